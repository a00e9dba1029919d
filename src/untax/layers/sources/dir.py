"""`dir:`, a directory that is a root file system already, used where it lies. Nothing is ever written to it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat

from untax.core.errors import UsageError
from untax.core.root import Root
from untax.core.spec import require_text
from untax.core.stage import Identity
from untax.layers.sources.host import machine_id

# Not software but this machine: to show one of them is never what somebody meant by a root file system.
_NO_IMAGES = ("/boot", "/dev", "/etc", "/home", "/proc", "/root", "/run", "/sys", "/tmp", "/var")
_KERNEL_OWN = ("/proc", "/sys", "/dev")


def make(scheme: str, name: str) -> DirectoryImage:
    del scheme  # there is one
    return DirectoryImage(name)


class DirectoryImage:
    def __init__(self, path: str) -> None:
        if not require_text("image", path).startswith("/"):
            raise UsageError(f"image {f'dir:{path}'!r}: give the directory by an absolute path")
        if ".." in path.split("/"):
            raise UsageError(f"image {f'dir:{path}'!r}: give the directory by a path without '..'")
        self._path = path

    async def identify(self) -> Identity:
        """Which directory it is, and how its two upper levels look. What changes further down changes nothing here."""
        return await asyncio.to_thread(self._identify)

    # Not `in_thread`, which waits for its work also when the caller has gone: this makes nothing, and a file system that does
    # not answer would hold up the caller beyond its deadline.
    async def root(self) -> Root:
        return Root(layers=(await asyncio.to_thread(self._require),))

    def _identify(self) -> Identity:
        path = self._require()
        found = hashlib.sha256(os.fsencode(path))
        for line in _looks(path):
            found.update(b"\0" + line)
        return Identity(f"dir:{machine_id()}:{found.hexdigest()}", is_portable=False)

    def _require(self) -> str:
        """The directory, as every link on the way to it has it."""
        try:
            path = os.path.realpath(self._path)
        except OSError as exc:  # some links of /proc can be read and not followed
            raise UsageError(f"image {f'dir:{self._path}'!r}: {exc.strerror}") from exc
        if not os.path.isdir(path):
            raise UsageError(f"image {f'dir:{self._path}'!r}: there is no such directory")
        if path == "/" or path in _NO_IMAGES or path.startswith(tuple(f"{place}/" for place in _KERNEL_OWN)):
            raise UsageError(
                f"image {f'dir:{self._path}'!r}: {path} is this machine's own; use 'host' to show its programs and nothing else"
            )
        return path


def _looks(path: str) -> list[bytes]:
    top = os.lstat(path)
    lines = [b"%d %d %o %d" % (top.st_dev, top.st_ino, top.st_mode, top.st_mtime_ns)]
    for name in sorted(os.listdir(path)):
        below = os.lstat(os.path.join(path, name))
        lines.append(b"%b %o %d %d" % (os.fsencode(name), below.st_mode, below.st_ino, below.st_mtime_ns))
        if stat.S_ISDIR(below.st_mode):
            lines += _level(os.path.join(path, name))
    return lines


def _level(path: str) -> list[bytes]:
    try:
        with os.scandir(path) as found:
            return sorted(b"%b %d" % (os.fsencode(entry.name), entry.stat(follow_symlinks=False).st_mtime_ns) for entry in found)
    except OSError:
        return []
