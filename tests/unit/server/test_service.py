"""Owners, leases and answers, over a real socket and a fake substrate: nothing is leased twice, and nothing outlives its owner."""

import asyncio
import contextlib
import json
import os
import socket
import struct
import time

import pytest

import untax
import untax.sync
from untax.channel.stream import SocketStream
from untax.core import account
from untax.pool.options import PoolOptions
from untax.remote import connection as client
from untax.remote.messages import PROTOCOL, Framer, decode, encode
from untax.server import operations
from untax.server import service as module
from untax.server.service import Service
from untax.server.unix import UnixListener
from untax.testing import FakeExit, FakeSubstrate


@contextlib.asynccontextmanager
async def serving(tmp_path, fake=None, *, lease_s=5.0, **options):
    """The service of an engine on a fake substrate, in this process and loop."""
    async with untax.Engine(fake or FakeSubstrate(), **options) as engine:
        service = Service(engine, lease_s=lease_s)
        listener = UnixListener(service, tmp_path / "s.sock")
        listener.start()
        service.url = f"unix:{listener.path}"
        try:
            yield service
        finally:
            await service.aclose()
            listener.close()


@pytest.fixture
def fake():
    return FakeSubstrate()


async def until(condition):
    """What another task brings about, at the latest when the test's own time is up."""
    while not condition():
        await asyncio.sleep(0.001)


def break_connection(engine):
    """As if the socket had been cut: neither side said anything."""
    engine._connection._stream._sock.shutdown(socket.SHUT_RDWR)


# ---- the same API ----


