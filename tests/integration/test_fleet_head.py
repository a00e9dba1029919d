"""Ray's head is killed and comes back, with its fault tolerance on: what it knows is in a Redis of the test's own."""

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time

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
            assert await fleet._joining.asked(fleet._joining.keeper.instance) == fleet._ticket.instance
            joined = await asyncio.to_thread(cluster.add)
            await until(lambda: joined in {node.member.node_id for node in fleet._nodes.values()})
            async with untax.Fleet.from_ticket(fleet.ticket()) as late, late.lease() as box:
                assert (await box.run(["echo", "late"])).stdout == b"late\n"
            await asyncio.gather(*(box.release() for box in held))
            assert {box.ledger.verdict for box in held} == {"trusted"}


CLIENT = """
import asyncio, sys, ray, untax
address, here = sys.argv[1:]
ray.init(address=address, _node_ip_address=here, log_to_driver=False, configure_logging=False)
async def main():
    async with untax.Fleet(address) as fleet:
        held = await next(node for node in fleet._nodes.values() if node.member.address == here).acquire()
        print("held", flush=True)
        while order := (await asyncio.to_thread(sys.stdin.readline)).strip():
            if order == "act":
                said = (await held.run(["echo", "on"])).text.strip()
            else:
                async with fleet.lease(wait_s=60) as box:
                    said = (await box.run(["echo", box._engine.member.address])).text.strip()
            print("said", said, flush=True)
        await held.release()
        print("said", held.ledger.verdict, flush=True)
asyncio.run(main())
"""


def told(address, *words):
    """`untax fleet`, in a process of its own: Ray's driver would go with the node that it is connected to."""
    argv = [sys.executable, "-m", "untax.cli", "fleet", *words, "--json", "--address", address]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout) if done.returncode == 0 else done.stderr


def states(status):
    return {one["node_id"]: one["state"] for one in status["nodes"]} if isinstance(status, dict) else None


def test_the_machine_of_the_head_is_lost_and_comes_back(tmp_path, free_tcp_port):
    """Of a fleet that stays. Leases of the other node go on meanwhile; who keeps the fleet was lost with the head, and is started again."""
    head, other = "127.0.0.56", "127.0.0.57"
    with (
        redis(free_tcp_port, tmp_path) as address,
        raycluster.RayCluster(2, first=56, head={"external_addresses": [address, address]}) as cluster,
    ):
        up = told(cluster.address, "up", "--state-dir", str(tmp_path / "{node}"), "--limits", "warn")
        before = {one["name"]: one["node_id"] for one in up["nodes"]}
        assert set(before) == {head, other}
        with subprocess.Popen(
            [sys.executable, "-c", CLIENT, cluster.address, other], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as client:

            def ask(order):
                client.stdin.write(f"{order}\n")
                client.stdin.flush()
                return next(line for line in client.stdout if line.startswith("said ")).split()[1]  # Ray tells of dead nodes

            assert client.stdout.readline() == "held\n"
            cluster.kill_head_node()
            assert ask("act") == "on"
            assert {ask("lease") for _ in range(4)} == {other}

            joined = cluster.start_head_node()
            assert ask("act") == "on"
            whole = {joined: "in", before[other]: "in"}
            end = time.monotonic() + 120
            while states(status := told(cluster.address, "status")) != whole:
                assert time.monotonic() < end, status
            assert ask("act") == "on" and ask("lease") in (head, other)
            said = client.communicate("\n", timeout=60)[0]
            assert "said trusted" in said, said
        assert sorted(told(cluster.address, "down")["nodes"]) == [head, other]
