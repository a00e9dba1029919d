"""A simulated fleet: the same outcome for the same seed, nothing above a budget, and each way to ready at its price."""

import json
import os
import random
import subprocess
import sys
from array import array
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from untax.core.errors import UsageError
from untax.core.ledger import Ledger
from untax.core.stage import Stage
from untax.layers import eviction
from untax.pool.costs import Costs
from untax.pool.placement import Fleet, choose
from untax.pool.simulation import POLICIES, Trace, drawn, read_fleet, recorded, simulate
from untax.pool.simulation.description import describe
from untax.pool.simulation.events import _Run
from untax.pool.simulation.ledgers import measured
from untax.pool.simulation.policies import Bag, NodeFirst, OneNode, Reach, StateDistance
from untax.pool.simulation.store import Store

ROOT = Path(__file__).parents[3]
SMALL = {
    "fleet": {"nodes": 10, "memory_mib": 8192, "sandbox_mib": 1024, "store_mib": 30000},
    "stages": {"spread": 0.0},
    "trace": {"rollouts": 3000, "specs": 60, "repos": 30, "images": 5, "hold_s": 60.0},
}


def small(**trace):
    return describe({**SMALL, "trace": {**SMALL["trace"], **trace}}, beside=Path())


def ladder(number: int, *, repo: int = 0) -> tuple[Stage, ...]:
    image = Stage("image", "i", {}, None, is_portable=True)
    middle = Stage("repo", f"r{repo}", {}, "i", is_portable=True)
    return image, middle, Stage("deps", f"d{number}", {}, middle.key, is_portable=True)


def a_trace(*arrivals: tuple[float, int, float]) -> Trace:
    """Of (when, which spec, how long): 20 s, 5 s and 30 s for their stages."""
    specs = tuple(ladder(number) for number in range(1 + max(spec for _, spec, _ in arrivals)))
    build_s = {stage.key: {"image": 20.0, "repo": 5.0, "deps": 30.0}[stage.name] for spec in specs for stage in spec}
    when, which, how_long = zip(*arrivals, strict=True)
    return Trace(specs, build_s, array("d", when), array("l", which), array("d", how_long))


def one_node(**fleet):
    said = {"nodes": 1, "memory_mib": 4, "sandbox_mib": 1, "store_mib": 30000, **fleet}
    return describe({"fleet": said, "stages": {"spread": 0.0}, "trace": {"warmup": 0.0}}, beside=Path())


# ---- what a rollout pays ----


def test_the_first_of_a_spec_builds_every_stage_and_the_next_is_created_over_them():
    outcome = simulate(one_node(), a_trace((0.0, 0, 1.0), (100.0, 0, 1.0)), "state-distance", 1)

    assert outcome.mean_s == pytest.approx((55.005 + 0.005) / 2)
    assert outcome.shares == {"exact": 0.0, "partial": 0.0, "created": 0.5, "fetched": 0.0, "built": 0.5}
    assert outcome.builds == 3


def test_a_spec_with_shared_ancestors_builds_only_what_is_missing():
    outcome = simulate(one_node(), a_trace((0.0, 0, 1.0), (100.0, 1, 1.0)), "random", 1)

    assert outcome.mean_s == pytest.approx((55.005 + 30.005) / 2)
    assert outcome.builds == 4


def test_a_stage_is_built_once_on_a_node_however_many_wait_for_it():
    outcome = simulate(one_node(), a_trace((0.0, 0, 1.0), (1.0, 0, 1.0), (2.0, 0, 1.0)), "random", 1)

    assert outcome.builds == 3
    assert outcome.mean_s == pytest.approx((55.005 + 54.005 + 53.005) / 3, abs=0.01)


def test_a_creation_does_not_wait_for_builds():
    """Builds have half of the starts: two of them are under way, a third waits, and what has its layers is created at once."""
    description = one_node(memory_mib=16, store_mib=60000)
    trace = a_trace((0.0, 0, 1.0), (100.0, 1, 9.0), (100.0, 2, 9.0), (100.0, 3, 9.0), (101.0, 0, 9.0))
    run = _Run(description, trace, "random", 1)
    outcome = run.play()

    times = list(run._tally._ready_s)
    assert min(times) == pytest.approx(0.005)
    assert sorted(times)[1:] == pytest.approx([30.005, 30.005, 55.005, 60.0], abs=0.02)
    assert outcome.builds == 6


