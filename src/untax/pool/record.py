"""What an engine's pool leaves on disk: what its steps have cost, for the next engine, and how it is doing, for whoever watches.

Below `pools/` in the state directory each engine has a file of its own and a lock beside it, which the kernel drops when the
engine dies; costs are shared by all engines of one substrate, and the last to write wins. Nothing here may fail a lease:
a directory that is full, read-only or damaged is said once, and the pool learns anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from untax.core.errors import UsageError
from untax.layers._durable import read_json
from untax.layers._flock import open_lock, try_exclusive
from untax.pool.costs import Costs
from untax.pool.status import PoolStatus

log = logging.getLogger("untax.pool")

# A table that changes twice a second is as live as an eye can use, and its writing is far below a thousandth of a core.
_WRITE_S = 0.5
_COSTS_S = 30.0  # between two writings of what was learnt; the last one is at the end


@dataclass(frozen=True, slots=True)
class Watched:
    """A running engine as its file describes it."""

    pid: int
    started_at: float
    updated_at: float
    pool: PoolStatus


class PoolRecord:
    """One engine's files. `open` blocks; everything after it happens in threads, at most twice a second and only after a change."""

    def __init__(self, directory: Path, substrate: str) -> None:
        self._directory = directory
        self._costs_path = directory / f"costs-{substrate}.json"
        self._path = directory / f"engine-{os.getpid()}-{secrets.token_hex(4)}.json"
        self._lock_fd = -1
        self._started_at = time.time()
        self._timer: asyncio.TimerHandle | None = None
        self._writing: asyncio.Future[None] | None = None
        self._costs_at: float | None = None
        self._has_failed = False
        self._status: Callable[[], PoolStatus] | None = None
        self._costs = Costs()

    def open(self) -> Costs:
        """Take a place of its own and read what earlier engines have learnt."""
        try:
            self._directory.mkdir(mode=0o700, exist_ok=True)
            self._lock_fd = open_lock(self._lock_of(self._path))
            fcntl.flock(self._lock_fd, fcntl.LOCK_EX)
            _remove_dead(self._directory)
        except OSError as exc:
            self._failed(exc)
        self._costs = self._known_costs()
        return self._costs

    def watch(self, status: Callable[[], PoolStatus]) -> None:
        """Write what `status` gives from now on. Inside the engine's loop."""
        self._status = status
        self._loop = asyncio.get_running_loop()
        if self._lock_fd >= 0:
            self._due()

    def changed(self) -> None:
        """Something has: to be written soon. Costs a look at one attribute while that is still to come."""
        if self._timer is None and self._lock_fd >= 0:
            self._timer = self._loop.call_later(_WRITE_S, self._due)

    async def aclose(self) -> None:
        """Keep what was learnt; nobody watches any more."""
        if self._timer is not None:
            self._timer.cancel()
        if self._writing is not None:
            await asyncio.wait([self._writing])
        if self._lock_fd < 0:
            return
        fd, self._lock_fd = self._lock_fd, -1

        def end() -> None:
            with contextlib.suppress(OSError):
                _write(self._costs_path, self._costs.to_json())
            for path in (self._path, self._lock_of(self._path)):
                with contextlib.suppress(OSError):
                    path.unlink()
            os.close(fd)

        await asyncio.to_thread(end)

    def _known_costs(self) -> Costs:
        try:
            return Costs.from_json(self._costs_path.read_text())
        except FileNotFoundError:
            pass
        except (OSError, UnicodeDecodeError, UsageError) as exc:
            log.warning("%s is not used, costs are learnt anew: %s", self._costs_path, exc)
        return Costs()

    def _due(self) -> None:
        if self._writing is not None and not self._writing.done():
            self._timer = self._loop.call_later(_WRITE_S, self._due)  # a disk that slow is not asked for more
            return
        self._timer = None
        if self._status is None:
            return
        about = {"pid": os.getpid(), "started_at": self._started_at, "updated_at": time.time(), "pool": self._status().as_dict()}
        costs = None
        if self._costs_at is None or time.monotonic() - self._costs_at >= _COSTS_S:
            self._costs_at, costs = time.monotonic(), self._costs.to_json()
        self._writing = self._loop.run_in_executor(None, self._write, json.dumps(about), costs)

    def _write(self, text: str, costs: str | None) -> None:
        try:
            _write(self._path, text)
            if costs is not None:
                _write(self._costs_path, costs)
        except OSError as exc:
            self._failed(exc)
        else:
            self._has_failed = False

    def _failed(self, exc: OSError) -> None:
        if not self._has_failed:
            self._has_failed = True
            log.warning("the pool's record in %s: %s; leases go on without it", self._directory, exc.strerror or exc)

    @staticmethod
    def _lock_of(path: Path) -> Path:
        return path.with_suffix(".lock")


def running(state_dir: Path) -> list[Watched]:
    """The engines of a state directory that run now and have a pool to show, the oldest first."""
    found = []
    for path in _live(state_dir / "pools"):
        about = read_json(path)
        if about is not None:
            with contextlib.suppress(UsageError):
                found.append(_watched(about))
    return sorted(found, key=lambda one: one.started_at)


def _watched(about: Mapping[str, Any]) -> Watched:
    try:
        return Watched(int(about["pid"]), float(about["started_at"]), float(about["updated_at"]), PoolStatus.from_dict(about["pool"]))
    except (KeyError, TypeError, ValueError) as exc:
        raise UsageError(f"not the record of a pool: {exc!r}") from exc


def _live(directory: Path) -> Iterator[Path]:
    for lock in sorted(directory.glob("engine-*.lock")):
        fd = try_exclusive(lock)
        if fd is None:
            yield lock.with_suffix(".json")
        else:
            os.close(fd)


def _remove_dead(directory: Path) -> None:
    for lock in directory.glob("engine-*.lock"):
        fd = try_exclusive(lock)
        if fd is not None:
            for path in (lock.with_suffix(".json"), lock):
                with contextlib.suppress(OSError):
                    path.unlink()
            os.close(fd)


def _write(path: Path, text: str) -> None:
    """Whole or not at all, for whoever reads; not synced, because after a crash of the machine nobody misses it."""
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w") as file:
            file.write(text)
        os.rename(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise
