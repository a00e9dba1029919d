"""Leases that wait at full nodes, and leave their line for another node that has room: one that joined, or where a lease has ended.

Each keeps its place where it waits until it has a sandbox elsewhere. Whenever a node has said something new, the oldest of each spec is looked at, and as
many behind it as there seems to be room for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine

from untax.core.errors import UntaxError
from untax.core.spec import EnvSpec
from untax.pool.nodes import Ranked
from untax.remote.box import RemoteBox

log = logging.getLogger("untax.fleet")

_PATIENCE_S = 1.0  # until it is looked again whether a lease that waits is better off elsewhere
_MOST_SPECS = 16  # looked at each time that a node says something


class _Waiting:
    def __init__(self, spec: EnvSpec, node: str, here: Coroutine[None, None, RemoteBox]) -> None:
        self.spec = spec
        self.node = node
        self.since_s = time.monotonic()
        self.here = asyncio.ensure_future(here)
        self.elsewhere: asyncio.Future[RemoteBox] | None = None
        self.chance: asyncio.Future[Ranked] = asyncio.get_running_loop().create_future()
        """Where there is room, once there is."""


class Line:
    """Of one client. `rank` says where a lease could go, best first; `room` how many more a node could take, and in how long it may be asked again if it refused
    a moment ago; `is_better` whether one is worth leaving a line for, in which a lease has waited for so long. Belongs to one event loop.
    """

    def __init__(
        self,
        rank: Callable[[EnvSpec], Awaitable[list[Ranked]]],
        room: Callable[[str], tuple[float, float]],
        is_better: Callable[[Ranked, str, float], bool],
    ) -> None:
        self._rank = rank
        self._room = room
        self._is_better = is_better
        self._again: asyncio.TimerHandle | None = None
        self._waiting: dict[_Waiting, None] = {}  # oldest first
        self._looking: asyncio.Task[None] | None = None
        self._is_outdated = False
        self._chores: set[asyncio.Future[None]] = set()

    def changed(self) -> None:
        """A node has said something. Costs next to nothing while nobody waits."""
        if not self._waiting:
            return
        self._is_outdated = True
        if self._looking is None:
            self._looking = asyncio.ensure_future(self._look())

    async def aclose(self) -> None:
        if self._again is not None:
            self._again.cancel()
        if self._looking is not None:
            self._looking.cancel()
        if chores := [*self._chores, *([self._looking] if self._looking is not None else ())]:
            await asyncio.wait(chores)

    async def wait(
        self,
        spec: EnvSpec,
        node: str,
        here: Coroutine[None, None, RemoteBox],
        ask: Callable[[Ranked], Coroutine[None, None, RemoteBox]],
        *,
        is_refusal: Callable[[UntaxError], bool],
    ) -> RemoteBox:
        """What comes first: `here`, which waits at `node`, or what `ask` gives at another node, which may refuse. The other one is given back."""
        one = _Waiting(spec, node, here)
        self._waiting[one] = None
        first: asyncio.Future[RemoteBox] | None = None
        self.changed()  # something may have been said since it was refused
        try:
            first = await _first(one, ask, is_refusal)
            return first.result()
        finally:
            del self._waiting[one]
            for other in (one.here, one.elsewhere):
                if other is not None and other is not first:
                    chore = asyncio.ensure_future(_given_back(other))
                    self._chores.add(chore)
                    chore.add_done_callback(self._chores.discard)

    async def _look(self) -> None:
        try:
            while self._is_outdated and self._waiting:
                self._is_outdated = False
                await self._offer()
        finally:
            self._looking = None

    async def _offer(self) -> None:
        """Where there is room, to the oldest of each spec first."""
        specs: dict[EnvSpec, list[_Waiting]] = {}
        for one in self._waiting:
            if not one.chance.done() and (one.spec in specs or len(specs) < _MOST_SPECS):
                specs.setdefault(one.spec, []).append(one)
        given: dict[str, int] = {}
        for spec, waiting in specs.items():
            try:
                free = [best for best in await self._rank(spec) if not best.is_full]
            except UntaxError as exc:
                log.debug("where a lease that waits could go is not known: %s", exc)
                continue
            for one in waiting:
                best = next((best for best in free if best.node != one.node and self._has_room(best.node, given.get(best.node, 0))), None)
                if best is None:
                    break
                if not self._is_better(best, one.node, time.monotonic() - one.since_s):
                    self._look_in(_PATIENCE_S)  # who has waited for longer goes further
                    continue
                if one in self._waiting and not one.chance.done():
                    given[best.node] = given.get(best.node, 0) + 1
                    one.chance.set_result(best)

    def _has_room(self, node: str, given: int) -> bool:
        room, avoided_s = self._room(node)
        if given + 1 > room:
            return False
        if avoided_s > 0:  # what it refused for may be over, and it need not say so
            self._look_in(avoided_s)
        return avoided_s <= 0

    def _look_in(self, seconds: float) -> None:
        if self._again is None:
            self._again = asyncio.get_running_loop().call_later(seconds, self._look_again)

    def _look_again(self) -> None:
        self._again = None
        self.changed()


async def _first(
    one: _Waiting, ask: Callable[[Ranked], Coroutine[None, None, RemoteBox]], is_refusal: Callable[[UntaxError], bool]
) -> asyncio.Future[RemoteBox]:
    """Which of the two has come; the one where it waits when neither has, and what failed otherwise than by a refusal."""
    while True:
        other: asyncio.Future[RemoteBox] | asyncio.Future[Ranked] = one.elsewhere if one.elsewhere is not None else one.chance
        await asyncio.wait({task for task in (one.here, other) if not task.done()}, return_when=asyncio.FIRST_COMPLETED)
        if one.here.done() and (one.elsewhere is None or _has_come(one.here)):
            return one.here
        if one.elsewhere is None:
            one.elsewhere = asyncio.ensure_future(ask(one.chance.result()))
        elif one.elsewhere.done():
            exc = one.elsewhere.exception()
            if not isinstance(exc, UntaxError) or not is_refusal(exc):
                return one.elsewhere
            log.debug("a lease that waits at %s did not get one of %s: %s", one.node, one.chance.result().node, exc)
            if one.here.done():
                return one.here
            one.elsewhere, one.chance = None, asyncio.get_running_loop().create_future()


def _has_come(task: asyncio.Future[RemoteBox]) -> bool:
    return not task.cancelled() and task.exception() is None


async def _given_back(task: asyncio.Future[RemoteBox]) -> None:
    task.cancel()
    await asyncio.wait([task])
    if _has_come(task):
        with contextlib.suppress(UntaxError):  # a server that is gone has given it back
            await task.result().release()
