"""How a client's fleet begins and ends, over real sockets and a fake substrate, with Ray's part played here: nothing is left of a start that failed or was cancelled, nor of a loop that is over."""

import asyncio
import contextlib
import gc
import os
import threading
from dataclasses import replace
from types import SimpleNamespace
from typing import ClassVar

import pytest

pytest.importorskip("ray", reason="ray: not installed; pip install 'untax[ray]'")

from ray.exceptions import ActorDiedError
from tests.unit.server.test_service import serving, until

import untax
from untax.cluster import access, handles, joining, operate, tickets
from untax.cluster import fleet as module
from untax.cluster.fleet import Fleet
from untax.cluster.node import NodeEngine
from untax.cluster.plan import Plan
from untax.cluster.terms import Member, Refusal, Roll, Ticket
from untax.cluster.trust import Trust
from untax.remote.boot import boot_id
from untax.remote.engine import RemoteSubstrate
from untax.server import view as server_view
from untax.sync import Fleet as BlockingFleet
from untax.sync import fleet as blocking_module
from untax.sync.fleet import _shared as blocking_handle
from untax.testing import LayeredFake

AUTHORITY = Trust.new("life").authority.certificate
OFFER = RemoteSubstrate("fake", "vm", "vm")


def member(socket, node_id="here", agent="1"):
    return Member(
        node_id, node_id, "127.0.0.1", "https://127.0.0.1:1", str(socket), boot_id(), untax.__version__, "fake", "vm", "vm",
        agent=agent,
    )  # fmt: skip


def ticket(*members, authority=AUTHORITY):
    return Ticket("life", "token", authority, untax.__version__, "head:1", OFFER, tuple(members))


class Keeping:
    """Whoever keeps the fleet, as a client sees it. Its calls are answered in the caller's loop."""

    def __init__(self, ticket):
        self.said = ticket
        self.rolls = []
        self.is_dead = False
        self.was_taken_down = False

    def __getattr__(self, name):
        def remote(*args):
            access.require_ray().auto_init()
            return asyncio.ensure_future(self._answer(name, *args))

        return SimpleNamespace(remote=remote)

    async def _answer(self, name, *args):
        if self.is_dead:
            raise ActorDiedError
        if name == "ticket":
            return self.said.to_json()
        if name == "instance":
            return self.said.instance
        if name == "plan":
            return Plan("life")
        if name == "down":
            self.was_taken_down = True
            return None
        assert name == "members"
        while not self.rolls or self.rolls[-1].version == args[0]:
            await asyncio.sleep(0.001)
            if self.is_dead:
                raise ActorDiedError
        return self.rolls[-1].to_json()


class Near:
    """Ray, as far as `access` reaches it."""

    def __init__(self):
        self.users = 0
        self.killed = []
        self.keeper = None
        self.gate = threading.Event()
        self.gate.set()
        self.is_waited_for = threading.Event()
        self.is_passed = threading.Event()
        self.trouble = []
        self.is_connected = True
        self.is_asked = False

    def is_initialized(self):
        return self.is_connected

    def auto_init(self):
        """As Ray before whatever it is asked for."""
        self.is_asked = True
        if not self.is_connected:
            pytest.fail("Ray would have started a cluster")

    def cancel(self, call, *, recursive):
        self.auto_init()
        call.cancel()

    def connect(self, address, *, anywhere=False, given_up=None):
        self._pass()
        if self.trouble:
            raise self.trouble.pop()
        self.users += 1
        self.is_passed.set()
        return address

    def disconnect(self):
        self.users -= 1

    def find_keeper(self, name):
        return self.keeper

    def start_keeper(self, plan, ray_address, *, is_lasting):
        self._pass()
        if self.keeper is not None:
            return self.keeper, False
        self.keeper = Keeping(ticket())
        self.is_passed.set()
        return self.keeper, True

    async def kill(self, keeper):
        self.killed.append(keeper)

    def _pass(self):
        self.is_waited_for.set()
        assert self.gate.wait(30)


