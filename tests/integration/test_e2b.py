"""E2B's own SDK, as it comes from PyPI, against `untax serve`: blocking and async, one URL for all sandboxes, and a name for each."""

import asyncio
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time

import httpx
import pytest
from tests import hosted as hosting

e2b = pytest.importorskip("e2b", reason="e2b: its SDK is not installed; pip install 'untax[test]'")

DOMAIN = "e2b.localhost"


@pytest.fixture(scope="module")
async def server(tmp_path_factory):
    async with hosting.hosted(tmp_path_factory.mktemp("e2b"), "--allow-network", "127.0.0.1") as served:
        yield served


@pytest.fixture(scope="module")
def options(server):
    """What an SDK reads from its environment."""
    return {"api_url": server.url, "sandbox_url": server.url, "api_key": server.token}


@pytest.fixture
async def sandbox(options):
    made = await e2b.AsyncSandbox.create("base", timeout=60, **options)
    yield made
    with contextlib.suppress(e2b.SandboxException):
        await made.kill()


async def test_the_blocking_sdk_works_too(options):
    """It runs in a thread; its calls are the same on the wire."""

    def use() -> tuple[str, str, bool, bool]:
        box = e2b.Sandbox.create("base", timeout=60, envs={"A": "b"}, **options)
        said = box.commands.run("echo $A; id -un; pwd").stdout
        box.files.write("d/x.txt", "hello")
        read = box.files.read("d/x.txt")
        was_running = box.is_running()
        box.kill()
        return said, read, was_running, box.is_running()

    assert await asyncio.to_thread(use) == ("b\nuser\n/home/user\n", "hello", True, False)


async def test_commands_stream_fail_and_time_out(sandbox):
    seen: list[str] = []
    result = await sandbox.commands.run("echo out; echo err >&2", on_stdout=seen.append)
    assert (result.stdout, result.stderr, seen) == ("out\n", "err\n", ["out\n"])
    with pytest.raises(e2b.CommandExitException) as failed:
        await sandbox.commands.run("exit 3")
    assert failed.value.exit_code == 3
    with pytest.raises(e2b.TimeoutException):
        await sandbox.commands.run("sleep 60", timeout=1)
    assert (await sandbox.commands.run("id -un", user="root")).stdout == "root\n"


async def test_a_process_goes_on_without_its_client_and_takes_another(sandbox):
    started = await sandbox.commands.run("read line; echo got $line", background=True, stdin=True)
    await started.disconnect()
    assert started.pid in [one.pid for one in await sandbox.commands.list()]
    again = await sandbox.commands.connect(started.pid)
    await sandbox.commands.send_stdin(started.pid, "this\n")
    assert (await again.wait()).stdout == "got this\n"
    assert not await sandbox.commands.kill(started.pid)


async def test_a_terminal_has_a_size_that_changes(sandbox):
    said = bytearray()
    terminal = await sandbox.pty.create(e2b.PtySize(rows=24, cols=80), on_data=said.extend)
    await sandbox.pty.resize(terminal.pid, e2b.PtySize(rows=30, cols=100))
    await sandbox.pty.send_stdin(terminal.pid, b"stty size\nexit\n")
    await terminal.wait()
    assert b"30 100" in said


async def test_files_have_owners_metadata_and_any_size(sandbox):
    await sandbox.files.write("a/b/c.txt", "x", metadata={"k": "v"})
    info = await sandbox.files.get_info("a/b/c.txt")
    assert (info.owner, info.mode, info.metadata) == ("user", 0o644, {"k": "v"})
    assert [one.name for one in await sandbox.files.list("a", depth=2)] == ["b", "c.txt"]
    large = os.urandom(5 << 20)
    await sandbox.files.write("/srv/large.bin", large, user="root")
    assert bytes(await sandbox.files.read("/srv/large.bin", format="bytes")) == large
    assert (await sandbox.commands.run("stat -c %U /srv/large.bin; sha256sum < /srv/large.bin")).stdout.startswith("root\n")
    assert (await sandbox.files.rename("a/b/c.txt", "z.txt")).metadata == {"k": "v"}
    await sandbox.files.remove("a")
    assert not await sandbox.files.exists("a")
    with pytest.raises(e2b.FileNotFoundException):
        await sandbox.files.read("a/b/c.txt")


