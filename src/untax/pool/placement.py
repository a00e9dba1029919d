"""Which idle sandbox is closest to what a rollout needs, on one node or on a thousand.

A fleet is what is known of all nodes: what is idle there and how warm, which layers lie there, how much is starting. The
choice is the one with the smallest expected time to ready, with its reason in words. Asking costs a few look-ups for each
rung of the ladder, however many nodes there are: everything is kept by stage key, and by how far away a node is.

Among nodes that are equally warm and equally far, a few are compared, not all: which few goes round with every question. Of
all nodes, one in nine is on average less busy than the least busy of eight that were taken blindly; and where each choice is the
better of even two, the longest queue grows with the logarithm of the logarithm of the number of nodes (Mitzenmacher, "The power
of two choices", 2001). To find the very best, every order would have to be kept at every start. With up to eight such nodes the
choice is the best there is.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from untax.core.stage import Stage
from untax.pool.costs import Costs

Kind = Literal["exact", "partial", "cold"]

_COMPARED = 8
_SEEN = 64  # nodes that are looked at to find those eight: full ones are passed over, and a fleet may be nearly full
_NEAR_S = 1e-4  # links quicker than this are equally quick; beyond it, four times as long is another distance


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
    other: Choice | None = None
    """The next best way that is not merely the same one on another node."""

    @property
    def why(self) -> str:
        """One sentence for people."""
        text = self.said()
        if self.other is not None:
            text += f"; next best: {self.other._how()}, {self.other._todo()}: {_seconds(self.other.expected_s)}"
        return text

    def said(self) -> str:
        """The same without what else there was."""
        return f"{self._how()}{f' on {self.node}' if self.node else ''}, {self._todo()}: {_seconds(self.expected_s)}"

    def _how(self) -> str:
        if self.entry is not None:
            assert self.start is not None
            return f"idle with the {self.start.name} stage"
        return f"create over the {self.start.name} stage" if self.start is not None else "create from nothing"

    def _todo(self) -> str:
        return "missing " + ", ".join(stage.name for stage in self.missing) if self.missing else "nothing missing"


class Node:
    """What is known of one machine. `load` is the work that is starting there, as a share of what it can start at once."""

    __slots__ = ("_is_open", "_open_ones", "link_s", "load", "name")

    def __init__(self, name: str, link_s: float, open_ones: _Nodes) -> None:
        self.name = name
        self.link_s = link_s
        self.load = 0.0
        self._is_open = True
        self._open_ones = open_ones
        open_ones.add(self)

    @property
    def is_open(self) -> bool:
        """False for one that takes nothing at present: it is passed over."""
        return self._is_open

    @is_open.setter
    def is_open(self, value: bool) -> None:
        if value is not self._is_open:
            self._is_open = value
            (self._open_ones.add if value else self._open_ones.discard)(self)


class Fleet:
    """Nodes, their idle sandboxes and their layers, by stage key."""

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        self._open = _Nodes()  # kept apart from the others, so that one that takes something is found if there is any
        self._idle: dict[str, _Nodes] = {}  # stage key → nodes that have something idle
        self._present: dict[str, _Nodes] = {}  # stage key → nodes that have its layers
        self._parked: dict[str, dict[str, OrderedSet]] = {}  # node → stage key → entries, the one parked last at the end
        self._where: dict[str, tuple[str, str]] = {}  # entry → its node and its uppermost stage key
        self._counts: dict[str, int] = {}  # stage key → entries
        self._held: dict[str, set[str]] = {}  # node → stage keys

    # ---- what happened ----

    def add_node(self, name: str, *, link_s: float = 0.0) -> None:
        """A node is there, or its link has become another."""
        node = self._nodes.get(name)
        if node is None:
            self._nodes[name] = Node(name, link_s, self._open)
            self._parked[name], self._held[name] = {}, set()
            return
        kept = [
            *([self._open] if node.is_open else []),
            *(self._idle[key] for key in self._parked[name]),
            *(self._present[key] for key in self._held[name]),
        ]
        for nodes in kept:
            nodes.discard(node)
        node.link_s = link_s
        for nodes in kept:
            nodes.add(node)

    def remove_node(self, name: str) -> None:
        """It is gone, with all that was idle there."""
        if name not in self._nodes:
            return
        for entry in [entry for entries in self._parked[name].values() for entry in entries]:
            self.take(entry)
        for key in list(self._held[name]):
            self.evicted(name, key)
        self._nodes.pop(name).is_open = False
        del self._parked[name], self._held[name]

    def node(self, name: str) -> Node:
        return self._nodes[name]

    def park(self, entry: str, node: str, key: str) -> None:
        """A sandbox is idle, with the stage `key` uppermost in it."""
        if entry in self._where:
            raise ValueError(f"{entry} is parked already")
        here = self._parked[node]
        if key not in here:
            here[key] = OrderedSet()
            self._idle.setdefault(key, _Nodes()).add(self._nodes[node])
        here[key].add(entry)
        self._where[entry] = (node, key)
        self._counts[key] = self._counts.get(key, 0) + 1

    def take(self, entry: str) -> None:
        """It is idle no more: leased, destroyed or dead."""
        node, key = self._where.pop(entry)
        here = self._parked[node]
        here[key].discard(entry)
        if not here[key]:
            del here[key]
            _forget(self._idle, key, self._nodes[node])
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]

    def stored(self, node: str, key: str) -> None:
        """The layers of a stage lie on a node, those of the stages below it too."""
        if key not in self._held[node]:
            self._held[node].add(key)
            self._present.setdefault(key, _Nodes()).add(self._nodes[node])

    def evicted(self, node: str, key: str) -> None:
        if key in self._held.get(node, ()):
            self._held[node].discard(key)
            _forget(self._present, key, self._nodes[node])

    # ---- what is known ----

    def idle_by_key(self) -> dict[str, int]:
        return dict(self._counts)

    def idle_at(self, key: str) -> int:
        return self._counts.get(key, 0)

    def has(self, node: str, key: str) -> bool:
        return key in self._held.get(node, ())

    def idle(self, node: str, key: str) -> Iterator[str]:
        """Those that are idle there with this stage uppermost, the one parked first at the beginning."""
        return iter(self._parked[node].get(key, ()))

    def last_parked(self, node: str, key: str) -> str:
        """The one whose memory is most likely still in the caches."""
        return self._parked[node][key].last()

    def some_with_idle(self, key: str) -> Sequence[Node]:
        """Open nodes with something idle at this stage: up to eight at each distance, others at the next question."""
        nodes = self._idle.get(key)
        return nodes.some() if nodes is not None else ()

    def some_with(self, key: str) -> Sequence[Node]:
        """The same of nodes that have the layers of a stage."""
        nodes = self._present.get(key)
        return nodes.some() if nodes is not None else ()

    def some(self) -> Sequence[Node]:
        """The same of all nodes."""
        return self._open.some()


class OrderedSet(dict[str, None]):
    """A set that remembers in which order things came."""

    def add(self, value: str) -> None:
        self[value] = None

    def discard(self, value: str) -> None:
        self.pop(value, None)

    def last(self) -> str:
        return next(reversed(self))


class _Nodes:
    """A set of nodes by distance, that gives a few of them without looking at all."""

    __slots__ = ("_distances", "_rings")

    def __init__(self) -> None:
        self._rings: dict[int, _Ring] = {}
        self._distances: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._rings)

    def add(self, node: Node) -> None:
        distance = _distance(node.link_s)
        if distance not in self._rings:
            self._rings[distance] = _Ring()
            insort(self._distances, distance)
        self._rings[distance].add(node)

    def discard(self, node: Node) -> None:
        distance = _distance(node.link_s)
        ring = self._rings[distance]
        ring.discard(node)
        if not ring.nodes:
            del self._rings[distance]
            self._distances.remove(distance)

    def some(self) -> Sequence[Node]:
        """Open ones, up to eight at each distance."""
        if len(self._distances) == 1:
            return self._rings[self._distances[0]].some()
        return [node for distance in self._distances for node in self._rings[distance].some()]


class _Ring:
    """Nodes in a list, so that a few of them can be taken in turn; each one's place is known, so that it can be taken out."""

    __slots__ = ("_next", "_places", "nodes")

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._places: dict[str, int] = {}
        self._next = 0

    def add(self, node: Node) -> None:
        self._places[node.name] = len(self.nodes)
        self.nodes.append(node)

    def discard(self, node: Node) -> None:
        place = self._places.pop(node.name)
        last = self.nodes.pop()
        if last is not node:
            self.nodes[place] = last
            self._places[last.name] = place

    def some(self) -> list[Node]:
        nodes = self.nodes
        count = len(nodes)
        if count <= _COMPARED:
            return [node for node in nodes if node._is_open]
        found: list[Node] = []
        at = self._next
        for _ in range(min(count, _SEEN)):
            at = at + 1 if at + 1 < count else 0
            if nodes[at]._is_open:
                found.append(nodes[at])
                if len(found) == _COMPARED:
                    break
        self._next = at
        return found


