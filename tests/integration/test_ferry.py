"""Channels of boxes on another node, carried by the native process beside the node's agent: what a client may rely on, whatever becomes of the connection."""

import asyncio
import contextlib
import os
import signal
import socket

import pytest
from tests.hostview import stopped
from tests.relay import Relay

import untax
from untax import substrates
from untax.core.span import now_ns

pytest.importorskip("cryptography", reason="ray: the extra is not installed")
pytest.importorskip("uvicorn", reason="server: the extra is not installed")

from untax.cluster.agent import Agent
from untax.cluster.node import NodeEngine
from untax.cluster.plan import Plan, Post
from untax.cluster.terms import Ticket
from untax.cluster.trust import Trust
from untax.remote import ferried as module
from untax.remote import sealed

LEASE_S = 3.0


@pytest.fixture
async def there(tmp_path):
    """An agent, and a client of it as on another machine, through a link that can break."""
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    trust = Trust.new("ferry")
    address = "127.0.0.3"
    plan = Plan("ferry", "namespace", str(tmp_path / "{node}"), lease_s=LEASE_S)
    agent = Agent(plan, Post("there", "there", address, trust.token, trust.authority.certificate, trust.identity_for(address)))
    async with contextlib.AsyncExitStack() as stack:
        member = await agent.start()
        stack.push_async_callback(agent.aclose)
        relay = await stack.enter_async_context(Relay(address, int(member.url.rpartition(":")[2])))
        ticket = Ticket("ferry", trust.token, trust.authority.certificate, untax.__version__, "")
        member = type(member).from_data({**member.to_data(), "url": f"https://{address}:{relay.port}"})
        node = await stack.enter_async_context(NodeEngine(member, ticket, is_here=False, clock=now_ns))
        node.agent, node.link, node.ticket = agent, relay, ticket
        await ferried(node)
        yield node


async def ferried(node):
    """Return once the node's channels have a connection of their own."""
    async with asyncio.timeout(20):
        while not (node._place._ferried is not None and node._place._ferried._is_open and is_told(node)):
            await asyncio.sleep(0.005)


def is_told(node):
    """Whether the agent knows that this client has one."""
    ferry = ferry_of(node)
    return ferry._numbers.get(node._connection.server.owner) in ferry._greeted


def break_it(node):
    """As a reset of that connection alone, if it is there."""
    if (connection := node._place._ferried._sealed) is not None:
        connection._stream._sock.shutdown(socket.SHUT_RDWR)


def lanes(node):
    """Those by the ferry, and those over the held connection."""
    return len(node._place._ferried.lanes), len(node._place._lanes)


def ferry_of(node):
    return node.agent._hosting.ferry


async def test_a_box_on_another_node_is_spoken_to_past_its_agent(there):
    """Everything that goes over a channel goes by the ferry: commands, sessions, files, streams."""
    async with there.lease() as box:
        assert lanes(there) == (1, 0)
        assert (await box.run(["sh", "-c", "echo out; echo err >&2; exit 3"])).exit_code == 3
        async with box.session() as bash:
            await bash.run("cd /tmp && X=1")
            assert (await bash.run("pwd; echo $X")).text == "/tmp\n1\n"
        data = os.urandom(5 << 20)  # more than a window
        await box.write("big", data)
        assert await box.read("big") == data
        process = await box.start(["cat"])
        await process.write(b"in")
        process.close_stdin()
        assert (await process.wait()).stdout == b"in"
        await box.reset()
        assert await box.list() == []
    assert box.ledger.verdict == "trusted"
    assert lanes(there) == (0, 0)


async def test_many_boxes_at_once_do_not_hear_of_each_other(there):
    async def use(number):
        async with there.lease() as box:
            for _ in range(5):
                data = bytes([number]) * (200_000 + number)
                await box.write("mine", data)
                assert await box.read("mine") == data
            return (await box.shell(f"echo {number}")).text

    assert await asyncio.gather(*map(use, range(12))) == [f"{number}\n" for number in range(12)]


async def test_leases_in_quick_succession_all_get_their_answers(there):
    """A lane is spoken over the moment it is told of, however busy the ferry is with others."""
    await there.warm(None, 4)

    async def use():
        for _ in range(25):
            async with there.lease() as box:
                assert (await box.run(["true"], timeout_s=20)).exit_code == 0

    async with asyncio.timeout(120):
        await asyncio.gather(*(use() for _ in range(6)))


