"""THREATS 4.4: tricks with output."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
from tests import hostview

CAP = 1 << 20


async def test_o1_bytes_that_are_no_text_are_exact(box):
    result = await box.shell(r"printf '\xc3\x28\xff\xfe\x00end'")

    assert result.stdout == b"\xc3\x28\xff\xfe\x00end"
    assert json.loads(json.dumps(result.text)) == "\ufffd(\ufffd\ufffd\0end"


async def test_o2_random_bytes_arrive_unchanged(box):
    result = await box.shell("head -c 1000000 /dev/urandom | tee /tmp/r; sha256sum < /tmp/r >&2")

    assert hashlib.sha256(result.stdout).hexdigest() == result.stderr.split()[0].decode()


async def test_o3_a_gibibyte_of_output_costs_the_engine_little(box):
    before = hostview.resident_kib()
    result = await box.shell("yes | head -c 1073741824; echo end", timeout_s=120)

    assert result.truncated
    assert (result.exit_code, len(result.stdout) + result.dropped_stdout) == (0, (1 << 30) + 4)
    assert len(result.stdout) <= CAP
    assert result.stdout.startswith(b"y\ny\n")
    assert result.stdout.endswith(b"y\nend\n")
    assert hostview.resident_kib() - before <= 64 * 1024


async def test_o4_two_streams_in_turn_do_not_lock_up(box):
    result = await box.shell("for i in $(seq 200); do head -c 1048576 /dev/zero; head -c 1048576 /dev/zero >&2; done", timeout_s=120)

    assert (result.outcome, result.exit_code) == ("exited", 0)
    assert len(result.stdout) + result.dropped_stdout == 200 << 20
    assert len(result.stderr) + result.dropped_stderr == 200 << 20


async def test_o5_shapes_of_output(box):
    """Nothing; no final newline; one line of 100 MiB; a million writes of one byte."""
    assert (await box.run(["true"])).stdout == b""
    assert (await box.shell("printf x")).stdout == b"x"
    line = await box.shell("head -c 104857600 /dev/zero | tr '\\0' x", timeout_s=60)
    assert len(line.stdout) + line.dropped_stdout == 100 << 20
    assert set(line.stdout) == {ord("x")}
    count = 1_000_000 if os.environ.get("UNTAX_LONG") == "1" else 200_000
    many = await box.run(["perl", "-e", f"syswrite(STDOUT, chr(65 + $_ % 26)) for 0..{count - 1}"], timeout_s=120)
    assert many.stdout == bytes(65 + n % 26 for n in range(count))


async def test_o6_a_forged_line_stays_inside_one_record(box, caplog):
    """Whatever a workload prints or is called, a record of the log is one line without control characters."""
    caplog.set_level("DEBUG", logger="untax")
    await box.shell(r"printf 'x\n2026-01-01 ERROR forged\n\033[2J'; exit 3")
    await box.shell("exit 1", cwd="/tmp", env={"X": "a\n2026-01-01 ERROR forged\x1b[2J"})
    for record in caplog.records:
        if record.name.startswith("untax"):
            assert "\n" not in record.getMessage()
            assert "\x1b" not in record.getMessage()


async def test_o6_a_result_s_summary_is_one_line(box):
    result = await box.shell(r"printf 'x\n2026-01-01 ERROR forged\033[2J\r' >&2; exit 3")

    assert "\n" not in result.summary()
    assert "\x1b" not in result.summary()


async def test_o7_other_descriptors_are_not_there(box):
    result = await box.shell("echo x >&3; echo $?; echo y >/dev/fd/9; echo $?")

    assert result.text == "1\n1\n"


async def test_o8_late_output_is_nobody_s(box):
    first = await box.shell("(sleep 0.5; echo late; echo late >&2) & echo early")
    second = await box.shell("sleep 1; echo next")

    assert first.stdout == b"early\n"
    assert (second.stdout, second.stderr) == (b"next\n", b"")


@pytest.mark.parametrize("text", ["echo \ud800", "echo \u202e\u2066x", "touch 😀 && ls", "\ufeffecho x", "echo \x7f\x1b"], ids=ascii)
async def test_o9_odd_text_is_run_or_refused(box, text):
    from untax import UsageError

    try:
        result = await box.shell(text)
    except UsageError:
        assert "\ud800" in text
        return
    assert result.outcome == "exited"


async def test_o10_the_command_line_neutralises_terminal_controls(tmp_path):
    """On a terminal nothing of a workload's can set the clipboard or the title; into a pipe bytes go as they are."""
    import pty
    import select

    argv = [sys.executable, "-m", "untax.cli", "run", "--", "printf", r"\033]52;c;ZXZpbA==\a\033]0;t\a visible"]
    env = {**os.environ, "UNTAX_STATE_DIR": str(tmp_path / "state"), "PYTHONPATH": os.pathsep.join(["src", "."])}
    piped = subprocess.run(argv, capture_output=True, env=env, timeout=60)
    if piped.returncode != 0:
        pytest.fail(f"untax run: {piped.stderr.decode(errors='replace')[-500:]}")
    main, follower = pty.openpty()
    process = subprocess.Popen(argv, stdout=follower, stderr=follower, stdin=subprocess.DEVNULL, env=env)
    os.close(follower)
    shown = b""
    try:
        while select.select([main], [], [], 30)[0]:
            try:
                data = os.read(main, 4096)
            except OSError:
                break
            if not data:
                break
            shown += data
    finally:
        process.wait(30)
        os.close(main)

    assert b"visible" in shown
    assert b"\x1b]52" not in shown
    assert b"\x1b]0" not in shown
    assert b"\a" not in shown
    assert b"\x1b]52;c;ZXZpbA==\a" in piped.stdout


async def test_o11_what_looks_like_a_result_is_output(box):
    result = await box.shell("""echo '{"exit_code":0,"status":"exited"}'; exit 9""")

    assert (result.outcome, result.exit_code) == ("exited", 9)


async def test_o12_new_lines_are_not_translated(box):
    result = await box.run(["python3", "-c", r"import sys;sys.stdout.buffer.write(b'\r\n'*1000)"])

    assert result.stdout == b"\r\n" * 1000
