"""Destroy: how long `release` keeps its caller, and how long until everything of the sandbox is gone.

Each sandbox has run commands, holds files and a few processes of its own when it is released.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from benchmarks import _census, _measure
from benchmarks._measure import Row

RETURNS_MS = 2.0
GONE_S = 1.0
LEFT_RUNNING = 5  # processes
FILES = 50


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    returned: list[float] = []
    gone: list[float] = []
    unfinished: dict[str, int] = {}
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
        state = Path(place)
        async with _measure.engine_on(substrate, state) as engine:
            first = await engine.acquire(_measure.spec_for(substrate))
            mark = _census.group_mark(_census.descendants(os.getpid()))
            await asyncio.to_thread(_census.settled, state, mark)  # what it makes ahead of need while one is live, it keeps
            await first.release()
            settled = await asyncio.to_thread(_census.settled, state, mark)
            for turn in range(arguments.count + _measure.WARM_UP):
                before = set(_census.descendants(os.getpid()))
                box = await engine.acquire(_measure.spec_for(substrate))
                script = f"for i in $(seq {FILES}); do echo $i > file$i; done; for i in $(seq {LEFT_RUNNING}); do sleep 600 & done"
                (await box.shell(script)).check()
                doomed = _census.Doomed(set(_census.descendants(os.getpid())) - before)
                begin = time.perf_counter()
                await box.release()
                release_s = time.perf_counter() - begin
                # In a thread: the engine's own loop has the last word on a released box.
                ended = await asyncio.to_thread(doomed.wait_gone, GONE_S)
                differs = await asyncio.to_thread(_census.wait_like, state, mark, settled, GONE_S)
                if turn >= _measure.WARM_UP:
                    returned.append(release_s)
                    gone.append(time.perf_counter() - begin)
                    if ended is None or differs:
                        unfinished = differs or {"processes": 1}
    note = f"after {GONE_S:g} s still: {unfinished}" if unfinished else "processes, namespaces, mounts, groups, descriptors, directories"
    return [
        _measure.compare(
            "release returns",
            substrate,
            returned,
            budget=f"≤ {RETURNS_MS:g} ms at p50",
            holds=lambda row: row.p50 <= RETURNS_MS,
        ),
        _measure.compare(
            "everything is gone",
            substrate,
            gone,
            budget=f"≤ {GONE_S:g} s, every time",
            holds=lambda _: not unfinished and max(gone) <= GONE_S,
            note=note,
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("destroy", __doc__, measure, count=200))
