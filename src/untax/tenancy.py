"""The life of a box: how its sandbox comes to be, what it stands on, how it is frozen, reset and given back.

Whoever ends the lease, and however, what the sandbox held is given back; afterwards every action raises `SandboxLost`.
"""

from __future__ import annotations

import asyncio
import logging
from builtins import list as list_
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from untax.box import Box
from untax.channel.client import Channel
from untax.channel.egress import Egress, Policy
from untax.core.errors import (
    CreateError,
    SandboxLost,
    SubstrateError,
    SubstrateUnavailable,
    UsageError,
)
from untax.core.ledger import ActionRecord, Ledger
from untax.core.root import ImageConfig
from untax.core.span import Stopwatch
from untax.core.substrate import Describing, Facts, Freezable, Frozen, LayeredSandbox, Remembering, Retiring, Sandbox, UserSwitching
from untax.ground import Ground, Support
from untax.snapshot import Snapshot
from untax.standby import NO_IMAGE, ORDINARY, Standby, raise_up

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.layers.merged import Change
    from untax.leases import Request
    from untax.pooling import Asked

log = logging.getLogger("untax.box")


class Tenancy(Box):
    """A box whose sandbox is this process's own. Made by an engine."""

    _engine: Engine

    def __init__(self, engine: Engine, request: Request, ledger: Ledger) -> None:
        super().__init__(engine, request, ledger)
        self._ground: Ground | None = None  # what the lease began with; None where the substrate has no layers
        self._standing: Ground | None = None  # what the sandbox stands on now
        self._sandbox: Sandbox | None = None
        self._standby: Standby | None = None  # the pool's, when the sandbox came from there and was not replaced since
        self._place: str | None = None  # in the pool, by the name it has there; None for one that is none of its
        self._parting: tuple[Sandbox, Channel | None, Ground | None] | None = None  # still to be destroyed
        self._is_paused = False
        self._leaving: set[asyncio.Task[None]] = set()
        self._policy: Policy | None = None  # in place of the spec's

    @property
    def sandbox(self) -> Sandbox | None:
        return self._sandbox

    @property
    def image(self) -> ImageConfig:
        """What the image says about itself: its variables, user and working directory apply below the spec's; its entry point is data."""
        return self._ground.root.config if self._ground is not None else NO_IMAGE

    @property
    def facts(self) -> Facts:
        """What commands find inside, with what the image says about itself."""
        sandbox, image = self._sandbox, self.image
        facts = sandbox.facts() if isinstance(sandbox, Describing) else ORDINARY
        workdir = self._engine.warehouse.bound(self.spec, image).workdir if self._ground is not None else self.spec.workdir
        return replace(facts, workdir=workdir or facts.workdir, env={**facts.env, **image.env})

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
                self._see_off("the box was reset")
                if self._leaving and self._engine.substrate.isolation == "none":
                    await asyncio.wait(self._leaving)  # with no boundary between them, the new one would see what is left of the old
                self._ledger.add("reset", *watch.part())

    async def _replace(self) -> None:
        if isinstance(self._sandbox, Retiring):
            self._sandbox.retire()
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
            is_pristine = await cast("LayeredSandbox", self._sandbox).is_pristine()
        except SubstrateError:
            return False  # not proven
        return is_pristine and channel is self._channel and channel.is_idle  # nothing was begun while it was looked at

    async def snapshot(self, *, live: bool = False) -> Snapshot:
        """Freeze the files as they are now; the sandbox goes on. `engine.fork` and `engine.restore` begin from it.

        It lasts until it is dropped or the engine closes, unless it is saved. `live` keeps processes and their memory too, where the substrate
        can (`SubstrateUnavailable`): sessions and started processes go on in every box that begins from it; of actions nobody may be waiting for one.
        """
        async with self._changing:
            if live:
                self._remembering()
            else:
                self._layered("take a snapshot")
            freezing = self._engine.chore(self._remember() if live else self._freeze())
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

    async def _remember(self) -> Snapshot:
        sandbox, channel, ground = self._remembering()
        watch = Stopwatch(self._clock)
        async with channel.silence():
            remembered = await sandbox.remember()
        start_ns, end_ns = watch.part()
        support = Support(lambda: self._engine.chore(remembered.discard()))
        live = replace(ground, root=remembered.root, supports=(*ground.supports, support))
        for below in ground.supports:
            below.hold()
        return self._engine.warehouse.shelf.put(Snapshot(self._engine, self.spec, live, "live", (end_ns - start_ns) / 1e9))

    def _remembering(self) -> tuple[Remembering, Channel, Ground]:
        self._live()
        sandbox, channel, ground = self._sandbox, self._channel, self._ground
        if not isinstance(sandbox, Remembering) or not isinstance(channel, Channel) or ground is None:
            raise SubstrateUnavailable(
                self.id,
                f"substrate {self._engine.substrate.name!r} keeps files only; process memory (live=True) needs one that can put processes down "
                "and go on with them (docs/api.md says which), and an untax.Engine in this very process",
            )
        return sandbox, channel, ground

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

    def police(self, policy: Policy) -> None:
        """Another policy for whatever programs inside ask for from now on; streams that are open stay.

        `UsageError` for a box whose spec has no network at all: nothing inside knows where to ask then.
        """
        channel = self._live()
        if self.spec.network == "none":
            raise UsageError("this box was leased without network; lease it with one to change its policy later")
        self._policy = policy
        channel.egress = Egress(policy, on_attempt=self._note_egress)

    async def pause(self) -> None:
        """Stop every process inside until `resume`."""
        await self._freezable().pause()
        self._is_paused = True

    async def resume(self) -> None:
        await self._freezable().resume()
        self._is_paused = False

    # ---- how it comes to be, for the engine ----

    async def furnish(self, watch: Stopwatch, asked: Asked | None) -> None:
        """Get a sandbox with everything the lease asked for: from the pool, or made for what is none of a pool's."""
        if asked is not None or self._request.is_plain:
            await self._engine.pooling.furnish(self, watch, asked)
        else:
            await self._open(watch)
        self._ledger.held(watch.last_ns)
        if not self._request.is_ahead:  # whose time begins once whoever gave it looks after it
            self.begin_term()

    def begin_term(self) -> None:
        """Its time begins now, again for one whose holder has only now got it."""
        if self._ending is not None:
            return
        if self._expiry is not None:
            self._expiry.cancel()
        self._expiry = asyncio.get_running_loop().call_later(self._request.ttl_s, self._expire)

    async def abandon(self) -> None:
        """Give back whatever a `furnish` that failed had taken."""
        self._over = self._over or "it was never ready"
        self._leave(self._over)
        if self._leaving:
            await asyncio.wait(self._leaving)
        self._give_ground_up()

    async def take_over(self, standby: Standby, watch: Stopwatch, *, is_proven: bool) -> None:
        """Make a sandbox of the pool this lease's own. `SandboxLost` when it is dead, and then nothing of it is kept."""
        standby.on_lost = None  # until it is this lease's, its death is for the pool: another one is handed out
        try:
            await standby.bind(self.spec, is_proven=is_proven)
            self._ledger.add("ready", *watch.part())
            if self._request.files:
                await standby.write(self._request.files)
                self._ledger.add("setup", *watch.part())
            self._check_wanted()
            channel = standby.open_channel()
            if channel.is_lost:
                raise SandboxLost(standby.sandbox.id, channel.lost_reason or "it died while it was handed out")
            self._adopt(standby)
            if standby.ground is not None:
                self._ground = standby.ground.hold()
            standby.on_lost = self._lost
        except BaseException:
            self._sandbox = self._channel = self._standing = self._standby = None
            self._give_ground_up()
            raise
        self._standby = standby
        self._place = standby.name

    @property
    def request(self) -> Request:
        return self._request

    @property
    def is_over(self) -> bool:
        return self._over is not None and self._ending is not None

    @property
    def standby(self) -> Standby | None:
        """What the pool gave it, while it has it."""
        return self._standby

    async def is_untouched(self) -> bool:
        """Whether nothing was ever asked of the sandbox, and nothing has happened in it, as far as that can be proven."""
        standby, channel = self._standby, self._channel
        if standby is None or channel is not standby.channel or not isinstance(channel, Channel):
            return False  # its channel was handed to another process or thread, and nobody here knows what was asked over it
        return not self._ledger.has_acted and await self._is_pristine() and not self._ledger.has_acted

    def let_go(self) -> None:
        """The sandbox is somebody else's from now on."""
        self._sandbox = self._channel = self._standing = self._standby = None

    async def _open(self, watch: Stopwatch | None) -> None:
        """A sandbox made for this lease alone: of a snapshot, of a build, or in place of the one it had."""
        self._check_wanted()
        if self._ground is None:
            await self._find_ground(watch)
            self._check_wanted()
        try:
            has_stages = self._ground is not None or not (self.spec.repo or self.spec.setup)
            request = self._request if has_stages else self._request.neutral()
            standby = await raise_up(
                self._engine, request, self._ground, watch or Stopwatch(self._clock), network=self.spec.network, seen=self._seen
            )
        except CreateError:
            self._engine.warehouse.forget(self._request)  # perhaps what was at hand is there no more: it is looked for again
            raise
        if watch is not None:
            for span in standby.spans:
                self._ledger.add(*span)
        if not has_stages:
            await standby.add(("repo", "deps"), self.spec)
            for name, seconds in standby.built.items():
                self._ledger.stages[name] = self._ledger.stages.get(name, 0.0) + seconds
            await standby.bind(self.spec, is_proven=True)
        if self._request.files:
            await standby.write(self._request.files)
        if (self._request.files or not has_stages) and watch is not None:
            self._ledger.add("setup", *watch.part())

    def _seen(self, standby: Standby) -> None:
        """A sandbox that is coming up: from now on whoever ends the lease ends it too."""
        if self._sandbox is not standby.sandbox:
            standby.on_lost = self._lost
        self._adopt(standby)
        self._check_wanted()

    def _adopt(self, standby: Standby) -> None:
        if self._sandbox is not standby.sandbox:
            self._sandbox, self._standing = standby.sandbox, standby.ground if self._engine.layered is not None else None
            self._is_paused = False
            self._ledger.sandboxes.append(standby.sandbox.id)
        self._ledger.unenforced = standby.unenforced
        channel = self._channel = standby.channel
        if channel is not None and self.spec.network != "none":
            channel.egress = Egress(self._policy or self.spec.network, on_attempt=self._note_egress)

    async def _find_ground(self, watch: Stopwatch | None) -> None:
        """What the lease begins with. Where all of it is there already, this costs a look into a dictionary."""
        warehouse = self._engine.warehouse
        built: Mapping[str, float] | None = None
        ground = warehouse.at_hand(self._request)
        if ground is None and warehouse.has_stages:
            ground, built = await warehouse.find(self._request)
        self._ground = ground
        if built is not None:
            self._ledger.put_in_place(built)
            if watch is not None:
                self._ledger.add("setup", *watch.part())

    def _check_wanted(self) -> None:
        """`SandboxLost` when the lease ended while the sandbox was coming up; whoever waits for it gives it back."""
        if self._over is not None:
            raise SandboxLost(self.id, self._over)

    # ---- how it ends ----

    def _lost(self, standby: Standby, lost: SandboxLost) -> None:
        """The channel has ended by itself: the sandbox is of no more use and goes at once."""
        if standby.channel is self._channel and self._channel is not None:
            self.was_lost(lost)

    def was_lost(self, lost: SandboxLost) -> None:
        if self._over is None:
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
        self._sandbox = self._channel = self._standing = self._standby = None
        if sandbox is not None:
            self._parting = (sandbox, channel, standing)

    def _see_off(self, reason: str) -> None:
        """Destroy, in the background, the sandbox that was parted with. A reset does so last: a hundred processes that die make their successor wait.

        So does what ends by itself when the channel closes, which therefore is not before.
        """
        parting, self._parting = self._parting, None
        if parting is not None:
            sandbox, channel, standing = parting
            if channel is not None:
                channel.close()
            task = self._engine.chore(self._engine.destroy(sandbox, standing))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            log.debug("sandbox %s goes: %s", parting[0].id, reason)

    def _give_ground_up(self) -> None:
        ground, self._ground = self._ground, None
        if ground is not None:
            ground.release()

    async def _give_back(self, reason: str) -> None:
        place = self._place
        if place is None or not await self._engine.pooling.take_back(self):
            await self._destroyed(reason)
            if place is not None:
                self._engine.pooling.was_returned(self, place)
        self._give_ground_up()

    async def _destroyed(self, reason: str) -> None:
        """As `_leave`, with the end of everything that was parted with."""
        self._see_off(reason)
        self._part()
        parting, self._parting = self._parting, None
        if parting is not None:
            sandbox, channel, standing = parting
            if channel is not None:
                channel.close()
            await self._engine.destroy(sandbox, standing)
        if self._leaving:
            await asyncio.wait(self._leaving)

    # ---- what it can do ----

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

    async def _provide_worker(self, user: str | None) -> None:
        """Nobody inside acts for `user`; without a user the sandbox's own hands are gone and get replaced."""
        sandbox = self._sandbox
        if not isinstance(sandbox, UserSwitching):
            raise UsageError(f"user {user!r}: substrate {self._engine.substrate.name!r} runs commands as one user only; leave user= out")
        await sandbox.provide_worker(user or "")
