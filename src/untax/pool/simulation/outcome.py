"""What one policy made of one trace."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

WAYS = ("exact", "partial", "created", "fetched", "built")
"""How a sandbox came to be ready.

exact    it was parked with everything in place
partial  it was parked at a lower rung, and the missing ones were added
created  there was none, but all the layers lay on the node
fetched  it was created, after stages that were missing had come from other nodes
built    it was created, after stages that were missing had been built, here or on the node that they came from
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    policy: str
    rollouts: int
    """Those that count; the ones before them only brought the fleet into its usual state."""
    mean_s: float
    """Of the time to ready: from the arrival until an action would run."""
    p50_s: float
    p95_s: float
    p99_s: float
    queue_s: float
    """Mean wait until some node had room; it is in the time to ready."""
    shares: dict[str, float]
    """Of the rollouts, by the way in which they became ready (`WAYS`)."""
    builds: int
    """Stages that were built meanwhile."""
    fetches: int
    """Stages that came from another node."""
    evictions: int
    end_s: float
    """When the last one was ready."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class Tally:
    """Takes the samples down. One call for each rollout that counts."""

    def __init__(self) -> None:
        self._ready_s = array("d")
        self._queue_s = 0.0
        self._ways: Counter[str] = Counter()
        self.builds = 0
        self.fetches = 0
        self.evictions = 0

    def add(self, way: str, ready_s: float, queue_s: float) -> None:
        self._ready_s.append(ready_s)
        self._queue_s += queue_s
        self._ways[way] += 1

    def outcome(self, policy: str, end_s: float) -> Outcome:
        samples = sorted(self._ready_s)
        count = len(samples)
        p50_s, p95_s, p99_s = (samples[min(count - 1, int(share * count))] for share in (0.5, 0.95, 0.99))
        return Outcome(
            policy,
            count,
            sum(samples) / count,
            p50_s,
            p95_s,
            p99_s,
            self._queue_s / count,
            {way: self._ways[way] / count for way in WAYS},
            self.builds,
            self.fetches,
            self.evictions,
            end_s,
        )
