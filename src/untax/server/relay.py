"""Carries the bytes of a channel whose stream is not a descriptor that could be handed out: an exec session of an engine, a pod's."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from untax.channel.stream import SocketStream
from untax.core.stream import ByteStream

if TYPE_CHECKING:
    from untax.channel.client import Channel

_HIGH = 1 << 20  # unsent bytes above which the other side is not read from


class Relay:
    """Between `stream`, which `channel` received from so far, and a socket whose other end is the holder's."""

    def __init__(self, stream: ByteStream, sock: socket.socket, channel: Channel) -> None:
        self._cell = stream
        self._holder = SocketStream(sock)
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_closed = False
        # The stream goes on calling the channel, whose own business with it is over.
        channel.data_received = self._from_cell  # type: ignore[method-assign]
        channel.connection_lost = self._ended  # type: ignore[method-assign]
        self._holder.start(_FromHolder(self))
        stream.resume_reading()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._holder.close()
            self._cell.close()

    def from_holder(self, data: bytes) -> None:
        self._cell.write(data)
        self._hold_up(self._cell, self._holder)

    def _from_cell(self, data: bytes) -> None:
        self._holder.write(data)
        self._hold_up(self._holder, self._cell)

    def _hold_up(self, full: ByteStream, source: ByteStream) -> None:
        if full.write_buffer_size > _HIGH:
            source.pause_reading()
            self._begin(_resume(full, source))

    def _ended(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._begin(self._finish())

    async def _finish(self) -> None:
        """The cell has ended; what it said last is for the holder all the same."""
        await self._holder.drain()
        self.close()

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class _FromHolder:
    def __init__(self, relay: Relay) -> None:
        self._relay = relay

    def data_received(self, data: bytes) -> None:
        self._relay.from_holder(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._relay.close()


async def _resume(full: ByteStream, source: ByteStream) -> None:
    await full.drain()
    source.resume_reading()
