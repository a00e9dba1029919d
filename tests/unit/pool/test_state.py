"""What a pool orders, whatever happens and in whatever order: one lease for each sandbox, no more than the budget, everyone in turn."""

import math

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, precondition, rule

from untax.core.spec import EnvSpec, Repo
from untax.core.stage import Identity, stages_of
from untax.pool.costs import Costs
from untax.pool.events import (
    Abandoned,
    Asked,
    Bound,
    Closed,
    Create,
    Destroy,
    Died,
    Evicted,
    Failed,
    Gone,
    HandOut,
    Made,
    Pressed,
    Refuse,
    Rejected,
    Resized,
    Returned,
    Stored,
    Target,
    Tick,
    Unkept,
    Withdrawn,
)
from untax.pool.policy import Policy
from untax.pool.state import Pool


def ladder(image, commit=None, setup=()):
    repo = None if commit is None else Repo("https://example.org/r.git", commit)
    return stages_of(EnvSpec(repo=repo, setup=setup), Identity(image))


IMAGE = ladder("x")
REPO = ladder("x", "c1")
DEPS_A = ladder("x", "c1", ("a",))
DEPS_B = ladder("x", "c1", ("b",))
OTHER = ladder("y", "c2", ("a",))
SPECS = [IMAGE, REPO, DEPS_A, DEPS_B, OTHER]
MIB = {spec[-1].key: mib for spec, mib in zip(SPECS, [10.0, 20.0, 30.0, 50.0, 40.0], strict=True)}


# ---- one step at a time ----


def ready(policy=None, *, stored=SPECS):
    """A pool whose node has the layers of these specs, and whose starts are quick."""
    pool = Pool(policy or Policy())
    for stages in stored:
        for stage in stages:
            assert pool.handle(Stored(0.0, stage.key)) == []
    return pool


def ask(pool, ticket, stages=DEPS_A, *, now=0.0, deadline=math.inf, mib=0.0):
    return pool.handle(Asked(now, ticket, stages, deadline, mib))


def lease(pool, ticket, stages=DEPS_A, *, now=0.0, entry=None):
    """Ask, make what is ordered, bind; gives the entry's name."""
    orders = ask(pool, ticket, stages, now=now)
    if isinstance(orders[0], Create):
        orders = pool.handle(Made(now, orders[0].order, entry or f"e-{ticket}"))
    (given,) = orders
    assert isinstance(given, HandOut) and given.ticket == ticket
    assert pool.handle(Bound(now, ticket)) == []
    return given.entry


def kinds(orders):
    return [type(order) for order in orders]


def warmed(pool, count=1, stages=DEPS_A, *, now=0.0, may_build=True):
    """A pool with so many idle."""
    orders = pool.handle(Resized(now, (Target(stages, count, 0.0, may_build),)))
    while orders:
        made = [pool.handle(Made(now, order.order, f"w{order.order}")) for order in orders if isinstance(order, Create)]
        orders = [order for several in made for order in several]
    assert pool.idle_at(stages[-1].key) == count


def test_a_hit_is_handed_out_at_once_and_what_else_is_due_comes_with_its_binding():
    pool = ready()
    warmed(pool)
    (given,) = ask(pool, "t", now=1.0)
    assert (given.kind, given.waited_s, given.missing, given.order) == ("exact", 0.0, (), None)
    assert kinds(pool.handle(Bound(1.0, "t"))) == [Create]


def test_who_already_waits_goes_before_a_hit():
    pool = ready(Policy(entries=1))
    first = lease(pool, "a")
    assert ask(pool, "b", now=1.0) == []
    (given,) = pool.handle(Returned(2.0, first, clean=True))
    assert given.ticket == "b"
    assert ask(pool, "c", now=2.0) == []


def test_a_refill_waits_until_the_first_action_is_over_unless_half_of_them_are_gone():
    pool = ready(Policy(calm_s=0.5))
    warmed(pool, 4)
    ask(pool, "a", now=1.0)
    assert pool.handle(Bound(1.0, "a")) == []
    assert pool.next_due_s() == 1.5
    assert kinds(pool.handle(Tick(1.5))) == [Create]
    for number in range(3):
        ask(pool, f"b{number}", now=2.0)
    assert Create in kinds(pool.handle(Bound(2.0, "b0")))


def test_a_refill_for_what_is_given_ahead_waits_for_nothing():
    """Nobody is about to act in it."""
    pool = ready(Policy(calm_s=0.5))
    warmed(pool, 4)
    assert kinds(pool.handle(Asked(1.0, "a", DEPS_A, math.inf, is_ahead=True))) == [HandOut]
    assert kinds(pool.handle(Bound(1.0, "a"))) == [Create]


def test_a_creation_that_was_broken_off_is_no_failure():
    pool = ready()
    (order,) = ask(pool, "a")
    pool.handle(Withdrawn(0.0, "a"))
    assert not pool.is_wanted(order.order)
    assert pool.handle(Abandoned(0.0, order.order)) == []
    assert pool.size == 0
    assert kinds(ask(pool, "b")) == [Create]  # nothing is held back


