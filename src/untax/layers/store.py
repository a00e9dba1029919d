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
import json
import logging
import os
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from untax._remove import remove_tree
from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.layers import eviction, spares
from untax.layers._about import Rows, difference, facts_in, rows_in, seal_in, seal_now, which, write_facts
from untax.layers._durable import fsync_directory, read_json, replace_whole, syncing, write_synced
from untax.layers._flock import flocked, open_lock, try_exclusive
from untax.layers._holds import Holds
from untax.layers._records import Records
from untax.layers.digest import Known, TreeDigest, digest_tree
from untax.layers.marks import KINDS, Marks
from untax.layers.record import SNAPSHOT, StageRecord, is_layer_id, require_layer_id

__all__ = ["Draft", "Freed", "Layer", "LayerStore", "Pin", "StageRecord"]

_log = logging.getLogger("untax.layers")
_FORMAT = 1
_WHO = "store"  # what errors name as the stage: it is none of the ladder's
BUDGET = "budget"  # the same, where waiting or letting go of something would not help
_PLACES = ("trees", "stages", "drafts", "damaged", *spares.PLACES)
_FULL = (errno.ENOSPC, errno.EDQUOT)
_AT_ONCE = 64  # layers that are taken away together: each holds a descriptor, and for each such number all records are read once


@dataclass(frozen=True, slots=True)
class Layer:
    id: str
    tree: Path
    """The directory that sandboxes stand on. Nothing may be written to it, ever."""
    bytes: int
    """What it takes on the disk."""
    entries: int


@dataclass(frozen=True, slots=True)
class Freed:
    stages: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    """Mirrors, caches, partial downloads and layers half arrived, each as `place/name`."""
    bytes: int = 0
    """Of all of them."""


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
        with _told(self._store.root), self:
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
        before = self._store._free_bytes()
        self.discard()
        if isinstance(exc, OSError) and exc.errno in _FULL:
            # As much again as it had come to, because nobody knows how much it lacked.
            wanted = 2 * max(self._store._free_bytes() - before, 0)
            with contextlib.suppress(StageUnavailable):
                self._store.evict(wanted_bytes=wanted)
            raise _unavailable(exc, self._store.root) from exc


