"""THREATS 3: clocks that step, machines that are slow.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
"""

import asyncio
import contextlib
import os
import time

import pytest
from tests import hostview, wallclock
from tests.enginehost import engine_host
from tests.security.faults.ground import (
    loop_file_system,
    own_group,
)


@pytest.mark.parametrize("by", [3600, -3600])
async def test_x24_a_wall_clock_that_steps_changes_no_deadline(state, tmp_path, by):
    env, flag = wallclock.shifted(tmp_path, by)
    async with engine_host(state, env=env) as host:
        await host.lease("a", {}, ttl_s=600)
        task = asyncio.create_task(host.run("a", ["sleep", "60"], timeout_s=1))
        await asyncio.sleep(0.2)
        flag.touch()
        began = time.monotonic()
        result = await asyncio.wait_for(task, 10)
        assert result["outcome"] == "timeout"
        assert time.monotonic() - began < 2
        slow = await host.run("a", ["sleep", "0.2"])
        ledger = await host.call("ledger", box="a")

    assert 0.2 <= slow["elapsed_s"] < 5
    assert 0.2 <= slow["round_trip_s"] < 5
    assert all(value >= 0 for value in numbers_in(ledger))


def numbers_in(value):
    if isinstance(value, dict):
        for inner in value.values():
            yield from numbers_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from numbers_in(inner)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield value


async def test_x26_deadlines_hold_on_a_slow_disk(tmp_path, as_root):
    """256 KiB/s for the engine and all it makes."""
    with loop_file_system(tmp_path, mib=256) as where:
        async with engine_host(where / "state") as host:
            await host.lease("a")
            device = os.stat(where).st_dev
            rate = f"{os.major(device)}:{os.minor(device)} 262144"
            with own_group("blkio", blkio__throttle__write_bps_device=rate) as group:
                for pid in [host.pid, *(p.pid for p in hostview.below(host.pid))]:
                    with contextlib.suppress(OSError):
                        (group / "cgroup.procs").write_text(str(pid))
                began = time.monotonic()
                result = await asyncio.wait_for(
                    host.run("a", ["dd", "if=/dev/zero", "of=f", "bs=1M", "count=40", "oflag=direct"], timeout_s=1.5), 15
                )
                assert result["outcome"] in ("timeout", "exited"), result
                assert time.monotonic() - began < 4
                host.kill()
                await host.process.wait()


async def test_x27_deadlines_hold_with_a_twentieth_of_a_processor(state, as_root):
    async with engine_host(state) as host:
        await host.lease("a")
        with own_group("cpu") as group:
            if (group / "cpu.cfs_quota_us").exists():
                (group / "cpu.cfs_period_us").write_text("100000")
                (group / "cpu.cfs_quota_us").write_text("5000")
            else:
                (group / "cpu.max").write_text("5000 100000")
            (group / "cgroup.procs").write_text(str(host.pid))
            outcomes = []
            for _ in range(3):
                began = time.monotonic()
                outcomes.append(((await host.run("a", ["sleep", "60"], timeout_s=0.5))["outcome"], time.monotonic() - began))
            fine = await host.run("a", ["echo", "fine"], timeout_s=5)

    assert [outcome for outcome, _ in outcomes] == ["timeout"] * 3
    assert max(took for _, took in outcomes) < 2.5
    assert fine["stdout"] == b"fine\n"