async def test_a_watch_tells_what_happens(sandbox):
    await sandbox.files.make_dir("w/in")
    seen: asyncio.Queue[e2b.FilesystemEvent] = asyncio.Queue()
    watch = await sandbox.files.watch_dir("w", seen.put_nowait, recursive=True)
    await sandbox.files.write("w/in/x", "1")
    async with asyncio.timeout(20):
        while (event := await seen.get()).type is not e2b.FilesystemEventType.WRITE:
            pass
    assert event.name == "in/x"
    await watch.stop()


async def test_pause_keeps_what_runs_and_a_fork_keeps_files(sandbox, options):
    started = await sandbox.commands.run("sleep 100", background=True)
    await sandbox.files.write("x", "before")
    forks = await sandbox.fork(count=2)
    assert [await one.files.read("x") for one in forks] == ["before", "before"]
    await asyncio.gather(*(one.kill() for one in forks))
    assert await sandbox.pause()
    assert not await sandbox.is_running()
    assert not await sandbox.pause()
    await e2b.AsyncSandbox.connect(sandbox.sandbox_id, **options)
    assert started.pid in [one.pid for one in await sandbox.commands.list()]
    assert await sandbox.pause(keep_memory=False)
    await e2b.AsyncSandbox.connect(sandbox.sandbox_id, **options)
    assert await sandbox.files.read("x") == "before"
    assert await sandbox.commands.list() == []


async def test_a_snapshot_is_a_template(sandbox, options):
    await sandbox.files.write("x", "kept")
    taken = await sandbox.create_snapshot(name="mine")
    await sandbox.kill()
    async with await e2b.AsyncSandbox.create(taken.snapshot_id, timeout=60, **options) as again:
        assert await again.files.read("x") == "kept"
    assert await e2b.AsyncSandbox.delete_snapshot(taken.snapshot_id, **options)
    with pytest.raises(e2b.SandboxException):
        await e2b.AsyncSandbox.create(taken.snapshot_id, **options)


async def test_sandboxes_are_listed_page_by_page_and_only_their_tenants(options):
    made = [await e2b.AsyncSandbox.create("base", timeout=60, metadata={"suite": "pages"}, **options) for _ in range(3)]
    try:
        pages = e2b.AsyncSandbox.list(query=e2b.SandboxQuery(metadata={"suite": "pages"}), limit=2, **options)
        found = [one.sandbox_id for one in await pages.next_items()]
        assert pages.has_next
        found += [one.sandbox_id for one in await pages.next_items()]
        assert found == [one.sandbox_id for one in reversed(made)]
        assert not pages.has_next
    finally:
        await asyncio.gather(*(one.kill() for one in made))


async def test_a_sandbox_ends_at_its_deadline(options):
    made = await e2b.AsyncSandbox.create("base", timeout=60, **options)
    await made.set_timeout(1)
    async with asyncio.timeout(20):
        while await made.is_running():
            await asyncio.sleep(0.1)
    with pytest.raises(e2b.SandboxException):
        await made.get_info()


async def test_a_snapshot_of_what_is_paused_without_memory_outlives_the_pause(options):
    made = await e2b.AsyncSandbox.create("base", timeout=60, **options)
    await made.files.write("x.txt", "kept")
    await made.pause(keep_memory=False)
    template = (await made.create_snapshot()).snapshot_id
    await made.connect(timeout=60)
    async with await e2b.AsyncSandbox.create(template, timeout=60, **options) as other:
        assert await other.files.read("x.txt") == "kept"
    await made.pause(keep_memory=False)
    template = (await made.create_snapshot()).snapshot_id
    assert await e2b.AsyncSandbox.delete_snapshot(template, **options)
    await made.connect(timeout=60)
    assert await made.files.read("x.txt") == "kept"
    await made.kill()


