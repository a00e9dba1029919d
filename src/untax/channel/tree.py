"""Trees as tar streams: packing a local path, and unpacking what a hostile sandbox sends.

Packing is hand-made because `tarfile` takes several times as long on small files. Unpacking trusts nothing: every step goes
from one directory's descriptor to the next without following links, so nothing that the stream itself put there can
lead it elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Generator, Iterator

from untax.channel.arguments import Name, path_bytes
from untax.core.errors import ProtocolError, TooLarge, UsageError, file_error
from untax.core.tar import BLOCK, Header, TarError, components, decimal, records

MAX_BYTES = 16 << 30  # of one upload or download that is not told otherwise
MAX_ENTRIES = 2_000_000
_EMIT = 256 << 10  # packed bytes are handed on in pieces of about this size
_EFBIG, _ELOOP = 27, 40
_NAME_MAX, _PREFIX_MAX = 100, 155
_OCTAL_MAX = 8**11 - 1
_PAX_MAX = 64 << 10  # a longer extended header cannot be a path, a link and a size
_DEPTH_MAX = 256
_END = bytes(2 * BLOCK)
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


# ---- packing ----


def upload_plan(local: Name, remote: Name, *, max_bytes: int, max_entries: int) -> tuple[bytes, Packer]:
    """Where to unpack inside, and what: a file goes under its new name into the directory around it."""
    source, target = path_bytes(local, "local"), path_bytes(remote, "remote")
    try:
        is_dir = stat.S_ISDIR(os.stat(source).st_mode)
    except OSError as exc:
        raise UsageError(f"{os.fsdecode(source)}: {exc.strerror}; upload() takes a local file or directory") from exc
    if is_dir:
        return target, Packer(source, b"", max_bytes=max_bytes, max_entries=max_entries)
    parent, name = os.path.split(target)
    if name in (b"", b".", b".."):
        raise UsageError(f"{os.fsdecode(target)!r} names a directory: say under which name the file is to lie there")
    return parent or b".", Packer(source, name, max_bytes=max_bytes, max_entries=max_entries)


class Packer:
    """Iterates over the tar stream of a local file (named `name` in it) or of a directory's contents.

    Links are packed as links. Sockets, devices and FIFOs are left out, as are set-id bits and owners. A file that
    shrinks meanwhile is filled up with zeros.
    """

    def __init__(self, source: bytes, name: bytes, *, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        self.entries = 0
        self.bytes = 0
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._pieces = self._pack(source, name)

    def __iter__(self) -> Packer:
        return self

    def __next__(self) -> bytes:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()

    def _pack(self, source: bytes, name: bytes) -> Generator[bytes, None, None]:
        out = bytearray()
        try:
            if name:
                directory, base = os.path.split(os.path.realpath(source))
                fd = os.open(directory, _DIRECTORY & ~os.O_NOFOLLOW)
                try:
                    yield from self._file(out, fd, base, name)
                finally:
                    os.close(fd)
            else:
                fd = os.open(source, _DIRECTORY & ~os.O_NOFOLLOW)
                try:
                    out += _header(b"./", os.fstat(fd), b"5", 0)
                    yield from self._directory(out, fd, b"")
                finally:
                    os.close(fd)
        except OSError as exc:
            raise file_error(exc.errno or 0, "while packing", os.fsdecode(exc.filename or source)) from exc
        yield bytes(out + _END)

    def _directory(self, out: bytearray, fd: int, prefix: bytes) -> Iterator[bytes]:
        with os.scandir(fd) as found:
            entries = [(os.fsencode(entry.name), entry) for entry in found]
        for name, entry in entries:
            path = prefix + name
            if entry.is_file(follow_symlinks=False):
                if not self._small_file(out, fd, name, path):
                    yield from self._file(out, fd, name, path)
                elif len(out) >= _EMIT:
                    yield bytes(out)
                    out.clear()
            elif entry.is_symlink():
                self._count(path, 0)
                try:
                    target = os.readlink(name, dir_fd=fd)
                    out += _header(path, entry.stat(follow_symlinks=False), b"2", 0, target)
                except FileNotFoundError:
                    continue  # went away meanwhile
            elif entry.is_dir(follow_symlinks=False):
                try:
                    below = os.open(name, _DIRECTORY, dir_fd=fd)
                except FileNotFoundError:
                    continue
                try:
                    self._count(path, 0)
                    out += _header(path + b"/", os.fstat(below), b"5", 0)
                    yield from self._directory(out, below, path + b"/")
                finally:
                    os.close(below)

    def _small_file(self, out: bytearray, directory: int, name: bytes, path: bytes) -> bool:
        """The common case without a generator of its own; false when the file is not small, or changes while it is read."""
        try:
            fd = os.open(name, _FILE, dir_fd=directory)
        except FileNotFoundError:
            return True
        try:
            status = os.fstat(fd)
            size = status.st_size
            if size > _EMIT or not stat.S_ISREG(status.st_mode):
                return False
            data = os.read(fd, size) if size else b""
        finally:
            os.close(fd)
        if len(data) != size:
            return False
        self._count(path, size)
        out += _header(path, status, b"0", size)
        out += data
        if size % BLOCK:
            out += _END[: -size % BLOCK]
        return True

    def _file(self, out: bytearray, directory: int, name: bytes, path: bytes) -> Iterator[bytes]:
        try:
            fd = os.open(name, _FILE, dir_fd=directory)
        except FileNotFoundError:
            return
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                return
            size = status.st_size
            self._count(path, size)
            out += _header(path, status, b"0", size)
            yield bytes(out)  # what is large goes on as it was read, without a copy
            out.clear()
            left = size
            while left:
                piece = os.read(fd, min(left, _EMIT)) or bytes(min(left, _EMIT))
                left -= len(piece)
                yield piece
            out += bytes(-size % BLOCK)
        finally:
            os.close(fd)
        if len(out) >= _EMIT:
            yield bytes(out)
            out.clear()

    def _count(self, path: bytes, size: int) -> None:
        self.entries += 1
        self.bytes += size
        if self.entries > self._max_entries or self.bytes > self._max_bytes:
            raise TooLarge(_EFBIG, f"more than {self._max_entries} entries or {self._max_bytes} bytes", os.fsdecode(path))


def _header(path: bytes, status: os.stat_result, kind: bytes, size: int, target: bytes = b"") -> bytes:
    """One ustar header, with an extended one before it when a field does not fit."""
    prefix = b""
    extended = b""
    if len(path) > _NAME_MAX:
        cut = path.find(b"/", max(0, len(path) - _NAME_MAX - 1), _PREFIX_MAX + 1)
        if 0 < cut < len(path) - 1:
            prefix, name = path[:cut], path[cut + 1 :]
        else:
            extended, name = _pax(b"path", path), path[:_NAME_MAX]
    else:
        name = path
    if len(target) > _NAME_MAX:
        extended += _pax(b"linkpath", target)
        target = target[:_NAME_MAX]
    written = size
    if size > _OCTAL_MAX:
        extended += _pax(b"size", b"%d" % size)
        written = 0
    mtime = min(max(int(status.st_mtime), 0), _OCTAL_MAX)
    header = _fields(name, status.st_mode & 0o777, written, mtime, kind, target, prefix)
    if extended:
        return _fields(b"././@PaxHeader", 0o644, len(extended), mtime, b"x", b"", b"") + _padded(extended) + header
    return header


def _fields(name: bytes, mode: int, size: int, mtime: int, kind: bytes, target: bytes, prefix: bytes) -> bytes:
    head = b"%b%07o\0000000000\0000000000\0%011o\0%011o\0" % (name.ljust(100, b"\0"), mode, size, mtime)
    if target or prefix:
        tail = _tail(kind, target, prefix)
        tail_sum = sum(tail)
    else:
        tail, tail_sum = _PLAIN_TAILS[kind]
    return b"%b%06o\0 %b" % (head, sum(head) + tail_sum + 256, tail)  # 256: the sum counts its own field as blanks


def _tail(kind: bytes, target: bytes, prefix: bytes) -> bytes:
    return kind + target.ljust(100, b"\0") + b"ustar\00000" + bytes(80) + prefix.ljust(167, b"\0")


_PLAIN_TAILS = {kind: (tail := _tail(kind, b"", b""), sum(tail)) for kind in (b"0", b"2", b"5", b"x")}


def _pax(key: bytes, value: bytes) -> bytes:
    total = len(key) + len(value) + 3
    digits = len(str(total))
    if len(str(total + digits)) > digits:
        digits += 1  # the record's length counts its own digits
    return b"%d %b=%b\n" % (total + digits, key, value)


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % BLOCK)


# ---- unpacking ----


class Unpacker:
    """Takes a tar stream in pieces of any size and writes it to `local`: a file, or a directory that may exist.

    A directory's stream begins with its root, `./`; a stream that begins with a file holds nothing else. Made are regular files, directories and links that
    stay inside; other links, devices and FIFOs are listed in `skipped`. Nothing gets set-id bits. A malformed
    stream and a name that leaves the tree raise `ProtocolError`, more than the caps `TooLarge`.
    """

    def __init__(self, local: Name, *, max_bytes: int = MAX_BYTES, max_entries: int = MAX_ENTRIES) -> None:
        self._local = path_bytes(local, "local")
        self._max_bytes = max_bytes
        self._max_entries = max_entries
        self._buffer = bytearray()
        self._left = 0  # bytes of the current file still to come
        self._padding = 0
        self._fd = -1  # the current file; -1 with `_left` > 0 means that it is left out
        self._file_mtime = 0
        self._extended: dict[bytes, bytes] = {}
        self._pax: bytearray | None = None  # an extended header being read
        self._path: list[bytes] = []  # the directory that is open now, and the descriptors from the root to it
        self._fds: list[int] = []
        self._modes: list[tuple[list[bytes], int]] = []  # of directories, set at the end: they may forbid writing
        self._ended = False
        self._is_file = False
        self.entries = 0
        self.bytes = 0
        self.skipped: list[str] = []

    def feed(self, *pieces: bytes) -> None:
        """Write as much as has come; blocks on the disk."""
        try:
            for piece in pieces:
                self._feed(piece)
        except TarError as exc:
            raise ProtocolError(str(exc)) from None
        except OSError as exc:
            if isinstance(exc, TooLarge):
                raise
            where = os.fsdecode(exc.filename) if isinstance(exc.filename, bytes) else exc.filename
            raise file_error(exc.errno or 0, f"while unpacking {where}", os.fsdecode(self._local)) from exc

    def _feed(self, data: bytes) -> None:
        if self._buffer:
            self._buffer += data
            data = bytes(self._buffer)
            self._buffer.clear()
        at, end = 0, len(data)
        view = memoryview(data)
        while at < end:
            if self._left:
                take = min(self._left, end - at)
                self._content(view[at : at + take])
                at += take
                self._left -= take
                if not self._left:
                    self._finish_content()
            elif self._padding:
                take = min(self._padding, end - at)
                self._padding -= take
                at += take
            elif end - at < BLOCK:
                break
            else:
                self._header(data[at : at + BLOCK])
                at += BLOCK
        self._buffer += data[at:]

    def finish(self) -> None:
        """The stream has ended: check that it was whole, and give directories their modes."""
        if self._left or self._padding or self._buffer or self._pax is not None or not self.entries:
            raise ProtocolError("a tar stream that ends in the middle")
        for path, mode in reversed(self._modes):
            os.fchmod(self._walk(path), mode)
        self.close()

    def close(self) -> None:
        """Let go of every descriptor; what was written stays. Safe to call twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        self._pop(0)

    # ---- one entry ----

    def _header(self, block: bytes) -> None:
        if not block.strip(b"\0"):
            self._ended = True
            return
        if self._ended:
            raise ProtocolError("a tar stream that goes on after its end")
        header = Header(block)
        kind, size = header.kind, header.size
        if kind in (b"x", b"g"):
            if size > _PAX_MAX or self._pax is not None:
                raise ProtocolError("an extended tar header that is too long")
            self._pax = bytearray()
            self._begin(size, -1)
            if not size:
                self._finish_content()
            return
        extended, self._extended = self._extended, {}
        if b"size" in extended:
            size = decimal(extended[b"size"])
        name, target = extended.get(b"path", header.name), extended.get(b"linkpath", header.target)
        self._entry(name, kind, header.mode & 0o777, size, header.mtime, target)

    def _entry(self, name: bytes, kind: bytes, mode: int, size: int, mtime: int, target: bytes) -> None:
        path = components(name, deepest=_DEPTH_MAX)
        self.entries += 1
        self.bytes += size
        if self.entries > self._max_entries or self.bytes > self._max_bytes:
            raise TooLarge(_EFBIG, f"more than {self._max_entries} entries or {self._max_bytes} bytes", os.fsdecode(self._local))
        if self._is_file:
            raise ProtocolError("a tar stream of one file that goes on")
        if kind in (b"0", b"\0", b"7"):
            if self.entries == 1:
                self._is_file, path = True, []
            elif not path:
                raise ProtocolError("a file without a name in a tar stream")
            self._begin(size, self._create(path, mode))
            self._file_mtime = mtime
            if not size:
                self._finish_content()
            return
        if size:
            raise ProtocolError("a tar entry with contents that cannot have any")
        if kind == b"5":
            self._walk(path)
            self._modes.append((path, mode))
        elif kind == b"2" and path and _stays_inside(path, target):
            directory = self._make_way(path)
            os.symlink(target, path[-1], dir_fd=directory)
        elif kind == b"1" and path:
            self._hard_link(path, components(target, deepest=_DEPTH_MAX))
        else:
            self.skipped.append(os.fsdecode(b"/".join(path)))

    def _begin(self, size: int, fd: int) -> None:
        self._left, self._padding, self._fd = size, -size % BLOCK, fd

    def _content(self, piece: memoryview) -> None:
        if self._pax is not None:
            self._pax += piece
        elif self._fd >= 0:
            while piece:
                piece = piece[os.write(self._fd, piece) :]

    def _finish_content(self) -> None:
        if self._pax is not None:
            self._extended = {key: value for key, value in records(bytes(self._pax)) if key in (b"path", b"linkpath", b"size")}
            self._pax = None
        elif self._fd >= 0:
            os.utime(self._fd, (self._file_mtime, self._file_mtime))
            os.close(self._fd)
            self._fd = -1

    def _create(self, path: list[bytes], mode: int) -> int:
        if self._is_file:
            fd = os.open(self._local, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        else:
            directory = self._parent(path)
            try:
                fd = os.open(path[-1], _CREATE, 0o600, dir_fd=directory)
            except FileExistsError:
                os.unlink(path[-1], dir_fd=directory)
                fd = os.open(path[-1], _CREATE, 0o600, dir_fd=directory)
        os.fchmod(fd, mode)
        return fd

    def _hard_link(self, path: list[bytes], target: list[bytes]) -> None:
        if not target:
            raise ProtocolError("a hard link to nothing")
        source = os.dup(self._walk(target[:-1]))
        try:
            if not stat.S_ISREG(os.stat(target[-1], dir_fd=source, follow_symlinks=False).st_mode):
                raise ProtocolError("a hard link to what is not a file")
            directory = self._make_way(path)
            os.link(target[-1], path[-1], src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(source)

    # ---- directories, by descriptor ----

    def _make_way(self, path: list[bytes]) -> int:
        """The directory of a new name, with what had that name removed."""
        directory = self._parent(path)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path[-1], dir_fd=directory)
        return directory

    def _parent(self, path: list[bytes]) -> int:
        parent = path[:-1]
        return self._fds[-1] if parent == self._path and self._fds else self._walk(parent)

    def _walk(self, path: list[bytes]) -> int:
        """The descriptor of a directory below the root, made where it is missing."""
        if not self._fds:
            with contextlib.suppress(FileExistsError):
                os.mkdir(self._local, 0o755)
            self._fds.append(os.open(self._local, _DIRECTORY & ~os.O_NOFOLLOW))
        same = 0
        while same < len(path) and same < len(self._path) and path[same] == self._path[same]:
            same += 1
        self._pop(same + 1)
        for name in path[same:]:
            try:
                fd = os.open(name, _DIRECTORY, dir_fd=self._fds[-1])
            except FileNotFoundError:
                os.mkdir(name, 0o755, dir_fd=self._fds[-1])
                fd = os.open(name, _DIRECTORY, dir_fd=self._fds[-1])
            self._fds.append(fd)
            self._path.append(name)
        return self._fds[-1]

    def _pop(self, keep: int) -> None:
        while len(self._fds) > keep:
            os.close(self._fds.pop())
        del self._path[max(0, keep - 1) :]


def _stays_inside(path: list[bytes], target: bytes) -> bool:
    """Whether a link at `path` points below the root by its text alone.

    Judged without following other links, so `..` is allowed only at the beginning: behind a name it would go up from
    wherever that name leads.
    """
    if not target or target.startswith(b"/") or b"\0" in target:
        return False
    parts = [part for part in target.split(b"/") if part not in (b"", b".")]
    up = 0
    while up < len(parts) and parts[up] == b"..":
        up += 1
    return b".." not in parts[up:] and up < len(path)
