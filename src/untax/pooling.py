"""An engine's pool: which stages a lease needs, how a sandbox for it is made, raised to a higher stage, bound and taken back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, NamedTuple

from untax.core.errors import CreateError, ProtocolError, ReadinessTimeout, SandboxLost, StageUnavailable, UsageError
from untax.core.ledger import Hit, Ledger
from untax.core.span import Stopwatch
from untax.core.spec import EnvSpec
from untax.core.stage import Fetched, Stage, snapshot_rung
from untax.ground import Ground
from untax.grounds import Recipe, recipe_of
from untax.leases import Request
from untax.pool import events as ev
from untax.pool.costs import Costs
from untax.pool.grants import Grant
from untax.pool.options import PoolOptions
from untax.pool.pool import PoolDriver
from untax.pool.status import PoolStatus, StageStatus, finite, label_of
from untax.snapshot import Snapshot
from untax.standby import Standby, raise_up

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.tenancy import Tenancy

# What a hand-out meets when a sandbox died while it was parked: another one will do.
_DEAD = (SandboxLost, ReadinessTimeout, ProtocolError)
STORE = "store"  # what an error of the store names as its stage
_STORE_PATIENCE_S = 60.0  # on a full disk, for a lease to end whose layers are in the way of another's
# A store with a budget is looked at so long after something in it was used or let go of, and at most so great a share of the time: each look
# reads what is known of every stage.
_SETTLE_S, _SETTLE_SHARE = 0.25, 0.05
_MOST_LADDERS = 4096
_MOST_WARM = 100_000


class Asked(NamedTuple):
    """A lease's place in the pool."""

    ticket: str
    stages: tuple[Stage, ...]


