"""THREATS 4.1: the known ways out of a namespace sandbox, each tried from inside."""

import asyncio
import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import hostview
from tests.images import small_directory

import untax
from untax.substrates._host import cell_path

# Host settings that E9 tries to change; recorded first and restored should a case ever succeed.
KERNEL_SETTINGS = ("/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/sys/kernel/uevent_helper")


async def python(box, code: str, **options):
    return await box.run(["python3", "-c", code], **options)


async def test_e1_no_file_of_the_host_is_found_inside(engine, box, canary):
    """A canary lies in a dozen places of the host; the programs' own directories are the host's to share."""
    looked = await box.shell(
        f"find / -name {canary.files[0].name} 2>/dev/null; "
        f"grep -rIlsF {canary.text} / --exclude-dir=proc --exclude-dir=usr --exclude-dir=.pyenv 2>/dev/null",
        timeout_s=60,
    )
    assert looked.stdout == b""

    async with engine.lease(untax.EnvSpec(image=f"dir:{small_directory()}")) as small:
        everywhere = await small.shell(f"grep -rIlsF {canary.text} / --exclude-dir=proc 2>/dev/null", timeout_s=60)
    assert everywhere.stdout == b""


async def test_e2_only_the_sandbox_s_own_processes_are_seen(box):
    result = await box.shell("cat /proc/1/comm; for p in /proc/[0-9]*; do echo ${p#/proc/} $(cat $p/comm); done")
    lines = result.text.splitlines()

    assert lines[0].startswith("cell")
    seen = {int(line.split()[0]) for line in lines[1:]}
    assert len(seen) <= 6, lines
    assert max(seen) < 1000
    assert os.getpid() not in seen


async def test_e3_no_descriptor_leads_outside(box):
    result = await box.shell("ls -l /proc/self/fd | tail -n +2")
    targets = [line.split(" -> ")[1] for line in result.text.splitlines()]

    assert len(targets) == 4, targets
    assert all(t == "/dev/null" or t.startswith(("pipe:", "socket:", "/proc/")) for t in targets), targets


async def test_e4_nothing_can_be_mounted_or_unmounted(box):
    result = await box.shell(
        "mount -t tmpfs t /mnt; echo $?; mount -o remount,rw /; echo $?; umount -l /proc; echo $?; ls /proc/1 >/dev/null; echo $?"
    )

    assert [int(x) for x in result.text.split()][:3].count(0) == 0
    assert result.text.split()[3] == "0"


async def test_e5_no_namespace_can_be_made_inside(box):
    result = await box.shell("unshare -Ur id; echo $?; unshare -m true; echo $?; unshare -n true; echo $?")

    assert "0" not in result.text.split()


async def test_e6_nobody_else_s_namespace_can_be_entered(box):
    result = await box.run(["nsenter", "-t", "1", "-a", "true"])

    assert result.exit_code != 0


async def test_e7_no_device_can_be_made_or_found(box):
    made = await box.shell("mknod /tmp/d b 8 0; echo $?; mknod /tmp/c c 1 11; echo $?; find / -xdev -type b 2>/dev/null; find /dev -type b")
    assert made.text.split() == ["1", "1"]
    found = await box.shell("find /dev -type c | sort")
    allowed = {"null", "zero", "full", "random", "urandom", "tty", "ptmx"}
    strange = [p for p in found.text.split() if p.removeprefix("/dev/") not in allowed and not p.startswith("/dev/pts/")]
    assert not strange


async def test_e8_a_second_chroot_does_not_lead_out(box, canary):
    code = (
        "import os\nos.mkdir('j')\nos.chroot('j')\n[os.chdir('..') for _ in range(99)]\nos.chroot('.')\n"
        "print(os.listdir('/'))\n" + "".join(f"open({str(p)!r}).read()\n" for p in canary.files)
    )
    result = await python(box, code)

    assert result.exit_code != 0
    assert canary.bytes not in result.stdout + result.stderr


