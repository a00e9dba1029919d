"""Nodes in the order of how soon a lease would be ready there: by example, and for whatever views there may be."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from untax.core.spec import EnvSpec, Repo, is_as_strong
from untax.core.stage import Identity, stages_of
from untax.pool.costs import Costs
from untax.pool.nodes import NodeView, is_better, rank, unfit
from untax.pool.placement import Fleet, choose

BUSY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A process may wait for its turn for seconds where other suites run beside this one."""


def ladder(image, commit=None, setup=(), portable=True):
    repo = None if commit is None else Repo("https://example.org/r.git", commit)
    return stages_of(EnvSpec(repo=repo, setup=setup), Identity(image, is_portable=portable))


DEPS_A, DEPS_B, OTHER = ladder("x", "c1", ("a",)), ladder("x", "c1", ("b",)), ladder("y", "c2", ("a",))
BASE, IMAGE, REPO, DEPS = DEPS_A
KEYS = sorted({stage.key for spec in (DEPS_A, DEPS_B, OTHER) for stage in spec})


def measured(create=0.005, bind=0.0005, image=20.0, repo=5.0, deps=30.0, stages=DEPS_A):
    costs = Costs()
    costs.observe("create", create)
    costs.observe("bind", bind)
    for stage, seconds in zip(stages, (0.0, image, repo, deps), strict=True):
        costs.observe_stage(stage, seconds)
    return costs


def view(node, *, idle=(), stored=(), isolation="namespace", **more):
    counts = {}
    for stage in idle:
        counts[stage.key] = counts.get(stage.key, 0) + 1
    return NodeView(node, isolation, counts, {stage.key for stage in stored}, **{"costs": measured(), **more})


def order(ranked):
    return [one.node for one in ranked]


# ---- by example ----


def test_the_node_with_an_idle_sandbox_comes_before_one_with_layers_before_one_with_an_image():
    views = [view("far"), view("image", stored=DEPS_A[:2]), view("layers", stored=DEPS_A), view("idle", idle=[DEPS], stored=DEPS_A)]

    ranked = rank(DEPS_A, views)

    assert order(ranked) == ["idle", "layers", "image", "far"]
    assert [one.choice.kind for one in ranked] == ["exact", "cold", "cold", "cold"]


def test_a_choice_says_why_and_what_came_next():
    ranked = rank(DEPS_A, [view("a", idle=[DEPS]), view("b", stored=DEPS_A[:3])])

    assert ranked[0].why == (
        "idle with the deps stage on a, nothing missing: 0.5 ms; next: create over the repo stage on b, missing deps: 30 s"
    )
    assert ranked[1].why == "create over the repo stage on b, missing deps: 30 s; no other node could take it"


def test_equals_go_to_the_callers_own_node_and_say_so():
    views = [view(name, idle=[DEPS], stored=DEPS_A) for name in "abcd"]

    for here in "abcd":
        ranked = rank(DEPS_A, views, here=here)
        assert ranked[0].node == here
        assert "the caller's own among equals" in ranked[0].why


def test_what_nobody_could_measure_is_equal_and_what_anybody_would_notice_is_not():
    views = [view("here", idle=[DEPS], costs=measured(bind=0.007)), view("there", idle=[DEPS])]
    assert rank(DEPS_A, views, here="here")[0].node == "here"
    views[0].costs = measured(bind=0.05)
    assert rank(DEPS_A, views, here="here")[0].node == "there"


def test_the_callers_own_node_takes_no_more_than_its_share():
    """Thousands of rollouts of one driver are not to crowd the machine that the driver happens to run on."""
    views = [view("here", stored=DEPS_A, leased=19, cpus=4), view("there", stored=DEPS_A, leased=3, cpus=4)]

    assert rank(DEPS_A, views, here="here")[0].node == "there"
    views[0].leased = 3
    assert rank(DEPS_A, views, here="here")[0].node == "here"


