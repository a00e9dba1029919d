"""What this machine is, as far as sandboxes and measurements care. Reads only; changes nothing.

Each finding says what was found, whether it stands in the way, and what to do when it does. Measurements carry them.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["ok", "note", "warn", "bad"]

_LEAST_FREE_MIB = 1024
_LEAST_FREE_INODES = 100_000

# Run by an interpreter of its own, because a process cannot leave a user namespace that it has entered.
_OVERLAY_TRIAL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
def call(step, result):
    if result != 0:
        sys.exit(f"{step}: {os.strerror(ctypes.get_errno())}")
CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
os.chdir(sys.argv[1])
for name in ("lower", "upper", "work", "merged"):
    os.mkdir(name)
ids = {"setgroups": "deny", "uid_map": f"0 {os.geteuid()} 1", "gid_map": f"0 {os.getegid()} 1"}
call("new user namespace", libc.unshare(CLONE_NEWUSER | CLONE_NEWNS))
for name, text in ids.items():  # an id that is not mapped cannot make the files that overlay wants
    with open("/proc/self/" + name, "w") as file:
        file.write(text)
call("mount overlay", libc.mount(b"overlay", b"merged", b"overlay", 0, b"lowerdir=lower,upperdir=upper,workdir=work,userxattr"))
"""


@dataclass(frozen=True, slots=True)
class Finding:
    name: str
    status: Status
    found: str
    remedy: str = ""


def findings(state_dir: Path) -> list[Finding]:
    """Everything that `untax doctor` says about the host itself."""
    return [
        _kernel(),
        _cgroups(),
        _user_namespaces(),
        _userns_restriction(),
        _overlay(),
        _kvm(),
        _smt(),
        _ksm(),
        _swap(),
        _io_uring(),
        _ptrace(),
        _lsms(),
        _space(state_dir),
        _inodes(state_dir),
        _journal(state_dir),
    ]


def facts() -> dict[str, Any]:
    """What every run says about its host."""
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_mib": _memory_mib(),
        "python": platform.python_version(),
        "untax": _own_version(),
        "root": hasattr(os, "geteuid") and os.geteuid() == 0,
        "cgroups": cgroup_mode(),
        "virtualised": "hypervisor" in (_read("/proc/cpuinfo") or ""),
        "load": [round(one, 2) for one in os.getloadavg()],
    }


def _cpu_model() -> str:
    lines = (_read("/proc/cpuinfo") or "").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor() or "unknown")


def _memory_mib() -> int | None:
    lines = (_read("/proc/meminfo") or "").splitlines()
    return next((int(line.split()[1]) >> 10 for line in lines if line.startswith("MemTotal:")), None)


def _own_version() -> str:
    import untax

    return untax.__version__


def as_json(found: list[Finding]) -> list[dict[str, str]]:
    return [asdict(finding) for finding in found]


def cgroup_mode() -> str:
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").is_file():
        return "v2"
    if (root / "unified" / "cgroup.controllers").is_file():
        return "hybrid"
    return "v1" if (root / "memory").is_dir() else "none"


def _kernel() -> Finding:
    release = platform.release()
    numbers = tuple(int(part) for part in release.split("-")[0].split(".")[:2] if part.isdigit())
    if numbers < (5, 12):
        return Finding("kernel", "bad", release, "Linux 5.12 or newer has the mount and pidfd calls that sandboxes need")
    return Finding("kernel", "ok", release)


def _cgroups() -> Finding:
    mode = cgroup_mode()
    remedies = {"none": "mount a cgroup hierarchy; until then memory, pids and cpu limits are not enforced"}
    return Finding("cgroups", "warn" if mode == "none" else "ok", mode, remedies.get(mode, ""))


def _user_namespaces() -> Finding:
    most = _read("/proc/sys/user/max_user_namespaces")
    if most is None:
        return Finding("user namespaces", "bad", "not in this kernel", "a kernel with CONFIG_USER_NS")
    if most == "0":
        return Finding("user namespaces", "bad", "limit 0", "sysctl -w user.max_user_namespaces=65536")
    if _read("/proc/sys/kernel/unprivileged_userns_clone") == "0" and os.geteuid() != 0:
        return Finding("user namespaces", "bad", "closed to ordinary users", "sysctl -w kernel.unprivileged_userns_clone=1")
    return Finding("user namespaces", "ok", f"limit {most}")


def _userns_restriction() -> Finding:
    restricted = _read("/proc/sys/kernel/apparmor_restrict_unprivileged_userns") == "1"
    if restricted and os.geteuid() != 0:
        remedy = "an AppArmor profile with `userns,` for the cell, or sysctl -w kernel.apparmor_restrict_unprivileged_userns=0"
        return Finding("user namespace restriction", "warn", "AppArmor restricts them", remedy)
    return Finding("user namespace restriction", "ok", "AppArmor restricts ordinary users only" if restricted else "none")


