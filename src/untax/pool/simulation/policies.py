"""Where a rollout goes: four policies over the same nodes, pools, stores and refill.

Each picks among the nodes that have room. On the node that was picked, all of them take what `placement.choose` finds
best there; `state-distance` asks it about the whole fleet at once, which is the difference that is shown. With few nodes it ranks them
as a client of a real fleet does (`pool.nodes`); with many that would take too long, and near ties go by load alone.
"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from untax.core.stage import Stage
from untax.pool import nodes as real
from untax.pool import placement
from untax.pool.costs import Costs, Operation
from untax.pool.placement import Choice, Fleet, Node

# As many as `placement.choose` compares among equals: no policy shall lose for looking at fewer nodes.
_COMPARED = 8
_SHARES = 1000  # a load is told as a share, and a view has whole numbers
_RANKED = 16  # nodes, up to which they are ranked as in a real fleet: about 10 µs each, for every rollout


class Reach(Costs):
    """What putting a stage in place costs a node that lacks it: to fetch it, where another has it."""

    def __init__(self, measured: Costs, copies: Mapping[str, int]) -> None:
        super().__init__()
        self.measured = measured
        self._copies = copies

    def of(self, operation: Operation) -> float:
        return self.measured.of(operation)

    def of_stage(self, stage: Stage) -> float:
        is_coming = stage.is_portable and self._copies.get(stage.key, 0) > 0
        return self.measured.of_fetch(stage) if is_coming else self.measured.of_stage(stage)


class Policy(Protocol):
    """Is told what happens on every node, and chooses."""

    def choose(self, wanted: Sequence[Stage], now_s: float) -> Choice | None:
        """None when no node has room."""

    def park(self, entry: str, node: int, key: str) -> None: ...

    def take(self, entry: str, node: int) -> None: ...

    def stored(self, node: int, stage: Stage) -> None: ...

    def evicted(self, node: int, stage: Stage) -> None: ...

    def has_room(self, node: int, is_open: bool) -> None: ...

    def works(self, node: int, load: float) -> None:
        """What is starting there or waits to, as a share of what may be starting at once."""

    def begins(self, node: int, stages: Iterable[Stage], now_s: float) -> None:
        """These are missing there, and are put in place from now on."""

    def leased(self, node: int, count: int, filled: float) -> None:
        """So many rollouts are there now, and so much of the room for layers is taken."""


def node_name(number: int) -> str:
    return f"n{number}"


class StateDistance:
    """The smallest expected time to ready over the whole fleet."""

    def __init__(self, nodes: int, costs: Reach, _: random.Random) -> None:
        self._fleet = Fleet()
        self._costs = costs
        self._names = [node_name(number) for number in range(nodes)]
        for name in self._names:
            self._fleet.add_node(name)
        self._machines = [self._fleet.node(name) for name in self._names]

    def choose(self, wanted: Sequence[Stage], now_s: float) -> Choice | None:  # noqa: ARG002
        return placement.choose(wanted, self._fleet, self._costs)

    def park(self, entry: str, node: int, key: str) -> None:
        self._fleet.park(entry, self._names[node], key)

    def take(self, entry: str, node: int) -> None:  # noqa: ARG002 - one fleet knows where its entries are
        self._fleet.take(entry)

    def stored(self, node: int, stage: Stage) -> None:
        self._fleet.stored(self._names[node], stage.key)

    def evicted(self, node: int, stage: Stage) -> None:
        self._fleet.evicted(self._names[node], stage.key)

    def has_room(self, node: int, is_open: bool) -> None:
        self._machines[node].is_open = is_open

    def works(self, node: int, load: float) -> None:
        self._machines[node].load = load

    def begins(self, node: int, stages: Iterable[Stage], now_s: float) -> None:
        pass

    def leased(self, node: int, count: int, filled: float) -> None:
        pass


class OneNode(Fleet):
    """A fleet of one, which answers `placement.choose` from plain sets: a thousand of them are kept, and each changes often."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.add_node(name)
        self._here = (self.node(name),)
        self._layers: set[str] = set()
        self._at: dict[str, list[str]] = {}
        self._key_of: dict[str, str] = {}

    def park(self, entry: str, node: str, key: str) -> None:  # noqa: ARG002
        self._key_of[entry] = key
        self._at.setdefault(key, []).append(entry)

    def take(self, entry: str) -> None:
        key = self._key_of.pop(entry)
        self._at[key].remove(entry)
        if not self._at[key]:
            del self._at[key]

    def stored(self, node: str, key: str) -> None:  # noqa: ARG002
        self._layers.add(key)

    def evicted(self, node: str, key: str) -> None:  # noqa: ARG002
        self._layers.discard(key)

    def last_parked(self, node: str, key: str) -> str:  # noqa: ARG002
        return self._at[key][-1]

    def some_with_idle(self, key: str) -> Sequence[Node]:
        return self._here if key in self._at else ()

    def some_with(self, key: str) -> Sequence[Node]:
        return self._here if key in self._layers else ()

    def some(self) -> Sequence[Node]:
        return self._here