def choose(wanted: Sequence[Stage], fleet: Fleet, costs: Costs, *, can_take: bool = True, can_create: bool = True) -> Choice | None:
    """The quickest way to a sandbox with all the `wanted` rungs (lowest first) in place; None when there is none.

    `can_take=False` leaves what is idle alone, `can_create=False` looks at nothing else. Of ways that take equally long the one
    over the quicker link is chosen, then the warmer one. Starting is slower on a node that already starts much: the expected time
    of whatever is left to do there grows with its load.
    """
    bind_s, create_s = costs.of("bind"), costs.of("create")
    best: _Way | None = None
    other: _Way | None = None
    missing_s = 0.0
    for rung in range(len(wanted) - 1, -2, -1):  # from everything in place down to nothing
        if other is not None and missing_s > other[0]:
            break  # what is missing takes longer than the two best ways, without a link and a load
        key = wanted[rung].key if rung >= 0 else None
        for is_idle in (True, False):
            if is_idle:
                if not can_take or key is None:
                    continue
                nodes, fixed_s, scaled_s = fleet.some_with_idle(key), bind_s, missing_s
            else:
                if not can_create:
                    continue
                nodes = fleet.some_with(key) if key is not None else fleet.some()
                fixed_s, scaled_s = 0.0, create_s + missing_s
            if nodes:
                way = _quickest(nodes, fixed_s, scaled_s, rung, is_idle)
                if best is None or way[:2] < best[:2]:
                    best, other = way, best
                elif other is None or way[:2] < other[:2]:
                    other = way
        if rung >= 0:
            missing_s += costs.of_stage(wanted[rung])
    if best is None:
        return None
    return _choice(wanted, fleet, best, None if other is None else _choice(wanted, fleet, other, None))


