"""THREATS §4.7 over HTTP, by id: what bad tokens, bodies, names and connections come to, and what they cost others.

A12 to A14 are about the agent and its socket, in test_protocol.py and test_served.py; what is said here of them is that HTTP adds no way around.
"""

import asyncio
import contextlib
import io
import os
import random
import socket
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import httpx
import pytest
from tests import hostview, serving
from tests.fuzz.requests import Fuzz
from tests.hosted import hosted

import untax
from untax import substrates

LONG = "x" * 10_000


@pytest.fixture(scope="module", autouse=True)
def namespace():
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")


@pytest.fixture
async def served(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text(
        '[tenant.alice]\ntoken = "alice-token-0123456789"\nstarting = 4\nleases = 6\n[tenant.bob]\nconnections = 2\nsnapshots = 1\ntoken = "bob-token-0123456789ab"\n'
    )
    tokens.chmod(0o600)
    async with hosted(tmp_path, "--token-file", str(tokens)) as served:
        served.token = "alice-token-0123456789"
        yield served
        async with served.client() as client:  # the standing invariant: it answers within a second, and a fresh sandbox works
            assert (await client.get("/health", timeout=2)).status_code == 200


@pytest.fixture
async def client(served):
    async with served.client() as client:
        yield client


@pytest.fixture
async def lease(client):
    made = await client.post("/v1/leases", json={})
    assert made.status_code == 201, made.text
    return made.json()["lease"]


async def test_a1_without_the_right_token_every_answer_is_the_same(served, lease):
    """No token, a wrong one, one with a space behind it, one in the wrong scheme: 401, whether or not what is asked for exists."""
    wrong = [
        {},
        {"authorization": "Bearer wrong-token-0123456789"},
        {"authorization": f"Bearer {served.token} "[:-1] + "x"},
        {"authorization": f"Basic {served.token}"},
        {"authorization": served.token},
        {"x-api-key": "nope"},
        {"x-api-key": served.token, "authorization": "Bearer bob-token-0123456789ab"},
    ]
    async with httpx.AsyncClient(base_url=served.url, timeout=10, trust_env=False) as client:
        answers = {
            (answer.status_code, answer.text)
            for headers in wrong
            for path in (f"/v1/leases/{lease}", "/v1/leases/nothing", "/v1/no/such/path")
            for answer in [await client.get(path, headers=headers)]
        }
        assert len(answers) == 1 and answers.pop()[0] == 401
        assert {(await client.delete(path)).text for path in (f"/v1/leases/{lease}", "/v1/leases/nothing")} == {
            (await client.get("/v1/x")).text
        }
    async with served.client() as client:
        assert (await client.get(f"/v1/leases/{lease}")).status_code == 200
    with pytest.raises(untax.UsageError, match="token"):
        async with untax.connect(served.url, token="wrong-token-0123456789"):
            pass


async def test_a1_what_is_another_tenants_is_not_there(served, client, lease):
    """Alice's lease, snapshot and ledgers are 404 or absent for Bob, in the words for what never was."""
    snapshot = (await client.post(f"/v1/leases/{lease}/snapshots", json={})).json()["snapshot"]
    async with served.client("bob-token-0123456789ab") as bob:
        for path in (f"/v1/leases/{lease}", f"/v1/leases/{lease}/ledger", f"/v1/snapshots/{snapshot}"):
            other = await bob.get(path)
            assert other.status_code == 404 and lease not in other.text and snapshot not in other.text
        assert (await bob.delete(f"/v1/leases/{lease}")).status_code == 404
        assert (await bob.post(f"/v1/snapshots/{snapshot}/forks", json={"n": 1})).status_code == 404
        assert (await bob.get("/v1/leases")).json() == {"leases": []}
    async with untax.connect(served.url, token="bob-token-0123456789ab") as engine:
        with pytest.raises(untax.UsageError, match="no snapshot"):
            await engine.restore(snapshot)
        assert await engine.ledgers() == ()
    assert (await client.get(f"/v1/leases/{lease}")).status_code == 200


async def test_a1_what_others_have_built_is_not_to_be_watched(served):
    """Keys of stages are hashes of recipes: who guesses a recipe would see whether it is there."""
    async with untax.connect(served.url, token="bob-token-0123456789ab") as engine:
        with pytest.raises(untax.UsageError, match="several tenants"):
            async with asyncio.timeout(10):
                await engine.watch(lambda part: pytest.fail(f"told {part}"))
        async with engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0


async def test_a1_what_others_have_made_ready_has_no_recipe(served):
    """Set-up commands may hold what only their owner should read; over the held connection as over plain HTTP."""
    spec = untax.EnvSpec(setup=("echo alices-secret-recipe > /opt/recipe",))
    async with untax.connect(served.url, token=served.token) as alice:
        await alice.warm(spec, 1)
        async with untax.connect(served.url, token="bob-token-0123456789ab") as bob, served.client("bob-token-0123456789ab") as plain:
            seen = (await bob.pools()).to_json() + (await plain.get("/v1/pools")).text
    assert '"setup"' in seen or '"idle":1' in seen
    assert "recipe" not in seen


async def test_a2_any_key_is_heard_under_names_of_this_machine_only(tmp_path):
    """A page of somebody's whose name was made to lead here is refused by the name that its browser sends."""
    async with hosted(tmp_path, "--any-key") as served, httpx.AsyncClient(base_url=served.url, timeout=10, trust_env=False) as client:
        port = served.url.rsplit(":", 1)[1]
        for host, status in (
            (f"127.0.0.1:{port}", 200), (f"localhost:{port}", 200), ("sandbox.localhost", 200), (f"[::1]:{port}", 200),
            ("rebound.example", 421), (f"rebound.example:{port}", 421), ("localhost.example", 421), ("127.0.0.1.example", 421), ("", 421),
        ):  # fmt: skip
            answer = await client.get("/v1/leases", headers={"x-api-key": "anything-at-all-0123", "host": host})
            assert answer.status_code == status, (host, answer.text)


@pytest.mark.parametrize(
    "options", [("--host", "0.0.0.0"), ("--host", "0.0.0.0", "--any-key"), ("--host", "::"), ("--host", "no.such.host.invalid")]
)
def test_a2_a_public_address_without_tls_and_tokens_is_refused(options, tmp_path):
    argv = [sys.executable, "-m", "untax.cli", "serve", "--port", "0", "--state-dir", str(tmp_path), *options]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=serving.environment())
    assert ended.returncode == 2 and "UsageError" in ended.stderr and ended.stdout == ""


