"""Who may use the service, and how much of it.

A tenant is a name, a secret of which only a hash is kept, and limits. Tokens come from a file: either one token and nothing else, or
a table for each tenant:

    [tenant.alice]
    token = "…"              # or token_sha256 = "…", so that the file holds no secret
    leases = 64              # sandboxes held at once
    starting = 16            # of them, those that are not there yet
    actions = 256            # requests at once
    snapshots = 100
    connections = 64         # clients that hold one
    templates = 100          # of E2B's dialect
    builds = 8               # of them, at once
    uploads_mib = 1024       # files for builds of E2B's templates
"""

from __future__ import annotations

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from untax.core.errors import UsageError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
_TOKEN_MIN = 16  # characters; a shorter one can be guessed
TOKEN_MAX = 512


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one tenant may have at once. Above it the answer is 429 with `Retry-After`."""

    leases: int = 4096
    starting: int = 256
    actions: int = 4096
    snapshots: int = 1024
    connections: int = 1024
    """Held ones, and clients that may come back to theirs."""
    templates: int = 1024
    """Of E2B's dialect, snapshots of sandboxes among them."""
    builds: int = 64
    """Of templates, that are asked for and not over."""
    uploads_mib: int = 8192
    """Of files that lie here for builds that are not over."""


@dataclass(frozen=True, slots=True, eq=False)
class Tenant:
    name: str
    allowance: Allowance = field(default_factory=Allowance)
    is_trusted: bool = False
    """As the server's own user is: clients that hold their channels may do whatever an embedded engine would do for them."""

    def __repr__(self) -> str:
        return f"<Tenant {self.name}>"


ANYBODY = Tenant("anybody")
"""Whoever comes with any key at all, where `--any-key` was asked for."""


class Tenants:
    """Finds a tenant by its token, in a time that does not tell how much of the token was right."""

    def __init__(self, known: Iterable[tuple[Tenant, bytes]], *, any_key: bool = False) -> None:
        self._known = tuple(known)
        self._any_key = any_key
        if not self._known and not any_key:
            raise UsageError("a service needs at least one token")

    def __iter__(self) -> Any:
        yield from (tenant for tenant, _ in self._known)
        if self._any_key:
            yield ANYBODY

    def find(self, token: str | None) -> Tenant | None:
        """None for a token that nobody has."""
        given = digest(token or "")
        found: Tenant | None = None
        for tenant, expected in self._known:  # all of them, whichever it is
            if hmac.compare_digest(given, expected):
                found = tenant
        if not token or len(token) > TOKEN_MAX:
            return None
        return found or (ANYBODY if self._any_key else None)


def digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def read_tenants(text: str, *, any_key: bool = False) -> Tenants:
    """What a token file says; `UsageError` with the line of thought that would mend it."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if len(lines) == 1 and "=" not in lines[0] and not lines[0].startswith("["):
        return Tenants([(Tenant("default"), digest(_checked_token("the token", lines[0])))], any_key=any_key)
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        raise UsageError(f"the token file is neither one token nor TOML: {exc}") from exc
    tables = document.get("tenant")
    if not isinstance(tables, dict) or not tables or set(document) != {"tenant"}:
        raise UsageError("the token file must hold one token, or tables [tenant.NAME] with a token in each")
    return Tenants([_read_one(name, table) for name, table in tables.items()], any_key=any_key)


def _read_one(name: str, table: object) -> tuple[Tenant, bytes]:
    if _NAME.fullmatch(name) is None or not isinstance(table, dict):
        raise UsageError(f"[tenant.{name}]: a tenant's name has 1 to 63 letters, digits, '.', '_' or '-', and its table a token")
    rest = dict(table)
    token, hashed = rest.pop("token", None), rest.pop("token_sha256", None)
    if (token is None) == (hashed is None):
        raise UsageError(f"[tenant.{name}]: give either token or token_sha256")
    if token is not None:
        secret = digest(_checked_token(f"[tenant.{name}]: token", token))
    else:
        try:
            secret = bytes.fromhex(hashed)
        except (TypeError, ValueError):
            secret = b""
        if len(secret) != hashlib.sha256().digest_size:
            raise UsageError(f"[tenant.{name}]: token_sha256 must be 64 hexadecimal digits")
    return Tenant(name, _allowance(name, rest)), secret


def _allowance(name: str, given: Mapping[str, Any]) -> Allowance:
    known = {one.name for one in fields(Allowance)}
    for key, value in given.items():
        if key not in known:
            raise UsageError(f"[tenant.{name}]: {key!r} is not one of {', '.join(sorted(known | {'token', 'token_sha256'}))}")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UsageError(f"[tenant.{name}]: {key} must be a whole number above 0, not {value!r}")
    return Allowance(**given)


def _checked_token(what: str, token: object) -> str:
    if (
        not isinstance(token, str)
        or not _TOKEN_MIN <= len(token) <= TOKEN_MAX
        or not token.isascii()
        or not token.isprintable()
        or " " in token
    ):
        raise UsageError(f"{what} must have {_TOKEN_MIN} to {TOKEN_MAX} printable ASCII characters and no space")
    return token
