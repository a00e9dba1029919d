"""Several processes and engines on one host: they share one store, and what one client makes another can use."""

import asyncio
import json
import os
import sys
import time
from dataclasses import replace

import pytest
from tests import hostview, servers
from tests.enginehost import engine_host
from tests.images import small_image
from tests.serving import environment, serving

import untax
import untax.sync
from untax import substrates
from untax.core.account import IN_HAND
from untax.remote import engine as client

SPEC = {"setup": ("echo built >made",)}


@pytest.fixture(autouse=True)
def namespace():
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")


@pytest.fixture
def spec():
    return untax.EnvSpec(image=small_image("namespace"), **SPEC)


@pytest.fixture
async def served(tmp_path):
    async with serving(tmp_path) as served:
        yield served


async def test_a_stage_is_built_once_for_all_engines_of_a_state_directory(served, spec, tmp_path):
    """At the same time by an embedded engine, one in a third process and the server; afterwards nobody builds anything."""
    state = tmp_path / "state"
    asked = {"image": spec.image, "setup": list(spec.setup)}
    async with untax.Engine(state_dir=state) as own, engine_host(state) as host, untax.connect(served.url) as remote:
        first, second, _ = await asyncio.gather(own.acquire(spec), remote.acquire(spec), host.lease("third", asked))
        assert await first.read("made") == await second.read("made") == b"built\n"
        built = [one for one in (first.ledger.stages, second.ledger.stages) if "deps" in one]
        assert len(built) <= 1
        async with own.lease(spec) as box, remote.lease(spec) as other:
            assert (box.ledger.stages, other.ledger.stages) == ({}, {})
        roots = [(await engine.prepare(spec)).root for engine in (own, remote)]
        assert roots[0] == roots[1]
        await asyncio.gather(first.release(), second.release())


async def test_an_engine_that_starts_sweeps_only_what_the_dead_left(served, tmp_path):
    """Beside a live server: a killed engine's sandboxes go, the server's stay."""
    state = tmp_path / "state"
    async with untax.connect(served.url) as remote, remote.lease() as box:
        await box.write("mine", b"1")
        async with engine_host(state) as host:
            await host.lease("doomed")
            dead = [agent.pid for agent in hostview.agents(host.pid)]
            host.kill()
            await host.process.wait()
        async with untax.Engine(state_dir=state) as own, own.lease() as fresh:
            assert (await fresh.run(["true"])).exit_code == 0
            assert all([await asyncio.to_thread(hostview.wait_gone, pid, 5) for pid in dead])
            assert await box.read("mine") == b"1"
        assert (await box.run(["cat", "mine"])).stdout == b"1"
        await box.reset()
        assert await box.list() == []
    runs = [path.name for path in (state / "namespace").iterdir() if path.name.startswith("engine-")]
    assert [name.split("-")[1] for name in runs] == [str(served.process.pid)]


async def test_a_snapshot_of_one_client_begins_the_boxes_of_another(served):
    async with untax.connect(served.url) as one, untax.connect(served.url) as two:
        async with one.lease() as box:
            await box.write("f", b"shared")
            snapshot = await box.snapshot()
            async with two.fork(snapshot.id, 2) as group:
                assert [await fork.read("f") for fork in group] == [b"shared"] * 2
            with pytest.raises(untax.UsageError, match="another engine's"):
                await two.restore(snapshot)
            await snapshot.save()
            async with two.restore(snapshot) as other:
                assert await other.read("f") == b"shared"
            kept = await box.snapshot()
        await one.aclose()
        with pytest.raises(untax.UsageError, match="no saved snapshot"):  # it went with its owner
            await two.find_snapshot(kept.id)
        found = await two.find_snapshot(snapshot.id)
        assert found.is_saved
        await found.drop()
        with pytest.raises(untax.UsageError, match="dropped"):
            await two.restore(found)
        with pytest.raises(untax.UsageError, match="no saved snapshot"):
            await two.restore(snapshot.id)


async def test_what_is_prepared_is_told_and_stays_until_its_pin_is_closed(served, spec):
    told = []
    async with untax.connect(served.url) as engine:
        prepared = await engine.prepare(spec, progress=lambda *said: told.append(said))
        assert prepared.stages[-1].name == "deps"
        assert set(prepared.built) >= {"deps"}
        assert all(isinstance(what, str) for what, _, _ in told)
        assert prepared.pin.ids
        prepared.pin.close()
        prepared.pin.close()
        broken = replace(spec, setup=("echo because; exit 3",))
        with pytest.raises(untax.StageFailed, match="because") as failed:
            await engine.prepare(broken)
        assert b"because" in failed.value.log


async def test_the_network_is_enforced_and_logged_in_the_client_s_process(served):
    """And is in the server's account of the rollout too."""
    with servers.listener() as peer, servers.listener() as other:
        async with untax.connect(served.url) as engine:
            async with engine.lease(network=(peer.address,)) as box:
                reached = await box.shell(
                    f"curl -s -m 5 http://{peer.address}/; curl -s -m 5 -o /dev/null -w '%{{http_code}}' http://{other.address}/"
                )
            [theirs] = await engine.ledgers()
    assert reached.text == "reached403"
    assert [(one.port, one.verdict) for one in box.ledger.egress] == [(peer.port, "allowed"), (other.port, "denied")]
    assert [(one["port"], one["verdict"]) for one in theirs["egress"]] == [(peer.port, "allowed"), (other.port, "denied")]


