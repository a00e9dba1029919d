"""THREATS 3, 4.8 and 4.9 where they concern one engine with many clients: who dies, when, and what is left of it.

The server is `untax serve` in a process of its own, clients are programs of their own where they are killed.
"""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests import failpoints, hostview, leftovers, wallclock
from tests.security.faults.ground import is_traced, launcher_of, strace
from tests.serving import ended, environment, script, serving, started

import untax
from untax import substrates

LONG = os.environ.get("UNTAX_LONG") == "1"

HOLDER = """
import asyncio, sys, untax
async def main():
    async with untax.connect(sys.argv[1]) as engine:
        boxes = await asyncio.gather(*(engine.acquire() for _ in range(int(sys.argv[2]))))
        await asyncio.gather(*(box.shell("echo x >f; (sleep 1000 &)") for box in boxes))
        if "fork" in sys.argv:
            import os
            if os.fork() == 0:
                import time
                print("forked", os.getpid(), flush=True)
                os.close(1)
                time.sleep(600)
        else:
            print("held", flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def baseline():
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    leftovers.adopt_orphans()
    return leftovers.Watch(marks=()).take()


@pytest.fixture
async def served(tmp_path):
    async with serving(tmp_path, "--lease", "2", "--drain", "0") as served:
        yield served


async def gone(pid: int, within_s: float) -> bool:
    """Whether all sandboxes below the server are."""
    return await asyncio.to_thread(hostview.eventually, lambda: not hostview.held(pid), within_s)


async def holds(pid: int, count: int) -> bool:
    """Whether it soon has that many sandboxes that are somebody's: what is made ahead gives way in its own time."""
    return await asyncio.to_thread(hostview.eventually, lambda: hostview.held(pid) == count, 5)


async def clean(before: leftovers.Snapshot, state: Path, pid: int) -> dict[str, list[str]]:
    watch = leftovers.Watch(marks=(str(state), f"-{pid}-"))

    def left() -> dict[str, list[str]]:
        now = watch.take()
        found = now.more_than(leftovers.Snapshot(processes=before.processes, namespaces=now.namespaces, descriptors=now.descriptors))
        sandboxes = leftovers.named(state, "sbx-")
        return found | ({"entries": sandboxes} if sandboxes else {})

    await asyncio.to_thread(hostview.eventually, lambda: not left(), 10, 0.1)
    return left()


# ---- the server ----


async def test_c1_a_killed_server_takes_its_sandboxes_along_and_its_clients_are_told(tmp_path, baseline):
    """X1 with 50 leases: each is a lost sandbox and the rollout's verdict infra; started anew on the same socket, the same clients go on."""
    state, path = tmp_path / "state", tmp_path / "s.sock"
    first = await started(path, state)
    async with untax.connect(first.url) as engine:
        boxes = await asyncio.gather(*(engine.acquire() for _ in range(50)))
        running = [asyncio.ensure_future(box.run(["sleep", "600"])) for box in boxes]
        waiting = asyncio.ensure_future(boxes[0].snapshot())
        await asyncio.gather(*(box.write("f", b"x") for box in boxes[1:]))
        pid = first.process.pid
        await first.kill()

        ends = await asyncio.wait_for(asyncio.gather(*running, return_exceptions=True), 10)
        assert {type(end) for end in ends} == {untax.SandboxLost}, [end for end in ends if not isinstance(end, untax.SandboxLost)]
        assert {box.ledger.verdict for box in boxes} == {"infra"}
        with contextlib.suppress(untax.UntaxError):  # taken, or told: never waited for for ever
            await asyncio.wait_for(waiting, 10)
        with pytest.raises(untax.BackendError, match="untax serve"):
            await engine.acquire(wait_s=1.0)

        second = await started(path, state)
        try:
            async with engine.lease() as box:
                assert (await box.run(["echo", "ok"])).stdout == b"ok\n"
            with pytest.raises(untax.SandboxLost):
                await boxes[1].reset()
            await asyncio.gather(*(box.release() for box in boxes))
        finally:
            await ended(second)
    await ended(first)
    assert not await clean(baseline, state, pid)


