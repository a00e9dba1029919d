"""A tree copied as it is: modes, owners, times, holes, hard links, extended attributes, overlay marks, whiteouts.

The source was written by a workload. Nothing in it is followed or run: every step is taken from an open directory, by a
name without a slash, and a link is a file with a target. The depth of a tree costs no descriptors, its links no memory
beyond their inode numbers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from untax.layers import marks

FICLONE = 0x40049409
_CHUNK_BYTES = 1 << 20
_MOST_AT_ONCE = 1 << 30  # copy_file_range takes at most 2 GiB in one call
# What copy_file_range and FICLONE answer where the file system, or the pair of them, cannot.
_CANNOT = frozenset({errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTTY, errno.EPERM, errno.EBADF})
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_METACOPY = frozenset(marks.metacopy(kind) for kind in marks.KINDS)

Owner = Callable[[bytes, os.stat_result], tuple[int, int]]
"""Who a copy belongs to: given its path from the root of the tree and what it was."""
Skip = Callable[[bytes, os.stat_result], bool]
"""Whether an entry is left out, with all below it."""


@dataclass(slots=True)
class Copied:
    entries: int = 0
    bytes: int = 0
    """Of contents, without holes; a reflinked file counts in full."""


def copy_tree(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    skip: Skip | None = None,
    owner: Owner | None = None,
    check: Callable[[], None] | None = None,
) -> Copied:
    """Copy what is in the directory `source` into the empty directory `target`, and the directory's own attributes.

    The source must not change meanwhile: a name that is gone or has become something else is an `OSError`, and never leads
    anywhere else. Devices other than whiteouts are an `OSError` too. `check` is called now and then and may raise, to stop.
    """
    return _Copy(skip, owner, check).run(source, target)


class Contents:
    """Copies what is in files. `check` is called now and then and may raise, to stop."""

    def __init__(self, check: Callable[[], None] | None = None) -> None:
        self._check = check
        self._can_clone = True

    def copy(self, reading: int, writing: int, size: int) -> None:
        """Bring what can be read from one descriptor to another that has nothing yet: by reference where the file system can, with its holes elsewhere."""
        if size == 0:
            return
        if self._can_clone:
            try:
                fcntl.ioctl(writing, FICLONE, reading)
                return
            except OSError as exc:
                if exc.errno not in _CANNOT:
                    raise
                self._can_clone = False
        at = 0
        while at < size:
            try:
                at = os.lseek(reading, at, os.SEEK_DATA)
            except OSError as exc:
                if exc.errno == errno.ENXIO:  # a hole up to the end
                    break
                raise
            end = min(os.lseek(reading, at, os.SEEK_HOLE), size)
            at = self._extent(reading, writing, at, end)
        os.ftruncate(writing, size)

    def _extent(self, reading: int, writing: int, at: int, end: int) -> int:
        while at < end:
            if self._check is not None:
                self._check()
            try:
                moved = os.copy_file_range(reading, writing, min(end - at, _MOST_AT_ONCE), at, at)
            except OSError as exc:
                if exc.errno not in _CANNOT:
                    raise
                moved = os.pwrite(writing, os.pread(reading, min(end - at, _CHUNK_BYTES), at), at)
            if moved == 0:
                raise OSError(errno.EBUSY, "a file became shorter while it was copied")
            at += moved
        return at


@dataclass(slots=True)
class _Level:
    """A directory that is being copied: what is left of it, and who it is, to know it again on the way back up."""

    names: Iterator[bytes]
    path: bytes
    was: os.stat_result
    source_id: tuple[int, int]
    target_id: tuple[int, int]
    closed_mode: int | None
    """Of a directory that is closed to its owner, who is us: it is opened meanwhile."""


@dataclass(slots=True)
class _Copy:
    skip: Skip | None
    owner: Owner | None
    check: Callable[[], None] | None
    done: Copied = field(default_factory=Copied)
    links: dict[tuple[int, int], int] = field(default_factory=dict)
    parked: int = -1
    """A directory in the target that has one more name of each file with several, until the end: a path may be too long to link by."""
    contents: Contents = field(init=False)

    def __post_init__(self) -> None:
        self.contents = Contents(self.check)

    def run(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> Copied:
        with contextlib.ExitStack() as stack:
            src = os.open(source, _DIRECTORY)
            stack.callback(os.close, src)
            dst = os.open(target, _DIRECTORY)
            stack.callback(os.close, dst)
            park = f".untax-{secrets.token_hex(8)}".encode()
            os.mkdir(park, 0o700, dir_fd=dst)
            self.parked = os.open(park, _DIRECTORY, dir_fd=dst)
            stack.callback(os.close, self.parked)
            try:
                self._walk(src, dst)
            finally:
                for number in set(self.links.values()):
                    os.unlink(str(number), dir_fd=self.parked)
                os.rmdir(park, dir_fd=dst)
            self._attributes(src, dst, b"", os.fstat(src))  # last: the times of the root change with what is made in it
        return self.done

    def _walk(self, root_src: int, root_dst: int) -> None:
        """Depth first, with two descriptors: up again by "..", which must be the directory that it was."""
        src, dst = os.open(".", _DIRECTORY, dir_fd=root_src), os.open(".", _DIRECTORY, dir_fd=root_dst)
        levels = [self._level(src, dst, b"", os.fstat(src), None)]
        try:
            while levels:
                level = levels[-1]
                name = next(level.names, None)
                if name is not None:
                    path = level.path + b"/" + name if level.path else name
                    was = os.stat(name, dir_fd=src, follow_symlinks=False)
                    if self.skip is not None and self.skip(path, was):
                        continue
                    if self.check is not None:
                        self.check()
                    self.done.entries += 1
                    if stat.S_ISDIR(was.st_mode):
                        os.mkdir(name, 0o700, dir_fd=dst)
                        closed = _open_up(src, name, was, 0o500)
                        src = _step(src, name)
                        dst = _step(dst, name)
                        levels.append(self._level(src, dst, path, was, closed))
                    else:
                        self._entry(src, dst, name, path, was)
                    continue
                levels.pop()
                if levels:
                    self._attributes(src, dst, level.path, level.was)
                    shut = os.dup(src) if level.closed_mode is not None else -1
                    src = _step(src, b"..")
                    if level.closed_mode is not None:
                        os.fchmod(shut, level.closed_mode)
                        os.close(shut)
                    dst = _step(dst, b"..")
                    if (_id(src), _id(dst)) != (levels[-1].source_id, levels[-1].target_id):
                        raise OSError(errno.EBUSY, "the tree was moved while it was copied", os.fsdecode(level.path))
        finally:
            os.close(src)
            os.close(dst)

    def _level(self, src: int, dst: int, path: bytes, was: os.stat_result, closed: int | None) -> _Level:
        names = sorted(os.fsencode(found) for found in os.listdir(src))
        return _Level(iter(names), path, was, _id(src), _id(dst), closed)

    # ---- one entry ----

    def _entry(self, src: int, dst: int, name: bytes, path: bytes, was: os.stat_result) -> None:
        inode = (was.st_dev, was.st_ino)
        if was.st_nlink > 1 and inode in self.links:
            os.link(str(self.links[inode]), name, src_dir_fd=self.parked, dst_dir_fd=dst, follow_symlinks=False)
            return
        kind = stat.S_IFMT(was.st_mode)
        if kind == stat.S_IFREG:
            self._file(src, dst, name, path, was)
        elif kind == stat.S_IFLNK:
            os.symlink(os.readlink(name, dir_fd=src), name, dir_fd=dst)
            self._named_attributes(src, dst, name, path, was)
        elif kind in (stat.S_IFIFO, stat.S_IFSOCK) or marks.is_whiteout(was):
            os.mknod(name, kind | stat.S_IMODE(was.st_mode), device=0, dir_fd=dst)
            self._named_attributes(src, dst, name, path, was)
        else:
            raise OSError(errno.EPERM, "a device, which no layer may hold", os.fsdecode(path))
        if was.st_nlink > 1:
            number = self.links[inode] = len(self.links)
            os.link(name, str(number), src_dir_fd=dst, dst_dir_fd=self.parked, follow_symlinks=False)

    def _file(self, src: int, dst: int, name: bytes, path: bytes, was: os.stat_result) -> None:
        # Not blocking, should the file have become a FIFO since it was looked at.
        closed = _open_up(src, name, was, 0o400)
        reading = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=src)
        try:
            if closed is not None:
                os.fchmod(reading, closed)
            if _id(reading) != (was.st_dev, was.st_ino):
                raise OSError(errno.EBUSY, "replaced while it was copied", os.fsdecode(path))
            writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=dst)
            try:
                self.contents.copy(reading, writing, was.st_size)
                self.done.bytes += was.st_size
                self._attributes(reading, writing, path, was)
            finally:
                os.close(writing)
        finally:
            os.close(reading)

    # ---- attributes: owner, mode, xattrs, times, in the order in which one does not undo another ----

    def _attributes(self, src: int, dst: int, path: bytes, was: os.stat_result) -> None:
        os.fchown(dst, *self._owner_of(path, was))
        os.fchmod(dst, stat.S_IMODE(was.st_mode))
        _copy_xattrs(src, dst)
        os.utime(dst, ns=(was.st_atime_ns, was.st_mtime_ns))

    def _named_attributes(self, src: int, dst: int, name: bytes, path: bytes, was: os.stat_result) -> None:
        os.chown(name, *self._owner_of(path, was), dir_fd=dst, follow_symlinks=False)
        if not stat.S_ISLNK(was.st_mode):
            # The umask may have taken bits away. It was made by us a moment ago where nobody else writes.
            os.chmod(name, stat.S_IMODE(was.st_mode), dir_fd=dst)
        # There are no xattr calls that take a directory and a name; this is one, and it follows nothing at its end.
        _copy_xattrs(b"/proc/self/fd/%d/%s" % (src, name), b"/proc/self/fd/%d/%s" % (dst, name))
        os.utime(name, ns=(was.st_atime_ns, was.st_mtime_ns), dir_fd=dst, follow_symlinks=False)

    def _owner_of(self, path: bytes, was: os.stat_result) -> tuple[int, int]:
        return self.owner(path, was) if self.owner is not None else (was.st_uid, was.st_gid)


def _open_up(directory: int, name: bytes, was: os.stat_result, needed: int) -> int | None:
    """Let an ordinary user open a file or directory of its own that is closed even to itself; gives the mode to put back."""
    mode = stat.S_IMODE(was.st_mode)
    if mode & needed == needed or was.st_uid != os.geteuid() or os.geteuid() == 0:
        return None
    found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    try:
        if _id(found) != (was.st_dev, was.st_ino):
            raise OSError(errno.EBUSY, "replaced while it was copied", os.fsdecode(name))
        os.chmod(f"/proc/self/fd/{found}", mode | needed)
    finally:
        os.close(found)
    return mode


def _step(directory: int, name: bytes) -> int:
    """Another directory by its name in this one, in its place."""
    found = os.open(name, _DIRECTORY, dir_fd=directory)
    os.close(directory)
    return found


def _id(fd: int) -> tuple[int, int]:
    found = os.fstat(fd)
    return found.st_dev, found.st_ino


def _copy_xattrs(src: int | bytes, dst: int | bytes) -> None:
    follow = isinstance(src, int)
    try:
        names = os.listxattr(src, follow_symlinks=follow)
    except OSError as exc:
        if exc.errno in (errno.ENOTSUP, errno.ENODATA):
            return
        raise
    for name in names:
        if marks.is_volatile(name):
            continue
        if name in _METACOPY:
            raise OSError(errno.EINVAL, "its contents lie in another layer (metacopy), which no layer of ours does")
        os.setxattr(dst, name, os.getxattr(src, name, follow_symlinks=follow), follow_symlinks=follow)
