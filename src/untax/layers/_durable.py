"""Files that are whole after a crash: written aside, synced, renamed."""

from __future__ import annotations

import ctypes
import json
import os
import secrets
from pathlib import Path
from typing import Any

from untax.layers._flock import opened


def syncfs(fd: int) -> None:
    """Everything written to the file system of `fd` is on the disk afterwards, or the error that kept it off is raised."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def fsync_directory(directory: Path) -> None:
    with opened(directory) as fd:
        os.fsync(fd)


def write_synced(path: Path, data: bytes) -> None:
    """Write and sync a file of ours; one that is there is written over."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)


def replace_whole(path: Path, data: bytes) -> None:
    """Put a whole file in place of `path`, or leave everything as it was; killed on the way, it leaves a `.new-…` beside it."""
    fresh = path.with_name(f".new-{secrets.token_hex(8)}")
    try:
        write_synced(fresh, data)
        os.rename(fresh, path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


def read_json(path: Path) -> dict[str, Any] | None:
    """An object that is in a file; None for anything else, or nothing."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