def test_a_creation_is_wanted_while_somebody_else_waits_for_it():
    pool = ready(Policy(entries=1))
    (order,) = ask(pool, "a")
    ask(pool, "b")
    pool.handle(Withdrawn(0.0, "a"))
    assert pool.is_wanted(order.order)


def test_a_full_store_takes_the_longest_idle_that_keeps_layers_in_it():
    pool = ready()
    warmed(pool, 2)
    (gone,) = pool.handle(Pressed(1.0))
    assert isinstance(gone, Destroy)
    assert kinds(pool.handle(Gone(1.0, gone.entry))) == []  # and is not made again at once
    assert Create in kinds(pool.handle(Tick(pool.next_due_s())))
    assert ready().handle(Pressed(0.0)) == []


def test_room_is_made_by_what_the_store_keeps_before_what_is_all_that_keeps_a_stage():
    """The one idle at an unkept stage has waited longest, and would take its layers with it."""
    pool = ready(Policy(entries=2))
    pool.handle(Unkept(0.0, frozenset({DEPS_A[-1].key})))
    pool.handle(Resized(0.0, (Target(DEPS_A, 1), Target(DEPS_B, 1))))
    for now, order in enumerate((1, 2)):
        pool.handle(Made(float(now), order, f"w{order}"))
    at_a = pool.at_once(DEPS_A, 0.0).id
    (gone,) = ask(pool, "t", OTHER, now=5.0)
    assert isinstance(gone, Destroy) and gone.entry != at_a

    pool.handle(Unkept(6.0, frozenset()))  # from here on, the one that is idle for longest
    (given,) = pool.handle(Gone(6.0, gone.entry))
    assert isinstance(given, Create)
    (gone,) = ask(pool, "u", OTHER, now=6.0)
    assert gone.entry == at_a


def test_what_was_evicted_is_not_built_to_be_kept_ready():
    pool = ready()
    warmed(pool, 2, may_build=False)
    pool.handle(Evicted(1.0, DEPS_A[-1].key))
    ask(pool, "a", now=1.0)
    assert pool.handle(Bound(1.0, "a")) == []
    pool.handle(Stored(2.0, DEPS_A[-1].key))
    assert kinds(pool.handle(Tick(2.0))) in ([], [Create])


def test_where_a_stage_cannot_be_added_to_a_live_sandbox_an_idle_ancestor_is_left_alone_while_there_is_room():
    for in_place, wanted in ((True, HandOut), (False, Create)):
        pool = ready(Policy(upgrades_in_place=in_place), stored=[REPO])
        warmed(pool, 1, REPO)
        assert kinds(ask(pool, "a", DEPS_A, now=1.0))[0] is wanted
    full = ready(Policy(entries=1, upgrades_in_place=False), stored=[REPO])
    warmed(full, 1, REPO)
    (given,) = ask(full, "a", DEPS_A, now=1.0)
    assert (given.kind, [stage.name for stage in given.missing]) == ("partial", ["deps"])


def test_dead_ones_that_were_idle_before_a_ticket_came_cost_it_no_attempt():
    pool = ready(Policy(tries=1))
    warmed(pool, 3)
    orders = ask(pool, "a", now=1.0)
    for _ in range(3):
        assert HandOut in kinds(orders)
        orders = pool.handle(Rejected(1.0, "a", "dead"))
    assert not [order for order in orders if isinstance(order, Refuse)]


def test_the_first_lease_is_cold_and_the_next_one_of_the_same_sandbox_exact():
    pool = ready()
    (create,) = ask(pool, "t1")
    (cold,) = pool.handle(Made(0.25, create.order, "e1"))
    pool.handle(Bound(0.25, "t1"))
    pool.handle(Returned(1.0, "e1", clean=True))
    (exact,) = ask(pool, "t2", now=2.0)

    assert (cold.kind, cold.waited_s, cold.order) == ("cold", 0.25, create.order)
    assert (exact.kind, exact.entry, exact.waited_s, exact.order, exact.missing) == ("exact", "e1", 0.0, None, ())


def test_a_dirty_sandbox_is_destroyed_and_never_handed_out():
    pool = ready()
    entry = lease(pool, "t1")

    assert kinds(pool.handle(Returned(1.0, entry, clean=False))) == [Destroy]
    assert kinds(ask(pool, "t2", now=1.0)) == [Create]


def test_single_use_means_that_a_clean_one_is_destroyed_too():
    pool = ready(Policy(reuse="single"))

    assert kinds(pool.handle(Returned(1.0, lease(pool, "t1"), clean=True))) == [Destroy]


