"""A node of the fleet that is broken, or hostile, takes nothing from the others but what it asked for: no stage, no thread, no lease's time."""

import contextlib
import os
import random
import struct
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfers import ODD_DATA, SOON_S, Node, dialer, key_owned_by, meet, publish, serving, stores

from untax.cluster.transfer import copy, serve, wire
from untax.cluster.transfer.errand import Errand, kind_of
from untax.cluster.transfer.fetch import Fetch
from untax.cluster.transfer.plan import CHUNK_BYTES
from untax.cluster.transfer.spread import Budget, Heat, orders
from untax.cluster.transfer.wire import PeerFault, Refused
from untax.core.errors import StageFailed, StageUnavailable
from untax.layers.store import StageRecord

# ---- what it says of itself ----


@settings(max_examples=100, deadline=None)
@given(
    said=st.lists(
        st.fixed_dictionaries(dict.fromkeys(("key", "parent", "name", "uses", "bytes", "cost_s"), st.sampled_from(["k", "j"]) | ODD_DATA)),
        max_size=6,
    )
)
def test_whatever_is_said_to_be_hot_can_be_reckoned_with(said):
    heats = [heat for one in said if (heat := Heat.from_data("one", one)) is not None]
    assert sum(order.bytes for order in orders(heats, (), 1e9, 1.0)) <= 1e9


@pytest.mark.parametrize(
    "answer",
    [
        {"record": 7},
        {"record": "[]"},
        {"record": "{" * 100_000},
        {"record": StageRecord("another", "repo", None, ()).to_json()},
        {"record": StageRecord("key", "repo", None, (), is_portable=False).to_json()},
        {"record": StageRecord("key", "repo", None, ()).to_json().replace('"adds": []', '"adds": ["../../etc"]')},
        {"record": StageRecord("key", "repo", None, ()).to_json().replace('"parent": null', '"parent": "../x"')},
        {"record": StageRecord("key", "repo", None, ()).to_json().replace('"log_tail": ""', '"log_tail": "\\ud800"')},
        {"record": StageRecord("key", "repo", None, ("sha256-" + "0" * 64,)).to_json()},
        {"error": {"a": 1}},
    ],
)
def test_a_record_that_is_none_is_nobodys(tmp_path, trust, answer):
    """Of a stage that is wanted: what one node says of it is no stage, so it is built here."""
    node = Node("node", tmp_path, trust)
    answer = {**answer, "kind": kind_of(node.store)}
    with (
        stores(tmp_path, "liar") as (store,),
        serving(store, trust[0], node="liar", ops={"stage": lambda session, _said: session.wire.send(answer)}) as liar,
    ):
        node.transfer.meet([liar])
        errand = Errand(node.transfer, "key", "repo", lambda *_: None)
        try:
            found = errand.look(node.transfer.peers())
            assert not found or errand.bring(found) is None
        finally:
            errand.left()
            node.close()


def test_a_failure_with_a_log_that_nobody_printed_is_still_a_failure(tmp_path, trust):
    node = Node("node", tmp_path, trust)

    def claim(session, _said):
        session.wire.send({"outcome": "failed", "holders": [], "message": "no such commit", "log": "\ud800 and \udcff"})

    with stores(tmp_path, "liar") as (store,), serving(store, trust[0], node="liar", ops={"claim": claim}) as liar:
        node.transfer.meet([liar])
        errand = Errand(node.transfer, key_owned_by("liar", "node"), "repo", lambda *_: None)
        try:
            with pytest.raises(StageFailed, match="no such commit") as caught:
                errand.begin()
            assert b" and " in caught.value.log
        finally:
            errand.left()
            node.close()


