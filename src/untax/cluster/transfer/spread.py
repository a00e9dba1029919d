"""Which stages of other nodes are worth having before anybody here asks for them. Pure: what is known in, what to bring out.

Each node decides for itself, within its own budgets, from what the others say is hot there. Nothing is pushed and nothing is evicted for it:
a stage that comes ahead of demand takes only room that nobody else wants.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from untax.layers.record import StageRecord, is_key

MOST_SAID = 64
"""Stages that one node tells of, the hottest first."""


_MOST_BYTES = 1 << 60  # of one stage: no store has them, and every number in reach of it can be reckoned with


@dataclass(frozen=True, slots=True)
class Budget:
    """What spreading may cost a node."""

    every_s: float = 5.0
    disk_bytes: int = 8 << 30
    """Of stages that were brought ahead of demand and that nobody here has asked for yet."""
    share: float = 0.25
    """Of what is free in the store, or on its disk where that has no budget, at most this at a time."""
    bytes_per_s: float = 50e6
    """An eighth of what 5 Gbit/s carry: leases fetch beside it."""
    least_uses: float = 3.0
    """In the days before, the older the less; twice may be chance."""


@dataclass(frozen=True, slots=True)
class Heat:
    """A stage that another node has, and how much it is wanted there."""

    key: str
    node: str
    parent: str | None
    name: str
    uses: float
    bytes: int
    cost_s: float

    def to_data(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("key", "parent", "name", "uses", "bytes", "cost_s")}

    @classmethod
    def from_data(cls, node: str, data: Mapping[str, Any]) -> Heat | None:
        """None for what no node says that is whole."""
        try:
            heat = cls(
                str(data["key"]),
                node,
                None if data["parent"] is None else str(data["parent"]),
                str(data["name"]),
                float(data["uses"]),
                int(data["bytes"]),
                float(data["cost_s"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError):
            return None
        is_whole = is_key(heat.key) and 0 <= heat.bytes < _MOST_BYTES and 0 <= heat.uses < 1e12 and 0 <= heat.cost_s < 1e9
        return heat if is_whole else None


@dataclass(slots=True)
class _Known:
    heat: Heat
    uses: float
    nodes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Order:
    """Bring this stage from one of these nodes; what it stands on is here, or was ordered before it."""

    key: str
    name: str
    nodes: tuple[str, ...]
    bytes: int


def hottest(records: Iterable[StageRecord], uses: Mapping[str, float], sizes: Mapping[str, int], node: str, least: float) -> list[Heat]:
    """What a node tells of itself: the stages that may travel and are used, and those that they stand on."""
    known = {one.key: one for one in records if one.is_portable and one.name != "snapshot"}
    told: dict[str, Heat] = {}
    for record in sorted(known.values(), key=lambda one: (-uses.get(one.key, 0.0), one.key)):
        if uses.get(record.key, 0.0) < least or len(told) >= MOST_SAID:
            break
        one: StageRecord | None = record
        while one is not None and one.key not in told:
            size = sum(sizes.get(layer_id, 0) for layer_id in one.adds)
            told[one.key] = Heat(one.key, node, one.parent, one.name, uses.get(one.key, 0.0), size, one.cost_s)
            one = known.get(one.parent) if one.parent is not None else None
    return list(told.values())


def orders(said: Iterable[Heat], here: Collection[str], room_bytes: float, least: float) -> list[Order]:
    """What to bring, in this order: whatever saves most building for each byte, with what it stands on before it, as far as there is room.

    A stage counts with the uses of all nodes together: what is hot in the fleet is hot, wherever that was.
    """
    known: dict[str, _Known] = {}
    for heat in said:
        one = known.setdefault(heat.key, _Known(heat, 0.0))
        one.uses += heat.uses
        one.nodes.append(heat.node)
    wanted = [one for key, one in known.items() if key not in here and one.uses >= least]
    wanted.sort(key=lambda one: (-one.uses * one.heat.cost_s / max(one.heat.bytes, 1), one.heat.key))
    chosen: dict[str, Order] = {}
    left = room_bytes
    for one in wanted:
        chain = _chain(one, known, {*here, *chosen})
        size = sum(part.heat.bytes for part in chain)
        if size <= left:
            left -= size
            for part in chain:
                chosen[part.heat.key] = Order(part.heat.key, part.heat.name, tuple(part.nodes), part.heat.bytes)
    return list(chosen.values())


def _chain(one: _Known, known: Mapping[str, _Known], here: Collection[str]) -> list[_Known]:
    """What is missing below it, lowest first, and itself. What nobody told of is not waited for: it is built or fetched when it is wanted."""
    chain: list[_Known] = []
    at: _Known | None = one
    while at is not None and at.heat.key not in here and at not in chain:
        chain.append(at)
        at = known.get(at.heat.parent) if at.heat.parent is not None else None
    chain.reverse()
    return chain
