"""Where connections wait between two questions, or for an answer that takes its time: one thread for all of them.

So a claim that waits for a build of an hour costs a descriptor and no thread, and a hundred nodes that want one layer wait for their turn
instead of being turned away.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from untax.cluster.transfer.wire import BEAT_S


class Guest(Protocol):
    """What waits. Of the room while it is in it, and of whoever it was handed to afterwards."""

    is_over: bool
    """Set by the room on one that may wait no longer."""

    def fileno(self) -> int: ...

    def is_due(self) -> bool:
        """Whether an answer that it waited for is there. Never waits."""

    def tick(self, now: float) -> bool:
        """Called every `BEAT_S`: whether it may go on waiting. Never waits."""


G = TypeVar("G", bound=Guest)


class Room(Generic[G]):
    """`handed` is called, in the room's own thread, with whoever is due, has something to read, or may wait no longer; it must not wait."""

    def __init__(self, handed: Callable[[G], None]) -> None:
        self._handed = handed
        self._guard = threading.Lock()
        self._coming: list[G] = []
        self._rung: list[G] = []
        self._inside: dict[int, G] = {}  # by descriptor; the room's thread's own
        self._selector = selectors.DefaultSelector()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._bell, selectors.EVENT_READ)
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="untax-layers-room", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enter(self, guest: G) -> bool:
        """False once the room is closed: it is still the caller's then."""
        with self._guard:
            if self._is_closed:
                return False
            self._coming.append(guest)
            self._wake()
        return True

    def ring(self, guest: G) -> None:
        """From any thread, after it has become due; whether it is in the room by now or not. Never waits."""
        with self._guard:
            if not self._is_closed:
                self._rung.append(guest)
                self._wake()

    def close(self) -> list[G]:
        """Those who were still inside, who are the caller's now. Safe to call twice."""
        with self._guard:
            is_first, self._is_closed = not self._is_closed, True
            if is_first:
                self._wake()
        if not is_first:
            return []
        if self._thread.ident is not None:
            self._thread.join()
        left = [*self._inside.values(), *self._coming]
        self._inside.clear()
        self._coming.clear()
        self._selector.close()
        os.close(self._bell)
        return left

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it rings already
            os.eventfd_write(self._bell, 1)

    def _run(self) -> None:
        beat_at = time.monotonic() + BEAT_S
        while True:
            was_empty = not self._inside
            found = self._selector.select(max(beat_at - time.monotonic(), 0.0) if self._inside else None)
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._bell)  # before the lists are taken: what is added to them afterwards rings again
            with self._guard:
                if self._is_closed:
                    return
                coming, self._coming = self._coming, []
                rung, self._rung = self._rung, []
            for key, _ in found:
                if key.fd != self._bell:
                    self._out(self._inside[key.fd])
            for guest in coming:
                # Whoever became due before it came in has rung already, when nobody was here.
                self._handed(guest) if guest.is_due() else self._in(guest)
            for guest in rung:
                # It may have been answered before it came in: then it waits for something else by now.
                if self._inside.get(guest.fileno()) is guest and guest.is_due():
                    self._out(guest)
            if (now := time.monotonic()) >= beat_at or was_empty:
                beat_at = now + BEAT_S
                for guest in () if was_empty else list(self._inside.values()):
                    if not guest.tick(now):
                        guest.is_over = True
                        self._out(guest)

    def _in(self, guest: G) -> None:
        try:
            self._selector.register(guest.fileno(), selectors.EVENT_READ)
        except OSError:  # the kernel watches no more than so many
            guest.is_over = True
            self._handed(guest)
        else:
            self._inside[guest.fileno()] = guest

    def _out(self, guest: G) -> None:
        del self._inside[guest.fileno()]
        self._selector.unregister(guest.fileno())
        self._handed(guest)