def test_a2_a_token_file_that_others_can_read_is_refused(tmp_path):
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-many-characters\n")
    tokens.chmod(0o644)
    argv = [sys.executable, "-m", "untax.cli", "serve", "--port", "0", "--token-file", str(tokens)]
    ended = subprocess.run(argv, capture_output=True, text=True, timeout=30, env=serving.environment())
    assert ended.returncode == 2 and "chmod 600" in ended.stderr and "a-token-of" not in ended.stderr


async def test_a3_bodies_that_mean_nothing_are_refused_and_cost_nothing(served, client, lease):
    before = _rss_mib(served.process.pid)
    for body in (
        b"{", b"[]", b"null", b'"x"', b'{"argv": "true"}', b'{"argv": [1]}', b'{"argv": null, "shell": 3}', b'{"timeout_s": 1e400, "argv": ["true"]}',
        b'{"argv": ["true"], "timeout_s": NaN}', b'{"argv": ["true"], "cap": ' + b"9" * 400 + b"}", b"[" * 100_000, b'{"a":' * 100_000,
        b'{"argv": ["true"], "argv": ["false"]}', b'{"argv": ["\\ud800"]}', b"\xff\xfe{}", b'{"argv": ["true"], "nonsense": 1}',
    ):  # fmt: skip
        answer = await client.post(f"/v1/leases/{lease}/run", content=body)
        assert answer.status_code == 400, (body[:60], answer.text)
    assert (await client.post(f"/v1/leases/{lease}/run", content=b"")).status_code == 400
    swollen = b'{"argv": [' + b"{}," * (2 << 20) + b"{}]}"  # as objects a hundred times its size
    assert (await client.post(f"/v1/leases/{lease}/run", content=swollen)).status_code == 413

    async def endless():
        for _ in range(256):
            yield b"x" * (1 << 20)

    with contextlib.suppress(httpx.WriteError, httpx.ReadError):  # it may hang up while we still send
        assert (await client.put(f"/v1/leases/{lease}/files", params={"path": "f"}, content=endless())).status_code == 413
    assert _rss_mib(served.process.pid) - before < 200


