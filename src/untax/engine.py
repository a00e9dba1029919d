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
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, cast

from untax import substrates
from untax.channel.client import Channel
from untax.core.errors import (
    BackendError,
    PoolClosed,
    PoolTimeout,
    SandboxLost,
    SubstrateError,
    SubstrateUnavailable,
    UntaxError,
    UsageError,
)
from untax.core.ledger import Ledger
from untax.core.span import Clock, Stopwatch, now_ns
from untax.core.spec import EnvSpec, Limits, Network
from untax.core.stage import Stage
from untax.core.stream import ByteStream
from untax.core.substrate import (
    Bare,
    BindingLate,
    Enforcing,
    Importing,
    IncumbentMaking,
    Layered,
    Sandbox,
    Service,
    Substrate,
    Unenforced,
    said_together,
)
from untax.ground import Ground
from untax.leases import Bindings, Choosing, Offer, Request, checked
from untax.leasing import Leasing
from untax.pool.costs import Costs
from untax.pool.options import PoolOptions
from untax.pool.record import PoolRecord
from untax.pool.status import PoolStatus
from untax.pooling import Pooling
from untax.quarantine import Quarantine, try_destroy
from untax.snapshot import Snapshot
from untax.tenancy import Tenancy
from untax.warehouse import Warehouse

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.sources import Progress

T = TypeVar("T")
Made = TypeVar("Made", bound=Bare)

log = logging.getLogger("untax.engine")

_DEADLINE_GRACE_S = 0.1


