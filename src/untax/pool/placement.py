"""Which idle sandbox is closest to what a rollout needs, on one node or on a thousand.

A fleet is what is known of all nodes: what is idle there and how warm, which layers lie there, what is on its way. The
choice is the one with the smallest expected time to ready, with its reason in words. Asking costs a few look-ups for
each rung of the ladder, however many nodes there are: everything is kept by stage key.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from untax.core.stage import Stage
from untax.pool.costs import Costs

Kind = Literal["exact", "partial", "cold"]

# How many nodes are compared among those that are equally warm: enough that the least busy of them is nearly the best of all.
_COMPARED = 8


@dataclass(frozen=True, slots=True)
class Choice:
    kind: Kind
    """`exact`: idle with everything in place. `partial`: idle at a lower rung. `cold`: to be created."""
    node: str
    entry: str | None
    """The idle sandbox; None for one that is to be created."""
    start: Stage | None
    """The rung that is in place already; None for nothing at all."""
    missing: tuple[Stage, ...]
    expected_s: float
    why: str


@dataclass(slots=True)
class Node:
    """What is known of one machine. `load` is the work that is starting there, as a share of what it can start at once."""

    name: str
    link_s: float = 0.0
    load: float = 0.0
    is_open: bool = True


class Fleet:
    """Nodes, their idle sandboxes and their layers, by stage key."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._idle: dict[str, dict[str, OrderedSet]] = {}  # stage key → node → entries, the one parked last at the end
        self._where: dict[str, tuple[str, str]] = {}  # entry → its node and its uppermost stage key
        self._present: dict[str, OrderedSet] = {}  # stage key → nodes that have its layers
        self._held: dict[str, set[str]] = {}  # node → stage keys

    # ---- what happened ----

    def add_node(self, name: str, *, link_s: float = 0.0) -> None:
        self._nodes.setdefault(name, Node(name)).link_s = link_s

    def remove_node(self, name: str) -> None:
        for entry in [entry for entry, (node, _) in self._where.items() if node == name]:
            self.take(entry)
        for key in list(self._held.get(name, ())):
            self.evicted(name, key)
        self._nodes.pop(name, None)

    def node(self, name: str) -> Node:
        return self._nodes[name]

    def park(self, entry: str, node: str, key: str) -> None:
        """A sandbox is idle, with the stage `key` uppermost in it."""
        if entry in self._where:
            raise ValueError(f"{entry} is parked already")
        self._where[entry] = (node, key)
        self._idle.setdefault(key, {}).setdefault(node, OrderedSet()).add(entry)

    def take(self, entry: str) -> None:
        """It is idle no more: leased, destroyed or dead."""
        node, key = self._where.pop(entry)
        at_key = self._idle[key]
        at_key[node].discard(entry)
        if not at_key[node]:
            del at_key[node]
        if not at_key:
            del self._idle[key]

    def stored(self, node: str, key: str) -> None:
        """The layers of a stage lie on a node, those of the stages below it too."""
        self._present.setdefault(key, OrderedSet()).add(node)
        self._held.setdefault(node, set()).add(key)

    def evicted(self, node: str, key: str) -> None:
        if key in self._held.get(node, ()):
            self._held[node].discard(key)
            self._present[key].discard(node)
            if not self._present[key]:
                del self._present[key]

    # ---- what is known ----

    def idle_at(self, key: str) -> int:
        return sum(len(entries) for entries in self._idle.get(key, {}).values())

    def has(self, node: str, key: str) -> bool:
        return key in self._held.get(node, ())

    def nodes_with_idle(self, key: str) -> Iterator[Node]:
        return (self._nodes[name] for name in self._idle.get(key, ()))

    def nodes_with(self, key: str) -> Iterator[Node]:
        return (self._nodes[name] for name in self._present.get(key, ()))

    def nodes(self) -> Iterator[Node]:
        return iter(self._nodes.values())

    def idle(self, node: str, key: str) -> Iterator[str]:
        """Those that are idle there with this stage uppermost, the one parked first at the beginning."""
        return iter(self._idle.get(key, {}).get(node, ()))

    def last_parked(self, node: str, key: str) -> str:
        """The one whose memory is most likely still in the caches."""
        return self._idle[key][node].last()


