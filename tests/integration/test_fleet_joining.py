"""Coming to a fleet on real Ray: by every name that its head has, and however many came before and left their questions behind."""

import asyncio
import logging

import pytest
from tests import raycluster
from tests.hostview import until

import untax

if reason := raycluster.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

from untax.cluster import access, actors

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster(ray_nodes):
    return ray_nodes


@pytest.fixture
def spelled(cluster):
    """The head's address as nobody wrote it down."""
    host, port = cluster.address.split(":")
    return f"127.{host.rpartition('.')[2]}:{port}"


async def test_a_node_that_knows_the_head_by_another_name_uses_the_fleet_as_the_others_do(cluster, spelled, tmp_path):
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    @ray.remote(num_cpus=0)
    def rollout(ticket):
        from untax.sync import Fleet

        said = [ray.get_runtime_context().gcs_address]
        for fleet in (Fleet.from_ticket(ticket), Fleet.current("named")):
            with fleet.lease() as box:
                said.append(box.run(["echo", "there"]).stdout)
        return said

    with cluster.joined_by(spelled) as node_id:
        async with untax.Fleet(cluster.address, name="named", state_dir=tmp_path / "{node}") as fleet:
            there = NodeAffinitySchedulingStrategy(node_id, soft=False)
            async with asyncio.timeout(PATIENCE_S):
                said = await rollout.options(scheduling_strategy=there).remote(fleet.ticket())
            assert said == [spelled, b"there\n", b"there\n"]


async def test_a_fleet_is_joined_by_whatever_name_its_head_has(cluster, spelled, tmp_path):
    async with untax.Fleet(cluster.address, name="joined", state_dir=tmp_path / "{node}"):
        port = cluster.address.rpartition(":")[2]
        for address in (spelled, f"127.0.0.1:{port}", f"localhost:{port}"):  # the last two as Ray takes them: for this node's own
            async with untax.Fleet(address, name="joined") as fleet, fleet.lease() as box:
                assert (await box.run(["echo", "there"])).stdout == b"there\n"
        with pytest.raises(untax.UsageError, match=r"ray.shutdown\(\) first"):
            await untax.Fleet(f"{cluster.address.partition(':')[0]}:1", name="joined").start()


async def test_questions_that_nobody_waits_for_keep_a_fleet_from_nothing(cluster, tmp_path, monkeypatch, caplog):
    """As of clients that ended: here more than the keeper may have begun at once."""
    monkeypatch.setattr(actors, "CALLS", 10)
    monkeypatch.setattr(actors, "WAITING", 3)
    with caplog.at_level(logging.WARNING):
        async with untax.Fleet(cluster.address, name="asked", state_dir=tmp_path / "{node}") as fleet:
            keeper = fleet._joining.keeper
            await until(lambda: fleet._roll.version > 0)
            left = [keeper.members.remote(fleet._roll.version) for _ in range(40)]
            async with asyncio.timeout(PATIENCE_S):
                assert await keeper.instance.remote() == fleet._ticket.instance
                assert "no node is named" in await keeper.drain.remote("nobody")
                async with untax.Fleet.from_ticket(fleet.ticket()) as late, late.lease() as box:
                    assert (await box.run(["echo", "late"])).stdout == b"late\n"
                assert await keeper.ticket.remote()
        del left
    assert "taken down" not in caplog.text


async def test_a_client_that_leaves_takes_its_question_along(cluster, tmp_path):
    async with untax.Fleet(cluster.address, name="left", state_dir=tmp_path / "{node}") as fleet:

        async def waiting():
            return await fleet._joining.keeper.__ray_call__.remote(lambda self: self._waiting)

        async with asyncio.timeout(PATIENCE_S):
            while await waiting() != 1:
                await asyncio.sleep(0.02)
            async with untax.Fleet.from_ticket(fleet.ticket()):
                while await waiting() != 2:
                    await asyncio.sleep(0.02)
            while await waiting() != 1:
                await asyncio.sleep(0.02)


async def test_a_keeper_that_hangs_is_killed_and_its_agents_end(cluster, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(access, "_DOWN_S", 1.0)
    with caplog.at_level(logging.WARNING):
        async with untax.Fleet(cluster.address, name="hung", state_dir=tmp_path / "{node}") as fleet:
            sockets = [tmp_path / one.node_id[:12] / "fleet-hung" / "s" for one in fleet.members]
            assert all(one.exists() for one in sockets)

            await fleet._joining.keeper.__ray_call__.remote(_hang)
    assert "its keeper is killed, and the agents end by themselves" in caplog.text
    await until(lambda: not any(one.exists() for one in sockets))


def _hang(keeper):
    """It forgets no node, and never comes to an end with them."""
    import asyncio

    keeper._ended = lambda node: asyncio.Event().wait()
