"""The asyncio driver against a cell that the test plays, honest or hostile."""

import asyncio
import struct

import pytest
from tests import agentwire
from tests.unit.channel.fakecell import FakeCell, command_done, error, settle

from untax.channel import actions, client, flow, wire
from untax.core.errors import NotFound, NotRun, ProtocolError, ReadinessTimeout, SandboxLost, UsageError


async def test_answers_find_their_callers_in_any_order():
    cell = FakeCell()
    one, [(first, _, _)] = await cell.asked(cell.channel.call(actions.run(["a"])))
    two, [(second, _, _)] = await cell.asked(cell.channel.call(actions.run(["b"])))
    cell.say(second, wire.DONE, command_done(out=b"B"))
    cell.say(first, wire.DONE, command_done(out=b"A"))

    assert (await one).stdout == b"A"
    assert (await two).stdout == b"B"


async def test_an_error_inside_leaves_the_channel_usable():
    cell = FakeCell()
    task, [(request, _, _)] = await cell.asked(cell.channel.call(actions.read("x")))
    cell.say(request, wire.ERROR, error(wire.OS, 2))
    with pytest.raises(NotFound):
        await task

    task, [(request, _, _)] = await cell.asked(cell.channel.call(actions.ping()))
    cell.say(request, wire.DONE)
    await task


async def test_ready_means_greeted():
    cell = FakeCell(greet=False)
    task = asyncio.ensure_future(cell.channel.wait_ready())
    await settle()
    assert not task.done()
    cell.raw(agentwire.hello(version=b"9.9"))
    await task
    assert cell.channel.cell_version == "9.9"


async def test_a_silent_cell_is_not_ready():
    with pytest.raises(ReadinessTimeout):
        await FakeCell(greet=False).channel.wait_ready(0.01)


async def test_x31_another_version_is_refused_with_both_named():
    cell = FakeCell(greet=False)
    cell.raw(agentwire.hello(major=7, version=b"9.9"))
    with pytest.raises(ProtocolError, match=r"9\.9 speaks protocol 7\.0, this client 1\.0"):
        await cell.channel.wait_ready()
    with pytest.raises(SandboxLost):
        await cell.channel.call(actions.ping())


async def test_cancelling_the_caller_cancels_the_command():
    cell = FakeCell()
    task, [(request, _, _)] = await cell.asked(cell.channel.call(actions.run(["sleep"])))
    task.cancel()
    await settle()

    assert cell.requests() == [(request, wire.CANCEL, b"")]
    cell.say(request, wire.OUT, b"\1late")  # crossed the cancel
    cell.say(request, wire.DONE, command_done(how=3))
    assert not cell.channel.is_lost
    assert not cell.channel._open


async def test_the_end_of_the_stream_is_told_to_everybody():
    cell = FakeCell()
    tasks = [asyncio.ensure_future(cell.channel.call(actions.run(["x"]))) for _ in range(3)]
    await settle()
    cell.stream.receiver.connection_lost(ConnectionResetError())
    for task in tasks:
        with pytest.raises(SandboxLost, match="sbx-1: the connection was reset"):
            await task
    await cell.channel.wait_closed()


async def test_the_holder_is_told_once():
    told = []
    cell = FakeCell(on_lost=told.append)
    cell.channel.close()
    cell.channel.close()

    assert [str(lost) for lost in told] == ["sbx-1: the channel was closed"]


@pytest.mark.parametrize(
    "nonsense",
    [
        b"\xff\xff\xff\xff" + bytes(8),
        bytes(12),
        agentwire.frame(77, wire.DONE),
        agentwire.frame(0, wire.DONE),
        agentwire.hello(),
        agentwire.frame(1, wire.DONE, b"x"),
        agentwire.frame(1, wire.STARTED, b"\0\0\0\0"),
        agentwire.frame(1, 0xEE),
        agentwire.frame(1, wire.DONE) + agentwire.frame(1, wire.DONE),
        agentwire.frame(2 | wire.EGRESS_BIT, wire.EGRESS, b"\xff\xff\xff\xff"),
    ],
    ids=["oversize", "zero length", "wrong id", "id 0", "second greeting", "left over", "start of a ping", "unknown kind", "twice", "egress"],
)  # fmt: skip
async def test_a13_nonsense_ends_this_channel_and_no_other(nonsense):
    bad, good = FakeCell(), FakeCell()
    one, _ = await bad.asked(bad.channel.call(actions.ping()))
    other, _ = await bad.asked(bad.channel.call(actions.run(["x"])))
    bystander, [(request, _, _)] = await good.asked(good.channel.call(actions.ping()))
    bad.raw(nonsense)

    with pytest.raises(SandboxLost, match="nonsense"):
        await other
    assert bad.channel.is_lost
    assert bad.stream.closed
    await asyncio.gather(one, return_exceptions=True)
    good.say(request, wire.DONE)
    await bystander


