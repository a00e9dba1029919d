"""Which cases, how many trials, in which order. Pure: the same seed gives the same order."""

from __future__ import annotations

import random
from dataclasses import dataclass

from untax.core.errors import UsageError

NATIVE = "native"
"""The case that everything is compared to: the same command by `subprocess.run`."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`trials` rounds; in each round every case once, in an order drawn from `seed`. `warmup` rounds come first and are discarded."""

    cases: tuple[str, ...]
    trials: int = 100
    warmup: int = 5
    actions: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.cases:
            raise UsageError("a plan needs at least one case")
        if self.trials < 1 or self.warmup < 0 or self.actions < 1:
            raise UsageError("a plan needs trials ≥ 1, warmup ≥ 0 and actions ≥ 1")

    def order(self) -> list[tuple[int, str]]:
        """All trials as (round, case); negative rounds are warm-up."""
        rng = random.Random(self.seed)
        steps: list[tuple[int, str]] = []
        for number in range(-self.warmup, self.trials):
            cases = list(self.cases)
            rng.shuffle(cases)
            steps.extend((number, case) for case in cases)
        return steps
