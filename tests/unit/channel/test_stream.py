"""The stream over a real socket: writes that do not fit, pauses, and ends."""

import asyncio
import socket

import pytest

from untax.channel.stream import SocketStream


class Sink:
    def __init__(self):
        self.data = b""
        self.lost = []
        self.event = asyncio.Event()

    def data_received(self, data):
        self.data += data
        self.event.set()

    def connection_lost(self, exc):
        self.lost.append(exc)
        self.event.set()

    async def wait(self):
        await asyncio.wait_for(self.event.wait(), 5)
        self.event.clear()


@pytest.fixture
async def pair():
    ours, theirs = socket.socketpair()
    stream, sink = SocketStream(ours), Sink()
    stream.start(sink)
    theirs.setblocking(False)
    yield stream, sink, theirs
    stream.close()
    theirs.close()


async def test_bytes_go_both_ways(pair):
    stream, sink, theirs = pair
    stream.write(b"there")
    assert theirs.recv(100) == b"there"
    theirs.send(b"back")
    await sink.wait()
    assert sink.data == b"back"


async def test_what_the_kernel_does_not_take_is_kept_and_sent_in_order(pair):
    stream, _, theirs = pair
    pieces = [bytes([n]) * 100_000 for n in range(50)]
    for piece in pieces:
        stream.write(piece)
    assert stream.write_buffer_size > 0
    draining = asyncio.ensure_future(stream.drain())
    loop, got = asyncio.get_running_loop(), b""
    while len(got) < 5_000_000:
        got += await loop.sock_recv(theirs, 1 << 20)
    await draining

    assert got == b"".join(pieces)
    assert stream.write_buffer_size == 0


async def test_nothing_is_delivered_while_paused(pair):
    stream, sink, theirs = pair
    stream.pause_reading()
    theirs.send(b"x")
    await asyncio.sleep(0.01)
    assert sink.data == b""
    stream.resume_reading()
    await sink.wait()
    assert sink.data == b"x"


async def test_the_end_is_told_once_and_frees_who_waits(pair):
    stream, sink, _theirs = pair
    stream.write(bytes(5_000_000))
    draining = asyncio.ensure_future(stream.drain())
    await asyncio.sleep(0)
    stream.close()
    stream.close()
    await draining
    stream.write(b"ignored")
    assert sink.lost == [None]


async def test_a_write_to_a_closed_peer_loses_the_stream_after_what_it_said_last(pair):
    stream, sink, theirs = pair
    theirs.send(b"last words")
    theirs.close()
    stream.write(b"x")
    while not sink.lost:
        await sink.wait()
    assert sink.data == b"last words"
    assert len(sink.lost) == 1


async def test_a_detached_socket_is_somebody_elses(pair):
    stream, sink, theirs = pair
    sock = stream.detach()
    theirs.send(b"x")
    await asyncio.sleep(0.01)
    assert sink.data == b""
    assert sock.recv(10) == b"x"
    sock.close()