def test_a_few_leases_more_do_not_send_the_next_one_away_from_its_caller():
    views = [view("here", idle=[DEPS], leased=10, cpus=2), view("there", idle=[DEPS], leased=3, cpus=2)]

    assert rank(DEPS_A, views, here="here")[0].node == "here"
    views[1].leased = 2
    assert rank(DEPS_A, views, here="here")[0].node == "there"


def test_what_is_to_be_built_is_built_where_there_is_room_for_it():
    """One node does not evict what another would have had room for; what is there already is used where it is."""
    views = [view("here", filled=0.9), view("there", filled=0.2)]

    assert rank(DEPS_A, views, here="here")[0].node == "there"
    for one in views:
        one.stored = {stage.key for stage in DEPS_A}
    assert rank(DEPS_A, views, here="here")[0].node == "here"


def test_a_node_without_room_for_layers_pays_for_what_it_drives_out():
    """Half of what is put in place there. What lies there already drives nothing out."""
    views = [view("taken", stored=DEPS_A[:3], filled=0.95), view("empty", stored=DEPS_A[:2])]

    ranked = rank(DEPS_A, views)

    assert order(ranked) == ["empty", "taken"]  # half a second for the repository to come, against 15 s for what would go
    assert ranked[1].expected_s == pytest.approx(45.005)
    assert ranked[0].expected_s == pytest.approx(30.505)
    views[0].stored = {stage.key for stage in DEPS_A}
    assert rank(DEPS_A, views)[0].node == "taken"


def test_a_machine_much_busier_than_the_others_is_not_worth_the_seconds_that_it_saves():
    views = [view("busy", stored=DEPS_A, busy=0.9), view("idle", stored=DEPS_A[:3], costs=measured(deps=0.5))]
    assert rank(DEPS_A, views)[0].node == "idle"
    views[1].busy = 0.8
    assert rank(DEPS_A, views)[0].node == "busy"


def test_a_quicker_link_does_not_draw_everything_to_one_machine():
    views = [view("close", stored=DEPS_A, cpus=2), view("further", stored=DEPS_A, cpus=2, link_s=0.01)]
    went = []
    for _ in range(40):
        best = rank(DEPS_A, views, here="close")[0].node
        next(one for one in views if one.node == best).leased += 1
        went.append(best)

    assert went[:8] == ["close"] * 8
    assert 10 <= went.count("further") < 20


def test_callers_elsewhere_do_not_all_go_to_one_of_many_equals():
    views = [view(f"n{number}", idle=[DEPS]) for number in range(4)]

    assert len({rank(DEPS_A, views, salt=f"caller {number}")[0].node for number in range(32)}) == 4


def test_a_slow_node_is_avoided_by_what_it_measured_itself():
    slow = view("slow", stored=DEPS_A, costs=measured(create=0.5))
    quick = view("quick", stored=DEPS_A)

    assert order(rank(DEPS_A, [slow, quick], here="slow")) == ["quick", "slow"]


def test_a_node_over_a_slow_link_is_avoided_unless_it_is_so_much_nearer():
    views = [view("behind", stored=DEPS_A, link_s=0.2), view("close", stored=DEPS_A)]
    assert rank(DEPS_A, views)[0].node == "close"
    views[1].stored = set()
    assert rank(DEPS_A, views)[0].node == "behind"


def test_a_node_that_starts_much_comes_after_one_that_does_not():
    views = [view("loaded", stored=DEPS_A, starting=8, most_starting=4), view("free", stored=DEPS_A)]

    assert rank(DEPS_A, views, here="loaded")[0].node == "free"


def test_a_stage_that_is_being_built_is_waited_for_and_not_built_again_elsewhere():
    building = view("building", stored=DEPS_A[:3], building={DEPS.key: 100.0}, starting=1)
    free = view("free", stored=DEPS_A[:3])

    ranked = rank(DEPS_A, [building, free], now_s=110.0)

    assert order(ranked) == ["building", "free"]
    assert ranked[0].expected_s == pytest.approx(20.0, rel=0.01)


