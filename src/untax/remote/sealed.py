"""Messages over a connection that was left by TLS, each in a record that nobody can read or change on its way.

The keys are of this connection alone, one for each direction, and came inside TLS (`docs/protocol.md`). The other end is `native/ferry.c`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
from collections.abc import Callable
from struct import Struct
from typing import cast

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from untax.channel.stream import SocketStream
from untax.core.errors import BackendError, ProtocolError
from untax.remote import tls, websocket
from untax.remote.lanes import HEAD, PIECE
from untax.remote.web import SEALED_PATH, WebAddress, tls_of

SEALED_MAX = HEAD.size + PIECE + 16
"""Bytes of a record behind the field that says how many they are."""
_SIZE = Struct("<I")
_NONCE = Struct("<4xQ")
_KEY = 32
_HEAD_MAX = 64 << 10


def can_seal() -> bool:
    """False where the machine's rules leave ChaCha20-Poly1305 out (FIPS)."""
    try:
        ChaCha20Poly1305(bytes(_KEY))
    except UnsupportedAlgorithm:
        return False
    return True


async def dial(address: WebAddress, owner: str, secret: str, timeout_s: float) -> tuple[socket.socket, bytes]:
    """A connection for `Sealed`, and its keys. `OSError` where there is none in time, `BackendError` when the server does not give it."""
    context = tls_of(address)
    if context is None:
        raise BackendError("", "keys are told inside TLS only")
    asking = _Asking(_question(address, owner, secret))
    async with asyncio.timeout(timeout_s):
        transport = await tls.connect(asking, address.host, address.port, context, handshake_s=timeout_s)
        try:
            keys = _keys(await asking.answer)
            sock = transport.leave()
        finally:
            transport.abort()
    try:
        tls.keep_awake(sock)
    except OSError:
        sock.close()
        raise
    return sock, keys


class _Asking(asyncio.Protocol):
    """Has the head of the answer; nothing is sent behind it before this end has spoken."""

    def __init__(self, question: bytes) -> None:
        self.answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._question = question
        self._head = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._question)

    def data_received(self, data: bytes) -> None:
        self._head += data
        is_whole = b"\r\n\r\n" in self._head
        if self.answer.done() or not (is_whole or len(self._head) > _HEAD_MAX):
            return
        if is_whole and self._head.startswith(b"HTTP/1.1 101 "):
            self.answer.set_result(self._head)
        else:
            self._refused()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._refused()

    def _refused(self) -> None:
        if not self.answer.done():
            self.answer.set_exception(BackendError("", f"no connection beside the held one: {self._head[:200].decode('latin-1')!r}"))


def _question(address: WebAddress, owner: str, secret: str) -> bytes:
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [
        f"GET {address.path}{SEALED_PATH} HTTP/1.1",
        f"Host: {host}:{address.port}",
        "Upgrade: websocket",  # what HTTP servers let through
        "Connection: Upgrade",
        f"Sec-WebSocket-Key: {websocket.new_key().decode()}",
        "Sec-WebSocket-Version: 13",
        f"Untax-Owner: {owner}",
        f"Untax-Secret: {secret}",
        *([f"Authorization: Bearer {address.token}"] if address.token else []),
    ]
    return "\r\n".join([*lines, "", ""]).encode()


def _keys(head: bytes) -> bytes:
    for line in head.split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name.strip().lower() == b"untax-keys":
            try:
                keys = base64.b64decode(value.strip(), validate=True)
            except binascii.Error:
                break
            if len(keys) == 2 * _KEY:
                return keys
    raise BackendError("", "a connection beside the held one came without its keys")


class Sealed:
    """Owns `sock`, whose client's end it is. `received` has each message, `lost` is told once why no more will come, not after a `close`."""

    def __init__(self, sock: socket.socket, keys: bytes, received: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        self._out, self._in = ChaCha20Poly1305(keys[:_KEY]), ChaCha20Poly1305(keys[_KEY:])
        self._sent = self._opened = 0
        self._kept = b""
        self._received = received
        self._lost: Callable[[str], None] | None = lost
        self._stream = SocketStream(sock)
        self._stream.start(self)

    def send(self, message: bytes) -> None:
        head = _SIZE.pack(len(message) + 16)
        self._stream.write(head + self._out.encrypt(_NONCE.pack(self._sent), message, head))
        self._sent += 1

    @property
    def unsent(self) -> int:
        return self._stream.write_buffer_size

    def close(self) -> None:
        """Without a word to whoever was told of messages."""
        self._lost = None
        self._stream.close()

    # ---- from the stream ----

    def data_received(self, data: bytes) -> None:
        try:
            self._take(self._kept + data if self._kept else data)
        except ProtocolError as exc:
            self._lose(f"nonsense was received: {exc}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection broke: {exc}" if exc is not None else "the other end hung up")

    def _take(self, data: bytes) -> None:
        at, have = 0, len(data)
        while have - at >= _SIZE.size and self._lost is not None:
            (size,) = _SIZE.unpack_from(data, at)
            if not HEAD.size + 16 <= size <= SEALED_MAX:
                raise ProtocolError(f"a record of {size} bytes")
            end = at + _SIZE.size + size
            if end > have:
                break
            head = data[at : at + _SIZE.size]
            try:
                message = self._in.decrypt(_NONCE.pack(self._opened), data[at + _SIZE.size : end], head)
            except InvalidTag:
                raise ProtocolError("a record that is not the server's") from None
            self._opened += 1
            at = end
            self._received(message)
        self._kept = data[at:]

    def _lose(self, reason: str) -> None:
        lost, self._lost = self._lost, None
        self._stream.close()
        if lost is not None:
            lost(reason)
