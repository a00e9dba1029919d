"""How an engine's pool is to behave, checked once where it enters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from untax.core.errors import UsageError


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """`Engine(pool=PoolOptions(…))`. Without any, leases queue for nothing but the machine, and only what `warm` asks for is kept ready."""

    entries: int = 100_000
    """Sandboxes that leases and pools together may have at once; who comes then waits."""
    memory_mib: float = math.inf
    """What their memory limits may add up to."""
    reuse: Literal["reset", "single"] = "reset"
    """`reset`: a sandbox that comes back untouched, which is proven, serves again. `single`: none does."""
    adaptive: bool = False
    """Whether sizes follow demand, above what `warm` asks for."""
    hit_rate: float = 0.95
    """Of all leases of a spec, how many should find one that is ready, as far as the budget allows."""
    linger_s: float = 0.0
    """How long an idle sandbox that no target asks for is kept."""
    first_starting: int = 4
    most_starting: int = 64
    """How many may be starting at once: at first, and at most. What is best in between is found by measuring."""

    def __post_init__(self) -> None:
        for name in ("entries", "first_starting", "most_starting"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UsageError(f"PoolOptions.{name} must be a whole number from 1 on, not {value!r}")
        for name in ("memory_mib", "hit_rate", "linger_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or math.isnan(value) or value < 0:
                raise UsageError(f"PoolOptions.{name} must be a number from 0 on, not {value!r}")
        if not self.memory_mib > 0:
            raise UsageError("PoolOptions.memory_mib must be more than 0; leave it out for no bound")
        if not 0 < self.hit_rate < 1:
            raise UsageError(f"PoolOptions.hit_rate must be between 0 and 1, not {self.hit_rate!r}")
        if not 2 <= self.first_starting <= self.most_starting:
            raise UsageError("PoolOptions: 2 ≤ first_starting ≤ most_starting must hold: one for what takes long, one for what does not")
        if self.reuse not in ("reset", "single"):
            raise UsageError(f"PoolOptions.reuse must be 'reset' or 'single', not {self.reuse!r}")
