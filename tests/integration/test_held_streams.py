"""A channel over streams that break: the real agent, `cell join` as the stream, and somebody who keeps ending it."""

import asyncio
import random
import secrets

import pytest

from untax.channel import actions
from untax.channel.client import Channel
from untax.channel.held import HeldStream
from untax.core.errors import BackendError, ProtocolError, SandboxLost
from untax.substrates._host import cell_missing_reason, cell_path


class JoinCarrier(asyncio.SubprocessProtocol):
    """The standard input and output of a `cell join`, as an exec gives them."""

    def __init__(self, on_data, on_lost):
        self.on_data, self.on_lost = on_data, on_lost
        self.closed = False

    def connection_made(self, transport):
        self.transport = transport
        self.stdin = transport.get_pipe_transport(0)

    def pipe_data_received(self, fd, data):
        if not self.closed and fd == 1:
            self.on_data(data)

    def process_exited(self):
        if not self.closed:
            self.closed = True
            self.on_lost(None)

    def write(self, data):
        self.stdin.write(data)

    @property
    def write_buffer_size(self):
        return self.stdin.get_write_buffer_size()

    async def drain(self):
        pass

    def pause_reading(self):
        self.transport.get_pipe_transport(1).pause_reading()

    def resume_reading(self):
        self.transport.get_pipe_transport(1).resume_reading()

    def close(self):
        self.closed = True
        self.transport.close()

    def end(self):
        """As a connection that breaks: whatever is on the way is gone."""
        self.transport.kill()


class Held:
    def __init__(self, name):
        self.name = name
        self.carriers = []
        self.is_barred = False

    async def connect(self, on_data, on_lost):
        if self.is_barred:
            raise BackendError("", "no way there")
        loop = asyncio.get_running_loop()
        _, carrier = await loop.subprocess_exec(
            lambda: JoinCarrier(on_data, on_lost), cell_path(), "join", self.name, stderr=asyncio.subprocess.DEVNULL
        )
        self.carriers.append(carrier)
        return carrier


@pytest.fixture
async def held(tmp_path):
    if reason := cell_missing_reason():
        pytest.skip(f"cell: {reason}")
    name = f"untax-test-{secrets.token_hex(6)}"
    agent = await asyncio.create_subprocess_exec(
        cell_path(), "agent", "--held", name, "--patience", "20", "--dir", str(tmp_path), env={"MARK": "image"}
    )
    held = Held(name)
    yield held
    agent.terminate()
    await asyncio.wait_for(agent.wait(), 10)


@pytest.fixture
async def stream(held):
    stream = HeldStream("test", held.connect, patience_s=5)
    await stream.open()
    yield stream
    stream.close()


@pytest.fixture
async def channel(stream):
    channel = Channel(stream, sandbox_id="test")
    await channel.call(actions.configure(workdir="/tmp", env={"PATH": "/usr/bin:/bin"}, proxy_port=0, timeout_s=10))
    return channel


def run(argv, **more):
    return actions.run(argv, **more)


async def test_the_agent_tells_what_it_found_where_it_was_started(stream, tmp_path):
    assert stream.within.env == {"MARK": "image"}
    assert stream.within.cwd == str(tmp_path)


async def test_a_command_that_runs_while_the_stream_breaks_gives_its_result_once(held, stream, channel, tmp_path):
    mark = tmp_path / "ran"
    running = asyncio.ensure_future(channel.call(run(["sh", "-c", f"echo x >>{mark}; sleep 0.4; echo done"], timeout_s=20)))
    await asyncio.sleep(0.1)
    held.carriers[-1].end()
    result = await running

    assert (result.exit_code, result.stdout) == (0, b"done\n")
    assert mark.read_text() == "x\n"
    assert stream.reopened == 1


async def test_sessions_outlive_a_stream(held, channel, tmp_path):
    session, _ = await channel.call(actions.session_open())
    await channel.call(actions.session_run(session, "cd /usr; X=7", timeout_s=5))
    held.carriers[-1].end()
    result = await channel.call(actions.session_run(session, "echo $PWD $X", timeout_s=5))

    assert result.stdout == b"/usr 7\n"


async def test_nothing_is_lost_or_doubled_over_many_breaks(held, stream, channel):
    """Large and small answers, and large requests, under a stream that ends at random moments."""

    async def ender():
        while True:
            await asyncio.sleep(random.uniform(0.005, 0.05))
            held.carriers[-1].end()

    ending = asyncio.ensure_future(ender())
    try:
        for n in range(25):
            size = random.choice((1, 100, 70_000, 900_000))
            body = secrets.token_bytes(size)
            got = await channel.call(run(["cat"], stdin=body, cap=1 << 20, timeout_s=60))
            assert got.stdout == body, (n, size)
    finally:
        ending.cancel()
    assert stream.reopened > 0


async def test_another_s_token_gets_no_stream(held, stream, channel):
    """Whoever finds the socket inside cannot take the channel over: it goes to the host that was there first."""
    other = HeldStream("thief", held.connect, patience_s=1)
    with pytest.raises((BackendError, ProtocolError)):
        await other.open()

    assert (await channel.call(run(["true"], timeout_s=5))).exit_code == 0
    assert stream.reopened == 0


async def test_nonsense_on_a_joined_stream_harms_nobody(held, channel):
    for garbage in (b"x" * 32, b"\0" * 5000, b"utxheld1" + b"\0" * 24):
        join = await asyncio.create_subprocess_exec(
            cell_path(), "join", held.name, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        join.stdin.write(garbage)
        assert await asyncio.wait_for(join.wait(), 10) == 0  # let go of at once

    assert (await channel.call(run(["true"], timeout_s=5))).exit_code == 0


async def test_silent_guests_do_not_keep_the_host_out(held, stream, channel):
    guests = [
        await asyncio.create_subprocess_exec(
            cell_path(), "join", held.name, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL
        )
        for _ in range(8)
    ]
    await asyncio.sleep(0.2)
    held.carriers[-1].end()
    assert (await channel.call(run(["true"], timeout_s=10))).exit_code == 0
    for guest in guests:
        if guest.returncode is None:
            guest.kill()
        await guest.wait()


async def test_a_stream_that_stays_broken_is_a_lost_sandbox(held):
    stream = HeldStream("test", held.connect, patience_s=0.4)
    await stream.open()
    channel = Channel(stream, sandbox_id="test")
    await channel.call(actions.configure(workdir="/tmp", env={"PATH": "/usr/bin:/bin"}, proxy_port=0, timeout_s=10))
    held.is_barred = True
    held.carriers[-1].end()
    with pytest.raises(SandboxLost, match="could not be opened again"):
        await asyncio.wait_for(channel.call(run(["sleep", "30"], timeout_s=60)), 10)


async def test_an_agent_without_a_host_ends_after_its_patience():
    name = f"untax-test-{secrets.token_hex(6)}"
    agent = await asyncio.create_subprocess_exec(cell_path(), "agent", "--held", name, "--patience", "1")
    assert await asyncio.wait_for(agent.wait(), 10) == 0
