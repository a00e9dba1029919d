"""Registries for tests: the real one, with the ways to log in that it has, a token service for it, and one that misbehaves on demand.

All listen on loopback, on ports of their own, and end with the test. Images are made here from literal files and pushed over
HTTP by a few lines of our own, so that nothing of the code under test prepares what it is tested with.
"""

import base64
import contextlib
import gzip
import hashlib
import http.client
import http.server
import io
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from tests.servers import http_server, make_certificate

HOST = "127.0.0.1"
USER, PASSWORD = "ali", "open sesame"
# The registry takes bcrypt only, which Python has no word for: htpasswd -nbB ali 'open sesame'
HTPASSWD = "ali:$2b$04$sxSsLSPq78Qj2.mi52DhhuHAXnFf1rUYqXS6YPKv3lVmzJWO1u12m\n"
_START_S = 20.0

MACHINE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
"""This machine as images call it."""
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def digest_of(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


# ---- images ----


def layer(files: dict[str, bytes | None]) -> bytes:
    """A tar of files, directories (None), whiteouts by their `.wh.` names; the same bytes for the same files."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = (tarfile.DIRTYPE, 0o755) if data is None else (tarfile.REGTYPE, 0o644)
            entry.size = len(data or b"")
            entry.mtime = 1_700_000_000
            tar.addfile(entry, io.BytesIO(data or b""))
    return out.getvalue()


@dataclass
class Image:
    """Bytes as a registry keeps them: blobs by digest, and one manifest."""

    blobs: dict[str, bytes]
    manifest: bytes
    config_digest: str
    layer_digests: list[str]

    @property
    def digest(self) -> str:
        return digest_of(self.manifest)


def image(*layers: bytes, config: dict[str, object] | None = None, architecture: str = MACHINE, squeeze: bool = True) -> Image:
    packed = [gzip.compress(one, 1, mtime=0) if squeeze else one for one in layers]
    said = json.dumps(
        {
            "architecture": architecture,
            "os": "linux",
            "config": config or {},
            "rootfs": {"type": "layers", "diff_ids": [digest_of(one) for one in layers]},
        }
    ).encode()
    blobs = {digest_of(one): one for one in (*packed, said)}
    kind = LAYER if squeeze else LAYER.removesuffix("+gzip")
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": {"mediaType": CONFIG, "digest": digest_of(said), "size": len(said)},
            "layers": [{"mediaType": kind, "digest": digest_of(one), "size": len(one)} for one in packed],
        }
    ).encode()
    return Image(blobs, manifest, digest_of(said), [digest_of(one) for one in packed])


def index(*entries: tuple[Image, dict[str, str]]) -> bytes:
    return json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": INDEX,
            "manifests": [
                {"mediaType": MANIFEST, "digest": one.digest, "size": len(one.manifest), "platform": where} for one, where in entries
            ],
        }
    ).encode()


# ---- the real registry ----


@dataclass
class Registry:
    """Debian's docker-registry, listening on `address`."""

    address: str
    authorization: str | None = None  # what the tests' own pusher says
    tls: Path | None = None

    def push(self, name: str, tag: str, pushed: Image) -> None:
        for digest, blob in pushed.blobs.items():
            status, headers, _ = self._ask("POST", f"/v2/{name}/blobs/uploads/", b"", {})
            assert status == 202, status
            where = urlsplit(headers["Location"])
            self._put(f"{where.path}?{where.query}&digest={digest}", blob, "application/octet-stream")
        self._put(f"/v2/{name}/manifests/{tag}", pushed.manifest, MANIFEST)

    def push_index(self, name: str, tag: str, listed: bytes) -> None:
        self._put(f"/v2/{name}/manifests/{tag}", listed, INDEX)

    def _put(self, target: str, body: bytes, kind: str) -> None:
        status, _, said = self._ask("PUT", target, body, {"Content-Type": kind})
        assert status == 201, (status, said)

    def _ask(self, method: str, target: str, body: bytes, headers: dict[str, str]) -> tuple[int, http.client.HTTPMessage, bytes]:
        if self.authorization:
            headers["Authorization"] = self.authorization
        connection = http.client.HTTPConnection(self.address, timeout=10)
        try:
            connection.request(method, target, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


@contextlib.contextmanager
def registry(directory: Path, *, auth: str = "", tls: Path | None = None) -> Iterator[Registry]:
    """A registry whose storage is below `directory`. `auth` is that section of its configuration, `tls` a directory with key and certificate."""
    if shutil.which("docker-registry") is None:
        pytest.skip("registry: no docker-registry; apt install docker-registry")
    directory.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    sections = [
        "version: 0.1",
        "log: {level: warn, accesslog: {disabled: true}}",
        f"storage: {{filesystem: {{rootdirectory: {directory / 'storage'}}}}}",
        f"http: {{addr: '{HOST}:{port}'"
        + (f", tls: {{certificate: {tls / 'cert.pem'}, key: {tls / 'key.pem'}}}" if tls else "")
        + ", secret: tests}",
        auth,
    ]
    (directory / "config.yml").write_text("\n".join(sections) + "\n")
    log = (directory / "log").open("wb")
    server = subprocess.Popen(
        # Should the run itself be killed, the registry must not outlive it.
        ["setpriv", "--pdeathsig", "TERM", "--", "docker-registry", "serve", str(directory / "config.yml")],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        # It would report to whatever the environment names.
        env={key: value for key, value in os.environ.items() if not key.startswith(("REGISTRY_", "OTEL_"))},
    )
    try:
        deadline = time.monotonic() + _START_S
        while not _listens(port):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("docker-registry did not start: " + (directory / "log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)
        yield Registry(f"{HOST}:{port}", tls=tls)
    finally:
        server.send_signal(signal.SIGTERM)
        try:
            server.wait(10)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        log.close()


def htpasswd(directory: Path) -> str:
    """The section for user name and password."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "htpasswd").write_text(HTPASSWD)
    return f"auth: {{htpasswd: {{realm: tests, path: {directory / 'htpasswd'}}}}}"


def basic(user: str = USER, password: str = PASSWORD) -> str:
    return "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()


def auth_file(path: Path, address: str, user: str = USER, password: str = PASSWORD, **more: str) -> Path:
    """As `docker login` writes it."""
    entry = {"auth": base64.b64encode(f"{user}:{password}".encode()).decode(), **more}
    path.write_text(json.dumps({"auths": {address: entry}}))
    return path


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), 1):
        return True
    return False


# ---- the token service that a registry can be told to trust ----


@dataclass
class TokenService:
    """Signs tokens for whoever has the password, and notes who asked for what."""

    directory: Path
    url: str = ""
    asked: list[tuple[str, dict[str, list[str]], str | None]] = field(default_factory=list)
    lifetime_s: int = 300
    refresh_token: str = "r3fresh"

    def section(self) -> str:
        """What makes a registry send its clients here, and believe what they come back with."""
        return (
            f"auth: {{token: {{realm: '{self.url}', service: tests-registry, issuer: tests-issuer, "
            f"rootcertbundle: {self.directory / 'cert.pem'}}}}}"
        )

    def token(self, scopes: list[str]) -> str:
        access = []
        for scope in scopes:
            kind, name, actions = scope.split(":")
            access.append({"type": kind, "name": name, "actions": actions.split(",")})
        certificate = "".join((self.directory / "cert.pem").read_text().splitlines()[1:-1])
        now = int(time.time())
        parts = [
            {"typ": "JWT", "alg": "RS256", "x5c": [certificate]},
            {
                "iss": "tests-issuer",
                "sub": USER,
                "aud": "tests-registry",
                "exp": now + self.lifetime_s,
                "nbf": now - 60,
                "iat": now,
                "jti": os.urandom(8).hex(),
                "access": access,
            },
        ]
        text = ".".join(_base64url(json.dumps(part).encode()) for part in parts)
        signed = subprocess.run(
            ["openssl", "dgst", "-sha256", "-sign", str(self.directory / "key.pem")], input=text.encode(), capture_output=True, check=True
        ).stdout
        return f"{text}.{_base64url(signed)}"


@contextlib.contextmanager
def token_service(directory: Path) -> Iterator[TokenService]:
    directory.mkdir(parents=True, exist_ok=True)
    make_certificate(directory, HOST)
    service = TokenService(directory)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(parse_qs(urlsplit(self.path).query), self.headers.get("Authorization") == basic(), "token")

        def do_POST(self) -> None:
            form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self._answer(form, form.get("refresh_token") == [service.refresh_token], "access_token")

        def _answer(self, form: dict[str, list[str]], is_known: bool, word: str) -> None:
            service.asked.append((self.command, form, self.headers.get("Authorization")))
            body = json.dumps({word: service.token(form.get("scope", []))} if is_known else {"details": "unknown"}).encode()
            self.send_response(200 if is_known else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with http_server(Handler, host=HOST) as port:
        service.url = f"http://{HOST}:{port}/token"
        yield service


def _base64url(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


# ---- one that misbehaves ----


@dataclass
class Request:
    """What a fault is given: the request, and the means to answer it."""

    handler: http.server.BaseHTTPRequestHandler
    path: str
    start: int
    body: bytes

    def answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.handler.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **{k.replace("_", "-"): v for k, v in headers.items()}}.items():
            if value:
                self.handler.send_header(name, value)
        self.handler.end_headers()
        self.handler.wfile.write(body)


Fault = Callable[[Request], bool]
"""Answers a request wrongly and gives True, or leaves it to be answered rightly."""


@dataclass
class Rogue:
    """Serves images like a registry, unless a fault for the path steps in: the first one queued for it, once each."""

    address: str = ""
    contents: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    always: dict[str, Fault] = field(default_factory=dict)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)
    served: dict[str, int] = field(default_factory=dict)
    """Bytes of each path's body that went out."""
    has_ranges: bool = True
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def hold(self, name: str, tag: str, held: Image) -> None:
        for digest, blob in held.blobs.items():
            self.contents[f"/v2/{name}/blobs/{digest}"] = ("application/octet-stream", blob)
        for wanted in (tag, held.digest):
            self.contents[f"/v2/{name}/manifests/{wanted}"] = (MANIFEST, held.manifest)

    def fail(self, path: str, *faults: Fault) -> None:
        self.faults.setdefault(path, []).extend(faults)

    def count(self, path: str) -> int:
        return sum(1 for _, asked, _ in self.requests if asked == path)


@contextlib.contextmanager
def rogue(host: str = HOST, tls: Path | None = None) -> Iterator[Rogue]:
    served = Rogue()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            with served.lock:
                served.running += 1
                served.most_running = max(served.most_running, served.running)
                served.requests.append((self.command, self.path, dict(self.headers.items())))
                waiting = served.faults.get(self.path)
                fault = waiting.pop(0) if waiting else served.always.get(self.path)
            try:
                kind, body = served.contents.get(self.path, ("", b""))
                start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-")) if served.has_ranges else 0
                request = Request(self, self.path, start, body)
                if fault is not None and fault(request):
                    self.close_connection = True
                    return
                if not kind:
                    request.answer(404, b'{"errors":[{"code":"NAME_UNKNOWN"}]}')
                elif start:
                    request.answer(206, body[start:], Content_Range=f"bytes {start}-{len(body) - 1}/{len(body)}", Content_Type=kind)
                    self.sent(len(body) - start)
                else:
                    request.answer(200, body, Content_Type=kind)
                    self.sent(len(body))
            finally:
                with served.lock:
                    served.running -= 1

        def do_HEAD(self) -> None:
            with served.lock:
                served.requests.append((self.command, self.path, dict(self.headers.items())))
            kind, body = served.contents.get(self.path, ("", b""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Docker-Content-Digest", digest_of(body))
            self.end_headers()

        def sent(self, count: int) -> None:
            with served.lock:
                served.served[self.path] = served.served.get(self.path, 0) + count

        def log_message(self, *args: object) -> None:
            pass

    with http_server(Handler, host=host, tls=tls) as port:
        served.address = f"{host}:{port}"
        yield served


@dataclass
class Proxy:
    address: str = ""
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    """The first line of each request, and who said to be asking."""


@contextlib.contextmanager
def connect_proxy(target: str) -> Iterator[Proxy]:
    """A proxy that leads every CONNECT to `target`, whatever name was asked for."""
    proxy = Proxy()
    host, _, port = target.rpartition(":")

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_CONNECT(self) -> None:
            proxy.asked.append((f"{self.command} {self.path}", self.headers.get("Proxy-Authorization")))
            with socket.create_connection((host, int(port)), 5) as there:
                self.send_response(200)
                self.end_headers()
                back = threading.Thread(target=_pump, args=(there, self.connection), daemon=True)
                back.start()
                _pump(self.connection, there)
                back.join(5)

        def log_message(self, *args: object) -> None:
            pass

    with http_server(Handler, host=HOST) as listening:
        proxy.address = f"{HOST}:{listening}"
        yield proxy


def _pump(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def status(code: int, **headers: str) -> Fault:
    def fault(request: Request) -> bool:
        request.answer(code, b"no", **headers)
        return True

    return fault


def cut_after(count: int) -> Fault:
    """Announce everything that was asked for, send so many bytes of it, and hang up."""

    def fault(request: Request) -> bool:
        rest = request.body[request.start :]
        whole = f"bytes {request.start}-{len(request.body) - 1}/{len(request.body)}" if request.start else ""
        request.handler.send_response(206 if request.start else 200)
        request.handler.send_header("Content-Length", str(len(rest)))
        if whole:
            request.handler.send_header("Content-Range", whole)
        request.handler.end_headers()
        request.handler.wfile.write(rest[:count])
        request.handler.sent(len(rest[:count]))
        request.handler.wfile.flush()
        request.handler.connection.shutdown(socket.SHUT_RDWR)
        return True

    return fault


def instead(body: bytes) -> Fault:
    """Other bytes than those asked for."""

    def fault(request: Request) -> bool:
        request.answer(200, body)
        return True

    return fault


def endless(request: Request) -> bool:
    """Bytes without end, their number not announced."""
    request.handler.send_response(200)
    request.handler.send_header("Connection", "close")
    request.handler.end_headers()
    with contextlib.suppress(OSError):
        while True:
            request.handler.wfile.write(bytes(65536))
            request.handler.sent(65536)
    return True


def silent(seconds: float) -> Fault:
    """No answer for so long, or until the client is gone."""

    def fault(request: Request) -> bool:
        request.handler.connection.settimeout(seconds)
        with contextlib.suppress(OSError):
            request.handler.connection.recv(1)
        return True

    return fault


def dripping(interval_s: float, *, head: bool = False) -> Fault:
    """A byte at a time, of the head or of the body."""

    def fault(request: Request) -> bool:
        out = request.handler.wfile
        with contextlib.suppress(OSError):
            out.write(b"HTTP/1.1 200 OK\r\n")
            if not head:
                out.write(b"Content-Length: %d\r\n\r\n" % len(request.body))
            for n in range(10_000):
                out.write(b"X-A: b\r\n"[n % 8 : n % 8 + 1] if head else request.body[n : n + 1])
                out.flush()
                time.sleep(interval_s)
        return True

    return fault
