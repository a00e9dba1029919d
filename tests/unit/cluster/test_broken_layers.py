"""A layer that its author made up, or gives wrongly, or not to its end, is refused for what it is: nothing of it stays, and nothing else goes for it."""

import base64
import contextlib
import functools
import json
import os
import struct
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.transfers import MARKS, ODD_DATA, dialer, publish, serving
from tests.unit.cluster.test_rows import TOP, UP, entry, file

from untax.cluster.transfer import fetch, wire
from untax.cluster.transfer.arrival import Arrival, Mismatch, read_map
from untax.cluster.transfer.fetch import Fetch
from untax.cluster.transfer.outgoing import Outgoing
from untax.cluster.transfer.plan import CHUNK_BYTES, Piece
from untax.core.errors import StageError, StageFailed, StageUnavailable
from untax.layers.digest import attributes_hash, id_of_rows
from untax.layers.rows import read_rows
from untax.layers.store import StageRecord


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


@settings(max_examples=300, deadline=None)
@given(
    rest=st.fixed_dictionaries({"times": st.lists(ODD_DATA, max_size=2) | ODD_DATA, "attributes": ODD_DATA, "stored": ODD_DATA}) | ODD_DATA
)
def test_whatever_goes_with_the_rows_is_a_refusal_or_fits(tmp_path_factory, rest):
    with contextlib.suppress(StageFailed):
        made = Made(WITH_ONE, rest).arrival(tmp_path_factory.getbasetemp() / "none")
        assert 0 <= made.stored <= made.contents_bytes


FIELDS = st.sampled_from(
    [b"", b"d", b"f", b"l", b"h", b"w", b"c", b"a", b"b", b".", b"..", b"a/b", b"0", b"1", b"-1", b"755", b"0 1 " + b"0" * 64]
)
TEXTS = st.lists(FIELDS | st.binary(max_size=6), max_size=8).map(b"\0".join) | st.sampled_from(
    [UP, TOP, file(b"a"), entry(b"d", b"b"), b"h\0c\x001\0"]
)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(TEXTS, max_size=8).map(lambda some: [TOP, *some]))
def test_whatever_rows_are_made_up_lead_nowhere_else(texts):
    """Refused, or a tree: every name is one below its parent, every parent a directory before it, every hard link one of a file before it."""
    with contextlib.suppress(StageFailed):
        rows = read_rows(packed(texts), id_of_rows(texts))
        for number, row in enumerate(rows[1:], 1):
            assert row.name not in (b"", b".", b"..")
            assert b"/" not in row.name
            assert row.parent < number
            assert rows[row.parent].kind == "d"
            assert row.kind != "h" or (row.first < number and rows[row.first].kind in "flps")


def test_rows_without_number_are_not_listed(two):
    """Sixty million entries of nothing, in a few kilobytes."""
    with pytest.raises(StageFailed, match="more than"):
        read_rows(zlib.compress(bytes(240 << 20), 1), "sha256-" + "0" * 64)


def test_a_chunk_that_is_sent_again_in_the_place_of_another_is_found_out(two, trust):
    """Of a large file's parts and of whole files: what they hash to is theirs alone."""
    there, here = two
    layer = publish(there, {"large": os.urandom(2 * CHUNK_BYTES), "a": os.urandom(CHUNK_BYTES), "b": os.urandom(CHUNK_BYTES)})

    def first(session, said):
        chunks = session.outgoing._chunks
        at = next(at for at, chunk in enumerate(chunks) if len(chunk) == len(chunks[said["chunk"]]) and chunk[0].length == CHUNK_BYTES)
        (piece,) = chunks[at]
        (wanted,) = chunks[said["chunk"]]
        head = struct.pack("<IQQ", 1, wanted.offset, wanted.length)
        data = (there.layer(layer.id).tree / os.fsdecode(session.outgoing._rows[piece.row].name)).read_bytes()[: wanted.length]
        session.wire.send({"map": len(head), "bytes": len(data)})
        session.wire.send_bytes(head + data)

    with serving(there, trust[0], node="liar", ops={"chunk": first}) as liar, serving(there, trust[0]) as honest:
        with pytest.raises(StageUnavailable, match="liar"):
            Fetch(here, dialer(trust[1])).layer(layer.id, [liar])
        assert here.layers() == []
        Fetch(here, dialer(trust[1])).layer(layer.id, [liar, honest])
    here.verify(layer.id)


POINTS = ("layer", "rows", "chunk", "map", "data")


@pytest.mark.parametrize("point", POINTS)
def test_a_node_that_hangs_is_left_for_the_next(two, trust, monkeypatch, point):
    """Wherever it stops, with its connection open: what it gave is kept, and the next one gives the rest."""
    there, here = two
    layer = publish(there, {"file": os.urandom(100_000), "large": os.urandom(CHUNK_BYTES + 5)})
    monkeypatch.setattr(wire, "SILENCE_S", 1.0)
    monkeypatch.setattr(fetch, "SILENCE_S", 1.0)
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