async def test_c1_a_server_killed_in_the_middle_of_a_snapshot_ends_no_command_with_a_result(tmp_path, baseline):
    """The child that takes the snapshot has the command's process act for it, and is ended with the rest: that process must not go on from there,
    with the end of a call that it never made. The launcher is slow to end the sandbox, so that there is time to tell."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    state = tmp_path / "state"
    served = await started(tmp_path / "s.sock", state)
    pid = served.process.pid
    try:
        async with untax.connect(served.url) as engine:
            box = await engine.acquire()
            try:
                await box.snapshot()
            except untax.SubstrateUnavailable as exc:
                pytest.skip(str(exc))
            running = asyncio.ensure_future(box.run(["sleep", "600"]))
            launcher = launcher_of(pid)
            [sleeper] = await hostview.until(lambda: [one for one in hostview.below(launcher) if one.comm == "sleep"])
            # The second time that it puts something into that process is after the first call was made there. It stops then.
            async with strace(launcher, "inject=process_vm_writev:signal=STOP:when=2", "inject=pidfd_send_signal:delay_enter=1s"):
                taking = asyncio.ensure_future(box.snapshot())
                await hostview.until(lambda: is_traced(sleeper.pid))
                await asyncio.sleep(0.5)
                assert not taking.done(), "it is held up there"
                await served.kill()
                with pytest.raises(untax.SandboxLost):
                    await asyncio.wait_for(running, 30)
                with contextlib.suppress(untax.UntaxError):
                    await asyncio.wait_for(taking, 30)
    finally:
        await ended(served)
    await ended(await started(tmp_path / "s.sock", state))  # removes what the slow launcher had no time for
    assert not await clean(baseline, state, pid)


async def test_c2_a_server_killed_in_the_middle_of_anything_leaves_no_client_waiting(tmp_path, baseline):
    """Leases, forks, resets and snapshots under way: every one of them ends, by its result or by a typed error."""
    state, path = tmp_path / "state", tmp_path / "s.sock"
    for after_s in (0.1, 0.4, 0.7) if LONG else (0.3,):
        served = await started(path, state)
        async with untax.connect(served.url) as engine:

            async def use(kind, engine=engine):
                while True:
                    async with engine.lease() as box:
                        await box.write("f", b"x")
                        if kind == "reset":
                            await box.reset()
                        elif kind == "fork":
                            async with engine.fork(await box.snapshot(), 3):
                                pass

            using = [asyncio.ensure_future(use(kind)) for kind in ("lease", "reset", "fork") for _ in range(4)]
            await asyncio.sleep(after_s)
            pid = served.process.pid
            await served.kill()
            ends = await asyncio.wait_for(asyncio.gather(*using, return_exceptions=True), 15)
            assert all(isinstance(end, (untax.SubstrateError, untax.PoolError)) for end in ends), ends
        await ended(served)
        second = await started(path, state)
        async with untax.connect(second.url) as engine, engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0
        await ended(second)
        assert not await clean(baseline, state, pid)


async def test_c2_a_server_killed_at_each_named_step_leases_nothing_half_made_afterwards(tmp_path, baseline):
    """The same clients go on with its successor on the same socket and state, which the next step kills in turn."""
    state, path = tmp_path / "state", tmp_path / "s.sock"
    snapshots, pids, engine = [], [], None

    async def use() -> None:
        async with engine.lease() as box:
            assert await box.list(".") == []
            await box.write("mark", b"x")
            await box.reset()
            assert await box.list(".") == []
            await box.write("mark", b"x")
            snapshots.append(await box.snapshot())
            await snapshots[-1].save()
            async with engine.fork(snapshots[-1], 2) as group:
                assert [await fork.read("mark") for fork in group] == [b"x", b"x"]

    async with contextlib.AsyncExitStack() as stack:
        for point in failpoints.POINTS:
            served = await started(path, state, failpoint=point)
            pids.append(served.process.pid)
            engine = engine or await stack.enter_async_context(untax.connect(served.url))
            with contextlib.suppress(untax.SubstrateError, untax.PoolError):  # who only gives back need not hear of it
                await asyncio.wait_for(use(), 15)
            assert await asyncio.wait_for(served.process.wait(), 5) == -signal.SIGKILL, point
            if point == "snapshot.saved":
                saved = snapshots[-1].id
            await ended(served)
        served = await started(path, state)
        await use()
        async with engine.restore(saved) as box:  # which was killed right behind that
            assert await box.read("mark") == b"x"
        await ended(served)
    for pid in pids:
        assert not await clean(baseline, state, pid)


async def test_c3_a_killed_agent_is_a_lost_sandbox_on_both_sides(served):
    async with untax.connect(served.url) as engine:
        async with engine.lease() as box, engine.lease() as other:
            inits = {agent.pid for agent in hostview.agents(served.process.pid)}
            await other.release()
            [victim] = {agent.pid for agent in hostview.agents(served.process.pid)}
            os.kill(victim, signal.SIGKILL)
            with pytest.raises(untax.SandboxLost):
                await asyncio.wait_for(box.run(["sleep", "60"]), 5)
            assert await gone(served.process.pid, 5)
            assert len(inits) == 2
        theirs = await engine.ledgers()
        assert [one["verdict"] for one in theirs] == ["trusted", "infra"]
        async with engine.lease() as fresh:
            assert fresh.id != box.id
            assert (await fresh.run(["true"])).exit_code == 0


async def test_c7_a_second_server_refuses_and_takes_over_once_the_first_is_dead(tmp_path):
    """Neither on the same state directory nor at the same socket. An embedded engine works beside a server, and sweeps only what the dead left."""
    state, path = tmp_path / "state", tmp_path / "s.sock"
    first = await started(path, state)
    async with untax.connect(first.url) as engine:
        box = await engine.acquire()
        with pytest.raises(AssertionError, match=re.escape(f"already: {first.url}; connect to it")):
            await started(tmp_path / "other.sock", state, stderr=subprocess.DEVNULL)
        with pytest.raises(AssertionError, match="listens there already"):
            await started(path, tmp_path / "other", stderr=subprocess.DEVNULL)
        async with untax.Engine(state_dir=state) as other, other.lease() as neighbour:
            await neighbour.run(["true"])
        assert (await box.run(["echo", "untouched"])).stdout == b"untouched\n"
        await first.kill()
        assert path.is_socket()  # left behind

        second = await started(path, state)
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        async with engine.lease() as fresh:
            await fresh.run(["true"])
        await box.release()
    await ended(second)
    await ended(first)
    assert not path.exists()


@pytest.mark.parametrize("by_s", [3600, -3600])
async def test_c12_a_server_whose_wall_clock_steps_keeps_every_lease_and_deadline(tmp_path, by_s):
    """X24: during an action, with a lease whose time is short, and for a client that lost its connection."""
    env, flag = wallclock.shifted(tmp_path, by_s)
    served = await started(tmp_path / "s.sock", tmp_path / "state", "--lease", "5", "--drain", "0", env=env)
    try:
        async with untax.connect(served.url) as engine:
            box, short = await engine.acquire(), await engine.acquire(ttl_s=2)
            began = time.monotonic()
            running = asyncio.ensure_future(box.run(["sleep", "60"], timeout_s=1))
            await asyncio.sleep(0.2)
            flag.touch()
            engine._connection._stream._sock.shutdown(socket.SHUT_RDWR)  # it comes back, as itself
            assert (await asyncio.wait_for(running, 10)).outcome == "timeout"
            assert time.monotonic() - began < 3
            await short.run(["true"])
            with pytest.raises(untax.SandboxLost, match="its lease of 2 s"):
                await asyncio.wait_for(short.run(["sleep", "60"]), 10)
            assert 1.9 < time.monotonic() - began < 6
            assert (await box.run(["echo", "kept"])).stdout == b"kept\n"
            await box.reset()
            await asyncio.gather(box.release(), short.release())
            assert box.ledger.verdict == "trusted"
            assert all(value >= 0 for one in await engine.ledgers() for _, *times in one["parts"] for value in times)
    finally:
        await ended(served)


async def test_c14_a_server_that_is_told_to_end_destroys_everything_and_exits_with_0(tmp_path, baseline):
    """50 live sandboxes, gone within --drain + 10 s. A holder that ends in time is not disturbed."""
    state = tmp_path / "state"
    async with serving(tmp_path, "--drain", "1") as served:
        pid = served.process.pid
        async with untax.connect(served.url) as engine, untax.connect(served.url) as brief:
            boxes = await asyncio.gather(*(engine.acquire() for _ in range(50)))
            async with brief.lease() as box:
                stopping = asyncio.ensure_future(served.stop())
                result = await box.shell("sleep 0.3; echo done")
            assert (result.text, box.ledger.verdict) == ("done\n", "trusted")
            began = time.monotonic()
            assert await asyncio.wait_for(stopping, 15) == 0
            assert time.monotonic() - began < 11
            for box in boxes:
                with pytest.raises(untax.SandboxLost, match="server was stopped"):
                    await box.run(["true"])
                assert box.ledger.verdict == "infra"
    assert not await clean(baseline, state, pid)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
async def test_ctrl_c_and_a_closed_terminal_end_a_server_too(tmp_path, baseline, number):
    async with serving(tmp_path, "--drain", "0") as served, untax.connect(served.url) as engine:
        await engine.acquire()
        assert await asyncio.wait_for(served.stop(number), 15) == 128 + number
    assert not await clean(baseline, tmp_path / "state", served.process.pid)


async def test_x3_a_frozen_server_holds_up_nobody_past_its_deadline(served):
    """Actions do not pass through it; a request ends by its deadline; thawed, everything is as it was."""
    async with untax.connect(served.url) as engine, engine.lease() as box:
        with hostview.stopped(served.process.pid):
            assert (await asyncio.wait_for(box.run(["echo", "on"]), 5)).stdout == b"on\n"
            began = time.monotonic()
            with pytest.raises((untax.PoolTimeout, untax.BackendError)):
                await engine.acquire(wait_s=0.5)
            assert time.monotonic() - began < 5
        await box.reset()
        async with engine.lease() as other:
            assert (await other.run(["true"])).exit_code == 0
        assert len(hostview.agents(served.process.pid)) == 1
        assert await holds(served.process.pid, 1)  # what nobody waited for was given back
    assert box.ledger.verdict == "trusted"


async def test_x14_a_server_out_of_descriptors_refuses_and_goes_on(served):
    pid = served.process.pid
    async with untax.connect(served.url) as engine, engine.lease() as box:
        used = len(os.listdir(f"/proc/{pid}/fd"))
        subprocess.run(["prlimit", "--pid", str(pid), f"--nofile={used + 3}:"], check=True)
        failures = 0
        taken = []
        for _ in range(6):
            try:
                taken.append(await asyncio.wait_for(engine.acquire(wait_s=5.0), 15))
            except untax.UntaxError:
                failures += 1
        assert failures
        for _ in range(5):
            with contextlib.suppress(untax.BackendError):
                other = untax.connect(served.url)
                await asyncio.wait_for(other.start(), 10)
                await other.aclose()
        assert (await box.run(["echo", "still"])).stdout == b"still\n"
        subprocess.run(["prlimit", "--pid", str(pid), "--nofile=4096:"], check=True)
        await asyncio.gather(*(one.release() for one in taken))
        async with untax.connect(served.url) as fresh, fresh.lease() as another:
            assert (await another.run(["true"])).exit_code == 0


# ---- the client ----


async def test_x14_a_client_out_of_descriptors_is_told_and_its_leases_go_back(served):
    source = """
    import asyncio, os, resource, sys, untax
    async def main():
        async with untax.connect(sys.argv[1]) as engine:
            box = await engine.acquire()
            used = max(int(one) for one in os.listdir("/proc/self/fd"))
            gaps = [os.open("/dev/null", os.O_RDONLY) for _ in range(used)]
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(gaps) + 3, 4096))
            boxes, errors = [], []
            for _ in range(8):
                try:
                    boxes.append(await engine.acquire())
                except untax.BackendError as exc:
                    errors.append(str(exc))
            resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
            assert errors and all("ulimit" in one for one in errors), errors
            assert (await box.run(["true"])).exit_code == 0
            async with engine.lease() as other:
                await other.run(["true"])
            print("told", len(boxes), flush=True)
            sys.stdin.read()
    asyncio.run(main())
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", textwrap.dedent(source), served.url, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, env=environment()
    )  # fmt: skip
    told, count = (await asyncio.wait_for(process.stdout.readline(), 30)).split()
    assert told == b"told"
    held = 1 + int(count)
    assert await asyncio.to_thread(hostview.eventually, lambda: len(hostview.agents(served.process.pid)) == held, 5)
    await process.communicate(b"")
    assert process.returncode == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
