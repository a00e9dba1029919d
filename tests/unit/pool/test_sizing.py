"""How many to keep idle: worth what they save, within the budget, where they serve most."""

import heapq
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from untax.core.spec import EnvSpec, Repo
from untax.core.stage import Identity, stages_of
from untax.pool.costs import Costs
from untax.pool.sizing import SURPRISE, Arrivals, Budget, Demand, Rate, hit_rate, plan


def ladder(image, commit=None, setup=()):
    return stages_of(EnvSpec(repo=None if commit is None else Repo("https://example.org/r.git", commit), setup=setup), Identity(image))


IMAGE, REPO = ladder("x"), ladder("x", "c1")
DEPS = [ladder("x", "c1", (f"s{n}",)) for n in range(20)]
OTHER = ladder("y", "c2", ("a",))
SPECS = [IMAGE, REPO, *DEPS[:3], OTHER]
BUILT = {stage.key for spec in [*SPECS, *DEPS] for stage in spec}
PLENTY = Budget(memory_mib=math.inf, entries=10_000, starting=10_000)


def seconds(create=0.005, bind=0.0005, image=20.0, repo=5.0, deps=30.0):
    costs = Costs()
    costs.observe("create", create)
    costs.observe("bind", bind)
    for stage, cost in zip(DEPS[0], (0.0, image, repo, deps), strict=True):
        costs.observe_stage(stage, cost)
    return costs


# ---- how many come ----


@settings(deadline=None)
@given(st.floats(0.01, 200), st.sampled_from([1.0, 1.5, 4.0, 20.0]))
def test_arrivals_have_the_mean_and_the_variance_they_were_given(mean, burst):
    arrivals = Arrivals(mean, burst)
    most = int(mean + 40 * math.sqrt(mean * burst) + 40 * burst)
    chances = [arrivals.at_most(k) - arrivals.at_most(k - 1) for k in range(most)]
    found = sum(k * p for k, p in enumerate(chances))

    assert sum(chances) == pytest.approx(1.0, abs=1e-6)
    assert found == pytest.approx(mean, rel=1e-4)
    assert sum((k - found) ** 2 * p for k, p in enumerate(chances)) == pytest.approx(mean * burst, rel=1e-3)
    assert arrivals.excess(0) == mean
    for count in (1, 3, int(mean)):
        assert arrivals.excess(count) == pytest.approx(sum(max(0, k - count) * p for k, p in enumerate(chances)), abs=1e-4)


def test_so_many_that_their_chances_vanish_are_still_counted():
    assert Arrivals(5000.0).at_most(5000) == pytest.approx(0.5, abs=0.01)
    assert Arrivals(0.0).at_most(0) == 1.0
    assert Arrivals(3.0).at_most(-1) == 0.0


def test_the_hit_rate_is_what_a_pool_of_that_size_would_have():
    """Held against a pool that is played through: one is taken at each arrival and replaced two seconds later."""
    chance = random.Random(5)
    demand = Demand(IMAGE, rate_per_s=3.0)
    for count in (2, 6, 10):
        now, hits, replaced = 0.0, 0, [0.0] * count
        for _ in range(40_000):
            now += chance.expovariate(3.0)
            if replaced[0] <= now:
                hits += 1
            # A miss takes what comes next; either way one more is ordered now, as `state` does.
            heapq.heapreplace(replaced, now + 2.0)
        assert hits / 40_000 == pytest.approx(hit_rate(demand, count, 2.0), abs=0.02)


# ---- what the store does not keep ----


