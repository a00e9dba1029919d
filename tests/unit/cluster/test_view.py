"""What one client takes its nodes to be: what they said last, less what it has asked for since."""

import math

import pytest

import untax
from untax.cluster import view as module
from untax.cluster.view import Views
from untax.core.errors import LeaseRefused
from untax.core.stage import Identity, stages_of

SPEC = untax.EnvSpec(setup=("pip install x",))
STAGES = stages_of(SPEC, Identity("img"))
TOP = STAGES[-1].key
HOST = untax.EnvSpec()


class Clock:
    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def views(clock):
    found = Views(here="a", clock=clock)
    for node in "ab":
        found.joined(node, isolation="namespace")
    found.learnt(SPEC, "a", STAGES)
    return found


def told(**more):
    return {
        "whole": True,
        "idle": {},
        "stored": [stage.key for stage in STAGES],
        "starting": 0,
        "most_starting": 4,
        "leased": 0,
        "cpus": 8,
        **more,
    }


def test_what_is_told_is_put_together(views):
    views.told("a", told(idle={TOP: 2}, free_mib=None, free_sandboxes=3, building={"k": 2.0}))
    views.told("a", {"idle": {TOP: 0, "other": 1}, "stored": ["new"], "evicted": [TOP], "is_draining": True, "building": {}})

    view = views.view("a")
    assert view.idle == {"other": 1}
    assert "new" in view.stored and TOP not in view.stored
    assert (view.free_mib, view.free_sandboxes, view.is_draining, view.building) == (math.inf, 3, True, {})
    views.told("a", told())
    assert view.idle == {} and "new" not in view.stored


def test_many_who_ask_at_once_do_not_count_on_one_idle_sandbox(views):
    for node in "ab":
        views.told(node, told(idle={TOP: 2}))

    went = []
    for _ in range(4):
        best = views.rank(SPEC)[0]
        assert best.choice.kind == "exact"
        views.claim(best)
        went.append(best.node)

    assert sorted(went) == ["a", "a", "b", "b"]
    assert views.rank(SPEC)[0].choice.kind == "cold"


def test_what_is_used_up_is_so_until_the_node_says_more(views):
    """Whatever it says: with each word it says all that is another than it told before."""
    views.told("a", told(idle={TOP: 4, "other": 1}))
    views.used_up(SPEC, "a")
    assert views.view("a").idle == {"other": 1}
    assert views.rank(SPEC)[0].choice.kind == "cold"
    views.told("a", {"busy": 0.5})
    assert views.view("a").idle == {TOP: 4, "other": 1}
    assert views.rank(SPEC)[0].choice.kind == "exact"


def test_what_is_used_up_is_claimed_by_nobody_besides(views):
    views.told("a", told(idle={TOP: 4}))
    claimed(views, 7)
    views.used_up(SPEC, "a")
    assert views.view("a").idle == {}
    views.told("a", {"idle": {TOP: 2}, "asked": 7})
    assert views.view("a").idle == {TOP: 2}


def test_a_node_that_says_nothing_has_again_what_it_told_before(views, clock):
    views.told("a", told(idle={TOP: 4}))
    views.used_up(SPEC, "a")
    clock.now_s += module._USED_UP_S - 0.1
    assert views.rank(SPEC)[0].choice.kind == "cold"
    clock.now_s += 0.2
    assert views.rank(SPEC)[0].choice.kind == "exact"
    assert views.view("a").idle == {TOP: 4}


def claimed(views, number):
    claim = views.claim(views.rank(SPEC)[0], 1024)
    claim.number = number
    return claim


def test_a_claim_lasts_until_a_view_has_its_request_in_however_late_that_view_is(views, clock):
    """A node that is busy, or far, says for long what it was before it has seen the request."""
    views.told("a", told(idle={TOP: 2}, asked=6))
    claimed(views, 7)
    assert views.view("a").idle[TOP] == 1

    for _ in range(3):
        clock.now_s += 10.0
        views.told("a", {"busy": 0.5, "asked": 6})
        assert views.view("a").idle[TOP] == 1
    views.told("a", {"idle": {TOP: 1}, "asked": 7})
    assert views.view("a").idle[TOP] == 1


def test_a_view_that_has_a_request_in_settles_it_however_soon_it_comes(views):
    """Also when nothing is left to see of it: a lease that began and ended between two views claims nothing afterwards."""
    views.told("a", told(idle={TOP: 1}))
    claimed(views, 7)
    assert views.rank(SPEC)[0].choice.kind == "cold"

    views.told("a", {"asked": 7})
    assert views.rank(SPEC)[0].choice.kind == "exact"


def test_of_several_requests_those_are_settled_that_the_view_has_in(views):
    views.told("a", told(idle={TOP: 4}, free_sandboxes=4, free_mib=8192))
    for number in (3, 5, 9):
        claimed(views, number)
    assert (views.view("a").idle[TOP], views.view("a").free_sandboxes, views.view("a").free_mib) == (1, 1, 8192 - 3 * 1024)

    views.told("a", {"idle": {TOP: 2}, "leased": 2, "free_sandboxes": 2, "free_mib": 6144, "asked": 8})
    assert (views.view("a").idle[TOP], views.view("a").free_sandboxes, views.view("a").free_mib) == (1, 1, 5120)