async def test_a_connection_that_breaks_again_and_again_loses_and_repeats_nothing(there):
    """Whatever was on its way at that moment arrives once: large answers, large requests, commands with an effect."""
    async with there.lease() as box:
        breaking = True

        async def breaks():
            while breaking:
                await ferried(there)
                break_it(there)
                await asyncio.sleep(0.03)

        cutting = asyncio.ensure_future(breaks())
        data = os.urandom(3 << 20)
        for number in range(15):
            await box.write("big", data)
            assert await box.read("big") == data
            assert (await box.shell(f"echo {number} >> log; wc -l < log")).text == f"{number + 1}\n"
        breaking = False
        await cutting
        assert lanes(there) == (1, 0)
    assert box.ledger.verdict == "trusted"


async def test_both_connections_broken_at_once_are_taken_up_again(there):
    async with there.lease() as box:
        assert (await box.run(["mkfifo", "go"])).exit_code == 0
        running = asyncio.ensure_future(box.shell("read line < go; echo $line"))
        for _ in range(3):
            await ferried(there)
            there._connection._stream._transport.abort()
            break_it(there)
        assert (await box.shell("echo whole > go")).exit_code == 0
        assert (await running).stdout == b"whole\n"
    assert box.ledger.verdict == "trusted"


async def test_leases_whose_answers_are_lost_on_the_way_are_given_once(there):
    """The held connection breaks while leases are asked for: no sandbox is read by two lanes, none stays behind."""
    done = []

    async def use(number):
        for _ in range(4):
            async with there.lease() as box:
                assert (await box.shell(f"echo {number}")).text == f"{number}\n"
            done.append(box.ledger.verdict)

    async def breaks():
        while True:
            await asyncio.sleep(0.02)
            if (stream := there._connection._stream) is not None:
                stream._transport.abort()

    breaking = asyncio.ensure_future(breaks())
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(use(number) for number in range(6)))
    finally:
        breaking.cancel()
    assert done == ["trusted"] * 24
    assert there.agent.leases == 0


