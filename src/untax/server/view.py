"""What a server tells those who place leases over many nodes: what is idle, stored and starting here, pushed when it changes.

A session that asked is told all of it at once and from then on only what has changed: soon after a change and at most every 50 ms where it leases here
itself; elsewhere what tells where something can be had at all as soon, what is idle and under way every 150 ms, the rest within a quarter of a second. Every value is absolute, so that what is told twice does no harm. Beside it each is told up to
which of its own requests for leases all are in what it is told. One that *rests*, because it places no leases at the moment, is told as soon what would make a lease here go wrong and what its own requests came to, and everything else every two
seconds. While nobody asks, nothing here is called.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from untax.remote.messages import Body

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.pooling import Pooling

PUSH_S = 0.05
"""Between two pushes. Fifty a second, as they once were, took a fifth of the time of four agents that leased all they could (py-spy); until its own lease is in
what it is told a client reckons with it by itself."""
# The same for who does not lease here. Every node tells every client, so what is said grows with the product of the two.
# What tells where something can be had at all comes first, what is idle at the moment next: it is another one before a lease gets there.
_ELSEWHERE_S, _IDLE_S, _LATER_S = 0.05, 0.15, 0.25
# The same for who rests, all of them together. The first lease after a rest is placed by what is so old; how busy a machine is, it says of the last ten seconds anyway.
_RESTING_S = 2.0
_CERTAIN = ("isolation", "most_mib", "is_draining")  # what a lease goes wrong by, whatever else is so
_FIRST_S = 0.005  # after a quiet time: what belongs together is told together, and not beside a lease's first action, which takes 2 ms
_LOOK_S = 1.0  # how often it is looked at what has no event: how busy the machine is
_BUSY_STEP = 0.1  # by how much that has to differ to be told
_COST_STEP = 0.05  # the same of what steps cost, as a share
_UNSENT_MAX = 256 << 10  # bytes; who reads as slowly as that is told all of it once it has caught up
_CPUS = os.cpu_count() or 1  # which takes three system calls
_PRESSURE = "/proc/pressure/cpu"

View = dict[str, Any]


class Watcher(Protocol):
    """A session."""

    @property
    def unsent(self) -> int: ...

    @property
    def asked(self) -> int:
        """Up to which number every request of it for a lease is known to the pools."""

    def say(self, body: Body, fd: int | None = None) -> None: ...


class Watched(Protocol):
    """A service."""

    @property
    def engine(self) -> Engine: ...

    @property
    def is_draining(self) -> bool: ...


class _Told:
    """What a watcher knows."""

    __slots__ = ("asked", "at_s", "is_resting", "request_id", "view")

    def __init__(self, request_id: int, is_resting: bool) -> None:
        self.request_id = request_id
        self.is_resting = is_resting
        self.view: View | None = None  # it has to be told all of it
        self.asked = -1
        self.at_s = -math.inf


class Views:
    """Who watches, and what they were told last."""

    def __init__(self, service: Watched) -> None:
        self._service = service
        self._watchers: dict[Watcher, _Told] = {}
        self._poolings: list[Pooling] = []
        self._timer: asyncio.TimerHandle | None = None
        self._later: asyncio.TimerHandle | None = None  # for what was put off
        self._looking: asyncio.TimerHandle | None = None
        self._pushed_s = -math.inf
        self._rested_s = -math.inf  # when those who rest were told
        self._costs = _Costs()
        self._busy = 0.0
        self._restocked = -1
        self._told_urgent: tuple[object, list[float | None]] = (None, [])  # as of when all of it was put together last
        self._is_late = False  # whether what was put off is due
        self._was_draining = False  # when all of it was put together last
        self._keys: frozenset[str] = frozenset()

    def watch(self, watcher: Watcher, request_id: int, *, is_resting: bool = False) -> None:
        """It is told all of it; by the same request once more it only begins or ceases to rest, and is told then what it was not."""
        told = self._watchers.get(watcher)
        if told is not None and told.request_id == request_id:
            if told.is_resting and not is_resting:
                told.at_s = -math.inf
                self.changed_for_all()
            told.is_resting = is_resting
            return
        is_first = not self._watchers
        self._watchers[watcher] = _Told(request_id, is_resting)
        if is_first:
            self._begin()
        self._push()

    def leave(self, watcher: Watcher, request_id: int | None = None) -> None:
        """It is gone, or asks for no more; with a number, only if it is that request which ends."""
        told = self._watchers.get(watcher)
        if told is None or request_id not in (None, told.request_id):
            return
        del self._watchers[watcher]
        if not self._watchers:
            self._end()

    def changed(self) -> None:
        """Something has: told soon. Costs a look at one attribute while that is still to come."""
        if self._timer is None and self._watchers:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(_FIRST_S, self._pushed_s + PUSH_S - loop.time()), self._due)

    def changed_for_all(self) -> None:
        """The same, also for who rests. What is to be told sooner stays so, however many ask for it."""
        if self._watchers:
            loop = asyncio.get_running_loop()
            due_s = max(loop.time() + _FIRST_S, self._pushed_s + PUSH_S)
            if self._timer is not None and self._timer.when() > due_s:
                self._timer.cancel()
                self._timer = None
            if self._timer is None:
                self._timer = loop.call_at(due_s, self._due)

    def close(self) -> None:
        self._watchers.clear()
        self._end()

    # ---- inside ----

    def _begin(self) -> None:
        self._busy = _busy()
        self._look_at_pools()
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def _look_at_pools(self) -> None:
        engine = self._service.engine
        known, self._poolings = self._poolings, engine.watch_pools(self.changed)
        for pooling in self._poolings:
            if pooling not in known:
                engine.chore(pooling.know_store())

    def _end(self) -> None:
        for timer in (self._timer, self._later, self._looking):
            if timer is not None:
                timer.cancel()
        self._timer = self._later = self._looking = None
        if self._poolings:
            self._service.engine.watch_pools(None)
        self._poolings, self._costs, self._restocked = [], _Costs(), -1

    def _due(self) -> None:
        self._timer = None
        if self._can_wait():
            loop = asyncio.get_running_loop()
            due_s = loop.time() + _IDLE_S if self._all_rest else min(loop.time() + PUSH_S, self._pushed_s + _IDLE_S)
            self._timer = loop.call_at(due_s, self._due)
        else:
            self._look_at_pools()  # an engine that chooses among substrates may have started another
            self._push()

    def _late(self) -> None:
        """What was put off is due."""
        self._is_late = True
        self.changed()

    def _can_wait(self) -> bool:
        """Whether nobody would be told anything yet: all of it is put together only for who is."""
        now_s = asyncio.get_running_loop().time()
        if self._all_rest:
            if now_s >= self._rested_s + _RESTING_S or self._service.is_draining != self._was_draining:
                return False
        elif self._is_late or now_s >= self._pushed_s + _IDLE_S or self._is_urgent():
            return False
        return not any(
            told.at_s == -math.inf or told.view is None or watcher.asked != told.asked for watcher, told in self._watchers.items()
        )

    @property
    def _all_rest(self) -> bool:
        return all(told.is_resting for told in self._watchers.values())

    def _is_urgent(self) -> bool:
        """Whether something is another that is told soon (`_pause_s`), since all of it was put together."""
        (facts, amounts), (told_facts, told_amounts) = self._urgent(), self._told_urgent
        return facts != told_facts or any(map(_is_other, told_amounts, amounts))

    def _urgent(self) -> tuple[object, list[float | None]]:
        """In short what that is: what is told for being another, and what for being half or twice as much."""
        facts: list[object] = [self._service.is_draining, self._busy]
        amounts: list[float | None] = []
        for pooling in self._poolings:
            state = pooling.driver.state
            facts += (pooling.driver.restocked, *state.building())
            amounts += (state.admission.cap, *map(_finite, state.room))
        return facts, amounts

    def _look(self) -> None:
        """At what has no event: how busy the machine is, who has caught up, and what was put off."""
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        busy = _busy()
        if abs(busy - self._busy) >= _BUSY_STEP:
            self._busy = busy
        self.changed()

    def _push(self) -> None:
        loop = asyncio.get_running_loop()
        now_s = self._pushed_s = loop.time()
        self._is_late = False
        whole = self._whole()
        self._told_urgent = self._urgent()
        self._was_draining = self._service.is_draining
        changes: dict[int, tuple[Body, float]] = {}  # by what was known; most know the same
        put_off_s = math.inf
        is_turn = now_s >= self._rested_s + _RESTING_S  # of those who rest; nobody need call for it, since it is looked every second
        for watcher, told in self._watchers.items():
            if watcher.unsent > _UNSENT_MAX:
                told.view = None
                continue
            asked = watcher.asked
            if told.view is None:
                part = _all_of(whole)
            elif told.is_resting and not is_turn and asked == told.asked and all(told.view[name] == whole[name] for name in _CERTAIN):
                continue
            else:
                if id(told.view) not in changes:
                    changes[id(told.view)] = change = _change(told.view, whole), _pause_s(told.view, whole)
                else:
                    change = changes[id(told.view)]
                part, pause_s = change
                if not part and asked == told.asked:
                    continue
                due_s = told.at_s + pause_s
                if asked == told.asked and now_s < due_s:
                    put_off_s = min(put_off_s, due_s - now_s)
                    continue
            if asked != told.asked:
                part = {**part, "asked": asked}
            told.view, told.asked, told.at_s = whole, asked, now_s
            if told.is_resting and is_turn:
                self._rested_s = now_s
            watcher.say({"id": told.request_id, "part": part})
        if self._later is not None:
            self._later.cancel()
        self._later = loop.call_later(put_off_s, self._late) if put_off_s < math.inf else None

    def _whole(self) -> View:
        """Sets as sets, so that they can be compared."""
        engine, states = self._service.engine, [pooling.driver.state for pooling in self._poolings]
        loop_s = asyncio.get_running_loop().time()
        idle: dict[str, int] = {}
        building: dict[str, float] = {}
        for state in states:
            for key, count in state.idle_by_key().items():
                idle[key] = idle.get(key, 0) + count
            building |= {key: loop_s - since_s for key, since_s in state.building().items()}
        rooms = [state.room for state in states]
        options = [pooling.driver.options for pooling in self._poolings]
        return {
            "isolation": engine.substrate.isolation,
            "idle": idle,
            "stored": self._stored(),
            "building": building,
            "starting": sum(state.starting for state in states),
            "most_starting": max(1, sum(state.admission.cap for state in states)),
            "waiting": sum(state.waiting for state in states),
            "leased": sum(state.leased for state in states),
            "cpus": _CPUS,
            "busy": self._busy,
            "filled": max((round(pooling.filled, 2) for pooling in self._poolings), default=0.0),
            "free_sandboxes": _finite(max((entries for entries, _ in rooms), default=math.inf)),
            "free_mib": _finite(max((mib for _, mib in rooms), default=math.inf)),
            "most_mib": _finite(max((one.memory_mib for one in options), default=math.inf)),
            "is_draining": self._service.is_draining,
            "costs": self._costs.now(self._poolings),
        }

    def _stored(self) -> frozenset[str]:
        restocked = sum(pooling.driver.restocked for pooling in self._poolings)
        if restocked != self._restocked:
            self._restocked = restocked
            self._keys = frozenset(key.partition("~")[0] for pooling in self._poolings for key in pooling.driver.known_stages)
        return self._keys


class _Costs:
    """What steps cost, another one only once it differs by what anybody would notice."""

    def __init__(self) -> None:
        self._learnt = self._stages = -1
        self._now: dict[str, dict[str, float]] = {"by_name": {}, "by_key": {}}

    def now(self, poolings: Iterable[Pooling]) -> dict[str, dict[str, float]]:
        """The same object as before while nothing in it has changed."""
        costs = [pooling.driver.costs for pooling in poolings]
        if (learnt := sum(one.learnt for one in costs)) != self._learnt:
            stages = sum(one.learnt_stages for one in costs)
            found = {"by_name": {}, "by_key": {} if stages != self._stages else self._now["by_key"]}
            for one in costs:
                found["by_name"] |= one.by_name()
                if stages != self._stages:
                    found["by_key"] |= one.by_key()
            self._learnt, self._stages = learnt, stages
            if any(_differing(self._now[kind], found[kind]) for kind in found):
                self._now = found
        return self._now


def _differing(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in after.items() if (old := before.get(name)) is None or abs(value - old) > _COST_STEP * old}


def _change(before: View, after: View) -> Body:
    change: Body = {}
    for name, value in after.items():
        old = before[name]
        if value is old or value == old:
            continue
        if name == "idle":
            change["idle"] = {key: value.get(key, 0) for key in {*old, *value} if old.get(key, 0) != value.get(key, 0)}
        elif name == "stored":
            if value - old:
                change["stored"] = sorted(value - old)
            if old - value:
                change["evicted"] = sorted(old - value)
        elif name == "building":
            if value.keys() != old.keys():
                change["building"] = value
        elif name == "costs":
            change["costs"] = {kind: {key: cost for key, cost in value[kind].items() if old[kind].get(key) != cost} for kind in value}
        else:
            change[name] = value
    return change


def _pause_s(before: View, after: View) -> float:
    """After how long it is told. A lease might go elsewhere for what is there and was not, or is no more, or half or twice as much."""
    if any(before[name] != after[name] for name in ("isolation", "stored", "cpus", "busy", "most_mib", "is_draining")):
        return _ELSEWHERE_S
    if before["building"].keys() != after["building"].keys():
        return _ELSEWHERE_S
    if any(_is_other(before[name], after[name]) for name in ("most_starting", "free_sandboxes", "free_mib")):
        return _ELSEWHERE_S
    return _IDLE_S if _is_busier(before, after) else _LATER_S


def _is_busier(before: View, after: View) -> bool:
    if bool(before["waiting"]) != bool(after["waiting"]):
        return True
    if abs(after["leased"] - before["leased"]) >= max(after["cpus"], before["leased"] / 4):
        return True
    if abs(after["starting"] - before["starting"]) >= max(2, after["most_starting"] / 2) or abs(after["filled"] - before["filled"]) >= 0.1:
        return True
    was, now = before["idle"], after["idle"]
    return any(_is_other(was.get(key, 0), now.get(key, 0)) for key in {*was, *now})


def _is_other(before: float | None, after: float | None) -> bool:
    if before is None or after is None:
        return before is not after
    if before <= 0 or after <= 0:
        return (before > 0) != (after > 0)
    return not before / 2 < after < before * 2


def _all_of(view: View) -> Body:
    return view | {"stored": sorted(view["stored"]), "whole": True}


def _busy() -> float:
    """The share of the last ten seconds in which something waited for a processor; 0 where the kernel does not say."""
    try:
        with open(_PRESSURE, "rb") as file:
            return round(float(file.readline().split()[1].partition(b"=")[2]) / 100, 2)
    except (OSError, ValueError, IndexError):
        return 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
