"""THREATS 3: what the host lacks.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.enginehost import Refused, engine_host


def doctor(prefix: list[str], tmp_path: Path) -> dict:
    root = Path(__file__).resolve().parents[3]
    env = {**os.environ, "PYTHONPATH": f"{root / 'src'}:{root}", "UNTAX_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [*prefix, sys.executable, "-m", "untax.cli", "doctor", "--json"], capture_output=True, text=True, env=env, timeout=60
    )
    assert done.stdout, done.stderr
    return json.loads(done.stdout)


def of_substrate(report: dict, name: str) -> dict:
    [found] = [s for s in report["substrates"] if s["name"] == name]
    return found


NO_USER_NAMESPACES = ["unshare", "-Ur", "sh", "-c", 'echo 0 >/proc/sys/user/max_user_namespaces && exec "$@"', "sh"]


async def test_x32_without_user_namespaces_the_level_is_unavailable_and_says_why(state, tmp_path):
    if subprocess.run(["unshare", "-Ur", "true"], capture_output=True).returncode:
        pytest.skip("needs unshare and user namespaces")
    with pytest.raises(Refused) as caught:
        async with engine_host(state, prefix=NO_USER_NAMESPACES) as host:
            await host.lease("a")
    assert caught.value.kind in ("SubstrateUnavailable", "CreateError"), caught.value
    assert "max_user_namespaces" in caught.value.message

    found = of_substrate(doctor(NO_USER_NAMESPACES, tmp_path), "namespace")
    assert "max_user_namespaces" in json.dumps(found)


async def test_x32_without_control_groups_limits_are_marked_and_strict_refuses(state, as_root):
    """Hidden in a mount namespace of our own."""
    hide = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"', "sh"]
    async with engine_host(state, prefix=hide) as host:
        await host.lease("a")
        marked = json.dumps(await host.call("ledger", box="a"))
    assert "memory_mib" in marked
    with pytest.raises(Refused) as caught:
        async with engine_host(state, prefix=hide, options={"limits": "strict"}) as host:
            await host.lease("a")
    assert caught.value.kind == "SubstrateUnavailable"
    assert "memory_mib" in caught.value.message


def test_x32_the_doctor_reports_every_substrate(tmp_path):
    report = doctor([], tmp_path)
    assert {"process", "namespace"} <= {s["name"] for s in report["substrates"]}
