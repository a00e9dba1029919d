"""The disk limit by each means that a host may offer, on scratch file systems of the tests' own."""

import os
import subprocess

import pytest
from tests import hostview

import untax

MIB = 1 << 20
LIMIT_MIB = 32
# The first file keeps the second below the size at which the limit on a single file would come first.
_FILL = "dd if=/dev/zero of=first bs=1M count=4 && dd if=/dev/zero of=big bs=1M count=200"


def _scratch(tmp_path, mkfs: list[str], options: str):
    """A loop mount of a fresh file system; skips where this kernel cannot."""
    if os.geteuid() != 0:
        pytest.skip("loop mounts need root")
    image, place = tmp_path / "image", tmp_path / "scratch"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(512 * MIB)
    subprocess.run([*mkfs, str(image)], check=True, capture_output=True)
    mounted = subprocess.run(["mount", "-o", f"loop,{options}", str(image), str(place)], capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"this kernel does not mount {' '.join(mkfs)} with {options}: {mounted.stderr.strip()}")
    return place


def _unmount(place):
    """What an engine removes in the background may hold it for a moment."""
    assert hostview.eventually(lambda: subprocess.run(["umount", str(place)], capture_output=True).returncode == 0, 20, 0.1)


@pytest.fixture
def with_project_quotas(tmp_path):
    place = _scratch(tmp_path, ["mkfs.ext4", "-q", "-F", "-O", "project,quota"], "prjquota")
    yield place
    _unmount(place)


@pytest.fixture
def btrfs_with_quotas(tmp_path):
    place = _scratch(tmp_path, ["mkfs.btrfs", "-q", "-f"], "defaults")
    subprocess.run(["btrfs", "quota", "enable", str(place)], check=True, capture_output=True)
    yield place
    _unmount(place)


async def _fills_to_its_limit(state_dir, mode: int) -> None:
    spec = untax.EnvSpec(limits=untax.Limits(disk_mib=LIMIT_MIB))
    async with untax.Engine("namespace", state_dir=state_dir, limits="strict") as engine:
        assert engine.substrate.host.disk_mode == mode
        for _ in range(2):  # the second one must not pay for what the first one wrote
            async with engine.lease(spec) as box:
                full = await box.shell(_FILL, timeout_s=60)
                size = int((await box.shell("stat -c %s big")).text)
                again = await box.shell("rm big && echo ok >small && cat small")

            assert full.outcome == "disk_full", (full, size)
            assert LIMIT_MIB * MIB // 2 < size <= LIMIT_MIB * MIB
            assert again.text == "ok\n"


async def test_r7_project_quotas_hold(with_project_quotas):
    await _fills_to_its_limit(with_project_quotas / "state", 1)


async def test_r7_quotas_of_btrfs_hold(btrfs_with_quotas):
    await _fills_to_its_limit(btrfs_with_quotas / "state", 2)


async def test_r7_an_image_of_our_own_holds(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("a disk image needs root")
    await _fills_to_its_limit(tmp_path / "state", 3)


async def test_r7_memory_on_request_holds(tmp_path):
    """As an ordinary user too: the one disk limit that needs nothing of the host."""
    spec = untax.EnvSpec(limits=untax.Limits(disk_mib=LIMIT_MIB))
    async with untax.Engine("namespace", state_dir=tmp_path / "state", disk="tmpfs") as engine, engine.lease(spec) as box:
        full = await box.shell(_FILL, timeout_s=60)
        size = int((await box.shell("stat -c %s big")).text)
        unenforced = [limit.name for limit in box.ledger.unenforced]

    assert full.outcome == "disk_full"
    assert size <= LIMIT_MIB * MIB
    assert "disk_mib" not in unenforced
