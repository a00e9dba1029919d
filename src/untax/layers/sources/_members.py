"""Where the members of a packed image lie: in a directory, or in an outer tar that is never unpacked to names of its choosing."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from untax.core.errors import StageFailed, StageUnavailable
from untax.core.tar import TarError, components
from untax.layers import tarball
from untax.layers.blob import Blob, Caps
from untax.layers.sources import Progress, Stop
from untax.layers.tarball import Tarball

_OPEN = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC  # without waiting for whoever might write to a FIFO of that name
_CHUNK = 1 << 20
_OUTER = Caps(bytes=256 << 30, entries=100_000, deepest=16)
_SMALL = 1 << 20  # members of a compressed archive that are held in memory while it is looked through
_SMALL_TOTAL = 32 << 20


class Folder(Protocol):
    def __contains__(self, name: str, /) -> bool: ...

    def size(self, name: str, /) -> int: ...

    def open(self, name: str, /) -> BinaryIO: ...

    def read(self, name: str, most: int, /) -> bytes: ...


class Directory:
    """A layout as a directory. Links are not followed: what they lead to may be nobody's image."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def __enter__(self) -> Directory:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def __contains__(self, name: str) -> bool:
        try:
            self.open(name).close()
        except StageFailed:
            return False
        return True

    def size(self, name: str) -> int:
        with self.open(name) as file:
            return os.fstat(file.fileno()).st_size

    def open(self, name: str) -> BinaryIO:
        fd = os.dup(self._fd)
        try:
            *parents, last = [os.fsdecode(part) for part in components(os.fsencode(name), deepest=8)]
            for parent in parents:
                fd, above = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd), fd
                os.close(above)
            fd, above = os.open(last, _OPEN, dir_fd=fd), fd
            os.close(above)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise StageFailed("image", f"{self._path}: {name[:200]!r} in it is not a file")
            return open(fd, "rb", buffering=0)
        except FileNotFoundError:
            os.close(fd)
            raise StageFailed("image", f"{self._path}: there is no {name[:200]!r} in it") from None
        except (OSError, ValueError) as exc:
            os.close(fd)
            raise StageFailed("image", f"{self._path}: {name[:200]!r} in it cannot be opened, or is a link: copy it with cp -RL") from exc
        except BaseException:
            os.close(fd)
            raise

    def read(self, name: str, most: int) -> bytes:
        with self.open(name) as file:
            return _read_most(file, most, f"{self._path}: {name[:200]!r}")


class Members:
    """The members of an outer tar: where each lies in `file`, or its contents where it had to be unpacked to be seen."""

    def __init__(self, what: str, file: BinaryIO | None) -> None:
        self._what = what
        self._file = file
        self._places: dict[tuple[bytes, ...], tuple[int, int]] = {}
        self._contents: dict[tuple[bytes, ...], bytes] = {}
        self._links: dict[tuple[bytes, ...], tuple[bytes, ...]] = {}

    def add(self, name: tuple[bytes, ...], place: tuple[int, int] | None, contents: bytes | None) -> None:
        if name in self._places or name in self._contents or name in self._links:
            raise TarError("two members of one name")
        if place is not None:
            self._places[name] = place
        elif contents is not None:
            self._contents[name] = contents

    def link(self, name: tuple[bytes, ...], target: tuple[bytes, ...]) -> None:
        self.add(name, None, None)
        self._links[name] = target

    def __contains__(self, name: str) -> bool:
        found = self._resolve(name)
        return found in self._places or found in self._contents

    def size(self, name: str) -> int:
        found = self._require(name)
        return self._places[found][1] if found in self._places else len(self._contents[found])

    def open(self, name: str) -> BinaryIO:
        found = self._require(name)
        if found in self._contents:
            return io.BytesIO(self._contents[found])
        assert self._file is not None
        return io.BufferedReader(_Section(self._file.fileno(), *self._places[found]), _CHUNK)

    def read(self, name: str, most: int) -> bytes:
        with self.open(name) as file:
            return _read_most(file, most, f"{self._what}: {name[:200]!r}")

    def _require(self, name: str) -> tuple[bytes, ...]:
        found = self._resolve(name)
        if found not in self._places and found not in self._contents:
            raise StageFailed("image", f"{self._what}: there is no {name[:200]!r} in it")
        return found

    def _resolve(self, name: str) -> tuple[bytes, ...]:
        """Old archives name a layer that comes twice by a link to the first."""
        try:
            found = tuple(components(name.encode(errors="surrogateescape"), deepest=_OUTER.deepest))
        except (TarError, UnicodeEncodeError):
            raise StageFailed("image", f"{self._what}: {name[:200]!r} is not the name of a member") from None
        return self._links.get(found, found)


