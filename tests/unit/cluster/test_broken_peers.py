"""A node of the fleet that is broken, or hostile, takes nothing from the others but what it asked for: no stage, no thread, no lease's time."""

import base64
import contextlib
import functools
import json
import os
import struct
import threading
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfers import MARKS, Node, contexts, dialer, meet, serving, stores
from tests.unit.cluster.test_rows import TOP, UP, entry, file

from untax.cluster.transfer import fetch, serve, wire
from untax.cluster.transfer.arrival import Arrival, Mismatch, read_map
from untax.cluster.transfer.claims import owners
from untax.cluster.transfer.errand import Errand
from untax.cluster.transfer.fetch import Fetch, Throttle
from untax.cluster.transfer.outgoing import Outgoing
from untax.cluster.transfer.pace import Wanted
from untax.cluster.transfer.plan import CHUNK_BYTES, Piece
from untax.cluster.transfer.spread import Budget
from untax.cluster.transfer.wire import PeerFault, Refused, Wires
from untax.core.errors import StageError, StageFailed, StageUnavailable
from untax.layers.digest import attributes_hash, id_of_rows
from untax.layers.store import StageRecord

SOON_S = 30.0  # for what takes an instant, on a machine that has other things to do


@pytest.fixture(scope="module")
def trust(tmp_path_factory):
    return contexts(tmp_path_factory.mktemp("trust"))


@pytest.fixture
def two(tmp_path):
    with stores(tmp_path, "there", "here") as opened:
        yield opened


def publish(store, files):
    with store.draft() as draft:
        for name, data in files.items():
            (draft.tree / name).write_bytes(data)
        return draft.publish()


def packed(rows):
    return zlib.compress(b"".join(len(row).to_bytes(4, "little") + row for row in rows))


def rest_of(value):
    return zlib.compress(json.dumps(value).encode())


class Made:
    """A layer that its author made up: rows with an id that fits, and whatever goes with them."""

    def __init__(self, rows, rest):
        own = [_own(row) for row in rows]
        self.id = id_of_rows(own)
        self.packed_rows = packed(own)
        self.rest = rest_of(rest)

    def arrival(self, place):
        return Arrival(place, self.id, self.packed_rows, self.rest, MARKS, may_climb=True)

    def send_chunk(self, wire, number):
        wire.send({"map": 4, "bytes": 0})  # nothing but a hole
        wire.send_bytes(bytes(4))


def _own(row):
    """Of this user, who could give it to nobody else."""
    fields = row.split(b"\0")
    if len(fields) == 8:
        fields[3:5] = (b"%d" % os.geteuid(), b"%d" % os.getegid())
    return b"\0".join(fields)


class Anything:
    """A store that has whatever is asked for."""

    def __init__(self, store):
        self._store = store

    def pin(self, ids):
        return self._store.pin(())


def fetched(here, store, trust, made):
    with serving(Anything(store), trust[0], prepared={made.id: made}) as peer:
        return Fetch(here, dialer(trust[1])).layer(made.id, [peer])


# ---- what it says that a layer is ----


def test_a_layer_of_an_impossible_size_evicts_nothing(two, trust):
    """Neither by what it says of itself, nor by rows that it made up: what there could never be room for is refused, and the store stays as it was."""
    there, here = two
    kept = publish(here, {"kept": b"of a stage that nobody uses at the moment"})
    here.put_stage(StageRecord("kept", "deps", None, (kept.id,)))
    layer = publish(there, {"file": b"x" * 1000})
    honest = Outgoing(there, layer.id)
    rest = json.loads(zlib.decompress(honest.rest))
    honest.rest = rest_of({**rest, "stored": 10**18})
    with serving(there, trust[0], prepared={layer.id: honest}) as peer:
        assert Fetch(here, dialer(trust[1])).layer(layer.id, [peer]).id == layer.id
    assert here.stage("kept") is not None

    giant = Made([TOP, file(b"giant", size=1 << 50), UP], {"times": [0], "attributes": {}, "stored": 10**18})
    with pytest.raises(StageUnavailable, match="full"):
        fetched(here, there, trust, giant)
    assert here.stage("kept") is not None


WITH_ONE = [TOP, file(b"a"), UP]


