"""Ray's head is killed and comes back, with its fault tolerance on: what it knows is in a Redis of the test's own."""

import asyncio
import contextlib
import os
import shutil
import subprocess

import pytest
from tests import raycluster
from tests.hostview import until

import untax

if reason := raycluster.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

from untax.cluster import actors


@contextlib.contextmanager
def redis(port, directory):
    if (program := shutil.which("redis-server")) is None:
        pytest.skip("redis: not installed; apt install redis-server")
    argv = [program, "--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(directory)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert any("eady to accept connections" in line for line in process.stdout)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()


def agents(fleet):
    """The processes that hold the nodes' agents, as the head knows them."""
    import ray

    names = [actors.node_actor_name(fleet.name, fleet._ticket.instance, one.node_id) for one in fleet.members]
    found = [ray.get_actor(name, actors.NAMESPACE) for name in names]
    return ray.get([one.__ray_call__.remote(lambda self: os.getpid()) for one in found])


async def test_sandboxes_channels_and_leases_go_on_without_the_head_and_it_finds_everything_again(tmp_path, free_tcp_port):
    with (
        redis(free_tcp_port, tmp_path) as address,
        raycluster.RayCluster(2, first=48, head={"external_addresses": [address, address]}) as cluster,
    ):
        async with untax.Fleet(cluster.address, state_dir=tmp_path / "{node}") as fleet:
            pids = await asyncio.to_thread(agents, fleet)
            held = [await node.acquire() for node in fleet._nodes.values()]
            for box in held:
                assert (await box.run(["mkfifo", "go"])).exit_code == 0
            running = [asyncio.ensure_future(box.shell("read line < go; echo $line")) for box in held]
            await asyncio.to_thread(cluster.kill_head)

            for box in held:
                assert (await box.run(["echo", "on"])).stdout == b"on\n"
            for _ in range(4):
                async with fleet.lease() as other:
                    assert (await other.run(["echo", "fresh"])).stdout == b"fresh\n"
            await asyncio.to_thread(cluster.start_head)

            for box in held:
                assert (await box.shell("echo whole > go")).exit_code == 0
            assert [one.stdout for one in await asyncio.gather(*running)] == [b"whole\n"] * 2
            assert await asyncio.to_thread(agents, fleet) == pids  # they are the same
            assert await fleet._asked(fleet._keeper.instance.remote()) == fleet._ticket.instance
            joined = await asyncio.to_thread(cluster.add)
            await until(lambda: joined in {node.member.node_id for node in fleet._nodes.values()})
            async with untax.Fleet.from_ticket(fleet.ticket()) as late, late.lease() as box:
                assert (await box.run(["echo", "late"])).stdout == b"late\n"
            await asyncio.gather(*(box.release() for box in held))
            assert {box.ledger.verdict for box in held} == {"trusted"}
