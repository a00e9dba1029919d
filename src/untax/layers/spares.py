"""What a store keeps beside its layers only to be faster the next time: git mirrors, package managers' caches, blobs and layers half fetched.

All of it can be had again, so it is the first to go when room is short, and goes by itself when nobody has used it for long.
A mirror, cache or layer has a file `<name>.use` beside it: whoever uses it holds that locked, its time is that of the last use, and in it
stands what the directory takes, because to count that takes a look at every file. A blob is its downloader's while it is locked.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from untax._remove import remove_tree
from untax.layers._descent import Descent, walk
from untax.layers._flock import take_shared, try_exclusive

MIRRORS, CACHES, DOWNLOADS, ARRIVALS = PLACES = ("mirrors", "caches", "downloads", "arrivals")
_DAY_S = 86_400.0
# A partial blob or layer that nobody has gone on with in a week is not wanted any more; a repository or an image comes back after a pause.
_KEPT_S = {MIRRORS: 30 * _DAY_S, CACHES: 30 * _DAY_S, DOWNLOADS: 7 * _DAY_S, ARRIVALS: 7 * _DAY_S}
_USE = ".use"
_GONE = ".gone-"
_MOST_DIGITS = 20


@dataclass(frozen=True, slots=True)
class Spare:
    path: Path
    bytes: int
    """What it takes on the disk, as of its last use."""
    used: float
    """Seconds since the epoch."""

    @property
    def name(self) -> str:
        return f"{self.path.parent.name}/{self.path.name}"

    def is_old(self, now: float) -> bool:
        return now - self.used > _KEPT_S[self.path.parent.name]


@contextlib.contextmanager
def using(path: Path) -> Iterator[None]:
    """Keep the mirror, cache or arriving layer at `path`, which may still have to be made, from being removed. Blocks at most for an instant."""
    fd = take_shared(_use_of(path))
    if fd is None:
        raise FileNotFoundError(path.parent)
    try:
        os.utime(fd)
        yield
    finally:
        with contextlib.suppress(OSError):
            _note(fd, bytes_below(path))
        os.close(fd)


def spares(root: Path) -> list[Spare]:
    """All of a store's, the one that has not been used for longest first."""
    found = [*_directories(root / MIRRORS), *_directories(root / CACHES), *_directories(root / ARRIVALS), *_blobs(root / DOWNLOADS)]
    return sorted(found, key=lambda spare: (spare.used, spare.name))


def is_in_use(spare: Spare) -> bool:
    """Whether some process uses it now."""
    fd = _try_lock(spare)
    if fd is None:
        return True
    os.close(fd)
    return False


def remove(spare: Spare) -> bool:
    """Take it away unless somebody uses it. Whoever wants it from now on begins anew."""
    fd = _try_lock(spare)
    if fd is None:
        return False
    gone = spare.path.with_name(f"{_GONE}{secrets.token_hex(8)}")
    try:
        with contextlib.suppress(FileNotFoundError):
            os.rename(spare.path, gone)
        for beside in (_use_of(spare.path), spare.path.with_name(f"{spare.path.name}.lock")):
            beside.unlink(missing_ok=True)
    finally:
        os.close(fd)
    remove_tree(gone)
    return True


def remove_old(root: Path) -> list[Spare]:
    """Remove what nobody has used for long, and what a process that died was removing."""
    for place in PLACES:
        for path in (root / place).glob(f"{_GONE}*"):
            remove_tree(path)
    now = time.time()
    return [spare for spare in spares(root) if spare.is_old(now) and remove(spare)]


def bytes_below(top: Path) -> int:
    """What is there takes on the disk, as far as it can be seen: it may be a workload's, and changing."""
    total = 0
    linked: set[tuple[int, int]] = set()
    try:
        with Descent(top) as descent:
            for visit in walk(descent, closed=lambda: None):
                if visit is None:
                    continue
                found = visit[1]
                if found.st_nlink > 1 and not stat.S_ISDIR(found.st_mode):
                    if (found.st_dev, found.st_ino) in linked:
                        continue
                    linked.add((found.st_dev, found.st_ino))
                total += found.st_blocks * 512
    except OSError:
        pass  # gone on the way: what was counted up to here
    return total


def _directories(place: Path) -> Iterator[Spare]:
    for path in _entries(place):
        with contextlib.suppress(OSError):
            if path.name.startswith(".") or not stat.S_ISDIR((found := path.lstat()).st_mode):
                continue
            noted = _noted(path)
            yield Spare(path, *noted) if noted is not None else Spare(path, bytes_below(path), found.st_mtime)


def _blobs(place: Path) -> Iterator[Spare]:
    for path in _entries(place):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if path.name.startswith("sha") and stat.S_ISREG(found.st_mode):
                yield Spare(path, found.st_blocks * 512, found.st_mtime)


def _entries(place: Path) -> list[Path]:
    try:
        return sorted(place.iterdir())
    except OSError:
        return []


def _try_lock(spare: Spare) -> int | None:
    if spare.path.parent.name == DOWNLOADS:
        return try_exclusive(spare.path)
    return try_exclusive(_use_of(spare.path), create=True)


def _use_of(path: Path) -> Path:
    return path.with_name(path.name + _USE)


def _note(fd: int, size: int) -> None:
    """Others who use it too may be writing the same: all write a number of one length."""
    os.pwrite(fd, b"%0*d" % (_MOST_DIGITS, size), 0)


def _noted(path: Path) -> tuple[int, float] | None:
    """Its size and last use; None where nobody has noted that."""
    try:
        use = _use_of(path)
        text = use.read_bytes()
        return (int(text), use.stat().st_mtime) if len(text) == _MOST_DIGITS and text.isdigit() else None
    except OSError:
        return None
