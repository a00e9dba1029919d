"""THREATS 4.3: tricks with the process tree. Whatever a command leaves behind, the next one and the reset are clean."""

import asyncio
import contextlib
import os
import time

import pytest
from tests import hostview
from tests.boxview import is_running, wait_gone, wait_running

import untax


async def python(box, code: str, **options):
    return await box.run(["python3", "-c", code], **options)


async def test_p1_a_background_child_does_not_hold_the_answer(box):
    """It keeps running; the rule is written in the protocol."""
    result = await box.shell("sleep 1001 & echo hi")

    assert result.stdout == b"hi\n"
    assert result.round_trip_s < 1
    assert await wait_running(box, "1001")


async def test_p2_a_detached_child_is_gone_after_a_reset(box):
    await box.shell("nohup setsid sleep 1002 >/dev/null 2>&1 &")
    assert await wait_running(box, "1002")
    await box.reset()

    assert not await is_running(box, "1002")


async def test_p3_a_child_with_the_pipe_does_not_hold_the_answer(box):
    result = await box.shell("(sleep 1003 &); echo done")

    assert result.stdout == b"done\n"
    assert result.round_trip_s < 0.5 + result.elapsed_s


async def test_p4_a_deadline_takes_the_grandchildren(box):
    result = await box.shell("sh -c 'sh -c \"sleep 1004\" & wait'", timeout_s=1)

    assert result.timed_out
    assert result.round_trip_s < 1.5
    assert await wait_gone(box, "1004", within_s=1)


DAEMON = (
    "import os, signal, sys, time\n"
    "for s in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT): signal.signal(s, signal.SIG_IGN)\n"
    "if os.fork(): os._exit(0)\nos.setsid()\nif os.fork(): os._exit(0)\n"
    "open('up', 'w').write(str(os.getpid()))\nos.execvp('sleep', ['sleep', '1005'])\n"
)


async def test_p5_a_daemon_that_ignores_signals_is_dead_after_a_reset(box):
    await python(box, DAEMON)
    up = await box.shell("for i in $(seq 300); do [ -s up ] && exit 0; sleep 0.01; done; exit 1")
    assert up.exit_code == 0
    assert await wait_running(box, "1005")
    await box.reset()

    assert not await is_running(box, "1005")


async def test_p6_a_trap_does_not_outlast_the_deadline(box):
    result = await box.shell("trap '' TERM INT HUP; sleep 1006", timeout_s=1)

    assert result.timed_out
    assert result.round_trip_s < 1.5
    assert await wait_gone(box, "1006", within_s=1)


async def test_p7_orphans_are_reaped(box):
    result = await python(
        box,
        "import os, time\nfor _ in range(100):\n    pid = os.fork()\n    if not pid:\n"
        "        for _ in range(5):\n            if not os.fork(): os._exit(0)\n        os._exit(0)\n    os.waitpid(pid, 0)\n",
    )
    assert result.exit_code == 0
    zombies = await box.shell(
        "for i in $(seq 100); do n=$(cat /proc/[0-9]*/stat 2>/dev/null | grep -c ') Z '); [ $n = 0 ] && break; sleep 0.01; done; echo $n"
    )

    assert zombies.text == "0\n"


async def test_p8_killing_everything_leaves_an_agent_and_keeps_the_outcome(box):
    """Neither the worker that started it nor the next one may be killed away to make a command look like one that never ran."""
    for _ in range(5):
        result = await box.shell("kill -9 -1; exit 7", timeout_s=10)
        assert (result.outcome, result.exit_code) == ("exited", 7)
        assert (await box.run(["echo", "here"], timeout_s=5)).stdout == b"here\n"

    assert box.ledger.verdict == "trusted"


async def test_p8_python_killing_every_pid_one_by_one(box):
    """Also the worker, which has the workload's own identity, may be hit; the answer is a result or a typed loss, soon."""
    began = time.monotonic()
    try:
        await python(
            box,
            "import os\nfor p in range(2, 400):\n    if p != os.getpid():\n        try: os.kill(p, 9)\n        except OSError: pass\n",
            timeout_s=10,
        )
        assert (await box.run(["echo", "here"], timeout_s=5)).stdout == b"here\n"
        assert await box.read("/proc/self/comm")
    except untax.SandboxLost:
        assert box.ledger.verdict == "infra"
    assert time.monotonic() - began < 8


