"""Which stages to let go of when the store must shrink: pure, and the same answer for the same facts.

A stage is worth what it would cost to build again times how much it is used. What others stand on stays while they stay,
a layer stays while any stage needs it, and a saved snapshot stays until it is removed by name: nothing can build it again.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

HALF_LIFE_S = 24 * 3600.0
"""After a day without use, a use counts half: a training run is resumed within days or not at all."""
_CHEAPEST_S = 0.001
"""Even what costs nothing to build is worth more when it is used more."""


@dataclass(frozen=True, slots=True)
class Candidate:
    key: str
    parent: str | None
    adds: tuple[str, ...]
    cost_s: float
    uses: float
    """How often it was used, older uses counting less."""
    is_kept: bool = False
    """In use now, or impossible to build again."""

    @property
    def value(self) -> float:
        return max(self.cost_s, _CHEAPEST_S) * self.uses


def aged(uses: float, idle_s: float) -> float:
    """What `uses` count for after so long without another."""
    return float(uses * 0.5 ** (max(idle_s, 0.0) / HALF_LIFE_S))


def choose(candidates: Sequence[Candidate], layer_bytes: Mapping[str, int], wanted_bytes: int) -> list[str]:
    """Keys to remove, in an order in which nothing loses what it stands on; together they free `wanted_bytes`, or all they can.

    Stores have thousands of stages, so nothing here looks at all of them for each.
    """
    needs = _Needs(candidates, layer_bytes)
    chosen = _least_first(candidates, needs, wanted_bytes)
    return _without_spare(chosen, needs, wanted_bytes)


class _Needs:
    """How many stages need each layer, and what is freed by those that no longer do."""

    def __init__(self, candidates: Sequence[Candidate], layer_bytes: Mapping[str, int]) -> None:
        self._bytes = layer_bytes
        self._needed = Counter(layer for one in candidates for layer in dict.fromkeys(one.adds))
        self.freed = 0

    def drop(self, one: Candidate) -> None:
        for layer in dict.fromkeys(one.adds):
            self._needed[layer] -= 1
            self.freed += self._bytes.get(layer, 0) if not self._needed[layer] else 0

    def take_back(self, one: Candidate) -> None:
        self.freed -= self.freed_by(one)
        self._needed.update(dict.fromkeys(one.adds, 1))

    def freed_by(self, one: Candidate) -> int:
        """What of that is due to `one`, which was dropped, and to no other alone."""
        return sum(self._bytes.get(layer, 0) for layer in dict.fromkeys(one.adds) if not self._needed[layer])


def _least_first(candidates: Sequence[Candidate], needs: _Needs, wanted_bytes: int) -> list[Candidate]:
    by_key = {one.key: one for one in candidates}
    children = Counter(one.parent for one in candidates)
    leaves = [(one.value, one.key) for one in candidates if not one.is_kept and not children[one.key]]
    heapq.heapify(leaves)
    chosen: list[Candidate] = []
    while needs.freed < wanted_bytes and leaves:
        least = by_key[heapq.heappop(leaves)[1]]
        needs.drop(least)
        chosen.append(least)
        children[least.parent] -= 1
        parent = by_key.get(least.parent) if least.parent is not None else None
        if parent is not None and not parent.is_kept and not children[parent.key]:
            heapq.heappush(leaves, (parent.value, parent.key))
    return chosen


def _without_spare(chosen: list[Candidate], needs: _Needs, wanted_bytes: int) -> list[str]:
    """Give back, dearest first, what was chosen on the way and turned out not to be needed."""
    keys = dict.fromkeys(one.key for one in chosen)
    for one in sorted(chosen, key=lambda one: (-one.value, one.key)):
        if one.parent not in keys and needs.freed - needs.freed_by(one) >= wanted_bytes:
            needs.take_back(one)
            del keys[one.key]
    return list(keys)