@pytest.fixture
def near(monkeypatch):
    near = Near()
    for name in ("connect", "disconnect", "find_keeper", "start_keeper", "kill"):
        monkeypatch.setattr(access, name, getattr(near, name))
    monkeypatch.setattr(access, "own_node", lambda: "here")
    monkeypatch.setattr(blocking_module, "_handles", {})
    monkeypatch.setattr(access, "require_ray", lambda: near)
    for one in (module, joining):
        monkeypatch.setattr(one, "AGAIN_S", 0.01)
    return near


@pytest.fixture
def elsewhere(tmp_path):
    """A served engine in a thread and a loop of its own, for clients whose loops come and go."""
    done, there = threading.Event(), {}
    ready = threading.Event()

    async def serve():
        async with serving(tmp_path) as service:
            there["service"], there["path"] = service, tmp_path / "s.sock"
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    assert ready.wait(30)
    yield SimpleNamespace(**there)
    done.set()
    thread.join()


# ---- handles ----


def descriptors():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


async def rollout(handle):
    async with handle.lease() as box:
        return (await box.run(["true"])).exit_code


def test_loops_that_use_a_handle_one_after_the_other_leave_nothing_open(near, elsewhere):
    said = ticket(member(elsewhere.path))
    near.keeper = Keeping(said)
    handle = Fleet.from_ticket(said.to_json())
    asyncio.run(rollout(handle))
    before = descriptors()
    gc.disable()  # what is open only until objects are collected counts as open
    try:
        for _ in range(3):
            assert asyncio.run(rollout(handle)) == 0
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()
    assert not handles._handles and near.users == 0
    assert not elsewhere.service.sessions and not list(elsewhere.service.owners)


def test_a_loop_that_was_closed_without_a_word_is_forgotten_by_the_next(near, elsewhere):
    said = ticket(member(elsewhere.path))
    near.keeper = Keeping(said)
    handle = Fleet.from_ticket(said.to_json())
    loop = asyncio.new_event_loop()
    assert loop.run_until_complete(rollout(handle)) == 0
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0.01))
    loop.close()
    assert near.users == 1
    assert asyncio.run(rollout(handle)) == 0
    assert not handles._handles and near.users == 0


def test_handles_of_one_loop_are_one_and_begin_anew_when_that_was_closed(near, elsewhere):
    said = ticket(member(elsewhere.path))
    near.keeper = Keeping(said)

    async def use():
        first, second = [await Fleet.from_ticket(said.to_json())._ready() for _ in range(2)]
        assert first is second
        await first.aclose()
        assert await rollout(Fleet.from_ticket(said.to_json())) == 0

    asyncio.run(use())
    assert near.users == 0


def test_a_handle_tells_who_is_in_the_fleet_as_its_loop_was_last_told(near, elsewhere):
    """By its ticket before anybody was asked, and again when the loop is over."""
    said = ticket(member(elsewhere.path))
    near.keeper = Keeping(said)
    handle = Fleet.from_ticket(said.to_json())

    async def use():
        assert handle.members == said.members
        await rollout(handle)
        near.keeper.rolls = [Roll(7, (said.members[0].drained(),), ())]
        await until(lambda: handle.members[0].is_draining)
        assert Fleet.from_ticket(handle.ticket()).members == handle.members

    asyncio.run(use())
    assert handle.members == said.members


def test_a_blocking_handle_whose_first_start_failed_is_good_for_the_next(near, elsewhere):
    said = ticket(member(elsewhere.path))
    near.keeper = Keeping(said)
    near.trouble = [untax.SubstrateUnavailable("", "no Ray cluster answers")]
    handle = blocking_handle(said.to_json())
    with pytest.raises(untax.SubstrateUnavailable):
        handle.acquire()
    assert blocking_handle(said.to_json()) is handle
    with handle.lease() as box:
        assert box.run(["true"]).exit_code == 0
    handle.aclose()
    with pytest.raises(untax.UntaxError):  # what was closed stays so
        handle.acquire()
    assert blocking_handle(said.to_json()) is not handle
    assert near.users == 0


async def test_what_was_warmed_is_known_to_the_leases_that_follow(near, tmp_path, monkeypatch):
    """Whoever warms is about to lease, and rests no more."""
    monkeypatch.setattr(server_view, "_RESTING_S", 3600.0)
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"))
        near.keeper = Keeping(said)
        async with Fleet.from_ticket(said.to_json()) as fleet:
            for n in (1, 3, 2):
                await fleet.warm(n=n)
                await until(lambda n=n: list(fleet._placing.views.view("here").idle.values()) == [n])


