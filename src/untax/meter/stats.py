"""Percentiles and what is made of them. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


def percentile(samples: Sequence[float], q: float) -> float:
    """The `q`-th percentile (0 to 100), interpolated linearly between neighbours; NaN of nothing."""
    if not samples:
        return math.nan
    ordered = sorted(samples)
    at = (len(ordered) - 1) * q / 100
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


@dataclass(frozen=True, slots=True)
class Summary:
    """`ratio` is p50 against the p50 of the same metric's baseline; None where there is none."""

    count: int
    p50_s: float
    p95_s: float
    ratio: float | None


def summarise(samples: Sequence[float], baseline: Sequence[float] = ()) -> Summary:
    p50 = percentile(samples, 50)
    ratio = p50 / percentile(baseline, 50) if baseline and samples else None
    return Summary(len(samples), p50, percentile(samples, 95), ratio)
