"""How a store gets room, and what that takes away: what dead processes left, what nobody needs, and the stages of least value.

A layer is taken away by a rename into `drafts/` under its own lock, alone: whoever wants it has it whole or finds it gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from untax._remove import remove_tree
from untax.core.errors import StageUnavailable
from untax.layers import eviction, spares
from untax.layers._about import facts_in
from untax.layers._durable import fsync_directory
from untax.layers._flock import flocked, try_exclusive
from untax.layers._holds import Holds
from untax.layers._places import Places
from untax.layers._records import Records
from untax.layers._trouble import BUDGET
from untax.layers.record import SNAPSHOT

_log = logging.getLogger("untax.layers")
_AT_ONCE = 64  # layers that are taken away together: each holds a descriptor, and for each such number all records are read once


@dataclass(frozen=True, slots=True)
class Freed:
    stages: tuple[str, ...] = ()
    layers: tuple[str, ...] = ()
    spares: tuple[str, ...] = ()
    """Mirrors, caches, partial downloads and layers half arrived, each as `place/name`."""
    bytes: int = 0
    """Of all of them."""


class Room:
    """`sizes` gives the layers that are there and what each takes on the disk."""

    def __init__(
        self, places: Places, records: Records, holds: Holds, budget_bytes: int | None, sizes: Callable[[], Mapping[str, int]]
    ) -> None:
        self._places = places
        self._records = records
        self._holds = holds
        self._sizes = sizes
        self.budget_bytes = budget_bytes

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
        with flocked(self._places.trees, fcntl.LOCK_EX):
            self.sweep()
            self._clear_damaged()
            self._holds.drop_expired()
            self._remove_unneeded(freed)
            for spare in spares.remove_old(self._places.root):
                freed.add_spare(spare)
            for spare in spares.spares(self._places.root):
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

    def unkept(self) -> frozenset[str]:
        """Stages that are here only because somebody has them pinned: those that would go if nobody had any."""
        if self.budget_bytes is None:
            return frozenset()
        sizes = self._sizes()
        short = sum(sizes.values()) - self.budget_bytes
        return frozenset(eviction.choose(self.candidates(as_if_unused=True), sizes, short)) if short > 0 else frozenset()

    def shortage_bytes(self, wanted: int = 0, *, beside_used: bool = False) -> int:
        """How much has to go before `wanted` bytes fit the budget and the disk; zero or less when they do."""
        short = wanted - self._places.free_bytes() if wanted > 0 else 0
        if self.budget_bytes is not None:
            sizes = self._sizes()
            over = sum(sizes.values()) + sum(spare.bytes for spare in spares.spares(self._places.root)) + wanted - self.budget_bytes
            if over > 0 and beside_used:
                over -= sum(size for layer_id, size in sizes.items() if self.is_in_use(layer_id))
            short = max(short, over)
        return short

    def is_in_use(self, layer_id: str) -> bool:
        """Whether some process holds this layer now."""
        if layer_id in self._holds:
            return True
        path = self._places.lock_of(layer_id)
        fd = try_exclusive(path)
        if fd is None:
            return path.exists()
        os.close(fd)
        return False

    def require(self, wanted: int) -> None:
        """A new layer is in use by whoever wants it, and needs no room until nobody does; but one that could never be kept is refused."""
        if self.budget_bytes is None:
            return
        self.trim()
        saved = {layer_id for one in self._records.all() if one.name == SNAPSHOT for layer_id in one.adds}
        saved_bytes = sum(facts[0] for layer_id in saved if (facts := facts_in(self._places.tree_of(layer_id))) is not None)
        if saved_bytes + wanted > self.budget_bytes:
            beside = f" beside saved snapshots of {saved_bytes}" if saved_bytes else ""
            raise StageUnavailable(
                BUDGET,
                f"a layer of {wanted} bytes does not fit the store's budget of {self.budget_bytes} bytes{beside}; raise the budget"
                + (", or remove snapshots" if saved_bytes else ""),
            )

    # ---- taking away ----

    def remove_stage(self, key: str) -> None:
        """Forget a stage, and remove those of its layers that nobody uses and no other stage needs."""
        record = self._records.get(key)
        self._records.forget((key,))
        self._remove_layers(record.adds if record is not None else (), _Tally())

    def _evict_some(self, short: int, freed: _Tally) -> bool:
        candidates = {one.key: one for one in self.candidates()}
        chosen = eviction.choose(list(candidates.values()), self._sizes(), short)
        self._records.forget(chosen)
        freed.stages += chosen
        self._remove_layers([layer_id for key in chosen for layer_id in candidates[key].adds], freed)
        return bool(chosen)

    def _remove_unneeded(self, freed: _Tally) -> None:
        needed = self._records.needed()
        self._remove_layers([layer_id for layer_id in self._places.layer_ids() if layer_id not in needed], freed)

    def _remove_layers(self, ids: Iterable[str], freed: _Tally) -> None:
        """Take layers away unless somebody uses them or a record names them."""
        rest = list(dict.fromkeys(ids))
        while rest:
            some, rest = rest[:_AT_ONCE], rest[_AT_ONCE:]
            with contextlib.ExitStack() as stack:
                held: dict[str, int] = {}
                for layer_id in some:
                    if (fd := try_exclusive(self._places.lock_of(layer_id))) is not None:
                        stack.callback(os.close, fd)
                        held[layer_id] = fd
                # Read again now that nobody can pin them: a record may have been written since the decision.
                needed = self._records.needed() if held else set()
                gone = [self._take_out(layer_id, fd, freed) for layer_id, fd in held.items() if layer_id not in needed]
                if gone:
                    fsync_directory(self._places.trees)
                for path in gone:
                    remove_tree(path)

    def _take_out(self, layer_id: str, lock_fd: int, freed: _Tally) -> Path:
        facts = facts_in(self._places.tree_of(layer_id))
        gone = self._places.drafts / f"gone-{secrets.token_hex(8)}"
        os.rename(self._places.tree_of(layer_id), gone)
        fcntl.flock(lock_fd, fcntl.LOCK_SH)  # lets those who wait for it learn that it is gone, and still keeps sweepers off
        freed.layers.append(layer_id)
        freed.bytes += facts[0] if facts is not None else 0
        return gone

    def sweep(self) -> None:
        """Remove what dead processes left half made. Whose lock can be had is dead."""
        dead: list[tuple[Path, int]] = []
        with self._places.gate(fcntl.LOCK_EX):
            for place in (self._places.root, self._places.stages):
                for path in place.glob(".new-*"):
                    path.unlink(missing_ok=True)
            for path in sorted(self._places.drafts.iterdir()):
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
        for path in self._places.damaged.iterdir():
            if path.is_symlink() or not path.is_dir():
                path.unlink(missing_ok=True)
                continue
            fd = try_exclusive(path / "lock", create=True)
            if fd is not None:
                remove_tree(path)
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
