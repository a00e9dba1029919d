"""Leases over several servers: to the nearest, to the next when that refuses, and with the reason in the ledger."""

import asyncio
import contextlib
import json
import math
import time

import pytest
from tests.unit.server.test_service import until

import untax
from untax.cluster import attention, ladders
from untax.cluster import placing as module
from untax.cluster.placing import Placing
from untax.cluster.view import Views
from untax.leases import Bindings, checked
from untax.pool.options import PoolOptions
from untax.server import view as server_view
from untax.server.service import Service
from untax.server.unix import UnixListener
from untax.testing import FakeSubstrate


class Nodes:
    def __init__(self, placing, services, engines):
        self.placing, self.services, self.engines = placing, services, engines

    def request(self, **bindings):
        return checked(next(iter(self.engines.values())).offer, None, Bindings(**bindings))

    async def lease(self, **bindings):
        return await self.placing.fulfil(self.request(**bindings))


@contextlib.asynccontextmanager
async def nodes(tmp_path, names="abc", *, here=None, **options):
    """As many servers in this process, each with an engine on a fake substrate, all followed."""
    async with contextlib.AsyncExitStack() as stack:
        placing = Placing(here=here)
        services, engines = {}, {}
        for name in names:
            engine = await stack.enter_async_context(untax.Engine(FakeSubstrate(), pool=PoolOptions(**options)))
            services[name] = service = Service(engine)
            listener = UnixListener(service, tmp_path / f"{name}.sock")
            listener.start()
            stack.callback(listener.close)
            stack.push_async_callback(service.aclose)
            engines[name] = await stack.enter_async_context(untax.connect(f"unix:{listener.path}"))
            placing.follow(name, engines[name])
        stack.push_async_callback(placing.aclose)
        await until(lambda: all(len(service.views._watchers) == 1 for service in services.values()))
        yield Nodes(placing, services, engines)


async def test_a_lease_goes_where_a_sandbox_is_idle_and_says_why(tmp_path):
    async with nodes(tmp_path, here="a") as fleet:
        await fleet.engines["b"].warm(n=1)
        fleet.placing.wake()
        await until(lambda: sum(fleet.placing.views.view("b").idle.values()) == 1)
        for node in "abc":  # a fake is made more quickly than anything is guessed to be bound
            fleet.placing.views.told(node, {"costs": {"by_name": {"create": 0.05}, "by_key": {}}})

        box = await fleet.lease()

        assert box.ledger.hit.kind == "exact"
        assert box.ledger.placed.node == "b"
        assert "idle with the image stage on b" in box.ledger.placed.why and "next: create over" in box.ledger.placed.why
        assert box.ledger.placed.tried == ()
        assert "placed: b: idle" in str(box.ledger)
        await box.release()
        assert json.loads(box.ledger.to_json())["placed"]["node"] == "b"
        [theirs] = await fleet.engines["b"].ledgers()
        assert theirs["placed"] == json.loads(box.ledger.to_json())["placed"]


async def test_the_next_leases_node_is_found_once_it_is_quiet_and_not_at_every_word(tmp_path, monkeypatch):
    found = []
    monkeypatch.setattr(Views, "foresee", lambda self, spec, real=Views.foresee: (found.append(spec), real(self, spec)))
    async with nodes(tmp_path) as fleet:
        await (await fleet.lease()).release()
        await until(lambda: found)
        before = len(found)
        for _ in range(50):
            fleet.placing._stirred()
        assert len(found) == before
        await until(lambda: len(found) > before)
        assert fleet.placing.views.foreseen(found[-1]) is not None


async def test_the_node_that_the_next_lease_is_likely_to_go_to_is_woken_and_no_other(tmp_path, monkeypatch):
    woken = []
    async with nodes(tmp_path) as fleet:
        fleet.placing.stir()  # nothing was asked for yet
        await (await fleet.lease()).release()
        await until(lambda: fleet.placing.views.foreseen(fleet.placing._last))
        for name, engine in fleet.engines.items():
            monkeypatch.setattr(engine, "stir", lambda name=name: woken.append(name))
        fleet.placing.stir()
        assert woken == [fleet.placing.views.foreseen(fleet.placing._last).node]