def travelling(trace, **seconds):
    """The same, where stages travel: 2 s, 0.5 s and 3 s."""
    took = {"image": 2.0, "repo": 0.5, "deps": 3.0, **seconds}
    return replace(trace, fetch_s={stage.key: took[stage.name] for spec in trace.specs for stage in spec})


def played(description, trace, monkeypatch, *nodes):
    """The times to ready, in the order in which they were, and the outcome; each rollout goes to the node that is said for it."""
    numbers = iter(nodes)

    class Told(NodeFirst):
        def pick(self, _wanted):
            return next(numbers)

    monkeypatch.setitem(POLICIES, "told", Told)
    run = _Run(description, trace, "told", 1)
    outcome = run.play()
    return list(run._tally._ready_s), outcome


def test_what_one_node_has_another_fetches(monkeypatch):
    """Built once in the fleet; the second node pays for each stage that comes, and for its creation."""
    times, outcome = played(one_node(nodes=2), travelling(a_trace((0.0, 0, 1.0), (100.0, 0, 1.0))), monkeypatch, 0, 1)

    assert times == pytest.approx([55.005, 5.505])
    assert (outcome.builds, outcome.fetches) == (3, 3)
    assert (outcome.shares["built"], outcome.shares["fetched"]) == (0.5, 0.5)


def test_what_another_node_is_building_is_waited_for_and_then_fetched(monkeypatch):
    """The third wants what the second is still waiting for: each node has it come for itself, and nobody builds it again."""
    trace = travelling(a_trace((0.0, 0, 1.0), (1.0, 0, 1.0), (30.0, 0, 1.0)))
    times, outcome = played(one_node(nodes=3), trace, monkeypatch, 0, 1, 2)

    # The image is there after 20 s, the repository after 25, the dependencies after 55: each is fetched once it is.
    assert sorted(times) == pytest.approx(sorted([55.005, 57.005, 28.005]))
    assert (outcome.builds, outcome.fetches) == (3, 6)


def test_a_stage_that_comes_is_fetched_once_however_many_wait_for_it_on_that_node(monkeypatch):
    trace = travelling(a_trace((0.0, 0, 1.0), (100.0, 0, 50.0), (101.0, 0, 50.0)))
    times, outcome = played(one_node(nodes=2), trace, monkeypatch, 0, 1, 1)

    assert sorted(times) == pytest.approx(sorted([55.005, 5.505, 4.505]), abs=0.01)
    assert (outcome.builds, outcome.fetches) == (3, 3)


def test_what_no_node_has_any_more_is_built_again(monkeypatch):
    """The store has room for the dependencies of two specs: the third evicts the first's, and there is no other copy."""
    description = describe(
        {
            "fleet": {"nodes": 2, "memory_mib": 1, "sandbox_mib": 1, "store_mib": 5600},
            "stages": {"spread": 0.0, "image": {"mib": 0}, "repo": {"mib": 0}, "deps": {"mib": 2800}},
            "trace": {"warmup": 0.0},
        },
        beside=Path(),
    )
    trace = travelling(a_trace((0.0, 0, 1.0), (100.0, 1, 1.0), (200.0, 2, 1.0), (300.0, 0, 1.0)))
    times, outcome = played(description, trace, monkeypatch, 0, 0, 0, 0)

    assert times == pytest.approx([55.005, 30.005, 30.005, 30.005])
    assert outcome.fetches == 0 and outcome.evictions


def test_placement_counts_what_a_stage_takes_to_come():
    """With one node full, a spec that it has is fetched by another rather than queued; and costs are learnt from what came."""
    description = describe(
        {"fleet": {"nodes": 2, "memory_mib": 1, "sandbox_mib": 1, "store_mib": 30000}, "stages": {"spread": 0.0}, "trace": {"warmup": 0.0}},
        beside=Path(),
    )
    run = _Run(description, travelling(a_trace((0.0, 0, 1000.0), (100.0, 0, 1.0))), "state-distance", 1)
    run.play()

    assert sorted(run._tally._ready_s) == pytest.approx([5.505, 55.005])
    assert [run._costs.of_fetch(stage) for stage in ladder(0)] == [2.0, 0.5, 3.0]


