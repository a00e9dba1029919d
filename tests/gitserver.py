"""The meter's git server on loopback, able to misbehave: it counts, refuses, fails, hangs and asks for a password."""

import base64
import contextlib
import os
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.servers import ALIAS, http_server

from untax.rollout import gitserver


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
    server = GitServer()

    class Moody(gitserver.Handler):
        """The meter's own, in whatever mood the test wants."""

        protocol_version = "HTTP/1.0"  # one request for each connection: what is cut off ends there

        def do_GET(self) -> None:  # noqa: N802  (as http.server names it)
            server.requests.append(f"{self.command} {self.path}")
            server.authorizations.append(self.headers.get("Authorization"))
            if server.redirect is not None:
                self._turn_away(302, "Location", server.redirect + self.path)
                return
            if server.hangs is not None:
                server.hangs.wait(60)
            if server.failures:
                self.send_error(server.failures.pop(0))
                return
            if server.password is not None:
                wanted = "Basic " + base64.b64encode(server.password.encode()).decode()
                if self.headers.get("Authorization") != wanted:
                    self._turn_away(401, "WWW-Authenticate", 'Basic realm="git"')
                    return
            if server.is_old:
                del self.headers["Git-Protocol"]
            super().do_GET()

        def say(self, answer: bytes) -> None:
            super().say(answer[: server.cut_at] if self.command == "POST" else answer)

        def _turn_away(self, status: int, name: str, value: str) -> None:
            self.send_response(status)
            self.send_header(name, value)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with http_server(Moody.of(str(directory))) as port:
        server.url = f"http://{ALIAS}:{port}"
        yield server