async def test_a_handle_knows_the_nodes_of_its_ticket_and_then_those_of_the_fleet_that_it_uses(near, tmp_path):
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"))
        near.keeper = Keeping(said)
        handle = Fleet.from_ticket(said.to_json())
        assert handle.members == said.members and not handle.refusals and not handle.wanted
        assert await rollout(handle) == 0
        away = Refusal("away", "away", "its clock is off")
        near.keeper.rolls.append(Roll(1, said.members, (away,), 3))
        await until(lambda: handle.refusals == (away,) and handle.wanted == 3)
        assert await asyncio.to_thread(lambda: handle.members) == said.members  # where no loop is, what it began with
        await (await handle._ready()).aclose()


async def test_a_handle_speaks_of_the_nodes_that_its_fleet_has_now(near, tmp_path):
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"))
        near.keeper = Keeping(said)
        handle = Fleet.from_ticket(said.to_json())
        assert await rollout(handle) == 0
        near.keeper.rolls.append(Roll(1, (), (Refusal("here", "here", "it was drained"),)))
        await until(lambda: not handle.members)
        for ask in (handle.prepare(untax.EnvSpec()), handle.warm(), handle.find_snapshot("none")):
            with pytest.raises(untax.SubstrateUnavailable, match="node here: it was drained"):
                await ask
        await (await handle._ready()).aclose()


async def test_a_handle_that_was_made_while_no_node_was_in_says_so():
    empty = replace(ticket(), offer=None)
    with pytest.raises(untax.SubstrateUnavailable, match=r"no node was in the fleet 'life' when this handle was made: get a new handle"):
        Fleet.from_ticket(empty.to_json()).lease()


async def test_a_handle_writes_no_ticket_for_a_lease_and_wakes_its_fleet_for_it(near, tmp_path, monkeypatch):
    """Which takes 23 ms with 500 nodes."""
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"))
        near.keeper = Keeping(said)
        handle = Fleet.from_ticket(said.to_json())
        monkeypatch.setattr(Ticket, "to_json", lambda self: pytest.fail("not for a lease"))
        assert await rollout(handle) == 0
        stirred = []
        shared = await handle._ready()
        monkeypatch.setattr(shared._placing, "stir", lambda: stirred.append(True))
        assert await rollout(handle) == 0
        assert stirred
        await shared.aclose()


async def test_a_snapshot_of_an_engine_in_a_process_of_its_own_is_not_copied(near, tmp_path):
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"))
        near.keeper = Keeping(said)
        async with (
            untax.Engine(LayeredFake(tmp_path / "fake"), state_dir=tmp_path / "own") as engine,
            Fleet.from_ticket(said.to_json()) as fleet,
        ):
            async with engine.lease() as box:
                snapshot = await box.snapshot()
            with pytest.raises(untax.UsageError, match=rf"snapshot {snapshot.id} is not on a node of the fleet"):
                await fleet.copy(snapshot, "here")


# ---- the cluster's own ----


@pytest.fixture
def asked(near, monkeypatch):
    """How often whoever keeps the fleet was asked for a ticket."""
    times = []

    def ticket_of(name):
        times.append(name)
        if near.keeper is None:
            raise untax.UsageError(f"there is no fleet {name!r}")
        return near.keeper.said.to_json()

    monkeypatch.setattr(access, "ticket_of", ticket_of)
    monkeypatch.setattr(tickets, "_kept", {})
    monkeypatch.setattr(tickets, "_own", set())
    return times


def test_whoever_keeps_the_fleet_is_asked_once_in_a_process(near, elsewhere, asked):
    near.keeper = Keeping(ticket(member(elsewhere.path)))
    for _ in range(3):
        assert asyncio.run(rollout(Fleet.current("life"))) == 0
    assert asked == ["life"]


def replaced_by_another(near, elsewhere):
    """This process has kept a ticket, and its fleet was followed by another."""
    near.keeper = Keeping(ticket(member(elsewhere.path)))
    assert asyncio.run(rollout(Fleet.current("life"))) == 0
    near.keeper = Keeping(replace(ticket(member(elsewhere.path), authority="of another"), token="another"))