async def test_without_a_reason_for_another_it_is_the_callers_own_node(tmp_path):
    async with nodes(tmp_path, here="c") as fleet:
        for node in "abc":  # on a busy machine a way may seem long, which is a reason
            fleet.placing.views.linked(node, 0.0001)
        box = await fleet.lease()
        assert box.ledger.placed.node == "c"
        await box.release()


async def test_a_burst_is_spread_over_what_is_idle_everywhere(tmp_path):
    async with nodes(tmp_path, here="a") as fleet:
        await asyncio.gather(*(engine.warm(n=3) for engine in fleet.engines.values()))
        fleet.placing.wake()
        await until(lambda: all(sum(fleet.placing.views.view(node).idle.values()) == 3 for node in "abc"))
        for node in "abc":  # a fake is made more quickly than anything is guessed to be bound
            fleet.placing.views.told(node, {"costs": {"by_name": {"create": 0.05}, "by_key": {}}})

        boxes = await asyncio.gather(*(fleet.lease() for _ in range(9)))

        assert [box.ledger.hit.kind for box in boxes] == ["exact"] * 9
        assert sorted(box.ledger.placed.node for box in boxes) == sorted("aaabbbccc")
        await asyncio.gather(*(box.release() for box in boxes))


async def test_a_node_that_refuses_is_passed_over_and_named(tmp_path):
    async with nodes(tmp_path, here="a", entries=1) as fleet:
        fleet.services["a"].views._push = lambda: None  # it tells no more
        other = await fleet.engines["a"].acquire()  # somebody else's, of which the next lease has not heard
        for node in "abc":  # on a busy machine a way may seem long, and another node be asked first
            fleet.placing.views.linked(node, 0.0001)

        box = await fleet.lease()

        [(node, said)] = box.ledger.placed.tried
        assert node == "a" and "1 sandboxes are leased" in said
        assert box.ledger.placed.node in "bc"
        assert f"before that a: {said}" in str(box.ledger)
        await box.release()
        await other.release()


async def test_a_draining_node_gets_no_lease(tmp_path):
    async with nodes(tmp_path, "ab", here="a") as fleet:
        fleet.services["a"].drain()
        boxes = [await fleet.lease() for _ in range(3)]
        assert {box.ledger.placed.node for box in boxes} == {"b"}
        await asyncio.gather(*(box.release() for box in boxes))


async def test_when_all_are_full_it_waits_at_one_and_is_served_when_that_has_room(tmp_path):
    async with nodes(tmp_path, "ab", entries=1) as fleet:
        first, second = await fleet.lease(), await fleet.lease()
        assert {first.ledger.placed.node, second.ledger.placed.node} == {"a", "b"}
        waiting = asyncio.ensure_future(fleet.lease(wait_s=20.0))
        await until(lambda: any(service.engine.pooling.driver.state.waiting for service in fleet.services.values()))
        await asyncio.gather(first.release(), second.release())
        third = await waiting
        assert {node for node, _ in third.ledger.placed.tried} <= {"a", "b"}
        await third.release()


async def test_a_lease_that_waits_goes_where_one_has_ended_and_leaves_no_other(tmp_path):
    async with nodes(tmp_path, "ab", entries=1) as fleet:
        held = {box.ledger.placed.node: box for box in [await fleet.lease(), await fleet.lease()]}
        waiting = asyncio.ensure_future(fleet.lease(wait_s=20.0))
        await until(lambda: any(waiting_at(fleet)))
        [full] = waiting_at(fleet)
        [other] = {"a", "b"} - {full}
        await held[other].release()
        box = await waiting
        assert box.ledger.placed.node == other
        await until(lambda: not waiting_at(fleet))
        assert fleet.services[full].leases == 1
        await asyncio.gather(box.release(), held[full].release())
        await until(lambda: not any(service.leases for service in fleet.services.values()))
        assert sum(service.ledgers_total for service in fleet.services.values()) == 3


