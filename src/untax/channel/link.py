"""The caller's ends of what lasts longer than one answer: streams, watches, and streams that the cell asked for.

They belong to a `Channel`, which hands them their frames and tells them of changes.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from untax.channel import wire
from untax.channel.call import Call
from untax.channel.flow import EgressFlow, Flow, WatchFlow
from untax.channel.replies import Event

if TYPE_CHECKING:
    from untax.channel.client import Channel

T = TypeVar("T")

PIECE = 128 << 10  # of a body in one DATA frame: half a window, so that one is filled while the other is read


class Entry:
    """An open id: where its frames go and who is told."""

    __slots__ = ("call", "deadline", "parts", "waiters")

    def __init__(self, call: Call[Any], deadline: float) -> None:
        self.call = call
        self.deadline = deadline
        self.parts: list[int] | None = None  # of a batch: ids that end with it, answered or not
        self.waiters: list[asyncio.Future[None]] = []

    def wake(self) -> None:
        if self.waiters:
            waiters, self.waiters = self.waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


class Link(Generic[T]):
    """The caller's end of a flow."""

    def __init__(self, channel: Channel, request_id: int, entry: Entry, stream: Flow[T]) -> None:
        self.channel = channel
        self.flow = stream
        self._id = request_id
        self._entry = entry
        self._eof_sent = False
        self._cancelled = False

    async def receive(self) -> tuple[int, bytes] | None:
        """The next piece and its stream (1 stdout, 2 stderr), or None when nothing more will come."""
        while True:
            piece = self.flow.take()
            if piece is not None:
                if credit := self.flow.credit(self._id):
                    self.channel._write(credit)
                return piece
            if self.flow.is_ended or self._cancelled:
                return None
            await self.channel._changed(self._entry)

    def take_now(self) -> list[bytes]:
        """All that has come, of whatever stream, without waiting."""
        pieces = []
        while (piece := self.flow.take()) is not None:
            pieces.append(piece[1])
        if credit := self.flow.credit(self._id):
            self.channel._write(credit)
        return pieces

    async def send(self, data: bytes) -> None:
        """Send, waiting while the other side does not take it. `BrokenPipeError` once it takes no more."""
        view = memoryview(data)
        while view:
            if self.flow.finished or self._eof_sent or self._cancelled:
                raise BrokenPipeError("the other end is closed")
            if not self.flow.window:
                await self.channel._changed(self._entry)
                continue
            self.channel._check()
            piece = bytes(view[: min(self.flow.window, PIECE)])
            view = view[len(piece) :]
            self.flow.window -= len(piece)
            self.channel._write(wire.data(self._id, piece, eof=False))

    def send_eof(self) -> None:
        """Say that nothing more will be sent. Safe to call twice."""
        if not self._eof_sent and not self.flow.finished and not self._cancelled and not self.channel.is_lost:
            self.channel._write(wire.data(self._id, b"", eof=True))
        self._eof_sent = True

    async def wait(self) -> T:
        """The flow's result, once it has ended. Does not take what comes: someone must, or it never ends."""
        while not self.flow.finished:
            if self._cancelled:
                raise asyncio.CancelledError
            await self.channel._changed(self._entry)
        return self.flow.result(self.channel.sandbox_id)

    def kill(self) -> None:
        """Stop the flow inside; its result still comes."""
        if not self.flow.finished and not self._cancelled and not self.channel.is_lost:
            self.channel._write(wire.cancel(self._id))

    def cancel(self) -> None:
        """Stop the flow inside and forget it. Safe to call at any time."""
        self.channel._cancel(self._id, self._entry)
        self._cancelled = True


class EgressLink(Link[None]):
    """The host's end of a stream that the cell asked for: first `accept` or `deny` it."""

    flow: EgressFlow

    def accept(self) -> None:
        self.flow.started = True
        if not self.flow.finished and not self.channel.is_lost:
            self.channel._write(wire.frame(self._id, wire.EGRESS_OK, b""))

    def deny(self, status: int, message: str) -> None:
        if not self.flow.finished and not self.channel.is_lost:
            self.channel._write(wire.frame(self._id, wire.EGRESS_DENY, wire.u16(status) + wire.blob(message.encode())))
        self.channel._open.pop(self._id, None)
        self._cancelled = True

    def end(self) -> None:
        """Nobody serves it any more: tell the cell, and drop what still comes."""
        if self._cancelled or self.flow.finished:
            return
        if self.flow.started:
            self.send_eof()
            self.channel._cancel(self._id, self._entry)
        else:
            self.deny(502, "the host gave up")


class Watch:
    """Events below a path, as an asynchronous iterator; `close` ends it."""

    def __init__(self, channel: Channel, request_id: int, entry: Entry, call: WatchFlow) -> None:
        self._channel = channel
        self._id = request_id
        self._entry = entry
        self._call = call
        self._closed = False

    def __aiter__(self) -> Watch:
        return self

    async def __anext__(self) -> Event:
        while not self._call.events:
            if self._call.finished or self._closed:
                raise StopAsyncIteration
            await self._channel._changed(self._entry)
        return self._call.events.popleft()

    def take_now(self) -> list[Event]:
        """All that has come, without waiting."""
        events = list(self._call.events)
        self._call.events.clear()
        return events

    def close(self) -> None:
        self._closed = True
        self._channel._cancel(self._id, self._entry)

    async def __aenter__(self) -> Watch:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
