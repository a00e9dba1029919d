"""Which node of a fleet a lease goes to: the quickest way on each, as `placement` finds it there, and the nodes in the order of their ways.

A node's view is what it last said of itself: what is idle and how warm, which layers lie there, what is starting, what its own steps were
measured to cost; and what whoever asks knows of it: how far away it is, whether it refused a moment ago. All of it may be outdated
by the time the lease gets there. A stage that a node lacks and another has comes from there, if it is the same on every machine; one that another is
building is waited for, and then comes. So the answer is not one node but all that could take it, best first: the next is asked when one refuses.

Ways that differ by less than anybody could measure are equal; the caller's own is among them where one is idle with everything in place and not later by more than its actions save. Among equals comes first, where stages are to be built, the node with more room for them,
so that one does not evict what others would have had room for; then the one with fewer leases for each of its processors; then the
caller's own; then a fixed order that differs from caller to caller, so that many who ask at once do not all go to one.

How long the quickest way on a node takes is found for each that could be among the best; which way that is, with its words, for those that are looked at.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nsmallest
from zlib import crc32

from untax.core.spec import is_as_strong
from untax.core.stage import Stage
from untax.pool.costs import FETCH_SHARE, Costs, Operation
from untax.pool.placement import Choice, Fleet, Node, choose

# Learnt costs of equal nodes differ by about this much from run to run: a warm lease by tenths of a millisecond, longer steps by a tenth.
_EQUAL_S, _EQUAL_SHARE = 0.0005, 0.1
# A lease is for what runs in it afterwards: on a node where work waits for a processor by so much more than on the idlest one, that takes longer by
# this share of the seconds that the commands of a rollout take (a T2 episode's: about five).
_BUSIER, _ACTING_S = 0.3, 5.0
# The same for each lease more that a processor has than on the emptiest node: little, since most leases wait for a model most of the time, but enough
# that a quicker link does not draw everything to one machine.
_CROWDED_S = 0.002
# An action on the caller's own node takes a quarter of a millisecond less than elsewhere, and a rollout has up to 150 of them.
_NEAR_S = 0.03
_MORE_CROWDED = 4.0  # leases for each processor more than elsewhere, which send the next one away from its caller's own node
_CLEAR = 2.0  # times sooner, for a lease to leave the line in which it waits
# Where the room for layers is taken, what is put in place drives out about as much of something else, which is wanted again as often as not.
_FILLED, _EVICTED = 0.9, 0.5


@dataclass(slots=True)
class NodeView:
    """What is known of one node. Its holder changes it as it learns more."""

    node: str
    isolation: str = "none"
    """The strongest boundary that its substrate gives."""
    idle: dict[str, int] = field(default_factory=dict)
    """Sandboxes that are idle, by the key of their uppermost stage."""
    stored: set[str] = field(default_factory=set)
    """Keys of the stages whose layers lie there."""
    building: dict[str, float] = field(default_factory=dict)
    """Keys of the stages that are being put in place, and since when, in seconds of the clock of whoever asks."""
    starting: int = 0
    most_starting: int = 4
    waiting: int = 0
    leased: int = 0
    cpus: int = 1
    busy: float = 0.0
    """The share of its time that work waits for a processor."""
    filled: float = 0.0
    """How much of the room for layers is taken; 0 where there is no bound."""
    free_sandboxes: float = math.inf
    """How many more could be leased, with what is idle out of the way and those who wait served."""
    free_mib: float = math.inf
    most_mib: float = math.inf
    """What the memory limits of all its sandboxes may add up to."""
    costs: Costs = field(default_factory=Costs)
    """As it measured them itself."""
    link_s: float = 0.0
    is_draining: bool = False
    trouble: str = ""
    """Why it cannot be asked at all, in words."""
    avoided_s: float = 0.0
    """How much longer it is taken to be of no use, because it refused."""

    @property
    def load(self) -> float:
        """By how much what is left to do there takes longer than alone."""
        return (self.starting + self.waiting) / max(1, self.most_starting) + self.busy

    @property
    def crowd(self) -> float:
        """Leases for each processor."""
        return self.leased / max(1, self.cpus)


class Ranked:
    """One node that could take it."""

    __slots__ = ("_choice", "_found", "_why", "expected_s", "is_full", "node", "note", "other")

    def __init__(self, found: _Found, note: str, other: Ranked | None) -> None:
        self.node = found.view.node
        self.expected_s = found.expected_s
        self.is_full = found.is_full
        """Whether a lease there has to end first."""
        self.note = note
        """What beside the way decided, in words."""
        self.other = other
        """The best of the nodes behind it."""
        self._found = found
        self._choice: Choice | None = None
        self._why: str | None = None

    @property
    def view(self) -> NodeView:
        return self._found.view

    @property
    def choice(self) -> Choice:
        """The quickest way there, as it is when this is first looked at."""
        if self._choice is None:
            self._choice = self._found.choice()
        return self._choice

    @property
    def why(self) -> str:
        """One sentence for people."""
        if self._why is None:
            self._why = f"{self.said()}; {f'next: {self.other.said()}' if self.other is not None else 'no other node could take it'}"
        return self._why

    def said(self) -> str:
        return f"{self.choice.said()}{f' ({self.note})' if self.note else ''}"


def unfit(view: NodeView, *, isolation: str, memory_mib: float) -> str | None:
    """Why a node cannot take a lease at all, in words; None when it can, if only later."""
    if view.trouble:
        return view.trouble
    if view.is_draining:
        return "it is draining"
    if not is_as_strong(view.isolation, as_required=isolation):
        return f"its isolation is {view.isolation!r}, weaker than {isolation!r}"
    if memory_mib > view.most_mib:
        return f"{memory_mib:g} MiB do not fit its {view.most_mib:g} MiB for sandboxes"
    return None


def rank(
    wanted: Sequence[Stage],
    views: Iterable[NodeView],
    *,
    here: str | None = None,
    isolation: str = "none",
    memory_mib: float = 0.0,
    now_s: float = 0.0,
    usual: Costs | None = None,
    chains: Mapping[str, Sequence[Stage]] | None = None,
    salt: str = "",
    most: int | None = None,
) -> list[Ranked]:
    """The nodes that could take a lease with these rungs (lowest first), best first; empty when none could.

    `here` is the caller's own node. `usual` is what steps cost elsewhere, for those that a node has not measured. `chains` has the rungs as single
    nodes know them: what exists on one machine only has another key on each. `salt` is the caller's own, for the order among equals. With `most`, so
    many of them: the same ones, in less time.
    """
    known = list(views)
    fit = [view for view in known if unfit(view, isolation=isolation, memory_mib=memory_mib) is None]
    idlest, emptiest = min((view.busy for view in fit), default=0.0), min((view.crowd for view in fit), default=0.0)
    around = _around(wanted, known)
    found: list[_Found] = []
    others: list[_Found] = []
    for view in fit:
        one = _Found(view, chains.get(view.node, wanted) if chains else wanted, _OfNode(view, usual, now_s, around))
        one.more_s = view.avoided_s + max(0.0, view.busy - idlest - _BUSIER) * _ACTING_S + int(view.crowd - emptiest) * _CROWDED_S
        (found if one.is_at_once() else others).append(one)
    if most is not None and len(found) > most:
        # What is noticeably later than so many and one more, which is in the words of the last, is behind them however the rest turns out.
        late_s = _late(nsmallest(most + 1, (one.expected_s for one in found))[-1])
        others = [one for one in others if one.view.node == here or one.least_s() <= late_s]
    for one in others:
        one.find(memory_mib)
    return _ordered(found + others, here, salt, most, emptiest)


def is_better(other: Ranked, waiting: NodeView, waited_s: float) -> bool:
    """Whether a lease that waits at one node would be served so much sooner at another by now that it is worth asking there.

    How long it would still wait is not known. Leases end in turn, each of them lasts about as long as the commands of a rollout take, and who has
    waited for long waits for as long again. Where its node has room, its turn has come or is about to.
    """
    if other.is_full or other.view.avoided_s > 0 or (waiting.free_sandboxes >= 1 and waiting.free_mib > 0):
        return False
    left_s = max(waited_s, _ACTING_S * max(1, waiting.waiting) / max(1, waiting.leased))
    return _CLEAR * other.expected_s + _EQUAL_S < left_s


def is_favoured(view: NodeView, views: Iterable[NodeView]) -> bool:
    """Whether nothing speaks against a lease on this node being followed by another one there: it takes leases, and no other has clearly less to do."""
    if view.trouble or view.is_draining or view.avoided_s > 0:
        return False
    others = [one for one in views if one is not view and not one.trouble and not one.is_draining]
    return all(view.busy - one.busy <= _BUSIER and view.crowd - one.crowd < _MORE_CROWDED for one in others)


# ---- one node ----


class _Found:
    """The quickest way on one node: first how long it takes, and which it is when that is asked for."""

    __slots__ = ("_costs", "expected_s", "has_missing", "is_exact", "is_full", "more_s", "view", "wanted")

    def __init__(self, view: NodeView, wanted: Sequence[Stage], costs: Costs) -> None:
        self.view = view
        self.wanted = wanted
        self.more_s = 0.0
        """What beside the way counts as if it took so long."""
        self.expected_s = 0.0
        self.is_exact = self.is_full = self.has_missing = False
        self._costs = costs

    def is_at_once(self) -> bool:
        """Whether one with everything in place is idle there, so that nothing else is quicker; it is then found."""
        view = self.view
        if view.idle.get(self.wanted[-1].key, 0) <= 0:
            return False
        bind_s = self._costs.of("bind")
        if bind_s > self._costs.of("create"):
            return False
        self.expected_s = view.link_s + bind_s + 0.0 + self.more_s
        self.is_exact = True
        return True

    def least_s(self) -> float:
        """No way there is quicker, where nothing is idle with everything in place."""
        costs, top = self._costs, self.wanted[-1]
        way_s = costs.of("create")
        if self.view.idle:
            way_s = min(way_s, costs.of("bind") + costs.of_stage(top))
        return self.view.link_s + way_s + self.more_s

    def find(self, memory_mib: float) -> None:
        """As `placement.choose` does it over a fleet of this one node, without its words."""
        view, costs, wanted = self.view, self._costs, self.wanted
        idle, link_s, slower = view.idle, view.link_s, 1.0 + view.load
        bind_s, create_s = costs.of("bind"), costs.of("create")
        best_s, best, is_idle = math.inf, -1, False
        missing_s = 0.0
        for rung in range(len(wanted) - 1, -2, -1):
            if missing_s > best_s:
                break
            key = wanted[rung].key if rung >= 0 else None
            if key is not None and idle.get(key, 0) > 0 and (way_s := link_s + bind_s + missing_s * slower) < best_s:
                best_s, best, is_idle = way_s, rung, True
            if _has(view, wanted[0], key) and (way_s := link_s + 0.0 + (create_s + missing_s) * slower) < best_s:
                best_s, best, is_idle = way_s, rung, False
            if rung >= 0:
                missing_s += costs.of_stage(wanted[rung])
        if view.filled >= _FILLED:
            self.more_s += _EVICTED * sum(costs.of_stage(stage) for stage in wanted[best + 1 :])
        self.expected_s = best_s + self.more_s
        self.has_missing = best < len(wanted) - 1
        self.is_exact = is_idle and not self.has_missing
        self.is_full = not self.is_exact and (view.free_sandboxes < 1 or memory_mib > view.free_mib)

    def choice(self) -> Choice:
        found = choose(self.wanted, _One(self.view, self.wanted[0]), self._costs)
        assert found is not None  # nothing keeps one from being created from nothing
        return found


def _has(view: NodeView, lowest: Stage, key: str | None) -> bool:
    """Whether the layers of a stage lie there. The base is nothing, and everywhere; what is fixed when a sandbox is created is in the key behind a tilde."""
    return key is None or (key == lowest.key and lowest.name == "base") or key.partition("~")[0] in view.stored


class _One(Fleet):
    """A fleet of one node, which answers from its view."""

    def __init__(self, view: NodeView, lowest: Stage) -> None:
        super().__init__()
        self.add_node(view.node, link_s=view.link_s)
        here = self.node(view.node)
        here.load = view.load
        self._here = (here,)
        self._view = view
        self._lowest = lowest

    def some_with_idle(self, key: str) -> Sequence[Node]:
        return self._here if self._view.idle.get(key, 0) > 0 else ()

    def some_with(self, key: str) -> Sequence[Node]:
        return self._here if _has(self._view, self._lowest, key) else ()

    def some(self) -> Sequence[Node]:
        return self._here

    def last_parked(self, node: str, key: str) -> str:
        return f"{node}:{key}"  # which one it will be is that node's business


@dataclass(slots=True)
class _Whereabouts:
    """Of one stage that can travel."""

    stored: list[str] = field(default_factory=list)
    """The nodes that have it."""
    building: dict[str, float] = field(default_factory=dict)
    """The nodes that are putting it in place, and since when."""


def _around(wanted: Sequence[Stage], views: Sequence[NodeView]) -> dict[str, _Whereabouts]:
    """By key. Those that take no lease give layers all the same."""
    found: dict[str, _Whereabouts] = {}
    for stage in wanted:
        if not stage.is_portable or stage.name == "base":
            continue
        plain = stage.key.partition("~")[0]
        where = found[stage.key] = _Whereabouts()
        for view in views:
            if plain in view.stored and not view.trouble:
                where.stored.append(view.node)
            elif stage.key in view.building:
                where.building[view.node] = view.building[stage.key]
    return found


class _OfNode(Costs):
    """A node's own costs; what it has not measured costs there what it costs elsewhere, and what is being built what is left of that."""

    def __init__(self, view: NodeView, usual: Costs | None, now_s: float, around: Mapping[str, _Whereabouts]) -> None:
        self._view = view
        self._usual = usual if usual is not None else view.costs
        self._now_s = now_s
        self._around = around

    def of(self, operation: Operation) -> float:
        known = self._view.costs.known(operation)
        return known if known is not None else self._usual.of(operation)

    def of_stage(self, stage: Stage) -> float:
        """Of putting it in place: of having it come, where there is a node that has it, and of building it otherwise."""
        where = self._around.get(stage.key)
        is_coming = where is not None and any(node != self._view.node for node in where.stored)
        known = self.of_fetch(stage) if is_coming else self._of_building(stage)
        since_s = self._view.building.get(stage.key)
        if since_s is not None:
            return self._left(known, since_s)
        if is_coming or where is None or not where.building:
            return known
        return self._left(known, min(where.building.values())) + self.of_fetch(stage)

    def of_fetch(self, stage: Stage) -> float:
        for costs in (self._view.costs, self._usual):
            if (known := costs.known_fetch(stage)) is not None:
                return known
        return FETCH_SHARE * self._of_building(stage)

    def _of_building(self, stage: Stage) -> float:
        own, usual = self._view.costs, self._usual
        known = own.known_stage(stage)
        if known is None:
            known = usual.known_stage(stage)
        if known is None:
            known = own.of_stage(stage) if own.has_name(stage.name) else usual.of_stage(stage)
        return known

    def _left(self, known: float, since_s: float) -> float:
        # Somebody else's, which goes on whatever the load is: `choose` is to come to just what is left.
        return max(0.0, known - (self._now_s - since_s)) / (1.0 + self._view.load)


