"""THREATS 3.1: an engine that is killed between two steps, or frozen.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
"""

import asyncio
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests import hostview, leftovers
from tests.enginehost import Refused, engine_host
from tests.security.conftest import LONG
from tests.security.faults.ground import (
    INFRASTRUCTURE,
    before,
    launcher_of,
    strace,
    wait_clean,
    works,
)


async def test_x1_a_killed_engine_leaves_nothing_behind_the_next_start(state):
    """With 50 live sandboxes, each with processes: all gone within 10 s of the next start."""
    async with engine_host(state) as host:
        await asyncio.gather(*(host.lease(f"b{n}") for n in range(50)))
        await asyncio.gather(*(host.run(f"b{n}", ["sh", "-c", "echo x >f; (sleep 1000 &)"]) for n in range(50)))
        pid = host.pid
        inits = [a.pid for a in hostview.agents(pid)]
        assert len(inits) >= 50
        host.kill()
        await host.process.wait()
        assert all(hostview.wait_gone(init, 10) for init in inits)
        began = time.monotonic()
        async with engine_host(state) as second:
            await second.lease("a")
            before.update(leftovers.Watch(marks=()).take().processes)  # the second engine's own
            assert not await wait_clean(state.with_name("none"), pid, 10, beside=second.pid)
            assert time.monotonic() - began < 10
            await second.call("release", box="a")
    assert not await wait_clean(state, pid, 10)


@pytest.mark.parametrize("when", [1, 3] if LONG else [1])
@pytest.mark.parametrize("call", ["fsmount", "move_mount", "clone", "clone3", "mkdirat", "setresuid"])
async def test_x2_killed_between_two_steps_of_create(state, call, when):
    """The launcher dies at a named call while it makes a sandbox: a typed error, and the next start is clean."""
    await kill_launcher_at(f"{call}:signal=KILL:when={when}", state, "lease")


@pytest.mark.parametrize("when", [1, 2, 3] if LONG else [1])
@pytest.mark.parametrize("call", ["openat", "waitid", "umount2", "unlinkat", "sendmsg"])
async def test_x2_killed_between_two_steps_of_destroy(state, call, when):
    await kill_launcher_at(f"{call}:signal=KILL:when={when}", state, "release")


@pytest.mark.parametrize("when", [1, 2, 3] if LONG else [1])
@pytest.mark.parametrize("call", ["waitid", "unlinkat", "open_tree", "clone3", "setns"])
async def test_x2_killed_between_two_steps_of_reset(state, call, when):
    """Nobody is killed here: the old sandbox ends by itself when its channel does, before it is asked to go."""
    await kill_launcher_at(f"{call}:signal=KILL:when={when}", state, "reset")


async def test_x2_a_launcher_that_dies_just_after_a_clone_leaves_no_request_waiting(state):
    """Its child, held up in its first call, has the launcher's end of the socket open: no end of file tells of the death."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    for _ in range(5):
        if await _died_just_after_a_clone(state):
            break
    else:
        pytest.fail("what was made ahead of need was held up each time, in the place of the second")


async def _died_just_after_a_clone(state: Path) -> bool:
    """False when it was another's child that was held up."""
    async with engine_host(state) as host:
        await host.lease("first")
        pid, launcher = host.pid, launcher_of(host.pid)
        made = {p.pid for p in hostview.below(launcher)}
        async with strace(launcher, "inject=prctl:delay_enter=8s:when=1"):
            second = asyncio.create_task(host.lease("second", {"workdir": "/elsewhere"}))  # over which nothing was made ahead
            is_born = await asyncio.to_thread(hostview.eventually, lambda: bool({p.pid for p in hostview.below(launcher)} - made), 5)
            os.kill(launcher, signal.SIGSTOP)
            third = asyncio.create_task(host.lease("third"))
            await host.call("ping")  # the engine has asked for the third by now, and has told of the second if that is there
            is_held = is_born and not second.done()
            os.kill(launcher, signal.SIGKILL)
            began = time.monotonic()
            [late] = await asyncio.gather(asyncio.wait_for(third, 12), return_exceptions=True)
            took = time.monotonic() - began
            [outcome] = await asyncio.gather(asyncio.wait_for(second, 30), return_exceptions=True)
        host.kill()
        await host.process.wait()
    is_held = is_held and isinstance(outcome, BaseException)  # the launcher may have answered before it was stopped
    if is_held:
        assert isinstance(late, Refused) and late.kind == "BackendError", late
        assert took < 10  # the creation before it is held up for eight seconds, and until then might have served it
        assert isinstance(outcome, Refused) and set(outcome.families) & INFRASTRUCTURE, outcome
        assert await works(state)
    assert not await wait_clean(state, pid, 10)
    return is_held


async def kill_launcher_at(where: str, state: Path, op: str) -> None:
    """Three of `op` at once while the launcher dies there: each ends, as does a lease after it; nothing is left in the end."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    async with engine_host(state) as host:
        names = [f"b{n}" for n in range(3)]
        for name in ["first", *(names if op != "lease" else [])]:
            await host.lease(name)
            await host.run(name, ["sh", "-c", "echo x >written; (sleep 1000 &)"])
        launcher = launcher_of(host.pid)
        pid = host.pid
        async with strace(launcher, f"inject={where}") as struck:
            outcomes = await asyncio.gather(
                *(asyncio.wait_for(host.call(op, **fields_of(op, name)), 12) for name in names), return_exceptions=True
            )
            outcomes += await asyncio.gather(asyncio.wait_for(host.lease("late"), 12), return_exceptions=True)
            if not hostview.wait_gone(launcher, 0):
                await asyncio.sleep(0.1)  # some calls are only made while nothing else is to be done (QUIET_MS of native/launch.c)
        for outcome in outcomes:
            assert outcome is None or (isinstance(outcome, Refused) and set(outcome.families) & INFRASTRUCTURE), outcome
        # strace, which is killed when it waits for a dead tracee, may have said nothing.
        met = struck or hostview.wait_gone(launcher, 0)
        host.kill()
        await host.process.wait()
    assert await works(state)
    assert not await wait_clean(state, pid, 10)
    if not met and os.geteuid() != 0:
        pytest.skip(f"root: an ordinary user's launcher does not come to {where}")
    assert met, f"nobody comes to {where}"


def fields_of(op: str, name: str) -> dict:
    return {"box": name, "spec": {}, "options": {}} if op == "lease" else {"box": name}


async def test_x3_a_frozen_engine_goes_on_as_if_nothing_had_been(state):
    async with engine_host(state) as host:
        await host.lease("a")
        task = asyncio.create_task(host.run("a", ["sh", "-c", "sleep 1; echo done"], timeout_s=30))
        with hostview.stopped(host.pid):
            await asyncio.sleep(2)
        assert (await asyncio.wait_for(task, 10))["stdout"] == b"done\n"
        assert (await host.run("a", ["echo", "next"]))["stdout"] == b"next\n"


async def test_x3_a_deadline_that_passed_while_frozen_is_a_timeout_and_not_a_loss(state):
    async with engine_host(state) as host:
        await host.lease("a")
        task = asyncio.create_task(host.run("a", ["sleep", "60"], timeout_s=1))
        await asyncio.sleep(0.2)
        with hostview.stopped(host.pid):
            await asyncio.sleep(2.5)
        assert (await asyncio.wait_for(task, 10))["outcome"] == "timeout"
        assert (await host.run("a", ["true"]))["exit_code"] == 0
