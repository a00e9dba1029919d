"""`untax serve` over HTTP and its clients: the same engine from afar, blocking too, under TLS, over a connection that breaks."""

import asyncio
import contextlib
import json
import signal
import subprocess

import pytest
from tests.hosted import hosted

import untax
import untax.sync
from untax import substrates
from untax.remote import websocket


@pytest.fixture(autouse=True)
def namespace():
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")


async def test_plain_http_does_what_a_client_needs(tmp_path):
    """Without any client of ours: lease, run, files, a session, a snapshot and its forks, what it came to."""
    async with hosted(tmp_path) as served, served.client() as client:
        lease = (await client.post("/v1/leases", json={"env": {"A": "1"}, "files": {"f": "eA=="}})).json()["lease"]
        one = f"/v1/leases/{lease}"
        ran = (await client.post(f"{one}/run", json={"shell": "echo $A; cat f; exit 3"})).json()
        assert (ran["stdout"], ran["exit_code"], ran["outcome"]) == ("1\nx", 3, "exited")
        raw = (await client.post(f"{one}/run", json={"argv": ["printf", "\\377"]})).json()
        assert raw["stdout_base64"] == "/w=="
        assert (await client.put(f"{one}/files", params={"path": "d/g", "mode": 0o600}, content=b"\0\1")).json() == {"bytes": 2}
        assert (await client.get(f"{one}/files", params={"path": "d/g", "offset": 1})).content == b"\1"
        assert (await client.get(f"{one}/stat", params={"path": "d/g"})).json()["mode"] == 0o600
        missing = await client.get(f"{one}/files", params={"path": "none"})
        assert missing.status_code == 404 and missing.json()["error"]["kind"] == "NotFound"
        session = (await client.post(f"{one}/sessions", json={})).json()["session"]
        await client.post(f"{one}/sessions/{session}/run", json={"text": "cd d"})
        assert (await client.post(f"{one}/sessions/{session}/run", json={"text": "ls"})).json()["stdout"] == "g\n"
        assert (await client.post(f"{one}/edit", json={"path": "f", "old": "x", "new": "y"})).json() == {"replaced": 1}
        assert (await client.post(f"{one}/search", json={"pattern": "y"})).json()["matches"][0]["path"] == "f"
        snapshot = (await client.post(f"{one}/snapshots", json={"save": True})).json()["snapshot"]
        forks = (await client.post(f"/v1/snapshots/{snapshot}/forks", json={"n": 2})).json()["leases"]
        assert (await client.get(f"/v1/leases/{forks[0]['lease']}/files", params={"path": "f"})).content == b"y"
        assert (await client.delete(f"/v1/snapshots/{snapshot}")).status_code == 204
        assert (await client.post(f"{one}/reset", json={})).json()["lease"] == lease
        assert (await client.get(f"{one}/files", params={"path": "f"})).content == b"x"
        assert (await client.post(f"{one}/ttl", json={"ttl_s": 0.05})).status_code == 200
        while (await client.get(one)).status_code != 404:
            await asyncio.sleep(0.02)
        while not (ledgers := (await client.get("/v1/ledgers")).json()["ledgers"]):
            await asyncio.sleep(0.02)
        assert {ledger["verdict"] for ledger in ledgers} == {"trusted"}
        document = (await client.get("/v1/openapi.json")).json()
        assert document["openapi"] == "3.1.0" and "/v1/leases/{lease}/run" in document["paths"]
        for name in ("untax_leases", "untax_request_seconds_bucket", "untax_pool_cold_total"):
            assert name in (await client.get("/metrics")).text


