"""Blobs on their way into the store: a file each in `downloads/`, kept when the way was cut, checked while they come.

A file is its downloader's while it is locked. Whoever wants the same blob meanwhile waits, in this process or in another, and
whoever comes after a crash or a cancelled download goes on where it ended.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from untax.core.errors import StageFailed, StageUnavailable
from untax.layers.sources import Stopped
from untax.layers.sources._http import CHUNK, Halt, Patience, Reply, Transient, persist, printable, shown

_LOCK_POLL_S = 0.1  # a wait for the kernel's lock itself could not be ended
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, slots=True)
class Descriptor:
    """Bytes that are known by what they are."""

    digest: str
    size: int

    @property
    def file_name(self) -> str:
        return self.digest.replace(":", "-")

    def hasher(self) -> hashlib._Hash:
        return hashlib.new(self.digest.partition(":")[0])


def download(
    directory: Path,
    blob: Descriptor,
    ask: Callable[[int], Reply],
    *,
    patience: Patience,
    halt: Halt,
    came: Callable[[int], None],
) -> BinaryIO:
    """The whole blob as a file to read, its digest checked. It stays in `directory` until `discard`.

    `ask(start)` requests the bytes from `start` on; `came` is told of each number of bytes that are there now and were not before.
    """
    path = directory / blob.file_name
    file = _open_locked(path, blob.size, halt)
    try:
        persist(f"blob {blob.digest[:19]}…", patience, halt, _Download(file, blob, ask, halt, came).attempt)
        file.seek(0)
        # Whoever waits for it may read it now too. To hold several while waiting for others could lock two downloaders out for good.
        fcntl.flock(file.fileno(), fcntl.LOCK_UN)
    except BaseException as exc:
        is_kept = isinstance(exc, (Stopped, StageUnavailable)) and not is_full(exc.__cause__)
        if not is_kept:
            path.unlink(missing_ok=True)
        file.close()
        raise
    return file


def discard(directory: Path, blob: Descriptor) -> None:
    """Remove what `download` left. Others who have it open go on reading."""
    (directory / blob.file_name).unlink(missing_ok=True)


def is_full(exc: BaseException | None) -> bool:
    """A disk that is full: what is kept of a download would keep it so."""
    return isinstance(exc, OSError) and exc.errno in _FULL


class _Download:
    """One blob, over as many attempts as it takes."""

    def __init__(self, file: BinaryIO, blob: Descriptor, ask: Callable[[int], Reply], halt: Halt, came: Callable[[int], None]) -> None:
        self._file, self._blob, self._ask, self._halt, self._came = file, blob, ask, halt, came
        self._hash = blob.hasher()
        self._at = 0
        self._furthest = 0
        self._is_pieced = False  # together from more than one answer
        self._had_to_restart = False
        self._take_up()

    def attempt(self) -> None:
        """Bring what is still missing. Afterwards the file is the blob, or an exception says why not."""
        if self._at < self._blob.size:
            before = self._furthest
            try:
                self._transfer()
            except Transient as exc:
                exc.progressed = self._furthest > before
                raise
        if f"{self._hash.name}:{self._hash.hexdigest()}" == self._blob.digest:
            return
        if not self._is_pieced or self._had_to_restart:
            raise StageFailed("image", f"the registry sent other bytes than those of {self._blob.digest}; refused")
        # One of the pieces may be from before a crash of this machine, or of another copy behind the same name.
        self._had_to_restart = True
        self._start_over()
        raise Transient(f"the pieces of {self._blob.digest} do not fit together", wait_s=0, progressed=True)

    def _transfer(self) -> None:
        self._is_pieced = self._at > 0
        with self._ask(self._at) as reply:
            if self._at and reply.status == 416:
                self._start_over()
                raise Transient(f"{shown(reply.url)} cannot go on where it ended")
            if reply.status == 206:
                self._require_range(reply)
            elif reply.status == 200:
                self._start_over()  # it does not go on in the middle, or was not asked to
            else:
                require_ok(reply, "the blob")
            missing = self._blob.size - self._at
            if reply.length is not None and reply.length != missing:
                raise Transient(f"{shown(reply.url)} offers {reply.length} bytes where {missing} are missing")
            for data in reply.chunks():
                if self._at + len(data) > self._blob.size:
                    raise StageFailed("image", f"{shown(reply.url)} sends more than the {self._blob.size} bytes that the manifest promised")
                self._add(data)
        if self._at < self._blob.size:
            raise Transient(f"{shown(reply.url)} ended {self._blob.size - self._at} bytes too early")

    def _require_range(self, reply: Reply) -> None:
        found = re.fullmatch(r"bytes (\d{1,19})-\d{1,19}/(\d{1,19}|\*)", reply.headers.get("Content-Range", ""))
        if found is None or int(found[1]) != self._at or found[2] not in ("*", str(self._blob.size)):
            self._start_over()
            raise Transient(f"{shown(reply.url)} went on somewhere else than asked")

    def _add(self, data: bytes) -> None:
        try:
            rest = memoryview(data)
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as exc:
            raise StageUnavailable("image", f"cannot keep what is downloaded: {exc.strerror}") from exc
        self._hash.update(data)
        self._move(self._at + len(data))

    def _take_up(self) -> None:
        """Go on with what is there, if it can be a part of the blob."""
        if os.fstat(self._file.fileno()).st_size > self._blob.size:
            self._start_over()
        self._file.seek(0)
        while data := self._file.read(CHUNK):
            self._halt.check()
            self._hash.update(data)
            self._move(self._at + len(data))
        self._is_pieced = self._at > 0

    def _start_over(self) -> None:
        self._file.seek(0)
        self._file.truncate()
        self._hash = self._blob.hasher()
        self._is_pieced = False
        self._at = 0

    def _move(self, at: int) -> None:
        self._at = at
        if at > self._furthest:
            self._came(at - self._furthest)
            self._furthest = at


def _open_locked(path: Path, whole: int, halt: Halt) -> BinaryIO:
    """The file at `path`, made when missing, ours alone."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise StageUnavailable("image", f"cannot keep downloads in {path.parent}: {exc.strerror}") from exc
        file = open(fd, "r+b", buffering=0)  # noqa: SIM115 - the caller's to close
        try:
            while not _try_lock(fd):
                halt.sleep(_LOCK_POLL_S)
            # Whoever had it before us may be done with it and have removed it; to us it is as good as before.
            if os.fstat(fd).st_size == whole or os.path.samestat(os.stat(path), os.fstat(fd)):
                return file
        except FileNotFoundError:
            pass
        except BaseException:
            file.close()
            raise
        file.close()


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def require_ok(reply: Reply, what: str) -> None:
    """`StageFailed` in the other end's own words unless the status is 200."""
    if reply.status == 200:
        return
    said = ""
    with contextlib.suppress(Transient, StageFailed):
        said = ": " + printable(reply.read(4096).decode(errors="replace").strip(), 200)
    raise StageFailed("image", f"{what}: {shown(reply.url)} answered {reply.status}{said}".removesuffix(": "))