def test_how_long_a_stage_takes_to_come_follows_from_its_size_and_the_link_unless_it_is_said():
    said = {**SMALL, "fleet": {**SMALL["fleet"], "link_mib_s": 500}, "operations": {"arrive_s": 0.1}}
    description = describe(said, beside=Path())
    other = describe({**said, "stages": {"spread": 0.0, "deps": {"fetch_s": 7.0}}}, beside=Path())

    assert [description.fetch_s(name) for name in ("image", "repo", "deps")] == pytest.approx([3.1, 0.5, 2.1])
    assert other.fetch_s("deps") == 7.0
    assert describe(SMALL, beside=Path()).fetch_s("deps") is None
    assert sorted(set(drawn(description, 1).fetch_s.values())) == pytest.approx([0.5, 2.1, 3.1])
    assert drawn(describe(SMALL, beside=Path()), 1).fetch_s == {}


def test_nobody_gets_more_room_than_there_is():
    """With room for one, the second waits until the first has given its own back."""
    description = one_node(memory_mib=1)
    outcome = simulate(description, a_trace((0.0, 0, 100.0), (60.0, 0, 1.0)), "state-distance", 1)

    assert outcome.queue_s == pytest.approx((155.01 - 60.0) / 2, abs=0.01)


@pytest.mark.parametrize("policy", POLICIES)
def test_no_budget_is_ever_passed(policy):
    """Memory, starts, builders and the store, after every event; and a parked sandbox stands on layers that are there."""
    description = small(rollouts=1000, utilisation=0.6, burst=4.0)
    run = _Run(description, drawn(description, 3), policy, 3)
    happen = run._happen
    seen = Counter()

    def watched():
        happen()
        for node in run._nodes:
            seen["parked"] += len(node.parked)
            assert 0 <= node.live <= node.room
            assert node.live + len(node.parked) <= node.room
            assert 0 <= node.builders <= node.starting <= node.starts
            assert node.builders <= node.starts // 2
            assert node.store.mib <= description.fleet.store_mib and not node.store.overdrawn
            assert sum(node.idle.values()) == len(node.parked) + node.coming
            assert all(stage.key in node.store for spec in node.parked.values() for stage in spec)

    run._happen = watched
    outcome = run.play()

    assert outcome.rollouts == 500
    assert seen["parked"] and outcome.shares["exact"] > 0


# ---- policies ----


def test_state_distance_is_nearer_than_image_affinity_and_that_than_random():
    description = small(rollouts=6000, utilisation=0.7)
    trace = drawn(description, 1)
    mean = {policy: simulate(description, trace, policy, 1).mean_s for policy in POLICIES}

    assert mean["state-distance"] < mean["image-affinity"] < mean["random"]


def test_few_nodes_are_ranked_as_in_a_real_fleet():
    """What one is building is waited for there and not built again; and what nobody has is built where there is more room for it."""
    twice = simulate(one_node(nodes=2), a_trace((0.0, 0, 1.0), (10.0, 0, 1.0)), "state-distance", 1)
    specs = tuple(tuple(replace(stage, key=f"{stage.key} of {number}") for stage in ladder(number)) for number in range(2))
    apart = replace(a_trace((0.0, 0, 1.0), (100.0, 1, 1.0)), specs=specs, build_s={stage.key: 1.0 for spec in specs for stage in spec})
    run = _Run(one_node(nodes=2), apart, "state-distance", 1)
    run.play()

    assert (twice.builds, twice.mean_s) == (3, pytest.approx((55.005 + 45.005) / 2))
    assert [len(node.store) for node in run._nodes] == [3, 3]


def test_many_nodes_are_not_each_looked_at_and_the_nearest_is_found_all_the_same():
    description = describe({**SMALL, "fleet": {**SMALL["fleet"], "nodes": 40}}, beside=Path())
    trace = drawn(description, 1)
    mean = {policy: simulate(description, trace, policy, 1).mean_s for policy in ("random", "state-distance")}

    assert type(POLICIES["state-distance"](40, Reach(Costs(), {}), random.Random(1))) is StateDistance
    assert mean["state-distance"] < 0.5 * mean["random"]


