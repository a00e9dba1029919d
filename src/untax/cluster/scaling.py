"""How many nodes a fleet should have: what its nodes say of those who wait for room, in; what Ray's autoscaler is asked for, out. Pure; no Ray in here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from untax.core.errors import UsageError

Resources = Mapping[str, float]
"""As Ray names and counts them."""

_CPU = "CPU"
_LEAST: Resources = {_CPU: 1.0}
"""What a node has that nobody knows anything of: every type of nodes that can be had does."""


@dataclass(frozen=True, slots=True)
class Scaling:
    """How a fleet grows and shrinks where Ray's autoscaler runs. Without one, nothing of it does any harm."""

    node_resources: Resources | None = None
    """What one more node has, as the autoscaler's types of nodes say it; None: the CPUs of the smallest node that is there, beside the head."""
    min_nodes: int = 1
    """So many stay in the fleet however idle they are."""
    max_nodes: int | None = None
    """More than so many are not asked for."""
    idle_s: float | None = None
    """After so long without a lease a node is drained, so that Ray may take it away; None: never."""

    def __post_init__(self) -> None:
        for name in ("min_nodes", "max_nodes"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UsageError(f"{name} must be a whole number from 1 on, not {value!r}")
        if self.max_nodes is not None and self.max_nodes < self.min_nodes:
            raise UsageError(f"max_nodes={self.max_nodes} is less than min_nodes={self.min_nodes}")
        if self.idle_s is not None and not _is_amount(self.idle_s):
            raise UsageError(f"idle_s must be a number of seconds, or None for never, not {self.idle_s!r}")
        if self.node_resources is not None:
            object.__setattr__(self, "node_resources", _checked(self.node_resources))


@dataclass(frozen=True, slots=True)
class Load:
    """What a node says of itself."""

    leased: int = 0
    waiting: int = 0
    short: int = 0
    """How many of those who wait have to wait for the end of a lease."""
    spare: float = 0.0
    """How many more of the kind that it has it could lease at once."""

    @property
    def is_idle(self) -> bool:
        return not self.leased and not self.waiting

    @classmethod
    def of_view(cls, view: Mapping[str, Any]) -> Load:
        """From what a node pushes to its clients (untax.server.view)."""
        leased, waiting = int(view.get("leased", 0)), int(view.get("waiting", 0))
        entries, free_mib, most_mib = (_bound(view.get(name)) for name in ("free_sandboxes", "free_mib", "most_mib"))
        if entries < 0 or free_mib < 0:
            return cls(leased, waiting, min(waiting, int(-entries)) if entries < 0 else waiting)
        if math.isinf(free_mib):
            return cls(leased, waiting, 0, entries)
        each_mib = (most_mib - free_mib) / (leased + waiting) if leased + waiting and most_mib > free_mib else 0.0
        return cls(leased, waiting, 0, min(entries, free_mib // each_mib if each_mib else math.inf))


def missing(loads: Iterable[Load]) -> int:
    """How many more nodes, each holding what a full one holds, those would fill who wait for room that no node has."""
    known = list(loads)
    short = sum(one.short for one in known) - sum(one.spare for one in known)
    if short <= 0:
        return 0
    full = [one.leased for one in known if one.short]
    return math.ceil(short / max(1.0, sum(full) / len(full)))


def bundles(present: Sequence[Resources], more: int, scaling: Scaling, *, workers: Sequence[Resources]) -> list[dict[str, float]]:
    """What the cluster is to have room for: every node that it has, whole, and `more`.

    The autoscaler is told a size and not a lack, and fills nodes with what it is told without regard to what they do. So each that is there takes
    one that is as large as itself, and those that are asked for find no place on it. `workers` are those of `present` that were started as others would be.
    """
    wanted = scaling.node_resources or _smallest(workers)
    there = [{name: one[name] for name in wanted if one.get(name, 0) > 0} for one in present]
    return [one for one in there if one] + [dict(wanted)] * more


def _smallest(workers: Sequence[Resources]) -> Resources:
    """A larger one might be of no type that there is, and nothing would be started at all."""
    cpus = min((one[_CPU] for one in workers if one.get(_CPU, 0) > 0), default=None)
    return _LEAST if cpus is None else {_CPU: cpus}


def _bound(value: Any) -> float:
    return math.inf if value is None else float(value)


def _is_amount(value: object) -> bool:
    return not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value) and value > 0


def _checked(resources: object) -> dict[str, float]:
    if not isinstance(resources, Mapping) or not resources:
        raise UsageError(f"node_resources must be what a node has, such as {{'CPU': 8}}, not {resources!r}")
    for name, amount in resources.items():
        if not isinstance(name, str) or not name or not _is_amount(amount):
            raise UsageError(f"node_resources: {name!r} must be a resource of Ray's and more than 0 of it, not {amount!r}")
    return {name: float(amount) for name, amount in resources.items()}