async def test_a_lease_takes_the_steps_of_an_embedded_one(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        async with engine.lease(env={"A": "1"}, files={"x": b"data"}) as box:
            assert "A=1" in (await box.run(["env"])).text
            assert await box.read("x") == b"data"
            assert service.leases == 1
        assert service.leases == 0
        assert not fake.live
    assert fake.log == ["start", "create", "wait_ready", "open_channel", "configure", "spawn env", "destroy", "aclose"]


async def test_both_ends_have_the_whole_account(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        async with engine.lease() as box:
            await box.run(["true"])
            await box.run(["no-such-program"])
            await box.reset()
        [theirs] = await engine.ledgers()
    ours = box.ledger

    assert theirs["rollout"] == ours.rollout
    assert [name for name, *_ in theirs["actions"]] == [action.name for action in ours.actions] == ["run", "run"]
    assert theirs["verdict"] == ours.verdict == "trusted"
    assert theirs["sandboxes"] == ours.sandboxes == ["fake-0", "fake-1"]
    assert theirs["resets"] == ours.resets == {"replaced": 1}
    mine = ours.metrics()
    for part in ("create_s", "action_s", "dispatch_s", "reset_s", "holder_s"):
        assert theirs["metrics"][part] == pytest.approx(mine[part], rel=1e-6), part
    assert mine["unattributed_s"] <= max(0.01 * mine["total_s"], 50e-6)
    assert {"queue", "create", "ready", "reset", "cleanup"} <= {span.name for span in ours.spans}


async def test_errors_are_the_same_ones(fake, tmp_path):
    fake.failures["create"] = untax.CreateError("fake-9", "no room")
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        with pytest.raises(untax.CreateError, match="no room") as raised:
            await engine.acquire()
        assert raised.value.sandbox_id == "fake-9"
        del fake.failures["create"]
        with pytest.raises(untax.UsageError, match="EnvSpec"):
            engine.lease("no spec")
        async with engine.lease() as box:
            with pytest.raises(untax.UsageError, match="no layers"):
                await box.snapshot()
            with pytest.raises(untax.NotFound):
                await box.read("missing")
        with pytest.raises(untax.SandboxLost, match="released"):
            await box.run(["true"])
        with pytest.raises(untax.UsageError, match="no layers"):
            await engine.restore("snap-" + "0" * 24)
    assert box.ledger.verdict == "trusted"


async def test_a_bug_in_the_server_is_told_and_hangs_nobody(fake, tmp_path, monkeypatch, caplog):
    async def broken(*_):
        raise KeyError("oops")

    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease() as box:
        monkeypatch.setattr(service.operations, "op_pause", broken)
        with pytest.raises(untax.BackendError, match="KeyError"):
            await box.pause()
        assert "a request failed" in caplog.text
        await box.run(["true"])


async def test_wait_s_is_the_server_s_to_keep(fake, tmp_path):
    gate = fake.gates["create"] = asyncio.Event()
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        try:
            with pytest.raises(untax.PoolTimeout):
                await engine.acquire(wait_s=0.05)
        finally:
            gate.set()


async def test_x23_a_lease_ends_by_its_time_with_a_typed_error(fake, tmp_path):
    """The action under way is told why, and the grader of a box that is over gets an error and no hang."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        box = await engine.acquire(ttl_s=0.2)
        with pytest.raises(untax.SandboxLost, match=r"lease of 0\.2 s has ended"):
            await box.run(["sleep", "60"])
        with pytest.raises(untax.SandboxLost, match=r"lease of 0\.2 s has ended"):
            await engine.grader(box, take=("**",))
        await box.release()
        assert not fake.live
        assert service.leases == 0
    assert box.ledger.verdict == "infra"


@pytest.mark.parametrize("begin", ["acquire", "lease"])
@pytest.mark.parametrize(("asleep_s", "said"), [(0.0, ["knock", "pools"]), (1e9, ["pools"])])
async def test_who_said_nothing_for_a_while_is_woken_before_a_lease_is_even_checked(fake, tmp_path, monkeypatch, asleep_s, said, begin):
    asked = []
    received = module.Session.message_received

    def seen(session, body, fd):
        asked.append(body["op"])
        received(session, body, fd)

    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        monkeypatch.setattr(client, "_ASLEEP_S", asleep_s)  # no time at all, or more than there was
        monkeypatch.setattr(module.Session, "message_received", seen)
        with pytest.raises(untax.UsageError):
            await getattr(engine, begin)(ttl_s=-1)
        await engine.pools()
        assert asked == said


async def test_the_ledger_is_whole_from_the_first_look_in_whatever_thread_that_is(fake, tmp_path, monkeypatch):
    """Also for who looks while another thread is about to complete it."""
    complete = account.complete

    def slowly(*args, **options):
        time.sleep(0.05)
        complete(*args, **options)

    monkeypatch.setattr(account, "complete", slowly)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        box = await engine.acquire()
        assert not box._ledger.rollout, "nobody has waited for it"
        assert box.id == "fake-0"
        seen = await asyncio.gather(*(asyncio.to_thread(lambda: (box.ledger.rollout, box.ledger.hit)) for _ in range(4)))
        assert all(rollout and hit.kind == "cold" for rollout, hit in seen) and len({rollout for rollout, _ in seen}) == 1
        assert box.ledger.sandboxes == ["fake-0"]
        await box.run(["true"])
        await box.release()
        assert box.ledger.metrics()["unattributed_s"] <= max(0.01 * box.ledger.total_s, 50e-6)


async def test_blocking_clients_release_what_they_lease(fake, tmp_path):
    async with serving(tmp_path, fake) as service:

        def rollouts():
            with untax.sync.connect(service.url) as engine:
                boxes = [engine.acquire() for _ in range(2)]
                for box in boxes:
                    assert box.run(["true"]).exit_code == 0
                    box.release()
                assert not engine._inner._boxes
                return [box.ledger for box in boxes]

        ledgers = await asyncio.to_thread(rollouts)
        assert service.leases == 0
        assert all(ledger.is_closed and ledger.verdict == "trusted" and len(ledger.actions) == 1 for ledger in ledgers)
        kept = [json.loads(one) for one in service.latest_ledgers()]
        assert {one["rollout"] for one in kept} == {ledger.rollout for ledger in ledgers}
        assert {one["verdict"] for one in kept} == {"trusted"}


async def test_the_end_of_what_is_given_up_wakes_nobody(fake, tmp_path, monkeypatch):
    """The server ends the channel a moment before it answers: its holder hears of the answer only."""
    heard = []
    readable = SocketStream._readable
    monkeypatch.setattr(SocketStream, "_readable", lambda self: (heard.append(self), readable(self)))
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        box = await engine.acquire()
        stream = box._channel._stream
        await box.run(["true"])
        assert stream in heard
        heard.clear()
        await box.release()
        assert stream not in heard and stream._closed


async def test_an_action_under_way_is_told_that_its_box_was_released(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        box = await engine.acquire()
        running = asyncio.ensure_future(box.run(["sleep", "600"]))
        await asyncio.sleep(0.01)
        await box.release()
        with pytest.raises(untax.SandboxLost, match="released"):
            await running
        assert box.ledger.verdict == "trusted"


async def test_a_lease_whose_account_cannot_be_read_is_not_to_be_trusted(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(operations, "packed", lambda _: b"no account")
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease() as box:
        assert (await box.run(["true"])).exit_code == 0
        assert box.ledger.verdict == "infra" and "ProtocolError" in box.ledger.reason
        assert box.id == "fake-0"


# ---- cancellation ----


async def test_a_cancelled_request_leaves_no_lease(fake, tmp_path):
    gate = fake.gates["create"] = asyncio.Event()
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        leasing = asyncio.ensure_future(engine.acquire())
        await until(lambda: "create" in fake.log)
        leasing.cancel()
        await asyncio.wait([leasing])
        gate.set()
        await until(lambda: not service.engine._boxes)
        assert not fake.live
        assert service.leases == 0
        async with engine.lease():
            pass


async def test_x34_cancelled_at_any_point_nothing_is_left(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        for turns in range(60):
            leasing = asyncio.ensure_future(engine.acquire())
            for _ in range(turns):
                await asyncio.sleep(0)
            leasing.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await leasing).release()
        await until(lambda: not service.leases and not service.engine._boxes)
        assert not fake.live
        assert not engine._boxes


# ---- owners ----


async def test_a_broken_connection_is_taken_up_again_and_nothing_is_lost(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease() as box:
        owner = engine.server.owner
        break_connection(engine)
        assert (await box.run(["true"])).exit_code == 0  # the channel is not the connection
        await box.reset()
        await box.run(["true"])
        assert engine.server.owner == owner
        assert service.leases == 1
    assert box.ledger.verdict == "trusted"


async def test_a_lost_reply_is_asked_for_again_and_gives_the_same_lease(fake, tmp_path):
    """The server made the sandbox and answered into a socket that nobody reads any more."""
    gate = fake.gates["create"] = asyncio.Event()
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        leasing = asyncio.ensure_future(engine.acquire())
        await until(lambda: "create" in fake.log)
        engine._connection._stream._loop.remove_reader(engine._connection._stream._sock)  # deaf
        gate.set()
        await until(lambda: service.leases == 1)
        await asyncio.sleep(0.01)
        assert not leasing.done()
        stream = engine._connection._stream
        stream._lose("cut")

        box = await leasing
        assert (await box.run(["true"])).exit_code == 0
        assert fake.log.count("create") == 1
        assert service.leases == 1
        await box.release()


async def test_a_request_that_never_arrived_is_carried_out_once(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        break_connection(engine)
        boxes = await asyncio.gather(*(engine.acquire() for _ in range(5)))
        assert service.leases == len({box.id for box in boxes}) == 5
        assert fake.log.count("create") == 5
        await asyncio.gather(*(box.release() for box in boxes))


@pytest.mark.parametrize("is_made", [True, False])
async def test_a_lease_that_failed_with_its_connection_is_given_back_by_the_next_one(fake, tmp_path, monkeypatch, is_made):
    """Its client was told that it failed, and has asked elsewhere by the time that the server is reached again."""
    gate = fake.gates["create"] = asyncio.Event()
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        owner = engine.server.owner
        leasing = asyncio.ensure_future(engine.acquire())
        await until(lambda: "create" in fake.log)
        with monkeypatch.context() as cut:
            cut.setattr(client.Connection, "connect", refused)
            break_connection(engine)
            with pytest.raises(untax.BackendError, match="there is no other"):
                await leasing
        if is_made:
            gate.set()
            await until(lambda: service.leases == 1)
        await engine.pools()
        assert engine.server.owner == owner
        gate.set()
        await until(lambda: not service.leases and not fake.live)
        async with engine.lease():
            assert service.leases == 1


async def test_more_leases_at_once_than_a_server_takes_wait_for_their_turn(fake, tmp_path):
    """And their releases are not behind them."""
    async with serving(tmp_path, fake, pool=PoolOptions(entries=20)) as service, untax.connect(service.url) as engine:

        async def rollout():
            async with engine.lease() as box:
                return (await box.run(["true"])).exit_code

        assert await asyncio.gather(*(rollout() for _ in range(1100))) == [0] * 1100
        assert service.leases == 0


async def test_a_request_that_waits_for_its_turn_keeps_its_deadline(fake, tmp_path, monkeypatch):
    monkeypatch.setattr(client, "_AT_ONCE", 1)
    gate = fake.gates["create"] = asyncio.Event()
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        first = asyncio.ensure_future(engine.acquire())
        await until(lambda: "create" in fake.log)
        with pytest.raises(untax.BackendError, match=r"within 0\.05 s"):
            await engine.request("lease", {}, timeout_s=0.05)
        await engine.pools()  # of the other sort
        gate.set()
        await (await first).release()
        async with engine.lease():
            assert service.leases == 1


async def test_an_owner_that_does_not_come_back_loses_its_leases(fake, tmp_path, monkeypatch):
    """Within its lease time, also when a snapshot or a reset of its is under way."""
    async with serving(tmp_path, fake, lease_s=0.2) as service:
        engine = untax.connect(service.url)
        await engine.start()
        box = await engine.acquire()
        monkeypatch.setattr(client.Connection, "connect", refused)
        break_connection(engine)
        await until(lambda: not service.leases)
        await until(lambda: not fake.live)
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        assert box.ledger.verdict == "infra"
        await until(lambda: service.ledgers)
        theirs = json.loads(service.ledgers[0].text)
        assert theirs["verdict"] == "infra"
        assert "gone" in theirs["reasons"][0]
        await engine.aclose()


async def refused(self):
    raise untax.BackendError("", "no server listens")


async def test_an_owner_that_comes_back_too_late_is_told(fake, tmp_path):
    """A server that does not know it any more: its boxes are lost, and new leases work."""
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        box = await engine.acquire()
        [owner] = service.owners
        service.owners.end(owner, "for the test")
        await until(lambda: not fake.live)
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        async with engine.lease() as other:
            await other.run(["true"])
        assert engine.server.owner != owner.id
        await box.release()


async def test_c15_what_a_closed_client_held_is_given_back(fake, tmp_path):
    async with serving(tmp_path, fake) as service:
        engine = untax.connect(service.url)
        await engine.start()
        boxes = [await engine.acquire() for _ in range(3)]
        await engine.aclose()
        assert service.leases == 0
        assert not fake.live
        assert not list(service.owners)
        with pytest.raises(untax.SandboxLost):
            await boxes[0].run(["true"])
        with pytest.raises(untax.PoolClosed):
            await engine.acquire()


async def test_what_cannot_be_given_back_of_a_dead_owner_keeps_nothing_else(fake, tmp_path, monkeypatch, caplog):
    """A release, a pin and a snapshot that fail are logged; every other lease, pin and snapshot goes."""

    class Thing:
        def __init__(self, *, fails):
            self.is_saved, self.is_gone, self._fails = False, False, fails

        def close(self):
            self.is_gone = True
            if self._fails:
                raise OSError("busy")

        async def drop(self):
            self.close()

    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        await asyncio.gather(*(engine.acquire() for _ in range(3)))
        [owner] = service.owners
        owner.pins = {str(n): Thing(fails=n == 0) for n in range(2)}
        owner.snapshots = {str(n): Thing(fails=n == 0) for n in range(2)}
        pins, snapshots = list(owner.pins.values()), list(owner.snapshots.values())
        first, *_ = owner.leases.values()
        released = first.release

        async def fails():
            await released()
            raise RuntimeError("stuck")

        monkeypatch.setattr(first, "release", fails)
        service.owners.end(owner, "it is dead")
        await owner.ended
        assert not fake.live
        assert all(thing.is_gone for thing in (*pins, *snapshots))
    assert [word in caplog.text for word in ("stuck", "busy")] == [True, True]


async def test_an_owner_must_know_its_secret(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease():
        with pytest.raises(untax.UsageError, match="secret"):
            service.owners.take_up(engine.server.owner, "wrong", "x")
        with pytest.raises(untax.UsageError, match="secret"):
            service.owners.take_up(engine.server.owner, None, "x")


@pytest.mark.parametrize("lease_s", [0.3, 3.0, 600.0])
async def test_a_client_is_asked_for_heartbeats_often_enough_to_keep_its_lease(fake, tmp_path, lease_s):
    """However short that is: three of them, so that one may be late and one lost."""
    async with serving(tmp_path, fake, lease_s=lease_s) as service, untax.connect(service.url) as engine:
        assert 3 * engine.server.heartbeat_s <= lease_s
        assert engine.server.heartbeat_s <= module.HEARTBEAT_S


async def test_where_a_connection_proves_nothing_only_heartbeats_do(fake, tmp_path):
    """As it will be over TCP: an owner that is connected and silent is over; one that is heard of is not."""

    class Attached:
        proves_life = False

        def drop(self, reason):
            self.dropped = reason

    async with serving(tmp_path, fake, lease_s=0.1) as service:
        silent, heard = (service.owners.take_up(None, None, name)[0] for name in ("silent", "heard"))
        attachments = {owner: Attached() for owner in (silent, heard)}
        for owner, attachment in attachments.items():
            service.owners.attach(owner, attachment)
        while not silent.is_over:
            service.owners.renew(heard)
            await asyncio.sleep(0.01)
        assert not heard.is_over
        assert "nothing was heard" in attachments[silent].dropped
        await until(lambda: heard.is_over)


# ---- faults of the server ----


async def test_x3_a_server_that_does_not_answer_is_given_up(fake, tmp_path, monkeypatch):
    """Nobody waits for ever: requests fail as the backend's, actions go on, and it is taken up again once it answers."""
    monkeypatch.setattr(module, "HEARTBEAT_S", 0.05)
    monkeypatch.setattr(client, "GREETING_S", 0.5)
    frozen = False

    def receive(session, body, fd):
        if not frozen:
            original(session, body, fd)

    original = module.Session.message_received
    monkeypatch.setattr(module.Session, "message_received", receive)
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease() as box:
        frozen = True
        with pytest.raises(untax.BackendError):
            await box.pause()
        await box.run(["true"])
        frozen = False
        async with asyncio.timeout(10):
            while True:
                with contextlib.suppress(untax.BackendError):
                    await box.pause()
                    break
        await box.run(["true"])
        assert service.leases == 1


async def test_a_closing_server_tells_its_clients(fake, tmp_path):
    async with contextlib.AsyncExitStack() as stack:
        service = await stack.enter_async_context(serving(tmp_path, fake))
        engine = untax.connect(service.url)
        await engine.start()
        box = await engine.acquire()
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await until(lambda: "spawn sleep 60" in fake.log)
    with pytest.raises(untax.SandboxLost):
        await running
    with pytest.raises(untax.SandboxLost, match="server was stopped"):
        await box.run(["true"])
    with pytest.raises(untax.BackendError, match="untax serve"):
        await engine.acquire()
    assert (box.ledger.verdict, fake.live) == ("infra", set())
    await engine.aclose()


async def test_a_draining_server_takes_no_new_leases(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        async with engine.lease() as box:
            service.drain()
            with pytest.raises(untax.PoolClosed, match="stopping"):
                await engine.acquire()
            with pytest.raises(untax.PoolClosed, match="stopping"):
                await untax.connect(service.url).start()
            break_connection(engine)
            await box.reset()  # who is here already may come back
            idle = asyncio.ensure_future(service.wait_idle())
            await asyncio.sleep(0)
            assert not idle.done()
        await idle


async def test_a_drain_waits_for_leases_that_are_being_made(fake, tmp_path):
    gate = fake.gates["create"] = asyncio.Event()
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine:
        leasing = asyncio.ensure_future(engine.acquire())
        await until(lambda: "create" in fake.log)
        service.drain()
        idle = asyncio.ensure_future(service.wait_idle())
        await asyncio.sleep(0.01)
        assert not idle.done()
        gate.set()
        box = await leasing
        await asyncio.sleep(0.01)
        assert not idle.done()
        await box.release()
        await idle


async def test_a_sandbox_that_dies_is_lost_on_both_sides(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease() as box:
        fake.sandboxes[0].die()
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        await until(lambda: not fake.live)
        assert service.leases == 1  # until it is given up
    assert box.ledger.verdict == "infra"
    assert json.loads(service.ledgers[-1].text)["verdict"] == "infra"


async def test_a_failed_reset_loses_the_box(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease() as box:
        fake.failures["open_channel"] = untax.BackendError("fake-1", "broken")
        with pytest.raises(untax.BackendError, match="broken"):
            await box.reset()
        with pytest.raises(untax.SandboxLost, match="its reset failed"):
            await box.run(["true"])
        del fake.failures["open_channel"]
    assert json.loads(service.ledgers[-1].text)["verdict"] == box.ledger.verdict == "infra"
    assert not fake.live


async def test_an_action_under_way_ends_with_a_reset_and_blames_nobody(fake, tmp_path):
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease() as box:
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await until(lambda: "spawn sleep 60" in fake.log)
        await box.reset()
        with pytest.raises(untax.SandboxLost, match="reset"):
            await running
        await box.run(["true"])
    assert box.ledger.verdict == "trusted"


# ---- clients that are broken or not ours ----


class Raw:
    """A client that says whatever the test likes."""

    def __init__(self, service):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(service.url.removeprefix("unix:"))
        self.sock.setblocking(False)
        self.framer = Framer()
        self.found = []

    def send(self, **body):
        self.sock.sendall(encode(body))

    async def receive(self):
        """The next message, or None at the end."""
        while not self.found:
            data = await asyncio.get_running_loop().sock_recv(self.sock, 65536)
            if not data:
                return None
            self.found += [decode(message)[0] for message in self.framer.feed(data)]
        return self.found.pop(0)

    def hello(self, **changes):
        self.send(
            **{
                "id": 1,
                "op": "hello",
                "protocol": PROTOCOL,
                "release": "x",
                "owner": None,
                "secret": None,
                "now_ns": 0,
                "boot": None,
                **changes,
            }
        )


@pytest.fixture
async def raw_service(fake, tmp_path):
    async with serving(tmp_path, fake) as service:
        yield service
        async with untax.connect(service.url) as engine, engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0  # whatever was said to it


async def test_another_protocol_is_refused_with_both_named(raw_service):
    raw = Raw(raw_service)
    raw.hello(protocol=99, release="7.7")
    answer = await raw.receive()
    assert answer["error"]["kind"] == "ProtocolError"
    assert "7.7 speaks protocol 99" in answer["error"]["args"][0]
    assert await raw.receive() is None


async def test_a_server_of_another_version_is_refused_with_both_named(raw_service, monkeypatch):
    monkeypatch.setattr(client, "PROTOCOL", 99)
    with pytest.raises(untax.ProtocolError, match=f"protocol 99, the server .* {PROTOCOL}"):
        await untax.connect(raw_service.url).start()


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 100, b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 1 << 20) + b"x", encode({"id": 1, "op": "lease", "args": {}}), encode({"id": "x"}), encode({"op": "hello"})],
)  # fmt: skip
async def test_nonsense_ends_the_connection_and_nothing_else(raw_service, data):
    raw = Raw(raw_service)
    raw.sock.sendall(data)
    answer = await raw.receive()
    while answer is not None:
        assert answer["error"]["kind"] == "ProtocolError"
        answer = await raw.receive()


async def test_requests_that_cannot_be_are_refused_one_by_one(raw_service):
    raw = Raw(raw_service)
    raw.hello()
    await raw.receive()
    requests = [
        {"op": "no_such"}, {"op": "__class__"}, {"op": "lease", "args": {"lease": 1}}, {"op": "reset", "args": {"lease": "x", "idle": True}},
        {"op": "lease", "args": {"lease": "l", "spec": "host", "files": {}, "wait_s": None, "ttl_s": 1.0, "snapshot": None}},
        {"op": "lease", "args": {"lease": "l", "spec": untax.EnvSpec(), "files": {}, "wait_s": None, "ttl_s": -1, "snapshot": None}},
        {"op": "worker", "args": {"lease": "x", "user": 5}}, {"op": "warm", "args": {"spec": untax.EnvSpec(), "n": "many"}},
    ]  # fmt: skip
    for number, request in enumerate(requests, 2):
        raw.send(**{"id": number, "args": {}, **request})
    for number in range(2, 2 + len(requests)):
        answer = await raw.receive()
        assert answer["id"] == number
        assert answer["error"]["kind"] in ("ProtocolError", "UsageError", "SandboxLost"), answer
    assert raw_service.leases == 0


async def test_descriptors_that_are_sent_to_the_server_are_closed(raw_service):
    raw = Raw(raw_service)
    raw.hello()
    await raw.receive()
    before = len(os.listdir("/proc/self/fd"))
    with open("/dev/null") as null:
        for number in range(2, 30):
            socket.send_fds(raw.sock, [encode({"id": number, "op": "renew"}, 1)], [null.fileno()])
            await raw.receive()
    assert len(os.listdir("/proc/self/fd")) <= before
    raw.sock.close()


async def test_a_second_connection_of_an_owner_takes_the_place_of_the_first(raw_service):
    first, second = Raw(raw_service), Raw(raw_service)
    first.hello()
    known = (await first.receive())["ok"]
    second.hello(owner=known["owner"], secret=known["secret"])
    assert (await second.receive())["ok"]["is_resumed"]
    assert await first.receive() is None


async def test_too_many_requests_at_once_are_refused(raw_service, fake):
    gate = fake.gates["create"] = asyncio.Event()
    raw = Raw(raw_service)
    raw.hello()
    await raw.receive()
    args = {"spec": untax.EnvSpec(), "files": {}, "wait_s": None, "ttl_s": 60.0, "snapshot": None}
    for number in range(2, 2 + 1025):
        raw.sock.setblocking(True)
        raw.send(id=number, op="lease", args={**args, "lease": f"l{number}"})
        raw.sock.setblocking(False)
        await asyncio.sleep(0)
    answer = await raw.receive()
    assert (answer["id"], answer["error"]["kind"]) == (1026, "UsageError")
    raw.sock.close()
    [owner] = raw_service.owners
    raw_service.owners.end(owner, "for the test")
    gate.set()
    await owner.ended
    async with asyncio.timeout(5):  # what was being made goes as soon as it is there
        while fake.live:
            await asyncio.sleep(0)


# ---- the socket ----


async def test_the_socket_is_for_its_user_only(fake, tmp_path):
    async with serving(tmp_path, fake) as service:
        path = service.url.removeprefix("unix:")
        assert os.stat(path).st_mode & 0o777 == 0o600
    assert not os.listdir(tmp_path)  # neither it nor its lock is left


async def test_a_socket_in_use_is_refused(fake, tmp_path):
    async with serving(tmp_path, fake) as service:
        with pytest.raises(untax.UsageError, match="listens there already"):
            UnixListener(service, tmp_path / "s.sock").start()
        async with untax.connect(service.url):
            pass


async def test_a_socket_of_somebody_else_s_program_is_refused(fake, tmp_path):
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "s.sock"))
        other.listen()
        with pytest.raises(untax.UsageError, match="somebody else listens"):
            async with serving(tmp_path, fake):
                pass
        assert (tmp_path / "s.sock").is_socket()
        assert other.accept()  # it was asked, and left alone


