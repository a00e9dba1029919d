"""One tar layer into the tree of a draft, however hostile the archive is.

Every step goes from one directory's descriptor to the next without following links, so nothing that the archive put there
leads anywhere else. Refused with `StageFailed` is what would lead out, what two readers would understand differently, and what
comes to more than its caps; the draft is then only fit to be discarded. What a layer deletes of those below it becomes
overlay's own marks.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from untax.core.errors import StageUnavailable
from untax.core.root import Root
from untax.core.tar import TarError, components
from untax.layers import tarball
from untax.layers._descent import Descent
from untax.layers.blob import Blob, Caps, Readable, refused
from untax.layers.marks import OPAQUE_VALUE, Marks, make_whiteout, opaque
from untax.layers.merged import Reader
from untax.layers.tarball import Entry, Tarball

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
HIGHEST_ID = 65_535  # what every sandbox can show, whatever its range
NAME_MAX = 255
_NOTES = 100  # kept; a layer may leave out a million things

_WHITEOUT = b".wh."
_OPAQUE = b".wh..wh..opq"
_OF_AUFS = (b".wh..wh.aufs", b".wh..wh.orph", b".wh..wh.plnk")  # what layers of the years before overlay have at their top
# Devices that images hold out of habit: null, zero, full, random, urandom; tty, console, ptmx. A sandbox has its own /dev.
_USUAL_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (5, 0), (5, 1), (5, 2)}
_TERMINALS = 4  # the major number of tty0, tty1, …

_CAPABILITY = b"security.capability"
# Version 2, without a root of its own: version 3 names an id of the machine it was made on.
_CAPABILITY_SIZE, _CAPABILITY_VERSION = 20, 2

# What the archive asked for and no file system gives: its fault, and it will be again.
_ARCHIVE_ERRNOS = (
    errno.ENAMETOOLONG,
    errno.EMLINK,
    errno.EINVAL,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EEXIST,
    errno.EISDIR,
    errno.ENOTEMPTY,
    errno.EFBIG,
)


@dataclass(frozen=True, slots=True)
class Unpacked:
    entries: int
    bytes: int
    notes: tuple[str, ...]
    """What was left out and why, for people."""


def unpack(
    source: Readable,
    tree: Path,
    *,
    marks: Marks,
    below: Sequence[Path] = (),
    has_whiteouts: bool = True,
    digest: str | None = None,
    diff_id: str | None = None,
    caps: Caps | None = None,
    on_read: Callable[[int], None] | None = None,
) -> Unpacked:
    """Unpack what `source` reads into `tree`, an empty directory of ours. Blocks.

    With `trusted` marks owners are kept, otherwise everything is this user's own and stays readable to them. `below` are
    the trees of the image's lower layers: directories that the archive goes through and does not describe look as they do
    there. `has_whiteouts` is false for an archive that is a whole root file system. `on_read` hears how many bytes of the
    source were read, and may raise to end it. A full disk is left to the draft to tell of.
    """
    caps = caps or Caps()
    blob = Blob(source, digest=digest, diff_id=diff_id, caps=caps, on_read=on_read)
    try:
        with Descent(tree) as descent:
            archive = Tarball(blob, caps)
            layer = _Layer(descent, marks, below, caps, has_whiteouts=has_whiteouts)
            with contextlib.closing(layer):
                for entry in archive:
                    layer.add(entry, archive)
                blob.finish()
                layer.finish()
    except TarError as exc:
        raise refused(f"the archive is refused: {exc}") from None
    except OSError as exc:
        _raise(exc)
    return Unpacked(archive.entries, blob.bytes, tuple(layer.notes))


def _raise(exc: OSError) -> NoReturn:
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        raise exc
    where = f" at {shown(os.fsencode(exc.filename))}" if exc.filename is not None and not isinstance(exc.filename, int) else ""
    if exc.errno in _ARCHIVE_ERRNOS:
        raise refused(f"the archive is refused: {exc.strerror}{where}") from exc
    raise StageUnavailable("image", f"it cannot be unpacked: {exc.strerror}{where}") from exc


class _Layer:
    def __init__(self, descent: Descent, marks: Marks, below: Sequence[Path], caps: Caps, *, has_whiteouts: bool) -> None:
        self._descent = descent
        self._marks: Marks = marks
        self._keeps_owners = marks == "trusted"
        self._below = below
        self._lower = Reader(Root(layers=tuple(map(str, below))), marks=marks) if below else None
        self._caps = caps
        self._has_whiteouts = has_whiteouts
        self._implied = 0
        self._holes = 0  # bytes that files have and the archive has not: they cost no disk, but whoever reads them time
        # Modes and times of directories are set at the end: modes may forbid writing, or hand a group down, and times change.
        self._directories: dict[bytes, tuple[int, int]] = {}
        self._opaque: set[bytes] = set()
        self._hides_all = False
        self._whiteouts: list[tuple[bytes, ...]] = []
        self.notes: list[str] = []
        self._imply(())

    def add(self, entry: Entry, archive: Tarball) -> None:
        path = components(entry.name, deepest=self._caps.deepest)
        if any(len(part) > NAME_MAX for part in path):
            raise TarError(f"a name of more than {NAME_MAX} bytes: {shown(entry.name)}")
        if not 0 <= entry.uid <= HIGHEST_ID or not 0 <= entry.gid <= HIGHEST_ID:
            raise TarError(f"an owner above {HIGHEST_ID}: {shown(entry.name)}")
        if entry.kind != tarball.DIRECTORY and (not path or entry.name.endswith((b"/", b"/.")) or entry.name == b"."):
            raise TarError(f"the name of a directory for something else: {shown(entry.name)}")
        if any(part.startswith(_WHITEOUT) for part in path) and self._is_about_whiteouts(path, entry):
            return
        if entry.kind == tarball.DIRECTORY:
            self._directory(path, entry)
        elif entry.kind == tarball.FILE:
            self._file(path, entry, archive)
        elif entry.kind == tarball.LINK:
            self._link(path, entry)
        elif entry.kind == tarball.HARD_LINK:
            self._hard_link(path, entry)
        elif entry.kind == tarball.FIFO:
            self._fifo(path, entry)
        else:
            self._device(path, entry)

    def finish(self) -> None:
        """Take back deletions that nothing can come of, and give directories their modes and times."""
        if self._hides_all:
            self._hide_all()
        for path in sorted(self._whiteouts):
            # Overlay lists a directory that it does not merge as it lies: a whiteout in it would be seen, and lead nowhere.
            if not self._is_below(path):
                os.unlink(path[-1], dir_fd=self._seek(path[:-1]))
        for name, (mode, mtime_ns) in sorted(self._directories.items()):
            fd = self._seek(name.split(b"/") if name else ())
            os.fchmod(fd, mode if self._keeps_owners else mode | 0o700)
            os.utime(fd, ns=(mtime_ns, mtime_ns))

    def close(self) -> None:
        if self._lower is not None:
            self._lower.close()

    def note(self, what: str) -> None:
        if len(self.notes) < _NOTES:
            self.notes.append(what)

    # ---- kinds of entries ----

    def _directory(self, path: Sequence[bytes], entry: Entry) -> None:
        fd = self._enter(path)
        if self._keeps_owners:
            os.fchown(fd, entry.uid, entry.gid)
        self._directories[b"/".join(path)] = (entry.mode, entry.mtime_ns)
        self._set_attributes(fd, entry)

    def _file(self, path: Sequence[bytes], entry: Entry, archive: Tarball) -> None:
        self._holes += entry.size - entry.stored
        if self._holes + entry.size > self._caps.bytes:
            raise TarError(f"files of more than {self._caps.bytes} bytes: {shown(entry.name)}")
        directory = self._enter(path[:-1])
        name = path[-1]
        try:
            fd = os.open(name, _CREATE, 0o600, dir_fd=directory)
        except FileExistsError:
            self._make_way(directory, name, stat.S_ISREG)
            fd = os.open(name, _CREATE, 0o600, dir_fd=directory)
        try:
            if entry.pieces is not None:
                _write_pieces(fd, entry, archive)
            elif entry.stored:
                for part in archive.content():
                    _write(fd, part)
            if self._keeps_owners and (entry.uid or entry.gid):
                os.fchown(fd, entry.uid, entry.gid)  # before the mode: a new owner loses the set-id bits
            os.fchmod(fd, entry.mode if self._keeps_owners else entry.mode | 0o400)
            if entry.attributes:
                self._set_attributes(fd, entry)
            os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))
        finally:
            os.close(fd)

    def _link(self, path: Sequence[bytes], entry: Entry) -> None:
        if not entry.target or climbs(path, entry.target):
            raise TarError(f"a link out of the tree: {shown(entry.name)} to {shown(entry.target)}")
        directory = self._enter(path[:-1])
        try:
            os.symlink(entry.target, path[-1], dir_fd=directory)
        except FileExistsError:
            self._make_way(directory, path[-1], stat.S_ISLNK)
            os.symlink(entry.target, path[-1], dir_fd=directory)
        if entry.attributes:
            self.note(f"{shown(entry.name)}: extended attributes of a link")
        self._own_and_date(directory, path[-1], entry)

    def _fifo(self, path: Sequence[bytes], entry: Entry) -> None:
        directory = self._enter(path[:-1])
        try:
            os.mkfifo(path[-1], 0o600, dir_fd=directory)
        except FileExistsError:
            self._make_way(directory, path[-1], stat.S_ISFIFO)
            os.mkfifo(path[-1], 0o600, dir_fd=directory)
        self._own_and_date(directory, path[-1], entry)
        os.chmod(path[-1], entry.mode, dir_fd=directory)

    def _own_and_date(self, directory: int, name: bytes, entry: Entry) -> None:
        if self._keeps_owners and (entry.uid or entry.gid):
            os.chown(name, entry.uid, entry.gid, dir_fd=directory, follow_symlinks=False)
        os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=directory, follow_symlinks=False)

    def _hard_link(self, path: Sequence[bytes], entry: Entry) -> None:
        target = components(entry.target, deepest=self._caps.deepest)
        if not target or target == path or any(part.startswith(_WHITEOUT) for part in target):
            raise TarError(f"a hard link to no other file: {shown(entry.name)}")
        try:
            source = os.dup(self._seek(target[:-1]))
        except (FileNotFoundError, NotADirectoryError):
            raise TarError(f"a hard link to what is not in the layer: {shown(entry.name)} to {shown(entry.target)}") from None
        try:
            found = self._status(source, target[-1])
            if found is None or not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
                raise TarError(f"a hard link to no file of the layer: {shown(entry.name)} to {shown(entry.target)}")
            directory = self._enter(path[:-1])
            if (there := self._status(directory, path[-1])) is not None:
                if (there.st_dev, there.st_ino) == (found.st_dev, found.st_ino):
                    return  # said twice
                self._make_way(directory, path[-1], lambda mode: stat.S_IFMT(mode) == stat.S_IFMT(found.st_mode))
            os.link(target[-1], path[-1], src_dir_fd=source, dst_dir_fd=directory, follow_symlinks=False)
        finally:
            os.close(source)

    def _device(self, path: Sequence[bytes], entry: Entry) -> None:
        is_usual = entry.kind == tarball.CHARACTER and (entry.device in _USUAL_DEVICES or entry.device[0] == _TERMINALS)
        if path[0] != b"dev" or not is_usual:
            raise TarError(f"a device: {shown(entry.name)}")
        self.note(f"{shown(entry.name)}: a sandbox has its own devices")

    # ---- what is deleted of lower layers ----

    def _is_about_whiteouts(self, path: Sequence[bytes], entry: Entry) -> bool:
        """Whether the entry says what is deleted, and is dealt with."""
        if path[0] in _OF_AUFS and self._has_whiteouts:
            return True
        name = path[-1]
        hidden = name.removeprefix(_WHITEOUT)
        is_proper = name == _OPAQUE or (
            name.startswith(_WHITEOUT) and hidden not in (b"", b".", b"..") and not hidden.startswith(_WHITEOUT)
        )
        if any(part.startswith(_WHITEOUT) for part in path[:-1]) or not is_proper:
            raise TarError(f"a deletion of nothing: {shown(entry.name)}")
        if not self._has_whiteouts:
            raise TarError(f"a deletion in what is no layer but a whole root file system: {shown(entry.name)}")
        if entry.kind != tarball.FILE or entry.size:
            raise TarError(f"a deletion that is more than an empty file: {shown(entry.name)}")
        if name == _OPAQUE:
            self._hide_below(path[:-1])
        else:
            directory = self._enter(path[:-1])
            if self._status(directory, hidden) is not None:
                raise TarError(f"one name both deleted and there: {shown(entry.name)}")
            make_whiteout(hidden, dir_fd=directory)
            self._whiteouts.append((*path[:-1], hidden))
        return True

    def _hide_below(self, path: Sequence[bytes]) -> None:
        if path:
            os.setxattr(self._enter(path), opaque(self._marks), OPAQUE_VALUE)
            self._opaque.add(b"/".join(path))
        else:
            self._hides_all = True

    def _hide_all(self) -> None:
        """Overlay merges the tops of all layers whatever they say: so each name there that lower layers have is hidden by itself."""
        top = self._seek(())
        names = {os.fsencode(name) for tree in self._below for name in os.listdir(tree)}
        if len(names) > self._caps.entries:
            raise TarError(f"a deletion of more than {self._caps.entries} names")
        for name in sorted(names):
            there = self._status(top, name)
            if there is None:
                make_whiteout(name, dir_fd=top)
            elif stat.S_ISDIR(there.st_mode):
                self._hide_below((name,))
                top = self._seek(())

    # ---- places ----

    def _enter(self, path: Sequence[bytes]) -> int:
        """The descriptor of a directory, made where it is missing. A link on the way is not a way."""
        descent = self._descent
        have = descent.names
        if len(have) == len(path) and all(map(bytes.__eq__, have, path)):
            return descent.fd
        try:
            shared = 0
            while shared < len(path) and shared < len(have) and have[shared] == path[shared]:
                shared += 1
            descent.seek(path[:shared])
            for depth in range(shared, len(path)):
                try:
                    descent.enter(path[depth])
                except FileNotFoundError:
                    os.mkdir(path[depth], 0o700, dir_fd=descent.fd)
                    descent.enter(path[depth])
                    self._imply(path[: depth + 1])
        except (NotADirectoryError, FileExistsError):
            raise TarError(f"a way through a link or a file: {shown(b'/'.join(path))}") from None
        return descent.fd

    def _seek(self, path: Sequence[bytes]) -> int:
        return self._descent.seek(path)

    def _is_below(self, path: Sequence[bytes]) -> bool:
        return self._looks_below(path) is not None

    def _looks_below(self, path: Sequence[bytes]) -> os.stat_result | None:
        """Of what the layers below show at `path`; None when they show nothing, or this layer hides it."""
        if self._lower is None or any(b"/".join(path[:depth]) in self._opaque for depth in range(1, len(path))):
            return None
        found = self._lower.lookup(tuple(path))
        return None if found is None else found.stat

    def _imply(self, path: Sequence[bytes]) -> None:
        """Give a directory that no entry has described yet the looks of the same one in the layers below."""
        self._implied += 1
        if self._implied > self._caps.entries:  # each entry can imply as many as its name is deep
            raise TarError(f"more than {self._caps.entries} directories that only names speak of")
        uid, gid, mode, mtime_ns = 0, 0, 0o755, 0
        status = self._looks_below(path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            uid, gid, mode, mtime_ns = status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode), status.st_mtime_ns
        self._directories[b"/".join(path)] = (mode, mtime_ns)
        if self._keeps_owners and (uid or gid):
            os.fchown(self._descent.fd, uid, gid)

    def _make_way(self, directory: int, name: bytes, is_same: Callable[[int], bool]) -> None:
        """Remove what an earlier entry of the same name and kind left: the last one counts, as with every tar."""
        there = self._status(directory, name)
        if there is None or not is_same(there.st_mode):
            raise TarError(f"two entries of one name and different kinds: {shown(name)}")
        os.unlink(name, dir_fd=directory)

    def _status(self, directory: int, name: bytes) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return None

    # ---- extended attributes ----

    def _set_attributes(self, fd: int, entry: Entry) -> None:
        for name, value in entry.attributes:
            if not self._is_kept(name, value):
                self.note(f"{shown(entry.name)}: the extended attribute {shown(name)}")
                continue
            try:
                os.setxattr(fd, name, value)
            except OSError as exc:
                if exc.errno in (errno.ENOTSUP, errno.EPERM):
                    self.note(f"{shown(entry.name)}: the extended attribute {shown(name)}, which this file system does not keep")
                elif exc.errno in (errno.ENOSPC, errno.E2BIG, errno.ERANGE, errno.EINVAL):
                    # Said of the attribute, not of the disk: file systems have a few kilobytes for all of a file's.
                    raise TarError(f"extended attributes that do not fit: {shown(entry.name)}") from exc
                else:
                    raise

    def _is_kept(self, name: bytes, value: bytes) -> bool:
        """A user's own, and capabilities, for the sake of exports: a sandbox gives nothing for them. Overlay's are ours alone to set."""
        if name == _CAPABILITY:
            is_usual = len(value) == _CAPABILITY_SIZE and value[3] == _CAPABILITY_VERSION
            return self._keeps_owners and is_usual
        return name.startswith(b"user.") and not name.startswith(b"user.overlay.") and b"\0" not in name and len(name) <= NAME_MAX


def climbs(path: Sequence[bytes], target: bytes) -> bool:
    """Whether a link at `path` goes above the root by its text. An absolute one does not: it begins at the sandbox's own root."""
    depth = 0 if target.startswith(b"/") else len(path) - 1
    for part in target.split(b"/"):
        if part == b"..":
            depth -= 1
            if depth < 0:
                return True
        elif part not in (b"", b"."):
            depth += 1
    return False


def _write(fd: int, part: memoryview) -> None:
    while part:
        part = part[os.write(fd, part) :]


def _write_pieces(fd: int, entry: Entry, archive: Tarball) -> None:
    os.ftruncate(fd, entry.size)
    pieces = iter(entry.pieces or ())
    room = 0
    for part in archive.content():
        while part:
            if not room:
                offset, room = next(pieces)
                os.lseek(fd, offset, os.SEEK_SET)
            _write(fd, part[:room])
            taken = min(room, len(part))
            room -= taken
            part = part[taken:]


def shown(name: bytes) -> str:
    return repr(os.fsdecode(name[:80])).encode(errors="backslashreplace").decode() + ("…" if len(name) > 80 else "")