async def test_a_command_that_runs_while_the_ferry_dies_is_an_infrastructure_outcome(there):
    """Its boxes are lost, with a verdict that says so; the next lease goes by another ferry."""
    async with there.lease() as box:
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await asyncio.sleep(0.1)
        ferry_of(there)._process.send_signal(signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await running
    assert box.ledger.verdict == "infra"
    await ferried(there)
    async with there.lease() as box:
        assert lanes(there) == (1, 0)
        assert (await box.run(["echo", "on"])).stdout == b"on\n"


async def test_a_client_without_that_connection_has_its_channels_over_the_held_one(there, monkeypatch):
    """Where it cannot be had, nobody notices but by the time that an action takes."""

    async def refused(*_):
        raise ConnectionRefusedError("no")

    monkeypatch.setattr("untax.remote.ferried.dial", refused)
    async with NodeEngine(there.member, there.ticket, is_here=False, clock=now_ns) as other, other.lease() as box:
        assert lanes(other) == (0, 1)
        assert (await box.run(["echo", "on"])).stdout == b"on\n"


async def test_who_has_lost_that_connection_and_gets_no_other_leases_over_the_held_one(there, monkeypatch):
    """What was carried by it is over once the lease's time has passed; what is leased afterwards is not."""
    dial = module.dial

    async def refused(*_):
        raise ConnectionRefusedError("no")

    async with there.lease() as box:
        assert lanes(there) == (1, 0)
        monkeypatch.setattr("untax.remote.ferried.dial", refused)
        break_it(there)
        async with asyncio.timeout(10):
            while is_told(there):
                await asyncio.sleep(0.005)
        async with there.lease() as other:
            assert lanes(there) == (1, 1)
            assert (await other.run(["echo", "on"])).stdout == b"on\n"
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"], timeout_s=60)
    assert box.ledger.verdict == "infra"
    monkeypatch.setattr("untax.remote.ferried.dial", dial)
    await ferried(there)
    async with there.lease() as box:
        assert lanes(there) == (1, 0)


async def test_a_sandbox_that_stops_reading_while_the_connection_breaks_gets_every_byte_once(there):
    """What the ferry had taken and the sandbox had not is sent again from there."""
    async with there.lease() as box:
        (held,) = next(iter(there.agent._hosting.owners.owners)).leases.values()
        data = [os.urandom(1 << 20) for _ in range(6)]
        with stopped(held._sandbox.agent_pid):
            writing = asyncio.gather(*(box.write(f"big{number}", one) for number, one in enumerate(data)))
            await asyncio.sleep(0.3)
            break_it(there)
            await ferried(there)
            await asyncio.sleep(0.3)
        await writing
        assert [await box.read(f"big{number}") for number in range(6)] == data
    assert box.ledger.verdict == "trusted"


async def test_an_owner_that_expires_leaves_nothing_in_the_ferry(there):
    """Its connections are gone and nobody comes back: what the ferry kept for it goes with the owner."""
    process = ferry_of(there)._process
    before = descriptors(process.pid)
    other = NodeEngine(there.member, there.ticket, is_here=False, clock=now_ns)
    other.agent = there.agent
    await other.start()
    await ferried(other)
    box = await other.acquire()
    owner = other._connection.server.owner
    there.agent._hosting.owners.owners.end(next(one for one in there.agent._hosting.owners.owners if one.id == owner), "for the test")
    await holds(process, before)
    assert owner not in ferry_of(there)._numbers
    with pytest.raises(untax.SandboxLost):
        await box.run(["true"], timeout_s=30)
    await other.aclose()


async def test_a_box_with_a_network_is_carried_by_the_agent_which_serves_it(there):
    async with there.lease(untax.EnvSpec(network="all")) as box:
        assert lanes(there) == (0, 1)
        assert (await box.run(["echo", "on"])).stdout == b"on\n"


async def test_a_sandbox_that_ends_is_told_at_once(there):
    """Not by a deadline: its end comes over the connection as the kernel tells it."""
    async with there.lease() as box:
        (held,) = next(iter(there.agent._hosting.owners.owners)).leases.values()
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await asyncio.sleep(0.05)
        os.kill(held._sandbox.agent_pid, signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            async with asyncio.timeout(5):
                await running
    assert box.ledger.verdict == "infra"


async def test_a_client_that_is_gone_leaves_nothing_in_the_ferry(there):
    """Its sandboxes end with its lease, its connection and lanes with them."""
    process = ferry_of(there)._process
    before = descriptors(process.pid)
    other = NodeEngine(there.member, there.ticket, is_here=False, clock=now_ns)
    other.agent = there.agent
    await other.start()
    await ferried(other)
    boxes = [await other.acquire() for _ in range(3)]
    await holds(process, before + 1 + len(boxes))
    await other.aclose()
    await holds(process, before)


async def test_the_ferry_ends_with_its_agent_and_has_no_rights_of_root(there):
    process = ferry_of(there)._process
    with open(f"/proc/{process.pid}/status") as file:
        status = dict(line.split(":\t", 1) for line in file.read().splitlines() if ":\t" in line)
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert os.geteuid() or status["Uid"].split() == ["65534"] * 4
    await there.agent.aclose()
    assert process.returncode == 0


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


async def holds(process, count):
    """Return once it has so many descriptors: it is told of them, and does not answer."""
    async with asyncio.timeout(10):
        while descriptors(process.pid) != count:
            await asyncio.sleep(0.01)


# ---- who is let in ----


async def dialled(there, owner, secret, token):
    address = there._place._address
    return await sealed.dial(type(address)(address.host, address.port, True, token=token, tls=address.tls), owner, secret, 10.0)


@pytest.mark.parametrize(("spoiled", "status"), [("token", "401"), ("owner", "404"), ("secret", "400")])
async def test_a1_nobody_gets_keys_without_the_token_and_the_secret_of_a_client(there, spoiled, status):
    server = there._connection.server
    given = {"owner": server.owner, "secret": server.secret, "token": there.ticket.token, spoiled: "x" * 43}
    with pytest.raises(untax.BackendError, match=f"HTTP/1.1 {status} "):
        await dialled(there, **given)


async def test_a12_records_that_are_not_the_client_s_end_the_connection_and_nothing_else(there):
    """Without the keys nobody says anything to a sandbox, by guessing or by changing a bit on the way."""
    server = there._connection.server
    async with there.lease() as box:
        for spoil in (
            lambda record: record[:-1] + bytes([record[-1] ^ 1]),
            lambda record: b"\xff" * 4 + record[4:],
            lambda _: os.urandom(4096),
        ):
            sock, keys = await dialled(there, server.owner, server.secret, there.ticket.token)
            with sock:
                greeting = []
                forged = sealed.Sealed(sock.dup(), keys, greeting.append, lambda _: None)
                forged._stream._send = lambda data, spoil=spoil, sock=sock: sock.send(spoil(data)) and len(data)
                forged.send(b"\0" * 5)
                sock.settimeout(10)
                assert await asyncio.to_thread(_ended, sock)
                assert not greeting
                forged.close()
        assert (await box.run(["echo", "on"])).stdout == b"on\n"  # it took its own way up again
    assert box.ledger.verdict == "trusted"


def _ended(sock):
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True
