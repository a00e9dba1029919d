"""How many sandboxes to keep idle, and at which stage.

An idle sandbox is worth what it saves: the seconds between being handed out and the next best way, times how often it is
used. It is used at most once while its successor is being made, so the next one at a stage that has `k` already is worth
P(more than k arrivals in that time) × seconds saved / that time. The best of them by its memory is added until the memory is
used up, or until everybody's target hit rate is reached and one more would save next to nothing. One at a shared lower stage
serves whatever those above it do not catch, of all specs together, as far as to begin there is quicker than to create.

Arrivals in bunches have a variance above their mean (`burst` times); they are taken to be negative binomial, or Poisson for 1.

Where the store has no room to keep a stage, what stands on it is all that keeps it: without an idle sandbox there, whoever comes next waits until
it is built. So stages that the store keeps need few of them, and those it does not keep one each: together they hold more than either.

How much is asked for in all is known well, what for is not: demand moves from spec to spec, and whoever it moves to meets a pool that was sized
for its past. So one time in fifty a spec whose layers are here is taken to be what everybody wants.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from untax.core.stage import Stage
from untax.pool.costs import Costs

# Seconds saved in each second, below which one more idle sandbox is not worth its upkeep: on the way to the target hit rate, and
# beyond it (there, it must save what one rollout in a hundred would otherwise wait all the time).
_LEAST_VALUE, _LEAST_BEYOND = 1e-6, 1e-2
SURPRISE = 0.02  # how often all that comes is for this spec, whatever it was used to
_BUSIEST = 0.9  # share of what can be started that is planned with; a queue behind more would be endless
_LEAST_REFILL_S = 1e-3
_MOST_OF_ONE = 100_000  # entries at one stage: a guard against rates that no machine sees


@dataclass(frozen=True, slots=True)
class Demand:
    """How often sandboxes of one spec are asked for."""

    stages: tuple[Stage, ...]
    rate_per_s: float
    burst: float = 1.0
    """Variance of the number of arrivals, as a multiple of its mean."""
    hold_s: float = 0.0
    """How long a lease lasts: what is leased takes room as well."""
    refill_s: float | None = None
    """How long it takes until one that was taken is replaced; None for what the costs say."""
    memory_mib: float = 0.0
    """Of one idle sandbox."""
    hit_rate: float = 0.95
    """Of all leases, how many should find one with everything in place."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What idle and leased sandboxes may take together, and how many may start at once."""

    memory_mib: float = math.inf
    entries: int = 256
    starting: int = 4


def plan(
    demand: Sequence[Demand], budget: Budget, costs: Costs, *, present: Collection[str] = (), unkept: Collection[str] = ()
) -> dict[str, int]:
    """How many to keep idle for each stage key; those with none are left out. `present`: stages whose layers are here. `unkept`: those of
    them that are here only as long as something stands on them.
    """
    demand = [one for one in demand if one.rate_per_s > 0]
    memory_mib = budget.memory_mib - sum(one.rate_per_s * one.hold_s * one.memory_mib for one in demand)
    entries = budget.entries - math.ceil(sum(one.rate_per_s * one.hold_s for one in demand))
    rungs = _rungs(demand, budget, costs, present, unkept)
    # One more here changes what one more is worth below (less overflows) and above (less is left to save). Above it only falls,
    # and is noticed when its turn comes; below it is computed anew at once.
    queue = [(-math.inf, number, 0) for number in range(len(rungs))]
    while queue and entries > 0:
        _, number, version = heapq.heappop(queue)
        rung = rungs[number]
        if version != rung.version or rung.memory_mib > memory_mib or rung.count >= _MOST_OF_ONE:
            continue
        value = rung.value()
        if value < (_LEAST_BEYOND if rung.is_enough() else _LEAST_VALUE):
            continue
        rank = -value / max(rung.memory_mib, 1e-3)
        if queue and rank > queue[0][0]:
            heapq.heappush(queue, (rank, number, version))
            continue
        memory_mib -= rung.memory_mib
        entries -= 1
        for changed in rung.add_one():
            heapq.heappush(queue, (-math.inf, changed.number, changed.version))
    return {rung.stage.key: rung.count for rung in rungs if rung.count}


def hit_rate(demand: Demand, count: int, refill_s: float) -> float:
    """The share of leases that find one of `count` idle: fewer than that many came while the last one was replaced."""
    return Arrivals(demand.rate_per_s * refill_s, demand.burst).at_most(count - 1)


# ---- how many come ----


