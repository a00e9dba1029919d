"""How many rollouts at once a machine takes before more no longer bring more. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from untax.meter.gather import Gathered, Samples, Series
from untax.meter.stats import percentile

_GAIN = 1.1  # less than this for twice as many at once is no gain any more


@dataclass(frozen=True, slots=True)
class Point:
    at_once: int
    per_s: float
    """Good rollouts for each second of wall clock."""
    p95_s: float
    n: int


@dataclass(frozen=True, slots=True)
class Load:
    """One series on one step, by how many were under way together."""

    series: Series
    tier: str
    length: int
    points: tuple[Point, ...]

    def __str__(self) -> str:
        return f"{self.series}, {self.tier}" + (f" × {self.length}" if self.length else "")

    @property
    def knee(self) -> int | None:
        """The fewest at once such that no larger number brought a tenth more for each doubling; None when that was not reached."""
        for n, point in enumerate(self.points[:-1]):
            if all(_gain(point, later) < _GAIN for later in self.points[n + 1 :]):
                return point.at_once
        return None


def _gain(one: Point, later: Point) -> float:
    """How many times as many rollouts each second, for each time that twice as many are under way."""
    return (later.per_s / one.per_s) ** (1 / math.log2(later.at_once / one.at_once)) if one.per_s else math.inf


def loads(run: Gathered) -> list[Load]:
    """Every series that was measured with more than one number at once."""
    found: dict[tuple[Series, str, int], list[Point]] = {}
    for case, samples in sorted(run.cases.items(), key=lambda one: one[0].concurrency):
        if samples.n and case.image == "present" and case.contention == "none":
            point = Point(case.concurrency, _rate(run, samples), percentile(samples.total, 95), samples.n)
            found.setdefault((samples.series, case.tier, case.length), []).append(point)
    return [Load(*key, tuple(points)) for key, points in found.items() if len(points) > 1]


def _rate(run: Gathered, samples: Samples) -> float:
    """From the batches; without any, what so many in a closed loop come to."""
    batches = run.batches.get(samples.case, [])
    wall_s = sum(batch.wall_ns for batch in batches) * 1e-9
    if wall_s > 0:
        return sum(batch.rollouts - batch.failed for batch in batches) / wall_s
    busy_s = math.fsum(samples.total)
    return samples.case.concurrency * samples.n / busy_s if busy_s else 0.0