async def test_a4_slow_senders_are_closed_and_nobody_waits_for_them(served, client):
    """Many connections that send one byte a second are closed at the head's deadline; others are answered meanwhile."""
    address = (served.url.split("//")[1].split(":")[0], int(served.url.rsplit(":", 1)[1]))
    began_at = time.monotonic()

    def is_closed(reader):
        return reader.at_eof() or reader.exception() is not None  # a byte that comes after the end is answered with a reset

    slow = [await asyncio.open_connection(*address) for _ in range(200)]
    for _, writer in slow:
        writer.write(b"GET / HTTP/1.1\r\nx: ")
    try:
        answered = 0
        async with asyncio.timeout(120):
            while not all(is_closed(reader) for reader, _ in slow):
                for _, writer in slow:
                    with contextlib.suppress(ConnectionError):
                        writer.write(b"y")
                assert (await client.get("/v1/about")).status_code == 200
                answered += any(not is_closed(reader) for reader, _ in slow)
                await asyncio.gather(*(asyncio.wait_for(reader.read(100), 0.5) for reader, _ in slow), return_exceptions=True)
        assert time.monotonic() - began_at > 4  # at the deadline, not before
        assert answered
    finally:
        for _, writer in slow:
            writer.close()


async def test_a4_a_head_without_end_is_refused(served):
    address = (served.url.split("//")[1].split(":")[0], int(served.url.rsplit(":", 1)[1]))
    reader, writer = await asyncio.open_connection(*address)
    with contextlib.suppress(ConnectionError):
        writer.write(b"GET / HTTP/1.1\r\n")
        for number in range(2000):
            writer.write(f"x-{number}: {'y' * 100}\r\n".encode())
            await writer.drain()
    with contextlib.suppress(ConnectionError):
        assert b"431" in await asyncio.wait_for(reader.read(100), 5)
    writer.close()


async def test_a5_a_lease_that_is_none_is_not_found(client):
    for name in ("nothing", LONG, "..", "%2e%2e", "a%2Fb", "%00", "%ff", "..%2f..%2fetc%2fpasswd", "lea-%0a"):
        for path in (f"/v1/leases/{name}", f"/v1/leases/{name}/ledger", f"/v1/snapshots/{name}"):
            assert (await client.get(path)).status_code in (400, 404), path


async def test_a5_a_lease_that_was_given_back_is_not_found(client, lease):
    assert (await client.delete(f"/v1/leases/{lease}")).json()["verdict"] == "trusted"
    for _ in range(2):
        assert (await client.delete(f"/v1/leases/{lease}")).status_code == 404
        assert (await client.post(f"/v1/leases/{lease}/run", json={"argv": ["true"]})).status_code == 404


async def test_a6_one_key_is_one_sandbox_and_one_execution(client, lease):
    twice = await asyncio.gather(*(client.post("/v1/leases", json={}, headers={"idempotency-key": "k1"}) for _ in range(3)))
    assert {answer.status_code for answer in twice} == {201} and len({answer.json()["lease"] for answer in twice}) == 1
    assert len((await client.get("/v1/leases")).json()["leases"]) == 2
    body = {"shell": "echo x >>count; wc -l <count"}
    for _ in range(3):
        answer = await client.post(f"/v1/leases/{lease}/run", json=body, headers={"idempotency-key": "k2"})
        assert answer.json()["stdout"].strip() == "1"
    other = await client.post(f"/v1/leases/{lease}/run", json={"argv": ["true"]}, headers={"idempotency-key": "k2"})
    assert other.status_code == 422


