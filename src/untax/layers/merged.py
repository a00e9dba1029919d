"""A chain of layers as the one tree that a sandbox sees, read without mounting it; and what an upper directory changes of it.

What hides what is decided as the kernel's overlay decides it (_overlay.py). A view of a host directory is an overlay
of its own at its place: the directory that each layer has there, over the host's. No link is ever followed, and a tree may be
one that a workload is changing right now.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from untax.core.root import Root
from untax.layers import marks as mark
from untax.layers._overlay import GONE, Found, Layer, Name, Overlay, Parts, Place, Pool
from untax.layers.marks import Marks

Kind = Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
ChangeKind = Literal["added", "modified", "deleted"]

_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}
_BLOCK = 1 << 18

COVERED: frozenset[str] = frozenset({"/proc", "/dev", "/tmp"})
"""Where a sandbox has mounts of its own. What lies there in an upper directory is only what they are mounted on."""


@dataclass(frozen=True, slots=True)
class MergedEntry:
    """One entry as a sandbox sees it. `path` is from the root, which itself is empty."""

    path: bytes
    kind: Kind
    stat: os.stat_result
    xattrs: Mapping[str, bytes]
    """Without overlay's own."""
    target: bytes
    """Where a symbolic link points."""
    link_group: tuple[int, ...] | None
    """Equal for the names of one file that has several; None for one that has no other name in its layer."""
    place: Place

    def open(self) -> int:
        """A descriptor to read a file's contents from; the caller closes it. Never waits, never follows a link."""
        return self.place.layer.open(self.place.parts)


@dataclass(frozen=True, slots=True)
class Change:
    """`path` is absolute; names that are not UTF-8 are escaped as by `os.fsdecode`."""

    path: str
    kind: ChangeKind


def walk(root: Root, *, marks: Marks | None = None) -> Iterator[MergedEntry]:
    """Everything, each directory before what it holds, names in the order of their bytes. The root itself comes first.

    What is below a directory closed to this user is left out.
    """
    with _Merged(root, marks or mark.of_this_process()) as merged:
        top = merged.top()
        yield merged.entry((), top)
        waiting: list[tuple[Parts, Iterator[Name]]] = [((), iter(merged.children((), top)))]
        while waiting:
            path, names = waiting[-1]
            name = next(names, None)
            if name is None:
                waiting.pop()
                continue
            found = merged.lookup(path, name)
            if found is None:
                continue
            here = (*path, name.text)
            yield merged.entry(here, found)
            if found.is_dir:
                waiting.append((here, iter(merged.children(here, found))))


def lookup(root: Root, path: str | bytes, *, marks: Marks | None = None) -> MergedEntry | None:
    """What is at `path`, which is taken from the root; None when there is nothing. A link on the way is not followed, so nothing is behind it."""
    with Reader(root, marks=marks) as reader:
        return reader.lookup(parts_of(path))


class Reader:
    """Many look-ups in one chain. Asked in the order of paths, it looks each directory up once."""

    def __init__(self, root: Root, *, marks: Marks | None = None) -> None:
        self._merged = _Merged(root, marks or mark.of_this_process())
        self._way: list[tuple[Parts, Found]] = []

    def lookup(self, parts: Parts) -> MergedEntry | None:
        """As the function of that name does."""
        if not self._way:
            self._way.append(((), self._merged.top()))
        while self._way[-1][0] != parts[: len(self._way[-1][0])]:
            self._way.pop()
        at, found = self._way[-1]
        while at != parts:
            if not found.is_dir:
                return None
            below = self._merged.lookup(at, Name(parts[len(at)], found))
            if below is None:
                return None
            at, found = parts[: len(at) + 1], below
            self._way.append((at, found))
        return self._merged.entry(parts, found)

    def close(self) -> None:
        """Safe to call twice."""
        self._merged.close()

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def changes(uppers: Sequence[Path | str], base: Root, *, marks: Marks | None = None, apart_from: Collection[str] = COVERED) -> list[Change]:
    """What `uppers`, bottom first, change of `base`, ordered by path. Nothing below `apart_from` is looked at.

    A directory is modified when its mode, owner or attributes are others; a file also by its contents or time. What a
    removed directory held is deleted with it, each path by itself, and so is added what a new one holds.
    """
    kind = marks or mark.of_this_process()
    chain = base.with_layers(*(str(upper) for upper in uppers))
    with _Merged(base, kind) as before, _Merged(chain, kind) as after:
        found = _Comparison(before, after, len(uppers), apart_from, has_owners=kind == "trusted").run()
    return sorted(found, key=lambda change: os.fsencode(change.path))