class LayerStore:
    def __init__(self, root: Path, *, marks: Marks, budget_bytes: int | None = None) -> None:
        """Make `root` a store, or open the one it is, and remove what dead processes left half made.

        `UsageError` when it is somebody else's, or one of another format or of the other kind of marks.
        """
        if marks not in KINDS:
            raise UsageError(f"marks must be one of {', '.join(KINDS)}, not {marks!r}")
        if budget_bytes is not None and budget_bytes <= 0:
            raise UsageError(f"the budget of a store must be a positive number of bytes, not {budget_bytes}")
        self.root = root.absolute()
        self.marks: Marks = marks
        self.budget_bytes = budget_bytes
        self._holds = Holds(lambda layer_id: self._tree_of(layer_id) / "lock")
        self._trees = f"{self.root}/trees/"
        self._records = Records(self.root / "stages", self._set_aside)
        self._sound: dict[str, tuple[int, int]] = {}  # ids whose seal was checked, and which directory that was
        self._checking: dict[str, threading.Lock] = {}
        with _told(self.root):
            _make_private(self.root)
            for name in _PLACES:
                (self.root / name).mkdir(mode=0o700, exist_ok=True)
            with self._gate(fcntl.LOCK_EX):
                self._check_format()
            self._sweep()

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
        path = self.root / "drafts" / secrets.token_hex(8)
        fd = -1
        with _told(self.root):
            try:
                # Behind the gate nobody sweeps, so nobody finds the directory before its lock is held.
                with self._gate(fcntl.LOCK_SH):
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
        path = self._tree_of(layer_id)
        facts = self._facts(layer_id)
        if facts is None:
            raise _missing(layer_id)
        return Layer(layer_id, path / "tree", *facts)

    def layers(self) -> list[Layer]:
        found = []
        for name in self._layer_ids():
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
            if self._is_there(layer_id):
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
        with self._holding(layer_id), _told(self.root):
            path = self._tree_of(layer_id)
            self._sound.pop(layer_id, None)
            this = which(path)
            with flocked(path, fcntl.LOCK_SH):
                is_whole = seal_in(path) == seal_now(path)
            if not is_whole:
                self.verify(layer_id)
            self._sound[layer_id] = this

    def verify(self, layer_id: str) -> None:
        """Read every byte of it. `StageUnavailable` naming what differs; such a layer is set aside."""
        with self._holding(layer_id), _told(self.root):
            path = self._tree_of(layer_id)
            with flocked(path, fcntl.LOCK_EX):
                try:
                    found = digest_tree(path / "tree")
                    if found.id == layer_id:
                        self._mend_facts(path, found)
                        return
                    what = difference(path, layer_id)
                except (FileNotFoundError, NotADirectoryError):
                    what = "something of it is gone"
                aside = self._set_aside(path, what)
                self._sound.pop(layer_id, None)
        raise StageUnavailable(
            _WHO,
            f"layer {layer_id} is no longer what was stored: {what}; it was set aside as {aside}, and its stage is built again when next asked for",
        )

    def rows(self, layer_id: str) -> bytes:
        """The rows of a layer's digest, packed: hashed, they are its id. Found out again where what was noted is damaged."""
        with self._holding(layer_id), _told(self.root):
            path = self._tree_of(layer_id)
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
        with _told(self.root):
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
        with self.pin(record.adds), _told(self.root):
            with self._gate(fcntl.LOCK_SH):  # or a sweep could take the file for a leftover
                self._records.put(record)
        for layer_id in record.adds:
            self._holds.unkeep(layer_id)
        self.used(record.key)

    def remove_stage(self, key: str) -> None:
        """Forget a stage, and remove those of its layers that nobody uses and no other stage needs. What stands on it stays."""
        record = self._records.get(key)
        with _told(self.root):
            self._records.forget((key,))
            self._remove_layers(record.adds if record is not None else (), _Tally())

    def used(self, key: str, times: int = 1) -> None:
        """Note that a stage was of use: what is used more is evicted later."""
        self._records.note_use(key, times)

    @contextlib.contextmanager
    def lock_stage(self, key: str) -> Iterator[None]:
        """Hold a stage against all other processes and threads that would build it; waits for whoever does."""
        with _told(self.root):
            fd = self._records.take_lock(key)
        try:
            yield
        finally:
            self._records.drop_lock(key, fd)

    # ---- room ----

    def trim(self) -> Freed:
        """Bring what is kept beside the layers in use back within the budget."""
        return self.evict(beside_used=True) if self.shortage_bytes(beside_used=True) > 0 else Freed()

    def evict(self, *, wanted_bytes: int = 0, beside_used: bool = False) -> Freed:
        """Make room for `wanted_bytes` more, within the budget and on the disk; what nobody needs goes first and in any case.

        Then mirrors, caches and partial downloads, those that were not used for longest first; then the stages of least value,
        those that nothing stands on first. Never a layer that somebody has pinned, nor a mirror or cache in use. The budget is for
        everything; or, `beside_used`, for what is kept beside the layers that somebody has pinned.
        """
        freed = _Tally()
        with _told(self.root), flocked(self.root / "trees", fcntl.LOCK_EX):
            self._sweep()
            self._clear_damaged()
            self._holds.drop_expired()
            self._remove_unneeded(freed)
            for spare in spares.remove_old(self.root):
                freed.add_spare(spare)
            for spare in self.spares():
                if self.shortage_bytes(wanted_bytes, beside_used=beside_used) <= 0:
                    break
                if spares.remove(spare):
                    freed.add_spare(spare)
            while (short := self.shortage_bytes(wanted_bytes, beside_used=beside_used)) > 0:
                if not self._evict_some(short, freed):
                    break
        return Freed(tuple(freed.stages), tuple(freed.layers), tuple(freed.spares), freed.bytes)

    def candidates(self, *, as_if_unused: bool = False) -> list[eviction.Candidate]:
        """The stages as `eviction.choose` wants to know them; or as they would be if nobody had any pinned."""
        now = time.time()
        return [
            eviction.Candidate(
                one.key,
                one.parent,
                one.adds,
                one.cost_s,
                self._records.uses(one.key, now),
                is_kept=one.name == SNAPSHOT or (not as_if_unused and any(self.is_in_use(layer_id) for layer_id in one.adds)),
            )
            for one in self._records.all()
        ]

    def needed(self) -> set[str]:
        """The layers that any record names."""
        return self._records.needed()

    def unkept(self) -> frozenset[str]:
        """Stages that are here only because somebody has them pinned: those that would go if nobody had any."""
        if self.budget_bytes is None:
            return frozenset()
        sizes = {layer.id: layer.bytes for layer in self.layers()}
        short = sum(sizes.values()) - self.budget_bytes
        return frozenset(eviction.choose(self.candidates(as_if_unused=True), sizes, short)) if short > 0 else frozenset()

    def shortage_bytes(self, wanted: int = 0, *, beside_used: bool = False) -> int:
        """How much has to go before `wanted` bytes fit the budget and the disk; zero or less when they do."""
        short = wanted - self._free_bytes() if wanted > 0 else 0
        if self.budget_bytes is not None:
            over = self._layer_bytes() + sum(spare.bytes for spare in self.spares()) + wanted - self.budget_bytes
            if over > 0 and beside_used:
                over -= sum(layer.bytes for layer in self.layers() if self.is_in_use(layer.id))
            short = max(short, over)
        return short

    def is_in_use(self, layer_id: str) -> bool:
        """Whether some process holds this layer now."""
        if layer_id in self._holds:
            return True
        path = self._tree_of(layer_id) / "lock"
        fd = try_exclusive(path)
        if fd is None:
            return path.exists()
        os.close(fd)
        return False

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
                raise StageFailed(_WHO, f"what was to be layer {expect} is {found.id}")
            target = self._tree_of(found.id)
            if not target.is_dir():
                self._require_room(found.bytes)
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
        fsync_directory(self.root / "trees")
        fsync_directory(self.root / "drafts")
        return Layer(found.id, target / "tree", found.bytes, found.entries)

    def _mend_facts(self, path: Path, found: TreeDigest) -> None:
        """Write what is known of a layer anew, where that is damaged or the seal was broken by something that changed nothing."""
        if facts_in(path) is not None and seal_in(path) == seal_now(path):
            return
        try:
            write_facts(path, self.marks, found.bytes, found.entries)
        except OSError as exc:
            _log.warning("%s is whole, but that cannot be noted (%s): it will be read again", path, exc.strerror)

    def _require_room(self, wanted: int) -> None:
        """A new layer is in use by whoever wants it, and needs no room until nobody does; but one that could never be kept is refused."""
        if self.budget_bytes is None:
            return
        self.trim()
        saved = {layer_id for one in self._records.all() if one.name == SNAPSHOT for layer_id in one.adds}
        saved_bytes = sum(facts[0] for layer_id in saved if (facts := facts_in(self._tree_of(layer_id))) is not None)
        if saved_bytes + wanted > self.budget_bytes:
            beside = f" beside saved snapshots of {saved_bytes}" if saved_bytes else ""
            raise StageUnavailable(
                BUDGET,
                f"a layer of {wanted} bytes does not fit the store's budget of {self.budget_bytes} bytes{beside}; raise the budget"
                + (", or remove snapshots" if saved_bytes else ""),
            )

    # ---- holding ----

    def _hold(self, layer_id: str) -> None:
        with _told(self.root):
            is_there = self._holds.take(layer_id)
        if not is_there:
            raise _missing(layer_id)

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

    # ---- removing ----

    def _evict_some(self, short: int, freed: _Tally) -> bool:
        candidates = {one.key: one for one in self.candidates()}
        sizes = {layer.id: layer.bytes for layer in self.layers()}
        chosen = eviction.choose(list(candidates.values()), sizes, short)
        self._records.forget(chosen)
        freed.stages += chosen
        self._remove_layers([layer_id for key in chosen for layer_id in candidates[key].adds], freed)
        return bool(chosen)

    def _remove_unneeded(self, freed: _Tally) -> None:
        needed = self.needed()
        self._remove_layers([layer_id for layer_id in self._layer_ids() if layer_id not in needed], freed)

    def _remove_layers(self, ids: Iterable[str], freed: _Tally) -> None:
        """Take layers away unless somebody uses them or a record names them."""
        rest = list(dict.fromkeys(ids))
        while rest:
            some, rest = rest[:_AT_ONCE], rest[_AT_ONCE:]
            with contextlib.ExitStack() as stack:
                held: dict[str, int] = {}
                for layer_id in some:
                    if (fd := try_exclusive(self._tree_of(layer_id) / "lock")) is not None:
                        stack.callback(os.close, fd)
                        held[layer_id] = fd
                # Read again now that nobody can pin them: a record may have been written since the decision.
                needed = self.needed() if held else set()
                gone = [self._take_out(layer_id, fd, freed) for layer_id, fd in held.items() if layer_id not in needed]
                if gone:
                    fsync_directory(self.root / "trees")
                for path in gone:
                    remove_tree(path)

    def _take_out(self, layer_id: str, lock_fd: int, freed: _Tally) -> Path:
        facts = facts_in(self._tree_of(layer_id))
        gone = self.root / "drafts" / f"gone-{secrets.token_hex(8)}"
        os.rename(self._tree_of(layer_id), gone)
        fcntl.flock(lock_fd, fcntl.LOCK_SH)  # lets those who wait for it learn that it is gone, and still keeps sweepers off
        freed.layers.append(layer_id)
        freed.bytes += facts[0] if facts is not None else 0
        return gone

    def _layer_bytes(self) -> int:
        return sum(facts[0] for name in self._layer_ids() if (facts := self._facts(name)) is not None)

    def _free_bytes(self) -> int:
        try:
            found = os.statvfs(self.root)
        except OSError:
            return 0
        return found.f_bavail * found.f_frsize

    def _sweep(self) -> None:
        """Remove what dead processes left half made. Whose lock can be had is dead."""
        dead: list[tuple[Path, int]] = []
        with self._gate(fcntl.LOCK_EX):
            for place in (self.root, self.root / "stages"):
                for path in place.glob(".new-*"):
                    path.unlink(missing_ok=True)
            for path in sorted((self.root / "drafts").iterdir()):
                if path.is_symlink():
                    path.unlink(missing_ok=True)
                    continue
                fd = try_exclusive(path / "lock", create=True)
                if fd is not None:
                    dead.append((path, fd))
                elif not path.is_dir():
                    path.unlink(missing_ok=True)  # no draft; or one that was published or removed meanwhile
        for path, fd in dead:
            if not remove_tree(path):
                _log.warning("%s was left by a process that died and cannot be removed; remove it by hand", path)
            os.close(fd)

    def _clear_damaged(self) -> None:
        for path in (self.root / "damaged").iterdir():
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            fd = try_exclusive(path / "lock", create=True)
            if fd is not None:
                remove_tree(path)
                os.close(fd)

    def _set_aside(self, path: Path, why: str) -> Path:
        """Take something damaged out of use without losing it; whoever stands on it keeps it."""
        aside = self.root / "damaged" / f"{path.name}-{secrets.token_hex(4)}"
        _log.warning("%s is damaged (%s): set aside as %s", path, why, aside)
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            pass  # another process found it at the same time
        return aside

    # ---- reading ----

    def _check_format(self) -> None:
        path = self.root / "format"
        value: object = None
        try:
            value = json.loads(path.read_bytes())
        except FileNotFoundError:
            pass
        except ValueError as exc:
            self._set_aside(path, str(exc))
        if isinstance(value, dict) and value.get("marks") in KINDS and isinstance(value.get("version"), int):
            self._require_format(value["version"], value["marks"])
            return
        if value is not None:
            self._set_aside(path, "it does not say which format this is")
        for layer_id in self._layer_ids():  # a lost file must not mix two kinds of marks
            facts = read_json(self._tree_of(layer_id) / "layer.json")
            if facts is not None and facts.get("marks") in KINDS:
                self._require_format(_FORMAT, facts["marks"])
                break
        replace_whole(path, json.dumps({"version": _FORMAT, "marks": self.marks}).encode())

    def _require_format(self, version: int, found: object) -> None:
        if version != _FORMAT:
            raise UsageError(f"the layers in {self.root} are of format {version}, and this release knows {_FORMAT}; name another state_dir")
        if found != self.marks:
            owner, other = ("root", "an ordinary user") if found == "trusted" else ("an ordinary user", "root")
            raise UsageError(f"the layers in {self.root} were made for {owner}; {other} needs a store of its own: name another state_dir")

    def _facts(self, layer_id: str) -> tuple[int, int] | None:
        """Bytes and entries; None without such a layer. What cannot be read is found out again from the tree itself."""
        path = self._tree_of(layer_id)
        facts = facts_in(path)
        if facts is None and path.is_dir():
            _log.warning("%s: layer.json is damaged; reading the layer to write it anew", path)
            with contextlib.suppress(StageUnavailable):
                self.verify(layer_id)
            facts = facts_in(path)
        return facts

    def _layer_ids(self) -> list[str]:
        return sorted(name for name in os.listdir(self.root / "trees") if is_layer_id(name))

    def _is_whole(self, record: StageRecord) -> bool:
        return record.name == SNAPSHOT or all(self._is_there(one) for one in record.adds)

    def _is_there(self, layer_id: str) -> bool:
        return (self._tree_of(layer_id) / "tree").is_dir()

    def _tree_of(self, layer_id: str) -> Path:
        return self.root / "trees" / require_layer_id(layer_id)

    @contextlib.contextmanager
    def _gate(self, how: int) -> Iterator[None]:
        fd = open_lock(self.root / ".gate")
        try:
            fcntl.flock(fd, how)
            yield
        finally:
            os.close(fd)


