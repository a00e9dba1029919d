"""A git server on loopback: smart HTTP by git's own backend, so that a clone in a trial is a clone over a network.

It runs as a process of its own (`python -m untax.rollout.gitserver DIR`), because a server in the measuring process would share its
interpreter with what is being measured. It ends with its standard input, that is, with whoever started it, however that ends.
"""

from __future__ import annotations

import contextlib
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote, urlsplit

from untax.core.errors import SubstrateUnavailable

# An address of the loopback that no program takes for "this machine, past the proxy": 127.0.0.1 is in everybody's no_proxy.
ADDRESS = "127.0.0.2"
_START_S = 30.0
_MOST_BODY = 64 << 20  # of a request; a clone's are a few KiB


@contextlib.contextmanager
def serving(directory: Path) -> Iterator[str]:
    """Serve the repositories below `directory` for as long as the block lasts; gives `ADDRESS:port`."""
    argv = [sys.executable, "-m", "untax.rollout.gitserver", str(directory)]
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_own_env())
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        timer = threading.Timer(_START_S, server.kill)
        timer.start()
        try:
            said = server.stdout.readline().strip().decode(errors="replace")
        finally:
            timer.cancel()
        if not said.isdigit():
            raise SubstrateUnavailable("", f"the git server on {ADDRESS} did not start; is git installed (apt install git)?")
        yield f"{ADDRESS}:{said}"
    finally:
        server.stdin.close()
        try:
            server.wait(timeout=5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        server.stdout.close()


def _own_env() -> dict[str, str]:
    root = str(Path(__file__).resolve().parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


class Handler(http.server.BaseHTTPRequestHandler):
    """Hands each request on to git's own backend; `of` makes one for a directory."""

    protocol_version = "HTTP/1.1"
    backend = ""
    root = ""

    @classmethod
    def of(cls, directory: str) -> type[Handler]:
        """Serves the repositories below `directory`."""
        place = subprocess.run(["git", "--exec-path"], check=True, capture_output=True, text=True).stdout.strip()
        return type("_Handler", (cls,), {"backend": f"{place}/git-http-backend", "root": directory})

    def do_GET(self) -> None:
        body = self._body()
        if body is None:
            self.send_error(413)
            return
        head, _, answer = self._answer(body).partition(b"\r\n\r\n")
        fields = [line.split(b": ", 1) for line in head.split(b"\r\n") if b": " in line]
        if not fields:
            self.send_error(500)
            return
        self.send_response(next((int(value.split()[0]) for name, value in fields if name == b"Status"), 200))
        for name, value in fields:
            if name != b"Status":
                self.send_header(name.decode("latin-1"), value.decode("latin-1"))
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.say(answer)

    def do_POST(self) -> None:
        self.do_GET()

    def say(self, answer: bytes) -> None:
        self.wfile.write(answer)

    def _body(self) -> bytes | None:
        if self.headers.get("Transfer-Encoding") != "chunked":
            length = self.headers.get("Content-Length", "0")
            return self.rfile.read(int(length)) if length.isdigit() and int(length) <= _MOST_BODY else None
        body = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            if len(body) + size > _MOST_BODY:
                return None
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _answer(self, body: bytes) -> bytes:
        asked = urlsplit(self.path)
        variables = {
            "GIT_PROJECT_ROOT": self.root,
            "GIT_HTTP_EXPORT_ALL": "1",
            "PATH_INFO": unquote(asked.path),
            "QUERY_STRING": asked.query,
            "REQUEST_METHOD": self.command,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(len(body)),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
            "GIT_CONFIG_COUNT": "1",
            "GIT_CONFIG_KEY_0": "safe.directory",
            "GIT_CONFIG_VALUE_0": "*",
            "GIT_CONFIG_GLOBAL": os.devnull,
            "GIT_CONFIG_SYSTEM": os.devnull,
        }
        return subprocess.run([self.backend], env={**os.environ, **variables}, input=body, capture_output=True).stdout

    def log_message(self, *_: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # of the concurrency axis, all of whose rollouts clone at once


def main(directory: str) -> int:
    """Serve until standard input ends; the first line of standard output is the port."""
    with _Server((ADDRESS, 0), Handler.of(directory)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sys.stdout.write(f"{server.server_address[1]}\n")
        sys.stdout.flush()
        while sys.stdin.buffer.read(1 << 16):
            pass
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
