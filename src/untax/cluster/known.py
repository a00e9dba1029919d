"""A node of the cluster as whoever keeps the fleet knows it: what Ray says of it, and what was made of it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from untax.cluster.scaling import Load, Resources
from untax.cluster.terms import Member

HEAD = "node:__internal_head__"
"""The resource by which Ray marks the head."""


class Node:
    """One that lives."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        """As Ray lists it."""
        self.node_id = str(said["NodeID"])
        self.address = str(said["NodeManagerAddress"])
        self.name = str(said.get("NodeName") or self.address)
        self.resources: Resources = dict(said.get("Resources") or {})
        self.is_head = HEAD in self.resources
        self.actor: Any = None
        self.member: Member | None = None
        self.refused: str | None = None
        self.is_draining = False
        self.is_resting = False
        """Whether it was drained for want of use, and not because somebody said so."""
        self.is_waking = False
        self.load: Load | None = None
        """None where there is no agent, or it takes no leases."""
        self.idle_since_s: float | None = None
        self.tending: asyncio.Task[None] | None = None
        self.resting: asyncio.Task[None] | None = None
        self.tried = asyncio.Event()
        """Set once it is known whether there is an agent."""

    @property
    def is_coming(self) -> bool:
        """Whether its agent is about to be there."""
        return self.load is None and (self.is_waking or (self.refused is None and not self.is_draining))
