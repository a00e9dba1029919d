"""The blocking driver: one thread or many on one socket, deadlines, and interrupts."""

import contextlib
import os
import select
import signal
import socket
import struct
import threading
import time

import pytest
from tests import agentwire, interrupts
from tests.unit.channel.fakecell import command_done, error

from untax.channel import actions, blocking, flow, wire
from untax.channel.blocking import BlockingChannel
from untax.core.errors import NotFound, NotRun, ProtocolError, ReadinessTimeout, SandboxLost, UsageError


class Cell:
    """A thread that answers every request with what the test's function says."""

    def __init__(self, answer, greeting=None):
        self.socket, self.theirs = socket.socketpair()
        self.seen = []
        self._answer = answer
        self.theirs.sendall(agentwire.hello() if greeting is None else greeting)
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    def _serve(self):
        buffer = b""
        try:
            while data := self.theirs.recv(1 << 20):
                buffer += data
                while len(buffer) >= 4 and len(buffer) >= (size := 4 + struct.unpack_from("<I", buffer)[0]):
                    _, request, kind, flags, _ = struct.unpack_from("<IIBBH", buffer)
                    payload = buffer[12 + (4 if flags & 1 else 0) : size]
                    buffer = buffer[size:]
                    self.seen.append((request, kind, payload))
                    for reply in self._answer(request, kind, payload) or ():
                        self.theirs.sendall(agentwire.frame(*reply))
        except OSError:
            pass

    def close(self):
        self.theirs.close()


def echo(request, kind, payload):
    """A command's last argument comes back as its output."""
    if kind == wire.PING:
        return [(request, wire.DONE, b"")]
    if kind == wire.SPAWN:
        return [(request, wire.DONE, command_done(out=payload))]
    return None


@pytest.fixture
def opened():
    made = []

    def open_one(answer=echo, **options):
        cell = Cell(answer, options.pop("greeting", None))
        channel = BlockingChannel(cell.socket, sandbox_id="sbx-1", **options)
        made.append((cell, channel))
        return cell, channel

    yield open_one
    for cell, channel in made:
        channel.close()
        cell.close()


def test_a_call_is_answered(opened):
    _, channel = opened()
    channel.wait_ready()
    assert b"hello" in channel.call(actions.run(["hello"])).stdout


