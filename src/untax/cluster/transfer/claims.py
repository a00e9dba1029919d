"""Who builds what: one node of the fleet for each stage, by agreement and without anybody in the middle.

Every stage has an owner among the nodes, the same one whoever asks, by a hash of both. Whoever wants to build a stage claims it there
first; others who want it meanwhile wait there, and are told of its end. A claim is a connection: it ends with its holder, and when its
holder falls silent (a process that is stopped keeps its connections). The owner keeps nothing that could be lost: one that was asked
nothing yet grants the first claim, and whoever has that asks all nodes before it builds. When nodes come and go, or one falls silent,
two owners may each grant one, and a stage is built twice at worst.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

_HINTS = 4096  # stages of which is remembered who had them
_HOLDERS = 16  # nodes that are remembered for each

Outcome = Literal["granted", "there", "failed"]


def owners(key: str, nodes: Iterable[str]) -> list[str]:
    """All nodes, the one that owns `key` first, and whoever would if those before it were gone."""
    return sorted(nodes, key=lambda node: hashlib.sha256(f"{node}\0{key}".encode()).digest(), reverse=True)


@dataclass(frozen=True, slots=True)
class Verdict:
    outcome: Outcome
    holders: tuple[str, ...] = ()
    """Nodes that were said to have it, the latest first."""
    message: str = ""
    """Of the failure, with its log."""
    log: str = ""


class Ticket:
    """One claim, waiting or granted. `tell` is called, in any thread, when it was decided; it must not wait."""

    def __init__(self, key: str, node: str, tell: Callable[[], None]) -> None:
        self.key = key
        self.node = node
        self._tell = tell
        self.verdict: Verdict | None = None
        self.decided = threading.Event()

    def wait(self) -> Verdict:
        self.decided.wait()
        assert self.verdict is not None
        return self.verdict

    def decide(self, verdict: Verdict) -> None:
        self.verdict = verdict
        self.decided.set()
        self._tell()


class Claims:
    """What the owner knows. Every call returns at once, but for `Ticket.wait`."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._lines: dict[str, deque[Ticket]] = {}  # the first of each has the claim
        self._hints: OrderedDict[str, tuple[str, ...]] = OrderedDict()

    def claim(self, key: str, node: str, *, not_at: Iterable[str] = (), tell: Callable[[], None] = lambda: None) -> Ticket:
        """`not_at`: nodes that were said to have it and do not."""
        ticket = Ticket(key, node, tell)
        with self._guard:
            holders = self._without(key, {*not_at, node})
            if holders:
                ticket.decide(Verdict("there", holders))
                return ticket
            line = self._lines.setdefault(key, deque())
            line.append(ticket)
            if len(line) == 1:
                ticket.decide(Verdict("granted"))
        return ticket

    def there(self, key: str, nodes: Iterable[str]) -> None:
        """Some nodes have it: nobody who waits need wait any longer."""
        with self._guard:
            known = tuple(dict.fromkeys((*nodes, *self._hints.get(key, ()))))[:_HOLDERS]
            self._hints[key] = known
            self._hints.move_to_end(key)
            while len(self._hints) > _HINTS:
                self._hints.popitem(last=False)
            for ticket in self._waiting(key):
                ticket.decide(Verdict("there", known))

    def failed(self, ticket: Ticket, message: str, log: str) -> None:
        """The recipe itself failed: the same is true for all who wait, and kept for nobody who comes later."""
        with self._guard:
            if self._holds(ticket):
                for waiting in self._waiting(ticket.key):
                    waiting.decide(Verdict("failed", message=message, log=log))

    def leave(self, ticket: Ticket) -> None:
        """It is over, however it ended; the next in line has the claim. Safe to call twice."""
        with self._guard:
            line = self._lines.get(ticket.key)
            if line is None or ticket not in line:
                return
            was_first = line[0] is ticket
            line.remove(ticket)
            if not line:
                del self._lines[ticket.key]
            elif was_first:
                line[0].decide(Verdict("granted"))
        ticket.decided.set() if ticket.verdict is not None else ticket.decide(Verdict("failed", message="the claim was given up"))

    def close(self) -> None:
        """Everybody who waits may build for itself."""
        with self._guard:
            tickets = [ticket for line in self._lines.values() for ticket in line]
            self._lines.clear()
        for ticket in tickets:
            if ticket.verdict is None:
                ticket.decide(Verdict("granted"))

    def _holds(self, ticket: Ticket) -> bool:
        line = self._lines.get(ticket.key)
        return line is not None and line[0] is ticket

    def _waiting(self, key: str) -> list[Ticket]:
        """All but the one who has the claim; they leave the line."""
        line = self._lines.get(key)
        if line is None:
            return []
        waiting = list(line)[1:]
        self._lines[key] = deque([line[0]])
        return waiting

    def _without(self, key: str, nodes: set[str]) -> tuple[str, ...]:
        left = tuple(one for one in self._hints.get(key, ()) if one not in nodes)
        if left:
            self._hints[key] = left
        else:
            self._hints.pop(key, None)
        return left