def travelled(image=1.0, repo=0.2, deps=2.0):
    costs = measured()
    for stage, seconds in zip(DEPS_A[1:], (image, repo, deps), strict=True):
        costs.observe_fetch(stage, seconds)
    return costs


def test_a_stage_that_another_node_has_costs_what_it_takes_to_come():
    """Not what it takes to build; and the node whose own it is, is still the nearest."""
    views = [view("has", stored=DEPS_A), view("lacks", costs=travelled())]

    ranked = rank(DEPS_A, views)

    assert order(ranked) == ["has", "lacks"]
    assert ranked[1].expected_s == pytest.approx(0.005 + 1.0 + 0.2 + 2.0)
    views[0].starting = 4 * 1000
    assert order(rank(DEPS_A, views)) == ["lacks", "has"]


def test_a_node_that_takes_no_lease_still_gives_layers_and_one_that_is_gone_does_not():
    views = [view("has", stored=DEPS_A, is_draining=True), view("lacks", costs=travelled())]
    assert rank(DEPS_A, views)[0].expected_s == pytest.approx(3.205)
    views[0].trouble = "it does not answer"
    assert rank(DEPS_A, views)[0].expected_s == pytest.approx(55.005)


def test_what_is_the_same_on_one_machine_only_is_built_wherever_it_is_wanted():
    own = ladder("dir:x", "c1", ("a",), portable=False)
    views = [view("has", stored=own), view("lacks", costs=measured(stages=own))]

    assert rank(own, views)[1].expected_s == pytest.approx(55.005)


def test_a_stage_that_another_node_builds_is_waited_for_and_then_comes():
    building = view("building", stored=DEPS_A[:3], building={DEPS.key: 100.0}, starting=4 * 1000)
    free = view("free", stored=DEPS_A[:3], costs=travelled())

    ranked = rank(DEPS_A, [building, free], now_s=110.0)

    assert {one.node: one.expected_s for one in ranked}["free"] == pytest.approx(20.0 + 2.0 + 0.005)


def test_a_fetch_that_was_never_measured_costs_what_it_costs_elsewhere_or_a_share_of_the_building():
    views = [view("has", stored=DEPS_A), view("lacks", stored=DEPS_A[:3])]

    assert rank(DEPS_A, views)[1].expected_s == pytest.approx(3.005)
    assert rank(DEPS_A, views, usual=travelled())[1].expected_s == pytest.approx(2.005)


def test_what_a_node_never_did_costs_there_what_it_costs_elsewhere():
    """A node that just joined guesses half a minute for a set-up that takes the others a tenth of a second."""
    known, new = view("known", stored=DEPS_A[:3], costs=measured(deps=0.1)), view("new", stored=DEPS_A[:3], costs=Costs())
    known.starting = 8

    assert rank(DEPS_A, [known, new])[0].node == "known"
    assert rank(DEPS_A, [known, new], usual=measured(deps=0.1))[0].node == "new"


def test_a_node_that_refused_is_as_far_as_the_time_for_which_it_is_left_alone():
    views = [view("refused", idle=[DEPS], avoided_s=1.0), view("other", stored=DEPS_A)]

    ranked = rank(DEPS_A, views)

    assert order(ranked) == ["other", "refused"]
    assert "refused a moment ago" in ranked[1].said()


def test_full_nodes_come_last_the_shortest_line_first():
    views = [
        view("long", stored=DEPS_A, free_sandboxes=0, waiting=5, leased=10),
        view("short", stored=DEPS_A, free_sandboxes=0, waiting=1, leased=10),
        view("free"),
    ]

    ranked = rank(DEPS_A, views)

    assert order(ranked) == ["free", "short", "long"]
    assert [one.is_full for one in ranked] == [False, True, True]


def test_a_full_node_with_the_very_sandbox_idle_is_not_full():
    [only] = rank(DEPS_A, [view("n", idle=[DEPS], free_sandboxes=0)])
    assert not only.is_full