async def test_e9_kernel_settings_cannot_be_written(box):
    before = {path: Path(path).read_text() for path in KERNEL_SETTINGS if os.access(path, os.R_OK)}
    try:
        result = await box.shell(
            "for try in '|/tmp/x>/proc/sys/kernel/core_pattern' '1>/proc/sys/vm/drop_caches' 'h>/proc/sysrq-trigger' "
            "'x>/sys/kernel/uevent_helper' '1>/proc/sys/kernel/panic'; do "
            '(printf %s "${try%%>*}" >"${try#*>}") 2>/dev/null && echo "wrote ${try#*>}"; done; true'
        )
        assert result.stdout == b""
    finally:
        after = {path: Path(path).read_text() for path in before}
        for path, value in before.items():
            if after[path] != value and os.geteuid() == 0:
                Path(path).write_text(value)
    assert after == before


async def test_e10_what_tells_about_the_host_is_masked(box):
    result = await box.shell(
        "for f in kcore keys timer_list sched_debug latency_stats acpi scsi asound interrupts; do head -c 64 /proc/$f 2>/dev/null | wc -c; done;"
        "ls /proc/acpi /proc/scsi /proc/asound /sys/firmware /sys/devices/virtual/powercap 2>/dev/null | grep -v '^/' | grep -v '^$'"
    )

    assert set(result.text.split()) == {"0"}


async def test_e11_no_control_group_tree_can_be_mounted(box):
    result = await box.shell(
        "mkdir /tmp/c; mount -t cgroup -o memory c /tmp/c; echo $?; mount -t cgroup2 c /tmp/c; echo $?; find / -name release_agent -writable 2>/dev/null",
        timeout_s=60,
    )

    assert "0" not in result.text.split()
    assert "release_agent" not in result.text


async def test_e12_limits_cannot_be_raised_from_inside(box):
    result = await box.shell(
        "find /sys -type f -writable 2>/dev/null | head -1; find / -path /proc -prune -o -name 'memory.*' -writable -print 2>/dev/null | head -1",
        timeout_s=60,
    )

    assert result.stdout == b""


@pytest.mark.parametrize("cwd", ["/proc/self/fd/7", "/proc/1/root", "../../../..", "/proc/1/cwd", "/missing", "/proc/self/root/.."])
async def test_e13_a_working_directory_lies_inside(box, canary, cwd):
    """Refused, or the sandbox's own directory: then the host's canary is not below it."""
    try:
        result = await box.shell(f"ls {' '.join('.' + str(p) for p in canary.files)} 2>/dev/null; pwd; ls -a / | tr '\\n' ' '", cwd=cwd)
    except untax.SandboxLost:
        raise
    except untax.UntaxError:
        return
    assert canary.files[0].name not in result.text


async def test_e14_the_agent_binary_cannot_be_replaced(box):
    """Through /proc/1/exe, as in CVE-2019-5736; also while a command of our own runs."""
    before = hashlib.sha256(Path(cell_path()).read_bytes()).hexdigest()
    copied = await box.shell("cp /bin/sh /proc/1/exe; echo $?; cat /bin/sh >/proc/1/exe; echo $?")
    opened = await python(
        box,
        "import os\n"
        "for pid in os.listdir('/proc'):\n"
        "    if pid.isdigit():\n"
        "        try:\n"
        "            if 'cell' in os.readlink(f'/proc/{pid}/exe') or pid == '1':\n"
        "                open(f'/proc/{pid}/exe', 'r+b').write(b'x'); print('opened', pid)\n"
        "        except OSError: pass\n",
    )

    assert "0" not in copied.text.split()
    assert opened.stdout == b""
    assert hashlib.sha256(Path(cell_path()).read_bytes()).hexdigest() == before