async def test_a13_an_answer_before_the_greeting_is_nonsense():
    cell = FakeCell(greet=False)
    task, _ = await cell.asked(cell.channel.call(actions.ping()))
    cell.say(1, wire.DONE)
    with pytest.raises(SandboxLost):
        await task


async def test_x5_silence_beyond_the_deadline_is_a_lost_sandbox():
    cell = FakeCell(grace_s=0.02)
    with pytest.raises(SandboxLost, match="deadline"):
        await cell.channel.call(actions.run(["x"], timeout_s=0.01))
    assert cell.stream.closed


async def test_an_answer_within_the_grace_counts():
    cell = FakeCell(grace_s=5)
    task, [(request, _, _)] = await cell.asked(cell.channel.call(actions.run(["x"], timeout_s=0.001)))
    await asyncio.sleep(0.005)
    cell.say(request, wire.DONE, command_done(how=2))

    assert (await task).timed_out


async def test_a_long_body_waits_for_credit():
    cell = FakeCell()
    task, sent = await cell.asked(cell.channel.call(actions.write("x", b"z" * (2 << 20))))
    request = sent[0][0]
    body = [payload for _, kind, payload in sent if kind == wire.DATA]
    assert sum(len(payload) - 1 for payload in body) == wire.STREAM_WINDOW
    while not body or body[-1][:1] != b"\1":
        cell.say(request, wire.CREDIT, struct.pack("<BI", 0, wire.STREAM_WINDOW - cell.channel._open[request].call.window))
        await settle()
        body += [payload for _, kind, payload in cell.requests() if kind == wire.DATA]
    cell.say(request, wire.DONE, struct.pack("<Q", 2 << 20))

    assert await task == 2 << 20
    assert sum(len(payload) - 1 for payload in body) == 2 << 20


async def test_a_write_that_fails_early_stops_its_body():
    cell = FakeCell()
    task, sent = await cell.asked(cell.channel.call(actions.write("x", b"z" * (2 << 20))))
    cell.say(sent[0][0], wire.ERROR, error(wire.OS, 28))
    with pytest.raises(OSError, match="No space"):
        await task
    assert not cell.channel._open


async def test_a_batch_gives_each_its_own_answer():
    cell = FakeCell()
    calls = [actions.run(["a"]), actions.read("b"), actions.run(["c"])]
    task, [(batch, kind, payload)] = await cell.asked(cell.channel.batch(calls, stop=True))
    assert kind == wire.BATCH
    assert payload[:5] == b"\1" + struct.pack("<I", 3)
    cell.say(1, wire.DONE, command_done(out=b"A"))
    cell.say(2, wire.ERROR, error(wire.OS, 2))
    cell.say(3, wire.ERROR, error(wire.CANCELLED))
    cell.say(batch, wire.DONE, struct.pack("<I", 2))
    one, two, three = await task

    assert one.stdout == b"A"
    assert isinstance(two, NotFound)
    assert isinstance(three, NotRun)
    assert not cell.channel._open


async def test_a_batch_that_is_refused_leaves_nothing_open():
    cell = FakeCell()
    task, [(batch, _, _)] = await cell.asked(cell.channel.batch([actions.ping(), actions.ping()]))
    cell.say(batch, wire.ERROR, error(wire.REJECTED))
    with pytest.raises(UsageError):
        await task
    assert not cell.channel._open


async def test_a_batch_that_ends_before_its_parts_is_nonsense():
    cell = FakeCell()
    task, [(batch, _, _)] = await cell.asked(cell.channel.batch([actions.ping()]))
    cell.say(batch, wire.DONE, struct.pack("<I", 1))
    with pytest.raises(SandboxLost):
        await task


async def test_streams_cannot_be_in_a_batch():
    cell = FakeCell()
    with pytest.raises(UsageError):
        await cell.channel.batch([flow.connect(80)])


async def test_more_than_a_channel_holds_waits_its_turn():
    cell = FakeCell()
    tasks = [asyncio.ensure_future(cell.channel.call(actions.ping())) for _ in range(wire.REQUESTS_MAX + 5)]
    await settle()
    first = cell.requests()
    assert len(first) == wire.REQUESTS_MAX - 1
    for request, _, _ in first:
        cell.say(request, wire.DONE)
    await settle()
    for request, _, _ in cell.requests():
        cell.say(request, wire.DONE)
    await asyncio.gather(*tasks)


async def test_a18_a_cell_that_asks_and_never_reads_is_not_listened_to():
    """Refusals of egress would pile up for a cell that takes none of them: its own frames wait instead."""
    cell = FakeCell()
    cell.stream.stuck = 5 << 20
    cell.say(1 | wire.EGRESS_BIT, wire.EGRESS, wire.blob(b"x") + struct.pack("<H", 80))
    assert cell.stream.paused
    cell.stream.unstick()
    await settle()
    assert not cell.stream.paused


