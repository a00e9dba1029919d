"""The discrete events: a rollout arrives, is placed, becomes ready, is held, and gives its sandbox back.

What happens on a node is what an engine does there. An exact hit is bound. Anything else needs one of the node's starts: stages
that are missing are put in place first, each once however many wait for it, then a sandbox is created, or the parked one is used. A stage
that can travel is built once in the fleet: it comes from a node that has it, and one that another node is building is waited for. At
its end a sandbox is reset and parked again within the node's targets, or destroyed. Parked ones make way for live ones.
Work for one event does not depend on how many nodes or rollouts there are, but for the logarithm of the event queue.
"""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import replace
from heapq import heappop, heappush
from itertools import count

from untax.core.errors import UsageError
from untax.pool.costs import FETCH, Costs
from untax.pool.placement import Choice
from untax.pool.simulation.description import Description
from untax.pool.simulation.node import Job, Node
from untax.pool.simulation.outcome import Outcome, Tally
from untax.pool.simulation.policies import POLICIES, Reach
from untax.pool.simulation.targets import Targets
from untax.pool.simulation.trace import Spec, Trace

_BUILT, _FETCHED, _READY, _GIVEN_BACK, _REFILLED = range(5)


def simulate(description: Description, trace: Trace, policy: str, seed: int) -> Outcome:
    """Play the whole trace. The outcome is the same for the same four arguments."""
    if policy not in POLICIES:
        raise UsageError(f"{policy!r} is not a policy; there are: {', '.join(POLICIES)}")
    return _Run(description, trace, policy, seed).play()


def first_costs(description: Description) -> Costs:
    """What is expected before anything was built: the averages that the description has."""
    operations = description.operations
    by_name = {"create": operations.create_s, "bind": operations.bind_s, "reset": operations.reset_s}
    for name in ("image", "repo", "deps"):
        by_name[name] = description.stages.of(name).seconds
        if (fetch_s := description.fetch_s(name)) is not None:
            by_name[FETCH + name] = fetch_s
    return Costs.from_json(json.dumps({"version": 1, "by_name": by_name, "by_key": {}}))


