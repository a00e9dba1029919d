"""Which of one client's leases were given before they were asked for, and which of those it has taken since."""

from __future__ import annotations

import logging

from untax.remote.marks import Slots

log = logging.getLogger("untax.server")


class Ahead:
    """Nothing is given to who has no page of memory in common with us, in which it says what it takes."""

    def __init__(self) -> None:
        self._slots: Slots | None = None
        self._given: dict[str, int] = {}

    def share(self) -> None:
        """Have a page for a client to which descriptors can be passed; the same one when it comes back."""
        if self._slots is None:
            try:
                self._slots = Slots()
            except OSError as exc:
                log.warning("clients are given no leases ahead: %s", exc)

    @property
    def fd(self) -> int | None:
        """The page's, for the client; it stays ours."""
        return None if self._slots is None else self._slots.fd

    def add(self, lease_id: str) -> int | None:
        """A lease is about to be given: its slot, None when there is none."""
        slot = None if self._slots is None else self._slots.give()
        if slot is not None:
            self._given[lease_id] = slot
        return slot

    def is_untaken(self, lease_id: str) -> bool:
        """Whether it was given ahead, and nobody has it so far."""
        slot = self._given.get(lease_id)
        return slot is not None and self._slots is not None and not self._slots.is_taken(slot)

    @property
    def has_untaken(self) -> bool:
        return any(map(self.is_untaken, self._given))

    def pop(self, lease_id: str) -> bool | None:
        """It is over: whether it had been taken; None for one that was asked for."""
        slot = self._given.pop(lease_id, None)
        if slot is None or self._slots is None:
            return None
        is_taken = self._slots.is_taken(slot)
        self._slots.free(slot)
        return is_taken

    def close(self) -> None:
        self._given.clear()
        slots, self._slots = self._slots, None
        if slots is not None:
            slots.close()