async def test_those_who_wait_go_to_a_node_that_joins_as_many_as_it_has_room_for(tmp_path):
    async with nodes(tmp_path, "abc", entries=2) as fleet:
        fleet.placing.leave("c")
        held = [await fleet.lease() for _ in range(4)]
        waiting = [asyncio.ensure_future(fleet.lease(wait_s=20.0)) for _ in range(5)]
        await until(lambda: sum(service.engine.pooling.driver.state.waiting for service in fleet.services.values()) == 5)
        fleet.placing.follow("c", fleet.engines["c"])
        await until(lambda: sum(one.done() for one in waiting) == 2)
        came = [one.result() for one in waiting if one.done()]
        assert {box.ledger.placed.node for box in came} == {"c"}
        assert [one.done() for one in waiting] == [True, True, False, False, False]  # the oldest first
        await asyncio.gather(*(box.release() for box in (*held, *came)))
        rest = await asyncio.gather(*waiting[2:])
        await asyncio.gather(*(box.release() for box in rest))
        await until(lambda: not any(service.leases for service in fleet.services.values()))


def waiting_at(fleet):
    return {node for node, service in fleet.services.items() if service.engine.pooling.driver.state.waiting}


async def test_nobody_waits_longer_than_it_said(tmp_path):
    async with nodes(tmp_path, "ab", entries=1) as fleet:
        boxes = [await fleet.lease() for _ in range(2)]
        with pytest.raises(untax.PoolTimeout):
            await fleet.lease(wait_s=0.1)
        await asyncio.gather(*(box.release() for box in boxes))


async def silent(spec):
    await asyncio.Event().wait()


async def test_a_node_that_says_nothing_keeps_nobody_from_asking_another_what_a_spec_is(tmp_path, monkeypatch):
    monkeypatch.setattr(ladders, "_LADDER_S", 0.05)
    async with nodes(tmp_path, "abc", here="a") as fleet:
        fleet.engines["a"].ladder = fleet.engines["b"].ladder = silent
        box = await fleet.lease()
        assert box.ledger.wanted
        await box.release()


async def test_nobody_waits_longer_than_it_said_for_nodes_that_say_nothing(tmp_path):
    async with nodes(tmp_path, "ab") as fleet:
        fleet.engines["a"].ladder = fleet.engines["b"].ladder = silent
        with pytest.raises(untax.PoolTimeout, match="no node has said"):
            await fleet.lease(wait_s=0.1)


async def test_a_node_that_does_not_answer_is_asked_last_what_a_spec_is(tmp_path):
    async with nodes(tmp_path, "ab", here="a") as fleet:
        fleet.placing.views.lost("a", "for the test")
        fleet.engines["a"].ladder = silent
        await (await fleet.lease(wait_s=1.0)).release()


async def test_a_server_that_is_gone_is_left_and_leases_go_elsewhere(tmp_path):
    async with nodes(tmp_path, "ab", here="a") as fleet:
        await (await fleet.lease()).release()
        listener_path = tmp_path / "a.sock"
        listener_path.unlink()
        await fleet.services["a"].aclose()
        await until(lambda: "does not answer" in fleet.placing.views.left_out(fleet.request().spec).get("a", ""))

        box = await fleet.lease()

        assert box.ledger.placed.node == "b"
        await box.release()


async def test_when_no_node_can_take_it_each_says_what_it_lacks(tmp_path):
    async with nodes(tmp_path, "ab", memory_mib=2000.0) as fleet:
        with pytest.raises(untax.UsageError, match=r"node a: 4000 MiB do not fit its 2000 MiB.*node b: .*lower its limits"):
            await fleet.lease(limits=untax.Limits(memory_mib=4000))
        for service in fleet.services.values():
            service.drain()
        await until(lambda: all(fleet.placing.views.view(node).is_draining for node in "ab"))
        with pytest.raises(untax.SubstrateUnavailable, match=r"node a: it is draining; node b: it is draining"):
            await fleet.lease()


async def test_a_cancelled_lease_leaves_nothing_claimed(tmp_path):
    async with nodes(tmp_path, "a", entries=1) as fleet:
        box = await fleet.lease()
        claims = set(fleet.placing.views._nodes["a"].claims)
        waiting = asyncio.ensure_future(fleet.lease())
        await until(lambda: fleet.services["a"].engine.pooling.driver.state.waiting)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await until(lambda: not fleet.services["a"].engine.pooling.driver.state.waiting)
        assert set(fleet.placing.views._nodes["a"].claims) <= claims
        await box.release()
        await (await fleet.lease(wait_s=20.0)).release()