def test_what_the_store_keeps_and_what_stands_idle_complement_each_other():
    """Ten stages are kept, ten are not, and there is room for ten: one each for those that would have to be built, however rare they are."""
    demand = [Demand(spec, rate_per_s=1.0 / (rank + 1), hold_s=0.0, memory_mib=1.0) for rank, spec in enumerate(DEPS)]
    rare = {spec[-1].key for spec in DEPS[10:]}
    sizes = plan(demand, Budget(memory_mib=10.0, entries=100, starting=8), seconds(), present=BUILT, unkept=rare)
    assert sizes == dict.fromkeys(rare, 1)
    assert plan(demand, Budget(memory_mib=10.0, entries=100, starting=8), seconds(), present=BUILT) != sizes

    more = plan(demand, Budget(memory_mib=12.0, entries=100, starting=8), seconds(), present=BUILT, unkept=rare)
    assert {key for key in more if key not in rare} <= {spec[-1].key for spec in DEPS[:10]} and all(more[key] == 1 for key in rare)


def test_one_idle_keeps_a_stage_and_a_second_saves_but_a_creation():
    """Also where they come in bunches, which would otherwise be worth ten builds at a time."""
    demand = [Demand(DEPS[0], rate_per_s=0.1, burst=20.0, memory_mib=1.0), Demand(DEPS[1], rate_per_s=0.1, memory_mib=1.0)]
    unkept = {DEPS[0][-1].key, DEPS[1][-1].key}
    assert plan(demand, Budget(memory_mib=2.0), seconds(), present=BUILT, unkept=unkept) == dict.fromkeys(unkept, 1)


# ---- how often they come ----


def test_a_steady_rate_is_found_and_forgotten():
    rate = Rate(bin_s=1.0, memory_s=30.0)
    for n in range(3000):
        rate.arrived(n * 0.1)
    assert rate.per_s(300.0) == pytest.approx(10.0, rel=0.05)
    assert rate.burst(300.0) == pytest.approx(1.0)

    assert rate.per_s(330.0) == pytest.approx(10.0 / math.e, rel=0.1)
    assert rate.per_s(10_000.0) < 1e-6


def test_random_arrivals_have_no_burst_and_bunches_do():
    chance = random.Random(3)
    alone, bunched, now = Rate(memory_s=600), Rate(memory_s=600), 0.0
    while now < 3000:
        now += chance.expovariate(8.0)
        alone.arrived(now)
        if chance.random() < 1 / 16:
            bunched.arrived(now, 16)

    assert alone.burst(now) == pytest.approx(1.0, abs=0.35)
    assert bunched.per_s(now) == pytest.approx(8.0, rel=0.3)
    assert bunched.burst(now) == pytest.approx(16.0, rel=0.35)


def test_a_burst_is_seen_while_it_lasts():
    rate = Rate()
    for n in range(600):
        rate.arrived(n * 0.5)
    before = rate.per_s(300.0)
    rate.arrived(300.1, 100)

    assert rate.per_s(300.1) > before + 1
    assert rate.burst(300.1) > 10


def test_a_demand_that_has_moved_away_is_no_bunch():
    """Ten a second for half a minute, then nothing: what is left of its rate does not come all at once."""
    rate = Rate(memory_s=60)
    for n in range(300):
        rate.arrived(n * 0.1)

    assert rate.per_s(45.0) > 1
    assert rate.burst(45.0) < 2


def test_the_first_arrivals_count_as_they_are():
    assert (Rate().per_s(0.0), Rate().burst(0.0)) == (0.0, 1.0)
    rate = Rate()
    for n in range(20):
        rate.arrived(100 + n * 0.25)

    assert rate.per_s(105.0) == pytest.approx(4.0)


# ---- how many to keep ----


def test_one_spec_gets_as_many_as_its_hit_rate_needs():
    """Poisson, mean 3 in a refill: P(N ≤ 6) = 0.966 is the first above 0.95, so seven; P(N ≤ 5) = 0.916 for 0.9, so six."""
    for wanted, count in ((0.95, 7), (0.9, 6)):
        demand = Demand(IMAGE, rate_per_s=3.0, refill_s=1.0, hit_rate=wanted)
        assert plan([demand], PLENTY, seconds(), present=BUILT) == {IMAGE[-1].key: count}


