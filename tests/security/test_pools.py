"""THREATS 4.8 and 4.9 where a pool is concerned. Cases are named by their ids."""

import asyncio
import contextlib
import hashlib
import os
import signal
import subprocess
from pathlib import Path

import pytest
from tests import hostview, leftovers
from tests.enginehost import engine_host
from tests.security.faults.conftest import scratch  # noqa: F401
from tests.security.faults.ground import fill, taken_out

import untax
from untax import substrates

SUM = hashlib.sha256("".join(f"{n}\n" for n in range(1, 501)).encode()).hexdigest()[:8]
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


async def leases(engine, count):
    """As many as can be had; those that cannot end soon, and as the infrastructure's failure."""
    for _ in range(count):
        try:
            async with asyncio.timeout(10), engine.lease(wait_s=1.0) as box:
                assert (await box.run(["true"])).exit_code == 0
        except (untax.SubstrateError, untax.PoolTimeout):
            pass


async def all_is_well(engine):
    async with asyncio.timeout(30):
        await engine.warm(n=2)
        for _ in range(3):
            async with engine.lease(wait_s=10.0) as box:
                assert (await box.shell("cat f; echo x >f; cat f")).text == "x\n"
                assert box.ledger.verdict == "trusted"


async def test_c5_a_pool_on_a_full_disk_goes_on_once_there_is_room(state, scratch):  # noqa: F811
    """What is held goes on meanwhile."""
    async with pooled(scratch / "state", entries=4) as engine:
        await engine.warm(n=2)
        held = await engine.acquire()
        filler = fill(scratch)
        await leases(engine, 4)
        assert (await held.run(["echo", "still"])).text == "still\n"
        filler.unlink()
        (scratch / "filler2").unlink(missing_ok=True)
        await held.release()
        await all_is_well(engine)


async def test_c6_a_pool_whose_disk_turns_read_only_ends_and_the_next_one_finds_it_whole(state, scratch):  # noqa: F811
    """As a file system does that met an error: whatever is open stays so, and it takes a new mount to write again."""
    async with pooled(scratch / "state", entries=4) as engine:
        await engine.warm(n=2)
        held = await engine.acquire()
        subprocess.run(["mount", "-o", "remount,abort", str(scratch)], check=True)  # "ro" is refused while anything is written
        with pytest.raises(OSError, match="Read-only"):
            (scratch / "probe").touch()
        await leases(engine, 4)
        assert (await held.run(["echo", "still"])).text == "still\n"
    image = scratch.parent / "disk.img"
    taken_out(image, scratch)
    subprocess.run(["mount", "-o", "loop", str(image), str(scratch)], check=True)
    async with pooled(scratch / "state", entries=4) as engine:
        await all_is_well(engine)


async def test_c10_x22_parked_sandboxes_killed_at_random_are_never_leased(state):
    """The benchmark `parked_kills` does it ten thousand times."""
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


async def test_c11_x23_a_lifetime_that_ends_during_grading_is_a_typed_error_and_the_grader_lives_on(state):
    """A grader has a lifetime of its own; what it has taken stays when the graded box is no more."""
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
        launcher = engine.substrate._launcher.pid
        assert await asyncio.to_thread(hostview.eventually, lambda: not hostview.held(launcher), 5)


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


def marks(pid: int) -> set[str]:
    """What a live sandbox has to itself: its range of user ids, its control groups, its network."""
    base = int(Path(f"/proc/{pid}/uid_map").read_text().split()[1])
    ours = Path("/proc/self/cgroup").read_text().splitlines()
    groups = [line for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines() if line not in ours]
    ids = {f"ids from {base}"} if os.geteuid() == 0 else set()  # an ordinary user has but one
    return {*ids, *groups, os.readlink(f"/proc/{pid}/ns/net")}


async def test_q4_no_range_of_users_group_or_network_ever_has_two_live_holders(state):
    """Of two engines beside each other, and of one that takes the place of a third that was killed while its sandboxes lived."""
    held: set[str] = set()
    count = 0

    async def client(engine, leases):
        nonlocal count
        for _ in range(leases):
            async with engine.lease() as box:
                own = marks(box._sandbox.agent_pid)
                assert own and not own & held, own & held
                held.update(own)
                await box.run(["true"])
                held.difference_update(own)
                count += 1

    each = 625 if LONG else 15
    async with pooled(state, entries=16) as one:
        async with engine_host(state) as host:
            await asyncio.gather(*(host.lease(f"b{n}") for n in range(8)))
            dying = {agent.pid: marks(agent.pid) for agent in hostview.agents(host.pid)}
            assert len(dying) >= 8
            assert not set.intersection(*dying.values())
            host.kill(signal.SIGKILL)
        async with pooled(state, entries=16) as two:
            boxes = await asyncio.gather(*(two.acquire() for _ in range(8)))
            for box in boxes:
                own = marks(box._sandbox.agent_pid)
                shared = [pid for pid, theirs in dying.items() if own & theirs and hostview.seen(pid) is not None]
                assert not shared, (own, shared)
            await asyncio.gather(*(box.release() for box in boxes))
            await asyncio.gather(*(client(engine, each) for engine in (one, two) for _ in range(8)))
    assert count == 16 * each


# What the attacker runs, over and over, all at once: R1, R3, R7, O3.
ATTACKS = (
    ":(){ :|:& };:",
    "python3 -c 'x = bytearray(8 << 30)'",
    "dd if=/dev/zero of=big bs=1M; rm -f big",
    "yes | head -c 268435456",
)


async def test_q9_seven_ordinary_sandboxes_beside_an_attacker_all_succeed(state):
    """Not one of their commands fails or says something else. How much slower they are `benchmarks/neighbours` shows."""
    limits = untax.Limits(memory_mib=256, pids=64, disk_mib=64)
    async with untax.Engine("namespace", state_dir=state) as engine, engine.lease(limits=limits) as attacker:
        for lacking in attacker.ledger.unenforced:
            if lacking.name in ("pids", "memory_mib"):
                pytest.skip(f"{lacking.name} is not enforced here: {lacking.reason}")

        async def attack(text):
            while True:
                with contextlib.suppress(untax.SpawnFailed):  # its own bomb is in the way of its own commands
                    await attacker.shell(text, timeout_s=1)

        async def ordinary(n):
            async with engine.lease() as box:
                for turn in range(10):
                    done = await box.shell(f"echo {n} {turn} >f; seq 500 | sha256sum | cut -c1-8; cat f")
                    assert (done.exit_code, done.outcome) == (0, "exited"), done
                    assert done.text == f"{SUM}\n{n} {turn}\n"
            assert box.ledger.verdict == "trusted"

        attacking = [asyncio.create_task(attack(text)) for text in ATTACKS]
        try:
            await asyncio.gather(*(ordinary(n) for n in range(7)))
            assert not any(task.done() for task in attacking)
        finally:
            for task in attacking:
                task.cancel()
            await asyncio.gather(*attacking, return_exceptions=True)
        async with engine.lease() as fresh:
            assert (await fresh.run(["echo", "alive"])).stdout == b"alive\n"