# ---- leases that wait ----


def waits(fleet):
    return next((name for name, service in fleet.services.items() if service.engine.pooling.driver.state.waiting), None)


def leases(fleet):
    return sum(service.leases for service in fleet.services.values())


@contextlib.asynccontextmanager
async def one_waits(tmp_path, **bindings):
    """Two full nodes: the one where a further lease waits, the other one, what they hold, and that lease."""
    async with nodes(tmp_path, "ab", entries=1) as fleet:
        held = {box.ledger.placed.node: box for box in [await fleet.lease(), await fleet.lease()]}
        waiting = asyncio.ensure_future(fleet.lease(**bindings))
        await until(lambda: waits(fleet))
        where = waits(fleet)
        await until(lambda: fleet.placing.views.view(where).waiting == 1 and fleet.placing._line._waiting)
        yield fleet, where, "b" if where == "a" else "a", held, waiting
        await asyncio.gather(*(box.release() for box in held.values()))


async def test_a_lease_that_waits_moves_to_a_node_that_has_room_now(tmp_path):
    async with one_waits(tmp_path, wait_s=20.0) as (fleet, where, other, held, waiting):
        await held.pop(other).release()
        box = await waiting

        assert box.ledger.placed.node == other
        assert box.ledger.placed.tried[-1] == (where, f"it had no room yet when {other} had")
        await until(lambda: not waits(fleet))
        assert leases(fleet) == 2
        await box.release()


async def test_a_lease_that_waits_and_is_refused_elsewhere_keeps_its_turn(tmp_path):
    """What a view says may be outdated by the time it is asked there."""
    async with one_waits(tmp_path, wait_s=20.0) as (fleet, where, other, held, waiting):
        asked = []
        fulfil = fleet.engines[other].fulfil

        async def counted(request, **how):
            try:
                return await fulfil(request, **how)
            except untax.LeaseRefused as exc:
                asked.append(exc.reason)
                raise

        fleet.engines[other].fulfil = counted

        def told_otherwise():
            fleet.placing.views.told(other, {"free_sandboxes": 2})
            fleet.placing._line.changed()
            return asked

        await until(told_otherwise)
        fleet.placing.views.told(other, {"free_sandboxes": 0})
        assert waits(fleet) == where and set(asked) == {"full"}
        await held.pop(where).release()
        box = await waiting

        assert box.ledger.placed.node == where
        await box.release()


@pytest.mark.parametrize("first", [0, 1])
async def test_however_two_nodes_come_to_have_room_it_is_one_lease_in_the_end(tmp_path, first):
    for turns in range(25):
        place = tmp_path / str(turns)
        place.mkdir()
        async with one_waits(place, wait_s=20.0) as (fleet, where, other, held, waiting):
            order = [held.pop(where), held.pop(other)]
            release = asyncio.ensure_future(order[first].release())
            for _ in range(turns):
                await asyncio.sleep(0)
            await asyncio.gather(release, order[1 - first].release())
            box = await waiting
            assert (await box.run(["true"])).exit_code == 0
            await until(lambda: not waits(fleet) and leases(fleet) == 1)
            await box.release()
            await until(lambda: not leases(fleet) and not any(engine._boxes for engine in fleet.engines.values()))
            assert not fleet.placing._line._waiting


async def test_a_waiting_lease_that_is_cancelled_while_it_moves_leaves_nothing(tmp_path):
    for turns in range(0, 40, 2):
        place = tmp_path / str(turns)
        place.mkdir()
        async with one_waits(place) as (fleet, _, other, held, waiting):
            await held.pop(other).release()
            for _ in range(turns):
                await asyncio.sleep(0)
            waiting.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await waiting).release()
            await until(lambda: not waits(fleet) and leases(fleet) == 1)
            assert not fleet.placing._line._waiting


async def test_a_lease_whose_node_fails_while_it_waits_there_is_placed_anew(tmp_path):
    async with one_waits(tmp_path, wait_s=20.0) as (fleet, where, other, held, waiting):
        lost = held.pop(where)
        (tmp_path / f"{where}.sock").unlink()
        await fleet.services[where].aclose()
        await until(lambda: waits(fleet) == other)  # in that one's line from now on
        await held.pop(other).release()
        box = await waiting

        assert box.ledger.placed.node == other
        assert where in dict(box.ledger.placed.tried)
        await box.release()
        await lost.release()


