"""What this machine lets the namespace substrate do, and what to do about what it does not."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path

from untax.core.substrate import Unenforced
from untax.substrates._claims import mkfs_btrfs
from untax.substrates._host import is_host_root

_MEMORY, _PIDS, _CPU = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Host:
    """What the launcher found it can do here."""

    is_root: bool
    abilities: int
    disk_mode: int
    disk_reason: str


def change_refused(name: str) -> Unenforced:
    """A limit that holds, but could not be changed to what was asked for."""
    reason = "the kernel refused to change it; more than that is in use, perhaps"
    return Unenforced(name, reason, "lease a sandbox that is created with this limit")


def unenforced(host: Host, *, in_memory: bool) -> list[Unenforced]:
    if host.is_root:
        remedy = "mount the cgroup controllers (cgroup v2, or v1 with memory, pids and cpu)"
    else:
        remedy = "run the engine as root, or under `systemd-run --user --scope -p Delegate=yes`"
    missing = [
        Unenforced(name, "no writable control group with this controller", remedy)
        for name, ability in (("memory_mib", _MEMORY), ("cpus", _CPU))
        if not host.abilities & ability
    ]
    if not host.abilities & _PIDS and _kernel() < (5, 14):
        missing.append(Unenforced("pids", "no writable control group, and this kernel counts processes per user only", remedy))
    if host.disk_mode == 0 and not in_memory:
        tools = "install btrfs-progs, " if host.is_root and mkfs_btrfs() is None else ""
        as_root = "" if host.is_root else "run the engine as root, "
        remedy = f"{tools}{as_root}keep state_dir on a file system with project quotas, or use Engine(disk='tmpfs')"
        missing.append(Unenforced("disk_mib", host.disk_reason, remedy))
    return missing


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def userns_reason() -> str | None:
    if read_number("/proc/sys/user/max_user_namespaces") == 0:  # binds root as well
        return "user namespaces are switched off; sysctl -w user.max_user_namespaces=15000"
    if not is_host_root() and read_number("/proc/sys/kernel/unprivileged_userns_clone") == 0:
        return "user namespaces are for root only here; sysctl -w kernel.unprivileged_userns_clone=1, or run as root"
    return None


_FORBIDDEN = "the kernel, a container or a security module forbids it; run on the host itself, or allow user namespaces and mounts there"
_REMEDIES = {
    errno.ENOSPC: "a limit of the kernel or the disk is reached: free space in the state directory, or raise user.max_*_namespaces",
    errno.EDQUOT: "free space in the state directory",
    errno.EROFS: "the state directory is read-only; make it writable or name another with state_dir=…",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine; raise fs.file-max",
    errno.EAGAIN: "too many processes; raise the limit (ulimit -u) or close sandboxes",
    errno.EUSERS: "too many live sandboxes in this engine; release some",
    errno.EPERM: _FORBIDDEN,
    errno.EACCES: _FORBIDDEN,
}


def remedy(error: int | None) -> str:
    return _REMEDIES.get(error or 0, "run `untax doctor`")
