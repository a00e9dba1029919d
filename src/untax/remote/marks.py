"""Which of the leases that a server gave ahead were taken, in a page of memory that server and client both have.

To take one the client sets a byte. That costs no message, nobody is woken by it, and the server still reads it when the client was killed the next moment. The server
makes the page and says with each lease which byte is that lease's; what it reads there decides only whether a lease is accounted for.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque

SLOTS = mmap.PAGESIZE
"""Of one client: leases that are given ahead and were not given up yet."""


class Marks:
    """The client's: `fd` came with the greeting and is its caller's to close. `OSError` or `ValueError` for what is not such a page."""

    def __init__(self, fd: int) -> None:
        self._page = mmap.mmap(fd, SLOTS)

    def take(self, slot: int) -> None:
        """The lease of this slot has a holder from now on."""
        self._page[slot] = 1

    def close(self) -> None:
        self._page.close()


class Slots:
    """The server's: one page for each client."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("untax-marks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, SLOTS)
            # A client that made it smaller would end the server with SIGBUS at its next look.
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._page = mmap.mmap(self.fd, SLOTS)
        except BaseException:
            os.close(self.fd)
            raise
        self._free: deque[int] = deque()
        self._used = 0

    def give(self) -> int | None:
        """One that is nobody's, not taken; None when there is none."""
        if self._used < SLOTS:
            slot, self._used = self._used, self._used + 1
        elif self._free:
            slot = self._free.popleft()  # the one that was free the longest: a mark that comes late is nobody's
        else:
            return None
        self._page[slot] = 0
        return slot

    def is_taken(self, slot: int) -> bool:
        return self._page[slot] != 0

    def free(self, slot: int) -> None:
        self._free.append(slot)

    def close(self) -> None:
        """Safe to call twice."""
        if self.fd >= 0:
            self._page.close()
            os.close(self.fd)
            self.fd = -1
