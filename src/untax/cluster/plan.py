"""What the agent of a node is made of: how its engine is to be, and which node it is. No Ray in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from untax import substrates
from untax.cluster.scaling import Scaling
from untax.cluster.trust import Identity
from untax.core.errors import UsageError
from untax.core.spec import require_duration
from untax.engine import Engine
from untax.server.service import LEASE_S
from untax.substrates._host import chosen_state_dir


@dataclass(frozen=True, slots=True)
class Plan:
    """How the engine of every node is made. `state_dir` may have `{node}` in it, which stands for the node's id."""

    name: str
    substrate: str = "namespace"
    state_dir: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    lease_s: float = LEASE_S
    port: int = 0
    """Where every agent listens for other nodes, and for layers at the one after it; 0: any, others after each start."""
    scaling: Scaling = field(default_factory=Scaling)

    def check(self) -> None:
        """`UsageError` for what an engine would refuse on every node alike."""
        if self.substrate == "auto":
            raise UsageError(
                "a fleet has one substrate on all of its nodes, so that layers travel between them: not 'auto' but one of "
                f"{', '.join(substrates.names())}"
            )
        if not isinstance(self.substrate, str):
            raise UsageError(f"substrate must be a substrate's name, not {type(self.substrate).__name__}")
        require_duration("lease_s", self.lease_s)
        # Made and never started. Its wheels are on the nodes, which say so where they are not.
        Engine(self.substrate, state_dir=self.state_dir, **{name: one for name, one in self.options.items() if name != "setup_wheels"})

    @property
    def layers_port(self) -> int:
        return self.port + 1 if self.port else 0

    def state_dir_of(self, node_id: str) -> Path:
        return chosen_state_dir(None if self.state_dir is None else self.state_dir.replace("{node}", node_id[:12]))


@dataclass(frozen=True, slots=True)
class Post:
    """Which node it is, and by what its clients know it."""

    node_id: str
    name: str
    address: str
    token: str = field(repr=False)
    authority: str = field(repr=False)
    """The certificate by which the other agents are known."""
    identity: Identity
