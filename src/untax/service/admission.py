"""What tenants may ask for by name: images and repositories that the operator allowed, and no more than the machine has.

An embedded engine reads `dir:/srv/root` because its user can. Over HTTP that would be a way to the server's files, and a URL a way to whatever the
server can reach; so both are named at start-up (`--allow-image`, `--allow-repo`) or refused. So are private and local addresses
(`--allow-network`): it is the server that dials, and from where it stands they are its own.
"""

from __future__ import annotations

import contextlib
import fnmatch
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from untax.channel.egress import Address, Policy
from untax.core.spec import EnvSpec, Limits
from untax.service.errors import Refused


@dataclass(frozen=True, slots=True)
class Admission:
    """Patterns as of a shell; `*` allows everything."""

    images: tuple[str, ...] = ("host",)
    repos: tuple[str, ...] = ()
    networks: bool = True
    """Whether sandboxes may be given a network at all."""
    private: tuple[str, ...] = ()
    """Patterns as of `network`, with or without a port: what sandboxes may reach beside public addresses."""
    most: Limits = field(default_factory=lambda: Limits(cpus=256.0, memory_mib=1 << 20, disk_mib=1 << 20, pids=32_768))

    def check(self, spec: EnvSpec) -> None:
        """`Refused` with 403 for what was not allowed, 400 for more than the most."""
        if not any(fnmatch.fnmatchcase(spec.image, one) for one in self.images):
            raise Refused(
                403, "NotAllowed", f"image {spec.image[:200]!r} is not allowed here; the server's --allow-image names those that are"
            )
        if spec.repo is not None and not any(fnmatch.fnmatchcase(spec.repo.url, one) for one in self.repos):
            raise Refused(
                403, "NotAllowed", f"repository {spec.repo.url[:200]!r} is not allowed here; the server's --allow-repo names those that are"
            )
        self.check_network(spec.network)
        self.check_limits(spec.limits)

    def check_network(self, network: str | Sequence[str] | None) -> None:
        """`Refused` with 403 for any network where there is none, and for private addresses that were not allowed."""
        if network is None or network == "none":
            return
        if not self.networks:
            raise Refused(403, "NotAllowed", "no sandbox of this server may have a network")
        if not Policy(network).is_within(self.reachable(), own_addresses()):
            raise Refused(
                403, "NotAllowed", "private and local addresses are not allowed here; the server's --allow-network names those that are"
            )

    def reachable(self) -> Policy:
        """`UsageError` for what is no pattern."""
        return Policy(tuple(one if one.rpartition(":")[1] and not one.endswith("]") else f"{one}:*" for one in self.private))

    def check_limits(self, limits: Limits | None) -> None:
        if limits is None:
            return
        for name in ("cpus", "memory_mib", "disk_mib", "pids"):
            given, most = getattr(limits, name), getattr(self.most, name)
            if given > most:
                raise Refused(400, "UsageError", f"limits.{name} may be {most:g} at most on this server, not {given:g}")


def own_addresses() -> list[Address]:
    """Of this host, as its kernel says: its services are there, also where the address is a public one."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        address = ""
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            if "|-- " in line:
                address = line.rpartition(" ")[2]
            elif line.endswith("/32 host LOCAL"):
                found.add(address)
    with contextlib.suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            found.add(":".join(line[at : at + 4] for at in range(0, 32, 4)))
    return [ipaddress.ip_address(one) for one in sorted(found)]
