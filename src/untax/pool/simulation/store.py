"""The layers on one simulated node: a budget, and eviction by the value that the real store goes by (`layers/eviction.py`).

A stage is worth what it costs to build again times how often it was used, older uses counting less. Here a use counts
for more the later it is, instead of all earlier ones for less: the order is the same, and nothing has to be aged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from heapq import heappop, heappush

from untax.core.stage import Stage
from untax.layers.eviction import HALF_LIFE_S


def weight_of_use(now_s: float) -> float:
    return float(2.0 ** (now_s / HALF_LIFE_S))


class Store:
    """Stages by key. What others stand on, and what is held, stays."""

    __slots__ = (
        "_build_s",
        "_children",
        "_holds",
        "_loose",
        "_loose_keys",
        "_mib",
        "_mib_of",
        "_stages",
        "_uses",
        "budget_mib",
        "overdrawn",
    )

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
        # What may be evicted, by what it was worth when it came here; it may since have become worth more, or be held again.
        self._loose: list[tuple[float, str]] = []
        self._loose_keys: set[str] = set()

    def __contains__(self, key: object) -> bool:
        return key in self._uses

    def __iter__(self) -> Iterator[str]:
        return iter(self._uses)

    def __len__(self) -> int:
        return len(self._uses)

    @property
    def mib(self) -> int:
        return self._mib

    @property
    def filled(self) -> float:
        """The share of the budget that is taken."""
        return self._mib / self.budget_mib

    def hold(self, stages: tuple[Stage, ...]) -> None:
        """A sandbox stands on them, or will."""
        holds = self._holds
        for stage in stages:
            holds[stage.key] = holds.get(stage.key, 0) + 1

    def let_go(self, stages: tuple[Stage, ...]) -> None:
        holds = self._holds
        for stage in stages:
            key = stage.key
            if holds[key] > 1:
                holds[key] -= 1
            else:
                del holds[key]
                self._loosen(key)

    def use(self, stages: tuple[Stage, ...], now_s: float) -> None:
        """A rollout wants them; those that are there have been used once more."""
        uses, weight = self._uses, weight_of_use(now_s)
        for stage in stages:
            if stage.key in uses:
                uses[stage.key] += weight

    def add(self, stage: Stage, now_s: float) -> list[Stage]:
        """It has been built here. Returns what had to go for it."""
        key, parent, mib = stage.key, stage.parent, self._mib_of[stage.key]
        gone = self._make_room(mib)
        self._uses[key] = weight_of_use(now_s)
        self._stages[key] = stage
        self._children[parent] = self._children.get(parent, 0) + 1
        self._mib += mib
        self._loosen(key)
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
        """Worth only grows: who is first, and is worth no more than when it came, is worth least."""
        loose = self._loose
        while loose:
            then, key = heappop(loose)
            self._loose_keys.discard(key)
            if self._is_loose(key):
                if self._worth(key) <= then:
                    return key
                self._loosen(key)
        return None

    def _loosen(self, key: str) -> None:
        if key not in self._loose_keys and self._is_loose(key):
            self._loose_keys.add(key)
            heappush(self._loose, (self._worth(key), key))

    def _is_loose(self, key: str) -> bool:
        return key in self._uses and key not in self._holds and not self._children.get(key)

    def _worth(self, key: str) -> float:
        return self._uses[key] * self._build_s[key]

    def _remove(self, key: str) -> Stage:
        del self._uses[key]
        stage = self._stages.pop(key)
        self._mib -= self._mib_of[key]
        self._children[stage.parent] -= 1
        if stage.parent is not None:
            self._loosen(stage.parent)
        return stage
