"""One end of a channel, moved from one process to another in the middle of its life. No I/O of its own.

Whoever opened the channel, greeted and configured, stops reading at the end of a frame or within one, and says how far it was; whoever
goes on has the same stream and begins there. What lies unread in the socket stays there, what was read of an unfinished frame
travels along.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from untax.channel import wire
from untax.core.errors import BackendError, ProtocolError
from untax.core.stream import ByteStream

if TYPE_CHECKING:
    from untax.channel.client import Channel

_VERSION_MAX = 256


@dataclass(frozen=True, slots=True)
class Resumed:
    """How far a channel was when its holder changed."""

    cell_version: str
    next_id: int
    """The first request id that is certainly free."""
    kept: bytes = b""
    """The beginning of a frame whose rest is still to come."""

    def to_data(self) -> dict[str, Any]:
        data = {"major": wire.MAJOR, "minor": wire.MINOR, "cell": self.cell_version, "next_id": self.next_id}
        return {**data, "kept": self.kept} if self.kept else data  # which is rare

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Resumed:
        """`ProtocolError` for what is not one, or of another protocol than this process speaks."""
        major, cell, next_id, kept = data.get("major"), data.get("cell"), data.get("next_id"), data.get("kept", b"")
        if major != wire.MAJOR:
            raise ProtocolError(
                f"the server's channels speak protocol {major!r}, this client {wire.MAJOR}: install the same release on both sides"
            )
        if not isinstance(cell, str) or len(cell) > _VERSION_MAX or not isinstance(kept, bytes) or len(kept) > 4 + wire.FRAME_MAX_IN:
            raise ProtocolError("a channel was handed over without its state")
        if isinstance(next_id, bool) or not isinstance(next_id, int) or not 1 <= next_id <= wire.ID_MAX:
            raise ProtocolError(f"a channel was handed over at request {next_id!r}")
        return cls(cell, next_id, kept)


async def give(channel: Channel) -> tuple[ByteStream, Resumed]:
    """Stop using `channel` and give its stream away, paused; the channel refuses everything from here on.

    Nothing may be asked for at that moment. Streams that programs inside have open to the outside end here: who goes on serves
    the ones that come next.
    """
    channel._check()
    stream = channel._stream
    if channel._resuming is not None:
        await asyncio.wait([channel._resuming])  # it would have the reading go on behind our back
    stream.pause_reading()
    for task in channel._egress_tasks:
        task.cancel()
    while channel._egress_tasks:
        await asyncio.wait(channel._egress_tasks)
        await asyncio.sleep(0)  # their ends are said by callbacks of the tasks
    await stream.drain()
    channel._check()
    if any(not request_id & wire.EGRESS_BIT for request_id in channel._open):
        raise BackendError(channel.sandbox_id, "its channel cannot be handed over while actions are under way")
    return stream, channel._gone()
