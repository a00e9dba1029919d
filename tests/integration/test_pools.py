"""Pools on real substrates, through the public names."""

import asyncio
import json
import os
import subprocess
import sys

import pytest
from tests import servers
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.images import small_image
from tests.variants import Variant, options_of

import untax
from untax import substrates
from untax.core.spec import EnvSpec
from untax.core.substrate import BindingLate

ELSEWHERE = [Variant("container", "docker"), Variant("container", "podman"), Variant("gvisor"), Variant("vm")]
"""On top of the two that everything here runs on. Pods are in test_kubernetes_pool.py: whatever wants the one cluster of a machine runs in one go."""


@pytest.fixture(params=["namespace", "process"])
async def engine(request, tmp_path):
    if reason := substrates.load(request.param).unavailable_reason():
        pytest.skip(f"{request.param}: {reason}")
    async with untax.Engine(request.param, state_dir=tmp_path / "state") as engine:
        yield engine


@pytest.fixture
async def namespace(tmp_path):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    async with untax.Engine("namespace", state_dir=tmp_path / "state", pool=untax.PoolOptions(entries=4)) as engine:
        yield engine


def spec_on(engine, **fields):
    return EnvSpec(isolation=engine.substrate.isolation, **fields)


async def test_a_warm_lease_is_as_good_as_a_cold_one(engine):
    await warm_is_as_good_as_cold(engine, spec_on(engine), 2)


@pytest.mark.parametrize("variant", ELSEWHERE, ids=str)
async def test_a_warm_lease_is_as_good_as_a_cold_one_elsewhere(request, tmp_path, variant):
    """Where a sandbox takes a second or ten to come up, and a warm one none."""
    options = options_of(request, variant)
    if reason := substrates.load(variant.substrate, **options).unavailable_reason():
        pytest.skip(f"{variant.substrate}: {reason}")
    async with untax.Engine(variant.substrate, state_dir=tmp_path / "state", **options) as engine:
        await warm_is_as_good_as_cold(engine, spec_on(engine, image=small_image(variant.substrate)), 1)


async def warm_is_as_good_as_cold(engine, spec, n):
    """What was made ahead without a holder has everything that its lease brings: variables, files and limits.

    Limits are what it was made with where a sandbox cannot change them.
    """
    limits = untax.Limits(memory_mib=128)
    late = {"env": {"A": "1"}, "files": {"given": b"x"}, "limits": limits}
    async with engine.lease(spec, **late) as box:
        assert box.ledger.hit.kind == "cold"
        cold = await seen(box)
    binds_limits = isinstance(engine.substrate, BindingLate) and "limits" in engine.substrate.binds_late
    await engine.warm(spec, n, limits=None if binds_limits else limits)
    async with engine.lease(spec, **late) as box:
        assert box.ledger.hit.kind == "exact"
        warm = await seen(box)
        hungry = await box.run(["perl", "-e", "$x = 'x' x (300 << 20); print length $x"])
        assert hungry.outcome == ("exited" if "memory_mib" in {one.name for one in box.ledger.unenforced} else "oom"), hungry
    assert "A=1" in warm
    assert warm == cold


async def seen(box):
    """What a command finds, without what differs between any two sandboxes. The small image has no nproc, and says so each time."""
    text = (await box.shell("id -u; env | sort; ls -a; cat given; ulimit -a; nproc || true", merge=True)).check().text
    return [line for line in text.replace(box.id, "ID").splitlines() if not line.startswith(("_=", "SHLVL="))]


async def test_set_up_that_is_warm_is_not_done_again(engine, tmp_path):
    count = "date +%N >> ran"
    spec = spec_on(engine, setup=(count,))
    await engine.warm(spec, 2)
    async with engine.lease(spec) as box:
        assert box.ledger.hit.kind == "exact"
        assert len((await box.read("ran")).splitlines()) == 1
        assert box.ledger.metrics()["setup_s"] == 0.0


async def test_x22_parked_sandboxes_that_are_killed_are_not_seen(engine):
    spec = spec_on(engine)
    await engine.warm(spec, 4)
    for standby in engine.pooling.driver.parked()[:3]:
        sandbox = standby.sandbox
        os.kill(sandbox.agent_pid if hasattr(sandbox, "agent_pid") else sandbox._cell.pid, 9)
    for _ in range(4):
        async with engine.lease(spec) as box:
            assert (await box.run(["echo", "ok"])).stdout == b"ok\n"
            assert box.ledger.verdict == "trusted"
    status = engine.pools()
    assert status.died + status.rejected >= 1


async def test_users_and_limits_bind_to_what_is_warm(namespace):
    if os.geteuid() != 0:
        pytest.skip("root: another user inside needs it")
    await namespace.warm(n=2)
    async with namespace.lease(user="root", limits=untax.Limits(memory_mib=64, pids=32)) as box:
        assert box.ledger.hit.kind == "exact"
        assert (await box.shell("id -u; echo $HOME")).text.split() == ["0", "/root"]
        hungry = await box.run([os.path.realpath(sys.executable), "-c", "x = bytearray(200 << 20)"])
        assert hungry.outcome == "oom"
    async with namespace.lease() as box:
        assert (await box.shell("id -u; echo $HOME")).text.split() == ["1000", "/home/user"]