async def test_a_process_streams_over_a_websocket_of_its_own(tmp_path):
    async with hosted(tmp_path) as served, served.client() as client:
        lease = (await client.post("/v1/leases", json={})).json()["lease"]
        async with _opened(served, f"/v1/leases/{lease}/process") as socket:
            await socket.say({"argv": ["sh", "-c", "read line; echo got $line; echo err >&2; exit 4"]})
            assert (await socket.hear())["pid"] > 0
            await socket.send(websocket.BINARY, b"hello\n")
            pieces = [await socket.next(), await socket.next()]
            assert sorted(data for _, data in pieces) == [b"\1got hello\n", b"\2err\n"]
            assert (await socket.hear())["result"]["exit_code"] == 4
        async with _opened(served, f"/v1/leases/{lease}/process") as socket:
            await socket.say({"argv": ["sleep", "60"]})
            await socket.hear()
            await socket.say({"signal": 15})
            assert (await socket.hear())["result"]["outcome"] == "signaled"
        async with _opened(served, f"/v1/leases/{lease}/process") as socket:
            await socket.say({"argv": 3})
            assert (await socket.hear())["error"]["kind"] == "UsageError"
        with pytest.raises(AssertionError, match="404"):
            async with _opened(served, "/v1/leases/nothing/process"):
                pass


async def test_a_connection_that_breaks_is_taken_up_again_and_nothing_is_done_twice(tmp_path):
    """Every connection is cut in the middle of actions; each action is carried out once, and its answer arrives."""
    async with hosted(tmp_path) as served, _cutting(served.url) as proxy:
        async with untax.connect(proxy.url, token=served.token) as engine, engine.lease() as box:
            for number in range(3):
                running = asyncio.ensure_future(box.shell("echo x >>count; sleep 0.3; wc -l <count"))
                await asyncio.sleep(0.1)
                proxy.cut()
                assert (await running).text.strip() == str(number + 1)
            data = bytes(range(256)) * 8192
            writing = asyncio.ensure_future(box.write("big", data))
            await asyncio.sleep(0.005)
            proxy.cut()
            await writing
            assert await box.read("big") == data
        assert box.ledger.verdict == "trusted" and proxy.cuts == 4


async def test_who_holds_a_lease_comes_back_to_a_server_that_drains_and_nobody_else_does(tmp_path):
    async with hosted(tmp_path, "--drain", "30") as served, _cutting(served.url) as proxy:
        async with untax.connect(proxy.url, token=served.token) as engine:
            async with engine.lease() as box:
                served.send(signal.SIGTERM)
                with pytest.raises(untax.PoolClosed, match="stopping"):
                    while True:
                        await (await engine.acquire()).release()
                running = asyncio.ensure_future(box.shell("sleep 0.3; echo still here"))
                await asyncio.sleep(0.1)
                proxy.cut()
                assert (await running).text == "still here\n"
                with pytest.raises(untax.PoolClosed, match="stopping"):
                    await untax.connect(served.url, token=served.token).start()
            assert box.ledger.verdict == "trusted"
        assert await asyncio.wait_for(served.process.wait(), 10) == 0


async def test_x21_a_lease_whose_answer_was_lost_is_asked_for_again_and_is_the_same(tmp_path):
    """The server has made it, the answer never arrives, the connection breaks: one sandbox, and it works."""
    async with hosted(tmp_path) as served, served.client() as client, _cutting(served.url) as proxy:
        async with untax.connect(proxy.url, token=served.token) as engine:
            proxy.is_deaf = True
            coming = asyncio.ensure_future(engine.acquire(network=("example.invalid:1",)))
            while (await client.get("/v1/about")).json()["use"]["leases"] == 0:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.1)
            proxy.cut()
            proxy.is_deaf = False
            box = await asyncio.wait_for(coming, 10)
            assert (await box.run(["echo", "here"])).text == "here\n"
            assert (await client.get("/v1/about")).json()["use"]["leases"] == 1
            await box.release()


