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
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, TypeVar

from untax import substrates
from untax.box import Box
from untax.channel.egress import Policy
from untax.core.errors import BackendError, PoolClosed, PoolTimeout, SubstrateError, SubstrateUnavailable, UntaxError, UsageError
from untax.core.ledger import Ledger
from untax.core.span import Clock, Stopwatch, now_ns
from untax.core.spec import EnvSpec, FrozenEnv, Limits, Network, freeze_env, is_as_strong, require_duration
from untax.core.substrate import Sandbox, Service, Substrate, Unenforced, said_together

T = TypeVar("T")

log = logging.getLogger("untax.engine")

DEFAULT_TTL_S = 3600.0
# Destroying takes milliseconds; a sandbox that takes longer than this is reported, and left to the next sweep.
DESTROY_PATIENCE_S = 30.0


@dataclass(frozen=True, slots=True)
class Request:
    """A lease that was asked for, checked: the spec with everything bound late already in it."""

    spec: EnvSpec
    files: Mapping[str, bytes]
    wait_s: float | None
    ttl_s: float


class Engine:
    """Leases sandboxes on one substrate. `async with`, or `start()` and `aclose()`.

    `limits="strict"` refuses a sandbox one of whose limits this host cannot enforce; otherwise it is said once and marked
    in the ledger. Further options are the substrate's own.
    """

    box_class: type[Box] = Box

    def __init__(
        self,
        substrate: str | Substrate = "namespace",
        *,
        state_dir: str | os.PathLike[str] | None = None,
        limits: Literal["warn", "strict"] = "warn",
        clock: Clock = now_ns,
        **options: Any,
    ) -> None:
        if limits not in ("warn", "strict"):
            raise UsageError(f"limits must be 'warn' or 'strict', not {limits!r}")
        if isinstance(substrate, str):
            if state_dir is not None:
                options["state_dir"] = os.fsdecode(state_dir)
            substrate = substrates.load(substrate, **options)
        elif options or state_dir is not None:
            raise UsageError("options belong to a substrate given by name; this one is already made")
        self.substrate = substrate
        self._strict = limits == "strict"
        self.clock = clock
        self._state: Literal["new", "running", "closed"] = "new"
        self._boxes: set[Box] = set()
        self._chores: set[asyncio.Task[Any]] = set()
        self._said: set[str] = set()

    # ---- its own life ----

    async def start(self) -> None:
        """Make ready for leases; `SubstrateUnavailable` says why this machine cannot. Called by `async with`."""
        if self._state != "new":
            raise UsageError(f"this engine is {self._state}; make a new one")
        if reason := self.substrate.unavailable_reason():
            raise SubstrateUnavailable("", f"{self.substrate.name}: {reason}")
        if isinstance(self.substrate, Service):
            try:
                await self.substrate.start()
            except BaseException:
                self._state = "closed"
                await self.finish(self.chore(self.substrate.aclose()))
                raise
        self._state = "running"

    async def aclose(self) -> None:
        """Release every box, wait until what they held is gone, and end. Safe to call twice."""
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
        while chores := [chore for chore in self._chores if chore is not asyncio.current_task()]:
            await asyncio.wait(chores)
        if isinstance(self.substrate, Service):
            await self.substrate.aclose()

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
    ) -> Lease:
        """`async with engine.lease(spec) as box`: a sandbox for one rollout, gone at the end of the block.

        Without a spec: the host's own software, at the substrate's own isolation. What is given here binds late. `wait_s`
        bounds the time until the box is there (`PoolTimeout`), `ttl_s` the time that it lasts (`SandboxLost` afterwards).
        """
        return Lease(self, self.request(spec, env, user, files, limits, network, wait_s, ttl_s))

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
        return await self.fulfil(self.request(spec, env, user, files, limits, network, wait_s, ttl_s))

    def request(
        self,
        spec: EnvSpec | None,
        env: Mapping[str, str] | None,
        user: str | None,
        files: Mapping[str, bytes] | None,
        limits: Limits | None,
        network: Network | None,
        wait_s: float | None,
        ttl_s: float,
    ) -> Request:
        """Check everything that can be checked before anything is made."""
        if spec is None:
            spec = EnvSpec(isolation=self.substrate.isolation)
        elif not isinstance(spec, EnvSpec):
            raise UsageError(f"spec must be an untax.EnvSpec, not {type(spec).__name__}")
        if not is_as_strong(self.substrate.isolation, as_required=spec.isolation):
            raise UsageError(
                f"substrate {self.substrate.name!r} has isolation {self.substrate.isolation!r}, the spec asks for {spec.isolation!r} or "
                f"stronger: use another substrate, or accept it with EnvSpec(isolation={self.substrate.isolation!r})"
            )
        if spec.repo is not None:
            raise UsageError("repo: this release does not build repository stages; clone in setup=('git clone …',) or box.upload() a tree")
        changes: dict[str, Any] = {"user": user, "limits": limits, "network": network}
        changes = {name: value for name, value in changes.items() if value is not None}
        if env:
            changes["env"] = FrozenEnv({**spec.env, **freeze_env(env)})
        if changes:
            spec = replace(spec, **changes)
        if wait_s is not None:
            require_duration("wait_s", wait_s)
        Policy(spec.network)  # reads the patterns as it will read them later, and refuses what it could not
        return Request(spec, _checked_files(files), wait_s, require_duration("ttl_s", ttl_s))

    async def fulfil(self, request: Request) -> Box:
        """A box for a checked request."""
        if self._state != "running":
            if self._state == "new":
                raise UsageError("the engine is not started: use `async with Engine()`, or await engine.start()")
            raise PoolClosed("the engine is closed")
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

    # ---- for boxes ----

    async def create(self, spec: EnvSpec) -> Sandbox:
        """A sandbox, or nothing: cancelled in between, what comes of it is destroyed."""
        creating = asyncio.ensure_future(self.substrate.create(spec))
        try:
            return await asyncio.shield(creating)
        except asyncio.CancelledError:
            self.chore(self._undo(creating))
            raise
        except UntaxError:
            raise
        except Exception as exc:
            raise BackendError("", f"{self.substrate.name}: create failed: {type(exc).__name__}: {exc}") from exc

    async def _undo(self, creating: asyncio.Future[Sandbox]) -> None:
        try:
            sandbox = await creating
        except (Exception, asyncio.CancelledError):
            return  # nothing came of it, so there is nothing to give back
        await self.destroy(sandbox)

    async def destroy(self, sandbox: Sandbox) -> None:
        """Free a sandbox. What cannot be freed in time is said; the next start sweeps it."""
        try:
            async with asyncio.timeout(DESTROY_PATIENCE_S):
                await sandbox.destroy()
        except Exception as exc:  # told: the log; a holder that has its result must not lose it to the cleaning up
            log.warning("sandbox %s may have left something behind: %s: %s", sandbox.id, type(exc).__name__, exc)

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

    def forget(self, box: Box) -> None:
        self._boxes.discard(box)


class Lease:
    """The context manager that `Engine.lease` returns."""

    def __init__(self, engine: Engine, request: Request) -> None:
        self._engine = engine
        self._request = request
        self._box: Box | None = None

    async def __aenter__(self) -> Box:
        if self._box is not None:
            raise UsageError("a lease is entered once; call engine.lease() again")
        self._box = await self._engine.fulfil(self._request)
        return self._box

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        assert self._box is not None
        await self._box.release()


def _checked_files(files: Mapping[str, bytes] | None) -> Mapping[str, bytes]:
    if not isinstance(files, Mapping | None):
        raise UsageError(f"files must be a mapping of paths to bytes, not {type(files).__name__}")
    for path, data in (files or {}).items():
        if not isinstance(path, str) or not path or "\0" in path:
            raise UsageError(f"files: {path!r} is not a path")
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise UsageError(f"files: the content of {path!r} must be bytes, not {type(data).__name__}")
    return dict(files or {})
