"""Who keeps a fleet, and the actors of its nodes: what they make of nodes that hang, of deaths, and of each other under one name."""

import asyncio
import json

import pytest

pytest.importorskip("ray", reason="ray: not installed; pip install 'untax[ray]'")

from tests.unit.cluster.fakeray import FakeRay, agents

from untax.cluster import actors, autoscaler, drains, gauge, resident, scaler
from untax.cluster.actors import Keeper, keeper_name
from untax.cluster.plan import Plan
from untax.cluster.resident import NodeActor, is_forerunner, node_actor_name
from untax.cluster.scaling import Scaling
from untax.cluster.terms import Roll, Ticket
from untax.cluster.trust import Trust

NAME = "fleet"
TRUST = Trust.new(NAME)


@pytest.fixture
async def ray(monkeypatch):
    fake = FakeRay()
    monkeypatch.setattr(actors, "ray", fake)
    monkeypatch.setattr(resident, "ray", fake)
    monkeypatch.setattr(drains, "internal_kv", fake.internal_kv)
    monkeypatch.setattr(autoscaler, "ask", fake.ask)
    monkeypatch.setattr(resident, "_take_priority", lambda: None)
    monkeypatch.setattr(resident, "Apart", agents())
    monkeypatch.setattr(actors, "NodeAffinitySchedulingStrategy", lambda *_, **__: None)  # which takes ids as Ray makes them
    for module, name in ((actors, "LOOK_S"), (actors, "AGAIN_S"), (resident, "LOOK_S"), (resident, "AGAIN_S")):
        monkeypatch.setattr(module, name, 0.01)
    fake.agents = resident.Apart
    yield fake
    for handle in list(fake.named.values()):
        handle.die()
    await asyncio.sleep(0)
    fake.loop.set_task_factory(None)


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def keeper(ray, trust=TRUST):
    return ray.make(Keeper, Plan(NAME), trust, "head:1", name=keeper_name(NAME))


async def ticket_of(keeper):
    return Ticket.from_json(await keeper.ticket.remote())


async def roll_of(keeper):
    return Roll.from_json(await keeper.members.remote(-1))


async def rolls_until(keeper, condition):
    roll = await roll_of(keeper)
    while not condition(roll):
        roll = Roll.from_json(await keeper.members.remote(roll.version))
    return roll


# ---- fleets that follow each other under one name ----


async def test_the_next_fleet_of_a_name_has_agents_of_its_own_and_ends_those_of_the_one_before(ray):
    ray.join("a")
    first = keeper(ray)
    old = await ticket_of(first)
    first.die()
    other = Trust.new(NAME)

    second = await ticket_of(keeper(ray, other))

    assert second.instance != old.instance
    (member,) = second.members
    assert ray.agents.there["a"].post.token == other.token != old.token
    assert member.key != old.members[0].key
    assert [one.post.token for one in ray.agents.made] == [old.token, other.token]


async def test_a_keeper_that_is_started_again_finds_its_agents(ray):
    ray.join("a")
    first = keeper(ray)
    members = (await ticket_of(first)).members
    first.die()
    assert (await ticket_of(keeper(ray))).members == members
    assert len(ray.agents.made) == 1


async def test_an_agent_does_not_take_the_keeper_of_the_next_fleet_for_its_own(ray):
    ray.join("a")
    await ticket_of(keeper(ray))
    name = node_actor_name(NAME, "of-another", "b")
    ray.make(NodeActor, NAME, "of-another", name=name)
    await until(lambda: name in ray.killed)


def test_only_actors_of_earlier_fleets_on_the_same_node_are_forerunners():
    assert is_forerunner(node_actor_name(NAME, "old", "a"), NAME, "new", "a")
    for name in (
        node_actor_name(NAME, "new", "a"),
        node_actor_name(NAME, "old", "b"),
        node_actor_name("other", "old", "a"),
        keeper_name(NAME),
        "somebody's",
    ):
        assert not is_forerunner(name, NAME, "new", "a")


# ---- whoever keeps it dies ----


