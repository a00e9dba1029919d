"""From seconds per trajectory to worker-hours, money and workers at the scale of a training run. Pure.

Worker-hours = trajectories × seconds ÷ 3600 (the paper's Eq. 2). Seconds are those of a rollout worker: the mean, because a sum of many is as
many times the mean, with failed trials and retries paid for by the trajectories that went well. The demand for rollout workers is
all that this is: inference, rewards and queues elsewhere are not in it.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from untax.core.errors import UsageError
from untax.meter.gather import Gathered, Samples, Series
from untax.meter.stats import Interval, interval_of, of_ordered

SCALES = (10_000, 100_000, 1_000_000, 10_000_000)
STEPS = (10, 25, 50, 100, 150, 200, 300)
BATCHES = (8, 32, 128, 512)

_DRAWS = 500
_STALL_DRAWS = 200
_MOST_RESAMPLED = 2000
_SEED = 20260702
_PER_ACTION = ("action", "dispatch", "observe", "unattributed")
"""Parts that come again with every action; the others come once."""


def worker_hours(seconds_per_trajectory: float, trajectories: float) -> float:
    return trajectories * seconds_per_trajectory / 3600


def workers_for(hours: float, wall_clock_h: float) -> int:
    """How many must work side by side, always busy, to be done in `wall_clock_h`."""
    return math.ceil(hours / wall_clock_h - 1e-9)


def as_printed(text: str) -> tuple[float, Interval]:
    """A number that somebody typed, and everything that would be rounded to it: "42.5" is from 42.45 to 42.55.

    One of fewer than three digits ("10 ms") is a round number that somebody chose, and stands for itself.
    """
    try:
        value = float(text)
    except ValueError:
        raise UsageError(f"{text!r} is no number of seconds; write something like 42.5") from None
    if not math.isfinite(value) or value <= 0:
        raise UsageError(f"{text} is no time that a trajectory could take; it must be more than 0")
    mantissa, _, exponent = text.lower().strip().partition("e")
    places = len(mantissa.partition(".")[2])
    is_measured = len(mantissa.replace(".", "").lstrip("+0")) >= 3
    half = 0.5 * 10.0 ** (int(exponent or 0) - places) if is_measured else 0.0
    return value, Interval(max(0.0, value - half), value + half)


# ---- seconds by length ----


@dataclass(frozen=True, slots=True)
class Estimate:
    value: float
    interval: Interval
    is_extrapolated: bool = False

    def scaled(self, factor: float) -> Estimate:
        return Estimate(self.value * factor, self.interval.scaled(factor), self.is_extrapolated)

    def hours(self, trajectories: float) -> Estimate:
        return self.scaled(trajectories / 3600)


@dataclass(frozen=True, slots=True)
class ByLength:
    """Seconds of a worker for a trajectory of any length: a line between the lengths that were measured, and straight on beyond them.

    Where only one length was measured, the line is drawn by its parts: what comes once, and what comes with every action.
    """

    points: Mapping[int, float]
    draws: Mapping[int, Sequence[float]]
    trials: Mapping[int, int]
    """How many went well, of each length."""
    slope: float | None = None
    """Seconds for one more action, where one length must do."""

    def at(self, length: float) -> Estimate:
        first, last = min(self.points), max(self.points)
        values = [self._line(length, {point: series[n] for point, series in self.draws.items()}) for n in range(_DRAWS)]
        return Estimate(self._line(length, self.points), interval_of(values), is_extrapolated=not first <= length <= last)

    def n_at(self, length: float) -> int:
        """Trials behind `at(length)`: those of that length where it was measured, else those of the lengths that its line goes through."""
        return sum(n for one, n in self.trials.items() if (one == length if length in self.trials else one in self._ends(length)))

    @property
    def per_action(self) -> float:
        """Seconds for one more action, over the measured lengths."""
        if self.slope is not None:
            return self.slope
        first, last = min(self.points), max(self.points)
        return (self.points[last] - self.points[first]) / (last - first)

    @property
    def fixed(self) -> float:
        """Seconds that a trajectory costs before its first action and after its last."""
        last = max(self.points)
        return max(0.0, self.points[last] - self.per_action * last)

    def _line(self, length: float, points: Mapping[int, float]) -> float:
        if self.slope is not None:
            ((point, value),) = points.items()
            scale = value / self.points[point] if self.points[point] else 1.0
            return max(0.0, value + self.slope * scale * (length - point))
        a, b = self._ends(length)
        return max(0.0, points[a] + (points[b] - points[a]) * (length - a) / (b - a))

    def _ends(self, length: float) -> list[int]:
        """The two measured lengths whose line is taken, or the only one."""
        lengths = sorted(self.points)
        upper = next((n for n in range(1, len(lengths)) if lengths[n] >= length), len(lengths) - 1)
        return lengths[max(0, upper - 1) : upper + 1]


def by_length(run: Gathered, series: Series, tier: str) -> ByLength | None:
    """From trajectories of `tier`, or from the tier itself in a run that has none; None where nothing went well.

    In a run that has some, a series without is not guessed at: a tier's own few actions are heavier than those of a trajectory, and the guess would
    stand beside what was measured.
    """
    lengths = run.lengths(tier)
    found = {length: samples for length in lengths if (samples := run.of(series, tier, length)) is not None}
    if not found:
        samples = run.of(series, tier)
        if lengths or samples is None or not samples.actions:
            return None
        found = {max(1, round(samples.actions / samples.n)): samples}
    points = {length: samples.worker_per_trajectory for length, samples in found.items()}
    trials = {length: samples.n for length, samples in found.items()}
    rng = random.Random(_SEED)
    draws = {length: worker_draws(samples, rng) for length, samples in found.items()}
    if len(found) > 1:
        return ByLength(points, draws, trials)
    ((length, samples),) = found.items()
    parts = samples.mean_parts
    return ByLength(points, draws, trials, slope=sum(parts[name] for name in _PER_ACTION) / length)


def sample_estimate(samples: Samples) -> Estimate:
    """The worker's seconds for a trajectory of one case."""
    return Estimate(samples.worker_per_trajectory, interval_of(worker_draws(samples, random.Random(_SEED))))


