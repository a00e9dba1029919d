"""What samples say: percentiles, spread, 95 % intervals, differences. Pure, and nothing but Python.

The intervals of percentiles are those of the bootstrap, without the resampling: the k-th smallest of a resample of n is the sample at rank
⌈n·U⌉, where U has the beta distribution B(k, n − k + 1). Its quantiles are what infinitely many resamples would come to, exactly, for ten
samples as for a million, so no numerical library is needed and two reports of one file agree to the last digit. Means and
standard deviations are resampled from a fixed seed, or taken from their limit where there are thousands.
"""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import mul
from typing import Literal

LEVEL = 0.95
_TAIL = (1 - LEVEL) / 2
_Z = 1.959963984540054  # the normal quantile of 1 − _TAIL
_RESAMPLES = 500  # of a mean; the ends of its interval then move by about a thirtieth of its width
_DRAWS = 1024  # of a percentile, evenly through its distribution
_KNOTS = 400  # at which that distribution is looked at, where samples are very many
_MOST_RESAMPLED = 2000  # samples; from there on the limit is nearer than a thousand resamples are
_SEED = 20260701  # of resamples, so that a report is a function of its records
_FENCE = 3.0  # quartile distances beyond a quartile: Tukey's "far out"

Effect = Literal["negligible", "small", "medium", "large"]


@dataclass(frozen=True, slots=True)
class Interval:
    """Where a statistic lies with 95 % confidence. `is_open`: too few samples to say how large it may be; `high` is the largest seen."""

    low: float
    high: float
    is_open: bool = False

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def scaled(self, factor: float) -> Interval:
        return Interval(self.low * factor, self.high * factor, self.is_open)

    def overlaps(self, other: Interval) -> bool:
        return self.low <= other.high and other.low <= self.high


@dataclass(frozen=True, slots=True)
class Spread:
    """How samples lie, in the unit they came in (seconds, everywhere in the meter)."""

    n: int
    p50: float
    p95: float
    p99: float
    mean: float
    sd: float
    min: float
    max: float
    p25: float
    p75: float
    p05: float
    p50_interval: Interval
    p95_interval: Interval
    p99_interval: Interval
    mean_interval: Interval
    sd_interval: Interval
    far_out: int
    """Samples more than three quartile distances beyond a quartile. They are counted here and are in everything above."""


@dataclass(frozen=True, slots=True)
class Difference:
    """How `b` compares with `a`: medians subtracted and divided, and how often one of `b` is larger than one of `a`."""

    seconds: float
    seconds_interval: Interval
    ratio: float
    ratio_interval: Interval
    delta: float
    """Cliff's delta: P(b > a) − P(b < a). 1: every one of b is slower; 0: no telling them apart."""
    effect: Effect

    @property
    def is_told_apart(self) -> bool:
        """Whether the interval of the difference leaves zero out."""
        return self.seconds_interval.low > 0 or self.seconds_interval.high < 0


def spread(samples: Sequence[float]) -> Spread:
    """Everything about `samples`, which must not be empty."""
    ordered = sorted(samples)
    n = len(ordered)
    mean = math.fsum(ordered) / n
    sd = math.sqrt(math.fsum((x - mean) ** 2 for x in ordered) / (n - 1)) if n > 1 else 0.0
    mean_interval, sd_interval = _moment_intervals(ordered, mean, sd)
    p25, p75 = of_ordered(ordered, 25), of_ordered(ordered, 75)
    low, high = p25 - _FENCE * (p75 - p25), p75 + _FENCE * (p75 - p25)
    return Spread(
        n=n,
        p50=of_ordered(ordered, 50),
        p95=of_ordered(ordered, 95),
        p99=of_ordered(ordered, 99),
        mean=mean,
        sd=sd,
        min=ordered[0],
        max=ordered[-1],
        p25=p25,
        p75=p75,
        p05=of_ordered(ordered, 5),
        p50_interval=percentile_interval(ordered, 50),
        p95_interval=percentile_interval(ordered, 95),
        p99_interval=percentile_interval(ordered, 99),
        mean_interval=mean_interval,
        sd_interval=sd_interval,
        far_out=bisect.bisect_left(ordered, low) + n - bisect.bisect_right(ordered, high),
    )


# ---- percentiles ----


def percentile(samples: Sequence[float], q: float) -> float:
    """The `q`-th percentile (0 to 100), interpolated linearly between neighbours; NaN of nothing."""
    return of_ordered(sorted(samples), q)


