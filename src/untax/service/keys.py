"""Files with secrets in them: written so that nobody else can read them, and read only when nobody else could."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

from untax.core.errors import UsageError

_FILE_MAX = 1 << 20


def new_key() -> str:
    """Of the form that the SDKs of others check for."""
    return f"e2b_{secrets.token_hex(20)}"


def read_secret(path: str | os.PathLike[str]) -> str:
    """The text of a file that only its owner can read; `UsageError` otherwise, with the command that mends it."""
    path = Path(path)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from exc
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode):
            raise UsageError(f"{path} is not a file")
        if facts.st_uid not in (os.geteuid(), 0):
            raise UsageError(f"{path} belongs to user {facts.st_uid}, who could change it: make one of your own")
        if facts.st_mode & 0o077:
            raise UsageError(f"{path} can be read by others: chmod 600 {path}")
        data = os.read(fd, _FILE_MAX + 1)
    finally:
        os.close(fd)
    if len(data) > _FILE_MAX:
        raise UsageError(f"{path} is larger than a file of tokens could be")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise UsageError(f"{path} is not text") from None


def write_secret(path: str | os.PathLike[str], text: str) -> None:
    """Make the file, readable by its owner only from its first moment on; `FileExistsError` when there is one."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def own_key(path: str | os.PathLike[str]) -> str:
    """The key in this file, which is made when it is not there yet, so that clients keep theirs when a server is started anew."""
    path = Path(path)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        write_secret(path, new_key() + "\n")
    except FileExistsError:
        pass
    return read_secret(path).strip()
