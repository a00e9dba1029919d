"""What is being started in a pool (sandboxes that are made, stages that are added to one) and what is in the way of more."""

from __future__ import annotations

from dataclasses import dataclass

from untax.core.stage import Stage
from untax.pool.admission import Admission
from untax.pool.costs import Costs
from untax.pool.events import Create


@dataclass(slots=True)
class Start:
    since_s: float
    missing: tuple[Stage, ...]
    is_long: bool
    """Whether what is missing takes longer than the creation itself."""
    create: Create | None
    """None for stages that are added to a sandbox."""
    at_once: int = 0
    """How many were under way at most, while this one was."""


class Starts:
    """By order number, or by ticket for an upgrade. Long ones have half of the places, so that they do not hold up the rest."""

    def __init__(self, admission: Admission, costs: Costs, *, shares_stages: bool) -> None:
        self._admission = admission
        self._costs = costs
        self._shares_stages = shares_stages
        self._starts: dict[int | str, Start] = {}
        self.making = 0
        """Sandboxes, as opposed to upgrades."""

    def __len__(self) -> int:
        return len(self._starts)

    def __contains__(self, name: int | str) -> bool:
        return name in self._starts

    def __getitem__(self, name: int | str) -> Start:
        return self._starts[name]

    @property
    def free(self) -> int:
        """Places; negative for a moment after the cap was lowered."""
        return self._admission.cap - len(self._starts)

    @property
    def load(self) -> float:
        return len(self._starts) / self._admission.cap

    def building(self) -> dict[str, float]:
        """Keys of the stages that are being put in place for all, and since when."""
        return {stage.key: start.since_s for start in self._starts.values() for stage in start.missing} if self._shares_stages else {}

    def in_the_way(self, missing: tuple[Stage, ...]) -> str | None:
        """What one more with these stages missing would have to wait for; None for nothing."""
        if self.free <= 0:
            return "a place among those that start"
        if not missing:
            return None
        if self._shares_stages:
            keys = {stage.key for stage in missing if stage.name != "base"}  # which all have, and which is nothing
            if any(stage.key in keys for start in self._starts.values() for stage in start.missing):
                return "a stage that was being built for another"  # and with whose layer it will begin
        if self._is_long(missing) and sum(start.is_long for start in self._starts.values()) >= max(1, self._admission.cap // 2):
            return "a place among those that build"
        return None

    def begin(self, name: int | str, now_s: float, missing: tuple[Stage, ...], create: Create | None) -> None:
        self._starts[name] = Start(now_s, missing, self._is_long(missing), create)
        self.making += create is not None
        for start in self._starts.values():
            start.at_once = max(start.at_once, len(self._starts))

    def end(self, name: int | str) -> Start | None:
        start = self._starts.pop(name, None)
        if start is not None:
            self.making -= start.create is not None
        return start

    def measured(self, start: Start, now_s: float) -> None:
        """A start has succeeded: what it took teaches how many may be under way."""
        kind = "create" if not start.missing else start.missing[-1].key
        self._admission.observe(kind, now_s - start.since_s, start.at_once)

    def _is_long(self, missing: tuple[Stage, ...]) -> bool:
        return sum(self._costs.of_stage(stage) for stage in missing) > self._costs.of("create")
