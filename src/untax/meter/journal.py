"""Appends records to a run's file: whole lines or nothing, on disk after each batch of trials, and also when the disk is full.

Beside the file lies a reserve. When the disk is full the reserve is given up, which makes room for the records of the trials
that are already done; then the run ends with words.
"""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

from untax.core.errors import RecordError
from untax.meter.record import Reader, Record, Run, to_line

_RESERVE_BYTES = 1 << 20  # room for about a thousand records, more than are ever under way at once
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Journal:
    """Holds a run's file for writing; nobody else writes it meanwhile. `close()` gives it and the reserve back."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._fd: int | None = descriptor
        self._reserve = path.with_name(f".{path.name}.reserve")
        self._is_full = False
        self._set_reserve_aside()

    @classmethod
    def create(cls, path: Path, first: Run) -> Journal:
        """A new file that begins with `first`; `RecordError` when there is one already, for a run never writes over another."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise RecordError(f"{path} is there already; name another directory, or go on with it by --resume") from None
        except OSError as exc:
            raise _cannot(path, exc) from exc
        try:
            _take(path, descriptor)
            journal = cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        try:
            journal.append(first)
            journal.sync()
        except BaseException:
            journal.close()
            path.unlink(missing_ok=True)
            raise
        return journal

    @classmethod
    def resume(cls, path: Path) -> Journal:
        """Go on behind the last whole line; what was cut off behind it, by a crash while writing, is removed."""
        with Reader(path) as reader:
            for _ in reader:
                pass
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError as exc:
            raise _cannot(path, exc) from exc
        try:
            _take(path, descriptor)
            if reader.truncated:
                os.ftruncate(descriptor, reader.whole_bytes)
            return cls(path, descriptor)
        except BaseException:
            os.close(descriptor)
            raise

    def append(self, record: Record) -> None:
        """One whole line. When the disk is full it is written into the reserve's room, and `check_room` raises from then on."""
        self._write(to_line(record))

    def sync(self) -> None:
        """Everything that was appended survives a loss of power."""
        try:
            os.fsync(self._open())
        except OSError as exc:
            raise _cannot(self.path, exc) from exc

    def check_room(self) -> None:
        """Before more trials are begun: `RecordError` once the disk was found full. Everything that was measured is in the file."""
        if self._is_full:
            raise RecordError(
                f"{self.path}: the disk is full; all trials that were done are kept, none were begun since. Free some space and go on with "
                f"`untax bench --resume {self.path.parent}`"
            )

    def close(self) -> None:
        if self._fd is not None:
            descriptor, self._fd = self._fd, None
            self._reserve.unlink(missing_ok=True)
            os.close(descriptor)

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        if self._fd is None:
            raise RecordError(f"{self.path} is closed")
        return self._fd

    def _write(self, line: bytes) -> None:
        descriptor = self._open()
        before = os.fstat(descriptor).st_size
        try:
            self._write_all(descriptor, line)
        except OSError as exc:
            os.ftruncate(descriptor, before)  # no half lines
            if exc.errno not in _FULL or self._is_full:
                raise _cannot(self.path, exc) from exc
            self._is_full = True
            self._reserve.unlink(missing_ok=True)
            self._write(line)

    @staticmethod
    def _write_all(descriptor: int, line: bytes) -> None:
        rest = memoryview(line)
        while rest:
            rest = rest[os.write(descriptor, rest) :]

    def _set_reserve_aside(self) -> None:
        try:
            descriptor = os.open(self._reserve, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as exc:
            raise _cannot(self.path, exc) from exc
        try:
            os.posix_fallocate(descriptor, 0, _RESERVE_BYTES)
        except OSError as exc:
            self._reserve.unlink(missing_ok=True)
            raise _cannot(self.path, exc) from exc
        finally:
            os.close(descriptor)


def _take(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise RecordError(f"{path} is being written by another run; wait for it, or name another directory") from None


def _cannot(path: Path, exc: OSError) -> RecordError:
    why = "the disk is full; free some space" if exc.errno in _FULL else f"{exc.strerror}; name another directory with --out"
    return RecordError(f"{path}: {why}")
