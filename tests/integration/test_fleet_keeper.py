"""Who keeps a fleet dies, on real Ray: with its program while agents start, before another fleet of its name, in the middle of a drain."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from tests import raycluster
from tests.hostview import until
from tests.serving import script

import untax

if reason := raycluster.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

from untax.cluster import access, terms
from untax.cluster.terms import Roll, Ticket

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def cluster(ray_nodes):
    return ray_nodes


def agents(cluster):
    """Processes of agents on any node, and of their actors."""
    pids = [pid for node_id in cluster.ids() for pid in cluster.processes(node_id)]
    return [pid for pid in pids if _comm(pid).startswith(("ray::NodeActor", "untax-agent"))]


def _comm(pid):
    try:
        return Path(f"/proc/{pid}/comm").read_text()
    except OSError:
        return ""


MAKER = """
import asyncio, sys, untax
async def main():
    print("begins", flush=True)
    fleet = untax.Fleet(sys.argv[1], name="followed", state_dir=sys.argv[2] + "/{node}")
    await fleet.start()
    box = await fleet.acquire()
    print(fleet.ticket(), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


async def killed(process):
    process.kill()
    await process.wait()
    process._transport.close()


async def test_a_program_that_is_killed_while_its_agents_start_leaves_none(cluster, tmp_path):
    before = set(agents(cluster))
    process, line = await script(MAKER, cluster.address, str(tmp_path))
    try:
        assert line == b"begins\n"
        await until(lambda: set(agents(cluster)) - before)
    finally:
        await killed(process)
    await until(lambda: not set(agents(cluster)) - before)
    assert not list(tmp_path.glob("*/fleet-*/s"))


async def test_a_fleet_follows_one_that_was_killed_under_its_name_with_keys_of_its_own(cluster, tmp_path):
    process, _ = await script(MAKER, cluster.address, str(tmp_path))
    try:
        line = b""
        while not line.startswith(b"{"):
            line = await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
        old = Ticket.from_json(line.decode())
    finally:
        await killed(process)
    await asyncio.to_thread(_wait_without_keeper, cluster, "followed")
    # As whoever starts programs again does it: on the same directories, where agents are that have not noticed yet.
    async with untax.Fleet(cluster.address, name="followed", state_dir=tmp_path / "{node}") as fleet:
        assert {one.node_id for one in fleet.members} == set(cluster.ids()) and not fleet.refusals
        new = Ticket.from_json(fleet.ticket())
        assert new.token != old.token and new.instance != old.instance
        assert not {one.key for one in new.members} & {one.key for one in old.members}
        for node in fleet._nodes.values():
            async with node.lease() as box:
                assert (await box.run(["echo", "there"])).stdout == b"there\n"
        with pytest.raises(untax.PoolClosed, match="there is another of this name now"):
            await untax.Fleet.from_ticket(old.to_json()).start()


def _wait_without_keeper(cluster, name):
    """Until Ray has noticed the program's death."""
    access.connect(cluster.address)
    try:
        end = time.monotonic() + PATIENCE_S
        while access.find_keeper(name) is not None:
            assert time.monotonic() < end
            time.sleep(0.01)
    finally:
        access.disconnect()


async def test_a_drain_is_gone_on_with_when_whoever_keeps_the_fleet_was_killed(cluster, tmp_path):
    async with untax.Fleet(cluster.address, name="drained", state_dir=tmp_path / "{node}") as fleet:
        node = next(node for node in fleet._nodes.values() if not node.is_here)
        node_id = node.member.node_id
        box = await node.acquire()
        assert await fleet._joining.asked(fleet._joining.keeper.drain, node_id, wait=False) == ""
        await _kill_keeper(fleet)
        roll = await _said_anew(fleet)
        assert {one.node_id: one.is_draining for one in roll.members} == {one: one == node_id for one in cluster.ids()}
        assert (await box.run(["echo", "goes on"])).stdout == b"goes on\n"
        await box.release()
        await until(lambda: [one.reason for one in fleet.refusals if one.node_id == node_id] == ["it was drained"])
        await _kill_keeper(fleet)
        roll = await _said_anew(fleet)
        assert [one.node_id for one in roll.members] == [one for one in cluster.ids() if one != node_id]
        assert [(one.node_id, one.reason) for one in roll.refusals] == [(node_id, "it was drained")]


async def _kill_keeper(fleet):
    os.kill(await fleet._joining.keeper.__ray_call__.remote(lambda self: os.getpid()), signal.SIGKILL)


async def _said_anew(fleet):
    """By the keeper that Ray has started again."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return Roll.from_json(await fleet._joining.asked(fleet._joining.keeper.members, -1))
        except untax.UntaxError as exc:
            assert time.monotonic() < end, exc
            assert str(exc) == str(terms.down(fleet.name)) or "could not be asked" in str(exc)
            await asyncio.sleep(0.1)
