"""THREATS 4.7, the channel: a hostile client at the agent (A12), a hostile agent at the client (A13), and A14.

The frames here are written from docs/protocol.md alone, without the code under test.
"""

import asyncio
import os
import random
import socket
import struct
import time

import pytest
from tests import agentwire as w
from tests import hostview

import untax
from untax.channel import actions
from untax.channel.client import Channel
from untax.channel.stream import SocketStream
from untax.substrates._host import cell_path

LONG = os.environ.get("UNTAX_LONG") == "1"


@pytest.fixture
def peer(tmp_path):
    with w.Peer(cell_path(), tmp_path) as peer:
        identity, kind, payload = peer.next()
        assert (identity, kind) == (0, w.HELLO)
        assert struct.unpack_from("<I", payload)[0] == w.MAGIC
        yield peer


def runs(peer, identity: int = 77) -> bool:
    """The agent still works."""
    peer.send(w.spawn(identity, [b"echo", b"alive"]))
    kind, payload = peer.until(identity)
    return kind == w.DONE and w.parse_finished(payload)[2] == b"alive\n"


def new_peer_works(tmp_path) -> bool:
    with w.Peer(cell_path(), tmp_path) as fresh:
        fresh.send(w.hello())
        return runs(fresh)


# ---- A12: to the agent ----


def test_a12_random_bytes_end_the_connection(tmp_path):
    """An error or the end, never a crash; the exit status is the agent's own."""
    generator = random.Random(12)
    for _ in range(200 if LONG else 30):
        peer = w.Peer(cell_path(), tmp_path)
        peer.send(generator.randbytes(generator.randrange(1, 5000)))
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.is_closed()
        assert peer.close() >= 0, "died by a signal"
    assert new_peer_works(tmp_path)


def test_a12_random_bytes_after_the_greeting(tmp_path):
    generator = random.Random(13)
    for _ in range(200 if LONG else 30):
        peer = w.Peer(cell_path(), tmp_path)
        peer.send(w.hello())
        for _ in range(20):
            peer.send(
                w.frame(
                    generator.randrange(1 << 32),
                    generator.randrange(256),
                    generator.randbytes(generator.randrange(300)),
                    flags=generator.randrange(4),
                )
            )
        peer.socket.shutdown(socket.SHUT_WR)
        assert peer.is_closed()
        assert peer.close() >= 0