def test_numbers_that_cannot_be_reckoned_with_do_not_end_the_spreading(tmp_path, trust, monkeypatch):
    """One node says of a stage that it has 10**400 bytes; what the other has comes all the same."""
    one, two = Node("one", tmp_path, trust), Node("two", tmp_path, trust)

    def hot(session, _said):
        session.wire.send({"hot": [{"key": "k", "parent": None, "name": "deps", "uses": 9, "bytes": 10**400, "cost_s": 1.0}, 7, {}]})

    with stores(tmp_path, "liar") as (store,), serving(store, trust[0], node="liar", ops={"hot": hot}) as liar:
        layer = publish(one.store, {"file": b"x"})
        one.store.put_stage(StageRecord("stage", "deps", None, (layer.id,), cost_s=1.0))
        one.store.used("stage", 9)
        two.transfer.meet([one.peer, liar])
        assert [order.key for order in two.transfer.ahead.look()] == ["stage"]

        # And whatever else it may be that nobody thought of: the thread that spreads goes on.
        real, came = two.transfer.ahead.look, threading.Event()
        looks = iter([IndexError("of something"), RuntimeError("of something else")])

        def look():
            for error in looks:
                raise error
            came.set()
            return real()

        monkeypatch.setattr(two.transfer.ahead, "look", look)
        two.transfer.ahead._budget = Budget(every_s=0.01)
        two.transfer.ahead.start()
        assert came.wait(SOON_S)
        one.close()
        two.close()


def test_a_stage_that_was_said_to_be_small_evicts_nothing_when_it_comes_ahead_of_demand(tmp_path, trust):
    """Nor does it come for free: what it takes is counted, not what was said."""
    one, two = Node("one", tmp_path, trust), Node("two", tmp_path, trust)
    for node, key, mib in ((two, "kept", 2), (one, "large", 4), (one, "small", 1)):
        layer = publish(node.store, {"file": os.urandom(mib << 20)})
        node.store.put_stage(StageRecord(key, "deps", None, (layer.id,), cost_s=1.0))
    one.transfer._server._ops["hot"] = lambda session, _said: session.wire.send(
        {"hot": [Heat(key, "one", None, "deps", 9.0, 1, 1.0).to_data() for key in ("large", "small")]}
    )
    two.store.budget_bytes = 5 << 20
    meet([one, two])
    came = {order.key: two.transfer.ahead.bring(order) for order in two.transfer.ahead.look()}

    assert came == {"large": False, "small": True}
    assert {record.key for record in two.store.stages()} == {"kept", "small"}
    assert two.transfer.ahead._brought["small"] >= 1 << 20
    one.close()
    two.close()


@pytest.mark.parametrize("holders", [7, None, {"a": 1}, "one"])
@pytest.mark.parametrize("outcome", ["granted", "there", "perhaps", None, ["there"]])
def test_an_owner_that_answers_nonsense_is_passed_over(tmp_path, trust, outcome, holders):
    node = Node("node", tmp_path, trust)

    def claim(session, _said):
        session.wire.send({"outcome": outcome, "holders": holders, "message": 7, "log": None})

    with stores(tmp_path, "liar") as (store,), serving(store, trust[0], node="liar", ops={"claim": claim}) as liar:
        node.transfer.meet([liar])
        errand = Errand(node.transfer, key_owned_by("liar", "node"), "repo", lambda *_: None)
        try:
            assert errand.begin() is None, "it builds: the next owner is itself"
        finally:
            errand.left()
            node.close()


def test_holders_that_are_no_names_are_nobody(tmp_path, trust):
    node = Node("node", tmp_path, trust)

    def claim(session, _said):
        session.wire.send({"outcome": "there", "holders": [["a"], {"b": 1}, 7, None, "x" * 1000], "message": "", "log": ""})

    with stores(tmp_path, "liar") as (store,), serving(store, trust[0], node="liar", ops={"claim": claim}) as liar:
        node.transfer.meet([liar])
        errand = Errand(node.transfer, key_owned_by("liar", "node"), "repo", lambda *_: None)
        try:
            assert errand.begin() is None
        finally:
            errand.left()
            node.close()


# ---- what it asks ----


@pytest.fixture
def node(tmp_path, trust):
    made = Node("node", tmp_path, trust)
    yield made
    made.close()


def is_served(node, trust):
    with dialer(trust[1]).dial(node.peer) as one:
        return one.ask("stage", key="key")["record"] is None


