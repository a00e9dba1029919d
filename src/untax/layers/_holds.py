"""Which layers this process uses: one lock each however often it is used, because leases are many and descriptors are few."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from untax.layers._flock import is_same, take_shared

_KEPT_S = 3600.0  # a layer that was published is held for its record this long; builds that take longer pin what they use


class Holds:
    """Shared locks on layers, counted. `lock_of` gives the lock file of a layer that is in its place."""

    def __init__(self, lock_of: Callable[[str], Path]) -> None:
        self._lock_of = lock_of
        self._guard = threading.Lock()
        self._held: dict[str, _Hold] = {}
        self._kept: dict[str, float] = {}  # layers that wait for their record, and since when

    def __contains__(self, layer_id: str) -> bool:
        return layer_id in self._held

    def take(self, layer_id: str, *, waits: bool = True) -> bool:
        """Hold it once more; false when it is not there, or, unless one `waits`, while somebody takes it away."""
        with self._guard:
            hold = self._held.get(layer_id)
            if hold is not None and is_same(hold.fds[-1], self._lock_of(layer_id)):
                hold.count += 1
                return True
        fd = take_shared(self._lock_of(layer_id), waits=waits)
        if fd is None:
            return False
        with self._guard:
            self._add(layer_id, fd)
        return True

    def take_again(self, layer_id: str) -> bool:
        """Hold once more what is held already, without a look at the disk; false when it is not."""
        with self._guard:
            hold = self._held.get(layer_id)
            if hold is None:
                return False
            hold.count += 1
            return True

    def let_go(self, layer_id: str) -> None:
        with self._guard:
            hold = self._held.get(layer_id)
            if hold is None:
                return
            hold.count -= 1
            if hold.count <= 0:
                del self._held[layer_id]
                hold.close()

    def keep(self, layer_id: str, fd: int) -> None:
        """Hold a layer that was just published, by the lock its maker has, until `unkeep` or for an hour."""
        with self._guard:
            self._add(layer_id, fd)
            if layer_id in self._kept:
                self._held[layer_id].count -= 1
            self._kept[layer_id] = time.monotonic()

    def keep_held(self, layer_id: str) -> None:
        """The same for one that is held already."""
        with self._guard:
            if layer_id not in self._kept:
                self._held[layer_id].count += 1
            self._kept[layer_id] = time.monotonic()

    def unkeep(self, layer_id: str) -> None:
        with self._guard:
            is_kept = self._kept.pop(layer_id, None) is not None
        if is_kept:
            self.let_go(layer_id)

    def drop_expired(self) -> None:
        """Let go of layers whose record never came."""
        now = time.monotonic()
        with self._guard:
            expired = [one for one, since in self._kept.items() if now - since > _KEPT_S]
        for layer_id in expired:
            self.unkeep(layer_id)

    def close(self) -> None:
        with self._guard:
            self._kept.clear()
            while self._held:
                self._held.popitem()[1].close()

    def _add(self, layer_id: str, fd: int) -> None:
        hold = self._held.setdefault(layer_id, _Hold())
        if hold.fds and is_same(hold.fds[-1], self._lock_of(layer_id)):
            os.close(fd)
        else:  # one that was held before may have been set aside; whoever stands on that still does
            hold.fds.append(fd)
        hold.count += 1


class Pin:
    """Layers that stay where they are until `close`, or until this process is no more."""

    def __init__(self, let_go: Callable[[str], None]) -> None:
        self._let_go = let_go
        self._ids: list[str] = []

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._ids)

    def close(self) -> None:
        """Safe to call twice, and from any thread."""
        while self._ids:
            self._let_go(self._ids.pop())

    def _add(self, layer_id: str) -> None:
        self._ids.append(layer_id)

    def __enter__(self) -> Pin:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Hold:
    def __init__(self) -> None:
        self.fds: list[int] = []
        self.count = 0

    def close(self) -> None:
        while self.fds:
            os.close(self.fds.pop())
