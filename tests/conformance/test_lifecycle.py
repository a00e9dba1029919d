"""Leases from beginning to end, on every substrate: reset, release, ledger, and that neighbours do not meet."""

import asyncio
import json

import pytest
from tests import boxview

import untax


async def test_two_leases_do_not_see_each_other_s_files(engine, spec):
    async with engine.lease(spec) as one, engine.lease(spec) as two:
        await one.write("mine", b"1")
        with pytest.raises(untax.NotFound):
            await two.read("mine")
        assert one.id != two.id


async def test_a_reset_is_a_fresh_sandbox(box):
    """Files, processes and sessions of before are gone; the lease goes on."""
    await box.write("left", b"x")
    seconds = boxview.odd_seconds()
    await box.shell(f"(trap '' TERM HUP; setsid nohup sleep {seconds} >/dev/null 2>&1 &)")
    assert await boxview.wait_running(box, f"^{seconds}$")
    await box.reset()

    assert "left" not in [entry.name for entry in await box.list(".")]
    assert not await boxview.is_running(box, f"^{seconds}$")


async def test_a_session_does_not_outlive_a_reset(box):
    session = box.session()
    bash = await session.__aenter__()
    await bash.run("true")
    await box.reset()
    with pytest.raises(untax.UntaxError):
        await bash.run("true")


async def test_a_release_is_safe_to_do_twice(engine, spec):
    """The second one changes nothing: the box stays gone, its ledger as it was, and the engine goes on."""
    box = await engine.acquire(spec)
    await box.release()
    ledger = box.ledger.to_json()
    await box.release()

    assert box.ledger.to_json() == ledger
    assert box.ledger.verdict == "trusted"
    async with engine.lease(spec) as another:
        assert (await another.run(["true"])).exit_code == 0


async def test_release_ends_what_is_still_running(engine, spec):
    """A command in flight when its sandbox ends is the substrate's failure, at once, and never an exit code."""
    box = await engine.acquire(spec)
    task = asyncio.create_task(box.run(["sleep", "60"]))
    await box.run(["true"])
    await box.release()

    with pytest.raises(untax.SandboxLost):
        await asyncio.wait_for(task, 2)


async def test_many_leases_one_after_another(engine, spec, is_slow):
    """The benchmarks of each substrate have hundreds."""
    seen = set()
    count = 6 if is_slow else 30
    for n in range(count):
        async with engine.lease(spec) as box:
            assert (await box.run(["echo", str(n)])).text == f"{n}\n"
            seen.add(box.id)
    assert len(seen) == count


async def test_many_leases_at_once(engine, spec, is_slow):
    async def rollout(n):
        async with engine.lease(spec) as box:
            await box.write("n", str(n).encode())
            return (await box.run(["cat", "n"])).text

    count = 6 if is_slow else 20
    assert await asyncio.gather(*(rollout(n) for n in range(count))) == [str(n) for n in range(count)]


async def test_the_ledger_accounts_for_the_time(engine, spec):
    """Its parts and the holder's own time add up to the whole; an undisturbed rollout can be trusted."""
    async with engine.lease(spec) as box:
        await box.run(["sleep", "0.1"])
        await box.read("/etc/passwd")
    numbers = box.ledger.metrics()

    assert box.ledger.verdict == "trusted"
    assert box.ledger.reason is None
    assert numbers["action_s"] >= 0.1
    assert 0 < box.ledger.tax_s < box.ledger.total_s
    parts = [numbers[f"{part}_s"] for part in ("create", "ready", "setup", "action", "dispatch", "observe", "reset", "cleanup", "queue")]
    covered = sum(parts) + numbers["holder_s"] + numbers["unattributed_s"]
    assert covered == pytest.approx(box.ledger.total_s, rel=0.02, abs=1e-3)
    assert numbers["unattributed_s"] <= max(0.01 * box.ledger.total_s, 0.005)
    json.loads(box.ledger.to_json())


async def test_a_failing_command_leaves_a_trusted_ledger(engine, spec):
    async with engine.lease(spec) as box:
        await box.run(["false"])
        await box.run(["sleep", "5"], timeout_s=0.1)

    assert box.ledger.verdict == "trusted"


async def test_a_paused_box_stands_still_and_goes_on(engine, box, isolated):
    """Nothing inside runs between the two calls."""
    try:
        await box.shell("(while :; do echo x >>beats; sleep 0.01; done) >/dev/null 2>&1 &")
        await box.pause()
    except untax.UsageError as exc:
        pytest.skip(f"the substrate {engine.test_substrate!r} has no way to pause a sandbox: {exc}")
    except untax.UntaxError as exc:
        pytest.skip(f"this host cannot freeze a sandbox: {exc}")
    await box.resume()
    before = (await box.stat("beats")).size if "beats" in [e.name for e in await box.list(".")] else 0
    await box.pause()
    await asyncio.sleep(0.2)
    await box.resume()
    after = await box.shell("s=$(wc -c <beats); while [ $(wc -c <beats) -le $s ]; do sleep 0.01; done; echo $s", timeout_s=5)

    assert after.exit_code == 0
    assert int(after.text) - before < 40  # 0.2 s of beats would be some 20 lines of 2 bytes


async def test_a_lease_that_expires_is_lost_and_says_so(engine, spec):
    box = await engine.acquire(spec, ttl_s=0.3)
    with pytest.raises(untax.SandboxLost):
        await asyncio.wait_for(box.run(["sleep", "30"]), 5)
    await box.release()