def test_bunches_need_more():
    smooth, bunched = (
        plan([Demand(IMAGE, 3.0, burst=burst, refill_s=1.0)], PLENTY, seconds(), present=BUILT)[IMAGE[-1].key] for burst in (1.0, 8.0)
    )
    assert bunched > smooth + 3


def test_what_nobody_asks_for_is_not_kept():
    assert plan([], PLENTY, seconds()) == {}
    assert plan([Demand(IMAGE, 0.0)], PLENTY, seconds()) == {}


def test_where_starting_costs_no_more_than_handing_out_nothing_is_kept():
    assert plan([Demand(IMAGE, 10.0)], PLENTY, seconds(create=0.0005, bind=0.0005), present=BUILT) == {}


def test_leases_take_room_too():
    demand = [Demand(IMAGE, rate_per_s=1.0, hold_s=6.0, refill_s=1.0, memory_mib=100.0)]
    assert plan(demand, Budget(memory_mib=900.0, entries=100, starting=100), seconds(), present=BUILT) == {IMAGE[-1].key: 3}
    assert plan(demand, Budget(memory_mib=600.0, entries=100, starting=100), seconds(), present=BUILT) == {}
    assert plan(demand, Budget(memory_mib=900.0, entries=7, starting=100), seconds(), present=BUILT) == {IMAGE[-1].key: 1}


def test_a_spec_that_is_seldom_asked_for_is_prepared_for_the_day_that_it_is():
    """Demand moves from spec to spec: with room left, more of a rare one are kept than its own past asks for."""
    rare, usual = ladder("rare"), ladder("usual")
    costs = seconds(create=0.4)
    present = [stage.key for stages in (rare, usual) for stage in stages]
    demand = [Demand(usual, 8.0, memory_mib=1.0), Demand(rare, 0.01, memory_mib=1.0)]

    assert plan(demand, Budget(memory_mib=24, starting=100), costs, present=present)[rare[-1].key] >= 2
    assert plan(demand[1:], Budget(memory_mib=24, starting=100), costs, present=present).get(rare[-1].key, 0) <= 1


def test_what_saves_most_is_kept_first():
    """A minute of set-up against a create of milliseconds, at the same rate, with room for two."""
    demand = [Demand(IMAGE, 0.1, memory_mib=50.0), Demand(OTHER, 0.1, memory_mib=50.0)]
    counts = plan(demand, Budget(memory_mib=100.0, entries=100, starting=100), seconds(), present={s.key for s in IMAGE})

    assert counts == {OTHER[-1].key: 2}


def test_many_rare_specs_are_served_by_what_they_share():
    """Twenty specs over one repository, room for three: each alone is asked for too seldom to be kept."""
    demand = [Demand(spec, 0.002, memory_mib=50.0) for spec in DEPS]
    counts = plan(demand, Budget(memory_mib=150.0, entries=100, starting=1000), seconds(image=40.0, repo=20.0, deps=2.0))
    assert counts == {REPO[-1].key: 3}

    frequent = [Demand(DEPS[0], 0.5, memory_mib=50.0), *demand[1:]]
    counts = plan(frequent, Budget(memory_mib=150.0, entries=100, starting=1000), seconds(image=40.0, repo=20.0, deps=2.0))
    assert counts.get(DEPS[0][-1].key, 0) >= 1


def test_a_lower_rung_is_worth_nothing_to_those_whose_layers_are_here():
    """They are created over their layers in milliseconds; to add a stage to an idle sandbox takes longer."""
    demand = [Demand(spec, 5.0, memory_mib=50.0) for spec in DEPS]
    counts = plan(demand, Budget(memory_mib=500.0, entries=100, starting=1000), seconds(), present=BUILT)

    assert counts and set(counts) <= {spec[-1].key for spec in DEPS}


def test_a_machine_that_is_busy_starting_keeps_more():
    demand = [Demand(IMAGE, 3.0, refill_s=1.0)]
    few, many = (plan(demand, Budget(starting=n), seconds(), present=BUILT)[IMAGE[-1].key] for n in (100, 4))

    assert few < many


