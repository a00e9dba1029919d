"""Faults at real substrates, seen through the engine: lost cells, cancelled leases, killed engines, bad state directories."""

import asyncio
import contextlib
import os
import random
import signal
import time
from pathlib import Path

import pytest
from tests.enginehost import engine_host

import untax
from untax import substrates
from untax.core.substrate import Importing


# Those with cells of this machine's own; what lies behind an engine of its own has its faults in tests/security, what lies behind ssh in test_ssh.py, pods in test_kubernetes.py.
@pytest.fixture(
    params=[name for name in substrates.names() if name not in ("ssh", "kubernetes") and not isinstance(substrates.load(name), Importing)]
)
def name(request):
    if reason := substrates.load(request.param).unavailable_reason():
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture
async def engine(name, tmp_path):
    async with untax.Engine(name, state_dir=tmp_path / "state") as engine:
        yield engine


def cell_pid(box):
    sandbox = box._sandbox
    return sandbox.agent_pid if hasattr(sandbox, "agent_pid") else sandbox._cell.pid


async def test_x4_a_cell_that_dies_is_lost_within_a_second(engine):
    async with engine.lease() as box:
        running = asyncio.create_task(box.run(["sleep", "60"]))
        await box.run(["true"])
        started = time.monotonic()
        os.kill(cell_pid(box), signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await running
        assert time.monotonic() - started < 1
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        assert box.ledger.verdict == "infra"
    async with engine.lease() as box:
        assert (await box.run(["true"])).exit_code == 0


async def test_x5_a_cell_that_hangs_is_lost_at_the_deadline(engine):
    async with engine.lease() as box:
        pid = cell_pid(box)
        os.kill(pid, signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"], timeout_s=0.3)
        assert time.monotonic() - started < 2
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


async def test_x34_cancelled_at_any_time_nothing_is_left(engine, tmp_path):
    rng = random.Random(34)

    async def rollout():
        async with engine.lease(files={"a": b"1"}) as box:
            await box.run(["true"])
            await box.reset()
            await box.run(["sleep", "30"])

    for _ in range(40):
        task = asyncio.create_task(rollout())
        await asyncio.sleep(rng.random() * 0.03)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    await engine.aclose()
    left = [p for p in (tmp_path / "state").rglob("s*-*") if p.name.startswith(("sbx-", "spare-")) and p.is_dir()]
    assert left == []


async def test_x1_what_a_killed_engine_left_is_gone_after_the_next_start(name, tmp_path):
    async with engine_host(tmp_path / "state", substrate=name) as host:
        isolation = substrates.load(name).isolation
        for n in range(5):
            await host.lease(f"b{n}", {"isolation": isolation})
            await host.call("write", box=f"b{n}", path="left", text="x")
        host.kill()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(host.process.wait(), 5)
    async with untax.Engine(name, state_dir=tmp_path / "state") as engine, engine.lease() as box:
        assert (await box.run(["true"])).exit_code == 0
        dead = [p for p in (tmp_path / "state").rglob("engine-*") if p.is_dir()]
        assert len(dead) == 1  # its own
    assert [p for p in (tmp_path / "state").rglob("s*-*") if p.name.startswith(("sbx-", "spare-")) and p.is_dir()] == []


async def test_files_nobody_may_read_are_removed_with_their_sandbox(engine, tmp_path):
    async with engine.lease() as box:
        await box.shell("mkdir -p a/b/c; touch a/b/c/f; chmod 000 a/b/c a/b a")
    await engine.aclose()
    assert [p for p in (tmp_path / "state").rglob("s*-*") if p.name.startswith(("sbx-", "spare-")) and p.is_dir()] == []


async def test_a_state_directory_that_is_a_file_names_the_remedy(name, tmp_path):
    (tmp_path / "state").write_text("")
    with pytest.raises(untax.UntaxError, match="state_dir"):
        async with untax.Engine(name, state_dir=tmp_path / "state"):
            pass


async def test_an_unknown_image_is_refused_and_the_next_lease_works(engine):
    isolation = engine.substrate.isolation
    for image in ("no-such-image", "--privileged", ";reboot", "dir:/no/such/place"):
        with pytest.raises(untax.UsageError):
            await engine.acquire(untax.EnvSpec(image=image, isolation=isolation))
    async with engine.lease() as box:
        assert (await box.run(["true"])).exit_code == 0


async def test_a_user_that_is_not_there_is_refused(engine):
    async with engine.lease() as box:
        with pytest.raises((untax.UsageError, untax.Gone)):
            await box.run(["true"], user="no-such-user")
        assert (await box.run(["true"])).exit_code == 0
        assert box.ledger.verdict == "trusted"
