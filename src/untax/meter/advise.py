"""Which substrate, isolation and pool size suit rollouts, from what was measured. Pure.

A rollout of L actions costs what comes once plus L times what comes with every action. A pool of k idle sandboxes hides the start of those
rollouts that find one; the others start cold. An idle sandbox costs as well. Nothing weaker than the boundary asked for is ever offered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from untax.core.errors import UsageError
from untax.core.spec import ISOLATION_LEVELS, is_as_strong
from untax.meter import units
from untax.meter.profile import Profile
from untax.meter.record import HELD
from untax.meter.stats import Interval
from untax.pool.choice import rollout_s
from untax.pool.sizing import Demand, hit_rate

By = Literal["cost", "time"]

_HIT_RATES = (0.5, 0.9, 0.99)
"""Pools are sized for so many of the leases to find an idle sandbox."""
_MOST_POOL = 100_000


@dataclass(frozen=True, slots=True)
class Rollouts:
    """What is to be run."""

    length: float = 150
    isolation: str = "namespace"
    """The weakest boundary accepted."""
    parallel: int = 1
    """Rollouts under way at once."""
    resets: float = 0.0
    """Clean sandboxes that a rollout needs beside its first."""
    mix: Mapping[str, float] = field(default_factory=dict)
    """Shares of actions by the tier they resemble; empty for the measured trajectories' own mix."""
    price: float = 1.0
    """Of a worker-hour, where a substrate has no price of its own."""
    idle_share: float = 1.0
    """What an idle sandbox costs, as a share of a busy one."""
    burst: float = 1.0
    """Variance of arrivals over their mean; 1 when rollouts begin independently, their number when they begin together."""

    def __post_init__(self) -> None:
        if self.isolation not in ISOLATION_LEVELS:
            raise UsageError(f"isolation must be one of {', '.join(ISOLATION_LEVELS)}, not {self.isolation!r}")
        for name, least in (("length", 1), ("parallel", 1), ("resets", 0), ("price", 0), ("idle_share", 0), ("burst", 1)):
            if not least <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} must be {least} or more, not {getattr(self, name)}")
        if self.mix:
            if any(share < 0 for share in self.mix.values()) or sum(self.mix.values()) <= 0:
                raise UsageError("the shares of a mix must be positive")
            total = sum(self.mix.values())
            object.__setattr__(self, "mix", {tier: share / total for tier, share in self.mix.items()})


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run them."""

    profile: Profile
    pool: int
    hit_rate: float
    seconds: float
    """Of a worker for one rollout, on average."""
    interval: Interval
    cost: float
    """Of one rollout, with its share of the idle pool."""
    tax_share: float
    """Of the seconds, what is not the agent's own commands."""
    is_assumed: bool
    """No warm start was measured: a pool is taken to hide create and ready, and nothing else."""

    @property
    def name(self) -> str:
        return f"{self.profile.name}, pool of {self.pool}" if self.pool else f"{self.profile.name}, no pool"


@dataclass(frozen=True, slots=True)
class BreakEven:
    """`short` is quicker up to `length` actions, `long` from there on. None: `short` is quicker at any length."""

    short: str
    long: str
    length: float | None


@dataclass(frozen=True, slots=True)
class Advice:
    by: By
    options: tuple[Option, ...]
    """Best first."""
    reasons: tuple[str, ...]
    break_evens: tuple[BreakEven, ...]
    left_out: Mapping[str, str]
    """Profiles that are not offered, and why."""

    @property
    def best(self) -> Option:
        return self.options[0]


def advise(profiles: Sequence[Profile], rollouts: Rollouts, *, by: By = "cost") -> Advice:
    """Rank everything that is allowed. `UsageError` when nothing is."""
    allowed, left_out = [], {}
    for profile in profiles:
        missing = [tier for tier in rollouts.mix if tier not in profile.own_by_tier]
        if not is_as_strong(profile.isolation, as_required=rollouts.isolation):
            left_out[profile.name] = f"its isolation is {profile.isolation!r}, weaker than {rollouts.isolation!r}"
        elif missing:
            left_out[profile.name] = f"it was not measured on {', '.join(missing)}, which the mix has"
        else:
            allowed.append(profile)
    if not allowed:
        why = "; ".join(f"{name}: {reason}" for name, reason in left_out.items()) or "nothing was measured"
        raise UsageError(
            f"no measured substrate will do ({why}); measure one with isolation {rollouts.isolation!r} or stronger: `untax bench`"
        )
    options = [option for profile in allowed for option in _options(profile, rollouts)]
    # Equal in what is asked for, the stronger boundary and the smaller pool win.
    options.sort(key=lambda one: (_worth(one, by), -ISOLATION_LEVELS.index(one.profile.isolation), one.pool))
    return Advice(by, tuple(options), tuple(_reasons(options, rollouts, by)), tuple(_break_evens(allowed, rollouts)), left_out)


# ---- options ----


def _options(profile: Profile, rollouts: Rollouts) -> list[Option]:
    found = [_option(profile, rollouts, 0)]
    sizes = {_pool_for(profile, rollouts, rate) for rate in _HIT_RATES}
    return found + [_option(profile, rollouts, size) for size in sorted(sizes - {0})]