async def test_an_unknown_user_and_a_known_one(served):
    async with untax.connect(served.url) as engine, engine.lease() as box:
        with pytest.raises(untax.UsageError, match="user"):
            await box.run(["true"], user="nobody-of-that-name")
        if os.geteuid() == 0:
            assert (await box.run(["id", "-un"], user="root")).text == "root\n"


async def test_files_that_are_too_large_for_a_message_name_the_remedy(served):
    async with untax.connect(served.url) as engine:
        with pytest.raises(untax.UsageError, match="upload"):
            await engine.acquire(files={"big": b"x" * (65 << 20)})
        async with engine.lease(files={"big": b"x" * (20 << 20)}) as box:
            assert (await box.stat("big")).size == 20 << 20


async def test_one_pool_serves_all_clients(served, spec):
    """What one of them warmed another hits; both ends' ledgers say so, and the status is the server's."""
    async with untax.connect(served.url) as one, untax.connect(served.url) as two:
        await one.warm(spec, 2)
        async with two.lease(spec, env={"LATE": "1"}, files={"f": b"1"}) as box:
            assert (await box.shell("echo $LATE; cat made f")).text == "1\nbuilt\n1"
            assert box.ledger.hit.kind == "exact"
            await box.reset()
            assert (await box.shell("echo $LATE; cat made f")).text == "1\nbuilt\n1"
        status = await two.pools()
        assert (status.substrate, status.exact) == ("namespace", 1)
        [theirs] = await two.ledgers()
        assert theirs["hit"]["kind"] == "exact"
        assert [name for name, _ in theirs["wanted"]] == [stage.name for stage in box.ledger.wanted]
        await one.warm(spec, 0)


@pytest.mark.parametrize("connect", [untax.connect, untax.sync.connect])
async def test_a_worker_that_leases_in_a_row_has_the_next_sandbox_in_hand(served, connect, monkeypatch):
    """Each is a fresh one with an account of its own, asynchronous and blocking, fresh or having waited; and nothing of it stays."""
    monkeypatch.setattr(client, "FRESH_S", 0.05)  # after half a second it would not be leases in a row

    def work():
        with untax.sync.connect(served.url) as engine:
            engine.warm(n=4)
            boxes = []
            for turn in range(16):
                with engine.lease() as box:
                    assert box.shell("test ! -e mine && echo 1 >mine && cat mine").check().stdout == b"1\n"
                boxes.append(box)
                time.sleep(0.06 if turn % 4 == 3 else 0)  # longer than an answer proves anything
            return boxes, engine.ledgers()

    async def worked():
        async with untax.connect(served.url) as engine:
            await engine.warm(n=4)
            boxes = []
            for turn in range(16):
                async with engine.lease() as box:
                    assert (await box.shell("test ! -e mine && echo 1 >mine && cat mine")).check().stdout == b"1\n"
                boxes.append(box)
                await asyncio.sleep(0.06 if turn % 4 == 3 else 0)
            return boxes, await engine.ledgers()

    boxes, ledgers = await worked() if connect is untax.connect else await asyncio.to_thread(work)

    assert len({box.id for box in boxes}) == 16
    assert [box.ledger.rollout for box in boxes] == [one["rollout"] for one in ledgers]
    assert {one["verdict"] for one in ledgers} == {"trusted"}
    in_hand = [one for one in ledgers if one["hit"]["why"] == IN_HAND]
    assert len(in_hand) >= 4
    for one in (*in_hand, *(json.loads(box.ledger.to_json()) for box in boxes)):
        assert one["metrics"]["unattributed_s"] <= max(0.01 * one["metrics"]["total_s"], 100e-6)
    async with untax.connect(served.url) as engine:
        async with asyncio.timeout(10):
            while (await engine.pools()).stages[-1].leased:
                await asyncio.sleep(0.01)
        await engine.warm(n=0)


async def test_x33_a_client_that_is_killed_with_a_sandbox_in_hand_leaves_nothing(served):
    program = (
        "import asyncio, sys, time, untax\n"
        "async def main():\n"
        f"    async with untax.connect({served.url!r}) as engine:\n"
        "        await engine.warm(n=4)\n"
        "        while not engine.has_in_hand:\n"
        "            async with engine.lease() as box: await box.run(['true'])\n"
        "        print('in hand', flush=True); time.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    async with untax.connect(served.url) as engine:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, env=environment())
        assert await process.stdout.readline() == b"in hand\n"
        before = {one["rollout"] for one in await engine.ledgers()}
        process.kill()
        await process.wait()
        async with asyncio.timeout(10):
            while (await engine.pools()).stages[-1].leased:
                await asyncio.sleep(0.01)
        assert {one["rollout"] for one in await engine.ledgers()} == before
        await engine.warm(n=0)
