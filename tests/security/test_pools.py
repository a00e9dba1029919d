"""THREATS 4.8 and 4.9 where a pool is concerned. Cases are named by their ids."""

import asyncio
import os
import signal

import pytest
from tests import hostview, leftovers
from tests.enginehost import engine_host

import untax
from untax import substrates

LONG = os.environ.get("UNTAX_LONG") == "1"


@pytest.fixture
def state(tmp_path):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    leftovers.adopt_orphans()
    return tmp_path / "state"


def pooled(state, **options):
    return untax.Engine("namespace", state_dir=state, pool=untax.PoolOptions(**options))


async def test_c1_a_killed_engine_with_a_warm_pool_leaves_nothing_behind_the_next_start(state):
    async with engine_host(state) as host:
        await host.call("warm", spec={}, n=20)
        await host.lease("a")
        inits = [agent.pid for agent in hostview.agents(host.pid)]
        assert len(inits) >= 20
        host.kill(signal.SIGKILL)
    async with engine_host(state) as host:
        await host.call("warm", spec={}, n=2)
        await host.lease("b")
        assert (await host.run("b", ["echo", "ok"]))["stdout"] == b"ok\n"
        assert all([await asyncio.to_thread(hostview.wait_gone, pid, 10.0) for pid in inits])


async def test_c3_a_killed_agent_is_a_lost_sandbox_and_the_pool_refills_without_it(state):
    async with pooled(state, entries=3) as engine:
        await engine.warm(n=2)
        box = await engine.acquire()
        os.kill(box._sandbox.agent_pid, signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        await box.release()
        assert (box.ledger.verdict, box.ledger.hit.kind) == ("infra", "exact")
        await engine.warm(n=2)
        ids = set()
        for _ in range(3):
            async with engine.lease() as other:
                ids.add(other.id)
        assert box.id not in ids


async def test_c10_parked_sandboxes_killed_at_random_are_never_leased(state):
    """X22; the benchmark `parked_kills` does it ten thousand times."""
    leases = 2000 if LONG else 120
    async with pooled(state) as engine:
        await engine.warm(n=6)
        killed = 0
        for turn in range(leases):
            parked = engine.pooling.driver.parked()
            if turn % 5 == 0 and parked:
                os.kill(parked[turn // 5 % len(parked)].sandbox.agent_pid, signal.SIGKILL)
                killed += 1
            async with engine.lease() as box:
                assert (await box.run(["true"])).exit_code == 0
                assert box.ledger.verdict == "trusted"
        status = engine.pools()
    assert status.died + status.rejected >= killed * 0.9


async def test_c10_a_parked_sandbox_that_is_stopped_does_not_answer_and_is_not_leased(state, monkeypatch):
    """Its socket is open and nobody is behind it: only a round trip shows that."""
    monkeypatch.setattr("untax.standby.READY_TIMEOUT_S", 0.3)
    async with pooled(state) as engine:
        await engine.warm(n=1)
        (standby,) = engine.pooling.driver.parked()
        os.kill(standby.sandbox.agent_pid, signal.SIGSTOP)
        async with asyncio.timeout(10):
            async with engine.lease() as box:
                assert box.id != standby.sandbox.id
                assert (await box.run(["true"])).exit_code == 0


async def test_c11_a_lifetime_that_ends_during_grading_is_a_typed_error_and_the_grader_lives_on(state):
    """X23. A grader has a lifetime of its own; what it has taken stays when the graded box is no more."""
    async with pooled(state) as engine:
        box = await engine.acquire(ttl_s=0.5)
        await box.write("src/a.py", b"a = 1\n")
        async with engine.grader(box, take=("src/**",)) as clean:
            await asyncio.sleep(0.7)
            with pytest.raises(untax.SandboxLost, match="ttl_s"):
                await box.run(["true"])
            assert await clean.read("src/a.py") == b"a = 1\n"
        with pytest.raises(untax.SandboxLost):
            async with asyncio.timeout(5):
                async with engine.grader(box, take=("src/**",)):
                    pass


async def test_q1_64_clients_on_8_sandboxes_share_nothing(state):
    """No sandbox twice at once, none with traces of an earlier lease; `contention` does ten thousand."""
    live: set[str] = set()

    async def client(number):
        for turn in range(40 if LONG else 3):
            async with engine.lease() as box:
                assert box.id not in live
                live.add(box.id)
                result = await box.shell(f"test -e mark; echo $?; echo {number}.{turn} > mark; (sleep 100 &)")
                assert result.stdout == b"1\n"
                live.discard(box.id)

    async with pooled(state, entries=8) as engine:
        await engine.warm(n=8)
        await asyncio.gather(*(client(number) for number in range(64)))
        assert engine.pools().sandboxes <= 8


async def test_q1_who_will_not_wait_is_told_to_try_again(state):
    async with pooled(state, entries=2) as engine:
        held = [await engine.acquire() for _ in range(2)]
        refused = await asyncio.gather(*(engine.acquire(wait_s=0.05) for _ in range(16)), return_exceptions=True)
        assert {type(one) for one in refused} == {untax.PoolTimeout}
        assert all(one.retryable for one in refused)
        for box in held:
            await box.release()
        async with engine.lease(wait_s=5.0):
            pass


async def test_q2_one_sandbox_is_given_back_once_however_often_it_is_released(state):
    async with pooled(state, entries=2) as engine:
        await engine.warm(n=2)
        box = await engine.acquire()
        running = asyncio.ensure_future(box.run(["sleep", "100"]))
        await asyncio.sleep(0.05)
        await asyncio.gather(*(box.release() for _ in range(8)))
        with pytest.raises(untax.SandboxLost):
            await running
        await engine.warm(n=2)
        assert engine.pools().sandboxes == 2


async def test_q6_a_pool_resized_to_zero_during_leases_lets_them_finish(state):
    async with pooled(state) as engine:
        await engine.warm(n=6)
        boxes = [await engine.acquire() for _ in range(4)]
        await engine.warm(n=0)
        assert [(await box.run(["echo", "ok"])).stdout for box in boxes] == [b"ok\n"] * 4
        for box in boxes:
            await box.release()
        await asyncio.to_thread(hostview.eventually, lambda: engine.pools().sandboxes == 0, 5.0, 0.02)
        assert engine.pools().sandboxes == 0
        assert not hostview.agents(os.getpid())


async def test_q3_leases_and_cancellations_at_once_leave_no_place_taken(state):
    async def one(number):
        leasing = asyncio.ensure_future(engine.acquire())
        if number % 3 == 0:
            await asyncio.sleep(0.002 * (number % 7))
            leasing.cancel()
        try:
            box = await leasing
        except asyncio.CancelledError:
            return
        await box.release()

    async with pooled(state, entries=6) as engine:
        await engine.warm(n=3)
        for _ in range(50 if LONG else 3):
            await asyncio.gather(*(one(number) for number in range(40)))
        await engine.warm(n=0)
        await asyncio.to_thread(hostview.eventually, lambda: engine.pools().sandboxes == 0, 5.0, 0.02)
        assert engine.pools().sandboxes == 0
