"""A chain as a disk with a file system on it: squashfs, packed and never written to, or ext4 with room to write.

Both are made by the file systems' own tools. squashfs takes the entries as a tar on its standard input. ext4 takes a directory, so the
merged tree is copied into one first; an ordinary user's copy, and so the disk, has one owner throughout.
"""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.layers._descent import Descent
from untax.layers.export import _tar
from untax.layers.export._tree import USER_INSIDE, Item, Job, merged_items

SQUASHFS_XATTRS = "without access lists, for which squashfs has no place"
TOP_OWNER = "the top directory owned by root, because mksquashfs gives it to nobody else"
CLOSED_XATTRS = "without capabilities or other attributes that only root may set"
ROOT_MODE = "the top directory with mode 755, because this mke2fs gives it no other"

_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"  # an ordinary user's own seldom has sbin
_SAID_AT_MOST = 2000  # bytes of a tool's own words


# ---- squashfs ----


def write_squashfs(job: Job, target: Path, packing: str) -> None:
    """Make the file `target`, which must not exist yet. Two of the same layers differ in one date: the tool puts its own on the top."""
    tool = _tool("mksquashfs", "squashfs-tools")
    top = next(_items(job.uncounted()))
    if (top.uid, top.gid) != (0, 0):
        job.losses.add(TOP_OWNER)  # there are options for it, which 4.5 takes and forgets
    # Its words go to a file, not a pipe, which nobody would read while everything is written.
    with tempfile.TemporaryFile() as words:
        packer = subprocess.Popen(
            [
                tool,
                "-",
                target,
                "-tar",
                "-comp",
                packing,
                "-noappend",
                "-no-progress",
                "-quiet",
                "-mkfs-time",
                "0",
                "-root-mode",
                f"{top.mode:o}",
            ],
            stdin=subprocess.PIPE,
            stdout=words,
            stderr=subprocess.STDOUT,
            env={"PATH": _SYSTEM_PATH, "LC_ALL": "C"},
        )
        assert packer.stdin is not None
        try:
            with suppress(BrokenPipeError):  # it says why, below
                _tar.write_tar(_for_squashfs(job), packer.stdin.write, job.losses, on_bytes=job.on_bytes)
                packer.stdin.close()
            if packer.wait() != 0:
                words.seek(0)
                raise _failed("mksquashfs", words.read())
        finally:
            packer.kill()
            packer.wait()
            with suppress(OSError):
                packer.stdin.close()


def _items(job: Job) -> Iterator[Item]:
    return merged_items(job.root, job.marks, job.losses)


def _for_squashfs(job: Job) -> Iterator[Item]:
    for item in _items(job):
        kept = {name: value for name, value in item.xattrs.items() if name.startswith(("user.", "trusted.", "security."))}
        if len(kept) < len(item.xattrs):
            job.losses.add(SQUASHFS_XATTRS)
        if item.path:
            yield replace(item, xattrs=kept)


# ---- ext4 ----

_BLOCK = 4096
_INODE = 256
_SPARE_INODES = 1024
_FIXED_BYTES = 4 << 20  # superblocks, group descriptors, bitmaps, lost+found
_GROWTH = 1.5  # when the estimate was too small: indexes of long directories, extents of torn files
_ATTEMPTS = 6


