"""Lanes and WebSocket frames as bytes: cut anywhere, broken off anywhere, and from a peer that means harm."""

import random

import pytest

from untax.core.errors import ProtocolError
from untax.remote import websocket
from untax.remote.lanes import ACK, DATA, HEAD, PIECE, WINDOW, Lane, read_ack


class Sink:
    def __init__(self):
        self.data = bytearray()
        self.ends = 0

    def data_received(self, data):
        self.data += data

    def connection_lost(self, exc):
        self.ends += 1


class Pair:
    """Two ends of a lane, and what lies between them."""

    def __init__(self):
        self.sinks = Sink(), Sink()
        self.wires = ([], [])
        self.lanes = tuple(Lane(7, self.wires[end].append, lambda lane: None) for end in (0, 1))
        for lane, sink in zip(self.lanes, self.sinks, strict=True):
            lane.start(sink)

    def carry(self, lose_after=None):
        """Deliver what was sent, to the end or for so many messages."""
        count = 0
        while self.wires[0] or self.wires[1]:
            for end in (0, 1):
                if self.wires[end]:
                    if lose_after is not None and count >= lose_after:
                        return
                    count += 1
                    _deliver(self.lanes[1 - end], self.wires[end].pop(0))

    def reconnect(self):
        for wire in self.wires:
            wire.clear()
        seen = [lane.received for lane in self.lanes]
        for end, lane in enumerate(self.lanes):
            lane.suspend()
            lane.resume(self.wires[end].append, seen[1 - end])


def _deliver(lane, message):
    kind, _ = HEAD.unpack_from(message)
    if kind == DATA:
        lane.data_received(message[HEAD.size :])
    elif kind == ACK:
        lane.acknowledged(read_ack(message))


async def test_what_is_written_arrives_in_order_however_much_it_is():
    pair = Pair()
    data = random.Random(1).randbytes(3 * WINDOW + 12345)
    pair.lanes[0].write(data)
    assert pair.lanes[0].write_buffer_size > 0  # no more is on its way than may be
    pair.carry()
    assert pair.sinks[1].data == data and pair.lanes[0].write_buffer_size == 0


async def test_a_reader_that_stops_holds_up_the_writer_and_loses_nothing():
    pair = Pair()
    data = random.Random(2).randbytes(4 * WINDOW)
    pair.lanes[1].pause_reading()
    pair.lanes[0].write(data)
    pair.carry()
    assert not pair.sinks[1].data and pair.lanes[0].write_buffer_size >= 3 * WINDOW - PIECE
    pair.lanes[1].resume_reading()
    pair.carry()
    assert pair.sinks[1].data == data