def test_leases_at_once_by_a_ticket_that_is_outdated_are_given_all_by_one_that_is_not(near, elsewhere, asked):
    replaced_by_another(near, elsewhere)

    async def many():
        fleet = Fleet.current("life")
        return await asyncio.gather(*(rollout(fleet) for _ in range(4)), return_exceptions=True)

    assert asyncio.run(many()) == [0] * 4
    assert len(asked) == 2


def test_a_lease_that_is_cancelled_while_its_ticket_is_renewed_takes_no_other_along(near, elsewhere, asked, monkeypatch):
    replaced_by_another(near, elsewhere)
    gate, is_asked, ask = threading.Event(), threading.Event(), access.ticket_of

    def ticket_of(name):
        is_asked.set()
        assert gate.wait(30)
        return ask(name)

    monkeypatch.setattr(access, "ticket_of", ticket_of)

    async def many():
        fleet = Fleet.current("life")
        first, *others = (asyncio.ensure_future(rollout(fleet)) for _ in range(3))
        await asyncio.to_thread(is_asked.wait)
        first.cancel()
        await asyncio.wait([first])
        gate.set()
        assert first.cancelled()
        return await asyncio.gather(*others)

    assert asyncio.run(many()) == [0, 0]
    assert len(asked) == 2


def test_so_it_is_by_blocking_tasks(near, elsewhere, asked):
    near.keeper = Keeping(ticket(member(elsewhere.path)))
    for _ in range(3):
        with BlockingFleet.current("life").lease() as box:
            assert box.run(["true"]).exit_code == 0
    assert asked == ["life"]
    fleet = BlockingFleet.current("life")
    fleet.aclose()
    other = BlockingFleet.current("life")  # nobody would have heard of its end
    assert other is not fleet and len(asked) == 2
    other.aclose()


def test_a_ticket_of_a_fleet_that_is_gone_is_forgotten_and_another_asked_for(near, elsewhere, asked):
    near.keeper = Keeping(ticket(member(elsewhere.path)))
    assert asyncio.run(rollout(Fleet.current("life"))) == 0
    near.keeper = Keeping(replace(ticket(member(elsewhere.path), authority="of another"), token="another"))
    assert asyncio.run(rollout(Fleet.current("life"))) == 0
    assert len(asked) == 2
    near.keeper = None
    with pytest.raises(untax.UsageError, match="there is no fleet 'life'"):
        asyncio.run(rollout(Fleet.current("life")))
    with pytest.raises(untax.UsageError, match="there is no fleet 'life'"):
        Fleet.current("life")


async def test_so_it_is_by_who_enters_it_itself(near, tmp_path, asked, monkeypatch):
    monkeypatch.setattr(access, "is_another", lambda there, address: False)
    async with serving(tmp_path):
        near.keeper = Keeping(ticket(member(tmp_path / "s.sock")))
        async with Fleet.current("life") as fleet:
            assert await rollout(fleet) == 0
        near.keeper = Keeping(replace(ticket(member(tmp_path / "s.sock"), authority="of another"), token="another"))
        for _ in range(2):
            async with Fleet.current("life") as fleet:
                assert await rollout(fleet) == 0
        assert len(asked) == 2
        outdated = ticket(member(tmp_path / "s.sock")).to_json()
        with pytest.raises(untax.PoolClosed, match="there is another of this name now"):
            await Fleet.from_ticket(outdated).start()  # whoever names a fleet means that one
        assert len(asked) == 2


async def test_a_fleet_that_is_taken_down_while_it_is_used_is_asked_for_anew(near, tmp_path, asked):
    async with serving(tmp_path):
        near.keeper = first = Keeping(ticket(member(tmp_path / "s.sock")))
        handle = Fleet.current("life")
        assert await rollout(handle) == 0
        near.keeper, first.is_dead = Keeping(replace(ticket(member(tmp_path / "s.sock"), authority="of another"), token="another")), True
        shared = handles.there(handle._key)
        await until(lambda: shared._down is not None)
        with pytest.raises(untax.PoolClosed, match="there is another of this name now"):
            await rollout(handle)  # it was the other's
        fresh = Fleet.current("life")
        assert await rollout(fresh) == 0
        assert len(asked) == 2
        await shared.aclose()
        await (await fresh._ready()).aclose()