class Pooling:
    """Made by an engine; `start` once its substrate and store are."""

    def __init__(self, engine: Engine, options: PoolOptions, costs: Costs) -> None:
        self._engine = engine
        self._ladders: dict[tuple[Recipe, tuple[object, ...]], tuple[Stage, ...]] = {}
        self._warm: dict[tuple[Recipe, tuple[object, ...]], str] = {}  # uppermost stage keys of what is kept ready
        self._snapshots: dict[tuple[str, tuple[object, ...]], tuple[Stage, ...]] = {}  # those that are, or were, and are not dropped
        self._in_place: set[str] = set()  # stages that are in no store because they need none
        self._binding: set[Standby] = set()  # being handed out, each in the task of whoever asked for it
        self._none_binding: asyncio.Future[None] | None = None
        self._settling: asyncio.TimerHandle | asyncio.Task[None] | None = None
        self._settle_after_s = _SETTLE_S
        engine.warehouse.changed = self._settle_soon
        layered = engine.warehouse.has_stages
        self.driver: PoolDriver[Request, Standby] = PoolDriver(
            self, options, shares_stages=layered, upgrades_in_place=not layered, costs=costs
        )
        self.recorded: Callable[[], None] = self.driver.changed
        """Called after every change of the pool; what `watched_by` adds comes on top."""

    # ---- leases ----

    def ask(self, request: Request) -> Asked | None:
        """Take a place in the pool before anything else is done for a lease. What is idle with everything in place is asked at once to
        prove that it lives, and answers while the rest is done. None where it must be found out first which stages are needed, and for
        what is none of the pool's: builds, and snapshots that were never to be kept ready.
        """
        spec = request.spec
        if request.ground is not None:
            return None
        fixed = self._engine.fixed(spec)
        if request.snapshot is not None:
            stages = self._snapshots.get((request.snapshot.id, fixed))
        else:
            stages = self._ladders.get((recipe_of(spec), fixed))
        return self._ask(request, stages) if stages is not None else None

    def _ask(self, request: Request, stages: tuple[Stage, ...]) -> Asked:
        driver, spec = self.driver, request.spec
        if not request.is_ahead:
            self._begin(spec, stages, is_certain=True)
        ticket = driver.ask(stages, request, memory_mib=spec.limits.memory_mib, wait_s=request.wait_s, is_ahead=request.is_ahead)
        asked = Asked(ticket, stages)
        if request.on_asked is not None:
            request.on_asked()
        if self._engine.on_short is not None and min(driver.state.room) < 0:
            self._engine.on_short()
        return asked

    def _begin(self, spec: EnvSpec, stages: tuple[Stage, ...], *, is_certain: bool) -> None:
        hit = self.driver.at_once(stages, spec.limits.memory_mib)
        if hit is not None:
            hit.begin(spec, asyncio.get_running_loop().time(), is_certain=is_certain)

    def has_idle(self, request: Request) -> bool:
        """Whether one is idle with everything in place, and nobody waits before who asks for it now."""
        stages = self._ladders.get((recipe_of(request.spec), self._engine.fixed(request.spec)))
        return stages is not None and self.driver.at_once(stages, request.spec.limits.memory_mib) is not None

    def idle_in_s(self, request: Request) -> float | None:
        """About how long it takes to make one, where one is being made that nobody waits for; None where it is not."""
        stages = self._ladders.get((recipe_of(request.spec), self._engine.fixed(request.spec)))
        return self.driver.costs.of("create") if stages is not None and self.driver.state.is_coming(stages) else None

    def foresee(self, spec: EnvSpec) -> None:
        """A lease of this may be asked for any moment: what it would be given proves that it lives meanwhile."""
        stages = self._ladders.get((recipe_of(spec), self._engine.fixed(spec)))
        if stages is not None:
            self._begin(spec, stages, is_certain=False)

    async def furnish(self, box: Tenancy, watch: Stopwatch, asked: Asked | None) -> None:
        """Give the box the sandbox that is closest. One that turns out to be dead is not seen by it: the next one is tried."""
        request, ledger, driver = box.request, box.ledger, self.driver
        ticket, stages = asked or self._ask(request, await self._ladder(request.spec))
        ledger.wanted = stages
        grant = await driver.granted(ticket)
        while True:
            standby, order = grant.entry, grant.order
            self._binding.add(standby)
            try:
                began_ns = self._account(ledger, watch, grant)
                if order.missing:
                    await self._upgrade(grant, request, ledger, watch)
                is_proven = order.kind != "exact" or (request.is_ahead and standby.has_answered_lately)
                await box.take_over(standby, watch, is_proven=is_proven)
            except _DEAD as exc:
                standby.on_lost = None
                if box.is_over:
                    driver.give_back(standby.name, clean=False, ticket=grant.ticket)
                    raise
                grant = await driver.again(grant, exc)
            except BaseException as exc:
                standby.on_lost = None
                if order.missing and isinstance(exc, Exception) and not isinstance(exc, UsageError):
                    grant = await driver.again(grant, exc)  # whoever else waits for the same stage is told too
                    continue
                driver.give_back(standby.name, clean=False, ticket=grant.ticket)
                raise
            else:
                # Its holder need not wait for that: it is told before anything that the holder could do next is.
                driver.counted(grant, (watch.last_ns - began_ns) / 1e9)
                asyncio.get_running_loop().call_soon(driver.confirm, grant)
                return
            finally:
                self._binding.discard(standby)
                if self._none_binding is not None and not self._binding and not self._none_binding.done():
                    self._none_binding.set_result(None)

    async def wait_bound(self) -> None:
        """No hand-out is under way any more: each is cut off, or it would last as long as what is done inside."""
        for standby in self._binding:
            standby.close()
        while self._binding:
            self._none_binding = asyncio.get_running_loop().create_future()
            await self._none_binding

    def _account(self, ledger: Ledger, watch: Stopwatch, grant: Grant[Standby]) -> int:
        """What came before it was handed out; gives when that was."""
        order = grant.order
        standby = grant.entry
        if order.order is not None and standby.spans and standby.spans[0][1] >= watch.last_ns:
            ledger.add("queue", watch.last_ns, standby.spans[0][1])
            for span in standby.spans:
                ledger.add(*span)
            watch.last_ns = standby.spans[-1][2]
            ledger.put_in_place(standby.built)
        else:
            ledger.add("queue", *watch.part())
        ledger.hit = Hit(
            order.kind,
            order.start.name if order.start is not None else None,
            tuple(stage.name for stage in order.missing),
            order.waited_s,
            order.waited_for,
            order.why,
        )
        if order.kind == "cold":
            self._tell_cold(ledger.hit, standby)
        return watch.last_ns

    def _tell_cold(self, hit: Hit, standby: Standby) -> None:
        """Of one that was created: over which stage, and what was built for it."""
        hit.missing = tuple(standby.built)
        below = [stage.name for stage in standby.stages if stage.name not in standby.built]
        hit.start = below[-1] if below else None
        hit.steps.update((name, float(seconds)) for name, seconds in standby.built.items())
        for name, start_ns, end_ns in standby.spans:
            if name != "setup":
                hit.steps[name] = (end_ns - start_ns) / 1e9

    async def _upgrade(self, grant: Grant[Standby], request: Request, ledger: Ledger, watch: Stopwatch) -> None:
        """Put what is missing in place: inside where there are no layers; otherwise as layers for all, and the sandbox over them."""
        standby, order = grant.entry, grant.order
        assert ledger.hit is not None
        steps = ledger.hit.steps
        standby.built = {}
        if standby.ground is None:
            await standby.bind(request.neutral().spec, is_proven=False)
            await standby.add([stage.name for stage in order.missing], request.spec)
        else:
            ground, built = await self._ground(request)
            try:
                standby.built = dict(built)
                ledger.add("setup", *watch.part())
                await standby.leave()
                fresh = await raise_up(self._engine, request, ground, watch)
            finally:
                if ground is not None:
                    ground.release()
            standby.become(fresh)
            steps.update((name, (end_ns - start_ns) / 1e9) for name, start_ns, end_ns in fresh.spans)
        standby.stages = (*standby.stages, *order.missing)
        self._learn(standby.built, order.missing)
        ledger.put_in_place(standby.built)
        steps.update((name, float(seconds)) for name, seconds in standby.built.items())
        ledger.add("setup", *watch.part())

    # ---- the end of a lease ----

    async def take_back(self, box: Tenancy) -> bool:
        """Whether its sandbox was provably not used, could be of use, and is the pool's again; it is then not the box's any more."""
        standby, driver = box.standby, self.driver
        if standby is None or standby.ground is None or driver.options.reuse != "reset" or not driver.is_short(standby.stages[-1]):
            return False
        if box.spec.network != "none" or box.spec.user is not None or not await box.is_untouched():
            return False
        if box.standby is not standby:
            return False  # it died while it was being looked at
        box.let_go()
        standby.on_lost = self._died
        driver.give_back(standby.name, clean=True)
        self._held(box)
        return True

    def was_returned(self, box: Tenancy, name: str) -> None:
        """Its sandboxes were destroyed, or are in quarantine and count until they are gone."""
        driver = self.driver
        quarantine = self._engine.quarantine
        kept = [one for one in box.ledger.sandboxes if one in quarantine.ids]
        if kept:
            quarantine.when_gone(kept[-1], driver.gone_later(name))
        driver.give_back(name, clean=False, is_gone=True)
        self._held(box)

    def _held(self, box: Tenancy) -> None:
        if self.driver.options.adaptive:
            self.driver.held(box.ledger.wanted, box.ledger.held_s)

    def _died(self, standby: Standby, _lost: SandboxLost) -> None:
        self.driver.died(standby)

    # ---- what the pool cannot do itself ----

    async def make(self, order: ev.Create, request: Request) -> Standby:
        engine, watch = self._engine, Stopwatch(self._engine.clock)
        inside = () if engine.warehouse.has_stages else tuple(stage.name for stage in order.stages[2:])
        spans: list[tuple[str, int, int]] = []
        network = request.spec.network
        if order.ticket is None:
            request = request.neutral(order.stages)
        ground, built = await self._ground(request, is_urgent=order.ticket is not None)
        if built:
            spans.append(("setup", *watch.part()))
        try:
            standby = await raise_up(engine, request.neutral() if inside else request, ground, watch, network=network)
        except CreateError:
            engine.warehouse.forget(request)  # perhaps what was at hand is there no more: it is looked for again
            self.forget(request.spec)
            raise
        finally:
            if ground is not None:
                ground.release()
        standby.stages = order.stages
        standby.built = dict(built)
        spans += standby.spans
        created_s = (standby.spans[-1][2] - standby.spans[0][1]) / 1e9
        try:
            if inside:
                await standby.add(inside, request.spec)
                spans.append(("setup", *watch.part()))
            if order.ticket is None:
                await standby.bind(request.spec, is_proven=True)
                await standby.rehearse()  # nobody waits for it
        except BaseException:
            await engine.finish(engine.chore(standby.leave()))  # the pool has not heard of it yet
            raise
        standby.spans = spans
        self.driver.costs.observe("create", created_s)
        self._learn(standby.built, order.stages)
        standby.on_lost = self._died
        if standby.channel is not None and standby.channel.is_lost:
            await engine.finish(engine.chore(standby.leave()))  # the pool has not heard of it yet
            raise SandboxLost(standby.sandbox.id, "it died as soon as it was there")
        return standby

    async def destroy(self, entry: Standby) -> None:
        quarantine = self._engine.quarantine
        await entry.leave()
        if entry.sandbox.id in quarantine.ids:
            quarantine.when_gone(entry.sandbox.id, self.driver.gone_later(entry.name))

    async def _ground(self, request: Request, *, is_urgent: bool = True) -> tuple[Ground | None, Mapping[str, float]]:
        """Held for the caller, with the seconds of each stage that was built for it. When somebody waits for it and the disk is
        full, what is only kept ready makes room.
        """
        warehouse = self._engine.warehouse
        ground = warehouse.at_hand(request)
        if ground is not None or not warehouse.has_stages:
            return ground, {}
        while True:
            try:
                ground, built = await warehouse.find(request)
                break
            except StageUnavailable as exc:
                if exc.stage != STORE or not is_urgent or not await self._make_room(request):
                    raise
        if built:
            self._engine.chore(self._look_for_evicted())
        return ground, built or {}

    async def _make_room(self, request: Request) -> bool:
        """Whether the disk may have room now: what is at hand and unused goes first, then what is idle; then a lease's end is waited for,
        unless another engine may have room at once.
        """
        if self._engine.warehouse.let_go_unused() or await self.driver.shed():
            return True
        return not request.may_refuse and await self.driver.wait_gone(_STORE_PATIENCE_S)

    def close(self) -> None:
        """Refuse whoever waits, and begin nothing more."""
        self._engine.warehouse.changed = None
        if isinstance(self._settling, asyncio.TimerHandle):
            self._settling.cancel()
        self.driver.close()

    def _settle_soon(self) -> None:
        if self._settling is None:
            self._settling = asyncio.get_running_loop().call_later(self._settle_after_s, self._begin_settling)

    def _begin_settling(self) -> None:
        self._settling = self._engine.chore(self._settle())

    async def _settle(self) -> None:
        """Bring the store within its budget, and the pool up to date with what it would keep."""
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        try:
            unkept = await self._engine.warehouse.settle()
            self.driver.unkept(key for key in self.driver.known_stages if key.partition("~")[0] in unkept)
            await self._look_for_evicted()
        finally:
            self._settle_after_s = max(_SETTLE_S, (loop.time() - began_s) / _SETTLE_SHARE)
            self._settling = None

    def _learn(self, built: Mapping[str, float], stages: tuple[Stage, ...]) -> None:
        for stage in stages:
            took = built.get(stage.name)
            if isinstance(took, Fetched):
                self.driver.costs.observe_fetch(stage, took.fetch_s)
            elif took is not None:
                self.driver.costs.observe_stage(stage, took)

    async def _look_for_evicted(self) -> None:
        """A layer that was added may have cost others their place."""
        known = [(key, key.partition("~")[0]) for key in self.driver.known_stages]
        gone = await self._engine.warehouse.missing({plain for _, plain in known} - self._in_place)
        self.driver.evicted(key for key, plain in known if plain in gone)

    # ---- for whoever places leases over many nodes ----

    def watched_by(self, told: Callable[[], None] | None) -> None:
        """Called after every change, beside the engine's own record; None ends that. Must be cheap."""
        own = self.recorded
        if told is None:
            self.driver.changed = own
            return

        def both() -> None:
            own()
            told()

        self.driver.changed = both

    async def ladder(self, spec: EnvSpec) -> tuple[tuple[Stage, ...], frozenset[str]]:
        """The rungs of a spec as this node knows them, and the keys of those that are in place."""
        known = self._ladders.get((recipe_of(spec), self._engine.fixed(spec)))
        stages = known if known is not None else await self._ladder(spec)
        return stages, frozenset(stage.key for stage in stages) & self.driver.known_stages

    @property
    def filled(self) -> float:
        """The share of the store's budget that is taken, as it was when it was last looked at; 0 without one."""
        return self._engine.warehouse.filled

    async def know_store(self) -> None:
        """Stages that lie in the store from before are known without anybody having asked for them."""
        self.driver.stored(await self._engine.warehouse.stage_keys())

    def came(self, keys: Collection[str]) -> None:
        """The layers of these stages came into the store by themselves: leases, and whoever places them, count on them from now on."""
        plain = frozenset(keys)
        known = {stage.key for stages in self._ladders.values() for stage in stages if stage.key.partition("~")[0] in plain}
        self.driver.stored(plain | known)

    def trouble(self, request: Request) -> str | None:
        """Why a lease would have to wait for the end of another, in words; None when it would not."""
        state, spec = self.driver.state, request.spec
        stages = self._ladders.get((recipe_of(spec), self._engine.fixed(spec)), ()) if request.snapshot is None else ()
        if state.has_room_for(stages, spec.limits.memory_mib):
            return None
        entries, free_mib = state.room
        if entries < 1:
            return f"{state.leased} sandboxes are leased and {state.waiting} wait, and the pool holds {self.driver.options.entries}"
        return f"{spec.limits.memory_mib:g} MiB are asked for, and {max(0.0, free_mib):g} of {self.driver.options.memory_mib:g} are free"

    # ---- which stages ----

    async def _ladder(self, spec: EnvSpec) -> tuple[Stage, ...]:
        """What a lease of this spec needs in place, kept at hand. What is fixed when a sandbox is created makes another ladder."""
        engine = self._engine
        fixed = engine.fixed(spec)
        found, present = await engine.warehouse.ladder(spec)
        stages = _flavoured(found, fixed)
        if len(self._ladders) >= _MOST_LADDERS:
            self._ladders.clear()
        recipe = (recipe_of(spec), fixed)
        self._ladders[recipe] = stages
        if (kept := self._warm.get(recipe)) is not None and kept != stages[-1].key:
            self._warm[recipe] = stages[-1].key
            self.driver.moved(kept, stages)
        self._in_place.update(stage.key for stage in found[:2] if stage.key in present)
        self.driver.stored(stage.key for stage, plain in zip(stages, found, strict=True) if plain.key in present)
        return stages

    def _rungs(self, snapshot: Snapshot, fixed: tuple[object, ...]) -> tuple[Stage, ...]:
        """Of a snapshot: all of it is there already."""
        stages = self._snapshots[snapshot.id, fixed] = _flavoured((snapshot_rung(snapshot.id),), fixed)
        self._in_place.add(snapshot.id)
        self.driver.stored(stage.key for stage in stages)
        return stages

    def dropped(self, snapshot: Snapshot) -> None:
        """No sandbox is made from it any more; those that are idle go, because no lease can ask for them."""
        for key in [key for key in self._snapshots if key[0] == snapshot.id]:
            rung = self._snapshots.pop(key)[-1].key
            self.driver.useless(rung, [one for one in self.driver.parked() if one.stages[-1].key == rung])
        self._in_place.discard(snapshot.id)

    def forget(self, spec: EnvSpec) -> None:
        """Ask again what an image's name stands for."""
        for key in [key for key in self._ladders if key[0][0] == spec.image]:
            del self._ladders[key]

    # ---- for people ----

    async def warm(self, request: Request, count: int) -> None:
        if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= _MOST_WARM:
            raise UsageError(f"n must be a whole number between 0 and {_MOST_WARM}, not {count!r}")
        fixed = self._engine.fixed(request.spec)
        if request.snapshot is not None:
            stages = self._rungs(request.snapshot, fixed)
        else:
            stages = await self._ladder(request.spec)
            self._warm[recipe_of(request.spec), fixed] = stages[-1].key
        await self.driver.warm(stages, request, count, memory_mib=request.spec.limits.memory_mib)

    def status(self) -> PoolStatus:
        driver, state = self.driver, self.driver.state
        counts, costs = driver.counts, driver.costs
        stages = tuple(
            StageStatus(
                one.stage.name,
                one.stage.key,
                label_of(one.stage),
                one.idle,
                one.leased,
                one.making,
                one.waiting,
                one.target,
                0.0 if one.stage.key.partition("~")[0] in self._in_place else costs.of_stage(one.stage),
            )
            for one in driver.standings()
        )
        return PoolStatus(
            substrate=self._engine.substrate.name,
            stages=stages,
            sandboxes=state.size,
            most_sandboxes=driver.options.entries,
            memory_mib=state.memory_mib,
            most_memory_mib=finite(driver.options.memory_mib),
            starting=state.starting,
            most_starting=state.admission.cap,
            exact=counts.exact,
            partial=counts.partial,
            cold=counts.cold,
            refused=counts.refused,
            rejected=counts.rejected,
            died=counts.died,
            made=counts.made,
            failed=counts.failed,
            waited_s=counts.waited_s,
            create_s=costs.of("create"),
            bind_s=costs.of("bind"),
        )


def _flavoured(stages: tuple[Stage, ...], fixed: tuple[object, ...]) -> tuple[Stage, ...]:
    """What is fixed when a sandbox is created makes another ladder of the same rungs."""
    flavour = f"~{sha256(repr(fixed).encode()).hexdigest()[:12]}" if any(fixed) else ""
    return tuple(replace(stage, key=stage.key + flavour) for stage in stages) if flavour else stages
