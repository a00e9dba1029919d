"""A layer on its way in: a tree below the store's `arrivals/` that is filled chunk by chunk, and what of it has come.

What a fetch that was cut off or killed left is gone on with: the chunks that were noted as written are read and hashed again, which
costs a read and no trust. Nothing is followed: every step is taken from an open directory by a name that was checked.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from pathlib import Path

from untax._remove import remove_tree
from untax.cluster.transfer.beside import read_rest
from untax.cluster.transfer.plan import Chunk, chunks_of, is_large
from untax.core.errors import StageFailed
from untax.layers import marks
from untax.layers._descent import Descent
from untax.layers._durable import begin_writing, replace_whole
from untax.layers.digest import ContentsOf, contents_of
from untax.layers.rows import Row, path_of, read_rows
from untax.layers.unpack import shown

_CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AGAIN = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK

Extents = list[tuple[int, int]]


class Mismatch(Exception):
    """Contents that do not hash to what they are to be."""


class Arrival:
    """One process at a time fills it, with as many threads as it likes. `put` is called for each missing chunk, then `finish` once."""

    def __init__(self, place: Path, layer_id: str, packed_rows: bytes, packed_rest: bytes, kind: marks.Marks, *, may_climb: bool) -> None:
        self.tree = place / "tree"
        self.rows = read_rows(packed_rows, layer_id, may_climb=may_climb)
        if kind == "user" and any(row.kind not in "wh" and (row.uid, row.gid) != (os.geteuid(), os.getegid()) for row in self.rows):
            raise StageFailed("layer", f"the layer is refused: it is another user's than {os.geteuid()}, and only root can give files away")
        self.chunks: list[Chunk] = chunks_of(self.rows)
        self._place = place
        rest = read_rest(packed_rest, self.rows, kind)
        self._times, self._attributes, self.stored = rest.times, rest.attributes, rest.stored
        self._guard = threading.Lock()
        self._has = bytearray(len(self.chunks))
        self._large = {number: Large(self, number) for number, row in enumerate(self.rows) if row.kind == "f" and is_large(row)}
        for at, chunk in enumerate(self.chunks):
            if chunk[0].row in self._large:
                self._large[chunk[0].row].chunks.append(at)
        self.known: dict[tuple[int, int, int], str] = {}

    @property
    def missing(self) -> list[int]:
        return [at for at, there in enumerate(self._has) if not there]

    @property
    def contents_bytes(self) -> int:
        return sum(row.size for row in self.rows)

    # ---- beginning, or going on ----

    def begin(self) -> bool:
        """Make the directories, unless a fetch before this one has; and see what of its chunks is there. Whether that is any."""
        noted = self._noted()
        self.tree.mkdir(mode=0o700, parents=True, exist_ok=True)
        with Descent(self.tree) as descent:
            for row in self.rows[1:]:
                if row.kind == "d":
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(row.name, 0o700, dir_fd=descent.seek(path_of(self.rows, row.parent)))
        if any(noted):
            self._look_again(noted)
        else:
            replace_whole(self._place / "has", bytes(len(self.chunks)))
        return any(self._has)

    def _noted(self) -> bytes:
        with contextlib.suppress(OSError):
            noted = (self._place / "has").read_bytes()
            if len(noted) == len(self.chunks):
                return noted
        remove_tree(self.tree)
        return b""

    def _look_again(self, noted: bytes) -> None:
        with Descent(self.tree) as descent:
            for at, there in enumerate(noted):
                if there and self.chunks[at][0].row not in self._large and self._is_whole(descent, self.chunks[at]):
                    self._has[at] = 1
            for large in self._large.values():
                if any(noted[at] for at in large.chunks):
                    large.open(descent)
                    for at in large.chunks:
                        self._has[at] = noted[at]
                    with contextlib.suppress(Mismatch):  # all of it is fetched again
                        large.hash_on()
        replace_whole(self._place / "has", bytes(self._has))

    def _is_whole(self, descent: Descent, chunk: Chunk) -> bool:
        for piece in chunk:
            row = self.rows[piece.row]
            try:
                fd = os.open(
                    row.name,
                    os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK,
                    dir_fd=descent.seek(path_of(self.rows, row.parent)),
                )
            except OSError:
                return False
            try:
                data = os.pread(fd, row.size + 1, 0) if stat.S_ISREG(os.fstat(fd).st_mode) else b""
                if len(data) != row.size or contents_of(memoryview(data)) != row.contents:
                    return False
                self._know(self._dress(fd, piece.row), row)
            finally:
                os.close(fd)
        return True

    # ---- chunks ----

    def put_files(self, descent: Descent, at: int, maps: list[Extents], data: memoryview) -> None:
        """Write the files of a chunk; `Mismatch`, and none of the bad one left, when one is not what its row says."""
        within = parent = -1
        for piece, extents in zip(self.chunks[at], maps, strict=True):
            row = self.rows[piece.row]
            length = sum(size for _, size in extents)
            held, data = data[:length], data[length:]
            whole = held if length == row.size else _spread(row.size, extents, held)
            if contents_of(whole) != row.contents:
                raise Mismatch(shown(row.name))
            if row.parent != parent:
                within, parent = descent.seek(path_of(self.rows, row.parent)), row.parent
            fd = self._create(within, row.name, row.mode & 0o777)
            try:
                if length != row.size:
                    os.ftruncate(fd, row.size)
                for offset, size in extents:
                    _write_at(fd, whole[offset : offset + size], offset)
                self._know(self._dress(fd, piece.row), row)
            finally:
                os.close(fd)
        self._note(at)

    def part(self, descent: Descent, at: int) -> Large | None:
        """The large file that a chunk is a part of, open for writing; None for a chunk of whole files."""
        large = self._large.get(self.chunks[at][0].row)
        if large is not None:
            large.open(descent)
        return large

    def put_part(self, at: int) -> None:
        """A large file's part was written. `Mismatch`, and all of the file missing again, when it was the last and it is not what it is to be."""
        self._note(at)
        self._large[self.chunks[at][0].row].hash_on()

    def _note(self, at: int) -> None:
        with self._guard:
            self._has[at] = 1
            with open(self._place / "has", "r+b") as noted:
                noted.seek(at)
                noted.write(b"\1")

    def forget(self, chunks: list[int]) -> None:
        with self._guard:
            for at in chunks:
                self._has[at] = 0
            replace_whole(self._place / "has", bytes(self._has))

    def is_part(self, at: int) -> bool:
        """Whether a chunk is a part of a large file, and not several whole ones."""
        return self.chunks[at][0].row in self._large

    def is_there(self, at: int) -> bool:
        return bool(self._has[at])

    def close(self) -> None:
        for large in self._large.values():
            large.close()

    # ---- the end ----

    def finish(self, tree: Path) -> None:
        """Everything that has no contents, and the looks of directories, in what was `tree` and may lie elsewhere by now."""
        with Descent(tree) as descent, Descent(tree) as other:
            for number, row in enumerate(self.rows):
                if row.kind not in "df" or (row.kind == "f" and row.size == 0):
                    self._make(descent, other, number)
            # From the last to the first, so that nothing closes before what is in it is done.
            for number in range(len(self.rows) - 1, -1, -1):
                if self.rows[number].kind == "d":
                    self._dress(descent.seek(path_of(self.rows, number)), number)

    def _make(self, descent: Descent, other: Descent, number: int) -> None:
        row = self.rows[number]
        within = descent.seek(path_of(self.rows, row.parent))
        if row.kind == "h":
            first = self.rows[row.first]
            os.link(first.name, row.name, src_dir_fd=other.seek(path_of(self.rows, first.parent)), dst_dir_fd=within, follow_symlinks=False)
        elif row.kind == "w":
            marks.make_whiteout(row.name, dir_fd=within)
        elif row.kind == "f":
            fd = self._create(within, row.name, row.mode & 0o777)
            try:
                self._dress(fd, number)
            finally:
                os.close(fd)
        else:
            if row.kind == "l":
                os.symlink(row.target, row.name, dir_fd=within)
            else:
                os.mknod(row.name, (stat.S_IFIFO if row.kind == "p" else stat.S_IFSOCK) | 0o600, dir_fd=within)
            self._dress_named(within, number)

    def _create(self, within: int, name: bytes, mode: int) -> int:
        try:
            return os.open(name, _CREATE, mode, dir_fd=within)
        except FileExistsError:
            os.unlink(name, dir_fd=within)  # of a fetch that was cut off
            return os.open(name, _CREATE, mode, dir_fd=within)

    # ---- looks: owner, attributes, mode, times, in the order in which none undoes another ----

    def _dress(self, fd: int, number: int) -> int:
        """What it already looks like is not said again: a layer has files by the thousand. Gives its inode."""
        row = self.rows[number]
        found = os.fstat(fd)
        is_owned = (found.st_uid, found.st_gid) == (row.uid, row.gid)
        attributes = self._attributes.get(number, ())
        if not is_owned:
            os.fchown(fd, row.uid, row.gid)
        for name, value in attributes:
            os.setxattr(fd, name, value)
        if not is_owned or attributes or stat.S_IMODE(found.st_mode) != row.mode:
            os.fchmod(fd, row.mode)
        mtime_ns = row.mtime_ns if row.kind == "f" else self._times[number]
        os.utime(fd, ns=(mtime_ns, mtime_ns))
        return found.st_ino

    def _dress_named(self, within: int, number: int) -> None:
        row = self.rows[number]
        os.chown(row.name, row.uid, row.gid, dir_fd=within, follow_symlinks=False)
        for name, value in self._attributes.get(number, ()):
            os.setxattr(b"/proc/self/fd/%d/%s" % (within, row.name), name, value, follow_symlinks=False)
        if row.kind != "l":
            os.chmod(row.name, row.mode, dir_fd=within)
        os.utime(row.name, ns=(self._times[number], self._times[number]), dir_fd=within, follow_symlinks=False)

    def _know(self, inode: int, row: Row) -> None:
        """Its contents were hashed, and it is dressed."""
        self.known[inode, row.size, row.mtime_ns] = row.contents