def _option(profile: Profile, rollouts: Rollouts, pool: int) -> Option:
    cold_s = profile.start_s + profile.setup_s
    warm_s = _warm_s(profile)
    hits = _hits(profile, rollouts, pool) if pool else 0.0
    end_s = hits * (profile.warm_end_s if profile.warm_end_s is not None else profile.end_s) + (1 - hits) * profile.end_s
    seconds = rollout_s(
        start_s=hits * warm_s + (1 - hits) * cold_s,
        action_s=profile.action_s(rollouts.mix),
        actions=rollouts.length,
        end_s=end_s,
        resets=rollouts.resets,
        replacement_s=profile.replacement_s,
    )
    paid_s = seconds / (1 - profile.failed_share)
    idle_s = pool * rollouts.idle_share * paid_s / rollouts.parallel
    own_s = rollouts.length * profile.own(rollouts.mix)
    return Option(
        profile,
        pool,
        hits,
        paid_s,
        profile.spread.scaled(paid_s),
        (paid_s + idle_s) * (rollouts.price if profile.price is None else profile.price) / 3600,
        1 - own_s / paid_s if paid_s else 0.0,
        is_assumed=bool(pool) and profile.warm_s is None,
    )


def _warm_s(profile: Profile) -> float:
    """What a lease from a pool takes; where that was not measured, the set-up, which a pool of bare sandboxes does not hide."""
    return profile.warm_s if profile.warm_s is not None else profile.setup_s


def _demand(profile: Profile, rollouts: Rollouts) -> Demand:
    rollout_s = _warm_s(profile) + rollouts.length * profile.action_s(rollouts.mix) + profile.end_s
    return Demand(stages=(), rate_per_s=rollouts.parallel / max(rollout_s, 1e-9), burst=rollouts.burst)


def _refill_s(profile: Profile) -> float:
    return profile.start_s + (profile.setup_s if profile.warm_s is not None else 0.0)


def _hits(profile: Profile, rollouts: Rollouts, pool: int) -> float:
    return hit_rate(_demand(profile, rollouts), pool, _refill_s(profile))


def _pool_for(profile: Profile, rollouts: Rollouts, rate: float) -> int:
    """The smallest pool with that hit rate; never more than run at once, for each of them takes one."""
    low, high = 1, min(max(1, rollouts.parallel), _MOST_POOL)
    while low < high:
        middle = (low + high) // 2
        if _hits(profile, rollouts, middle) >= rate:
            high = middle
        else:
            low = middle + 1
    return low


def _worth(option: Option, by: By) -> float:
    return option.cost if by == "cost" else option.seconds


# ---- why ----


def _reasons(options: Sequence[Option], rollouts: Rollouts, by: By) -> list[str]:
    best = options[0]
    profile = best.profile
    work_s, fixed_s = rollouts.length * profile.action_s(rollouts.mix), profile.fixed_s(rollouts.resets)
    found = [f"{profile.name} has isolation {profile.isolation!r}; {rollouts.isolation!r} was asked for."]
    found.append(
        f"A rollout of {rollouts.length:g} actions takes {units.seconds(best.seconds)} of a worker on it: {units.seconds(work_s)} for its actions, "
        f"of which {units.seconds(rollouts.length * profile.way_s)} on their way, and {units.seconds(fixed_s)} once for each cold rollout."
    )
    if best.pool:
        saved = profile.start_s + profile.setup_s - _warm_s(profile)
        found.append(
            f"A pool of {best.pool} is found by {units.share(best.hit_rate)} of leases and saves each {units.seconds(saved)}; "
            f"with {rollouts.parallel} at once, {best.pool} idle ones are {units.share(best.pool / rollouts.parallel)} more sandboxes."
        )
    else:
        pooled = [one for one in options if one.profile is profile and one.pool]
        if pooled:
            found.append(
                f"A pool of {pooled[0].pool} would save {units.seconds(best.seconds - pooled[0].seconds)} a rollout and cost more than that in idle sandboxes."
            )
    others = [one for one in options if one.profile is not profile]
    if others:
        second = others[0]
        is_close = by == "time" and best.interval.overlaps(second.interval)
        more = _worth(second, by) / _worth(best, by) if _worth(best, by) else math.inf
        tail = "; their 95 % intervals overlap, so this is not a difference to rely on" if is_close else ""
        found.append(f"The next best is {second.name}: {units.times(more)} the {by}{tail}.")
    if profile.reset_s is None and rollouts.resets:
        found.append("No reset was measured on it: each is counted as a new sandbox.")
    if best.is_assumed:
        found.append(
            "No warm start was measured on it: the pool is taken to hide create and ready, and nothing else. Measure it: `untax bench` with warm cases."
        )
    if best.pool and profile.warm_note == HELD:
        found.append(f"The warm sandboxes of its trials were {profile.warm_note}, so what a lease from a pool costs is not in its start.")
    if profile.knee and rollouts.parallel > profile.knee:
        found.append(
            f"On the machine of this run more than {profile.knee} at once brought no more rollouts per second: {math.ceil(rollouts.parallel / profile.knee)} such machines."
        )
    if profile.failed_share:
        found.append(f"{units.share(profile.failed_share)} of its trials failed, and are paid for by the others.")
    return found


def _break_evens(profiles: Sequence[Profile], rollouts: Rollouts) -> list[BreakEven]:
    """Of every two, without pools: where the one with the cheaper start gives way to the one with the cheaper actions."""
    found = []
    for n, one in enumerate(profiles):
        for other in profiles[n + 1 :]:
            # Own time is the agent's, and what it differs by between substrates is noise as often as not: only the way counts.
            short, long = sorted((one, other), key=lambda profile: profile.fixed_s(rollouts.resets))
            once = long.fixed_s(rollouts.resets) - short.fixed_s(rollouts.resets)
            each = short.way_s - long.way_s
            if each > 0 and once / each <= 1:  # before the first action is done
                short, long, each = long, short, 0.0
            found.append(BreakEven(short.name, long.name, once / each if each > 0 else None))
    return found