def test_where_every_node_holds_everything_the_policy_hardly_matters():
    """The advantage is that of finding what is rare. Without anything rare there is none to have."""
    description = describe(
        {**SMALL, "fleet": {**SMALL["fleet"], "store_mib": 100000}, "trace": {**SMALL["trace"], "rollouts": 8000, "specs": 8, "repos": 4}},
        beside=Path(),
    )
    trace = drawn(description, 1)

    assert simulate(description, trace, "random", 1).mean_s < 0.5
    assert simulate(description, trace, "state-distance", 1).mean_s < 0.5


def test_a_bag_gives_only_what_is_in_it():
    draws = random.Random(1)
    bag, twin = Bag(range(5)), set(range(5))
    for _ in range(500):
        number = draws.randrange(8)
        if draws.random() < 0.5:
            bag.add(number)
            twin.add(number)
        else:
            bag.discard(number)
            twin.discard(number)
        assert set(bag) == twin and len(bag) == len(twin)
        assert not twin or bag.any(draws) in twin


def test_a_fleet_of_one_answers_as_any_fleet_does():
    """What nodes know of themselves is kept in a simpler way, with the same answers."""
    draws = random.Random(3)
    costs = Costs()
    fleet, one = Fleet(), OneNode("n")
    fleet.add_node("n")
    specs = [ladder(number, repo=number % 2) for number in range(4)]
    stages = [stage for spec in specs for stage in spec]
    idle: list[str] = []
    for number in range(400):
        key = draws.choice(stages).key
        match draws.randrange(4):
            case 0:
                idle.append(f"e{number}")
                for each in (fleet, one):
                    each.park(idle[-1], "n", key)
            case 1 if idle:
                entry = idle.pop(draws.randrange(len(idle)))
                for each in (fleet, one):
                    each.take(entry)
            case 2:
                for each in (fleet, one):
                    each.stored("n", key)
            case 3:
                for each in (fleet, one):
                    each.evicted("n", key)
        for each in (fleet, one):
            each.node("n").load = number % 5 / 2
        for spec in specs:
            assert choose(spec, one, costs) == choose(spec, fleet, costs)


def test_targets_are_those_of_the_sizing_code_and_within_the_room():
    description = small(rollouts=1500)
    run = _Run(description, drawn(description, 1), "state-distance", 1)
    run.play()

    planned = [node for node in run._nodes if node.targets]
    assert planned
    assert all(0 < sum(node.targets.values()) <= node.room for node in planned)


# ---- the store ----


def test_the_store_evicts_what_the_real_one_would():
    """Same uses, same costs, same parents: the same stage goes as by `layers/eviction.py`."""
    draws = random.Random(5)
    for _ in range(30):
        specs = [ladder(number, repo=number % 4) for number in range(12)]
        stages = {stage.key: stage for spec in specs for stage in spec}
        build_s = {key: draws.uniform(1, 50) for key in (*stages, "new")}
        store = Store(len(stages), build_s, dict.fromkeys(build_s, 1))
        uses: dict[str, list[float]] = {}
        for key, stage in stages.items():
            assert store.add(stage, 0.0) == []
            uses[key] = [0.0]
        for now_s in sorted(draws.uniform(0, 300_000) for _ in range(60)):
            spec = draws.choice(specs)
            store.use(spec, now_s)
            for stage in spec:
                uses[stage.key].append(now_s)
        (gone,) = store.add(Stage("image", "new", {}, None, is_portable=True), 300_000.0)

        candidates = [
            eviction.Candidate(key, stage.parent, (key,), build_s[key], sum(eviction.aged(1.0, 300_000.0 - at) for at in uses[key]))
            for key, stage in stages.items()
        ]
        assert [gone.key] == eviction.choose(candidates, dict.fromkeys(stages, 1), 1)


def test_what_a_sandbox_stands_on_is_not_evicted():
    first, second = ladder(1), ladder(2)
    sizes = {stage.key: 1 for spec in (first, second) for stage in spec}
    sizes["d3"] = 1
    store = Store(3, dict.fromkeys(sizes, 1.0), sizes)
    for stage in first:
        store.add(stage, 0.0)
    store.hold(first)

    assert store.add(second[-1], 1.0) == [] and store.overdrawn == 1
    store.let_go(first)
    assert first[-1] in store.add(Stage("deps", "d3", {}, "r0", is_portable=True), 2.0)


# ---- traces ----