async def test_a7_a_command_ends_with_its_connection_unless_it_has_a_key(served, client, lease):
    """The documented rule: without a key it is killed; with one it goes on, and whoever asks again gets its result."""
    async with served.client() as fickle:
        with pytest.raises(httpx.ReadTimeout):
            await fickle.post(f"/v1/leases/{lease}/run", json={"argv": ["sleep", "77"]}, timeout=0.5)
    async with served.client() as fickle:
        with pytest.raises(httpx.ReadTimeout):
            await fickle.post(f"/v1/leases/{lease}/run", json={"shell": "sleep 1; echo $$"}, timeout=0.3, headers={"idempotency-key": "k"})
    again = await client.post(f"/v1/leases/{lease}/run", json={"shell": "sleep 1; echo $$"}, headers={"idempotency-key": "k"})
    assert again.json()["exit_code"] == 0
    found = await client.post(f"/v1/leases/{lease}/run", json={"shell": "grep -la sleep.7[7] /proc/[0-9]*/cmdline 2>/dev/null"})
    assert found.json()["stdout"] == ""


_NUMBERS = (
    {"ttl_s": -1}, {"ttl_s": 0}, {"ttl_s": 1e308}, {"wait_s": -1}, {"wait_s": 0}, {"limits": {"memory_mib": -1}}, {"limits": {"pids": 0}},
    {"limits": {"cpus": 1e9}}, {"limits": {"cpus": 512}}, {"spec": {"limits": {"memory_mib": 1 << 40}}}, {"spec": {"limits": {"disk_mib": 0}}},
)  # fmt: skip


async def test_a8_numbers_that_cannot_be_are_refused(client, lease):
    for body in _NUMBERS:
        answer = await client.post("/v1/leases", json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], body
    for seconds in (-1, 0, 1e308):
        assert (await client.post(f"/v1/leases/{lease}/run", json={"argv": ["true"], "timeout_s": seconds})).status_code == 400


async def test_a9_an_image_is_a_name(client):
    for image in ("--privileged", ";reboot", "$(id)", "a\nb", "-v/:/host", "a\x00b"):
        assert (await client.post("/v1/leases", json={"spec": {"image": image}})).status_code in (400, 403), image


async def test_a10_variables_have_a_defined_result(client, lease):
    for env in ({"A=B": "1"}, {"": "1"}, {"A": "\x00"}, {"A\x00": "1"}):
        assert (await client.post(f"/v1/leases/{lease}/run", json={"argv": ["true"], "env": env})).status_code == 400
    many = {f"V{number}": "x" for number in range(10_000)}
    answer = await client.post(f"/v1/leases/{lease}/run", json={"argv": ["env"], "env": many | {"LD_PRELOAD": "/none", "A\n": "b"}})
    assert answer.status_code in (200, 400)
    assert (await client.post(f"/v1/leases/{lease}/run", json={"argv": ["true"]})).json()["exit_code"] == 0


async def test_a11_the_servers_own_files_are_no_image(served, client):
    async with untax.connect(served.url, token=served.token) as engine:
        for image in ("dir:/", "dir:/proc", "tar:/etc/passwd", "docker:alpine", "oci:/var/lib", "dir:../..", "registry:127.0.0.1/x"):
            assert (await client.post("/v1/leases", json={"spec": {"image": image}})).status_code == 403
            assert (await client.post("/v1/pools", json={"spec": {"image": image}, "n": 1})).status_code == 403
            for ask in (engine.acquire, engine.prepare, engine.warm):
                with pytest.raises(untax.UsageError, match="not allowed"):
                    await ask(untax.EnvSpec(image=image))


async def test_a11_a_repository_of_the_server_is_no_repository(client):
    for url in ("/etc", "file:///root", "http://169.254.169.254/", "ext::sh -c id"):
        answer = await client.post("/v1/leases", json={"spec": {"repo": {"url": url, "commit": "a" * 40}}})
        assert answer.status_code == 403


async def test_a11_the_servers_own_network_is_no_destination(served, client, lease):
    snapshot = (await client.post(f"/v1/leases/{lease}/snapshots", json={})).json()["snapshot"]
    for pattern in ("169.254.169.254:80", "127.0.0.1:*", "0.0.0.0/1:*", "localhost:80"):
        for path, body in (
            ("/v1/leases", {"spec": {"network": [pattern]}}),
            ("/v1/leases", {"network": [pattern]}),
            ("/v1/leases", {"network": [pattern], "snapshot": snapshot}),
            (f"/v1/snapshots/{snapshot}/forks", {"n": 1, "network": [pattern]}),
            ("/v1/pools", {"spec": {"network": [pattern]}, "n": 1}),
            ("/sandboxes", {"templateID": "base", "network": {"allowOut": [pattern.removesuffix(":*")]}}),
        ):
            assert (await client.post(path, json=body)).status_code == 403, (path, body)
    made = (await client.post("/sandboxes", json={"templateID": "base"})).json()["sandboxID"]
    assert (await client.put(f"/sandboxes/{made}/network", json={"allowOut": ["0.0.0.0/1"]})).status_code == 403
    async with untax.connect(served.url, token=served.token) as engine:
        with pytest.raises(untax.UsageError, match="not allowed"):
            await engine.acquire(network=("127.0.0.1:80",))


