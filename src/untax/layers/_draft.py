"""A layer in the making."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from untax._remove import remove_tree
from untax.core.errors import StageUnavailable, UsageError
from untax.layers._trouble import FULL, told, unavailable
from untax.layers.digest import Known

if TYPE_CHECKING:
    from untax.layers.store import Layer, LayerStore


class Draft:
    """A layer in the making: fill `tree`, then `publish`. As a context manager it is gone at the end unless it was published;
    a disk that fills up meanwhile is `StageUnavailable`, and older stages have then made room for another attempt.
    """

    def __init__(self, store: LayerStore, path: Path, lock_fd: int) -> None:
        self._store = store
        self._path = path
        self._lock_fd = lock_fd
        self.tree = path / "tree"

    def adopt(self, tree: Path) -> None:
        """Take a directory of the same file system, which must be ours and open to us, in place of the empty one."""
        os.rmdir(self.tree)
        os.rename(tree, self.tree)

    def publish(self, *, expect: str | None = None, known: Known | None = None) -> Layer:
        """Make it a layer, held in place until a record names it. The same content twice is one layer, and this one is dropped.

        `StageUnavailable` when the disk is full or the budget does not allow it, `StageFailed` when it is not the layer that one may
        `expect`; the draft is removed then. Contents that are `known` are not read again.
        """
        if self._lock_fd < 0:
            raise UsageError("this draft was published or discarded already")
        with told(self._store.root), self:
            return self._store._publish(self, expect, known)

    def discard(self) -> None:
        """Remove it. Safe to call twice, and after `publish`, when there is nothing left to remove."""
        if self._lock_fd >= 0:
            remove_tree(self._path)
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _release_lock(self) -> int:
        fd, self._lock_fd = self._lock_fd, -1
        return fd

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, _kind: object, exc: BaseException | None, _trace: object) -> None:
        before = self._store.free_bytes()
        self.discard()
        if isinstance(exc, OSError) and exc.errno in FULL:
            # As much again as it had come to, because nobody knows how much it lacked.
            wanted = 2 * max(self._store.free_bytes() - before, 0)
            with contextlib.suppress(StageUnavailable):
                self._store.evict(wanted_bytes=wanted)
            raise unavailable(exc, self._store.root) from exc
