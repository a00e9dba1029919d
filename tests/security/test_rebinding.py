"""Limits that bind late: a sandbox made ahead of need is held to what its lease asks for, and only the engine can change that."""

import asyncio
import os

import pytest

import untax
from untax.core.substrate import Rebindable

MIB = 1 << 20
MADE_WITH = untax.Limits(memory_mib=128, pids=40, disk_mib=48, cpus=1.0)


@pytest.fixture
def spec():
    return untax.EnvSpec(limits=MADE_WITH)


async def bind(box, **limits) -> None:
    sandbox = box._sandbox
    assert isinstance(sandbox, Rebindable)
    merged = untax.Limits(**{"memory_mib": 128, "pids": 40, "disk_mib": 48, "cpus": 1.0, **limits})
    lacking = {limit.name for limit in await sandbox.bind_limits(merged)}
    assert lacking == {limit.name for limit in box.ledger.unenforced}  # what the host never could; a change was refused for nothing else


async def started_threads(box) -> int:
    code = (
        "import threading\ne = threading.Event(); n = 0\n"
        "try:\n    while n < 300:\n        threading.Thread(target=e.wait, daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nprint(n); e.set()\n"
    )
    return int((await box.run(["python3", "-c", code], timeout_s=60)).text)


async def test_r2_the_process_limit_follows_the_lease_both_ways(box, enforced):
    enforced("pids")
    made = await started_threads(box)
    await bind(box, pids=120)
    more = await started_threads(box)
    await bind(box, pids=20)
    fewer = await started_threads(box)

    assert 20 < made <= 40 < more <= 120
    assert 0 < fewer <= 20


async def test_r3_the_memory_limit_follows_the_lease_both_ways(box, enforced):
    enforced("memory_mib")
    fill = ["python3", "-c", "x = bytearray(200 << 20); print(len(x))"]
    made = await box.run(fill)
    await bind(box, memory_mib=512)
    more = await box.run(fill)
    size = int((await box.shell("df --output=size -k /tmp | tail -1")).text)
    await bind(box, memory_mib=64)
    fewer = await box.run(fill)

    assert (made.outcome, more.outcome, fewer.outcome) == ("oom", "exited", "oom")
    assert size == 256 * 1024  # half of the memory, as for one that is created so


async def test_r7_the_disk_limit_follows_the_lease_both_ways(box, enforced):
    """Also the limit on a single file, which a process keeps from its start."""
    enforced("disk_mib")
    fill = "dd if=/dev/zero of=big bs=1M count=80 status=none; stat -c %s big; rm big"
    made = await box.shell(fill, timeout_s=60)
    await bind(box, disk_mib=160)
    more = await box.shell(fill, timeout_s=60)
    await bind(box, disk_mib=16)
    fewer = await box.shell(fill, timeout_s=60)

    assert int(made.text) <= 48 * MIB
    assert int(more.text) == 80 * MIB
    assert int(fewer.text) <= 16 * MIB


async def test_r7_a_snapshot_goes_on_under_the_limit_bound_last(box, enforced):
    enforced("disk_mib")
    await bind(box, disk_mib=160)
    await box.snapshot()
    written = await box.shell("dd if=/dev/zero of=big bs=1M count=80 status=none; stat -c %s big", timeout_s=60)

    assert int(written.text) == 80 * MIB


async def test_r6_the_processor_share_follows_the_lease(box, enforced):
    enforced("cpus")
    await bind(box, cpus=0.2)
    result = await box.shell("for i in 1 2; do yes >/dev/null & done; wait", timeout_s=2)

    assert result.user_s + result.system_s < 2 * 0.2 * 1.8


@pytest.mark.skipif(os.geteuid() != 0, reason="an engine of an ordinary user has one user id, so nobody else acts")
async def test_whoever_acted_before_acts_under_the_new_limits(box, enforced):
    enforced("disk_mib")
    await box.run(["true"], user="root")
    await bind(box, disk_mib=160)
    written = await box.run(["dd", "if=/dev/zero", "of=/workspace/big", "bs=1M", "count=80", "status=none"], user="root", timeout_s=60)

    assert written.exit_code == 0


async def test_a_sandbox_that_is_gone_says_so(engine, spec):
    box = await engine.acquire(spec)
    sandbox = box._sandbox
    await box.release()
    await asyncio.sleep(0)

    with pytest.raises(untax.SandboxLost):
        await sandbox.bind_limits(untax.Limits())
