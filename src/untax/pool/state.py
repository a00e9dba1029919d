"""What a pool does next: events in, orders out, without I/O and without a clock of its own.

`events` says what there is of both and which event answers which order. What holds after every event:

- a sandbox is leased to one ticket at most, and one that is dirty, dead or being destroyed to none;
- sandboxes that are idle, leased, being made and being destroyed together stay within the budget, and what is being started
  (a sandbox that is made, stages that are added) within the cap that `admission` has found, upgrades and builds within half of it;
- tickets with the same stages are handed out in the order in which they came. Between specs goes first who has waited longest
  in proportion to what its spec has already: a flood of one spec delays another by its share, and never for good;
- a ticket is handed out, refused or withdrawn by its deadline, as long as `Tick`s come when they are due.

Who a sandbox is for is decided when it is there, not when it is ordered. Refills come after all tickets and leave a place free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal

from untax.core.stage import Stage
from untax.pool import events as ev
from untax.pool.admission import Admission
from untax.pool.costs import Costs
from untax.pool.line import MOST_BACKOFF_S, Line, Spec, Ticket
from untax.pool.placement import Choice, choose
from untax.pool.policy import Policy, Standing
from untax.pool.starts import Start, Starts
from untax.pool.stock import Entry, Stock

# A ticket takes the room of what another waits for only when it has waited longer than that one, in proportion to what their
# specs have, by ten times what its own start takes, and by no more than a second: replacing sandboxes is then a tenth of the work.
_PATIENCE, _MOST_PATIENCE_S = 10.0, 1.0
_AT_ONCE = "idle with everything in place"


class Pool:
    """The whole state of one node's pool. `handle` is its only verb."""

    def __init__(self, policy: Policy | None = None, costs: Costs | None = None) -> None:
        self.policy = policy if policy is not None else Policy()
        self.costs = costs if costs is not None else Costs()
        if self.policy.entries < 1 or not self.policy.memory_mib > 0:
            raise ValueError("a pool holds at least one sandbox")
        if self.policy.fewest_starting < 2:
            raise ValueError("fewest_starting is at least 2: one for what takes long, one for what does not")
        self.admission = Admission(first=self.policy.first_starting, floor=self.policy.fewest_starting, ceiling=self.policy.most_starting)
        self._stock = Stock(entries=self.policy.entries, memory_mib=self.policy.memory_mib)
        self._starts = Starts(self.admission, self.costs, shares_stages=self.policy.shares_stages)
        self._line = Line()
        self._specs, self._tickets, self._queued = self._line.specs, self._line.tickets, self._line.queued
        self._targets: dict[str, Spec] = {}  # those with a target
        self._cut_off: dict[str, str] = {}  # tickets that were refused during an upgrade, and the sandbox that is still theirs
        self._unkept: frozenset[str] = frozenset()
        self._trim_due_s = math.inf
        self._calm_at_s = -math.inf
        self._is_calming = False  # whether a refill waits for that
        self._now_s = -math.inf
        self._seq = 0
        self._orders: list[ev.Order] = []
        self._is_closed = False
        # What the tickets before the one that is being looked at need and could not get yet: not to be taken by those after it.
        self._claimed = 0
        self._claimed_mib = 0.0
        self._handlers: dict[type, Callable[..., None]] = {
            ev.Asked: self._asked,
            ev.Withdrawn: self._withdrawn,
            ev.Made: self._made,
            ev.Failed: self._failed,
            ev.Abandoned: self._abandoned,
            ev.Bound: self._bound,
            ev.Rejected: self._rejected,
            ev.Returned: self._returned,
            ev.Died: self._died,
            ev.Gone: self._gone,
            ev.Stored: lambda event: self._stock.stored(event.key),
            ev.Evicted: lambda event: self._stock.evicted(event.key),
            ev.Unkept: self._now_unkept,
            ev.Resized: self._resized,
            ev.Pressed: self._pressed,
            ev.Tick: lambda _: None,
            ev.Closed: self._closed,
        }

    # ---- the interface ----

    def handle(self, event: ev.Event) -> list[ev.Order]:
        """What is to be done now. `ValueError` for an event that answers no order and names nothing that is known."""
        self._orders = []
        if event.now_s > self._now_s:
            self._now_s = event.now_s
        if type(event) is ev.Asked and self._hand_out_at_once(event):
            return self._orders  # whatever else is due comes with `Bound`, when the holder waits no longer
        self._handlers[type(event)](event)
        self._claimed, self._claimed_mib = 0, 0.0
        if self._queued:
            self._line.serve(self._now_s, self._serve_one)
        self._expire()
        if not self._is_closed:
            if self._trim_due_s <= self._now_s:
                self._trim()
            if self._targets:
                self._refill()
        self._line.forget(self._now_s, self._stock.idle_at)
        return self._orders

    def next_due_s(self) -> float:
        """When a `Tick` is due at the latest, if nothing happens before; `math.inf` for never."""
        due = min(self._trim_due_s, self._calm_at_s) if self._is_calming else self._trim_due_s
        return min(due, self._line.next_due_s(self._now_s))

    @property
    def starting(self) -> int:
        return len(self._starts)

    @property
    def size(self) -> int:
        """Sandboxes that there are, in whatever state, with those that are being made."""
        return len(self._stock)

    @property
    def memory_mib(self) -> float:
        return self._stock.memory_mib

    @property
    def waiting(self) -> int:
        return sum(spec.waiting for spec in self._queued.values())

    @property
    def leased(self) -> int:
        return self._stock.leased

    @property
    def room(self) -> tuple[float, float]:
        """How many sandboxes and MiB more could be leased without waiting for one that is: beside those who wait already."""
        entries, memory_mib = self._stock.room
        if not self._queued:
            return entries, memory_mib
        waiting = [ticket.memory_mib for ticket in self._tickets.values() if ticket.state == "waiting"]
        return entries - len(waiting), memory_mib - sum(waiting)

    def has_room_for(self, stages: tuple[Stage, ...], memory_mib: float) -> bool:
        """Whether a lease of this would not have to wait until another has ended."""
        if self.at_once(stages, memory_mib) is not None:
            return True
        entries, free_mib = self.room
        return entries >= 1 and memory_mib <= free_mib

    def idle_by_key(self) -> dict[str, int]:
        """As `idle_at`, of all stages that have any."""
        return self._stock.idle_by_key()

    def building(self) -> dict[str, float]:
        """Keys of the stages that are being put in place for all, and since when."""
        return self._starts.building()

    def idle_at(self, key: str) -> int:
        """Idle sandboxes with this stage uppermost."""
        return self._stock.idle_at(key)

    def at_once(self, stages: tuple[Stage, ...], memory_mib: float) -> Entry | None:
        """What whoever asks for this now is handed without waiting: nobody waits, and it is idle with everything in place."""
        if self._queued or self._is_closed or not stages:
            return None
        entry = self._stock.newest_idle(stages[-1].key)
        return entry if entry is not None and memory_mib <= entry.memory_mib else None

    def is_coming(self, stages: tuple[Stage, ...]) -> bool:
        """Whether one with all of these in place is being made that nobody waits for."""
        spec = self._specs.get(stages[-1].key)
        return spec is not None and spec.making > spec.waiting and not self._is_closed

    def is_idle(self, name: str) -> bool:
        entry = self._stock.get(name)
        return entry is not None and entry.state == "idle"

    def is_wanted(self, order: int) -> bool:
        """Whether somebody waits for what is being made by this order, or a target asks for it."""
        create = self._starts[order].create
        assert create is not None
        spec = self._line.spec(create.stages[-1])
        target = spec.target.count if spec.target else 0
        return spec.making <= spec.waiting + max(0, target - self._stock.idle_at(spec.stage.key))

    def is_short(self, stage: Stage) -> bool:
        """Whether one more idle at this stage would be taken or kept."""
        spec = self._specs.get(stage.key)
        if spec is None:
            return False
        return bool(spec.waiting) or (spec.target is not None and self._stock.idle_at(stage.key) + spec.making < spec.target.count)

    def standings(self) -> list[Standing]:
        return [
            Standing(spec.stage, self._stock.idle_at(key), spec.leased, spec.making, spec.waiting, spec.target.count if spec.target else 0)
            for key, spec in self._specs.items()
        ]

    # ---- what happened ----

    def _hand_out_at_once(self, event: ev.Asked) -> bool:
        """The usual case of a warm pool, in as few steps as it takes: nobody waits, and one with everything in place is idle."""
        stages = event.stages
        entry = self.at_once(stages, event.memory_mib)
        if entry is None or event.ticket in self._tickets:
            return False
        spec = self._specs[entry.stage.key]
        self._seq += 1
        ticket = Ticket(event.ticket, self._seq, self._now_s, event.deadline_s, stages, event.memory_mib, 0, "binding", entry.id)
        self._tickets[ticket.id] = ticket
        spec.leased += 1
        self._orders.append(ev.HandOut(ticket.id, entry.id, (), "exact", 0.0, "", _AT_ONCE, entry.stage))
        self._stock.lend(entry, ticket.id, stages, more_mib=0.0, is_upgraded=False)
        if not event.is_ahead:
            self._calm_at_s = self._now_s + self.policy.calm_s
        return True

    def _asked(self, event: ev.Asked) -> None:
        if event.ticket in self._tickets:
            raise ValueError(f"ticket {event.ticket!r} has been given already")
        if not event.stages:
            raise ValueError("a ticket names at least one stage")
        self._seq += 1
        ticket = Ticket(event.ticket, self._seq, self._now_s, event.deadline_s, event.stages, event.memory_mib)
        self._tickets[ticket.id] = ticket
        if self._is_closed:
            self._refuse(ticket, "the pool is closed", "closed")
        elif event.memory_mib > self.policy.memory_mib:
            self._refuse(ticket, f"needs {event.memory_mib:g} MiB, and the pool holds {self.policy.memory_mib:g} in all", "too_large")
        else:
            self._line.wait(ticket)

    def _withdrawn(self, event: ev.Withdrawn) -> None:
        ticket = self._tickets.get(event.ticket)
        if ticket is not None and ticket.state == "waiting":
            self._line.leave(ticket)
            self._line.finish(ticket)

    def _made(self, event: ev.Made) -> None:
        if self._stock.get(event.entry) is not None:
            raise ValueError(f"{event.entry!r} is there already")
        start, create = self._end_create(event.order)
        self._starts.measured(start, self._now_s)
        spec = self._line.spec(create.stages[-1])
        self._line.succeeded(spec)
        if self.policy.shares_stages:
            for stage in create.stages:
                self._stock.stored(stage.key)
        entry = Entry(event.entry, create.stages, create.stages[-1], create.memory_mib)
        entry.order, entry.ordered_s, entry.for_ticket = create.order, start.since_s, create.ticket is not None
        self._stock.add(entry)
        if self._is_closed:
            self._destroy(entry, "the pool is closed")
        else:
            self._park(entry)

    def _failed(self, event: ev.Failed) -> None:
        _, create = self._end_create(event.order)
        self._line.failed(self._line.spec(create.stages[-1]), self._now_s)
        if not event.is_retryable:
            self._refuse_all_that_need(event.stage or create.stages[-1].key, event.why)
        elif create.ticket is not None and (ticket := self._tickets.get(create.ticket)) is not None and ticket.state == "waiting":
            self._charge(ticket, event.why)

    def _abandoned(self, event: ev.Abandoned) -> None:
        self._end_create(event.order)

    def _bound(self, event: ev.Bound) -> None:
        ticket = self._tickets.get(event.ticket)
        if ticket is None:
            return  # refused at its deadline just before: what it has comes back with `Returned`
        if ticket.state != "binding":
            raise ValueError(f"ticket {event.ticket!r} has not been handed anything")
        assert ticket.entry is not None
        self._end_upgrade(ticket, is_done=True)
        self._line.finish(ticket)

    def _rejected(self, event: ev.Rejected) -> None:
        ticket = self._tickets.get(event.ticket)
        if ticket is None:
            if (name := self._cut_off.get(event.ticket)) is not None:
                self._give_back(self._stock[name])
                self._destroy(self._stock[name], event.why)
            return
        if ticket.state != "binding":
            raise ValueError(f"ticket {event.ticket!r} has not been handed anything")
        assert ticket.entry is not None
        entry = self._stock[ticket.entry]
        # One that was idle before the ticket came is no attempt: there may be many of them, and each that dies is gone now. What was
        # made since is one, so that sandboxes that all die when they are handed out do not keep a ticket for ever.
        was_parked = (entry.order is None or entry.since_s < ticket.asked_s) and ticket.id not in self._starts
        self._end_upgrade(ticket, is_done=False)
        ticket.entry = None
        self._give_back(entry)
        self._destroy(entry, event.why)
        if self._is_closed:
            self._refuse(ticket, "the pool is closed", "closed")
            return
        self._line.wait(ticket)
        if not event.is_retryable:
            self._refuse_all_that_need(event.stage or ticket.stages[-1].key, event.why)
        elif not was_parked:
            self._charge(ticket, event.why)

    def _returned(self, event: ev.Returned) -> None:
        entry = self._stock.get(event.entry)
        if entry is None or entry.state != "leased":
            raise ValueError(f"{event.entry!r} is not leased")
        self._give_back(entry)
        stage = None if entry.is_upgraded else entry.stage
        if event.at is not None:
            stage = next((stage for stage in entry.stages if stage.key == event.at), None)
        if entry.is_dead:
            self._destroy(entry, "it died while it was leased")
        elif not event.clean:
            self._destroy(entry, "it was not proven clean")
        elif self.policy.reuse == "single":
            self._destroy(entry, "each sandbox is used once")
        elif stage is None:
            self._destroy(entry, "it was changed, and which stage it stands on now is not known")
        elif self._is_closed:
            self._destroy(entry, "the pool is closed")
        else:
            entry.stage, entry.order, entry.is_upgraded = stage, None, False
            self._park(entry)

    def _died(self, event: ev.Died) -> None:
        entry = self._stock.get(event.entry)
        if entry is None or entry.state == "leaving":
            return
        if entry.state == "leased":
            entry.is_dead = True
        else:
            self._destroy(entry, "it died while it was idle")

    def _gone(self, event: ev.Gone) -> None:
        entry = self._stock.get(event.entry)
        if entry is None or entry.state != "leaving":
            raise ValueError(f"{event.entry!r} is not being destroyed")
        self._stock.gone(entry)

    def _now_unkept(self, event: ev.Unkept) -> None:
        self._unkept = event.keys

    def _resized(self, event: ev.Resized) -> None:
        for spec in self._targets.values():
            spec.target = None
        self._targets = {}
        for target in event.targets:
            if target.count > 0:
                spec = self._line.spec(target.stages[-1])
                spec.target = target
                self._targets[spec.stage.key] = spec
        self._trim_due_s = self._now_s

    def _pressed(self, _: ev.Pressed) -> None:
        """Those above their target go first, then those that have been idle for longest. Images are in use by too many to go."""
        keeping = [entry for entry in self._stock.all_idle() if entry.stage.name in ("repo", "deps")]
        if keeping:
            least = min(keeping, key=lambda entry: (self._surplus(self._line.spec(entry.stage)) <= 0, entry.since_s))
            self._line.hold_refill(self._line.spec(least.stage), self._now_s + MOST_BACKOFF_S)  # not at once again
            self._destroy(least, "the store has no room for another stage while it stands on its own")

    def _closed(self, _: ev.Closed) -> None:
        self._is_closed = True
        for ticket in [ticket for ticket in self._tickets.values() if ticket.state == "waiting"]:
            self._line.leave(ticket)
            self._refuse(ticket, "the pool is closed", "closed")
        for entry in self._stock.all_idle():
            self._destroy(entry, "the pool is closed")

    # ---- tickets ----

    def _serve_one(self, spec: Spec, ticket: Ticket) -> bool:
        """Whether something was done, so that the spec may have another turn; if not, what the ticket waits for is noted."""
        if self._stock.idle_at(spec.stage.key):
            return self._hand_out(ticket, choose(ticket.stages[-1:], self._stock.fleet, self.costs, can_create=False))
        if spec.making >= spec.waiting:
            ticket.waited_for = "a sandbox that was being made"
            return False
        if ticket.deadline_s <= self._now_s:
            return False  # whatever is begun now comes too late
        if spec.not_before_s > self._now_s:
            ticket.waited_for = "another attempt, after one that failed"
            return False
        if self._starts.free <= 0:
            ticket.waited_for = "a place among those that start"
            return False
        if not self._stock.idle and not self._has_room(1, ticket.memory_mib):
            self._claim(ticket, 1, ticket.memory_mib)
            return False
        self._stock.set_load(self._starts.load)
        choice = choose(ticket.stages, self._stock.fleet, self.costs, can_take=self.policy.upgrades_in_place)
        assert choice is not None  # the only node is open
        if choice.entry is None and not self._has_room(1, ticket.memory_mib):
            idle = choose(ticket.stages, self._stock.fleet, self.costs, can_create=False)
            if idle is None or idle.expected_s > choice.expected_s + self.costs.of("reset"):
                self._make_room(ticket, choice)
                return False
            choice = idle
        if (busy := self._starts.in_the_way(choice.missing)) is not None:
            ticket.waited_for = busy
            return False
        if choice.entry is not None:
            return self._hand_out(ticket, choice)
        ticket.waited_for = "the sandbox that was made for it"
        self._create(ticket.stages, ticket, choice, ticket.memory_mib)
        return spec.making < spec.waiting  # the others of the spec, as far as there is room

    def _hand_out(self, ticket: Ticket, choice: Choice | None) -> bool:
        assert choice is not None and choice.entry is not None and choice.start is not None
        entry = self._stock[choice.entry]
        more_mib = max(0.0, ticket.memory_mib - entry.memory_mib)
        if more_mib and not self._has_room(0, more_mib):
            self._make_room(ticket, choice, entries=0, memory_mib=more_mib, but=entry.id)
            return False
        self._line.leave(ticket)
        self._line.spec(ticket.stages[-1]).leased += 1
        is_cold = not choice.missing and entry.for_ticket and entry.order is not None and entry.ordered_s >= ticket.asked_s
        kind: ev.Kind = "cold" if is_cold else choice.kind if choice.missing else "exact"
        waited_s = self._now_s - ticket.asked_s
        why = "created while it waited" if is_cold else choice.why
        waited_for = (ticket.waited_for or "those who came before it") if waited_s > 0 else ""
        order = entry.order if is_cold else None
        self._orders.append(ev.HandOut(ticket.id, entry.id, choice.missing, kind, waited_s, waited_for, why, entry.stage, order))
        self._stock.lend(entry, ticket.id, ticket.stages, more_mib=more_mib, is_upgraded=bool(choice.missing))
        ticket.state, ticket.entry = "binding", entry.id
        self._calm_at_s = self._now_s + self.policy.calm_s
        if choice.missing:
            self._starts.begin(ticket.id, self._now_s, choice.missing, None)
        return True

    def _create(self, stages: tuple[Stage, ...], ticket: Ticket | None, choice: Choice, memory_mib: float) -> None:
        self._seq += 1
        create = ev.Create(self._seq, stages, ticket.id if ticket else None, choice.start, choice.missing, choice.why, memory_mib)
        self._line.spec(stages[-1]).making += 1
        self._stock.order(memory_mib)
        self._starts.begin(create.order, self._now_s, choice.missing, create)
        self._orders.append(create)

    def _expire(self) -> None:
        for ticket in self._line.overdue(self._now_s):
            waited_s = self._now_s - ticket.asked_s
            if ticket.state == "waiting":
                self._line.leave(ticket)
                self._refuse(ticket, f"nothing became free in {waited_s:.3g} s; {self._doing(ticket)}", "deadline")
            elif ticket.state == "binding" and ticket.id in self._starts:
                missing = ", ".join(stage.name for stage in self._starts[ticket.id].missing)
                self._end_upgrade(ticket, is_done=False)
                assert ticket.entry is not None
                self._cut_off[ticket.id] = ticket.entry
                self._refuse(ticket, f"adding the missing stages ({missing}) was not done within {waited_s:.3g} s", "deadline")

    def _doing(self, ticket: Ticket) -> str:
        spec = self._line.spec(ticket.stages[-1])
        return (
            f"{self.size} sandboxes of at most {self.policy.entries}, {len(self._starts)} starting of at most "
            f"{self.admission.cap}, {spec.making} of them for this spec, {spec.waiting} still waiting for it"
        )

    def _charge(self, ticket: Ticket, why: str) -> None:
        ticket.tries += 1
        if ticket.tries >= self.policy.tries:
            self._line.leave(ticket)
            self._refuse(ticket, f"{why} (tried {ticket.tries} times)", "failed")

    def _refuse_all_that_need(self, key: str, why: str) -> None:
        for ticket in [t for t in self._tickets.values() if t.state == "waiting" and any(stage.key == key for stage in t.stages)]:
            self._line.leave(ticket)
            self._refuse(ticket, why, "failed")

    def _refuse(self, ticket: Ticket, why: str, reason: Literal["deadline", "failed", "too_large", "closed"]) -> None:
        self._orders.append(ev.Refuse(ticket.id, why, reason))
        self._line.finish(ticket)

    # ---- room ----

    def _has_room(self, entries: int, memory_mib: float) -> bool:
        """Beside what is claimed by those who come before."""
        return self._stock.has_room(self._claimed + entries, self._claimed_mib + memory_mib)

    def _claim(self, ticket: Ticket, entries: int, memory_mib: float) -> None:
        ticket.waited_for = "room"
        self._claimed += entries
        self._claimed_mib += memory_mib

    def _make_room(
        self, ticket: Ticket, choice: Choice, *, entries: int = 1, memory_mib: float | None = None, but: str | None = None
    ) -> None:
        """Destroy what is idle and least missed, as far as what is being destroyed already is not enough, and keep the room."""
        self._claim(ticket, entries, ticket.memory_mib if memory_mib is None else memory_mib)
        victims = self._victims(ticket, min(_PATIENCE * choice.expected_s, _MOST_PATIENCE_S), but)
        while not self._stock.has_room(self._claimed, self._claimed_mib, in_time=True):
            victim = next(victims, None)
            if victim is None:
                return
            self._destroy(victim, f"its room is needed for a sandbox with the {ticket.stages[-1].name} stage of another spec")

    def _victims(self, ticket: Ticket, patience_s: float, but: str | None) -> Iterator[Entry]:
        """Idle sandboxes: those above their target first, then those that are not all that keeps a stage here, then by how long they
        have been idle.
        """

        def rank(entry: Entry) -> tuple[bool, bool, float]:
            spec = self._line.spec(entry.stage)
            return (self._surplus(spec) <= 0, self._keeps_alone(spec), entry.since_s)

        waited_s = (self._now_s - ticket.asked_s) / self._line.spec(ticket.stages[-1]).share
        for entry in sorted(self._stock.all_idle(), key=rank):
            spec = self._line.spec(entry.stage)
            head = spec.head()
            is_awaited = head is not None and head.memory_mib <= entry.memory_mib  # so that somebody takes it otherwise
            theirs_s = self._now_s - head.asked_s + patience_s if head is not None else 0.0
            if entry.id != but and (not is_awaited or waited_s * spec.share >= theirs_s):
                yield entry

    def _keeps_alone(self, spec: Spec) -> bool:
        """Whether a stage would be gone with the one that is idle there."""
        return spec.stage.key in self._unkept and self._stock.idle_at(spec.stage.key) == 1 and not spec.leased

    def _trim(self) -> None:
        """Destroy what has been idle above its target for long, and find out when there will be more of it."""
        self._trim_due_s = math.inf
        for spec in self._specs.values():
            while self._surplus(spec) > 0:
                oldest = self._stock.longest_idle(spec.stage.key)
                if oldest.since_s + self.policy.linger_s > self._now_s:
                    self._trim_due_s = min(self._trim_due_s, oldest.since_s + self.policy.linger_s)
                    break
                self._destroy(oldest, f"idle for {self._now_s - oldest.since_s:.3g} s, above the target")

    def _surplus(self, spec: Spec) -> int:
        return self._stock.idle_at(spec.stage.key) - (spec.target.count if spec.target else 0)

    def _refill(self) -> None:
        """Bring what is idle up to the targets, the emptiest first, after all tickets."""
        self._is_calming = False
        if self._claimed or self._claimed_mib:
            return
        while self._starts.free > 1:
            short = sorted(self._short())
            if self._calm_at_s > self._now_s and short:
                self._is_calming = any(share >= 0.5 for share, _ in short)
                short = [one for one in short if one[0] < 0.5]
            if not any(self._refill_one(self._specs[key]) for _, key in short):
                return

    def _short(self) -> Iterator[tuple[float, str]]:
        """Specs below their target, with the share of it that is there."""
        for spec in self._targets.values():
            assert spec.target is not None
            there = self._in_store(spec)
            if there < spec.target.count and spec.no_refill_before_s <= self._now_s:
                yield there / spec.target.count, spec.stage.key

    def _in_store(self, spec: Spec) -> int:
        """What is idle or will be, less what waits for it."""
        return self._stock.idle_at(spec.stage.key) + spec.making - spec.waiting

    def _refill_one(self, spec: Spec) -> bool:
        target = spec.target
        assert target is not None
        if not self._has_room(1, target.memory_mib):
            self._displace(spec, target)
            return False
        self._stock.set_load(self._starts.load)
        choice = choose(target.stages, self._stock.fleet, self.costs, can_take=False)
        assert choice is not None
        if (choice.missing and not target.may_build) or self._starts.in_the_way(choice.missing) is not None:
            return False
        self._create(target.stages, None, choice, target.memory_mib)
        return True

    def _displace(self, spec: Spec, target: ev.Target) -> None:
        """What lingers above its target gives way to what is below."""
        if self._stock.has_room(1, target.memory_mib, in_time=True):
            return
        surplus = [entry for entry in self._stock.all_idle() if self._surplus(self._line.spec(entry.stage)) > 0]
        if surplus:
            self._destroy(min(surplus, key=lambda entry: entry.since_s), f"above its target, and the {spec.stage.name} stage is below")

    # ---- starting ----

    def _end_create(self, order: int) -> tuple[Start, ev.Create]:
        start = self._starts.end(order)
        if start is None or start.create is None:
            raise ValueError(f"order {order} is not being carried out")
        self._line.spec(start.create.stages[-1]).making -= 1
        self._stock.order_ended(start.create.memory_mib)
        return start, start.create

    def _end_upgrade(self, ticket: Ticket, *, is_done: bool) -> None:
        start = self._starts.end(ticket.id)
        if start is not None and is_done and self.policy.shares_stages:
            for stage in start.missing:
                self._stock.stored(stage.key)

    # ---- entries ----

    def _park(self, entry: Entry) -> None:
        self._line.spec(entry.stage)
        self._stock.park(entry, self._now_s)
        self._trim_due_s = min(self._trim_due_s, self._now_s + self.policy.linger_s)

    def _give_back(self, entry: Entry) -> None:
        """It is leased no more; a ticket that it was never bound to has ended, unless it waits again."""
        assert entry.spec is not None and entry.ticket is not None
        ticket = self._tickets.get(entry.ticket)
        if ticket is not None and ticket.entry == entry.id:
            self._end_upgrade(ticket, is_done=False)
            self._line.finish(ticket)
        self._cut_off.pop(entry.ticket, None)
        self._specs[entry.spec].leased -= 1
        entry.spec = entry.ticket = None

    def _destroy(self, entry: Entry, why: str) -> None:
        self._stock.leave(entry)
        self._orders.append(ev.Destroy(entry.id, why))
