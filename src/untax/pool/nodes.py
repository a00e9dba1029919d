"""Which node of a fleet a lease goes to: the quickest way on each, as `placement` finds it there, and the nodes in the order of their ways.

A node's view is what it last said of itself: what is idle and how warm, which layers lie there, what is starting, what its own steps were
measured to cost; and what whoever asks knows of it: how far away it is, whether it refused a moment ago. All of it may be outdated
by the time the lease gets there. A stage that a node lacks and another has comes from there, if it is the same on every machine; one that another is
building is waited for, and then comes. So the answer is not one node but all that could take it, best first: the next is asked when one refuses.

Ways that differ by less than anybody could measure are equal. Among equals comes first, where stages are to be built, the node with more room for them,
so that one does not evict what others would have had room for; then the one with fewer leases for each of its processors; then the
caller's own; then a fixed order that differs from caller to caller, so that many who ask at once do not all go to one.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
    def crowd(self) -> int:
        """Whole leases for each processor."""
        return self.leased // max(1, self.cpus)


@dataclass(frozen=True, slots=True)
class Ranked:
    """One node that could take it."""

    node: str
    choice: Choice
    """The quickest way there."""
    expected_s: float
    is_full: bool
    """Whether a lease there has to end first."""
    note: str
    """What beside the way decided, in words."""
    other: Ranked | None = None
    """The best of the nodes behind it."""

    @property
    def why(self) -> str:
        """One sentence for people."""
        if self.other is None:
            return f"{self.said()}; no other node could take it"
        return f"{self.said()}; next: {self.other.said()}"

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
) -> list[Ranked]:
    """The nodes that could take a lease with these rungs (lowest first), best first; empty when none could.

    `here` is the caller's own node. `usual` is what steps cost elsewhere, for those that a node has not measured. `chains` has the rungs as single
    nodes know them: what exists on one machine only has another key on each. `salt` is the caller's own, for the order among equals.
    """
    known = list(views)
    fit = [view for view in known if unfit(view, isolation=isolation, memory_mib=memory_mib) is None]
    around = _around(wanted, known)
    idlest, emptiest = min((view.busy for view in fit), default=0.0), min((view.crowd for view in fit), default=0)
    found = []
    for view in fit:
        rungs = chains.get(view.node, wanted) if chains else wanted
        more_s = view.avoided_s + max(0.0, view.busy - idlest - _BUSIER) * _ACTING_S + (view.crowd - emptiest) * _CROWDED_S
        found.append(_way(rungs, view, memory_mib, _OfNode(view, usual, now_s, around), more_s))
    return _ordered(found, here, salt)


# ---- one node ----

_Found = tuple[NodeView, Choice, float, bool]


def _way(wanted: Sequence[Stage], view: NodeView, memory_mib: float, costs: Costs, more_s: float) -> _Found:
    choice = choose(wanted, _One(view, wanted[0]), costs)
    assert choice is not None  # nothing keeps one from being created from nothing
    if view.filled >= _FILLED:
        more_s += _EVICTED * sum(costs.of_stage(stage) for stage in choice.missing)
    is_full = choice.kind != "exact" and (view.free_sandboxes < 1 or memory_mib > view.free_mib)
    return view, choice, choice.expected_s + more_s, is_full


class _One(Fleet):
    """A fleet of one node, which answers from its view."""

    def __init__(self, view: NodeView, lowest: Stage) -> None:
        super().__init__()
        self.add_node(view.node, link_s=view.link_s)
        here = self.node(view.node)
        here.load = view.load
        self._here = (here,)
        self._view = view
        self._lowest = lowest.key if lowest.name == "base" else None  # which is nothing, and everywhere

    def some_with_idle(self, key: str) -> Sequence[Node]:
        return self._here if self._view.idle.get(key, 0) > 0 else ()

    def some_with(self, key: str) -> Sequence[Node]:
        # What is fixed when a sandbox is created is in the key behind a tilde; the layers are the same.
        return self._here if key == self._lowest or key.partition("~")[0] in self._view.stored else ()

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


def _ordered(found: list[_Found], here: str | None, salt: str) -> list[Ranked]:
    if not found:
        return []
    best_s = min((expected_s for _, _, expected_s, is_full in found if not is_full), default=-math.inf)
    equal_s = best_s * (1.0 + _EQUAL_SHARE) + _EQUAL_S

    def key(one: _Found) -> tuple[object, ...]:
        view, choice, expected_s, is_full = one
        lot = crc32(f"{salt} {view.node}".encode())
        if not is_full and expected_s <= equal_s:
            return (0, round(view.filled, 1) if choice.missing else 0.0, view.crowd, view.node != here, view.link_s, lot, view.node)
        if not is_full:
            return (1, expected_s, view.crowd, view.node != here, lot, view.node)
        return (2, (view.waiting + 1) / max(1, view.leased), expected_s, view.node != here, lot, view.node)

    found.sort(key=key)
    equals = sum(not is_full and expected_s <= equal_s for _, _, expected_s, is_full in found)
    ranked: list[Ranked] = []
    for view, choice, expected_s, is_full in reversed(found):
        is_equal = not is_full and expected_s <= equal_s and equals > 1
        note = _note(view, is_full, is_equal=is_equal, is_here=view.node == here)
        ranked.append(Ranked(view.node, choice, expected_s, is_full, note, ranked[-1] if ranked else None))
    ranked.reverse()
    return ranked


def _note(view: NodeView, is_full: bool, *, is_equal: bool, is_here: bool) -> str:
    said = []
    if is_full:
        said.append(f"full, {view.waiting} waiting")
    if view.avoided_s > 0:
        said.append("it refused a moment ago")
    if is_equal:
        said.append("the caller's own among equals" if is_here else "among equals")
    return ", ".join(said)