async def test_the_network_is_what_the_rules_say(options):
    """A server on this host's loopback is reached where a rule names its address and the operator allowed it, and nowhere else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.0 200 OK\r\n\r\nreached")
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    ask = f"curl -s --noproxy '' -x $http_proxy http://127.0.0.1:{port}/"
    made = await e2b.AsyncSandbox.create("base", timeout=60, network={"allow_out": ["127.0.0.1"]}, **options)
    try:
        assert (await made.commands.run(ask)).stdout == "reached"
        with pytest.raises(e2b.SandboxException, match="not allowed"):
            await made.update_network({"allow_out": ["169.254.169.254"]})
        await made.update_network({"deny_out": ["0.0.0.0/0"]})
        assert "reached" not in (await made.commands.run(f"{ask} || true")).stdout
    finally:
        await made.kill()
        listener.close()


async def test_a_template_is_built_step_by_step_and_only_once(tmp_path, options):
    (tmp_path / "hello.txt").write_text("from the context")

    def build(name: str) -> list[str]:
        said: list[str] = []
        template = (
            e2b.Template(file_context_path=str(tmp_path))
            .from_image("host")
            .set_envs({"GREETING": "hi"})
            .run_cmd("echo $GREETING > made.txt")
            .copy("hello.txt", "/srv/in/")
            .set_workdir("/srv")
        )
        e2b.Template.build(
            template,
            name,
            on_build_logs=lambda entry: said.append(entry.message),
            api_key=options["api_key"],
            api_url=options["api_url"],
        )
        return said

    await asyncio.to_thread(build, "first")
    again = await asyncio.to_thread(build, "second")
    assert sum(line.startswith("CACHED") for line in again) == 4
    async with await e2b.AsyncSandbox.create("second", timeout=60, **options) as made:
        result = await made.commands.run("cat /home/user/made.txt in/hello.txt; stat -c %U in/hello.txt; pwd; echo $GREETING")
        assert result.stdout == "hi\nfrom the contextuser\n/srv\nhi\n"


async def test_a_build_that_fails_says_at_which_step(options):
    template = e2b.Template().from_image("host").run_cmd("true").run_cmd("echo no; exit 7")
    with pytest.raises(e2b.BuildException, match="exit status 7"):
        await asyncio.to_thread(e2b.Template.build, template, "broken", api_key=options["api_key"], api_url=options["api_url"])
    with pytest.raises(e2b.SandboxException):
        await e2b.AsyncSandbox.create("broken", **options)


# ---- what an SDK would not do ----


async def test_a1_the_token_of_a_sandbox_opens_that_sandbox_only(server, sandbox, options):
    other = await e2b.AsyncSandbox.create("base", timeout=60, **options)
    try:
        async with httpx.AsyncClient(base_url=server.url) as client:
            for token in (None, "", "x", other._envd_access_token, options["api_key"]):
                headers = {"e2b-sandbox-id": sandbox.sandbox_id, **({"x-access-token": token} if token is not None else {})}
                assert (await client.post("/process.Process/List", headers=headers, json={})).status_code == 401
                assert (await client.get("/files?path=/etc/passwd", headers=headers)).status_code == 401
            assert (await client.get("/sandboxes")).status_code == 401
            assert (await client.get("/sandboxes", headers={"x-api-key": "e2b_" + "0" * 40})).status_code == 401
    finally:
        await other.kill()


@pytest.mark.parametrize("name", ["unknown", "../../etc", "i" * 10_000, "%00", "i0123456789abcdef0123"])
async def test_a5_an_unknown_sandbox_is_not_found(server, name):
    async with httpx.AsyncClient(base_url=server.url, headers={"x-api-key": server.token}) as client:
        path = httpx.URL(server.url).copy_with(raw_path=b"/sandboxes/" + name.encode().replace(b"/", b"%2F"))
        assert (await client.get(path)).status_code in (400, 404)
        gone = await client.get("/health", headers={"e2b-sandbox-id": name})
        assert gone.status_code == 502
        assert "was not found" in gone.json()["message"]


async def test_a6_one_key_makes_one_sandbox(server):
    async with httpx.AsyncClient(base_url=server.url, headers={"x-api-key": server.token}, timeout=30) as client:
        asked = [
            client.post("/v2/sandboxes", json={"templateID": "base", "timeout": 30}, headers={"idempotency-key": "k1"}) for _ in range(4)
        ]
        ids = {answer.json()["sandboxID"] for answer in await asyncio.gather(*asked)}
        assert len(ids) == 1
        assert (await client.delete(f"/sandboxes/{ids.pop()}")).status_code == 204


@pytest.mark.parametrize("timeout", [-1, 1e308, "60", None, True])
async def test_a8_a_timeout_that_is_none_is_refused(server, timeout):
    async with httpx.AsyncClient(base_url=server.url, headers={"x-api-key": server.token}) as client:
        assert (await client.post("/sandboxes", json={"templateID": "base", "timeout": timeout})).status_code == 400


@pytest.mark.parametrize("name", ["--privileged", ";reboot", "$(id)", "a\nb", "-v/:/host"])
async def test_a9_a_template_of_any_name_is_a_name(server, name):
    async with httpx.AsyncClient(base_url=server.url, headers={"x-api-key": server.token}) as client:
        assert (await client.post("/sandboxes", json={"templateID": name})).status_code in (400, 404)
        by_metadata = {"templateID": "base", "metadata": {"image": name}}
        assert (await client.post("/sandboxes", json=by_metadata)).status_code in (400, 403)


async def test_a18_a_stream_that_nobody_reads_ends_with_its_deadline(server, sandbox):
    """The process is held up, not the server's memory, and its deadline ends it all the same."""
    body = json.dumps({"process": {"cmd": "/usr/bin/yes"}, "stdin": False}).encode()
    request = (
        (
            f"POST /process.Process/Start HTTP/1.1\r\nHost: x\r\nE2b-Sandbox-Id: {sandbox.sandbox_id}\r\nX-Access-Token: {sandbox._envd_access_token}\r\n"
            f"Content-Type: application/connect+json\r\nConnect-Timeout-Ms: 1500\r\nContent-Length: {len(body) + 5}\r\n\r\n"
        ).encode()
        + b"\0"
        + len(body).to_bytes(4, "big")
        + body
    )
    url = httpx.URL(server.url)
    _, writer = await asyncio.open_connection(url.host, url.port, limit=1024)
    writer.write(request)
    before = time.monotonic()
    async with asyncio.timeout(20):
        while not await sandbox.commands.list() and time.monotonic() - before < 1:
            await asyncio.sleep(0.02)
        while await sandbox.commands.list():
            await asyncio.sleep(0.05)
    writer.close()


