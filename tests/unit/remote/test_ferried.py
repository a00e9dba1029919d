"""The client's end of the connection that channels of boxes have to themselves, against a server that may say anything."""

import asyncio
import os
import socket

import pytest

pytest.importorskip("cryptography", reason="ray: the extra is not installed")

from untax.core.errors import BackendError
from untax.remote import ferried as module
from untax.remote.ferried import Ferried
from untax.remote.lanes import ACK, DATA, END, HEAD, MESSAGE, WINDOW
from untax.remote.sealed import SEALED_MAX, Sealed, _keys
from untax.remote.web import WebAddress

ADDRESS = WebAddress("127.0.0.1", 1, True)


class Far:
    """The server's end of one connection."""

    def __init__(self, sock, keys):
        self.sock = sock
        self.heard = []
        self.ended = None
        self.sealed = Sealed(sock, keys[32:] + keys[:32], self.heard.append, self._lost)

    def _lost(self, reason):
        self.ended = reason

    def say(self, kind, number, body=b""):
        self.sealed.send(HEAD.pack(kind, number) + body)

    def greet(self, lanes=()):
        self.say(MESSAGE, len(lanes), b"".join(module._GREETED.pack(*one) for one in lanes))

    async def hears(self, count):
        async with asyncio.timeout(5):
            while len(self.heard) < count:
                await asyncio.sleep(0.001)
        return [(*HEAD.unpack_from(one), one[HEAD.size :]) for one in self.heard]


class Sink:
    def __init__(self):
        self.data = b""
        self.is_over = False

    def data_received(self, data):
        self.data += data

    def connection_lost(self, exc):
        self.is_over = True


@pytest.fixture
async def server(monkeypatch):
    """Gives each connection that is dialled, in turn; `down` has it refuse."""

    class Server:
        def __init__(self):
            self.connections = asyncio.Queue()
            self.is_down = False
            self.asked = 0

        async def dial(self, *_):
            self.asked += 1
            if self.is_down:
                raise ConnectionRefusedError("nobody listens")
            ours, its = socket.socketpair()
            keys = os.urandom(64)
            self.connections.put_nowait(Far(its, keys))
            return ours, keys

        async def accepted(self):
            async with asyncio.timeout(5):
                return await self.connections.get()

    server = Server()
    monkeypatch.setattr(module, "dial", server.dial)
    monkeypatch.setattr(module, "_FIRST_RETRY_S", 0.01)
    return server


async def opened(server, *, lease_s=10.0):
    ferried = Ferried(ADDRESS)
    ferried.begin("owner", "secret", lease_s)
    far = await server.accepted()
    assert await far.hears(1) == [(MESSAGE, 0, b"")]
    far.greet()
    await until(lambda: ferried._is_open)
    return ferried, far


async def until(holds):
    async with asyncio.timeout(5):
        while not holds():
            await asyncio.sleep(0.001)


async def test_a_lane_carries_bytes_both_ways_and_its_end(server):
    ferried, far = await opened(server)
    lane, sink = ferried.lane(3), Sink()
    lane.start(sink)
    lane.write(b"there")
    assert (await far.hears(2))[1] == (DATA, 3, b"there")
    far.say(DATA, 3, b"and back")
    far.say(END, 3)
    await until(lambda: sink.is_over)
    assert sink.data == b"and back" and not ferried.lanes
    ferried.close()


async def test_what_was_written_before_the_connection_is_there_goes_with_it(server):
    server.is_down = True
    ferried = Ferried(ADDRESS)
    ferried.begin("owner", "secret", 10.0)
    lane = ferried.lane(1)
    lane.write(b"early")
    await until(lambda: server.asked >= 2)
    server.is_down = False
    far = await server.accepted()
    assert await far.hears(1) == [(MESSAGE, 1, module._GREETED.pack(1, 0))]
    far.greet([(1, 0)])
    assert (await far.hears(2))[1] == (DATA, 1, b"early")
    ferried.close()


async def test_after_a_break_each_end_sends_what_the_other_lacks(server):
    ferried, far = await opened(server)
    lane, sink = ferried.lane(1), Sink()
    lane.start(sink)
    lane.write(b"0123456789")
    far.say(DATA, 1, b"abc")
    await until(lambda: sink.data)
    far.sealed.close()
    far = await server.accepted()
    assert await far.hears(1) == [(MESSAGE, 1, module._GREETED.pack(1, 3))]
    far.greet([(1, 4)])
    assert (await far.hears(2))[1] == (DATA, 1, b"456789")
    far.say(DATA, 1, b"def")
    await until(lambda: sink.data == b"abcdef")
    ferried.close()


async def test_a_lane_that_the_other_end_does_not_know_any_more_is_over(server):
    ferried, far = await opened(server)
    sink = Sink()
    ferried.lane(1).start(sink)
    far.sealed.close()
    far = await server.accepted()
    await far.hears(1)
    fresh, new = ferried.lane(2), Sink()  # told of when the greeting was on its way: the other end may hear of it a moment later
    fresh.start(new)
    far.greet()
    await until(lambda: sink.is_over)
    assert not new.is_over and list(ferried.lanes) == [2]
    ferried.close()


async def test_an_end_that_comes_before_the_answer_which_tells_of_the_lane_is_not_missed(server):
    """The held connection carries the answer, this one the end, and nothing holds them in order."""
    ferried, far = await opened(server)
    far.say(END, 7)
    await until(lambda: ferried._early)
    lane, sink = ferried.lane(7), Sink()
    lane.start(sink)
    await until(lambda: sink.is_over)
    assert not ferried.lanes and not ferried._early
    far.say(END, 7)  # of one that was told of and is over: nobody's
    far.say(DATA, 7, b"late")
    ferried.lane(8).start(Sink())
    await asyncio.sleep(0.01)
    assert ferried._is_open and not ferried._early
    ferried.close()


