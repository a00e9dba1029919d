"""The stream that an engine holds open to a process: plain towards it, cut into labelled pieces from it."""

from __future__ import annotations

import asyncio
import socket

from untax.channel.stream import SocketStream
from untax.core.errors import ProtocolError
from untax.core.stream import Receiver

_HEADER = 8  # which stream, three zeros, and how many bytes in four, the highest first
_STDOUT = 1
_PLAIN = b"\1\0\0\0"
_SAID_MAX = 4096


class Pieces:
    """Cuts what arrives into pieces of the two streams. Pure: bytes in, `(is_output, bytes)` out. The engine is not trusted to get it right."""

    def __init__(self) -> None:
        self._head = b""
        self._left = 0
        self._is_output = True

    def feed(self, data: bytes) -> list[tuple[bool, bytes]]:
        is_fresh = not self._left and not self._head and len(data) > _HEADER
        if is_fresh and data[:4] == _PLAIN and int.from_bytes(data[4:_HEADER]) == len(data) - _HEADER:
            return [(True, data[_HEADER:])]  # nearly always: one answer in one piece
        found: list[tuple[bool, bytes]] = []
        at = 0
        while at < len(data):
            if not self._left:
                head = self._head + data[at : at + _HEADER - len(self._head)]
                at += len(head) - len(self._head)
                if len(head) < _HEADER:
                    self._head = head
                    break
                self._head = b""
                if head[0] > 2 or head[1:4] != b"\0\0\0":
                    raise ProtocolError("the engine's stream is not cut into pieces as it should be")
                self._is_output, self._left = head[0] == _STDOUT, int.from_bytes(head[4:])
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            found.append((self._is_output, piece))
        return found


class EngineStream:
    """A `ByteStream` to a process in a container; what it says on standard error is kept apart, as far as there is little of it."""

    def __init__(self, sock: socket.socket, early: bytes = b"") -> None:
        self._inner = SocketStream(sock)
        self._early = early
        self._pieces = Pieces()
        self._receiver: Receiver | None = None
        self.said = b""
        self.write = self._inner.write
        self.drain = self._inner.drain
        self.pause_reading = self._inner.pause_reading
        self.resume_reading = self._inner.resume_reading
        self.close = self._inner.close

    @property
    def write_buffer_size(self) -> int:
        return self._inner.write_buffer_size

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._early:
            asyncio.get_running_loop().call_soon(self.data_received, self._early)
        self._inner.start(self)

    def data_received(self, data: bytes) -> None:
        assert self._receiver is not None
        try:
            pieces = self._pieces.feed(data)
        except ProtocolError:
            self._inner.close()
            return
        for is_output, piece in pieces:
            if is_output:
                self._receiver.data_received(piece)
            else:
                self.said = (self.said + piece)[-_SAID_MAX:]

    def connection_lost(self, exc: Exception | None) -> None:
        assert self._receiver is not None
        self._receiver.connection_lost(exc)
