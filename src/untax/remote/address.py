"""Where a server is: `unix:PATH`. Other transports get other schemes."""

from __future__ import annotations

import os
from pathlib import Path

from untax.core.errors import UsageError
from untax.core.spec import require_text

_PATH_MAX = 107  # bytes of a socket's name in the kernel, less the final NUL


def socket_path(url: str) -> Path:
    """The path in a URL; `UsageError` for another kind of URL."""
    scheme, colon, path = require_text("url", url).partition(":")
    if not colon or scheme != "unix" or not path:
        raise UsageError(f"{url!r} is not the address of a server; write unix:PATH, as `untax serve --socket PATH` prints it")
    return checked_path(path.removeprefix("//"))


def checked_path(path: str | os.PathLike[str]) -> Path:
    found = Path(require_text("socket", os.fsdecode(path))).absolute()
    if len(os.fsencode(found)) > _PATH_MAX:
        raise UsageError(f"{found}: a socket's path has at most {_PATH_MAX} bytes, this one {len(os.fsencode(found))}; name a shorter one")
    return found


def is_trusted(uid: int) -> bool:
    """Whether a process of this user may be at the other end: one's own, or root, who can do everything anyway."""
    return uid in (os.geteuid(), 0)
