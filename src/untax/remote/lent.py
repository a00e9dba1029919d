"""Leases of a server whose channels are another engine's: `hosted:untax` makes its sandboxes of them.

The server's part of each lease (its life, its workers, its account) stays here; the stream goes to whoever runs actions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from untax.core.errors import ProtocolError
from untax.core.substrate import Facts
from untax.remote.box import RemoteBox
from untax.remote.engine import RemoteEngine
from untax.remote.lanes import Lane

if TYPE_CHECKING:
    from untax.channel.client import Channel
    from untax.channel.handover import Resumed
    from untax.core.stream import ByteStream
    from untax.leases import Request
    from untax.remote.connection import Reply


class _Elsewhere:
    """What a box has in the place of its channel."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane

    def stop_listening(self) -> None:
        pass  # that is whoever has a channel over it

    def close(self) -> None:
        """Whoever has a channel over it is told."""
        self._lane.close()


class LentBox(RemoteBox):
    """A lease whose `lane` somebody else speaks over. Of its own it does only what is asked of the server."""

    lane: Lane

    def __init__(self, engine: RemoteEngine, request: Request, lease_id: str, asked_ns: int, reply: Reply) -> None:
        super().__init__(engine, request, lease_id, asked_ns, reply)
        facts = reply.body.get("facts")
        if not isinstance(facts, Facts):
            self.end_by("the server did not say what commands find inside")
            raise ProtocolError("a lease without its facts: install the same release on both sides")
        self.facts = facts
        ledger = self.ledger
        self.served_by = "none" if ledger.hit is None else ledger.hit.kind
        """How the server's own pool had it."""
        self.came_s = ledger.total_s
        """From asking for it until it was there."""
        self.raised_s = sum(span.elapsed_ns for span in ledger.spans if span.name in ("create", "setup")) / 1e9
        """Of that, what the server's own substrate took."""

    def _channel_over(self, stream: ByteStream, resumed: Resumed) -> Channel:
        if not isinstance(stream, Lane):
            raise ProtocolError("a channel that is not carried by the connection")
        stream.resumed = resumed
        stream.is_quiet = True  # to the server it would look like the end of the sandbox
        self.lane = stream
        return cast("Channel", _Elsewhere(stream))

    async def provide_worker(self, user: str) -> None:
        await self._provide_worker(user)


class LentEngine(RemoteEngine):
    box_class: type[RemoteBox] = LentBox
    wants_facts = True
