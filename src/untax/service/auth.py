"""Whose request it is: a token in one of the two places where clients put it."""

from __future__ import annotations

from collections.abc import Iterable

from untax.service.errors import unauthorized
from untax.service.tenants import Tenant, Tenants

_SCHEME = b"bearer "


def token_in(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """`Authorization: Bearer TOKEN`, or `X-API-Key: TOKEN`; None when neither or both are there."""
    found: list[bytes] = []
    for name, value in headers:  # an ASGI server gives the names in lower case
        if name == b"authorization":
            found.append(value[len(_SCHEME) :] if value[: len(_SCHEME)].lower() == _SCHEME else b"")
        elif name == b"x-api-key":
            found.append(value)
    if len(set(found)) != 1:
        return None
    return found[0].decode("latin-1") or None


def authenticate(tenants: Tenants, headers: Iterable[tuple[bytes, bytes]]) -> Tenant:
    """`Refused` with 401 unless the request has one token, and somebody has it."""
    tenant = tenants.find(token_in(headers))
    if tenant is None:
        raise unauthorized()
    return tenant
