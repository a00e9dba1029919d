"""The life of a box: how its sandbox comes to be, what it stands on, how it is frozen, reset and given back.

Whoever ends the lease, and however, what the sandbox held is given back; afterwards every action raises `SandboxLost`.
"""

from __future__ import annotations

import asyncio
import logging
from builtins import list as list_
from collections.abc import Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from untax.channel import actions
from untax.channel.client import READY_TIMEOUT_S, Channel
from untax.channel.egress import Egress, EgressAttempt
from untax.core.errors import (
    BackendError,
    CommandFailed,
    CreateError,
    ProtocolError,
    ReadinessTimeout,
    SandboxLost,
    SpawnFailed,
    SubstrateError,
    SubstrateUnavailable,
    UsageError,
)
from untax.core.ledger import ActionRecord, EgressRecord, Ledger
from untax.core.root import ImageConfig
from untax.core.span import Stopwatch
from untax.core.spec import EnvSpec
from untax.core.stream import ByteStream
from untax.core.substrate import Describing, Enforcing, Explaining, Facts, Freezable, Frozen, LayeredSandbox, Sandbox
from untax.ground import Ground
from untax.snapshot import Snapshot

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.layers.merged import Change
    from untax.leases import Request

T = TypeVar("T")

log = logging.getLogger("untax.box")

SETUP_TIMEOUT_S = 3600.0  # a step may install a large dependency tree

# What every command finds, whatever the image; nothing of the engine's own environment gets in. Nobody is there to answer a
# prompt or to leave a pager (THREATS 6.1).
BASE_ENV: Mapping[str, str] = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
}
_INFRASTRUCTURE = (SpawnFailed, SandboxLost, BackendError, ProtocolError)
_ORDINARY = Facts(workdir="/", home="/root", user="root")
_NO_IMAGE = ImageConfig()


def environment(spec: EnvSpec, facts: Facts, image: ImageConfig = _NO_IMAGE) -> dict[str, str]:
    """The variables that commands start with: what the base, the sandbox, the image and the policy say, and the spec over them."""
    env = {**BASE_ENV, "PATH": facts.path, "HOME": facts.home, "USER": facts.user, "SHELL": facts.shell, **facts.env, **image.env}
    if spec.network != "none":
        proxy = f"http://127.0.0.1:{facts.proxy_port}"
        for name in ("http_proxy", "https_proxy"):
            env[name] = env[name.upper()] = proxy
        env["no_proxy"] = env["NO_PROXY"] = "localhost,127.0.0.1,::1"
    return {**env, **spec.env}


