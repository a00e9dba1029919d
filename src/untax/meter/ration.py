"""A time box shared among cases: which of them can have their least number of trials. Pure.

What a trial costs is known from its warm-up, and before that foreseen from a shorter trajectory of the same kind. The dearest cases go
first, because one of them takes the time of many others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from untax.meter.plan import LEAST_TRIALS
from untax.meter.record import Case


@dataclass(slots=True)
class Ration:
    """`budget_s` for everything. Costs are seconds of one slot of a case, whatever it has to do around its trial included."""

    budget_s: float
    least: int = LEAST_TRIALS
    costs_s: dict[Case, float] = field(default_factory=dict)

    def foreseen_s(self, case: Case) -> float | None:
        """What a slot of `case` will cost, from what shorter ones of its kind did; None when there is nothing to go by."""
        if case in self.costs_s:
            return self.costs_s[case]
        kin = [one for one in self.costs_s if one.length and one.length < case.length and replace(one, length=case.length) == case]
        if not kin:
            return None
        nearest = max(kin, key=lambda one: one.length)
        return self.costs_s[nearest] * case.length / nearest.length

    def needed_s(self, cases: Iterable[Case]) -> float:
        """What the least number of trials of all of them takes."""
        return self.least * sum(self.foreseen_s(case) or 0.0 for case in cases)

    def fits(self, case: Case, admitted: Sequence[Case], spent_s: float) -> bool:
        """Whether `case` can be tried at all beside those that were."""
        cost_s = self.foreseen_s(case)
        if cost_s is None:
            return spent_s < self.budget_s
        return spent_s + self.needed_s(admitted) + (self.least + 1) * cost_s <= self.budget_s

    def dropped(self, admitted: Sequence[Case], spent_s: float) -> list[Case]:
        """Those that must go so that the others have their least, dearest first."""
        left = sorted(admitted, key=lambda case: self.costs_s.get(case, 0.0))
        gone = []
        while left and spent_s + self.needed_s(left) > self.budget_s:
            gone.append(left.pop())
        return gone

    def has_round(self, admitted: Iterable[Case], spent_s: float) -> bool:
        """Whether there is time for one more trial of each."""
        return spent_s + sum(self.costs_s.get(case, 0.0) for case in admitted) <= self.budget_s

    def has_slot(self, case: Case, guess_s: float, spent_s: float) -> bool:
        """Whether there is time for one more slot of `case`, of which `guess_s` is thought until its cost is known."""
        return spent_s + self.costs_s.get(case, guess_s) <= self.budget_s

    def note(self, case: Case, cost_s: float) -> None:
        """The latest costs count most: the machine's mood changes."""
        before = self.costs_s.get(case)
        self.costs_s[case] = cost_s if before is None else 0.5 * before + 0.5 * cost_s