class Arrivals:
    """The number of arrivals in some time: Poisson, or negative binomial when its variance is `burst` times its mean."""

    def __init__(self, mean: float, burst: float = 1.0) -> None:
        self.mean = mean
        self.burst = burst if burst > 1.0 + 1e-6 else 1.0
        self._sums: list[float] = []
        self._served = [0.0]

    def at_most(self, count: int) -> float:
        """P(N ≤ count)."""
        if count < 0:
            return 0.0
        if self.mean <= 0:
            return 1.0
        while len(self._sums) <= count:
            before = self._sums[-1] if self._sums else 0.0
            self._sums.append(min(1.0, before + self._exactly(len(self._sums))))
        return self._sums[count]

    def more_than(self, count: int) -> float:
        return 1.0 - self.at_most(count)

    def excess(self, count: int) -> float:
        """E[max(0, N − count)]: how many are not served by so many."""
        while len(self._served) <= count:
            self._served.append(self._served[-1] + self.more_than(len(self._served) - 1))
        return max(0.0, self.mean - self._served[count])

    def _exactly(self, count: int) -> float:
        if self.burst == 1.0:
            return math.exp(count * math.log(self.mean) - self.mean - math.lgamma(count + 1))
        shape = self.mean / (self.burst - 1.0)
        ways = math.lgamma(count + shape) - math.lgamma(shape) - math.lgamma(count + 1)
        return math.exp(ways - shape * math.log(self.burst) + count * math.log1p(-1.0 / self.burst))


class Rate:
    """How often something arrives and in how large bunches, from when it did. Recent arrivals count more.

    The variance is that between one bin and the next (half the mean square of their difference): a rate that rises or falls for good is no bunch.
    """

    def __init__(self, *, bin_s: float = 1.0, memory_s: float = 60.0) -> None:
        self._bin_s = bin_s
        self._weight = min(1.0, bin_s / memory_s)
        self._bins = 0
        self._mean = 0.0  # arrivals in a bin
        self._variance = 0.0
        self._last = 0  # those in the bin before
        self._bin = 0
        self._count = 0
        self._has_begun = False

    def arrived(self, now_s: float, count: int = 1) -> None:
        self._close_bins(now_s)
        self._count += count

    def per_s(self, now_s: float) -> float:
        return self._moments(now_s)[0] / self._bin_s

    def burst(self, now_s: float) -> float:
        """The variance of how many arrive in a bin over its mean; 1 at least."""
        mean, variance = self._moments(now_s)
        return max(1.0, variance / mean) if mean > 0 else 1.0

    def _moments(self, now_s: float) -> tuple[float, float]:
        """With the bin that is still open, where that makes them larger: a burst is answered while it lasts."""
        self._close_bins(now_s)
        if self._count <= self._mean:
            return self._mean, self._variance
        weight = max(self._weight, 1.0 / (self._bins + 1))
        variance = _between(self._count, self._last)
        return self._mean + weight * (self._count - self._mean), self._variance + weight * (variance - self._variance)

    def _close_bins(self, now_s: float) -> None:
        this = math.floor(now_s / self._bin_s)
        if not self._has_begun:
            self._has_begun, self._bin = True, this
        if this <= self._bin:
            return
        self._learn(self._count)
        empty = this - self._bin - 1
        while empty > 0 and (self._last or self._bins * self._weight < 1.0):  # at first every bin counts the same
            self._learn(0)
            empty -= 1
        faded = (1.0 - self._weight) ** empty
        self._mean *= faded
        self._variance *= faded
        self._bin, self._count = this, 0

    def _learn(self, count: int) -> None:
        self._bins += 1
        weight = max(self._weight, 1.0 / self._bins)
        self._mean += weight * (count - self._mean)
        if self._bins > 1:
            self._variance += max(self._weight, 1.0 / (self._bins - 1)) * (_between(count, self._last) - self._variance)
        self._last = count


def _between(count: int, last: int) -> float:
    return (count - last) ** 2 / 2.0


# ---- what one more is worth ----


