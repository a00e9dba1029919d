"""Sandboxes in hand: given with the end of one lease for the next, never a second account, never a dead one, and back when somebody needs them."""

import asyncio
import gc
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.unit.server.test_service import break_connection, serving, until

import untax
import untax.leases
from untax import standby
from untax.core.account import IN_HAND
from untax.pool.options import PoolOptions
from untax.remote import engine as client
from untax.remote import hand as module
from untax.remote.box import RemoteBox
from untax.remote.marks import SLOTS
from untax.server import ahead, operations
from untax.server.operations import Operations
from untax.standby import Standby
from untax.testing import FakeSubstrate


@pytest.fixture
def fake():
    return FakeSubstrate()


@pytest.fixture
def asked(monkeypatch):
    """The requests for leases that servers got."""
    found = []
    op_lease = Operations.op_lease

    async def counted(self, owner, args, tell):
        found.append(args.text("lease"))
        return await op_lease(self, owner, args, tell)

    monkeypatch.setattr(Operations, "op_lease", counted)
    return found


async def in_a_row(engine, count=module._IN_A_ROW + 2, **options):
    """One lease after the other, as a worker has them; gives their boxes. Then there is one in hand."""
    boxes = []
    for _ in range(count):
        async with engine.lease(**options) as box:
            await box.run(["true"])
        boxes.append(box)
    return boxes


async def one_in_hand(engine, **options):
    """The pool is full again besides."""
    await engine.warm(n=2)
    boxes = await in_a_row(engine, **options)
    while not engine._hand:  # none was idle at that moment
        boxes += await in_a_row(engine, 1, **options)
    while (await engine.pools()).stages[-1].idle < 1:
        await asyncio.sleep(0.001)
    return boxes


async def test_who_leases_in_a_row_asks_for_the_first_few_only(fake, tmp_path, asked):
    """Each rollout has a sandbox and one account of its own all the same, at both ends, and it begins when it was asked for."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=16)
        boxes = await in_a_row(engine, 20)

        assert len(asked) == module._IN_A_ROW + 1
        assert len({box.id for box in boxes}) == len({box.ledger.rollout for box in boxes}) == 20
        theirs = await engine.ledgers()
        assert [one["rollout"] for one in theirs] == [box.ledger.rollout for box in boxes]
        assert {box.ledger.verdict for box in boxes} == {one["verdict"] for one in theirs} == {"trusted"}
        last = boxes[-1].ledger
        assert last.hit.kind == "exact" and "in hand" in last.hit.why
        assert last.total_s < 1 and theirs[-1]["metrics"]["total_s"] < 1
        assert abs(last.asked_at - theirs[-1]["asked_at"]) < 0.2
        for one in (last.metrics(), theirs[-1]["metrics"]):
            assert one["unattributed_s"] <= max(0.01 * one["total_s"], 50e-6)
            assert one["queue_s"] == one["create_s"] == 0.0
    assert not fake.live


async def test_nothing_comes_ahead_for_who_takes_its_time(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_NEXT_S", -1.0)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2)
        await in_a_row(engine)
        assert len(engine._hand) == 0 and service.leases == 0


@pytest.mark.parametrize("options", [{"files": {"x": b""}}, {"ttl_s": 30.0}])
async def test_nothing_comes_ahead_for_leases_that_it_would_not_fit(fake, tmp_path, options):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2)
        await in_a_row(engine, **options)
        assert len(engine._hand) == 0 and service.leases == 0


async def test_nothing_is_made_or_waited_for_to_be_given_ahead(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await in_a_row(engine)
        assert len(engine._hand) == 0 and service.leases == 0


async def test_another_spec_gets_a_sandbox_of_its_own(fake, tmp_path, asked):
    """And what was in hand goes back: it is no longer what is leased in a row."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        before = len(asked)
        async with engine.lease(env={"A": "1"}) as box:
            assert "A=1" in (await box.run(["env"])).text
        assert len(asked) == before + 1
        await until(lambda: service.leases == 0)


