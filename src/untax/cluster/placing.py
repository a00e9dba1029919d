"""How a lease finds its node: rank what is known, ask the best, and the next when that one refuses. Nobody else is asked on the way.

The nodes come and go with `follow` and `leave`; each that is followed says what changes there (`RemoteEngine.watch`). One that does not answer
is not asked for leases until it does again. While nothing is placed they say less (`untax.cluster.attention`). A lease that waits at a full node is asked for elsewhere too once another has room, and keeps
its turn until that one has given it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from untax.cluster.attention import REST_S, Attention
from untax.cluster.elsewhere import is_better_elsewhere, named
from untax.cluster.ladders import Ladders
from untax.cluster.view import Claim, Views
from untax.cluster.waiting import Line
from untax.core.errors import (
    BackendError,
    LeaseRefused,
    PoolClosed,
    PoolTimeout,
    StageUnavailable,
    SubstrateUnavailable,
    UntaxError,
    UsageError,
)
from untax.core.ledger import Placed
from untax.core.spec import EnvSpec
from untax.leases import Request
from untax.pool.nodes import Ranked, is_better
from untax.remote.box import RemoteBox
from untax.remote.engine import RemoteEngine

log = logging.getLogger("untax.fleet")

_MOST_FULL = 3  # nodes that are said to be full and are asked all the same, before one of them is waited for
_LEAST_WAIT_S = 0.001
_QUIET_S = 0.005  # without a word from any node or a lease: then the next one's node is found ahead, which takes nothing from anybody
_FIRST_RETRY_S, _LAST_RETRY_S = 0.1, 5.0  # until a node that did not answer is asked again what it has
_COMING_S = 0.05  # one that is made within that is waited for at the caller's own node; so long would it take to make one elsewhere
_COMES_S = 0.1  # from the end of a lease on, in which a worker in a loop comes for the next
_IN_HAND = "in hand: given by the caller's own node with the end of the lease before it"
_COMING = "the caller's own node said that one is being made there which nobody waits for"


@dataclass(slots=True)
class _Followed:
    engine: RemoteEngine
    watching: asyncio.Task[None]


class _LineEnded(Exception):
    """The node where a lease waited has failed, and another may do better."""

    def __init__(self, node: str, why: UntaxError) -> None:
        super().__init__(str(why))
        self.node = node
        self.why = why


class Placing:
    """Leases over several nodes. Belongs to one event loop; the engines stay their makers' to close."""

    def __init__(self, *, here: str | None = None) -> None:
        self.views = Views(here=here, salt=secrets.token_hex(4))
        self._nodes: dict[str, _Followed] = {}
        self._asked = 0  # leases that are being asked for now
        self._last: EnvSpec | None = None  # that was asked for
        self._stirred_s = 0.0  # when something was told or given back
        self._foreseeing: asyncio.TimerHandle | None = None
        self._ladders = Ladders(self.views, self._by_nearness)
        self._line = Line(self.ranked, self._room, self._is_better)
        # A client that leases from its hand looks at nobody. One lease among those that has to be placed wakes its own node, where the next is likely to be: of the
        # others it may go by what is known.
        self._near, self._far = (Attention(self._tell_pace, is_needed=lambda: self._asked > 0) for _ in range(2))
        self._handed_s = -math.inf  # when a lease came from the hand
        self._coming: deque[tuple[EnvSpec, float]] = deque()  # what the caller's own node is making, and until when it is likely to be ours

    # ---- who is there ----

    def follow(self, node: str, engine: RemoteEngine) -> None:
        """A node whose engine is connected takes leases from now on; an earlier one of the same name is left."""
        self.leave(node)
        self.views.joined(node, isolation=engine.substrate.isolation)
        engine.on_link(lambda link_s: self.views.linked(node, link_s))
        engine.rest(self._is_resting(node))
        engine.on_nothing_ahead = functools.partial(self._nothing_ahead, node)
        self._nodes[node] = _Followed(engine, asyncio.get_running_loop().create_task(self._watch(node, engine)))
        self._line.changed()

    def leave(self, node: str, engine: RemoteEngine | None = None) -> None:
        """It takes no more, if it is still that engine's; what was leased of it lives on."""
        followed = self._nodes.get(node)
        if followed is not None and engine in (None, followed.engine):
            del self._nodes[node]
            followed.watching.cancel()
            followed.engine.on_link(None)
            followed.engine.on_nothing_ahead = None
            self.views.left(node)

    def engine(self, node: str) -> RemoteEngine:
        return self._nodes[node].engine

    async def aclose(self) -> None:
        self._near.close()
        self._far.close()
        if self._foreseeing is not None:
            self._foreseeing.cancel()
        tasks = [one.watching for one in self._nodes.values()]
        for node in list(self._nodes):
            self.leave(node)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        await self._ladders.aclose()
        await self._line.aclose()

    async def _watch(self, node: str, engine: RemoteEngine) -> None:
        """As long as it is followed: a node that was out of reach may answer again."""
        delay_s = _FIRST_RETRY_S

        def told(part: Mapping[str, Any]) -> None:
            nonlocal delay_s
            delay_s = _FIRST_RETRY_S
            self.views.told(node, part)
            self._line.changed()
            self._stirred()

        while True:
            try:
                await engine.watch(told)
            except UntaxError as exc:
                log.info("node %s: %s", node, exc)
                self.views.lost(node, str(exc))
                if not isinstance(exc, BackendError):
                    return  # closed, or not one for us
            await asyncio.sleep(delay_s)  # nothing tells when somebody begins to listen there
            delay_s = min(2 * delay_s, _LAST_RETRY_S)

    def wake(self) -> None:
        """Leases are about to be placed by what the nodes say: they say what has changed."""
        self._near.wake()
        self._far.wake()

    def _is_resting(self, node: str) -> bool:
        return (self._near if node == self.views.here else self._far).is_resting

    def _tell_pace(self) -> None:
        for node, followed in self._nodes.items():
            followed.engine.rest(self._is_resting(node))

    # ---- the next lease ----

    def _nothing_ahead(self, node: str, spec: EnvSpec, coming_s: float | None) -> None:
        """It had nothing idle to give with the end of a lease: what it told while this client rested is outdated. The lease that is placed next wakes it."""
        if coming_s is not None and coming_s <= _COMING_S and node == self.views.here:
            self._coming.append((spec, asyncio.get_running_loop().time() + _COMES_S))
        self.views.used_up(spec, node)

    def _stirred(self) -> None:
        loop = asyncio.get_running_loop()
        self._stirred_s = loop.time()
        if self._foreseeing is None and self._last is not None:
            self._foreseeing = loop.call_later(_QUIET_S, self._foresee)

    def _foresee(self) -> None:
        """Where the next lease goes, once it is quiet: groups of rollouts have one spec."""
        self._foreseeing = None
        loop = asyncio.get_running_loop()
        left_s = self._stirred_s + _QUIET_S - loop.time()
        if left_s > 0:
            self._foreseeing = loop.call_later(left_s, self._foresee)
        elif not self._asked and self._last is not None and not ((own := self._own()) is not None and own.is_giving):
            self.views.foresee(self._last)

    # ---- leases ----

    def stir(self) -> None:
        """Wake the node that the next lease is likely to go to."""
        if self._giver() is not None:
            return
        best = self.views.foreseen(self._last) if self._last is not None else None
        if best is not None and (followed := self._nodes.get(best.node)) is not None:
            followed.engine.stir()

    async def fulfil(self, request: Request) -> RemoteBox:
        """A box for a checked request that begins with its spec's own stages, on the node that is closest to it.

        `PoolTimeout` when none was free in time; `SubstrateUnavailable` or `UsageError` when none could be, with what each lacks; what the last node
        failed with when none did better.
        """
        began_s = time.monotonic()
        if (given := await self._in_hand(request)) is not None:
            return given
        tried: dict[str, UntaxError] = {}
        while True:
            box = await self._soon(request, began_s, tried) or await self._placed(request, began_s, tried)
            if box is not None:
                return box
            try:
                return await self._wait(request, began_s, tried)
            except _LineEnded as ended:
                log.debug("node %s, where a lease waited, failed: %s", ended.node, ended.why)
                for node in [node for node, exc in tried.items() if isinstance(exc, LeaseRefused)]:
                    del tried[node]  # they are asked again: that may be long ago
                tried[ended.node] = ended.why

    async def _in_hand(self, request: Request) -> RemoteBox | None:
        """What the caller's own node gave with the end of an earlier lease. It was placed there then, and nobody is asked."""
        engine = self._giver()
        if engine is None or not request.is_plain:
            return None
        box = await engine.take_in_hand(request, engine.clock())
        if box is not None:
            self._handed_s = asyncio.get_running_loop().time()
            box.was_placed(Placed(str(self.views.here), _IN_HAND))
        return box

    async def _soon(self, request: Request, began_s: float, tried: dict[str, UntaxError]) -> RemoteBox | None:
        """What the caller's own node is making already, when a lease there has just ended. What another has idle would be missed there in its turn, so that on a full
        fleet leases would only change places, and each of their actions have further to go.
        """
        own, node = self._own(), self.views.here
        while self._coming and self._coming[0][1] < asyncio.get_running_loop().time():
            self._coming.popleft()
        if own is None or node is None or node in tried or self._is_out(node):
            return None
        one = next((one for one in self._coming if one[0] == request.spec), None)
        if one is None:
            return None
        self._coming.remove(one)
        request = _in_time(request, began_s)
        try:
            box = await own.fulfil(replace(request, wait_s=min(_COMING_S, request.wait_s or math.inf)), may_refuse=True)
        except PoolTimeout as exc:  # it takes longer than such ones do, if it comes at all
            tried[node] = LeaseRefused("busy", str(exc))
            return None
        except UntaxError as exc:
            if not is_better_elsewhere(exc):
                raise
            tried[node] = exc
            return None
        box.was_placed(Placed(node, _COMING))
        return box

    def _is_out(self, node: str) -> bool:
        view = self.views.view(node)
        return view is None or bool(view.trouble) or view.is_draining

    def _giver(self) -> RemoteEngine | None:
        """The caller's own node, while it has given something ahead."""
        own = self._own()
        return own if own is not None and own.has_in_hand else None

    def _own(self) -> RemoteEngine | None:
        followed = self._nodes.get(self.views.here) if self.views.here is not None else None
        return followed.engine if followed is not None else None

    def is_favoured(self, node: str) -> bool:
        """Whether the next lease like one that ends on this node may as well come from there."""
        return self.views.favours(node)

    async def _placed(self, request: Request, began_s: float, tried: dict[str, UntaxError]) -> RemoteBox | None:
        """On the best node that does not refuse; None when all who might have room said that they have none."""
        spec = request.spec
        full = 0
        while full < _MOST_FULL:
            if tried or asyncio.get_running_loop().time() > self._handed_s + REST_S:
                self.wake()
            else:
                self._near.wake()
            best = self.views.foreseen(spec) if not tried else None
            if best is None:
                ranked = await self.ranked(spec, _in_time(request, began_s).wait_s, most=len(tried) + 2)
                best = next((one for one in ranked if one.node not in tried), None)
            if best is None:
                break
            full += best.is_full
            try:
                return await self._ask(best, _in_time(request, began_s), tried, may_refuse=True)
            except UntaxError as exc:
                if not is_better_elsewhere(exc) and not await self.is_lacking(spec, best.node, exc):
                    raise
                log.debug("node %s gave no lease: %s", best.node, exc)
                tried[best.node] = exc
        return None

    async def _wait(self, request: Request, began_s: float, tried: dict[str, UntaxError]) -> RemoteBox:
        """Nobody has room, and all who might have said so: the lease waits where the line is shortest, and goes elsewhere when there is room before its turn."""
        self.wake()
        refused = {node: exc.reason for node, exc in tried.items() if isinstance(exc, LeaseRefused)}
        waitable = {node for node, reason in refused.items() if reason in ("full", "busy")}
        if not waitable and not any(isinstance(exc, StageUnavailable) for exc in tried.values()):
            waitable = {
                node for node, reason in refused.items() if reason == "disk"
            }  # until a lease ends there; once, not at one after the other
        ranked = await self.ranked(request.spec)
        best = next((one for one in ranked if (one.is_full and one.node not in tried) or one.node in waitable), None)
        if best is not None:
            try:
                return await self._line.wait(
                    request.spec,
                    best.node,
                    self._ask(best, _in_time(request, began_s), tried, may_refuse=False),
                    lambda other: self._ask(other, _in_time(request, began_s), _moved(tried, best.node, other.node), may_refuse=True),
                    is_refusal=is_better_elsewhere,
                )
            except UntaxError as exc:
                if is_better_elsewhere(exc) or await self.is_lacking(request.spec, best.node, exc):
                    raise _LineEnded(best.node, exc) from exc
                raise
        failures = [(node, exc) for node, exc in tried.items() if not isinstance(exc, (LeaseRefused, PoolClosed))]
        if failures:
            raise named(*failures[-1])
        raise self._nowhere(request.spec, tried)

    async def _ask(self, ranked: Ranked, request: Request, tried: Mapping[str, UntaxError], *, may_refuse: bool) -> RemoteBox:
        if ranked.node not in self._nodes:
            raise BackendError("", f"node {ranked.node} has left")
        engine = self._nodes[ranked.node].engine
        engine.stir()
        claim = self.views.claim(ranked, request.spec.limits.memory_mib)
        self._asked += 1
        self._last = request.spec
        why = ""

        def sent(number: int) -> None:
            nonlocal why
            claim.number = number
            why = ranked.why  # the words are found while the node works

        try:
            box = await engine.fulfil(request, may_refuse=may_refuse, on_sent=sent)
        except BaseException as exc:
            self.views.failed(claim, exc if isinstance(exc, UntaxError) and is_better_elsewhere(exc) else None)
            raise
        finally:
            self._asked -= 1
        if claim.number is None:  # it was in hand by the time it was to be asked for: the node was asked nothing
            self.views.failed(claim)
            why = _IN_HAND
        else:
            self.views.came(claim)
            box.on_given_back = functools.partial(self._given_back, claim)
        box.was_placed(Placed(ranked.node, why, tuple((node, str(exc)) for node, exc in tried.items())))
        asyncio.get_running_loop().call_soon(self._learn_of, request.spec, ranked.node, box)  # nobody waits for that
        return box

    def _given_back(self, claim: Claim) -> None:
        self.views.ended(claim)
        self._stirred()

    def _learn_of(self, spec: EnvSpec, node: str, box: RemoteBox) -> None:
        """Which stages it really needed there."""
        if box.ledger.wanted:
            self.views.learnt(spec, node, box.ledger.wanted)

    def _room(self, node: str) -> tuple[float, float]:
        view = self.views.view(node)
        return (0.0, 0.0) if view is None else (view.free_sandboxes, view.avoided_s)

    def _is_better(self, other: Ranked, node: str, waited_s: float) -> bool:
        waiting = self.views.view(node)
        return waiting is None or is_better(other, waiting, waited_s)

    async def ranked(self, spec: EnvSpec, within_s: float | None = None, *, most: int | None = None) -> list[Ranked]:
        """Where a lease of `spec` could go now, best first; with `most`, so many of them. `PoolTimeout` where no node says in time what it is."""
        if not self.views.is_known(spec):
            try:
                async with asyncio.timeout(within_s):
                    await self._ladders.learn(spec)
            except TimeoutError:
                raise PoolTimeout(
                    f"no sandbox within {within_s:g} s: no node has said of which stages it is; see `untax fleet status`"
                ) from None
        return self.views.rank(spec, most=most)

    def _nowhere(self, spec: EnvSpec, tried: Mapping[str, UntaxError]) -> UntaxError:
        reasons = {node: str(exc) for node, exc in tried.items()} | self.views.left_out(spec)
        said = "; ".join(f"node {node}: {reason}" for node, reason in sorted(reasons.items())) or "no node is in it"
        views = [view for node in self.views.nodes if (view := self.views.view(node)) is not None]
        if views and all(spec.limits.memory_mib > view.most_mib for view in views):
            return UsageError(f"no node of the fleet is large enough for this lease: {said}; lower its limits, or add a larger node")
        return SubstrateUnavailable("", f"no node of the fleet takes this lease: {said}; `untax fleet status` shows them all")

    async def is_lacking(self, spec: EnvSpec, node: str, exc: UntaxError) -> bool:
        """Whether what a node said is that the image is not on its machine, so that another may do better."""
        return await self._ladders.is_lacking(spec, node, exc)

    def _by_nearness(self) -> list[tuple[str, RemoteEngine]]:
        """Those that do not answer last."""

        def distance(one: tuple[str, RemoteEngine]) -> tuple[bool, bool, float]:
            node, engine = one
            view = self.views.view(node)
            return view is None or bool(view.trouble), node != self.views.here, engine.link_s

        return sorted(((node, followed.engine) for node, followed in self._nodes.items()), key=distance)


def _moved(tried: Mapping[str, UntaxError], node: str, other: str) -> Mapping[str, UntaxError]:
    """Who was asked before, of a lease that waited at `node`."""
    before: dict[str, UntaxError] = {one: exc for one, exc in tried.items() if one != node}
    return before | {node: LeaseRefused("full", f"it had no room yet when {other} had")}


def _in_time(request: Request, began_s: float) -> Request:
    if request.wait_s is None:
        return request
    left_s = request.wait_s - (time.monotonic() - began_s)
    if left_s <= 0:
        raise PoolTimeout(f"no sandbox within wait_s={request.wait_s:g}: every node was asked; allow more time, or add nodes")
    return replace(request, wait_s=max(_LEAST_WAIT_S, left_s))