async def in_a_row(fleet, count):
    boxes = []
    for _ in range(count):
        box = await fleet.lease()
        await box.run(["true"])
        await box.release()
        boxes.append(box)
    return boxes


async def test_leases_in_a_row_come_from_the_hand_of_the_callers_own_node(tmp_path):
    """Nobody is asked for them, and the ledger says so."""
    async with nodes(tmp_path, here="b") as fleet:
        await asyncio.gather(*(engine.warm(n=8) for engine in fleet.engines.values()))
        fleet.placing.wake()
        await until(lambda: all(sum(fleet.placing.views.view(node).idle.values()) == 8 for node in "abc"))
        for node in "abc":  # a fake is made more quickly than anything is guessed to be bound
            fleet.placing.views.told(node, {"costs": {"by_name": {"create": 0.05}, "by_key": {}}})
        ranked = fleet.placing.views.rank
        while not fleet.engines["b"].has_in_hand:
            await in_a_row(fleet, 1)
        fleet.placing.views.rank = None  # not needed from here on

        boxes = await in_a_row(fleet, 5)

        assert {box.ledger.placed.node for box in boxes} == {"b"}
        assert all("in hand" in box.ledger.placed.why for box in boxes)
        fleet.placing.views.rank = ranked
        assert [one["placed"]["node"] for one in await fleet.engines["b"].ledgers()][-5:] == ["b"] * 5


async def test_a_node_that_had_nothing_idle_for_the_next_lease_is_known_to_have_nothing(tmp_path, brief):
    """What it told while its client rested is outdated, and the lease that follows at once goes where one is idle."""
    async with nodes(tmp_path, "ab", here="b") as fleet:
        for node in "ab":
            await fleet.engines[node].warm(n=3)
        while not fleet.engines["b"].has_in_hand:
            await in_a_row(fleet, 1)
        box = await fleet.lease()
        assert box.ledger.placed.node == "b"
        await until(lambda: resting(fleet) == {"a", "b"})
        for node in "ab":
            fleet.placing.views.told(node, {"idle": {box.ledger.wanted[-1].key: 3}, "costs": {"by_name": {"create": 2.0}, "by_key": {}}})
        gate = fleet.services["b"].engine.substrate.gates["create"] = asyncio.Event()  # what takes the place of these is long in coming
        async with untax.connect(fleet.engines["b"].url) as other:
            while (await other.pools()).stages[-1].idle:
                await other.acquire()

            await box.release()
            after = await asyncio.wait_for(fleet.lease(), 20)

            assert after.ledger.placed.node == "a" and after.ledger.hit.kind == "exact"
            gate.set()
            await after.release()


async def test_what_the_callers_own_node_is_making_already_is_waited_for_there_and_not_taken_from_another(tmp_path, monkeypatch):
    """On a full fleet leases would only change places, and their actions go further."""
    monkeypatch.setattr(module, "_COMING_S", 10.0)
    async with one_coming(tmp_path) as (fleet, box, gate):
        await box.release()
        asyncio.get_running_loop().call_later(0.1, gate.set)
        after = await asyncio.wait_for(fleet.lease(), 20)

        assert after.ledger.placed.node == "b" and after.ledger.placed.why == module._COMING
        assert after.ledger.hit.kind == "exact" and after.ledger.hit.waited_for == "a sandbox that was being made"
        assert not fleet.placing._coming
        await after.release()


async def test_what_is_made_and_does_not_come_is_not_waited_for_while_another_node_has_one(tmp_path):
    async with one_coming(tmp_path) as (fleet, box, gate):
        await box.release()
        after = await asyncio.wait_for(fleet.lease(), 20)

        assert after.ledger.placed.node == "a" and after.ledger.hit.kind == "exact"
        [(node, said)] = after.ledger.placed.tried
        assert node == "b" and "nothing became free" in said
        gate.set()
        await after.release()


