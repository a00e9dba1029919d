"""Started processes, terminals, batches, watches and connections, on every substrate."""

import asyncio
import contextlib
import signal

import pytest
from tests import boxview

import untax


async def collected(process) -> bytes:
    return b"".join([piece.data async for piece in process])


async def read_until(process, wanted: bytes) -> bytes:
    seen = b""
    async with asyncio.timeout(10):
        while wanted not in seen:
            piece = await process.read()
            assert piece is not None, seen
            seen += piece.data
    return seen


async def test_output_comes_while_the_process_runs(box):
    process = await box.start(["sh", "-c", "echo first; read x; echo got $x >&2; exit 5"])
    assert await read_until(process, b"first\n") == b"first\n"
    assert process.is_running
    await process.write(b"word\n")
    result = await process.wait()

    assert (result.exit_code, result.stdout, result.stderr) == (5, b"", b"got word\n")


async def test_input_can_be_ended(box):
    process = await box.start(["wc", "-c"])
    for _ in range(10):
        await process.write(b"x" * 100_000)
    process.close_stdin()

    assert (await process.wait()).stdout.split() == [b"1000000"]


async def test_a_reader_that_does_not_read_holds_up_the_writer_and_not_the_channel(box):
    process = await box.start(["sh", "-c", "yes | head -c 3000000; echo end >&2"])
    async with asyncio.timeout(60):  # were it held up, that would be for good; emulated machines take half a second for each
        for _ in range(20):
            await box.run(["true"])
    listed = {info.pid: info for info in await box.processes()}
    assert listed[process.pid].running  # it waits until someone reads

    data = await collected(process)
    assert len(data) == 3_000_000 + 4


async def test_a_process_can_be_signalled(box):
    process = await box.start(["sh", "-c", "trap 'echo caught; exit 7' USR1; echo ready; while :; do sleep 0.02; done"])
    await read_until(process, b"ready\n")
    await process.signal(signal.SIGUSR1)
    result = await process.wait()

    assert (result.exit_code, result.stdout) == (7, b"caught\n")


async def test_a_kill_takes_the_children_along(box):
    seconds = boxview.odd_seconds()
    process = await box.start(["sh", "-c", f"sleep {seconds} & echo up; wait"])
    await read_until(process, b"up\n")
    assert await boxview.wait_running(box, f"^{seconds}$")
    process.kill()
    await process.wait()

    assert await boxview.wait_gone(box, f"^{seconds}$", within_s=2)


async def test_leaving_the_block_ends_the_process(box):
    seconds = boxview.odd_seconds()
    async with await box.start(["sh", "-c", f"echo up; exec sleep {seconds}"]) as process:
        await read_until(process, b"up\n")
        assert await boxview.wait_running(box, f"^{seconds}$")

    assert await boxview.wait_gone(box, f"^{seconds}$", within_s=2)


async def test_a_deadline_ends_a_started_process(box):
    process = await box.start(["sleep", "60"], timeout_s=0.3)
    result = await asyncio.wait_for(process.wait(), 5)

    assert result.timed_out


async def test_a_process_is_listed_and_found_again(box):
    """By its id, with what it printed meanwhile."""
    process = await box.start(["sh", "-c", "echo one; read x; echo two $x"])
    await read_until(process, b"one\n")
    [info] = [p for p in await box.processes() if p.pid == process.pid]
    assert (info.running, info.pty, info.argv[0]) == (True, False, "sh")

    again = await box.attach(process.pid)
    await again.write(b"more\n")
    assert b"two more\n" in await read_until(again, b"two more\n")
    assert (await again.wait()).exit_code == 0


async def test_what_was_never_started_cannot_be_found(box):
    with pytest.raises(untax.Gone):
        await box.attach(4_000_000)


async def test_both_streams_may_be_one(box):
    script = "for i in 1 2 3; do echo o$i; echo e$i >&2; done"
    merged = await box.run(["sh", "-c", script], merge=True)

    assert (merged.stdout, merged.stderr) == (b"o1\ne1\no2\ne2\no3\ne3\n", b"")


async def test_a_cap_of_one_s_own_is_kept(box):
    result = await box.run(["seq", "100000"], cap=1000)

    assert len(result.stdout) == 1000
    assert result.stdout.startswith(b"1\n2\n")
    assert result.stdout.endswith(b"100000\n")


async def test_a_terminal_is_one(box):
    """It is a terminal of the asked size, echoes, can be resized, and turns ^C into a signal."""
    process = await box.start(
        [
            "sh",
            "-c",
            "tty; stty size; read x; echo got:$x; stty size; trap 'echo INT; exit 3' INT; echo armed; while :; do sleep 0.02; done",
        ],
        pty=True,
        rows=30,
        cols=100,
    )
    seen = await read_until(process, b"30 100")
    assert b"/dev/pts/" in seen
    await process.resize(40, 120)
    await process.write(b"word\n")
    seen = await read_until(process, b"armed")
    assert b"got:word" in seen
    assert b"40 120" in seen
    await process.write(b"\x03")
    seen = await read_until(process, b"INT")
    assert (await process.wait()).exit_code == 3