def of_ordered(ordered: Sequence[float], q: float) -> float:
    """`percentile` of samples that are in order already."""
    if not ordered:
        return math.nan
    at = (len(ordered) - 1) * q / 100
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def percentile_interval(ordered: Sequence[float], q: float) -> Interval:
    """The bootstrap interval of the `q`-th percentile of samples in order."""
    n = len(ordered)
    rank = (n - 1) * q / 100 + 1  # from 1, between two ranks where the percentile is
    low, high = (ordered[_at(n, beta_quantile(tail, rank, n - rank + 1))] for tail in (_TAIL, 1 - _TAIL))
    # With fewer samples than this, all of them lie below the true percentile too often for the largest to be a bound.
    return Interval(low, high, is_open=(q / 100) ** n > _TAIL)


def percentile_draws(ordered: Sequence[float], q: float) -> list[float]:
    """What the percentile of a resample comes to, in order: evenly through its distribution, which needs no chance."""
    return [ordered[rank] for rank in _resampled_ranks(len(ordered), q)]


@lru_cache(maxsize=1024)
def _resampled_ranks(n: int, q: float) -> tuple[int, ...]:
    """The ranks (from 0) that a resample's percentile has, one for each of `_DRAWS` equal shares of the beta distribution."""
    rank = (n - 1) * q / 100 + 1
    a, b = rank, n - rank + 1
    middle, wide = a / (a + b), 7 * math.sqrt(a * b / (a + b + 1)) / (a + b)
    first, last = max(0, math.floor(n * (middle - wide))), min(n, math.ceil(n * (middle + wide)))
    step = max(1, (last - first) // _KNOTS)  # of a million samples, not every rank is looked at
    found: list[int] = []
    for j in range(first + step, last + step, step):
        upto = beta_share(min(1.0, j / n), a, b) * _DRAWS
        while len(found) < _DRAWS and len(found) + 0.5 <= upto:
            found.append(min(n, j) - 1)
    return tuple(found + [min(n, last) - 1] * (_DRAWS - len(found)))


def _at(n: int, share: float) -> int:
    """The index of the sample below or at which `share` of all lie."""
    return min(n - 1, max(0, math.ceil(n * share) - 1))


# ---- means ----


def mean_draws(samples: Sequence[float], count: int, rng: random.Random) -> list[float]:
    """`count` draws of the mean of a resample; from its limit, the normal distribution, where samples are many."""
    n = len(samples)
    if n > _MOST_RESAMPLED:
        mean = math.fsum(samples) / n
        sd = math.sqrt(math.fsum((x - mean) ** 2 for x in samples) / (n - 1))
        return [rng.gauss(mean, sd / math.sqrt(n)) for _ in range(count)]
    return [sum(rng.choices(samples, k=n)) / n for _ in range(count)]


def interval_of(draws: Sequence[float]) -> Interval:
    """The middle 95 % of draws."""
    ordered = sorted(draws)
    return Interval(of_ordered(ordered, 100 * _TAIL), of_ordered(ordered, 100 * (1 - _TAIL)))


def _moment_intervals(ordered: Sequence[float], mean: float, sd: float) -> tuple[Interval, Interval]:
    n = len(ordered)
    if n == 1:
        return Interval(mean, mean, is_open=True), Interval(0.0, 0.0, is_open=True)
    if n > _MOST_RESAMPLED:
        fourth = math.fsum((x - mean) ** 4 for x in ordered) / n
        error = math.sqrt(max(0.0, fourth - sd**4) / n) / (2 * sd) if sd else 0.0
        half = _Z * sd / math.sqrt(n)
        return Interval(mean - half, mean + half), Interval(max(0.0, sd - _Z * error), sd + _Z * error)
    rng = random.Random(_SEED)
    centred = [x - mean for x in ordered]  # or squares of large numbers would cancel
    means, deviations = [], []
    for _ in range(_RESAMPLES):
        drawn = rng.choices(centred, k=n)
        total = sum(drawn)
        means.append(mean + total / n)
        deviations.append(math.sqrt(max(0.0, (sum(map(mul, drawn, drawn)) - total * total / n) / (n - 1))))
    return interval_of(means), interval_of(deviations)


# ---- comparing ----


def difference(a: Sequence[float], b: Sequence[float]) -> Difference:
    """How `b` compares with `a`; neither is empty."""
    a, b = sorted(a), sorted(b)
    a_draws, b_draws = percentile_draws(a, 50), percentile_draws(b, 50)
    random.Random(_SEED).shuffle(b_draws)  # the two are resampled independently
    a50, b50 = of_ordered(a, 50), of_ordered(b, 50)
    delta = cliffs_delta(a, b)
    return Difference(
        seconds=b50 - a50,
        seconds_interval=interval_of([y - x for x, y in zip(a_draws, b_draws, strict=True)]),
        ratio=ratio(b50, a50),
        ratio_interval=interval_of([ratio(y, x) for x, y in zip(a_draws, b_draws, strict=True)]),
        delta=delta,
        effect=effect(delta),
    )


def ratio(above: float, below: float) -> float:
    """Of two durations; a duration of zero is shorter than any other by more than can be said."""
    return above / below if below > 0 else math.inf if above > 0 else 1.0


def cliffs_delta(a: Sequence[float], b: Sequence[float]) -> float:
    """P(b > a) − P(b < a), over all pairs."""
    a = sorted(a)
    smaller = sum(bisect.bisect_left(a, y) for y in b)
    not_larger = sum(bisect.bisect_right(a, y) for y in b)
    return (smaller - (len(a) * len(b) - not_larger)) / (len(a) * len(b))


def effect(delta: float) -> Effect:
    """In words, by the thresholds of Romano et al. (2006)."""
    size = abs(delta)
    return "negligible" if size < 0.147 else "small" if size < 0.33 else "medium" if size < 0.474 else "large"


# ---- two kinds of trials in one sample ----

_LEAST_SHARE = 0.1  # of the smaller group; fewer are a tail
_LEAST_APART = 4.0  # Ashman's D of the best cut: 2.65 for a normal distribution, 3.46 for a uniform one
_FEW = 12.0  # samples for which twice that is asked: the best cut of few lies between the groups that chance made


def two_modes(samples: Sequence[float], *, at_least: int = 20) -> tuple[float, float, float] | None:
    """Where samples fall into two groups: both medians and the share of the upper one. None where one group will do.

    The cut that explains most of the variance of the logarithms, believed when the groups lie far apart for their own widths.
    """
    ordered = sorted(x for x in samples if x > 0)
    n = len(ordered)
    if n < at_least:
        return None
    logs = [math.log(x) for x in ordered]
    sums, squares = [0.0, *accumulate(logs)], [0.0, *accumulate(x * x for x in logs)]
    least = max(2, math.ceil(n * _LEAST_SHARE))
    mean = sums[n] / n
    cut = max(range(least, n - least + 1), key=lambda i: (sums[i] - i * mean) ** 2 / (i * (n - i)))
    low, high = sums[cut] / cut, (sums[n] - sums[cut]) / (n - cut)
    widths = max(0.0, squares[cut] / cut - low * low) + max(0.0, (squares[n] - squares[cut]) / (n - cut) - high * high)
    if high - low < math.log(1.1) or math.sqrt(2) * (high - low) < _LEAST_APART * (1 + _FEW / n) * math.sqrt(widths):
        return None
    return of_ordered(ordered[:cut], 50), of_ordered(ordered[cut:], 50), (n - cut) / n


# ---- the beta distribution ----


def beta_quantile(share: float, a: float, b: float) -> float:
    """Where the beta distribution B(a, b) reaches `share`."""
    low, high = 0.0, 1.0
    for _ in range(60):  # halvings: to the last bit of a double near 1
        middle = (low + high) / 2
        if beta_share(middle, a, b) < share:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def beta_share(x: float, a: float, b: float) -> float:
    """The share of the beta distribution B(a, b) below `x`: the regularised incomplete beta function."""
    if x <= 0:
        return 0.0
    if x >= 1:
        return 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    # The continued fraction converges fast on one side of the mean; the other side is the mirror image.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(x, a, b) / a
    return 1.0 - front * _fraction(1 - x, b, a) / b


def _fraction(x: float, a: float, b: float) -> float:
    """Lentz's evaluation of the continued fraction of the incomplete beta function."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / _away(1.0 - (a + b) * x / (a + 1), tiny)
    value = d
    for m in range(1, 10_000):  # about √(a + b) terms are needed
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d = 1.0 / _away(1.0 + term * d, tiny)
            c = _away(1.0 + term / c, tiny)
            step = c * d
            value *= step
        if abs(step - 1.0) < 1e-12:
            break
    return value


def _away(x: float, tiny: float) -> float:
    return x if abs(x) > tiny else tiny
