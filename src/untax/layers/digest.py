"""What a tree is, as one number, whoever made it and wherever it lies; and whether it was touched since.

The *digest* covers names, types, modes, owners, contents, times of files, link targets, hard links, extended attributes
and device numbers: all that a sandbox can see of a layer except the times of directories, which change while a tree is
filled. The *seal* covers what the file system itself notes about every entry (inode, size, times, among them the one that
nobody can set), so it is broken by any edit in place and costs a look at each entry, not a read.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from untax.layers import marks
from untax.layers._descent import Descent, walk

_VERSION = b"untax tree 1\0"
BLOCK = 1 << 16  # bytes; of zeros it counts as a hole, so that a sparse copy and a full one are one content
_ZEROS = bytes(BLOCK)
_WINDOW = 4 * BLOCK  # bytes that are read at a time: still in the processor's own cache when they are hashed
_LARGE = 1 << 20  # bytes; from here on a file is worth a thread of its own
_THREADS = min(4, os.cpu_count() or 1)
_AHEAD = 64  # rows that may wait for a large file before them; each holds a descriptor
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
UP = b"u\0"
_HELD = struct.Struct("<QQQQqqIII")

Known = Mapping[tuple[int, int, int], str]
"""What contents hash to, by a file's inode, size and time: of those that nobody but us could have written to since they were hashed."""


@dataclass(frozen=True, slots=True)
class TreeDigest:
    id: str
    """`sha256-` and the hash in hexadecimal: the name of a layer of this content."""
    bytes: int
    """What it takes on the disk."""
    entries: int


def digest_tree(top: Path, note: Callable[[bytes], object] | None = None, known: Known | None = None) -> TreeDigest:
    """The digest of a tree that nobody changes meanwhile. `note`, where given, is told one row for each entry and each way up.
    Contents that are `known` are not read again.

    An ordinary user's closed files and directories are opened by a change of mode that is taken back, which breaks a seal.
    """
    total = hashlib.sha256(_VERSION)
    used = 0
    count = 0
    for row, taken in _rows(top, known or {}):
        total.update(row)
        used += taken
        count += row != UP
        if note is not None:
            note(row)
    return TreeDigest(f"sha256-{total.hexdigest()}", used, count)


def id_of_rows(rows: Iterable[bytes]) -> str:
    """The id that `digest_tree` gave along with these rows."""
    total = hashlib.sha256(_VERSION)
    for row in rows:
        total.update(row)
    return f"sha256-{total.hexdigest()}"


def seal_tree(top: Path) -> str:
    """A hash of what the file system notes about every entry. What is below a directory closed to this user is not looked at;
    to change anything there, somebody has to open it, and that breaks the seal too.
    """
    total = hashlib.sha256(_VERSION)
    with Descent(top) as descent:
        total.update(_held(os.fstat(descent.fd)))
        for visit in walk(descent, closed=lambda: total.update(b"closed")):
            if visit is None:
                total.update(UP)
            else:
                total.update(visit[0] + b"\0" + _held(visit[1]))
    return total.hexdigest()


def _held(st: os.stat_result) -> bytes:
    # Without the device: its number changes between two starts of the machine.
    return _HELD.pack(st.st_ino, st.st_nlink, st.st_rdev, st.st_size, st.st_mtime_ns, st.st_ctime_ns, st.st_mode, st.st_uid, st.st_gid)


# ---- rows ----


def _rows(top: Path, known: Known) -> Iterator[tuple[bytes, int]]:
    """Rows in the tree's order and what each takes on the disk. Large files are read by threads, a few ahead of their turn."""
    waiting: deque[tuple[bytes | _Reading, int]] = deque()
    with contextlib.ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS))
        descent = stack.enter_context(Descent(top, force=True))
        try:
            for row, taken in _unread_rows(descent, pool, known):
                waiting.append((row, taken))
                while waiting and (len(waiting) > _AHEAD or isinstance(waiting[0][0], bytes)):
                    yield _read(*waiting.popleft())
            while waiting:
                yield _read(*waiting.popleft())
        finally:
            for row, _ in waiting:
                if not isinstance(row, bytes) and row.row.cancel():
                    os.close(row.fd)


@dataclass(frozen=True, slots=True)
class _Reading:
    """A large file on its way; its reader closes the descriptor, unless it never began."""

    row: Future[bytes]
    fd: int


def _read(row: bytes | _Reading, taken: int) -> tuple[bytes, int]:
    return (row if isinstance(row, bytes) else row.row.result()), taken


