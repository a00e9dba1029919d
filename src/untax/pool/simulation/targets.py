"""How many sandboxes each node keeps parked, planned from the rollouts that were placed there."""

from __future__ import annotations

from untax.pool.simulation.description import Description
from untax.pool.simulation.node import Job, Node
from untax.pool.simulation.trace import Spec, Trace

# A node plans anew whenever it was asked for four times as many sandboxes as it has room for: the demand has been seen by then.
_ROUNDS = 4


class Targets:
    def __init__(self, description: Description, trace: Trace) -> None:
        self._specs = trace.specs
        self._every = _ROUNDS * description.fleet.room
        self._rungs = {spec[at].key: spec[: at + 1] for spec in trace.specs for at in range(len(spec))}

    def rungs(self, key: str) -> Spec:
        """A stage with all that it stands on, lowest first."""
        return self._rungs[key]

    def noted(self, node: Node, job: Job) -> bool:
        """A rollout was placed on a node. Whether its targets are others now."""
        node.asked[job.spec_number] = node.asked.get(job.spec_number, 0) + 1
        node.seen += 1
        if node.seen < self._every:
            return False
        most = sorted(node.asked.items(), key=lambda one: -one[1])[: node.room]
        node.targets = {self._specs[number][-1].key: 1 for number, _ in most}
        node.asked = {}
        node.seen = 0
        return True