async def test_e15_no_set_uid_program_gives_anything(box):
    result = await box.shell(
        "grep NoNewPrivs /proc/self/status; id -u; "
        "for f in $(find /usr/bin /usr/sbin /bin /sbin -xdev -perm -4000 -type f 2>/dev/null); do timeout 2 $f --version </dev/null; done >/dev/null 2>&1; "
        "timeout 2 sudo -n id -u 2>/dev/null; timeout 2 su -c 'id -u' </dev/null 2>/dev/null; "
        "cp $(command -v id) /tmp/sid; chmod 4755 /tmp/sid; /tmp/sid -u; grep Uid /proc/self/status",
        timeout_s=60,
    )
    words = result.text.split()

    assert words[:2] == ["NoNewPrivs:", "1"]
    uids = [w for w in words[2:] if w.isdigit()]
    assert uids and "0" not in uids


async def test_e16_no_capability_is_left_and_a_filter_is_on(box):
    result = await box.shell("grep -E '^(Cap|Seccomp:)' /proc/self/status")
    found = dict(line.split(":\t") for line in result.text.splitlines())

    assert {name: int(value, 16) for name, value in found.items() if name.startswith("Cap")} == dict.fromkeys(
        ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), 0
    )
    assert found["Seccomp"] == "2"


async def test_e16_a_session_and_a_pty_are_held_to_the_same(box):
    """Every path by which a program is started ends behind the same filter."""
    async with box.session() as bash:
        said = await bash.run("grep -E '^(CapEff|CapBnd|Seccomp:|NoNewPrivs)' /proc/self/status | tr -d '\\n\\t'")
    assert "NoNewPrivs:1" in said.text
    assert "Seccomp:2" in said.text
    assert "CapBnd:0000000000000000" in said.text