class _Section(io.RawIOBase):
    """A part of a file, read by its own place in it."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self._fd, self._at, self._end = fd, start, start + size

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = os.pread(self._fd, min(len(buffer), self._end - self._at), self._at)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)


def _members(what: str, blob: Blob, file: BinaryIO | None) -> Members:
    """Look through an outer tar: remember where members lie in `file`, or hold the small ones."""
    found = Members(what, file)
    archive, held = Tarball(blob, _OUTER), 0
    try:
        for entry in archive:
            name = tuple(components(entry.name, deepest=_OUTER.deepest))
            if entry.kind == tarball.FILE and entry.pieces is None:
                if file is not None:
                    found.add(name, (archive.offset, entry.stored), None)
                elif entry.stored <= _SMALL and held + entry.stored <= _SMALL_TOTAL:
                    held += entry.stored
                    found.add(name, None, b"".join(bytes(part) for part in archive.content()))
            elif entry.kind == tarball.LINK:
                found.link(name, _inside(name, entry.target))
            elif entry.kind == tarball.HARD_LINK:
                found.link(name, tuple(components(entry.target, deepest=_OUTER.deepest)))
            elif entry.kind != tarball.DIRECTORY:
                raise TarError("a member that is neither a file nor a link to one")
    except TarError as exc:
        raise StageFailed("image", f"{what}: the archive is refused: {exc}") from None
    return found


def _inside(name: tuple[bytes, ...], target: bytes) -> tuple[bytes, ...]:
    """Where a link at `name` leads, in the archive."""
    at = list(name[:-1])
    for part in target.split(b"/"):
        if part == b"..":
            if not at:
                raise TarError("a link out of the archive")
            at.pop()
        elif part not in (b"", b"."):
            at.append(part)
    if target.startswith(b"/") or len(at) > _OUTER.deepest:
        raise TarError("a link out of the archive")
    return tuple(at)


def look_through(file: BinaryIO, what: str, stop: Stop) -> Members:
    """The members without unpacking anything to the disk. Of a compressed archive only the small ones are there."""
    blob = Blob(file, caps=_OUTER, on_read=lambda _: stop.check())
    return _members(what, blob, None if _is_compressed(file) else file)


@contextlib.contextmanager
def unpacked(file: BinaryIO, what: str, directory: Path, stop: Stop, progress: Progress) -> Iterator[Members]:
    """The members of an archive, out of a nameless copy in `directory` when it is compressed."""
    if not _is_compressed(file):
        yield look_through(file, what, stop)
        return
    total = os.fstat(file.fileno()).st_size

    def on_read(read: int) -> None:
        stop.check()
        progress("unpacking the archive", read, total)

    blob = Blob(file, caps=_OUTER, on_read=on_read)
    try:
        with tempfile.TemporaryFile(dir=directory, buffering=0) as copy:
            while data := blob.read(_CHUNK):
                copy.write(data)
            copy.seek(0)
            yield _members(what, Blob(copy, caps=_OUTER, on_read=lambda _: stop.check()), copy)
    except OSError as exc:
        raise StageUnavailable("image", f"{what}: it cannot be unpacked in {directory}: {exc.strerror}") from exc


def _is_compressed(file: BinaryIO) -> bool:
    first = os.pread(file.fileno(), 6, 0)
    return first.startswith((b"\x1f\x8b", b"\xfd7zXZ\0", b"\x28\xb5\x2f\xfd"))


def _read_most(file: BinaryIO, most: int, what: str) -> bytes:
    data = b""
    while len(data) <= most and (more := file.read(min(_CHUNK, most + 1 - len(data)))):
        data += more
    if len(data) > most:
        raise StageFailed("image", f"{what}: more than {most} bytes")
    return data
