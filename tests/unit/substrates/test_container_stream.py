"""What an engine's stream is cut into, however the bytes arrive."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from untax.core.errors import ProtocolError
from untax.substrates._container_stream import Pieces


def cut(kind: int, data: bytes) -> bytes:
    return bytes((kind, 0, 0, 0)) + len(data).to_bytes(4) + data


@given(st.lists(st.tuples(st.sampled_from([1, 2]), st.binary(max_size=40)), max_size=8), st.lists(st.integers(1, 60), max_size=20))
def test_the_two_streams_come_apart_wherever_the_bytes_are_cut(said, cuts):
    whole = b"".join(cut(kind, data) for kind, data in said)
    pieces, got, at = Pieces(), {True: b"", False: b""}, 0
    for size in [*cuts, len(whole)]:
        for is_output, piece in pieces.feed(whole[at : at + size]):
            got[is_output] += piece
        at += size

    assert got[True] == b"".join(data for kind, data in said if kind == 1)
    assert got[False] == b"".join(data for kind, data in said if kind == 2)


@pytest.mark.parametrize("head", [b"\x03\0\0\0\0\0\0\1x", b"\1\0\0\1\0\0\0\1x", b"HTTP/1.1 500 no"])
def test_what_is_not_cut_into_pieces_is_refused(head):
    with pytest.raises(ProtocolError):
        Pieces().feed(head)
