"""What a server tells those who place leases over many nodes: what is idle, stored and starting here, pushed when it changes.

A session that asked is told all of it at once and from then on only what has changed, soon after a change and at most every 20 ms. Every
value is absolute, so that what is told twice does no harm. While nobody asks, nothing here is called.
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

PUSH_S = 0.02
"""Between two pushes: fifty a second keep a core busy to less than a hundredth, and no lease takes longer than this to be seen."""
_FIRST_S = 0.005  # after a quiet time: what belongs together is told together, and not beside a lease's first action, which takes 2 ms
_LOOK_S = 1.0  # how often it is looked at what has no event: how busy the machine is
_BUSY_STEP = 0.1  # by how much that has to differ to be told
_UNSENT_MAX = 256 << 10  # bytes; who reads as slowly as that is told all of it once it has caught up
_PRESSURE = "/proc/pressure/cpu"

View = dict[str, Any]


class Watcher(Protocol):
    """A session."""

    @property
    def unsent(self) -> int: ...

    def say(self, body: Body, fd: int | None = None) -> None: ...


class Watched(Protocol):
    """A service."""

    @property
    def engine(self) -> Engine: ...

    @property
    def is_draining(self) -> bool: ...


class Views:
    """Who watches, and what they were told last."""

    def __init__(self, service: Watched) -> None:
        self._service = service
        self._watchers: dict[Watcher, int] = {}  # and the number of its request
        self._behind: set[Watcher] = set()  # those who have to be told all of it
        self._poolings: list[Pooling] = []
        self._last: View = {}
        self._timer: asyncio.TimerHandle | None = None
        self._looking: asyncio.TimerHandle | None = None
        self._pushed_s = -math.inf
        self._costs = _Costs()
        self._busy = 0.0
        self._restocked = -1
        self._keys: frozenset[str] = frozenset()

    def watch(self, watcher: Watcher, request_id: int) -> None:
        is_first = not self._watchers
        self._watchers[watcher] = request_id
        self._behind.add(watcher)
        if is_first:
            self._begin()
        self._push()

    def leave(self, watcher: Watcher, request_id: int | None = None) -> None:
        """It is gone, or asks for no more; with a number, only if it is that request which ends."""
        if request_id is not None and self._watchers.get(watcher) != request_id:
            return
        self._behind.discard(watcher)
        if self._watchers.pop(watcher, None) is not None and not self._watchers:
            self._end()

    def changed(self) -> None:
        """Something has: told soon. Costs a look at one attribute while that is still to come."""
        if self._timer is None and self._watchers:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(max(_FIRST_S, self._pushed_s + PUSH_S - loop.time()), self._due)

    def close(self) -> None:
        self._watchers.clear()
        self._behind.clear()
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
        for timer in (self._timer, self._looking):
            if timer is not None:
                timer.cancel()
        self._timer = self._looking = None
        if self._poolings:
            self._service.engine.watch_pools(None)
        self._poolings, self._last, self._costs, self._restocked = [], {}, _Costs(), -1

    def _due(self) -> None:
        self._timer = None
        self._look_at_pools()  # an engine that chooses among substrates may have started another
        self._push()

    def _look(self) -> None:
        self._looking = asyncio.get_running_loop().call_later(_LOOK_S, self._look)
        busy = _busy()
        if abs(busy - self._busy) >= _BUSY_STEP:
            self._busy = busy
            self.changed()
        elif self._behind:
            self.changed()

    def _push(self) -> None:
        self._pushed_s = asyncio.get_running_loop().time()
        whole = self._whole()
        before, self._last = self._last, whole
        change = _change(before, self._last) if before else {}
        if costs := self._costs.news(self._poolings):
            change["costs"] = costs
        told: Body | None = None
        for watcher, request_id in self._watchers.items():
            if watcher.unsent > _UNSENT_MAX:
                self._behind.add(watcher)
            elif watcher in self._behind:
                self._behind.discard(watcher)
                told = told or _told(self._last) | {"costs": self._costs.all(), "whole": True}
                watcher.say({"id": request_id, "part": told})
            elif change:
                watcher.say({"id": request_id, "part": change})

    def _whole(self) -> View:
        """Sets as sets, so that they can be compared; costs apart."""
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
            "cpus": os.cpu_count() or 1,
            "busy": self._busy,
            "filled": max((round(pooling.filled, 2) for pooling in self._poolings), default=0.0),
            "free_sandboxes": _finite(max((entries for entries, _ in rooms), default=math.inf)),
            "free_mib": _finite(max((mib for _, mib in rooms), default=math.inf)),
            "most_mib": _finite(max((one.memory_mib for one in options), default=math.inf)),
            "is_draining": self._service.is_draining,
        }

    def _stored(self) -> frozenset[str]:
        restocked = sum(pooling.driver.restocked for pooling in self._poolings)
        if restocked != self._restocked:
            self._restocked = restocked
            self._keys = frozenset(key.partition("~")[0] for pooling in self._poolings for key in pooling.driver.known_stages)
        return self._keys


class _Costs:
    """What was told of what steps cost."""

    def __init__(self) -> None:
        self._learnt = -1
        self._by_name: dict[str, float] = {}
        self._by_key: dict[str, float] = {}

    def news(self, poolings: Iterable[Pooling]) -> Body | None:
        """What is new since this was last asked; None for nothing."""
        costs = [pooling.driver.costs for pooling in poolings]
        if (learnt := sum(one.learnt for one in costs)) == self._learnt:
            return None
        self._learnt = learnt
        by_name, by_key = self._by_name, self._by_key
        self._by_name, self._by_key = {}, {}
        for one in costs:
            names, keys = one.as_told()
            self._by_name |= names
            self._by_key |= keys
        return {"by_name": _differing(by_name, self._by_name), "by_key": _differing(by_key, self._by_key)}

    def all(self) -> Body:
        return {"by_name": self._by_name, "by_key": self._by_key}


def _differing(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in after.items() if before.get(name) != value}


def _change(before: View, after: View) -> Body:
    change: Body = {}
    for name, value in after.items():
        old = before[name]
        if name == "idle":
            if counts := {key: value.get(key, 0) for key in {*old, *value} if old.get(key, 0) != value.get(key, 0)}:
                change["idle"] = counts
        elif name == "stored":
            if value is old:
                continue
            if value - old:
                change["stored"] = sorted(value - old)
            if old - value:
                change["evicted"] = sorted(old - value)
        elif name == "building":
            if value.keys() != old.keys():
                change["building"] = value
        elif value != old:
            change[name] = value
    return change


def _told(view: View) -> Body:
    return view | {"stored": sorted(view["stored"])}


def _busy() -> float:
    """The share of the last ten seconds in which something waited for a processor; 0 where the kernel does not say."""
    try:
        with open(_PRESSURE, "rb") as file:
            return round(float(file.readline().split()[1].partition(b"=")[2]) / 100, 2)
    except (OSError, ValueError, IndexError):
        return 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