_STOP_ALL = """
import os, signal, sys, time
if os.fork(): sys.exit(0)
os.setsid()
time.sleep(0.1)
for p in filter(str.isdigit, os.listdir("/proc")):
    try:
        if open(f"/proc/{p}/comm").read() == "cell-worker\\n": os.kill(int(p), 9)
    except OSError: pass
until = time.monotonic() + 20
while time.monotonic() < until:
    try: os.kill(-1, signal.SIGSTOP)
    except OSError: pass
"""


async def test_p18_a_workload_that_stops_its_new_worker_holds_up_nobody_else(engine, spec):
    """A worker takes on the workload's identity on its way in and can be stopped half-way; the launcher must not wait for it."""

    async def act(box) -> None:
        with contextlib.suppress(untax.UntaxError):
            await box.run(["true"], timeout_s=0.3)

    for _ in range(6):
        async with engine.lease(spec) as box:
            await python(box, _STOP_ALL, timeout_s=5)
            await asyncio.sleep(0.3)
            acting = asyncio.create_task(act(box))
            await asyncio.sleep(0.05)
            async with asyncio.timeout(3), engine.lease(spec) as other:
                assert (await other.run(["echo", "free"])).stdout == b"free\n"
            await acting


async def test_p9_the_agent_cannot_be_signalled(box):
    result = await box.shell("kill -9 1; echo $?; kill -TERM 1; echo $?; kill -STOP 1; echo $?")

    assert (await box.run(["echo", "here"])).stdout == b"here\n"
    assert len(result.text.split()) == 3


async def test_p10_closed_streams_do_not_end_the_wait(box):
    result = await box.shell("exec 0<&- 1>&- 2>&-; sleep 1; exit 4", timeout_s=10)

    assert (result.outcome, result.exit_code) == ("exited", 4)
    assert result.elapsed_s >= 1


@pytest.mark.parametrize("command", ["cat", "read x; echo $?", "python3 -c 'input()'"])
async def test_p11_reading_without_input_is_end_of_file(box, command):
    result = await box.shell(command, timeout_s=5)

    assert result.outcome == "exited"
    assert result.round_trip_s < 3


@pytest.mark.parametrize(
    "command",
    [
        "git init -q . && git -c user.name=t -c user.email=t@t commit --allow-empty",
        "git clone https://user@127.0.0.1:1/x",
        "ssh nobody@127.0.0.1",
        "apt-get install nano",
        "python3 -m getpass",
        "python3 -c 'import getpass; getpass.getpass()'",
    ],
)
async def test_p12_programs_that_ask_are_not_waited_for(box, command):
    result = await box.shell(command, timeout_s=10)

    assert result.outcome in ("exited", "signaled")
    assert result.round_trip_s < 5


@pytest.mark.parametrize("command", ["git init -q . && git log | head", "man ls", "less /etc/passwd", "systemctl status", "git help -a"])
async def test_p13_no_pager_waits(box, command):
    result = await box.shell(command, timeout_s=10)

    assert result.outcome in ("exited", "signaled")
    assert result.round_trip_s < 5


async def test_p14_what_cannot_run_is_told_like_a_shell_does(box):
    await box.write("text", b"echo hi\n", mode=0o755)
    await box.write("locked", b"#!/bin/sh\n", mode=0o644)
    await box.mkdir("dir")
    codes = [(await box.run([name])).exit_code for name in ("./missing", "./dir", "./text", "./locked")]

    assert codes == [127, 126, 126, 126]


async def test_p15_long_arguments_are_refused_or_run(box):
    for argv, env in (
        (["echo", "x" * (200 << 10)], None),
        (["echo", *["y" * 100_000] * 30], None),
        (["echo"], {f"V{n}": "z" * 100_000 for n in range(30)}),
    ):
        with pytest.raises(untax.UsageError):
            await box.run(argv, env=env)
    assert (await box.run(["echo", "alive"])).stdout == b"alive\n"


async def test_p16_a_nul_is_refused(box):
    for options in ({"argv": ["echo", "a\0b"]}, {"argv": ["env"], "env": {"A\0B": "1"}}, {"argv": ["pwd"], "cwd": "/tm\0p"}):
        with pytest.raises(untax.UsageError):
            await box.run(**options)