# ---- all of them ----


def _late(expected_s: float) -> float:
    """What takes longer than this is noticeably later."""
    return expected_s * (1.0 + _EQUAL_SHARE) + _EQUAL_S


@functools.lru_cache(maxsize=4096)
def _lot(salt: str, node: str) -> int:
    return crc32(f"{salt} {node}".encode())


def _ordered(found: list[_Found], here: str | None, salt: str, most: int | None, emptiest: float) -> list[Ranked]:
    if not found:
        return []
    best_s = min((one.expected_s for one in found if not one.is_full), default=-math.inf)
    equal_s = _late(best_s)

    def is_equal(one: _Found) -> bool:
        return not one.is_full and one.expected_s <= (equal_s + _NEAR_S if one.is_exact and one.view.node == here else equal_s)

    def key(one: _Found) -> tuple[object, ...]:
        view, expected_s = one.view, one.expected_s
        node = view.node
        # Whole leases more for each processor than on the emptiest. A few do not send one away from where its caller is: most wait for a model, and a quicker way is certain.
        crowd = int((view.crowd - emptiest) / (_MORE_CROWDED if node == here else 1.0))
        if is_equal(one):
            return (0, round(view.filled, 1) if one.has_missing else 0.0, crowd, node != here, view.link_s, _lot(salt, node), node)
        if not one.is_full:
            return (1, expected_s, crowd, node != here, _lot(salt, node), node)
        return (2, (view.waiting + 1) / max(1, view.leased), expected_s, node != here, _lot(salt, node), node)

    equals = sum(map(is_equal, found))
    # The one behind the last that is asked for is in its words.
    in_order = sorted(found, key=key) if most is None else nsmallest(most + 1, found, key=key)
    ranked: list[Ranked] = []
    for one in reversed(in_order):
        note = _note(one.view, one.is_full, is_equal=equals > 1 and is_equal(one), is_here=one.view.node == here)
        ranked.append(Ranked(one, note, ranked[-1] if ranked else None))
    ranked.reverse()
    return ranked[:most]


def _note(view: NodeView, is_full: bool, *, is_equal: bool, is_here: bool) -> str:
    said = []
    if is_full:
        said.append(f"full, {view.waiting} waiting")
    if view.avoided_s > 0:
        said.append("it refused a moment ago")
    if is_equal:
        said.append("the caller's own among equals" if is_here else "among equals")
    return ", ".join(said)
