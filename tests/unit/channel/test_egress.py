"""Which destinations a sandbox may reach, decided by pure code, and dialled exactly as decided."""

import asyncio
import struct

import pytest
from tests.unit.channel.fakecell import FakeCell, settle

from untax.channel import wire
from untax.channel.egress import Egress, Policy, clean_host, is_public
from untax.core.errors import UsageError

EGRESS_ID = 1 | wire.EGRESS_BIT


def allowed(network, host, port, address):
    policy = Policy(network)
    return policy.check_name(host, port) is None and policy.check_address(host, address, port) is None


@pytest.mark.parametrize(
    ("network", "host", "port", "address", "expected"),
    [
        ("none", "example.org", 443, "93.184.216.34", False),
        ((), "example.org", 443, "93.184.216.34", False),
        ("all", "example.org", 443, "93.184.216.34", True),
        ("all", "93.184.216.34", 80, "93.184.216.34", True),
        ("all", "2606:4700::1111", 80, "2606:4700::1111", True),
        ("all", "evil.example", 80, "127.0.0.1", False),
        ("all", "localhost", 80, "127.0.0.1", False),
        ("all", "10.0.0.1", 80, "10.0.0.1", False),
        ("all", "x", 80, "192.168.1.1", False),
        ("all", "x", 80, "172.16.0.1", False),
        ("all", "x", 80, "100.64.0.1", False),
        ("all", "metadata", 80, "169.254.169.254", False),
        ("all", "metadata", 80, "168.63.129.16", False),
        ("all", "x", 80, "fd00:ec2::254", False),
        ("all", "x", 80, "fe80::1", False),
        ("all", "x", 80, "::1", False),
        ("all", "x", 80, "::", False),
        ("all", "x", 80, "0.0.0.0", False),
        ("all", "x", 80, "224.0.0.1", False),
        ("all", "x", 80, "255.255.255.255", False),
        ("all", "x", 80, "::ffff:127.0.0.1", False),
        ("all", "x", 80, "64:ff9b::7f00:1", False),
        ("all", "x", 80, "2002:7f00:1::", False),
        (("index.example.org:443",), "index.example.org", 443, "93.184.216.34", True),
        (("index.example.org:443",), "index.example.org", 80, "93.184.216.34", False),
        (("index.example.org:443",), "other.example.org", 443, "93.184.216.34", False),
        (("index.example.org:443",), "93.184.216.34", 443, "93.184.216.34", False),
        (("index.example.org:443",), "index.example.org", 443, "10.0.0.1", False),
        (("index.example.org:443", "10.0.0.1:443"), "index.example.org", 443, "10.0.0.1", True),
        (("*.example.com:*",), "a.b.example.com", 8080, "93.184.216.34", True),
        (("*.example.com:*",), "example.com", 80, "93.184.216.34", False),
        (("*.example.com:*",), "evilexample.com", 80, "93.184.216.34", False),
        (("*:443",), "anything.example", 443, "93.184.216.34", True),
        (("*:443",), "93.184.216.34", 443, "93.184.216.34", True),
        (("*:443",), "anything.example", 443, "127.0.0.1", False),
        (("127.0.0.1:8080",), "127.0.0.1", 8080, "127.0.0.1", True),
        (("127.0.0.1:8080",), "127.0.0.1", 8081, "127.0.0.1", False),
        (("localhost:*",), "localhost", 9, "127.0.0.1", True),
        (("localhost:*",), "localhost", 9, "::1", True),
        (("localhost:*",), "127.0.0.1", 9, "127.0.0.1", False),
        (("localhost:*",), "localhost", 9, "10.0.0.1", False),
        (("[::1]:80",), "::1", 80, "::1", True),
        (("10.0.0.0/8:443",), "10.1.2.3", 443, "10.1.2.3", True),
        (("INDEX.example.org:443",), "index.example.org", 443, "93.184.216.34", True),
    ],
)  # fmt: skip
def test_the_policy(network, host, port, address, expected):
    assert allowed(network, host, port, address) is expected


@pytest.mark.parametrize(
    "network",
    ["some", ("example.org",), ("example.org:http",), ("example.org:0",), ("a b:80",), ("http://x:80",), (5,), ("ex*mple.org:80",)],
)
def test_a_malformed_policy_is_refused_with_words(network):
    with pytest.raises(UsageError):
        Policy(network)


@pytest.mark.parametrize(
    ("raw", "host"),
    [
        (b"Example.ORG.", "example.org"),
        (b"[::1]", "::1"),
        (b"127.0.0.1", "127.0.0.1"),
        (b"", None),
        (b"a b", None),
        (b"a\r\nb", None),
        (b"\xff", None),
        (b"fe80::1%eth0", None),
        (b"a..b", None),
        (b"x" * 300, None),
    ],
)
def test_hosts_are_made_comparable(raw, host):
    assert clean_host(raw) == host