class OrderedSet(dict[str, None]):
    """A set that remembers in which order things came."""

    def add(self, value: str) -> None:
        self[value] = None

    def discard(self, value: str) -> None:
        self.pop(value, None)

    def last(self) -> str:
        return next(reversed(self))


def choose(wanted: Sequence[Stage], fleet: Fleet, costs: Costs, *, can_take: bool = True, can_create: bool = True) -> Choice | None:
    """The quickest way to a sandbox with all the `wanted` rungs (lowest first) in place; None when there is none.

    `can_take=False` leaves what is idle alone, `can_create=False` looks at nothing else. Starting is slower on a node that already starts much: the expected time of whatever is left to do there grows with its load.
    """
    best: Choice | None = None
    runner_up: Choice | None = None
    for choice in _ways(wanted, fleet, costs, can_take, can_create):
        if best is None or choice.expected_s < best.expected_s:
            best, runner_up = choice, best
        elif runner_up is None or choice.expected_s < runner_up.expected_s:
            runner_up = choice
    return None if best is None else _explained(best, runner_up)


def _ways(wanted: Sequence[Stage], fleet: Fleet, costs: Costs, can_take: bool, can_create: bool) -> Iterator[Choice]:
    missing: tuple[Stage, ...] = ()
    missing_s = 0.0
    for stage in reversed(wanted):  # from everything in place down to nothing
        for node in _least_busy(fleet.nodes_with_idle(stage.key)) if can_take else ():
            yield _idle_choice(wanted, stage, missing, missing_s, node, fleet, costs)
        for node in _least_busy(fleet.nodes_with(stage.key)) if can_create else ():
            yield _cold_choice(stage, missing, missing_s, node, costs)
        missing = (stage, *missing)
        missing_s += costs.of_stage(stage)
    for node in _least_busy(fleet.nodes()) if can_create else ():
        yield _cold_choice(None, missing, missing_s, node, costs)


def _idle_choice(
    wanted: Sequence[Stage], stage: Stage, missing: tuple[Stage, ...], missing_s: float, node: Node, fleet: Fleet, costs: Costs
) -> Choice:
    # Layers that lie here above the sandbox's own rung need not be built: another sandbox is created over them instead, which
    # is a way of its own. What is compared here is adding the missing rungs to this one.
    kind: Kind = "exact" if stage is wanted[-1] else "partial"
    expected_s = node.link_s + costs.of("bind") + missing_s * (1.0 + node.load)
    return Choice(kind, node.name, fleet.last_parked(node.name, stage.key), stage, missing, expected_s, "")


def _cold_choice(stage: Stage | None, missing: tuple[Stage, ...], missing_s: float, node: Node, costs: Costs) -> Choice:
    expected_s = node.link_s + (costs.of("create") + missing_s) * (1.0 + node.load)
    return Choice("cold", node.name, None, stage, missing, expected_s, "")


def _least_busy(nodes: Iterator[Node]) -> list[Node]:
    return heapq.nsmallest(_COMPARED, (node for node in nodes if node.is_open), key=lambda node: node.link_s + node.load)


def _explained(best: Choice, other: Choice | None) -> Choice:
    has = f"{best.start.name} stage" if best.start is not None else "nothing"
    where = f" on {best.node}" if best.node else ""
    todo = "nothing is missing" if not best.missing else "missing: " + ", ".join(stage.name for stage in best.missing)
    how = "an idle sandbox has the" if best.entry is not None else "create over the" if best.start is not None else "create from"
    why = f"{how} {has}{where}, {todo}: {_seconds(best.expected_s)}"
    if other is not None:
        why += f"; next best {other.kind}: {_seconds(other.expected_s)}"
    return Choice(best.kind, best.node, best.entry, best.start, best.missing, best.expected_s, why)


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{value * 1e3:.2g} ms"
