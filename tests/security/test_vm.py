"""Virtual machines, by the ids of the threat list: what is theirs alone, beside what tests/conformance asks of every substrate.

One engine for all cases, so that a machine boots once and is restored for each.
"""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from tests import hostview, leftovers, servers
from tests.images import image_with_sshd, small_image

import untax
from untax import substrates
from untax.core.substrate import Incumbent

READY_S = 150.0


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("vm")


@pytest.fixture(scope="module")
def vms(_runner, place):
    if reason := substrates.load("vm").unavailable_reason():
        pytest.skip(f"vm: {reason}")
    leftovers.adopt_orphans()
    engine = untax.Engine("vm", state_dir=place / "state", ready_s=READY_S)
    _runner.run(engine.start())
    yield engine
    _runner.run(engine.aclose())


@pytest.fixture(scope="module")
def spec():
    return untax.EnvSpec(image=small_image("vm"), isolation="vm")


@pytest.fixture
async def box(vms, spec):
    async with vms.lease(spec) as box:
        yield box


def process_of(box) -> hostview.Seen:
    return next(p for p in hostview.below(os.getpid()) if f"untax-{box.id}" in Path(f"/proc/{p.pid}/cmdline").read_text())


def status_of(pid: int) -> dict[str, str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


# ---- 4.1 ----


async def test_e2_its_first_process_is_the_cell(box):
    assert (await box.run(["cat", "/proc/1/comm"])).text == "cell-agent\n"


async def test_e29_a_flooded_console_costs_the_host_nothing(box, place):
    """What a guest prints is kept in a ring of fixed size, and nowhere else."""
    before = sum(path.stat().st_size for path in place.rglob("*") if path.is_file())
    resident = int(status_of(process_of(box).pid)["VmRSS"].split()[0])
    flood = await box.shell("timeout 3 yes 'flooding the console of this machine' >/dev/console", user="root", timeout_s=30)

    assert flood.exit_code == 124, flood
    assert (await box.run(["echo", "alive"])).text == "alive\n"
    assert sum(path.stat().st_size for path in place.rglob("*") if path.is_file()) - before < 1 << 20
    assert int(status_of(process_of(box).pid)["VmRSS"].split()[0]) - resident < 128 << 10  # KiB; translated code is in it


async def test_e30_it_is_another_machine_and_says_which_kind(box):
    """Its boot id is not the host's, and what is only emulated is called so in every ledger."""
    seen = await box.run(["cat", "/proc/sys/kernel/random/boot_id"])
    emulated = "emulated" in box.ledger.substrate

    assert seen.text != Path("/proc/sys/kernel/random/boot_id").read_text()
    assert box.ledger.substrate.startswith("vm")
    assert emulated == any(lacking.name == "isolation" for lacking in box.ledger.unenforced)
    assert ("tcg" in Path(f"/proc/{process_of(box).pid}/cmdline").read_text()) == emulated


async def test_e4_root_inside_finds_no_disk_no_port_and_no_way_to_make_one(box):
    tried = await box.shell(
        """
        ls /dev; ls /sys/class 2>&1; perl -e '$at = "/tmp/d"; print syscall(133, $at, 0060644, 0xfe10) == 0 ? "made" : "mknod refused"'
        echo 1 >/proc/sys/kernel/panic || echo fixed; echo c >/proc/sysrq-trigger || echo fixed
        grep -E '^(CapEff|NoNewPrivs)' /proc/self/status
        """,
        user="root",
    )

    assert "vd" not in tried.text
    assert "vport" not in tried.text
    assert "mknod refused" in tried.text
    assert tried.text.count("fixed") == 2
    assert "NoNewPrivs:\t1" in tried.text


async def test_n1_n2_n3_there_is_no_network_but_a_loopback_of_its_own(box):
    """No device and no route, so no way: not to a peer, not to where clouds keep their data, and not to what listens on this machine."""
    with servers.listener("127.0.0.1") as peer:
        assert peer.is_reachable_from_host
        devices = (await box.shell("cut -d: -f1 -s /proc/net/dev | tr -d ' '; tail -n +2 /proc/net/route")).text.split()
        outside = await box.shell("echo >/dev/tcp/192.0.2.1/53")
        host = await box.shell(f"echo >/dev/tcp/127.0.0.1/{peer.port}")
        assert [asked for _, asked in peer.peers if asked] == []

    assert devices == ["lo"]
    assert b"unreachable" in outside.stderr
    assert b"refused" in host.stderr


async def test_e17_the_emulator_itself_has_no_rights(box):
    """Whoever breaks out into it finds a process without privileges, behind QEMU's own filter, in nobody's network."""
    pid = process_of(box).pid
    status = status_of(pid)

    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    if os.geteuid() == 0:
        assert set(status["Uid"].split()) - {"0"} == set(status["Uid"].split())
        assert int(status["CapPrm"], 16) == 0
        assert Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        opened = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
        assert not [name for name in opened if name.startswith(("/root", "/home", "/etc"))]


# ---- 4.2 ----


async def test_r1_a_fork_bomb_meets_its_limit(vms, spec):
    small = dataclasses.replace(spec, limits=untax.Limits(pids=32))
    async with vms.lease(small) as box:
        bomb = await box.run(["perl", "-e", "for (1 .. 60) { $p = fork; if (defined $p && !$p) { sleep 60; exit } }"], timeout_s=30)
        after = await box.reset() or await box.run(["echo", "ok"])

    assert bomb.limit_kind == "pids", bomb
    assert after.text == "ok\n"


async def test_r3_r4_r8_too_much_memory_ends_the_command_and_not_the_machine(vms, spec):
    """Of the whole command, of a child of it, and as files in memory."""
    small = dataclasses.replace(spec, limits=untax.Limits(memory_mib=64))
    async with vms.lease(small) as box:
        ended = await box.run(["perl", "-e", "$x = 'x' x (300 << 20); print length $x"], timeout_s=60)
        part = await box.shell("perl -e '$x = \"x\" x (300 << 20)'; echo after", timeout_s=60)
        filled = await box.shell("for at in /tmp /dev/shm; do dd if=/dev/zero of=$at/x bs=1M count=300 2>&1; rm $at/x; done", timeout_s=60)
        after = await box.run(["echo", "ok"])

    assert ended.outcome == "oom", ended
    assert (part.text, part.outcome, part.oom_kills) == ("after\n", "exited", 1)
    assert filled.text.count("No space left") == 2 or filled.oom_kills, filled
    assert after.text == "ok\n"


async def test_r7_the_disk_ends_at_its_limit(vms, spec, place):
    small = dataclasses.replace(spec, limits=untax.Limits(disk_mib=32))
    async with vms.lease(small) as box:
        filled = await box.run(["dd", "if=/dev/zero", "of=big", "bs=1M", "count=200"], timeout_s=60)
        held = (await box.stat("big")).size
        after = await box.shell("rm big && echo ok")

    assert filled.outcome == "disk_full", filled
    assert held <= 32 << 20
    assert after.text == "ok\n"


# ---- 4.5, and clones ----


async def test_f9_whatever_root_does_to_its_files_a_reset_undoes(box):
    await box.shell("rm -rf /usr/lib /etc /home; chmod 000 /workspace", user="root", timeout_s=60)
    await box.reset()

    assert (await box.shell("cat /etc/passwd | head -1; echo x >f; cat f")).text == "root:x:0:0:root:/root:/bin/bash\nx\n"


async def test_c13_two_machines_of_one_saved_machine_differ(vms, spec):
    """Random bytes, machine id and name are each one's own, and the clock is the host's."""
    ask = "head -c 16 /dev/urandom | od -An -tx1; cat /etc/machine-id /proc/sys/kernel/hostname; date +%s.%N"
    async with vms.lease(spec) as one, vms.lease(spec) as two:
        told = []
        for box in (one, two):
            before = time.time()
            lines = (await box.shell(ask)).text.splitlines()
            assert before - 1 < float(lines[3]) < time.time() + 1
            assert lines[2] == box.id
            told.append(lines[:3])

    assert all(a != b for a, b in zip(*told, strict=True)), told


# ---- as people do it today ----


async def test_an_sshd_in_the_image_gives_the_incumbent_path(place, tmp_path, as_root):
    """One fresh ssh an action, with the same result as the held channel; without an sshd that is not offered."""
    spec = untax.EnvSpec(image=f"dir:{image_with_sshd(tmp_path / 'image')}", isolation="vm")
    async with untax.Engine("vm", state_dir=place / "state", ready_s=READY_S, sshd="/usr/bin/sshd") as engine, engine.lease(spec) as box:
        argv = ["sh", "-c", "echo out; echo err >&2; pwd; id -un; exit 3"]
        held = await box.run(argv)
        assert isinstance(box._sandbox, Incumbent)
        fresh = await box._sandbox.run_incumbent(argv, timeout_s=120)

    assert (fresh.exit_code, fresh.stdout, fresh.stderr) == (held.exit_code, held.stdout, held.stderr) == (3, held.stdout, b"err\n")


async def test_without_an_sshd_there_is_no_incumbent_path(box):
    assert not isinstance(box._sandbox, Incumbent)


# ---- what fails ----


async def test_x19_c9_a_machine_that_dies_under_its_holder_is_lost_and_says_how(vms, spec):
    async with vms.lease(spec) as box:
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await box.run(["true"])
        os.kill(process_of(box).pid, signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await running

    assert box.ledger.verdict == "infra"


async def test_x_a_guest_that_stops_is_lost_at_once(vms, spec):
    """It hangs up on nobody: that it has stopped is told by the emulator."""
    async with vms.lease(spec) as box:
        running = asyncio.ensure_future(box.run(["sleep", "60"]))
        await box.run(["true"])
        await box._sandbox._qemu.monitor.ask("system_reset")
        with pytest.raises(untax.SandboxLost, match="stopped"):
            await running

    assert box.ledger.verdict == "infra"


async def test_x_a_kernel_that_panics_is_no_sandbox_and_shows_its_last_words(vms, spec, place, monkeypatch):
    machines = vms.substrate._machines
    monkeypatch.setattr(machines, "_command_line", machines._command_line.replace("rdinit=/cell", "rdinit=/nothing"))
    with pytest.raises(untax.CreateError, match=r"(?s)panicked.*Kernel panic") as caught:
        await vms.acquire(spec)

    assert "kernel=" in str(caught.value)


async def test_x_a_damaged_saved_machine_is_dropped_and_made_anew(vms, spec, place, as_root):
    async with vms.lease(spec):
        pass
    machines = vms.substrate._machines
    key = list(machines._open)[-1]
    state = place / "state/vm/saved" / key / "state"
    state.write_bytes(os.urandom(state.stat().st_size))
    with pytest.raises(untax.CreateError, match="boots one anew"):
        await vms.acquire(spec)
    async with vms.lease(spec) as box:
        assert (await box.run(["echo", "again"])).text == "again\n"


async def test_x_a_damaged_disk_is_dropped_and_made_anew(vms, spec, place, as_root):
    async with vms.lease(spec):
        pass
    disk = max((place / "state/vm/chains").glob("*.squashfs"), key=lambda path: path.stat().st_atime)
    disk.write_bytes(b"\0" * disk.stat().st_size)
    with pytest.raises(untax.CreateError, match=r"(?s)damaged.*the next lease makes it anew"):
        await vms.acquire(spec)
    async with vms.lease(spec) as box:
        assert (await box.run(["echo", "again"])).text == "again\n"


async def test_x1_a_killed_engine_takes_its_machines_along(vms, spec, place):
    """By the kernel's hand: nobody has to start anew for it."""
    async with vms.lease(spec):
        pass  # there is a saved machine now
    program = textwrap.dedent(f"""
        import asyncio, untax
        async def main():
            async with untax.Engine("vm", state_dir={str(place / "state")!r}, ready_s={READY_S}) as engine:
                box = await engine.acquire(untax.EnvSpec(image={spec.image!r}, isolation="vm"))
                print(box._sandbox.pid, flush=True)
                await asyncio.sleep(600)
        asyncio.run(main())
    """)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as host:
        machine = int(host.stdout.readline())
        assert "qemu" in Path(f"/proc/{machine}/cmdline").read_text()
        host.kill()

    assert await asyncio.to_thread(hostview.wait_gone, machine, 5.0)


async def test_leases_leave_nothing_behind(vms, spec, place):
    async with vms.lease(spec):
        pass
    watch = leftovers.Watch(marks=(str(place),), state_dir=place / "state")
    before = watch.take()
    for _ in range(3):
        async with vms.lease(spec) as box:
            await box.run(["true"])
    left = await asyncio.to_thread(watch.wait_like, before)

    assert not left


# ---- what is asked for wrongly ----


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"machine": "toaster"}, "machine must be one of"),
        ({"accel": "magic"}, "accel must be one of"),
        ({"start": "warm"}, "start must be one of"),
        ({"sshd": "sshd"}, "absolute path"),
        ({"keep": 0}, "keep must be a whole number"),
    ],
)
def test_an_option_that_does_not_exist_is_refused_with_those_that_do(options, words):
    with pytest.raises(untax.UsageError, match=words):
        substrates.load("vm", **options)


@pytest.mark.parametrize(("kernel", "words"), [("/nowhere/vmlinuz", "No such file"), ("/bin/sh", "not a bzImage")])
def test_a_kernel_that_is_none_makes_it_unavailable_with_words(kernel, words):
    assert words in (substrates.load("vm", kernel=kernel).unavailable_reason() or "")


def test_an_emulator_that_is_not_there_makes_it_unavailable_with_the_remedy():
    assert "apt install" in (substrates.load("vm", qemu="qemu-nowhere").unavailable_reason() or "")
