"""Each substrate in each form that the suites run it in: containers on a Docker and on a Podman of the run's own, SSH to an sshd of its own.

Where engines of our own cannot be started (they need root) a rootless one that listens already serves; without one the checks are skipped.
"""

import os
import shutil
from dataclasses import dataclass
from typing import Any

import pytest

from untax import substrates
from untax.substrates._container_api import find_socket

# What a substrate is run on, where it can be run on several things.
_ENGINES = {"container": ("docker", "podman")}


@dataclass(frozen=True)
class Variant:
    substrate: str
    engine: str | None = None
    runtime: str | None = None
    """Of the engine's, another than its default."""
    is_served: bool = False
    """By an engine in another process, which `untax serve` is."""
    is_hosted: bool = False
    """The same, over HTTP."""
    is_fleet: bool = False
    """By the engines of two Ray nodes."""
    is_afar: bool = False
    """And each over TLS, as from a node of neither."""

    def __str__(self) -> str:
        if self.is_fleet:
            return "fleet-tls" if self.is_afar else "fleet"
        if self.is_served or self.is_hosted:
            return "hosted" if self.is_hosted else "served"
        return "-".join(part for part in (self.substrate, self.engine, self.runtime) if part is not None)


VARIANTS = [
    *(Variant(name, engine) for name in substrates.names() for engine in _ENGINES.get(name, (None,))),
    Variant("container", "docker", "runsc"),
]


def options_of(request: pytest.FixtureRequest, variant: Variant | None = None) -> dict[str, Any]:
    """What `substrates.load` is given besides the name. Starts the engine of the whole run when it is the first to be asked for."""
    chosen = variant or request.param
    if chosen.substrate == "ssh":
        options: dict[str, Any] = request.getfixturevalue("sshd").options
        return options
    engine = chosen.engine
    if engine is None:
        return {}
    if chosen.runtime is not None and shutil.which(chosen.runtime) is None:
        pytest.skip(f"gvisor: no {chosen.runtime} for {engine} to use")
    runtime = {} if chosen.runtime is None else {"runtime": chosen.runtime}
    return {"engine": engine, "socket": socket_of(request, engine), **runtime}


def socket_of(request: pytest.FixtureRequest, engine: str) -> str:
    if os.geteuid() != 0:
        there = find_socket(engine, os.environ)
        return there if there is not None else pytest.skip(f"only root can start {engine} for a test, and no rootless one listens")
    own = request.getfixturevalue(engine)  # skips when it cannot be started
    return str(own.socket if engine == "docker" else own.serve())