def worker_draws(samples: Samples, rng: random.Random) -> list[float]:
    """Bootstrap draws of the worker's seconds for each trajectory that went well; failures are drawn too, and paid for."""
    paid = [(seconds, 1) for seconds in samples.worker] + [(seconds, 0) for seconds in samples.lost]
    n = len(paid)
    value = samples.worker_per_trajectory
    if n > _MOST_RESAMPLED:  # the limit: a ratio of two means is normal, with the variance of its linear part
        good = samples.n / n
        sd = math.sqrt(math.fsum(((seconds - value * ok) / good) ** 2 for seconds, ok in paid) / (n - 1))
        return [rng.gauss(value, sd / math.sqrt(n)) for _ in range(_DRAWS)]
    if not samples.lost:
        return [sum(rng.choices(samples.worker, k=n)) / n for _ in range(_DRAWS)]
    draws = []
    for _ in range(_DRAWS):
        drawn = rng.choices(paid, k=n)
        draws.append(sum(seconds for seconds, _ in drawn) / max(1, sum(ok for _, ok in drawn)))
    return draws


# ---- projections ----


@dataclass(frozen=True, slots=True)
class Projection:
    """One series at one length and scale."""

    series: Series
    n: int
    """Trials behind it that went well."""
    seconds: Estimate
    hours: Estimate
    more_hours: float
    """Than the fastest of those compared."""
    ratio: float
    """To the fastest of those compared."""


def tier_for(run: Gathered, wanted: str | None = None) -> str:
    """The tier to project from: the one asked for, or the heaviest that has trajectories."""
    if wanted is not None:
        if wanted not in run.tiers:
            raise UsageError(f"the run has no tier {wanted!r}; it has {', '.join(run.tiers) or 'none'}")
        return wanted
    if not run.tiers:
        raise UsageError(f"{run.path}: no trial of a plain case went well, so there is nothing to project from")
    return next((tier for tier in reversed(run.tiers) if run.lengths(tier)), run.tiers[-1])