# ---- a name for every sandbox ----


@pytest.fixture(scope="module")
async def named(tmp_path_factory):
    """A server with a certificate for all names below its domain, and what an SDK reads from its environment for it."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl: the program is missing")
    try:
        socket.getaddrinfo(f"1-a.{DOMAIN}", 443)
    except OSError:
        pytest.skip("names: *.localhost leads nowhere; apt install libnss-myhostname")
    place = tmp_path_factory.mktemp("named")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", f"/CN={DOMAIN}",
         "-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"subjectAltName=DNS:{DOMAIN},DNS:*.{DOMAIN}", "-keyout", "key.pem", "-out", "cert.pem"],
        cwd=place, check=True, capture_output=True,
    )  # fmt: skip
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    served = await hosting.started(
        place / "state", "--domain", DOMAIN, "--tls-cert", str(place / "cert.pem"), "--tls-key", str(place / "key.pem"), port=port
    )
    try:
        yield served, place / "cert.pem"
    finally:
        await hosting.serving.ended(served)


USE_NAMES = """
import json, ssl, sys, time, urllib.request
from e2b import Sandbox
box = Sandbox.create("base", timeout=60, network={"allow_public_traffic": False, "mask_request_host": "inner.example.org:${PORT}"})
box.files.write("x.txt", "signed")
read = urllib.request.urlopen(box.download_url("x.txt")).read().decode()
box.commands.run("python3 -m http.server 8000", background=True)
url = f"https://{box.get_host(8000)}/x.txt"
try:
    urllib.request.urlopen(url)
    refused = None
