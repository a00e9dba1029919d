"""Files that are whole after a crash: written aside, synced, renamed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from untax.layers._flock import opened


def syncfs(fd: int) -> None:
    """Everything written to the file system of `fd` is on the disk afterwards, or the error that kept it off is raised."""
    if _libc().syncfs(fd) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def begin_writing(fd: int, offset: int, length: int) -> None:
    """Have the kernel begin to write what is in memory of a part of a file, so that there is less to wait for when all is synced. Never fails."""
    call = _sync_file_range()
    if call is not None:
        call(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


_SYNC_FILE_RANGE_WRITE = 2


@functools.cache
def _sync_file_range() -> Callable[[int, int, int, int], object] | None:
    """None in a library without it."""
    call = getattr(_libc(), "sync_file_range", None)
    if call is not None:
        call.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    return call


@contextlib.contextmanager
def syncing(directory: Path) -> Iterator[Callable[[], None]]:
    """Have the file system below written to the disk while the block goes on. What it gives returns when that is done, or raises what kept it off.

    Covers what was written before the block.
    """
    with opened(directory) as fd, ThreadPoolExecutor(1, thread_name_prefix="untax-sync") as pool:
        yield pool.submit(syncfs, fd).result


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


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
