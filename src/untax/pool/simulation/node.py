"""One simulated node: room for sandboxes, a store of layers, a cap on what is starting, and its own pool targets."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from untax.core.stage import Stage
from untax.pool.simulation.description import Nodes
from untax.pool.simulation.store import Store
from untax.pool.simulation.trace import Spec


class Job:
    """One rollout on its way."""

    __slots__ = ("arrived_s", "hold_s", "is_builder", "is_counted", "kind", "missing", "node", "placed_s", "spec", "spec_number", "way")

    def __init__(self, arrived_s: float, spec_number: int, spec: Spec, hold_s: float, is_counted: bool) -> None:
        self.arrived_s = arrived_s
        self.placed_s = arrived_s
        self.spec_number = spec_number
        self.spec = spec
        self.hold_s = hold_s
        self.is_counted = is_counted
        self.kind = ""
        self.way = "created"
        """If it is created: what of that it had to wait for (`outcome.WAYS`)."""
        self.node: Node
        self.is_builder = False
        """Whether it has one of the places of builders on its node."""
        self.missing: tuple[Stage, ...] = ()

    def comes(self, way: str) -> None:
        """Something that it lacks is fetched, or built, which says more."""
        if self.way != "built":
            self.way = way


class Node:
    __slots__ = (
        "asked",
        "builder_queue",
        "builders",
        "building",
        "coming",
        "groups",
        "idle",
        "last",
        "live",
        "number",
        "parked",
        "planned_s",
        "queue",
        "room",
        "seen",
        "starting",
        "starts",
        "store",
        "targets",
        "usual",
    )

    def __init__(self, number: int, fleet: Nodes, build_s: Mapping[str, float], mib_of: Mapping[str, int]) -> None:
        self.number = number
        self.room = fleet.room
        self.starts = fleet.starts
        self.store = Store(fleet.store_mib, build_s, mib_of)
        self.live = 0
        """Sandboxes that a rollout has, or that are on their way to one."""
        self.parked: dict[str, Spec] = {}
        """Entry → the rungs in place; the one parked first comes first."""
        self.idle: dict[str, int] = {}
        """How many are parked, and how many are being made for it, by the key of the uppermost stage."""
        self.coming = 0
        self.starting = 0
        self.builders = 0
        """Of those starting, the ones that build stages: half of the starts at most, so that a creation never waits for a build."""
        self.queue: deque[Job] = deque()
        self.builder_queue: deque[Job] = deque()
        """Wait until something else has started, with everything in place and without."""
        self.building: dict[str, list[Job]] = {}
        """Stages being built, and who waits for each besides the one who builds."""
        self.targets: Mapping[str, int] = {}
        """How many of a kind to keep parked, by the key of the uppermost stage."""
        # What `targets` plans with: rollouts placed here since the last plan, by spec; in how many groups; and rates before it.
        self.asked: dict[int, float] = {}
        self.seen = 0
        self.groups = 0
        self.last: Job | None = None
        self.usual: dict[int, float] = {}
        self.planned_s = 0.0

    @property
    def load(self) -> float:
        return (self.starting + len(self.queue) + len(self.builder_queue)) / self.starts

    def lacks(self, job: Job) -> bool:
        """Whether a stage that it wants is not on the node."""
        return any(stage.key not in self.store for stage in job.missing)

    @property
    def may_build(self) -> bool:
        return self.starting < self.starts and self.builders < max(1, self.starts // 2)

    @property
    def has_memory(self) -> bool:
        return self.live + len(self.parked) + self.coming < self.room