@pytest.mark.parametrize("seed", range(20))
async def test_a_connection_that_breaks_anywhere_loses_and_repeats_nothing(seed):
    choose = random.Random(seed)
    pair, sent = Pair(), (bytearray(), bytearray())
    for _ in range(12):
        for end in (0, 1):
            data = choose.randbytes(choose.choice((1, 100, 5000, WINDOW // 3)))
            sent[end].extend(data)
            pair.lanes[end].write(data)
        pair.carry(lose_after=choose.randrange(6))
        pair.reconnect()
    pair.carry()
    assert (pair.sinks[1].data, pair.sinks[0].data) == sent


async def test_an_end_is_told_once():
    pair = Pair()
    pair.lanes[0].end(None)
    pair.lanes[0].close()
    pair.lanes[0].write(b"x")
    assert pair.sinks[0].ends == 1 and pair.wires[0] == []


async def test_a_peer_that_breaks_the_rules_is_refused():
    pair = Pair()
    with pytest.raises(ProtocolError, match="never sent"):
        pair.lanes[0].acknowledged(1)
    pair.lanes[1].pause_reading()
    with pytest.raises(ProtocolError, match="more was sent"):
        for _ in range(WINDOW // PIECE + 3):
            pair.lanes[1].data_received(b"x" * PIECE)
    with pytest.raises(ProtocolError, match="never was"):
        pair.lanes[0].resume(print, 5)


@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536, 300_000])
def test_a_frame_is_read_as_it_was_written_wherever_it_is_cut(is_client, size):
    data = random.Random(size).randbytes(size)
    frames = websocket.frame(websocket.BINARY, data, is_client=is_client) * 2
    parser = websocket.Parser(is_client=not is_client)
    step = max(1, len(frames) // 50)
    found = [message for at in range(0, len(frames), step) for message in parser.feed(frames[at : at + step])]
    assert found == [(websocket.BINARY, data)] * 2


def test_a_message_in_pieces_with_a_ping_between_is_one_message():
    parser = websocket.Parser(is_client=True)
    pieces = b"\x02\x01a" + b"\x89\x01p" + b"\x00\x01b" + b"\x80\x01c"
    assert list(parser.feed(pieces)) == [(websocket.PING, b"p"), (websocket.BINARY, b"abc")]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xf2\x00",
        b"\x82\x80\0\0\0\0",
        b"\x80\x00",
        b"\x83\x00",
        b"\x09\x00",
        b"\x89\x7e\x00\xff",
        b"\x82\x7f" + b"\xff" * 8,
        b"\x02\x00\x02\x00",
    ],
)
def test_frames_that_mean_nothing_are_refused(nonsense):
    with pytest.raises(ProtocolError):
        list(websocket.Parser(is_client=True).feed(nonsense))


def _read(parser, pieces):
    """What is found, or that it is refused."""
    found = []
    try:
        for piece in pieces:
            found += parser.feed(piece)
    except ProtocolError as exc:
        found.append(str(exc))
    return found


@pytest.mark.parametrize("is_client", [True, False])
@pytest.mark.parametrize("most", [100, 70_000])
def test_a_frame_that_comes_whole_is_read_as_one_that_comes_byte_by_byte(is_client, most):
    """Whatever is in its head: the way for what is usual lets nothing pass that the other does not."""
    rng = random.Random(most)
    refused = 0
    for first in (0x00, 0x01, 0x02, 0x08, 0x12, 0x42, 0x80, 0x81, 0x82, 0x83, 0x88, 0x89, 0x8A, 0x8B, 0x92, 0xA2, 0xC2, 0xF2, 0xFF):
        for second in (0, 1, 5, 99, 100, 101, 125, 126, 127, 128, 129, 133, 225, 228, 229, 253, 254, 255):
            short = second & 0x7F
            for size in {126: (0, 5, 90, 200), 127: (0, 7, 200, 1 << 20, 1 << 63)}.get(short, (short,)):
                head = bytes((first, second)) + (b"" if short < 126 else size.to_bytes(2 if short == 126 else 8, "big"))
                whole = head + rng.randbytes(min(size, 300) + (0 if is_client else 4))
                for data in (whole, whole[:-1], whole + b"\x82", whole + whole, head, head[:-1], b"\x02\x00" + whole):
                    one, other = (websocket.Parser(is_client=is_client, most=most) for _ in range(2))
                    found = _read(one, [data])
                    assert found == _read(other, [data[at : at + 1] for at in range(len(data))]), data[:20]
                    refused += any(isinstance(message, str) for message in found)
    assert refused > 100


@pytest.mark.parametrize("is_client", [True, False])
def test_a_whole_frame_between_the_pieces_of_a_message_is_refused(is_client):
    parser = websocket.Parser(is_client=is_client)
    whole = websocket.frame(websocket.BINARY, b"whole", is_client=not is_client)
    piece = bytes((whole[0] & 0x7F,)) + whole[1:]
    assert list(parser.feed(piece)) == []
    with pytest.raises(ProtocolError, match="breaks off what was begun"):
        list(parser.feed(whole))


def test_masks_are_not_used_again():
    masks = {websocket.frame(websocket.BINARY, b"", is_client=True)[2:] for _ in range(5000)}
    assert len(masks) > 4990 and all(len(mask) == 4 for mask in masks)


def test_a_large_message_in_small_pieces_takes_time_by_its_size():
    """64 MiB in 4 KiB: joined again for each piece, that would be half a terabyte to copy."""
    data = bytes(64 << 20)
    frame = websocket.frame(websocket.BINARY, data, is_client=False)
    parser = websocket.Parser(is_client=True)
    found = [message for at in range(0, len(frame), 4096) for message in parser.feed(frame[at : at + 4096])]
    assert found == [(websocket.BINARY, data)]


def test_a_message_that_does_not_end_is_refused_within_bounds():
    parser = websocket.Parser(is_client=True, most=1 << 16)
    with pytest.raises(ProtocolError, match=r"does not end|allowed"):
        for _ in range(10_000):
            list(parser.feed(b"\x02\x00" if _ == 0 else b"\x00\x00"))