async def test_a_user_that_is_not_there_is_the_leases_own_mistake(namespace):
    await namespace.warm(n=1)
    with pytest.raises(untax.UsageError, match="nobody-here"):
        await namespace.acquire(user="nobody-here")
    async with namespace.lease() as box:
        assert box.ledger.verdict == "trusted"


async def test_a_partial_hit_builds_only_the_missing_stage_and_is_timed(namespace, tmp_path):
    """The pool is full of idle sandboxes at the image stage: one gives its place."""
    await namespace.warm(n=4)
    spec = EnvSpec(setup=("echo built > /opt/built",))
    if os.geteuid() != 0:
        spec = EnvSpec(setup=("echo built > built",))
    async with namespace.lease(spec) as box:
        hit = box.ledger.hit
        assert (hit.kind, hit.start, hit.missing) == ("partial", "image", ("deps",))
        assert hit.steps["deps"] == pytest.approx(box.ledger.stages["deps"])
        assert {"create", "ready"} <= hit.steps.keys()
        await box.shell("cat /opt/built built 2>/dev/null | grep built")
    async with namespace.lease(spec) as box:
        assert "deps" not in box.ledger.stages  # it is a layer for all now


async def test_leases_queue_for_a_full_pool_in_order_and_say_why(namespace):
    order = []

    async def one(number):
        async with namespace.lease() as box:
            order.append(number)
            await box.run(["true"])
            return box.ledger

    ledgers = await asyncio.gather(*(one(number) for number in range(24)))
    waited = [ledger.hit for ledger in ledgers if ledger.hit.waited_s > 0.001]
    assert waited
    assert all(hit.waited_for for hit in waited)
    assert max(abs(place - number) for place, number in enumerate(order)) <= 4  # as many as are bound at a time


async def test_adaptive_sizes_keep_ready_what_is_asked_for(tmp_path):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    options = untax.PoolOptions(adaptive=True, entries=16, linger_s=5.0)
    async with untax.Engine("namespace", state_dir=tmp_path / "state", pool=options) as engine:
        kinds = []
        for _ in range(60):
            async with engine.lease() as box:
                kinds.append(box.ledger.hit.kind)
            await asyncio.sleep(0.04)
        assert kinds[0] == "cold"
        assert kinds[-10:].count("exact") >= 8


async def test_a_grader_may_come_from_the_pool_and_has_only_what_was_taken(namespace):
    await namespace.warm(n=2)
    async with namespace.lease() as box:
        await box.write("src/a.py", b"a = 1\n")
        await box.write("cheat", b"x")
        async with namespace.grader(box, take=("src/**",)) as clean:
            assert clean.ledger.hit.kind == "exact"
            assert await clean.read("src/a.py") == b"a = 1\n"
            with pytest.raises(untax.NotFound):
                await clean.read("cheat")


def test_a_pool_serves_blocking_callers_too(tmp_path):
    from untax import sync

    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    with sync.Engine("namespace", state_dir=str(tmp_path / "state")) as engine:
        engine.warm(n=2)
        with engine.lease(env={"A": "1"}) as box:
            assert box.run(["sh", "-c", "echo $A"]).stdout == b"1\n"
            assert box.ledger.hit.kind == "exact"
        with engine.lease(network=("127.0.0.1:9",)) as box:
            assert box.run(["true"]).exit_code == 0
        assert engine.pools().exact == 1


def test_what_is_kept_ready_for_blocking_callers_with_a_network_can_reach_it(tmp_path):
    """Egress is served by the loop, so such a sandbox is made with its channel there, before anybody leases it."""
    from untax import sync

    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    with servers.listener() as peer, sync.Engine("namespace", state_dir=str(tmp_path / "state")) as engine:
        spec = untax.EnvSpec(network=(peer.address,))
        engine.warm(spec, 1)
        with engine.lease(spec) as box:
            assert box.ledger.hit.kind == "exact"
            assert box.run(["curl", "-s", "-m", "5", f"http://{peer.address}/"]).text == "reached"


async def test_status_shows_a_running_engine(namespace, tmp_path):
    await namespace.warm(n=2)
    state = str(tmp_path / "state")

    def status(*more):
        argv = [sys.executable, "-m", "untax.cli", "pool", "status", "--state-dir", state, *more]
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    async with namespace.lease():
        await asyncio.sleep(0.8)  # it is written twice a second at most
        document = json.loads(await asyncio.to_thread(status, "--json"))
        (engine,) = document["engines"]
        assert engine["pid"] == os.getpid()
        assert engine["pool"]["exact"] == 1
        assert "image" in await asyncio.to_thread(status)
