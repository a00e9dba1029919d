"""The files of virtual machines: disks, sealed memory, and machines that were saved.

What several machines share cannot be written to by any of them: the base disk is opened for reading, and kernel and saved memory are
sealed memory files, which nobody can write to any more, whoever gets hold of them.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from untax._remove import remove_tree
from untax.core.errors import BackendError

_MIB = 1 << 20
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_COPY_AT_ONCE = 8 << 20


# ---- memory files ----


def sealed(name: str, data: bytes) -> int:
    """A descriptor of a memory file with `data` that cannot be changed any more."""
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
    seal(fd)
    return fd


def seal(fd: int) -> None:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)


def blank_memory(size: int) -> int:
    fd = os.memfd_create("untax-ram", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    return fd


def copy_sparse(source: int, target: int) -> int:
    """Copy the whole file but its holes; gives how many bytes that were."""
    size = os.fstat(source).st_size
    os.ftruncate(target, size)
    at = copied = 0
    while at < size:
        try:
            at = os.lseek(source, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # nothing but a hole is left
                break
            raise
        end = os.lseek(source, at, os.SEEK_HOLE)
        while at < end:
            data = os.pread(source, min(end - at, _COPY_AT_ONCE), at)
            if not data:
                raise BackendError("", "a saved machine became shorter while it was read")
            at += os.pwrite(target, data, at)
            copied += len(data)
    return copied


# ---- disks ----


def mke2fs() -> str | None:
    return shutil.which("mke2fs", path=_SYSTEM_PATH)


def nameless(directory: Path) -> int:
    """A file of its own that goes with its last descriptor."""
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT):
            raise
    path = directory / f"disk-{secrets.token_hex(6)}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    path.unlink()
    return fd


def blank_disk(directory: Path, size: int) -> int:
    """An empty ext4 without a journal: what is on it ends with its machine, however that ends."""
    tool = mke2fs()
    assert tool is not None  # or the substrate is not available
    fd = nameless(directory)
    try:
        os.ftruncate(fd, size)
        made = subprocess.run(
            [tool, "-q", "-F", "-t", "ext4", "-O", "^has_journal,^resize_inode", "-m", "0", "-E", "lazy_itable_init=1,nodiscard", f"/proc/self/fd/{fd}"],
            pass_fds=[fd], stdin=subprocess.DEVNULL, capture_output=True, env={"PATH": _SYSTEM_PATH, "LC_ALL": "C"},
        )  # fmt: skip
        if made.returncode != 0:
            raise BackendError("", f"mke2fs: {made.stderr[-500:].decode(errors='replace').strip()}")
    except BaseException:
        os.close(fd)
        raise
    return fd


# ---- saved machines ----


@dataclass(slots=True)
class Saved:
    """A machine as it stood before it was told who it is. Its memory is at hand as long as this is open."""

    directory: Path
    ram_fd: int

    def disk(self, directory: Path) -> int:
        """A copy of its own disk, for one machine."""
        fd = nameless(directory)
        try:
            with (self.directory / "disk").open("rb") as source:
                copy_sparse(source.fileno(), fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def state(self) -> int:
        return os.open(self.directory / "state", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        if self.ram_fd >= 0:
            os.close(self.ram_fd)
            self.ram_fd = -1


class SavedMachines:
    """By key, below a directory that engines share; the least recently used go when there are more than `keep`."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self.keep = keep

    def open(self, key: str) -> Saved | None:
        """Blocking: its memory is read into a sealed file, once for all machines of this engine."""
        directory = self._root / key
        try:
            with (directory / "ram").open("rb") as file:
                os.utime(directory)
                fd = blank_memory(0)
                try:
                    copy_sparse(file.fileno(), fd)
                    seal(fd)
                except BaseException:
                    os.close(fd)
                    raise
        except FileNotFoundError:
            return None
        return Saved(directory, fd)

    def put(self, key: str, ram_fd: int, disk_fd: int, state_fd: int, about: dict[str, object]) -> Saved:
        """Whole or not there. Takes `ram_fd` over, sealed; nobody has it mapped for writing any more."""
        making = self._root / f"making-{os.getpid()}-{secrets.token_hex(4)}"
        try:
            making.mkdir(mode=0o700)
            for name, fd in (("ram", ram_fd), ("disk", disk_fd), ("state", state_fd)):
                with (making / name).open("xb") as file:
                    copy_sparse(fd, file.fileno())
            (making / "about.json").write_text(json.dumps({**about, "created": time.time()}))
            seal(ram_fd)
            with contextlib.suppress(OSError):  # another engine was first
                making.rename(self._root / key)
        except OSError as exc:
            raise BackendError(
                "", f"a machine could not be saved: {exc.strerror}; free space in {self._root}, or name another state_dir"
            ) from exc
        finally:
            remove_tree(making)
        self._forget_old()
        return Saved(self._root / key, ram_fd)

    def drop(self, key: str) -> None:
        """It did not go on: the next one is booted."""
        remove_tree(self._root / key)

    def _forget_old(self) -> None:
        found = sorted(self._all(), reverse=True)
        for _, path in found[self.keep :]:
            remove_tree(path)

    def _all(self) -> Iterator[tuple[float, Path]]:
        for path in self._root.iterdir():
            with contextlib.suppress(OSError):
                if path.is_dir() and not path.name.startswith("making-"):
                    yield path.stat().st_mtime, path
