"""THREATS 3: cancellation at any point, and failures in a loop.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
"""

import asyncio
import os
import random

import pytest
from tests import leftovers
from tests.enginehost import engine_host
from tests.security.conftest import LONG


async def test_x34_cancellation_at_any_point_leaves_nothing(engine, state_dir):
    """Leases, resets and commands cancelled after random delays; the fixture then counts what is left."""
    generator = random.Random(34)
    watch = leftovers.Watch(marks=(str(state_dir), f"-{os.getpid()}-"), state_dir=state_dir)
    before = watch.take()

    async def rollout() -> None:
        async with engine.lease() as box:
            await box.shell("sleep 0.005; (sleep 100 &)")
            await box.reset()
            await box.run(["sleep", "5"])

    for _ in range(300 if LONG else 60):
        task = asyncio.create_task(rollout())
        await asyncio.sleep(generator.random() * 0.08)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not await asyncio.to_thread(watch.wait_like, before, 10)


async def test_x35_failures_in_a_loop_do_not_fill_the_log(state, tmp_path):
    """A thousand actions, half of which raise and half of which fail; what is written stays small."""
    log = tmp_path / "stderr"
    with open(log, "wb") as stderr:
        async with engine_host(state, stderr=stderr.fileno()) as host:
            await host.lease("a")
            for _ in range(20):
                outcomes = await asyncio.gather(
                    *(host.run("a", ["false"], cwd="/missing" if n % 2 else None) for n in range(50)), return_exceptions=True
                )
                assert len(outcomes) == 50
    assert log.stat().st_size < 64 << 10
    written = [p for p in state.rglob("*") if p.is_file() and not {"disks", "layers"} & set(p.parts)]
    assert sum(p.stat().st_size for p in written) < 1 << 20