def parts_of(path: str | bytes) -> Parts:
    """The names on the way to `path` from the root."""
    parts = tuple(part for part in os.fsencode(path).split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise ValueError(f"a path inside a chain of layers must not go up: {path!r}")
    return parts


# ---- the chain with its views ----


class _Merged:
    def __init__(self, root: Root, marks: Marks) -> None:
        self._pool = Pool()
        layers = list(reversed(root.layers))
        self._main = Overlay(0, [Layer(number, top, (), self._pool) for number, top in enumerate(layers)], marks)
        self._views: dict[Parts, Overlay] = {}
        for view in root.views:
            at = parts_of(view.at)
            parts = [Layer(number, top, at, self._pool) for number, top in enumerate(layers)]
            bottom = Layer(len(layers), view.source, (), self._pool)
            self._views[at] = Overlay(1 + len(self._views), [*(layer for layer in parts if layer.is_there()), bottom], marks)

    def top(self) -> Found:
        return self._views.get((), self._main).top()

    def children(self, path: Parts, directory: Found) -> list[Name]:
        found = directory.overlay.children(directory)
        mounted = {at[-1] for at in self._views if at and at[:-1] == path} - {name.text for name in found}
        return sorted([*found, *(Name(name, directory) for name in mounted)], key=lambda name: name.text)

    def lookup(self, path: Parts, name: Name) -> Found | None:
        view = self._views.get((*path, name.text))
        return view.top() if view is not None else name.within.overlay.lookup(name)

    def entry(self, path: Parts, found: Found) -> MergedEntry:
        place, st = found.places[0], found.stat
        is_link = stat.S_ISLNK(st.st_mode)
        return MergedEntry(
            b"/".join(path),
            _KINDS[stat.S_IFMT(st.st_mode)],
            st,
            found.overlay.attributes(place),
            place.layer.target(place.parts) if is_link else b"",
            (found.overlay.number, place.layer.number, st.st_dev, st.st_ino) if st.st_nlink > 1 and not found.is_dir else None,
            place,
        )

    def close(self) -> None:
        self._pool.close()

    def __enter__(self) -> _Merged:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---- comparing ----


class _Comparison:
    """Two chains of which the second has `extra` layers more on top. Where these say nothing, nothing is looked at."""

    def __init__(self, before: _Merged, after: _Merged, extra: int, apart_from: Collection[str], *, has_owners: bool) -> None:
        self._before = before
        self._after = after
        self._extra = extra
        self._apart = {parts_of(path) for path in apart_from}
        self._has_owners = has_owners
        self._found: list[Change] = []
        self._todo: list[tuple[Parts, Found | None, Found | None]] = []

    def run(self) -> list[Change]:
        self._compare((), self._before.top(), self._after.top())
        while self._todo:
            path, was, now = self._todo.pop()
            for name, old, new in self._names(path, was, now):
                here = (*path, name)
                if here not in self._apart:
                    self._compare(
                        here,
                        self._before.lookup(path, old) if old is not None else None,
                        self._after.lookup(path, new) if new is not None else None,
                    )
        return self._found

    def _names(self, path: Parts, was: Found | None, now: Found | None) -> Iterator[tuple[bytes, Name | None, Name | None]]:
        """Names that may lead to different things before and after."""
        old = {name.text: name for name in self._before.children(path, was)} if was is not None else {}
        new = {name.text: name for name in self._after.children(path, now)} if now is not None else {}
        if was is None or now is None or not self._is_same_below(was, now):
            candidates = old.keys() | new.keys()
        else:
            written = [place for place in now.places if self._is_extra(place)]
            candidates = {name for place in written for name, _ in place.layer.names(place.parts)}
        for name in candidates:
            yield name, old.get(name), new.get(name)

    def _is_extra(self, place: Place) -> bool:
        return place.layer.number < self._extra

    def _is_same_below(self, was: Found, now: Found) -> bool:
        lower = [(place.layer.number - self._extra, place.parts) for place in now.places if not self._is_extra(place)]
        return lower == [(place.layer.number, place.parts) for place in was.places]

    def _compare(self, path: Parts, was: Found | None, now: Found | None) -> None:
        if was is None and now is None:
            return
        if was is None or now is None:
            self._add(path, "added" if was is None else "deleted")
        elif self._is_untouched(was, now):
            return
        elif self._is_modified(was, now):
            self._add(path, "modified")
        old = was if was is not None and was.is_dir else None
        new = now if now is not None and now.is_dir else None
        if old is not None or new is not None:
            self._todo.append((path, old, new))

    def _is_untouched(self, was: Found, now: Found) -> bool:
        """Nothing was written to it. In a directory then nothing either: even a view further down has its place in the upper one."""
        return self._is_same_below(was, now) and not any(self._is_extra(place) for place in now.places)

    def _is_modified(self, was: Found, now: Found) -> bool:
        old, new = was.stat, now.stat
        if old.st_mode != new.st_mode or (self._has_owners and (old.st_uid, old.st_gid) != (new.st_uid, new.st_gid)):
            return True
        before, after = was.places[0], now.places[0]
        if was.overlay.attributes(before) != now.overlay.attributes(after):
            return True
        if stat.S_ISDIR(new.st_mode):
            return False
        if stat.S_ISLNK(new.st_mode):
            return _target(before) != _target(after)
        if (old.st_rdev, old.st_mtime_ns) != (new.st_rdev, new.st_mtime_ns):
            return True
        return stat.S_ISREG(new.st_mode) and (old.st_size != new.st_size or not _is_same_content(before, after))

    def _add(self, path: Parts, kind: ChangeKind) -> None:
        self._found.append(Change(os.fsdecode(b"/" + b"/".join(path)), kind))


def _target(place: Place) -> bytes | None:
    try:
        return place.layer.target(place.parts)
    except OSError:
        return None  # gone, or something else by now


def _is_same_content(before: Place, after: Place) -> bool:
    """Read both: a time can be set, so it proves nothing."""
    fds: list[int] = []
    try:
        for place in (before, after):
            fds.append(place.layer.open(place.parts))
        while True:
            old, new = (os.read(fd, _BLOCK) for fd in fds)
            if old != new:
                return False
            if not old:
                return True
    except OSError as exc:
        if exc.errno in GONE or exc.errno in (errno.EACCES, errno.ENXIO):
            return False
        raise
    finally:
        for fd in fds:
            os.close(fd)