def _unread_rows(descent: Descent, pool: ThreadPoolExecutor, known: Known) -> Iterator[tuple[bytes | _Reading, int]]:
    top = os.fstat(descent.fd)
    seen: dict[tuple[int, int], int] = {}  # inodes with several names, and the number of the entry that had the first
    yield _row(b"d", b"", top, b"", _attributes(descent.fd)), top.st_blocks * 512
    number = 0
    for visit in walk(descent):
        if visit is None:
            yield UP, 0
            continue
        number += 1
        name, st, within = visit
        if stat.S_ISDIR(st.st_mode):
            yield _directory(descent, name, st), st.st_blocks * 512
        elif marks.is_whiteout(st):
            # Overlay makes one and gives it many names; neither that nor its owner means anything.
            yield b"w\0" + name + b"\0", 0
        elif st.st_nlink > 1 and (first := seen.setdefault((st.st_dev, st.st_ino), number)) != number:
            yield b"h\0%s\0%d\0" % (name, first), 0
        elif stat.S_ISREG(st.st_mode):
            yield _file(pool, within, name, st, known), st.st_blocks * 512
        else:
            yield _special(within, name, st), st.st_blocks * 512


def _row(kind: bytes, name: bytes, st: os.stat_result, what: bytes, attributes: bytes) -> bytes:
    return b"%s\0%s\0%o\0%d\0%d\0%s\0%s\0" % (kind, name, stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid, what, attributes)


def _directory(descent: Descent, name: bytes, st: os.stat_result) -> bytes:
    descent.enter(name)  # and not by its path: a directory closed to us is opened on the way in
    try:
        return _row(b"d", name, st, b"", _attributes(descent.fd))
    finally:
        descent.leave()


def _special(within: int, name: bytes, st: os.stat_result) -> bytes:
    attributes = _attributes(b"/proc/self/fd/%d/%s" % (within, name))
    if stat.S_ISLNK(st.st_mode):
        return _row(b"l", name, st, os.readlink(name, dir_fd=within), attributes)
    if stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode):
        kind = b"c" if stat.S_ISCHR(st.st_mode) else b"b"
        return _row(kind, name, st, b"%d:%d" % (os.major(st.st_rdev), os.minor(st.st_rdev)), attributes)
    return _row(b"p" if stat.S_ISFIFO(st.st_mode) else b"s", name, st, b"", attributes)


def _attributes(at: int | bytes) -> bytes:
    """A hash of the extended attributes that mean something; empty where there are none."""
    try:
        names = os.listxattr(at, follow_symlinks=False) if isinstance(at, bytes) else os.listxattr(at)
    except OSError as exc:
        if exc.errno in (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES):  # not supported, or not for this user to see
            return b""
        raise
    return attributes_hash(
        (name, os.getxattr(at, name, follow_symlinks=False) if isinstance(at, bytes) else os.getxattr(at, name))
        for name in sorted(names)
        if not marks.is_volatile(name)
    )


def attributes_hash(attributes: Iterable[tuple[str, bytes]]) -> bytes:
    """Of extended attributes in the order of their names; empty where there are none."""
    total = hashlib.sha256()
    found = False
    for name, value in attributes:
        total.update(b"%s\0%d\0%s" % (os.fsencode(name), len(value), value))
        found = True
    return total.hexdigest().encode() if found else b""


# ---- contents ----


def _file(pool: ThreadPoolExecutor, within: int, name: bytes, st: os.stat_result, known: Known) -> bytes | _Reading:
    contents = known.get((st.st_ino, st.st_size, st.st_mtime_ns))
    if contents is not None and not _has_attributes(within, name):
        return _contents_row(name, st, contents, b"")  # not even opened: a layer that came from elsewhere has thousands of them
    fd = _open_file(within, name, st)
    if st.st_size >= _LARGE and st.st_blocks and contents is None:
        return _Reading(pool.submit(_file_row, fd, name, st), fd)
    return _file_row(fd, name, st, contents)


def _has_attributes(within: int, name: bytes) -> bool:
    """Whether it has any extended attribute at all, or that cannot be told."""
    try:
        return bool(os.listxattr(b"/proc/self/fd/%d/%s" % (within, name), follow_symlinks=False))
    except OSError:
        return True


def _open_file(within: int, name: bytes, st: os.stat_result) -> int:
    try:
        return os.open(name, _READ, dir_fd=within)
    except PermissionError:
        closed = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
    try:
        path = f"/proc/self/fd/{closed}"
        os.chmod(path, stat.S_IMODE(st.st_mode) | 0o400)
        try:
            return os.open(path, _READ & ~os.O_NOFOLLOW)
        finally:
            os.chmod(path, stat.S_IMODE(st.st_mode))
    finally:
        os.close(closed)