async def test_who_comes_later_or_for_something_else_does_not_wait_for_what_is_being_made(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_COMING_S", 10.0)
    monkeypatch.setattr(module, "_COMES_S", 0.2)
    async with one_coming(tmp_path) as (fleet, box, gate):
        await box.release()
        other, tried = fleet.request(env={"OF": "another"}), {}
        assert await fleet.placing._soon(other, time.monotonic(), tried) is None and fleet.placing._coming
        fleet.placing.views.lost("b", "it does not answer")
        assert await fleet.placing._soon(fleet.request(), time.monotonic(), tried) is None and fleet.placing._coming
        await asyncio.sleep(0.21)
        fleet.placing.views.view("b").trouble = ""
        assert await fleet.placing._soon(fleet.request(), time.monotonic(), tried) is None and not fleet.placing._coming
        assert not tried
        gate.set()


@contextlib.asynccontextmanager
async def one_coming(tmp_path):
    """Of two nodes the caller's own has nothing idle, only what is being made until the gate opens, and the other has three. Gives a box of the own node."""
    async with nodes(tmp_path, "ab", here="b") as fleet:
        for node in "ab":
            await fleet.engines[node].warm(n=3)
        while not fleet.engines["b"].has_in_hand:
            await in_a_row(fleet, 1)
        box = await fleet.lease()
        assert box.ledger.placed.node == "b"
        gate = fleet.services["b"].engine.substrate.gates["create"] = asyncio.Event()
        async with untax.connect(fleet.engines["b"].url) as other:
            while (await other.pools()).stages[-1].idle:
                await other.acquire()
            fleet.services["b"].engine.pooling.driver.costs.hear({"create": 0.001}, {})  # however slow the machine is
            for node in "ab":
                fleet.placing.views.told(
                    node, {"idle": {box.ledger.wanted[-1].key: 3}, "costs": {"by_name": {"create": 2.0}, "by_key": {}}}
                )
            yield fleet, box, gate


async def test_a_claim_of_what_was_in_hand_by_then_is_settled(tmp_path):
    """Another lease may have brought it while this one was being placed: the node is asked nothing, and nothing stays claimed."""
    async with nodes(tmp_path, "a", here="a") as fleet:
        await fleet.engines["a"].warm(n=8)
        fleet.placing.wake()
        await until(lambda: sum(fleet.placing.views.view("a").idle.values()) == 8)
        while not fleet.engines["a"].has_in_hand:
            await in_a_row(fleet, 1)
        [best] = await fleet.placing.ranked(fleet.request().spec)

        box = await fleet.placing._ask(best, fleet.request(), {}, may_refuse=True)

        assert "in hand" in box.ledger.placed.why
        await box.release()
        assert not [one for one in fleet.placing.views._nodes["a"].claims if one.number is None]


@pytest.mark.parametrize(
    ("own", "other", "is_kept"),
    [
        ({}, {}, True),
        ({"busy": 0.9}, {"busy": 0.1}, False),
        ({"busy": 0.9}, {"busy": 0.8}, True),
        ({"leased": 7}, {"leased": 0}, True),
        ({"leased": 9}, {"leased": 0}, False),
        ({"is_draining": True}, {}, False),
        ({"busy": 0.9}, {"busy": 0.1, "is_draining": True}, True),
    ],
)
def test_the_next_lease_is_placed_anew_where_another_node_has_clearly_less_to_do(own, other, is_kept):
    views = Views(here="a")
    for node, said in (("a", own), ("b", other)):
        views.joined(node, isolation="none")
        views.told(node, {"cpus": 2, **said})
    assert views.favours("a") is views.favours("a") is is_kept
    assert views.favours("nobody") is False
    views.told("a", {"busy": 0.0, "leased": 0, "is_draining": False})
    assert views.favours("a") is True
    views.drained("a")
    assert views.favours("a") is False


# ---- who places nothing rests ----


@pytest.fixture
def brief(monkeypatch):
    """It rests soon, and what may be told later to who does is not told at all."""
    for one in (attention, module):
        monkeypatch.setattr(one, "REST_S", 0.02)
    monkeypatch.setattr(server_view, "_RESTING_S", 3600.0)


def resting(fleet):
    """As the nodes know it."""
    return {node for node, service in fleet.services.items() for told in service.views._watchers.values() if told.is_resting}


def claims(fleet):
    return [claim for node in fleet.services for claim in fleet.placing.views._nodes[node].claims]


def idle(fleet, node):
    return sum(fleet.placing.views.view(node).idle.values())


async def test_a_client_that_places_nothing_rests_and_one_that_does_is_told_what_has_changed(tmp_path, brief):
    """Also by the nodes to which the lease did not go."""
    async with nodes(tmp_path) as fleet:
        assert resting(fleet) == set("abc")  # it has placed nothing yet
        await (await fleet.lease()).release()
        await until(lambda: resting(fleet) == set("abc") and not claims(fleet))
        before = {node: idle(fleet, node) for node in "abc"}
        await asyncio.gather(*(engine.warm(n=5) for engine in fleet.engines.values()))
        await asyncio.sleep(3 * server_view._LATER_S)
        assert {node: idle(fleet, node) for node in "abc"} == before

        await (await fleet.lease()).release()

        await until(lambda: all(idle(fleet, node) >= 4 for node in "abc"))
        await until(lambda: resting(fleet) == set("abc"))


async def test_what_was_claimed_before_a_rest_is_settled(tmp_path, brief):
    """Nothing is taken for gone until the client looks again."""
    async with nodes(tmp_path) as fleet:
        for _ in range(5):
            await (await fleet.lease()).release()
        await until(lambda: resting(fleet) == set("abc") and not claims(fleet))


async def test_a_draining_node_is_known_to_a_client_at_rest(tmp_path, brief):
    async with nodes(tmp_path, "ab") as fleet:
        fleet.services["a"].drain()
        await until(lambda: fleet.placing.views.view("a").is_draining)
        assert resting(fleet) == set("ab")


async def test_who_waits_for_room_does_not_rest(tmp_path, brief):
    """A lease that waits moves to another node however long ago it was placed, since it hears of its room."""
    async with one_waits(tmp_path, wait_s=20.0) as (fleet, _, other, held, waiting):
        await asyncio.sleep(10 * attention.REST_S)
        assert resting(fleet) == set()
        await held.pop(other).release()
        box = await waiting
        assert box.ledger.placed.node == other
        await box.release()
        await until(lambda: resting(fleet) == set("ab"))


async def test_leases_from_the_hand_wake_nobody_and_one_among_them_that_is_asked_for_the_callers_own_node(tmp_path, monkeypatch):
    async with nodes(tmp_path, here="b") as fleet:
        await fleet.engines["b"].warm(n=8)
        while not fleet.engines["b"].has_in_hand:
            await in_a_row(fleet, 1)
        await until(lambda: resting(fleet) == set())
        for one in (fleet.placing._near, fleet.placing._far):
            monkeypatch.setattr(one, "_looked_s", -math.inf)
            one._look()  # as if it had been a while
        await until(lambda: resting(fleet) == set("abc"))

        boxes = await in_a_row(fleet, 5)
        await asyncio.sleep(0.05)
        assert resting(fleet) == set("abc")
        other = await fleet.lease(files={"of": b"its own"})

        assert all("in hand" in box.ledger.placed.why for box in boxes) and "in hand" not in other.ledger.placed.why
        await until(lambda: resting(fleet) == set("ac"))
        await until(lambda: not claims(fleet))  # the node that was asked has told it
        await other.release()


async def test_who_was_refused_looks_also_while_it_leases_from_its_hand(tmp_path):
    """What it went by was outdated."""
    async with nodes(tmp_path, "ab", here="a", entries=1) as fleet:
        fleet.services["a"].views._push = lambda: None  # it tells no more
        other = await fleet.engines["a"].acquire()
        fleet.placing._handed_s = asyncio.get_running_loop().time()

        box = await fleet.lease()

        assert [node for node, _ in box.ledger.placed.tried] == ["a"]
        await until(lambda: resting(fleet) == set())
        await box.release()
        await other.release()


async def test_a_node_that_joins_is_told_whether_its_client_rests(tmp_path):
    async with nodes(tmp_path) as fleet:
        for is_resting in (True, False):
            fleet.placing.leave("c")
            await until(lambda: not fleet.services["c"].views._watchers)
            fleet.placing.follow("c", fleet.engines["c"])
            await until(lambda: fleet.services["c"].views._watchers)
            assert ("c" in resting(fleet)) is is_resting
            fleet.placing.wake()
