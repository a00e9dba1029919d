"""Taking a tree away with whatever a workload put into it: closed directories, and more of them inside each other than a
process may hold open or a path may name. Never through a link.
"""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# Directories deeper than this are moved up to the top first: one descriptor is held for each level.
_DEEPEST = 64


def remove_tree(path: Path) -> bool:
    """Remove `path` and all below it; false when something is left. What is missing already is as good as removed."""
    try:
        top = _open(os.fsencode(path), None)
    except FileNotFoundError:
        return True
    except OSError:
        return _unlink(os.fsencode(path), None)
    try:
        # Each round takes away everything but what lay too deep, which is then directly below the top.
        while _empty(top, top, 0):
            pass
    except OSError:
        pass  # a read-only file system, somebody else's file: what is left is said below
    finally:
        os.close(top)
    try:
        os.rmdir(path)
    except OSError:
        return not os.path.lexists(path)
    return True


def _empty(top: int, here: int, depth: int) -> bool:
    """Remove what is in `here`; true when something of it was moved to the top instead."""
    moved = False
    for entry in _entries(here):
        name = os.fsencode(entry.name)
        if not entry.is_dir(follow_symlinks=False):
            _unlink(name, here)
            continue
        if _rmdir(name, here):
            continue
        try:
            inner = _open(name, here)  # which also makes one that can be moved: its `..` is written
        except OSError:
            continue  # somebody else's, and what is beside it goes all the same
        try:
            if depth >= _DEEPEST:
                os.rename(name, b".untax-" + secrets.token_hex(12).encode(), src_dir_fd=here, dst_dir_fd=top)
                moved = True
                continue
            moved |= _empty(top, inner, depth + 1)
        finally:
            os.close(inner)
        _rmdir(name, here)
    return moved


def _entries(fd: int) -> list[os.DirEntry[str]]:
    with os.scandir(fd) as found:
        return list(found)


def _open(name: bytes, within: int | None) -> int:
    """Open a directory of ours, and make it one whose entries can be removed."""
    try:
        fd = os.open(name, _DIRECTORY, dir_fd=within)
    except PermissionError:
        closed = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=within)
        try:
            os.chmod(f"/proc/self/fd/{closed}", 0o700)
            return os.open(f"/proc/self/fd/{closed}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        finally:
            os.close(closed)
    if stat.S_IMODE(os.fstat(fd).st_mode) & 0o700 != 0o700:
        os.fchmod(fd, 0o700)
    return fd


def _unlink(name: bytes, within: int | None) -> bool:
    try:
        os.unlink(name, dir_fd=within)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _rmdir(name: bytes, within: int) -> bool:
    try:
        os.rmdir(name, dir_fd=within)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
