"""What runsc is asked to make: one sandbox's OCI description. Pure data; the wording of THREATS 6.3 is the list to compare with.

The root is a read-only image of the chain, which gVisor's own kernel reads itself: no helper process opens files of the host for it. What is
written lies above it in that kernel's memory, as does everything else that a sandbox has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from untax.core.spec import Limits
from untax.substrates._container_body import CAPABILITIES, CELL

_MIB = 1 << 20
_WORKERS = 1  # of the cell: they are counted with the user that they act for
_SHM_MIB = 64
_HINT = "dev.gvisor.spec.rootfs"
# The cell's own, to give a restored sandbox a name of its own and to end what takes too much memory; those who work for others have it no more than the rest.
_RIGHTS = [f"CAP_{name}" for name in (*CAPABILITIES, "SYS_ADMIN", "KILL")]
_RLIMITS = {"CORE": 0, "NOFILE": 4096, "MEMLOCK": 64 << 10, "MSGQUEUE": 800 << 10, "RTPRIO": 0, "NICE": 0}


@dataclass(frozen=True, slots=True)
class Wanted:
    """One sandbox."""

    name: str
    image: str
    """The chain's image, on the host."""
    user: str
    own: Sequence[str]
    limits: Limits

    @property
    def files_mib(self) -> int:
        """How much may be written: it is memory, so no more than there is of that."""
        return min(self.limits.disk_mib, self.limits.memory_mib)


def config(wanted: Wanted) -> dict[str, Any]:
    limits = wanted.limits
    rlimits = {**_RLIMITS, "NPROC": limits.pids + _WORKERS}
    tmp_bytes = max(limits.memory_mib * _MIB // 2, _MIB)
    return {
        "ociVersion": "1.0.0",
        "hostname": wanted.name,
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": "/",
            "args": [
                CELL,
                "agent",
                "--stdio",
                "--contained",
                "--told",
                "--user",
                wanted.user,
                *(part for one in wanted.own for part in ("--own", one)),
            ],
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "noNewPrivileges": True,
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), _RIGHTS),
            "rlimits": [{"type": f"RLIMIT_{name}", "soft": value, "hard": value} for name, value in rlimits.items()],
        },
        "root": {"path": "rootfs"},
        "annotations": {
            f"{_HINT}.source": wanted.image,
            f"{_HINT}.type": "erofs",
            f"{_HINT}.overlay": "memory",
            f"{_HINT}.options": f"size={wanted.files_mib * _MIB}",
        },
        "mounts": [
            _mount("/proc", "proc", "nosuid", "noexec", "nodev"),
            _mount("/dev", "tmpfs", "nosuid", "mode=755"),
            _mount("/dev/pts", "devpts", "nosuid", "noexec"),
            _mount("/dev/shm", "tmpfs", "nosuid", "nodev", "noexec", "mode=1777", f"size={_SHM_MIB * _MIB}"),
            _mount("/sys", "sysfs", "nosuid", "noexec", "nodev", "ro"),
            _mount("/tmp", "tmpfs", "nosuid", "nodev", "mode=1777", f"size={tmp_bytes}"),
        ],
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "network", "ipc", "uts", "mount")]},
    }


def _mount(where: str, kind: str, *options: str) -> Mapping[str, Any]:
    return {"destination": where, "type": kind, "source": kind, "options": list(options)}