async def test_a_stream_returns_credit_as_it_is_read():
    cell = FakeCell()
    task, [(request, _, _)] = await cell.asked(cell.channel.open(flow.start(["x"])))
    cell.say(request, wire.STARTED, struct.pack("<I", 42))
    link = await task
    for _ in range(4):
        cell.say(request, wire.OUT, b"\1" + bytes(65536))
    total = 0
    while total < 4 * 65536:
        total += len((await link.receive())[1])

    assert link.flow.pid == 42
    assert sum(struct.unpack("<BI", payload)[1] for _, kind, payload in cell.requests() if kind == wire.CREDIT) == 4 * 65536


async def test_a13_a_stream_beyond_its_window_is_nonsense():
    cell = FakeCell()
    task, [(request, _, _)] = await cell.asked(cell.channel.open(flow.start(["x"])))
    cell.say(request, wire.STARTED, struct.pack("<I", 42))
    link = await task
    for _ in range(wire.STREAM_WINDOW // 65536 + 1):
        cell.say(request, wire.OUT, b"\1" + bytes(65536))
    assert cell.channel.is_lost
    with pytest.raises(SandboxLost):
        await link.wait()


async def test_a13_output_before_its_start_is_nonsense():
    cell = FakeCell()
    task, [(request, _, _)] = await cell.asked(cell.channel.open(flow.start(["x"])))
    cell.say(request, wire.OUT, b"\1x")
    with pytest.raises(SandboxLost):
        await task


async def test_a_start_that_fails_is_raised():
    cell = FakeCell()
    task, [(request, _, _)] = await cell.asked(cell.channel.open(flow.connect(80)))
    cell.say(request, wire.ERROR, error(wire.OS, 111))
    with pytest.raises(OSError, match="refused"):
        await task


async def test_egress_is_refused_where_there_is_no_network():
    cell = FakeCell()
    cell.say(1 | wire.EGRESS_BIT, wire.EGRESS, wire.blob(b"example.org") + struct.pack("<H", 443))
    [(request, kind, payload)] = cell.requests()

    assert (request, kind) == (1 | wire.EGRESS_BIT, wire.EGRESS_DENY)
    assert struct.unpack_from("<H", payload)[0] == 403
    cell.say(request, wire.OUT, b"\1x")  # crossed the refusal
    assert not cell.channel.is_lost


async def test_egress_streams_are_bounded():
    class Forever:
        async def serve(self, host, port, link):
            await asyncio.Event().wait()

    cell = FakeCell(egress=Forever())
    for n in range(client._EGRESS_MAX + 1):
        cell.say(n | wire.EGRESS_BIT, wire.EGRESS, wire.blob(b"x") + struct.pack("<H", 80))
    assert [kind for _, kind, _ in cell.requests()] == [wire.EGRESS_DENY]
    cell.channel.close()
    await settle()


async def test_egress_streams_that_the_cell_never_ends_are_bounded():
    """What was served waits for the cell's last word; a cell that never says it gets no further streams."""

    class Brief:
        async def serve(self, host, port, link):
            link.accept()

    cell = FakeCell(egress=Brief())
    for n in range(client._OPEN_MAX + 50):
        cell.say(n | wire.EGRESS_BIT, wire.EGRESS, wire.blob(b"x") + struct.pack("<H", 80))
        if n % 100 == 0:
            await settle()
    await settle()

    assert len(cell.channel._open) <= client._OPEN_MAX
    cell.channel.close()


async def test_events_nobody_takes_become_an_overflow():
    cell = FakeCell()
    task, [(request, _, _)] = await cell.asked(cell.channel.watch("."))
    cell.say(request, wire.STARTED, struct.pack("<I", 0))
    event = b"\1" + wire.blob(b"a") + wire.blob(b"")
    async with await task as watch:
        for _ in range(flow.EVENTS_MAX // 1000 + 1):
            cell.say(request, wire.ITEMS, struct.pack("<I", 1000) + event * 1000)
        assert len(watch._call.events) <= flow.EVENTS_MAX
        assert (await anext(watch)).type == "overflow"
    assert cell.requests() == [(request, wire.CANCEL, b"")]


async def test_a_batch_that_is_too_large_leaves_no_id_open():
    cell = FakeCell()
    with pytest.raises(UsageError):
        await cell.channel.batch([actions.write("x", bytes(1 << 20)) for _ in range(5)])
    with pytest.raises(UsageError):
        await cell.channel.batch([actions.ping(), actions.edit("x", bytes(5 << 20), b"")])
    assert not cell.channel._open
    assert cell.requests() == []