def write_ext4(job: Job, target: Path, *, scratch: Path, free_bytes: int) -> None:
    """Make the file `target`: the tree, and `free_bytes` to write to. `scratch` is an empty directory, filled and left to the caller."""
    tool = _tool("mke2fs", "e2fsprogs")
    as_inside = _as_inside() if job.marks == "user" else []
    copied = _copy_out(job, scratch)
    if copied.top.mode != 0o755:
        job.losses.add(ROOT_MODE)
    inodes = copied.entries + _SPARE_INODES
    size = copied.bytes + inodes * _INODE + _FIXED_BYTES + free_bytes
    owner = f"root_owner={copied.top.uid}:{copied.top.gid}"
    for _ in range(_ATTEMPTS):
        blocks = -(-(size + _journal_mib(size) * (1 << 20)) // _BLOCK)
        done = subprocess.run(
            [*as_inside, tool, "-q", "-F", "-t", "ext4", "-b", str(_BLOCK), "-I", str(_INODE), "-N", str(inodes), "-m", "0",
             "-J", f"size={_journal_mib(size)}", "-E", owner, "-d", scratch, target, str(blocks)],
            stdin=subprocess.DEVNULL, capture_output=True, env={"PATH": _SYSTEM_PATH, "LC_ALL": "C"},
        )  # fmt: skip
        if done.returncode == 0:
            return
        target.unlink(missing_ok=True)
        if b"ext2 file" not in done.stderr and b"allocat" not in done.stderr:
            break
        size = int(size * _GROWTH)
    raise _failed("mke2fs", done.stderr)


def _journal_mib(size: int) -> int:
    return 4 if size < 128 << 20 else 16 if size < 1 << 30 else 64  # as mke2fs chooses it


def _as_inside() -> list[str]:
    """What runs a program so that it sees this user's files as those of the user inside."""
    argv = [_tool("unshare", "util-linux"), "--user", f"--map-user={USER_INSIDE}", f"--map-group={USER_INSIDE}", "--"]
    if subprocess.run([*argv, "true"], stdin=subprocess.DEVNULL, capture_output=True).returncode != 0:
        raise UsageError(
            "ext4: to give the files their owner, this user would have to be allowed user namespaces; export to squashfs, or as root"
        )
    return argv


@dataclass(slots=True)
class _Copied:
    top: Item
    entries: int = 0
    bytes: int = 0
    """In whole blocks."""


def _copy_out(job: Job, scratch: Path) -> _Copied:
    """Make the entries below `scratch`. Modes of directories come last: one that nobody may write to has content too."""
    items = _items(job)
    done = _Copied(next(items))
    directories = [done.top]
    first_of: dict[object, bytes] = {}
    with Descent(scratch) as place:
        for item in items:
            parent, _, name = item.path.rpartition(b"/")
            within = place.seek(parent.split(b"/") if parent else [])
            done.entries += 1
            done.bytes += len(name) + 16 + (_BLOCK if item.xattrs else 0)
            if item.kind == "directory":
                os.mkdir(name, 0o700, dir_fd=within)
                directories.append(item)
                done.bytes += _BLOCK
            elif item.links in first_of:
                os.link(os.fsencode(scratch) + b"/" + first_of[item.links], name, dst_dir_fd=within, follow_symlinks=False)
            else:
                if item.links is not None:
                    first_of[item.links] = item.path
                done.bytes += _make(item, name, within, job.on_bytes)
                _attribute(item, name, within, job)
        for item in reversed(directories):
            parent, _, name = item.path.rpartition(b"/")
            within = place.seek(parent.split(b"/") if parent else [])
            _attribute(item, name or b".", within, job)
    return done


def _make(item: Item, name: bytes, within: int, on_bytes: Callable[[int], None]) -> int:
    """A file, link or FIFO; gives what it takes on a disk."""
    if item.kind == "link":
        os.symlink(item.target, name, dir_fd=within)
        return _BLOCK if len(item.target) > 59 else 0
    if item.kind == "fifo":
        os.mkfifo(name, 0o600, dir_fd=within)
        return 0
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=within)
    with os.fdopen(fd, "wb", buffering=0) as file:
        if item.size:
            _tar.copy_content(item, _sparse(file.fileno()), on_bytes=on_bytes)
            os.ftruncate(file.fileno(), item.size)
    return -(-item.size // _BLOCK) * _BLOCK


def _sparse(fd: int) -> Callable[[bytes], None]:
    """Writes on, leaving out chunks of nothing but zeros."""

    def write(data: bytes) -> None:
        if data.count(0) == len(data):
            os.lseek(fd, len(data), os.SEEK_CUR)
            return
        while data:
            data = data[os.write(fd, data) :]

    return write


def _attribute(item: Item, name: bytes, within: int, job: Job) -> None:
    """Owner, mode, attributes, date, in the order in which one does not undo another."""
    if job.marks == "trusted":
        os.chown(name, item.uid, item.gid, dir_fd=within, follow_symlinks=False)
    if item.kind != "link":
        os.chmod(name, item.mode, dir_fd=within)
    for attribute, value in item.xattrs.items():
        try:
            os.setxattr(b"/proc/self/fd/%d/%s" % (within, name), attribute, value, follow_symlinks=False)
        except PermissionError:
            if job.marks == "trusted":
                raise
            job.losses.add(CLOSED_XATTRS)
    os.utime(name, ns=(item.mtime_ns, item.mtime_ns), dir_fd=within, follow_symlinks=False)


# ---- tools ----


def _tool(name: str, package: str) -> str:
    found = shutil.which(name, path=_SYSTEM_PATH)
    if found is None:
        raise UsageError(f"this export needs {name}, which is not installed here: apt install {package}")
    return found


def _failed(tool: str, said: bytes) -> StageFailed | StageUnavailable:
    words = said[-_SAID_AT_MOST:]
    if os.strerror(errno.ENOSPC).encode() in words:
        return StageUnavailable("export", f"{tool}: no space left on the disk of the target", words)
    return StageFailed("export", f"{tool} failed", words)
