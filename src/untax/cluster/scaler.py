"""Carries out what `scaling` decides for whoever keeps a fleet: tells Ray's autoscaler of those who wait for room, and lets nodes go that nobody needs.

Nodes *rest* that were drained for want of use. Ray takes them away when its own time for idle nodes is over, and does not while an agent is on them:
a node on which an actor lives is busy. Where it leaves them, they are the first to be woken when somebody waits again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable
from operator import itemgetter

from untax.cluster.known import Node
from untax.cluster.scaling import Load, Scaling, bundles, missing

log = logging.getLogger("untax.cluster")

_LASTING_S = 1.0  # until somebody's wait is told: a line that is served by itself need not be
_AGAIN_S = 10.0  # until it is told again: another program's request takes the place of ours
_LEAST_S = 0.1  # between two looks


class Scaler:
    """Belongs to one event loop. `rest` and `wake` are the keeper's; `told` is called when `wanted` has changed."""

    def __init__(
        self,
        scaling: Scaling,
        nodes: Callable[[], Iterable[Node]],
        *,
        rest: Callable[[Node], Awaitable[float]],
        wake: Callable[[Node], None],
        told: Callable[[], None],
        ask: Callable[[list[dict[str, float]]], Awaitable[bool]],
        may_have_asked: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scaling = scaling
        self._nodes = nodes
        self._rest, self._wake, self._told, self._ask_ray = rest, wake, told, ask
        self._clock = clock
        self._asked: list[dict[str, float]] | None = None if may_have_asked else []
        """What Ray was told last; None: who knows."""
        self._asked_s = -math.inf
        self._short_since_s: float | None = None
        self._changed = asyncio.Event()
        self.wanted = 0
        """How many nodes more Ray was asked for."""

    def changed(self, node: Node, load: Load | None) -> None:
        """A node says how it is doing, or is none that could."""
        node.load = load
        if load is None or not load.is_idle:
            node.idle_since_s = None
        elif node.idle_since_s is None:
            node.idle_since_s = self._clock()
        self._changed.set()

    async def run(self) -> None:
        while True:
            self._changed.clear()
            try:
                due_s = await self.look()
            except Exception:  # the fleet goes on as large as it is
                log.exception("whether more or fewer nodes are needed could not be found out")
                due_s = _AGAIN_S
            await asyncio.sleep(_LEAST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if math.isinf(due_s) else due_s):
                    await self._changed.wait()

    async def close(self) -> None:
        """What was asked for is taken back."""
        if self._asked or self._asked is None:
            await self._ask_ray([])

    async def look(self) -> float:
        """Do what is to be done now; how long it can be left alone then, if nothing changes."""
        now_s = self._clock()
        lacking = missing(node.load for node in self._nodes() if node.load is not None)
        if not lacking:
            self._short_since_s = None
            await self._ask([], 0, now_s)
            return min(await self._let_go(now_s), math.inf if self._asked == [] else _AGAIN_S)
        if self._short_since_s is None:
            self._short_since_s = now_s
        if (left_s := self._short_since_s + _LASTING_S - now_s) > 0:
            return left_s
        nodes = list(self._nodes())
        more = max(0, lacking - sum(node.is_coming for node in nodes))
        for node in [node for node in nodes if node.is_resting][:more]:
            log.info("node %s is needed again", node.name)
            self._wake(node)
            more -= 1
        if self._scaling.max_nodes is not None:
            more = max(0, min(more, self._scaling.max_nodes - len(nodes)))
        # Also while none is asked for: those that come are not to be taken away before they have an agent.
        workers = [node.resources for node in nodes if not node.is_head]
        await self._ask(bundles([node.resources for node in nodes], more, self._scaling, workers=workers), more, now_s)
        return _AGAIN_S

    async def _ask(self, size: list[dict[str, float]], more: int, now_s: float) -> None:
        if size != self._asked or (size and now_s - self._asked_s >= _AGAIN_S):
            self._asked_s = now_s
            if await self._ask_ray(size):
                self._asked = size
        if more != self.wanted:
            log.info("%d nodes more are asked of Ray's autoscaler", more)
            self.wanted = more
            self._told()

    async def _let_go(self, now_s: float) -> float:
        """Of the nodes that nobody has needed for long enough, as many as need not stay; the head is Ray's own."""
        idle_s = self._scaling.idle_s
        if idle_s is None:
            return math.inf
        serving = [node for node in self._nodes() if node.load is not None]
        waiting_s = math.inf
        idle = [(node.idle_since_s, node) for node in serving if node.idle_since_s is not None and not node.is_head]
        idle.sort(key=itemgetter(0))
        for since_s, node in idle[: max(0, len(serving) - self._scaling.min_nodes)]:
            left_s = since_s + idle_s - now_s
            if left_s <= 0:
                left_s = await self._rest(node)
                if left_s <= 0:
                    log.info("node %s rests: nobody has needed it for %g s", node.name, idle_s)
                    continue
                node.idle_since_s = now_s + left_s - idle_s
            waiting_s = min(waiting_s, left_s)
        return waiting_s