async def test_x33_c15_what_a_dead_client_held_is_gone_within_its_lease_time(served, number):
    process, line = await script(HOLDER, served.url, "8")
    assert line == b"held\n"
    assert len(hostview.agents(served.process.pid)) == 8
    process.send_signal(number)
    await process.wait()
    assert await gone(served.process.pid, 3)  # the lease's 2 s and one more; a dead process is noticed at once
    async with untax.connect(served.url) as engine:
        theirs = await engine.ledgers()
        assert len(theirs) == 8
        if number == signal.SIGKILL:
            assert {one["verdict"] for one in theirs} == {"infra"}
        async with engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0


async def test_x33_a_fork_that_keeps_the_connection_does_not_keep_the_leases(served):
    """The child of a killed client holds copies of every descriptor: it is the process that counts."""
    process, line = await script(HOLDER, served.url, "3", "fork")
    child = int(line.split()[1])
    process.kill()
    await process.wait()
    try:
        assert await gone(served.process.pid, 3)
    finally:
        os.kill(child, signal.SIGKILL)


async def test_x33_a_stopped_client_keeps_what_it_holds(served):
    """It is not dead: when it goes on, its sandboxes are there."""
    process, _ = await script(HOLDER, served.url, "2")
    process.send_signal(signal.SIGSTOP)
    await asyncio.sleep(3)
    assert len(hostview.agents(served.process.pid)) == 2
    process.kill()
    await process.wait()
    assert await gone(served.process.pid, 3)


