"""Where leases go among real agents, over their sockets and over TLS. No Ray: what tells of agents is not what places leases."""

import asyncio
import contextlib
import math
import re

import pytest

import untax
from untax import substrates
from untax.leases import Bindings, checked

pytest.importorskip("cryptography", reason="cryptography: not installed; pip install 'untax[ray]'")
pytest.importorskip("uvicorn", reason="uvicorn: not installed; pip install 'untax[ray]'")

from untax.cluster.agent import Agent
from untax.cluster.node import NodeEngine
from untax.cluster.placing import Placing
from untax.cluster.plan import Plan, Post
from untax.cluster.terms import Ticket
from untax.cluster.trust import Trust
from untax.core.span import now_ns
from untax.pool.options import PoolOptions

NOT_AHEAD_S = 59.0  # of leases that last no longer than this none is given ahead (`untax.remote.hand`)
SLOW_S = 0.5  # of a sandbox, where it takes some milliseconds otherwise


@pytest.fixture
async def fleet(request, tmp_path):
    """Two agents with room for one sandbox each, unless the test says otherwise; the second is reached as from another machine."""
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    trust = Trust.new("placing")
    ticket = Ticket("placing", trust.token, trust.authority.certificate, untax.__version__, "")
    plan = Plan("placing", "namespace", str(tmp_path / "{node}"), {"pool": PoolOptions(entries=getattr(request, "param", 1))})
    async with contextlib.AsyncExitStack() as stack:
        placing = Placing()
        placing.agents = {}
        for number, name in enumerate(("here", "there"), 2):
            address = f"127.0.0.{number}"
            agent = Agent(plan, Post(name, name, address, trust.token, trust.authority.certificate, trust.identity_for(address)))
            member = await agent.start()
            stack.push_async_callback(agent.aclose)
            node = await stack.enter_async_context(NodeEngine(member, ticket, is_here=name == "here", clock=now_ns))
            assert node.is_here is (name == "here")
            placing.agents[name] = agent
            placing.follow(name, node)
        stack.push_async_callback(placing.aclose)
        yield placing


def lease(fleet, **bindings):
    return fleet.fulfil(checked(fleet.engine("here").offer, None, Bindings(**bindings)))


async def test_a_lease_that_waits_moves_when_another_agent_has_room_and_both_account_for_one(fleet):
    first, second = await lease(fleet), await lease(fleet)
    held = {box.ledger.placed.node: box for box in (first, second)}
    assert held.keys() == {"here", "there"}
    pools = {name: agent._hosting.engine.pooling.driver.state for name, agent in fleet.agents.items()}
    for _ in range(2):
        waiting = asyncio.ensure_future(lease(fleet, wait_s=30.0))
        while not any(pool.waiting for pool in pools.values()):
            await asyncio.sleep(0.001)
        where = next(name for name, pool in pools.items() if pool.waiting)
        other = "there" if where == "here" else "here"
        await held.pop(other).release()

        box = held[other] = await waiting

        assert box.ledger.placed.node == other
        assert box.ledger.placed.tried[-1] == (where, f"it had no room yet when {other} had")
        assert (await box.run(["echo", "moved"])).stdout == b"moved\n"
        while pools[where].waiting:  # it is withdrawn behind the answer
            await asyncio.sleep(0.001)
        assert {name: agent.leases for name, agent in fleet.agents.items()} == {"here": 1, "there": 1}
    await asyncio.gather(*(box.release() for box in held.values()))
    assert {box.ledger.verdict for box in held.values()} == {"trusted"}
    assert all(not pool.leased and not pool.waiting for pool in pools.values())


async def used(box):
    assert (await box.run(["echo", "there"])).stdout == b"there\n"
    await box.release()
    return box.ledger.placed


@pytest.mark.parametrize("fleet", [8], indirect=True)
async def test_leases_go_to_the_other_node_once_one_was_measured_to_be_slow_and_the_ledger_says_how_slow(fleet, monkeypatch):
    def create_s(name):
        return fleet.views.view(name).costs.known("create") or math.inf

    async with asyncio.timeout(60):
        for name in ("here", "there"):  # the first ones found nothing prepared
            while create_s(name) > SLOW_S / 10:
                await used(await fleet.engine(name).acquire(ttl_s=NOT_AHEAD_S))
                await asyncio.sleep(0.01)  # it is told a moment later
        substrate = fleet.agents["here"]._hosting.engine.substrate
        create = substrate.create_on

        async def slow(*args, **options):
            await asyncio.sleep(SLOW_S)
            return await create(*args, **options)

        monkeypatch.setattr(substrate, "create_on", slow)
        while create_s("here") < SLOW_S / 2:
            await used(await fleet.engine("here").acquire(ttl_s=NOT_AHEAD_S))
            await asyncio.sleep(0.01)

        placed = [await used(await lease(fleet, ttl_s=NOT_AHEAD_S)) for _ in range(4)]

    assert [one.node for one in placed] == ["there"] * 4
    for one in placed:
        (quick, of_quick), (late, of_late) = re.findall(r" on (here|there), nothing missing: (\S+) ms", one.why)
        assert (quick, late) == ("there", "here")
        assert float(of_quick) < SLOW_S * 1000 / 2 <= float(of_late)