def test_threads_get_their_own_answers(opened):
    _, channel = opened()
    wrong = []

    def work(name):
        for n in range(200):
            word = f"{name}-{n}".encode()
            if word not in channel.call(actions.run([word])).stdout:
                wrong.append(word)

    threads = [threading.Thread(target=work, args=(name,)) for name in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_a_leader_with_its_answer_leaves_the_reading_to_another(opened):
    held = []

    def answer(request, kind, payload):
        if kind == wire.SPAWN and b"slow" in payload:
            held.append(request)
            return None
        return echo(request, kind, payload)

    cell, channel = opened(answer)
    results = []
    slow = threading.Thread(target=lambda: results.append(channel.call(actions.run(["slow"]))))
    slow.start()
    while not held:
        time.sleep(0.001)
    for _ in range(10):
        channel.call(actions.ping())
    cell.theirs.sendall(agentwire.frame(held[0], wire.DONE, command_done(out=b"late")))
    slow.join(5)
    assert results[0].stdout == b"late"


def test_x5_silence_is_a_lost_sandbox_at_the_deadline(opened):
    _, channel = opened(lambda *_: None, grace_s=0.05)
    began = time.monotonic()
    with pytest.raises(SandboxLost, match="deadline"):
        channel.call(actions.run(["x"], timeout_s=0.05))
    assert time.monotonic() - began < 1
    with pytest.raises(SandboxLost):
        channel.call(actions.ping())


def test_a_follower_has_its_own_deadline(opened):
    _, channel = opened(lambda *_: None, grace_s=0.05)

    def lead():
        with pytest.raises(SandboxLost):
            channel.call(actions.run(["x"], timeout_s=60))

    leader = threading.Thread(target=lead)
    leader.start()
    time.sleep(0.02)
    with pytest.raises(SandboxLost):
        channel.call(actions.run(["x"], timeout_s=0.05))
    leader.join(5)
    assert not leader.is_alive()


def test_a_hang_up_is_told_to_every_thread(opened):
    cell, channel = opened(lambda *_: None)
    lost = []

    def work():
        try:
            channel.call(actions.run(["x"], timeout_s=None))
        except SandboxLost as exc:
            lost.append(exc)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    while len(cell.seen) < 5:
        time.sleep(0.001)
    cell.theirs.shutdown(socket.SHUT_RDWR)
    for thread in threads:
        thread.join(5)
    assert len(lost) == 4


def test_an_interrupt_cancels_the_command(opened):
    cell, channel = opened(lambda *_: None)
    threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        channel.call(actions.run(["sleep"]))
    while len(cell.seen) < 3:
        time.sleep(0.001)
    assert [kind for _, kind, _ in cell.seen] == [wire.HELLO, wire.SPAWN, wire.CANCEL]
    assert not channel.is_lost


def interrupted(channel, call):
    """Make the call and cancel it as Ctrl-C does, once it was sent."""
    request, entry = channel._begin(call)
    channel._cancel(request, entry)
    return request


def test_a_cancelled_action_that_never_ends_is_a_lost_sandbox(opened, monkeypatch):
    """As in `Channel`: the cell owes the final frame of what was cancelled."""
    monkeypatch.setattr(blocking, "CANCEL_GRACE_S", 0.1)
    _, channel = opened(lambda *_: None)
    channel.wait_ready()
    interrupted(channel, actions.run(["x"]))

    with pytest.raises(SandboxLost, match="cancelled"):
        channel.call(actions.run(["y"]))


def test_a_leader_without_a_deadline_sees_what_others_cancel(opened, monkeypatch):
    monkeypatch.setattr(blocking, "CANCEL_GRACE_S", 0.05)
    monkeypatch.setattr(blocking, "_WAKE_S", 0.05)
    _, channel = opened(lambda *_: None)
    ends = []

    def wait():
        with pytest.raises(SandboxLost) as caught:
            channel.watch(".")
        ends.append(caught.value)

    leader = threading.Thread(target=wait)
    leader.start()
    interrupted(channel, actions.run(["x"]))
    leader.join(10)
    assert len(ends) == 1


def test_an_end_that_nobody_has_read_yet_is_not_overdue(opened, monkeypatch):
    """No thread reads between two actions: what came in time counts, however late it is looked at."""
    monkeypatch.setattr(blocking, "CANCEL_GRACE_S", 0.0)

    def answer(request, kind, payload):
        return [(request, wire.ERROR, error(8))] if kind == wire.CANCEL else [(request, wire.DONE, b"")] if kind == wire.PING else None

    _, channel = opened(answer)
    channel.wait_ready()
    interrupted(channel, actions.run(["x"]))
    select.select([channel._sock], [], [], 10)
    channel.call(actions.ping())
    assert not channel._cancelled


def test_a_body_that_is_not_taken_ends_at_the_deadline(opened):
    """A cell that gives no credit, and one that reads nothing at all, are lost when the action's time is over."""
    _, channel = opened(lambda *_: None, grace_s=0.1)
    with pytest.raises(SandboxLost):
        channel.call(actions.write("x", bytes(2 << 20)), timeout_s=0.1)

    ours, theirs = socket.socketpair()
    with theirs:
        theirs.sendall(agentwire.hello())
        channel = BlockingChannel(ours, sandbox_id="sbx-1", grace_s=0.1)
        with pytest.raises(SandboxLost, match="did not take"):
            channel.call(actions.write("x", bytes(1 << 20)), timeout_s=0.1)


def test_an_interrupt_in_the_middle_of_a_frame_does_not_cut_it():
    """The rest goes before anything else; a CANCEL inside of a frame would be read as its contents."""
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
    theirs.sendall(agentwire.hello())
    channel = BlockingChannel(ours, sandbox_id="sbx-1")
    held = threading.Event()
    got = bytearray()

    def take():
        held.wait(10)
        while data := theirs.recv(1 << 20):
            got.extend(data)

    taker = threading.Thread(target=take)
    taker.start()

    def stop(*_):
        held.set()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            channel.call(actions.write("x", bytes(1 << 20)))
    finally:
        signal.signal(signal.SIGALRM, before)
    channel.close()
    taker.join(10)
    theirs.close()
    kinds = []
    while got:
        length, _, kind, _, _ = struct.unpack_from("<IIBBH", got)
        kinds.append(kind)
        del got[: 4 + length]
    assert kinds == [wire.HELLO, wire.WRITE, wire.CANCEL]


def test_a13_nonsense_is_a_lost_sandbox(opened):
    _, channel = opened(lambda request, *_: [(request + 5, wire.DONE, b"")])
    with pytest.raises(SandboxLost, match="nonsense"):
        channel.call(actions.ping())


def test_readiness(opened):
    with pytest.raises(ReadinessTimeout):
        opened(greeting=b"")[1].wait_ready(0.02)
    with pytest.raises(ProtocolError, match="protocol 3"):
        opened(greeting=agentwire.hello(major=3))[1].wait_ready()


def test_errors_and_batches(opened):
    def answer(request, kind, payload):
        if kind == wire.READ:
            return [(request, wire.ERROR, error(wire.OS, 2))]
        if kind == wire.BATCH:
            first, second = struct.unpack_from("<I", payload, 9)[0], request - 1
            return [(first, wire.DONE, b""), (second, wire.ERROR, error(wire.OS, 2)), (request, wire.DONE, struct.pack("<I", 2))]
        return echo(request, kind, payload)

    _, channel = opened(answer)
    with pytest.raises(NotFound):
        channel.call(actions.read("x"))
    none, missing = channel.batch([actions.ping(), actions.read("x")])
    assert none is None
    assert isinstance(missing, NotFound)


def test_a_large_request_and_a_large_answer_cross(opened):
    """Both sides write at once, more than the socket holds: neither may wait for the other for ever."""

    def answer(request, kind, payload):
        if kind == wire.READ:
            return [
                *((request, wire.OUT, b"\1" + bytes(200_000)) for _ in range(20)),
                (request, wire.DONE, struct.pack("<QIqI", 0, 0, 0, 0)),
            ]
        if kind == wire.WRITE:
            return [(request, wire.DONE, struct.pack("<Q", len(payload)))]
        return None

    _, channel = opened(answer)
    threads = [threading.Thread(target=lambda: channel.call(actions.read("x"))) for _ in range(3)]
    threads += [threading.Thread(target=lambda: channel.call(actions.write("x", bytes(1 << 20)))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert not channel.is_lost


def test_streams_are_read_written_and_ended(opened):
    def answer(request, kind, payload):
        if kind == wire.SPAWN:
            return [(request, wire.STARTED, struct.pack("<I", 7))]
        if kind == wire.DATA:
            if payload[0]:
                return [(request, wire.DONE, command_done(code=2))]
            return [(request, wire.OUT, b"\1" + payload[1:].upper()), (request, wire.CREDIT, struct.pack("<BI", 0, len(payload) - 1))]
        return None

    _, channel = opened(answer)
    link = channel.open(flow.start(["cat"]))
    link.send(b"abc")
    assert link.receive(timeout_s=5) == (1, b"ABC")
    with pytest.raises(TimeoutError):
        link.receive(timeout_s=0.02)
    link.send_eof()
    assert link.receive() is None
    assert link.wait().exit_code == 2


def test_a_fork_may_not_use_its_parents_channel(opened):
    _, channel = opened()
    channel.wait_ready()
    channel._pid += 1
    with pytest.raises(UsageError, match="fork"):
        channel.call(actions.ping())


def test_a_batch_that_is_too_large_leaves_no_id_open(opened):
    _, channel = opened()
    with pytest.raises(UsageError):
        channel.batch([actions.write("x", bytes(1 << 20)) for _ in range(5)])
    with pytest.raises(UsageError):
        channel.batch([actions.ping(), actions.edit("x", bytes(5 << 20), b"")])
    with pytest.raises(UsageError):
        channel.batch([actions.ping() for _ in range(wire.REQUESTS_MAX)])
    assert list(channel._open) == [0]


# ---- interrupts ----


class Slow:
    """A cell that keeps the answers to some commands: "first" until "second" has come too, "second" until it is let go."""

    def __init__(self):
        self.ids = {}
        self.lock = threading.Lock()
        self.is_let_go = False

    def __call__(self, request, kind, payload):
        with self.lock:
            return list(self._answers(request, kind, payload))

    def _answers(self, request, kind, payload):
        if kind == wire.CANCEL and request in self.ids.values():
            self.ids = {name: id_ for name, id_ in self.ids.items() if id_ != request}
            yield request, wire.ERROR, error(8)
        elif kind == wire.PING:
            yield 0x80000000 | request, wire.EGRESS, wire.blob(b"host") + wire.u16(80)
            yield request, wire.DONE, b""
        elif kind == wire.WRITE:
            yield request, wire.DONE, struct.pack("<Q", len(payload))
        elif kind == wire.SPAWN:
            self.ids["first" if b"first" in payload else "second"] = request
            if "first" in self.ids and "second" in self.ids:
                yield self.ids.pop("first"), wire.DONE, command_done(out=b"1")
            if self.is_let_go and "second" in self.ids:
                yield self.ids.pop("second"), wire.DONE, command_done(out=b"2")

    def let_go(self, cell):
        with self.lock, contextlib.suppress(OSError):
            self.is_let_go = True
            if "second" in self.ids:
                cell.theirs.sendall(agentwire.frame(self.ids.pop("second"), wire.DONE, command_done(out=b"2")))


class Other:
    """A thread with two actions of its own on the channel of one that is interrupted."""

    def __init__(self, channel, *, after):
        self.ends = []
        self.is_wanted = threading.Event()
        self._channel = channel
        self._after = after
        self._thread = threading.Thread(target=self._act, daemon=True)
        self._thread.start()

    def _act(self):
        while not (self._after() or self.is_wanted.is_set()):
            time.sleep(0.0001)
        for call in (actions.run(["second"], timeout_s=None), actions.ping(timeout_s=None)):
            try:
                self.ends.append(self._channel.call(call))
            except SandboxLost as exc:
                self.ends.append(exc)

    def has_ended(self):
        self.is_wanted.set()
        self._thread.join(10)
        return not self._thread.is_alive()


def leads(channel):
    """Reads for both; the other one reads on."""
    channel.call(actions.run(["first"], timeout_s=60))


def answers(channel):
    """Says by the way what the cell asks."""
    channel.call(actions.ping())


def fills(channel):
    """Sends more than the socket takes at once, and reads meanwhile."""
    channel.call(actions.write("x", bytes(20_000)))


def follows(channel):
    channel.call(actions.run(["first"], timeout_s=60))


def closes(channel):
    channel.close()


@pytest.mark.parametrize("work", [leads, answers, fills, follows, closes])
def test_an_interrupt_of_one_thread_holds_up_no_other_whenever_it_comes(work, monkeypatch):
    """The other gets its answers, or is told that the sandbox is lost."""
    monkeypatch.setattr(blocking, "CANCEL_GRACE_S", 0.05)
    is_first = work in (leads, answers, fills)
    made = []

    def make():
        slow = Slow()
        cell = Cell(slow)
        cell.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        channel = BlockingChannel(cell.socket, sandbox_id="sbx-1")
        channel.wait_ready()
        other = Other(channel, after=(lambda: channel._is_read) if is_first else (lambda: True))
        while not is_first and not channel._is_read:
            time.sleep(0.0001)
        made[:] = [slow, cell, channel, other]

    def end(*told):
        slow, cell, channel, other = made
        slow.let_go(cell)
        assert other.has_ended(), told
        assert channel.is_lost or not any(isinstance(answer, SandboxLost) for answer in other.ends)
        assert not (channel._is_read or channel._followers or channel._lock.locked() or channel._sending.locked())
        channel.close()
        cell.close()

    steps = 0
    make()
    for steps in interrupts.at_each_step(lambda: work(made[2])):
        end(steps)
        make()
    end(steps)
    assert steps > 100  # or it was not interrupted at all


def test_an_interrupted_cancel_leaves_nobody_waiting_once_it_is_called_again(opened, monkeypatch):
    monkeypatch.setattr(blocking, "_WAKE_S", 0.02)  # after which a leader sees for itself that it need not wait, when no CANCEL was sent

    running = set()

    def answer(request, kind, payload):
        if kind == wire.SPAWN:
            running.add(request)
            return [(request, wire.STARTED, struct.pack("<I", 7))]
        if kind == wire.CANCEL and request in running:
            running.remove(request)
            return [(request, wire.ERROR, error(8))]
        return [(request, wire.DONE, b"")] if kind == wire.PING else None

    _, channel = opened(answer)
    held = []

    def wait(link):
        with contextlib.suppress(NotRun, SandboxLost):
            link.wait()

    def start():
        link = channel.open(flow.start(["cat"]))
        thread = threading.Thread(target=wait, args=(link,), daemon=True)
        thread.start()
        while not channel._is_read:
            time.sleep(0.0001)
        held[:] = [link, thread]

    start()
    steps = 0
    for steps in interrupts.at_each_step(lambda: held[0].cancel()):
        held[0].cancel()
        held[1].join(10)
        assert not held[1].is_alive(), steps
        channel.call(actions.ping(timeout_s=60))  # what was cancelled is over for the cell too
        assert not running, steps
        if channel.is_lost:
            _, channel = opened(answer)
        start()
    held[1].join(10)
    assert not held[1].is_alive()
    assert steps > 50  # or it was not interrupted at all


def test_an_interrupted_batch_leaves_the_channel_to_others(opened, monkeypatch):
    """The answers to its parts come all the same."""

    def answer(request, kind, payload):
        if kind == wire.BATCH:
            return [(part, wire.ERROR, error(8)) for part in (request - 2, request - 1, request)]
        return [(request, wire.DONE, b"")] if kind == wire.PING else None

    cell, channel = opened(answer)
    cell.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    channel.wait_ready()
    send_more = BlockingChannel._send_more
    interrupts_left = [KeyboardInterrupt()]

    def interrupted(self, deadline):
        if interrupts_left:
            raise interrupts_left.pop()
        send_more(self, deadline)

    monkeypatch.setattr(BlockingChannel, "_send_more", interrupted)
    with pytest.raises(KeyboardInterrupt):
        channel.batch([actions.write("x", bytes(100_000)), actions.write("y", bytes(100_000))])
    channel.call(actions.ping(timeout_s=60))
    assert not interrupts_left and not channel.is_lost


def started(request, kind, payload):
    """A program that takes nothing, and a watch without events."""
    if kind in (wire.SPAWN, wire.WATCH):
        return [(request, wire.STARTED, struct.pack("<I", 7))]
    return [(request, wire.ERROR, error(8))] if kind == wire.CANCEL else None


@pytest.mark.parametrize("what", ["send", "watch"])
def test_who_waits_is_told_when_another_thread_ends_it(opened, what):
    _, channel = opened(started)
    ends = []
    if what == "send":
        link = channel.open(flow.start(["cat"]))

        def wait():
            with pytest.raises(BrokenPipeError):
                link.send(bytes(64 << 20))
            ends.append("broken")

        end = link.cancel
    else:
        watch = channel.watch("/")

        def wait():
            with pytest.raises(StopIteration):
                watch.next(None)
            ends.append("over")

        end = watch.close
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not channel._is_read:
        time.sleep(0.0001)
    end()
    thread.join(10)
    assert len(ends) == 1