async def test_a_forked_process_says_that_it_must_connect_anew(served):
    source = """
    import asyncio, os, sys, untax
    async def main():
        async with untax.connect(sys.argv[1]) as engine:
            box = await engine.acquire()
            if os.fork() == 0:
                try:
                    await engine.acquire()
                except untax.UsageError as exc:
                    os.write(1, str(exc).encode())
                os._exit(0)
            os.wait()
            await box.run(["true"])
            await box.release()
    asyncio.run(main())
    """
    process, _ = await script(textwrap.dedent(source), served.url, wait_line=False)
    said, _ = await process.communicate()
    assert b"connect anew here" in said
    assert process.returncode == 0


STRANGER = """
import asyncio, concurrent.futures.thread, os, socket, sys, time
import untax, untax.remote.engine, untax.layers.merged
os.setgid(65534)
os.setuid(65534)
async def main():
    try:
        async with untax.connect(sys.argv[1]):
            print("connected")
    except untax.UntaxError as exc:
        print(type(exc).__name__, exc)
if sys.argv[1].startswith("unix:"):
    asyncio.run(main())
else:
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        sock.listen()
        print("up", flush=True)
        time.sleep(60)
"""


@pytest.fixture
def stranger():
    if os.geteuid() != 0:
        pytest.skip("root: to become another user")