# number, arguments: harmless even where the call is allowed after all
E17_CALLS = {
    "bpf": (321, 0, 0, 0),
    "perf_event_open": (298, 0, 0, -1, -1, 0),
    "userfaultfd": (323, 0),
    "io_uring_setup": (425, 1, 0),
    "keyctl": (250, 0, -3, 0),
    "add_key": (248, 0, 0, 0, 0, -2),
    "request_key": (249, 0, 0, 0, 0),
    "kexec_load": (246, 0, 0, 0, 0),
    "init_module": (175, 0, 0, 0),
    "finit_module": (313, -1, 0, 0),
    "delete_module": (176, 0, 0),
    "open_by_handle_at": (304, -1, 0, 0),
    "mount": (165, 0, 0, 0, 0, 0),
    "umount2": (166, 0, 0),
    "move_mount": (429, -1, 0, -1, 0, 0),
    "open_tree": (428, -100, 0, 1),
    "fsopen": (430, 0, 0),
    "fsmount": (432, -1, 0, 0),
    "fspick": (433, -100, 0, 0),
    "mount_setattr": (442, -100, 0, 0, 0, 0),
    "pivot_root": (155, 0, 0),
    "setns": (308, -1, 0),
    "unshare": (272, 0x10000000),
    "swapon": (167, 0, 0),
    "reboot": (169, 0, 0, 0, 0),
    "settimeofday": (164, 0, 0),
    "clock_settime": (227, 0, 0),
    "acct": (163, 0),
    "quotactl": (179, 0, 0, 0, 0),
    "iopl": (172, 3),
    "ioperm": (173, 0, 1, 1),
    "fanotify_init": (300, 0, 0),
    "kcmp": (312, 1, 1, 0, 0, 0),
    "syslog": (103, 3, 0, 0),
    "vhangup": (153,),
}


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
async def test_e17_dangerous_system_calls_are_refused(box):
    """Each gives EPERM or ENOSYS; never success, never a dead sandbox."""
    code = (
        "import ctypes, errno\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, call in {E17_CALLS!r}.items():\n"
        "    ctypes.set_errno(0)\n"
        "    got = libc.syscall(*[ctypes.c_long(x) for x in call])\n"
        "    print(name, got, errno.errorcode.get(ctypes.get_errno()), flush=True)\n"
    )
    result = await python(box, code)
    verdicts = {name: (value, error) for name, value, error in (line.split() for line in result.text.splitlines())}

    assert set(verdicts) == set(E17_CALLS), result.stderr
    wrong = {name: v for name, v in verdicts.items() if v[0] != "-1" or v[1] not in ("EPERM", "ENOSYS")}
    assert not wrong


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="a 32-bit call exists on x86_64 only")
async def test_e17_another_architecture_s_calls_are_refused(box, tmp_path):
    """A filter that reads only the number would let `int 0x80` through as something else."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    source = tmp_path / "x.c"
    source.write_text(
        '#include <stdio.h>\n#include <signal.h>\n#include <stdlib.h>\nstatic void no(int s) { (void)s; puts("refused"); exit(0); }\n'
        "int main(void) { long r; signal(SIGSYS, no); signal(SIGSEGV, no);\n"
        '__asm__ volatile("int $0x80" : "=a"(r) : "a"(20L) : "memory");\n'  # getpid in the i386 table, writev in ours
        'puts(r == -1 || r == -38 ? "refused" : "ran"); return 0; }\n'
    )
    subprocess.run(["gcc", "-O0", "-static", "-o", tmp_path / "x", source], check=True)
    await box.write("x", (tmp_path / "x").read_bytes(), mode=0o755)
    result = await box.run(["./x"])

    assert result.outcome == "signaled" or result.text == "refused\n"
    assert (await box.run(["true"])).exit_code == 0


async def test_e18_threads_start(box):
    """clone3 must look absent, not forbidden."""
    result = await python(box, "import threading;t=threading.Thread(target=print,args=('ok',));t.start();t.join()")

    assert result.text == "ok\n"


async def test_e19_nothing_can_be_typed_into_a_terminal(box):
    """TIOCSTI and TIOCLINUX, with and without a pty."""
    code = "import fcntl,sys\nfor n in (0x5412, 0x541C):\n    try:\n        fcntl.ioctl(0, n, b'x'); print('typed')\n    except OSError as e: print('no')\n"
    assert (await python(box, code)).text == "no\nno\n"

    process = await box.start(["python3", "-c", code], pty=True)
    said = (await process.wait()).stdout
    assert b"typed" not in said
    assert said.count(b"no") == 2


async def test_e20_files_cannot_be_opened_by_handle(box):
    """The walk of Shocker: inode 2 of the device below the sandbox's root."""
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "class H(ctypes.Structure): _fields_ = [('n', ctypes.c_uint), ('t', ctypes.c_int), ('b', ctypes.c_ubyte * 8)]\n"
        "d = os.open('/', os.O_RDONLY)\n"
        "h = H(8, 1, (ctypes.c_ubyte * 8)(2, 0, 0, 0, 0, 0, 0, 0))\n"
        "print(libc.open_by_handle_at(d, ctypes.byref(h), os.O_RDONLY))\n"
    )
    assert (await python(box, code)).text == "-1\n"


async def test_e21_no_socket_of_the_host_is_inside(box):
    result = await box.shell(
        "ls -d /var/run/docker.sock /run/containerd /run/podman /run/dbus /run/systemd 2>/dev/null; find / -path /proc -prune -o -path /usr -prune -o -type s -print 2>/dev/null",
        timeout_s=60,
    )

    assert result.stdout == b""


async def test_e22_only_the_documented_variables_are_inside(box, canary):
    result = await box.shell("env; for p in /proc/[0-9]*; do tr '\\0' '\\n' <$p/environ; done 2>/dev/null")

    assert canary.text not in result.text
    documented = {
        "PATH",
        "HOME",
        "USER",
        "LANG",
        "TERM",
        "SHELL",
        "PAGER",
        "GIT_PAGER",
        "GIT_TERMINAL_PROMPT",
        "DEBIAN_FRONTEND",
        "PIP_NO_INPUT",
        "PWD",
        "OLDPWD",
        "SHLVL",
        "_",
        "LOGNAME",
        "LC_ALL",
    }
    assert {line.split("=")[0] for line in result.text.splitlines() if "=" in line} <= documented


