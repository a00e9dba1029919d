"""Content-addressed layers on disk, and the records of which stage adds which: put, get, pin, evict.

Everything here blocks; drivers call it in threads. Several processes may use one store at a time. What holds at every
moment, also when a process is killed or the disk is full: a layer is below `trees/` whole or not at all, a record names
layers that were there when it was written, and what a dead process left half made is found by the lock it no longer holds.

Locks are the kernel's (`flock`), so the dead hold none. A layer's `lock` is shared by those who use it and exclusive for
whoever takes it away; taking it away begins with a rename into `drafts/`, so nobody ever finds half of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import secrets
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from untax._remove import remove_tree
from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.layers import spares
from untax.layers._about import Rows, difference, facts_in, rows_in, seal_in, seal_now, which, write_facts
from untax.layers._draft import Draft
from untax.layers._durable import fsync_directory, syncing, write_synced
from untax.layers._flock import flocked, open_lock
from untax.layers._holds import Holds, Pin
from untax.layers._places import Places
from untax.layers._records import Records
from untax.layers._room import Freed, Room
from untax.layers._trouble import WHO, missing, told
from untax.layers.digest import Known, TreeDigest, digest_tree
from untax.layers.eviction import Candidate
from untax.layers.marks import KINDS, Marks
from untax.layers.record import SNAPSHOT, StageRecord, require_layer_id

__all__ = ["Draft", "Freed", "Layer", "LayerStore", "Pin", "StageRecord"]

_log = logging.getLogger("untax.layers")


@dataclass(frozen=True, slots=True)
class Layer:
    id: str
    tree: Path
    """The directory that sandboxes stand on. Nothing may be written to it, ever."""
    bytes: int
    """What it takes on the disk."""
    entries: int


class LayerStore:
    def __init__(self, root: Path, *, marks: Marks, budget_bytes: int | None = None) -> None:
        """Make `root` a store, or open the one it is, and remove what dead processes left half made.

        `UsageError` when it is somebody else's, or one of another format or of the other kind of marks.
        """
        if marks not in KINDS:
            raise UsageError(f"marks must be one of {', '.join(KINDS)}, not {marks!r}")
        if budget_bytes is not None and budget_bytes <= 0:
            raise UsageError(f"the budget of a store must be a positive number of bytes, not {budget_bytes}")
        self._places = Places(root)
        self.root = self._places.root
        self.marks: Marks = marks
        self._holds = Holds(self._places.lock_of)
        self._trees = f"{self._places.trees}/"
        self._records = Records(self._places.stages, self._places.set_aside)
        self._room = Room(self._places, self._records, self._holds, budget_bytes, lambda: {one.id: one.bytes for one in self.layers()})
        self._sound: dict[str, tuple[int, int]] = {}  # ids whose seal was checked, and which directory that was
        self._checking: dict[str, threading.Lock] = {}
        with told(self.root):
            self._places.make(marks)
            self._room.sweep()

    # ---- places for others ----

    @property
    def mirrors(self) -> Path:
        return self.root / spares.MIRRORS

    @property
    def caches(self) -> Path:
        return self.root / spares.CACHES

    @property
    def downloads(self) -> Path:
        return self.root / spares.DOWNLOADS

    @property
    def arrivals(self) -> Path:
        return self.root / spares.ARRIVALS

    def spares(self) -> list[spares.Spare]:
        """What is in these four, the one that has not been used for longest first."""
        return spares.spares(self.root)

    # ---- layers ----

    def draft(self) -> Draft:
        """A fresh directory to fill. It is swept if this process dies."""
        path = self._places.drafts / secrets.token_hex(8)
        fd = -1
        with told(self.root):
            try:
                # Behind the gate nobody sweeps, so nobody finds the directory before its lock is held.
                with self._places.gate(fcntl.LOCK_SH):
                    path.mkdir(mode=0o700)
                    fd = open_lock(path / "lock")
                    # Shared, as its users will: to turn an exclusive lock into a shared one, the kernel drops it for an instant.
                    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
                draft = Draft(self, path, fd)
                draft.tree.mkdir()
                draft.tree.chmod(0o755)
            except BaseException:
                remove_tree(path)
                if fd >= 0:
                    os.close(fd)
                raise
        return draft

    def layer(self, layer_id: str) -> Layer:
        """`StageUnavailable` when there is none of that id."""
        path = self._places.tree_of(layer_id)
        facts = self._facts(layer_id)
        if facts is None:
            raise missing(layer_id)
        return Layer(layer_id, path / "tree", *facts)

    def layers(self) -> list[Layer]:
        found = []
        for name in self._places.layer_ids():
            with contextlib.suppress(StageUnavailable):  # taken away since it was listed
                found.append(self.layer(name))
        return found

    def reuse(self, layer_id: str) -> Layer | None:
        """A layer that is there already, held until a record names it; None when it is not there, or is found damaged and set aside."""
        try:
            with self._holding(layer_id):
                self.check_seal(layer_id)
                self._holds.keep_held(layer_id)
                return self.layer(layer_id)
        except StageUnavailable:
            if self._places.is_there(layer_id):
                raise
            return None

    def pin(self, ids: Iterable[str]) -> Pin:
        """Hold layers in place. `StageUnavailable` when one is missing or, looked at for the first time, not as it was stored."""
        pin = Pin(self._holds.let_go)
        try:
            for layer_id in dict.fromkeys(ids):
                if self._hold_again(layer_id):
                    pin._add(layer_id)
                    continue
                self._hold(require_layer_id(layer_id))
                pin._add(layer_id)
                self._check_once(layer_id)
        except BaseException:
            pin.close()
            raise
        return pin

    def pin_at_once(self, ids: Iterable[str]) -> Pin | None:
        """As `pin`, without waiting for anything: None when a layer is not there, or has to be looked at first, or is being taken away."""
        pin = Pin(self._holds.let_go)
        for layer_id in dict.fromkeys(ids):
            if not self._is_sound(layer_id) or not self._holds.take(layer_id, waits=False):
                pin.close()
                return None
            pin._add(layer_id)
        return pin

    def check_seal(self, layer_id: str) -> None:
        """Look at what the file system notes about every entry. When that is not as it was sealed, the digest decides.

        `StageUnavailable` for a layer that was edited in place, which is set aside: its stage is built again when next asked for.
        """
        with self._holding(layer_id), told(self.root):
            path = self._places.tree_of(layer_id)
            self._sound.pop(layer_id, None)
            this = which(path)
            with flocked(path, fcntl.LOCK_SH):
                is_whole = seal_in(path) == seal_now(path)
            if not is_whole:
                self.verify(layer_id)
            self._sound[layer_id] = this

    def verify(self, layer_id: str) -> None:
        """Read every byte of it. `StageUnavailable` naming what differs; such a layer is set aside."""
        with self._holding(layer_id), told(self.root):
            path = self._places.tree_of(layer_id)
            with flocked(path, fcntl.LOCK_EX):
                try:
                    found = digest_tree(path / "tree")
                    if found.id == layer_id:
                        self._mend_facts(path, found)
                        return
                    what = difference(path, layer_id)
                except (FileNotFoundError, NotADirectoryError):
                    what = "something of it is gone"
                aside = self._places.set_aside(path, what)
                self._sound.pop(layer_id, None)
        raise StageUnavailable(
            WHO,
            f"layer {layer_id} is no longer what was stored: {what}; it was set aside as {aside}, and its stage is built again when next asked for",
        )

    def rows(self, layer_id: str) -> bytes:
        """The rows of a layer's digest, packed: hashed, they are its id. Found out again where what was noted is damaged."""
        with self._holding(layer_id), told(self.root):
            path = self._places.tree_of(layer_id)
            noted = rows_in(path, layer_id)
            if noted is None:
                rows = Rows()
                if digest_tree(path / "tree", rows.add).id != layer_id:
                    self.verify(layer_id)  # says what differs
                noted = rows.packed()
            return noted

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """What the disk refuses to those who write into the store is `StageUnavailable` in its words."""
        with told(self.root):
            yield

    # ---- stages ----

    def stage(self, key: str) -> StageRecord | None:
        """The record of a stage whose own layers are all there; None means that it has to be built."""
        record = self._records.get(key)
        return record if record is not None and self._is_whole(record) else None

    def stages(self) -> list[StageRecord]:
        """All that `stage` would give, oldest first."""
        return sorted(filter(self._is_whole, self._records.all()), key=lambda one: (one.created, one.key))

    def put_stage(self, record: StageRecord) -> None:
        """Remember a stage. Its layers must be in the store; `StageUnavailable` otherwise, or when the disk is full."""
        with self.pin(record.adds), told(self.root):
            with self._places.gate(fcntl.LOCK_SH):  # or a sweep could take the file for a leftover
                self._records.put(record)
        for layer_id in record.adds:
            self._holds.unkeep(layer_id)
        self.used(record.key)

    def remove_stage(self, key: str) -> None:
        """Forget a stage, and remove those of its layers that nobody uses and no other stage needs. What stands on it stays."""
        with told(self.root):
            self._room.remove_stage(key)

    def used(self, key: str, times: int = 1) -> None:
        """Note that a stage was of use: what is used more is evicted later."""
        self._records.note_use(key, times)

    @contextlib.contextmanager
    def lock_stage(self, key: str) -> Iterator[None]:
        """Hold a stage against all other processes and threads that would build it; waits for whoever does."""
        with told(self.root):
            fd = self._records.take_lock(key)
        try:
            yield
        finally:
            self._records.drop_lock(key, fd)

    # ---- room ----

    @property
    def budget_bytes(self) -> int | None:
        """What everything here may take; None: whatever the disk has."""
        return self._room.budget_bytes

    @budget_bytes.setter
    def budget_bytes(self, budget_bytes: int | None) -> None:
        self._room.budget_bytes = budget_bytes

    def trim(self) -> Freed:
        """Bring what is kept beside the layers in use back within the budget."""
        with told(self.root):
            return self._room.trim()

    def evict(self, *, wanted_bytes: int = 0, beside_used: bool = False) -> Freed:
        """Make room for `wanted_bytes` more, within the budget and on the disk; what nobody needs goes first and in any case.

        Then mirrors, caches and partial downloads, those that were not used for longest first; then the stages of least value,
        those that nothing stands on first. Never a layer that somebody has pinned, nor a mirror or cache in use. The budget is for
        everything; or, `beside_used`, for what is kept beside the layers that somebody has pinned.
        """
        with told(self.root):
            return self._room.evict(wanted_bytes=wanted_bytes, beside_used=beside_used)

    def candidates(self) -> list[Candidate]:
        """The stages as `eviction.choose` wants to know them."""
        return self._room.candidates()

    def needed(self) -> set[str]:
        """The layers that any record names."""
        return self._records.needed()

    def unkept(self) -> frozenset[str]:
        """Stages that are here only because somebody has them pinned: those that would go if nobody had any."""
        return self._room.unkept()

    def shortage_bytes(self, wanted: int = 0, *, beside_used: bool = False) -> int:
        """How much has to go before `wanted` bytes fit the budget and the disk; zero or less when they do."""
        return self._room.shortage_bytes(wanted, beside_used=beside_used)

    def free_bytes(self) -> int:
        """On the disk that holds the store."""
        return self._places.free_bytes()

    def is_in_use(self, layer_id: str) -> bool:
        """Whether some process holds this layer now."""
        return self._room.is_in_use(layer_id)

    def close(self) -> None:
        """Let go of everything that is still held. Safe to call twice."""
        self._holds.close()

    # ---- publishing ----

    def _publish(self, draft: Draft, expect: str | None, known: Known | None) -> Layer:
        path = draft._path
        with syncing(draft.tree) as wait_synced:  # the disk has its time while the processors hash
            rows = Rows()
            found = digest_tree(draft.tree, rows.add, known)
            if expect is not None and found.id != expect:
                raise StageFailed(WHO, f"what was to be layer {expect} is {found.id}")
            target = self._places.tree_of(found.id)
            if not target.is_dir():
                with told(self.root):  # a disk that is full for this is not so for the draft
                    self._room.require(found.bytes)
            write_synced(path / "rows", rows.packed())
            write_facts(path, self.marks, found.bytes, found.entries)
            fsync_directory(path)
            wait_synced()
        while True:
            try:
                os.rename(path, target)
            except OSError as exc:
                if exc.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                if (layer := self.reuse(found.id)) is not None:
                    return layer
                continue
            break
        self._holds.keep(found.id, draft._release_lock())
        self._sound[found.id] = which(target)
        fsync_directory(self._places.trees)
        fsync_directory(self._places.drafts)
        return Layer(found.id, target / "tree", found.bytes, found.entries)

    def _mend_facts(self, path: Path, found: TreeDigest) -> None:
        """Write what is known of a layer anew, where that is damaged or the seal was broken by something that changed nothing."""
        if facts_in(path) is not None and seal_in(path) == seal_now(path):
            return
        try:
            write_facts(path, self.marks, found.bytes, found.entries)
        except OSError as exc:
            _log.warning("%s is whole, but that cannot be noted (%s): it will be read again", path, exc.strerror)

    # ---- holding ----

    def _hold(self, layer_id: str) -> None:
        with told(self.root):
            is_there = self._holds.take(layer_id)
        if not is_there:
            raise missing(layer_id)

    @contextlib.contextmanager
    def _holding(self, layer_id: str) -> Iterator[None]:
        self._hold(require_layer_id(layer_id))
        try:
            yield
        finally:
            self._holds.let_go(layer_id)

    def _hold_again(self, layer_id: str) -> bool:
        """Hold one that is held already and was seen to be sound: what a lease over warm stages does for each layer, so one call each."""
        return self._is_sound(layer_id) and self._holds.take_again(layer_id)

    def _check_once(self, layer_id: str) -> None:
        """Have the seal checked by one of those who want it at the same time, while the others wait: it takes a look at each entry."""
        if self._is_sound(layer_id):
            return
        with self._checking.setdefault(layer_id, threading.Lock()):
            if not self._is_sound(layer_id):
                self.check_seal(layer_id)

    def _is_sound(self, layer_id: str) -> bool:
        """Whether the layer in its place is one whose seal this process has checked."""
        this = self._sound.get(layer_id)
        if this is None:
            return False
        try:
            st = os.lstat(self._trees + layer_id)
        except OSError:
            return False
        return (st.st_ino, st.st_ctime_ns) == this

    # ---- reading ----

    def _facts(self, layer_id: str) -> tuple[int, int] | None:
        """Bytes and entries; None without such a layer. What cannot be read is found out again from the tree itself."""
        path = self._places.tree_of(layer_id)
        facts = facts_in(path)
        if facts is None and path.is_dir():
            _log.warning("%s: layer.json is damaged; reading the layer to write it anew", path)
            with contextlib.suppress(StageUnavailable):
                self.verify(layer_id)
            facts = facts_in(path)
        return facts

    def _is_whole(self, record: StageRecord) -> bool:
        return record.name == SNAPSHOT or all(self._places.is_there(one) for one in record.adds)