class _Rung:
    """A stage at which sandboxes could be kept, and who would be served by them."""

    def __init__(self, number: int, stage: Stage, below: _Rung | None, bind_s: float) -> None:
        self.number = number
        self._bind_s = bind_s
        self.stage = stage
        self.below = below
        self.above: list[_Rung] = []
        if below is not None:
            below.above.append(self)
        self.own: list[Demand] = []  # of the specs whose uppermost stage this is
        self.memory_mib = 0.0
        self.hit_rate = 0.0  # the highest that is wanted here
        self.step_s = 0.0  # to add this stage to a sandbox that has the one below
        self.cold_s = 0.0  # to create one here when nothing is idle
        self.refill_s = 0.0
        self.is_present = False  # its layer: nothing is built on the mere chance that somebody comes
        self.next_s: float | None = None  # instead of `cold_s` when one is here already, where the stage stays only for that one's sake
        self.everybody = Arrivals(0.0)  # those of all specs, while one is replaced here
        self.count = 0
        self.version = 0
        self._flow: tuple[Arrivals, float] | None = None

    def arrivals(self) -> Arrivals:
        """Those of its own specs, and what the rungs above could not serve, while one is replaced here."""
        return self._flows()[0]

    def value(self) -> float:
        """Seconds that one more would save in each second."""
        arrivals, saved_s = self._flows()
        chance = arrivals.more_than(self.count)
        if self.own and self.is_present:
            chance += SURPRISE * (self.everybody.more_than(self.count) - chance)
        saved_s = min(saved_s, self.without_s())
        if self.next_s is not None and self.count:
            saved_s = min(saved_s, self.next_s)
        return chance * max(0.0, saved_s - self._bind_s) / self.refill_s

    def without_s(self) -> float:
        """What a lease of this stage takes when nothing is idle here: from a lower rung if something is idle there, or created."""
        if self.below is None:
            return self.cold_s
        is_idle = self.below.arrivals().at_most(self.below.count - 1)
        further_s = min(self.cold_s, self.step_s + self.below.without_s())
        return is_idle * min(self.cold_s, self.step_s) + (1.0 - is_idle) * further_s

    def is_enough(self) -> bool:
        """Whether all that pass here find what they need as often as they should."""
        if self.arrivals().at_most(self.count - 1) >= self.hit_rate:
            return True
        return not self.own and all(rung.is_enough() for rung in self.above)

    def add_one(self) -> Iterator[_Rung]:
        """The rungs whose worth is to be computed anew: this one and those below it."""
        self.count += 1
        self.version += 1
        yield self
        rung = self.below
        while rung is not None:
            rung._flow = None
            rung.version += 1
            yield rung
            rung = rung.below

    def _flows(self) -> tuple[Arrivals, float]:
        """Who comes here, and how much an idle sandbox here can save each of them at most."""
        if self._flow is None:
            flows = [(one.rate_per_s * self.refill_s, max(1.0, one.burst), math.inf) for one in self.own]
            for rung in self.above:
                arrivals, saved_s = rung._flows()
                # To begin here and add a stage is of use where creating one with that stage takes longer.
                saved_s = min(saved_s, rung.cold_s - rung.step_s)
                if saved_s > 0:
                    flows.append((arrivals.excess(rung.count) * self.refill_s / rung.refill_s, arrivals.burst, saved_s))
            mean = sum(flow[0] for flow in flows)
            if mean <= 0:
                self._flow = (Arrivals(0.0), 0.0)
            else:
                burst = sum(flow[0] * flow[1] for flow in flows) / mean
                self._flow = (Arrivals(mean, burst), sum(flow[0] * min(flow[2], self.cold_s) for flow in flows) / mean)
        return self._flow


def _rungs(demand: Sequence[Demand], budget: Budget, costs: Costs, present: Collection[str], unkept: Collection[str]) -> list[_Rung]:
    rungs: dict[str, _Rung] = {}
    starting = 0.0  # seconds of starting work in each second
    for one in demand:
        create_s = cold_s = refill_s = costs.of("create")
        rung: _Rung | None = None
        for stage in one.stages:
            step_s = costs.of_stage(stage)
            is_present, is_kept = stage.key in present, stage.key not in unkept
            # While one is idle its stage is here, and another over it is but a creation; without any, it has to be built first.
            refill_s = create_s if is_present else refill_s + step_s
            cold_s = create_s if is_present and is_kept else cold_s + step_s
            if stage.name == "base":
                continue  # a sandbox without an image is of use to nobody
            if stage.key not in rungs:
                rungs[stage.key] = _Rung(len(rungs), stage, rung, costs.of("bind"))
            rung = rungs[stage.key]
            rung.step_s, rung.cold_s, rung.refill_s = step_s, cold_s, max(_LEAST_REFILL_S, refill_s)
            rung.is_present = is_present
            rung.next_s = create_s if is_present and not is_kept else None
            rung.memory_mib = max(rung.memory_mib, one.memory_mib)
            rung.hit_rate = max(rung.hit_rate, one.hit_rate)
        if rung is not None:
            rung.own.append(one)
    for rung in rungs.values():
        if given := [one.refill_s for one in rung.own if one.refill_s is not None]:
            rung.refill_s = max(_LEAST_REFILL_S, *given)
        starting += sum(one.rate_per_s for one in rung.own) * rung.refill_s
    # What is started waits for what is being started: the busier, the longer until one is replaced.
    busy = min(_BUSIEST, starting / max(1, budget.starting))
    rate_per_s = sum(one.rate_per_s for one in demand)
    burst = sum(one.rate_per_s * one.burst for one in demand) / rate_per_s if rate_per_s else 1.0
    for rung in rungs.values():
        rung.refill_s /= 1.0 - busy
        rung.everybody = Arrivals(rate_per_s * rung.refill_s, burst)
    return list(rungs.values())
