"""How a pool's decisions are bounded, and how one of its stages is doing."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from untax.core.stage import Stage


@dataclass(frozen=True, slots=True)
class Policy:
    entries: int = 256
    """Sandboxes that there may be at once, whatever their state."""
    memory_mib: float = math.inf
    """What they may count together."""
    reuse: Literal["reset", "single"] = "reset"
    """Whether a sandbox whose reset was verified may serve again."""
    shares_stages: bool = True
    """Whether a stage that was put in place once is a layer that others begin with: it is then built for all that wait for it."""
    upgrades_in_place: bool = True
    """Whether missing stages can be added to a sandbox that lives. Where they cannot, an idle one at a lower stage saves nothing
    but its room: it is taken only when there is no other, and replaced."""
    first_starting: int = 4
    fewest_starting: int = 2
    most_starting: int = 64
    """Bounds of what may be starting at once; at least two, so that a long build does not hold up everything else."""
    linger_s: float = 60.0
    """How long an idle sandbox above its target is kept."""
    calm_s: float = 0.0
    """How long after a hand-out no refill is begun while half of a target is still idle: it would be in the way of the first action."""
    tries: int = 3
    """How often a ticket's start may fail before the ticket is refused."""


@dataclass(frozen=True, slots=True)
class Standing:
    """How one stage is doing, for people."""

    stage: Stage
    idle: int
    leased: int
    making: int
    waiting: int
    target: int
