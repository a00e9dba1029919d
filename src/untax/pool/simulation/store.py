"""The layers on one simulated node: a budget, and eviction by the value that the real store goes by (`layers/eviction.py`).

A stage is worth what it costs to build again times how often it was used, older uses counting less. Here a use counts
for more the later it is, instead of all earlier ones for less: the order is the same, and nothing has to be aged.
"""

from __future__ import annotations

from collections.abc import Mapping

from untax.core.stage import Stage
from untax.layers.eviction import HALF_LIFE_S


def weight_of_use(now_s: float) -> float:
    return float(2.0 ** (now_s / HALF_LIFE_S))


class Store:
    """Stages by key. What others stand on, and what is held, stays."""

    __slots__ = ("_build_s", "_children", "_holds", "_mib", "_mib_of", "_stages", "_uses", "budget_mib", "overdrawn")

    def __init__(self, budget_mib: int, build_s: Mapping[str, float], mib_of: Mapping[str, int]) -> None:
        self.budget_mib = budget_mib
        self.overdrawn = 0
        """How often nothing could be evicted although there was too little room."""
        self._build_s = build_s
        self._mib_of = mib_of
        self._mib = 0
        self._uses: dict[str, float] = {}
        self._stages: dict[str, Stage] = {}
        self._children: dict[str | None, int] = {}
        self._holds: dict[str, int] = {}

    def __contains__(self, key: str) -> bool:
        return key in self._uses

    @property
    def mib(self) -> int:
        return self._mib

    def hold(self, stages: tuple[Stage, ...]) -> None:
        """A sandbox stands on them, or will."""
        holds = self._holds
        for stage in stages:
            holds[stage.key] = holds.get(stage.key, 0) + 1

    def use(self, stages: tuple[Stage, ...], now_s: float) -> None:
        """A rollout wants them; those that are there have been used once more."""
        uses, weight = self._uses, weight_of_use(now_s)
        for stage in stages:
            if stage.key in uses:
                uses[stage.key] += weight

    def let_go(self, stages: tuple[Stage, ...]) -> None:
        holds = self._holds
        for stage in stages:
            if holds[stage.key] == 1:
                del holds[stage.key]
            else:
                holds[stage.key] -= 1

    def add(self, stage: Stage, now_s: float) -> list[Stage]:
        """It has been built here. Returns what had to go for it."""
        mib = self._mib_of[stage.key]
        gone = self._make_room(mib)
        self._uses[stage.key] = weight_of_use(now_s)
        self._stages[stage.key] = stage
        self._children[stage.parent] = self._children.get(stage.parent, 0) + 1
        self._mib += mib
        return gone

    def _make_room(self, mib: int) -> list[Stage]:
        gone: list[Stage] = []
        while self._mib + mib > self.budget_mib:
            least = self._least()
            if least is None:
                self.overdrawn += 1
                break
            gone.append(self._remove(least))
        return gone

    def _least(self) -> str | None:
        children, holds, build_s = self._children, self._holds, self._build_s
        least, worth = None, 0.0
        for key, uses in self._uses.items():
            if (least is None or uses * build_s[key] < worth) and key not in holds and not children.get(key):
                least, worth = key, uses * build_s[key]
        return least

    def _remove(self, key: str) -> Stage:
        del self._uses[key]
        stage = self._stages.pop(key)
        self._children[stage.parent] -= 1
        self._mib -= self._mib_of[key]
        return stage