def test_an_upgraded_sandbox_is_parked_only_where_it_is_known_to_stand():
    """X22, Q1. After a reset of an upgraded sandbox only the driver knows which stage is uppermost."""
    for at, expected in [(None, [Destroy]), (DEPS_A[-1].key, []), (IMAGE[-1].key, [])]:
        pool = ready(stored=[])
        parked = lease(pool, "t1", IMAGE)
        pool.handle(Returned(1.0, parked, clean=True))
        (partial,) = ask(pool, "t2", DEPS_A, now=1.0)
        assert (partial.kind, partial.entry, [stage.name for stage in partial.missing]) == ("partial", parked, ["repo", "deps"])
        pool.handle(Bound(2.0, "t2"))

        assert kinds(pool.handle(Returned(3.0, parked, clean=True, at=at))) == expected
        if at is not None:
            stages = DEPS_A if at == DEPS_A[-1].key else IMAGE
            (again,) = ask(pool, "t3", stages, now=3.0)
            assert (again.kind, again.entry) == ("exact", parked)


def test_a_dead_idle_sandbox_is_replaced_and_a_dead_leased_one_destroyed_when_it_comes_back():
    pool = ready()
    entry = lease(pool, "t1")
    assert pool.handle(Died(0.5, entry)) == []
    assert kinds(pool.handle(Returned(1.0, entry, clean=True))) == [Destroy]
    pool.handle(Gone(1.0, entry))

    idle = lease(pool, "t2", now=2.0)
    (refill,) = pool.handle(Resized(2.0, (Target(DEPS_A, 1),)))
    pool.handle(Made(2.5, refill.order, "r1"))
    pool.handle(Returned(2.5, idle, clean=True))

    orders = pool.handle(Died(3.0, "r1"))
    assert kinds(orders) == [Destroy]


def test_one_that_is_found_dead_at_hand_out_is_replaced_before_its_holder_sees_it():
    """X22. As many as there are, and the ticket keeps its place."""
    pool = ready(Policy(tries=1))
    entries = [lease(pool, f"t{i}", now=i) for i in range(5)]
    for entry in entries:
        pool.handle(Returned(9.0, entry, clean=True))
    orders = ask(pool, "first", now=10.0)
    orders = [order for order in orders if isinstance(order, HandOut)]
    seen = set()
    while isinstance(orders[-1], HandOut):
        seen.add(orders[-1].entry)
        orders = pool.handle(Rejected(10.0, "first", "it is dead"))
        assert kinds(orders)[0] is Destroy

    assert seen == set(entries)
    assert kinds(orders) == [Destroy, Create] and orders[-1].ticket == "first"


def test_who_came_first_gets_what_is_made_first():
    pool = ready()
    (first,) = ask(pool, "t1")
    (second,) = ask(pool, "t2", now=0.1)

    (given,) = pool.handle(Made(0.2, second.order, "e2"))
    assert (given.ticket, given.entry) == ("t1", "e2")
    (given,) = pool.handle(Made(0.3, first.order, "e1"))
    assert (given.ticket, given.entry) == ("t2", "e1")


def test_a_stage_is_built_once_for_all_that_wait_for_it():
    """Q10."""
    pool = ready(Policy(entries=256, first_starting=64), stored=[])
    orders = [order for i in range(128) for order in ask(pool, f"t{i}")]
    assert kinds(orders) == [Create]

    orders = pool.handle(Made(30.0, orders[0].order, "e0"))
    assert kinds(orders) == [HandOut] + [Create] * 64
    assert all(not order.missing for order in orders[1:])


def test_specs_that_share_nothing_do_not_wait_for_each_other():
    pool = ready(stored=[])

    assert kinds(ask(pool, "t1", ladder("x"))) == [Create]
    assert kinds(ask(pool, "t2", ladder("y"))) == [Create]


def test_what_becomes_stored_during_a_build_is_used_by_the_next_one_at_once():
    """The image is there while the set-up of the first spec still runs: the second one's need not wait for that."""
    pool = ready(stored=[])
    ask(pool, "t1", DEPS_A)
    assert ask(pool, "t2", DEPS_B) == []
    for stage in REPO[:-1]:
        assert pool.handle(Stored(1.0, stage.key)) == []
    (create,) = pool.handle(Stored(2.0, REPO[-1].key))

    assert (create.ticket, create.start, create.missing) == ("t2", REPO[-1], DEPS_B[-1:])


def test_without_shared_stages_each_sandbox_is_built_for_itself():
    pool = ready(Policy(shares_stages=False, first_starting=8), stored=[])
    orders = [order for i in range(8) for order in ask(pool, f"t{i}")]

    assert kinds(orders) == [Create] * 4  # the other half of the cap is for what is quick


def test_long_builds_leave_places_for_quick_starts():
    pool = ready(Policy(first_starting=2), stored=[IMAGE])
    ask(pool, "slow", DEPS_A)

    assert kinds(ask(pool, "slow too", OTHER)) == []
    assert kinds(ask(pool, "quick", IMAGE)) == [Create]


def test_a_build_that_cannot_succeed_fails_everyone_who_waits_for_it_at_once():
    pool = ready(stored=[REPO])
    (create,) = ask(pool, "t1")
    assert ask(pool, "t2") == []
    assert kinds(ask(pool, "t3", REPO)) == [Create]
    orders = pool.handle(Failed(1.0, create.order, "pip exited with 1", is_retryable=False, stage=DEPS_A[-1].key))

    assert [(order.ticket, order.reason) for order in orders] == [("t1", "failed"), ("t2", "failed")]
    assert "pip exited with 1" in orders[0].why


