"""What a container engine says about itself, for people: who answers, with which runtime, and what that leaves open."""

from __future__ import annotations

import http.client
import json
import re
import socket
from typing import Any

from untax.substrates._container_api import EngineKind

_PATIENCE_S = 3.0
# Escapes of 2025 (CVE-2025-31133, -52565, -52881): fixed from these on, or in a distribution's older one by a patch of its own.
_RUNC_FLOORS = {(1, 2): 8, (1, 3): 3}


def lines_about(engine: EngineKind, path: str) -> list[str]:
    """One line each. An engine that does not answer is said in one."""
    try:
        return _docker(path) if engine == "docker" else _podman(path)
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError) as exc:
        return [f"{engine} at {path} does not answer as it should: {exc}"]


def _docker(path: str) -> list[str]:
    version, info = _get(path, "/version"), _get(path, "/info")
    parts = {part["Name"]: part["Version"] for part in version.get("Components") or []}
    backing = dict(info.get("DriverStatus") or []).get("Backing Filesystem", "unknown")
    options = " ".join(info.get("SecurityOptions") or [])
    return [
        f"docker {version['Version']} at {path}, runtime {info['DefaultRuntime']} {parts.get(info['DefaultRuntime'], '')}".rstrip(),
        *_runtime_advice(info["DefaultRuntime"], parts.get("runc", "")),
        *(
            [f"other runtimes: {', '.join(others)}"]
            if (others := sorted(set(info.get("Runtimes") or {}) - {info["DefaultRuntime"]}))
            else []
        ),
        f"storage {info['Driver']} on {backing}, control groups v{info.get('CgroupVersion', '?')}",
        _identity("name=userns" in options, "name=rootless" in options, "set userns-remap in the daemon's configuration"),
    ]


def _podman(path: str) -> list[str]:
    info = _get(path, "/v4.0.0/libpod/info")
    host, store = info["host"], info["store"]
    runtime = host["ociRuntime"]
    number = re.search(r"version (\S+)", runtime.get("version", ""))
    version = number[1] if number else ""
    backing = (store.get("graphStatus") or {}).get("Backing Filesystem", "unknown")
    return [
        f"podman {info['version']['Version']} at {path}, runtime {runtime['name']} {version}".rstrip(),
        *_runtime_advice(runtime["name"], version),
        f"storage {store['graphDriverName']} on {backing}, control groups {host.get('cgroupVersion', '?')}",
        _identity(False, bool(host["security"].get("rootless")), "use a rootless service"),
    ]


def _runtime_advice(name: str, version: str) -> list[str]:
    number = re.match(r"(\d+)\.(\d+)\.(\d+)", version)
    if name != "runc" or number is None:
        return []
    major, minor, patch = (int(part) for part in number.groups())
    is_fixed = (major, minor) > max(_RUNC_FLOORS) or patch >= _RUNC_FLOORS.get((major, minor), 1 << 30)
    return (
        []
        if is_fixed
        else [f"runc {version} is below 1.2.8 and 1.3.3 (CVE-2025-31133 and others); update it, unless your distribution has patched it"]
    )


def _identity(is_remapped: bool, is_rootless: bool, remedy: str) -> str:
    if is_rootless:
        return "rootless: root inside is an ordinary user of the host"
    return "user ids are remapped" if is_remapped else f"user ids inside are the host's own; to have them apart, {remedy}"


def _get(path: str, target: str) -> Any:
    connection = http.client.HTTPConnection("localhost", timeout=_PATIENCE_S)
    connection.sock = socket.socket(socket.AF_UNIX)
    try:
        connection.sock.settimeout(_PATIENCE_S)
        connection.sock.connect(path)
        connection.request("GET", target)
        answer = connection.getresponse()
        if answer.status != 200:
            raise http.client.HTTPException(f"HTTP {answer.status}")
        return json.loads(answer.read(16 << 20))
    finally:
        connection.close()
