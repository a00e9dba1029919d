"""What a command may rely on, on every substrate. A new adapter is covered here without an edit."""

import asyncio
import signal
import time

import pytest
from tests import boxview

import untax


async def test_a_failing_command_is_a_result(box):
    """A non-zero exit belongs to the command, and the sandbox stays usable after it."""
    failed = await box.run(["sh", "-c", "echo no >&2; exit 3"])
    after = await box.run(["true"])

    assert (failed.exit_code, failed.stderr, failed.outcome) == (3, b"no\n", "exited")
    assert after.exit_code == 0


async def test_a_timeout_keeps_what_was_printed(box):
    """A command cut off at its deadline still shows how far it got."""
    cut = await box.run(["sh", "-c", "echo started; sleep 60"], timeout_s=0.5)

    assert cut.timed_out
    assert cut.outcome == "timeout"
    assert cut.stdout == b"started\n"
    assert 0.45 <= cut.elapsed_s < 1.5


async def test_a_released_box_says_so(engine, spec):
    """Using a sandbox after its end is the substrate's failure, never an exit code."""
    box = await engine.acquire(spec)
    await box.release()

    with pytest.raises(untax.SandboxLost):
        await box.run(["true"])


async def test_arguments_arrive_byte_for_byte(box):
    """No shell, no quoting, no decoding stands between a list and the program's arguments."""
    odd = ["", " ", "a b", "$HOME", "`id`", "'", '"', "\\n", "-e", "*", "naïve", "😀", "\n", "\t"]

    result = await box.run(["printf", "%s\\0", *odd])

    assert result.stdout.split(b"\0")[:-1] == [word.encode() for word in odd]


async def test_bytes_that_are_not_text_pass_both_ways(box):
    """Arguments, input and output are bytes; nothing is decoded on the way."""
    raw = bytes(range(1, 256))

    echoed = await box.run([b"printf", b"%s", raw])
    piped = await box.run(["cat"], stdin=bytes(range(256)))

    assert echoed.stdout == raw
    assert piped.stdout == bytes(range(256))
    assert isinstance(piped.text, str)


async def test_stdout_and_stderr_are_kept_apart(box):
    result = await box.run(["sh", "-c", "echo out; echo err >&2"])

    assert (result.stdout, result.stderr) == (b"out\n", b"err\n")


async def test_a_command_without_input_reads_end_of_file(box):
    """Nothing waits for a keyboard: standard input is empty unless it was given."""
    result = await box.run(["cat"], timeout_s=5)

    assert (result.outcome, result.exit_code, result.stdout) == ("exited", 0, b"")


async def test_given_input_arrives_whole(box):
    """Also when it is larger than a pipe or a frame."""
    data = bytes(range(256)) * 20_000  # 5 MB

    result = await box.run(["wc", "-c"], stdin=data)

    assert result.stdout.split() == [str(len(data)).encode()]


async def test_input_that_nobody_reads_is_no_failure(box):
    result = await box.run(["true"], stdin=b"x" * (3 << 20), timeout_s=10)

    assert (result.outcome, result.exit_code) == ("exited", 0)


async def test_a_missing_program_is_exit_code_127(box):
    """As in a shell, with a message, and not an exception."""
    result = await box.run(["no-such-program-here"])

    assert (result.outcome, result.exit_code) == ("exited", 127)
    assert b"no-such-program-here" in result.stderr


async def test_what_cannot_be_executed_is_exit_code_126(box):
    """A directory, a file without the permission, and a file of no known format are the same on every substrate."""
    await box.write("plain", b"echo hello\n", mode=0o644)
    await box.write("noformat", b"\0\1\2 nonsense", mode=0o755)
    await box.mkdir("adir")

    for name in ("./plain", "./noformat", "./adir"):
        result = await box.run([name])
        assert (name, result.outcome, result.exit_code) == (name, "exited", 126)
        assert result.stderr


@pytest.mark.parametrize("code", [0, 1, 42, 255])
async def test_exit_codes_are_exact(box, code):
    result = await box.run(["sh", "-c", f"exit {code}"])

    assert (result.outcome, result.exit_code) == ("exited", code)


@pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGSYS])
async def test_death_by_a_signal_is_told_from_an_exit(box, number):
    result = await box.run(["sh", "-c", f"kill -{int(number)} $$"])

    assert (result.outcome, result.exit_code) == ("signaled", 128 + number)


async def test_a_shell_text_is_run_by_a_shell(box):
    result = await box.shell("x=1; for i in a b; do echo $i$x; done | tr a-z A-Z; false || echo end")

    assert result.text == "A1\nB1\nend\n"


async def test_a_relative_directory_is_below_the_working_directory(box):
    await box.mkdir("deep/down", parents=True)
    base = (await box.run(["pwd"])).text.strip()

    assert (await box.run(["pwd"], cwd="deep/down")).text.strip() == f"{base}/deep/down"
    assert (await box.run(["pwd"], cwd=f"{base}/deep")).text.strip() == f"{base}/deep"


