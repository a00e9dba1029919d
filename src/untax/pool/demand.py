"""Who asks for what, how often and for how long, as measured; and the sizes that follow from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import replace

from untax.core.stage import Stage
from untax.pool import events as ev
from untax.pool.costs import Costs
from untax.pool.options import PoolOptions
from untax.pool.sizing import Budget, Demand, Rate, plan

_PERIOD_S = 0.25  # between two plans, while somebody comes: one takes about a millisecond for twenty specs
# Demand is the mean of what it was lately and of what it is used to be. On the traces of `benchmarks/adaptive`, ten seconds alone
# are too few for groups that come seldom, and a minute alone is too long for what moves from spec to spec.
_BIN_S, _LATELY_S, _USUALLY_S = 1.0, 10.0, 60.0
_MOST_SPECS = 256  # whose demand is remembered; those not asked for for longest are forgotten first
_WEIGHT = 0.2  # of the newest hold time
_RARE_PER_S = 1e-3  # asked for less often than this, a spec is nobody's habit any more


class _Spec:
    __slots__ = ("hold_s", "lately", "memory_mib", "stages", "usually")

    def __init__(self, stages: tuple[Stage, ...], memory_mib: float) -> None:
        self.stages = stages
        self.memory_mib = memory_mib
        self.lately = Rate(bin_s=_BIN_S, memory_s=_LATELY_S)
        self.usually = Rate(bin_s=_BIN_S, memory_s=_USUALLY_S)
        self.hold_s = 0.0

    def arrived(self, now_s: float) -> None:
        self.lately.arrived(now_s)
        self.usually.arrived(now_s)

    def per_s(self, now_s: float) -> float:
        return (self.lately.per_s(now_s) + self.usually.per_s(now_s)) / 2


class Demands:
    def __init__(self, options: PoolOptions, costs: Costs, *, shares_stages: bool) -> None:
        self._options = options
        self._shares_stages = shares_stages
        self._costs = costs
        self._specs: OrderedDict[str, _Spec] = OrderedDict()
        self._count = self._planned_at = 0
        self.period_s = _PERIOD_S
        self._has_targets = False

    def came(self, stages: tuple[Stage, ...], memory_mib: float, now_s: float) -> tuple[Stage, ...]:
        """Gives the stages that are new."""
        key = stages[-1].key
        spec = self._specs.get(key)
        is_new = spec is None
        if spec is None:
            spec = self._specs[key] = _Spec(stages, memory_mib)
            if len(self._specs) > _MOST_SPECS:
                self._specs.popitem(last=False)
        self._specs.move_to_end(key)
        spec.memory_mib = memory_mib
        spec.arrived(now_s)
        self._count += 1
        return stages if is_new else ()

    def held(self, key: str, seconds: float) -> None:
        spec = self._specs.get(key)
        if spec is not None:
            spec.hold_s = spec.hold_s + _WEIGHT * (seconds - spec.hold_s) if spec.hold_s else seconds

    @property
    def is_busy(self) -> bool:
        """Whether the next plan may differ from the last one."""
        return self._count != self._planned_at or self._has_targets

    def targets(
        self, floors: Mapping[str, ev.Target], starting: int, present: Collection[str], unkept: Collection[str], now_s: float
    ) -> dict[str, ev.Target]:
        """By stage key, the floors included."""
        self._planned_at = self._count
        demand, rungs = [], dict[str, tuple[tuple[Stage, ...], float]]()
        for key, spec in list(self._specs.items()):
            rate_per_s = spec.per_s(now_s)
            if rate_per_s < _RARE_PER_S:
                del self._specs[key]
                continue
            demand.append(
                Demand(
                    spec.stages,
                    rate_per_s,
                    spec.usually.burst(now_s),
                    hold_s=spec.hold_s,
                    memory_mib=spec.memory_mib,
                    hit_rate=self._options.hit_rate,
                )
            )
            for rung in range(len(spec.stages)):
                _, memory_mib = rungs.get(spec.stages[rung].key, ((), 0.0))
                rungs[spec.stages[rung].key] = (spec.stages[: rung + 1], max(memory_mib, spec.memory_mib))
        budget = Budget(self._options.memory_mib, self._options.entries, starting)
        sizes = plan(demand, budget, self._costs, present=present, unkept=unkept)
        planned = {key: ev.Target(rungs[key][0], count, rungs[key][1], may_build=not self._shares_stages) for key, count in sizes.items()}
        self._has_targets = bool(planned)
        for key, floor in floors.items():
            if key not in planned or planned[key].count < floor.count:
                planned[key] = floor
            else:
                planned[key] = replace(planned[key], may_build=True)
        return planned
