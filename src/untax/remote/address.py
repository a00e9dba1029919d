"""Where a server is: `unix:PATH` on this machine, `http://…` or `https://…` anywhere."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import urlsplit

from untax.core.errors import UsageError
from untax.core.spec import require_text
from untax.remote.web import WebAddress

_PATH_MAX = 107  # bytes of a socket's name in the kernel, less the final NUL


def is_web(url: object) -> bool:
    return isinstance(url, str) and url.partition(":")[0].lower() in ("http", "https")


def web_address(url: str, token: str | None, ca_file: str | os.PathLike[str] | None) -> WebAddress:
    """The parts of an HTTP URL; `UsageError` for what is none. Without a token, that of the environment."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as exc:
        raise UsageError(f"{url!r} is not a URL: {exc}") from exc
    if not parts.hostname or parts.query or parts.fragment or any(c.isspace() or not c.isprintable() for c in url):
        raise UsageError(f"{url!r} is not the address of a server; write http://HOST:PORT, as `untax serve` prints it")
    if parts.username is not None or parts.password is not None:
        raise UsageError("a token does not belong into a URL, where logs would show it: give token=, or set UNTAX_TOKEN")
    token = token if token is not None else os.environ.get("UNTAX_TOKEN")
    if token is not None and (
        not isinstance(token, str) or not token.isascii() or not token.isprintable() or not token.strip() or " " in token
    ):
        raise UsageError("a token is printable ASCII without spaces")
    is_secure = parts.scheme.lower() == "https"
    return WebAddress(
        parts.hostname,
        port or (443 if is_secure else 80),
        is_secure,
        parts.path.rstrip("/"),
        token,
        None if ca_file is None else os.fsdecode(ca_file),
    )


def socket_path(url: str) -> Path:
    """The path in a URL; `UsageError` for another kind of URL."""
    scheme, colon, path = require_text("url", url).partition(":")
    if not colon or scheme != "unix" or not path:
        raise UsageError(f"{url!r} is not the address of a server; write unix:PATH or http://HOST:PORT, as `untax serve` prints it")
    return checked_path(path.removeprefix("//"))


def checked_path(path: str | os.PathLike[str]) -> Path:
    found = Path(require_text("socket", os.fsdecode(path))).absolute()
    if len(os.fsencode(found)) > _PATH_MAX:
        raise UsageError(f"{found}: a socket's path has at most {_PATH_MAX} bytes, this one {len(os.fsencode(found))}; name a shorter one")
    return found


def is_trusted(uid: int) -> bool:
    """Whether a process of this user may be at the other end: one's own, or root, who can do everything anyway."""
    return uid in (os.geteuid(), 0)