def test_a_start_that_failed_is_tried_again_later_and_not_for_ever():
    pool = ready(Policy(tries=3))
    (create,) = ask(pool, "t1")
    for _ in range(2):
        assert pool.handle(Failed(pool.next_due_s() if pool.next_due_s() < math.inf else 0.0, create.order, "no pids left")) == []
        (create,) = pool.handle(Tick(pool.next_due_s()))
    (refused,) = pool.handle(Failed(9.0, create.order, "no pids left"))

    assert isinstance(refused, Refuse) and "no pids left" in refused.why and "3" in refused.why


def test_a_deadline_refuses_with_what_was_in_the_way():
    pool = ready(Policy(entries=1))
    lease(pool, "t1")
    assert ask(pool, "t2", deadline=5.0) == []
    assert pool.next_due_s() <= 5.0
    assert pool.handle(Tick(4.9)) == []
    (refused,) = pool.handle(Tick(5.0))

    assert (refused.ticket, refused.reason) == ("t2", "deadline")
    assert "1 sandboxes of at most 1" in refused.why


def test_a_deadline_that_has_passed_gets_what_is_idle_or_a_refusal():
    pool = ready()
    assert kinds(ask(pool, "t0", now=1.0, deadline=1.0)) == [Refuse]
    entry = lease(pool, "t1", now=1.0)
    pool.handle(Returned(2.0, entry, clean=True))

    assert kinds(ask(pool, "t2", now=3.0, deadline=3.0)) == [HandOut]
    assert pool.handle(Tick(4.0)) == []  # binding what was handed out is not cut off


@pytest.mark.parametrize("answer", ["returned", "rejected"])
def test_an_upgrade_is_cut_off_at_the_deadline(answer):
    pool = ready(stored=[])
    entry = lease(pool, "t1", IMAGE)
    pool.handle(Returned(1.0, entry, clean=True))
    assert kinds(ask(pool, "t2", DEPS_A, now=1.0, deadline=9.0)) == [HandOut]
    (refused,) = pool.handle(Tick(9.0))
    assert (refused.ticket, refused.reason, pool.starting) == ("t2", "deadline", 0)

    orders = pool.handle(Returned(9.1, entry, clean=False) if answer == "returned" else Rejected(9.1, "t2", "cut off"))
    assert kinds(orders) == [Destroy]
    assert pool.handle(Gone(9.2, entry)) == [] and pool.size == 0


def test_room_is_made_by_destroying_what_is_idle_and_used_only_when_it_is_free():
    pool = ready(Policy(entries=1))
    entry = lease(pool, "t1", IMAGE)
    pool.handle(Returned(1.0, entry, clean=True))
    pool.handle(Evicted(1.0, DEPS_A[1].key))

    orders = ask(pool, "t2", OTHER, now=2.0)
    assert [type(order) for order in orders] == [Destroy]
    assert pool.handle(Tick(3.0)) == []
    (create,) = pool.handle(Gone(3.5, entry))
    assert create.ticket == "t2"


def test_room_that_was_made_for_one_is_not_taken_by_the_next():
    """A large ticket is not starved by many small ones."""
    pool = ready(Policy(memory_mib=100.0))
    small = []
    for i in range(4):
        (create,) = ask(pool, f"s{i}", IMAGE, mib=25.0)
        pool.handle(Made(0.0, create.order, f"e{i}"))
        pool.handle(Bound(0.0, f"s{i}"))
        small.append(f"e{i}")
    assert ask(pool, "large", OTHER, now=1.0, mib=75.0) == []
    for entry in small[:3]:
        assert ask(pool, f"after {entry}", REPO, now=2.0, mib=25.0) == []
        orders = pool.handle(Returned(5.0, entry, clean=False))
        assert kinds(orders) == [Destroy]
        orders = pool.handle(Gone(5.0, entry))
    assert [order.ticket for order in orders] == ["large"]


def test_a_ticket_that_can_never_fit_is_refused_at_once():
    (refused,) = ask(Pool(Policy(memory_mib=100.0)), "t", mib=101.0)

    assert refused.reason == "too_large" and "101" in refused.why


def test_refills_come_after_tickets_and_leave_a_place_free():
    pool = ready(Policy(first_starting=4, most_starting=4))
    orders = pool.handle(Resized(0.0, (Target(REPO, 10),)))
    assert [order.ticket for order in orders] == [None] * 3
    (create,) = ask(pool, "t1", DEPS_A)
    assert create.ticket == "t1"

    assert ask(pool, "t2", DEPS_B) == []
    given, next_one = pool.handle(Made(1.0, create.order, "e1"))
    assert (type(given), given.ticket) == (HandOut, "t1")
    assert (type(next_one), next_one.ticket) == (Create, "t2")


