"""How much may be *starting* at once, from how starting slows down.

While a machine has room, a start takes as long as it does alone. Once it has none, each further one only makes all of them
slower: time grows in proportion to how many there are. So the part of them that merely queues can be read off the times,
`n × (1 − alone / measured)`, and the cap follows it: up while almost nothing queues, down while too much does. (TCP Vegas does
the same with round trips.) How much may *run* once it has started is another matter and not decided here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_QUEUE_LOW, _QUEUE_HIGH = 1.0, 3.0  # starts that queue: below, one more is tried; above, one fewer
_FIRST_SAMPLES = 3  # of a kind of start, before it has a say: the first ones warm caches up
_WINDOW = 200  # starts of a kind after which the time it takes alone is learnt anew, since machines and software change


@dataclass(slots=True)
class _Alone:
    """The shortest time of a kind of start, over this window and the one before."""

    now_s: float = math.inf
    before_s: float = math.inf
    samples: int = 0

    def observe(self, seconds: float) -> None:
        self.samples += 1
        if self.samples % _WINDOW == 0:
            self.now_s, self.before_s = math.inf, self.now_s
        self.now_s = min(self.now_s, seconds)

    @property
    def seconds(self) -> float:
        return min(self.now_s, self.before_s)


class Admission:
    """The cap on starting work. `floor` and `ceiling` bound it; both the same makes it fixed."""

    def __init__(self, *, first: int, floor: int, ceiling: int) -> None:
        if not 1 <= floor <= first <= ceiling:
            raise ValueError(f"not 1 <= floor {floor} <= first {first} <= ceiling {ceiling}")
        self._floor, self._ceiling = floor, ceiling
        self._cap = float(first)
        self._alone: dict[str, _Alone] = {}

    @property
    def cap(self) -> int:
        return int(self._cap)

    def observe(self, kind: str, seconds: float, at_once: int) -> None:
        """A start of this kind took so long, while at most `at_once` starts were under way."""
        alone = self._alone.setdefault(kind, _Alone())
        alone.observe(seconds)
        if alone.samples <= _FIRST_SAMPLES or seconds <= 0:
            return
        queueing = at_once * (1.0 - alone.seconds / seconds)
        if queueing > _QUEUE_HIGH:
            self._cap = max(float(self._floor), self._cap - 1.0 / self._cap)  # by one in the time of `cap` starts
        elif queueing < _QUEUE_LOW and at_once >= self.cap:  # an idle machine says nothing about a busy one
            self._cap = min(float(self._ceiling), self._cap + 1.0 / self._cap)