async def test_lanes_whose_connection_does_not_come_back_within_the_lease_are_over(server):
    ferried, far = await opened(server, lease_s=0.1)
    sink = Sink()
    ferried.lane(1).start(sink)
    server.is_down = True
    far.sealed.close()
    await until(lambda: sink.is_over)
    assert server.asked >= 2
    ferried.close()


async def test_lanes_do_not_wait_for_a_server_that_hangs_up_before_it_greets(server):
    """It is asked less and less often, and after the lease's time the lanes are over."""
    ferried, far = await opened(server, lease_s=0.3)
    sink = Sink()
    ferried.lane(1).start(sink)
    far.sealed.close()

    async def hang_up():
        while True:
            (await server.connections.get()).sealed.close()

    hanging_up = asyncio.ensure_future(hang_up())
    await until(lambda: sink.is_over)
    assert server.asked < 10  # 10 ms, 20, 40, …
    hanging_up.cancel()
    ferried.close()


async def test_another_owner_s_lanes_are_numbered_anew(server):
    """What was heard under an earlier owner says nothing of them."""
    ferried, far = await opened(server)
    ferried.lane(5).start(Sink())
    far.say(END, 9)
    await until(lambda: ferried._early)
    ferried.begin("another", "secret", 10.0)
    far = await server.accepted()
    await far.hears(1)
    far.greet()
    await until(lambda: ferried._is_open)
    far.say(END, 2)  # before the answer that tells of it
    await until(lambda: ferried._early)
    ended, other = Sink(), Sink()
    ferried.lane(9).start(other)
    ferried.lane(2).start(ended)
    await until(lambda: ended.is_over)
    assert not other.is_over
    ferried.close()


async def test_a_lane_that_is_closed_between_the_two_greetings_is_ended_over_there(server):
    ferried, far = await opened(server)
    lane = ferried.lane(1)
    lane.start(Sink())
    far.sealed.close()
    far = await server.accepted()
    await far.hears(1)
    lane.close()
    far.greet([(1, 0)])
    assert (await far.hears(2))[1] == (END, 1, b"")
    ferried.close()


async def test_while_there_is_no_held_connection_nothing_is_dialled(server):
    """Whoever cannot be reached by the one cannot be reached by the other; what is there goes on."""
    ferried, far = await opened(server)
    lane, sink = ferried.lane(1), Sink()
    lane.start(sink)
    ferried.rest()
    far.say(DATA, 1, b"on")
    await until(lambda: sink.data)
    server.is_down = True
    far.sealed.close()
    await until(lambda: not ferried._is_open)
    asked = server.asked
    await asyncio.sleep(0.05)
    assert server.asked == asked and not sink.is_over
    ferried.close()
    assert sink.is_over


NONSENSE = {
    "a second greeting": HEAD.pack(MESSAGE, 0),
    "a kind that is none": HEAD.pack(9, 0),
    "an acknowledgement of nothing": HEAD.pack(ACK, 1) + (5).to_bytes(8, "little"),
    "an acknowledgement that is cut": HEAD.pack(ACK, 1) + b"xx",
}


@pytest.mark.parametrize("message", NONSENSE.values(), ids=NONSENSE)
async def test_a13_nonsense_ends_the_connection_and_lanes_go_on_with_the_next(server, message):
    ferried, far = await opened(server)
    sink = Sink()
    ferried.lane(1).start(sink)
    far.sealed.send(message)
    await until(lambda: far.ended is not None)
    far = await server.accepted()
    await far.hears(1)
    far.greet([(1, 0)])
    far.say(DATA, 1, b"on")
    await until(lambda: sink.data == b"on")
    ferried.close()


@pytest.mark.parametrize(
    "greeting", [HEAD.pack(DATA, 1) + b"x", HEAD.pack(MESSAGE, 1) + b"short", HEAD.pack(MESSAGE, 1) + module._GREETED.pack(1, 99)]
)
async def test_a13_a_greeting_that_is_none_is_no_connection(server, greeting):
    server.is_down = True
    ferried = Ferried(ADDRESS)
    ferried.lane(1).start(Sink())
    server.is_down = False
    ferried.begin("owner", "secret", 10.0)
    far = await server.accepted()
    far.sealed.send(greeting)
    await until(lambda: far.ended is not None)
    assert await server.accepted()  # it is asked for again
    ferried.close()


@pytest.mark.parametrize(
    "record", [b"\0" * 4, b"\x14\0\0\0" + b"x" * 20, (SEALED_MAX + 1).to_bytes(4, "little"), b"\x15\0\0\0" + b"x" * 21]
)
async def test_a13_bytes_that_are_no_record_end_the_connection(server, record):
    ferried, far = await opened(server)
    far.sock.send(record)
    await until(lambda: far.ended is not None)
    ferried.close()


async def test_a13_more_than_a_window_is_not_taken(server):
    """A server that sends without being asked for more is dropped before it fills this process's memory."""
    ferried, far = await opened(server)
    lane = ferried.lane(1)
    lane.start(Sink())
    lane.pause_reading()
    for _ in range(WINDOW // (128 << 10) + 4):
        far.say(DATA, 1, bytes(128 << 10))
    await until(lambda: far.ended is not None)
    ferried.close()


@pytest.mark.parametrize(
    "head", [b"HTTP/1.1 101 x\r\n\r\n", b"HTTP/1.1 101 x\r\nuntax-keys: ??\r\n\r\n", b"HTTP/1.1 101 x\r\nUntax-Keys: AAAA\r\n\r\n"]
)
def test_an_answer_without_its_keys_is_no_connection(head):
    with pytest.raises(BackendError, match="without its keys"):
        _keys(head)