async def test_e23_neighbours_share_no_memory_and_no_temporary_file(box, neighbour):
    made = await box.shell("echo s >/tmp/x; echo s >/dev/shm/x; ipcmk -M 4096; ipcs -m | grep -c 4096")
    assert made.text.strip().endswith("1"), made  # the object is there for the one who made it

    result = await neighbour.shell("cat /tmp/x /dev/shm/x 2>/dev/null; ipcs -m | grep -c 4096")
    assert result.text == "0\n"


async def test_e24_a_neighbour_s_process_does_not_exist(box, neighbour):
    agents = hostview.agents()
    assert len(agents) >= 2
    pids = {p.pid for agent in agents for p in hostview.inside(agent)} | {os.getpid()}
    tried = " ".join(str(pid) for pid in pids if pid > 1000)
    result = await box.shell(f"for p in {tried}; do kill -0 $p 2>/dev/null && echo $p; ls -d /proc/$p 2>/dev/null; done; true")

    assert result.stdout == b""


async def test_e25_a_neighbour_s_loopback_is_another(box, neighbour):
    process = await box.start(["python3", "-u", "-m", "http.server", "9999", "--bind", "127.0.0.1"])
    up = await box.shell("for i in $(seq 500); do (echo >/dev/tcp/127.0.0.1/9999) 2>/dev/null && exit 0; sleep 0.01; done; exit 1")
    assert up.exit_code == 0
    result = await neighbour.shell("(echo >/dev/tcp/127.0.0.1/9999) 2>&1 && echo reached")

    assert "refused" in result.text
    assert "reached" not in result.text
    await process.signal(9)


async def test_e26_the_kernel_s_log_is_not_readable(box):
    result = await box.shell("dmesg 2>/dev/null | head -1; head -c 64 /dev/kmsg 2>/dev/null; head -c 64 /proc/kmsg 2>/dev/null")

    assert result.stdout == b""


def digests(root: Path) -> dict[str, tuple[int, int, str]]:
    found = {}
    for path in root.rglob("*"):
        if path.is_file() and not path.is_symlink():
            info = path.lstat()
            found[str(path)] = (info.st_mode, info.st_mtime_ns, hashlib.sha256(path.read_bytes()).hexdigest())
    return found


async def test_e27_the_base_layer_stays_as_it_is(engine, neighbour, tmp_path):
    """Whoever may write in one sandbox (here as root inside, on a directory of our own) changes nothing for another."""
    root = tmp_path / "image"
    shutil.copytree(small_directory(), root, symlinks=True)
    before = digests(root)
    spec = untax.EnvSpec(image=f"dir:{root}")
    async with engine.lease(spec) as one, engine.lease(spec) as two:
        for user in (None, "root"):
            try:
                await one.shell("echo x >>/usr/bin/env; chmod 4755 /bin/sh; rm -f /usr/bin/wc; echo y >/etc/passwd", user=user)
            except untax.UsageError:
                continue  # this host gives a sandbox one user only
        result = await two.shell("sha256sum </usr/bin/env; stat -c %a /bin/bash /bin/sh; echo a | wc -l")
        expected = hashlib.sha256((root / "usr/bin/env").read_bytes()).hexdigest()

    assert result.text.split() == [expected, "-", "755", "755", "1"]
    assert digests(root) == before


