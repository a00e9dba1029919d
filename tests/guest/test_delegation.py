"""An ordinary user to whom part of the cgroup v2 tree was given has every limit but the disk's. Runs in the guest only: tests/guest/run.

What a service manager does for `Delegate=yes` is done by hand: the user gets a group and its control files, and sits in a
leaf of it.
"""

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = 4321
TREE = Path("/sys/fs/cgroup")

THREADS = """
import threading
over = threading.Event()
try:
    for n in range(300):
        threading.Thread(target=over.wait, daemon=True).start()
except RuntimeError:
    pass
print(n)
over.set()
"""

SPIN = """
import time
began, used = time.monotonic(), time.process_time()
while time.monotonic() - began < 4:
    pass
print((time.process_time() - used) / (time.monotonic() - began))
"""

INSIDE = """
import asyncio, json, sys, untax

async def main():
    spec = untax.EnvSpec(limits=untax.Limits(memory_mib=128, pids=40, cpus=0.5))
    async with untax.Engine("namespace", state_dir=sys.argv[1]) as engine:
        for _ in range(2):  # the second one stands on what was made ahead
            async with engine.lease(spec) as box:
                oom = await box.run(["python3", "-c", "x = bytearray(1 << 30)"], timeout_s=120)
                spin = await box.run(["python3", "-c", sys.argv[2]], timeout_s=60)
                crowd = await box.run(["python3", "-c", sys.argv[3]], timeout_s=120)
        async with engine.lease(spec) as box:
            await box._sandbox.bind_limits(untax.Limits(memory_mib=512, pids=40, cpus=1.0))
            more = await box.run(["python3", "-c", "x = bytearray(200 << 20)"], timeout_s=120)
            await box.pause()
            await box.resume()
            lacking = [limit.name for limit in box.ledger.unenforced]
    print(json.dumps({"oom": oom.outcome, "crowd": crowd.limit_kind, "threads": int(crowd.text), "share": float(spin.text), "more": more.outcome, "lacking": lacking}))

asyncio.run(main())
"""


@pytest.fixture
def delegated():
    if not os.environ.get("UNTAX_GUEST"):
        pytest.skip("guest: this is not the guest")
    group = TREE / f"delegated-{os.getpid()}"
    leaf = group / "session"
    leaf.mkdir(parents=True)
    for path in (group, leaf, *(d / name for d in (group, leaf) for name in ("cgroup.procs", "cgroup.threads", "cgroup.subtree_control"))):
        os.chown(path, USER, USER)
    yield leaf
    left = [str(d) for d, _, _ in os.walk(group) if Path(d) not in (group, leaf)]
    for directory in sorted((*left, str(leaf), str(group)), key=len, reverse=True):
        os.rmdir(directory)
    assert not left


@pytest.mark.timeout(540)  # under emulation
def test_r3_limits_hold_for_a_user_with_a_delegated_group(delegated, tmp_path):
    home = Path("/mnt/guest/tmp/delegate")
    home.mkdir()
    os.chown(home, USER, USER)

    def become() -> None:
        (delegated / "cgroup.procs").write_text(str(os.getpid()))
        os.setgroups([])
        os.setgid(USER)
        os.setuid(USER)

    done = subprocess.run(
        ["/usr/bin/python3", "-c", INSIDE, str(home / "state"), SPIN, THREADS],
        preexec_fn=become,
        cwd="/",
        env={
            "PATH": "/usr/bin:/bin",
            "HOME": str(home),
            "TMPDIR": str(home),
            "PYTHONPATH": str(ROOT / "src"),
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    seen = json.loads(done.stdout)
    assert (seen["oom"], seen["crowd"], seen["more"]) == ("oom", "pids", "exited"), seen
    assert seen["threads"] <= 40
    assert 0 < seen["share"] < 0.5 * 1.4, seen
    assert seen["lacking"] == ["disk_mib"]
