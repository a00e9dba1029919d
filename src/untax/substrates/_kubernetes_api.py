"""The API server over HTTP/1.1: requests that end by their deadline, watches that are read as they come.

Written here and not taken from a client library because the held exec stream (`_kubernetes_exec`) needs the bare
connection; docs/decisions/0008 has the measurements.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote, urlencode

from untax.core.errors import BackendError
from untax.substrates._kubernetes_access import Access

REQUEST_S = 15.0
_HEAD_MAX = 64 << 10
_BODY_MAX = 64 << 20
_LINE_MAX = 8 << 20  # a watch event holds one object; etcd's limit is 1.5 MiB
_IDLE_MAX = 8
_RETRIES = 3


class ApiError(Exception):
    """The server's answer was no. `reason` is its word for it, `message` a sentence."""

    def __init__(self, status: int, reason: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(status, reason, message)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message or self.reason} (HTTP {self.status})"


def path_of(*parts: str, query: Mapping[str, Any] | None = None) -> str:
    path = "/" + "/".join(quote(part, safe="") for part in parts)
    return f"{path}?{urlencode(query, doseq=True)}" if query else path


class Connection:
    """One connection and what is being read from it."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def close(self) -> None:
        self.writer.transport.abort()

    async def head(self) -> tuple[int, dict[str, str]]:
        try:
            raw = await self.reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError as exc:
            raise OSError("an answer's head is too long") from exc
        lines = raw.decode("latin-1").split("\r\n")
        status = lines[0].split(" ", 2)
        if len(status) < 2 or not status[1].isdigit():
            raise OSError("no HTTP answer")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return int(status[1]), {name.strip().lower(): value.strip() for name, _, value in pairs}

    async def pieces(self, headers: Mapping[str, str]) -> AsyncIterator[bytes]:
        """The body as it comes."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            while True:
                size = int((await self.reader.readline()).split(b";")[0] or b"0", 16)
                data = await self.reader.readexactly(size + 2)
                if not size:
                    return
                yield data[:-2]
        elif "content-length" in headers:
            left = int(headers["content-length"])
            while left:
                data = await self.reader.read(min(left, 1 << 16))
                if not data:
                    raise OSError("an answer was cut off")
                left -= len(data)
                yield data
        else:
            while data := await self.reader.read(1 << 16):
                yield data


class Api:
    """Requests to one API server. `close` drops the connections."""

    def __init__(self, access: Access, *, timeout_s: float = REQUEST_S) -> None:
        self.access = access
        self._timeout_s = timeout_s
        self._idle: list[Connection] = []
        self._closed = False

    def close(self) -> None:
        self._closed = True
        while self._idle:
            self._idle.pop().close()

    async def request(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None = None, patch: bool = False
    ) -> dict[str, Any]:
        """The answer as JSON. `ApiError` when the server says no, `BackendError` when it says nothing by the deadline.

        What cannot have taken effect is tried again: a refused connection, and `429` with the pause that was asked for. So is a
        connection that broke under a GET or DELETE; a broken POST is the caller's to look after.
        """
        data = b"" if body is None else json.dumps(body, separators=(",", ":")).encode()
        timeout_s = timeout_s or self._timeout_s
        kind = "application/merge-patch+json" if patch else "application/json"
        try:
            async with asyncio.timeout(timeout_s):
                for attempt in range(_RETRIES + 1):
                    try:
                        return await self._request(method, path, data, kind)
                    except ApiError as exc:
                        if exc.status not in (429, 503) or attempt == _RETRIES or (exc.status == 503 and method == "POST"):
                            raise
                        await asyncio.sleep(min(exc.retry_after_s or 0.2 * 2**attempt, 5.0))
                    except (OSError, EOFError, ValueError) as exc:
                        unsent = isinstance(exc, ConnectionRefusedError)
                        if attempt == _RETRIES or not (unsent or method in ("GET", "DELETE")):
                            raise self._failed(exc) from exc
                        if attempt:
                            await asyncio.sleep(0.1 * 2**attempt)
        except TimeoutError:
            raise BackendError("", f"the API server {self.access.server} did not answer {method} within {timeout_s:g} s") from None
        raise AssertionError

    def _failed(self, exc: Exception) -> BackendError:
        said = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
        return BackendError("", f"the API server {self.access.server} cannot be reached: {said}; check the kubeconfig and the way there")

    async def _request(self, method: str, path: str, data: bytes, kind: str) -> dict[str, Any]:
        for anew in (False, True):
            connection = await self._take(anew=anew)
            try:
                status, headers = await self._sent(connection, method, path, data, kind)
                answer = b"".join([piece async for piece in _bounded(connection.pieces(headers))])
            except BaseException:
                connection.close()
                raise
            if headers.get("connection", "").lower() == "close" or self._closed or len(self._idle) >= _IDLE_MAX:
                connection.close()
            else:
                self._idle.append(connection)
            if status != 401 or anew:
                break
        if status >= 400:
            raise refusal(status, answer, headers.get("retry-after"))
        found = json.loads(answer) if answer else {}
        return found if isinstance(found, dict) else {}

    async def _sent(self, connection: Connection, method: str, path: str, data: bytes, kind: str) -> tuple[int, dict[str, str]]:
        connection.writer.write(
            head(self.access, method, path, await self.access.headers(), {"Content-Type": kind, "Content-Length": str(len(data))}) + data
        )
        await connection.writer.drain()
        return await connection.head()

    async def _take(self, *, anew: bool) -> Connection:
        if anew:
            await self.access.headers(anew=True)
            while self._idle:
                self._idle.pop().close()
        while self._idle:
            connection = self._idle.pop()
            if not connection.reader.at_eof() and not connection.writer.is_closing():
                return connection
            connection.close()
        await self.access.headers()
        sock = await dial(self.access)
        reader, writer = await asyncio.open_connection(
            sock=sock, ssl=self.access.context(), server_hostname=self.access.server_hostname, limit=_HEAD_MAX
        )
        return Connection(reader, writer)

    async def watch(self, path: str, *, silent_s: float) -> AsyncIterator[dict[str, Any]]:
        """Events as they come, until the server ends the watch. `ApiError`, or `OSError` when the connection breaks or is silent."""
        connection = await self._take(anew=False)
        try:
            async with asyncio.timeout(self._timeout_s):
                status, headers = await self._sent(connection, "GET", path, b"", "application/json")
            if status >= 400:
                body = b"".join([piece async for piece in _bounded(connection.pieces(headers))])
                raise refusal(status, body, headers.get("retry-after"))
            held = b""
            pieces = connection.pieces(headers)
            while True:
                async with asyncio.timeout(silent_s):
                    piece = await anext(pieces, None)
                if piece is None:
                    return
                *lines, held = (held + piece).split(b"\n")
                if len(held) > _LINE_MAX:
                    raise OSError("a watch event is too long")
                for line in lines:
                    event = json.loads(line)
                    if isinstance(event, dict):
                        yield event
        except EOFError as exc:
            raise OSError("the watch was cut off") from exc
        finally:
            connection.close()