async def test_a_client_that_stays_away_loses_its_leases_and_is_told(tmp_path):
    async with hosted(tmp_path, "--lease", "0.3") as served, served.client() as client, _cutting(served.url) as proxy:
        async with untax.connect(proxy.url, token=served.token) as engine, engine.lease() as box:
            proxy.close()
            with pytest.raises(untax.SandboxLost):
                await box.run(["sleep", "5"], timeout_s=5)
            assert box.ledger.verdict == "infra"
            assert (await client.get("/v1/about")).json()["use"]["leases"] == 0


async def test_tls_and_the_blocking_client(tmp_path):
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    async with hosted(tmp_path, "--tls-cert", str(certificate), "--tls-key", str(key)) as served:
        assert served.url.startswith("https://")
        with pytest.raises(untax.UsageError, match="ca_file"):
            await untax.connect(served.url, token=served.token).start()

        def blocking():
            with untax.sync.connect(served.url, token=served.token, ca_file=certificate) as engine, engine.lease() as box:
                assert box.run(["echo", "safe"]).text == "safe\n"
                with box.session() as bash:
                    bash.run("cd /tmp")
                    return bash.run("pwd").text

        assert await asyncio.to_thread(blocking) == "/tmp\n"


class _Cutting:
    """A proxy whose connections can be cut."""

    def __init__(self, target: str) -> None:
        self._host, port = target.split("//")[1].rsplit(":", 1)
        self._port = int(port)
        self._open: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.is_deaf = False
        """What the server says is swallowed."""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, away = await asyncio.open_connection(self._host, self._port)
        self._open |= {writer, away}

        async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                while data := await source.read(65536):
                    if self.is_deaf and source is there:
                        continue
                    sink.write(data)
                    await sink.drain()
            sink.close()

        await asyncio.gather(pump(reader, away), pump(there, writer))

    def cut(self) -> None:
        self.cuts += 1
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    def close(self) -> None:
        self._server.close()
        self.cut()


@contextlib.asynccontextmanager
async def _cutting(url):
    proxy = _Cutting(url)
    await proxy.start()
    try:
        yield proxy
    finally:
        proxy.close()


class _Socket:
    def __init__(self, reader, writer):
        self._reader, self._writer = reader, writer
        self._parser = websocket.Parser(is_client=True)
        self._came = []

    async def send(self, opcode, data):
        self._writer.write(websocket.frame(opcode, data, is_client=True))
        await self._writer.drain()

    async def say(self, body):
        await self.send(websocket.TEXT, json.dumps(body).encode())

    async def next(self):
        while not self._came:
            data = await asyncio.wait_for(self._reader.read(65536), 10)
            assert data
            self._came += self._parser.feed(data)
        return self._came.pop(0)

    async def hear(self):
        opcode, data = await self.next()
        assert opcode == websocket.TEXT, (opcode, data)
        return json.loads(data)


@contextlib.asynccontextmanager
async def _opened(served, path):
    host, port = served.url.split("//")[1].rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    head = [f"GET {path} HTTP/1.1", f"Host: {host}", f"Authorization: Bearer {served.token}", "Upgrade: websocket", "Connection: Upgrade"]
    head += ["Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {websocket.new_key().decode()}"]
    writer.write("\r\n".join([*head, "", ""]).encode())
    status = (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
    assert b"101" in status, status
    try:
        yield _Socket(reader, writer)
    finally:
        writer.close()


async def test_spans_go_where_the_environment_says(tmp_path, monkeypatch):
    """A collector of our own hears of requests and of a rollout with its parts."""
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    heard = bytearray()

    async def collect(reader, writer):
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
        heard.extend(await reader.readexactly(size))
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(collect, "127.0.0.1", 0) as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.sockets[0].getsockname()[1]}")
        async with hosted(tmp_path) as served, served.client() as client:
            lease = (await client.post("/v1/leases", json={})).json()["lease"]
            await client.delete(f"/v1/leases/{lease}")
            assert await served.stop() == 0  # sends what is left
    for name in (b"untax create_lease", b"untax rollout", b"untax cleanup"):
        assert name in heard