class EachNode:
    """What is known of each node, by itself."""

    def __init__(self, nodes: int, costs: Reach, draws: random.Random) -> None:
        self._costs = costs
        self._draws = draws
        self._open = Bag(range(nodes))
        self._fleets = [OneNode(node_name(number)) for number in range(nodes)]
        self._machines = [fleet.node(node_name(number)) for number, fleet in enumerate(self._fleets)]

    def park(self, entry: str, node: int, key: str) -> None:
        self._fleets[node].park(entry, self._machines[node].name, key)

    def take(self, entry: str, node: int) -> None:
        self._fleets[node].take(entry)

    def stored(self, node: int, stage: Stage) -> None:
        self._fleets[node].stored(self._machines[node].name, stage.key)

    def evicted(self, node: int, stage: Stage) -> None:
        self._fleets[node].evicted(self._machines[node].name, stage.key)

    def has_room(self, node: int, is_open: bool) -> None:
        if is_open:
            self._open.add(node)
        else:
            self._open.discard(node)

    def works(self, node: int, load: float) -> None:
        self._machines[node].load = load

    def begins(self, node: int, stages: Iterable[Stage], now_s: float) -> None:
        pass

    def leased(self, node: int, count: int, filled: float) -> None:
        pass


class NodeFirst(EachNode, ABC):
    """A node is picked without looking at how warm it is; then the quickest way there is taken."""

    @abstractmethod
    def pick(self, wanted: Sequence[Stage]) -> int:
        """One of the nodes that have room; there is one."""

    def choose(self, wanted: Sequence[Stage], now_s: float) -> Choice | None:  # noqa: ARG002
        if not self._open:
            return None
        return placement.choose(wanted, self._fleets[self.pick(wanted)], self._costs)


class RankedNodes(EachNode):
    """As a client of a fleet of few nodes places, with views that are never outdated."""

    def __init__(self, nodes: int, costs: Reach, draws: random.Random) -> None:
        super().__init__(nodes, costs, draws)
        self._views = [real.NodeView(node_name(number), costs=costs.measured, most_starting=_SHARES) for number in range(nodes)]
        self._numbers = {view.node: number for number, view in enumerate(self._views)}
        self._key_of: dict[str, str] = {}

    def choose(self, wanted: Sequence[Stage], now_s: float) -> Choice | None:
        if not self._open:
            return None
        best = real.rank(wanted, self._views, now_s=now_s)[0].choice
        if best.entry is None or best.start is None:
            return best
        return replace(best, entry=self._fleets[self._numbers[best.node]].last_parked(best.node, best.start.key))

    def park(self, entry: str, node: int, key: str) -> None:
        super().park(entry, node, key)
        idle = self._views[node].idle
        idle[key] = idle.get(key, 0) + 1
        self._key_of[entry] = key

    def take(self, entry: str, node: int) -> None:
        super().take(entry, node)
        self._views[node].idle[self._key_of.pop(entry)] -= 1

    def stored(self, node: int, stage: Stage) -> None:
        super().stored(node, stage)
        view = self._views[node]
        view.stored.add(stage.key)
        view.building.pop(stage.key, None)

    def evicted(self, node: int, stage: Stage) -> None:
        super().evicted(node, stage)
        self._views[node].stored.discard(stage.key)

    def has_room(self, node: int, is_open: bool) -> None:
        super().has_room(node, is_open)
        self._views[node].free_sandboxes = math.inf if is_open else 0.0

    def works(self, node: int, load: float) -> None:
        super().works(node, load)
        self._views[node].starting = round(load * _SHARES)

    def begins(self, node: int, stages: Iterable[Stage], now_s: float) -> None:
        view = self._views[node]
        for stage in stages:
            if stage.key not in view.stored:
                view.building.setdefault(stage.key, now_s)

    def leased(self, node: int, count: int, filled: float) -> None:
        view = self._views[node]
        view.leased, view.filled = count, filled


