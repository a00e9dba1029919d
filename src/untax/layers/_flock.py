"""Locks that the kernel drops when their holder dies, on files whose names may be taken away meanwhile."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path


def open_lock(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)


def is_same(fd: int, path: Path) -> bool:
    """Whether a descriptor is of the file that has this name now."""
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False


def take_named(path: Path) -> int:
    """An exclusive lock on the file that has this name now; those before it may have taken the name away with them."""
    while True:
        fd = open_lock(path)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            if is_same(fd, path):
                return fd
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def take_shared(path: Path, *, waits: bool = True) -> int | None:
    """A shared lock on a layer that is in its place; None when there is none. Those who hold it exclusively do so for an instant,
    which is waited for or, unless one `waits`, means None too.
    """
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            if not path.parent.is_dir():
                return None
            fd = open_lock(path)  # somebody removed the file alone
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            os.close(fd)
            return None
        if is_same(fd, path):
            return fd
        os.close(fd)


def try_exclusive(path: Path, *, create: bool = False) -> int | None:
    """An exclusive lock on the file that has this name, when nobody else has any on it."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    if not is_same(fd, path):
        os.close(fd)
        return None
    return fd


@contextlib.contextmanager
def flocked(directory: Path, how: int) -> Iterator[None]:
    """Hold a directory itself locked; waits."""
    with opened(directory) as fd:
        fcntl.flock(fd, how)
        yield


@contextlib.contextmanager
def opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
