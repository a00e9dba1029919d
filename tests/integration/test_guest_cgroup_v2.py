"""The limit cases once more where cgroup v2 is all there is, which is what most users have.

The hosts that run our tests may have v1 or hybrid groups, so these run in a virtual machine (tests/guest/run).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_CASES = ROOT / "tests" / "security" / "test_resources.py"
DEADLINE_S = 420  # under emulation on two cores


@pytest.mark.slow
@pytest.mark.timeout(DEADLINE_S + 90)
def test_limits_hold_on_a_host_with_cgroup_v2_only():
    """Memory, process, CPU and disk limits end in the outcomes of their names, and the agent survives each."""
    if os.environ.get("UNTAX_GUEST"):
        pytest.skip("guest: this is the guest")
    if os.geteuid() != 0:
        pytest.skip("guest: needs root, to read the kernel and to share the host's files with the guest")
    if not LIMIT_CASES.exists():
        pytest.skip("guest: the limit cases are not part of this tree")
    done = subprocess.run(
        [ROOT / "tests" / "guest" / "run", "-v", str(LIMIT_CASES.relative_to(ROOT))],
        env={
            **os.environ,
            "PYTHON": sys.executable,
            "UNTAX_GUEST_DEADLINE_S": str(DEADLINE_S),
            "UNTAX_REQUIRE": "namespace,cgroup",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=DEADLINE_S + 60,
    )
    if done.returncode == 77:
        pytest.skip(done.stderr.strip())
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-4_000:]
