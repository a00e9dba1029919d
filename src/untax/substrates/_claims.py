"""Things of the machine that engines share out among themselves: ranges of user ids, and disk images.

A claim is a locked file. The kernel drops the lock when the engine dies, however it dies, so nothing is ever held by
the dead, and nothing that is held can be given twice.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from pathlib import Path

from untax.core.errors import BackendError, SubstrateUnavailable
from untax.substrates._host import ensure_private_dir

# Host ids 0x70000000 and up: above what distributions give to users, subordinate ranges and systemd's containers.
_FIRST_RANGE = 0x7000
_RANGES_EACH = 2048
_BLOCKS = 17
_IMAGES = 64


class Claim:
    """A locked file; `close` gives it back."""

    def __init__(self, fd: int, number: int, path: Path) -> None:
        self._fd = fd
        self.number = number
        self.path = path

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _claim_first(directory: Path, count: int, suffix: str) -> Claim | None:
    ensure_private_dir(directory)
    for number in range(count):
        path = directory / f"{number}{suffix}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as exc:
            raise BackendError("", f"{path}: {exc.strerror}; make it writable, or name another state_dir") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            continue
        return Claim(fd, number, path)
    return None


class RangeClaim:
    """User-id ranges of this engine alone on this machine, whatever its state directory."""

    def __init__(self, state_dir: Path) -> None:
        shared = Path("/run/untax")
        with contextlib.suppress(OSError):
            shared.mkdir(mode=0o700, exist_ok=True)
        claim = _claim_first((shared if os.access(shared, os.W_OK) else state_dir) / "uids", _BLOCKS, "")
        if claim is None:
            raise SubstrateUnavailable("", f"all {_BLOCKS} blocks of user ids are held by other engines; close one")
        self._claim = claim
        self.first = _FIRST_RANGE + claim.number * _RANGES_EACH
        self.count = _RANGES_EACH

    def close(self) -> None:
        self._claim.close()


def mkfs_btrfs() -> str | None:
    return shutil.which("mkfs.btrfs", path="/usr/sbin:/sbin:/usr/local/sbin:/usr/bin:/bin")


def disk_image(state_dir: Path) -> Claim | None:
    """A sparse btrfs image for this engine's upper directories, made when there is none to take over; None without mkfs.btrfs."""
    mkfs = mkfs_btrfs()
    claim = _claim_first(state_dir / "disks", _IMAGES, ".btrfs") if mkfs is not None else None
    if claim is None or mkfs is None:
        return None
    if claim.path.stat().st_size == 0 and not _make_filesystem(mkfs, claim.path):
        claim.close()
        return None
    return claim


def _make_filesystem(mkfs: str, path: Path) -> bool:
    # The smallest node size: each sandbox is a subvolume, and a subvolume costs at least a node of memory.
    free = shutil.disk_usage(path.parent).free
    size = max(free * 8 // 10, 256 << 20)
    try:
        os.truncate(path, size)
        made = subprocess.run([mkfs, "-q", "-f", "-n", "4096", "-m", "single", "-d", "single", str(path)], capture_output=True, check=False)
    except OSError:
        made = None
    if made is None or made.returncode != 0:
        with contextlib.suppress(OSError):
            os.truncate(path, 0)
        return False
    return True
