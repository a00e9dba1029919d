"""Many byte streams over one connection that carries whole messages: the channels of the boxes that a client holds.

A *lane* is one of them, the same at both ends. What was sent stays until the other end has said that it has it, so that a lane goes on over another
connection when the one that carries it breaks; how much may be on its way is bounded, so that a reader who stops holds up the writer and nobody else.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from struct import Struct

from untax.channel.handover import Resumed
from untax.core.errors import ProtocolError
from untax.core.stream import Receiver

MESSAGE, DATA, ACK, END, FERRIED = 0, 1, 2, 3, 4
"""The first byte of what is sent: a request or an answer, bytes of a lane, how many of them came, the end of a lane; an answer whose lane goes by another
connection (`untax.remote.ferried`)."""
HEAD = Struct("<BI")
_ACK = Struct("<BIQ")
WINDOW = 1 << 20
"""Bytes of one lane, each way, that may be on their way."""
_ACK_EVERY = WINDOW // 4
PIECE = 256 << 10

Send = Callable[[bytes], None]


class Lane:
    """A `ByteStream` whose bytes are carried by `send`, one message for each piece; None while there is no connection."""

    def __init__(self, number: int, send: Send | None, on_end: Callable[[Lane], None]) -> None:
        self.number = number
        self.resumed: Resumed | None = None
        """Where a channel over it goes on, once that is known to whoever gives the lane away."""
        self.is_quiet = False
        """Whether the other end is not told when this one closes it: of a lease that is given up by a request."""
        self._head = HEAD.pack(DATA, number)
        self._send = send
        self._on_end = on_end
        self._receiver: Receiver | None = None
        self._early: list[bytes] = []  # before somebody listened
        self._unseen: deque[bytes] = deque()  # sent, and not yet acknowledged
        self._base = 0  # where the first of them begins
        self._sent = 0
        self._seen = 0  # by the other end
        self._kept: deque[bytes] = deque()  # not yet sent
        self._kept_size = 0
        self._received = 0
        self._acknowledged = 0
        self._held_back: deque[bytes] | None = None  # while paused
        self._drained: list[asyncio.Future[None]] = []
        self.is_over = False

    # ---- as a ByteStream ----

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self.is_over:
            asyncio.get_running_loop().call_soon(receiver.connection_lost, None)
            return
        early, self._early = self._early, []
        for data in early:
            self._deliver(data)

    def write(self, data: bytes | memoryview) -> None:
        if self.is_over:
            return
        if not self._kept and len(data) <= PIECE and self._sent - self._seen + len(data) <= WINDOW:
            self._put(bytes(data))
            return
        for at in range(0, len(data), PIECE):
            self._kept.append(bytes(data[at : at + PIECE]))
        self._kept_size += len(data)
        self._pump()

    @property
    def write_buffer_size(self) -> int:
        return self._kept_size

    async def drain(self) -> None:
        if self._kept and not self.is_over:
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(drained)
            await drained

    def pause_reading(self) -> None:
        if self._held_back is None:
            self._held_back = deque()

    def resume_reading(self) -> None:
        held, self._held_back = self._held_back, None
        while held and self._held_back is None:
            self._deliver(held.popleft())
        if held and self._held_back is not None:
            self._held_back.extendleft(reversed(held))

    def close(self) -> None:
        """End it, as a rule at both ends."""
        if not self.is_over:
            if self._send is not None and not self.is_quiet:
                self._send(HEAD.pack(END, self.number))
            self.end(None)

    # ---- from the connection ----

    def data_received(self, data: bytes) -> None:
        """`ProtocolError` when the other end sends more than it may."""
        self._received += len(data)
        if self._received - self._acknowledged > WINDOW + PIECE:
            raise ProtocolError("more was sent over a channel than was asked for")
        self._deliver(data)

    def acknowledged(self, total: int) -> None:
        if not self._seen <= total <= self._sent:
            raise ProtocolError("bytes were acknowledged that were never sent")
        self._forget(total)
        self._pump()

    def end(self, exc: Exception | None) -> None:
        """The other end has ended it, or will never be heard of again."""
        if self.is_over:
            return
        self.is_over = True
        self._unseen.clear()
        self._kept.clear()
        self._kept_size = 0
        self._wake()
        self._on_end(self)
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(exc)

    # ---- when the connection changes ----

    @property
    def received(self) -> int:
        return self._received

    @property
    def is_untouched(self) -> bool:
        """Nothing went over it yet, either way."""
        return self._received == self._sent == 0 and not self._kept

    def suspend(self) -> None:
        """There is no connection for now."""
        self._send = None

    def resume(self, send: Send, seen: int) -> None:
        """Another connection carries it, and the other end has `seen` so many bytes of it."""
        if not self._seen <= seen <= self._sent:
            raise ProtocolError("a channel is taken up at a place where it never was")
        self._forget(seen)
        self._send = send
        skip = seen - self._base
        for data in list(self._unseen):
            if skip < len(data):
                send(self._head + data[max(0, skip) :])
            skip -= len(data)
        self._acknowledged = self._received  # it was told by the greeting
        self._pump()

    # ---- inside ----

    def _forget(self, total: int) -> None:
        """The other end has so many bytes."""
        self._seen = total
        while self._unseen and self._base + len(self._unseen[0]) <= total:
            self._base += len(self._unseen.popleft())

    def _put(self, data: bytes) -> None:
        self._sent += len(data)
        self._unseen.append(data)
        if self._send is not None:
            self._send(self._head + data)

    def _pump(self) -> None:
        while self._kept and self._send is not None and self._sent - self._seen + len(self._kept[0]) <= WINDOW:
            data = self._kept.popleft()
            self._kept_size -= len(data)
            self._put(data)
        if not self._kept:
            self._wake()

    def _deliver(self, data: bytes) -> None:
        if self._held_back is not None:
            self._held_back.append(data)
            return
        if self._receiver is None:
            self._early.append(data)
            return
        self._receiver.data_received(data)
        if self._received - self._acknowledged >= _ACK_EVERY and not self.is_over and self._held_back is None and self._send is not None:
            self._acknowledged = self._received
            self._send(_ACK.pack(ACK, self.number, self._received))

    def _wake(self) -> None:
        waiting, self._drained = self._drained, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


def read_ack(message: bytes) -> int:
    if len(message) != _ACK.size:
        raise ProtocolError("an acknowledgement that is none")
    total: int = _ACK.unpack(message)[2]
    return total
