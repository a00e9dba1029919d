"""The persistent shell, on every substrate: what lasts, what does not, and that nothing waits for more input."""

import asyncio
import time

import pytest

import untax


async def test_directory_variables_and_functions_last(box):
    async with box.session() as bash:
        await bash.run("mkdir -p sub && cd sub && export X=1 Y='a b' && f() { echo \"f:$1:$X\"; }")
        result = await bash.run('echo ${PWD##*/}; f "$Y"')

    assert result.text == "sub\nf:a b:1\n"


async def test_each_text_has_its_own_result(box):
    async with box.session() as bash:
        failed = await bash.run("echo out; echo err >&2; (exit 7)")
        after = await bash.run("echo $?; true")

    assert (failed.exit_code, failed.stdout, failed.stderr) == (7, b"out\n", b"err\n")
    assert after.exit_code == 0


async def test_several_lines_are_one_text(box):
    async with box.session() as bash:
        result = await bash.run("for i in 1 2 3\ndo\n  echo $i\ndone\ncat <<EOF\nhere\nEOF")

    assert result.text == "1\n2\n3\nhere\n"


@pytest.mark.parametrize("text", ["echo 'unterminated", 'echo "open', "cat <<EOF\nno end", "if true; then", "(", "echo $("], ids=repr)
async def test_an_unfinished_text_does_not_wait_for_more(box, text):
    """It fails or is taken as it stands, at once, and the session goes on."""
    async with box.session() as bash:
        await bash.run("KEPT=yes")
        began = time.monotonic()
        await bash.run(text, timeout_s=10)
        assert time.monotonic() - began < 3
        after = await bash.run("echo $KEPT")

    assert after.text == "yes\n"


async def test_commands_in_a_session_read_end_of_file(box):
    """Nothing can swallow what the session is told next."""
    async with box.session() as bash:
        result = await bash.run('cat; read x; echo "[$x]"', timeout_s=5)
        after = await bash.run("echo still here")

    assert result.text == "[]\n"
    assert after.text == "still here\n"


async def test_exit_ends_the_session_and_says_with_what(box):
    async with box.session() as bash:
        result = await bash.run("exit 3")
        assert result.exit_code == 3
        with pytest.raises((untax.Gone, untax.UsageError)):
            await bash.run("echo more")

    assert (await box.run(["true"])).exit_code == 0


async def test_a_failing_text_under_errexit_ends_the_session_like_exit(box):
    async with box.session() as bash:
        result = await bash.run("set -e; false; echo not reached", timeout_s=5)

    assert (result.exit_code, result.stdout) == (1, b"")


async def test_a_session_that_replaces_itself_ends_with_that_program(box):
    async with box.session() as bash:
        result = await bash.run("exec sleep 0.2", timeout_s=10)

    assert result.outcome == "exited"
    assert result.exit_code == 0


async def test_a_deadline_in_a_session_ends_the_command(box):
    """The text is cut off on time; whether the shell survives is said by the next call, which does not hang."""
    async with box.session() as bash:
        await bash.run("KEPT=1")
        cut = await bash.run("echo begun; sleep 60", timeout_s=0.4)
        assert cut.timed_out
        assert cut.stdout == b"begun\n"
        try:
            after = await bash.run("echo ok", timeout_s=5)
        except untax.Gone:
            return
        assert after.text == "ok\n"


async def test_background_children_of_a_session_do_not_hold_its_answers(box):
    async with box.session() as bash:
        began = time.monotonic()
        result = await bash.run("sleep 30 & echo $! >pid; echo started")
        assert time.monotonic() - began < 3
        alive = await bash.run("kill -0 $(cat pid) && echo alive")

    assert result.stdout == b"started\n"
    assert alive.text == "alive\n"


async def test_two_sessions_share_files_and_nothing_else(box):
    async with box.session() as one, box.session() as two:
        await asyncio.gather(one.run("V=1; echo one >one"), two.run("V=2; echo two >two"))
        first, second = await asyncio.gather(one.run("echo $V; cat two"), two.run("echo $V; cat one"))

    assert (first.text, second.text) == ("1\ntwo\n", "2\none\n")


async def test_output_that_imitates_a_prompt_ends_nothing(box):
    """Completion is reported on a descriptor of its own, never by matching what is printed."""
    async with box.session() as bash:
        result = await bash.run("printf '$ \\n# \\n__DONE__ 0\\n\\0\\001'; echo end")

    assert result.stdout == b"$ \n# \n__DONE__ 0\n\0\1end\n"


async def test_a_session_starts_where_and_with_what_it_is_told(box):
    await box.mkdir("here")
    async with box.session(cwd="here", env={"GIVEN": "yes"}) as bash:
        result = await bash.run("echo $GIVEN; echo ${PWD##*/}")

    assert result.text == "yes\nhere\n"


async def test_output_of_a_session_is_capped_like_any_other(box):
    async with box.session() as bash:
        result = await bash.run("yes | head -c 5000000; echo; echo last")
        after = await bash.run("echo next")

    assert result.truncated
    assert result.stdout.endswith(b"last\n")
    assert len(result.stdout) + result.dropped_stdout == 5_000_006
    assert after.text == "next\n"


async def test_each_result_says_what_its_own_text_used(box):
    """Not what the shell has used since it was opened."""
    async with box.session() as bash:
        by_shell = await bash.run("i=0; while [ $i -lt 120000 ]; do i=$((i+1)); done")
        by_child = await bash.run("perl -e 'for ($i = 0; $i < 3000000; $i++) {}'")
        idle = await bash.run("true")

    assert by_shell.user_s + by_shell.system_s > 0.03
    assert by_child.user_s + by_child.system_s > 0.03
    # Some kernels count in hundredths, of which two may end just then; the two before took far more together.
    assert idle.user_s + idle.system_s < 0.03
    assert idle.peak_memory_kib > 100


async def test_a_large_child_of_a_session_is_seen(box):
    """Also one that has ended by then: it lived longer than the second that looks are apart at most."""
    async with box.session() as bash:
        large = await bash.run("perl -e '$x = \"x\" x (32 << 20); sleep 2'", timeout_s=30)
        after = await bash.run("true")

    assert large.peak_memory_kib > 32 << 10
    assert after.peak_memory_kib < 32 << 10