class Random(NodeFirst):
    """Any node with room."""

    def pick(self, wanted: Sequence[Stage]) -> int:  # noqa: ARG002
        return self._open.any(self._draws)


class RoundRobin(NodeFirst):
    """The next node with room."""

    def __init__(self, nodes: int, costs: Reach, draws: random.Random) -> None:
        super().__init__(nodes, costs, draws)
        self._nodes = nodes
        self._last = -1

    def pick(self, wanted: Sequence[Stage]) -> int:  # noqa: ARG002
        number = (self._last + 1) % self._nodes
        while number not in self._open:
            number = (number + 1) % self._nodes
        self._last = number
        return number


class ImageAffinity(NodeFirst):
    """A node with room that has the image, the least busy of a few; any node with room when there is none."""

    def __init__(self, nodes: int, costs: Reach, draws: random.Random) -> None:
        super().__init__(nodes, costs, draws)
        self._load = [0.0] * nodes
        self._images: list[set[str]] = [set() for _ in range(nodes)]
        self._with_image: dict[str, Bag] = {}  # image key → nodes that have it *and* room

    def pick(self, wanted: Sequence[Stage]) -> int:
        suited = self._with_image.get(wanted[0].key) or self._open
        load = self._load
        return min((suited.any(self._draws) for _ in range(_COMPARED)), key=lambda node: load[node])

    def stored(self, node: int, stage: Stage) -> None:
        super().stored(node, stage)
        if stage.name == "image":
            self._images[node].add(stage.key)
            if node in self._open:
                self._with_image.setdefault(stage.key, Bag()).add(node)

    def evicted(self, node: int, stage: Stage) -> None:
        super().evicted(node, stage)
        if stage.name == "image":
            self._images[node].discard(stage.key)
            if stage.key in self._with_image:
                self._with_image[stage.key].discard(node)

    def has_room(self, node: int, is_open: bool) -> None:
        super().has_room(node, is_open)
        for key in self._images[node]:
            bag = self._with_image.setdefault(key, Bag())
            if is_open:
                bag.add(node)
            else:
                bag.discard(node)

    def works(self, node: int, load: float) -> None:
        super().works(node, load)
        self._load[node] = load


class Bag:
    """Numbers, any of which can be drawn in constant time."""

    def __init__(self, numbers: Sequence[int] = ()) -> None:
        self._numbers = list(numbers)
        self._at = {number: at for at, number in enumerate(self._numbers)}

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[int]:
        return iter(self._numbers)

    def __contains__(self, number: int) -> bool:
        return number in self._at

    def add(self, number: int) -> None:
        if number not in self._at:
            self._at[number] = len(self._numbers)
            self._numbers.append(number)

    def discard(self, number: int) -> None:
        at = self._at.pop(number, None)
        if at is None:
            return
        last = self._numbers.pop()
        if last != number:
            self._numbers[at] = last
            self._at[last] = at

    def any(self, draws: random.Random) -> int:
        return self._numbers[int(draws.random() * len(self._numbers))]


def state_distance(nodes: int, costs: Reach, draws: random.Random) -> Policy:
    return (RankedNodes if nodes <= _RANKED else StateDistance)(nodes, costs, draws)


POLICIES: dict[str, Callable[[int, Reach, random.Random], Policy]] = {
    "random": Random,
    "round-robin": RoundRobin,
    "image-affinity": ImageAffinity,
    "state-distance": state_distance,
}
