"""One node of a fleet, as a client has it: the connection to its agent, over the Unix socket where both are on one node and over TLS elsewhere."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from untax.cluster.terms import Member, Ticket
from untax.cluster.trust import pinned
from untax.core.errors import UsageError
from untax.remote.address import socket_path
from untax.remote.boot import boot_id
from untax.remote.dial import Dialler, UnixDialler, WebDialler
from untax.remote.engine import RemoteEngine
from untax.remote.web import WebAddress

if TYPE_CHECKING:
    from untax.box import Box
    from untax.core.span import Clock
    from untax.leases import Request
    from untax.remote.box import RemoteBox


class NodeEngine(RemoteEngine):
    """A `RemoteEngine` of one member. Its messages name the node."""

    def __init__(self, member: Member, ticket: Ticket, *, is_here: bool, clock: Clock) -> None:
        super().__init__(f"unix:{member.socket}", clock=clock)
        self.member = member
        self.label = member.name
        """As ledgers and messages call the node."""
        self.on_over: Callable[[NodeEngine], object] | None = None
        """Told when it left and nothing of it is held any more."""
        self.is_favoured: Callable[[], bool] | None = None
        """Whether the next lease would go there again, by whoever places leases."""
        self._asking = 0
        self.is_here = is_here and member.boot_id is not None and member.boot_id == boot_id() and os.access(member.socket, os.W_OK)
        self._place: Dialler = UnixDialler(socket_path(self.url)) if self.is_here else WebDialler(_address(member, ticket))
        self._is_gone = False

    @property
    def is_usable(self) -> bool:
        return self._state == "running" and not self._is_gone and not self.member.is_draining

    @property
    def is_connected(self) -> bool:
        return self._connection is not None and self._connection.is_connected

    @property
    def wants_next(self) -> bool:
        return self.is_usable and self.is_favoured is not None and self.is_favoured()

    @property
    def load(self) -> int:
        """Leases of this client here, asked for or held."""
        return self._asking + len(self._boxes)

    async def fulfil(self, request: Request, *, may_refuse: bool = False, on_sent: Callable[[int], None] | None = None) -> RemoteBox:
        self._asking += 1
        try:
            return await super().fulfil(request, may_refuse=may_refuse, on_sent=on_sent)
        finally:
            self._asking -= 1
            self._end_if_over()

    @property
    def has_in_hand(self) -> bool:
        return self.is_usable and super().has_in_hand

    async def take_in_hand(self, request: Request, asked_ns: int) -> RemoteBox | None:
        self._asking += 1
        try:
            return await super().take_in_hand(request, asked_ns) if self.is_usable else None
        finally:
            self._asking -= 1
            self._end_if_over()

    def forget(self, box: Box) -> None:
        super().forget(box)
        self._end_if_over()

    def _is_needed(self) -> bool:
        return not self._is_gone or super()._is_needed()

    def left(self) -> None:
        """The node, or this agent of it, is not in the fleet any more. What still answers goes on; what does not is over."""
        self._is_gone = True
        if self._connection is not None:
            self._connection.on_lost = self._lost
            if not self._connection.is_connected:
                self._lost("")
        self._end_if_over()

    def _end_if_over(self) -> None:
        if self._is_gone and not self._boxes and not self._asking and self._state == "running":
            self._state = "closed"
            self._ending = asyncio.ensure_future(self._over())

    async def _over(self) -> None:
        if self._hand is not None:
            self._hand.close()
        if self._connection is not None:
            await self._connection.close()
        if self.on_over is not None:
            self.on_over(self)

    def _lost(self, reason: str) -> None:
        self._end_all(f"node {self.member.name} left the fleet{f' ({reason})' if reason else ''}")


def _address(member: Member, ticket: Ticket) -> WebAddress:
    parts = urlsplit(member.url)
    if parts.scheme != "https" or parts.hostname is None or parts.port is None:
        raise UsageError(f"node {member.name}: {member.url!r} is not the address of an agent")
    return WebAddress(parts.hostname, parts.port, True, token=ticket.token, tls=pinned(ticket.authority))