def _overlay() -> Finding:
    name = "overlay in a user namespace"
    with tempfile.TemporaryDirectory(prefix="untax-doctor-") as scratch:
        try:
            tried = subprocess.run([sys.executable, "-c", _OVERLAY_TRIAL, scratch], capture_output=True, timeout=10)
        except (OSError, subprocess.SubprocessError) as exc:
            return Finding(name, "warn", f"could not be tried: {exc}", "run untax doctor once more on a quieter machine")
    said = tried.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    if tried.returncode == 0:
        return Finding(name, "ok", "works")
    return Finding(
        name, "warn", said or f"exit {tried.returncode}", "modprobe overlay; Linux 5.11 or newer; see the lines on user namespaces"
    )


def _kvm() -> Finding:
    if not os.path.exists("/dev/kvm"):
        return Finding("KVM", "note", "no /dev/kvm", "virtual machines would be emulated; enable nested virtualisation")
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Finding("KVM", "note", "/dev/kvm is not yours", "add your user to the kvm group")
    return Finding("KVM", "ok", "/dev/kvm opens; whether it runs a guest, only a probe tells (see the substrate vm)")


def _smt() -> Finding:
    active = _read("/sys/devices/system/cpu/smt/active")
    if active == "1":
        return Finding("SMT", "note", "on", "neighbours share a core; for hostile tenants: echo off > /sys/devices/system/cpu/smt/control")
    return Finding("SMT", "ok", "off" if active == "0" else "unknown")


def _ksm() -> Finding:
    if _read("/sys/kernel/mm/ksm/run") == "1":
        return Finding("same-page merging", "warn", "on", "it leaks what neighbours hold: echo 2 > /sys/kernel/mm/ksm/run")
    return Finding("same-page merging", "ok", "off")


def _swap() -> Finding:
    lines = (_read("/proc/swaps") or "").splitlines()[1:]
    if lines:
        return Finding("swap", "note", f"{len(lines)} in use", "swapping bends measurements: swapoff -a")
    return Finding("swap", "ok", "none")


def _io_uring() -> Finding:
    setting = _read("/proc/sys/kernel/io_uring_disabled")
    words = {"0": "open to all", "1": "closed to ordinary users", "2": "off"}
    if setting == "0":
        return Finding(
            "io_uring", "note", words["0"], "sandboxes refuse it anyway; for everything else: sysctl -w kernel.io_uring_disabled=2"
        )
    return Finding("io_uring", "ok", words.get(setting or "", "no setting in this kernel"))


def _ptrace() -> Finding:
    setting = _read("/proc/sys/kernel/yama/ptrace_scope")
    words = {"0": "any process of the same user", "1": "descendants only", "2": "administrators only", "3": "nobody"}
    if setting in (None, "0"):
        return Finding("ptrace", "note", words["0"], "sysctl -w kernel.yama.ptrace_scope=1")
    return Finding("ptrace", "ok", words.get(str(setting), str(setting)))


def _lsms() -> Finding:
    return Finding("security modules", "ok", _read("/sys/kernel/security/lsm") or "cannot be read (securityfs is not mounted)")


def _space(state_dir: Path) -> Finding:
    found = _statvfs(state_dir)
    free_mib = found.f_bavail * found.f_frsize >> 20
    if free_mib < _LEAST_FREE_MIB:
        return Finding("free space", "warn", f"{free_mib} MiB below {state_dir}", "free some, or name another state_dir")
    return Finding("free space", "ok", f"{free_mib} MiB below {state_dir}")


def _inodes(state_dir: Path) -> Finding:
    found = _statvfs(state_dir)
    if found.f_files and found.f_favail < _LEAST_FREE_INODES:
        return Finding("free inodes", "warn", str(found.f_favail), "remove small files, or name another state_dir")
    return Finding("free inodes", "ok", str(found.f_favail) if found.f_files else "no fixed number")


def _journal(state_dir: Path) -> Finding:
    device, kind = _file_system_of(state_dir)
    if kind != "ext4":
        return Finding("state file system", "ok", kind)
    has_journal = any(Path("/proc/fs/jbd2").glob(f"{device}-*"))
    if has_journal:
        return Finding("state file system", "ok", "ext4 with a journal")
    remedy = "deleting many files makes it slower and slower; put state_dir on tmpfs, btrfs or an ext4 with a journal"
    return Finding("state file system", "warn", "ext4 without a journal", remedy)


def _file_system_of(path: Path) -> tuple[str, str]:
    """The kernel's name of the device, and the type, of the file system that holds `path`."""
    number = os.stat(existing(path)).st_dev
    wanted = f"{os.major(number)}:{os.minor(number)}"
    block = f"/sys/dev/block/{wanted}"
    device = os.path.basename(os.readlink(block)) if os.path.islink(block) else ""
    for line in (_read("/proc/self/mountinfo") or "").splitlines():
        fields, _, rest = line.partition(" - ")
        if fields.split()[2] == wanted:
            return device, rest.split()[0]
    return device, "unknown"


def _statvfs(path: Path) -> os.statvfs_result:
    return os.statvfs(existing(path))


def existing(path: Path) -> Path:
    """The nearest directory above that is there and can be looked at."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return path


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