def test_a_refill_that_is_under_way_serves_a_ticket_that_comes_meanwhile():
    """No second sandbox is started for it, and it counts as warm."""
    pool = ready()
    (refill,) = pool.handle(Resized(0.0, (Target(REPO, 1),)))
    orders = ask(pool, "t1", REPO, now=0.1)
    assert [order.ticket for order in orders] == [None]  # what it will take is replaced
    (given,) = pool.handle(Made(0.2, refill.order, "r1"))

    assert (given.ticket, given.entry, given.kind) == ("t1", "r1", "exact")


def test_what_is_being_made_is_said_to_come_while_nobody_waits_for_it():
    pool = ready()
    assert not pool.is_coming(REPO)
    (refill,) = pool.handle(Resized(0.0, (Target(REPO, 1),)))
    assert pool.is_coming(REPO) and not pool.is_coming(IMAGE)
    pool.handle(Resized(0.0, ()))
    ask(pool, "t1", REPO, now=0.1)
    assert not pool.is_coming(REPO)
    pool.handle(Withdrawn(0.2, "t1"))
    assert pool.is_coming(REPO)
    pool.handle(Made(0.3, refill.order, "r1"))
    assert not pool.is_coming(REPO)  # it is there


def test_a_target_of_zero_during_leases_destroys_nothing_that_is_leased():
    """Q6."""
    pool = ready(Policy(linger_s=0.0))
    orders = pool.handle(Resized(0.0, (Target(DEPS_A, 2),)))
    for n, order in enumerate(orders):
        pool.handle(Made(0.0, order.order, f"e{n}"))
    (given, *_) = ask(pool, "t1")
    pool.handle(Bound(0.0, "t1"))
    orders = pool.handle(Resized(1.0, ()))
    assert [type(order) for order in orders] == [Destroy] and orders[0].entry != given.entry

    orders = pool.handle(Returned(2.0, given.entry, clean=True))
    assert kinds(orders) == [Destroy]


def test_what_lingers_gives_way_to_what_is_below_its_target():
    pool = ready(Policy(entries=2))
    for entry in (lease(pool, "t1"), lease(pool, "t2")):
        pool.handle(Returned(1.0, entry, clean=True))
    orders = pool.handle(Resized(2.0, (Target(DEPS_A, 1), Target(OTHER, 1))))
    assert [type(order) for order in orders] == [Destroy]
    (create,) = pool.handle(Gone(2.0, orders[0].entry))

    assert (create.ticket, create.stages) == (None, OTHER)
    assert pool.handle(Tick(3.0)) == []


def test_a_claim_ends_with_the_ticket_that_made_it():
    pool = ready(Policy(memory_mib=100.0, linger_s=math.inf))
    (create,) = ask(pool, "t1", mib=60.0)
    pool.handle(Made(0.0, create.order, "e1"))
    pool.handle(Bound(0.0, "t1"))
    assert ask(pool, "large", OTHER, mib=60.0) == []
    assert pool.handle(Resized(1.0, (Target(REPO, 1, 10.0),))) == []

    assert kinds(pool.handle(Withdrawn(2.0, "large"))) == [Create]


def test_a_wait_says_what_for():
    pool = ready(Policy(entries=1))
    entry = lease(pool, "t1")
    ask(pool, "t2", now=1.0)
    (given,) = pool.handle(Returned(4.0, entry, clean=True))
    assert (given.waited_s, given.waited_for) == (3.0, "room")

    pool = ready(stored=[])
    (create,) = ask(pool, "t1")
    ask(pool, "t2")
    _, create = pool.handle(Made(30.0, create.order, "e1"))
    (given,) = pool.handle(Made(30.5, create.order, "e2"))
    assert (given.ticket, given.kind, given.waited_for) == ("t2", "cold", "the sandbox that was made for it")


def test_what_nothing_is_left_of_is_forgotten():
    """An engine that lives for months sees specs without number."""
    pool = ready(Policy(linger_s=0.0), stored=[])
    for n in range(1000):
        for create in pool.handle(Asked(float(n), f"w{n}", IMAGE, n + 3600.0)):
            pool.handle(Failed(float(n), create.order, "no"))
        pool.handle(Withdrawn(float(n), f"w{n}"))
        entry = lease(pool, f"t{n}", ladder(f"image {n}"), now=float(n))
        pool.handle(Returned(n + 0.1, entry, clean=False))
        pool.handle(Gone(n + 0.2, entry))
        pool.handle(Tick(n + 0.3))

    assert len(pool.standings()) <= 130
    assert pool.next_due_s() > 1000 and len(pool._line._deadlines) < 100


def test_what_is_above_the_target_lingers_and_goes():
    pool = ready(Policy(linger_s=60.0))
    entry = lease(pool, "t1")
    assert pool.handle(Returned(1.0, entry, clean=True)) == []
    assert pool.handle(Tick(60.9)) == []
    assert pool.next_due_s() == 61.0

    assert kinds(pool.handle(Tick(61.0))) == [Destroy]


