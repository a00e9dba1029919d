"""What each step has been measured to cost, and what it is expected to cost next time.

Steps are learnt by name: a stage by its key, and by its rung for keys never built here; what a substrate does by the
operation. A stage that comes from another node costs something else than one that is built, and is learnt apart. Recent measurements count more. Before the first one there is a guess, of the right order and no more.
"""

from __future__ import annotations

import json
import math
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, Literal

from untax.core.errors import UsageError
from untax.core.stage import Stage

Operation = Literal["create", "bind", "reset"]

_WEIGHT = 0.2  # of the newest measurement: after ten, nine tenths of what is expected is theirs
_OUTLIER = 4.0  # times less than expected: then it is half forgotten at once, or a sandbox that took 2 s once would be expected to take 1.5 s next time
_VERSION = 1
_MOST_KEYS = 4096  # of single stages; the ones not measured for longest are forgotten first
# Seconds, before anything was measured: a sandbox of our own, a clone, an installation, an image that is pulled.
_GUESSES: Mapping[str, float] = {
    "create": 0.005,
    "bind": 0.0005,
    "reset": 0.005,
    "base": 0.0,
    "image": 20.0,
    "repo": 5.0,
    "deps": 30.0,
    "snapshot": 0.0,
}
FETCH = "fetch "  # before the name of a rung, and before a key
FETCH_SHARE = 0.1  # of what building takes, before any fetch was measured: a layer at the speed of a disk or a network


class Costs:
    """Expected seconds. Not safe for threads; one belongs to one event loop."""

    def __init__(self) -> None:
        self._by_name: dict[str, float] = {}
        self._by_key: OrderedDict[str, float] = OrderedDict()
        self.learnt = 0
        """How often something was: who looks again sees whether there is anything new."""
        self.learnt_stages = 0
        """The same of single stages."""

    # ---- what is expected ----

    def of(self, operation: Operation) -> float:
        return self._by_name.get(operation, _GUESSES[operation])

    def known(self, operation: Operation) -> float | None:
        """As `of`, and None instead of a guess."""
        return self._by_name.get(operation)

    def of_stage(self, stage: Stage) -> float:
        """Of putting this rung in place over the one below it."""
        known = self._by_key.get(stage.key)
        return known if known is not None else self._by_name.get(stage.name, _GUESSES[stage.name])

    def known_stage(self, stage: Stage) -> float | None:
        """As `of_stage`, and None where this very stage was never put in place."""
        return self._by_key.get(stage.key)

    def of_fetch(self, stage: Stage) -> float:
        """Of having this rung come from a node that has it."""
        known = self.known_fetch(stage)
        return known if known is not None else FETCH_SHARE * self.of_stage(stage)

    def known_fetch(self, stage: Stage) -> float | None:
        """As `of_fetch`, and None where no stage of this rung ever came."""
        known = self._by_key.get(FETCH + stage.key)
        return known if known is not None else self._by_name.get(FETCH + stage.name)

    def has_name(self, name: str) -> bool:
        """Whether a step of this name was ever measured."""
        return name in self._by_name

    # ---- what was measured ----

    def observe(self, operation: Operation, seconds: float) -> None:
        self._learn(operation, seconds)

    def observe_stage(self, stage: Stage, seconds: float) -> None:
        """It was built."""
        self._learn(stage.name, seconds)
        self._learn_key(stage.key, seconds)

    def observe_fetch(self, stage: Stage, seconds: float) -> None:
        """It came from another node, without the wait for whoever built it."""
        self._learn(FETCH + stage.name, seconds)
        self._learn_key(FETCH + stage.key, seconds)

    def _learn_key(self, key: str, seconds: float) -> None:
        self.learnt_stages += 1
        self._by_key[key] = _blend(self._by_key.pop(key, None), seconds)
        if len(self._by_key) > _MOST_KEYS:
            self._by_key.popitem(last=False)

    def _learn(self, name: str, seconds: float) -> None:
        self._by_name[name] = _blend(self._by_name.get(name), seconds)
        self.learnt += 1

    # ---- told to others ----

    def by_name(self) -> dict[str, float]:
        """All that was measured, by name."""
        return dict(self._by_name)

    def by_key(self) -> dict[str, float]:
        """The same of single stages."""
        return dict(self._by_key)

    def hear(self, by_name: Mapping[str, float], by_key: Mapping[str, float], *, weight: float = 1.0) -> None:
        """What somebody else measured, in the place of what is known; with a smaller weight it only moves that."""
        for name, seconds in by_name.items():
            before = self._by_name.get(name)
            self._by_name[name] = seconds if before is None else before + weight * (seconds - before)
        for key, seconds in by_key.items():
            before = self._by_key.pop(key, None)
            self._by_key[key] = seconds if before is None else before + weight * (seconds - before)
        while len(self._by_key) > _MOST_KEYS:
            self._by_key.popitem(last=False)

    # ---- kept between engines ----

    def to_json(self) -> str:
        return json.dumps({"version": _VERSION, "by_name": self._by_name, "by_key": self._by_key})

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """`UsageError` for what is no record of costs; one of a later release says so."""
        try:
            value: Any = json.loads(text)
            if value["version"] != _VERSION:
                raise UsageError(f"costs of version {value['version']!r}: this release knows {_VERSION}; remove the file to learn anew")
            costs = cls()
            costs._by_name = {str(name): _seconds(cost) for name, cost in value["by_name"].items()}
            costs._by_key = OrderedDict((str(key), _seconds(cost)) for key, cost in value["by_key"].items())
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            if isinstance(exc, UsageError):
                raise
            raise UsageError(f"not a record of costs: {exc}; remove the file to learn anew") from exc
        return costs


def _seconds(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e9:
        raise ValueError(f"{value!r} is no number of seconds")
    return float(value)


def _blend(before: float | None, seconds: float) -> float:
    if before is None:
        return seconds
    if seconds < before / _OUTLIER:  # what was expected came of a moment in which everything was slow, the first one as a rule
        return math.sqrt(before * seconds)
    return before + _WEIGHT * (seconds - before)
