"""What happens when a sandbox's memory runs out: its largest process ends, and nothing else.

To the host's kernel a gVisor sandbox is one process, which it would kill as a whole. So it is kept from that, tells instead that the limit is
reached, and the cell inside is told to end the largest process, with room to do so. A sandbox that fills that room too is ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
from collections.abc import Awaitable, Callable
from pathlib import Path

from untax.core.errors import UntaxError
from untax.substrates._gvisor_groups import Group

log = logging.getLogger("untax.gvisor")

# While the largest process is found and ended, whoever asks for memory gets it in small pieces: the kernel inside needs some to do so, and on a
# busy machine it takes half a second, in which a process that is not held up fills a gibibyte.
_ROOM, _FIRST, _PIECE = 1 << 30, 192 << 20, 64 << 20
_PAUSE_S = 0.05  # between two pieces, and between two attempts to have them back: the dead give their memory up in their own time
_ATTEMPTS = 100
_AGAIN = 20  # attempts until the next largest process follows
_TAKEN = ("anon", "shmem", "slab")  # of memory.stat: what no writing back would free


class MemoryGuard:
    """From `watch` to `close`. `shed` has the cell inside end the largest process; `give_up` ends the sandbox."""

    def __init__(self, group: Group, limit: int, shed: Callable[[], Awaitable[None]], give_up: Callable[[], None]) -> None:
        self._group = group
        self._limit = limit
        self._shed = shed
        self._give_up = give_up
        self._fd = -1
        self._changes: Changes | None = None
        self._making_room: asyncio.Task[None] | None = None
        self._path = Path()
        self._is_unified = False

    def watch(self) -> None:
        """Without it, where the kernel refuses, a sandbox whose memory has run out is lost."""
        where = self._group.memory
        if where is None:
            return
        self._path, self._is_unified = where
        try:
            self._fd = self._watched_unified() if self._is_unified else self._watched_v1()
        except OSError as exc:
            log.debug("memory of a sandbox cannot be watched: %s", exc)
            return
        asyncio.get_running_loop().add_reader(self._fd, self._told)

    def _watched_v1(self) -> int:
        control = os.open(self._path / "memory.oom_control", os.O_RDWR | os.O_CLOEXEC)
        told = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        try:
            (self._path / "cgroup.event_control").write_text(f"{told} {control}")
            os.write(control, b"1")  # nobody is killed: they wait
        except OSError:
            os.close(told)
            raise
        finally:
            os.close(control)
        return told

    def _watched_unified(self) -> int:
        (self._path / "memory.max").write_text(str(self._limit + _ROOM))
        (self._path / "memory.high").write_text(str(self._limit))  # beyond it they are slowed down
        self._changes = Changes(self._path / "memory.events")
        return self._changes.fileno()

    def _told(self) -> None:
        if self._changes is not None:
            self._changes.seen()
            if self._taken() < self._limit * 15 // 16:
                return  # what was read from files is in it, and makes room by itself
        else:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._fd)
        if self._making_room is None:
            self._making_room = asyncio.ensure_future(self._make_room())

    def _taken(self) -> int:
        lines = (line.split() for line in (self._path / "memory.stat").read_text().splitlines())
        return sum(int(words[1]) for words in lines if len(words) == 2 and words[0] in _TAKEN)

    async def _make_room(self) -> None:
        shedding = asyncio.ensure_future(self._shed())
        given = 0
        try:
            for attempt in range(1, _ATTEMPTS + 1):
                if self._is_stuck():
                    given += _PIECE if given else _FIRST
                    if given > _ROOM:
                        break
                    self._group.allow(self._limit + given)
                await asyncio.sleep(_PAUSE_S)  # the kernel tells nobody when memory comes back
                if not shedding.done():
                    continue
                shedding.result()
                if self._has_room_back() and not self._is_stuck():
                    return
                if attempt % _AGAIN == 0:
                    shedding = asyncio.ensure_future(self._shed())
            self._end()
        except (OSError, UntaxError) as exc:
            log.debug("no room could be made: %s", exc)
            self._end()
        finally:
            shedding.cancel()
            self._making_room = None

    def _is_stuck(self) -> bool:
        """Whether somebody waits for memory. Looked at, because one who waits again is not always told of."""
        return not self._is_unified and "under_oom 1" in (self._path / "memory.oom_control").read_text()

    def _has_room_back(self) -> bool:
        if self._is_unified:
            return self._taken() < self._limit
        try:
            self._group.allow(self._limit)
        except OSError as exc:
            if exc.errno != errno.EBUSY:
                raise
            return False
        return True

    def _end(self) -> None:
        log.warning("a sandbox is ended: its memory ran out, and ending its largest process did not help")
        self._give_up()

    def close(self) -> None:
        """Before the sandbox is ended: whoever waits for memory could not die."""
        if self._making_room is not None:
            self._making_room.cancel()
        if self._fd >= 0:
            asyncio.get_running_loop().remove_reader(self._fd)
            if self._changes is not None:
                self._changes.close()
            else:
                os.close(self._fd)
            self._fd = -1
            if not self._is_unified:
                with contextlib.suppress(OSError):
                    (self._path / "memory.oom_control").write_text("0")


class Changes:
    """Of a file of a version 2 group: readable when it has changed since it was `seen`, and once at first.

    Such a file can be read at any time, and tells a change by EPOLLPRI only, which a loop's own readers do not wait for.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self._epoll = select.epoll()
            self._epoll.register(self._file, select.EPOLLPRI)
        except BaseException:
            os.close(self._file)
            raise

    def fileno(self) -> int:
        return self._epoll.fileno()

    def seen(self) -> None:
        os.pread(self._file, 4096, 0)  # or it is told again

    def close(self) -> None:
        self._epoll.close()
        os.close(self._file)
