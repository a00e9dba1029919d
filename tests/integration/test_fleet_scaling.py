"""A fleet that grows when leases wait and shrinks when nobody needs its nodes, with Ray's own autoscaler."""

import asyncio

import pytest
from tests import raycluster
from tests.autoscaled import AutoscaledCluster
from tests.hostview import until

import untax
from untax.pool.options import PoolOptions

if reason := raycluster.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

PATIENCE_S = 60.0


def alive():
    import ray

    return {one["NodeID"] for one in ray.nodes() if one["Alive"]}


async def test_ray_starts_a_node_for_a_lease_that_waits_and_takes_it_away_when_nobody_needs_it(tmp_path):
    """The lease goes there by itself. While it is held Ray leaves the node alone, though nothing of Ray's own runs on it."""
    pool = PoolOptions(entries=2)
    with AutoscaledCluster(workers=2) as cluster:
        async with untax.Fleet(cluster.address, state_dir=tmp_path / "{node}", pool=pool, idle_s=1.0, min_nodes=1) as fleet:
            assert [one.node_id for one in fleet.members] == [cluster.head_id]
            first, second = await fleet.acquire(), await fleet.acquire()
            waiting = asyncio.ensure_future(fleet.acquire(wait_s=PATIENCE_S))
            await until(lambda: fleet.wanted == 1)
            third = await waiting
            started = third._engine.member.node_id
            assert alive() == {cluster.head_id, started}
            await until(lambda: fleet.wanted == 0)
            await asyncio.gather(first.release(), second.release())
            # Three times as long as Ray leaves an idle node, and as the fleet does.
            assert (await third.shell("sleep 3; echo there")).stdout == b"there\n"
            await third.release()
            assert [box.ledger.verdict for box in (first, second, third)] == ["trusted"] * 3
            await until(lambda: [one.node_id for one in fleet.members] == [cluster.head_id])
            await until(lambda: alive() == {cluster.head_id})
            await until(lambda: not fleet.refusals)
            async with fleet.lease() as box:
                assert box._engine.member.node_id == cluster.head_id


async def test_a_node_that_rests_where_no_autoscaler_takes_it_is_woken_when_somebody_waits(ray_nodes, tmp_path):
    head, other = ray_nodes.ids()
    pool = PoolOptions(entries=1)
    async with untax.Fleet(ray_nodes.address, name="resting", state_dir=tmp_path / "{node}", pool=pool, idle_s=0.5) as fleet:
        [refusal] = await until(lambda: fleet.refusals)
        assert refusal.node_id == other and "it rests" in refusal.reason  # not the head
        first = await fleet.acquire()
        assert first._engine.member.node_id == head
        second = await fleet.acquire(wait_s=PATIENCE_S)
        assert second._engine.member.node_id == other
        assert not fleet.refusals
        await asyncio.gather(first.release(), second.release())