def test_a_drawn_trace_has_the_load_and_the_popularity_that_were_asked_for():
    description = small(rollouts=40000, zipf=1.0, utilisation=0.5, burst=3.0)
    trace = drawn(description, 7)

    busy = sum(trace.hold_s) / trace.arrive_s[-1] / (description.fleet.nodes * description.fleet.room)
    assert busy == pytest.approx(0.5, rel=0.05)
    asked = Counter(trace.spec)
    assert asked[0] / asked[9] == pytest.approx(10, rel=0.25)
    groups = len(set(trace.arrive_s))
    assert len(trace) / groups == pytest.approx(3.0, rel=0.05)


def test_the_same_seed_gives_the_same_numbers_in_another_process():
    """Nothing follows from the order of a set, which differs between processes."""
    program = (
        "import sys; from pathlib import Path; from untax.pool.simulation import *; from untax.pool.simulation.description import describe;"
        f"d = describe({ {**SMALL, 'trace': {**SMALL['trace'], 'rollouts': 1500}}!r}, beside=Path()); t = drawn(d, 4);"
        "print([simulate(d, t, p, 4) for p in POLICIES])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    said = {
        subprocess.run([sys.executable, "-c", program], env={**environment, "PYTHONHASHSEED": seed}, capture_output=True, check=True).stdout
        for seed in ("1", "2")
    }

    assert len(said) == 1 and said.pop().strip()


def test_another_seed_gives_other_arrivals():
    assert drawn(small(), 1).arrive_s != drawn(small(), 2).arrive_s


# ---- ledgers ----


def a_ledger(*, setup_s: float = 0.0, hold_s: float = 10.0, stages: dict[str, float] | None = None, fault: bool = False, **more) -> str:
    """As the engine writes it, of a rollout that took 4 ms to create and so long otherwise."""
    ledger = Ledger(rollout="r", substrate="namespace", isolation="namespaces", start_ns=0)
    ready = int((0.004 + setup_s) * 1e9)
    ledger.add("create", 0, 3_000_000)
    ledger.add("ready", 3_000_000, 4_000_000)
    ledger.add("setup", 4_000_000, ready)
    ledger.held(ready)
    ledger.released(ready + int(hold_s * 1e9))
    ledger.add("cleanup", ready + int(hold_s * 1e9), ready + int(hold_s * 1e9) + 1_000_000)
    ledger.closed(ready + int(hold_s * 1e9) + 1_000_000)
    ledger.stages = stages or {}
    if fault:
        ledger.fault("lost")
    return json.dumps({**json.loads(ledger.to_json()), **more})


def test_costs_come_from_ledgers_of_rollouts_that_can_be_trusted(tmp_path):
    lines = [a_ledger(setup_s=40, stages={"image": 12.0, "deps": 28.0}), a_ledger(setup_s=20, stages={"deps": 20.0}), "", a_ledger()]
    lines.append(a_ledger(setup_s=900, stages={"deps": 900.0}, fault=True))
    (tmp_path / "ledgers.jsonl").write_text("\n".join(lines) + "\n")

    known = measured(tmp_path / "ledgers.jsonl")
    assert known.stages == {"image": 12.0, "deps": 24.0}
    assert known.operations == {"create_s": pytest.approx(0.004)}
    description = describe({**SMALL, "stages": {"ledgers": "ledgers.jsonl", "image": {"seconds": 1}}}, beside=tmp_path)
    assert (description.stages.image.seconds, description.stages.repo.seconds, description.stages.deps.seconds) == (1.0, 5.0, 24.0)
    assert description.operations.create_s == pytest.approx(0.004)


def test_what_came_from_another_node_is_no_build_and_tells_what_coming_costs(tmp_path):
    lines = [a_ledger(setup_s=30, stages={"image": 9.0, "deps": 20.0}), a_ledger(setup_s=9, stages={"deps": 9.0}, fetched={"deps": 3.0})]
    (tmp_path / "ledgers.jsonl").write_text("\n".join(lines))
    description = describe({**SMALL, "stages": {"ledgers": "ledgers.jsonl"}}, beside=tmp_path)

    assert (description.stages.deps.seconds, description.fetch_s("deps"), description.fetch_s("image")) == (20.0, 3.0, None)


