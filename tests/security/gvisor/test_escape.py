"""THREATS 4.1 in gVisor. Commands meet a kernel of their own: what it grants them is its own too, and nothing of the host's."""

import json
import os
from pathlib import Path

from tests.security.test_escape import *  # noqa: F403
from tests.security.test_escape import python

# For the levels that share the host's kernel: there a filter refuses these, here the kernel behind them is another.
del test_e5_no_namespace_can_be_made_inside, test_e7_no_device_can_be_made_or_found  # noqa: F821
del test_e15_no_set_uid_program_gives_anything, test_e16_no_capability_is_left_and_a_filter_is_on  # noqa: F821
del test_e16_a_session_and_a_pty_are_held_to_the_same, test_e17_dangerous_system_calls_are_refused  # noqa: F821
del test_e23_neighbours_share_no_memory_and_no_temporary_file, test_e26_the_kernel_s_log_is_not_readable  # noqa: F821
del test_e30_the_evidence_matches_the_level_s_name, test_what_the_sandbox_s_root_makes_is_not_root_s_on_the_host  # noqa: F821
del test_the_agent_is_small_static_and_not_writable_by_others  # noqa: F821 - of the file, not of a sandbox


async def test_e5_a_namespace_made_inside_is_of_the_kernel_inside(box, canary):
    """It may be had, and shows nothing more: neither the host's files nor its processes nor its network."""
    result = await box.shell(
        f"unshare -Urmn sh -c 'mount -t tmpfs t /mnt; cat {' '.join(str(p) for p in canary.files)}; ls /proc | grep -c ^[0-9]; cat /proc/net/dev'"
    )

    assert canary.bytes not in result.stdout + result.stderr
    assert "eth0" not in result.text


async def test_e7_a_device_that_was_made_is_nobody_s(box):
    """No disk and no memory of the host is behind a number."""
    result = await box.shell(
        "mknod /tmp/d b 8 0; mknod /tmp/c c 1 1; for f in /tmp/d /tmp/c; do head -c 64 $f | wc -c; done; find /dev -type b"
    )

    assert result.text.split() == ["0", "0"]


async def test_e15_no_set_uid_program_gives_anything(box):
    result = await box.shell("cp $(command -v id) /tmp/sid; chmod 4755 /tmp/sid; /tmp/sid -u; su -c 'id -u' </dev/null 2>/dev/null; true")
    mine = await box.shell("cp $(command -v id) /usr/bin/sid; chmod 4755 /usr/bin/sid", user="root")
    theirs = await box.run(["sid", "-u"])

    assert result.text.split() == ["1000"]
    assert (mine.exit_code, theirs.text) == (0, "1000\n")  # a program of root's that anybody may start as root, and does not


async def test_e16_no_capability_is_left(box):
    """By whichever way a program was started."""
    ask = "grep -E '^Cap' /proc/self/status"
    async with box.session() as bash:
        said = (await box.shell(ask)).text + (await bash.run(ask)).text
    found = [line.split(":\t") for line in said.splitlines()]

    assert len(found) >= 8
    assert {int(value, 16) for _, value in found} == {0}


async def test_e17_dangerous_system_calls_change_nothing_of_the_host_s(box):
    """Some succeed, in the kernel inside. None of them ends the sandbox, and the host's clock, name and modules stay."""
    before = (os.uname(), Path("/proc/modules").read_text() if Path("/proc/modules").exists() else "")
    code = (
        "import ctypes, json\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"print(json.dumps([libc.syscall(*[ctypes.c_long(x) for x in call]) for call in {list(E17_CALLS.values())!r}]))"  # noqa: F405
    )
    result = await python(box, code)

    assert len(json.loads(result.stdout)) == len(E17_CALLS), result.stderr  # noqa: F405
    assert (os.uname(), Path("/proc/modules").read_text() if Path("/proc/modules").exists() else "") == before
    assert (await box.run(["true"])).exit_code == 0


async def test_e23_neighbours_share_no_memory_and_no_temporary_file(box, neighbour):
    made = await box.shell("echo s >/tmp/x; echo s >/dev/shm/x; ipcmk -M 4096")
    number = made.text.split()[-1]
    attach = f"import ctypes; print(ctypes.CDLL(None, use_errno=True).shmget(0, 0, 0) and ctypes.CDLL(None).shmctl({number}, 2, 0))"
    result = await neighbour.shell("cat /tmp/x /dev/shm/x 2>/dev/null; true")

    assert number.isdigit()
    assert result.text == ""
    assert (await python(neighbour, attach)).text.strip() == "-1"


async def test_e26_the_kernel_s_log_is_the_one_inside(box):
    result = await box.shell("dmesg 2>/dev/null; head -c 64 /dev/kmsg 2>/dev/null; head -c 64 /proc/kmsg 2>/dev/null")

    assert result.stdout == b"" or b"gVisor" in result.stdout


async def test_e30_the_evidence_matches_the_level_s_name(box):
    """Neither the host's boot nor its release is seen."""
    inside = (await box.shell("cat /proc/sys/kernel/random/boot_id; uname -r")).text.split()

    assert inside[0] != Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert inside[1] != os.uname().release
    assert (box.ledger.isolation, box.ledger.substrate) == ("gvisor", "gvisor")


async def test_the_host_processes_of_a_sandbox_have_a_root_and_a_network_of_their_own(box, as_root):
    """Whoever breaks out of the kernel inside is nobody in an empty directory, without a network."""
    from tests.security.gvisor.conftest import agents

    kernels = agents()
    assert kernels
    for kernel in kernels:
        assert os.readlink(f"/proc/{kernel.pid}/ns/net") != os.readlink("/proc/self/ns/net")
        assert os.readlink(f"/proc/{kernel.pid}/ns/mnt") != os.readlink("/proc/self/ns/mnt")
        assert set(os.listdir(f"/proc/{kernel.pid}/root")) <= {"proc", "etc", "sys", "dev"}
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{kernel.pid}/status").read_text().splitlines() if ":\t" in line)
        assert status["NoNewPrivs"] == "1"
        assert status["Seccomp"] == "2"