async def test_the_end_of_a_terminal_s_program_is_the_end_of_its_stream(box):
    process = await box.start(["echo", "bye"], pty=True)

    assert await asyncio.wait_for(collected(process), 5) == b"bye\r\n"
    assert (await process.wait()).exit_code == 0


# ---- batches ----


async def test_a_batch_runs_in_order_and_answers_each(box):
    results = await box.batch().write("a", b"1").shell("cat a; echo 2 >>a").run(["false"]).read("a").read("missing").list(".").send()

    assert results[1].stdout == b"1"
    assert results[2].exit_code == 1
    assert results[3] == b"12\n"
    assert isinstance(results[4], untax.NotFound)
    assert "a" in [entry.name for entry in results[5]]


async def test_a_batch_may_stop_at_its_first_failure(box):
    results = await box.batch().read("missing").write("never", b"").send(stop=True)

    assert isinstance(results[0], untax.NotFound)
    assert isinstance(results[1], untax.NotRun)
    assert "never" not in [entry.name for entry in await box.list(".")]


async def test_a_batch_of_hundreds_is_one_round_trip(box):
    batch = box.batch()
    for n in range(300):
        batch.write(f"f{n}", b"%d" % n)
    assert len(await batch.send()) == 300

    assert (await box.shell("ls | wc -l")).text.strip() == "300"


async def test_an_empty_batch_is_nothing(box):
    assert await box.batch().send() == []


# ---- watches ----


async def test_a_watch_tells_what_happens_below_a_path(box):
    await box.mkdir("d/sub")
    async with await box.watch("d") as watch:
        await box.shell("echo x >d/new; mv d/new d/sub/moved; rm d/sub/moved")
        events = []
        async with asyncio.timeout(5):
            async for event in watch:
                events.append(event)
                if event.type == "deleted" and event.path.endswith("moved"):  # a move may look like a deletion and a creation
                    break

    kinds = {(event.type, event.path.rsplit("/", 1)[-1]) for event in events}
    assert ("created", "new") in kinds
    assert ("deleted", "moved") in kinds
    assert any(event.type == "moved" or (event.type == "created" and event.path.endswith("moved")) for event in events)


async def test_a_watch_of_something_missing_is_refused(box):
    with pytest.raises(untax.NotFound):
        await box.watch("missing")


# ---- connections into the sandbox ----

SERVER = (
    "socket(S,2,1,6) or die; setsockopt(S,1,2,1); bind(S,pack('S n a4 x8',2,%d,qq(\\x7f\\0\\0\\1))) or die qq($!); listen(S,5);"
    "$|=1; print qq(up\\n); while(accept(C,S)){ while(sysread(C,$b,65536)){ syswrite(C,uc $b) } close C }"
)


async def test_a_server_inside_can_be_reached(box, free_port):
    server = await box.start(["perl", "-e", SERVER % free_port])
    await read_until(server, b"up\n")
    async with await box.connect(free_port) as one, await box.connect(free_port) as two:
        await one.write(b"hello")
        assert await asyncio.wait_for(one.read(), 5) == b"HELLO"
        one.write_eof()
        assert await asyncio.wait_for(one.read(), 5) == b""
        await two.write(b"x" * 10)
        assert await asyncio.wait_for(two.read(), 5) == b"X" * 10


async def test_a_connection_carries_more_than_a_window(box, free_port):
    server = await box.start(["perl", "-e", SERVER % free_port])
    await read_until(server, b"up\n")
    async with await box.connect(free_port) as link:

        async def send():
            for _ in range(40):
                await link.write(b"a" * 50_000)
            link.write_eof()

        sending = asyncio.create_task(send())
        got = 0
        async with asyncio.timeout(20):
            while data := await link.read():
                assert set(data) == {ord("A")}
                got += len(data)
        await sending
    assert got == 2_000_000


async def test_a_port_where_nobody_listens_is_refused(box, free_port):
    with pytest.raises(OSError, match="refused"):
        await box.connect(free_port)


@pytest.mark.parametrize("port", [0, -1, 65536, "80", None])
async def test_a_port_that_is_none_is_refused(box, port):
    with pytest.raises(untax.UsageError):
        await box.connect(port)


@pytest.fixture
def free_port():
    """Free on the host too, whose loopback the process substrate shares."""
    import socket

    with contextlib.closing(socket.socket()) as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# ---- idempotency ----


async def test_a_request_with_a_known_key_does_not_run_again(box):
    """The second one gets the first one's answer."""
    from untax.channel import actions

    answers = []
    for _ in range(2):
        call = actions.shell("echo x >>count; wc -l <count")
        call.key = b"0123456789abcdef"
        answers.append((await box._act(call)).stdout)
    other = actions.shell("echo x >>count; wc -l <count")
    other.key = b"fedcba9876543210"

    assert answers == [b"1\n", b"1\n"]
    assert (await box._act(other)).stdout == b"2\n"


async def test_a_second_request_waits_for_the_first_of_its_key(box):
    from untax.channel import actions

    def once():
        call = actions.shell("sleep 0.3; echo x >>count; wc -l <count")
        call.key = b"the same key 123"
        return box._act(call)

    first, second = await asyncio.gather(once(), once())
    assert first.stdout == second.stdout == b"1\n"