def test_a_lease_that_ended_before_a_view_had_it_in_takes_no_room_but_has_used_what_was_idle(views):
    views.told("a", told(idle={TOP: 2}, free_sandboxes=4, free_mib=8192, leased=1))
    claim = claimed(views, 7)
    assert (views.view("a").leased, views.view("a").free_sandboxes) == (2, 3)
    views.came(claim)
    views.ended(claim)

    view = views.view("a")
    assert (view.leased, view.free_sandboxes, view.free_mib, view.idle[TOP]) == (1, 4, 8192, 1)
    views.told("a", {"asked": 7})
    views.ended(claim)
    assert (view.leased, view.idle[TOP]) == (1, 2)


def test_a_request_that_is_not_sent_yet_is_in_no_view(views):
    views.told("a", told(idle={TOP: 1}))
    views.claim(views.rank(SPEC)[0])
    views.told("a", {"asked": 1000})

    assert views.rank(SPEC)[0].choice.kind == "cold"


def test_a_node_that_began_anew_knows_of_no_earlier_requests_and_has_what_it_answered(views):
    """Its numbers are those of a client that it never saw before."""
    views.told("a", told(idle={TOP: 2}))
    views.came(claimed(views, 7))
    claimed(views, 8)
    views.told("a", told(idle={TOP: 2}, asked=0))

    assert views.view("a").idle[TOP] == 1


def test_a_lease_that_came_to_nothing_claims_nothing(views):
    views.told("a", told(idle={TOP: 1}))
    claim = views.claim(views.rank(SPEC)[0])
    views.failed(claim)

    assert views.rank(SPEC)[0].choice.kind == "exact"


def test_creations_that_were_asked_for_are_load_and_their_stages_are_being_built(views):
    views.told("a", told(stored=[STAGES[0].key]))
    views.told("b", told(stored=[STAGES[0].key]))
    first = views.rank(SPEC)[0]
    views.claim(first)

    assert views.view(first.node).starting == 1
    assert TOP in views.view(first.node).building
    assert views.rank(SPEC)[0].node == first.node  # what is being built there is not built elsewhere too


def test_what_was_found_ahead_of_a_lease_is_what_would_be_found_then(views, clock):
    """And is forgotten with everything that is heard or done."""
    for node in "ab":
        views.told(node, told(idle={TOP: 2}))
    views.foresee(SPEC)
    best = views.foreseen(SPEC)
    assert (best.node, best.why) == (views.rank(SPEC)[0].node, views.rank(SPEC)[0].why)
    assert views.foreseen(untax.EnvSpec(setup=("pip install y",))) is None

    claim = None

    def claims():
        nonlocal claim
        claim = views.claim(views.rank(SPEC)[0])

    for happens in (
        lambda: views.told("b", {"idle": {TOP: 1}}),
        lambda: views.linked("a", 0.5),
        claims,
        lambda: views.ended(claim),
        lambda: views.failed(claim),
        lambda: views.lost("a", "no answer"),
        lambda: views.drained("b"),
        lambda: views.joined("c", isolation="namespace"),
        lambda: views.left("c"),
        lambda: views.learnt(SPEC, "a", stages_of(SPEC, Identity("other"))),
    ):
        views.foresee(SPEC)
        happens()
        assert views.foreseen(SPEC) is None
        for node in "ab":
            views.told(node, told(idle={TOP: 2}, is_draining=False))
    views.foresee(SPEC)
    clock.now_s += 60.0
    assert views.foreseen(SPEC) is None


def test_nothing_is_found_ahead_while_a_node_is_left_alone_for_a_while(views):
    views.told("a", told(idle={TOP: 2}))
    views.failed(views.claim(views.rank(SPEC)[0]), LeaseRefused("full", "no room"))
    views.foresee(SPEC)

    assert views.foreseen(SPEC) is None


def test_a_node_that_refused_is_left_alone_ever_longer_until_it_serves(views, clock):
    for node in "ab":
        views.told(node, told(idle={TOP: 3}))
    full = LeaseRefused("full", "no room")

    views.failed(views.claim(views.rank(SPEC)[0]), full)
    assert views.rank(SPEC)[0].node == "b"
    clock.now_s += 0.11
    assert views.rank(SPEC)[0].node == "a"
    views.failed(views.claim(views.rank(SPEC)[0]), full)
    clock.now_s += 0.11
    assert views.rank(SPEC)[0].node == "b"
    clock.now_s += 0.11
    claim = views.claim(views.rank(SPEC)[0])
    views.came(claim)
    views.failed(views.claim(views.rank(SPEC)[0]), full)
    clock.now_s += 0.11
    assert views.rank(SPEC)[0].node == "a"


