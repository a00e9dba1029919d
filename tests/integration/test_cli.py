"""The commands as a user calls them: exit codes, `--json`, what reaches a terminal, and nothing left after Ctrl-C."""

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from untax import cli

PATHS = os.pathsep.join(p for p in sys.path if p)


def command(*arguments):
    return [sys.executable, "-m", "untax.cli", *arguments]


def untax(*arguments, **options):
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": PATHS}, **options
    )


@pytest.fixture
def on_process(process_state):
    return ("--substrate", "process", "--state-dir", str(process_state))


def test_run_gives_the_command_s_own_code_and_output(on_process):
    done = untax("run", *on_process, "--", "sh", "-c", "echo out; echo err >&2; exit 3")

    assert (done.returncode, done.stdout) == (3, "out\n")
    assert "err\n" in done.stderr


def test_run_as_json(on_process):
    done = untax("run", *on_process, "--json", "--env", "A=1", "--", "sh", "-c", 'printf "$A\\377"')

    document = json.loads(done.stdout)
    assert (document["exit_code"], document["outcome"]) == (0, "exited")
    assert (document["stdout"], document["stdout_base64"]) == ("1�", "Mf8=")
    assert document["ledger"]["verdict"] == "trusted"


def test_a_deadline_is_124_and_a_missing_program_127(on_process):
    assert untax("run", *on_process, "--timeout", "0.2", "--", "sleep", "9").returncode == 124
    assert untax("run", *on_process, "--", "no-such-program").returncode == 127


def test_a_fault_of_the_infrastructure_is_125(on_process):
    done = untax("run", *on_process, "--limits", "strict", "--json", "--", "true")

    assert done.returncode == 125
    assert json.loads(done.stdout)["error"] == "SubstrateUnavailable"


@pytest.mark.parametrize(
    "arguments",
    [("run",), ("run", "--memory-mib", "-1", "--", "true"), ("run", "--network", "x", "--", "true"), ("no-such-command",), ("run", "--env", "A=B\0", "--", "true"),
     ("run", "--image", "--privileged", "--", "true"), ("shell",)],
)  # fmt: skip
def test_wrong_usage_is_2(process_state, arguments):
    if any("\0" in argument for argument in arguments):
        pytest.skip("the kernel itself refuses NUL in an argument")
    assert untax(*arguments, stdin=subprocess.DEVNULL).returncode == 2


def test_standard_input_is_passed_on_when_asked_for(on_process):
    assert untax("run", *on_process, "--stdin", "--", "cat", input="given").stdout == "given"


def test_o10_escape_sequences_are_neutralised_on_a_terminal_unless_raw(on_process):
    hostile = ("--", "printf", "\\033]52;c;ZXZpbA==\\a")

    shown = on_terminal("run", *on_process, *hostile)
    raw = on_terminal("run", *on_process, "--raw", *hostile)
    assert b"\x1b]52" not in shown
    assert rb"\x1b]52;c;ZXZpbA==\x07" in shown
    assert b"\x1b]52;c;ZXZpbA==\x07" in raw


@pytest.mark.parametrize("before", [[], ["nohup"], ["sh", "-c", 'trap "" INT; exec "$@"', "sh"]], ids=["", "nohup", "in the background"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_interrupts_a_command_leaves_nothing(on_process, process_state, number, before):
    """Twice, as `timeout` sends it: to the process and to its group."""
    argv = [*before, *command("run", *on_process, "--", "sleep", "4321.5")]
    is_ignored = (before[:1], number) in ((["nohup"], signal.SIGHUP), (["sh"], signal.SIGINT))
    running = subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": PATHS}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert wait_for(lambda: sleepers("4321.5"))
    running.send_signal(number)
    if is_ignored:
        with pytest.raises(subprocess.TimeoutExpired):
            running.wait(0.5)
        number = signal.SIGTERM
    if number != signal.SIGINT:
        running.send_signal(signal.SIGTERM)

    assert running.wait(20) == 128 + number
    assert wait_for(lambda: not sleepers("4321.5"))
    assert list((process_state / "process").glob("engine-*")) == []


def test_a_shell_is_a_terminal_that_gives_its_exit_code(on_process):
    said, code = on_terminal("shell", *on_process, typed=b"tty; echo $((6*7)); stty size; exit 5\n", size=(33, 101), want_code=True)

    assert code == 5
    assert b"/dev/pts/" in said
    assert b"42" in said
    assert b"33 101" in said


def test_a_shell_whose_terminal_is_closed_leaves_nothing(on_process, process_state):
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = PATHS
        os.execv(sys.executable, command("shell", *on_process))
    said = b""
    while b"$ " not in said and b"# " not in said:
        said += os.read(terminal, 65536)
    os.close(terminal)

    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGHUP
    assert list((process_state / "process").glob("engine-*")) == []


def test_doctor_says_what_can_be_used(process_state):
    done = untax("doctor", "--json", "--state-dir", str(process_state))
    document = json.loads(done.stdout)

    assert {one["name"] for one in document["substrates"]} >= {"namespace", "process"}
    for one in document["substrates"]:
        assert one["usable"] or one["reason"]
        assert one["usable"] == any(line.startswith(("tried: ", "not tried, ")) for line in one["evidence"])  # and why not
    assert list(process_state.glob(".untax-doctor-*")) == []
    assert "kernel" in {finding["name"] for finding in document["host"]}
    assert "Substrates" in untax("doctor").stdout


def test_doctor_does_not_call_usable_what_cannot_make_a_sandbox(tmp_path):
    """Found out by trying: nothing about the substrate itself is wrong here."""
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    done = untax("doctor", "--json", "--state-dir", str(in_the_way))

    assert done.returncode == 1
    assert all(not one["usable"] and one["reason"] for one in json.loads(done.stdout)["substrates"])


def test_every_command_and_exit_code_is_documented():
    text = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()

    for name in cli.COMMANDS:
        assert f"untax {name}" in text
        options = set(re.findall(r"--[a-z][a-z-]+", untax(name, "--help").stdout)) - {"--help"}
        assert {option for option in options if f"`{option}" not in text} == set()
    for code in (0, 1, 2, 124, 125, 130):
        assert f"| {code} |" in text


def on_terminal(*arguments, typed=b"", size=(24, 80), want_code=False):
    """Run on a terminal of our own; what appeared on it."""
    pid, master = pty.fork()
    if pid == 0:
        os.environ["PYTHONPATH"] = PATHS
        os.execv(sys.executable, command(*arguments))
    import fcntl
    import struct
    import termios

    fcntl.ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    said = b""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if select.select([master], [], [], 0.2)[0]:
            try:
                data = os.read(master, 65536)
            except OSError:
                break
            if not data:
                break
            said += data
            if typed and (b"$ " in said or b"# " in said):
                os.write(master, typed)
                typed = b""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(master)
    return (said, code) if want_code else said


def sleepers(mark):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                words = Path(f"/proc/{entry}/cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            if words[:2] == [b"sleep", mark.encode()]:
                found.append(int(entry))
    return found


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