async def test_a11_a_step_of_one_tenants_build_is_not_anothers(served):
    """Both say the same of files that differ: the hash of a context is its builder's word."""
    if os.geteuid() != 0:
        pytest.skip("needs root: steps of a template run as root inside")
    files = "0" * 64
    for tenant in ("alice-token-0123456789", "bob-token-0123456789ab"):
        async with served.client(tenant) as client:
            assert (
                await _built(client, tenant, [{"type": "COPY", "args": ["who", "/srv/who"], "filesHash": files}], {files: tenant})
                == "ready"
            )
            made = (await client.post("/sandboxes", json={"templateID": tenant})).json()
            read = await client.get(
                "/files?path=/srv/who", headers={"e2b-sandbox-id": made["sandboxID"], "x-access-token": made["envdAccessToken"]}
            )
            assert read.text == tenant


async def test_a8_files_of_a_build_that_cannot_be_unpacked_end_it(client):
    files = "1" * 64
    steps = [{"type": "COPY", "args": ["who", "/srv/who"], "filesHash": files}]
    assert await _built(client, "broken", steps, {files: b"\x1f\x8b" + b"nothing of the kind"}) == "error"


async def _built(client: httpx.AsyncClient, name: str, steps: list[dict[str, object]], files: dict[str, str | bytes]) -> str:
    """What becomes of a build with these files, each as a tar of one called `who`, or as the bytes that they are."""
    asked = (await client.post("/v3/templates", json={"name": name})).json()
    for files_hash, content in files.items():
        link = (await client.get(f"/templates/{asked['templateID']}/files/{files_hash}")).json()["url"]
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            entry = tarfile.TarInfo("who")
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content.encode() if isinstance(content, str) else content))
        sent = await client.put(link, content=content if isinstance(content, bytes) else packed.getvalue())
        assert sent.status_code == 200, sent.text
    where = f"/templates/{asked['templateID']}/builds/{asked['buildID']}"
    begun = await client.post(f"/v2{where}", json={"fromImage": "host", "steps": steps})
    assert begun.status_code == 202, begun.text
    async with asyncio.timeout(30):
        while (status := (await client.get(f"{where}/status")).json()["status"]) == "building":
            await asyncio.sleep(0.05)
    return str(status)


