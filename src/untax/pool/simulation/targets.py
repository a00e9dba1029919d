"""How many sandboxes each node keeps parked: `sizing.plan`, from the rollouts that were placed there."""

from __future__ import annotations

from heapq import nlargest

from untax.pool import sizing
from untax.pool.costs import Costs
from untax.pool.simulation.description import Description
from untax.pool.simulation.node import Job, Node
from untax.pool.simulation.trace import Spec, Trace

# A node plans anew whenever it was asked for so many times as many sandboxes as it has room for: the demand has been seen by then.
_ROUNDS = 4
_NEWEST = 0.5  # the weight of what was asked for since the last plan, beside all before
_LEAST = 0.05  # rollouts since the last plan, below which a spec is forgotten


class Targets:
    def __init__(self, description: Description, trace: Trace, costs: Costs) -> None:
        fleet = description.fleet
        self._specs = trace.specs
        self._costs = costs
        self._every = _ROUNDS * fleet.room
        self._most = 2 * fleet.room  # specs that are planned for: what is asked for less has no chance of a place
        self._hold_s = sum(trace.hold_s) / len(trace)
        self._sandbox_mib = float(fleet.sandbox_mib)
        self._budget = sizing.Budget(memory_mib=float(fleet.room * fleet.sandbox_mib), entries=fleet.room, starting=fleet.starts)
        self._rungs = {spec[at].key: spec[: at + 1] for spec in trace.specs for at in range(len(spec))}

    def rungs(self, key: str) -> Spec:
        """A stage with all that it stands on, lowest first."""
        return self._rungs[key]

    def noted(self, node: Node, job: Job) -> bool:
        """A rollout was placed on a node. Whether its targets are others now."""
        asked, last = node.asked, node.last
        asked[job.spec_number] = asked.get(job.spec_number, 0.0) + 1.0
        node.seen += 1
        if last is None or last.spec_number != job.spec_number or last.arrived_s != job.arrived_s:
            node.groups += 1
        node.last = job
        if node.seen < self._every or job.placed_s <= node.planned_s:
            return False
        self._plan(node, job.placed_s)
        return True

    def _plan(self, node: Node, now_s: float) -> None:
        usual = node.usual
        for number in {**usual, **node.asked}:
            usual[number] = (1.0 - _NEWEST) * usual.get(number, 0.0) + _NEWEST * node.asked.get(number, 0.0) / (now_s - node.planned_s)
        burst = 2.0 * node.seen / node.groups - 1.0  # variance over mean, for groups of a geometric size
        least = _LEAST / (now_s - node.planned_s)
        node.usual = {number: rate for number, rate in usual.items() if rate >= least}
        demand = []
        for number in nlargest(self._most, node.usual, key=node.usual.__getitem__):
            spec = self._specs[number]
            # What the store has let go of was not worth its room; nor is a sandbox over it.
            if spec[-1].key in node.store:
                demand.append(sizing.Demand(spec, node.usual[number], burst, self._hold_s, memory_mib=self._sandbox_mib))
        node.targets = sizing.plan(demand, self._budget, self._costs, present=node.store)
        node.asked, node.seen, node.groups, node.planned_s = {}, 0, 0, now_s