def test_a_node_with_room_again_is_not_avoided_any_longer(views):
    for node in "ab":
        views.told(node, told(idle={TOP: 3}))
    views.failed(views.claim(views.rank(SPEC)[0]), LeaseRefused("full", "no room"))
    views.told("a", {"free_sandboxes": 2})

    assert views.rank(SPEC)[0].node == "a"


def test_a_node_that_said_it_drains_is_not_asked_again(views):
    for node in "ab":
        views.told(node, told())
    views.failed(views.claim(views.rank(SPEC)[0]), LeaseRefused("draining", "it is draining"))

    assert [one.node for one in views.rank(SPEC)] == ["b"]
    assert views.left_out(SPEC) == {"a": "it is draining"}


def test_keys_that_are_each_nodes_own_are_asked_for_at_each(views):
    own = {node: stages_of(HOST, Identity(f"host:{node}", is_portable=False)) for node in "ab"}
    assert views.unasked(SPEC) == []
    assert views.ladder(HOST) is None
    views.learnt(HOST, "a", own["a"])
    assert views.unasked(HOST) == ["b"]
    views.learnt(HOST, "b", own["b"])
    assert views.unasked(HOST) == []
    views.told("b", told(idle={own["b"][-1].key: 1}))

    assert views.rank(HOST)[0].node == "b"


def test_a_name_that_stands_for_another_image_now_is_learnt_anew(views):
    moved = stages_of(SPEC, Identity("img2"))
    views.learnt(SPEC, "b", moved)
    assert views.ladder(SPEC) == moved


def test_a_node_that_left_is_forgotten(views):
    views.left("a")
    assert views.nodes == ("b",)
    views.told("a", told())
    assert views.view("a") is None


def test_nonsense_is_said_to_be_that(views):
    with pytest.raises(untax.ProtocolError, match="node a"):
        views.told("a", {"idle": 3})


def test_a_node_that_lacks_an_image_is_passed_over_for_a_while_and_for_that_image_only(views, clock):
    for node in "ab":
        views.told(node, told())
    other = untax.EnvSpec(setup=("pip install y",))
    views.learnt(other, "b", stages_of(other, Identity("img")))
    views.lacks(SPEC, "b", "there is no such directory")

    assert [one.node for one in views.rank(SPEC)] == ["a"]
    assert views.left_out(SPEC) == {"b": "there is no such directory"}
    assert {one.node for one in views.rank(other)} == {"a", "b"}
    clock.now_s += 31.0
    assert {one.node for one in views.rank(SPEC)} == {"a", "b"}
    assert not views.left_out(SPEC)


def test_a_node_that_lacked_an_image_and_has_it_now_is_ranked_at_once(views):
    for node in "ab":
        views.told(node, told())
    views.lacks(SPEC, "b", "there is no such directory")
    views.learnt(SPEC, "b", STAGES)
    assert {one.node for one in views.rank(SPEC)} == {"a", "b"}


def test_who_lacks_an_image_need_not_be_asked_for_keys_of_its_own(views):
    local = untax.EnvSpec(image="dir:/data")
    views.learnt(local, "a", stages_of(local, Identity("dir:a", is_portable=False)))
    assert views.unasked(local) == ["b"] and not views.is_known(local)
    views.lacks(local, "b", "there is no such directory")
    assert views.unasked(local) == [] and views.is_known(local)


def test_a_node_that_was_slow_once_is_tried_again_after_a_while_by_one_lease(views, clock):
    def costs(create_s):
        return {"by_name": {"create": create_s}, "by_key": {}}

    views.told("a", told(costs=costs(0.02)))
    views.told("b", told(costs=costs(2.0), busy=0.0))
    views.told("a", {"leased": 40})  # all that there is
    assert [one.node for one in views.rank(SPEC)] == ["a", "b"]
    clock.now_s += 61.0
    assert views.rank(SPEC)[0].node == "b"
    views.claim(views.rank(SPEC)[0])
    assert [one.node for one in views.rank(SPEC)] == ["a", "b"], "what it said holds until it says otherwise"
    assert views.view("b").costs.known("create") == 2.0
    clock.now_s += 30.0
    assert views.rank(SPEC)[0].node == "a"
    views.told("b", {"costs": costs(0.02)})
    assert views.rank(SPEC)[0].node == "b"


def test_a_node_that_is_as_quick_as_others_is_not_doubted(views, clock):
    for node in "ab":
        views.told(node, told(costs={"by_name": {"create": 0.02 if node == "a" else 0.03}, "by_key": {}}))
    clock.now_s += 61.0
    views.rank(SPEC)
    assert views.view("b").costs.known("create") == 0.03

    views.told("a", {"costs": {"by_name": {"create": 0.002}, "by_key": {}}})  # the others become quicker, and it has no lease any more
    clock.now_s += 61.0
    views.rank(SPEC)
    assert views.view("b").costs.known("create") == pytest.approx(0.002)
