"""What a killed agent left is removed by a process that outlives it, and by nobody where there is nothing to remove or somebody else is at it."""

import os
from pathlib import Path

import pytest
from tests.hostview import until
from tests.serving import script

from untax import substrates
from untax.cluster.reaper import swept
from untax.server.sole import only_server

AGENT = """
import asyncio, os, sys, untax
from pathlib import Path
from untax.cluster.reaper import Reaper
async def main(state, place, how):
    Path(place).mkdir()
    Path(place, "s").touch()
    for _ in range(20):  # as Ray's workers have
        os.open("/dev/null", os.O_RDONLY)
    reaper = Reaper("namespace", Path(state), Path(place))
    async with untax.Engine("namespace", state_dir=state, limits="warn") as engine, engine.lease() as box:
        await box.shell("sleep 1000 & echo")
        print(os.getpid(), flush=True)
        if how == "kill":
            await asyncio.sleep(1000)
    reaper.done()
asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture
def state(tmp_path):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    return made


def reapers(state):
    """Processes that wait for the end of an agent of this state directory, or clean up after it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"untax.cluster.reaper" in words and str(state).encode() in words:
            found.append(int(path.parent.name))
    return found


def left(state, pid):
    """Directories and mounts of the agent's engine, and its control groups."""
    found = [str(path) for path in (state / "namespace").glob("*engine-*")]
    found += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(state) in line]
    for base, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{base}/{name}" for name in names if f"engine-{pid}-" in name]
    return found


async def test_nothing_stays_of_an_agent_that_was_killed(state, tmp_path):
    process, line = await script(AGENT, str(state), str(tmp_path / "place"), "kill")
    try:
        assert left(state, int(line)) and reapers(state)
    finally:
        process.kill()
        await process.wait()
        process._transport.close()
    await until(lambda: not reapers(state))
    assert left(state, int(line)) == []
    assert not (tmp_path / "place").exists()


async def test_an_agent_that_ended_in_order_has_nobody_clean_up_after_it(state, tmp_path):
    process, line = await script(AGENT, str(state), str(tmp_path / "place"), "end")
    assert await process.wait() == 0
    process._transport.close()
    await until(lambda: not reapers(state))
    assert left(state, int(line)) == []
    assert (tmp_path / "place" / "s").exists()  # the agent's own to remove


async def test_where_another_agent_is_there_already_nothing_is_touched(state, tmp_path):
    (tmp_path / "place").mkdir()
    with only_server(str(state), "namespace"):
        await swept("namespace", state, tmp_path / "place")
    assert (tmp_path / "place").exists()
    await swept("namespace", state, tmp_path / "place")
    assert not (tmp_path / "place").exists()
