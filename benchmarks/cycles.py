"""Ten thousand create–run–destroy cycles leave this machine exactly as it was.

Counted before and after with the engine up, so that what it holds for itself is in both counts, and once more
after it has closed, against the count before it was started.
"""

import argparse
import asyncio
import os
import tempfile
import time
from pathlib import Path

from benchmarks import _census, _measure
from benchmarks._measure import Row

SETTLE_S = 5.0
AT_ONCE = 4  # some cycles overlap, as rollouts do; it also makes better use of two CPUs


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    count = arguments.count
    cycle_s: list[float] = []
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
        state = Path(place)
        async with _measure.engine_on(substrate, state) as engine, engine.lease(_measure.spec_for(substrate)):
            pass  # the first use lays out the state directory and keeps its image for the next
        outset = _census.take(state)
        async with _measure.engine_on(substrate, state) as engine:
            spec = _measure.spec_for(substrate)

            async def cycle() -> None:
                begin = time.perf_counter()
                async with engine.lease(spec) as box:
                    (await box.run(["true"])).check()
                cycle_s.append(time.perf_counter() - begin)

            async def several(times: int) -> None:
                for _ in range(times):
                    await cycle()

            async with engine.lease(spec):
                mark = _census.group_mark(_census.descendants(os.getpid()))
            # As many at once as later: what the engine keeps for each concurrent one is there before the count.
            await asyncio.gather(*(several(25) for _ in range(AT_ONCE)))
            await asyncio.sleep(1)
            before = _census.take(state, mark)
            cycle_s.clear()
            begin = time.perf_counter()
            await asyncio.gather(*(several(count // AT_ONCE) for _ in range(AT_ONCE)))
            rate = len(cycle_s) / (time.perf_counter() - begin)
            await asyncio.sleep(0.1)
            differs = await asyncio.to_thread(_census.wait_like, state, mark, before, SETTLE_S)
        after_close = await asyncio.to_thread(_census.wait_like, state, "", outset, SETTLE_S)
        groups = _census.groups_named(mark)
        if groups:
            after_close["cgroups"] = groups
    return [
        _measure.compare("one cycle", substrate, cycle_s, note=f"{AT_ONCE} at once, {rate:.0f} a second"),
        _measure.number(
            f"left after {len(cycle_s):,} cycles",
            substrate,
            sum(abs(change) for change in differs.values()),
            "things",
            budget="exactly as before",
            holds=not differs,
            note=f"{differs or before}",
        ),
        _measure.number(
            "left after close",
            substrate,
            sum(abs(change) for change in after_close.values()),
            "things",
            budget="exactly as before",
            holds=not after_close,
            note=f"{after_close}" if after_close else "",
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("cycles", __doc__, measure, count=10_000))