async def test_what_nobody_comes_for_goes_back_and_has_no_account(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_S", 0.05)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        boxes = await one_in_hand(engine)
        assert service.leases == 1
        await until(lambda: service.leases == 0)
        await until(lambda: service.engine.pools().stages[-1].leased == 0)
        assert len(await engine.ledgers()) == len(boxes)


async def test_what_is_in_hand_is_recalled_for_who_would_have_to_wait(fake, tmp_path):
    """At once: not when its time is up."""
    async with serving(tmp_path, fake, pool=PoolOptions(entries=2)) as service:
        async with untax.connect(service.url) as engine, untax.connect(service.url) as other:
            await one_in_hand(engine)
            async with asyncio.timeout(module._KEPT_S / 2):
                first, second = await other.acquire(), await other.acquire()
            assert len(engine._hand) == 0
            assert first.ledger.verdict == second.ledger.verdict == "trusted"
            await first.release()
            await second.release()


async def test_a_draining_server_gives_nothing_ahead_and_has_back_what_it_gave(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=3)
        await in_a_row(engine)
        box = await engine.acquire()
        async with engine.lease():
            pass
        assert len(engine._hand) == 1
        service.drain()
        await until(lambda: not engine._hand)
        assert (await box.run(["true"])).exit_code == 0
        await box.release()
        async with asyncio.timeout(5):
            await service.wait_idle()
        assert len(engine._hand) == 0 and service.leases == 0
        with pytest.raises(untax.PoolClosed):
            await engine.acquire()


@pytest.mark.parametrize("fresh_s", [-1.0, 60.0])
async def test_x22_one_that_died_in_hand_is_seen_by_nobody(fake, tmp_path, monkeypatch, fresh_s):
    """Whether it is asked to prove that it lives, or came too short a time ago for that."""
    monkeypatch.setattr(client, "FRESH_S", fresh_s)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        [dead] = [box for owner in service.owners for box in owner.leases.values()]
        next(one for one in fake.sandboxes if one.id == dead.id).die()
        await until(lambda: dead.id not in fake.live)
        async with engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0
        assert box.id != dead.id and box.ledger.verdict == "trusted"
        assert dead.ledger.rollout not in {one["rollout"] for one in await engine.ledgers()}


@pytest.mark.parametrize(("fresh_s", "proofs"), [(-1.0, 1), (60.0, 0)])
async def test_x22_a_sandbox_that_came_a_while_ago_proves_that_it_lives(fake, tmp_path, monkeypatch, fresh_s, proofs):
    """By an answer of its own, the time of which is in `ready`."""
    monkeypatch.setattr(client, "FRESH_S", fresh_s)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        proved, prove = [], client.RemoteBox.prove

        async def slowly(box, within_s):
            await prove(box, within_s)
            await asyncio.sleep(0.01)
            proved.append(box.id)

        monkeypatch.setattr(client.RemoteBox, "prove", slowly)
        box = await engine.acquire()
        assert "in hand" in box.ledger.hit.why
        assert proved == [box.id] * proofs
        assert (box.ledger.metrics()["ready_s"] >= 0.01) is bool(proofs)
        await box.release()


@pytest.fixture
def bound(monkeypatch):
    """Of each hand-out, whether its sandbox had to answer."""
    found, bind = [], Standby.bind

    async def noted(self, spec, *, is_proven):
        found.append(is_proven)
        await bind(self, spec, is_proven=is_proven)

    monkeypatch.setattr(Standby, "bind", noted)
    return found


@pytest.mark.parametrize(("lately_s", "is_proven"), [(60.0, True), (-1.0, False)])
async def test_x22_what_is_given_ahead_answers_unless_it_has_lately(fake, tmp_path, monkeypatch, bound, lately_s, is_proven):
    """Whoever leases it counts from that answer on. One that is asked for answers in any case."""
    monkeypatch.setattr(standby, "LATELY_S", lately_s)
    monkeypatch.setattr(module, "_SOON_S", 60.0)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        await asyncio.sleep(0.2)  # what is in the pool answered before that
        bound.clear()
        async with engine.lease():
            pass
        assert len(engine._hand) == 1
        assert bound[0] is is_proven
        age_s = asyncio.get_running_loop().time() - engine._hand._given[0].answered_s
        assert (age_s >= 0.15) is is_proven
        await until(lambda: service.engine.pools().stages[-1].idle >= 1)
        bound.clear()
        assert (await engine.acquire(files={"of": b"its own"})).ledger.hit.kind == "exact"
        assert False in bound


async def test_x22_one_that_died_in_the_pool_is_given_ahead_to_nobody_who_leases_it(fake, tmp_path, monkeypatch):
    """Also where its server does not know yet, and has not asked it."""
    monkeypatch.setattr(standby, "LATELY_S", 60.0)
    monkeypatch.setattr(client, "FRESH_S", 60.0)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        box = await engine.acquire()
        for entry in service.engine.pooling.driver.parked():
            entry.on_lost = None  # as if that had not been heard of
            next(one for one in fake.sandboxes if one.id == entry.sandbox.id).die()
        await box.release()
        for _ in range(3):
            async with engine.lease() as after:
                assert (await after.run(["true"])).exit_code == 0
            assert after.ledger.verdict == "trusted"


def silenced(fake, entry):
    """It lives, and says nothing any more."""
    next(one for one in fake.sandboxes if one.id == entry.sandbox.id).cell.silent = True
    return entry.sandbox.id


async def test_x22_an_answer_of_long_ago_proves_nothing_of_what_is_given_ahead(fake, tmp_path, monkeypatch):
    """Somebody knocked, and leased another: what was asked then had answered, and fell silent since."""
    monkeypatch.setattr(standby, "LATELY_S", 0.1)
    monkeypatch.setattr(operations, "_NEXT_S", 0.2)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        box = await engine.acquire()
        await until(lambda: not given(service) and service.engine.pools().stages[-1].idle >= 2)
        parked = list(service.engine.pooling.driver.parked())
        for entry in parked:
            entry.begin(box.spec, asyncio.get_running_loop().time(), is_certain=False)
        await asyncio.sleep(0.2)
        silent = [silenced(fake, entry) for entry in parked]

        releasing = asyncio.ensure_future(box.release())
        await asyncio.wait([releasing], timeout=1.0)

        assert not [one for one in engine._hand._given if one.reply.body["sandbox"] in silent]
        for one in fake.sandboxes:
            if one.id in silent:
                one.die()
        await releasing


async def test_the_age_of_an_answer_counts_from_when_it_was_asked_for(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(standby, "LATELY_S", 60.0)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        [entry, *_] = service.engine.pooling.driver.parked()
        entry.begin(entry.bound, before_s := asyncio.get_running_loop().time(), is_certain=False)
        await asyncio.sleep(0.1)
        await entry.bind(entry.bound, is_proven=False)
        assert entry.answered_s == before_s


async def test_what_is_asked_whether_it_lives_while_it_is_given_ahead_is_given_and_lives_on(fake, tmp_path):
    """A knock of another client comes just before: a channel is handed over when that is answered, and nothing is destroyed for it."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        box = await engine.acquire()
        await until(lambda: not given(service) and service.engine.pools().stages[-1].idle >= 2)
        parked = {entry.sandbox.id for entry in service.engine.pooling.driver.parked()}
        next_of = service.operations._next

        async def knocked(owner, lease_id, last):
            service.engine.foresee(last.spec)
            return await next_of(owner, lease_id, last)

        service.operations._next = knocked
        await box.release()
        assert len(engine._hand) == 1
        assert parked <= fake.live


def test_what_had_answered_lately_is_fresh_to_who_comes_for_it_soon():
    """Or the answer that its server did not wait for would be waited for by the next lease."""
    assert standby.LATELY_S + module._SOON_S <= client.FRESH_S


async def test_what_is_in_hand_stays_for_its_time_whenever_it_answered(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_KEPT_S", 0.5)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        hand = engine._hand
        engine._hand._for = "spec", 60.0
        kept = []
        hand._give_back = kept.append
        reply = SimpleNamespace(discard=lambda: None)
        request = SimpleNamespace(spec="spec", ttl_s=60.0)
        for lease_id, silent_s, late_s in (("silent", 10.0, 0.0), ("late", 0.0, 10.0)):
            hand._coming += 1
            hand.keep(request, lease_id, reply, hand.drops, silent_s=silent_s, late_s=late_s)
        hand._drop_old()
        assert [one.lease_id for one in hand._given] == ["silent", "late"] and not kept
        hand._given.rotate(1)
        hand._drop_old()
        assert kept == ["late"]
        hand.forget()
        assert service.leases == 0


async def test_one_worker_has_one_in_hand_at_most_however_quick_it_is(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=16)
        await in_a_row(engine)
        for _ in range(20):
            async with engine.lease():
                assert len(engine._hand) + engine._hand._coming == 0
            assert len(engine._hand) + engine._hand._coming <= 1
        assert sum(owner.ahead.has_untaken for owner in service.owners) <= 1


async def test_workers_whose_leases_end_together_have_one_each_in_hand(fake, tmp_path, asked):
    """What came with the end of one's lease is not taken for the other's, though nobody has come for it yet."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=16)
        await in_a_row(engine)
        await until(lambda: service.engine.pools().stages[-1].idle >= 8)
        first, second = await engine.acquire(), await engine.acquire()
        before = len(asked)
        await first.release()
        await second.release()
        assert len(engine._hand) == 2
        boxes = [await engine.acquire(), await engine.acquire()]
        assert len(asked) == before and len({box.id for box in boxes}) == 2


async def test_a_worker_that_does_not_come_again_is_counted_for_a_moment_only(fake, tmp_path, monkeypatch):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=16)
        await in_a_row(engine)
        first, second = await engine.acquire(), await engine.acquire()
        await first.release()
        monkeypatch.setattr(module, "_SOON_S", -1.0)  # as if that had been a while ago
        await second.release()
        assert len(engine._hand) == 1


@pytest.mark.parametrize("is_taken", [True, False])
async def test_x33_what_a_dead_client_leaves_behind_has_an_account_if_it_was_leased(fake, tmp_path, is_taken):
    async with serving(tmp_path, fake, lease_s=0.2) as service:
        engine = untax.connect(service.url)
        await engine.start()
        boxes = await one_in_hand(engine)
        if is_taken:
            boxes.append(await engine.acquire())
            assert not any(owner.ahead.has_untaken for owner in service.owners)
        [owner] = service.owners
        engine._connection._beat.cancel()
        engine._connection._is_closed = True  # as if its process had been killed
        break_connection(engine)
        await until(lambda: owner.ended is not None and owner.ended.done())
        await asyncio.sleep(0)  # ledgers are put by behind everything else
        assert not service.leases and not service.engine._boxes
        ledgers = service.latest_ledgers()
        assert len(ledgers) == len(boxes)
        assert ('"verdict":"infra"' in ledgers[-1]) is is_taken


async def test_the_time_of_a_lease_begins_when_it_is_taken(fake, tmp_path, monkeypatch):
    """To the moment by its holder's clock; the server's is never earlier."""
    monkeypatch.setattr(operations, "_AHEAD_S", 0.8)  # long enough for a full machine to lease it before
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        [waiting] = [box for owner in service.owners for box in owner.leases.values()]
        assert waiting._expiry is None
        began_s = asyncio.get_running_loop().time()
        box = await engine.acquire()
        await until(lambda: waiting._expiry is not None)
        assert began_s + box._request.ttl_s <= box._expiry.when() <= waiting._expiry.when()
        await box.release()


async def test_a_lost_answer_brings_the_next_one_all_the_same(fake, tmp_path):
    """There is never a second one."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2)
        await in_a_row(engine)
        box = await engine.acquire()
        [session] = service.sessions
        say = session.say
        session.say = lambda body, fd=None: say(body, fd) if "id" not in body or body["id"] == 0 else break_connection(engine)
        await box.release()
        assert len(engine._hand) == 1 and service.leases == 1
        async with engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0
            assert "in hand" in box.ledger.hit.why


async def test_closing_gives_back_what_is_in_hand(fake, tmp_path):
    async with serving(tmp_path, fake) as service:
        async with untax.connect(service.url) as engine:
            boxes = await one_in_hand(engine)
        await until(lambda: service.leases == 0)
        assert len(service.ledgers) == len(boxes)
        assert service.engine.pools().stages[-1].leased == 0


async def test_a_server_that_is_gone_takes_what_it_gave_along(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        await service.aclose()
        await until(lambda: not engine._hand)
        with pytest.raises(untax.UntaxError):
            await engine.acquire()


async def test_a_worker_with_many_leases_has_no_more_in_hand_than_it_holds(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=8)
        most = 0

        async def loop():
            nonlocal most
            for _ in range(12):
                async with engine.lease() as box:
                    await box.run(["true"])
                most = max(most, len(engine._hand))

        await asyncio.gather(*(loop() for _ in range(3)))
        assert 1 <= most <= 3
        assert len(await engine.ledgers()) == 36


async def test_every_lease_is_counted_once_at_its_gate(fake, tmp_path):
    """What a tenant may hold includes what it has in hand, and all of it comes back."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        [owner] = service.owners
        held = []
        owner.gate = type(owner.gate)()
        owner.gate.leased = held.append
        await one_in_hand(engine)
        assert sum(held) == 1
        engine._hand.drop()
        await until(lambda: service.leases == 0)
        assert sum(held) == 0


async def test_what_a_gate_refuses_is_not_given_ahead(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2)
        [owner] = service.owners

        await in_a_row(engine, module._IN_A_ROW)
        box = await engine.acquire()

        def refuse(spec):
            raise untax.UsageError("no more")

        owner.gate = type(owner.gate)()
        owner.gate.admit = refuse
        while (await engine.pools()).stages[-1].idle < 1:
            await asyncio.sleep(0.001)
        engine.on_nothing_ahead = lambda spec, coming_s: pytest.fail("one was idle")
        await box.release()
        assert len(engine._hand) == 0 and service.leases == 0
        assert box.ledger.verdict == "trusted"


async def test_who_wanted_the_next_one_is_told_that_nothing_was_idle_for_it(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        said = []
        engine.on_nothing_ahead = lambda spec, coming_s: said.append((spec, coming_s))
        await engine.warm(n=2)
        await in_a_row(engine, module._IN_A_ROW)
        box = await engine.acquire()
        while (await engine.pools()).starting:
            await asyncio.sleep(0.001)
        service.engine.has_idle = lambda request: False
        await box.release()
        [(spec, coming_s)] = said
        assert spec.isolation == engine.substrate.isolation and coming_s is None and not engine._hand


async def test_who_wanted_the_next_one_is_told_in_how_long_one_is_there_that_is_made_for_nobody(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        said = []
        engine.on_nothing_ahead = lambda spec, coming_s: said.append(coming_s)
        await engine.warm(n=2)
        await in_a_row(engine, module._IN_A_ROW)
        box = await engine.acquire()
        fake.gates["create"] = asyncio.Event()
        async with untax.connect(service.url) as other:
            while (await other.pools()).stages[-1].idle:
                await other.acquire()
            await box.release()
            [coming_s] = said
            assert coming_s == service.engine.pooling.driver.costs.of("create") > 0
            fake.gates["create"].set()


async def test_leases_leave_nothing_for_the_garbage_collector(fake, tmp_path):
    """A process that leases all day is otherwise stopped for its collections: for 50 ms each where there is much besides, as in Ray's workers."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        own = service.engine
        gc.collect()
        gc.disable()
        try:
            await in_a_row(engine, 10)
            await in_a_row(own, 10)
            boxes = await asyncio.gather(*(engine.acquire(files={"of": b"its own"}) for _ in range(5)))
            await asyncio.gather(*(box.release() for box in boxes))
            del boxes
            await asyncio.sleep(0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            left = [type(one).__name__ for one in gc.garbage]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
        assert len(left) < 10, left


# ---- what must not come of it ----


def given(service):
    """The leases that clients have in hand."""
    return [box for owner in service.owners for one, box in owner.leases.items() if owner.ahead.is_untaken(one)]


async def test_a_snapshot_is_never_restored_from_the_hand(tmp_path):
    """What is in hand has the spec's own stages and nothing else."""
    async with serving(tmp_path, FakeSubstrate()) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        request = untax.leases.checked(engine.offer, None, untax.leases.Bindings())
        assert await engine.take_in_hand(replace(request, snapshot=object()), 0) is None
        assert len(engine._hand) == 1


async def test_one_that_dies_before_it_was_told_of_is_nobodys(fake, tmp_path, monkeypatch):
    """Its lease does not stay behind."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        box = await engine.acquire()
        await until(lambda: not given(service))
        gate = fake.gates["destroy"] = asyncio.Event()
        ending = asyncio.ensure_future(box.release())
        await until(lambda: given(service))
        [dead] = given(service)
        next(one for one in fake.sandboxes if one.id == dead.id).die()
        await until(lambda: dead._over is not None)
        gate.set()
        await ending
        assert dead.id not in {one.id for one in given(service)}
        engine._hand.drop()
        await until(lambda: service.leases == 0)
        assert dead.ledger.rollout not in {one["rollout"] for one in await engine.ledgers()}


async def test_nothing_is_taken_while_the_server_cannot_be_told(fake, tmp_path):
    async with serving(tmp_path, fake, lease_s=0.5) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        break_connection(engine)
        await until(lambda: not engine._connection.is_connected)
        box = await engine.acquire()
        await asyncio.sleep(0.7)
        assert (await box.run(["true"])).exit_code == 0
        await box.release()
        assert box.ledger.verdict == "trusted"


async def test_a_fork_of_the_process_takes_nothing(fake, tmp_path, monkeypatch):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        monkeypatch.setattr(engine._connection, "_pid", -1)
        with pytest.raises(untax.UsageError, match="fork"):
            await engine.acquire()
        monkeypatch.undo()
        assert len(engine._hand) == 1


async def test_a_client_that_is_busy_with_something_else_keeps_it_from_nobody(fake, tmp_path, monkeypatch):
    """It neither gives back nor answers a recall: the server takes it back, and what is taken back is not leased."""
    monkeypatch.setattr(operations, "_AHEAD_S", 0.1)
    monkeypatch.setattr(module.Hand, "drop", lambda self: None)
    async with serving(tmp_path, fake, pool=PoolOptions(entries=2)) as service:
        async with untax.connect(service.url) as engine, untax.connect(service.url) as other:
            await one_in_hand(engine)
            boxes = [await other.acquire(wait_s=3.0), await other.acquire(wait_s=3.0)]
            for box in boxes:
                await box.release()
            monkeypatch.setattr(client, "FRESH_S", 60.0)
            box = await engine.acquire()
            assert (await box.run(["true"])).exit_code == 0
            await box.release()
            assert box.ledger.verdict == "trusted"


async def test_what_was_given_ahead_is_looked_after_together(fake, tmp_path, monkeypatch):
    """A timer for each would wake a server that leases all it can once more for every lease. None is left out of the look."""
    monkeypatch.setattr(operations, "_AHEAD_S", 0.05)
    monkeypatch.setattr(operations, "_TOGETHER_S", 0.02)
    looked = []
    look_after = Operations._look_after
    monkeypatch.setattr(
        Operations, "_look_after", lambda self, owner, lease_id: (looked.append(lease_id), look_after(self, owner, lease_id))
    )
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=4)
        given = []
        gives = Operations._given

        async def counted(self, owner, lease_id, request, **options):
            outcome = await gives(self, owner, lease_id, request, **options)
            given.extend([lease_id] if request.is_ahead else [])
            return outcome

        monkeypatch.setattr(Operations, "_given", counted)
        await in_a_row(engine, 30)
        timers = [one for one in asyncio.get_running_loop()._scheduled if getattr(one._callback, "__func__", None) is Operations._look]
        assert sum(not one.cancelled() for one in timers) <= 1
        await until(lambda: looked == given and len(given) >= 2)
        await until(lambda: service.operations._looking is None)


async def test_what_comes_while_a_drain_begins_is_not_leased(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2)
        await in_a_row(engine)
        box = await engine.acquire()
        given_, started = service.operations._given, asyncio.Event()

        async def slowly(*args, **options):
            started.set()
            await asyncio.sleep(0.02)
            return await given_(*args, **options)

        service.operations._given = slowly
        engine._hand.drop()
        ending = asyncio.ensure_future(box.release())
        await started.wait()
        service.drain()
        await ending
        with pytest.raises(untax.PoolClosed):
            await engine.acquire()
        async with asyncio.timeout(5):
            await service.wait_idle()


async def test_a_recall_reaches_what_is_on_its_way(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        box = await engine.acquire()
        await until(lambda: not given(service))
        gate = fake.gates["destroy"] = asyncio.Event()
        ending = asyncio.ensure_future(box.release())
        await until(lambda: given(service))
        drops = engine._hand.drops
        service.recall()
        await until(lambda: engine._hand.drops > drops)
        gate.set()
        await ending
        await until(lambda: service.leases == 0)
        assert len(engine._hand) == 0


async def test_who_was_told_to_give_back_is_not_told_again_until_there_is_more(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        [session] = service.sessions
        said, say = [], session.say
        session.say = lambda body, fd=None: (said.append(body.get("event")), say(body, fd))
        for _ in range(5):
            service.recall()
        assert said.count("recall") == 1


@pytest.mark.parametrize("has_next", [True, False])
async def test_c15_a_lease_that_ends_while_its_owner_does_has_its_ledger(fake, tmp_path, has_next):
    async with serving(tmp_path, fake) as service:
        engine = untax.connect(service.url)
        await engine.start()
        await engine.warm(n=2)
        before = len(await in_a_row(engine, module._IN_A_ROW + 1 if has_next else 1))
        box = await engine.acquire()
        await box.run(["true"])
        [owner] = service.owners
        gate = fake.gates["destroy"] = asyncio.Event()
        ending = asyncio.ensure_future(box.release())
        await until(lambda: owner.under_way)
        await asyncio.sleep(0.01)
        service.owners.end(owner, "the test says so")
        gate.set()
        await until(lambda: owner.ended.done())
        await asyncio.sleep(0)
        assert len(service.ledgers) == before + 1
        ending.cancel()
        await asyncio.wait([ending])
        await engine.aclose()


async def test_what_is_taken_is_known_to_a_server_that_hears_nothing(fake, tmp_path):
    """Or the rollout that took it would have no account should its client die."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        assert given(service)
        [session] = service.sessions
        session.message_received = lambda body, fd: None  # whatever is said does not arrive
        box = await engine.acquire()
        assert not given(service)
        break_connection(engine)
        await box.release()
        assert box.ledger.verdict == "trusted"


@pytest.mark.parametrize("slot", [None, True, "0", -1, SLOTS])
async def test_what_came_without_a_place_for_its_mark_is_given_back_and_another_asked_for(fake, tmp_path, slot):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        engine._hand._given[0].reply.body["slot"] = slot
        box = await engine.acquire()
        assert box.ledger.hit.why != IN_HAND
        await box.release()
        await until(lambda: service.leases == len(engine._hand))
        assert box.ledger.verdict == "trusted"


async def test_who_has_no_page_is_given_nothing_ahead(fake, tmp_path, monkeypatch):
    def none():
        raise OSError("no memory")

    monkeypatch.setattr(ahead, "Slots", none)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2)
        await in_a_row(engine)
        assert len(engine._hand) == 0 and service.leases == 0


async def test_what_took_long_to_get_here_is_as_old_as_it_is(fake, tmp_path, monkeypatch):
    """Who was busy while it lay in the socket: the server is about to take it back."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2)
        await in_a_row(engine)
        engine._hand.drop()
        box = await engine.acquire()
        clock = engine.clock
        monkeypatch.setattr(engine, "clock", lambda: clock() + int(2 * module._KEPT_S * 1e9))
        await box.release()
        monkeypatch.undo()
        box = await engine.acquire()
        assert box.ledger.hit.why != IN_HAND
        await box.release()


async def test_one_whose_end_comes_with_its_proof_of_life_is_not_leased(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "FRESH_S", -1.0)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        prove = RemoteBox.prove

        async def proved(self, within_s):
            await prove(self, within_s)
            self.end_by("it died in that moment")

        monkeypatch.setattr(RemoteBox, "prove", proved)
        box = await engine.acquire()
        assert (await box.run(["true"])).exit_code == 0 and box.ledger.hit.why != IN_HAND
        await box.release()
        assert box.ledger.verdict == "trusted"


async def test_what_is_taken_in_the_moment_of_being_taken_back_has_an_account_that_says_so(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        [owner] = service.owners
        [(lease_id, box)] = owner.leases.items()
        engine._connection.take(engine._hand._given[0].reply.body["slot"])
        before = len(service.latest_ledgers())
        await service.operations._give_back(owner, lease_id)
        assert len(service.latest_ledgers()) == before + 1
        assert box.ledger.verdict == "infra" and "taken back" in box.ledger.reason


async def test_who_could_not_say_what_it_takes_asks_for_nothing_ahead(fake, tmp_path, monkeypatch):
    named = []
    op_release = Operations.op_release

    async def seen(self, owner, args, tell):
        named.append(args.text_or_none("next"))
        return await op_release(self, owner, args, tell)

    monkeypatch.setattr(Operations, "op_release", seen)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await engine.warm(n=2)
        await in_a_row(engine)
        assert any(named)
        named.clear()
        engine._connection._share(None)
        await in_a_row(engine)
        assert named and not any(named)


async def test_an_ordinary_lease_cannot_be_ended_without_an_account(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        box = await engine.acquire()
        await engine.ask("release", lease=box._lease_id, account=b"", is_unused=True)
        [ledger] = await engine.ledgers()
        assert ledger["reasons"] == ["its holder could not take it"]
        await box.release()


async def test_who_is_counted_by_the_lease_is_given_nothing_ahead(fake, tmp_path):
    """A tenant's rollouts are all asked for."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        [owner] = service.owners
        owner.gate = type(owner.gate)()
        owner.gate.name = "tenant"
        await engine.warm(n=2)
        await in_a_row(engine)
        assert len(engine._hand) == 0 and service.leases == 0


async def test_a_proof_takes_no_longer_than_its_lease_may_wait(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "FRESH_S", -1.0)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        [hung] = given(service)
        next(one for one in fake.sandboxes if one.id == hung.id).cell.write = lambda data: None
        async with asyncio.timeout(0.8):
            box = await engine.acquire(wait_s=0.2)
        assert box.id != hung.id
        await box.release()


async def test_an_engine_that_closes_meanwhile_gives_no_box(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "FRESH_S", -1.0)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        prove, closing = client.RemoteBox.prove, []

        async def slowly(box, within_s):
            await prove(box, within_s)
            closing.append(asyncio.ensure_future(engine.aclose()))
            await asyncio.sleep(0)

        monkeypatch.setattr(client.RemoteBox, "prove", slowly)
        with pytest.raises(untax.PoolClosed):
            await engine.acquire()
        await until(lambda: service.leases == 0)


@pytest.mark.parametrize("off_ns", [10_000_000_000, -5_000_000_000])
async def test_a_clock_that_is_off_makes_no_time(fake, tmp_path, monkeypatch, off_ns):
    """Of when its holder gave a lease up: the server's own account adds up all the same."""
    from untax.core import account

    holding = account.holding
    monkeypatch.setattr(account, "holding", lambda ledger: {**holding(ledger), "released_ns": holding(ledger)["released_ns"] + off_ns})
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        async with engine.lease() as box:
            await box.run(["true"])
        [ledger] = await engine.ledgers()
        assert 0 <= ledger["metrics"]["cleanup_s"] < 1
        assert 0 <= ledger["metrics"]["tax_s"] < 1


async def test_who_leases_from_the_engine_itself_has_it_recalled_too(fake, tmp_path):
    """As a server's HTTP side does."""
    async with serving(tmp_path, fake, pool=PoolOptions(entries=2)) as service, untax.connect(service.url) as engine:
        await one_in_hand(engine)
        async with asyncio.timeout(module._KEPT_S / 2):
            boxes = [await service.engine.acquire(), await service.engine.acquire()]
        for box in boxes:
            await box.release()
