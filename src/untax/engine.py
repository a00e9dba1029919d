"""The embedded engine: leases of sandboxes on one substrate, in this process.

The engine decides and keeps account; the substrate does the work; a `Box` is what a holder sees. Everything that was
created is destroyed, whichever way its holder goes: by `release`, by its time, by cancellation at any point, or
with the engine.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from untax import grader, substrates
from untax.box import Box
from untax.core.errors import (
    BackendError,
    PoolClosed,
    PoolTimeout,
    SubstrateError,
    SubstrateUnavailable,
    UntaxError,
    UsageError,
)
from untax.core.ledger import Ledger
from untax.core.span import Clock, Stopwatch, now_ns
from untax.core.spec import EnvSpec, Limits, Network
from untax.core.substrate import Importing, Layered, Sandbox, Service, Substrate, Unenforced, said_together
from untax.ground import Ground
from untax.leases import DEFAULT_TTL_S, Bindings, Lease, Request, checked
from untax.quarantine import Quarantine, try_destroy
from untax.snapshot import Snapshot
from untax.warehouse import Warehouse

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.sources import Progress
    from untax.tenancy import Tenancy

T = TypeVar("T")

log = logging.getLogger("untax.engine")

_MOST_FORKS = 10_000


class Engine:
    """Leases sandboxes on one substrate. `async with`, or `start()` and `aclose()`.

    `limits="strict"` refuses a sandbox one of whose limits this host cannot enforce; otherwise it is said once and marked
    in the ledger. Layers are kept below `state_dir`, up to `store_budget_mib` beside what is in use; `setup_network` is the
    policy for set-up commands, apart from the leases' own, and `setup_wheels` a directory of packages that pip and uv find in them. Further options are the substrate's own.
    """

    box_class: type[Box] = Box

    def __init__(
        self,
        substrate: str | Substrate = "namespace",
        *,
        state_dir: str | os.PathLike[str] | None = None,
        limits: Literal["warn", "strict"] = "warn",
        store_budget_mib: int | None = None,
        setup_network: Network = "none",
        setup_wheels: str | os.PathLike[str] | None = None,
        clock: Clock = now_ns,
        **options: Any,
    ) -> None:
        if limits not in ("warn", "strict"):
            raise UsageError(f"limits must be 'warn' or 'strict', not {limits!r}")
        if isinstance(substrate, str):
            if state_dir is not None:
                options["state_dir"] = os.fsdecode(state_dir)
            substrate = substrates.load(substrate, **options)
        elif options or (state_dir is not None and not isinstance(substrate, (Layered, Importing))):
            raise UsageError("options belong to a substrate given by name; this one is already made")
        self.substrate = substrate
        # Asked once: whether a protocol is fulfilled is found out by trying each of its properties.
        self.layered: Layered | None = substrate if isinstance(substrate, Layered) else None
        self.importing: Importing | None = substrate if isinstance(substrate, Importing) else None
        self.clock = clock
        self._strict = limits == "strict"
        self._state: Literal["new", "running", "closed"] = "new"
        self._boxes: set[Tenancy] = set()
        self._chores: set[asyncio.Task[Any]] = set()
        self._said: set[str] = set()
        self._quarantine = Quarantine()
        self._warehouse = Warehouse(self, state_dir, budget_mib=store_budget_mib, setup_network=setup_network, setup_wheels=setup_wheels)

    # ---- its own life ----

    async def start(self) -> None:
        """Make ready for leases; `SubstrateUnavailable` says why this machine cannot. Called by `async with`."""
        if self._state != "new":
            raise UsageError(f"this engine is {self._state}; make a new one")
        if reason := self.substrate.unavailable_reason():
            raise SubstrateUnavailable("", f"{self.substrate.name}: {reason}")
        try:
            if isinstance(self.substrate, Service):
                await self.substrate.start()
            await self._warehouse.start()
        except BaseException:
            self._state = "closed"
            if isinstance(self.substrate, Service):
                await self.finish(self.chore(self.substrate.aclose()))
            raise
        self._state = "running"

    async def aclose(self) -> None:
        """Release every box and every snapshot that is not saved, wait until what they held is gone, and end. Safe to call twice."""
        if self._state != "closed":
            self._state = "closed"
            await self.finish(self.chore(self._close()))

    async def __aenter__(self) -> Engine:
        await self.start()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def _close(self) -> None:
        for outcome in await asyncio.gather(*(box.release() for box in list(self._boxes)), return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("while closing: %s: %s", type(outcome).__name__, outcome)
        await self._wait_chores()
        await self._quarantine.aclose()
        self._warehouse.let_go()
        await self._wait_chores()
        await self._warehouse.aclose()
        if isinstance(self.substrate, Service):
            await self.substrate.aclose()

    async def _wait_chores(self) -> None:
        while chores := [chore for chore in self._chores if chore is not asyncio.current_task()]:
            await asyncio.wait(chores)

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
        request = checked(self.substrate, spec, Bindings(env, user, files, limits, network, wait_s, ttl_s))
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
        return await self.fulfil(checked(self.substrate, spec, Bindings(env, user, files, limits, network, wait_s, ttl_s)))

    async def prepare(self, spec: EnvSpec, *, progress: Progress | None = None) -> Prepared:
        """Put every stage of `spec` in place without leasing it; gives what is there and how long each missing one took.

        What the image's name stands for is asked again, which a lease does once per engine only. The layers are pinned until
        the `pin` of what is given is closed, or the engine.
        """
        self._check_running()
        return await self._warehouse.prepare(checked(self.substrate, spec, Bindings()).spec, progress)

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
        checked(self.substrate, box.spec, Bindings(wait_s=wait_s, ttl_s=ttl_s))
        request = Request(box.spec, box._request.files, wait_s, ttl_s)
        return Lease(lambda: grader.graded(self, box, patterns, request), Box.release)

    async def find_snapshot(self, snapshot_id: str) -> Snapshot:
        """A saved snapshot by its id; `UsageError` when there is none."""
        self._check_running()
        return await self._warehouse.shelf.find(snapshot_id)

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
        found = await self._warehouse.shelf.find(snapshot) if not isinstance(snapshot, Snapshot) else snapshot
        _ = found.ground  # says so when it was dropped
        return replace(checked(self.substrate, found.spec, late), snapshot=found)

    # ---- how a box comes to be ----

    async def fulfil(self, request: Request) -> Box:
        """A box for a checked request."""
        self._check_running()
        watch = Stopwatch(self.clock)
        if request.wait_s is None:
            return await self._fulfil(request, watch)
        try:
            async with asyncio.timeout(request.wait_s) as deadline:
                return await self._fulfil(request, watch)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise PoolTimeout(f"no sandbox within wait_s={request.wait_s:g}; allow more time, or lighten the machine's load") from None

    async def _fulfil(self, request: Request, watch: Stopwatch) -> Box:
        ledger = Ledger(
            rollout=secrets.token_hex(8),
            substrate=self.substrate.name,
            isolation=self.substrate.isolation,
            start_ns=watch.last_ns,
            clock=self.clock,
        )
        box = self.box_class(self, request, ledger)
        self._boxes.add(box)
        try:
            ledger.add("queue", *watch.part())
            await box.furnish(watch)
        except BaseException as exc:
            self._boxes.discard(box)
            await self.finish(self.chore(box.abandon()))
            if self._state == "closed" and isinstance(exc, SubstrateError):
                raise PoolClosed("the engine was closed before the sandbox was there") from exc
            raise
        return box

    def _check_running(self) -> None:
        if self._state == "new":
            raise UsageError("the engine is not started: use `async with Engine()`, or await engine.start()")
        if self._state == "closed":
            raise PoolClosed("the engine is closed")

    # ---- for boxes ----

    @property
    def warehouse(self) -> Warehouse:
        return self._warehouse

    @property
    def quarantined(self) -> tuple[str, ...]:
        """The ids of sandboxes that could not be proven gone; each is tried again until it is, and never leased."""
        return self._quarantine.ids

    async def create(self, spec: EnvSpec, ground: Ground | None = None, cache: Path | None = None) -> Sandbox:
        """A sandbox, or nothing: cancelled in between, what comes of it is destroyed. `ground` is held for it until it is gone."""
        creating = asyncio.ensure_future(self._creating(spec, ground, cache))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            self.chore(self._undo(creating, ground))
            raise
        except BaseException as exc:
            if ground is not None:
                ground.release()
            if isinstance(exc, UntaxError) or not isinstance(exc, Exception):
                raise
            raise BackendError("", f"{self.substrate.name}: create failed: {type(exc).__name__}: {exc}") from exc

    def _creating(self, spec: EnvSpec, ground: Ground | None, cache: Path | None) -> Coroutine[Any, Any, Sandbox]:
        if ground is None:
            return self.substrate.create(spec)
        substrate = self.layered or self.importing
        assert substrate is not None
        return substrate.create_on(spec, ground.hold().root, cache=cache)

    async def _undo(self, creating: asyncio.Future[Sandbox], ground: Ground | None) -> None:
        try:
            sandbox = await creating
        except (Exception, asyncio.CancelledError):
            if ground is not None:
                ground.release()
            return  # nothing came of it, so there is nothing to give back
        await self.destroy(sandbox, ground)

    async def destroy(self, sandbox: Sandbox, ground: Ground | None = None) -> None:
        """Free a sandbox and what it stood on. One that cannot be proven gone goes into quarantine, and keeps its ground."""
        why = await try_destroy(sandbox)
        let_go = ground.release if ground is not None else _nothing
        if why is None:
            let_go()
        else:
            self._quarantine.add(sandbox, why, let_go)

    def check_enforced(self, sandbox: Sandbox, unenforced: tuple[Unenforced, ...]) -> None:
        """Refuse, or say once, what this host cannot hold a sandbox to."""
        if unenforced and self._strict:
            raise SubstrateUnavailable(sandbox.id, "; ".join(f"{u.name} cannot be enforced: {u.reason} ({u.remedy})" for u in unenforced))
        unsaid = [limit for limit in unenforced if limit.name not in self._said]
        self._said.update(limit.name for limit in unsaid)
        for names, reason, remedy in said_together(unsaid):
            log.warning("not enforced on this host: %s: %s; %s", names, reason, remedy)

    def chore(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Work that outlives whoever asked for it; the engine waits for it when it closes."""
        task = asyncio.ensure_future(work)
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)
        return task

    async def finish(self, task: asyncio.Task[T]) -> T:
        """Wait for a task to its end even when cancelled meanwhile; the cancellation is passed on afterwards."""
        cancelled: asyncio.CancelledError | None = None
        while not task.done():
            try:
                await asyncio.shield(task)
            except asyncio.CancelledError as exc:
                if task.cancelled():
                    raise
                cancelled = exc
            except Exception:
                break  # the task's own; raised below
        if cancelled is not None:
            raise cancelled
        return task.result()

    def forget(self, box: Tenancy) -> None:
        self._boxes.discard(box)


def _nothing() -> None:
    pass


async def _release_all(boxes: Sequence[Box]) -> None:
    await asyncio.gather(*(box.release() for box in boxes))


async def _give_back(coming: Sequence[asyncio.Future[Box]]) -> None:
    """Those that came up after all when others did not."""
    came = await asyncio.gather(*coming, return_exceptions=True)
    await _release_all([box for box in came if isinstance(box, Box)])