@pytest.mark.parametrize(
    "rest",
    [
        None,
        [],
        {},
        {"times": 7, "attributes": {}, "stored": 0},
        {"times": [], "attributes": {}, "stored": 0},
        {"times": [0, 0], "attributes": {}, "stored": 0},
        {"times": [float("inf")], "attributes": {}, "stored": 0},
        {"times": [float("nan")], "attributes": {}, "stored": 0},
        {"times": [1 << 80], "attributes": {}, "stored": 0},
        {"times": [None], "attributes": {}, "stored": 0},
        {"times": [0], "attributes": {}, "stored": -1},
        {"times": [0], "attributes": {}, "stored": float("inf")},
        {"times": [0], "attributes": {}, "stored": "many"},
        {"times": [0], "attributes": [], "stored": 0},
        {"times": [0], "attributes": {"7": [["user.a", ""]]}, "stored": 0},
        {"times": [0], "attributes": {"-1": [["user.a", ""]]}, "stored": 0},
        {"times": [0], "attributes": {"99999999999999999999": []}, "stored": 0},
        {"times": [0], "attributes": {"x": []}, "stored": 0},
        {"times": [0], "attributes": {"1": [["user.a", ""]]}, "stored": 0},
        {"times": [0], "attributes": {"1": [["user.\ud800", ""]]}, "stored": 0},
        {"times": [0], "attributes": {"1": [["user.a", "not base64"]]}, "stored": 0},
        {"times": [0], "attributes": {"1": [["user.a", 7]]}, "stored": 0},
        {"times": [0], "attributes": {"1": ["ab", "c"]}, "stored": 0},
        {"times": [0], "attributes": {"1": 7}, "stored": 0},
    ],
    ids=str,
)
def test_what_goes_with_the_rows_is_held_to_them(two, trust, rest):
    """Whatever it is, the answer is a refusal of ours: not an error that nobody expects, which would end whoever fetches."""
    there, here = two
    with pytest.raises(StageFailed, match="refused"):
        fetched(here, there, trust, Made(WITH_ONE, rest))
    assert here.layers() == []


def with_attribute(row, name, value):
    made = row.split(b"\0")
    made[6] = attributes_hash([(name, value)])
    rows = [TOP, b"\0".join(made), UP]
    times = [0] * (1 if row.startswith(b"f\0") else 2)
    return Made(rows, {"times": times, "attributes": {"1": [[name, base64.b64encode(value).decode()]]}, "stored": 0})


@pytest.mark.parametrize(
    "made",
    [
        with_attribute(file(b"a"), "security.capability", b"no capability"),
        with_attribute(entry(b"l", b"a", what=b"b"), "user.of-a-link", b"x"),
        with_attribute(file(b"a"), "user." + "n" * 300, b"x"),
        with_attribute(file(b"a"), "user.a", b"x" * 70_000),
        Made([TOP, file(b"a", size=1 << 45), UP], {"times": [0], "attributes": {}, "stored": 0}),
    ],
    ids=["capability", "link", "name", "value", "size"],
)
def test_what_this_file_system_cannot_have_is_left_for_the_next_node(two, trust, made):
    """The fault of one layer, and no reason to take the store for broken, or its disk for full."""
    there, here = two
    try:
        fetched(here, there, trust, made)
    except StageError as exc:
        assert "refused" in exc.message or "cannot be made here" in exc.message or "what was to be" in exc.message
        assert exc.stage in ("layer", "store")
        assert here.layers() == []
    else:
        here.verify(made.id)  # there are some that can


def test_a_million_giants_that_are_all_hole_take_no_memory(two):
    """What a workload can make in a second must not make a node list four thousand parts of each."""
    rows = [TOP, *(file(b"%07d" % number, size=1 << 40) for number in range(2000)), UP]
    with pytest.raises(StageFailed, match="parts"):
        Made(rows, {}).arrival(two[1].arrivals / "x")


@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200), lengths=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=5))
def test_a_map_stays_inside_its_pieces(data, lengths):
    pieces = tuple(Piece(number, 0, length) for number, length in enumerate(lengths))
    with contextlib.suppress(Mismatch):
        for piece, extents in zip(pieces, read_map(memoryview(data), pieces), strict=True):
            ends = [0, *(offset + size for offset, size in extents)]
            assert all(offset >= end and size > 0 for (offset, size), end in zip(extents, ends, strict=False))
            assert ends[-1] <= piece.length


ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4) | st.sampled_from(["0", "1", "2"]), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(rest=st.fixed_dictionaries({"times": st.lists(ODD, max_size=2) | ODD, "attributes": ODD, "stored": ODD}) | ODD)
def test_whatever_goes_with_the_rows_is_a_refusal_or_fits(tmp_path_factory, rest):
    with contextlib.suppress(StageFailed):
        made = Made(WITH_ONE, rest).arrival(tmp_path_factory.getbasetemp() / "none")
        assert 0 <= made.stored <= made.contents_bytes


# ---- what it says of itself ----


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


def key_owned_by(node, *others):
    return next(key for key in (f"key-{number}" for number in range(1000)) if owners(key, (node, *others))[0] == node)


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
            while one.answer().get("wait"):
                pass
        assert one.ask("stage", key="key")["record"] is None, "and the next is answered"


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
        assert one.ask_long("claim", key="key", not_at=[])["outcome"] == "granted"
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
        assert first.ask_long("claim", key="key", not_at=[])["outcome"] == "granted"
        second.send({"op": "claim", "key": "key", "not_at": []})
        second.send({"op": "claim", "key": "key", "not_at": []})
        with pytest.raises(PeerFault):
            while second.receive(waits_s=SOON_S).get("wait"):
                pass
    with dialer(trust[1]).dial(node.peer) as third:
        assert third.ask_long("claim", key="key", not_at=[])["outcome"] == "granted"


# ---- many, and silent ones ----


