"""What a list of entries must be before anything is made of it: a hostile one has a fitting id, because its author chose both."""

import hashlib
import zlib

import pytest
from tests.transfers import MARKS
from tests.unit.layers.odd import furnish

from untax._remove import remove_tree
from untax.cluster.transfer.plan import CHUNK_BYTES, chunks_of
from untax.core.errors import StageFailed
from untax.layers.digest import id_of_rows
from untax.layers.rows import Row, path_of, read_rows
from untax.layers.store import LayerStore

NOTHING = hashlib.sha256().hexdigest().encode()
TOP = b"d\x00\x00755\x000\x000\x00\x00\x00"
UP = b"u\0"


def entry(kind, name, *, mode=b"644", uid=b"0", gid=b"0", what=b"", attributes=b""):
    return b"\0".join((kind, name, mode, uid, gid, what, attributes, b""))


def file(name, size=1, **changes):
    return entry(b"f", name, what=b"0 %d %s" % (size, NOTHING), **changes)


def read(*rows, may_climb=True):
    packed = zlib.compress(b"".join(len(row).to_bytes(4, "little") + row for row in rows))
    return read_rows(packed, id_of_rows(rows), may_climb=may_climb)


def test_the_rows_of_a_real_layer_are_read_back(tmp_path):
    store = LayerStore(tmp_path / "layers", marks=MARKS)
    try:
        with store.draft() as draft:
            furnish(draft.tree, outside=tmp_path)
            layer = draft.publish()
        rows = read_rows(store.rows(layer.id), layer.id)
        by_name = {row.name: row for row in rows}

        assert by_name[b"second name"].kind == "h"
        assert rows[by_name[b"second name"].first].name == b"plain"
        assert by_name[b"whiteout"].kind == "w"
        assert max(len(path_of(rows, number)) for number in range(len(rows))) == 1201
    finally:
        store.close()
        remove_tree(tmp_path / "layers")


def test_damaged_rows_are_found_out_again(tmp_path):
    store = LayerStore(tmp_path / "layers", marks=MARKS)
    with store.draft() as draft:
        (draft.tree / "file").write_text("x")
        layer = draft.publish()
    (store.root / "trees" / layer.id / "rows").write_bytes(b"not these")

    assert read_rows(store.rows(layer.id), layer.id)[1].name == b"file"
    store.close()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [file(b"a")],
        [TOP],
        [TOP, UP, UP],
        [TOP, UP, file(b"a")],
        [TOP, file(b".."), UP],
        [TOP, file(b"."), UP],
        [TOP, file(b""), UP],
        [TOP, file(b"a/../../etc"), UP],
        [TOP, file(b"/etc/passwd"), UP],
        [TOP, file(b"n" * 256), UP],
        [TOP, file(b"a"), file(b"a"), UP],
        [TOP, file(b"b"), file(b"a"), UP],
        [TOP, entry(b"c", b"null", what=b"1:3"), UP],
        [TOP, entry(b"b", b"disk", what=b"8:0"), UP],
        [TOP, entry(b"l", b"a", what=b""), UP],
        [TOP, entry(b"p", b"a", what=b"x"), UP],
        [TOP, b"h\0a\x001\0", UP],
        [TOP, b"h\0a\x000\0", UP],
        [TOP, b"h\0a\x00-1\0", UP],
        [TOP, entry(b"d", b"a"), b"h\0b\x001\0", UP, UP],
        [TOP, file(b"a", mode=b"10777"), UP],
        [TOP, file(b"a", mode=b"9"), UP],
        [TOP, file(b"a", uid=b"65536"), UP],
        [TOP, file(b"a", gid=b"-1"), UP],
        [TOP, file(b"a", size=1 << 60), UP],
        [TOP, entry(b"f", b"a", what=b"0 1 nothing"), UP],
        [TOP, file(b"a", attributes=b"x"), UP],
        [TOP, b"", UP],
        [TOP, *[entry(b"d", b"d")] * 4096, *[UP] * 4097],
    ],
)
def test_what_no_layer_is_is_refused(rows):
    with pytest.raises(StageFailed, match="refused"):
        read(*rows)


def test_a_link_out_of_the_tree_is_refused_in_an_image_and_a_file_with_a_target_elsewhere():
    out = entry(b"l", b"way", what=b"../../etc/passwd")

    assert read(TOP, out, UP)[1].target == b"../../etc/passwd"
    assert read(TOP, entry(b"l", b"way", what=b"/etc/passwd"), UP, may_climb=False)
    with pytest.raises(StageFailed, match="out of the tree"):
        read(TOP, out, UP, may_climb=False)


def test_rows_of_another_id_or_without_an_end_are_refused():
    packed = zlib.compress(len(TOP).to_bytes(4, "little") + TOP)
    with pytest.raises(StageFailed, match="another layer"):
        read_rows(packed, "sha256-" + "0" * 64)
    for bad in (b"", packed[:-3], packed + b"more", b"\xff" * 9, zlib.compress(bytes(257 << 20), 9), zlib.compress(b"\xff\xff\xff\x7fxx")):
        with pytest.raises(StageFailed, match="refused"):
            read_rows(bad, "sha256-" + "0" * 64)


def test_chunks_cover_every_byte_once_and_stay_small():
    sizes = [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3, 40 << 30, *[10] * 5000, 1 << 20]
    rows = [Row("d", b"", 0), *(Row("f", b"%06d" % n, 0, size=size) for n, size in enumerate(sizes))]
    covered = dict.fromkeys(range(len(rows)), 0)
    for chunk in chunks_of(rows):
        assert len(chunk) == 1 or sum(piece.length for piece in chunk) <= CHUNK_BYTES
        for piece in chunk:
            assert piece.offset == covered[piece.row]
            covered[piece.row] += piece.length

    assert [covered[number + 1] for number in range(len(sizes))] == sizes
    assert len(chunks_of(rows)) < 5000
