"""THREATS C4: the power goes under a server, and what its state directory is worth to the next one.

The file system of the state directory is shut down as `godown -f` of the kernel's own tests does it: from one moment on nothing more reaches the
disk, neither data nor the journal's. What was in memory only is lost with the mount; the next mount replays the journal, as a boot does.
"""

import asyncio
import contextlib
import fcntl
import os
import struct
import subprocess
from pathlib import Path

import pytest
from tests import leftovers
from tests.images import small_directory
from tests.security.faults.ground import taken_out
from tests.serving import ended, started

import untax

LONG = os.environ.get("UNTAX_LONG") == "1"
EXT4_IOC_SHUTDOWN, NO_LOG_FLUSH = 0x8004587D, 2
SET_UP = "mkdir -p /opt; head -c 2000000 /dev/urandom >/opt/blob; sha256sum </opt/blob >/opt/sum; echo {n} >/opt/which"
WHOLE = 'test "$(sha256sum </opt/blob)" = "$(cat /opt/sum)" && test "$(cat /opt/which)" = {n}'


class Darkness(Exception):
    """The power is off."""


@contextlib.contextmanager
def mounted(image: Path, where: Path):
    done = subprocess.run(["mount", "-o", "loop", str(image), str(where)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no loop mount here: {done.stderr.strip()}")
    try:
        yield
    finally:
        taken_out(image, where)


def cut_power(where: Path) -> None:
    fd = os.open(where, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.ioctl(fd, EXT4_IOC_SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
    except OSError as exc:
        pytest.skip(f"no shutdown of an ext4 here: {exc.strerror}")
    finally:
        os.close(fd)


async def test_c4_after_a_power_cut_the_state_loads_and_nothing_dirty_or_torn_is_leased(tmp_path, as_root):
    """Cut while stages are built, boxes written to and snapshots saved: what was said to be saved is there, what is leased is whole and clean."""
    leftovers.adopt_orphans()
    image, where = tmp_path / "disk.img", tmp_path / "mnt"
    where.mkdir()
    with open(image, "wb") as file:
        file.truncate(1 << 30)
    subprocess.run(["mkfs.ext4", "-qF", str(image)], check=True)
    specs = [untax.EnvSpec(f"dir:{small_directory()}", setup=(SET_UP.format(n=n),), user="root") for n in range(40)]
    saved: dict[str, int] = {}
    built: set[int] = set()
    off = asyncio.Event()

    async def use(engine, numbers):
        for n in numbers:
            async with engine.lease(specs[n]) as box:
                whole = (await box.shell(WHOLE.format(n=n))).exit_code == 0
                if off.is_set():
                    raise Darkness  # a command whose disk went under it failed as it would anywhere, and nobody is left to see it
                assert whole
                built.add(n)
                await box.write("/workspace/mark", str(n).encode())
                snapshot = await box.snapshot()
                await snapshot.save()
                saved[snapshot.id] = n

    async def check(engine):
        async with engine.lease() as box:
            assert await box.list(".") == []
        for n in sorted(built)[-3:]:
            async with engine.lease(specs[n]) as box:
                assert (await box.shell(f"{WHOLE.format(n=n)} && ! test -e /workspace/mark")).exit_code == 0
        for snapshot_id, n in list(saved.items())[-3:]:
            async with engine.restore(snapshot_id) as box:
                assert (await box.shell(WHOLE.format(n=n))).exit_code == 0
                assert await box.read("/workspace/mark") == str(n).encode()

    @contextlib.asynccontextmanager
    async def booted():
        """A server on what the disk holds now, checked, and a client of it."""
        with mounted(image, where):
            served = await started(tmp_path / "s.sock", where / "state", stderr=subprocess.DEVNULL)
            try:
                async with untax.connect(served.url) as engine:
                    await check(engine)
                    yield served, engine
            finally:
                await ended(served)

    for cut in range(8 if LONG else 2):
        enough = len(saved) + 2 + cut
        async with booted() as (served, engine):
            using = [asyncio.ensure_future(use(engine, range(20 * (cut % 2) + k, 20 * (cut % 2) + 20, 3))) for k in range(3)]
            async with asyncio.timeout(30):
                while len(saved) < enough and not any(task.done() for task in using):
                    await asyncio.wait(using, timeout=0.02)
            off.set()
            cut_power(where)
            await served.kill()
            ends = await asyncio.gather(*using, return_exceptions=True)
            off.clear()
        assert all(isinstance(end, untax.UntaxError | Darkness) for end in ends), ends
    async with booted():
        pass
    assert len(saved) >= 4