def test_numbers_in_disguise_are_judged_by_what_they_resolve_to():
    """`2130706433` and `0x7f.1` are names to us and addresses to a resolver."""
    assert clean_host(b"2130706433") == "2130706433"
    assert not allowed("all", "2130706433", 80, "127.0.0.1")


def test_public_means_global_and_unicast():
    import ipaddress

    assert is_public(ipaddress.ip_address("1.1.1.1"))
    assert not is_public(ipaddress.ip_address("240.0.0.1"))


async def ask(cell, host, port):
    cell.say(EGRESS_ID, wire.EGRESS, wire.blob(host) + struct.pack("<H", port))
    for _ in range(200):
        await asyncio.sleep(0.005)
        if sent := cell.requests():
            return sent
    raise AssertionError("no answer to EGRESS")


async def test_a_refusal_is_told_and_remembered():
    egress = Egress(("index.example.org:443",))
    cell = FakeCell(egress=egress)
    [(_, kind, payload)] = await ask(cell, b"evil.example", 443)

    assert kind == wire.EGRESS_DENY
    assert struct.unpack_from("<H", payload)[0] == 403
    [attempt] = egress.attempts
    assert (attempt.host, attempt.port, attempt.verdict) == ("evil.example", 443, "denied")
    assert 'add "evil.example:443"' in attempt.reason


async def test_n8_a_name_is_resolved_once_and_its_checked_address_dialled():
    """A second answer of the name server has no effect: there is no second question."""
    asked = []

    async def resolve(host, port):
        asked.append(host)
        return ["93.184.216.34" if len(asked) > 1 else "10.0.0.1"]

    egress = Egress(("rebind.example:80",), resolve=resolve)
    cell = FakeCell(egress=egress)
    [(_, kind, _)] = await ask(cell, b"rebind.example", 80)

    assert kind == wire.EGRESS_DENY
    assert asked == ["rebind.example"]
    assert egress.attempts[0].address == "10.0.0.1"


async def echo_server():
    async def serve(reader, writer):
        while data := await reader.read(65536):
            writer.write(data.upper())
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1]


async def test_bytes_are_relayed_until_both_ends_have_ended():
    server, port = await echo_server()
    egress = Egress((f"127.0.0.1:{port}",))
    cell = FakeCell(egress=egress)
    assert [kind for _, kind, _ in await ask(cell, b"127.0.0.1", port)] == [wire.EGRESS_OK]
    cell.say(EGRESS_ID, wire.OUT, b"\1hello")
    cell.say(EGRESS_ID, wire.OUT, b"\1")
    got = []
    async with asyncio.timeout(5):
        while not got or got[-1][2][:1] != b"\1":
            await asyncio.sleep(0.005)
            got += cell.requests()

    assert b"".join(payload[1:] for _, kind, payload in got if kind == wire.DATA) == b"HELLO"
    cell.say(EGRESS_ID, wire.DONE)
    await settle()
    assert not cell.channel.is_lost
    assert egress.attempts[0].allowed
    server.close()
    cell.channel.close()
    await settle()


async def test_a_server_is_held_up_by_a_program_that_does_not_read():
    """At most one window goes to the cell before it returns credit."""

    async def flood(reader, writer):
        try:
            while True:
                writer.write(bytes(65536))
                await writer.drain()
        except ConnectionError:
            pass

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    cell = FakeCell(egress=Egress((f"localhost:{port}",)))
    got = await ask(cell, b"localhost", port)
    for _ in range(30):
        await asyncio.sleep(0.005)
        got += cell.requests()
    assert sum(len(payload) - 1 for _, kind, payload in got if kind == wire.DATA) == wire.STREAM_WINDOW
    cell.channel.close()
    server.close()
    await asyncio.sleep(0.02)


async def test_a_destination_that_is_not_there_is_a_failure_not_a_refusal():
    server, port = await echo_server()
    server.close()
    await server.wait_closed()
    egress = Egress((f"127.0.0.1:{port}",))
    [(_, kind, payload)] = await ask(FakeCell(egress=egress), b"127.0.0.1", port)

    assert (kind, struct.unpack_from("<H", payload)[0]) == (wire.EGRESS_DENY, 502)
    assert egress.attempts[0].verdict == "failed"


async def test_a_lost_channel_ends_its_connections():
    server, port = await echo_server()
    cell = FakeCell(egress=Egress((f"127.0.0.1:{port}",)))
    await ask(cell, b"127.0.0.1", port)
    [task] = cell.channel._egress_tasks
    cell.channel.close()
    await asyncio.wait([task], timeout=2)

    assert task.done()
    server.close()
