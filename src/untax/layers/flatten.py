"""Many layers as one: what a long chain of snapshots adds to its stages, in a single layer that adds the same.

The chain is read as a sandbox sees it (merged.py), so a directory that was renamed on the way is written out where it
lies now, with what it holds of the stages. What differs from the stages is copied; what is gone from them gets a whiteout.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from untax.core.root import Root
from untax.layers import marks as mark
from untax.layers._descent import DIRECTORY, Descent, walk
from untax.layers._overlay import Parts
from untax.layers.copy import Contents
from untax.layers.marks import Marks
from untax.layers.merged import MergedEntry, Reader, changes, parts_of
from untax.layers.store import Layer, LayerStore, Pin, StageRecord

FLAT = "flat"
"""The name of the rung of such a layer: nobody asks for it by a key, and any of them may be evicted when nobody stands on it."""


class Flat:
    """A layer that is held in the store for whoever made it."""

    def __init__(self, store: LayerStore, key: str, layer: Layer, pin: Pin) -> None:
        self.tree = layer.tree
        self._store = store
        self._key = key
        self._pin = pin

    def remove(self) -> None:
        """Let go of it; it is gone unless another stage, a saved snapshot perhaps, has the same layer."""
        self._pin.close()
        self._store.remove_stage(self._key)


def flatten(store: LayerStore, uppers: Sequence[Path], base: Root) -> Flat:
    """Put what `uppers`, bottom first, add to `base` into the store as one layer."""
    key = f"{FLAT}-{secrets.token_hex(12)}"
    with store.draft() as draft:
        squash(uppers, base, draft.tree, marks=store.marks)
        layer = draft.publish()
    pin = store.pin([layer.id])
    try:
        store.put_stage(StageRecord(key, FLAT, None, (layer.id,), is_portable=False))
    except BaseException:
        pin.close()
        raise
    return Flat(store, key, layer, pin)


def squash(uppers: Sequence[Path], base: Root, target: Path, *, marks: Marks) -> None:
    """Fill the empty directory `target` with one layer that over `base` shows what all of `uppers` show. They must not change meanwhile."""
    found = changes(uppers, base, marks=marks, apart_from=())
    wanted = {parts_of(change.path) for change in found}
    wanted |= {parts[:depth] for parts in wanted for depth in range(len(parts))}
    # A directory whose time alone is another is no change that anybody wants to read about, and still one to keep.
    wanted |= {parts for upper in uppers for parts in _directories(upper)}
    chain = base.with_layers(*map(str, uppers))
    with Reader(chain, marks=marks) as now, Descent(target) as out:
        _Layer(now, out, mark.prefix(marks)).fill(sorted(wanted))


def _directories(upper: Path) -> Iterator[Parts]:
    with Descent(upper, force=os.geteuid() != 0) as descent:
        for visit in walk(descent):
            if visit is not None and stat.S_ISDIR(visit[1].st_mode):
                yield (*descent.names, visit[0])


class _Layer:
    """Being written: parents before what they hold, and their times last."""

    def __init__(self, now: Reader, out: Descent, prefix: str) -> None:
        self._now = now
        self._out = out
        self._prefix = prefix
        self._contents = Contents()
        self._links: dict[tuple[int, ...], int] = {}
        self._parked = -1

    def fill(self, wanted: Sequence[Parts]) -> None:
        park = f".untax-{secrets.token_hex(8)}".encode()
        os.mkdir(park, 0o700, dir_fd=self._out.seek(()))
        self._parked = os.open(park, DIRECTORY, dir_fd=self._out.fd)
        try:
            directories = [(parts, entry) for parts in wanted if (entry := self._write(parts)) is not None and entry.kind == "directory"]
            for number in self._links.values():
                os.unlink(str(number), dir_fd=self._parked)
        finally:
            os.close(self._parked)
        os.rmdir(park, dir_fd=self._out.seek(()))
        for parts, entry in reversed(directories):
            self._dress(self._out.seek(parts), entry)

    def _write(self, parts: Parts) -> MergedEntry | None:
        entry = self._now.lookup(parts)
        if not parts:
            return entry
        above = self._now.lookup(parts[:-1])
        if above is None or above.kind != "directory":
            return None  # gone with what held it
        within, name = self._out.seek(parts[:-1]), parts[-1]
        if entry is None:
            mark.make_whiteout(name, dir_fd=within)
        elif entry.kind == "directory":
            os.mkdir(name, 0o700, dir_fd=within)
        elif entry.link_group is not None and entry.link_group in self._links:
            os.link(str(self._links[entry.link_group]), name, src_dir_fd=self._parked, dst_dir_fd=within, follow_symlinks=False)
        else:
            self._copy(entry, within, name)
            if entry.link_group is not None:
                number = self._links[entry.link_group] = len(self._links)
                os.link(name, str(number), src_dir_fd=within, dst_dir_fd=self._parked, follow_symlinks=False)
        return entry

    def _copy(self, entry: MergedEntry, within: int, name: bytes) -> None:
        was = entry.stat
        if entry.kind == "symlink":
            os.symlink(entry.target, name, dir_fd=within)
        elif entry.kind in ("fifo", "socket"):
            os.mknod(name, stat.S_IFMT(was.st_mode) | 0o600, dir_fd=within)
        elif entry.kind == "file":
            reading = entry.open()
            try:
                if (at := os.fstat(reading)).st_ino != was.st_ino or at.st_dev != was.st_dev:
                    raise OSError(errno.EBUSY, "replaced while it was copied", os.fsdecode(entry.path))
                writing = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=within)
                try:
                    self._contents.copy(reading, writing, was.st_size)
                    self._dress(writing, entry)
                finally:
                    os.close(writing)
            finally:
                os.close(reading)
            return
        else:
            raise OSError(errno.EPERM, "a device, which no layer may hold", os.fsdecode(entry.path))
        os.chown(name, was.st_uid, was.st_gid, dir_fd=within, follow_symlinks=False)
        if entry.kind != "symlink":
            os.chmod(name, stat.S_IMODE(was.st_mode), dir_fd=within)
        for attribute, value in self._kept(entry):
            os.setxattr(b"/proc/self/fd/%d/%s" % (within, name), attribute, value, follow_symlinks=False)
        os.utime(name, ns=(was.st_atime_ns, was.st_mtime_ns), dir_fd=within, follow_symlinks=False)

    def _dress(self, fd: int, entry: MergedEntry) -> None:
        """Owner, mode, attributes, times, in the order in which one does not undo another."""
        was = entry.stat
        os.fchown(fd, was.st_uid, was.st_gid)
        os.fchmod(fd, stat.S_IMODE(was.st_mode))
        for attribute, value in self._kept(entry):
            os.setxattr(fd, attribute, value)
        os.utime(fd, ns=(was.st_atime_ns, was.st_mtime_ns))

    def _kept(self, entry: MergedEntry) -> Iterator[tuple[str, bytes]]:
        """An attribute that a workload named as overlay names its own is put below these, where overlay looks for such."""
        for attribute, value in entry.xattrs.items():
            if attribute.startswith(self._prefix):
                yield f"{self._prefix}overlay.{attribute[len(self._prefix) :]}", value
            elif not mark.is_volatile(attribute):
                yield attribute, value
