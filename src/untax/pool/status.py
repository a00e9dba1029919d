"""How a pool is doing, as data: for `engine.pools()`, `untax pool status` and whoever watches an engine from outside."""

from __future__ import annotations

import json
import math
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from untax.core.errors import UsageError
from untax.core.stage import Stage

SCHEMA = 1
"""Of `to_json`. A reader refuses a number it does not know."""

_LABEL = 60  # characters


@dataclass(frozen=True, slots=True)
class StageStatus:
    """Sandboxes with one stage uppermost, and those who ask for it."""

    name: str
    key: str
    label: str
    """What its recipe says, in a few words."""
    idle: int
    leased: int
    making: int
    waiting: int
    target: int
    """How many are to be idle."""
    cost_s: float
    """What putting it in place over the stage below is expected to take."""


@dataclass(frozen=True, slots=True)
class PoolStatus:
    """One engine's pool at one moment; counts are since the engine started."""

    substrate: str
    stages: tuple[StageStatus, ...]
    sandboxes: int
    """Whatever their state, with those that are being made."""
    most_sandboxes: int
    memory_mib: float
    most_memory_mib: float | None
    starting: int
    most_starting: int
    """As found by measuring."""
    exact: int
    partial: int
    cold: int
    refused: int
    rejected: int
    died: int
    made: int
    failed: int
    waited_s: float
    create_s: float
    bind_s: float

    def __await__(self) -> Generator[None, None, PoolStatus]:
        """Itself, at once: a server's has to be waited for, and the same line then serves both."""
        return self
        yield

    @property
    def leases(self) -> int:
        return self.exact + self.partial + self.cold

    def as_dict(self) -> dict[str, Any]:
        return {"untax_pool": SCHEMA, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.as_dict(), separators=(",", ":"))

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> PoolStatus:
        """`UsageError` for what is no status, or one of a later release."""
        try:
            if data["untax_pool"] != SCHEMA:
                raise UsageError(f"a pool status of version {data['untax_pool']!r}: this release knows {SCHEMA}")
            values = {field.name: data[field.name] for field in fields(cls)}
            names = [field.name for field in fields(StageStatus)]
            values["stages"] = tuple(StageStatus(**{name: stage[name] for name in names}) for stage in data["stages"])
        except (KeyError, TypeError) as exc:
            raise UsageError(f"not a pool status: {exc!r}") from exc
        return cls(**values)


def label_of(stage: Stage) -> str:
    recipe = stage.recipe
    if stage.name == "image":
        text = str(recipe.get("image", ""))
    elif stage.name == "repo":
        text = f"{recipe.get('url', '')}@{str(recipe.get('commit', ''))[:10]}"
    elif stage.name == "deps":
        steps = recipe.get("steps")
        text = "; ".join(map(str, steps)) if isinstance(steps, (list, tuple)) else ""
    else:
        text = str(recipe.get("snapshot", ""))
    text = " ".join(text.split())
    return text if len(text) <= _LABEL else text[: _LABEL - 1] + "…"


def finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def together(name: str, pools: Sequence[PoolStatus]) -> PoolStatus:
    """Sums; what is a measure of one substrate is the largest of them, which is what a lease may have to wait for."""
    if len(pools) == 1:
        return replace(pools[0], substrate=f"{name}: {pools[0].substrate}")
    names = [one.name for one in fields(PoolStatus) if one.name not in ("substrate", "stages", "most_memory_mib", "create_s", "bind_s")]
    memory = [one.most_memory_mib for one in pools]
    return PoolStatus(
        substrate=f"{name}: {', '.join(sorted({one.substrate for one in pools})) or 'nothing leased yet'}",
        stages=_merged(stage for one in pools for stage in one.stages),
        most_memory_mib=None if None in memory or not memory else sum(one for one in memory if one is not None),
        create_s=max((one.create_s for one in pools), default=0.0),
        bind_s=max((one.bind_s for one in pools), default=0.0),
        **{name: sum(getattr(one, name) for one in pools) for name in names},
    )


def _merged(stages: Iterable[StageStatus]) -> tuple[StageStatus, ...]:
    """One row for each stage, however many pools have it."""
    found: dict[str, StageStatus] = {}
    for stage in stages:
        if (before := found.get(stage.key)) is not None:
            counts = {name: getattr(before, name) + getattr(stage, name) for name in ("idle", "leased", "making", "waiting", "target")}
            stage = replace(before, cost_s=max(before.cost_s, stage.cost_s), **counts)
        found[stage.key] = stage
    return tuple(found.values())