def test_recorded_rollouts_are_replayed_as_they_came(tmp_path):
    wanted = [["base", "b"], ["image", "i"], ["repo", "r"], ["deps", "d"]]
    lines = [a_ledger(asked_at=1000.5, wanted=wanted, hold_s=7), a_ledger(asked_at=1000.0, wanted=wanted[:2], hold_s=3)]
    (tmp_path / "ledgers.jsonl").write_text("\n".join(lines))
    description = describe({**SMALL, "trace": {"ledgers": "ledgers.jsonl", "warmup": 0.0}}, beside=tmp_path)
    trace = recorded(description, 1)

    assert [[stage.key for stage in spec] for spec in trace.specs] == [["i"], ["i", "r", "d"]]
    assert list(trace) == [(0.0, 0, pytest.approx(3.0)), (0.5, 1, pytest.approx(7.0))]
    outcome = simulate(description, trace, "state-distance", 1)
    assert outcome.rollouts == 2 and outcome.builds >= 3


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["{"], "line 1 is not JSON"),
        (["[]"], "no ledger"),
        (['{"untax_ledger": 99}'], "no ledger of version"),
        ([a_ledger()], "cannot be replayed"),
        ([a_ledger(asked_at="soon", wanted=[])], "line 1"),
        ([a_ledger(asked_at=1, wanted=[["roof", "x"]])], "roof"),
        ([a_ledger(asked_at=1, wanted=[["base", "x"]])], "no stage"),
        ([a_ledger(asked_at=1, wanted=[], metrics=3)], "no metrics"),
        ([a_ledger(fault=True)], "can be trusted"),
    ],
)
def test_a_file_of_ledgers_that_cannot_be_replayed_says_why(tmp_path, lines, said):
    (tmp_path / "ledgers.jsonl").write_text("\n".join(lines))
    description = describe({**SMALL, "trace": {"ledgers": "ledgers.jsonl"}}, beside=tmp_path)

    with pytest.raises(UsageError, match=said):
        recorded(description, 1)


# ---- the file ----


def test_the_example_describes_a_fleet():
    description = read_fleet(ROOT / "examples" / "fleet-1000.toml")

    assert description.fleet.nodes == 1000 and description.fleet.room == 16
    assert description.arrivals.rollouts == 1_000_000
    assert (description.arrivals.zipf, description.arrivals.utilisation) == (1.0, 0.7)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"fleet": None}, "no \\[fleet\\]"),
        ({"fleets": {}}, "fleets is not known"),
        ({"fleet": {"nodes": 3}}, "does not say memory_mib"),
        ({"fleet": {**SMALL["fleet"], "nodes": 0}}, "nodes = 0"),
        ({"fleet": {**SMALL["fleet"], "nodes": True}}, "nodes = True"),
        ({"fleet": {**SMALL["fleet"], "memory_mib": 10}}, "holds no sandbox"),
        ({"fleet": {**SMALL["fleet"], "store_mib": 10}}, "cannot hold"),
        ({"stages": {"deps": {"second": 3}}}, "second is not known"),
        ({"stages": {"deps": 3}}, "must be a table"),
        ({"stages": {"deps": {"seconds": float("nan")}}}, "must be a number"),
        ({"stages": {"ledgers": 3}}, "name of a file"),
        ({"stages": {"ledgers": "absent"}}, "absent"),
        ({"operations": {"create_s": -1}}, "create_s = -1"),
        ({"trace": {"rollouts": 1e3}}, "whole number"),
        ({"trace": {"zipf": "1"}}, "zipf"),
        ({"trace": {"warmup": 1}}, "warmup"),
        ({"grid": {"zipf": 1}}, "list of numbers"),
    ],
)
def test_a_description_that_cannot_be_says_why(tmp_path, change, said):
    described = {name: value for name, value in {**SMALL, **change}.items() if value is not None}

    with pytest.raises(UsageError, match=said):
        describe(described, beside=tmp_path)


def test_a_cell_of_the_grid_is_the_same_fleet_with_another_load():
    description = replace(small(), grid=replace(small().grid, rollouts=77))
    cell = description.with_cell(0.5, 0.3)

    assert (cell.arrivals.zipf, cell.arrivals.utilisation, cell.arrivals.rollouts) == (0.5, 0.3, 77)
    assert cell.fleet == description.fleet
