"""THREATS 4.2 in gVisor."""

import os
import subprocess
import time

from tests.security.test_resources import *  # noqa: F403
from tests.security.test_resources import python

# No kernel counts the forks that it refused here, and niceness is a number without effect; both are asked for below. A reset is a replacement.
del test_r1_a_fork_bomb_stops_at_the_process_limit, test_r2_threads_count_as_processes, test_r19_no_priority_can_be_taken  # noqa: F821
del test_r17_a_reset_takes_no_longer_for_many_files  # noqa: F821


async def test_r1_a_fork_bomb_stops_at_the_process_limit(engine, spec):
    box = await engine.acquire(spec)
    try:
        bomb = await box.start(["bash", "-c", ":(){ :|:& };:; sleep 5"])
        counts = [sum(entry.name.isdigit() for entry in await box.list("/proc")) for _ in range(20)]  # the cell itself still can
        assert subprocess.run(["true"]).returncode == 0  # the host can still fork
        assert max(counts) <= spec.limits.pids + 4  # and the cell's own
        bomb.kill()
    finally:
        began = time.monotonic()
        await box.release()
    assert time.monotonic() - began < 2


async def test_r2_threads_count_as_processes(box, spec):
    code = (
        "import threading\ne = threading.Event(); n = 0\n"
        "try:\n    while n < 100000:\n        threading.Thread(target=e.wait, daemon=True).start(); n += 1\n"
        "except RuntimeError: pass\nprint(n); e.set()\n"
    )
    result = await python(box, code, timeout_s=60)

    assert 0 < int(result.text) <= spec.limits.pids


async def test_r19_a_priority_taken_inside_is_none_on_the_host(box):
    from tests.security.gvisor.conftest import agents

    before = {one.pid: os.getpriority(os.PRIO_PROCESS, one.pid) for one in agents()}
    await box.shell("chrt -f 99 true; nice -n -20 true; ionice -c1 -n0 true; renice -n -20 $$")

    assert {pid: os.getpriority(os.PRIO_PROCESS, pid) for pid in before} == before