def test_a_flood_of_one_spec_delays_another_by_its_share_only():
    pool = ready(Policy(entries=4))
    orders = [order for i in range(1000) for order in ask(pool, f"flood {i}", DEPS_A, now=i * 1e-6)]
    orders += ask(pool, "alone", DEPS_B, now=0.001)
    entries, now, handed = 0, 0.001, []
    for _ in range(100):
        now += 0.01
        following = []
        for order in orders:
            match order:
                case Create():
                    entries += 1
                    following += pool.handle(Made(now, order.order, f"e{entries}"))
                case HandOut():
                    handed.append(order.ticket)
                    pool.handle(Bound(now, order.ticket))
                    following += pool.handle(Returned(now, order.entry, clean=True))
                case Destroy():
                    following += pool.handle(Gone(now, order.entry))
        orders = following + pool.handle(Tick(now))
        if "alone" in handed:
            break

    assert "alone" in handed
    assert len(handed) < 40
    floods = [ticket for ticket in handed if ticket != "alone"]
    assert floods == [f"flood {i}" for i in range(len(floods))]


def test_closing_refuses_what_waits_and_destroys_everything_as_it_comes_back():
    pool = ready(Policy(entries=3))
    leased, idle = lease(pool, "t1"), lease(pool, "t2")
    pool.handle(Returned(1.0, idle, clean=True))
    (create,) = ask(pool, "t3", OTHER, now=1.0)
    orders = pool.handle(Closed(2.0))
    assert [(type(order), getattr(order, "reason", None)) for order in orders] == [(Refuse, "closed"), (Destroy, None)]

    assert kinds(pool.handle(Made(3.0, create.order, "e3"))) == [Destroy]
    assert kinds(pool.handle(Returned(3.0, leased, clean=True))) == [Destroy]
    assert kinds(ask(pool, "t4", now=3.0)) == [Refuse]
    for entry in (leased, idle, "e3"):
        assert pool.handle(Gone(4.0, entry)) == []
    assert (pool.size, pool.memory_mib, pool.starting) == (0, 0.0, 0)


def test_events_that_answer_nothing_are_refused():
    pool = ready()
    entry = lease(pool, "t1")
    for event in [
        Made(0.0, 999, "e"),
        Failed(0.0, 999, "x"),
        Returned(0.0, "unknown", clean=True),
        Gone(0.0, entry),
        Asked(0.0, "t", (), 1.0),
    ]:
        with pytest.raises(ValueError):
            pool.handle(event)
    ask(pool, "t2")
    with pytest.raises(ValueError):
        ask(pool, "t2")
    with pytest.raises(ValueError):
        pool.handle(Bound(0.0, "t2"))


# ---- whatever happens ----


