"""Names of images as registries and engines write them, and the platform this machine wants. Pure: nothing is looked up.

The grammar is that of the OCI distribution specification and of the `distribution` project behind most registries. It is
also the guard: what passes here has no character that a URL, a header, a shell or a path could take for something else.
"""

from __future__ import annotations

import ipaddress
import platform
import re
from dataclasses import dataclass

from untax.core.errors import UsageError

_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?(?:\.[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?)*|\[[0-9A-Fa-f:.]+\])"
_PART = r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*"
_TAG = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
_DIGEST = r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}"
_REMOTE = re.compile(
    rf"(?:(?P<scheme>https?)://)?(?P<host>{_HOST})(?::(?P<port>[0-9]{{1,5}}))?/(?P<name>{_PART}(?:/{_PART})*)"
    rf"(?::(?P<tag>{_TAG}))?(?:@(?P<digest>{_DIGEST}))?"
)
_LOCAL = re.compile(rf"(?:{_HOST}(?::[0-9]{{1,5}})?/)?{_PART}(?:/{_PART})*(?::{_TAG})?(?:@(?:{_DIGEST}))?|sha256:[0-9a-f]{{64}}")
_DIGEST_ALONE = re.compile(_DIGEST)
_LONGEST_NAME = 255  # what registries and engines accept, host included
_LONGEST = _LONGEST_NAME + 300  # with scheme, port, tag and digest

# What uname calls a processor, as OCI platforms call it.
_ARCHITECTURES = {
    "x86_64": ("amd64", ""),
    "aarch64": ("arm64", "v8"),
    "armv6l": ("arm", "v6"),
    "armv7l": ("arm", "v7"),
    "armv8l": ("arm", "v7"),
    "i386": ("386", ""),
    "i686": ("386", ""),
    "loongarch64": ("loong64", ""),
    "ppc64le": ("ppc64le", ""),
    "riscv64": ("riscv64", ""),
    "s390x": ("s390x", ""),
}


@dataclass(frozen=True, slots=True)
class Reference:
    """An image in a registry. `scheme` is None unless it was written out; a digest makes the tag a comment."""

    host: str
    port: int | None
    name: str
    tag: str
    digest: str | None
    scheme: str | None = None

    @property
    def authority(self) -> str:
        return self.host if self.port is None else f"{self.host}:{self.port}"

    @property
    def wanted(self) -> str:
        """What the registry is asked for: the digest, or else the tag."""
        return self.digest or self.tag

    def __str__(self) -> str:
        return f"{self.authority}/{self.name}" + (f"@{self.digest}" if self.digest else f":{self.tag}")


def parse_remote(text: str) -> Reference:
    """`[http[s]://]host[:port]/name[:tag][@digest]`; anything else is a `UsageError`. The host is never guessed."""
    found = _REMOTE.fullmatch(text) if len(text) <= _LONGEST else None
    if found is None and _PASSWORD.match(text):
        raise UsageError(
            f"registry image {shown_name(text)!r} has a password in it, which a name never holds: log in to the registry (docker login, podman login), or name a "
            "file of credentials in REGISTRY_AUTH_FILE"
        )
    if found is None:
        raise UsageError(
            f"registry image {_shown(text)} is not host[:port]/name[:tag] or host[:port]/name@sha256:…; names are in lower case"
        )
    host, port, name = found["host"], found["port"], found["name"]
    if len(host) + 1 + len(name) > _LONGEST_NAME:
        raise UsageError(f"registry image {_shown(text)} has a name of more than {_LONGEST_NAME} characters")
    if port is not None and not 0 < int(port) < 65536:
        raise UsageError(f"registry image {_shown(text)}: {port} is not a port")
    if host.startswith("["):
        try:
            ipaddress.IPv6Address(host[1:-1])
        except ValueError:
            raise UsageError(f"registry image {_shown(text)}: {host} is not an IPv6 address") from None
    return Reference(host.lower(), int(port) if port else None, name, found["tag"] or "latest", found["digest"], found["scheme"])


def parse_local(text: str, engine: str) -> str:
    """The name or id of an image in a local engine, as it is sent to the engine; anything else is a `UsageError`."""
    if len(text) > _LONGEST or _LOCAL.fullmatch(text) is None:
        raise UsageError(f"{engine} image {_shown(text)} is not name[:tag], name@sha256:… or an image id; names are in lower case")
    return text


def is_digest(text: object) -> bool:
    return isinstance(text, str) and _DIGEST_ALONE.fullmatch(text) is not None


def is_loopback(host: str) -> bool:
    """Whether a host, by name alone, is this machine: nothing is resolved, so no name server can make it so."""
    bare = host.strip("[]")
    try:
        return ipaddress.ip_address(bare).is_loopback
    except ValueError:
        return bare.lower() == "localhost"


@dataclass(frozen=True, slots=True)
class Platform:
    architecture: str
    variant: str = ""
    os: str = "linux"

    def __str__(self) -> str:
        return "/".join(part for part in (self.os, self.architecture, self.variant) if part)

    def fit(self, other: Platform) -> int | None:
        """How well an image for `other` suits this machine, best is 0; None when it would not run."""
        if (other.os, other.architecture) != (self.os, self.architecture):
            return None
        if other.variant == self.variant:
            return 0
        ours, theirs = _level(self), _level(other)
        return ours - theirs if theirs <= ours else None


def this_platform() -> Platform:
    machine = platform.machine()
    architecture, variant = _ARCHITECTURES.get(machine, (machine, ""))
    return Platform(architecture, variant)


def _level(wanted: Platform) -> int:
    """Variants are levels, `v7` above `v6`. One that is not named is the lowest that the architecture has."""
    lowest = {"arm": 7, "arm64": 8}.get(wanted.architecture, 1)  # images for arm that name no variant are v7 by convention
    found = re.fullmatch(r"v([0-9]{1,2})(?:\.[0-9]{1,2})?", wanted.variant)
    return int(found[1]) if found else lowest if not wanted.variant else 99


# Somebody's mistake, as in registry:user:password@host/name. What follows the @ of a digest is never a host.
_PASSWORD = re.compile(r"((?:[A-Za-z0-9+.-]+:)?(?://)?)[^/@]*:[^/@]*@(?!sha256:|sha512:)")


def shown_name(text: str) -> str:
    """A name as it may be shown: whatever may be a password in it is left out."""
    text = _PASSWORD.sub(r"\1…@", text, count=1) if _PASSWORD.match(text) else text
    return text if len(text) <= 80 else text[:80] + "…"


def _shown(text: str) -> str:
    return repr(shown_name(text))
