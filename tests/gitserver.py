"""Git over smart HTTP on loopback, by git's own backend, and able to misbehave: it counts, refuses, fails, hangs and asks for a password."""

import base64
import contextlib
import http.server
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tests.servers import ALIAS, http_server


@dataclass
class GitServer:
    url: str = ""
    requests: list[str] = field(default_factory=list)
    failures: list[int] = field(default_factory=list)
    """Status codes to answer with, before it works."""
    is_old: bool = False
    """Speaks the first version of the protocol, in which only what a ref points to may be asked for."""
    cut_at: int | None = None
    """Ends each answer of objects after so many bytes."""
    password: str | None = None
    redirect: str | None = None
    """Where everybody is sent instead."""
    authorizations: list[str | None] = field(default_factory=list)
    """What each request brought."""
    hangs: threading.Event | None = None
    """While it is there and not set, nobody gets an answer."""

    @property
    def packs(self) -> int:
        """How often objects were asked for."""
        return sum(request.startswith("POST") for request in self.requests)


def run_git(*argv: str, cwd: Path, **variables: str) -> str:
    """Git as the tests use it: with an identity, and nothing of this machine's configuration."""
    env = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null", "HOME": str(cwd)}
    for who in ("AUTHOR", "COMMITTER"):
        env |= {f"GIT_{who}_NAME": "t", f"GIT_{who}_EMAIL": "t@example.org"}
    done = subprocess.run(["git", "-c", "safe.directory=*", *argv], cwd=cwd, env={**env, **variables}, capture_output=True, check=False)
    assert done.returncode == 0, f"git {' '.join(argv)}: {done.stderr.decode(errors='replace')}"
    return done.stdout.decode(errors="replace").strip()


@contextlib.contextmanager
def git_server(directory: Path) -> Iterator[GitServer]:
    """Serve the repositories below `directory`; the URL is that of the directory."""
    backend = subprocess.run(["git", "--exec-path"], check=True, capture_output=True, text=True).stdout.strip()
    server = GitServer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(length) if length else self._chunks()
            server.requests.append(f"{self.command} {self.path}")
            server.authorizations.append(self.headers.get("Authorization"))
            if server.redirect is not None:
                self.send_response(302)
                self.send_header("Location", server.redirect + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if server.hangs is not None:
                server.hangs.wait(60)
            if server.failures:
                self.send_error(server.failures.pop(0))
                return
            if server.password is not None:
                wanted = "Basic " + base64.b64encode(server.password.encode()).decode()
                if self.headers.get("Authorization") != wanted:
                    self.send_response(401)
                    self.send_header("WWW-Authenticate", 'Basic realm="git"')
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
            head, _, answer = self._backend(body).partition(b"\r\n\r\n")
            fields = [line.split(b": ", 1) for line in head.split(b"\r\n") if line]
            self.send_response(next((int(v.split()[0]) for k, v in fields if k == b"Status"), 200))
            for name, value in fields:
                if name != b"Status":
                    self.send_header(name.decode(), value.decode())
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer[: server.cut_at] if self.command == "POST" else answer)

        do_POST = do_GET

        def _chunks(self) -> bytes:
            body = b""
            if self.headers.get("Transfer-Encoding") == "chunked":
                while size := int(self.rfile.readline(), 16):
                    body += self.rfile.read(size)
                    self.rfile.readline()
                self.rfile.readline()
            return body

        def _backend(self, body: bytes) -> bytes:
            asked = urlsplit(self.path)
            variables = {
                "GIT_PROJECT_ROOT": str(directory),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": unquote(asked.path),
                "QUERY_STRING": asked.query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "CONTENT_LENGTH": str(len(body)),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
                "GIT_PROTOCOL": "" if server.is_old else self.headers.get("Git-Protocol", ""),
                "GIT_CONFIG_COUNT": "1",
                "GIT_CONFIG_KEY_0": "safe.directory",
                "GIT_CONFIG_VALUE_0": "*",
                "GIT_CONFIG_GLOBAL": "/dev/null",
                "GIT_CONFIG_SYSTEM": "/dev/null",
            }
            return subprocess.run(
                [f"{backend}/git-http-backend"], env={**os.environ, **variables}, input=body, capture_output=True, check=False
            ).stdout

        def log_message(self, *args: object) -> None:
            pass

    with http_server(Handler) as port:
        server.url = f"http://{ALIAS}:{port}"
        yield server
