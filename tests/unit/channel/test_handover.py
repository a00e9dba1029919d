"""A channel that changes hands: what was read of a frame travels along, ids go on, and nothing is lost or answered twice."""

import asyncio
import socket

import pytest
from tests import agentwire
from tests.unit.channel.fakecell import FakeCell, FakeStream, command_done, settle

from untax.channel import actions, wire
from untax.channel.blocking import BlockingChannel
from untax.channel.client import Channel
from untax.channel.egress import Egress
from untax.channel.handover import Resumed, give
from untax.core.errors import BackendError, ProtocolError, SandboxLost


async def test_the_next_holder_goes_on_where_the_last_one_was():
    """An answer that was cut in two, one half read by each of the two, is one answer."""
    cell = FakeCell()
    for _ in range(3):
        task, [(request, _, _)] = await cell.asked(cell.channel.call(actions.ping()))
        cell.say(request, wire.DONE)
        await task
    whole = agentwire.frame(wire.EGRESS_BIT | 1, wire.EGRESS, wire.blob(b"example.org") + wire.u16(80))
    cell.raw(whole[:15])

    stream, resumed = await give(cell.channel)
    assert stream is cell.stream
    assert stream.paused
    assert resumed == Resumed(cell.channel.cell_version, 4, whole[:15])

    successor = FakeStream()
    channel = Channel(successor, sandbox_id="sbx-1", resumed=resumed)
    assert successor.sent == b""  # it was greeted
    channel.data_received(whole[15:])
    assert agentwire_kinds(successor.sent) == [(wire.EGRESS_BIT | 1, wire.EGRESS_DENY)]

    task = asyncio.ensure_future(channel.call(actions.ping()))
    await settle()
    assert agentwire_kinds(successor.sent)[-1] == (4, wire.PING)
    channel.data_received(agentwire.frame(4, wire.DONE, b""))
    await task
    await channel.wait_ready()


def agentwire_kinds(sent):
    found = []
    while sent:
        size = 4 + int.from_bytes(sent[:4], "little")
        found.append((int.from_bytes(sent[4:8], "little"), sent[8]))
        sent = sent[size:]
    return found


async def test_the_last_holder_can_do_nothing_more():
    cell = FakeCell()
    await give(cell.channel)
    with pytest.raises(SandboxLost, match="handed over"):
        await cell.channel.call(actions.ping())
    with pytest.raises(SandboxLost):
        await give(cell.channel)
    assert not cell.stream.closed


async def test_nothing_is_handed_over_in_the_middle_of_an_action():
    cell = FakeCell()
    task, _ = await cell.asked(cell.channel.call(actions.ping()))
    with pytest.raises(BackendError, match="under way"):
        await give(cell.channel)
    cell.channel.close()
    with pytest.raises(SandboxLost):
        await task


async def test_what_is_unsent_is_sent_first():
    cell = FakeCell()
    cell.stream.stuck = 10
    giving = asyncio.ensure_future(give(cell.channel))
    await settle()
    assert not giving.done()
    cell.stream.unstick()
    await giving


async def test_streams_to_the_outside_end_with_the_hand_over():
    """They were dialled by the last holder, who lets go of them; frames of theirs that still come are dropped by the next."""
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    cell = FakeCell(egress=Egress((f"127.0.0.1:{port}",)))
    stream_id = wire.EGRESS_BIT | 5
    cell.say(stream_id, wire.EGRESS, wire.blob(b"127.0.0.1") + wire.u16(port))
    while (stream_id, wire.EGRESS_OK) not in agentwire_kinds(cell.stream.sent):
        await asyncio.sleep(0.001)

    _, resumed = await give(cell.channel)
    assert (stream_id, wire.CANCEL) in agentwire_kinds(cell.stream.sent)

    channel = Channel(FakeStream(), sandbox_id="sbx-1", resumed=resumed)
    channel.data_received(agentwire.frame(stream_id, wire.OUT, b"\1late") + agentwire.frame(stream_id, wire.DONE, b""))
    assert not channel.is_lost
    server.close()


def test_a_blocking_channel_goes_on_too():
    ours, theirs = socket.socketpair()
    whole = agentwire.frame(9, wire.DONE, command_done(out=b"x"))
    channel = BlockingChannel(ours, sandbox_id="sbx-1", resumed=Resumed("9.9", 9))
    theirs.sendall(whole)

    assert channel.call(actions.run(["true"])).stdout == b"x"
    assert channel.cell_version == "9.9"
    assert channel.is_idle
    assert agentwire_kinds(theirs.recv(1000)) == [(9, wire.SPAWN)]
    channel.close()
    theirs.close()


@pytest.mark.parametrize(
    "spoiled", [{"major": 2}, {"cell": None}, {"cell": "x" * 1000}, {"next_id": 0}, {"next_id": True}, {"kept": "x"}, {"kept": b"x" * (1 << 20)}]
)  # fmt: skip
def test_a_state_that_cannot_be_is_refused(spoiled):
    data = Resumed("1", 1).to_data()
    assert Resumed.from_data(data) == Resumed("1", 1)
    with pytest.raises(ProtocolError):
        Resumed.from_data(data | spoiled)