class Large:
    """A file of several chunks. It is hashed from its beginning as far as it is there, by whoever wrote the chunk that was missing."""

    def __init__(self, arrival: Arrival, number: int) -> None:
        self._arrival = arrival
        self._number = number
        self._hashing = threading.Lock()
        self._writing = threading.Lock()
        self._reader: ContentsOf | None = None
        self.chunks: list[int] = []
        self.fd = -1

    def open(self, descent: Descent) -> None:
        """From its first chunk to its last: a layer has more such files than a process may have open."""
        row = self._arrival.rows[self._number]
        with self._hashing:
            if self.fd < 0:
                within = descent.seek(path_of(self._arrival.rows, row.parent))
                try:
                    self.fd = os.open(row.name, _AGAIN, dir_fd=within)
                except FileNotFoundError:
                    self.fd = os.open(row.name, _CREATE, 0o600, dir_fd=within)
                os.ftruncate(self.fd, row.size)
                self._reader = ContentsOf(self.fd, row.size, is_sparse=True)

    def write(self, data: memoryview, offset: int) -> None:
        # The kernel writes to one file for one thread at a time and has the others spin meanwhile: a third of a processor, for two of them.
        with self._writing:
            _write_at(self.fd, data, offset)

    def begin_writing(self, offset: int, length: int) -> None:
        """Or the disk would begin when the last byte of all has come."""
        begin_writing(self.fd, offset, length)

    def hash_on(self) -> None:
        row = self._arrival.rows[self._number]
        while (end := self._there()) > self._reader_at() or end == row.size:
            if not self._hashing.acquire(blocking=False):
                return  # whoever hashes looks again when it has done so
            try:
                reader = self._reader
                if reader is None:
                    return  # done
                reader.read_to(end)
                if reader.at == row.size:
                    self._end(reader, row)
            finally:
                self._hashing.release()

    def _end(self, reader: ContentsOf, row: Row) -> None:
        if reader.hexdigest() != row.contents:
            os.ftruncate(self.fd, 0)
            os.ftruncate(self.fd, row.size)
            self._reader = ContentsOf(self.fd, row.size, is_sparse=True)
            self._arrival.forget(self.chunks)
            raise Mismatch(shown(row.name))
        self._reader = None
        self._arrival._know(self._arrival._dress(self.fd, self._number), row)
        self.close()

    def _reader_at(self) -> int:
        reader = self._reader
        return reader.at if reader is not None else self._arrival.rows[self._number].size

    def _there(self) -> int:
        for at in self.chunks:
            if not self._arrival.is_there(at):
                return self._arrival.chunks[at][0].offset
        return self._arrival.rows[self._number].size

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _write_at(fd: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done


def read_map(data: memoryview, pieces: Chunk) -> list[Extents]:
    """Where the data of a chunk's pieces belong: ascending, and inside each. `Mismatch` for anything else."""
    counts = [int.from_bytes(data[at * 4 : at * 4 + 4], "little") for at in range(len(pieces))]
    if len(data) != 4 * len(pieces) + 16 * sum(counts):
        raise Mismatch("a chunk's map of another length")
    at = 4 * len(pieces)
    maps: list[Extents] = []
    for piece, count in zip(pieces, counts, strict=True):
        extents: Extents = []
        end = piece.offset
        for _ in range(count):
            offset, size = (int.from_bytes(data[at + skip : at + skip + 8], "little") for skip in (0, 8))
            if offset < end or size == 0 or offset + size > piece.offset + piece.length:
                raise Mismatch("a chunk with data outside of it")
            extents.append((offset, size))
            end = offset + size
            at += 16
        maps.append(extents)
    return maps


def _spread(size: int, extents: Extents, data: memoryview) -> memoryview:
    whole = bytearray(size)
    for offset, length in extents:
        whole[offset : offset + length] = data[:length]
        data = data[length:]
    return memoryview(whole)
