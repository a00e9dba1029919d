"""Who waits in a pool: tickets, each in the line of its spec, whose turn it is, and when one is due."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from untax.core.stage import Stage
from untax.pool import events as ev

# After a start that failed: doubled each time, until one succeeds. Somebody waits for a ticket's, nobody for a refill's.
_FIRST_BACKOFF_S, MOST_BACKOFF_S, _MOST_REFILL_BACKOFF_S = 0.05, 1.0, 60.0
_FEWEST_SPECS = 64  # that are known before those that nothing is left of are forgotten


@dataclass(slots=True)
class Ticket:
    id: str
    seq: int
    asked_s: float
    deadline_s: float
    stages: tuple[Stage, ...]
    memory_mib: float
    tries: int = 0
    state: Literal["waiting", "binding", "done"] = "waiting"
    entry: str | None = None
    waited_for: str = ""


@dataclass(slots=True)
class Spec:
    """All that is known of one uppermost stage."""

    stage: Stage
    queue: list[tuple[int, Ticket]] = field(default_factory=list)
    waiting: int = 0
    making: int = 0
    leased: int = 0
    target: ev.Target | None = None
    failures: int = 0
    not_before_s: float = -math.inf
    no_refill_before_s: float = -math.inf

    @property
    def share(self) -> int:
        """What it has, counted so that nothing is one."""
        return 1 + self.leased + self.making

    def head(self) -> Ticket | None:
        while self.queue and self.queue[0][1].state != "waiting":
            heapq.heappop(self.queue)
        return self.queue[0][1] if self.queue else None


class Line:
    """Tickets and the specs that they are for. Which of them is served is the pool's business."""

    def __init__(self) -> None:
        self.specs: dict[str, Spec] = {}
        self.tickets: dict[str, Ticket] = {}
        """Those that are not done."""
        self.queued: dict[str, Spec] = {}
        """Those with somebody waiting."""
        self.failing: dict[str, Spec] = {}
        """Those whose last start failed."""
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._forget_at = _FEWEST_SPECS

    def spec(self, stage: Stage) -> Spec:
        found = self.specs.get(stage.key)
        if found is None:
            found = self.specs[stage.key] = Spec(stage)
        return found

    # ---- tickets ----

    def wait(self, ticket: Ticket) -> None:
        ticket.state = "waiting"
        spec = self.spec(ticket.stages[-1])
        heapq.heappush(spec.queue, (ticket.seq, ticket))
        spec.waiting += 1
        self.queued[spec.stage.key] = spec
        if ticket.deadline_s < math.inf:  # perhaps once more: it may have been passed over while it was binding
            heapq.heappush(self._deadlines, (ticket.deadline_s, ticket.seq, ticket))
        if len(self._deadlines) > 64 + 4 * len(self.tickets):
            self._deadlines = [item for item in self._deadlines if item[2].state != "done"]
            heapq.heapify(self._deadlines)

    def leave(self, ticket: Ticket) -> None:
        """It waits no longer."""
        ticket.state = "done"
        spec = self.spec(ticket.stages[-1])
        spec.waiting -= 1
        if not spec.waiting:
            del self.queued[spec.stage.key]
            spec.queue.clear()

    def finish(self, ticket: Ticket) -> None:
        ticket.state = "done"
        del self.tickets[ticket.id]

    def serve(self, now_s: float, serve_one: Callable[[Spec, Ticket], bool]) -> None:
        """Ask for the first of each spec, those before the others that have waited longest for their spec's share; one that was served gives its
        spec another turn, the rest keeps waiting.
        """
        turns = [_turn(spec, head, now_s) for spec in self.queued.values() if (head := spec.head()) is not None]
        heapq.heapify(turns)
        while turns:
            _, _, key = heapq.heappop(turns)
            spec = self.specs[key]
            head = spec.head()
            if head is not None and serve_one(spec, head) and (head := spec.head()) is not None:
                heapq.heappush(turns, _turn(spec, head, now_s))

    # ---- time ----

    def overdue(self, now_s: float) -> Iterator[Ticket]:
        """Those whose deadline has come, in whatever state; each is given once."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            yield heapq.heappop(self._deadlines)[2]

    def next_due_s(self, now_s: float) -> float:
        """When a deadline comes, or another attempt may be made; `math.inf` for never."""
        while self._deadlines and self._deadlines[0][2].state == "done":
            heapq.heappop(self._deadlines)
        due_s = self._deadlines[0][0] if self._deadlines else math.inf
        for spec in self.failing.values():
            if spec.waiting and spec.not_before_s > now_s:
                due_s = min(due_s, spec.not_before_s)
            if spec.target is not None and spec.no_refill_before_s > now_s:
                due_s = min(due_s, spec.no_refill_before_s)
        return due_s

    # ---- attempts ----

    def failed(self, spec: Spec, now_s: float) -> None:
        backoff_s = _FIRST_BACKOFF_S * 2**spec.failures
        spec.not_before_s = now_s + min(MOST_BACKOFF_S, backoff_s)
        spec.no_refill_before_s = now_s + min(_MOST_REFILL_BACKOFF_S, backoff_s)
        self.failing[spec.stage.key] = spec
        spec.failures = min(spec.failures + 1, 30)

    def succeeded(self, spec: Spec) -> None:
        spec.failures, spec.not_before_s, spec.no_refill_before_s = 0, -math.inf, -math.inf
        self.failing.pop(spec.stage.key, None)

    def hold_refill(self, spec: Spec, until_s: float) -> None:
        spec.no_refill_before_s = until_s
        self.failing[spec.stage.key] = spec

    def forget(self, now_s: float, idle_at: Callable[[str], int]) -> None:
        """Specs that nothing is left of, when there are many."""
        if len(self.specs) < self._forget_at:
            return
        for key, spec in list(self.specs.items()):
            is_in_use = spec.waiting or spec.making or spec.leased or spec.target or idle_at(key)
            if not is_in_use and spec.not_before_s <= now_s:
                del self.specs[key]
                self.failing.pop(key, None)
        self._forget_at = max(_FEWEST_SPECS, 2 * len(self.specs))


def _turn(spec: Spec, head: Ticket, now_s: float) -> tuple[float, int, str]:
    return (-(now_s - head.asked_s) / spec.share, head.seq, spec.stage.key)