@pytest.mark.parametrize(
    "said",
    [
        {"op": None},
        {"op": ["stage"]},
        {},
        {"op": "stage", "key": "../../etc/passwd"},
        {"op": "stage", "key": {"a": 1}},
        {"op": "layer", "layer": "sha256-" + "0" * 64},
        {"op": "layer", "layer": "../x"},
        {"op": "chunk", "chunk": 0},
        {"op": "chunk", "chunk": True},
        {"op": "claim", "key": "key"},
        {"op": "claim", "key": "a/b", "not_at": []},
        {"op": "claim", "key": "key", "not_at": {"a": 1}},
        {"op": "there", "holders": ["node"]},
        {"op": "done", "outcome": "failed"},
        {"op": "bring", "key": "../x", "from": "node"},
        {"op": "bring", "key": "snap-1", "from": "nobody"},
        {"op": "bring", "key": "snap-1"},
    ],
    ids=str,
)
def test_a_question_that_is_none_is_refused_in_words(node, trust, said):
    with dialer(trust[1]).dial(node.peer) as one:
        one.send(said)
        with pytest.raises(Refused):
            one.answer()
        assert one.ask("stage", key="key")["record"] is None, "and the next is answered"


def test_whatever_is_asked_is_answered_or_ends_its_connection_alone(node, trust):
    """Two thousand questions of known names and odd contents."""
    chance = random.Random(20261117)
    odd = [None, True, 0, -1, 1 << 70, 0.5, float("nan"), "", "key", "../x", "\ud800", [], ["node"], {}, {"a": 1}, "x" * 5000]
    names = ("key", "layer", "chunk", "not_at", "holders", "outcome", "message", "log", "from", "is_known", "wait", "error")
    one, answered, ended = dialer(trust[1]).dial(node.peer), 0, 0
    for _ in range(2000):
        op = chance.choice([*(name for name in node.transfer._server._ops if name != "beat"), None, [], "op"])
        try:
            one.send({"op": op, **{name: chance.choice(odd) for name in chance.sample(names, chance.randint(0, 5))}})
            while one.receive(waits_s=SOON_S).get("wait"):
                pass
            answered += 1
        except PeerFault:
            ended += 1
            one.close()
            one = dialer(trust[1]).dial(node.peer)
    one.close()

    assert ended == 0
    assert answered == 2000
    assert is_served(node, trust)
    assert node.store.layers() == node.store.stages() == []


@pytest.mark.parametrize("number", [-1, 1, 1 << 70, True, 0.0, None, "0", [0]])
def test_a_chunk_that_there_is_not_is_refused(node, trust, number):
    layer = publish(node.store, {"file": b"x"})
    node.store.put_stage(StageRecord("stage", "deps", None, (layer.id,)))
    with dialer(trust[1]).dial(node.peer) as one:
        one.ask("layer", layer=layer.id, is_known=True)
        with pytest.raises(Refused):
            one.ask("chunk", chunk=number)
        assert one.ask("chunk", chunk=0)["bytes"] == 1


def test_a_stage_said_to_be_at_a_thousand_odd_names_is_remembered_briefly(node, trust):
    with dialer(trust[1]).dial(node.peer) as one:
        assert one.ask("claim", key="key", not_at=[])["outcome"] == "granted"
        one.ask("there", holders=["n" * 100_000, None, 7, *map(str, range(1000))])
        one.ask("there", holders="node")
    (known,) = node.transfer.claims._hints.values()
    assert len(known) <= 16
    assert max(map(len, known)) <= 200


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<I", (1 << 20) + 1),
        struct.pack("<I", 0),
        struct.pack("<I", 2) + b"[]",
        struct.pack("<I", 5) + b"\xff\xff\xff\xff\xff",
        struct.pack("<I", 100_000) + b"[" * 100_000,
        struct.pack("<I", 5000) + b"9" * 5000,
        struct.pack("<I", 1000) + b'{"op": ',
        b"\1",
    ],
    ids=["too long", "empty", "list", "no text", "deep", "number", "half of it", "half of its length"],
)
def test_a_message_that_is_none_ends_its_connection_alone(node, trust, monkeypatch, sent):
    monkeypatch.setattr(wire, "SILENCE_S", 0.3)
    with dialer(trust[1]).dial(node.peer) as one:
        one.send_bytes(sent)
        with pytest.raises(PeerFault):
            one.receive(waits_s=SOON_S)
    monkeypatch.undo()
    assert is_served(node, trust)


