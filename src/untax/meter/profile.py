"""What one way of running was measured to cost: once for each rollout, and with every action. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from untax.meter import project
from untax.meter.gather import Gathered, Samples, Series
from untax.meter.knee import loads
from untax.meter.stats import Interval
from untax.pool.choice import Expected


@dataclass(frozen=True, slots=True)
class Profile:
    """Mean seconds of a substrate reached over one path."""

    substrate: str
    path: str
    isolation: str
    start_s: float
    """Cold, until a command could run: queue, create, ready."""
    setup_s: float
    """What a cold rollout puts in place before its actions."""
    end_s: float
    own_s: float
    """An action's own time, inside."""
    way_s: float
    """What an action pays beside it: dispatch, observe, unattributed."""
    n: int
    failed_share: float = 0.0
    """Of trials; their time is paid for by the others."""
    reset_s: float | None = None
    """None where no reset was measured: the sandbox is replaced."""
    warm_s: float | None = None
    """From asking for a warm one until a command could run; None where no warm start was measured."""
    warm_end_s: float | None = None
    warm_note: str = ""
    """What the record says about where the warm one came from."""
    own_by_tier: Mapping[str, float] = field(default_factory=dict)
    spread: Interval = field(default_factory=lambda: Interval(1.0, 1.0))
    """Of the mean total, as a multiple of it: 95 %."""
    knee: int | None = None
    """From how many at once on this machine more no longer bring more."""
    price: float | None = None
    """Of an hour of it, where that is not a worker's."""

    @property
    def name(self) -> str:
        return str(Series(self.substrate, self.path))

    def fixed_s(self, resets: float = 0.0) -> float:
        """What a cold rollout pays whatever its length."""
        return self.start_s + self.setup_s + self.end_s + resets * self.replacement_s

    @property
    def replacement_s(self) -> float:
        """A clean sandbox in the middle of a rollout."""
        return self.reset_s if self.reset_s is not None else self.start_s + self.setup_s + self.end_s

    def action_s(self, mix: Mapping[str, float] | None = None) -> float:
        return self.way_s + self.own(mix)

    def own(self, mix: Mapping[str, float] | None = None) -> float:
        """An action's own time, of the trajectories that were measured or as tiers are mixed."""
        return sum(share * self.own_by_tier[tier] for tier, share in mix.items()) if mix else self.own_s


def profiles(
    run: Gathered, isolation: Mapping[str, str], tier: str | None = None, prices: Mapping[str, float] | None = None
) -> list[Profile]:
    """One for each cold series whose substrate's isolation level is known and that ran with it, under the name that it ran as. `tier`: whose
    trajectories; the heaviest unless told. `prices` of an hour are by the run's names for substrates.
    """
    if not run.tiers:
        return []
    tier = project.tier_for(run, tier)
    knees = {load.series: load.knee for load in loads(run)}
    found = []
    for series in run.series:
        samples = _longest(run, series, tier)
        if series.warmth != "cold" or series.substrate not in isolation or samples is None or not samples.actions:
            continue
        if samples.is_of(isolation[series.substrate]):  # otherwise it has neither this one's boundary nor its speed
            one = _profile(run, series, samples, isolation[series.substrate], knees.get(series))
            found.append(replace(one, price=(prices or {}).get(series.substrate)))
    return found


def expected(found: Iterable[Profile]) -> list[Expected]:
    """What `Engine("auto")` chooses by: the held channel's costs beside the agent's own commands."""
    return [Expected(one.substrate, one.isolation, one.start_s, one.way_s, one.end_s, "measured") for one in found if one.path == "channel"]


def _profile(run: Gathered, series: Series, samples: Samples, isolation: str, knee: int | None) -> Profile:
    parts = samples.mean_parts
    actions = samples.actions / samples.n
    warm = _longest(run, Series(series.substrate, series.path, "warm"), samples.case.tier)
    warm_parts = warm.mean_parts if warm else None
    estimate = project.sample_estimate(samples)
    return Profile(
        substrate=samples.ran_as,
        path=series.path,
        isolation=isolation,
        start_s=parts["queue"] + parts["create"] + parts["ready"],
        setup_s=parts["setup"],
        end_s=parts["cleanup"],
        own_s=parts["action"] / actions,
        way_s=(parts["dispatch"] + parts["observe"] + parts["unattributed"]) / actions,
        n=samples.n,
        failed_share=samples.failed / (samples.n + samples.failed),
        reset_s=parts["reset"] or None,
        warm_s=sum(warm_parts[name] for name in ("queue", "create", "ready", "setup")) if warm_parts else None,
        warm_end_s=warm_parts["cleanup"] if warm_parts else None,
        warm_note=warm.detail.get("warm", "") if warm else "",
        own_by_tier={
            tier: one.parts["action"] / one.actions
            for tier in run.tiers
            if (one := run.of(series, tier) or _longest(run, series, tier)) and one.actions
        },
        spread=estimate.interval.scaled(1 / estimate.value) if estimate.value else Interval(1.0, 1.0),
        knee=knee,
    )


def _longest(run: Gathered, series: Series, tier: str) -> Samples | None:
    for length in (*reversed(run.lengths(tier)), 0):
        if found := run.of(series, tier, length):
            return found
    return None