class _Run:
    def __init__(self, description: Description, trace: Trace, policy: str, seed: int) -> None:
        self._trace = trace
        self._operations = description.operations
        self._costs = first_costs(description)
        self._copies: Counter[str] = Counter()  # on how many nodes each stage lies
        self._awaited: dict[str, list[Job]] = {}  # stages that can travel and are being built, and who waits for each on other nodes
        self._policy_name = policy
        reach = Reach(self._costs, self._copies)
        self._policy = POLICIES[policy](description.fleet.nodes, reach, random.Random(f"policy {seed}"))
        self._specs = [tuple(replace(stage, is_portable=stage.key in trace.fetch_s) for stage in spec) for spec in trace.specs]
        self._targets = Targets(description, trace, self._costs)
        mib_of = {stage.key: description.stages.of(stage.name).mib for spec in trace.specs for stage in spec}
        self._nodes = [Node(number, description.fleet, trace.build_s, mib_of) for number in range(description.fleet.nodes)]
        self._by_name = {f"n{node.number}": node for node in self._nodes}
        self._events: list[tuple[float, int, int, Node, Job | Spec]] = []
        self._numbers = count()
        self._waiting: deque[Job] = deque()
        self._tally = Tally()
        self._to_come = len(trace)
        self._uncounted = int(description.warmup * len(trace))
        self._counts_from_s = trace.arrive_s[self._uncounted]
        self._now_s = 0.0

    def play(self) -> Outcome:
        events, specs = self._events, self._specs
        for place, (arrive_s, number, hold_s) in enumerate(self._trace):
            while events and events[0][0] <= arrive_s:
                self._happen()
            self._now_s = arrive_s
            self._arrive(Job(arrive_s, number, specs[number], hold_s, place >= self._uncounted))
        while self._to_come:
            self._happen()
        return self._tally.outcome(self._policy_name, self._now_s)

    def _happen(self) -> None:
        self._now_s, _, event, node, what = heappop(self._events)
        if event == _GIVEN_BACK:
            assert isinstance(what, Job)
            self._given_back(node, what)
        elif event == _READY:
            assert isinstance(what, Job)
            self._started(node, what)
            self._ready(what, self._now_s)
        elif event in (_BUILT, _FETCHED):
            assert isinstance(what, Job)
            self._in_place(node, what, is_fetched=event == _FETCHED)
        else:
            assert isinstance(what, tuple)
            self._refilled(node, what)

    def _after(self, seconds: float, event: int, node: Node, what: Job | Spec) -> None:
        heappush(self._events, (self._now_s + seconds, next(self._numbers), event, node, what))

    # ---- placing ----

    def _arrive(self, job: Job) -> None:
        # First come, first served: with others waiting there is no room for this one either.
        choice = None if self._waiting else self._policy.choose(job.spec, self._now_s)
        if choice is None:
            self._waiting.append(job)
        else:
            self._place(job, choice)

    def _place(self, job: Job, choice: Choice) -> None:
        node = self._by_name[choice.node]
        job.node, job.kind, job.missing, job.placed_s = node, choice.kind, choice.missing, self._now_s
        node.store.hold(job.spec)
        node.store.use(job.spec, self._now_s)
        if choice.entry is not None:
            self._unpark(node, choice.entry)
        elif not node.has_memory and node.parked:
            self._unpark(node, next(iter(node.parked)))
        node.live += 1
        self._policy.leased(node.number, node.live, node.store.filled)
        if job.missing:
            self._policy.begins(node.number, job.missing, self._now_s)
        if node.live == node.room:
            self._policy.has_room(node.number, False)
        if self._targets.noted(node, job):
            self._refill(node, node.targets)
        if choice.kind == "exact":
            self._ready(job, self._now_s + self._operations.bind_s)
            self._refill(node, (job.spec[-1].key,))
        else:
            self._start(node, job)

    def _unpark(self, node: Node, entry: str) -> None:
        spec = node.parked.pop(entry)
        node.idle[spec[-1].key] -= 1
        node.store.let_go(spec)
        self._policy.take(entry, node.number)

    # ---- starting ----

    def _start(self, node: Node, job: Job) -> None:
        if job.missing and node.lacks(job):
            if node.may_build:
                self._build(node, job)
            else:
                node.builder_queue.append(job)
        elif node.starting < node.starts:
            node.starting += 1
            self._go_on(node, job)
        else:
            node.queue.append(job)
        self._policy.works(node.number, node.load)

    def _build(self, node: Node, job: Job) -> None:
        node.starting += 1
        node.builders += 1
        job.is_builder = True
        self._go_on(node, job)

    def _started(self, node: Node, job: Job | None) -> None:
        """Something has started, or only waits: the next ones may."""
        node.starting -= 1
        if job is not None and job.is_builder:
            job.is_builder = False
            node.builders -= 1
        while node.queue and node.starting < node.starts:
            node.starting += 1
            self._go_on(node, node.queue.popleft())
        while node.builder_queue and node.may_build:
            self._build(node, node.builder_queue.popleft())
        self._policy.works(node.number, node.load)

    def _go_on(self, node: Node, job: Job) -> None:
        """With one of the node's starts: put the next stage that is missing in place, or wait for it, or create."""
        for stage in job.missing:
            if stage.key in node.store:
                continue
            if stage.key in node.building:
                node.building[stage.key].append(job)
                self._started(node, job)  # whoever only waits leaves the start to others
            else:
                node.building[stage.key] = []
                self._obtain(node, job, stage.key)
            return
        operations = self._operations
        self._after(operations.bind_s if job.kind == "partial" else operations.create_s, _READY, node, job)

    def _obtain(self, node: Node, job: Job, key: str) -> None:
        """From a node that has it; once it is there, from one that is building it; otherwise it is built here."""
        fetch_s = self._trace.fetch_s.get(key)
        if fetch_s is not None and self._copies[key] > 0:
            job.comes("fetched")
            self._after(fetch_s, _FETCHED, node, job)
            return
        job.comes("built")
        if fetch_s is None:
            self._after(self._trace.build_s[key], _BUILT, node, job)
        elif key in self._awaited:
            self._awaited[key].append(job)  # and keeps its start: an engine that waits for another has begun
        else:
            self._awaited[key] = []
            self._after(self._trace.build_s[key], _BUILT, node, job)

    def _in_place(self, node: Node, job: Job, *, is_fetched: bool) -> None:
        stage = next(stage for stage in job.missing if stage.key not in node.store)
        key, is_counted = stage.key, self._now_s >= self._counts_from_s
        for gone in node.store.add(stage, self._now_s):
            self._tally.evictions += is_counted
            self._copies[gone.key] -= 1
            self._policy.evicted(node.number, gone)
        self._copies[key] += 1
        if is_fetched:
            self._tally.fetches += is_counted
            self._costs.observe_fetch(stage, self._trace.fetch_s[key])
        else:
            self._tally.builds += is_counted
            self._costs.observe_stage(stage, self._trace.build_s[key])
            for elsewhere in self._awaited.pop(key, ()):
                self._after(self._trace.fetch_s[key], _FETCHED, elsewhere.node, elsewhere)
        self._policy.stored(node.number, stage)
        self._policy.leased(node.number, node.live, node.store.filled)
        waiting = node.building.pop(key)
        self._go_on(node, job)
        for other in waiting:
            other.comes(job.way)
            self._start(node, other)

    # ---- held, and given back ----

    def _ready(self, job: Job, ready_s: float) -> None:
        self._to_come -= 1
        if job.is_counted:
            self._tally.add(job.way if job.kind == "cold" else job.kind, ready_s - job.arrived_s, job.placed_s - job.arrived_s)
        # Reset, or destroyed, when the memory is free again.
        self._after(ready_s - self._now_s + job.hold_s + self._operations.reset_s, _GIVEN_BACK, job.node, job)

    def _given_back(self, node: Node, job: Job) -> None:
        key = job.spec[-1].key
        if node.live == node.room:
            self._policy.has_room(node.number, True)
        node.live -= 1
        self._policy.leased(node.number, node.live, node.store.filled)
        if node.idle.get(key, 0) < node.targets.get(key, 0) and node.has_memory:
            self._park(node, job.spec)
        else:
            node.store.let_go(job.spec)
        if self._waiting:
            choice = self._policy.choose(self._waiting[0].spec, self._now_s)
            if choice is not None:
                self._place(self._waiting.popleft(), choice)

    def _park(self, node: Node, spec: Spec) -> None:
        """What it stands on is held already."""
        key = spec[-1].key
        entry = f"s{next(self._numbers)}"
        node.parked[entry] = spec
        node.idle[key] = node.idle.get(key, 0) + 1
        self._policy.park(entry, node.number, key)

    # ---- refill ----

    def _refill(self, node: Node, keys: Iterable[str]) -> None:
        """Create what the targets want, while there is memory and a start for it that no rollout waits for."""
        for key in keys:
            while node.idle.get(key, 0) < node.targets.get(key, 0):
                if not node.has_memory or node.starting >= node.starts or key not in node.store:
                    break
                spec = self._targets.rungs(key)
                node.store.hold(spec)
                node.idle[key] = node.idle.get(key, 0) + 1
                node.coming += 1
                node.starting += 1
                self._after(self._operations.create_s, _REFILLED, node, spec)

    def _refilled(self, node: Node, spec: Spec) -> None:
        node.coming -= 1
        node.idle[spec[-1].key] -= 1
        if node.has_memory:
            self._park(node, spec)
        else:  # a rollout has taken its room meanwhile
            node.store.let_go(spec)
        self._started(node, None)
        self._refill(node, node.targets)
