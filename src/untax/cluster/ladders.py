"""By which stages nodes know a spec: asked of the nearest, of everybody when that says nothing, and of all where the keys are each node's own.

An image may lie on some of the machines only. A node that lacks it says that the spec is wrong, which it is there: the others are asked, and
it is passed over for a while. Only what all of them say is wrong is the caller's mistake.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

from untax.cluster.elsewhere import is_better_elsewhere
from untax.cluster.view import Views
from untax.core.errors import BackendError, PoolClosed, UntaxError, UsageError
from untax.core.spec import EnvSpec
from untax.remote.engine import RemoteEngine

_LADDER_S = 2.0  # for nodes to say by which keys they know a spec; who is slower is placed without


class Ladders:
    """What `nodes` gives may be asked, the nearest first; `views` is told. Belongs to one event loop."""

    def __init__(self, views: Views, nodes: Callable[[], Sequence[tuple[str, RemoteEngine]]]) -> None:
        self._views = views
        self._nodes = nodes
        self._learning: dict[tuple[str, EnvSpec], tuple[asyncio.Task[None], float]] = {}  # and since when

    async def learn(self, spec: EnvSpec) -> None:
        """Once for all who want to know. `UsageError` when every node says that there is no such thing."""
        views, nearest = self._views, self._nodes()
        lacking: dict[str, UsageError] = {}
        if views.ladder(spec) is None and nearest:
            lacking = await self._ask(spec, nearest[:1], is_last=not nearest[1:])
            if views.ladder(spec) is None and nearest[1:]:
                lacking |= await self._ask(spec, [one for one in nearest if one[0] not in lacking], is_last=True)
        unasked = set(views.unasked(spec))
        if rest := [(node, engine) for node, engine in nearest if node in unasked]:
            await self._ask(spec, rest)
        if nearest and len(lacking) == len(nearest) and views.ladder(spec) is None:
            node, first = next(iter(lacking.items()))
            raise UsageError(f"node {node}: {first}" + (f"; the same on {len(lacking) - 1} more" if len(lacking) > 1 else ""))

    async def is_lacking(self, spec: EnvSpec, node: str, exc: UntaxError) -> bool:
        """Whether the mistake that a node finds in a lease is that its machine lacks the image: then it cannot say either of which stages it is."""
        if not isinstance(exc, UsageError):
            return False
        return bool(await self._ask(spec, [one for one in self._nodes() if one[0] == node]))

    async def aclose(self) -> None:
        tasks = [task for task, _ in self._learning.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _ask(self, spec: EnvSpec, nodes: Sequence[tuple[str, RemoteEngine]], *, is_last: bool = False) -> dict[str, UsageError]:
        """Until all have said it, or have had their time; while nobody has, as long as there is nobody else to ask. Gives what those said who lack it."""
        learning = {node: self._learning_of(spec, node, engine) for node, engine in nodes}
        until_s = max((since_s for _, since_s in learning.values()), default=0.0) + _LADDER_S
        is_unknown, running = self._views.ladder(spec) is None, {task for task, _ in learning.values()}
        while running and (not is_unknown or self._views.ladder(spec) is None):
            left_s = None if is_unknown and is_last else until_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                break
            _, running = await asyncio.wait(running, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        lacking = {}
        for node, (task, _) in learning.items():
            exc = task.exception() if task.done() and not task.cancelled() else None
            if isinstance(exc, UsageError):
                lacking[node] = exc
            # Nobody else tells what is wrong with the recipe itself; a node that is gone is another matter.
            elif isinstance(exc, UntaxError) and not is_better_elsewhere(exc):
                raise exc
        return lacking

    def _learning_of(self, spec: EnvSpec, node: str, engine: RemoteEngine) -> tuple[asyncio.Task[None], float]:
        learning = self._learning.get((node, spec))
        if learning is None:
            task = asyncio.get_running_loop().create_task(self._ladder_of(spec, node, engine))
            learning = self._learning[node, spec] = task, time.monotonic()
            task.add_done_callback(lambda _: self._learnt(node, spec, task))
        return learning

    def _learnt(self, node: str, spec: EnvSpec, task: asyncio.Task[None]) -> None:
        self._learning.pop((node, spec), None)
        task.cancelled() or task.exception()  # who asked may have heard enough from others

    async def _ladder_of(self, spec: EnvSpec, node: str, engine: RemoteEngine) -> None:
        with contextlib.suppress(BackendError, PoolClosed):
            try:
                stages, present = await engine.ladder(spec)
            except UsageError as exc:
                self._views.lacks(spec, node, str(exc))
                raise
            self._views.learnt(spec, node, stages)
            self._views.told(node, {"stored": [key.partition("~")[0] for key in present]})
