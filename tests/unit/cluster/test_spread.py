"""Hot stages come before they are asked for: what saves most for its size, with what it stands on, within what it may cost."""

import os

import pytest
from tests.transfers import HOST, MARKS, TOKEN, contexts

from untax._remove import remove_tree
from untax.cluster.transfer import Peer, Transfer
from untax.cluster.transfer.spread import MOST_SAID, Budget, Heat, hottest, orders
from untax.layers.store import LayerStore, StageRecord

MIB = 1 << 20
DIGEST = "sha256-" + "0" * 63


def heat(key, *, uses=10.0, size=100, cost_s=10.0, parent=None, node="one"):
    return Heat(key, node, parent, "deps", uses, size, cost_s)


def keys(found):
    return [one.key for one in found]


def test_what_saves_most_for_its_bytes_comes_first_as_far_as_there_is_room():
    said = [heat("dear", cost_s=100), heat("huge", cost_s=100, size=10_000), heat("cheap", cost_s=1), heat("cold", uses=1)]

    assert keys(orders(said, (), 250, 3.0)) == ["dear", "cheap"]
    assert keys(orders(said, ("dear",), 20_000, 3.0)) == ["cheap", "huge"]
    assert orders(said, (), 0, 3.0) == []


def test_what_it_stands_on_comes_before_it_and_counts():
    said = [heat("deps", parent="repo"), heat("repo", uses=0, parent="image"), heat("image", uses=0, size=1000)]

    assert keys(orders(said, (), 1200, 3.0)) == ["image", "repo", "deps"]
    assert orders(said, (), 1199, 3.0) == []
    assert keys(orders(said, ("image",), 200, 3.0)) == ["repo", "deps"]


def test_uses_of_all_nodes_count_together_and_all_of_them_can_give_it():
    said = [heat("a", uses=2, node="one"), heat("a", uses=2, node="two")]

    assert [(one.key, one.nodes) for one in orders(said, (), 1000, 3.0)] == [("a", ("one", "two"))]


def test_what_stands_on_itself_ends():
    assert keys(orders([heat("a", parent="b"), heat("b", parent="a")], (), 1000, 3.0))


def test_a_node_tells_of_what_is_used_and_may_travel():
    records = [
        StageRecord("image", "image", "base", (DIGEST + "1",), cost_s=5),
        StageRecord("deps", "deps", "image", (DIGEST + "2",), cost_s=9),
        StageRecord("cold", "deps", "image", (DIGEST + "3",)),
        StageRecord("own", "image", "base", (DIGEST + "4",), is_portable=False),
        StageRecord("snap", "snapshot", None, (DIGEST + "5",)),
    ]
    uses = {"deps": 5.0, "cold": 1.0, "own": 9.0, "snap": 9.0}
    told = hottest(records, uses, {DIGEST + "2": 70}, "one", 3.0)

    assert [(one.key, one.bytes) for one in told] == [("deps", 70), ("image", 0)]
    many = [StageRecord(f"k{n:04}", "deps", None, ()) for n in range(500)]
    assert len(hottest(many, {one.key: 9.0 for one in many}, {}, "one", 3.0)) == MOST_SAID


@pytest.mark.parametrize(
    "said", [{}, {"key": "../x"}, {"bytes": -1}, {"uses": float("inf")}, {"uses": "many"}, {"bytes": None}, {"cost_s": -1}]
)
def test_what_no_node_says_that_is_whole_is_left_out(said):
    whole = heat("a").to_data()

    assert Heat.from_data("one", whole) == heat("a") or Heat.from_data("one", whole).key == "a"
    assert Heat.from_data("one", {**whole, **said} if said else {}) is None


# ---- carried out ----


@pytest.fixture
def two(tmp_path):
    trust = contexts(tmp_path)
    made = []
    for name in ("one", "two"):
        store = LayerStore(tmp_path / name, marks=MARKS)
        options = {"server_context": trust[0], "client_context": trust[1], "token": TOKEN, "host": HOST}
        node = Transfer(name, store, **options, budget=Budget(every_s=0.02, disk_bytes=3 * MIB, bytes_per_s=1e9))
        node._server.start()
        made.append(node)
    peers = [Peer.at(node.node, node.address) for node in made]
    for node in made:
        node.meet(peers)
    yield made
    for node in made:
        node.close()
        node.store.close()
        remove_tree(node.store.root)


def add(store, key, *, uses, parent=None, name="deps", mib=1):
    with store.draft() as draft:
        (draft.tree / key).write_bytes(os.urandom(mib * MIB))
        layer = draft.publish()
    store.put_stage(StageRecord(key, name, parent, (layer.id,), cost_s=5.0))
    store.used(key, uses)


def test_hot_stages_come_by_themselves_within_the_budget_and_cold_ones_do_not(two):
    """Two of them fit in the 3 MiB that may be here unused; the third comes once one of those is used."""
    one, two = two
    told = []
    two.arrived = told.extend
    add(one.store, "image", uses=0, name="image")
    add(one.store, "hot", uses=20, parent="image")
    add(one.store, "warm", uses=10, parent="image", mib=2)
    add(one.store, "cold", uses=0)
    for order in two.ahead.look():
        assert two.ahead.bring(order)

    assert {record.key for record in two.store.stages()} == {"image", "hot"}
    assert told == ["image", "hot"], "whoever places leases is told of each"
    assert two.ahead.look() == []
    assert [two.store.stage(key).adds == one.store.stage(key).adds for key in ("image", "hot")] == [True, True]
    two.store.used("hot")
    two.store.used("image")
    assert [order.key for order in two.ahead.look()] == ["warm"]


def test_uses_that_the_store_does_not_know_of_yet_count(two):
    one, two = two
    add(one.store, "stage", uses=0)
    assert two.ahead.look() == []
    one.untold_uses = lambda: {"stage": 7}

    assert [order.key for order in two.ahead.look()] == ["stage"]


def test_who_is_asked_again_is_not_greeted_again(two, monkeypatch):
    """A greeting costs both ends more than the question; one that does not answer over what was held is greeted anew."""
    one, two = two
    add(one.store, "hot", uses=20)
    greeted, dial = [], two.dialer.dial
    monkeypatch.setattr(two.dialer, "dial", lambda peer, **options: greeted.append(peer.node) or dial(peer, **options))

    for _ in range(3):
        assert [order.key for order in two.ahead.look()] == ["hot"]
    assert greeted == ["one"]
    [wire] = two.ahead._wires.values()
    wire.close()
    assert [order.key for order in two.ahead.look()] == ["hot"]
    assert greeted == ["one", "one"]
    two.meet([])
    assert two.ahead.look() == [] and not two.ahead._wires


def test_it_goes_on_by_itself_and_ends(two):
    one, two = two
    add(one.store, "hot", uses=20)
    came = two.store.put_stage
    arrived = []

    def noted(record):
        came(record)
        arrived.append(record.key)
        two.ahead._closed.set()

    two.store.put_stage = noted
    two.ahead.start()
    two.ahead._thread.join(30)

    assert arrived == ["hot"]
    assert not two.ahead._thread.is_alive()
