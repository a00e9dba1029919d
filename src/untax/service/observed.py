"""What requests took, in buckets: for `/metrics` and the dashboard. Bounded, whatever is asked."""

from __future__ import annotations

import bisect
from collections import Counter

BOUNDS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0)


class Histogram:
    __slots__ = ("buckets", "count", "total_s")

    def __init__(self) -> None:
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.count = 0
        self.total_s = 0.0

    def add(self, took_s: float) -> None:
        self.buckets[bisect.bisect_left(BOUNDS_S, took_s)] += 1
        self.count += 1
        self.total_s += took_s


class Observed:
    """Names come from the service's own table, never from a request."""

    def __init__(self) -> None:
        self.took: dict[str, Histogram] = {}
        self.statuses: Counter[tuple[str, int]] = Counter()

    def add(self, name: str, status: int, took_s: float) -> None:
        found = self.took.get(name)
        if found is None:
            found = self.took[name] = Histogram()
        found.add(took_s)
        self.statuses[name, status] += 1