async def test_an_actor_whose_keeper_dies_before_it_has_an_agent_ends(ray):
    ray.join("a")
    ray.agents.hanging["a"] = asyncio.Event()
    first = keeper(ray)
    await until(lambda: len(ray.named) == 2)
    (actor,) = (handle for name, handle in ray.named.items() if name != first.name)
    first.die()
    ray.agents.hanging["a"].set()
    await until(lambda: actor.name in ray.killed)
    assert not ray.agents.there


async def test_an_actor_that_hangs_when_its_keeper_is_dead_is_killed(ray, monkeypatch):
    monkeypatch.setattr(resident, "END_S", 0.05)
    ray.join("a")
    ray.agents.hanging["a"] = asyncio.Event()
    first = keeper(ray)
    await until(lambda: len(ray.named) == 2)
    (actor,) = (handle for name, handle in ray.named.items() if name != first.name)
    await until(lambda: actor.tasks and ray.agents.hanging["a"]._waiters)
    first.die()
    await until(lambda: actor.name in ray.killed)


async def test_an_actor_whose_agent_cannot_end_is_killed_all_the_same(ray):
    ray.join("a")
    first = keeper(ray)
    await ticket_of(first)
    ray.agents.cannot_end = True
    first.die()
    await until(lambda: len(ray.killed) == 2)


async def test_an_actor_that_was_ended_and_whose_keeper_dies_before_it_kills_it_goes_too(ray):
    ray.join("a")
    first = keeper(ray)
    await ticket_of(first)
    (actor,) = (handle for name, handle in ray.named.items() if name != first.name)
    await actor.end.remote()
    assert "ending" in (await actor.begin.remote(Plan(NAME), None))["refused"]
    first.die()
    await until(lambda: actor.name in ray.killed)


# ---- a node that hangs ----


async def test_one_node_that_hangs_holds_nobody_up(ray, monkeypatch):
    monkeypatch.setattr(actors, "_SETTLE_S", 0.05)
    ray.join("a")
    ray.join("stuck")
    ray.agents.hanging["stuck"] = asyncio.Event()
    there = keeper(ray)

    assert [one.node_id for one in (await ticket_of(there)).members] == ["a"]

    assert [(one.node_id, one.reason) for one in (await roll_of(there)).refusals] == [("stuck", "its agent has not started yet")]
    ray.join("later")
    await rolls_until(there, lambda roll: {one.node_id for one in roll.members} == {"a", "later"})
    del ray.alive["a"]
    await rolls_until(there, lambda roll: {one.node_id for one in roll.members} == {"later"})
    ray.agents.hanging.pop("stuck").set()
    await rolls_until(there, lambda roll: {one.node_id for one in roll.members} == {"later", "stuck"})


async def test_where_the_first_one_is_slow_the_others_have_longer(ray, monkeypatch):
    """On a machine that is busy they all are, and whoever brings a fleet up means all of its nodes."""
    monkeypatch.setattr(actors, "_SETTLE_S", 0.05)
    gates = {}
    for name in ("first", "second"):
        ray.join(name)
        gates[name] = ray.agents.hanging[name] = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.call_later(0.3, gates["first"].set)
    loop.call_later(0.5, gates["second"].set)
    assert {one.node_id for one in (await ticket_of(keeper(ray))).members} == {"first", "second"}


async def test_a_node_joins_while_the_only_other_one_hangs(ray):
    ray.join("stuck")
    ray.agents.hanging["stuck"] = asyncio.Event()
    there = keeper(ray)
    await until(lambda: there.actor._settling is not None)
    ray.join("later")
    await until(lambda: "later" in ray.agents.there)


async def test_a_node_that_joins_is_enough_while_the_only_other_one_hangs(ray, monkeypatch):
    monkeypatch.setattr(actors, "_SETTLE_S", 0.05)
    monkeypatch.setattr(actors, "LOOK_S", 0.01)
    ray.join("stuck")
    ray.agents.hanging["stuck"] = asyncio.Event()
    there = keeper(ray)
    await until(lambda: there.actor._settling is not None)
    ray.join("later")
    assert [one.node_id for one in (await ticket_of(there)).members] == ["later"]


