"""The caller's ends of streams and watches over a `BlockingChannel`."""

from __future__ import annotations

import queue
from time import monotonic
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from untax.channel import wire
from untax.channel.call import Call
from untax.channel.flow import Flow, WatchFlow
from untax.channel.handshake import Handshake
from untax.channel.link import PIECE
from untax.channel.replies import Event
from untax.core.errors import NotRun

if TYPE_CHECKING:
    from untax.channel.blocking import BlockingChannel

T = TypeVar("T")

FOREVER = float("inf")

Turn = queue.SimpleQueue[None]
"""Has an item when its one waiter shall look again. All C's: an interrupt within a `threading.Condition`, whose code is Python's, would leave the lock held or free a stranger's."""

NOBODY: frozenset[Turn] = frozenset()


class Entry:
    """An open id: where its frames go, and what its waiters sleep on while another thread reads."""

    __slots__ = ("call", "parts", "turns")

    def __init__(self, call: Call[Any] | Greeting) -> None:
        self.call = call
        self.parts: list[int] | None = None
        self.turns = NOBODY


class Greeting:
    """The frames of id 0."""

    __slots__ = ("handshake",)

    def __init__(self, handshake: Handshake) -> None:
        self.handshake = handshake

    @property
    def finished(self) -> bool:
        return self.handshake.done

    def feed(self, kind: int, payload: bytes) -> bool:
        self.handshake.take(kind, payload)
        return False


class BlockingLink(Generic[T]):
    """The caller's end of a flow. One thread may receive while another sends."""

    def __init__(self, channel: BlockingChannel, request_id: int, entry: Entry, stream: Flow[T]) -> None:
        self.channel = channel
        self.flow = stream
        self._id = request_id
        self._entry = entry
        self._eof_sent = False
        self._cancelled = False

    def receive(self, timeout_s: float | None = None) -> tuple[int, bytes] | None:
        """The next piece and its stream, or None when nothing more will come; `TimeoutError` after `timeout_s`."""
        channel, stream = self.channel, self.flow
        deadline = FOREVER if timeout_s is None else monotonic() + timeout_s
        while True:
            with channel._lock:
                piece = stream.take()
                credit = stream.credit(self._id) if piece is not None else b""
            if piece is not None:
                if credit:
                    channel._send(credit)
                return piece
            if stream.is_ended or self._cancelled:
                return None
            channel._wait(self._entry, lambda: stream.is_ended or stream.has_pieces or self._cancelled, deadline)

    def send(self, data: bytes) -> None:
        """Send, waiting while the other side does not take it. `BrokenPipeError` once it takes no more."""
        view = memoryview(data)
        stream = self.flow
        while view:
            self.channel._wait(self._entry, lambda: stream.window > 0 or stream.finished or self._cancelled, FOREVER)
            if stream.finished or self._eof_sent or self._cancelled:
                raise BrokenPipeError("the other end is closed")
            with self.channel._lock:
                piece = bytes(view[: min(stream.window, PIECE)])
                stream.window -= len(piece)
            view = view[len(piece) :]
            self.channel._send(wire.data(self._id, piece, eof=False))

    def send_eof(self) -> None:
        if not self._eof_sent and not self.flow.finished and not self._cancelled and not self.channel.is_lost:
            self.channel._send(wire.data(self._id, b"", eof=True))
        self._eof_sent = True

    def wait(self) -> T:
        """The flow's result, once it has ended; `NotRun` when another thread cancels it. Does not take what comes: someone must, or it never ends."""
        self.channel._wait(self._entry, lambda: self.flow.finished or self._cancelled, FOREVER)
        if not self.flow.finished:
            raise NotRun("cancelled")
        return self.flow.result(self.channel.sandbox_id)

    def kill(self) -> None:
        """Stop the flow inside; its result still comes."""
        if not self.flow.finished and not self._cancelled and not self.channel.is_lost:
            self.channel._send(wire.cancel(self._id))

    def cancel(self) -> None:
        """Stop the flow inside and forget it. Safe to call at any time."""
        self._cancelled = True
        self.channel._cancel(self._id, self._entry)


class BlockingWatch:
    """Events below a path; iterating waits for the next one, `close` ends it."""

    def __init__(self, channel: BlockingChannel, request_id: int, entry: Entry, call: WatchFlow) -> None:
        self._channel = channel
        self._id = request_id
        self._entry = entry
        self._call = call
        self._is_closed = False

    def __iter__(self) -> BlockingWatch:
        return self

    def __next__(self) -> Event:
        return self.next(None)

    def next(self, timeout_s: float | None) -> Event:
        """The next event; `TimeoutError` after `timeout_s`, `StopIteration` at the end."""
        deadline = FOREVER if timeout_s is None else monotonic() + timeout_s
        call = self._call
        self._channel._wait(self._entry, lambda: bool(call.events) or call.finished or self._is_closed, deadline)
        if not call.events:
            raise StopIteration
        return call.events.popleft()

    def close(self) -> None:
        self._is_closed = True
        self._channel._cancel(self._id, self._entry)

    def __enter__(self) -> BlockingWatch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