def test_what_exists_on_one_machine_only_is_looked_for_by_that_machines_keys():
    a, b = ladder("host:a", portable=False), ladder("host:b", portable=False)
    views = [view("a", stored=a), view("b", idle=[b[-1]], stored=b)]

    assert rank(a, views, chains={"a": a, "b": b})[0].node == "b"
    assert rank(a, views)[0].node == "a"


def test_what_is_fixed_at_creation_changes_which_idle_ones_serve_but_not_the_layers():
    flavoured = tuple(replace(stage, key=f"{stage.key}~abc") for stage in DEPS_A)
    [only] = rank(flavoured, [view("n", idle=[DEPS], stored=DEPS_A)])

    assert (only.choice.kind, only.choice.missing) == ("cold", ())


def test_no_view_no_choice():
    assert rank(DEPS_A, []) == []
    assert rank(DEPS_A, [view("n", is_draining=True)]) == []


# ---- whatever there is ----

LEVELS = ("none", "namespace", "container", "gvisor", "vm")
seconds = st.floats(0.0, 50.0)


@st.composite
def costs(draw):
    found = Costs()
    for operation in ("create", "bind"):
        if draw(st.booleans()):
            found.observe(operation, draw(seconds))
    for stage in draw(st.lists(st.sampled_from(DEPS_A + DEPS_B + OTHER), max_size=4)):
        found.observe_stage(stage, draw(seconds))
    return found


@st.composite
def a_view(draw, node):
    return NodeView(
        node,
        draw(st.sampled_from(LEVELS)),
        draw(st.dictionaries(st.sampled_from(KEYS), st.integers(0, 3), max_size=4)),
        draw(st.sets(st.sampled_from(KEYS))),
        draw(st.dictionaries(st.sampled_from(KEYS), seconds, max_size=2)),
        starting=draw(st.integers(0, 10)),
        most_starting=draw(st.integers(1, 8)),
        waiting=draw(st.integers(0, 5)),
        leased=draw(st.integers(0, 20)),
        cpus=draw(st.integers(1, 4)),
        busy=draw(st.floats(0, 1)),
        free_sandboxes=draw(st.integers(-3, 5)),
        free_mib=draw(st.floats(-100, 4000)),
        most_mib=draw(st.sampled_from([500.0, 4000.0, float("inf")])),
        costs=draw(costs()),
        link_s=draw(st.sampled_from([0.0, 0.0001, 0.002, 0.2])),
        is_draining=draw(st.sampled_from([False, False, True])),
        avoided_s=draw(st.sampled_from([0.0, 0.0, 0.3])),
    )


@st.composite
def questions(draw):
    views = [draw(a_view(f"n{number}")) for number in range(draw(st.integers(1, 6)))]
    how = {
        "here": draw(st.sampled_from([None, "n0", "n3", "elsewhere"])),
        "isolation": draw(st.sampled_from(LEVELS)),
        "memory_mib": draw(st.sampled_from([0.0, 600.0, 5000.0])),
        "now_s": 60.0,
        "usual": draw(st.none() | costs()),
        "salt": draw(st.sampled_from(["", "x"])),
    }
    return draw(st.sampled_from([DEPS_A, DEPS_B, OTHER, DEPS_A[:2]])), views, how


def of_one_machine(question):
    wanted, views, how = question
    return tuple(replace(stage, is_portable=False) for stage in wanted), views, how


@settings(BUSY, max_examples=40)
@given(questions())
def test_every_node_that_could_take_it_is_there_once_and_no_other(question):
    """Never one that drains, or whose substrate or budget cannot take it."""
    wanted, views, how = question
    ranked = rank(wanted, views, **how)

    able = {
        one.node
        for one in views
        if not one.is_draining and is_as_strong(one.isolation, as_required=how["isolation"]) and how["memory_mib"] <= one.most_mib
    }
    assert sorted(order(ranked)) == sorted(able)
    said = {one.node: unfit(one, isolation=how["isolation"], memory_mib=how["memory_mib"]) for one in views}
    assert {node for node, reason in said.items() if reason is None} == able


