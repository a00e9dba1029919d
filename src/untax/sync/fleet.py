"""The fleet, blocking."""

from __future__ import annotations

import os
import threading
from typing import Any

from untax.cluster import terms, tickets
from untax.cluster.fleet import Fleet as AsyncFleet
from untax.cluster.node import NodeEngine
from untax.cluster.terms import Member, Refusal, Ticket
from untax.sync.direct import DirectRemoteBox, Threaded
from untax.sync.engine import Engine, _unwrapped
from untax.sync.loop import Loop
from untax.sync.snapshot import Snapshot


class DirectNodeEngine(Threaded, NodeEngine):
    box_class = DirectRemoteBox


class DirectFleet(Threaded, AsyncFleet):
    node_class = DirectNodeEngine

    def _made(self, member: Member, *, is_here: bool) -> NodeEngine:
        node = super()._made(member, is_here=is_here)
        assert isinstance(node, DirectNodeEngine)
        node.thread, node.threads = self.thread, self.threads
        return node


class Fleet(Engine):
    """As `untax.Fleet`: `with`, or `start()` and `aclose()`.

    A handle that was pickled, or that `current` gave, is one for all of its process: it begins by itself and lasts until `aclose`, so that the next task finds its connections.
    """

    _inner: DirectFleet

    def __init__(self, address: str = "auto", **options: Any) -> None:
        self._begin(DirectFleet(address, **options))
        self._is_shared = False
        self._starting = threading.RLock()

    @classmethod
    def current(cls, name: str = terms.DEFAULT_NAME) -> Fleet:
        """Inside a task or an actor of the cluster: its fleet. `UsageError` where there is none. Asks for its ticket until a lease was made by it in this process."""
        ticket, is_new = tickets.current(name)
        fleet = _shared_by(ticket)
        if is_new or fleet._loop is not None:
            return fleet
        return _shared_by(tickets.asked(name))  # of one that is not used nobody here would have heard that it is gone

    @classmethod
    def from_ticket(cls, text: str) -> Fleet:
        """The handle of this process for the fleet that gave the ticket."""
        return _shared(text)

    @property
    def members(self) -> tuple[Member, ...]:
        return self._inner.members

    @property
    def wanted(self) -> int:
        return self._inner.wanted

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        return self._inner.refusals

    def ledgers(self) -> tuple[dict[str, Any], ...]:
        return self._running().run(self._inner.ledgers())

    def copy(self, snapshot: Snapshot | str, node: str) -> Snapshot:
        """As `untax.Fleet.copy`."""
        loop = self._running()
        return Snapshot(loop, loop.run(self._inner.copy(_unwrapped(snapshot), node)))

    def ticket(self) -> str:
        return self._inner.ticket()

    def aclose(self) -> None:
        with _lock:
            for key in [key for key, fleet in _handles.items() if fleet is self]:
                del _handles[key]
        with self._starting:  # or what is about to begin would be nobody's to end
            super().aclose()

    close = aclose

    def __enter__(self) -> Fleet:
        if not self._is_shared:
            self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._is_shared:
            self.aclose()

    def __reduce__(self) -> tuple[Any, ...]:
        return _shared, (self.ticket(),)

    def _running(self) -> Loop:
        if self._is_shared and self._loop is None:
            with self._starting:  # and no lock of all handles: it may take as long as Ray does
                if self._loop is None:
                    self._start_shared()
        return super()._running()

    def _start_shared(self) -> None:
        """A start that fails is over, and not this handle: the next task of the process may find the cluster well."""
        is_new = self._inner._state == "new"
        try:
            self.start()
        except BaseException:
            if is_new:
                assert self._inner._ticket is not None
                self._begin(DirectFleet._of(self._inner._ticket))
            raise


_handles: dict[tuple[int, str, str], Fleet] = {}
_lock = threading.RLock()


def _shared(text: str) -> Fleet:
    return _shared_by(Ticket.from_json(text))


def _shared_by(ticket: Ticket) -> Fleet:
    with _lock:
        key = (os.getpid(), ticket.name, ticket.token)
        found = _handles.get(key)
        if found is None:
            found = _handles[key] = Fleet.__new__(Fleet)
            found._begin(DirectFleet._of(ticket))
            found._is_shared = True
            found._starting = threading.RLock()
        return found
