"""Layers that lie on each other as the kernel's overlay sees them (fs/overlayfs/namei.c, `ovl_lookup`), read without mounting them.

Whiteouts hide, opaque directories end the way down, and a directory that was renamed says where its lower part lies. Everything is
opened by descriptors, one name at a time, and no link is ever followed.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from untax.layers import marks as mark
from untax.layers._descent import Descent, stat_at
from untax.layers.marks import Marks

Parts = tuple[bytes, ...]

_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
GONE = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE, errno.ENAMETOOLONG})
"""What is answered for a name that is not there any more, or is not what it was."""
_NO_ATTRIBUTES = frozenset({errno.EOPNOTSUPP, errno.ENODATA, errno.EPERM, errno.EACCES})
# A chain may be hundreds of layers deep, and most processes have 1,024 descriptors: so many layers are open at a time, so many directories of each.
_LAYERS_OPEN = 48
_DIRECTORIES_OPEN = 6


# ---- one layer ----


class Layer:
    """A directory that is one of a chain's, or the part of it from `within` on; opened when it is needed."""

    def __init__(self, number: int, top: str, within: Parts, pool: Pool) -> None:
        self.number = number
        # What a launcher has mounted for itself alone is seen through /proc/<pid>/root, a link that leads out when it is resolved by its text.
        self.top = top if top.startswith("/proc/") else os.path.realpath(top)
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
            if exc.errno in GONE or exc.errno == errno.EACCES:
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
            if exc.errno in _NO_ATTRIBUTES or exc.errno in GONE:
                return None
            raise

    def attributes(self, parts: Parts) -> dict[str, bytes]:
        try:
            at = self._at(parts)
            if at is None:
                return {}
            return {name: os.getxattr(at, name, follow_symlinks=False) for name in os.listxattr(at, follow_symlinks=False)}
        except OSError as exc:
            if exc.errno in _NO_ATTRIBUTES or exc.errno in GONE:
                return {}
            raise

    def target(self, parts: Parts) -> bytes:
        fd = self._seek(parts[:-1])
        if fd is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fsdecode(b"/".join(parts)))
        return os.readlink(parts[-1], dir_fd=fd)

    def open(self, parts: Parts) -> int:
        if self._pool.is_closed:  # the walk is over, and its entry lives on: nobody would close what is opened now
            with Descent(self.top, keep=1) as descent:
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
            return self._pool.seek(self.top, (*self._within, *parts))
        except OSError as exc:
            if exc.errno in GONE or exc.errno == errno.EACCES:
                return None
            raise


def _is_whiteout(entry: os.DirEntry[str]) -> bool:
    if entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False) or entry.is_symlink():
        return False
    try:
        return mark.is_whiteout(entry.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False


class Pool:
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
class Place:
    layer: Layer
    parts: Parts


@dataclass(frozen=True, slots=True)
class Found:
    """What a name leads to: the uppermost place, which is the one that is seen, and for a directory those it is merged with."""

    overlay: Overlay
    places: tuple[Place, ...]
    stat: os.stat_result

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.stat.st_mode)


@dataclass(frozen=True, slots=True)
class Name:
    """A name in a directory. `holders`, where it is known, are the places of the directory that have it."""

    text: bytes
    within: Found
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


class Overlay:
    """Layers that lie on each other, uppermost first."""

    def __init__(self, number: int, layers: Sequence[Layer], marks: Marks) -> None:
        self.number = number
        self.layers = tuple(layers)
        self._prefix = mark.prefix(marks)
        self._opaque = mark.opaque(marks)
        self._redirect = mark.redirect(marks)

    def top(self) -> Found:
        places = tuple(Place(layer, ()) for layer in self.layers)
        st = self.layers[0].stat(())
        if st is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), self.layers[0].top)
        return Found(self, places, st)

    def children(self, directory: Found) -> list[Name]:
        holders: dict[bytes, list[int]] = {}
        hidden: set[bytes] = set()
        for number, place in enumerate(directory.places):
            for name, is_whiteout in place.layer.names(place.parts):
                seen = holders.setdefault(name, [])
                if is_whiteout and not seen:
                    hidden.add(name)
                seen.append(number)
        return [Name(name, directory, tuple(holders[name])) for name in sorted(holders) if name not in hidden]

    def lookup(self, name: Name) -> Found | None:
        search = _Search(name.text)
        places: list[Place] = []
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
                stack = tuple(Place(layer, ()) for layer in self.layers)
                at = self.layers.index(base.layer) + 1
                is_from_top = True
        return Found(self, tuple(places), seen) if seen is not None else None

    def _in_layer(self, base: Place, search: _Search) -> tuple[Place, os.stat_result] | None:
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

    def _step(self, base: Place, search: _Search, name: bytes, before: Parts, after: Parts) -> tuple[Place, os.stat_result] | None:
        parts = (*base.parts, name)
        st = base.layer.stat(parts)
        if st is None:
            return None
        if mark.is_whiteout(st):
            search.stop = True
            return None
        if not stat.S_ISDIR(st.st_mode):
            search.stop = True
            return None if search.is_dir or after else (Place(base.layer, parts), st)
        if not after:
            search.is_dir = True
        if base.layer.attribute(parts, self._opaque) == mark.OPAQUE_VALUE:
            search.stop = True
        elif (value := base.layer.attribute(parts, self._redirect)) is not None:
            search.redirect(value, before, after)
        return Place(base.layer, parts), st

    def attributes(self, place: Place) -> dict[str, bytes]:
        """As they are seen from inside: overlay keeps its own to itself, and lifts the ones that were put below them by a prefix more."""
        escaped = self._prefix + "overlay."
        found = {}
        for name, value in place.layer.attributes(place.parts).items():
            if name.startswith(escaped):
                found[self._prefix + name[len(escaped) :]] = value
            elif not name.startswith(self._prefix):
                found[name] = value
        return found
