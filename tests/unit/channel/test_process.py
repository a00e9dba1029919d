"""Started processes, connections and sessions, against a cell that the test plays."""

import asyncio
import struct

import pytest
from tests.unit.channel.fakecell import FakeCell, command_done, error, settle

from untax.channel import flow, wire
from untax.channel.process import Connection, Process
from untax.channel.session import Session
from untax.core.errors import Gone


async def started(cell, opening):
    task, [(request, _, _)] = await cell.asked(opening)
    cell.say(request, wire.STARTED, struct.pack("<I", 7))
    return request, await task


async def test_output_comes_in_its_order_and_ends():
    cell = FakeCell()
    request, process = await started(cell, Process.open(cell.channel, flow.start(["x"])))
    cell.say(request, wire.OUT, b"\1a")
    cell.say(request, wire.OUT, b"\2b")
    cell.say(request, wire.OUT, b"\1c")
    cell.say(request, wire.DONE, command_done(code=4))

    assert [tuple(output) async for output in process] == [("stdout", b"a"), ("stderr", b"b"), ("stdout", b"c")]
    assert (await process.wait()).exit_code == 4
    assert not process.is_running


async def test_waiting_takes_what_was_not_read():
    cell = FakeCell()
    request, process = await started(cell, Process.open(cell.channel, flow.start(["x"])))
    cell.say(request, wire.OUT, b"\1a")
    task, _ = await cell.asked(process.wait())
    for _ in range(20):
        cell.say(request, wire.OUT, b"\2" + bytes(65536))
        await settle()
    cell.say(request, wire.DONE, command_done())
    result = await task

    assert result.stdout == b"a"
    assert (len(result.stderr), result.dropped_stderr) == (1 << 20, 4 * 65536)


async def test_a_write_waits_for_the_window_and_fails_after_the_end():
    cell = FakeCell()
    request, process = await started(cell, Process.open(cell.channel, flow.start(["x"])))
    task, _sent = await cell.asked(process.write(bytes(wire.STREAM_WINDOW + 1)))
    assert not task.done()
    cell.say(request, wire.CREDIT, struct.pack("<BI", 0, 10))
    await task
    process.close_stdin()
    assert cell.requests()[-1] == (request, wire.DATA, b"\1")
    with pytest.raises(BrokenPipeError):
        await process.write(b"more")


async def test_leaving_the_block_kills_what_still_runs():
    cell = FakeCell()
    request, process = await started(cell, Process.open(cell.channel, flow.start(["x"])))
    async with process:
        pass
    assert cell.requests() == [(request, wire.CANCEL, b"")]


async def test_interleaved_bytes_cannot_fill_the_memory():
    stream = flow.start(["x"])
    stream.feed(wire.STARTED, struct.pack("<I", 1))
    for _ in range(100_000):
        stream.feed(wire.OUT, b"\1a")
        stream.feed(wire.OUT, b"\2b")
    assert len(stream._pieces) <= flow._PIECES_MAX
    taken = {1: 0, 2: 0}
    while (piece := stream.take()) is not None:
        taken[piece[0]] += len(piece[1])
    assert taken == {1: 100_000, 2: 100_000}


async def test_a_connection_ends_in_each_direction():
    cell = FakeCell()
    request, connection = await started(cell, Connection.open(cell.channel, 80))
    await connection.write(b"GET")
    connection.write_eof()
    cell.say(request, wire.OUT, b"\1reply")
    cell.say(request, wire.OUT, b"\1")
    assert await connection.read() == b"reply"
    assert await connection.read() == b""
    cell.say(request, wire.DONE)
    assert [kind for _, kind, _ in cell.requests()] == [wire.DATA, wire.DATA]


async def session(cell):
    task, [(request, kind, _)] = await cell.asked(Session(cell.channel.call).open())
    assert kind == wire.SESSION_OPEN
    cell.say(request, wire.DONE, struct.pack("<II", 5, 99))
    return await task


async def test_a_session_runs_one_command_at_a_time():
    cell = FakeCell()
    bash = await session(cell)
    one, [(first, _, payload)] = await cell.asked(bash.run("one"))
    two, sent = await cell.asked(bash.run("two"))
    assert struct.unpack_from("<I", payload)[0] == 5
    assert sent == []
    cell.say(first, wire.DONE, command_done(out=b"1") + b"\1")
    assert (await one).stdout == b"1"
    await settle()
    [(second, _, _)] = cell.requests()
    cell.say(second, wire.DONE, command_done(out=b"2") + b"\1")
    assert (await two).stdout == b"2"


async def test_a_session_that_ended_says_so():
    cell = FakeCell()
    bash = await session(cell)
    task, [(request, _, _)] = await cell.asked(bash.run("exit 3"))
    cell.say(request, wire.DONE, command_done(code=3) + b"\0")
    assert (await task).exit_code == 3
    assert not bash.is_alive
    with pytest.raises(Gone):
        await bash.run("true")
    await bash.close()
    assert cell.requests() == []


async def test_closing_a_session_tells_the_cell_and_forgives_it():
    cell = FakeCell()
    bash = await session(cell)
    task, [(request, kind, _)] = await cell.asked(bash.close())
    assert kind == wire.SESSION_CLOSE
    cell.say(request, wire.ERROR, error(wire.GONE))
    await task
    await asyncio.gather(bash.close(), bash.close())
