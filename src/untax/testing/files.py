"""The files of a fake sandbox: in memory, or in real directories that lie on each other as overlay lays them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

_WHITEOUT = os.makedev(0, 0)
_OPAQUE = "user.overlay.opaque"


class Files(Protocol):
    """Every method raises the `OSError` that the real thing would. Paths are absolute."""

    def read(self, path: str) -> bytes: ...

    def write(self, path: str, data: bytes, mode: int, *, exclusive: bool) -> None: ...

    def stat(self, path: str) -> os.stat_result: ...

    def target(self, path: str) -> str: ...

    def list(self, path: str) -> list[str]: ...

    def mkdir(self, path: str) -> None: ...

    def remove(self, path: str, *, recursive: bool) -> None: ...


class MemoryFiles(dict[str, bytes]):
    """Names and bytes; every directory exists."""

    def read(self, path: str) -> bytes:
        if path not in self:
            raise _error(errno.ENOENT, path)
        return self[path]

    def write(self, path: str, data: bytes, mode: int, *, exclusive: bool) -> None:  # noqa: ARG002
        if exclusive and path in self:
            raise _error(errno.EEXIST, path)
        self[path] = data

    def stat(self, path: str) -> os.stat_result:
        if path in self:
            return os.stat_result((stat.S_IFREG | 0o644, 0, 0, 1, 0, 0, len(self[path]), 0, 0, 0))
        if any(name.startswith(path.rstrip("/") + "/") for name in self):
            return os.stat_result((stat.S_IFDIR | 0o755, 0, 0, 1, 0, 0, 0, 0, 0, 0))
        raise _error(errno.ENOENT, path)

    def target(self, path: str) -> str:
        raise _error(errno.EINVAL, path)

    def list(self, path: str) -> list[str]:
        below = path.rstrip("/") + "/"
        return sorted({name[len(below) :].partition("/")[0] for name in self if name.startswith(below)})

    def mkdir(self, path: str) -> None:
        pass

    def remove(self, path: str, *, recursive: bool) -> None:  # noqa: ARG002
        names = [name for name in self if name == path or name.startswith(path + "/")]
        if not names:
            raise _error(errno.ENOENT, path)
        for name in names:
            del self[name]


class LayeredFiles:
    """Layers below, one directory on top that takes what is written. No link is ever followed."""

    def __init__(self, layers: tuple[str, ...], upper: Path) -> None:
        self.layers = layers
        self.upper = upper

    def read(self, path: str) -> bytes:
        found = self._seen(path)
        kind = stat.S_IFMT(found.lstat().st_mode)
        if kind != stat.S_IFREG:
            raise _error(errno.EISDIR if kind == stat.S_IFDIR else errno.ELOOP, path)
        return found.read_bytes()

    def write(self, path: str, data: bytes, mode: int, *, exclusive: bool) -> None:
        was = self._find(path)
        if exclusive and was is not None:
            raise _error(errno.EEXIST, path)
        if was is not None and was.is_dir():
            raise _error(errno.EISDIR, path)
        mode = mode or (stat.S_IMODE(was.lstat().st_mode) if was is not None else 0o644)
        self.mkdir(os.path.dirname(path))
        target = self.upper / path.lstrip("/")
        target.unlink(missing_ok=True)
        target.write_bytes(data)
        target.chmod(mode)

    def stat(self, path: str) -> os.stat_result:
        return self._seen(path).lstat()

    def target(self, path: str) -> str:
        return os.readlink(self._seen(path))

    def list(self, path: str) -> list[str]:
        if not stat.S_ISDIR(self._seen(path).lstat().st_mode):
            raise _error(errno.ENOTDIR, path)
        gone: set[str] = set()
        names: set[str] = set()
        for directory in self._places(path):
            for entry in directory.iterdir():
                (gone if _is_whiteout(entry) else names).add(entry.name) if entry.name not in gone | names else None
        return sorted(names)

    def mkdir(self, path: str) -> None:
        at = self.upper
        for depth, part in enumerate(parts := _parts(path), 1):
            at = at / part
            inside = "/".join(parts[:depth])
            seen = self._find(inside)
            if seen is not None and not stat.S_ISDIR(seen.lstat().st_mode):
                raise _error(errno.ENOTDIR, inside)
            if not at.is_dir():
                was_gone = os.path.lexists(at)
                at.unlink(missing_ok=True)
                at.mkdir()
                at.chmod(stat.S_IMODE(seen.lstat().st_mode) if seen is not None else 0o755)
                if was_gone:
                    os.setxattr(at, _OPAQUE, b"y")

    def remove(self, path: str, *, recursive: bool) -> None:
        seen = self._seen(path)
        if seen.is_dir() and not seen.is_symlink() and self.list(path) and not recursive:
            raise _error(errno.ENOTEMPTY, path)
        target = self.upper / path.lstrip("/")
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        else:
            target.unlink(missing_ok=True)
        if self._find(path) is not None:
            self.mkdir(os.path.dirname(path))
            os.mknod(target, stat.S_IFCHR, _WHITEOUT)

    def _seen(self, path: str) -> Path:
        found = self._find(path)
        if found is None:
            raise _error(errno.ENOENT, path)
        return found

    def _find(self, path: str) -> Path | None:
        return next(self._places(path), None)

    def _places(self, path: str) -> Iterator[Path]:
        """Where it lies, uppermost first: one place, or for a directory all that are merged."""
        parts = _parts(path)
        for layer in (str(self.upper), *reversed(self.layers)):
            at, is_last = Path(layer), False
            for depth, part in enumerate(parts):
                at = at / part
                if not os.path.lexists(at):
                    break
                is_dir = stat.S_ISDIR(at.lstat().st_mode)
                if _is_whiteout(at) or (not is_dir and depth + 1 < len(parts)):
                    return
                is_last = is_last or not is_dir or _is_opaque(at)
            else:
                yield at
            if is_last:
                return


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part not in ("", ".")]


def _is_whiteout(path: Path) -> bool:
    found = path.lstat()
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == _WHITEOUT


def _is_opaque(path: Path) -> bool:
    try:
        return os.getxattr(path, _OPAQUE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def _error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)