except urllib.error.HTTPError as exc:
    refused = exc.code
for _ in range(100):
    try:
        served = urllib.request.urlopen(urllib.request.Request(url, headers={"e2b-traffic-access-token": box.traffic_access_token})).read().decode()
        break
    except urllib.error.HTTPError:
        time.sleep(0.1)
import websockets.sync.client
box.files.write("echo.py", ECHO)
box.commands.run("python3 echo.py", background=True, envs={"PYTHONPATH": ""})
for _ in range(100):
    try:
        with websockets.sync.client.connect(
            f"wss://{box.get_host(9000)}/chat", additional_headers={"e2b-traffic-access-token": box.traffic_access_token}, proxy=None
        ) as ws:
            ws.send("hello")
            said = ws.recv()
        break
    except websockets.exceptions.InvalidStatus:
        time.sleep(0.1)
box.kill()
print(json.dumps([read, refused, served, said]))
"""
# A WebSocket server of the standard library alone, which is all that a sandbox is sure to have: one message back, in capitals.
ECHO = """
import base64, hashlib, socket
server = socket.create_server(("127.0.0.1", 9000))
while True:
    peer, _ = server.accept()
    head = b""
    while b"\\r\\n\\r\\n" not in head:
        head += peer.recv(65536)
    key = next(line.split(b": ")[1] for line in head.split(b"\\r\\n") if line.lower().startswith(b"sec-websocket-key"))
    accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
    peer.sendall(b"HTTP/1.1 101 x\\r\\nUpgrade: websocket\\r\\nConnection: Upgrade\\r\\nSec-WebSocket-Accept: " + accept + b"\\r\\n\\r\\n")
    frame = peer.recv(65536)
    size = frame[1] & 127
    text = bytes(byte ^ frame[2 + at % 4] for at, byte in enumerate(frame[6 : 6 + size])).upper()
    peer.sendall(bytes((0x81, len(text))) + text)
    peer.recv(65536)
    peer.close()
"""


async def test_with_a_domain_urls_are_signed_and_ports_have_names(named, tmp_path):
    served, certificate = named
    env = {
        **os.environ, "E2B_DOMAIN": served.said["exports"]["E2B_DOMAIN"], "E2B_API_KEY": served.token, "SSL_CERT_FILE": str(certificate),
    }  # fmt: skip
    done = await asyncio.to_thread(
        subprocess.run, [sys.executable, "-c", f"ECHO = {ECHO!r}\n{USE_NAMES}"], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == ["signed", 403, "signed", "HELLO"]


async def test_a_signal_that_is_none_is_refused(server, sandbox):
    """Of whatever type: found by random requests."""
    process = await sandbox.commands.run("sleep 60", background=True)
    to = {"e2b-sandbox-id": sandbox.sandbox_id, "x-access-token": sandbox._envd_access_token}
    async with httpx.AsyncClient(base_url=server.url, headers=to, timeout=20, trust_env=False) as client:
        for signal in ([], {"a": 1}, None, 1.5, 11, "SIGNAL_SIGHUP"):
            answer = await client.post("/process.Process/SendSignal", json={"process": {"pid": process.pid}, "signal": signal})
            assert (answer.status_code, answer.json()["code"]) == (400, "invalid_argument"), signal
    assert await process.kill()


async def test_a_connect_that_names_the_sandbox_in_headers_too_is_the_control_planes(server, sandbox):
    """As SDKs of 2.10 ask; there is nothing of the kind behind envd's port."""
    to = {"x-api-key": server.token, "e2b-sandbox-id": sandbox.sandbox_id, "e2b-sandbox-port": "49983"}
    async with httpx.AsyncClient(base_url=server.url, headers=to, timeout=20, trust_env=False) as client:
        answer = await client.post(f"/sandboxes/{sandbox.sandbox_id}/connect", json={"timeout": 60})
        assert (answer.status_code, answer.json()["sandboxID"]) == (200, sandbox.sandbox_id)
        assert (await client.post(f"/sandboxes/{sandbox.sandbox_id}/connect", headers={"x-api-key": "x"}, json={})).status_code == 401
