"""How much may be *starting* at once, from how starting slows down.

While a machine has room, starts that run side by side take no longer than one alone: a third more of them at once is a third
more of them done. Once it has none, each only makes the others slower, and time grows in proportion to how many there are. So
two levels are compared, one a third above the other: when more at once gets more done, the cap goes up, and otherwise down,
until the level is found where it begins to be of no use. There it rests, and after some time it looks again. Nothing is
remembered of how quick the machine once was: it is compared with itself, minutes ago at most.

How much may *run* once it has started is another matter and not decided here.
"""

from __future__ import annotations

import math
from typing import Literal

_STEP = 4 / 3
_GAIN = 0.5  # of a third more at once, how much must be a third more done: in the middle between all of it and nothing
_FEWEST_SAMPLES = 16  # of a level; twice the level where that is more
_REST = 10  # times as many starts before it looks again: looking costs a little of what is being looked for
_MOST_KINDS = 1024


class Admission:
    """The cap on starting work. `floor` and `ceiling` bound it; both the same makes it fixed."""

    def __init__(self, *, first: int, floor: int, ceiling: int) -> None:
        if not 1 <= floor <= first <= ceiling:
            raise ValueError(f"not 1 <= floor {floor} <= first {first} <= ceiling {ceiling}")
        self._floor, self._ceiling = floor, ceiling
        self._level = first  # where it would rest
        self._cap = first  # what is being tried
        self._done_here: float | None = None  # at the level itself, when that has been measured
        self._doing: Literal["here", "up", "down", "rest"] = "here"
        self._has_climbed = False
        self._first_s: dict[str, float] = {}  # of each kind of start: what its times are compared with
        self._skip = self._samples = 0
        self._sum = 0.0

    @property
    def cap(self) -> int:
        return self._cap

    def observe(self, kind: str, seconds: float, at_once: int) -> None:
        """A start of this kind took so long, while at most `at_once` starts were under way."""
        if seconds <= 0 or at_once < self._cap:
            return  # a machine with less to do says nothing about this level
        if kind not in self._first_s:
            if len(self._first_s) >= _MOST_KINDS:
                self._first_s.clear()
            self._first_s[kind] = seconds
            return
        if self._skip > 0:
            self._skip -= 1  # begun at the level before
            return
        self._samples += 1
        self._sum += math.log(at_once) - math.log(seconds / self._first_s[kind])
        wanted = max(_FEWEST_SAMPLES, 2 * self._cap)
        if self._samples >= (wanted * _REST if self._doing == "rest" else wanted):
            self._compare(self._sum / self._samples)

    def _compare(self, done: float) -> None:
        """`done` is the logarithm of how much gets done in some time at the cap that was tried."""
        if self._doing in ("here", "rest"):
            self._done_here = done
            self._has_climbed = False
            self._climb()
            return
        assert self._done_here is not None
        low, high = sorted(((self._level, self._done_here), (self._cap, done)))
        is_gain = (high[1] - low[1]) > _GAIN * math.log(high[0] / low[0])
        if self._doing == "up" and is_gain:
            self._level, self._done_here, self._has_climbed = self._cap, done, True
            self._climb()
        elif self._doing == "up":
            self._rest() if self._has_climbed else self._descend()
        elif is_gain:
            self._rest()
        else:
            self._level, self._done_here = self._cap, done
            self._descend()

    def _climb(self) -> None:
        if self._level < self._ceiling:
            self._try("up", min(self._ceiling, max(self._level + 1, round(self._level * _STEP))))
        elif self._has_climbed:
            self._rest()
        else:
            self._descend()

    def _descend(self) -> None:
        if self._level > self._floor:
            self._try("down", max(self._floor, min(self._level - 1, round(self._level / _STEP))))
        else:
            self._rest()

    def _rest(self) -> None:
        self._try("rest", self._level)

    def _try(self, doing: Literal["up", "down", "rest"], cap: int) -> None:
        self._doing = doing
        self._skip = max(self._cap, cap)
        self._cap = cap
        self._samples, self._sum = 0, 0.0
