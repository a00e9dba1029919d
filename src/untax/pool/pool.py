"""The driver of a pool: carries out what `state` orders and tells it what came of it. It never polls.

What a sandbox is, how one is made, given to its holder and destroyed is the business of the `Hands` that are passed in. A
`HandOut` is carried out by whoever asked, in its own task, so that a hit costs no switch to another; everything that
nobody waits for in person (creations, destructions, ticks) runs in tasks and timers of the driver's own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from untax.core.errors import PoolClosed, PoolTimeout, UsageError
from untax.core.stage import Stage
from untax.pool import events as ev
from untax.pool.costs import Costs
from untax.pool.demand import Demands
from untax.pool.grants import Counts, E, Grant, Hands, blame, copy_of
from untax.pool.options import PoolOptions
from untax.pool.policy import Policy, Standing
from untax.pool.state import Pool

log = logging.getLogger("untax.pool")

# A lease's first action takes about a millisecond, a creation on the same machine makes it twice that.
_CALM_S = 0.02
# How often in a row a refill may fail before whoever waits for `warm` is told; between them it waits ever longer.
_WARM_TRIES = 3
_MOST_RECIPES = 4096  # before those that no target asks for are forgotten


R = TypeVar("R")
"""What is asked for: opaque here."""


@dataclass(slots=True)
class _Warming:
    key: str
    count: int
    done: asyncio.Future[None]
    made: int = 0
    failures: int = 0


class PoolDriver(Generic[R, E]):
    """One node's pool. Belongs to the event loop it is used in."""

    def __init__(self, hands: Hands[R, E], options: PoolOptions, *, shares_stages: bool, upgrades_in_place: bool, costs: Costs) -> None:
        self.options = options
        self.costs = costs
        self.counts = Counts()
        self.changed: Callable[[], None] = _nothing
        """Called after whatever changes what is idle, leased or waiting; must be cheap."""
        self.restocked = 0
        """How often what is stored changed: who looks again sees whether it did."""
        policy = Policy(
            entries=options.entries,
            memory_mib=options.memory_mib,
            reuse=options.reuse,
            shares_stages=shares_stages,
            upgrades_in_place=upgrades_in_place,
            first_starting=options.first_starting,
            most_starting=options.most_starting,
            linger_s=options.linger_s,
            calm_s=_CALM_S,
            tries=1,  # a failure is told at once; only what was idle before is replaced unseen
        )
        self._state = Pool(policy, costs)
        self._hands = hands
        self._loop = asyncio.get_running_loop()
        self._clock = self._loop.time
        self._tickets = 0
        self._asked: dict[str, R] = {}  # by ticket, until it is bound or over
        self._outcomes: dict[str, Grant[E] | Exception] = {}  # of those who are not waiting yet
        self._waiting: dict[str, asyncio.Future[Grant[E]]] = {}
        self._entries: dict[str, E] = {}
        self._making: dict[int, asyncio.Task[None]] = {}
        self._for: dict[str, int] = {}  # ticket → the creation that was ordered for it
        self._destroying: set[asyncio.Task[None]] = set()
        self._not_gone: set[str] = set()  # returned, and not proven gone yet
        self._recipes: dict[str, R] = {}  # uppermost stage key → what a refill makes
        self._floors: dict[str, ev.Target] = {}
        self._warming: list[_Warming] = []
        self._gone: asyncio.Future[None] | None = None  # of those who wait for any to go
        self._demands = Demands(options, costs, shares_stages=shares_stages) if options.adaptive else None
        self._replanning: asyncio.TimerHandle | None = None
        self._stored: set[str] = set()
        self._unkept: frozenset[str] = frozenset()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = math.inf
        self._cause: Exception | None = None  # of what is being refused right now
        self._is_closed = False

    # ---- leases ----

    async def acquire(self, stages: tuple[Stage, ...], request: R, *, memory_mib: float = 0.0, wait_s: float | None = None) -> Grant[E]:
        """The sandbox that is closest. `PoolTimeout`, `PoolClosed`, or whatever its creation failed with."""
        return await self.granted(self.ask(stages, request, memory_mib=memory_mib, wait_s=wait_s))

    def ask(
        self, stages: tuple[Stage, ...], request: R, *, memory_mib: float = 0.0, wait_s: float | None = None, is_ahead: bool = False
    ) -> str:
        """The first half of `acquire`: gives the ticket, which is to be taken to `granted`. `is_ahead`: of a lease that nobody has asked for yet."""
        self._tickets += 1
        ticket = str(self._tickets)
        now_s = self._clock()
        self._asked[ticket] = request
        if self._demands is not None:
            self._came(stages, request, memory_mib, now_s)
        self._tell(ev.Asked(now_s, ticket, stages, math.inf if wait_s is None else now_s + wait_s, memory_mib, is_ahead))
        return ticket

    async def granted(self, ticket: str) -> Grant[E]:
        """The other half of `acquire`."""
        outcome = self._outcomes.pop(ticket, None)
        if outcome is None:
            outcome = await self._handed_out(ticket)
        if isinstance(outcome, Exception):
            del self._asked[ticket]
            raise outcome
        return outcome

    def at_once(self, stages: tuple[Stage, ...], memory_mib: float) -> E | None:
        """What `ask` would be granted this moment without waiting; None when it would have to wait."""
        entry = self._state.at_once(stages, memory_mib)
        return self._entries[entry.id] if entry is not None else None

    def bound(self, grant: Grant[E], seconds: float) -> None:
        """Its holder has it; binding took so long."""
        self.counted(grant, seconds)
        self.confirm(grant)

    def counted(self, grant: Grant[E], seconds: float) -> None:
        """The first half of `bound`: the other, `confirm`, may wait until the holder has something to wait for."""
        order = grant.order
        if order.kind == "exact":
            self.counts.exact += 1
            self.costs.observe("bind", seconds)
        elif order.kind == "partial":
            self.counts.partial += 1
        else:
            self.counts.cold += 1
        self.counts.waited_s += order.waited_s
        del self._asked[grant.ticket]
        self._outcomes.pop(grant.ticket, None)

    def confirm(self, grant: Grant[E]) -> None:
        self._tell(ev.Bound(self._clock(), grant.ticket))

    async def again(self, grant: Grant[E], why: Exception) -> Grant[E]:
        """It was dead or would not do, and is to be destroyed: another one, before those who came later."""
        self.counts.rejected += 1
        self._refusing(why, ev.Rejected(self._clock(), grant.ticket, str(why), *blame(why, grant.order.missing)))
        return await self.granted(grant.ticket)

    def give_back(self, name: str, *, clean: bool, ticket: str | None = None, is_gone: bool = False) -> None:
        """A lease has ended, or a hand-out (`ticket`) was broken off. `is_gone`: its sandbox has been destroyed already."""
        if ticket is not None:
            self._asked.pop(ticket, None)
            self._outcomes.pop(ticket, None)  # a refusal that came while it was handed out
        if is_gone:
            del self._entries[name]
        self._tell(ev.Returned(self._clock(), name, clean))

    def gone_later(self, name: str) -> Callable[[], None]:
        """For one that is given back and not proven gone: it counts until what this gives is called."""
        self._not_gone.add(name)

        def gone() -> None:
            self._not_gone.discard(name)
            self._tell(ev.Gone(self._clock(), name))

        return gone

    def died(self, entry: E) -> None:
        """Noticed while it was idle."""
        if entry.name in self._entries:
            self.counts.died += 1
            self._tell(ev.Died(self._clock(), entry.name))

    def useless(self, key: str, idle: Iterable[E]) -> None:
        """Nobody can ask for this uppermost stage any more: none is kept ready, and those that are idle with it go."""
        self._floors.pop(key, None)
        if self._demands is None:
            self._recipes.pop(key, None)
        self._resize()
        for entry in idle:
            self._tell(ev.Died(self._clock(), entry.name))

    def held(self, stages: tuple[Stage, ...], seconds: float) -> None:
        """A lease has lasted so long."""
        if self._demands is not None:
            self._demands.held(stages[-1].key, seconds)

    async def _handed_out(self, ticket: str) -> Grant[E] | Exception:
        future = self._waiting[ticket] = self._loop.create_future()
        try:
            grant: Grant[E] = await future
            return grant
        except asyncio.CancelledError:
            self._left(ticket, future)
            raise
        except Exception as exc:
            return exc

    def _left(self, ticket: str, future: asyncio.Future[Grant[E]]) -> None:
        """Whoever waited is gone. What it was given in the meantime goes back; what was being made for nobody else is broken off."""
        self._waiting.pop(ticket, None)
        self._asked.pop(ticket, None)
        given = self._outcomes.pop(ticket, None)
        if given is None and not future.cancelled() and future.exception() is None:
            given = future.result()
        if isinstance(given, Grant):
            self.give_back(given.entry.name, clean=True)
            return
        self._tell(ev.Withdrawn(self._clock(), ticket))
        order = self._for.pop(ticket, None)
        if order is not None and order in self._making and not self._state.is_wanted(order):
            self._making[order].cancel()

    # ---- what is kept ready ----

    async def warm(self, stages: tuple[Stage, ...], request: R, count: int, *, memory_mib: float) -> None:
        """Keep at least so many idle; returns once they are, raises what stands in the way."""
        key = stages[-1].key
        if self._is_closed:
            raise PoolClosed("the engine is closed")
        if count > self.options.entries:
            raise UsageError(f"{count} sandboxes do not fit a pool of {self.options.entries}; raise PoolOptions(entries=…)")
        if count * memory_mib > self.options.memory_mib:
            raise UsageError(
                f"{count} sandboxes of {memory_mib:g} MiB do not fit a pool of {self.options.memory_mib:g} MiB; ask for fewer, lower their "
                "limits, or raise PoolOptions(memory_mib=…)"
            )
        if count == 0:
            self._floors.pop(key, None)
            self._resize()
            return
        self._recipes[key] = request
        self._floors[key] = ev.Target(stages, count, memory_mib)
        warming = _Warming(key, count, self._loop.create_future())
        self._warming.append(warming)
        try:
            self._resize()
            await warming.done
        finally:
            self._warming.remove(warming)

    def moved(self, key: str, stages: tuple[Stage, ...]) -> None:
        """What is kept ready under this uppermost stage is another one now: its image has changed."""
        floor = self._floors.pop(key, None)
        if floor is not None:
            self._recipes[stages[-1].key] = self._recipes.pop(key)
            self._floors[stages[-1].key] = replace(floor, stages=stages)
            self._resize()

    def stored(self, keys: Iterable[str]) -> None:
        """The layers of these stages are here."""
        for key in keys:
            if key not in self._stored:
                self._stored.add(key)
                self.restocked += 1
                self._tell(ev.Stored(self._clock(), key))

    def evicted(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._stored.discard(key)
            self.restocked += 1
            self._tell(ev.Evicted(self._clock(), key))

    def unkept(self, keys: Iterable[str]) -> None:
        """Of these stages, which are here, the store keeps nothing once nobody stands on them."""
        found = frozenset(keys)
        if found != self._unkept:
            self._unkept = found
            self._tell(ev.Unkept(self._clock(), found))

    async def shed(self) -> bool:
        """Destroy an idle sandbox that keeps layers in the store; whether there was one."""
        before = set(self._destroying)
        self._tell(ev.Pressed(self._clock()))
        leaving = self._destroying - before
        if leaving:
            await asyncio.wait(leaving)
        return bool(leaving)

    async def wait_gone(self, patience_s: float) -> bool:
        """Wait until any sandbox is gone; False when none is in time, or none is there that could go."""
        if self._state.size == self._state.starting:
            return False
        if self._gone is None:
            self._gone = self._loop.create_future()
        try:
            async with asyncio.timeout(patience_s):
                await asyncio.shield(self._gone)
        except TimeoutError:
            return False
        return True

    @property
    def known_stages(self) -> frozenset[str]:
        """Those whose layers are taken to be here."""
        return frozenset(self._stored)

    def is_short(self, stage: Stage) -> bool:
        """Whether one more idle at this stage would be of use."""
        return not self._is_closed and self._state.is_short(stage)

    @property
    def state(self) -> Pool:
        """For reading."""
        return self._state

    def parked(self) -> list[E]:
        """Those that are idle."""
        return [entry for name, entry in self._entries.items() if self._state.is_idle(name)]

    def standings(self) -> list[Standing]:
        return self._state.standings()

    def _resize(self) -> None:
        targets = dict(self._floors)
        if self._demands is not None:
            targets |= self._demands.targets(self._floors, self._state.admission.cap, self._stored, self._unkept, self._clock())
            if len(self._recipes) > _MOST_RECIPES:
                self._recipes = {key: request for key, request in self._recipes.items() if key in targets}
        self._tell(ev.Resized(self._clock(), tuple(targets.values())))

    def _came(self, stages: tuple[Stage, ...], request: R, memory_mib: float, now_s: float) -> None:
        assert self._demands is not None
        for stage in self._demands.came(stages, memory_mib, now_s):
            self._recipes.setdefault(stage.key, request)
        if self._replanning is None:
            self._replanning = self._loop.call_later(self._demands.period_s, self._replan)

    def _replan(self) -> None:
        """As long as somebody comes, and once more for each time that nobody did, until nothing is left to shrink."""
        self._replanning = None
        if self._is_closed or self._demands is None:
            return
        self._resize()
        if self._demands.is_busy:
            self._replanning = self._loop.call_later(self._demands.period_s, self._replan)

    # ---- its end ----

    def close(self) -> None:
        """Refuse whoever waits, break off what is being made, destroy what is idle."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._replanning is not None:
            self._replanning.cancel()
        for task in self._making.values():
            task.cancel()
        self._tell(ev.Closed(self._clock()))
        for warming in self._warming:
            if not warming.done.done():
                warming.done.set_exception(PoolClosed("the engine was closed before the pool was warm"))

    async def wait_closed(self) -> None:
        """Return once nothing that was made is idle or on its way any more."""
        await self.wait_settled()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def wait_settled(self) -> None:
        """Return once nothing is being made or destroyed, as far as nobody asks for more meanwhile."""
        while tasks := [*self._making.values(), *self._destroying]:
            await asyncio.wait(tasks)

    # ---- events in, orders out ----

    def _tell(self, event: ev.Event) -> None:
        orders = self._state.handle(event)
        if self._gone is not None and type(event) is ev.Gone:
            self._gone.set_result(None)
            self._gone = None
        if orders:
            for order in orders:
                self._carry_out(order)
        due_s = self._state.next_due_s()
        if due_s < self._timer_at:
            self._arm(due_s)
        if self._warming:
            self._see_who_is_warm()
        self.changed()

    def _refusing(self, cause: Exception, event: ev.Event) -> None:
        """As `_tell`; whoever is refused because of it is told the cause itself."""
        self._cause = cause
        try:
            self._tell(event)
        finally:
            self._cause = None

    def _arm(self, due_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = due_s
        self._timer = self._loop.call_at(due_s, self._tick)

    def _tick(self) -> None:
        self._timer, self._timer_at = None, math.inf
        self._tell(ev.Tick(self._clock()))

    def _carry_out(self, order: ev.Order) -> None:
        if isinstance(order, ev.HandOut):
            grant = Grant(order.ticket, self._entries[order.entry], order)
            self._for.pop(order.ticket, None)
            future = self._waiting.pop(order.ticket, None)
            if future is None or future.done():  # not waiting yet, or cancelled this moment
                self._outcomes[order.ticket] = grant
            else:
                future.set_result(grant)
        elif isinstance(order, ev.Create):
            self._create(order)
        elif isinstance(order, ev.Destroy):
            self._destroy(order)
        else:
            self._refuse(order)

    def _create(self, order: ev.Create) -> None:
        if order.ticket is not None:
            request = self._asked[order.ticket]
            self._for[order.ticket] = order.order
        else:
            request = self._recipes[order.stages[-1].key]
        task = self._making[order.order] = self._loop.create_task(self._make(order, request))
        task.add_done_callback(lambda _: self._broken_off(order.order))

    def _broken_off(self, order: int) -> None:
        """A task that was cancelled before its first step never ran, and says nothing itself."""
        if self._making.pop(order, None) is not None:
            self._tell(ev.Abandoned(self._clock(), order))

    async def _make(self, order: ev.Create, request: R) -> None:
        key = order.stages[-1].key
        try:
            entry = await self._hands.make(order, request)
        except asyncio.CancelledError:
            self._broken_off(order.order)
            raise
        except Exception as exc:  # told: whoever waits for it, and the log
            del self._making[order.order]
            self.counts.failed += 1
            is_retryable, stage = blame(exc, order.stages)
            log.log(
                logging.INFO if order.ticket or getattr(exc, "retryable", False) else logging.WARNING,
                "a sandbox of the pool could not be made: %s",
                exc,
            )
            self._refusing(exc, ev.Failed(self._clock(), order.order, str(exc), is_retryable, stage))
            self._warming_failed(key, exc, is_final=order.ticket is None and not getattr(exc, "retryable", False))
            return
        del self._making[order.order]
        self.counts.made += 1
        self._entries[entry.name] = entry
        if self._state.policy.shares_stages and not self._stored.issuperset(keys := {stage.key for stage in order.stages}):
            self._stored |= keys
            self.restocked += 1
        for warming in self._warming:
            if warming.key == key:
                warming.made += 1
                warming.failures = 0
        self._tell(ev.Made(self._clock(), order.order, entry.name))

    def _destroy(self, order: ev.Destroy) -> None:
        entry = self._entries.pop(order.entry, None)
        if entry is None:
            if order.entry not in self._not_gone:
                self._tell(ev.Gone(self._clock(), order.entry))
            return
        log.debug("sandbox %s of the pool goes: %s", order.entry, order.why)
        task = self._loop.create_task(self._destroyed(entry))
        self._destroying.add(task)
        task.add_done_callback(self._destroying.discard)

    async def _destroyed(self, entry: E) -> None:
        await self._hands.destroy(entry)
        if entry.name not in self._not_gone:
            self._tell(ev.Gone(self._clock(), entry.name))

    def _refuse(self, order: ev.Refuse) -> None:
        self.counts.refused += 1
        self._for.pop(order.ticket, None)
        exc: Exception
        if order.reason == "deadline":
            exc = PoolTimeout(order.why)
        elif order.reason == "closed":
            exc = PoolClosed("the engine was closed before the sandbox was there")
        elif order.reason == "failed" and self._cause is not None:
            exc = copy_of(self._cause)
        else:
            exc = UsageError(f"{order.why}; lower the lease's limits, or raise PoolOptions(memory_mib=…)")
        future = self._waiting.pop(order.ticket, None)
        if future is not None and not future.done():
            future.set_exception(exc)
        elif order.ticket in self._asked:
            self._outcomes[order.ticket] = exc

    # ---- who waits for warmth ----

    def _see_who_is_warm(self) -> None:
        for warming in self._warming:
            if not warming.done.done() and (warming.made >= warming.count or self._state.idle_at(warming.key) >= warming.count):
                warming.done.set_result(None)

    def _warming_failed(self, key: str, exc: Exception, *, is_final: bool) -> None:
        for warming in self._warming:
            if warming.key == key and not warming.done.done():
                warming.failures += 1
                if is_final or warming.failures >= _WARM_TRIES:
                    self._floors.pop(key, None)
                    warming.done.set_exception(copy_of(exc))
        if key not in self._floors and not self._is_closed and any(one.key == key for one in self._warming):
            self._resize()


def _nothing() -> None:
    pass