# Seconds, seconds of the link, the node, the rung that is in place, and whether it is idle there.
_Way = tuple[float, float, Node, int, bool]


def _quickest(nodes: Sequence[Node], fixed_s: float, scaled_s: float, rung: int, is_idle: bool) -> _Way:
    best: Node | None = None
    best_s = math.inf
    for node in nodes:
        expected_s = node.link_s + fixed_s + scaled_s * (1.0 + node.load)
        if best is None or expected_s < best_s or (expected_s == best_s and node.link_s < best.link_s):
            best, best_s = node, expected_s
    assert best is not None
    return best_s, best.link_s, best, rung, is_idle


def _choice(wanted: Sequence[Stage], fleet: Fleet, way: _Way, other: Choice | None) -> Choice:
    expected_s, _, node, rung, is_idle = way
    kind: Kind = "cold" if not is_idle else "exact" if rung == len(wanted) - 1 else "partial"
    start = wanted[rung] if rung >= 0 else None
    entry = fleet.last_parked(node.name, wanted[rung].key) if is_idle else None
    return Choice(kind, node.name, entry, start, tuple(wanted[rung + 1 :]), expected_s, other)


def _forget(kept: dict[str, _Nodes], key: str, node: Node) -> None:
    kept[key].discard(node)
    if not kept[key]:
        del kept[key]


def _distance(link_s: float) -> int:
    return 0 if link_s <= _NEAR_S else 1 + int(math.log2(link_s / _NEAR_S) / 2)


def _seconds(value: float) -> str:
    return f"{value:.2g} s" if value >= 1 else f"{value * 1e3:.2g} ms"