async def test_p17_an_unknown_user_is_refused(box):
    with pytest.raises(untax.UntaxError) as caught:
        await box.run(["id"], user="nobody-of-this-name")

    assert isinstance(caught.value, (untax.UsageError, untax.Gone))


async def test_p18_a_stopped_command_ends_at_its_deadline(box):
    result = await box.shell("kill -STOP $$; echo 1018", timeout_s=1)

    assert result.timed_out
    assert result.round_trip_s < 1.5
    assert (await box.shell("cat /proc/[0-9]*/stat | grep -c ') T '")).text.strip() == "0"


@pytest.mark.parametrize("code", [0, 255, 256])
async def test_p20_exit_codes_are_exact(box, code):
    result = await box.shell(f"exit {code}")

    assert (result.outcome, result.exit_code) == ("exited", code & 255)


@pytest.mark.parametrize("number", [6, 9, 11, 15, 31])
async def test_p20_signals_are_exact(box, number):
    result = await box.shell(f"kill -{number} $$")

    assert (result.outcome, result.exit_code) == ("signaled", 128 + number)


async def test_p21_a_session_keeps_its_rules(box):
    async with box.session() as bash:
        await bash.run("cd /tmp; export A=1")
        assert (await bash.run("echo $PWD $A")).text == "/tmp 1\n"
        for unfinished in ("echo 'open", "cat <<E\nx"):
            began = time.monotonic()
            await bash.run(unfinished, timeout_s=5)
            assert time.monotonic() - began < 2
        assert (await bash.run("exit 3")).exit_code == 3
    async with box.session() as bash:
        assert (await bash.run("set -e; false", timeout_s=5)).exit_code == 1
    async with box.session() as bash:
        assert (await bash.run("exec sleep 1", timeout_s=5)).outcome == "exited"


async def test_p22_a_reaper_of_its_own_hides_nothing(box):
    code = (
        "import ctypes, os, time\nctypes.CDLL(None).prctl(36, 1)\n"
        "if not os.fork():\n    os.setsid()\n    if not os.fork(): os.execvp('sleep', ['sleep', '1022'])\n    os._exit(0)\n"
        "open('up', 'w').write('x'); os.execvp('sleep', ['sleep', '1023'])\n"
    )
    await box.shell(
        'nohup python3 -c "$CODE" >/dev/null 2>&1 & for i in $(seq 300); do [ -s up ] && break; sleep 0.01; done', env={"CODE": code}
    )
    assert await wait_running(box, "1022")
    await box.reset()

    assert not await is_running(box, "1022")
    assert not await is_running(box, "1023")


@pytest.mark.parametrize("name", ["cell", "[kworker/0:1]", ""])
async def test_p23_a_name_protects_nobody_and_condemns_nobody(box, name):
    """Killing goes by the group or the namespace, never by name: a process of that name outside lives on."""
    outside = await asyncio.create_subprocess_exec("sleep", "60", executable="/usr/bin/sleep")
    code = f"import ctypes, time\nctypes.CDLL(None).prctl(15, {name.encode()!r}, 0, 0, 0)\nprint('up', flush=True)\ntime.sleep(1024)"
    try:
        cut = await python(box, code, timeout_s=1)
        assert cut.timed_out
        assert await wait_gone(box, "time.sleep(1024)", within_s=1)
        assert outside.returncode is None
        os.kill(outside.pid, 0)
    finally:
        outside.kill()
        await outside.wait()


async def test_a_tree_is_dead_within_a_second_of_its_deadline(box):
    """Counted from the host, where nothing can hide."""
    await box.shell("for i in 1 2 3 4 5; do setsid sleep 1025 & done; sleep 1025", timeout_s=0.5)
    gone = hostview.eventually(
        lambda: not [p for agent in hostview.agents() for p in hostview.inside(agent) if p.comm == "sleep"], within_s=1
    )
    assert gone


async def test_a_destroyed_sandbox_leaves_no_process(engine, spec):
    box = await engine.acquire(spec)
    before = {a.pid for a in hostview.agents()}
    await box.shell("for i in $(seq 50); do (trap '' TERM; sleep 1026) >/dev/null 2>&1 & done")
    await box.release()
    gone = hostview.eventually(lambda: len({a.pid for a in hostview.agents()} & before) == len(before) - 1, within_s=1)

    assert gone
