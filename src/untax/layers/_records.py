"""The records of a store's stages as files of one directory: which layers each adds, how often it was used, who is building it.

`<key>.json` is the record, `<key>.use` how often it was used, `<key>.lock` is there while somebody builds it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import struct
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from untax.layers import eviction
from untax.layers._durable import fsync_directory, replace_whole
from untax.layers._flock import take_named
from untax.layers.record import FromLaterRelease, StageRecord, Unreadable, is_key, require_key

_USE = struct.Struct("<dd")  # how often it was used, as of when
_LAYER_IDS = re.compile(rb"sha256-[0-9a-f]{64}")


class Records:
    """`set_aside` takes a file that is damaged out of the way, with the reason."""

    def __init__(self, directory: Path, set_aside: Callable[[Path, str], object]) -> None:
        self._directory = directory
        self._set_aside = set_aside
        self._read: dict[str, tuple[tuple[int, int, int], StageRecord | _Foreign]] = {}  # what was read, and of which file

    def get(self, key: str) -> StageRecord | None:
        """None where there is none, or none that this release can read."""
        found = self._find(require_key(key))
        return found if isinstance(found, StageRecord) else None

    def all(self) -> list[StageRecord]:
        return [one for key in self.keys() if (one := self.get(key)) is not None]

    def keys(self) -> list[str]:
        names = os.listdir(self._directory)
        return sorted(name[:-5] for name in names if name.endswith(".json") and is_key(name[:-5]))

    def needed(self) -> set[str]:
        """The layers that any of them names, those of later releases among them: whoever wrote them will want them."""
        return {layer_id for key in self.keys() if (one := self._find(key)) is not None for layer_id in one.adds}

    def put(self, record: StageRecord) -> None:
        replace_whole(self._path(record.key, "json"), record.to_json().encode())

    def forget(self, keys: Iterable[str]) -> None:
        for key in keys:
            for kind in ("json", "use"):
                self._path(key, kind).unlink(missing_ok=True)
        fsync_directory(self._directory)

    # ---- use ----

    def note_use(self, key: str, times: int = 1) -> None:
        """Failing to is no failure."""
        now = time.time()
        try:
            os.stat(self._path(key, "json"))
            fd = os.open(self._path(key, "use"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return  # evicted meanwhile, or a full disk, which is no reason to refuse a lease
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            uses, since = _unpack_use(os.pread(fd, _USE.size, 0))
            os.pwrite(fd, _USE.pack(eviction.aged(uses, now - since) + times, now), 0)
        except OSError:
            pass
        finally:
            os.close(fd)

    def uses(self, key: str, now: float) -> float:
        """What its uses count for by now."""
        try:
            uses, since = _unpack_use(self._path(key, "use").read_bytes())
        except OSError:
            return 0.0
        return eviction.aged(uses, now - since)

    # ---- building ----

    def take_lock(self, key: str) -> int:
        """Wait for whoever builds it; gives the lock, to be handed to `drop_lock`."""
        return take_named(self._path(key, "lock"))

    def drop_lock(self, key: str, fd: int) -> None:
        # Whoever waits for this very file finds, once it has it, that the name is gone, and starts over.
        with contextlib.suppress(OSError):
            self._path(key, "lock").unlink()
        os.close(fd)

    # ---- files ----

    def _find(self, key: str) -> StageRecord | _Foreign | None:
        path = self._path(key, "json")
        try:
            st = os.stat(path)
            this = st.st_ino, st.st_mtime_ns, st.st_size
            known = self._read.get(key)
            if known is not None and known[0] == this:
                return known[1]
            found = _parsed(path.read_bytes(), key)
        except FileNotFoundError:
            return None
        except (ValueError, OSError) as exc:
            with contextlib.suppress(OSError):
                self._set_aside(path, str(exc))
            return None
        self._read[key] = this, found
        return found

    def _path(self, key: str, kind: str) -> Path:
        return self._directory / f"{require_key(key)}.{kind}"


class _Foreign:
    """A record that a later release wrote. All that can be told of it is which layers it speaks of."""

    def __init__(self, data: bytes) -> None:
        self.adds = tuple(dict.fromkeys(found.decode() for found in _LAYER_IDS.findall(data)))


def _parsed(data: bytes, key: str) -> StageRecord | _Foreign:
    try:
        record = StageRecord.from_json(data)
    except FromLaterRelease:
        return _Foreign(data)
    if record.key != key:
        raise Unreadable(f"it is the record of {record.key}")
    return record


def _unpack_use(data: bytes) -> tuple[float, float]:
    if len(data) != _USE.size:
        return 0.0, 0.0
    uses, since = _USE.unpack(data)
    return (uses, since) if 0.0 <= uses < 1e12 and 0.0 <= since < 1e12 else (0.0, 0.0)
