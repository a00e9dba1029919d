"""HTTP on a container engine's Unix socket: short questions, long uploads, and streams that stay open.

Whatever the engine does, a caller has its answer or a `BackendError` by the deadline. An engine that has let a deadline pass is taken
for frozen: from then on calls fail at once, until one quiet question that is left waiting there is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal
from urllib.parse import quote, urlencode

from untax.core.errors import BackendError

EngineKind = Literal["docker", "podman"]

_HEAD_MAX = 64 << 10
_ANSWER_MAX = 16 << 20
_PIECE = 256 << 10
# Docker's own paths without a version are the engine's newest; Podman serves Docker's under one, and its own under another.
_PREFIX: Mapping[EngineKind, str] = {"docker": "", "podman": "/v1.41"}
_NATIVE: Mapping[EngineKind, str] = {"docker": "", "podman": "/v4.0.0/libpod"}
_VARIABLE: Mapping[EngineKind, str] = {"docker": "DOCKER_HOST", "podman": "CONTAINER_HOST"}


class Refused(Exception):
    """The engine answered no; `status` and its own words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(f"{words} (HTTP {status})")
        self.status = status
        self.words = words


def find_socket(engine: EngineKind, env: Mapping[str, str]) -> str | None:
    """Where the engine listens: what its variable says, or the first usual place that exists; None when there is neither."""
    if said := env.get(_VARIABLE[engine]):
        return said.removeprefix("unix://") if said.startswith("unix:///") else None
    runtime = env.get("XDG_RUNTIME_DIR")
    places = {
        "docker": ["/var/run/docker.sock", *([f"{runtime}/docker.sock"] if runtime else [])],
        "podman": [*(["/run/podman/podman.sock"] if os.geteuid() == 0 else []), *([f"{runtime}/podman/podman.sock"] if runtime else [])],
    }[engine]
    return next((place for place in places if os.path.exists(place)), None)


def socket_trouble(engine: EngineKind, path: str) -> str | None:
    """Why nobody can be spoken to there, with the remedy; None when somebody listens."""
    if len(os.fsencode(path)) > 107:
        return f"the name of the socket {path} is longer than the 107 bytes that a socket's may have; make a link to it with a shorter one"
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(2.0)
        try:
            probe.connect(path)
        except OSError as exc:
            return _unreachable(engine, path, exc)
    return None


@dataclass(slots=True)
class Upgraded:
    """A connection that has become a stream, and what of it was read along with the answer's head."""

    sock: socket.socket
    early: bytes


@dataclass(slots=True)
class _Reply:
    status: int
    headers: Mapping[str, str]
    early: bytes