async def test_e28_the_state_directory_is_closed_to_others(box, state_dir, as_root):
    """As another user of the host: nothing below the top can be listed, and no set-uid file is reachable."""
    await box.shell("cp $(command -v id) sid; chmod 6755 sid")
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    # pytest's own directory is 0700 already; what counts is the mode of ours.
    assert state_dir.stat().st_mode & 0o077 == 0
    listed = subprocess.run([*drop, "find", str(state_dir), "-maxdepth", "3"], capture_output=True, text=True)
    assert "Permission denied" in listed.stderr
    assert listed.stdout.strip() in ("", str(state_dir))


async def test_e30_the_evidence_matches_the_level_s_name(box):
    """A namespace sandbox shares the host's kernel, and says so."""
    inside = (await box.shell("cat /proc/sys/kernel/random/boot_id; uname -r")).text.split()

    assert inside == [Path("/proc/sys/kernel/random/boot_id").read_text().strip(), os.uname().release]
    assert box.ledger.isolation == "namespace"
    assert box.ledger.substrate == "namespace"


async def test_the_root_user_inside_has_only_the_documented_capabilities(box):
    """Opt-in: chown, dac_override, fowner, fsetid, setuid, setgid in its own user namespace, and no more."""
    try:
        result = await box.shell("id -u; grep CapBnd /proc/self/status; mount -t tmpfs t /mnt; echo $?", user="root")
    except untax.UsageError as exc:
        pytest.skip(f"this host gives a sandbox one user only: {exc}")
    words = result.text.split()
    allowed = 1 << 0 | 1 << 1 | 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7

    assert words[0] == "0"
    assert int(words[2], 16) & ~allowed == 0
    assert words[3] != "0"


async def test_what_the_sandbox_s_root_makes_is_not_root_s_on_the_host(box, state_dir, as_root):
    """Unique ranges of unprivileged ids: a set-uid file in an upper directory never belongs to the host's root."""
    await box.shell("cp $(command -v id) /workspace/sid; chmod 4755 /workspace/sid; touch /workspace/mine")
    try:
        await box.shell("cp $(command -v id) /rootsid; chmod 4755 /rootsid", user="root")
    except untax.UsageError:
        pass
    owners = {}
    for agent in hostview.agents():
        top = Path(f"/proc/{agent.pid}/root")
        for path in (top / "workspace/sid", top / "rootsid"):
            try:
                owners[str(path)] = path.lstat().st_uid
            except OSError:
                pass
    assert owners
    assert 0 not in owners.values()
    assert min(owners.values()) >= 65_536


def test_the_agent_is_small_static_and_not_writable_by_others():
    path = Path(cell_path())
    said = subprocess.run(["ldd", path], capture_output=True, text=True)

    assert "not a dynamic" in said.stdout + said.stderr or "statically" in said.stdout
    assert path.stat().st_size < 1 << 20
    assert path.stat().st_mode & 0o022 == 0


async def test_the_agent_cannot_be_traced_or_read(box):
    """Not dumpable: no ptrace, no memory, no descriptors, also where agent and workload share one user."""
    code = (
        "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.ptrace(16, 1, 0, 0))\n"
        "for name in ('mem', 'environ', 'maps', 'root', 'cwd', 'exe', *(f'fd/{n}' for n in range(64))):\n"
        "    for look in (os.readlink, os.listdir, lambda p: open(p, 'rb').read(1), lambda p: open(p, 'r+b')):\n"
        "        try: look(f'/proc/1/{name}'); print('read', name)\n"
        "        except OSError: pass\n"
    )
    result = await python(box, code)

    assert result.text.splitlines()[0] == "-1"
    assert "read" not in result.text


async def test_a_hundred_cases_in_one_sandbox_do_not_wear_it_out(box):
    """Refusals cost nothing that adds up."""
    began = time.monotonic()
    await asyncio.gather(*(box.shell("unshare -m true; mount -t proc p /proc; kill -9 1") for _ in range(50)))
    assert (await box.run([sys.executable, "-c", "print(1)"])).exit_code in (0, 127)
    assert time.monotonic() - began < 30
