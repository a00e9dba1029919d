"""Chains of layers that a substrate took in as files of its own: written once each, found again by name, the ones not used for longest removed.

When a file was last used is its time of access, when it was made that of its change: the first is set here, the second is part of what it is.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from untax.core.errors import CreateError
from untax.core.root import Root
from untax.substrates._host import ensure_private_dir

_KEPT = 16


class Chains:
    """In `place`, as files that end in `suffix`; beyond `kept_bytes` in all, fewer than the usual number of them."""

    def __init__(self, place: Path, suffix: str, kept_bytes: int | None = None) -> None:
        self._place = place
        self._suffix = suffix
        self._kept_bytes = kept_bytes
        self._busy: dict[str, asyncio.Lock] = {}

    def open(self) -> None:
        ensure_private_dir(self._place)

    async def take_in(self, key: str, root: Root, write: Callable[[Path], Awaitable[object]]) -> Root:
        """A root of one file that stands for `root`, known by `key`: found again, or as `write` makes it, once for all who ask."""
        path = self._place / f"{hashlib.sha256(key.encode()).hexdigest()[:40]}.{self._suffix}"
        async with self._busy.setdefault(path.name, asyncio.Lock()):
            if not _is_touched(path):
                await write(path)
                _is_touched(path)
                await asyncio.to_thread(self._forget_old)
        return replace(root, layers=(str(path),), views=())

    def use(self, root: Root) -> Path:
        """Its file, which is now the one used last. `CreateError` when it had to go."""
        path = Path(root.layers[-1])
        if not _is_touched(path):
            raise _gone(path)
        return path

    def link(self, root: Root, target: Path) -> None:
        """As `use`, under another name as well: it stays there whatever becomes of it here."""
        path = self.use(root)
        try:
            os.link(path, target)
        except FileNotFoundError as exc:
            raise _gone(path) from exc

    def has(self, root: Root) -> bool:
        return os.path.exists(root.layers[-1])

    async def discard(self, root: Root) -> None:
        """Whoever has the file open, or a link to it, keeps it."""
        await asyncio.to_thread(Path(root.layers[-1]).unlink, missing_ok=True)

    def _forget_old(self) -> None:
        found: list[tuple[float, int, Path]] = []
        for path in self._place.glob(f"*.{self._suffix}"):
            with contextlib.suppress(FileNotFoundError):  # another engine's doing, in the same directory
                found.append((path.stat().st_atime, path.stat().st_size, path))
        total = 0
        for count, (_, size, path) in enumerate(sorted(found, reverse=True)):
            total += size
            if count >= _KEPT or (count and self._kept_bytes is not None and total > self._kept_bytes):
                path.unlink(missing_ok=True)


def _gone(path: Path) -> CreateError:
    return CreateError("", f"the image {path.name} is there no more; the next lease makes it anew")


def _is_touched(path: Path) -> bool:
    """Marked as used now, if it is there."""
    try:
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))
    except FileNotFoundError:
        return False
    return True
