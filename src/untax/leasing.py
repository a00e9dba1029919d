"""What every engine offers its callers, wherever its sandboxes are: leases, forks, restores, graders.

All of it is checked here, in the caller's process, and comes down to `fulfil`, which an embedded engine and a connection to a
server each carry out in their own way.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar

from untax import grader
from untax.box import Box
from untax.core.errors import PoolClosed, UsageError
from untax.core.span import Clock, now_ns
from untax.core.spec import EnvSpec, Limits, Network
from untax.core.tasks import EndOf
from untax.leases import DEFAULT_TTL_S, Bindings, Lease, Offer, Request, checked
from untax.snapshot import Snapshot

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.sources import Progress

T = TypeVar("T")

_MOST_FORKS = 10_000


class Leasing(ABC):
    """Leases sandboxes. `async with`, or `start()` and `aclose()`."""

    def __init__(self, clock: Clock = now_ns) -> None:
        self.clock = clock
        self._state: Literal["new", "running", "closed"] = "new"
        self._boxes: set[Box] = set()
        self._chores: set[asyncio.Task[Any]] = set()

    @property
    @abstractmethod
    def offer(self) -> Offer:
        """What leases are checked against before anything is asked for."""

    @abstractmethod
    async def start(self) -> None: ...

    @abstractmethod
    async def aclose(self) -> None: ...

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    def stir(self) -> None:  # noqa: B027
        """A lease is about to be asked for and is not even checked yet: who has somebody to wake up begins with that."""

    @abstractmethod
    async def fulfil(self, request: Request) -> Box:
        """A box for a checked request."""

    @abstractmethod
    async def prepare(self, spec: EnvSpec, *, progress: Progress | None = None) -> Prepared: ...

    @abstractmethod
    async def find_snapshot(self, snapshot_id: str) -> Snapshot:
        """A saved snapshot by its id; `UsageError` when there is none."""

    # ---- leases ----

    def lease(
        self,
        spec: EnvSpec | None = None,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[Box]:
        """`async with engine.lease(spec) as box`: a sandbox for one rollout, gone at the end of the block.

        Without a spec: the host's own software, at the substrate's own isolation. What is given here binds late. `wait_s`
        bounds the time until the box is there (`PoolTimeout`), `ttl_s` the time that it lasts (`SandboxLost` afterwards).
        A stage that is missing is built first, once for all who ask: `StageFailed` has its log.
        """
        self.stir()
        request = checked(self.offer, spec, Bindings(env, user, files, limits, network, wait_s, ttl_s))
        return Lease(lambda: self.fulfil(request), Box.release)

    async def acquire(
        self,
        spec: EnvSpec | None = None,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Box:
        """As `lease`, for those who cannot use `with`: the holder calls `box.release()`."""
        self.stir()
        return await self.fulfil(checked(self.offer, spec, Bindings(env, user, files, limits, network, wait_s, ttl_s)))

    # ---- from snapshots, and for grading ----

    def fork(
        self,
        snapshot: Snapshot | str,
        n: int,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[list[Box]]:
        """`async with engine.fork(snapshot, 8) as group`: that many boxes that begin with the snapshot's files, all or none.

        `snapshot` may be the id of a saved one. What is given here binds over the spec of the box that it was taken of.
        """
        if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= _MOST_FORKS:
            raise UsageError(f"n must be a whole number between 1 and {_MOST_FORKS}, not {n!r}")
        late = Bindings(env, user, files, limits, network, wait_s, ttl_s)
        return Lease(lambda: self._fork(snapshot, n, late), _release_all)

    def restore(
        self,
        snapshot: Snapshot | str,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[Box]:
        """`async with engine.restore(snapshot) as box`: one box, as `fork` gives several."""
        late = Bindings(env, user, files, limits, network, wait_s, ttl_s)
        return Lease(lambda: self._restore(snapshot, late), Box.release)

    def grader(
        self, box: Box, take: Sequence[str] = ("src/**",), *, wait_s: float | None = None, ttl_s: float = DEFAULT_TTL_S
    ) -> Lease[Box]:
        """`async with engine.grader(box, take=("src/**",)) as clean`: a fresh box of `box.spec` plus only the files named.

        Nothing else that the workload did gets there: the box begins with the spec's own stages, and of the patterns' matches
        in the working directory the bytes of regular files are written into it. Deletions are not carried over.
        """
        patterns = grader.checked(take)
        checked(self.offer, box.spec, Bindings(wait_s=wait_s, ttl_s=ttl_s))
        request = Request(box.spec, box._request.files, wait_s, ttl_s)
        return Lease(lambda: grader.graded(self, box, patterns, request), Box.release)

    async def _restore(self, snapshot: Snapshot | str, late: Bindings) -> Box:
        return await self.fulfil(await self._request_from(snapshot, late))

    async def _fork(self, snapshot: Snapshot | str, n: int, late: Bindings) -> list[Box]:
        request = await self._request_from(snapshot, late)
        coming = [asyncio.ensure_future(self.fulfil(request)) for _ in range(n)]
        try:
            return await asyncio.gather(*coming)
        except BaseException:
            for task in coming:
                task.cancel()
            await self.finish(self.chore(_give_back(coming)))
            raise

    async def _request_from(self, snapshot: Snapshot | str, late: Bindings) -> Request:
        self._check_running()
        if isinstance(snapshot, Snapshot) and snapshot.engine is not self:
            if not snapshot.is_saved:
                raise UsageError(f"snapshot {snapshot.id} is another engine's; save() it to use it here")
            snapshot = snapshot.id
        found = snapshot if isinstance(snapshot, Snapshot) else await self.find_snapshot(snapshot)
        found.check_kept()
        return replace(checked(self.offer, found.spec, late), snapshot=found)

    # ---- for boxes ----

    def _check_running(self) -> None:
        if self._state == "new":
            raise UsageError("the engine is not started: use `async with Engine()`, or await engine.start()")
        if self._state == "closed":
            raise PoolClosed("the engine is closed")

    def forget(self, box: Box) -> None:
        """Its lease is over."""
        self._boxes.discard(box)

    def chore(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that outlives whoever asked for it; the engine waits for it when it closes."""
        task = asyncio.ensure_future(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    async def finish(self, task: asyncio.Future[T]) -> T:
        """Wait for a task to its end even when cancelled meanwhile; the cancellation is passed on afterwards."""
        return await EndOf(task)


async def _release_all(boxes: Sequence[Box]) -> None:
    await asyncio.gather(*(box.release() for box in boxes))


async def _give_back(coming: Sequence[asyncio.Future[Box]]) -> None:
    """Those that came up after all when others did not."""
    came = await asyncio.gather(*coming, return_exceptions=True)
    await _release_all([box for box in came if isinstance(box, Box)])
