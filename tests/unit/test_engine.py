"""Leases on a fake substrate: the order of steps, late bindings, the ledger, and that nothing is ever left behind."""

import asyncio
import logging
import random

import pytest

import untax
from untax.core.substrate import Unenforced
from untax.testing import FakeExit, FakeSubstrate


@pytest.fixture
def fake():
    return FakeSubstrate()


async def test_a_lease_takes_the_steps_in_order(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        await box.run(["true"])

    assert fake.log == [
        "start", "create", "wait_ready", "open_channel", "configure", "spawn true", "destroy", "aclose",
    ]  # fmt: skip
    assert not fake.live


async def test_a_failing_command_is_a_result(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        assert (await box.run(["false"])).exit_code == 1
        missing = await box.run(["no-such-program"])
        assert (missing.exit_code, b"not found" in missing.stderr) == (127, True)
    assert box.ledger.verdict == "trusted"


async def test_what_is_given_at_lease_time_binds_late(fake):
    spec = untax.EnvSpec(env={"A": "1", "B": "1"}, user="one")
    async with untax.Engine(fake) as engine:
        limits = untax.Limits(memory_mib=64)
        async with engine.lease(spec, env={"B": "2"}, user="two", files={"x": b"data"}, limits=limits, network=("a.example:443",)) as box:
            env = (await box.run(["env"])).text.splitlines()
            assert {"A=1", "B=2", "http_proxy=http://127.0.0.1:3128", "PAGER=cat", "HOME=/home/user"} <= set(env)
            assert await box.read("x") == b"data"
        used = fake.specs[0]
        assert (used.user, used.limits, used.network) == ("two", limits, ("a.example:443",))
    numbers = box.ledger.metrics()
    assert numbers["setup_s"] > 0


async def test_nothing_of_the_engine_s_own_environment_gets_in(fake, monkeypatch):
    monkeypatch.setenv("UNTAX_CANARY", "secret")
    async with untax.Engine(fake) as engine, engine.lease() as box:
        assert "secret" not in (await box.run(["env"])).text


async def test_a_substrate_below_the_spec_s_isolation_refuses():
    weak = FakeSubstrate(isolation="none")
    async with untax.Engine(weak) as engine:
        with pytest.raises(untax.UsageError, match="isolation='none'"):
            engine.lease(untax.EnvSpec())
        async with engine.lease(untax.EnvSpec(isolation="none")):
            pass
        async with engine.lease():  # no spec asks for no more than there is
            pass


async def test_set_up_steps_run_before_the_lease_begins(fake):
    async with untax.Engine(fake) as engine:
        async with engine.lease(untax.EnvSpec(setup=("echo one", "echo two"))):
            assert fake.log[-2:] == ["spawn echo one", "spawn echo two"]
        with pytest.raises(untax.CreateError, match="false"):
            await engine.acquire(untax.EnvSpec(setup=("false",)))
        assert not fake.live


async def test_without_layers_there_are_no_snapshots_and_that_is_said(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        for attempt in (box.snapshot, box.diff):
            with pytest.raises(untax.UsageError, match="no layers"):
                await attempt()
        with pytest.raises(untax.UsageError, match="no layers"):
            await engine.restore("snap-" + "0" * 24)
        with pytest.raises(untax.UsageError, match="no layers"):
            await engine.prepare(untax.EnvSpec())
        async with engine.grader(box) as clean:  # which needs none
            assert clean.id != box.id


@pytest.mark.parametrize("step", ["create", "wait_ready", "open_channel"])
async def test_a_step_that_fails_gives_back_what_was_taken(fake, step):
    async with untax.Engine(fake) as engine:
        fake.failures[step] = untax.CreateError("x", "cannot")
        with pytest.raises(untax.CreateError):
            await engine.acquire()
        assert not fake.live
        fake.failures.clear()
        async with engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0


async def test_an_adapter_s_own_exception_becomes_a_backend_error(fake):
    async with untax.Engine(fake) as engine:
        fake.failures["create"] = RuntimeError("sdk")
        with pytest.raises(untax.BackendError, match="sdk"):
            await engine.acquire()


@pytest.mark.parametrize("step", ["create", "wait_ready", "open_channel", "destroy"])
async def test_x34_cancelled_at_any_step_nothing_is_left(fake, step):
    async with untax.Engine(fake) as engine:
        gate = fake.gates[step] = asyncio.Event()

        async def rollout():
            async with engine.lease() as box:
                await box.run(["true"])

        task = asyncio.create_task(rollout())
        while step not in fake.log:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not fake.live
    assert fake.log[-1] == "aclose"


async def test_x34_cancelled_after_any_number_of_turns_nothing_is_left(fake):
    rng = random.Random(34)
    async with untax.Engine(fake) as engine:

        async def rollout():
            async with engine.lease(files={"a": b"1"}) as box:
                await box.run(["true"])
                await box.reset()
                await box.run(["sleep", "9"])

        for _ in range(300):
            task = asyncio.create_task(rollout())
            for _ in range(rng.randrange(60)):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert not fake.live


async def test_cancelling_the_await_kills_the_command(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        task = asyncio.create_task(box.run(["sleep", "60"]))
        while "spawn sleep 60" not in fake.log:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (await box.run(["true"])).exit_code == 0
    assert "killed" in fake.log


async def test_a_sandbox_that_dies_is_lost_at_once_and_destroyed(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        task = asyncio.create_task(box.run(["sleep", "60"]))
        while "spawn sleep 60" not in fake.log:
            await asyncio.sleep(0)
        fake.sandboxes[0].die()
        with pytest.raises(untax.SandboxLost):
            await task
        await asyncio.sleep(0.01)
        assert not fake.live  # without waiting for the holder
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        assert box.ledger.verdict == "infra"
        assert "SandboxLost" in box.ledger.reason


async def test_a13_nonsense_from_the_cell_loses_that_sandbox_alone(fake):
    async with untax.Engine(fake) as engine, engine.lease() as one, engine.lease() as other:
        fake.sandboxes[0].cell.say(b"\xff" * 64)
        with pytest.raises(untax.SandboxLost):
            await one.run(["sleep", "1"])
        assert (await other.run(["true"])).exit_code == 0
        assert (one.ledger.verdict, other.ledger.verdict) == ("infra", "trusted")


async def test_a_lease_ends_by_itself(fake):
    async with untax.Engine(fake) as engine:
        box = await engine.acquire(ttl_s=0.02)
        with pytest.raises(untax.SandboxLost, match="ttl_s"):
            await box.run(["sleep", "60"])
        with pytest.raises(untax.SandboxLost, match="ttl_s"):
            await box.run(["true"])
        await box.release()
        assert not fake.live


async def test_a_released_box_says_so_and_the_verdict_stays(fake):
    async with untax.Engine(fake) as engine:
        box = await engine.acquire()
        running = asyncio.create_task(box.run(["sleep", "60"]))
        await box.run(["true"])
        await box.release()
        await box.release()
        with pytest.raises(untax.SandboxLost, match="released"):
            await running
        with pytest.raises(untax.SandboxLost, match="released"):
            await box.run(["true"])
        assert box.ledger.verdict == "trusted"


async def test_a_reset_gives_a_fresh_sandbox_with_the_same_bindings(fake):
    async with untax.Engine(fake) as engine, engine.lease(env={"A": "late"}, files={"given": b"1"}) as box:
        first = box.id
        await box.write("left", b"x")
        await box.reset()
        assert box.id != first
        assert "A=late" in (await box.run(["env"])).text
        assert await box.read("given") == b"1"
        with pytest.raises(untax.NotFound):
            await box.read("left")
    assert box.ledger.metrics()["reset_s"] > 0
    assert box.ledger.verdict == "trusted"
    assert not fake.live


async def test_a_reset_that_fails_loses_the_box(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        fake.failures["create"] = untax.CreateError("", "no more")
        with pytest.raises(untax.CreateError):
            await box.reset()
        with pytest.raises(untax.SandboxLost, match="no more"):
            await box.run(["true"])
        assert box.ledger.verdict == "infra"
    assert not fake.live


def _held_up(fake):
    """From here on a create of this substrate waits for the event that this gives."""
    may_go, create = asyncio.Event(), fake.create

    async def create_later(spec):
        await may_go.wait()
        return await create(spec)

    fake.create = create_later
    return may_go


async def test_a_box_that_is_released_during_its_reset_stays_released(fake):
    async with untax.Engine(fake) as engine:
        box = await engine.acquire()
        may_go = _held_up(fake)
        resetting = asyncio.ensure_future(box.reset())
        await asyncio.sleep(0)
        await box.release()
        may_go.set()
        with pytest.raises(untax.SandboxLost, match="released"):
            await resetting
        with pytest.raises(untax.SandboxLost, match="released"):
            await box.run(["true"])
    assert not fake.live
    assert box.ledger.verdict == "trusted"


async def test_a_lease_that_comes_up_while_the_engine_closes_is_given_back(fake):
    engine = untax.Engine(fake)
    await engine.start()
    may_go = _held_up(fake)
    acquiring = asyncio.ensure_future(engine.acquire())
    await asyncio.sleep(0)
    closing = asyncio.ensure_future(engine.aclose())
    with pytest.raises(untax.PoolClosed):
        await acquiring
    assert not closing.done()  # what is being created is waited for, so that it is not left behind
    may_go.set()
    await closing

    assert fake.log[-2:] == ["destroy", "aclose"]
    assert not fake.live


async def test_closing_the_engine_ends_every_lease(fake):
    engine = untax.Engine(fake)
    await engine.start()
    boxes = [await engine.acquire() for _ in range(5)]
    await engine.aclose()
    await engine.aclose()

    assert not fake.live
    with pytest.raises(untax.SandboxLost):
        await boxes[0].run(["true"])
    with pytest.raises(untax.PoolClosed):
        await engine.acquire()


async def test_an_engine_that_was_not_started_says_so(fake):
    with pytest.raises(untax.UsageError, match="async with"):
        await untax.Engine(fake).acquire()


async def test_wait_s_bounds_the_time_to_get_a_box(fake):
    async with untax.Engine(fake) as engine:
        gate = fake.gates["create"] = asyncio.Event()
        with pytest.raises(untax.PoolTimeout):
            await engine.acquire(wait_s=0.02)
        gate.set()
    assert not fake.live


@pytest.mark.parametrize("options", [{"wait_s": -1}, {"wait_s": float("nan")}, {"ttl_s": 0}, {"ttl_s": float("inf")}, {"files": {"a": "text"}},
                                     {"env": {"A=": "x"}}, {"limits": 3}, {"network": "some"}, {"user": "a:b"}])  # fmt: skip
async def test_a_bad_option_of_a_lease_is_refused(fake, options):
    async with untax.Engine(fake) as engine:
        with pytest.raises(untax.UsageError):
            engine.lease(**options)
    assert "create" not in fake.log


async def test_a_limit_that_is_not_enforced_is_said_once_and_marked(caplog):
    fake = FakeSubstrate(unenforced=(Unenforced("disk_mib", "no quota here", "use btrfs"),))
    with caplog.at_level(logging.WARNING, "untax"):
        async with untax.Engine(fake) as engine:
            for _ in range(3):
                async with engine.lease() as box:
                    pass
    assert [r.getMessage() for r in caplog.records if "disk_mib" in r.getMessage()] == [
        "not enforced on this host: disk_mib: no quota here; use btrfs"
    ]
    assert box.ledger.unenforced[0].name == "disk_mib"


async def test_strict_limits_refuse_what_cannot_be_enforced():
    fake = FakeSubstrate(unenforced=(Unenforced("disk_mib", "no quota here", "use btrfs"),))
    async with untax.Engine(fake, limits="strict") as engine:
        with pytest.raises(untax.SubstrateUnavailable, match="use btrfs"):
            await engine.acquire()
    assert not fake.live


async def test_another_user_s_hands_are_provided_on_demand(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        assert (await box.run(["true"], user="other")).exit_code == 0
        assert (await box.run(["true"], user="other")).exit_code == 0
    assert fake.log.count("provide_worker other") == 1


async def test_a_substrate_that_cannot_be_used_says_why():
    with pytest.raises(untax.SubstrateUnavailable, match="install it"):
        async with untax.Engine(FakeSubstrate(unavailable="not here: install it")):
            pass


async def test_the_parts_of_a_rollout_add_up(fake):
    programs = {"work": lambda argv, env, stdin: FakeExit(wall_s=1e-5)}
    fake.programs.update(programs)
    async with untax.Engine(fake) as engine, engine.lease() as box:
        for _ in range(20):
            await box.run(["work"])
    numbers = box.ledger.metrics()
    parts = sum(numbers[f"{part}_s"] for part in untax.core.span.PARTS)
    assert parts + numbers["holder_s"] + numbers["unattributed_s"] == pytest.approx(numbers["total_s"], rel=1e-6)
    assert numbers["unattributed_s"] <= max(0.01 * numbers["total_s"], 50e-6)
    assert numbers["action_s"] == pytest.approx(20 * 1e-5, rel=0.01)
    assert numbers["actions"] == 20


async def test_a_batch_answers_each_action(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        values = await box.batch().run(["echo", "hi"]).write("f", b"1").read("f").read("missing").send()
    assert values[0].text == "hi\n"
    assert values[1:3] == [1, b"1"]
    assert isinstance(values[3], untax.NotFound)


async def test_pause_and_resume_reach_the_sandbox(fake):
    async with untax.Engine(fake) as engine, engine.lease() as box:
        await box.pause()
        await box.resume()
    assert fake.log[-4:] == ["pause", "resume", "destroy", "aclose"]


async def test_options_for_a_ready_made_substrate_are_refused(fake):
    with pytest.raises(untax.UsageError):
        untax.Engine(fake, state_dir="/tmp/x")
    with pytest.raises(untax.UsageError):
        untax.Engine(fake, limits="maybe")