def _file_row(fd: int, name: bytes, st: os.stat_result, contents: str | None = None) -> bytes:
    try:
        return _contents_row(name, st, contents or _contents(fd, st), _attributes(fd))
    finally:
        os.close(fd)


def _contents_row(name: bytes, st: os.stat_result, contents: str, attributes: bytes) -> bytes:
    return _row(b"f", name, st, b"%d %d %s" % (st.st_mtime_ns, st.st_size, contents.encode()), attributes)


def _contents(fd: int, st: os.stat_result) -> str:
    reading = ContentsOf(fd, st.st_size, is_sparse=st.st_blocks * 512 < st.st_size)
    reading.read_to(st.st_size)
    return reading.hexdigest()


class ContentsOf:
    """A hash of the blocks of a file that are not all zeros, each with its place; from its beginning as far as it is there. Holes are not read."""

    def __init__(self, fd: int, size: int, *, is_sparse: bool) -> None:
        self._fd = fd
        self._size = size
        self._is_sparse = is_sparse
        self._total = hashlib.sha256()
        self._window = memoryview(bytearray(min(_WINDOW, size)))
        self.at = 0

    def read_to(self, end: int) -> None:
        """As far as `end`, which is a multiple of a block or the file's own: what is behind it may still have to be written."""
        while self.at < end:
            length = min(_WINDOW, end - self.at)
            if self._is_sparse:
                data, hole = _next_data(self._fd, self.at, self._size)
                if data > self.at:
                    self.at = min(data, end)
                    continue
                length = min(length, hole - self.at)
            window = self._window[:length]
            if os.preadv(self._fd, [window], self.at) != length:
                raise OSError(errno.EIO, f"{os.fsdecode(os.readlink(f'/proc/self/fd/{self._fd}'))} changed while it was read")
            for at in range(0, length, BLOCK):
                _count(self._total, self.at + at, window[at : at + BLOCK])
            self.at += length

    def hexdigest(self) -> str:
        return self._total.hexdigest()


def contents_of(data: memoryview) -> str:
    """The same of a file that is in memory."""
    total = hashlib.sha256()
    for at in range(0, len(data), BLOCK):
        _count(total, at, data[at : at + BLOCK])
    return total.hexdigest()


def _count(total: hashlib._Hash, at: int, block: memoryview) -> None:
    # A view is compared byte by byte in steps of Python's, so only what may be all zeros is, and as bytes.
    if block[0] or block[-1] or bytes(block) != _ZEROS[: len(block)]:
        total.update(at.to_bytes(8, "little"))
        total.update(block)


def _next_data(fd: int, at: int, size: int) -> tuple[int, int]:
    """The beginning of the block, from `at` on, in which there is data again, and that of the next block in which there is none."""
    try:
        data = os.lseek(fd, at, os.SEEK_DATA)
        hole = os.lseek(fd, data, os.SEEK_HOLE)
    except OSError as exc:
        # Nothing but a hole up to the end; or a file system that does not tell.
        return (size if exc.errno == errno.ENXIO else at), size
    return max(at, data // BLOCK * BLOCK), -(-hole // BLOCK) * BLOCK


# ---- what differs ----


def first_difference(known: list[bytes], found: list[bytes]) -> str:
    """Where two trees' rows part, in words: the path, and what about it is not the same."""
    trail: list[bytes] = []
    for was, now in zip(known, found, strict=False):
        if was != now:
            return _in_words(trail, was, now)
        if now == UP:
            if trail:
                trail.pop()
        elif now.startswith(b"d\0"):
            trail.append(now.split(b"\0")[1])
    return "entries at its end are missing or new"


def _in_words(trail: list[bytes], was: bytes, now: bytes) -> str:
    old, new = was.split(b"\0"), now.split(b"\0")

    def path(name: bytes) -> str:
        return os.fsdecode(b"/" + b"/".join([*trail[1:], name]))

    if was == UP or (now != UP and new[1] < old[1]):
        return f"{path(new[1])} was added"
    if now == UP or new[1] > old[1]:
        return f"{path(old[1])} is gone"
    if old[0] != new[0] or len(old) < 7:
        return f"{path(old[1])} is another kind of thing"
    names = ("", "", "mode", "owner", "group", "contents, times or target", "extended attributes")
    differ = [names[i] for i in range(2, 7) if old[i] != new[i]]
    return f"{path(old[1])} has another {' and another '.join(differ)}"