async def test_an_agent_that_does_not_start_is_ended_and_tried_again(ray, monkeypatch):
    monkeypatch.setattr(actors, "_BEGIN_S", 0.05)
    ray.join("stuck")
    ray.agents.hanging["stuck"] = asyncio.Event()
    there = keeper(ray)
    (refusal,) = (await rolls_until(there, lambda roll: roll.refusals)).refusals
    assert "did not start within 0.05 s" in refusal.reason
    await until(lambda: node_actor_name(NAME, there.actor._instance, "stuck") in ray.killed)
    ray.agents.hanging.pop("stuck")
    await rolls_until(there, lambda roll: roll.members)


async def test_an_agent_that_does_not_answer_is_left_as_it_is(ray, monkeypatch):
    """The same, where it has a keeper that was started again: its actor answers, and its leases are not."""
    monkeypatch.setattr(actors, "_ANSWER_S", 0.05)
    monkeypatch.setattr(actors, "_BEGIN_S", 0.05)
    ray.join("stuck")
    first = keeper(ray)
    members = (await ticket_of(first)).members
    ray.agents.silent["stuck"] = asyncio.Event()
    first.die()
    second = keeper(ray)
    (refusal,) = (await rolls_until(second, lambda roll: roll.refusals)).refusals
    assert "does not answer within 0.05 s" in refusal.reason
    assert node_actor_name(NAME, second.actor._instance, "stuck") not in ray.killed
    ray.agents.silent.pop("stuck").set()
    assert (await rolls_until(second, lambda roll: roll.members)).members == members


async def test_an_actor_goes_with_its_agent(ray, monkeypatch):
    """At once: Ray's head, which ends actors on request, may be away."""
    ended = []
    monkeypatch.setattr(resident, "_exit", ended.append)
    ray.join("a")
    await ticket_of(keeper(ray))
    ray.agents.there["a"].on_end()
    assert ended == [1]


async def test_an_actor_that_does_not_answer_is_left_as_it_is(ray, monkeypatch):
    """It may be one with leases, of a machine that is too busy to answer."""
    monkeypatch.setattr(actors, "_ANSWER_S", 0.05)
    monkeypatch.setattr(NodeActor, "version", NodeActor.forever)
    ray.join("stuck")
    (refusal,) = (await rolls_until(keeper(ray), lambda roll: roll.refusals)).refusals
    assert "does not answer within 0.05 s" in refusal.reason
    assert not ray.killed


async def test_whatever_goes_wrong_with_a_node_is_a_refusal_of_it(ray, monkeypatch):
    identity_for = Trust.identity_for

    def picky(trust, address):
        if "odd" in address:
            raise ValueError("no certificate for that")
        return identity_for(trust, address)

    monkeypatch.setattr(Trust, "identity_for", picky)
    ray.join("a")
    ray.join("odd")
    there = keeper(ray)
    assert [one.node_id for one in (await ticket_of(there)).members] == ["a"]
    assert [(one.node_id, one.reason) for one in (await roll_of(there)).refusals] == [("odd", "ValueError: no certificate for that")]


async def test_an_agent_that_hears_nothing_does_not_keep_news_from_the_others(ray, monkeypatch):
    monkeypatch.setattr(actors, "_TELL_S", 0.05)
    told = []

    async def meet(actor, roll):
        told.append((actor._agent.post.node_id, {one["node_id"] for one in json.loads(roll)["members"]}))
        if actor._agent.post.node_id == "deaf":
            await asyncio.Event().wait()

    monkeypatch.setattr(NodeActor, "meet", meet)
    ray.join("a")
    ray.join("deaf")
    await ticket_of(keeper(ray))
    ray.join("later")
    await until(lambda: ("a", {"a", "deaf", "later"}) in told)


# ---- drains ----