class Engine(Leasing):
    """Leases sandboxes on one substrate, or with `"auto"` on the one that suits each spec. `async with`, or `start()` and `aclose()`.

    `limits="strict"` refuses a sandbox one of whose limits this host cannot enforce; otherwise it is said once and marked
    in the ledger. Layers are kept below `state_dir`, up to `store_budget_mib` beside what is in use; `setup_network` is the
    policy for set-up commands, apart from the leases' own, and `setup_wheels` a directory of packages that pip and uv find in them. Further options are the substrate's own.
    """

    box_class: type[Tenancy] = Tenancy
    on_short: Callable[[], object] | None = None
    """Told when a lease has to wait for room; must be cheap."""

    def __new__(cls, substrate: str | Substrate = "namespace", **options: Any) -> Self:
        del options
        if cls is Engine and isinstance(substrate, str) and substrate == "auto":
            from untax.auto import AutoEngine

            return cast("Self", object.__new__(AutoEngine))
        return object.__new__(cls)

    def __init__(
        self,
        substrate: str | Substrate = "namespace",
        *,
        state_dir: str | os.PathLike[str] | None = None,
        limits: Literal["warn", "strict"] = "warn",
        store_budget_mib: int | None = None,
        setup_network: Network = "none",
        setup_wheels: str | os.PathLike[str] | None = None,
        pool: PoolOptions | None = None,
        clock: Clock = now_ns,
        **options: Any,
    ) -> None:
        if limits not in ("warn", "strict"):
            raise UsageError(f"limits must be 'warn' or 'strict', not {limits!r}")
        if not isinstance(pool, PoolOptions | None):
            raise UsageError(f"pool must be an untax.PoolOptions, not {type(pool).__name__}")
        # A substrate that somebody made has state of its own, unless it is told where ours is.
        self._has_state = isinstance(substrate, str) or state_dir is not None
        if isinstance(substrate, str):
            if state_dir is not None:
                options["state_dir"] = os.fsdecode(state_dir)
            substrate = substrates.load(substrate, **options)
        elif options or (state_dir is not None and not isinstance(substrate, (Layered, Importing, Choosing))):
            raise UsageError("options belong to a substrate given by name; this one is already made")
        self.substrate = substrate
        # Asked once: whether a protocol is fulfilled is found out by trying each of its properties.
        self.layered: Layered | None = substrate if isinstance(substrate, Layered) else None
        self.importing: Importing | None = substrate if isinstance(substrate, Importing) else None
        super().__init__(clock)
        self._strict = limits == "strict"
        self._said: set[str] = set()
        self.quarantine = Quarantine()
        self._pool_options = pool if pool is not None else PoolOptions()
        self._pooling: Pooling | None = None
        self._record: PoolRecord | None = None
        self._late = substrate.binds_late if isinstance(substrate, BindingLate) else frozenset[str]()
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
            await self._open_pool()
        except BaseException:
            self._state = "closed"
            await self.finish(self.chore(self._give_start_up()))
            raise
        self._state = "running"

    async def _give_start_up(self) -> None:
        self._warehouse.let_go()
        await self._warehouse.aclose()
        if isinstance(self.substrate, Service):
            await self.substrate.aclose()

    async def _open_pool(self) -> None:
        record = PoolRecord(self._warehouse.state_dir / "pools", self.substrate.name) if self._has_state else None
        costs = await asyncio.to_thread(record.open) if record is not None else Costs()
        self._pooling = Pooling(self, self._pool_options, costs)
        if record is not None:
            self._record = record
            record.watch(self._pooling.status)
            self._pooling.recorded = record.changed
            self._pooling.watched_by(None)

    async def aclose(self) -> None:
        """Release every box and every snapshot that is not saved, wait until what they held is gone, and end. Safe to call twice."""
        if self._state != "closed":
            self._state = "closed"
            await self.finish(self.chore(self._close()))

    @property
    def offer(self) -> Offer:
        return self.substrate

    async def _close(self) -> None:
        if self._pooling is not None:
            self._pooling.close()
        for outcome in await asyncio.gather(*(box.release() for box in list(self._boxes)), return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("while closing: %s: %s", type(outcome).__name__, outcome)
        if self._pooling is not None:
            await self._pooling.wait_bound()
            await self._pooling.driver.wait_closed()
        await self._wait_chores()
        if self._record is not None:
            await self._record.aclose()
        await self.quarantine.aclose()
        self._warehouse.let_go()
        await self._wait_chores()
        await self._warehouse.aclose()
        if isinstance(self.substrate, Service):
            await self.substrate.aclose()

    async def _wait_chores(self) -> None:
        while chores := [chore for chore in self._chores if chore is not asyncio.current_task()]:
            await asyncio.wait(chores)

    # ---- what is in store ----

    async def prepare(self, spec: EnvSpec, *, progress: Progress | None = None) -> Prepared:
        """Put every stage of `spec` in place without leasing it; gives what is there and how long each missing one took.

        What the image's name stands for is asked again, which a lease does once per engine only. The layers are pinned until
        the `pin` of what is given is closed, or the engine.
        """
        self._check_running()
        prepared = await self._warehouse.prepare(checked(self.substrate, spec, Bindings()).spec, progress)
        self.pooling.forget(spec)
        return prepared

    async def warm(self, spec: EnvSpec | Snapshot | str | None = None, n: int = 1, *, limits: Limits | None = None) -> None:
        """Keep at least `n` sandboxes of `spec` ready from now on; returns once they are. `n=0` ends that.

        A snapshot, or the id of a saved one, in the place of a spec keeps sandboxes that go on from it, of a live one with its processes:
        `restore` and `fork` then take them. That ends when it is dropped. What stands in the way is raised: `StageFailed` with the log of a set-up that fails, `UsageError` for what does not fit the
        pool, `CreateError` when sandboxes do not come up.
        """
        if isinstance(spec, (Snapshot, str)):
            request = await self._request_from(spec, Bindings(limits=limits))
        else:
            request = checked(self.substrate, spec, Bindings(limits=limits))
            self._check_running()
        await self.pooling.warm(request, n)

    def pools(self) -> PoolStatus:
        """What is idle, leased and on its way at which stage, how leases were served, and what the steps cost."""
        self._check_running()
        return self.pooling.status()

    async def ladder(self, spec: EnvSpec) -> tuple[tuple[Stage, ...], frozenset[str]]:
        """The stages that a lease of `spec` needs in place, lowest first, as they are known here, and the keys of those that are."""
        self._check_running()
        return await self.pooling.ladder(checked(self.substrate, spec, Bindings()).spec)

    def trouble(self, request: Request) -> str | None:
        """Why this lease would have to wait for the end of another, in words; None when it would not."""
        self._check_running()
        return self.pooling.trouble(request)

    def has_idle(self, request: Request) -> bool:
        """Whether a lease of this would be given one that is idle with everything in place, at once."""
        return self._state == "running" and self.pooling.has_idle(request)

    def idle_in_s(self, request: Request) -> float | None:
        """About how long it takes until there is one, where one is being made that nobody waits for."""
        return self.pooling.idle_in_s(request) if self._state == "running" else None

    def foresee(self, spec: EnvSpec) -> None:
        """A lease of this may be asked for any moment. Promises nothing, and costs next to nothing when none is."""
        if self._state == "running":
            self.pooling.foresee(spec)

    def watch_pools(self, told: Callable[[], None] | None) -> list[Pooling]:
        """Call `told` after every change in the pools from now on, which are given; None ends that. Must be cheap."""
        self.pooling.watched_by(told)
        return [self.pooling]

    async def find_snapshot(self, snapshot_id: str) -> Snapshot:
        """A saved snapshot by its id; `UsageError` when there is none."""
        self._check_running()
        return await self._warehouse.shelf.find(snapshot_id)

    # ---- how a box comes to be ----

    async def fulfil(self, request: Request) -> Tenancy:
        """A box for a checked request."""
        self._check_running()
        watch = Stopwatch(self.clock)
        if request.wait_s is None:
            return await self._fulfil(request, watch)
        try:
            # The pool ends a wait at its deadline, and says what it was for. This is for what is no wait: finding, adding, binding.
            grace_s = _DEADLINE_GRACE_S if request.is_plain else 0.0
            async with asyncio.timeout(request.wait_s + grace_s) as deadline:
                return await self._fulfil(request, watch)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise PoolTimeout(f"no sandbox within wait_s={request.wait_s:g}; allow more time, or lighten the machine's load") from None

    async def _fulfil(self, request: Request, watch: Stopwatch) -> Tenancy:
        asked = self.pooling.ask(request)
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
            if asked is None and not request.is_plain:
                ledger.add("queue", *watch.part())
            await box.furnish(watch, asked)
        except BaseException as exc:
            self._boxes.discard(box)
            await self.finish(self.chore(box.abandon()))
            if self._state == "closed" and isinstance(exc, SubstrateError):
                raise PoolClosed("the engine was closed before the sandbox was there") from exc
            raise
        return box

    # ---- for boxes ----

    @property
    def pooling(self) -> Pooling:
        assert self._pooling is not None  # from `start` on
        return self._pooling

    def fixed(self, spec: EnvSpec) -> tuple[object, ...]:
        """What is settled when a sandbox is created, so that one which was made ahead serves only leases with the same."""
        return (
            None if "limits" in self._late else spec.limits,
            spec.limits.disk_mib if "limits" in self._late and "disk" not in self._late else None,
            None if "user" in self._late else spec.user,
            None if spec.repo is not None or spec.setup else spec.workdir,
        )

    def channel_over(self, stream: ByteStream, sandbox_id: str, network: Network, on_lost: Callable[[SandboxLost], None]) -> Channel:  # noqa: ARG002  for a subclass
        """The client's end of a sandbox's stream, for leases with this policy."""
        return Channel(stream, sandbox_id=sandbox_id, on_lost=on_lost)

    @property
    def warehouse(self) -> Warehouse:
        return self._warehouse

    @property
    def quarantined(self) -> tuple[str, ...]:
        """The ids of sandboxes that could not be proven gone; each is tried again until it is, and never leased."""
        return self.quarantine.ids

    async def create(self, spec: EnvSpec, ground: Ground | None = None, cache: Path | None = None) -> Sandbox:
        """A sandbox, or nothing: cancelled in between, what comes of it is destroyed. `ground` is held for it until it is gone."""
        return await self._whole(self._creating(spec, ground, cache), ground)

    async def create_incumbent(self, spec: EnvSpec, ground: Ground | None = None) -> Bare:
        """As `create`, the way those do it who hold no channel."""
        if ground is not None or not isinstance(self.substrate, IncumbentMaking):
            return await self.create(spec, ground)
        return await self._whole(self.substrate.create_incumbent(spec), None)

    async def _whole(self, creating: Coroutine[Any, Any, Made], ground: Ground | None) -> Made:
        making = asyncio.ensure_future(creating)
        try:
            return await asyncio.shield(making)
        except asyncio.CancelledError:
            self.chore(self._undo(making, ground))
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

    async def _undo(self, creating: asyncio.Future[Made], ground: Ground | None) -> None:
        try:
            sandbox = await creating
        except (Exception, asyncio.CancelledError):
            if ground is not None:
                ground.release()
            return  # nothing came of it, so there is nothing to give back
        await self.destroy(sandbox, ground)

    async def destroy(self, sandbox: Bare, ground: Ground | None = None) -> None:
        """Free a sandbox and what it stood on. One that cannot be proven gone goes into quarantine, and keeps its ground."""
        why = await try_destroy(sandbox)
        let_go = ground.release if ground is not None else _nothing
        if why is None:
            let_go()
        else:
            self.quarantine.add(sandbox, why, let_go)

    def check_enforced(self, sandbox: Sandbox, unenforced: tuple[Unenforced, ...]) -> None:
        """Refuse, or say once, what this host cannot hold a sandbox to."""
        self._check_strict(sandbox.id, unenforced)
        unsaid = [limit for limit in unenforced if limit.name not in self._said]
        self._said.update(limit.name for limit in unsaid)
        for names, reason, remedy in said_together(unsaid):
            log.warning("not enforced on this host: %s: %s; %s", names, reason, remedy)

    def check_host(self) -> None:
        """`SubstrateUnavailable` where limits are strict and it is known already that no lease could be given for them. Once started."""
        if isinstance(self.substrate, Enforcing):
            self._check_strict("", self.substrate.unenforced)

    def _check_strict(self, sandbox_id: str, unenforced: Sequence[Unenforced]) -> None:
        if unenforced and self._strict:
            raise SubstrateUnavailable(sandbox_id, "; ".join(f"{u.name} cannot be enforced: {u.reason} ({u.remedy})" for u in unenforced))


def _nothing() -> None:
    pass