async def test_a_ticket_that_is_kept_has_the_nodes_that_were_told_of_since(near, tmp_path, asked):
    async with serving(tmp_path):
        here, later = member(tmp_path / "s.sock"), member(tmp_path / "s.sock", "later")
        near.keeper = Keeping(ticket(here))
        handle = Fleet.current("life")
        assert await rollout(handle) == 0
        near.keeper.rolls.append(Roll(1, (here, later), ()))
        await until(lambda: len(handle.members) == 2)
        assert {one.node_id for one in Fleet.current("life").members} == {"here", "later"}
        assert tickets.current("life")[0].members == (here, later)
        await (await handle._ready()).aclose()


# ---- Ray's head is away ----


async def test_a_handle_begins_with_the_nodes_of_its_ticket_while_rays_head_is_away(near, tmp_path, monkeypatch):
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"))
        there, near.keeper = Keeping(said), None
        is_away = threading.Event()

        def find_keeper(name):
            if not is_away.is_set():
                raise access.away(TimeoutError("timeout in getting the actor handle"))
            return there

        monkeypatch.setattr(access, "find_keeper", find_keeper)
        async with Fleet.from_ticket(said.to_json()) as fleet:
            assert await rollout(fleet) == 0
            is_away.set()
            there.rolls.append(Roll(1, said.members, (), 2))
            await until(lambda: fleet.wanted == 2)


async def test_where_none_of_them_answers_either_that_is_said(near, tmp_path, monkeypatch):
    monkeypatch.setattr(access, "find_keeper", failing_now(access.away(TimeoutError("timeout"))))
    with pytest.raises(untax.BackendError, match=r"no node of the fleet 'life' .* answers, nor does Ray's head: .*`ray status`"):
        await Fleet.from_ticket(ticket(member(tmp_path / "nobody")).to_json()).start()
    with pytest.raises(untax.BackendError, match=r"Ray's head does not answer"):
        await Fleet.from_ticket(ticket().to_json()).start()
    assert near.users == 0


def failing_now(exc):
    def fail(*_):
        raise exc

    return fail


# ---- another cluster ----


async def test_a_handle_in_a_process_of_another_cluster_says_so(near, monkeypatch, tmp_path):
    monkeypatch.setattr(access, "connect", lambda address, **_: setattr(near, "users", near.users + 1) or "elsewhere:1")
    monkeypatch.setattr(access, "is_another", lambda there, address: there != address)
    for keeper in (None, Keeping(ticket(authority="of another"))):
        near.keeper = keeper
        with pytest.raises(
            untax.UsageError, match=r"connected to the Ray cluster at elsewhere:1, and this handle is of a fleet 'life' on that at head:1"
        ):
            await Fleet.from_ticket(ticket(member(tmp_path / "nobody")).to_json()).start()
    assert near.users == 0


@pytest.mark.parametrize("is_started", [True, False])
async def test_a_ticket_of_the_own_cluster_is_renewed_also_where_its_head_is_another_now(near, tmp_path, monkeypatch, asked, is_started):
    """What its address leads to now is silent, which says nothing of a cluster that this process is part of."""
    async with serving(tmp_path):
        near.keeper = Keeping(ticket(member(tmp_path / "s.sock")))
        async with Fleet.current("life") as first:
            assert await rollout(first) == 0
        monkeypatch.setattr(access, "is_another", lambda *_: True)
        near.keeper = Keeping(replace(ticket(member(tmp_path / "s.sock"), authority="of another"), token="another", ray_address="head:2"))
        handle, later = (Fleet.current("life") for _ in range(2))  # the second one's ticket is forgotten by the time that it begins
        for fleet in (handle, later):
            if is_started:
                async with fleet:
                    assert await rollout(fleet) == 0
            else:
                assert await rollout(fleet) == 0
        if not is_started:
            await (await handle._ready()).aclose()


# ---- blocking handles ----