async def test_a_missing_directory_starts_nothing(box):
    """The command never ran: that is not its exit status."""
    with pytest.raises(untax.UntaxError) as caught:
        await box.run(["touch", "ran"], cwd="no/such/place")

    assert "working directory" in str(caught.value)
    assert "no/such/place" in str(caught.value)
    assert "ran" not in [entry.name for entry in await box.list(".")]


async def test_a_child_left_behind_does_not_hold_the_answer(box):
    """The result comes when the command exits, though its child still has the pipe open."""
    began = time.monotonic()
    result = await box.run(["sh", "-c", "sleep 30 & echo hi"], timeout_s=20)

    assert result.stdout == b"hi\n"
    assert time.monotonic() - began < 5


async def test_late_output_of_a_child_is_not_in_the_next_result(box):
    await box.shell("mkfifo gate; (read x <gate; echo late; echo late >&2; echo done >after) & echo early")
    result = await box.shell("echo go >gate; while [ ! -s after ]; do sleep 0.01; done; echo next", timeout_s=10)

    assert (result.stdout, result.stderr) == (b"next\n", b"")


async def test_a_deadline_takes_the_whole_tree(box):
    """Children and grandchildren go with the command, also those in sessions of their own."""
    one, two, three = (boxview.odd_seconds() for _ in range(3))
    cut = await box.shell(f"setsid sleep {one} & sleep {two} & sh -c 'sleep {three}'; wait", timeout_s=0.4)

    assert cut.timed_out
    for seconds in (one, two, three):
        assert await boxview.wait_gone(box, f"^{seconds}$", within_s=1)


async def test_signals_that_are_ignored_do_not_outlast_a_deadline(box):
    began = time.monotonic()
    cut = await box.shell("trap '' TERM INT HUP QUIT; while :; do sleep 0.1; done", timeout_s=0.3)

    assert cut.timed_out
    assert time.monotonic() - began < 1.5


async def test_cancelling_the_await_kills_the_command(box):
    """A caller that goes away takes its command along."""
    seconds = boxview.odd_seconds()
    await box.run(["mkfifo", "up"])
    task = asyncio.create_task(box.shell(f"echo up >up; exec sleep {seconds}", timeout_s=60))
    await box.run(["cat", "up"], timeout_s=10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    # `wait` is not ours to use: the process is another command's child. Its directory in /proc ends with it.
    assert await boxview.wait_gone(box, f"^{seconds}$", within_s=5)


async def test_many_commands_run_at_once_over_one_channel(box):
    """They do not wait for each other, and no answer goes to the wrong caller."""
    began = time.monotonic()
    results = await asyncio.gather(*(box.shell(f"sleep 1; echo {n}") for n in range(40)))

    assert [r.text.strip() for r in results] == [str(n) for n in range(40)]
    assert time.monotonic() - began < 40  # seconds that they would take in turn


async def test_time_inside_is_part_of_the_round_trip(box):
    result = await box.run(["sleep", "0.2"])

    assert 0.19 <= result.elapsed_s <= result.round_trip_s


async def test_the_command_s_own_processor_time_is_reported(box):
    busy = await box.shell("i=0; while [ $i -lt 60000 ]; do i=$((i+1)); done")

    assert busy.user_s + busy.system_s > 0.01
    assert busy.peak_memory_kib > 100


async def test_check_raises_with_the_result(box):
    with pytest.raises(untax.CommandFailed) as caught:
        (await box.run(["sh", "-c", "echo sorry >&2; exit 9"])).check()

    assert caught.value.result.exit_code == 9
    assert (await box.run(["true"])).check().exit_code == 0


async def test_new_lines_are_not_translated(box):
    result = await box.run(["printf", "a\\r\\nb\\rc\\n"])

    assert result.stdout == b"a\r\nb\rc\n"


async def test_a_closed_output_does_not_end_the_command(box):
    """The result comes at exit, not at end of file."""
    result = await box.shell("exec 0<&- 1>&- 2>&-; sleep 0.5; exit 4", timeout_s=10)

    assert (result.outcome, result.exit_code) == ("exited", 4)
    assert result.elapsed_s >= 0.49


async def test_q7_32_commands_at_once_never_mix_what_they_print(box):
    """Each gets its own lines, all of them, however they were written."""
    loop = "i=0; while [ $i -lt 1000 ]; do echo $1; [ $((i % 100)) -ne 0 ] || echo $1 >&2; i=$((i+1)); done"
    results = await asyncio.gather(*(box.run(["sh", "-c", loop, "sh", str(n)], timeout_s=120) for n in range(32)))

    for n, result in enumerate(results):
        assert (result.exit_code, result.stdout, result.stderr) == (0, f"{n}\n".encode() * 1000, f"{n}\n".encode() * 10)
