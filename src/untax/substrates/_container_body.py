"""What an engine is asked to make: one container's description, in Docker's words and in Podman's own.

The two say the same: no network but loopback, no capability beyond what the cell needs to act for the users inside, our filter, our
masks, limits, no log, gone by itself when its first process ends. Pure data; the wording of THREATS 6.2 is the list to compare with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from untax.core.spec import Limits

CELL = "/.untax/cell"
"""Where the cell lies in every image that containers are made of."""

_MIB = 1 << 20
# The cell's own: to make directories for its user, to become one of the users inside, and to end its workers' bounding set.
# Workers for others than root have none of them, for root the first six.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID", "SETPCAP")
_CELL_PROCESSES = 2  # the agent and its worker are counted with the workload
_CPU_PERIOD_US = 100_000
_SHM_BYTES = 64 * _MIB
_MASKED = [
    *(f"/proc/{name}" for name in ("acpi", "asound", "interrupts", "kcore", "keys", "latency_stats", "sched_debug", "scsi", "timer_list", "timer_stats")),
    "/sys/firmware", "/sys/devices/virtual/powercap", "/sys/devices/system/cpu/vulnerabilities",
]  # fmt: skip
_READ_ONLY = [f"/proc/{name}" for name in ("bus", "fs", "irq", "sys", "sysrq-trigger")]
# Named one by one, and low: an engine's own defaults may be above what it is allowed to set.
_ULIMITS = {"core": 0, "nofile": 4096, "memlock": 64 << 10, "msgqueue": 800 << 10, "rtprio": 0, "nice": 0}
_PODMAN_NPROC = 16_384  # Podman would set its own default; the real limit is the group's


@dataclass(frozen=True, slots=True)
class Wanted:
    """One container."""

    name: str
    image: str
    user: str
    own: Sequence[str]
    labels: Mapping[str, str]
    limits: Limits
    runtime: str | None
    has_disk_limit: bool

    @property
    def command(self) -> list[str]:
        return ["agent", "--stdio", "--contained", "--user", self.user, *(part for place in self.own for part in ("--own", place))]

    @property
    def tmp_bytes(self) -> int:
        return max(self.limits.memory_mib * _MIB // 2, _MIB)


def docker_body(wanted: Wanted, profile: Mapping[str, Any]) -> dict[str, Any]:
    limits = wanted.limits
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "AutoRemove": True,
        "Init": False,
        "LogConfig": {"Type": "none"},
        "CapDrop": ["ALL"],
        "CapAdd": list(CAPABILITIES),
        "SecurityOpt": ["no-new-privileges", f"seccomp={json.dumps(profile)}"],
        "MaskedPaths": _MASKED,
        "ReadonlyPaths": _READ_ONLY,
        "Ulimits": [{"Name": name, "Soft": value, "Hard": value} for name, value in _ulimits(limits).items()],
        "ShmSize": _SHM_BYTES,
        "Tmpfs": {"/tmp": f"rw,exec,nosuid,nodev,mode=1777,size={wanted.tmp_bytes}"},
        **docker_limits(limits),
    }
    if wanted.runtime is not None:
        host["Runtime"] = wanted.runtime
    if wanted.has_disk_limit:
        host["StorageOpt"] = {"size": f"{limits.disk_mib}M"}
    return {
        "Image": wanted.image,
        "Hostname": wanted.name,
        "User": "0:0",
        "WorkingDir": "/",
        "Entrypoint": [CELL],
        "Cmd": wanted.command,
        "Labels": dict(wanted.labels),
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Healthcheck": {"Test": ["NONE"]},
        "StopSignal": "SIGKILL",  # as the first process the cell is deaf to others, and an engine would wait for it
        "HostConfig": host,
    }


def docker_limits(limits: Limits) -> dict[str, Any]:
    memory = limits.memory_mib * _MIB
    return {"Memory": memory, "MemorySwap": memory, "NanoCpus": round(limits.cpus * 1e9), "PidsLimit": limits.pids + _CELL_PROCESSES}


def podman_body(wanted: Wanted, profile_path: str) -> dict[str, Any]:
    body: dict[str, Any] = {
        "name": wanted.name,
        "image": wanted.image,
        "hostname": wanted.name,
        "user": "0:0",
        "work_dir": "/",
        "entrypoint": [CELL],
        "command": wanted.command,
        "labels": dict(wanted.labels),
        "stdin": True,
        "terminal": False,
        "remove": True,
        "init": False,
        "systemd": "false",
        "stop_timeout": 0,
        "stop_signal": 9,
        "log_configuration": {"driver": "none"},
        "healthconfig": {"Test": ["NONE"]},
        "netns": {"nsmode": "none"},
        "ipcns": {"nsmode": "private"},
        "cgroupns": {"nsmode": "private"},
        "cap_drop": ["ALL"],
        "cap_add": [f"CAP_{name}" for name in CAPABILITIES],
        "no_new_privileges": True,
        "seccomp_profile_path": profile_path,
        "mask": _MASKED,
        "image_volume_mode": "tmpfs",
        "shm_size": _SHM_BYTES,
        "mounts": [
            {"destination": "/tmp", "type": "tmpfs", "source": "tmpfs",
             "options": ["rw", "exec", "nosuid", "nodev", "mode=1777", f"size={wanted.tmp_bytes}"]},
        ],
        "r_limits": [
            {"type": name, "soft": value, "hard": value}
            for name, value in {**_ulimits(wanted.limits), "nproc": _PODMAN_NPROC}.items()
        ],
        "resource_limits": podman_limits(wanted.limits),
    }  # fmt: skip
    if wanted.runtime is not None:
        body["oci_runtime"] = wanted.runtime
    if wanted.has_disk_limit:
        body["storage_opts"] = {"size": f"{wanted.limits.disk_mib}M"}
    return body


def podman_limits(limits: Limits) -> dict[str, Any]:
    memory = limits.memory_mib * _MIB
    return {
        "memory": {"limit": memory, "swap": memory},
        "cpu": {"period": _CPU_PERIOD_US, "quota": max(1000, round(limits.cpus * _CPU_PERIOD_US))},
        "pids": {"limit": limits.pids + _CELL_PROCESSES},
    }


def _ulimits(limits: Limits) -> dict[str, int]:
    return {**_ULIMITS, "fsize": limits.disk_mib * _MIB}