def test_a_blocking_handle_is_made_of_a_ticket_as_an_unpickled_one_is(near, elsewhere):
    said = ticket(member(elsewhere.path))
    near.keeper = Keeping(said)
    handle = BlockingFleet.from_ticket(said.to_json())
    assert handle is blocking_handle(said.to_json()) and handle.members == said.members
    with handle.lease() as box:
        assert box.run(["true"]).exit_code == 0
    handle.aclose()


def test_a_handle_that_waits_for_ray_keeps_no_other_from_being_unpickled(near, elsewhere):
    said = ticket(member(elsewhere.path))
    near.keeper = Keeping(said)
    near.gate.clear()
    first = blocking_handle(said.to_json())
    using = threading.Thread(target=lambda: first.acquire().release())
    using.start()
    try:
        assert near.is_waited_for.wait(30)
        made = []
        other = threading.Thread(target=lambda: made.append(blocking_handle(replace(said, token="another").to_json())))
        other.start()
        other.join(5)
        assert made and made[0] is not first
    finally:
        near.gate.set()
        using.join()
        first.aclose()
    made[0].aclose()
    assert near.users == 0


# ---- a program that has left its cluster ----


async def test_a_program_that_shut_ray_down_closes_its_fleet_and_starts_no_cluster(near, tmp_path):
    async with serving(tmp_path):
        near.keeper = Keeping(ticket(member(tmp_path / "s.sock")))
        async with Fleet(name="life") as fleet:
            fleet._joining.is_maker = True
            assert await rollout(fleet) == 0
            near.is_connected = near.is_asked = False
        assert not near.is_asked and not near.keeper.was_taken_down and near.users == 0


async def test_a_program_that_shut_ray_down_leases_on_and_hears_again_when_it_is_back(near, tmp_path, monkeypatch):
    async with serving(tmp_path):
        here = member(tmp_path / "s.sock")
        near.keeper = first = Keeping(ticket(here))
        monkeypatch.setattr(access, "find_keeper", lambda name: access._check_connected(name) or near.keeper)
        async with Fleet.from_ticket(ticket(here).to_json()) as fleet:
            near.is_connected = False
            near.is_asked, first.is_dead, near.keeper = False, True, Keeping(ticket(here))
            await asyncio.sleep(0.1)  # it looks every hundredth of a second
            assert await rollout(fleet) == 0 and not near.is_asked
            near.is_connected = True
            near.keeper.rolls.append(Roll(7, (here.drained(),), ()))
            await until(lambda: fleet.members[0].is_draining)


async def test_whatever_ray_fails_with_a_fleet_is_followed_on(near, tmp_path, monkeypatch):
    async with serving(tmp_path):
        here = member(tmp_path / "s.sock")
        near.keeper = Keeping(ticket(here))
        near.keeper.rolls.append(Roll(1, (here,), ()))
        async with Fleet.from_ticket(ticket(here).to_json()) as fleet:
            await until(lambda: fleet._roll.version == 1)
            failed = []
            with monkeypatch.context() as patched:

                async def answer(self, name, *_):
                    failed.append(name)
                    raise AttributeError("core_worker")

                patched.setattr(Keeping, "_answer", answer)
                near.keeper.rolls.append(Roll(2, (here,), ()))
                await until(lambda: failed.count("members") >= 2 and "instance" in failed)
            near.keeper.rolls.append(Roll(3, (here.drained(),), ()))
            await until(lambda: fleet.members[0].is_draining)


# ---- fleets that follow each other under one name ----


async def test_a_handle_of_a_fleet_that_was_replaced_says_so_when_it_begins(near, tmp_path):
    near.keeper = Keeping(ticket(authority="of another"))
    for members in ((), (member(tmp_path / "nobody"),)):
        with pytest.raises(untax.PoolClosed, match="there is another of this name now: get a new handle"):
            await Fleet.from_ticket(ticket(*members).to_json()).start()
    assert near.users == 0


