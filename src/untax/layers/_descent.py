"""Going down a tree that a workload made, and up again: by descriptors, never through a link, however deep it is.

Paths have a longest length, processes a largest number of open files and Python a deepest recursion; trees have none of
these. So a descent holds the last few directories open and finds the others again by their names when it comes back up.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_OPEN_AT_ONCE = 32  # directories; deeper trees than this are rare, and 1,024 descriptors are all that most processes have


class Descent:
    """A place in one tree; `fd` is the directory it is at. With `force`, directories that are closed to their own owner are
    opened by a change of mode, which is taken back on the way up.
    """

    def __init__(self, top: Path | str | bytes, *, force: bool = False, keep: int = _OPEN_AT_ONCE) -> None:
        self._top = top
        self._force = force
        self._keep = keep
        self._names: list[bytes] = []
        self._modes: list[int | None] = [None]
        self._fds: list[int] = []
        fd, self._modes[0] = self._open(top, None)
        self._fds.append(fd)

    @property
    def names(self) -> Sequence[bytes]:
        """From the top to here."""
        return self._names

    @property
    def depth(self) -> int:
        return len(self._names)

    @property
    def fd(self) -> int:
        """Of the directory here; lent until the next step."""
        if self._fds[-1] < 0:
            self._find_again()
        return self._fds[-1]

    def enter(self, name: bytes) -> int:
        """Go down into `name`; an `OSError` leaves everything as it was."""
        fd, mode = self._open(name, self.fd)
        self._names.append(name)
        self._modes.append(mode)
        self._fds.append(fd)
        self._close(len(self._fds) - 1 - self._keep)
        return fd

    def leave(self) -> None:
        """Go up by one."""
        self._restore()
        self._close(len(self._fds) - 1)
        self._fds.pop()
        self._modes.pop()
        self._names.pop()

    def seek(self, names: Sequence[bytes]) -> int:
        """Go to the directory of that path from the top, by way of what it has in common with this one."""
        shared = _shared(self._names, list(names))
        while len(self._names) > shared:
            self.leave()
        for name in names[shared:]:
            self.enter(name)
        return self.fd

    def close(self) -> None:
        """Safe to call twice."""
        try:
            while self._names and any(mode is not None for mode in self._modes):
                self.leave()
            if self._fds:
                self._restore()
        finally:
            for at in range(len(self._fds)):
                self._close(at)
            self._fds.clear()

    def __enter__(self) -> Descent:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self, name: Path | str | bytes, within: int | None) -> tuple[int, int | None]:
        try:
            return _open_for_search(name, within), None
        except PermissionError:
            if not self._force:
                raise
        closed = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        try:
            mode = stat.S_IMODE(os.fstat(closed).st_mode)
            os.chmod(f"/proc/self/fd/{closed}", mode | 0o700)
            return os.open(f"/proc/self/fd/{closed}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC), mode
        finally:
            os.close(closed)

    def _restore(self) -> None:
        mode = self._modes[-1]
        if mode is not None:
            os.fchmod(self.fd, mode)

    def _close(self, at: int) -> None:
        if at >= 0 and self._fds[at] >= 0:
            os.close(self._fds[at])
            self._fds[at] = -1

    def _find_again(self) -> None:
        fd = os.open(self._top, DIRECTORY)
        last = len(self._names)
        for at, name in enumerate(self._names):
            below = -1
            try:
                below = os.open(name, DIRECTORY, dir_fd=fd)
            finally:
                if last - at < self._keep and self._fds[at] < 0 and below >= 0:
                    self._fds[at] = fd
                else:
                    os.close(fd)
            fd = below
        self._fds[last] = fd


def _shared(have: list[bytes], want: list[bytes]) -> int:
    """How many names two paths begin with alike. Steps down and up by a few are told at once, which matters where it is deep."""
    least = min(len(have), len(want))
    if have[:least] == want[:least]:
        return least
    return next(at for at in range(least) if have[at] != want[at])


def _open_for_search(name: Path | str | bytes, within: int | None) -> int:
    fd = os.open(name, DIRECTORY, dir_fd=within)
    try:
        os.stat(".", dir_fd=fd)  # a directory may be readable and still closed to whoever wants to go on from it
    except OSError:
        os.close(fd)
        raise
    return fd


def stat_at(fd: int, name: bytes) -> os.stat_result:
    return os.stat(name, dir_fd=fd, follow_symlinks=False)


def names_in(fd: int) -> list[bytes]:
    """Sorted by their bytes, which is the same on every machine."""
    return sorted(os.fsencode(name) for name in os.listdir(fd))


Visit = tuple[bytes, os.stat_result, int]
"""A name, what it is, and the directory it is in; the name is empty for the top."""


def walk(descent: Descent, *, closed: Callable[[], None] | None = None) -> Iterator[Visit | None]:
    """Everything below the descent's place, directories before what they hold, in the order of names; None for each way up.

    `closed` is called for a directory that cannot be opened, in place of an exception; nothing below it is visited.
    """
    waiting: list[Iterator[bytes]] = [iter(names_in(descent.fd))]
    while waiting:
        name = next(waiting[-1], None)
        if name is None:
            waiting.pop()
            if waiting:
                descent.leave()
            yield None
            continue
        st = stat_at(descent.fd, name)
        yield name, st, descent.fd
        if stat.S_ISDIR(st.st_mode):
            try:
                waiting.append(iter(names_in(descent.enter(name))))
            except PermissionError:
                if closed is None:
                    raise
                closed()
                yield None
