"""Spans: named pieces of a rollout's time. The only reader of the measuring clock.

Adapters never time themselves. Whoever calls one reads the clock here, and the end of one part is the beginning
of the next (`Stopwatch.part`), so that nothing falls between two parts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], int]
"""Gives nanoseconds that never go back; the difference of two readings is a duration."""

now_ns: Clock = time.monotonic_ns

PARTS = ("queue", "create", "ready", "setup", "action", "dispatch", "observe", "reset", "cleanup")
"""What a rollout's time divides into.

queue     waiting for the engine to take the request up
create    the substrate's `create`, until the sandbox has an identity
ready     from there until the channel is open and configured: an action sent now would run
setup     stages that were missing, files, and on substrates without layers the set-up steps that the lease asked for
action    a command's own time, measured inside the sandbox
dispatch  the rest of an action's way there and back
observe   turning the answer's bytes into a result and waking the caller
reset     proving the sandbox clean, or replacing it by a fresh one
cleanup   from release until the sandbox is given up
"""


@dataclass(frozen=True, slots=True)
class Span:
    """One part, from `start_ns` to `end_ns` on the measuring clock, counted from the beginning of its ledger."""

    name: str
    start_ns: int
    end_ns: int

    @property
    def elapsed_ns(self) -> int:
        return self.end_ns - self.start_ns


class Stopwatch:
    """Cuts time into neighbouring parts: each ends at the instant at which the next begins."""

    __slots__ = ("_clock", "last_ns")

    def __init__(self, clock: Clock = now_ns) -> None:
        self._clock = clock
        self.last_ns = clock()

    def part(self) -> tuple[int, int]:
        """End the current part now; give its two ends."""
        start = self.last_ns
        self.last_ns = self._clock()
        return start, self.last_ns
