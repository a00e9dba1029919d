"""Where leases go among real agents, over their sockets and over TLS. No Ray: what tells of agents is not what places leases."""

import asyncio
import contextlib

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


@pytest.fixture
async def fleet(tmp_path):
    """Two agents with room for one sandbox each; the second is reached as from another machine."""
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    trust = Trust.new("placing")
    ticket = Ticket("placing", trust.token, trust.authority.certificate, untax.__version__, "")
    plan = Plan("placing", "namespace", str(tmp_path / "{node}"), {"pool": PoolOptions(entries=1)})
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