async def test_another_user_is_refused_whatever_the_file_s_mode(served, stranger):
    place = served.path.parent
    for directory in (place, *place.parents):
        if directory.stat().st_mode & 0o005 == 0:
            directory.chmod(directory.stat().st_mode | 0o011)

    async def told():
        process, line = await script(STRANGER, served.url)
        await process.wait()
        return line.decode()

    assert "UsageError" in (said := await told()) and "another user's" in said
    served.path.chmod(0o666)
    assert "UsageError this server serves user 0, not user 65534" in await told()


async def test_a_server_of_another_user_is_not_believed(tmp_path, stranger):
    """Somebody else may have taken the place where one's own is expected."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "s.sock"))
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STRANGER, str(sock.fileno()), pass_fds=(sock.fileno(),), stdout=asyncio.subprocess.PIPE, env=environment()
        )  # fmt: skip
        assert await process.stdout.readline() == b"up\n"
    try:
        with pytest.raises(untax.UsageError, match="runs as user 65534"):
            await untax.connect(f"unix:{tmp_path}/s.sock").start()
    finally:
        process.kill()
        await process.communicate()


# ---- many at once ----


async def test_q1_64_clients_at_once_never_share_a_sandbox(served):
    """Each with a connection of its own, leasing one after another: all are served, and nobody finds what another wrote."""
    seen: list[str] = []

    async def client(number):
        async with untax.connect(served.url) as engine:
            for turn in range(3):
                async with engine.lease() as box:
                    seen.append(box.id)
                    assert await box.list() == []
                    await box.write("mine", f"{number}/{turn}".encode())
                    assert (await box.run(["cat", "mine"])).text == f"{number}/{turn}"

    await asyncio.gather(*(client(number) for number in range(64)))
    assert len(seen) == len(set(seen)) == 192
    assert not hostview.agents(served.process.pid)
    assert await holds(served.process.pid, 0)


async def test_q2_releases_at_once_and_under_actions_have_one_winner(served):
    async with untax.connect(served.url) as engine:
        box = await engine.acquire()
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await asyncio.sleep(0.05)
        await asyncio.gather(box.release(), box.release(), box.release())
        with pytest.raises(untax.SandboxLost, match="released"):
            await running
        assert box.ledger.verdict == "trusted"

        async with engine.lease() as writer:
            writing = asyncio.ensure_future(writer.shell("for i in $(seq 2000); do echo $i >>log; done"))
            snapshot = await writer.snapshot()
            async with engine.fork(snapshot, 4) as group:
                parts = [await fork.shell("cat log 2>/dev/null || true") for fork in group]
            await writing
            assert len({part.stdout for part in parts}) == 1
            lines = parts[0].text.split()
            assert lines == [str(number) for number in range(1, len(lines) + 1)]
    assert not hostview.agents(served.process.pid)
    assert await holds(served.process.pid, 0)


async def test_q2_a_broken_connection_in_the_middle_of_everything_loses_nothing(served):
    """Cut again and again while leases, resets and actions go on: each rollout comes to its own end, none is leased twice."""
    async with untax.connect(served.url) as engine:
        done: list[str] = []

        async def use(number):
            for _ in range(4):
                async with engine.lease() as box:
                    await box.write("mine", b"%d" % number)
                    await box.reset()
                    assert await box.list() == []
                    done.append(box.ledger.sandboxes[0])

        async def cut():
            while True:
                await asyncio.sleep(0.02)
                if (stream := engine._connection._stream) is not None:
                    stream._sock.shutdown(socket.SHUT_RDWR)

        cutting = asyncio.ensure_future(cut())
        try:
            await asyncio.gather(*(use(number) for number in range(8)))
        finally:
            cutting.cancel()
        assert len(done) == len(set(done)) == 32
        assert all(one["verdict"] == "trusted" for one in await engine.ledgers())
        assert await gone(served.process.pid, 5)


async def test_the_start_line_and_the_service_manager_s_word(tmp_path):
    """A script learns the path from one line, a service manager by its own socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        manager.settimeout(20)
        argv = [
            sys.executable,
            "-m",
            "untax.cli",
            "serve",
            "--socket",
            str(tmp_path / "s.sock"),
            "--state-dir",
            str(tmp_path / "state"),
            "--limits",
            "warn",
        ]
        env = environment() | {"NOTIFY_SOCKET": str(tmp_path / "notify")}
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE, env=env)
        line = (await process.stdout.readline()).decode()
        assert line.startswith(f"listening on unix:{tmp_path}/s.sock ")
        assert manager.recv(100) == b"READY=1"
        ran = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "untax.cli", "run", "--json", "--connect", f"unix:{tmp_path}/s.sock", "--", "echo", "over there",
            stdout=asyncio.subprocess.PIPE, env=environment(),
        )  # fmt: skip
        said = json.loads((await ran.communicate())[0])
        assert (said["stdout"], said["ledger"]["verdict"]) == ("over there\n", "trusted")
        process.terminate()
        assert await process.wait() == 0
        assert manager.recv(100) == b"STOPPING=1"
        process._transport.close()