async def test_a_fleet_that_is_replaced_while_it_is_used_says_so(near, tmp_path):
    async with serving(tmp_path) as service:
        said = ticket(member(tmp_path / "s.sock"))
        near.keeper = first = Keeping(said)
        async with Fleet.from_ticket(said.to_json()) as fleet:
            assert await rollout(fleet) == 0
            near.keeper, first.is_dead = Keeping(ticket(authority="of another")), True
            await until(lambda: fleet._following.done())
            with pytest.raises(untax.PoolClosed, match="there is another of this name now"):
                await fleet.acquire()
        assert service.leases == 0


async def test_a_keeper_that_is_started_again_is_followed(near, tmp_path):
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"))
        near.keeper = first = Keeping(said)
        async with Fleet.from_ticket(said.to_json()) as fleet:
            near.keeper, first.is_dead = Keeping(said), True
            near.keeper.rolls = [Roll(7, (said.members[0].drained(),), ())]
            await until(lambda: fleet.members[0].is_draining)


async def test_a_fleet_is_brought_up_where_the_one_that_was_found_was_about_to_go(near, tmp_path, monkeypatch):
    near.keeper = dying = Keeping(ticket())
    dying.is_dead = True
    made = Keeping(ticket(member(tmp_path / "s.sock")))
    finds = []

    def start_keeper(*_, **__):
        finds.append(None)
        return (dying, False) if len(finds) < 3 else (made, True)

    monkeypatch.setattr(access, "start_keeper", start_keeper)
    async with serving(tmp_path), Fleet(name="life") as fleet:
        assert await rollout(fleet) == 0
    assert made.was_taken_down and near.killed == [made]


# ---- a start that is cancelled ----


async def cancelled(near, work):
    """While Ray is being asked, which nothing can interrupt."""
    near.gate.clear()
    near.is_waited_for.clear()
    task = asyncio.ensure_future(work)
    await asyncio.to_thread(near.is_waited_for.wait)
    task.cancel()
    await asyncio.sleep(0.01)
    near.gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.to_thread(near.is_passed.wait)  # it came to something, whoever waited for it
    await asyncio.sleep(0.01)


async def entered(manager):
    async with manager:
        pytest.fail("it was to be cancelled")


@pytest.mark.parametrize("begin", [lambda: Fleet(name="life").start(), lambda: entered(operate.up("auto", Plan("life")))])
async def test_a_start_that_is_cancelled_while_it_connects_to_ray_lets_go_of_it(near, begin):
    await cancelled(near, begin())
    assert near.users == 0 and near.keeper is None


@pytest.mark.parametrize("begin", [lambda: Fleet(name="life").start(), lambda: entered(operate.up("auto", Plan("life")))])
async def test_a_start_that_is_cancelled_while_the_keeper_is_made_takes_it_down(near, begin, monkeypatch):
    monkeypatch.setattr(access, "connect", lambda address, **_: setattr(near, "users", near.users + 1) or address)
    await cancelled(near, begin())
    assert near.users == 0
    assert near.keeper.was_taken_down and near.killed == [near.keeper]


# ---- who is there ----


class Scripted(NodeEngine):
    """Whose greeting takes a turn of its own for each node; `None` lets it be."""

    greetings: ClassVar = {}
    begun: ClassVar = []

    def __init__(self, member, ticket, *, is_here, clock):  # every one of them has a socket
        super().__init__(member, ticket, is_here=True, clock=clock)

    async def start(self):
        self.begun.append(self.member.node_id)
        greeting = self.greetings.get(self.member.node_id)
        if greeting is not None:
            await greeting()
        await super().start()


def failing(exc):
    async def greeting():
        raise exc

    return greeting


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(Scripted, "greetings", {})
    monkeypatch.setattr(Scripted, "begun", [])
    monkeypatch.setattr(Fleet, "node_class", Scripted)
    return Scripted


@pytest.mark.parametrize(
    "exc", [untax.ProtocolError("a greeting without its fields"), untax.UsageError("a stranger"), RuntimeError("whatever it is")]
)
async def test_a_node_that_does_not_greet_as_it_should_is_tried_again_and_the_others_are_heard_of(near, scripted, tmp_path, exc):
    async with serving(tmp_path):
        here, odd = member(tmp_path / "s.sock"), member(tmp_path / "s.sock", "odd")
        said = ticket(here)
        near.keeper = Keeping(said)
        scripted.greetings["odd"] = failing(exc)
        async with Fleet.from_ticket(said.to_json()) as fleet:
            near.keeper.rolls.append(Roll(1, (here, odd), ()))
            await until(lambda: scripted.begun.count("odd") >= 3)
            near.keeper.rolls.append(Roll(2, (here.drained(),), ()))
            await until(lambda: fleet.members[0].is_draining)
            assert not fleet._following.done()


