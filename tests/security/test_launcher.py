"""One launcher serves all sandboxes: nothing that happens in one, or to a child that works for one, holds it up for the others."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import hostview
from tests.security.faults.test_disks import FUSE_DAEMON

import untax

ROOT = os.geteuid() == 0


def children(pid: int) -> set[int]:
    """Those that work for it; not sandboxes, which it may start at any time, until they have died and wait for it to notice."""
    found = (hostview.seen(int(child)) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    return {child.pid for child in found if child and not (child.is_init and child.state != "Z")}


def processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.asynccontextmanager
async def held(launcher: int, before: set[int]):
    """The child that the launcher just forked, stopped; it goes on afterwards."""
    await asyncio.sleep(0)  # until it is asked for; from there on every moment counts
    deadline = time.monotonic() + 1
    while not (new := children(launcher) - before) and time.monotonic() < deadline:
        pass
    stopped: list[int] = []
    for pid in new:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            stopped.append(pid)
    try:
        yield
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


async def test_sandboxes_that_end_beside_a_long_snapshot_leave_the_launcher_idle(engine, box, spec):
    """The snapshot's child holds copies of what the launcher watched: closed here and open there, it was told of them without end."""
    launcher = box._sandbox._launcher.pid
    neighbours = [await engine.acquire(spec) for _ in range(3)]
    spent_s = None
    for _ in range(50):  # until one is caught before it is over
        before = children(launcher)
        asked = asyncio.ensure_future(box._sandbox.snapshot())
        async with held(launcher, before):
            await asyncio.sleep(0.1)
            if not asked.done():
                while neighbours:
                    await neighbours.pop().release()
                await asyncio.sleep(0.3)
                before_s = processor_s(launcher)
                await asyncio.sleep(1)
                spent_s = processor_s(launcher) - before_s
        with contextlib.suppress(untax.BackendError):  # its own patience may have ended meanwhile
            await (await asyncio.wait_for(asked, 20)).discard()
        if spent_s is not None:
            break
    assert spent_s is not None, "no snapshot could be held"
    assert spent_s < 0.3


async def test_a_snapshot_behind_a_worker_that_is_kept_from_coming_is_refused_in_time(engine, box):
    """The workload can stop a worker on its way in. The sandbox is as it was, and can be frozen when the worker has come after all."""
    launcher = box._sandbox._launcher.pid
    refused = False
    for i in range(50):  # until one is caught on its way
        before = children(launcher)
        entering = asyncio.ensure_future(box._sandbox.provide_worker("", name=f"late{i}"))
        async with held(launcher, before):
            await asyncio.sleep(0.1)
            if not entering.done():
                with pytest.raises(untax.BackendError, match="on its way in"):
                    await asyncio.wait_for(box._sandbox.snapshot(), 15)
                refused = True
                assert (await box.run(["echo", "on"])).stdout == b"on\n"
        with contextlib.suppress(untax.UntaxError):
            await entering
        if refused:
            break
    assert refused, "no worker could be held"
    taken = await asyncio.wait_for(box._sandbox.snapshot(), 15)
    await taken.discard()


@pytest.mark.skipif(not ROOT, reason="needs root: mounts a file system")
async def test_a_link_in_the_place_of_a_directory_is_not_followed_to_the_host(tmp_path, spec):
    """What an upper directory holds is looked at without leaving it: here the link leads to a file system that never answers."""
    where = tmp_path / "hung"
    where.mkdir()
    daemon = await asyncio.create_subprocess_exec(sys.executable, "-c", FUSE_DAEMON, str(where), stdout=asyncio.subprocess.PIPE)
    try:
        said = (await asyncio.wait_for(daemon.stdout.readline(), 5)).decode().split()
        if not said or said[0] != "up":
            pytest.skip("FUSE cannot be mounted here")
        async with untax.Engine("namespace", state_dir=tmp_path / "state") as engine, engine.lease(spec) as box:
            try:
                moved = await box.run(["sh", "-c", f"mv /home /elsewhere && ln -s {where} /home"], user="root")
                assert moved.exit_code == 0, moved
                assert not await asyncio.wait_for(box._sandbox.is_pristine(), 5)
                async with asyncio.timeout(5), engine.lease(spec) as other:
                    assert (await other.run(["echo", "fine"])).stdout == b"fine\n"
            finally:
                daemon.kill()  # the kernel then answers for it
    finally:
        with contextlib.suppress(ProcessLookupError):
            daemon.kill()
        await daemon.wait()
        subprocess.run(["umount", "-l", str(where)], capture_output=True)