def test_a12_a_truncated_frame_is_no_request(peer, tmp_path):
    peer.send(w.hello() + w.spawn(1, [b"touch", b"ran"])[:-5])
    peer.socket.shutdown(socket.SHUT_WR)
    assert peer.is_closed()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("length", [0, 1, 7, (4 << 20) + 1, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a12_impossible_lengths_end_the_connection(peer, length):
    before = hostview.resident_kib(peer.process.pid)
    peer.send(w.hello() + struct.pack("<I", length) + b"\1\0\0\0\5\0\0\0" * 100)
    assert peer.is_closed(2)
    assert peer.process.poll() is not None or hostview.resident_kib(peer.process.pid) - before < 8192


def test_a12_an_unknown_kind_is_an_error_and_the_connection_lives(peer):
    peer.send(w.hello())
    for kind in (0x00, 0x08, 0x11, 0x3F, 0x70, 0x72, 0x80, 0xFF):
        peer.send(w.frame(100 + kind, kind, b"xxxx"))
    assert runs(peer)


def test_a12_inner_kinds_are_not_open_to_the_host(peer, tmp_path):
    """EXEC and KILL belong to agent and worker; a client that sends them gets nothing started."""
    peer.send(w.hello())
    for kind in range(0x70, 0x80):
        peer.send(w.frame(kind, kind, struct.pack("<IiBB", 1, 9, 0, 1)))
    assert runs(peer)


def test_a12_one_byte_at_a_time(peer):
    for byte in w.hello() + w.spawn(5, [b"echo", b"slow"]):
        peer.send(bytes([byte]))
    kind, payload = peer.until(5)
    assert (kind, w.parse_finished(payload)[2]) == (w.DONE, b"slow\n")


def test_a12_interleaved_ids_get_their_own_answers(peer):
    peer.send(w.hello() + b"".join(w.spawn(n, [b"echo", b"%d" % n]) for n in range(1, 101)))
    got = {}
    while len(got) < 100:
        identity, kind, payload = peer.next(10)
        if kind == w.DONE:
            got[identity] = w.parse_finished(payload)[2]
    assert got == {n: b"%d\n" % n for n in range(1, 101)}


def test_a12_an_id_in_use_is_refused_or_closed(peer):
    peer.send(w.hello() + w.spawn(9, [b"sleep", b"1"]) + w.spawn(9, [b"echo", b"second"]))
    found = peer.until(9)
    if found is not None and found[0] == w.DONE:
        assert w.parse_finished(found[1])[2] != b"second\n" or runs(peer)


def test_a12_half_close_ends_what_runs(peer):
    """The end of input is the end of the sandbox: commands die, the agent exits by itself."""
    peer.send(w.hello() + w.spawn(1, [b"sh", b"-c", b"sleep 500"], options=2))
    while (found := peer.next()) and found[1] != w.STARTED:
        pass
    children = [p.pid for p in hostview.below(peer.process.pid)]
    assert children
    peer.socket.shutdown(socket.SHUT_WR)
    assert peer.is_closed()
    assert peer.process.wait(5) >= 0
    assert all(hostview.wait_gone(pid, 2) for pid in children)


def test_a12_ten_thousand_frames_a_second(peer):
    """Bounded memory, every one answered."""
    peer.send(w.hello())
    before = hostview.resident_kib(peer.process.pid)
    count, answered = 10_000, 0
    for start in range(0, count, 500):
        peer.send(b"".join(w.frame(n + 1, w.PING) for n in range(start, start + 500)))
        while answered < start + 500:
            _, kind, _ = peer.next()
            answered += kind == w.DONE
    assert answered == count
    assert hostview.resident_kib(peer.process.pid) - before < 4096
    assert runs(peer)


def test_a12_more_requests_than_allowed_are_refused_and_bounded(peer):
    """1,024 in flight; one more is BUSY. The answers are read only afterwards."""
    peer.send(w.hello() + b"".join(w.spawn(n, [b"sleep", b"2"]) for n in range(1, 1030)))
    while (found := peer.next(10)) and found[1] != w.ERROR:
        pass
    assert struct.unpack_from("<H", found[2])[0] == 11


def test_a12_a_client_that_never_reads_costs_bounded_memory(peer):
    peer.send(w.hello() + b"".join(w.spawn(n, [b"head", b"-c", b"5000000", b"/dev/zero"], cap=4 << 20) for n in range(1, 41)))
    hostview.eventually(lambda: False, 1.0)
    total = sum(hostview.resident_kib(p.pid) for p in hostview.below(peer.process.pid)) + hostview.resident_kib(peer.process.pid)
    assert total < 200 * 1024


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        struct.pack("<HIHH", 0, 100, 0, 0),
        struct.pack("<HIHH", 0, 100, 0, 0) + w.raw(b"") + w.raw(b"") + struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<HIHH", 0, 100, 0, 0) + w.raw(b"") + w.raw(b"") + w.strs([]) + w.strs([]) + w.raw(b""),
        struct.pack("<HIHH", 0, 100, 0, 0) + w.raw(b"") + w.raw(b"") + w.strs([b"ec\0ho"]) + w.strs([]) + w.raw(b""),
        struct.pack("<HIHH", 0, 100, 0, 0) + w.raw(b"/\0") + w.raw(b"") + w.strs([b"true"]) + w.strs([]) + w.raw(b""),
        struct.pack("<HIHH", 0, 100, 0, 0) + w.raw(b"") + w.raw(b"") + w.strs([b"true"]) + w.strs([b"A\0=1"]) + w.raw(b""),
        struct.pack("<HIHH", 0, 100, 0, 0) + w.raw(b"") + w.raw(b"") + w.strs([b"true"]) + w.strs([]) + w.raw(b"") + b"extra",
        struct.pack("<HIHH", 0xFF00, 100, 0, 0) + w.raw(b"") + w.raw(b"") + w.strs([b"true"]) + w.strs([]) + w.raw(b""),
    ],
    ids=["empty", "short", "count", "no argv", "nul argument", "nul cwd", "nul variable", "extra", "options"],
)
def test_a12_a_malformed_request_is_rejected_and_starts_nothing(peer, payload):
    peer.send(w.hello() + w.frame(3, w.SPAWN, payload))
    kind, answer = peer.until(3)
    assert kind == w.ERROR
    assert struct.unpack_from("<H", answer)[0] in (w.REJECTED, 6)
    assert runs(peer)


def test_a12_a_batch_within_a_batch_or_with_bad_counts(peer):
    inner = w.frame(11, w.BATCH, struct.pack("<BI", 0, 0))
    peer.send(w.hello())
    for identity, payload in (
        (20, struct.pack("<BI", 0, 1) + inner),
        (21, struct.pack("<BI", 0, 1_000_000)),
        (22, struct.pack("<BI", 0, 2) + w.frame(12, w.PING)),
        (23, struct.pack("<BI", 0, 1) + b"\xff" * 8),
    ):
        peer.send(w.frame(identity, w.BATCH, payload))
        assert peer.until(identity) is not None
    assert runs(peer)


# ---- A13: from a fake agent ----


