"""Which stages to let go of when the store must shrink: pure, and the same answer for the same facts.

A stage is worth what it would cost to build again times how much it is used. What others stand on stays while they stay,
a layer stays while any stage needs it, and a saved snapshot stays until it is removed by name: nothing can build it again.
"""

from __future__ import annotations

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
    """Keys to remove, in an order in which nothing loses what it stands on; together they free `wanted_bytes`, or all they can."""
    chosen = _least_first(candidates, layer_bytes, wanted_bytes)
    return _without_spare(chosen, candidates, layer_bytes, wanted_bytes)


def _least_first(candidates: Sequence[Candidate], layer_bytes: Mapping[str, int], wanted_bytes: int) -> list[Candidate]:
    standing = {one.key: one for one in candidates}
    children = Counter(one.parent for one in candidates)
    needed = Counter(layer for one in candidates for layer in one.adds)
    chosen: list[Candidate] = []
    freed = 0
    while freed < wanted_bytes:
        leaves = [one for one in standing.values() if not one.is_kept and not children[one.key]]
        if not leaves:
            break
        least = min(leaves, key=lambda one: (one.value, one.key))
        del standing[least.key]
        children[least.parent] -= 1
        for layer in least.adds:
            needed[layer] -= 1
            freed += layer_bytes.get(layer, 0) if not needed[layer] else 0
        chosen.append(least)
    return chosen


def _without_spare(
    chosen: list[Candidate], candidates: Sequence[Candidate], layer_bytes: Mapping[str, int], wanted_bytes: int
) -> list[str]:
    """Give back, dearest first, what was chosen on the way and turned out not to be needed."""
    for one in sorted(chosen, key=lambda one: (-one.value, one.key)):
        if one.parent is not None and any(other.key == one.parent for other in chosen):
            continue
        rest = [other for other in chosen if other is not one]
        if _freed_by({other.key for other in rest}, candidates, layer_bytes) >= wanted_bytes:
            chosen = rest
    return [one.key for one in chosen]


def _freed_by(keys: set[str], candidates: Sequence[Candidate], layer_bytes: Mapping[str, int]) -> int:
    needed = {layer for one in candidates if one.key not in keys for layer in one.adds}
    gone = {layer for one in candidates if one.key in keys for layer in one.adds}
    return sum(layer_bytes.get(layer, 0) for layer in gone - needed)