class _Tally:
    def __init__(self) -> None:
        self.stages: list[str] = []
        self.layers: list[str] = []
        self.spares: list[str] = []
        self.bytes = 0

    def add_spare(self, spare: spares.Spare) -> None:
        self.spares.append(spare.name)
        self.bytes += spare.bytes


# ---- errors ----


def _missing(layer_id: str) -> StageUnavailable:
    return StageUnavailable(_WHO, f"layer {layer_id} is not in the store (any more); its stage is built again when next asked for")


def _unavailable(exc: OSError, root: Path) -> StageUnavailable:
    if exc.errno in _FULL:
        return StageUnavailable(_WHO, f"the disk that holds {root} is full ({exc.strerror}); free some, or name another state_dir")
    return StageUnavailable(
        _WHO, f"{exc.filename or root}: {exc.strerror or exc}; make {root} readable and writable, or name another state_dir"
    )


@contextlib.contextmanager
def _told(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise _unavailable(exc, root) from exc


def _make_private(path: Path) -> None:
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as exc:
        raise UsageError(f"the store {path}: something that is not a directory is in the way; name another state_dir") from exc
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(f"the store {path} is a link or not a directory; name another state_dir")
    if found.st_uid != os.geteuid():
        raise UsageError(f"the store {path} belongs to user {found.st_uid}; name another state_dir")
    if found.st_mode & 0o022:
        raise UsageError(f"the store {path} can be written by others; chmod 700 it, or name another state_dir")
