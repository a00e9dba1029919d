"""THREATS 3 on gVisor: kernels that die or hang, calls that are cut off, images that are damaged."""

import asyncio
import os
import random
import signal
import time

import pytest
from tests.images import small_directory
from tests.security.gvisor.conftest import agents

import untax
from untax.substrates import _gvisor_groups

SPEC = untax.EnvSpec(image=f"dir:{small_directory()}", isolation="gvisor")


def kernel_of(box):
    """The process that is this box's kernel."""
    [kernel] = agents(box.sandbox.pid)
    return kernel.pid


async def test_x4_a_kernel_that_dies_is_a_lost_sandbox_within_a_second(engine):
    async with engine.lease(SPEC) as box:
        running = asyncio.create_task(box.run(["sleep", "60"]))
        await box.run(["true"])
        began = time.monotonic()
        os.kill(kernel_of(box), signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await running
        assert time.monotonic() - began < 1
        assert box.ledger.verdict == "infra"


async def test_x19_c9_a_sandbox_deleted_by_hand_is_lost_and_replaced(engine):
    async with engine.lease(SPEC) as box:
        running = asyncio.create_task(box.run(["sleep", "60"]))
        await box.run(["true"])
        await box.sandbox._runsc.call("delete", "--force", box.id, timeout_s=20)
        with pytest.raises(untax.SandboxLost):
            await asyncio.wait_for(running, 5)
        assert box.ledger.verdict == "infra"
    async with engine.lease(SPEC) as another:
        assert (await another.run(["echo", "fine"])).text == "fine\n"


async def test_x5_a_kernel_that_hangs_is_lost_at_the_deadline(engine):
    async with engine.lease(SPEC) as box:
        os.kill(kernel_of(box), signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"], timeout_s=1)
        assert time.monotonic() - began < 2.5
    async with engine.lease(SPEC) as fresh:
        assert (await fresh.run(["echo", "fine"])).text == "fine\n"


async def test_x34_a_lease_that_is_cut_off_anywhere_leaves_nothing(engine):
    """Whenever the caller leaves, what was begun is ended: no process, no group, no file."""
    chance = random.Random(5)
    for _ in range(6):
        coming = asyncio.create_task(engine.acquire(SPEC))
        await asyncio.sleep(chance.random() * 0.25)
        coming.cancel()
        for box in await asyncio.gather(coming, return_exceptions=True):
            if not isinstance(box, BaseException):
                await box.release()
    substrate = engine.substrate
    async with asyncio.timeout(10):
        while left := [*substrate._live, *substrate._holding.path.glob("sbx-*"), *_groups(substrate)]:
            await asyncio.sleep(0.05)
    assert left == []


def _groups(substrate):
    return [path for tree in _gvisor_groups._trees() for path in tree.parent.glob(f"*{substrate._holding.path.name}/sbx-*")]


async def test_an_image_without_a_shell_runs_what_it_has(engine, tmp_path):
    """The cell needs nothing of the image; what does is told what is missing."""
    image = tmp_path / "bare"
    image.mkdir()
    (image / "only").write_text("x")
    (image / "only").chmod(0o755)
    async with engine.lease(untax.EnvSpec(image=f"dir:{image}", isolation="gvisor")) as box:
        await box.write("made", b"1")
        assert (await box.run(["/only"])).exit_code == 126
        told = await box.shell("echo hi")
        assert (told.exit_code, told.stdout) == (127, b"")


async def test_a_damaged_image_is_said_and_made_anew(engine, tmp_path):
    """A create that fails has given back what it took, and the next one has an image that is whole."""
    image = tmp_path / "image"
    image.mkdir()
    (image / "here").write_text("whole")
    spec = untax.EnvSpec(image=f"dir:{image}", isolation="gvisor")
    async with engine.lease(spec) as box:
        path = box.sandbox._root.layers[-1]
        assert await box.read("/here") == b"whole"
    with open(path, "r+b") as file:
        file.truncate(5000)
    with pytest.raises(untax.CreateError):
        await engine.acquire(spec)
    async with engine.lease(spec) as box:
        assert await box.read("/here") == b"whole"
