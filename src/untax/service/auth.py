"""Whose request it is: a token in one of the two places where clients put it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from untax.service.errors import Refused, unauthorized
from untax.service.tenants import ANYBODY, Tenant, Tenants

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
    if tenant is ANYBODY and not _names_this_machine(headers):
        raise Refused(
            421, "Misdirected", "--any-key hears requests for localhost only: a web page may have led a browser here by a name of its own"
        )
    return tenant


def _names_this_machine(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether `Host` is this machine's own. A name that somebody else's server gives out may lead here as well, and a browser would then let its pages ask."""
    hosts = [value.decode("latin-1").lower() for name, value in headers if name == b"host"]
    if len(hosts) != 1:
        return False
    name = re.sub(r":[0-9]+\Z", "", hosts[0])
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False
