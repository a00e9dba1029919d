"""Servers that tests bring up on the host's loopback, and stop: a counting listener, git over HTTPS, a package index.

Nothing here listens anywhere else, and no test aims at an address that it did not make.
"""

import base64
import contextlib
import hashlib
import http.server
import os
import socket
import socketserver
import ssl
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

# Loopback, and not in `no_proxy` inside a sandbox: reachable only through the sandbox's proxy, by name.
ALIAS = "127.0.0.2"


@dataclass
class Listener:
    """Accepts on a port, counts who came, and answers everyone with one line of HTTP."""

    host: str
    port: int
    peers: list[tuple[str, bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"

    def is_reachable_from_host(self) -> bool:
        """The proof without which "the sandbox cannot reach it" would mean nothing. Does not count as a visit."""
        before = len(self.peers)
        with socket.create_connection((self.host, self.port), 2) as s:
            s.sendall(b"GET / HTTP/1.0\r\n\r\n")
            answered = s.recv(100).startswith(b"HTTP/1.0 200")
        del self.peers[before:]
        return answered


@contextlib.contextmanager
def listener(host: str = ALIAS, port: int = 0) -> Iterator[Listener]:
    found: list[Listener] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.settimeout(5)
            with contextlib.suppress(OSError):
                asked = self.request.recv(4096)
                found[0].peers.append((self.client_address[0], asked))
                self.request.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 7\r\n\r\nreached")

    with _serving(_Server((host, port), Handler)) as server:
        found.append(Listener(host, server.server_address[1]))
        yield found[0]


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True

    def shutdown_request(self, request: socket.socket) -> None:
        if isinstance(request, ssl.SSLSocket):
            with contextlib.suppress(OSError, ValueError):  # clients take a stream that just ends for an attack
                request.settimeout(2)
                request.unwrap()
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that goes away in the middle is part of the tests


@contextlib.contextmanager
def _serving(server: _Server) -> Iterator[_Server]:
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@contextlib.contextmanager
def http_server(handler: type[http.server.BaseHTTPRequestHandler], host: str = ALIAS, tls: Path | None = None) -> Iterator[int]:
    """Serve with `handler`; gives the port. `tls` is a file with key and certificate."""
    server = _Server((host, 0), handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls)
        # The handshake then happens in the connection's own thread, not in the accept loop.
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    with _serving(server):
        yield server.server_address[1]


def make_certificate(directory: Path, host: str = ALIAS) -> Path:
    """A self-made key and certificate for `host`, in one file."""
    key, certificate, both = directory / "key.pem", directory / "cert.pem", directory / "both.pem"
    subprocess.run(
        [
            *f"openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={host} -addext subjectAltName=IP:{host}".split(),
            *("-keyout", str(key), "-out", str(certificate)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_bytes(key.read_bytes() + certificate.read_bytes())
    return both


@dataclass(frozen=True)
class Served:
    url: str
    pattern: str  # what a network policy must name
    certificate: bytes


@contextlib.contextmanager
def git_over_https(directory: Path, files: dict[str, str]) -> Iterator[Served]:
    """One repository with one commit, served by git's own smart HTTP backend behind TLS."""
    work, bare = directory / "work", directory / "project.git"
    identity = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(directory)}
    for who in ("AUTHOR", "COMMITTER"):
        identity |= {f"GIT_{who}_NAME": "t", f"GIT_{who}_EMAIL": "t@example.org"}
    env = {**os.environ, **identity}

    def git(*argv: str) -> None:
        subprocess.run(["git", *argv], env=env, check=True, capture_output=True)

    git("init", "-q", "-b", "main", str(work))
    for name, text in files.items():
        (work / name).write_text(text)
    git("-C", str(work), "add", "-A")
    git("-C", str(work), "commit", "-q", "-m", "first")
    git("clone", "-q", "--bare", str(work), str(bare))
    backend = subprocess.run(["git", "--exec-path"], check=True, capture_output=True, text=True).stdout.strip()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"

        def do_GET(self) -> None:
            asked = urlsplit(self.path)
            length = int(self.headers.get("Content-Length", 0))
            variables = {
                "GIT_PROJECT_ROOT": str(directory),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": unquote(asked.path),
                "QUERY_STRING": asked.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(length),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                # The repository belongs to whoever runs the tests, the backend may be run by another.
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
            }
            answer = subprocess.run(
                [f"{backend}/git-http-backend"],
                env={**env, **variables},
                input=self.rfile.read(length),
                capture_output=True,
                check=False,
            ).stdout
            head, _, body = answer.partition(b"\r\n\r\n")
            fields = [line.split(b": ", 1) for line in head.split(b"\r\n") if line]
            status = next((int(v.split()[0]) for k, v in fields if k == b"Status"), 200)
            self.send_response(status)
            for name, value in fields:
                if name != b"Status":
                    self.send_header(name.decode(), value.decode())
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args: object) -> None:
            pass

    both = make_certificate(directory)
    with http_server(Handler, tls=both) as port:
        yield Served(f"https://{ALIAS}:{port}/project.git", f"{ALIAS}:{port}", (directory / "cert.pem").read_bytes())


@contextlib.contextmanager
def package_index(directory: Path, name: str, version: str, module: str) -> Iterator[Served]:
    """A PEP 503 index over HTTPS with one wheel of one module in it."""
    wheel = _wheel(directory, name, version, module)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    pages = {
        f"/simple/{name}/": (
            "text/html",
            f'<!doctype html><a href="/files/{wheel.name}#sha256={digest}">{wheel.name}</a>'.encode(),
        ),
        f"/files/{wheel.name}": ("application/octet-stream", wheel.read_bytes()),
    }

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind, body = pages.get(self.path, ("", b""))
            self.send_response(200 if kind else 404)
            self.send_header("Content-Type", kind or "text/plain")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    both = make_certificate(directory)
    with http_server(Handler, tls=both) as port:
        yield Served(f"https://{ALIAS}:{port}/simple/", f"{ALIAS}:{port}", (directory / "cert.pem").read_bytes())


def _wheel(directory: Path, name: str, version: str, module: str) -> Path:
    path, info = directory / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    contents = {
        f"{name}.py": module.encode(),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for entry, data in contents.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{entry},sha256={digest},{len(data)}\n"
    contents[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in contents.items():
            archive.writestr(entry, data)
    return path
