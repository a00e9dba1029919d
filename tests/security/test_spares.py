"""What is made ahead of need: never anybody else's, never stale, never more than a few."""

import asyncio
import os
import shutil
from pathlib import Path

import pytest
from tests import leftovers
from tests.images import small_image

import untax

MIB = 1 << 20


def spares() -> int:
    """How many there are, by their control groups or, where there are none, not to be seen from here."""
    groups = {
        where for where in leftovers._cgroups() if f"-{os.getpid()}-" in where and "/spare-" in where and not where.endswith(".agent")
    }
    return max((sum(Path(other).parent == Path(one).parent for other in groups) for one in groups), default=0)


async def quiet(engine, spec, leases: int = 2) -> None:
    """Leased and given back, and time for the launcher to prepare for the next."""
    for _ in range(leases):
        async with engine.lease(spec) as box:
            await box.run(["true"])
    await asyncio.sleep(0.2)


async def test_one_that_was_made_ahead_holds_nothing_of_its_predecessors(engine, spec):
    for n in range(4):
        await quiet(engine, spec, leases=1)
        async with engine.lease(spec) as box:
            assert (await box.shell("ls -A . /tmp /dev/shm | grep -c predecessor")).text == "0\n"
            await box.shell(f"echo {n} | tee predecessor /tmp/predecessor /dev/shm/predecessor")


async def test_r7_limits_hold_for_one_that_was_made_ahead_for_others(engine, box, enforced):
    enforced("disk_mib", "pids")
    await quiet(engine, untax.EnvSpec())
    narrow = untax.EnvSpec(limits=untax.Limits(disk_mib=24, pids=20, memory_mib=128))
    async with engine.lease(narrow) as tight:
        full = await tight.shell("dd if=/dev/zero of=a bs=1M count=20; dd if=/dev/zero of=b bs=1M count=20", timeout_s=60)
        crowd = await tight.shell("for i in $(seq 60); do sleep 5 & done 2>/dev/null; wait", timeout_s=2)
        oom = await tight.run(["python3", "-c", "x = bytearray(400 << 20)"])
    await quiet(engine, narrow)
    async with engine.lease(untax.EnvSpec(limits=untax.Limits(disk_mib=200, pids=200))) as wide:
        roomy = await wide.shell("dd if=/dev/zero of=a bs=1M count=60 status=none; stat -c %s a", timeout_s=60)

    assert full.outcome == "disk_full"
    assert crowd.limit_kind == "pids"
    assert oom.outcome == "oom"
    assert int(roomy.text) == 60 * MIB


async def test_an_image_that_was_replaced_is_seen_as_it_is_now(engine, tmp_path):
    """Removed and made again under the same name: what was prepared over the old one is not used."""
    image = tmp_path / "image"
    for content in ("old", "new"):
        shutil.rmtree(image, ignore_errors=True)
        shutil.copytree(small_image("namespace").removeprefix("dir:"), image, symlinks=True)
        (image / "content").write_text(content)
        os.chmod(image / "content", 0o644)
        spec = untax.EnvSpec(image=f"dir:{image}")
        await quiet(engine, spec, leases=3)
        async with engine.lease(spec) as box:
            assert await box.read("/content") == content.encode()


async def test_there_are_never_more_than_a_few(engine, tmp_path):
    for n in range(4):
        image = tmp_path / f"image-{n}"
        shutil.copytree(small_image("namespace").removeprefix("dir:"), image, symlinks=True)
        await quiet(engine, untax.EnvSpec(image=f"dir:{image}"))

        assert spares() <= leftovers.SPARES


async def test_a_dropped_snapshot_goes_although_something_was_made_ahead_over_it(engine, spec):
    async with engine.lease(spec) as box:
        await box.write("kept", b"x")
        snapshot = await box.snapshot()
    for _ in range(3):
        async with engine.restore(snapshot) as again:
            assert await again.read("kept") == b"x"
    await asyncio.sleep(0.2)
    await snapshot.drop()
    async with engine.lease(spec) as box:
        with pytest.raises(FileNotFoundError):
            await box.read("kept")