def head(access: Access, method: str, path: str, credentials: Mapping[str, str], more: Mapping[str, str]) -> bytes:
    host = f"[{access.host}]" if ":" in access.host else access.host
    headers = {"Host": f"{host}:{access.port}", "Accept": "application/json", "User-Agent": "untax", **more, **credentials}
    lines = [f"{method} {access.prefix}{path} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), "", ""]
    return "\r\n".join(lines).encode("latin-1")


async def dial(access: Access) -> socket.socket:
    """A connected socket to the API server, through the kubeconfig's proxy where it names one."""
    loop = asyncio.get_running_loop()
    host, port = access.proxy or (access.host, access.port)
    last: OSError = OSError(f"{host} has no address")
    for family, kind, number, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, number)
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            _notice_silence(sock)
            await loop.sock_connect(sock, address)
            if access.proxy is not None:
                await _ask_proxy(loop, sock, access)
            return sock
        except OSError as exc:
            sock.close()
            last = exc
        except BaseException:
            sock.close()
            raise
    raise last


def _notice_silence(sock: socket.socket) -> None:
    """A peer that vanished without a word is noticed within a minute, and a held stream then opened anew."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 45_000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


async def _ask_proxy(loop: asyncio.AbstractEventLoop, sock: socket.socket, access: Access) -> None:
    target = f"{access.host}:{access.port}"
    await loop.sock_sendall(sock, f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
    answer = b""
    while b"\r\n\r\n" not in answer:
        data = await loop.sock_recv(sock, 1)  # not a byte of what follows the head
        if not data or len(answer) > _HEAD_MAX:
            raise OSError("the proxy hung up")
        answer += data
    if answer.split(b" ", 2)[1:2] != [b"200"]:
        raise OSError(f"the proxy said {answer.splitlines()[0].decode(errors='replace')[:80]}")


async def _bounded(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    size = 0
    async for piece in pieces:
        size += len(piece)
        if size > _BODY_MAX:
            raise OSError("an answer is too long")
        yield piece


def refusal(status: int, body: bytes, retry_after: str | None = None) -> ApiError:
    """What an answer of 400 and above says."""
    said: Any = None
    with contextlib.suppress(ValueError):
        said = json.loads(body)
    pause = float(retry_after) if retry_after and retry_after.isdigit() else None
    if not isinstance(said, dict):
        return ApiError(status, "", " ".join(body[:300].decode(errors="replace").split()), pause)
    return ApiError(status, str(said.get("reason", "")), str(said.get("message", "")), pause)