async def test_a12_nonsense_on_the_held_connection_ends_it_and_nothing_else(served, client, lease):
    """Random bytes, unmasked frames, lengths of 2^63, text, lanes that nobody has: that connection is closed, and no other."""
    host, port = served.url.split("//")[1].rsplit(":", 1)
    head = (
        f"GET /v1/channel HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.token}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    ).encode()
    for nonsense in (
        b"\xff" * 64,
        b"\x82\x01x",
        b"\x82\xff" + b"\xff" * 8,
        b"\x81\x81\0\0\0\0x",
        b"\x83\x80\0\0\0\0",
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(head)
        assert b"101" in await reader.readuntil(b"\r\n\r\n")
        writer.write(nonsense)
        await asyncio.wait_for(reader.read(), 15)
        writer.close()
    assert (await client.post(f"/v1/leases/{lease}/run", json={"argv": ["true"]})).json()["exit_code"] == 0


async def test_a14_the_service_is_not_reachable_from_inside(served, client, lease):
    port = served.url.rsplit(":", 1)[1]
    asked = await client.post(
        f"/v1/leases/{lease}/run", json={"shell": f"(echo >/dev/tcp/127.0.0.1/{port}) 2>&1; cat /proc/net/tcp | wc -l"}
    )
    assert "refused" in asked.json()["stdout"] or "unreachable" in asked.json()["stdout"]


async def test_a15_no_token_in_arguments_environment_or_log(tmp_path):
    log = tmp_path / "log"
    with log.open("wb") as stderr:
        from tests import hosted as hosting

        served = await hosting.started(tmp_path / "state", "--verbose", stderr=stderr.fileno())
        try:
            async with served.client() as client, untax.connect(served.url, token=served.token):
                await client.post("/v1/leases", json={})
                await client.get("/v1/nothing")
                await client.post("/v1/leases", content=b"{")
            process = Path(f"/proc/{served.process.pid}")
            shown = process.joinpath("cmdline").read_bytes() + process.joinpath("environ").read_bytes() + log.read_bytes()
            assert served.token.encode() not in shown and len(served.token) == 44
            assert served.key_file.stat().st_mode & 0o777 == 0o600
        finally:
            await serving.ended(served)


async def test_a17_more_creates_than_allowed_are_told_to_come_again(client):
    answers = await asyncio.gather(*(client.post("/v1/leases", json={}) for _ in range(24)))
    codes = [answer.status_code for answer in answers]
    assert set(codes) == {201, 429} and codes.count(201) <= 6
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    for answer in answers:
        if answer.status_code == 201:
            await client.delete(f"/v1/leases/{answer.json()['lease']}")
    assert (await client.post("/v1/leases", json={})).status_code == 201


async def test_a17_more_connections_and_snapshots_than_allowed_are_refused(served, client):
    """Bob may hold two connections and one snapshot; refused ones leave nothing behind, and Alice does not notice."""
    bob = "bob-token-0123456789ab"
    async with untax.connect(served.url, token=bob) as one, untax.connect(served.url, token=bob), one.lease() as box:
        for _ in range(3):
            with pytest.raises(untax.UntaxError, match="close some"):
                await untax.connect(served.url, token=bob).start()
        snapshot = await box.snapshot()
        with pytest.raises(untax.PoolTimeout, match="drop some"):
            await box.snapshot()
        await snapshot.drop()
        await box.snapshot()
        async with untax.connect(served.url, token=served.token) as engine, engine.lease() as other:
            assert (await other.run(["true"])).exit_code == 0
    async with untax.connect(served.url, token=bob) as again, again.lease() as box:
        assert (await box.run(["true"])).exit_code == 0


async def test_a17_what_e2bs_dialect_makes_counts_as_everything_does(served, client):
    if os.geteuid() != 0:
        pytest.skip("needs root: steps of a template run as root inside")
    files = "2" * 64
    steps = [{"type": "COPY", "args": ["who", "/srv/who"], "filesHash": files}, {"type": "RUN", "args": ["sleep 2"]}]
    building = asyncio.ensure_future(_built(client, "slow", steps, {files: "me"}))
    async with asyncio.timeout(20):
        while (await client.get("/v1/about")).json()["use"]["leases"] == 0:
            await asyncio.sleep(0.02)
    assert await building == "ready"
    assert (await client.get("/v1/about")).json()["use"]["leases"] == 0
    template = (await client.get("/templates")).json()[0]["templateID"]
    assert (await client.get(f"/templates/{template}/files/{files}")).json()["present"] is False
    async with served.client("bob-token-0123456789ab") as bob:  # who may have one snapshot
        made = (await bob.post("/sandboxes", json={"templateID": "base"})).json()["sandboxID"]
        asked = [(await bob.post(f"/sandboxes/{made}/snapshots", json={})).status_code for _ in range(2)]
        lease = (await bob.post("/v1/leases", json={})).json()["lease"]
        assert [*asked, (await bob.post(f"/v1/leases/{lease}/snapshots", json={})).status_code] == [201, 429, 429]


async def test_a18_a_stream_that_nobody_reads_costs_a_bounded_buffer(served, client, lease):
    """A client that stops reading: the command meets its deadline, the server's memory stays, and others go on."""
    before = _rss_mib(served.process.pid)
    async with untax.connect(served.url, token=served.token) as engine, engine.lease() as box:
        process = await box.start(["sh", "-c", "exec cat /dev/zero"], timeout_s=4)
        for _ in range(6):
            assert (await client.post(f"/v1/leases/{lease}/run", json={"argv": ["true"]})).json()["exit_code"] == 0
            await asyncio.sleep(0.2)
        assert _rss_mib(served.process.pid) - before < 64
        async with asyncio.timeout(15):
            assert (await process.wait()).outcome == "timeout"


async def test_x21_a_lost_answer_is_asked_for_again_and_is_one_sandbox(served, client):
    """A proxy that swallows the first answer: with a key, the second request gets the same lease."""
    host, port = served.url.split("//")[1].rsplit(":", 1)
    body = b"{}"
    head = f"POST /v1/leases HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {served.token}\r\nIdempotency-Key: lost\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + body)
        while not (await client.get("/v1/leases")).json()["leases"]:  # it is made, and told to nobody
            await asyncio.sleep(0.01)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # a reset, not a close
    again = await client.post("/v1/leases", content=body, headers={"idempotency-key": "lost"})
    assert again.status_code == 201
    assert [one["lease"] for one in (await client.get("/v1/leases")).json()["leases"]] == [again.json()["lease"]]


async def test_x1_killed_under_load_nobody_hangs_and_the_next_one_cleans_up(tmp_path):
    """kill -9 with clients at work: every action ends by its deadline, and a server on the same state has nothing of the dead one left."""
    from tests import hosted as hosting

    served = await hosting.started(tmp_path / "state")
    port = int(served.url.rsplit(":", 1)[1])
    engines = [untax.connect(served.url, token=served.token) for _ in range(4)]
    outcomes = []

    async def work(engine):
        async with engine:
            boxes = [await engine.acquire() for _ in range(2)]
            ready.release()
            try:
                async with asyncio.timeout(120):  # far beyond the deadline of an action: whoever gets here hangs
                    while True:
                        await asyncio.gather(*(box.run(["sleep", "0.05"], timeout_s=5) for box in boxes))
            except untax.UntaxError as exc:
                outcomes.append(exc)

    ready = asyncio.Semaphore(0)
    tasks = [asyncio.create_task(work(engine)) for engine in engines]
    for _ in engines:
        await ready.acquire()
    agents = [agent.pid for agent in hostview.agents(served.process.pid)]
    assert len(agents) >= 8
    await served.kill()
    again = await hosting.started(tmp_path / "state", port=port)
    try:
        await asyncio.gather(*tasks)
        assert len(outcomes) == 4 and all(isinstance(exc, (untax.SandboxLost, untax.BackendError)) for exc in outcomes), outcomes
        assert all([await asyncio.to_thread(hostview.wait_gone, pid, 30) for pid in agents])
        async with untax.connect(again.url, token=again.token) as engine, engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0
    finally:
        served.process._transport.close()
        await serving.ended(again)


async def test_c14_a_sigterm_gives_everything_back(tmp_path):
    async with hosted(tmp_path) as served, served.client() as client:
        made = [await client.post("/v1/leases", json={}) for _ in range(5)]
        assert {one.status_code for one in made} == {201}
        agents = [agent.pid for agent in hostview.agents(served.process.pid)]
        assert await served.stop() == 0
        assert all([await asyncio.to_thread(hostview.wait_gone, pid, 30) for pid in agents])


def _rss_mib(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise AssertionError(pid)


async def test_a16_requests_by_the_document_and_beside_it_never_break_the_service(served):
    """Random ones for every route, E2B's among them; `python -m tests.fuzz.requests` does a hundred thousand."""
    fuzz = await asyncio.to_thread(Fuzz, served.url, served.token, random.randrange(2**32))
    await asyncio.to_thread(fuzz.run, 800)
    assert not fuzz.findings
    assert fuzz.statuses[200] > 20 and fuzz.statuses[400] > 20, fuzz.statuses


async def test_a16_what_schemathesis_makes_of_the_document_is_answered_as_the_document_says(served):
    """No 5xx but 503 with Retry-After; statuses, content types and bodies are those of the document. `python -m tests.fuzz.document` does more."""
    from tests.fuzz import document

    statuses = await asyncio.to_thread(document.run, served.url, served.token, 6, same_each_time=True)
    assert statuses[200] > 50 and statuses[201] > 5 and statuses[400] > 50, statuses