class EngineApi:
    """One engine. Each question has a connection of its own: to a local socket that costs microseconds."""

    def __init__(self, engine: EngineKind, path: str, answer_s: float, on_recovery: Callable[[], None]) -> None:
        self.engine = engine
        self.path = path
        self.answer_s = answer_s
        self._on_recovery = on_recovery
        self._vigil: asyncio.Task[None] | None = None  # while the engine is taken for frozen

    async def ask(
        self, method: str, target: str, body: object = None, *, query: Mapping[str, str] | None = None, native: bool = False
    ) -> Any:
        """What the engine answers, as data; `Refused`, or `BackendError` when nothing came in time. `native` is the engine's own dialect."""
        data = b"" if body is None else json.dumps(body).encode()
        async with self._asking(self.answer_s) as sock:
            reply = await self._send(sock, method, self._target(target, query, native), data, "application/json")
            return _data(await _body(sock, reply))

    async def send_tar(self, method: str, target: str, file: BinaryIO, size: int, *, query: Mapping[str, str], patience_s: float) -> Any:
        """As `ask`, with a body that may be large. `patience_s` is for the answer; sending may last as long as it goes on."""
        async with self._asking(None) as sock:
            loop = asyncio.get_running_loop()
            head = self._head(method, self._target(target, query, native=False), size, "application/x-tar")
            async with self._deadline(self.answer_s):
                await loop.sock_sendall(sock, head)
            while data := file.read(_PIECE):
                async with self._deadline(patience_s):
                    await loop.sock_sendall(sock, data)
            async with self._deadline(patience_s):
                reply = await self._reply(sock)
                return _data(await _body(sock, reply))

    async def send_stream(
        self, target: str, reader: asyncio.StreamReader, whole: Awaitable[object], *, query: Sequence[tuple[str, str]], patience_s: float
    ) -> Any:
        """A POST whose body comes as it is made, as long as it goes on; `patience_s` is for the engine to take each piece, and to answer.

        At its end `whole` is waited for: when that raises, the body is broken off, for an engine would take half a tree for all of it. The
        engine may refuse in the middle: it then stops reading, and its answer is what counts.
        """
        loop = asyncio.get_running_loop()
        async with self._asking(None) as sock:
            async with self._deadline(self.answer_s):
                await loop.sock_sendall(sock, self._chunked_head(target, query))
            try:
                while data := await reader.read(_PIECE):
                    async with self._deadline(patience_s):
                        await loop.sock_sendall(sock, b"%x\r\n%b\r\n" % (len(data), data))
                await whole
                async with self._deadline(patience_s):
                    await loop.sock_sendall(sock, b"0\r\n\r\n")
            except BackendError as exc:
                if not isinstance(exc.__cause__, BrokenPipeError | ConnectionResetError):
                    raise
            async with self._deadline(patience_s):
                return _data(await _body(sock, await self._reply(sock)))

    def _chunked_head(self, target: str, query: Sequence[tuple[str, str]]) -> bytes:
        where = f"{_PREFIX[self.engine]}{target}?{urlencode(query)}"
        kind = "Content-Type: application/x-tar\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n"
        return f"POST {where} HTTP/1.1\r\nHost: {self.engine}\r\n{kind}\r\n".encode()

    async def upgrade(self, target: str, body: object = None, *, query: Mapping[str, str] | None = None) -> Upgraded:
        """A stream from now on; it is the caller's to close."""
        data = b"" if body is None else json.dumps(body).encode()
        async with self._asking(self.answer_s, keep=True) as sock:
            extra = "Connection: Upgrade\r\nUpgrade: tcp\r\n"
            reply = await self._send(sock, "POST", self._target(target, query, native=False), data, "application/json", extra)
            return Upgraded(sock, reply.early)

    async def aclose(self) -> None:
        vigil, self._vigil = self._vigil, None
        if vigil is not None:
            vigil.cancel()
            await asyncio.wait([vigil])

    # ---- deadlines, and what follows when one passes ----

    @contextlib.asynccontextmanager
    async def _asking(self, patience_s: float | None, *, keep: bool = False) -> AsyncIterator[socket.socket]:
        """A connection, closed at the end unless it is kept and all went well."""
        if self._vigil is not None and not self._vigil.done():
            raise BackendError("", f"{self._name} does not answer; it is asked again as soon as it does")
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            async with self._deadline(patience_s):
                await self._connect(sock)
                yield sock
        except BaseException:
            sock.close()
            raise
        if not keep:
            sock.close()

    @contextlib.asynccontextmanager
    async def _deadline(self, patience_s: float | None) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(patience_s) as limit:
                yield
        except TimeoutError:
            if not limit.expired():
                raise
            self._watch()
            raise BackendError("", f"{self._name} did not answer within {patience_s:g} s; look at it with `{self.engine} info`") from None
        except (OSError, _Broken) as exc:
            raise BackendError("", f"{self._name}: {exc.strerror if isinstance(exc, OSError) else exc}") from exc

    def _watch(self) -> None:
        if self._vigil is None or self._vigil.done():
            self._vigil = asyncio.ensure_future(self._keep_vigil())

    async def _keep_vigil(self) -> None:
        """Until a question is answered, or the connection ends because the engine was started anew."""
        with (
            contextlib.suppress(OSError, _Broken, BackendError),
            socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as sock,
        ):
            await self._connect(sock)
            await self._send(sock, "GET", self._target("/_ping", None, native=False), b"", "text/plain")
        self._on_recovery()

    @property
    def _name(self) -> str:
        return f"the {self.engine} engine at {self.path}"

    # ---- HTTP ----

    def _target(self, target: str, query: Mapping[str, str] | None, native: bool) -> str:
        prefix = (_NATIVE if native else _PREFIX)[self.engine]
        return f"{prefix}{quote(target, safe='/:@')}{'?' + urlencode(query) if query else ''}"

    async def _connect(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            await loop.sock_connect(sock, self.path)
        except BlockingIOError:  # more are waiting to be let in than its queue holds: the kernel wakes nobody for that
            await asyncio.to_thread(_connect_blocking, sock, self.path, self.answer_s)
        except OSError as exc:
            raise BackendError("", _unreachable(self.engine, self.path, exc)) from exc

    async def _send(self, sock: socket.socket, method: str, target: str, data: bytes, kind: str, extra: str = "") -> _Reply:
        await asyncio.get_running_loop().sock_sendall(sock, self._head(method, target, len(data), kind, extra) + data)
        return await self._reply(sock)

    def _head(self, method: str, target: str, size: int, kind: str, extra: str = "") -> bytes:
        connection = extra or "Connection: close\r\n"
        return f"{method} {target} HTTP/1.1\r\nHost: {self.engine}\r\nContent-Type: {kind}\r\nContent-Length: {size}\r\n{connection}\r\n".encode()

    async def _reply(self, sock: socket.socket) -> _Reply:
        loop = asyncio.get_running_loop()
        read = b""
        while b"\r\n\r\n" not in read:
            data = await loop.sock_recv(sock, _PIECE)
            read += data
            if not data or len(read) > _HEAD_MAX:
                raise _Broken("it broke the connection off" if not data else "its answer has no end of its head")
        head, _, early = read.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        try:
            status = int(first.split(" ", 2)[1])
        except (IndexError, ValueError):
            raise _Broken("it does not speak HTTP") from None
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        reply = _Reply(status, headers, early)
        if status >= 400:
            raise Refused(status, _words(await _body(sock, reply)))
        return reply


class _Broken(Exception):
    """The connection or the answer is not as HTTP has it."""


async def _body(sock: socket.socket, reply: _Reply) -> bytes:
    loop = asyncio.get_running_loop()
    read = bytearray(reply.early)

    async def more() -> bool:
        data = await loop.sock_recv(sock, _PIECE)
        read.extend(data)
        if len(read) > _ANSWER_MAX:
            raise _Broken(f"its answer has more than {_ANSWER_MAX} bytes")
        return bool(data)

    if reply.status in (204, 304):
        return b""
    if reply.headers.get("transfer-encoding", "").lower() == "chunked":
        while (whole := _unchunked(read)) is None:
            if not await more():
                raise _Broken("its answer broke off")
        return whole
    length = reply.headers.get("content-length")
    size = int(length) if length is not None and length.isdigit() else None
    while (size is None or len(read) < size) and await more():
        continue
    if size is not None and len(read) < size:
        raise _Broken("its answer broke off")
    return bytes(read if size is None else read[:size])


def _unchunked(read: bytearray) -> bytes | None:
    """The body, once its last chunk is there."""
    whole, at = bytearray(), 0
    while (end := read.find(b"\r\n", at)) >= 0:
        try:
            size = int(bytes(read[at:end]).split(b";")[0], 16)
        except ValueError:
            raise _Broken("its answer is cut into pieces that are none") from None
        if len(read) < end + 2 + size + 2:
            return None
        if size == 0:
            return bytes(whole)
        whole += read[end + 2 : end + 2 + size]
        at = end + 2 + size + 2
    return None


def _data(body: bytes) -> Any:
    """JSON, or several of them in a row (as of a load), or text."""
    if not body.strip():
        return None
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in body.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return body.decode(errors="replace")


def _words(body: bytes) -> str:
    said = _data(body)
    text = said.get("message") or said.get("cause") or "" if isinstance(said, dict) else str(said or "")
    return " ".join(str(text).split())[:500] or "no reason given"


def _connect_blocking(sock: socket.socket, path: str, patience_s: float) -> None:
    sock.settimeout(patience_s)
    try:
        sock.connect(path)
    finally:
        sock.setblocking(False)


def _unreachable(engine: EngineKind, path: str, exc: OSError) -> str:
    if isinstance(exc, FileNotFoundError):
        return f"no {engine} engine listens at {path}; start its service, or name its socket with socket=… or {_VARIABLE[engine]}"
    if isinstance(exc, ConnectionRefusedError):
        return f"the {engine} engine at {path} is not running; start its service"
    if isinstance(exc, PermissionError):
        return f"this user may not speak to the {engine} engine at {path}; join its group, or use a rootless engine"
    return f"the {engine} engine at {path}: {exc.strerror or exc}"