def test_who_speaks_while_it_waits_or_leaves_has_no_claim(node, trust):
    with dialer(trust[1]).dial(node.peer) as first, dialer(trust[1]).dial(node.peer) as second:
        assert first.ask("claim", key="key", not_at=[])["outcome"] == "granted"
        second.send({"op": "claim", "key": "key", "not_at": []})
        second.send({"op": "claim", "key": "key", "not_at": []})
        with pytest.raises(PeerFault):
            while second.receive(waits_s=SOON_S).get("wait"):
                pass
    with dialer(trust[1]).dial(node.peer) as third:
        assert third.ask("claim", key="key", not_at=[])["outcome"] == "granted"


# ---- many, and silent ones ----


def test_more_who_wait_than_there_are_threads_are_all_told(node, trust):
    """Three hundred wait for one build, and the node answers others meanwhile: each costs a connection, none is sent to build for itself."""
    with contextlib.ExitStack() as stack:
        dialled = [stack.enter_context(dialer(trust[1], node=f"n{number}").dial(node.peer)) for number in range(300)]
        first, *others = dialled
        assert first.ask("claim", key="key", not_at=[])["outcome"] == "granted"
        for one in others:
            one.send({"op": "claim", "key": "key", "not_at": []})
        assert is_served(node, trust)
        first.ask("done", outcome="there")
        for one in others:
            said = one.answer(waits_s=SOON_S)
            assert (said["outcome"], said["holders"]) == ("there", ["n0"])


def test_more_who_fetch_than_there_are_threads_wait_for_their_turn(tmp_path, trust, monkeypatch):
    monkeypatch.setattr(serve, "_THREADS", 2)
    names = [f"s{number}" for number in range(8)]
    with stores(tmp_path, "there", *names) as (there, *others), serving(there, trust[0]) as peer:
        layer = publish(there, {f"f{number}": os.urandom(3 << 20) for number in range(4)} | {"large": os.urandom(2 * CHUNK_BYTES)})
        threads = [threading.Thread(target=Fetch(one, dialer(trust[1])).layer, args=(layer.id, [peer])) for one in others]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for one in others:
            one.verify(layer.id)


def test_who_waits_for_a_turn_is_told_so(two, trust, monkeypatch):
    """The line may be longer than anybody waits for a node that says nothing."""
    monkeypatch.setattr(serve, "_THREADS", 1)
    monkeypatch.setattr("untax.cluster.transfer.beats.BEAT_S", 0.02)
    begun, done = threading.Event(), threading.Event()

    def hold(session, _said):
        begun.set()
        done.wait(SOON_S)
        session.wire.send({})

    with serving(two[0], trust[0], ops={"hold": hold}) as peer:
        with dialer(trust[1]).dial(peer) as first, dialer(trust[1]).dial(peer) as second:
            first.send({"op": "hold"})
            assert begun.wait(SOON_S)
            second.send({"op": "stage", "key": "key"})
            assert [second.receive(waits_s=SOON_S) for _ in range(3)] == [{"wait": True}] * 3
            done.set()
            assert second.answer(waits_s=SOON_S)["record"] is None
            assert second.ask("stage", key="key")["record"] is None


def test_a_fetch_does_with_fewer_connections(two, trust, monkeypatch):
    """A node that takes one and no more gives the layer over that."""
    there, here = two
    layer = publish(there, {f"f{number}": os.urandom(3 << 20) for number in range(4)})
    real, begun = serve.Server._layer, []
    monkeypatch.setattr(serve.Server, "_layer", lambda self, session, said: (begun.append(said), real(self, session, said))[1])
    monkeypatch.setattr(serve, "_MOST", 1)
    with serving(there, trust[0]) as peer:
        Fetch(here, dialer(trust[1])).layer(layer.id, [peer])
    here.verify(layer.id)
    assert len(begun) == 1, "and not by beginning anew each time"


