"""What the agent of a node is made of: how its engine is to be, and which node it is. No Ray in here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from untax.cluster.scaling import Scaling
from untax.cluster.trust import Identity
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
    """Where every agent listens for other nodes; 0: any, another one after each start."""
    scaling: Scaling = field(default_factory=Scaling)

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