async def test_a_drain_is_gone_on_with_by_the_keeper_that_is_started_again(ray):
    ray.join("a")
    ray.join("b")
    first = keeper(ray)
    await ticket_of(first)
    agent = ray.agents.there["b"]
    agent.idle.clear()  # somebody holds a lease
    assert await first.drain.remote("address-of-b", wait=False) == ""
    await until(lambda: agent.is_draining)
    first.die()

    again = keeper(ray)

    assert {one.node_id: one.is_draining for one in (await ticket_of(again)).members} == {"a": False, "b": True}
    assert ray.agents.there["b"] is agent
    agent.idle.set()
    roll = await rolls_until(again, lambda roll: len(roll.members) == 1)
    assert [(one.node_id, one.reason) for one in roll.refusals] == [("b", "it was drained")]
    assert "b" not in ray.agents.there


async def test_an_agent_that_drains_and_of_whose_drain_nobody_knows_is_replaced_when_its_leases_are_over(ray):
    ray.join("a")
    ray.join("b")
    first = keeper(ray)
    await ticket_of(first)
    agent = ray.agents.there["b"]
    agent.idle.clear()
    agent.is_draining = True  # whoever kept the fleet died before it could do more
    first.die()

    again = keeper(ray)

    assert {one.node_id: one.is_draining for one in (await ticket_of(again)).members} == {"a": False, "b": True}
    agent.idle.set()
    roll = await rolls_until(again, lambda roll: {one.node_id: one.is_draining for one in roll.members} == {"a": False, "b": False})
    assert not roll.refusals and ray.agents.there["b"] is not agent


async def test_a_node_that_was_drained_stays_so_when_the_keeper_is_started_again(ray):
    ray.join("a")
    ray.join("b")
    first = keeper(ray)
    await ticket_of(first)
    assert await first.drain.remote("address-of-b") == ""
    first.die()

    again = keeper(ray)

    assert [one.node_id for one in (await ticket_of(again)).members] == ["a"]
    assert [(one.node_id, one.reason) for one in (await roll_of(again)).refusals] == [("b", "it was drained")]
    assert len(ray.agents.made) == 2


async def test_the_next_fleet_of_a_name_begins_with_all_nodes_and_nothing_is_kept_of_one_that_went_down(ray):
    ray.join("b")
    first = keeper(ray)
    await ticket_of(first)
    assert await first.drain.remote("address-of-b") == ""
    assert len(ray.stored) == 1
    first.die()
    second = keeper(ray, Trust.new(NAME))
    assert [one.node_id for one in (await ticket_of(second)).members] == ["b"]
    assert not ray.stored
    assert await second.drain.remote("address-of-b") == ""
    await second.down.remote()
    assert not ray.stored


async def test_a_node_is_drained_while_rays_head_is_away(ray, monkeypatch):
    ray.join("b")
    there = keeper(ray)
    await ticket_of(there)

    def away(*_):
        raise ConnectionError("no head")

    monkeypatch.setattr(drains, "note", away)
    assert await there.drain.remote("address-of-b") == ""
    assert [one.reason for one in (await roll_of(there)).refusals] == ["it was drained"]
    assert "no node is named 'nobody'" in await there.drain.remote("nobody")


# ---- growing and shrinking ----


@pytest.fixture
def soon(monkeypatch):
    """What takes seconds takes none."""
    for module, name in ((gauge, "TELL_S"), (scaler, "_LASTING_S"), (scaler, "_LEAST_S")):
        monkeypatch.setattr(module, name, 0.0)


def scaled(ray, **given):
    return ray.make(Keeper, Plan(NAME, scaling=Scaling(**given)), TRUST, "head:1", name=keeper_name(NAME))


def say(ray, node_id, **view):
    ray.agents.there[node_id].gauge.say({"part": {"leased": 0, "waiting": 0, "free_sandboxes": 4, **view}})


async def test_leases_that_wait_are_told_to_ray_and_to_everybody_and_taken_back(ray, soon):
    ray.join("a")
    there = scaled(ray)
    await ticket_of(there)
    say(ray, "a", leased=4, waiting=3, free_sandboxes=-3)
    assert (await rolls_until(there, lambda roll: roll.wanted)).wanted == 1
    assert ray.asked == [[{"CPU": 4.0}] * 2]
    ray.join("b")
    await until(lambda: "b" in ray.agents.there)
    say(ray, "b")  # they have room there
    await rolls_until(there, lambda roll: len(roll.members) == 2 and not roll.wanted)
    assert ray.asked[-1] == []