class Model(RuleBasedStateMachine):
    """A driver that answers every order, late, in any order, and sometimes with bad news."""

    tickets = Bundle("tickets")

    def __init__(self):
        super().__init__()
        self.now = 0.0
        self.names = 0
        self.waiting = {}  # ticket → (stages, deadline, mib), in the order in which they came
        self.came = {}  # ticket → number
        self.binding = {}  # ticket → (entry, missing)
        self.asked_for = {}  # ticket → stages
        self.upgraded = set()  # entries that were handed out with stages missing
        self.cut_off = {}  # ticket that was refused while its sandbox was upgraded → that sandbox
        self.leased = {}  # entry → ticket
        self.idle = {}  # entry → stage key
        self.leaving = set()
        self.creating = {}  # order → Create
        self.mib = {}  # entry → MiB
        self.dead = set()
        self.rung = {}  # entry → index of its spec's ladder, by key
        self.stages = {stage.key: stage for spec in SPECS for stage in spec}

    @initialize(
        entries=st.integers(1, 6),
        memory=st.sampled_from([60.0, 120.0, math.inf]),
        reuse=st.sampled_from(["reset", "single"]),
        shares=st.booleans(),
        starting=st.integers(2, 4),
        linger=st.sampled_from([0.0, 5.0]),
        deps_s=st.sampled_from([0.001, 4.0]),
    )
    def begin(self, entries, memory, reuse, shares, starting, linger, deps_s):
        self.policy = Policy(
            entries=entries,
            memory_mib=memory,
            reuse=reuse,
            shares_stages=shares,
            first_starting=starting,
            most_starting=6,
            linger_s=linger,
        )
        costs = Costs()
        for stage in self.stages.values():
            costs.observe_stage(stage, deps_s)
        self.pool = Pool(self.policy, costs)

    def tell(self, event):
        """Hand the event over, and hold every order against the model."""
        self.may_create_starting = None
        for order in self.pool.handle(event):
            match order:
                case HandOut():
                    self.check_hand_out(order)
                case Create():
                    self.creating[order.order] = order
                    assert order.ticket is None or order.ticket in self.waiting
                    assert self.size() <= self.policy.entries
                    assert self.memory() <= self.policy.memory_mib + 1e-9
                case Destroy():
                    assert order.entry not in self.leased and order.entry not in self.leaving
                    self.idle.pop(order.entry, None)
                    self.leaving.add(order.entry)
                case Refuse():
                    if order.ticket in self.waiting:
                        _, deadline, mib = self.waiting.pop(order.ticket)
                    else:
                        entry, missing, deadline = self.binding.pop(order.ticket)
                        assert missing and order.reason == "deadline"
                        self.cut_off[order.ticket] = entry
                        mib = 0.0
                    if order.reason == "deadline":
                        assert deadline <= self.now
                    if order.reason == "too_large":
                        assert mib > self.policy.memory_mib
            assert self.starting() <= self.pool.admission.cap or not isinstance(order, (Create, HandOut))

    def check_hand_out(self, order):
        assert order.entry in self.idle, "idle, and so neither leased, dirty, dead nor being destroyed"
        stages, deadline, mib = self.waiting.pop(order.ticket)
        same = [ticket for ticket, (other, _, _) in self.waiting.items() if other == stages]
        assert all(self.came[order.ticket] < self.came[ticket] for ticket in same), "first come, first served"
        keys = [stage.key for stage in stages]
        rung = keys.index(self.idle.pop(order.entry))
        assert order.missing == stages[rung + 1 :]
        assert (order.kind == "partial") == bool(order.missing)
        assert deadline > self.now or not order.missing
        self.leased[order.entry] = order.ticket
        self.binding[order.ticket] = (order.entry, order.missing, deadline)
        self.rung[order.entry] = keys[rung]
        (self.upgraded.add if order.missing else self.upgraded.discard)(order.entry)
        self.mib[order.entry] = max(self.mib[order.entry], mib)
        assert self.memory() <= self.policy.memory_mib + 1e-9

    def size(self):
        return len(self.leased) + len(self.idle) + len(self.leaving) + len(self.creating)

    def memory(self):
        alive = [*self.leased, *self.idle, *self.leaving]
        return sum(self.mib[entry] for entry in alive) + sum(order.memory_mib for order in self.creating.values())

    def starting(self):
        return len(self.creating) + sum(bool(missing) for _, missing, _ in self.binding.values())

    def pick(self, data, things):
        return data.draw(st.sampled_from(sorted(things)))

    @rule(dt=st.sampled_from([0.0, 0.001, 0.1, 1.0, 7.0]))
    def time_passes(self, dt):
        """Ticks come when they are due."""
        until = self.now + dt
        while (due := self.pool.next_due_s()) <= until:
            self.now = max(self.now, due)
            self.tell(Tick(self.now))
            assert self.pool.next_due_s() > self.now, "what was due is done"
        self.now = until
        self.tell(Tick(self.now))

    @rule(target=tickets, stages=st.sampled_from(SPECS), wait_s=st.sampled_from([0.0, 0.5, 10.0, math.inf]), n=st.integers(1, 4))
    def asked(self, stages, wait_s, n):
        new = []
        for _ in range(n):
            self.names += 1
            ticket = f"t{self.names}"
            self.waiting[ticket] = (stages, self.now + wait_s, MIB[stages[-1].key])
            self.came[ticket] = self.names
            self.asked_for[ticket] = stages
            self.tell(Asked(self.now, ticket, stages, self.now + wait_s, MIB[stages[-1].key]))
            new.append(ticket)
        return multiple(*new)

    @rule(ticket=consumes(tickets))
    def withdrawn(self, ticket):
        self.waiting.pop(ticket, None)
        self.tell(Withdrawn(self.now, ticket))

    @precondition(lambda self: self.creating)
    @rule(data=st.data(), n=st.integers(1, 3))
    def made(self, data, n):
        for _ in range(min(n, len(self.creating))):
            order = self.creating.pop(self.pick(data, self.creating))
            self.names += 1
            entry = f"e{self.names}"
            self.idle[entry] = order.stages[-1].key
            self.mib[entry] = order.memory_mib
            self.tell(Made(self.now, order.order, entry))

    @precondition(lambda self: self.creating)
    @rule(data=st.data(), is_retryable=st.booleans())
    def failed(self, data, is_retryable):
        order = self.creating.pop(self.pick(data, self.creating))
        self.tell(Failed(self.now, order.order, "no luck", is_retryable=is_retryable))
        if not is_retryable:
            assert not any(order.stages[-1] in stages for stages, _, _ in self.waiting.values())

    @precondition(lambda self: self.binding)
    @rule(data=st.data())
    def bound(self, data):
        ticket = self.pick(data, self.binding)
        self.binding.pop(ticket)
        self.tell(Bound(self.now, ticket))

    @precondition(lambda self: self.binding)
    @rule(data=st.data(), is_retryable=st.booleans())
    def rejected(self, data, is_retryable):
        ticket = self.pick(data, self.binding)
        entry, _, deadline = self.binding.pop(ticket)
        stages = self.asked_for[ticket]
        self.waiting[ticket] = (stages, deadline, MIB[stages[-1].key])
        del self.leased[entry]
        self.idle[entry] = None  # to be destroyed, which `tell` expects to find it for
        self.tell(Rejected(self.now, ticket, "dead", is_retryable=is_retryable))
        assert entry in self.leaving

    @precondition(lambda self: self.cut_off)
    @rule(data=st.data())
    def rejected_too_late(self, data):
        """The driver finds out that an upgrade was cut off, and answers the `HandOut` all the same."""
        ticket = self.pick(data, self.cut_off)
        entry = self.cut_off.pop(ticket)
        del self.leased[entry]
        self.idle[entry] = None
        self.tell(Rejected(self.now, ticket, "cut off"))
        assert entry in self.leaving

    @precondition(lambda self: self.leased)
    @rule(data=st.data(), clean=st.booleans(), at=st.sampled_from(["none", "below", "top"]))
    def returned(self, data, clean, at):
        """Bound or not: a holder may go at any time."""
        entry = self.pick(data, self.leased)
        ticket = self.leased.pop(entry)
        was_upgraded = entry in self.upgraded
        top = self.asked_for[ticket][-1].key
        self.binding.pop(ticket, None)
        key = {"none": None, "below": self.rung[entry], "top": top}[at]
        may_park = clean and entry not in self.dead and self.policy.reuse == "reset" and not (key is None and was_upgraded)
        if may_park:
            self.idle[entry] = key or self.rung[entry]
        self.cut_off.pop(ticket, None)
        self.tell(Returned(self.now, entry, clean=clean, at=key))
        if not may_park:
            assert entry in self.leaving

    @precondition(lambda self: self.idle)
    @rule(data=st.data())
    def died_idle(self, data):
        entry = self.pick(data, self.idle)
        del self.idle[entry]
        self.tell(Died(self.now, entry))
        assert entry in self.leaving

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def died_leased(self, data):
        entry = self.pick(data, self.leased)
        self.dead.add(entry)
        self.tell(Died(self.now, entry))

    @precondition(lambda self: self.leaving)
    @rule(data=st.data(), n=st.integers(1, 3))
    def gone(self, data, n):
        for _ in range(min(n, len(self.leaving))):
            entry = self.pick(data, self.leaving)
            self.leaving.discard(entry)
            self.tell(Gone(self.now, entry))

    @rule(key=st.sampled_from([stage.key for spec in SPECS for stage in spec]), is_stored=st.booleans())
    def layers_come_and_go(self, key, is_stored):
        self.tell(Stored(self.now, key) if is_stored else Evicted(self.now, key))

    @rule(counts=st.lists(st.integers(0, 3), min_size=len(SPECS), max_size=len(SPECS)))
    def resized(self, counts):
        self.tell(Resized(self.now, tuple(Target(spec, n, MIB[spec[-1].key]) for spec, n in zip(SPECS, counts, strict=True))))

    @invariant()
    def the_books_agree(self):
        if not hasattr(self, "pool"):
            return
        assert self.pool.size == self.size() <= self.policy.entries
        assert self.pool.memory_mib == pytest.approx(self.memory())
        assert self.pool.memory_mib <= self.policy.memory_mib + 1e-9
        assert self.pool.starting == self.starting()
        assert self.pool.waiting == len(self.waiting)

    @invariant()
    def nobody_waits_beyond_a_deadline(self):
        assert all(deadline > self.now for _, deadline, _ in self.waiting.values())
        assert not self.waiting or self.pool.next_due_s() <= min(deadline for _, deadline, _ in self.waiting.values())

    @invariant()
    def nobody_waits_beside_a_sandbox_that_is_idle(self):
        """With memory to spare, what is idle and exact is never kept from who waits for it."""
        if self.waiting and self.policy.memory_mib == math.inf:
            assert not {stages[-1].key for stages, _, _ in self.waiting.values()} & set(self.idle.values())

    def teardown(self):
        """From here on everything works: whoever still waits is served, without any deadline's help."""
        if not hasattr(self, "pool"):
            return
        self.tell(Resized(self.now, ()))
        for _ in range(400):
            if not self.waiting and not self.binding:
                break
            for order in sorted(self.creating):
                create = self.creating.pop(order)
                self.names += 1
                self.idle[f"e{self.names}"] = create.stages[-1].key
                self.mib[f"e{self.names}"] = create.memory_mib
                self.tell(Made(self.now, order, f"e{self.names}"))
            for ticket in sorted(self.binding):
                self.binding.pop(ticket)
                self.tell(Bound(self.now, ticket))
            for entry in sorted(self.leased):
                self.binding.pop(self.leased.pop(entry), None)  # one that was handed out just now is not bound yet
                self.tell(Returned(self.now, entry, clean=False))
            for entry in sorted(self.leaving):
                self.leaving.discard(entry)
                self.tell(Gone(self.now, entry))
            due = self.pool.next_due_s()
            self.now = max(self.now, due) if due < self.now + 100 else self.now + 0.01
            self.tell(Tick(self.now))
        assert not self.waiting and not self.binding, "starved"


TestWhateverHappens = Model.TestCase
TestWhateverHappens.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)
