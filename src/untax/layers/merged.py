"""A chain of layers as the one tree that a sandbox sees, read without mounting it; and what an upper directory changes of it.

What hides what is decided as the kernel's overlay decides it (fs/overlayfs/namei.c, `ovl_lookup`): whiteouts, opaque
directories, directories that were renamed and say where their lower part lies. A view of a host directory is an overlay
of its own at its place: the directory that each layer has there, over the host's. Everything is opened by descriptors,
one name at a time, and no link is ever followed, so a tree may be one that a workload is changing right now.
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
from untax.layers._descent import Descent, stat_at
from untax.layers.marks import Marks

Kind = Literal["file", "directory", "symlink", "fifo", "socket", "char", "block"]
ChangeKind = Literal["added", "modified", "deleted"]
Parts = tuple[bytes, ...]

_KINDS: dict[int, Kind] = {
    stat.S_IFREG: "file",
    stat.S_IFDIR: "directory",
    stat.S_IFLNK: "symlink",
    stat.S_IFIFO: "fifo",
    stat.S_IFSOCK: "socket",
    stat.S_IFCHR: "char",
    stat.S_IFBLK: "block",
}
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENAMETOOLONG})
_NO_ATTRIBUTES = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EPERM, errno.EACCES})
# A chain may be hundreds of layers deep, and most processes have 1,024 descriptors: so many layers are open at a time, so many directories of each.
_LAYERS_OPEN = 48
_DIRECTORIES_OPEN = 6
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
    place: _Place

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
        waiting: list[tuple[Parts, Iterator[_Name]]] = [((), iter(merged.children((), top)))]
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
    parts = _parts(path)
    with _Merged(root, marks or mark.of_this_process()) as merged:
        found: _Found | None = merged.top()
        for depth, name in enumerate(parts):
            if found is None or not found.is_dir:
                return None
            found = merged.lookup(parts[:depth], _Name(name, found))
        return merged.entry(parts, found) if found is not None else None


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


def _parts(path: str | bytes) -> Parts:
    parts = tuple(part for part in os.fsencode(path).split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise ValueError(f"a path inside a chain of layers must not go up: {path!r}")
    return parts


# ---- one layer ----


class _Layer:
    """A directory that is one of a chain's, or the part of it from `within` on; opened when it is needed."""

    def __init__(self, number: int, top: str, within: Parts, pool: _Pool) -> None:
        self.number = number
        # What a launcher has mounted for itself alone is seen through /proc/<pid>/root, a link that leads out when it is resolved by its text.
        self._top = top if top.startswith("/proc/") else os.path.realpath(top)
        self._within = within
        self._pool = pool

    def is_there(self) -> bool:
        return self._seek(()) is not None

    def stat(self, parts: Parts) -> os.stat_result | None:
        if not parts:
            fd = self._seek(())
            return os.fstat(fd) if fd is not None else None
        fd = self._seek(parts[:-1])
        try:
            return stat_at(fd, parts[-1]) if fd is not None else None
        except OSError as exc:
            if exc.errno in _GONE or exc.errno == errno.EACCES:
                return None
            raise

    def names(self, parts: Parts) -> list[tuple[bytes, bool]]:
        """What is in a directory, and whether it stands for something that is gone."""
        fd = self._seek(parts)
        if fd is None:
            return []
        found = []
        with os.scandir(fd) as entries:
            for entry in entries:
                found.append((os.fsencode(entry.name), _is_whiteout(entry)))
        return found

    def attribute(self, parts: Parts, name: str) -> bytes | None:
        try:
            at = self._at(parts)
            return os.getxattr(at, name, follow_symlinks=False) if at is not None else None
        except OSError as exc:
            if exc.errno in _NO_ATTRIBUTES or exc.errno in _GONE:
                return None
            raise

    def attributes(self, parts: Parts) -> dict[str, bytes]:
        try:
            at = self._at(parts)
            if at is None:
                return {}
            return {name: os.getxattr(at, name, follow_symlinks=False) for name in os.listxattr(at, follow_symlinks=False)}
        except OSError as exc:
            if exc.errno in _NO_ATTRIBUTES or exc.errno in _GONE:
                return {}
            raise

    def target(self, parts: Parts) -> bytes:
        fd = self._seek(parts[:-1])
        if fd is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(b"/".join(parts)))
        return os.readlink(parts[-1], dir_fd=fd)

    def open(self, parts: Parts) -> int:
        if self._pool.is_closed:  # the walk is over, and its entry lives on: nobody would close what is opened now
            with Descent(self._top, keep=1) as descent:
                return os.open(parts[-1], _READ, dir_fd=descent.seek((*self._within, *parts[:-1])))
        fd = self._seek(parts[:-1])
        if fd is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(b"/".join(parts)))
        return os.open(parts[-1], _READ, dir_fd=fd)

    def _at(self, parts: Parts) -> bytes | None:
        # There are no calls for attributes that take a directory and a name; this path is one, and nothing at its end is followed.
        fd = self._seek(parts[:-1]) if parts else self._seek(())
        if fd is None:
            return None
        return b"/proc/self/fd/%d/%s" % (fd, parts[-1] if parts else b".")

    def _seek(self, parts: Parts) -> int | None:
        """The directory, lent until the next call; None when it is not there (any more), or closed to us."""
        try:
            return self._pool.seek(self._top, (*self._within, *parts))
        except OSError as exc:
            if exc.errno in _GONE or exc.errno == errno.EACCES:
                return None
            raise


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink():
        return False
    try:
        return mark.is_whiteout(entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


class _Pool:
    """The layers that are open, the one used last at the end."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[Descent, int]] = {}
        self.is_closed = False

    def seek(self, top: str, parts: Parts) -> int | None:
        """None where another file system is mounted: overlay does not see what a mount covers its layers with."""
        descent, device = self._descent(top)
        fd = descent.seek(parts)
        if os.fstat(fd).st_dev == device:
            return fd
        mount = _mount_of(fd)  # a btrfs subvolume has a device number of its own too, and is no mount
        return descent.seek(parts) if mount == _mount_of(descent.seek(())) else None

    def _descent(self, top: str) -> tuple[Descent, int]:
        found = self._open.pop(top, None)
        if found is None:
            if len(self._open) >= _LAYERS_OPEN:
                self._open.pop(next(iter(self._open)))[0].close()
            descent = Descent(top, keep=_DIRECTORIES_OPEN)
            found = descent, os.fstat(descent.fd).st_dev
        self._open[top] = found
        return found

    def close(self) -> None:
        self.is_closed = True
        while self._open:
            self._open.popitem()[1][0].close()


def _mount_of(fd: int) -> str:
    text = Path(f"/proc/self/fdinfo/{fd}").read_text()
    return next((line for line in text.splitlines() if line.startswith("mnt_id:")), "")


# ---- one overlay ----


@dataclass(frozen=True, slots=True)
class _Place:
    layer: _Layer
    parts: Parts


@dataclass(frozen=True, slots=True)
class _Found:
    """What a name leads to: the uppermost place, which is the one that is seen, and for a directory those it is merged with."""

    overlay: _Overlay
    places: tuple[_Place, ...]
    stat: os.stat_result

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.stat.st_mode)


@dataclass(frozen=True, slots=True)
class _Name:
    """A name in a directory. `holders`, where it is known, are the places of the directory that have it."""

    text: bytes
    within: _Found
    holders: tuple[int, ...] | None = None


class _Search:
    """What `ovl_lookup` carries from layer to layer."""

    def __init__(self, name: bytes) -> None:
        self.name: Parts = (name,)
        self.is_absolute = False
        self.is_renamed = False
        self.is_dir = False
        self.stop = False

    def redirect(self, value: bytes, before: Parts, after: Parts) -> None:
        """From the next layer on, look somewhere else."""
        if value.startswith(b"/"):
            parts = tuple(value[1:].split(b"/"))
            self.name = (*parts, *after)
            self.is_absolute = True
            self.stop = False  # an opaque directory further up ends the way down from it, and this one begins at the top
        else:
            parts = (value,)
            self.name = (*before, value, *after)
        if any(part in (b"", b".", b"..") or b"/" in part for part in parts):
            raise OSError(errno.EINVAL, f"a directory of a layer says that it lies at {value!r}, which is no path")
        self.is_renamed = True


class _Overlay:
    """Layers that lie on each other, uppermost first."""

    def __init__(self, number: int, layers: Sequence[_Layer], marks: Marks) -> None:
        self.number = number
        self.layers = tuple(layers)
        self._prefix = mark.prefix(marks)
        self._opaque = mark.opaque(marks)
        self._redirect = mark.redirect(marks)

    def top(self) -> _Found:
        places = tuple(_Place(layer, ()) for layer in self.layers)
        st = self.layers[0].stat(())
        if st is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.layers[0]._top)
        return _Found(self, places, st)

    def children(self, directory: _Found) -> list[_Name]:
        holders: dict[bytes, list[int]] = {}
        hidden: set[bytes] = set()
        for number, place in enumerate(directory.places):
            for name, is_whiteout in place.layer.names(place.parts):
                seen = holders.setdefault(name, [])
                if is_whiteout and not seen:
                    hidden.add(name)
                seen.append(number)
        return [_Name(name, directory, tuple(holders[name])) for name in sorted(holders) if name not in hidden]

    def lookup(self, name: _Name) -> _Found | None:
        search = _Search(name.text)
        places: list[_Place] = []
        seen: os.stat_result | None = None
        stack = name.within.places
        at = 0
        is_from_top = len(stack) > 0 and not stack[0].parts
        while at < len(stack) and not search.stop:
            base = stack[at]
            at += 1
            if name.holders is not None and not search.is_renamed and at - 1 not in name.holders:
                continue
            found = self._in_layer(base, search)
            if found is None:
                continue
            place, st = found
            places.append(place)
            seen = seen or st
            if search.is_absolute and not is_from_top:
                stack = tuple(_Place(layer, ()) for layer in self.layers)
                at = self.layers.index(base.layer) + 1
                is_from_top = True
        return _Found(self, tuple(places), seen) if seen is not None else None

    def _in_layer(self, base: _Place, search: _Search) -> tuple[_Place, os.stat_result] | None:
        """Follow the searched name through one layer. Counted from its end, because its beginning may change on the way."""
        left = len(search.name)
        found = None
        here = base
        while left:
            at = len(search.name) - left
            found = self._step(here, search, search.name[at], search.name[:at], search.name[at + 1 :])
            if found is None:
                return None
            here = found[0]
            left -= 1
        return found

    def _step(self, base: _Place, search: _Search, name: bytes, before: Parts, after: Parts) -> tuple[_Place, os.stat_result] | None:
        parts = (*base.parts, name)
        st = base.layer.stat(parts)
        if st is None:
            return None
        if mark.is_whiteout(st):
            search.stop = True
            return None
        if not stat.S_ISDIR(st.st_mode):
            search.stop = True
            return None if search.is_dir or after else (_Place(base.layer, parts), st)
        if not after:
            search.is_dir = True
        if base.layer.attribute(parts, self._opaque) == mark.OPAQUE_VALUE:
            search.stop = True
        elif (value := base.layer.attribute(parts, self._redirect)) is not None:
            search.redirect(value, before, after)
        return _Place(base.layer, parts), st

    def attributes(self, place: _Place) -> dict[str, bytes]:
        """As they are seen from inside: overlay keeps its own to itself, and lifts the ones that were put below them by a prefix more."""
        escaped = self._prefix + "overlay."
        found = {}
        for name, value in place.layer.attributes(place.parts).items():
            if name.startswith(escaped):
                found[self._prefix + name[len(escaped) :]] = value
            elif not name.startswith(self._prefix):
                found[name] = value
        return found


# ---- the chain with its views ----


class _Merged:
    def __init__(self, root: Root, marks: Marks) -> None:
        self._pool = _Pool()
        layers = list(reversed(root.layers))
        self._main = _Overlay(0, [_Layer(number, top, (), self._pool) for number, top in enumerate(layers)], marks)
        self._views: dict[Parts, _Overlay] = {}
        for view in root.views:
            at = _parts(view.at)
            parts = [_Layer(number, top, at, self._pool) for number, top in enumerate(layers)]
            bottom = _Layer(len(layers), view.source, (), self._pool)
            self._views[at] = _Overlay(1 + len(self._views), [*(layer for layer in parts if layer.is_there()), bottom], marks)

    def top(self) -> _Found:
        return self._views.get((), self._main).top()

    def children(self, path: Parts, directory: _Found) -> list[_Name]:
        found = directory.overlay.children(directory)
        mounted = {at[-1] for at in self._views if at and at[:-1] == path} - {name.text for name in found}
        return sorted([*found, *(_Name(name, directory) for name in mounted)], key=lambda name: name.text)

    def lookup(self, path: Parts, name: _Name) -> _Found | None:
        view = self._views.get((*path, name.text))
        return view.top() if view is not None else name.within.overlay.lookup(name)

    def entry(self, path: Parts, found: _Found) -> MergedEntry:
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
        self._apart = {_parts(path) for path in apart_from}
        self._has_owners = has_owners
        self._found: list[Change] = []
        self._todo: list[tuple[Parts, _Found | None, _Found | None]] = []

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

    def _names(self, path: Parts, was: _Found | None, now: _Found | None) -> Iterator[tuple[bytes, _Name | None, _Name | None]]:
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

    def _is_extra(self, place: _Place) -> bool:
        return place.layer.number < self._extra

    def _is_same_below(self, was: _Found, now: _Found) -> bool:
        lower = [(place.layer.number - self._extra, place.parts) for place in now.places if not self._is_extra(place)]
        return lower == [(place.layer.number, place.parts) for place in was.places]

    def _compare(self, path: Parts, was: _Found | None, now: _Found | None) -> None:
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

    def _is_untouched(self, was: _Found, now: _Found) -> bool:
        """Nothing was written to it. In a directory then nothing either: even a view further down has its place in the upper one."""
        return self._is_same_below(was, now) and not any(self._is_extra(place) for place in now.places)

    def _is_modified(self, was: _Found, now: _Found) -> bool:
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


def _target(place: _Place) -> bytes | None:
    try:
        return place.layer.target(place.parts)
    except OSError:
        return None  # gone, or something else by now


def _is_same_content(before: _Place, after: _Place) -> bool:
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
        if exc.errno in _GONE or exc.errno in (errno.EACCES, errno.ENXIO):
            return False
        raise
    finally:
        for fd in fds:
            os.close(fd)