class Tenancy:
    """What a box is beside its actions. Made by an engine."""

    def __init__(self, engine: Engine, request: Request, ledger: Ledger) -> None:
        self.spec = request.spec
        self._engine = engine
        self._request = request
        self._ledger = ledger
        self._clock = engine.clock
        self._bound = request.spec  # with what the image wishes where the spec says nothing
        self._ground: Ground | None = None  # what the lease began with; None where the substrate has no layers
        self._standing: Ground | None = None  # what the sandbox stands on now
        self._sandbox: Sandbox | None = None
        self._channel: Channel | None = None
        self._parting: tuple[Sandbox, Ground | None] | None = None  # still to be destroyed
        self._over: str | None = None  # why no action is possible any more
        self._blameless = False  # it is over because the holder wanted it so
        self._is_paused = False
        self._ending: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._changing = asyncio.Lock()  # one reset or snapshot at a time

    def __repr__(self) -> str:
        return f"<Box {self.id} {self._over or 'live'}>"

    @property
    def id(self) -> str:
        """Of the sandbox; another one after `reset`."""
        return self._ledger.sandboxes[-1] if self._ledger.sandboxes else ""

    @property
    def ledger(self) -> Ledger:
        """Where the time went, and the verdict. Final after `release`."""
        return self._ledger

    @property
    def image(self) -> ImageConfig:
        """What the image says about itself: its variables, user and working directory apply below the spec's; its entry point is data."""
        return self._ground.root.config if self._ground is not None else _NO_IMAGE

    # ---- for its holder ----

    async def reset(self) -> None:
        """Back to what the lease began with, the same late bindings included.

        Everything in the old sandbox ends, actions under way included. One in which provably nothing happened is kept;
        otherwise a fresh one takes its place. When that does not come up the box is lost.
        """
        async with self._changing:
            self._live()
            watch = Stopwatch(self._clock)
            try:
                is_pristine = await self._is_pristine()
                self._check_wanted()
                if not is_pristine:
                    await self._replace()
                self._ledger.was_reset("pristine" if is_pristine else "replaced")
            except BaseException as exc:
                self._over = self._over or f"its reset failed: {exc}"
                self._leave(self._over)
                if isinstance(exc, SubstrateError) and not self._blameless:
                    self._ledger.fault(f"{type(exc).__name__}: {exc}")
                raise
            finally:
                self._ledger.add("reset", *watch.part())
                self._see_off("the box was reset")

    async def _replace(self) -> None:
        self._part()
        try:
            await self._open(None)
        except CreateError as exc:
            log.info("sandbox %s had no successor beside it (%s); another is made once it is gone", self.id, exc.message)
            self._leave("the box was reset")
            if self._leaving:
                await asyncio.wait(self._leaving)
            await self._open(None)

    async def _is_pristine(self) -> bool:
        """Whether keeping the sandbox is as good as replacing it, as far as that can be proven."""
        ground, channel = self._ground, self._channel
        if ground is None or self._standing is None or channel is None or self._is_paused:
            return False
        if self._request.files or self._standing.root != ground.root or not channel.is_idle:
            return False
        try:
            return await cast("LayeredSandbox", self._sandbox).is_pristine()
        except SubstrateError:
            return False  # not proven

    async def snapshot(self, *, live: bool = False) -> Snapshot:
        """Freeze the files as they are now; the sandbox goes on. `engine.fork` and `engine.restore` begin from it.

        It lasts until it is dropped or the engine closes, unless it is saved. `live` would keep the memory of processes too.
        """
        if live:
            raise SubstrateUnavailable(
                self.id,
                f"substrate {self._engine.substrate.name!r} keeps files only; process memory (live=True) needs a virtual machine that can be "
                "suspended, which no substrate of this release offers",
            )
        async with self._changing:
            self._layered("take a snapshot")
            freezing = self._engine.chore(self._freeze())
            start_ns = self._clock()
            try:
                snapshot = await self._engine.finish(freezing)
            except BaseException as exc:
                if freezing.done() and not freezing.cancelled() and freezing.exception() is None:
                    await freezing.result().drop()
                self._failed("snapshot", start_ns, self._channel, exc)
                raise
            now = self._clock()
            self._ledger.record(ActionRecord("snapshot", start_ns, now, now, 0, snapshot.how))
            return snapshot

    async def _freeze(self) -> Snapshot:
        sandbox = self._layered("take a snapshot")
        standing = self._standing
        assert standing is not None
        watch = Stopwatch(self._clock)
        frozen = await sandbox.snapshot()
        start_ns, end_ns = watch.part()
        shelf = self._engine.warehouse.shelf
        support = shelf.support(frozen)
        if sandbox is self._sandbox and frozen.root.layers[-1] in sandbox.root.layers:
            support.hold()
            self._standing = standing.raised(sandbox.root, frozen.tree, support)
        ground = standing.hold().raised(frozen.root, frozen.tree, support)
        return shelf.put(Snapshot(self._engine, self.spec, ground, frozen.how, (end_ns - start_ns) / 1e9))

    async def freeze(self) -> Frozen:
        """As `snapshot`, without a place on the shelf: for whoever takes the layer away and gives the box up."""
        return await self._layered("be frozen").snapshot()

    async def diff(self) -> list_[Change]:
        """What differs from what the lease began with, files that the lease itself was given included."""
        from untax.layers import merged

        sandbox = self._layered("compare files")
        ground, standing = self._ground, self._standing
        assert ground is not None
        assert standing is not None
        uppers = [*(one.tree for one in standing.own[len(ground.own) :]), sandbox.upper]
        return await asyncio.to_thread(merged.changes, uppers, ground.readable())

    async def pause(self) -> None:
        """Stop every process inside until `resume`."""
        await self._freezable().pause()
        self._is_paused = True

    async def resume(self) -> None:
        await self._freezable().resume()
        self._is_paused = False

    async def release(self) -> None:
        """Give the sandbox up. Returns when it is gone; safe to call twice."""
        if self._ending is None:
            self._blameless = True
            self._ending = self._engine.chore(self._end("the box was released"))
        await self._engine.finish(self._ending)

    # ---- how it comes to be, for the engine ----

    async def furnish(self, watch: Stopwatch) -> None:
        """Make the sandbox and everything the lease asked for, in parts that share their ends."""
        await self._open(watch)
        self._ledger.held(watch.last_ns)
        self._expiry = asyncio.get_running_loop().call_later(self._request.ttl_s, self._expire)

    async def abandon(self) -> None:
        """Give back whatever a `furnish` that failed had taken."""
        self._over = self._over or "it was never ready"
        self._leave(self._over)
        if self._leaving:
            await asyncio.wait(self._leaving)
        self._give_ground_up()

    async def _open(self, watch: Stopwatch | None) -> None:
        ledger = self._ledger
        self._check_wanted()
        if self._ground is None:
            await self._find_ground(watch)
            self._check_wanted()
        ground = self._ground
        try:
            sandbox = await self._engine.create(self._bound, ground, self._request.cache)
        except CreateError:
            self._engine.warehouse.forget(self._request)  # perhaps what was at hand is there no more: it is looked for again
            raise
        self._sandbox, self._standing = sandbox, ground
        self._is_paused = False
        ledger.sandboxes.append(sandbox.id)
        self._check_wanted()
        if watch is not None:
            ledger.add("create", *watch.part())
        if isinstance(sandbox, Enforcing):
            ledger.unenforced = tuple(sandbox.unenforced)
            self._engine.check_enforced(sandbox, ledger.unenforced)
        await sandbox.wait_ready()
        channel = self._channel = self._channel_over(await sandbox.open_channel(), sandbox.id)
        self._check_wanted()
        facts = sandbox.facts() if isinstance(sandbox, Describing) else _ORDINARY
        await self._configure(sandbox, channel, facts)
        if watch is not None:
            ledger.add("ready", *watch.part())
        if await self._set_up(facts) and watch is not None:
            ledger.add("setup", *watch.part())

    async def _find_ground(self, watch: Stopwatch | None) -> None:
        """What the lease begins with. Where all of it is there already, this costs a look into a dictionary."""
        warehouse = self._engine.warehouse
        built: Mapping[str, float] | None = None
        ground = warehouse.at_hand(self._request)
        if ground is None and warehouse.is_layered:
            ground, built = await warehouse.find(self._request)
        self._ground = ground
        if ground is None:
            return
        self._bound = warehouse.bound(self.spec, ground.root.config)
        if built is not None:
            self._ledger.stages = dict(built)
            if watch is not None:
                self._ledger.add("setup", *watch.part())

    def _check_wanted(self) -> None:
        """`SandboxLost` when the lease ended while the sandbox was coming up; whoever waits for it gives it back."""
        if self._over is not None:
            raise SandboxLost(self.id, self._over)

    def _channel_over(self, stream: ByteStream, sandbox_id: str) -> Channel:
        egress = Egress(self.spec.network, on_attempt=self._note_egress) if self.spec.network != "none" else None
        channel: Channel
        channel = Channel(stream, sandbox_id=sandbox_id, egress=egress, on_lost=lambda lost: self._lost(channel, lost))
        return channel

    async def _configure(self, sandbox: Sandbox, channel: Channel, facts: Facts) -> None:
        workdir = self._bound.workdir or facts.workdir
        port = facts.proxy_port if self.spec.network != "none" else 0
        env = environment(self.spec, facts, self.image)
        call = actions.configure(workdir=workdir, env=env, proxy_port=port, timeout_s=READY_TIMEOUT_S)
        try:
            # Sent right behind our greeting, so one wait covers both.
            await channel.call(call)
            if workdir != facts.workdir:
                await self._make_workdir(channel, workdir)
        except SandboxLost as exc:
            if isinstance(exc.__cause__, ProtocolError) and not channel.cell_version:
                raise exc.__cause__ from None
            if not channel.cell_version and "deadline" in exc.message:
                raise ReadinessTimeout(self.id, f"the cell did not greet within {READY_TIMEOUT_S:g} s") from exc
            if not channel.cell_version and isinstance(sandbox, Explaining) and (reason := await sandbox.loss_reason()):
                raise CreateError(sandbox.id, reason) from exc
            raise
        except OSError as exc:
            raise CreateError(self.id, f"it could not be configured: {exc}") from exc

    async def _make_workdir(self, channel: Channel, workdir: str) -> None:
        try:
            await channel.call(actions.mkdir(workdir))
        except OSError as exc:
            raise CreateError(self.id, f"workdir: {exc}; name one that the sandbox's user may make") from exc

    async def _set_up(self, facts: Facts) -> bool:
        """What no stage holds: the lease's own files, and on a substrate without layers all of it. Whether there was any."""
        channel, spec = self._live(), self.spec
        has_stages = self._ground is not None
        try:
            if spec.repo is not None and not has_stages:
                tree = await self._engine.warehouse.repository(spec.repo)
                await channel.upload(tree, self._bound.workdir or facts.workdir, timeout_s=SETUP_TIMEOUT_S)
            for path, data in self._request.files.items():
                await channel.call(actions.write(path, data))
        except OSError as exc:
            raise CreateError(self.id, f"files: {exc}") from exc
        for step in () if has_stages else spec.setup:
            try:
                (await channel.call(actions.shell(step, timeout_s=SETUP_TIMEOUT_S))).check()
            except CommandFailed as exc:
                raise CreateError(self.id, f"setup step {step!r}: {exc}") from exc
        return bool(self._request.files or (not has_stages and (spec.repo or spec.setup)))

    # ---- how it ends ----

    def _expire(self) -> None:
        if self._ending is None:
            reason = f"its lease of {self._request.ttl_s:g} s has ended; ask for more with ttl_s"
            self._ending = self._engine.chore(self._end(reason))

    def _lost(self, channel: Channel, lost: SandboxLost) -> None:
        """The channel has ended by itself: the sandbox is of no more use and goes at once."""
        if channel is self._channel and self._over is None:
            self._over = lost.message
            self._ledger.fault(f"SandboxLost: {lost}")
            log.warning("sandbox %s is lost: %s", self.id, lost.message)
            self._leave(lost.message)

    def _leave(self, reason: str) -> None:
        """Let go of the sandbox: no action reaches it any more, and it is destroyed in the background."""
        self._see_off(reason)
        self._part()
        self._see_off(reason)

    def _part(self) -> None:
        """No action reaches the sandbox from here on."""
        sandbox, channel, standing = self._sandbox, self._channel, self._standing
        self._sandbox = self._channel = self._standing = None
        if channel is not None:
            channel.close()
        if sandbox is not None:
            self._parting = (sandbox, standing)

    def _see_off(self, reason: str) -> None:
        """Destroy, in the background, the sandbox that was parted with. A reset does so last: a hundred processes that die make their successor wait."""
        parting, self._parting = self._parting, None
        if parting is not None:
            task = self._engine.chore(self._engine.destroy(*parting))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            log.debug("sandbox %s goes: %s", parting[0].id, reason)

    def _give_ground_up(self) -> None:
        ground, self._ground = self._ground, None
        if ground is not None:
            ground.release()

    async def _end(self, reason: str) -> None:
        ledger = self._ledger
        watch = Stopwatch(self._clock)
        ledger.released(watch.last_ns)
        self._over = self._over or reason
        if self._expiry is not None:
            self._expiry.cancel()
        self._leave(reason)
        if self._leaving:
            await asyncio.wait(self._leaving)
        self._give_ground_up()
        ledger.add("cleanup", *watch.part())
        ledger.closed(watch.last_ns)
        self._engine.forget(self)

    # ---- for both halves ----

    def _live(self) -> Channel:
        channel = self._channel
        if channel is None:
            raise SandboxLost(self.id, self._over or "it is being reset")
        return channel

    def _layered(self, what: str) -> LayeredSandbox:
        self._live()
        if self._standing is None:
            raise UsageError(f"substrate {self._engine.substrate.name!r} has no layers and cannot {what}; `untax doctor` lists the others")
        return cast("LayeredSandbox", self._sandbox)

    def _freezable(self) -> Freezable:
        self._live()
        if not isinstance(self._sandbox, Freezable):
            raise UsageError(f"substrate {self._engine.substrate.name!r} cannot pause a sandbox")
        return self._sandbox

    def _failed(self, name: str, start_ns: int, channel: Channel | None, exc: BaseException) -> None:
        """Write down an action that did not come off; the infrastructure's failures mark the whole rollout."""
        now = self._clock()
        self._ledger.record(ActionRecord(name, start_ns, now, now, 0, type(exc).__name__))
        if not isinstance(exc, _INFRASTRUCTURE):
            return
        if isinstance(exc, SandboxLost) and (self._blameless or (self._over is None and channel is not self._channel)):
            exc.message = self._over or "the box was reset"
            return  # the holder ended it under its own action
        if isinstance(exc, SandboxLost) and self._over:
            exc.message = self._over
        self._ledger.fault(f"{type(exc).__name__}: {exc}")

    def _note_egress(self, attempt: EgressAttempt) -> None:
        record = EgressRecord(attempt.host, attempt.port, attempt.verdict, attempt.reason, self._clock())
        self._ledger.egress_attempt(record)
        log.info(
            "egress rollout=%s sandbox=%s to=%r port=%d verdict=%s reason=%r",
            self._ledger.rollout, self.id, record.host, record.port, record.verdict, record.reason,
        )  # fmt: skip
