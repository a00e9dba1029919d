"""SocketStream: a `ByteStream` over a connected socket, without the set-up cost and copies of a transport."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import deque

from untax.core.stream import Receiver

RECEIVE_SIZE = 256 << 10  # one frame of data: fewer, larger reads when much is coming
# When little is coming: below malloc's first threshold for mmap (128 KiB). Above it a process pays for a map, a remap, an unmap and a page
# fault with every read, unless it happened to free something larger before: 37 against 18 µs for a ping.
RECEIVE_SMALL = 64 << 10


class SocketStream:
    """Owns `sock`. Reads when the loop says so; writes at once, and keeps only what the kernel does not take."""

    def __init__(self, sock: socket.socket, *, reads_soon: bool = False) -> None:
        """`reads_soon`: the loop hears of it in its next turn, for who has something more urgent to do than to wait for what comes."""
        sock.setblocking(False)
        self._reads_soon = reads_soon
        self._sock = sock
        self._fd = sock.fileno()
        self._recv = sock.recv
        self._send = sock.send
        self._receive_size = RECEIVE_SMALL
        self._receiver: Receiver | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._kept: deque[bytes | memoryview] = deque()
        self._kept_size = 0
        self._drained: list[asyncio.Future[None]] = []
        self._paused = False
        self._closed = False
        self._later: list[bytes | memoryview] | None = None  # written while writing is held

    def start(self, receiver: Receiver) -> None:
        self._loop = asyncio.get_running_loop()
        self._receiver = receiver
        if self._closed:
            self._loop.call_soon(receiver.connection_lost, None)
            return
        if self._reads_soon:
            self._loop.call_soon(self._begin_reading)
        else:
            self._begin_reading()
        if self._kept:
            self._loop.add_writer(self._fd, self._writable)

    def _begin_reading(self) -> None:
        if not self._paused and not self._closed:
            self._loop.add_reader(self._fd, self._readable)  # type: ignore[union-attr]

    def detach(self) -> socket.socket:
        """Give the socket to another owner, for example a `BlockingChannel`; the stream is closed without a word."""
        if self._loop is not None:
            if not self._paused:
                self._loop.remove_reader(self._fd)
            if self._kept:
                self._loop.remove_writer(self._fd)
        self._closed = True
        self._receiver = None
        self._wake()
        return self._sock

    def write(self, data: bytes | memoryview) -> None:
        if self._closed:
            return
        if self._later is not None:
            self._later.append(data)
            return
        if not self._kept:
            try:
                sent = self._send(data)
            except (BlockingIOError, InterruptedError):
                sent = 0
            except OSError as exc:
                self._lose_soon(exc)
                return
            if sent == len(data):
                return
            data = memoryview(data)[sent:]
            if self._loop is not None:
                self._loop.add_writer(self._fd, self._writable)
        self._kept.append(data)
        self._kept_size += len(data)

    @property
    def write_buffer_size(self) -> int:
        return self._kept_size

    async def drain(self) -> None:
        if self._kept and not self._closed:
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(drained)
            await drained

    def hold_writing(self) -> None:
        """What is written from now on is kept until `release_writing`; what was written before goes its way."""
        if self._later is None:
            self._later = []

    def release_writing(self, first: bytes) -> None:
        """Write `first`, and then what was kept."""
        later, self._later = self._later, None
        for data in (first, *(later or ())):
            self.write(data)

    def pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            if self._loop is not None and not self._closed:
                self._loop.remove_reader(self._fd)

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            if self._loop is not None and not self._closed:
                self._loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        if not self._closed:
            self._lose(None)

    def read_now(self) -> None:
        """Deliver what has come already, without waiting for the loop to say so."""
        if not self._closed and not self._paused:
            self._readable()

    def _readable(self) -> None:
        try:
            data = self._recv(self._receive_size)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._lose(exc)
            return
        self._receive_size = RECEIVE_SMALL if len(data) < RECEIVE_SMALL else RECEIVE_SIZE
        if data:
            self._receiver.data_received(data)  # type: ignore[union-attr]
        else:
            self._lose(None)

    def _writable(self) -> None:
        try:
            while self._kept:
                data = self._kept[0]
                sent = self._send(data)
                self._kept_size -= sent
                if sent < len(data):
                    self._kept[0] = memoryview(data)[sent:]
                    return
                self._kept.popleft()
        except (BlockingIOError, InterruptedError):
            return
        except OSError as exc:
            self._lose(exc)
            return
        self._loop.remove_writer(self._fd)  # type: ignore[union-attr]
        self._wake()

    def _lose_soon(self, exc: OSError) -> None:
        # The receiver is in the middle of a call of its own when it writes. What arrived before the loss is still read first:
        # an answer may be in it.
        if self._loop is not None:
            self._loop.call_soon(self._read_out, exc)

    def _read_out(self, exc: OSError) -> None:
        while not self._closed:
            try:
                data = self._recv(RECEIVE_SIZE)
            except OSError:
                data = b""
            if not data:
                self._lose(exc)
                return
            self._receiver.data_received(data)  # type: ignore[union-attr]

    def _lose(self, exc: Exception | None) -> None:
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            if not self._paused:
                self._loop.remove_reader(self._fd)
            if self._kept:
                self._loop.remove_writer(self._fd)
        self._kept.clear()
        self._kept_size = 0
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # a child may hold a copy of the descriptor
        self._sock.close()
        self._wake()
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(exc)

    def _wake(self) -> None:
        waiting, self._drained = self._drained, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
