"""What the paper printed ("The Rollout Infrastructure Tax in Coding-Agent Reinforcement Learning", arXiv 2607.01415), for comparison.

Only numbers that its text and tables give; its figures are not read off. Its measurements are of its own hardware and providers: how they
move is to be compared, not how large they are.
"""

from __future__ import annotations

from dataclasses import dataclass

TRAJECTORIES = 1_000_000
STEPS = 150
LENGTHS = (10, 50, 150)
TRIALS = 100
COLD_START_SPREAD = 110.0
"""§4.2 and the abstract: slowest ÷ fastest substrate, lightest tier."""
T2_SPREAD = 1.9
"""§4.2: the same two substrates on T2."""
WORKER_HOUR_SPREAD = 1.8
"""§4.4: slowest ÷ fastest, 150 steps."""


@dataclass(frozen=True, slots=True)
class Overhead:
    """A row of Table 1."""

    words: str
    seconds_per_trajectory: float
    hours: int


TABLE_1 = (
    Overhead("1 s per rollout", 1.0, 278),
    Overhead("10 ms per action, 150 actions", 0.010 * STEPS, 417),
    Overhead("100 ms per action, 150 actions", 0.100 * STEPS, 4167),
)


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A row of Table 2: seconds with the one decimal that is printed, and hours."""

    words: str
    seconds: float
    hours: int

    @property
    def computed_from(self) -> float:
        """The latency that the hours were computed from, before the paper rounded it to print it."""
        return self.hours * 3600 / TRAJECTORIES


TABLE_2 = (
    Trajectory("slowest substrate", 42.5, 11_811),
    Trajectory("fastest substrate", 23.4, 6_495),
    Trajectory("difference", 19.1, 5_316),
)


def rounding(seconds: float, trajectories: float) -> str | None:
    """Why Table 2 has another number for these; None for what is not in it."""
    for row in TABLE_2:
        if row.seconds == seconds and trajectories == TRAJECTORIES:
            return (
                f"The paper's Table 2 has {row.hours:,} h for {row.seconds:g} s: it computed the hours before it rounded the seconds "
                f"({row.hours:,} h is {row.computed_from:.2f} s a trajectory, printed as {row.seconds:g} s)."
            )
    return None
