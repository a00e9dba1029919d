"""Root that is not the machine's: in a user namespace of its own, or without the right to mount. Both have what an ordinary user has."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import untax

_PROGRAM = """
import asyncio, sys, untax
async def main():
    async with untax.Engine("namespace", state_dir=sys.argv[1]) as engine, engine.lease() as box:
        print(*(await box.run(["cat", "/proc/self/uid_map"])).text.split())
asyncio.run(main())
"""


@pytest.mark.parametrize(
    "prefix", [["unshare", "-Ur"], ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-all"]], ids=["namespace", "no-mount"]
)
def test_it_has_sandboxes_as_an_ordinary_user_has(prefix, tmp_path):
    """The kernel's own answer decides, not the number 0: one user id, and everything else works."""
    if os.geteuid() != 0 and prefix[0] == "setpriv":
        pytest.skip("giving up a capability needs root")
    if shutil.which(prefix[0]) is None:
        pytest.skip(f"needs {prefix[0]}")
    ran = subprocess.run(
        [*prefix, sys.executable, "-c", _PROGRAM, str(tmp_path / "state")],
        env={**os.environ, "PYTHONPATH": str(Path(untax.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ran.returncode == 0, ran.stderr
    assert (ran.stdout.split()[0], ran.stdout.split()[2]) == ("1000", "1")  # one id, and not a range of the machine's