def test_more_who_wait_than_there_are_threads_are_all_told(node, trust):
    """Three hundred wait for one build, and the node answers others meanwhile: each costs a connection, none is sent to build for itself."""
    with contextlib.ExitStack() as stack:
        dialled = [stack.enter_context(dialer(trust[1], node=f"n{number}").dial(node.peer)) for number in range(300)]
        first, *others = dialled
        assert first.ask_long("claim", key="key", not_at=[])["outcome"] == "granted"
        for one in others:
            one.send({"op": "claim", "key": "key", "not_at": []})
        assert is_served(node, trust)
        first.ask("done", outcome="there")
        for one in others:
            while (said := one.answer(waits_s=SOON_S)).get("wait"):
                pass
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
        assert one.ask_long("claim", key="key", not_at=[])["outcome"] == "granted"
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
        assert first.ask_long("claim", key="key", not_at=[])["outcome"] == "granted"
        second.send({"op": "claim", "key": "key", "not_at": []})
        while (said := second.answer(waits_s=SOON_S)).get("wait"):
            pass
        assert said["outcome"] == "granted"


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


POINTS = ("layer", "rows", "chunk", "map", "data")


@pytest.mark.parametrize("point", POINTS)
def test_a_node_that_hangs_is_left_for_the_next(two, trust, monkeypatch, point):
    """Wherever it stops, with its connection open: what it gave is kept, and the next one gives the rest."""
    there, here = two
    layer = publish(there, {"file": os.urandom(100_000), "large": os.urandom(CHUNK_BYTES + 5)})
    monkeypatch.setattr(wire, "SILENCE_S", 0.3)
    monkeypatch.setattr(fetch, "SILENCE_S", 0.3)
    told = []

    def silent(session, said, what):
        told.append(session)
        if what == "rows":
            session.wire.send({"rows": 1000, "rest": 1000})
            session.wire.send_bytes(bytes(10))
        if what == "map":
            session.wire.send({"map": 20, "bytes": 1000})
            session.wire.send_bytes(bytes(3))
        if what == "data":
            (piece,) = session.outgoing._chunks[said["chunk"]]
            head = struct.pack("<IQQ", 1, piece.offset, piece.length)
            session.wire.send({"map": len(head), "bytes": piece.length})
            session.wire.send_bytes(head + bytes(3))

    op = "layer" if point in ("layer", "rows") else "chunk"
    ops = {op: functools.partial(silent, what=point)}
    with serving(there, trust[0], node="hangs", ops=ops) as hangs, serving(there, trust[0]) as honest:
        Fetch(here, dialer(trust[1])).layer(layer.id, [hangs, honest])
    assert told
    here.verify(layer.id)


# ---- two who bring the same layer ----


@pytest.fixture
def slow(two, trust):
    """A layer that comes ahead of demand, so slowly that it would take days; begun, and how to share its pace."""
    there, here = two
    layer = publish(there, {f"f{number}": os.urandom(3 << 20) for number in range(6)})
    wanted, wires, begun = Wanted(), Wires(), threading.Event()

    class Slow(Throttle):
        def take(self, size, hurried):
            begun.set()
            super().take(size, hurried)

    with serving(there, trust[0]) as peer:
        patient = Fetch(here, dialer(trust[1]), wires, Slow(10.0), connections=1, wanted=wanted)

        def bring():
            with contextlib.suppress(StageUnavailable):
                patient.layer(layer.id, [peer])

        thread = threading.Thread(target=bring, daemon=True)
        thread.start()
        assert begun.wait(SOON_S)
        yield layer.id, peer, wanted
        wires.stop()
        thread.join(SOON_S)
        assert not thread.is_alive()


def in_a_thread(call):
    caught = []

    def run():
        try:
            caught.append(call())
        except BaseException as exc:
            caught.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert caught, "it still waits"
    return caught[0]


def test_a_lease_does_not_wait_at_the_spreaders_pace(two, trust, slow):
    layer_id, peer, wanted = slow
    urgent = Fetch(two[1], dialer(trust[1]), wanted=wanted)

    assert in_a_thread(lambda: urgent.layer(layer_id, [peer])).id == layer_id


def test_a_wait_for_who_brings_a_layer_can_be_stopped(two, trust, slow):
    """Also when that one is another process, which nobody can hurry."""
    layer_id, peer, _ = slow
    stuck = Fetch(two[1], dialer(trust[1]))
    threading.Timer(0.3, stuck.wires.stop).start()

    assert isinstance(in_a_thread(lambda: stuck.layer(layer_id, [peer])), StageUnavailable)


def test_who_is_patient_hurries_whoever_waited_first():
    wanted, wires = Wanted(), Wires()
    with wanted.by("layer", Wires(), is_patient=False):
        with wanted.by("other", wires, is_patient=True):
            assert not wires.hurried.is_set()
        with wanted.by("layer", wires, is_patient=True):
            assert wires.hurried.is_set()
    with wanted.by("layer", later := Wires(), is_patient=True):
        assert not later.hurried.is_set()
    assert not wanted._waiting
    assert not wanted._patient