@settings(BUSY, max_examples=40)
@given(questions(), st.randoms(use_true_random=False))
def test_the_order_depends_on_the_views_alone(question, draws):
    """Not on the order in which they are given, nor on what was asked before."""
    wanted, views, how = question
    first = rank(wanted, views, **how)
    shuffled = list(views)
    draws.shuffle(shuffled)

    again = rank(wanted, shuffled, **how)

    assert order(again) == order(first)
    assert [one.why for one in again] == [one.why for one in first]


@settings(BUSY, max_examples=40)
@given(questions())
def test_who_has_room_comes_before_who_has_none_and_the_sooner_before_the_later(question):
    wanted, views, how = question
    ranked = rank(wanted, views, **how)

    assert [one.is_full for one in ranked] == sorted(one.is_full for one in ranked)
    with_room = [one.expected_s for one in ranked if not one.is_full]
    if with_room and ranked[0].node == how["here"]:  # which may be a little later, for what its actions save
        assert with_room[0] <= min(with_room) * 1.1 + 0.0105 + 1e-9
    elif with_room:
        assert with_room[0] <= min(with_room) * 1.1 + 0.0005 + 1e-9
    if with_room and how["here"] not in order(ranked):
        noticeably_later = [seconds for seconds in with_room if seconds > min(with_room) * 1.1 + 0.0005]
        assert noticeably_later == with_room[len(with_room) - len(noticeably_later) :]
        assert noticeably_later == sorted(noticeably_later)


@settings(BUSY, max_examples=40)
@given(questions())
def test_the_way_on_a_node_is_the_one_that_placement_finds_there(question):
    """Of stages that do not travel: what the others have is of no use to it."""
    wanted, views, how = of_one_machine(question)
    by_name = {one.node: one for one in views}
    for one in rank(wanted, views, **{**how, "usual": None}):
        here = by_name[one.node]
        if here.building:
            continue
        fleet = Fleet()
        fleet.add_node(here.node, link_s=here.link_s)
        fleet.node(here.node).load = here.load
        for key, count in here.idle.items():
            for number in range(count):
                fleet.park(f"{key}-{number}", here.node, key)
        for key in {*here.stored, BASE.key}:
            fleet.stored(here.node, key)
        same = choose(wanted, fleet, here.costs)
        assert (one.choice.kind, one.choice.start, one.choice.expected_s) == (same.kind, same.start, same.expected_s)


NEARER = {
    "one more idle with everything": lambda one, wanted: one.idle.update({wanted[-1].key: one.idle.get(wanted[-1].key, 0) + 1}),
    "one more idle below": lambda one, wanted: one.idle.update({wanted[1].key: one.idle.get(wanted[1].key, 0) + 1}),
    "all layers": lambda one, wanted: one.stored.update(stage.key for stage in wanted),
    "some layers": lambda one, wanted: one.stored.update(stage.key for stage in wanted[:2]),
    "less starting": lambda one, _: setattr(one, "starting", 0),
    "nobody waits": lambda one, _: setattr(one, "waiting", 0),
    "a quicker link": lambda one, _: setattr(one, "link_s", 0.0),
    "no refusal": lambda one, _: setattr(one, "avoided_s", 0.0),
    "room": lambda one, _: (setattr(one, "free_sandboxes", 9), setattr(one, "free_mib", 1e6)),
    "not busy": lambda one, _: setattr(one, "busy", 0.0),
    "quicker steps": lambda one, wanted: setattr(one, "costs", measured(0.0, 0.0, 0.0, 0.0, 0.0, stages=wanted)),
}


