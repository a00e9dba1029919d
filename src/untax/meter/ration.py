"""A time box shared among cases: which of them can have their least number of trials. Pure.

What a trial costs is known from its warm-up, and before that foreseen from a shorter trajectory or from the same work elsewhere. The
dearest cases go first, because one of them takes the time of many others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from untax.meter.plan import LEAST_TRIALS
from untax.meter.record import Case

_ALWAYS = 0.1
"""Of the box: cases that need less than this together are never left out for want of time, whatever another's warm-up took."""
_OVER = 0.1
"""Of the box: what the trials may go beyond it before one that has begun is left out, as costs vary."""


@dataclass(slots=True)
class Ration:
    """`budget_s` for everything. Costs are seconds of one slot of a case, whatever it has to do around its trial included."""

    budget_s: float
    least_of: Callable[[Case], int] = lambda _: LEAST_TRIALS
    """How many slots of a case are its least number of trials."""
    costs_s: dict[Case, float] = field(default_factory=dict)

    def foreseen_s(self, case: Case) -> float | None:
        """What a slot of `case` will cost: from its own shorter trajectories, or else from such work on its substrate, or else from where it
        was cheapest, which is the least to expect. None when there is nothing to go by.
        """
        if case in self.costs_s:
            return self.costs_s[case]
        others = [one for one in self.costs_s if _is_such_work(one, case) and (one.length == case.length or 0 < one.length < case.length)]
        mates = [one for one in others if one.substrate == case.substrate]
        kin = [one for one in mates if replace(one, length=case.length) == case] or mates or others
        if not kin:
            return None
        nearest = max(one.length for one in kin)
        return min(self.costs_s[one] for one in kin if one.length == nearest) * (case.length / nearest if nearest else 1)

    def needed_s(self, cases: Iterable[Case], *, done: int = 0) -> float:
        """What the least number of trials of all of them takes, when each has had `done` slots."""
        return sum(self._slots_left(case, done) * (self.foreseen_s(case) or 0.0) for case in cases)

    def room_s(self, spent_s: float) -> float:
        """What there is for the least number of trials of all."""
        return max(self.budget_s - spent_s, self.budget_s * _ALWAYS)

    def fits(self, case: Case, admitted: Sequence[Case], spent_s: float) -> bool:
        """Whether `case` can be tried beside those that were, whose time is kept for them."""
        left_s = self.room_s(spent_s) - self.needed_s(admitted)
        cost_s = self.foreseen_s(case)
        return left_s > 0 if cost_s is None else (self.least_of(case) + 1) * cost_s <= left_s

    def dropped(self, admitted: Iterable[Case], spent_s: float, *, done: int = 0) -> list[Case]:
        """Those that must go so that the others have their least, dearest first."""
        unfinished = [case for case in admitted if self._slots_left(case, done)]
        left = sorted(unfinished, key=lambda case: self.costs_s.get(case, 0.0))
        room_s = self.room_s(spent_s) + (self.budget_s * _OVER if done else 0.0)
        gone = []
        while left and self.needed_s(left, done=done) > room_s:
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

    def _slots_left(self, case: Case, done: int) -> int:
        return max(0, self.least_of(case) - done)


def _is_such_work(one: Case, other: Case) -> bool:
    """The same but for how long it is and what it runs on."""
    return replace(one, substrate=other.substrate, path=other.path, warmth=other.warmth, length=other.length) == other