def test_who_was_answered_at_once_may_be_silent_afterwards(node, trust, monkeypatch):
    """Being told of an answer that was sent already is no reason to wait for the next question in a thread, and to lose patience there."""
    monkeypatch.setattr(wire, "SILENCE_S", 0.3)
    with dialer(trust[1]).dial(node.peer) as one:
        assert one.ask("claim", key="key", not_at=[], waits_s=SOON_S)["outcome"] == "granted"
        (session,) = node.transfer._server._sessions
        session.ring()
        with pytest.raises(PeerFault, match="timed out"):
            one.receive(waits_s=1.0)
        assert one.ask("done", outcome="there", waits_s=SOON_S) == {}


def test_a_silent_holder_loses_its_claim(node, trust, monkeypatch):
    """It has not gone, and its kernel answers for it: but it no longer says that it builds."""
    monkeypatch.setattr("untax.cluster.transfer.room.BEAT_S", 0.1)
    monkeypatch.setattr(serve, "SILENCE_S", 0.5)
    with dialer(trust[1]).dial(node.peer) as first, dialer(trust[1]).dial(node.peer) as second:
        assert first.ask("claim", key="key", not_at=[])["outcome"] == "granted"
        second.send({"op": "claim", "key": "key", "not_at": []})
        said = second.answer(waits_s=SOON_S)
        assert said["outcome"] == "granted"


def test_a_copy_waits_for_a_node_that_is_at_it_and_for_no_other(node, trust, monkeypatch):
    """However long it takes; but one that says nothing is given up, and whoever asked is told which."""
    monkeypatch.setattr("untax.cluster.transfer.room.BEAT_S", 0.02)
    done = threading.Event()
    monkeypatch.setattr(node.transfer, "bring", lambda _key, _source: done.wait(SOON_S))
    with dialer(trust[1]).dial(node.peer) as one:
        one.send({"op": "bring", "key": "snap-1", "from": "there"})
        assert [one.receive(waits_s=SOON_S) for _ in range(3)] == [{"wait": True}] * 3
        done.set()
        while (said := one.receive(waits_s=SOON_S)).get("wait"):
            pass
        assert said == {}

    monkeypatch.setattr(wire, "SILENCE_S", 0.3)
    node.transfer._server._ops["bring"] = lambda _session, _said: None
    with pytest.raises(StageUnavailable, match="node cannot be reached"):
        copy(dialer(trust[1]), node.peer, "snap-1", "there")


def test_a_holder_says_that_it_is_at_it(tmp_path, trust, monkeypatch):
    """Again and again, also after it said that others have it."""
    monkeypatch.setattr("untax.cluster.transfer.beats.BEAT_S", 0.02)
    node, owner = Node("node", tmp_path, trust), Node("owner", tmp_path, trust)
    meet([node, owner])
    heard = threading.Semaphore(0)
    owner.transfer._server._ops["beat"] = lambda _session, _said: heard.release()
    errand = Errand(node.transfer, key_owned_by("owner", "node"), "repo", lambda *_: None)
    try:
        assert errand.begin() is None
        for _ in range(3):
            assert heard.acquire(timeout=SOON_S)
        errand._say("there", holders=["node"])
        for _ in range(3):
            assert heard.acquire(timeout=SOON_S)
        errand.done()
        assert node.transfer.beats._wires == set()
        assert owner.transfer.claims._hints[errand._key][0] == "node"
    finally:
        errand.left()
        node.close()
        owner.close()


@pytest.mark.parametrize("is_beating", [False, True])
def test_an_owner_that_falls_silent_is_left_for_the_next(tmp_path, trust, monkeypatch, is_beating):
    """As long as it says that the claim waits, it is waited for; then no longer than for anybody who says nothing."""
    monkeypatch.setattr(wire, "SILENCE_S", 0.5)
    node = Node("node", tmp_path, trust)
    hung = []

    def claim(session, _said):
        if is_beating:
            session.wire.send({"wait": True})
        hung.append(session)

    with stores(tmp_path, "silent") as (store,), serving(store, trust[0], node="silent", ops={"claim": claim}) as silent:
        node.transfer.meet([silent])
        errand = Errand(node.transfer, key_owned_by("silent", "node"), "repo", lambda *_: None)
        try:
            assert errand.begin() is None
            assert hung
        finally:
            errand.left()
            node.close()