async def test_a_node_that_speaks_another_protocol_does_not_keep_a_fleet_from_starting(near, scripted, tmp_path):
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"), member(tmp_path / "s.sock", "odd"))
        near.keeper = Keeping(said)
        scripted.greetings["odd"] = failing(untax.ProtocolError("another protocol"))
        async with Fleet.from_ticket(said.to_json()) as fleet:
            assert await rollout(fleet) == 0


async def test_a_stranger_where_a_node_was_keeps_no_fleet_from_starting_that_another_node_has_let_in(near, scripted, tmp_path):
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"), member(tmp_path / "s.sock", "other"), member(tmp_path / "s.sock", "odd"))
        near.keeper = Keeping(said)
        scripted.greetings["odd"] = failing(untax.UsageError("another certificate"))
        async with Fleet.from_ticket(said.to_json()) as fleet:
            assert sorted(node for node, _ in fleet._nodes) == ["here", "other"]
            assert await rollout(fleet) == 0


async def test_where_nobody_but_the_own_node_lets_it_in_the_handle_is_the_stranger(near, scripted, tmp_path):
    """A socket asks for no token: that node would serve a handle of any fleet."""
    async with serving(tmp_path):
        said = ticket(member(tmp_path / "s.sock"), member(tmp_path / "s.sock", "odd"))
        near.keeper = Keeping(said)
        scripted.greetings["odd"] = failing(untax.UsageError("another token"))
        with pytest.raises(untax.UsageError, match=r"node odd: another token.* get a new handle"):
            await Fleet.from_ticket(said.to_json()).start()


async def test_a_node_is_met_once_however_many_meet_it(near, scripted, tmp_path):
    async with serving(tmp_path) as service:
        here, slow = member(tmp_path / "s.sock"), member(tmp_path / "s.sock", "slow")
        said = ticket(here)
        near.keeper = Keeping(said)
        async with Fleet.from_ticket(said.to_json()) as fleet:
            gate = asyncio.Event()
            scripted.greetings["slow"] = gate.wait
            near.keeper.rolls.append(Roll(1, (here, slow), ()))
            await until(lambda: "slow" in scripted.begun)
            other = asyncio.ensure_future(fleet._meet((here, slow)))
            await asyncio.sleep(0.01)
            gate.set()
            await other
            await until(lambda: slow.key in fleet._nodes)
            assert scripted.begun.count("slow") == 1
        assert not service.sessions


async def test_a_node_that_leaves_while_it_is_met_is_not_kept(near, scripted, tmp_path):
    async with serving(tmp_path) as service:
        here, slow = member(tmp_path / "s.sock"), member(tmp_path / "s.sock", "slow")
        near.keeper = Keeping(ticket(here))
        async with Fleet.from_ticket(ticket(here).to_json()) as fleet:
            gate = asyncio.Event()
            scripted.greetings["slow"] = gate.wait
            meeting = asyncio.ensure_future(fleet._meet((here, slow)))
            await until(lambda: "slow" in scripted.begun)
            fleet._take(Roll(1, (here,), ()))
            gate.set()
            await meeting
            assert slow.key not in fleet._nodes
            await until(lambda: len(service.sessions) == 1)


async def test_a_node_that_left_while_a_lease_was_asked_of_it_is_over_when_that_has_failed(near, tmp_path):
    async with serving(tmp_path) as service:
        here = member(tmp_path / "s.sock")
        near.keeper = Keeping(ticket(here))
        async with Fleet.from_ticket(ticket(here).to_json()) as fleet:
            (node,) = fleet._nodes.values()
            service.drain()
            asking = asyncio.ensure_future(node.acquire())
            await asyncio.sleep(0)
            assert node.load == 1
            fleet._take(Roll(1, (), ()))
            with contextlib.suppress(untax.UntaxError):
                await asking
            await until(lambda: not fleet._left)
