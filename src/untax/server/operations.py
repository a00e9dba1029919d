"""What owners may ask for: each request is one method, with arguments that are checked before they are believed."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from untax.core import account
from untax.core.errors import LeaseRefused, PoolTimeout, ProtocolError, SandboxLost, StageUnavailable, UntaxError, UsageError
from untax.core.ledger import Ledger
from untax.core.spec import EnvSpec
from untax.leases import Bindings, Request, checked
from untax.pooling import STORE
from untax.remote.messages import Body, packed, read_plain
from untax.server.answers import Outcome
from untax.server.handed import Handed, HangUps, hand_over
from untax.server.owners import Owner
from untax.snapshot import Snapshot

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.tenancy import Tenancy

log = logging.getLogger("untax.server")

_CHANGES_AT_ONCE = 10_000
_NEXT_S = 0.05  # for one that is idle to be bound ahead of its lease: whoever gives the last one up waits for that
_AHEAD_S = 3.0  # until it is taken back from who neither leased it nor gave it back; clients do so after one
_TOGETHER_S = 0.5  # between two looks at those: as much later may one be taken back

Tell = Callable[[Body], None]


class Operations:
    """`on_ledger` is told of every ledger that is final, `on_change` when a lease came or went; `recall` has clients give back what they have in hand."""

    def __init__(
        self,
        engine: Engine,
        hang_ups: HangUps,
        on_ledger: Callable[[Ledger, str], object],
        on_change: Callable[[], object],
        recall: Callable[[], object],
    ) -> None:
        self._engine = engine
        self._hang_ups = hang_ups
        self._on_ledger = on_ledger
        self._on_change = on_change
        self._recall = recall
        self.gives_ahead = True
        """Whether who gives one lease up may be given the next along with it."""
        self._to_look_after: deque[tuple[float, Owner, str]] = deque()  # what was given ahead, by when that was long ago
        self._looking: asyncio.TimerHandle | None = None

    def close(self) -> None:
        """Every lease has ended. Safe to call twice."""
        self._to_look_after.clear()
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    async def carry_out(self, owner: Owner, number: int, op: str, args: Mapping[str, Any], shift_ns: int, tell: Tell) -> Outcome:
        method = getattr(self, f"op_{op}", None) if op.isidentifier() else None
        if method is None:
            raise ProtocolError(f"the server knows no request {op!r}: install the same release on both sides")
        outcome: Outcome = await method(owner, _Args(args, number, shift_ns), tell)
        return outcome

    # ---- leases ----

    def knocked(self, owner: Owner) -> None:
        """It is about to ask for a lease, as a rule of what it leased before: what takes long for who was asleep is gone through while that is on its way."""
        if owner.last is not None:
            self._engine.foresee(owner.last[0])
            packed(owner.last[1])

    async def op_lease(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        asked = owner.leasing(args.request)
        try:
            return await self._lease(owner, args, asked)
        finally:
            asked()

    async def _lease(self, owner: Owner, args: _Args, asked: Callable[[], object]) -> Outcome:
        engine = self._engine
        lease_id = args.text("lease")
        late = Bindings(files=args.mapping("files"), wait_s=args.number_or_none("wait_s"), ttl_s=args.number("ttl_s"))
        may_refuse = args.truth_or_false("may_refuse")
        request = replace(checked(engine.offer, args.spec(), late), on_asked=asked, may_refuse=may_refuse)
        snapshot_id = args.text_or_none("snapshot")
        owner.gate.admit(request.spec)
        if (trouble := engine.trouble(request)) is not None:
            self._recall()
            if may_refuse:
                raise LeaseRefused("full", trouble)
        if snapshot_id is not None:
            owner.gate.check_snapshot(snapshot_id)
            request = replace(request, snapshot=await engine.find_snapshot(snapshot_id))
        try:
            return await self._given(owner, lease_id, request, with_facts=args.truth_or_false("facts"))
        except (PoolTimeout, StageUnavailable) as exc:
            if may_refuse and (refusal := _refusal(exc)) is not None:
                raise refusal from exc
            raise

    async def _given(self, owner: Owner, lease_id: str, request: Request, *, with_facts: bool = False) -> Outcome:
        engine = self._engine
        with owner.gate.starting():
            box = await engine.fulfil(request)
            owner.gate.leased(1)
        try:
            handed = await hand_over(box, self._hang_ups)
            if owner.is_over or lease_id in owner.leases:
                raise UsageError("the owner is gone, or has a lease of this id already")
        except BaseException:
            owner.gate.leased(-1)
            await engine.finish(engine.chore(box.release()))
            raise
        owner.leases[lease_id] = box
        self._on_change()
        opening = account.opening(box.ledger)
        owner.last = request.spec, opening
        body: Body = {
            "sandbox": box.id,
            "began_ns": box.ledger.start_ns,
            "held_ns": box.ledger.held_ns,
            "account": packed(opening),  # the client has the rest before it looks into that
            "image": box.image,
            "channel": handed.resumed.to_data(),
        }
        if with_facts:
            body["facts"] = box.facts
        return Outcome(body, handed, lambda: self._give_back(owner, lease_id))

    async def op_release(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        lease_id, next_id = args.text("lease"), args.text_or_none("next")
        if args.truth_or_false("is_unused") and owner.ahead.is_untaken(lease_id):
            await self._give_back(owner, lease_id)
            return Outcome({})
        box, is_ahead = owner.leases.pop(lease_id, None), owner.ahead.pop(lease_id) is not None
        if box is None:
            return Outcome({})
        try:
            if told := args.octets("account"):
                account.merge(box.ledger, read_plain(told), shift_ns=args.shift_ns, is_ahead=is_ahead)
            else:
                box.ledger.fault("its holder could not take it")
        except BaseException:
            await self._released(owner, box)
            raise
        if next_id is None:
            await self._released(owner, box)
            return Outcome({})
        box._begin_release()
        try:
            try:
                following = await self._next(owner, next_id, box.request)
            finally:
                await self._released(owner, box)
        except BaseException:
            await self._give_back(owner, next_id)
            raise
        if following.handed is not None and following.handed.is_lost:
            await self._give_back(owner, next_id)
            following = Outcome({})
        if following.handed is None:  # on a full machine the end of one takes as long as the making of another
            following = await self._next(owner, next_id, box.request)
        if following.handed is not None:
            self._look_later(owner, next_id)
        return following

    async def _next(self, owner: Owner, lease_id: str, last: Request) -> Outcome:
        """Another one like the last, for who is likely to ask for it; nothing where that would have to wait or be made, or be somebody else's.

        Where none is idle that is said, and in how long one will be that is being made already and nobody waits for.
        """
        if not self._may_give(owner) or not last.is_plain or last.files:
            return Outcome({})
        # As a rule the last one came so too.
        request = last if last.is_ahead else replace(last, wait_s=_NEXT_S, on_asked=None, is_ahead=True)
        try:
            if not self._engine.has_idle(request):
                coming_s = self._engine.idle_in_s(request)
                return Outcome({"is_idle": False} if coming_s is None else {"is_idle": False, "idle_in_s": coming_s})
            owner.gate.admit(request.spec)
            if (slot := owner.ahead.add(lease_id)) is None:
                return Outcome({})
            owner.is_recalled = False
            given = await self._given(owner, lease_id, request)
        except BaseException as exc:
            owner.ahead.pop(lease_id)
            if not isinstance(exc, UntaxError):
                raise
            log.debug("%s is not given the next lease ahead: %s", owner.label, exc)
            return Outcome({})
        if not self._may_give(owner):
            await self._give_back(owner, lease_id)
            return Outcome({})
        given.body["slot"] = slot
        if (box := owner.leases.get(lease_id)) is not None and box.standby is not None:
            given.body["silent_s"] = asyncio.get_running_loop().time() - box.standby.answered_s
        return given

    def _may_give(self, owner: Owner) -> bool:
        """Whether anything is given ahead at all: to processes of this machine's own user, whose end is known when it comes, and who are not counted by the lease."""
        return (
            self.gives_ahead and not owner.is_over and not owner.gate.name and owner.attachment is not None and owner.attachment.proves_life
        )

    def _look_later(self, owner: Owner, lease_id: str) -> None:
        loop = asyncio.get_running_loop()
        self._to_look_after.append((loop.time() + _AHEAD_S, owner, lease_id))
        if self._looking is None:
            self._looking = loop.call_later(_AHEAD_S, self._look)

    def _look(self) -> None:
        """After all whose time has come, and seldom: a timer of its own for each would wake a busy server once more for every lease."""
        loop, left = asyncio.get_running_loop(), self._to_look_after
        try:
            while left and left[0][0] <= loop.time():
                _, owner, lease_id = left.popleft()
                self._look_after(owner, lease_id)
        finally:  # or leases would never end by their time
            self._looking = loop.call_at(max(left[0][0], loop.time() + _TOGETHER_S), self._look) if left else None

    def _look_after(self, owner: Owner, lease_id: str) -> None:
        """What was given ahead a while ago and is still there: leased, or in the hand of a client that is busy with something else and gives nothing back."""
        box = owner.leases.get(lease_id)
        if box is None:
            return
        if owner.ahead.is_untaken(lease_id):
            self._engine.chore(self._give_back(owner, lease_id))
        else:
            box.begin_term()  # its time began between then and now: it has all of it, and its holder knows to the moment when it ends

    async def _give_back(self, owner: Owner, lease_id: str) -> None:
        """Nobody wants it, or could take it."""
        box, is_taken = owner.leases.pop(lease_id, None), owner.ahead.pop(lease_id)
        if box is not None:
            if is_taken:
                box.ledger.fault("it was taken back in the moment in which it was leased")
            await self._released(owner, box, has_account=is_taken is not False)

    async def _released(self, owner: Owner, box: Tenancy, *, has_account: bool = True) -> None:
        """What was given ahead and never leased is no rollout, and has no account."""
        try:
            await box.release()
        finally:  # also when whoever asked for it has ended meanwhile
            owner.gate.leased(-1)
            if has_account:
                self._on_ledger(box.ledger, owner.gate.name)
            self._on_change()

    async def give_all_back(self, owner: Owner, reason: str) -> None:
        """The owner is over: nothing of it stays."""
        leases, owner.leases = owner.leases, {}
        for box in leases.values():
            box.ledger.fault(f"the holder of the lease is gone: {reason}")
        ends = [self._released(owner, box, has_account=owner.ahead.pop(lease_id) is not False) for lease_id, box in leases.items()]
        owner.ahead.close()
        unsaved = {name: one for name, one in owner.snapshots.items() if not one.is_saved}
        for outcome in [
            *await asyncio.gather(*ends, return_exceptions=True),
            *await asyncio.gather(*(asyncio.to_thread(pin.close) for pin in owner.pins.values()), return_exceptions=True),
            *await asyncio.gather(*(one.drop() for one in unsaved.values()), return_exceptions=True),
        ]:
            if isinstance(outcome, BaseException):
                log.warning("while giving back what an owner held: %s: %s", type(outcome).__name__, outcome)
        for name in unsaved:
            owner.gate.dropped_snapshot(name)

    # ---- their boxes ----

    async def op_reset(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        box = _box(owner, args)
        before: object = box._channel
        if isinstance(before, Handed):
            before.is_idle = args.truth("idle")
        try:
            await box.reset()
        finally:
            if isinstance(before, Handed):
                before.is_idle = False  # nobody knows what is asked over it next
        handed = await hand_over(box, self._hang_ups)
        body = {"sandbox": box.id, "unenforced": box.ledger.unenforced, "channel": handed.resumed.to_data()}
        return Outcome(body | {"how": "pristine"}) if handed is before else Outcome(body | {"how": "replaced"}, handed)

    async def op_snapshot(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        owner.gate.check_room()
        snapshot = await _box(owner, args).snapshot(live=args.truth("live"))
        if owner.is_over:
            await snapshot.drop()
        owner.snapshots[snapshot.id] = snapshot
        await owner.gate.took_snapshot(snapshot, is_saved=False)
        return Outcome(_told(snapshot), undo=snapshot.drop)

    async def op_diff(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:
        changes = await _box(owner, args).diff()
        for at in range(0, len(changes), _CHANGES_AT_ONCE):
            tell({"changes": changes[at : at + _CHANGES_AT_ONCE]})
        return Outcome({"count": len(changes)})

    async def op_pause(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        await _box(owner, args).pause()
        return Outcome({})

    async def op_resume(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        await _box(owner, args).resume()
        return Outcome({})

    async def op_worker(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        await _box(owner, args)._provide_worker(args.text_or_none("user"))
        return Outcome({})

    # ---- snapshots and stages ----

    async def op_find_snapshot(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        owner.gate.check_snapshot(args.text("snapshot"))
        return Outcome(_told(await self._engine.find_snapshot(args.text("snapshot"))))

    async def op_save(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        owner.gate.check_snapshot(args.text("snapshot"))
        snapshot = await self._engine.find_snapshot(args.text("snapshot"))
        await snapshot.save()
        await owner.gate.took_snapshot(snapshot, is_saved=True)
        return Outcome({})

    async def op_drop(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        snapshot_id = args.text("snapshot")
        owner.gate.check_snapshot(snapshot_id)
        snapshot = owner.snapshots.pop(snapshot_id, None)
        if snapshot is None and args.truth("is_saved"):
            snapshot = await self._engine.find_snapshot(snapshot_id)
        if snapshot is not None:
            await snapshot.drop()
            owner.gate.dropped_snapshot(snapshot_id)
        return Outcome({})

    async def op_prepare(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:
        owner.gate.admit(args.spec())
        prepared = await self._engine.prepare(args.spec(), progress=lambda what, done, total: tell({"progress": [what, done, total]}))
        pin_id = f"pin-{secrets.token_hex(8)}"
        owner.pins[pin_id] = prepared.pin
        if owner.is_over:
            prepared.pin.close()
        body = {
            "root": prepared.root,
            "stages": prepared.stages,
            "built": {name: float(seconds) for name, seconds in prepared.built.items()},
            "pin": pin_id,
            "pinned": prepared.pin.ids,
        }
        return Outcome(body)

    async def op_unpin(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        pin = owner.pins.pop(args.text("pin"), None)
        if pin is not None:
            await asyncio.to_thread(pin.close)
        return Outcome({})

    # ---- the engine itself ----

    async def op_warm(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        owner.gate.admit(args.spec())
        with owner.gate.starting(max(1, args.whole("n"))):
            if (snapshot_id := args.text_or_none("snapshot")) is None:
                await self._engine.warm(args.spec(), args.whole("n"))
            else:
                owner.gate.check_snapshot(snapshot_id)
                await self._engine.warm(snapshot_id, args.whole("n"), limits=args.spec().limits)
        return Outcome({})

    async def op_ladder(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        owner.gate.admit(args.spec())
        stages, present = await self._engine.ladder(args.spec())
        return Outcome({"stages": stages, "present": sorted(present)})

    async def op_pools(self, owner: Owner, args: _Args, tell: Tell) -> Outcome:  # noqa: ARG002
        return Outcome({"pools": owner.gate.shown(self._engine.pools())})


def _refusal(exc: PoolTimeout | StageUnavailable) -> LeaseRefused | None:
    """What another node may be better at is refused as such, for whoever asks several."""
    if isinstance(exc, StageUnavailable):
        return LeaseRefused("disk", str(exc)) if exc.stage == STORE else None
    return LeaseRefused("busy", str(exc)) if isinstance(exc.__cause__, UntaxError) else None  # an allowance of the tenant's, used up


def _box(owner: Owner, args: _Args) -> Tenancy:
    box = owner.leases.get(args.text("lease"))
    if box is None:
        raise SandboxLost("", "the server knows no such lease: it ended, or the server was started anew")
    return box


def _told(snapshot: Snapshot) -> Body:
    return {
        "snapshot": snapshot.id,
        "spec": snapshot.spec,
        "how": snapshot.how,
        "elapsed_s": snapshot.elapsed_s,
        "is_saved": snapshot.is_saved,
    }


class _Args:
    """The arguments of a request, each asked for by its type. `ProtocolError` for what is missing or something else."""

    def __init__(self, given: Mapping[str, Any], request: int, shift_ns: int) -> None:
        self._given = given
        self.request = request
        """The number of the request."""
        self.shift_ns = shift_ns

    def _of(self, name: str, *kinds: type) -> Any:
        value = self._given.get(name)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise ProtocolError(f"a request whose {name!r} is {type(value).__name__}")
        return value

    def text(self, name: str) -> str:
        value: str = self._of(name, str)
        return value

    def text_or_none(self, name: str) -> str | None:
        value: str | None = self._of(name, str, type(None))
        return value

    def number(self, name: str) -> float:
        value: float = self._of(name, int, float)
        return value

    def number_or_none(self, name: str) -> float | None:
        value: float | None = self._of(name, int, float, type(None))
        return value

    def whole(self, name: str) -> int:
        value: int = self._of(name, int)
        return value

    def truth(self, name: str) -> bool:
        value: bool = self._of(name, bool)
        return value

    def truth_or_false(self, name: str) -> bool:
        """For what is said only where it is so."""
        return self.truth(name) if name in self._given else False

    def octets(self, name: str) -> bytes:
        value: bytes = self._of(name, bytes)
        return value

    def mapping(self, name: str) -> Mapping[str, Any]:
        value: Mapping[str, Any] = self._of(name, dict)
        return value

    def spec(self) -> EnvSpec:
        value: EnvSpec = self._of("spec", EnvSpec)
        return value
