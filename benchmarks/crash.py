"""`kill -9` of an engine with fifty live sandboxes: how soon nothing is left once the next engine starts.

The engine runs in a process of its own, which says when all sandboxes are busy. One crash takes some 1.5 s, so 200 of them are
five minutes on each substrate.
"""

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import _census, _measure
from benchmarks._measure import Row

LIVE = 50
GONE_S = 10.0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--victim", metavar="DIR", help=argparse.SUPPRESS)


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    if arguments.victim is not None:
        await _be_killed(substrate, arguments.victim)
        return []
    gone: list[float] = []
    dead: list[float] = []
    left = ""
    for _ in range(arguments.count):
        with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
            dead_s, gone_s, left_now = await _one(substrate, Path(place))
        dead.append(dead_s)
        gone.append(gone_s)
        left = left_now or left
    return [
        _measure.compare(f"processes of {LIVE} sandboxes dead after kill -9", substrate, dead),
        _measure.compare(
            "nothing left after the next start",
            substrate,
            gone,
            budget=f"≤ {GONE_S:g} s, every time",
            holds=lambda _: not left and max(gone) <= GONE_S,
            note=left or "processes, mounts, groups, directories",
        ),
    ]


async def _be_killed(substrate: str, state_dir: str) -> None:
    """The victim: an engine whose sandboxes all run something and hold files, until the signal comes."""
    async with _measure.engine_on(substrate, Path(state_dir)) as engine:
        for _ in range(LIVE):
            box = await engine.acquire(_measure.spec_for(substrate))
            (await box.shell("echo busy > file; sleep 600 & sleep 600 &")).check()
        print("ready", flush=True)
        await asyncio.sleep(600)


async def _one(substrate: str, state: Path) -> tuple[float, float, str]:
    victim = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "benchmarks.crash", "--substrate", substrate, "--victim", str(state)),
        cwd=Path(__file__).resolve().parent.parent,
        stdout=asyncio.subprocess.PIPE,
    )
    assert victim.stdout is not None
    if await victim.stdout.readline() != b"ready\n":
        raise SystemExit(f"crash: the victim ended early with {await victim.wait()}")
    pids = _census.descendants(victim.pid)
    mark = _census.group_mark(pids)
    doomed, counted = _census.Doomed(pids), _census.Doomed(pids)
    os.kill(victim.pid, signal.SIGKILL)
    await victim.wait()
    ended = await asyncio.to_thread(counted.wait_gone, GONE_S)
    begin = time.perf_counter()
    async with _measure.engine_on(substrate, state) as engine:
        dead = await asyncio.to_thread(doomed.wait_gone, GONE_S)
        holding = _own(state)
        while (left := _left(state, mark, holding)) and time.perf_counter() - begin < GONE_S:
            await asyncio.sleep(0.01)
        gone_s = time.perf_counter() - begin
        async with engine.lease(_measure.spec_for(substrate)) as box:
            (await box.run(["true"])).check()  # and the next one works
    if dead is None:
        left += f" processes {dict(_census.commands(pids))}"
    return ended if ended is not None else GONE_S, gone_s, left


def _own(state: Path) -> str:
    """The directory of this engine below the state directory: the one that bears our process number."""
    return next((path.name for path in state.glob(f"engine-{os.getpid()}-*")), "")


def _left(state: Path, mark: str, holding: str) -> str:
    """What of the dead engine is still there, in words; empty when nothing is."""
    found = []
    if groups := _census.groups_named(mark):
        found.append(f"{groups} groups")
    if directories := [path.name for path in state.glob("engine-*") if path.name != holding]:
        found.append(f"directories {directories}")
    with open("/proc/self/mountinfo") as mounts:
        if count := sum(str(state) in line and (not holding or holding not in line) for line in mounts):
            found.append(f"{count} mounts")
    return ", ".join(found)


if __name__ == "__main__":
    raise SystemExit(_measure.main("crash", __doc__, measure, count=200, options=options))