class FakeCell:
    """The other end of a client's stream, in the test's hands."""

    def __init__(self, *, greet: bytes | None = None) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        ours.setblocking(False)
        self.channel = Channel(SocketStream(theirs), sandbox_id="fake", grace_s=0.3)
        self._loop = asyncio.get_running_loop()
        self._held = b""
        self._greet = w.hello() if greet is None else greet

    async def start(self) -> "FakeCell":
        await self.send(self._greet)
        await self.channel.wait_ready(2)
        return self

    async def send(self, data: bytes) -> None:
        try:
            await self._loop.sock_sendall(self.socket, data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    async def request(self, kind: int) -> int:
        """The id of the next request of this kind."""
        while True:
            while len(self._held) >= 4:
                (length,) = struct.unpack_from("<I", self._held)
                if len(self._held) < 4 + length:
                    break
                body, self._held = self._held[4 : 4 + length], self._held[4 + length :]
                identity, got = struct.unpack_from("<IB", body)
                if got == kind:
                    return identity
            self._held += await asyncio.wait_for(self._loop.sock_recv(self.socket, 65536), 5)

    def close(self) -> None:
        self.channel.close()
        self.socket.close()


async def lost_by(answer) -> tuple[untax.SandboxLost, float]:
    """Ask for `true`, give the answer that `answer(id)` makes, and expect the loss of that sandbox."""
    cell = await FakeCell().start()
    try:
        task = asyncio.create_task(cell.channel.call(actions.run(["true"], timeout_s=1)))
        identity = await cell.request(w.SPAWN)
        began = time.monotonic()
        await cell.send(answer(identity))
        with pytest.raises(untax.SandboxLost) as caught:
            await task
        return caught.value, time.monotonic() - began
    finally:
        cell.close()


@pytest.mark.parametrize(
    "answer",
    [
        lambda n: struct.pack("<I", 0xFFFFFFFF) + b"x" * 100,
        lambda n: struct.pack("<I", 300 << 10) + b"x" * 100,
        lambda n: struct.pack("<I", 3) + b"x" * 20,
        lambda n: w.frame(n + 1000, w.DONE, w.finished()),
        lambda n: w.frame(n, w.DONE, b"short"),
        lambda n: w.frame(n, w.DONE, w.finished() + b"extra"),
        lambda n: w.frame(n, 0x55, b""),
        lambda n: w.frame(n, w.OUT, b"\x07data"),
        lambda n: w.frame(n, w.ITEMS, struct.pack("<I", 0xFFFFFFFF)),
        lambda n: w.frame(0, w.DONE, b""),
        lambda n: w.frame(n, w.DONE, w.finished(), zero=7),
        lambda n: w.hello(),
    ],
    ids=["2^32-1", "over the limit", "3", "wrong id", "short", "extra", "kind", "stream 7", "items", "id 0", "zero", "second greeting"],
)
async def test_a13_nonsense_from_the_agent_drops_that_sandbox(answer):
    lost, took = await lost_by(answer)

    assert took < 0.9, "only its deadline ended it"
    assert "\n" not in str(lost)


async def test_a13_a_second_completion_drops_the_sandbox():
    cell = await FakeCell().start()
    try:
        task = asyncio.create_task(cell.channel.call(actions.run(["true"], timeout_s=1)))
        identity = await cell.request(w.SPAWN)
        await cell.send(w.frame(identity, w.DONE, w.finished()) * 2)
        assert (await task).exit_code == 0
        await asyncio.wait_for(cell.channel.wait_closed(), 2)
    finally:
        cell.close()


async def test_a13_a_completion_before_the_greeting_is_refused():
    cell = FakeCell(greet=w.frame(1, w.DONE, w.finished()))
    try:
        with pytest.raises((untax.ProtocolError, untax.SandboxLost)):
            await cell.start()
    finally:
        cell.close()


async def test_a13_silence_is_a_loss_at_the_deadline():
    cell = await FakeCell().start()
    try:
        began = time.monotonic()
        with pytest.raises(untax.SandboxLost):
            await cell.channel.call(actions.run(["true"], timeout_s=0.5))
        assert 0.5 <= time.monotonic() - began < 1.5
    finally:
        cell.close()


async def test_a13_silence_instead_of_a_greeting_is_a_timeout():
    cell = FakeCell(greet=b"")
    try:
        with pytest.raises(untax.ReadinessTimeout):
            await cell.channel.wait_ready(0.3)
    finally:
        cell.close()


async def test_a13_an_endless_answer_is_cut_off_with_little_memory():
    """More output than the cap that was asked for is the end of that sandbox, not of the host's memory."""
    cell = await FakeCell().start()
    before = hostview.resident_kib()
    try:
        task = asyncio.create_task(cell.channel.call(actions.run(["true"], timeout_s=20)))
        identity = await cell.request(w.SPAWN)
        out = w.frame(identity, w.OUT, b"\1" + b"x" * 200_000)
        for _ in range(400):
            await cell.send(out)
            if task.done():
                break
        with pytest.raises(untax.SandboxLost):
            await asyncio.wait_for(task, 2)
        assert hostview.resident_kib() - before < 32 * 1024
    finally:
        cell.close()


async def test_a13_endless_items_are_cut_off():
    cell = await FakeCell().start()
    try:
        task = asyncio.create_task(cell.channel.call(actions.list_dir(".", most=100)))
        identity = await cell.request(w.LIST)
        entry = w.raw(b"name") + b"f" + struct.pack("<IIIQq", 0o644, 0, 0, 0, 0) + w.raw(b"")
        for _ in range(100):
            await cell.send(w.frame(identity, w.ITEMS, struct.pack("<I", 50) + entry * 50))
        with pytest.raises(untax.SandboxLost):
            await asyncio.wait_for(task, 2)
    finally:
        cell.close()


async def test_a13_thousands_of_egress_streams_are_refused():
    """A cell without a network asks for connections all the same."""
    cell = await FakeCell().start()
    try:
        before = hostview.resident_kib()
        for n in range(3000):
            await cell.send(w.frame(0x80000000 + n, 0x90, w.raw(b"10.0.0.1") + struct.pack("<H", 80)))
        await asyncio.sleep(0)
        assert hostview.resident_kib() - before < 16 * 1024
    finally:
        cell.close()


async def test_a13_a_name_with_a_way_out_is_refused_in_a_download(tmp_path):
    """A hostile cell sends a tar that would leave the directory."""
    import io
    import tarfile

    outside = tmp_path / "outside"
    outside.mkdir()
    for members in (
        [("../outside/x", None)],
        [("/" + str(outside / "x").lstrip("/"), None)],
        [("in/d", str(outside)), ("in/d/x", None)],
        [("a/../../outside/x", None)],
    ):
        raw = io.BytesIO()
        with tarfile.open(fileobj=raw, mode="w") as tar:
            for name, link in members:
                info = tarfile.TarInfo(name)
                if link:
                    info.type, info.linkname = tarfile.SYMTYPE, link
                tar.addfile(info)
        cell = await FakeCell().start()
        try:
            task = asyncio.create_task(cell.channel.download("d", tmp_path / "in", timeout_s=2))
            identity = await cell.request(0x29)
            await cell.send(w.frame(identity, w.OUT, b"\1" + raw.getvalue()))
            await cell.send(w.frame(identity, w.DONE, struct.pack("<QQ", len(members), 0)))
            try:
                await task
            except (untax.UntaxError, OSError):
                pass
            assert list(outside.iterdir()) == []
        finally:
            cell.close()


async def test_a13_others_are_unaffected(engine, box):
    """One sandbox after another turns hostile; this one goes on."""
    for _ in range(10):
        await lost_by(lambda n: struct.pack("<I", 0xFFFFFFFF) + b"x" * 20)
        assert (await box.run(["echo", "fine"])).stdout == b"fine\n"


async def test_a14_the_control_socket_is_not_reachable(box):
    result = await box.shell(
        "ls -A /run /tmp; find / -path /proc -prune -o -path /usr -prune -o -type s -print 2>/dev/null; tail -n +2 /proc/net/unix | grep -c / ; ls -l /proc/[0-9]*/fd 2>/dev/null | grep -c socket:",
        timeout_s=60,
    )

    assert "cell" not in result.text
    assert [word for word in result.text.split() if word.isdigit()] == ["0", "0"]


async def test_a14_the_worker_s_socket_cannot_be_taken_over(box):
    """The worker has the workload's own identity; it is not dumpable, so its descriptors are out of reach."""
    code = (
        "import os, ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "for pid in [p for p in os.listdir('/proc') if p.isdigit() and int(p) != os.getpid()]:\n"
        "    try:\n        comm = open(f'/proc/{pid}/comm').read()\n    except OSError: continue\n"
        "    if not comm.startswith('cell'): continue\n"
        "    for n in range(64):\n        try: print('listed', os.readlink(f'/proc/{pid}/fd/{n}'))\n        except OSError: pass\n"
        "    try: print('pidfd', libc.syscall(438, os.pidfd_open(int(pid)), 3, 0))\n    except OSError: pass\n"
        "    if libc.ptrace(16, int(pid), 0, 0) == 0: print('traced', pid)\n"
    )
    result = await box.run(["python3", "-c", code])

    assert "listed" not in result.text
    assert "traced" not in result.text
    assert not [line for line in result.text.splitlines() if line.startswith("pidfd") and line != "pidfd -1"]