async def test_a_node_that_nobody_needs_rests_and_is_woken_when_leases_wait(ray, soon):
    ray.join("a")
    ray.join("b")
    there = scaled(ray, idle_s=0.01)
    await ticket_of(there)
    say(ray, "a", leased=1)
    resting = await rolls_until(there, lambda roll: roll.refusals)
    assert [(one.node_id, one.reason) for one in resting.refusals] == [("b", actors._RESTS)]
    assert "b" not in ray.agents.there  # its agent has ended, so that Ray may take it away
    say(ray, "a", leased=4, waiting=1, free_sandboxes=-1)
    woken = await rolls_until(there, lambda roll: len(roll.members) == 2)
    assert not woken.refusals and not woken.wanted


async def test_who_is_drained_by_hand_is_not_woken(ray, soon):
    ray.join("a")
    ray.join("b")
    there = scaled(ray)
    await ticket_of(there)
    assert await there.drain.remote("address-of-b") == ""
    say(ray, "a", leased=4, waiting=1, free_sandboxes=-1)
    assert (await rolls_until(there, lambda roll: roll.wanted)).wanted == 1
    assert ray.asked[-1] == [{"CPU": 4.0}] * 3
    await there.down.remote()
    assert ray.asked[-1] == []


async def test_agents_take_back_what_a_keeper_that_is_no_more_has_asked_for(ray, soon):
    ray.join("a")
    there = scaled(ray)
    await ticket_of(there)
    say(ray, "a", leased=4, waiting=1, free_sandboxes=-1)
    await rolls_until(there, lambda roll: roll.wanted)
    actor = next(handle.actor for name, handle in ray.named.items() if name != keeper_name(NAME))
    await until(lambda: actor._has_asked)
    there.die()
    await until(lambda: ray.asked[-1] == [])


# ---- clients that wait for changes ----


async def test_who_waits_for_a_change_is_answered_after_a_while_and_asks_again(ray, monkeypatch):
    """Nobody tells of a client that has died: what it asked for would stay for ever, and one day nothing else would begin."""
    monkeypatch.setattr(actors, "HOLD_S", 0.05)
    ray.join("a")
    there = keeper(ray)
    known = await roll_of(there)
    assert await there.members.remote(known.version) == ""
    assert there.actor._waiting == 0
    await there.forever.remote()
    monkeypatch.setattr(actors, "HOLD_S", 60.0)
    waiting = there.members.remote(known.version)
    ray.join("b")
    assert Roll.from_json(await waiting).version > known.version


async def test_no_more_wait_than_leave_room_for_other_calls(ray):
    ray.join("a")
    there = ray.make(Keeper, Plan(NAME), TRUST, "head:1", 2, name=keeper_name(NAME))
    known = await roll_of(there)
    waiting = [there.members.remote(known.version) for _ in range(2)]
    await until(lambda: there.actor._waiting == 2)
    assert await there.members.remote(known.version) == ""
    ray.join("b")
    assert all(Roll.from_json(one).version > known.version for one in await asyncio.gather(*waiting))


async def test_a_node_is_watched_for_as_long_as_it_lives(ray, monkeypatch):
    """The call by which its death is noticed ends now and then, and is made again."""
    monkeypatch.setattr(resident, "HOLD_S", 0.01)
    asked = []
    forever = NodeActor.forever

    async def counted(self):
        asked.append(self)
        await forever(self)

    monkeypatch.setattr(NodeActor, "forever", counted)
    ray.join("a")
    there = keeper(ray)
    (actor,) = [handle for name, handle in ray.named.items() if name != there.name] if (await ticket_of(there)).members else ()
    watching = asyncio.ensure_future(resident.until_failed(actor))
    await until(lambda: len(asked) > 3)
    assert not watching.done()
    actor.die()
    await watching
