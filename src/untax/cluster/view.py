"""What one client knows of each node of its fleet: the latest that the node said, corrected by what came of the client's own leases.

A lease that was just asked for is not in the view that came before it. Until one comes that has it in, it is a *claim*: its sandbox is taken for
gone, its start for under way. So many who ask at once in one process do not all count on one idle sandbox. Each view says up to which of the
client's requests it has them in.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from untax.core.errors import LeaseRefused, ProtocolError
from untax.core.spec import EnvSpec, Limits
from untax.core.stage import Stage
from untax.grounds import Recipe, recipe_of
from untax.pool.costs import Costs
from untax.pool.nodes import NodeView, Ranked, is_favoured, rank, unfit

# How long a node is left alone that refused: doubled each time, until a lease of it succeeds.
_AVOIDED_S, _MOST_AVOIDED_S = 0.1, 5.0
_USUAL_WEIGHT = 0.2  # of what one node says a step costs, in what is taken to be usual
_MOST_LADDERS = 4096
_DOUBT_S, _SLOWER = 60.0, 2.0  # until a node is tried again whose sandboxes took so many times longer than the quickest node's
_LACKING_S = 30.0  # until a node is asked again that had no such image
_USED_UP_S = 3.0  # in which a node says what else it has than it said before; to who rests it does every two seconds (`untax.server.view`)
_FORESEEN_S = 1.0  # what was found ahead holds for so long, while nothing else is heard: stages that are being built come nearer

_NUMBERS = ("most_starting", "waiting", "cpus", "busy", "filled")
_Asked = tuple[Recipe, Limits, str | None, str | None]


@dataclass(slots=True, eq=False)
class Claim:
    """A lease that was asked for at a node."""

    node: str
    key: str | None
    """Of what was idle; None for what is to be created."""
    is_exact: bool
    building: tuple[str, ...]
    memory_mib: float
    asked_s: float
    number: int | None = None
    """Of the request at its node; None until it was sent."""
    is_answered: bool = False
    is_over: bool = False
    """Its lease has ended before a view had it in: what was idle is used all the same."""


@dataclass(frozen=True, slots=True)
class _Foreseen:
    spec: EnvSpec
    version: int
    at_s: float
    best: Ranked


class _Node:
    """As it was told, and as it is taken to be."""

    def __init__(self, view: NodeView) -> None:
        self.view = view
        self.idle: dict[str, int] = {}
        self.used_up: set[str] = set()
        """Of these keys nothing was idle when the node was asked last, whatever it had told before."""
        self.used_up_until_s = -math.inf
        self.building: dict[str, float] = {}
        self.starting = self.leased = 0
        self.free_sandboxes = self.free_mib = math.inf
        self.claims: list[Claim] = []
        self.refusals = 0
        self.avoided_until_s = -math.inf
        self.is_told = False
        self.create_told_s = math.inf
        """When it last said how long a sandbox takes there."""
        self.create_s: float | None = None
        """What that was, while it is doubted."""

    def take(self, part: Mapping[str, Any], now_s: float) -> None:
        view = self.view
        self.used_up.clear()  # what it does not say now is as it was told
        if part.get("whole"):
            self.idle, view.stored = {}, set()
        for key, count in part.get("idle", {}).items():
            if count:
                self.idle[str(key)] = int(count)
            else:
                self.idle.pop(key, None)
        view.stored.update(map(str, part.get("stored", ())))
        view.stored.difference_update(part.get("evicted", ()))
        if "building" in part:
            self.building = {str(key): now_s - float(age_s) for key, age_s in part["building"].items()}
        for name in _NUMBERS:
            if name in part:
                setattr(view, name, type(getattr(view, name))(part[name]))
        self.free_sandboxes = _bound(part, "free_sandboxes", self.free_sandboxes)
        self.free_mib = _bound(part, "free_mib", self.free_mib)
        view.most_mib = _bound(part, "most_mib", view.most_mib)
        if "isolation" in part:
            view.isolation = str(part["isolation"])
        if "is_draining" in part:
            view.is_draining = part["is_draining"] is True
        self.starting, self.leased = int(part.get("starting", self.starting)), int(part.get("leased", self.leased))
        if "free_sandboxes" in part or "free_mib" in part:
            self.avoided_until_s = -math.inf  # what it refused for is another now
        self.is_told = True
        if self.claims:
            self.settle(int(part.get("asked", 0)), is_whole=part.get("whole") is True)

    def settle(self, asked: int, *, is_whole: bool) -> None:
        """All requests up to this number are in what was told; after all of it anew also those that were answered before, perhaps by another server."""
        self.claims = [
            claim for claim in self.claims if (claim.number is None or claim.number > asked) and not (is_whole and claim.is_answered)
        ]

    def correct(self) -> None:
        """What is told, less what is claimed or used up."""
        view, claims = self.view, self.claims
        view.idle = dict(self.idle) if claims or self.used_up else self.idle
        view.building = dict(self.building) if claims else self.building
        view.starting, view.leased = self.starting, self.leased
        view.free_sandboxes, view.free_mib = self.free_sandboxes, self.free_mib
        for claim in claims:
            if claim.key is not None:
                view.idle[claim.key] = view.idle.get(claim.key, 0) - 1
            if claim.is_over:
                continue
            view.leased += 1
            view.free_sandboxes -= 1
            view.free_mib -= claim.memory_mib
            if not claim.is_exact:
                view.starting += 1
                for key in claim.building:
                    view.building.setdefault(key, claim.asked_s)
        for key in self.used_up:
            view.idle.pop(key, None)


class Views:
    """Of all nodes. `here` is the caller's own, if it is one of them. Belongs to one event loop."""

    def __init__(self, *, here: str | None = None, salt: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self.here = here
        self._salt = salt
        self._clock = clock
        self._nodes: dict[str, _Node] = {}
        self._usual = Costs()
        self._ladders: OrderedDict[_Asked, dict[str, tuple[Stage, ...]]] = OrderedDict()
        self._lacking: OrderedDict[tuple[_Asked, str], tuple[float, str]] = OrderedDict()  # until when, and what they said
        self._version = 0  # of all of this
        self._foreseen: _Foreseen | None = None
        self._favoured: tuple[int, str, bool] = (-1, "", False)  # of which version and node that was said last

    # ---- who is there ----

    def joined(self, node: str, *, isolation: str, link_s: float = 0.0) -> None:
        """It can be leased from; until it has said more, it is taken to have nothing."""
        self._version += 1
        if node not in self._nodes:
            self._nodes[node] = _Node(NodeView(node, isolation))
        self._nodes[node].view.link_s = link_s

    def linked(self, node: str, link_s: float) -> None:
        """So long the way there and back takes now."""
        one = self._nodes.get(node)
        if one is not None and one.view.link_s != link_s:
            self._version += 1
            one.view.link_s = link_s

    def left(self, node: str) -> None:
        self._version += 1
        self._nodes.pop(node, None)
        for known in self._ladders.values():
            known.pop(node, None)

    def lost(self, node: str, why: str) -> None:
        """It does not answer; not asked until it says something of itself again."""
        self._version += 1
        if node in self._nodes:
            self._nodes[node].view.trouble = f"it does not answer: {why}"

    def drained(self, node: str) -> None:
        """It takes no new leases."""
        self._version += 1
        if node in self._nodes:
            self._nodes[node].view.is_draining = True

    def told(self, node: str, part: Mapping[str, Any]) -> None:
        """What a node said of itself: all, or what has changed. `ProtocolError` for what is no view."""
        one = self._nodes.get(node)
        if one is None:
            return
        self._version += 1
        now_s = self._clock()
        try:
            one.take(part, now_s)
            costs = part.get("costs") or {}
            by_name, by_key = costs.get("by_name", {}), costs.get("by_key", {})
            one.view.costs.hear(by_name, by_key)
            self._usual.hear(by_name, by_key, weight=_USUAL_WEIGHT)
        except (AttributeError, TypeError, ValueError) as exc:
            raise ProtocolError(f"a view of node {node} that is none: {exc!r}") from exc
        if "create" in by_name:
            one.create_told_s, one.create_s = now_s, None
        one.view.trouble = ""
        one.correct()

    def used_up(self, spec: EnvSpec, node: str) -> None:
        """Nothing is idle there for this, until it says more, or has not for so long that it is again as it was told: that it does not say."""
        one, stages = self._nodes.get(node), self._ladders.get(_asked(spec), {}).get(node) or self.ladder(spec)
        if one is not None and stages and stages[-1].key in one.idle:
            self._version += 1
            one.used_up.add(stages[-1].key)
            one.used_up_until_s = self._clock() + _USED_UP_S
            one.correct()

    def view(self, node: str) -> NodeView | None:
        """As it is taken to be now."""
        one = self._nodes.get(node)
        return one.view if one is not None else None

    def all(self) -> Iterable[NodeView]:
        return (one.view for one in self._nodes.values())

    def favours(self, node: str) -> bool:
        """Whether the next lease like one that ends on this node may as well come from there. Asked with the end of each, and seldom another than before."""
        version, known, does = self._favoured
        if version != self._version or known != node:
            one = self._nodes.get(node)
            does = one is not None and is_favoured(one.view, self.all())
            self._favoured = self._version, node, does
        return does

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._nodes)

    # ---- which stages ----

    def ladder(self, spec: EnvSpec) -> Sequence[Stage] | None:
        """The rungs of a spec, as any node knows them; None when nobody was asked yet."""
        known = self._ladders.get(_asked(spec))
        return next(iter(known.values()), None) if known else None

    def is_known(self, spec: EnvSpec) -> bool:
        """Whether nobody has to be asked for its rungs any more."""
        asked = _asked(spec)
        return bool(self._ladders.get(asked)) and not self._unasked(asked)

    def unasked(self, spec: EnvSpec) -> list[str]:
        """The nodes that know its rungs by keys of their own, and were not asked for them."""
        return self._unasked(_asked(spec))

    def _unasked(self, asked: _Asked) -> list[str]:
        known = self._ladders.get(asked, {})
        if len(known) >= len(self._nodes) or any(stages[-1].is_portable for stages in known.values()):
            return []
        answered = known.keys() | self._lack(asked).keys()
        return [node for node, one in self._nodes.items() if node not in answered and not one.view.is_draining and not one.view.trouble]

    def lacks(self, spec: EnvSpec, node: str, why: str) -> None:
        """There is no such image on its machine. It may come to be there: it is passed over for a while."""
        self._version += 1
        self._lacking[_asked(spec), node] = self._clock() + _LACKING_S, why
        self._ladders.get(_asked(spec), {}).pop(node, None)
        if len(self._lacking) > _MOST_LADDERS:
            self._lacking.popitem(last=False)

    def _lack(self, asked: _Asked) -> dict[str, str]:
        """Who lacks it now, in their words."""
        if not self._lacking:  # as nearly always
            return {}
        found = {node: self._lacking.get((asked, node), (-math.inf, "")) for node in self._nodes}
        return {node: why for node, (until_s, why) in found.items() if self._clock() < until_s}

    def learnt(self, spec: EnvSpec, node: str, stages: tuple[Stage, ...]) -> None:
        """Which stages `node` puts in place for a spec: it was asked, or a lease has shown."""
        if node not in self._nodes:
            return
        key = _asked(spec)
        self._lacking.pop((key, node), None)
        known = self._ladders.get(key)
        if known is None:
            known = self._ladders[key] = {}
            if len(self._ladders) > _MOST_LADDERS:
                self._ladders.popitem(last=False)
        if known.get(node) != stages:
            self._version += 1
            if any(one[-1].is_portable for one in known.values()) and stages[-1].is_portable:
                known.clear()  # the image's name stands for something else now, everywhere
            known[node] = stages

    # ---- where to ----

    def rank(self, spec: EnvSpec, *, most: int | None = None) -> list[Ranked]:
        """Where a lease of this spec could go, best first; with `most`, so many of them. Empty while its rungs were not learnt."""
        asked = _asked(spec)
        known = self._ladders.get(asked)
        if not known:
            return []
        now_s, lack = self._clock(), self._lack(asked)
        for one in self._nodes.values():
            avoided_s = max(0.0, one.avoided_until_s - now_s)
            if (avoided_s > 0) != (one.view.avoided_s > 0):
                self._version += 1
            one.view.avoided_s = avoided_s
            if now_s > one.create_told_s + _DOUBT_S:
                self._doubt(one)
            if one.used_up and now_s > one.used_up_until_s:
                self._version += 1
                one.used_up.clear()
                one.correct()
        return rank(
            next(iter(known.values())),
            [one.view for node, one in self._nodes.items() if node not in lack],
            here=self.here,
            isolation=spec.isolation,
            memory_mib=spec.limits.memory_mib,
            now_s=now_s,
            usual=self._usual,
            chains=known,
            salt=self._salt,
            most=most,
        )

    def _doubt(self, one: _Node) -> None:
        """A node that is never asked never measures again: what took long there once is held to be as quick as elsewhere, for one lease."""
        known = [cost for other in self._nodes.values() if (cost := other.view.costs.known("create")) is not None]
        own, least = one.view.costs.known("create"), min(known, default=0.0)
        one.create_told_s = self._clock()
        if own is not None and own > _SLOWER * least:
            one.create_told_s, one.create_s = math.inf, own
            one.view.costs.hear({"create": least}, {})
            self._version += 1

    def foresee(self, spec: EnvSpec) -> None:
        """Have the best for a lease of `spec` ready, with its words: for who has nothing else to do, before the next one is asked for."""
        foreseen = self._foreseen
        if foreseen is not None and foreseen.spec is spec and foreseen.version == self._version:
            return
        found = self.rank(spec, most=2) if self.is_known(spec) else []
        if found and not any(one.view.avoided_s for one in self._nodes.values()):
            assert found[0].why
            self._foreseen = _Foreseen(spec, self._version, self._clock(), found[0])

    def foreseen(self, spec: EnvSpec) -> Ranked | None:
        """What `rank` would have first, where that is known already."""
        found = self._foreseen
        if found is None or found.spec is not spec or found.version != self._version or self._clock() - found.at_s > _FORESEEN_S:
            return None
        return found.best

    def left_out(self, spec: EnvSpec) -> dict[str, str]:
        """The nodes that cannot take it, and why."""
        reasons = {node: unfit(one.view, isolation=spec.isolation, memory_mib=spec.limits.memory_mib) for node, one in self._nodes.items()}
        return {node: reason for node, reason in reasons.items() if reason is not None} | self._lack(_asked(spec))

    # ---- what came of it ----

    def claim(self, ranked: Ranked, memory_mib: float = 0.0) -> Claim:
        """A lease is about to be asked for there."""
        choice = ranked.choice
        key = choice.start.key if choice.entry is not None and choice.start is not None else None
        building = tuple(stage.key for stage in choice.missing)
        claim = Claim(ranked.node, key, choice.kind == "exact", building, memory_mib, self._clock())
        self._version += 1
        one = self._nodes[ranked.node]
        if one.create_s is not None:  # if it is no longer so, the node says so
            one.view.costs.hear({"create": one.create_s}, {})
            one.create_told_s, one.create_s = self._clock(), None
        one.claims.append(claim)
        one.correct()
        return claim

    def came(self, claim: Claim) -> None:
        """It is there. The claim stays until a view has it in."""
        claim.is_answered = True
        one = self._nodes.get(claim.node)
        if one is not None and one.refusals:
            self._version += 1
            one.refusals, one.avoided_until_s = 0, -math.inf

    def ended(self, claim: Claim) -> None:
        """The lease was given back."""
        self._version += 1
        claim.is_over = True
        one = self._nodes.get(claim.node)
        if one is not None and claim in one.claims:
            one.correct()

    def failed(self, claim: Claim, why: Exception | None = None) -> None:
        """It came to nothing. A node that refused, or did not answer, is left alone for a while."""
        self._version += 1
        one = self._nodes.get(claim.node)
        if one is None:
            return
        if claim in one.claims:
            one.claims.remove(claim)
            one.correct()
        if isinstance(why, LeaseRefused) and why.reason == "draining":
            one.view.is_draining = True
        if why is not None:
            one.avoided_until_s = self._clock() + min(_MOST_AVOIDED_S, _AVOIDED_S * 2**one.refusals)
            one.refusals = min(one.refusals + 1, 16)


def _bound(part: Mapping[str, Any], name: str, before: float) -> float:
    if name not in part:
        return before
    return math.inf if part[name] is None else float(part[name])


def _asked(spec: EnvSpec) -> _Asked:
    """All that decides on the keys of its stages, on whatever substrate."""
    return (recipe_of(spec), spec.limits, spec.user, spec.workdir)