async def test_a_socket_that_a_dead_server_left_is_taken_over(fake, tmp_path):
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "s.sock"))
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease():
        pass


async def test_what_is_not_a_socket_is_left_alone(fake, tmp_path):
    (tmp_path / "s.sock").write_text("precious")
    with pytest.raises(untax.UsageError, match="not a socket"):
        async with serving(tmp_path, fake):
            pass
    assert (tmp_path / "s.sock").read_text() == "precious"
    assert os.listdir(tmp_path) == ["s.sock"]


async def test_a_path_that_is_too_long_names_the_remedy(fake, tmp_path):
    long = tmp_path / ("x" * 100)
    for make in (lambda: untax.connect(f"unix:{long}"), lambda: UnixListener(None, long)):
        with pytest.raises(untax.UsageError, match="shorter"):
            make()


async def test_a_missing_directory_names_the_remedy(fake, tmp_path):
    with pytest.raises(untax.UsageError, match="no such directory"):
        async with serving(tmp_path / "none", fake):
            pass


@pytest.mark.parametrize("url", ["", "unix:", "/tmp/x", "http://", "http://u:p@h", "http://h:x", "https://h/?q", "tcp:x"])
def test_another_address_is_refused(url):
    with pytest.raises(untax.UsageError):
        untax.connect(url)


async def test_no_server_names_the_command_that_starts_one(tmp_path):
    with pytest.raises(untax.BackendError, match=r"untax serve --socket"):
        await untax.connect(f"unix:{tmp_path}/none").start()


async def test_a_connection_is_not_used_before_its_start(tmp_path):
    engine = untax.connect(f"unix:{tmp_path}/none")
    with pytest.raises(untax.UsageError, match="not connected"):
        engine.lease()


async def test_many_programs_output_comes_through_a_relay(tmp_path):
    """The fake's channels are no descriptors, so the server carries their bytes: all of them, in order."""
    fake = FakeSubstrate(programs={"big": lambda argv, env, stdin: FakeExit(stdout=b"x" * 200_000)})
    async with serving(tmp_path, fake) as service, untax.connect(service.url) as engine, engine.lease() as box:
        results = await asyncio.gather(*(box.run(["big"]) for _ in range(50)))
        assert {len(result.stdout) for result in results} == {200_000}
