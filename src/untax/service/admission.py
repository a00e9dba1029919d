"""What tenants may ask for by name: images and repositories that the operator allowed, and no more than the machine has.

An embedded engine reads `dir:/srv/root` because its user can. Over HTTP that would be a way to the server's files, and a URL a way to whatever the
server can reach; so both are named at start-up (`--allow-image`, `--allow-repo`) or refused.
"""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass, field

from untax.core.spec import EnvSpec, Limits
from untax.service.errors import Refused


@dataclass(frozen=True, slots=True)
class Admission:
    """Patterns as of a shell; `*` allows everything."""

    images: tuple[str, ...] = ("host",)
    repos: tuple[str, ...] = ()
    networks: bool = True
    """Whether sandboxes may be given a network at all."""
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
        if spec.network != "none" and not self.networks:
            raise Refused(403, "NotAllowed", "no sandbox of this server may have a network")
        self.check_limits(spec.limits)

    def check_limits(self, limits: Limits | None) -> None:
        if limits is None:
            return
        for name in ("cpus", "memory_mib", "disk_mib", "pids"):
            given, most = getattr(limits, name), getattr(self.most, name)
            if given > most:
                raise Refused(400, "UsageError", f"limits.{name} may be {most:g} at most on this server, not {given:g}")