def models(run: Gathered, tier: str) -> dict[Series, ByLength]:
    """Of every series that can be projected (`by_length`)."""
    found = ((series, by_length(run, series, tier)) for series in run.series)
    return {series: model for series, model in found if model is not None}


def unprojected(run: Gathered, tier: str, by_series: Mapping[Series, ByLength]) -> list[Series]:
    """Those with trials of the tier itself and without the trajectories that others have."""
    return [series for series in run.series if series not in by_series and run.of(series, tier) is not None]


def project(by_series: Mapping[Series, ByLength], *, steps: float, trajectories: float) -> list[Projection]:
    """Every series, the fastest first."""
    found = [(series, model.n_at(steps), model.at(steps)) for series, model in by_series.items()]
    found.sort(key=lambda one: one[2].value)
    if not found:
        return []
    fastest = found[0][2].value
    return [
        Projection(
            series,
            n,
            seconds,
            seconds.hours(trajectories),
            worker_hours(seconds.value - fastest, trajectories),
            seconds.value / fastest if fastest else math.nan,
        )
        for series, n, seconds in found
    ]


def sensitivity(model: ByLength, steps: Sequence[int] = STEPS, scales: Sequence[int] = SCALES) -> dict[int, dict[int, Estimate]]:
    """Worker-hours for every length and scale: by steps, then by trajectories."""
    rows = {}
    for length in steps:
        seconds = model.at(length)
        rows[length] = {scale: seconds.hours(scale) for scale in scales}
    return rows


# ---- a batch that waits for its slowest ----


@dataclass(frozen=True, slots=True)
class Stall:
    """A synchronous batch of `batch` rollouts: everybody waits for the slowest."""

    batch: int
    slowest: Estimate
    """Expected seconds of the slowest."""
    waiting: float
    """Share of the workers' time that is spent waiting for it."""
    is_floor: bool
    """The batch has more rollouts than there were trials: slower ones than were ever measured are to be expected."""


def stalls(samples: Sequence[float], batches: Sequence[int]) -> list[Stall]:
    """From measured durations of rollouts; a sample is as likely as any other to be a rollout of the batch."""
    ordered = sorted(samples)
    n = len(ordered)
    mean = math.fsum(ordered) / n
    rng = random.Random(_SEED)
    drawn = min(n, _MOST_RESAMPLED)
    draws: list[list[float]] = [[] for _ in batches]
    for _ in range(_STALL_DRAWS):
        resample = sorted(rng.choices(ordered, k=drawn))
        for values, batch in zip(draws, batches, strict=True):
            values.append(_expected_slowest(resample, batch))
    # Fewer than all were drawn from very many; what they vary by shrinks with the root of how many there are.
    shrink = math.sqrt(drawn / n)
    found = []
    for values, batch in zip(draws, batches, strict=True):
        slowest = _expected_slowest(ordered, batch)
        interval = interval_of([slowest + shrink * (draw - slowest) for draw in values])
        found.append(Stall(batch, Estimate(slowest, interval), 1 - mean / slowest if slowest else 0.0, batch > n))
    return found


def _expected_slowest(ordered: Sequence[float], batch: int) -> float:
    """The i-th of n samples is the slowest of a batch with the chance (i/n)^batch − ((i−1)/n)^batch."""
    n = len(ordered)
    total, above = 0.0, 1.0
    for i in range(n, 0, -1):
        below = ((i - 1) / n) ** batch
        total += ordered[i - 1] * (above - below)
        if below < 1e-12:
            break
        above = below
    return total


def median_of(run: Gathered, series: Series, tier: str, length: int) -> float | None:
    """The median total of a length that was measured; None for one that was not."""
    samples = run.of(series, tier, length)
    return of_ordered(sorted(samples.total), 50) if samples else None