@settings(BUSY, max_examples=150)
@given(questions(), st.sampled_from(sorted(NEARER)), st.integers(0, 5))
def test_a_node_that_comes_nearer_never_ranks_worse(question, change, which):
    """Of stages that do not travel: one that does brings the other nodes nearer too."""
    wanted, views, how = of_one_machine(question)
    if len(wanted) < 4 and change == "quicker steps":
        wanted = of_one_machine((DEPS_A, views, how))[0]
    nearer = views[which % len(views)]
    before = order(rank(wanted, views, **how))

    NEARER[change](nearer, wanted)

    after = order(rank(wanted, views, **how))
    if nearer.node in before:
        assert after.index(nearer.node) <= before.index(nearer.node), change


@settings(BUSY, max_examples=60)
@given(st.data(), st.integers(1, 4))
def test_the_first_few_of_many_are_those_of_the_whole_ranking(data, most):
    """Nodes that could not be among them are not looked at any closer; which they are, and why, is the same."""
    wanted, few, how = data.draw(questions())
    views = few + [data.draw(a_view(f"m{number}")) for number in range(data.draw(st.integers(0, 12)))]
    if data.draw(st.booleans()):  # as in a fleet that is warm: the usual case
        for one in views:
            one.idle[wanted[-1].key] = data.draw(st.integers(0, 2))
            one.costs.observe("create", 0.005)
            one.costs.observe("bind", 0.0005)
    whole = rank(wanted, views, **how)

    first = rank(wanted, views, **how, most=most)

    assert order(first) == order(whole)[:most]
    assert [one.why for one in first] == [one.why for one in whole[:most]]
    assert [(one.expected_s, one.is_full) for one in first] == [(one.expected_s, one.is_full) for one in whole[:most]]


# ---- leases that wait ----


OWN = tuple(replace(stage, is_portable=False) for stage in DEPS_A)


def waits(views, node="full", waited_s=0.0, wanted=OWN):
    """Where to; None to stay. Of stages that do not travel, unless others are wanted."""
    waiting = next(one for one in views if one.node == node)
    return next((one.node for one in rank(wanted, views) if one.node != node and is_better(one, waiting, waited_s)), None)


def full(node="full", **more):
    return view(node, free_sandboxes=-1, **{"stored": DEPS_A, "waiting": 1, "leased": 4, **more})


def test_a_lease_that_waits_goes_where_there_is_room_now():
    assert waits([full(), view("free", stored=DEPS_A)]) == "free"
    assert waits([full(), view("free", idle=[DEPS])]) == "free"


def test_a_lease_that_waits_stays_where_nothing_is_sooner():
    assert waits([full(), full("other", waiting=0)]) is None
    assert waits([full()]) is None
    assert waits([full(), view("refused", stored=DEPS_A, avoided_s=0.2)]) is None
    assert waits([full(), view("drains", stored=DEPS_A, is_draining=True)]) is None


def test_a_lease_whose_turn_has_come_stays():
    assert waits([view("full", stored=DEPS_A, free_sandboxes=1, leased=3), view("free", idle=[DEPS])]) is None


def test_a_lease_does_not_leave_its_line_for_a_long_build_unless_it_has_waited_as_long():
    views = [full(stored=()), view("builds", stored=DEPS_A[:3], costs=measured(deps=3.0))]

    assert waits(views, waited_s=0.1) is None
    assert waits(views, waited_s=5.9) is None
    assert waits(views, waited_s=6.2) == "builds"


def test_a_lease_leaves_its_line_for_what_comes_from_where_it_waits():
    """The full node has no room for it, and gives its layers all the same."""
    views = [full(), view("fetches", stored=DEPS_A[:3], costs=travelled(deps=0.05))]

    assert waits(views, waited_s=0.2) is None
    assert waits(views, waited_s=0.2, wanted=DEPS_A) == "fetches"


def test_a_lease_leaves_a_long_line_sooner_than_a_short_one():
    def at(waiting):
        return waits([full(stored=(), waiting=waiting, leased=10), view("builds", stored=DEPS_A[:3], costs=measured(deps=1.0))])

    assert at(1) is None
    assert at(20) == "builds"
