"""The HTTP server behind TLS, with clients that are not ours: the standard library's, curl and websockets."""

import asyncio
import contextlib
import http.client
import json
import logging
import shutil
import socket
import ssl
import subprocess

import pytest

pytest.importorskip("cryptography", reason="cryptography: not installed; pip install 'untax[ray]'")
pytest.importorskip("uvicorn", reason="uvicorn: not installed; pip install 'untax[server]'")

import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route, WebSocketRoute
from websockets.sync.client import connect

from untax.cluster.trust import Trust, pinned
from untax.core.errors import UsageError
from untax.service import listen
from untax.service.listen import Address, HttpListener

LARGE = 3 << 20


async def about(request):
    body = await request.body()
    return JSONResponse({"scheme": request.url.scheme, "client": request.client.host, "size": len(body)})


async def large(request):
    return Response(bytes(LARGE))


async def said(websocket):
    await websocket.accept()
    async for text in websocket.iter_text():
        await websocket.send_text(f"{websocket.url.scheme} {text}")


class Secured:
    def __init__(self, url, trust):
        self.url = url
        self.port = int(url.rpartition(":")[2])
        self.context = pinned(trust.authority.certificate)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2

    def connection(self):
        return http.client.HTTPSConnection("127.0.0.1", self.port, context=self.context, timeout=30)


@contextlib.asynccontextmanager
async def listening(place):
    trust = Trust.new("listen")
    certificate, key = trust.identity_for("127.0.0.1").write(place)
    app = Starlette(routes=[Route("/", about, methods=["GET", "POST"]), Route("/large", large), WebSocketRoute("/said", said)])
    listener = HttpListener(app, Address("127.0.0.1", 0, str(certificate), str(key)))
    await listener.start()
    try:
        yield Secured(listener.url, trust)
    finally:
        await listener.close()


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_requests_one_after_another_on_one_connection(tmp_path, version):
    def ask(secured):
        secured.context.minimum_version = secured.context.maximum_version = version
        answers, ports = [], set()
        with contextlib.closing(secured.connection()) as connection:
            for body in (None, b"x" * 10, bytes(LARGE)):
                connection.request("POST" if body else "GET", "/", body)
                answers.append(json.load(connection.getresponse()))
                ports.add(connection.sock.getsockname())
            connection.request("GET", "/large")
            answers.append(len(connection.getresponse().read()))
        return answers, len(ports)

    async with listening(tmp_path) as secured:
        assert secured.url.startswith("https://127.0.0.1:")
        answers, connections = await asyncio.to_thread(ask, secured)
    assert answers == [{"scheme": "https", "client": "127.0.0.1", "size": size} for size in (0, 10, LARGE)] + [LARGE]
    assert connections == 1


async def test_its_end_waits_for_no_look_at_the_date(tmp_path, monkeypatch):
    """What nobody waits for is looked at seldom; the end is told."""
    monkeypatch.setattr(listen, "_DATE_S", 3600.0)
    async with asyncio.timeout(30), listening(tmp_path) as secured:
        with contextlib.closing(secured.connection()) as connection:
            await asyncio.to_thread(connection.request, "GET", "/")
            answer = await asyncio.to_thread(connection.getresponse)
            assert answer.getheader("date", "").endswith("GMT")
            answer.read()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl: not installed")
async def test_curl_is_answered(tmp_path):
    async with listening(tmp_path) as secured:
        argv = [
            "curl",
            "-ksS",
            "--noproxy",
            "*",
            f"{secured.url}/",
            f"{secured.url}/large",
            "-o",
            "-",
            "-o",
            "/dev/null",
            "-w",
            "%{size_download} ",
        ]
        done = await asyncio.to_thread(subprocess.run, argv, capture_output=True, timeout=60)
    document, _, sizes = done.stdout.decode().partition("}")
    assert done.returncode == 0, done.stderr
    assert '"scheme":"https"' in document and sizes.split() == [str(len(document) + 1), str(LARGE)]


async def test_a_websocket_is_carried(tmp_path):
    def talk(secured):
        with connect(f"wss://127.0.0.1:{secured.port}/said", ssl=secured.context, proxy=None) as websocket:
            websocket.send("hello")
            return websocket.recv(timeout=30)

    async with listening(tmp_path) as secured:
        assert await asyncio.to_thread(talk, secured) == "wss hello"


async def test_a_peer_that_never_shakes_hands_is_dropped_and_one_that_never_asks_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(listen, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(listen, "HEAD_S", 0.2)

    def silent(secured):
        with socket.create_connection(("127.0.0.1", secured.port), timeout=30) as sock:
            before = sock.recv(100)
        with socket.create_connection(("127.0.0.1", secured.port), timeout=30) as sock:
            with secured.context.wrap_socket(sock, server_hostname="127.0.0.1", suppress_ragged_eofs=False) as inside:
                head = inside.recv(1000)
                return before, head.split(b"\r\n")[0], inside.recv(1000)

    async with listening(tmp_path) as secured:
        assert await asyncio.to_thread(silent, secured) == (b"", b"HTTP/1.1 408 Request Timeout", b"")


async def test_garbage_and_clients_that_do_not_trust_it_leave_no_trace_and_others_are_answered(tmp_path, caplog):
    caplog.set_level(logging.INFO)

    def knock(secured):
        for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x00\x05aaaaa", b""):
            with socket.create_connection(("127.0.0.1", secured.port), timeout=30) as sock:
                sock.sendall(garbage)
                sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionError):
                    assert len(sock.recv(1000)) < 100
        with pytest.raises(ssl.SSLCertVerificationError):
            http.client.HTTPSConnection("127.0.0.1", secured.port, context=ssl.create_default_context()).request("GET", "/")
        with contextlib.closing(secured.connection()) as connection:
            connection.request("GET", "/")
            return connection.getresponse().status

    async with listening(tmp_path) as secured:
        caplog.clear()
        assert await asyncio.to_thread(knock, secured) == 200
        assert [record.getMessage() for record in caplog.records] == []


def test_what_is_spoken_is_what_uvicorn_would_speak(tmp_path):
    certificate, key = map(str, Trust.new("listen").identity_for("127.0.0.1").write(tmp_path))
    config = uvicorn.Config(Starlette(), ssl_certfile=certificate, ssl_keyfile=key, log_config=None)
    config.load()
    ours = listen._context(Address("127.0.0.1", 0, certificate, key))
    for fact in ("protocol", "minimum_version", "maximum_version", "verify_mode", "options", "check_hostname", "security_level"):
        assert getattr(ours, fact) == getattr(config.ssl, fact), fact
    assert ours.get_ciphers() == config.ssl.get_ciphers() and ours.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_a_certificate_that_cannot_be_used_is_refused_before_anything_listens(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    certificate, _ = Trust.new("a").identity_for("127.0.0.1").write(first)
    _, key = Trust.new("b").identity_for("127.0.0.1").write(second)
    for pair in ((certificate, key), (certificate, tmp_path / "none"), (key, key)):
        with pytest.raises(UsageError, match="--tls-cert"):
            HttpListener(Starlette(), Address("127.0.0.1", 0, *map(str, pair)))
