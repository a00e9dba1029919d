"""Messages over a Unix socket, descriptors with them; the same for both ends."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import struct
from collections import deque
from collections.abc import Mapping
from typing import Any, Protocol

from untax.core.errors import ProtocolError
from untax.core.stream import ByteStream
from untax.remote.messages import MESSAGE_MAX, Body, Framer, decode, encode

_RECEIVE, _RECEIVE_SMALL = 256 << 10, 64 << 10  # as in `channel.stream`, and for its reasons
# As plain numbers: each use of the flags of `socket` is a call or two of `enum`'s.
_CLOEXEC, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC), int(socket.MSG_CTRUNC)
_ANCILLARY = socket.CMSG_SPACE(8 * array.array("i").itemsize)
_UCRED = struct.Struct("3i")
_NONE = -1
GREETING_MAX = 64 << 10
"""Bytes of a message from somebody who has not said who it is."""


class Receiver(Protocol):
    """Called in the event loop's thread."""

    def message_received(self, body: Body, fd: int | ByteStream | None) -> None:
        """A whole message; the descriptor, or the stream in the place of one, is the receiver's to close."""

    def connection_lost(self, reason: str) -> None:
        """Nothing more will come. Called once, not after a `close` of one's own."""


class MessageStream(Protocol):
    """What a transport offers. One that cannot pass descriptors carries what comes over them instead."""

    def start(self, receiver: Receiver) -> None: ...

    def send(self, body: Mapping[str, Any], fd: int | None = None) -> None:
        """Send or keep; never blocks. Ignored once it is closed. `fd` stays the caller's."""

    @property
    def unsent(self) -> int:
        """Bytes that the other end has not taken yet."""

    def close(self) -> None:
        """Without a word to the receiver. What was kept is sent as far as the other end takes it at once."""


class UnixStream:
    """Owns `sock`. The other end is dropped when more than `MESSAGE_MAX` lies unsent because it does not read."""

    def __init__(self, sock: socket.socket, *, is_known: bool = False) -> None:
        sock.setblocking(False)
        self._sock = sock
        self.is_known = is_known
        self._loop = asyncio.get_running_loop()
        self._receiver: Receiver | None = None
        self._framer = Framer(lambda: MESSAGE_MAX if self.is_known else GREETING_MAX)
        self._fds: deque[int] = deque()
        self._kept: deque[tuple[memoryview, int | None]] = deque()
        self._kept_size = 0
        self._came = 0  # bytes, so far
        self._receive_size = _RECEIVE_SMALL
        self._is_closed = False

    @property
    def peer(self) -> tuple[int, int]:
        """The process and user at the other end, as the kernel saw them when it connected or began to listen."""
        pid, uid, _ = _UCRED.unpack(self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
        return pid, uid

    @property
    def unsent(self) -> int:
        return self._kept_size

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        self._loop.add_reader(self._sock, self._readable)

    def send(self, body: Mapping[str, Any], fd: int | None = None) -> None:
        data = memoryview(encode(body, 0 if fd is None else 1))
        if self._is_closed:
            return
        if self._kept:
            self._keep(data, fd)
            return
        try:
            sent = self._send(data, fd)
        except OSError as exc:
            self._loop.call_soon(self._read_out, f"the connection broke: {exc.strerror}")
            return
        if sent < len(data):
            self._keep(data[sent:], fd if sent == 0 else None)
            self._loop.add_writer(self._sock, self._writable)

    def close(self) -> None:
        self._receiver = None
        self._end()

    # ---- inside ----

    def _send(self, data: memoryview, fd: int | None) -> int:
        try:
            if fd is None:
                return self._sock.send(data)
            return self._sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        except (BlockingIOError, InterruptedError):
            return 0

    def _keep(self, data: memoryview, fd: int | None) -> None:
        self._kept.append((data, None if fd is None else os.dup(fd)))
        self._kept_size += len(data)
        if self._kept_size > MESSAGE_MAX:
            self._loop.call_soon(self._lose, "it does not read what is sent to it")

    def _writable(self) -> None:
        try:
            while self._kept:
                data, fd = self._kept[0]
                sent = self._send(data, fd)
                if sent == 0:
                    return
                if fd is not None:
                    os.close(fd)
                self._kept_size -= sent
                if sent < len(data):
                    self._kept[0] = (data[sent:], None)
                    return
                self._kept.popleft()
        except OSError as exc:
            self._read_out(f"the connection broke: {exc.strerror}")
            return
        self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data, ancillary, flags, _ = self._sock.recvmsg(self._receive_size, _ANCILLARY, _CLOEXEC)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._lose(f"the connection broke: {exc.strerror}")
            return
        for level, kind, content in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                fds = array.array("i")
                fds.frombytes(content[: len(content) - len(content) % fds.itemsize])
                self._fds.extend(fds)
        if flags & _TRUNCATED:
            self._fds.append(_NONE)  # it was sent, and this process can have no more of them: whoever waits for it is told
        self._receive_size = _RECEIVE_SMALL if len(data) < _RECEIVE_SMALL else _RECEIVE
        if not data:
            self._lose("the other end hung up")
        else:
            self._came += len(data)
            self._take(data)

    def _read_out(self, reason: str) -> None:
        """The other end takes nothing more. What it said last, perhaps why, is read all the same."""
        before = -1
        while not self._is_closed and before != self._came:
            before = self._came
            self._readable()
        self._lose(reason)

    def _take(self, data: bytes) -> None:
        try:
            for message in self._framer.feed(data):
                body, descriptors = decode(message)
                if descriptors > len(self._fds):
                    raise ProtocolError("a message without its descriptor")
                taken = self._fds.popleft() if descriptors else _NONE
                fd = None if taken == _NONE else taken
                if self._receiver is None:
                    if fd is not None:
                        os.close(fd)
                    return
                self._receiver.message_received(body, fd)
        except ProtocolError as exc:
            self._lose(f"nonsense was received: {exc}")
            return
        if len(self._fds) > 8:
            self._lose("nonsense was received: descriptors that belong to no message")

    def _lose(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._end()
        if receiver is not None:
            receiver.connection_lost(reason)

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        self._loop.remove_writer(self._sock)
        for fd in (*self._fds, *(fd for _, fd in self._kept if fd is not None)):
            if fd != _NONE:
                os.close(fd)
        self._fds.clear()
        self._kept.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a fork of this process may hold a copy
        self._sock.close()