demands = st.lists(
    st.builds(
        Demand,
        st.sampled_from(SPECS),
        rate_per_s=st.sampled_from([0.0, 0.001, 0.1, 2.0, 30.0]),
        burst=st.sampled_from([1.0, 3.0]),
        hold_s=st.sampled_from([0.0, 1.0]),
        refill_s=st.sampled_from([None, 0.5]),
        memory_mib=st.sampled_from([0.0, 10.0, 64.0]),
        hit_rate=st.sampled_from([0.5, 0.95]),
    ),
    max_size=6,
)
budgets = st.builds(
    Budget, memory_mib=st.sampled_from([0.0, 100.0, 1000.0, math.inf]), entries=st.integers(0, 60), starting=st.integers(1, 64)
)


@settings(max_examples=200, deadline=None)
@given(demands, budgets, st.sets(st.sampled_from(sorted(BUILT))))
def test_a_plan_never_exceeds_its_budget(demand, budget, present):
    counts = plan(demand, budget, seconds(), present=present)
    memory = {}
    for one in demand:
        for stage in one.stages if one.rate_per_s else ():
            memory[stage.key] = max(memory.get(stage.key, 0.0), one.memory_mib)

    assert all(count > 0 for count in counts.values())
    assert set(counts) <= set(memory)
    assert sum(counts.values()) <= budget.entries
    assert sum(count * memory[key] for key, count in counts.items()) <= budget.memory_mib


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from([0.01, 0.2, 1.0, 3.0]), st.sampled_from([0.5, 2.0, 10.0])), min_size=1, max_size=3),
    st.integers(1, 7),
    st.booleans(),
)
def test_no_other_plan_within_the_budget_saves_more(specs, entries, is_here):
    """Unrelated specs: every way to share out so many sandboxes is tried."""
    stages = [ladder(f"image {n}") for n in range(len(specs))]
    costs = seconds()
    for ladder_, (_, cost) in zip(stages, specs, strict=True):
        costs.observe_stage(ladder_[-1], cost)
    demand = [Demand(ladder_, rate, hit_rate=1.0) for ladder_, (rate, _) in zip(stages, specs, strict=True)]
    here = {stage.key for one in stages for stage in one} if is_here else set()
    counts = plan(demand, Budget(entries=entries, starting=10**9), costs, present=here)

    def saved(shares):
        total = 0.0
        for share, one in zip(shares, demand, strict=True):
            cold_s = costs.of("create") + (0.0 if is_here else costs.of_stage(one.stages[-1]))
            surprise = SURPRISE if is_here else 0.0
            arrivals, everybody = Arrivals(one.rate_per_s * cold_s), Arrivals(sum(other.rate_per_s for other in demand) * cold_s)
            used = sum((1 - surprise) * arrivals.more_than(k) + surprise * everybody.more_than(k) for k in range(share))
            total += used * (cold_s - costs.of("bind")) / cold_s
        return total

    best = max(saved(shares) for shares in itertools.product(range(entries + 1), repeat=len(demand)) if sum(shares) <= entries)
    assert saved([counts.get(one.stages[-1].key, 0) for one in demand]) == pytest.approx(best, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(demands)
def test_with_room_enough_everybody_has_the_hit_rate_they_asked_for(demand):
    """As far as an idle sandbox saves anything at all."""
    counts = plan(demand, PLENTY, seconds())
    by_key = {}
    for one in demand:
        by_key.setdefault(one.stages[-1].key, []).append(one)
    for key, same in by_key.items():
        rate = sum(one.rate_per_s for one in same)
        refill_s = max([one.refill_s for one in same if one.refill_s is not None], default=None)
        if rate >= 0.1 and refill_s is not None:
            burst = sum(one.rate_per_s * one.burst for one in same) / rate
            together = Demand(same[0].stages, rate, burst)
            assert hit_rate(together, counts.get(key, 0), refill_s) >= max(one.hit_rate for one in same if one.rate_per_s)
