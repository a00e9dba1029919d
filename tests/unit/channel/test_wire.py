"""Frames as literal bytes, and a parser that no byte stream can hurt."""

import itertools
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from untax.channel import wire
from untax.channel.wire import FrameParser, Reader
from untax.core.errors import ProtocolError


def parse(parser, data):
    """The frames, and whether the parser gave up."""
    frames = []
    try:
        frames.extend(parser.feed(data))  # keeps what came before an error
    except ProtocolError:
        return frames, True
    return frames, False


def test_frames_are_these_bytes():
    assert wire.frame(1, wire.PING, b"") == bytes.fromhex("08000000 01000000 05 00 0000")
    assert wire.frame(2, 0x24, b"abc", deadline_ms=1500) == bytes.fromhex("0f000000 02000000 24 01 0000 dc050000 616263")
    assert wire.frame(3, 0x24, b"", key=b"k" * 16) == bytes.fromhex("18000000 03000000 24 02 0000") + b"k" * 16
    assert wire.frame(3, 0x24, b"", deadline_ms=1, key=b"k" * 16)[9:16] == bytes.fromhex("03 0000 01000000")
    assert wire.hello("1.0") == bytes.fromhex("17000000 00000000 01 00 0000 75747831 0100 0000 03000000 312e30")
    assert wire.credit(7, 1, 65536) == bytes.fromhex("0d000000 07000000 06 00 0000 01 00000100")
    assert wire.data(7, b"xy", eof=False) == bytes.fromhex("0b000000 07000000 07 00 0000 00 7879")
    assert wire.data(7, b"", eof=True) == bytes.fromhex("09000000 07000000 07 00 0000 01")
    assert wire.cancel(9) == bytes.fromhex("08000000 09000000 03 00 0000")
    assert wire.blobs([b"a", b""]) == bytes.fromhex("02000000 01000000 61 00000000")


frames = st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 255), st.binary(max_size=300)), max_size=8)


@given(frames=frames, tail=st.binary(max_size=20), cuts=st.lists(st.integers(0, 3000)))
def test_any_split_is_parsed_like_the_whole(frames, tail, cuts):
    """Where the kernel cuts a stream is nobody's business, also when it ends in nonsense."""
    stream = b"".join(wire.frame(*frame) for frame in frames) + tail
    whole = parse(FrameParser(), stream)

    parser, seen, failed = FrameParser(), [], False
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    for start, stop in itertools.pairwise(edges):
        found, failed = parse(parser, stream[start:stop])
        seen += found
        if failed:
            break

    assert (seen, failed) == whole


@pytest.mark.parametrize("length", [0, 7, wire.FRAME_MAX_IN + 1, 2**32 - 1])
def test_a13_a_length_out_of_bounds_ends_it_before_anything_is_kept(length):
    parser = FrameParser()

    assert parse(parser, struct.pack("<IIBBH", length, 1, 0x80, 0, 0)) == ([], True)
    assert parser.buffered == 0


def test_frames_before_the_nonsense_are_still_delivered():
    good = wire.frame(1, wire.DONE, b"x")

    assert parse(FrameParser(), good + b"\0" * 12) == ([(1, wire.DONE, b"x")], True)


def test_flags_and_padding_from_a_cell_are_nonsense():
    assert parse(FrameParser(), struct.pack("<IIBBH", 8, 1, 0x80, 1, 0))[1]
    assert parse(FrameParser(), struct.pack("<IIBBH", 8, 1, 0x80, 0, 1))[1]


def test_what_is_kept_is_bounded_by_one_frame():
    parser = FrameParser()
    parse(parser, struct.pack("<IIBBH", wire.FRAME_MAX_IN, 1, 0x82, 0, 0))
    for _ in range(4):
        assert parse(parser, bytes(65536)) == ([], False)
        assert parser.buffered <= wire.FRAME_MAX_IN + 4


@given(st.binary(max_size=200))
def test_a_reader_never_reads_beyond_its_payload(payload):
    reader = Reader(payload)
    try:
        while True:
            reader.u8()
            assert len(reader.blob()) <= len(payload)
    except ProtocolError:
        pass


def test_a_reader_wants_all_and_no_more():
    with pytest.raises(ProtocolError):
        Reader(b"\1").u16()
    with pytest.raises(ProtocolError):
        Reader(b"\xff\xff\xff\xffabc").blob()
    with pytest.raises(ProtocolError):
        Reader(b"\3\0\0\0abc").blob(most=2)
    with pytest.raises(ProtocolError):
        Reader(b"a").end()
