"""THREATS 3: the kernel says no, to one call or for want of descriptors, processes or memory.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
"""

import asyncio
import contextlib
import os
import shutil
import subprocess

import pytest
from tests import hostview
from tests.enginehost import Refused, engine_host
from tests.security.conftest import LONG
from tests.security.faults.ground import (
    INFRASTRUCTURE,
    launcher_of,
    own_group,
    strace,
    wait_clean,
    works,
)

import untax


@pytest.mark.parametrize(
    "call",
    [
        "umount2",
        "clone",
        "fsopen",
        "fsconfig",
        "fsmount",
        "move_mount",
        "mount_setattr",
        "mkdirat",
        "sethostname",
        "setresuid",
        "capset",
        "epoll_ctl",
    ]
    + (["pivot_root", "clone3", "openat2", "write", "seccomp", "setns", "chdir"] if LONG else []),
)
async def test_x13_a_single_call_that_fails_is_rolled_back(state, call):
    """For the first, second, third … time that it is made: a typed error or none, and then everything is as before."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    async with engine_host(state) as host:
        await host.lease("first")
        await host.call("release", box="first")
        launcher = launcher_of(host.pid)
        met = 0
        for turn in range(1, 12 if LONG else 8):
            when = (
                turn if turn < (6 if LONG else 3) else 1
            )  # where what was made ahead served all of these on a busy machine: until it does not
            if turn != when and met:
                break
            async with strace(launcher, f"inject={call}:error=EBUSY:when={when}") as struck:
                # One finds what was made ahead, the other does not.
                names = {"b": {}, "c": {"workdir": "/elsewhere"}}
                tries = [asyncio.wait_for(host.lease(name, spec, wait_s=8.0), 20) for name, spec in names.items()]
                for name, refused in zip(names, await asyncio.gather(*tries, return_exceptions=True), strict=True):
                    if refused is None:
                        await asyncio.wait_for(host.call("release", box=name), 20)
                    else:
                        assert isinstance(refused, Refused) and set(refused.families) & INFRASTRUCTURE, refused
            met += len(struck)
            await host.lease("after")
            assert (await host.run("after", ["echo", "ok"]))["stdout"] == b"ok\n"
            await host.call("release", box="after")
        remaining = hostview.eventually(lambda: not hostview.held(host.pid), 5)
        pid = host.pid
        assert remaining or hostview.held(host.pid) <= 1  # one may be kept ready
    assert not await wait_clean(state, pid, 10)
    if not met and os.geteuid() != 0:
        pytest.skip(f"root: an ordinary user's launcher does not make the call {call}")
    assert met, f"nobody makes the call {call} while a sandbox is made"


@pytest.mark.parametrize(
    ("error", "kind"), [("EIO", untax.SubstrateError), ("ENOMEM", untax.SubstrateError), ("EACCES", untax.PermissionDenied)]
)
async def test_x9_x13_a_working_directory_that_the_kernel_fails_is_no_result(state, error, kind):
    """As on a disk that is full or broken; one that the workload has closed to itself is its own affair."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    async with untax.Engine("namespace", state_dir=state, limits="warn") as engine, engine.lease() as box:
        await box.run(["true"])  # it has its name by now
        (worker,) = [one for one in hostview.below(box._sandbox.agent_pid) if one.comm == "cell-worker"]
        async with strace(worker.pid, f"inject=chdir:error={error}") as struck:
            async with asyncio.timeout(20):
                with pytest.raises(kind):
                    await box.run(["true"])
                with pytest.raises(kind):
                    async with box.session():
                        pass
        assert len(struck) >= 2
        assert (await box.run(["echo", "ok"])).text == "ok\n"


async def test_x14_out_of_descriptors_is_a_refusal(state):
    async with engine_host(state) as host:
        await host.lease("a")
        used = (await host.call("ping"))["descriptors"]
        subprocess.run(["prlimit", "--pid", str(host.pid), f"--nofile={used + 4}:"], check=True)
        failures = []
        for n in range(12):
            try:
                await asyncio.wait_for(host.lease(f"b{n}", {}, wait_s=5.0), 10)
            except Refused as refused:
                assert set(refused.families) & INFRASTRUCTURE, refused
                failures.append(refused)
        assert failures
        assert (await host.run("a", ["echo", "still"]))["stdout"] == b"still\n"
        subprocess.run(["prlimit", "--pid", str(host.pid), "--nofile=4096:"], check=True)
        await host.lease("c")
        assert (await host.run("c", ["true"]))["exit_code"] == 0
        pid = host.pid
    assert not await wait_clean(state, pid, 10)


async def test_x15_an_engine_that_cannot_fork_refuses(state, as_root):
    async with engine_host(state) as host:
        await host.lease("a")
        tree = [host.pid, launcher_of(host.pid)]
        with own_group("pids") as group:
            for pid in tree:
                (group / "cgroup.procs").write_text(str(pid))
            current = int((group / "pids.current").read_text())
            (group / "pids.max").write_text(str(current + 2))
            for n in range(4):
                with contextlib.suppress(Refused):
                    await asyncio.wait_for(host.lease(f"b{n}", {}, wait_s=5.0), 10)
            assert (await host.run("a", ["echo", "still"]))["stdout"] == b"still\n"
            (group / "pids.max").write_text("max")
            await host.lease("c")
            assert (await host.run("c", ["true"]))["exit_code"] == 0
            pid = host.pid
            host.kill()
            await host.process.wait()
    assert await works(state)
    assert not await wait_clean(state, pid, 10)


async def test_x16_an_engine_short_of_memory_blames_no_sandbox(state, as_root):
    """The engine is killed for its own memory: clients see its end, and the next start is clean."""
    async with engine_host(state) as host:
        await host.lease("a")
        with own_group("memory") as group:
            for name in ("memory.limit_in_bytes", "memory.max"):
                if (group / name).exists():
                    (group / name).write_text(str(24 << 20))
            (group / "cgroup.procs").write_text(str(host.pid))
            outcome: object
            try:
                outcome = await asyncio.wait_for(host.run("a", ["head", "-c", "60000000", "/dev/zero"], cap=60_000_000, timeout_s=20), 25)
            except (EOFError, Refused, TimeoutError) as exc:
                outcome = exc
            if isinstance(outcome, dict):
                assert outcome["outcome"] == "exited", "a sandbox was blamed"
            pid = host.pid
            with contextlib.suppress(ProcessLookupError):
                host.kill()
            await host.process.wait()
    assert await works(state)
    assert not await wait_clean(state, pid, 10)


async def test_x17_a_sandbox_out_of_memory_is_told_with_evidence(engine, box, enforced):
    enforced("memory_mib")
    async with engine.lease(limits=untax.Limits(memory_mib=128)) as small:
        result = await small.run(["python3", "-c", "x = bytearray(1 << 30)"])
        after = await small.run(["echo", "alive"])

    assert (result.outcome, result.exit_code) == ("oom", 137)
    assert result.oom_kills >= 1
    assert after.stdout == b"alive\n"
    assert small.ledger.verdict == "trusted"
