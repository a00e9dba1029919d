"""Fork: from a snapshot to a sandbox in hand, with 1 GiB written below it and with nothing; and a hundred in one call.

The span ends when the child's channel is open, which is when a rollout can act. Each child of the hundred writes a
token of its own, and none may see another's.
"""

import argparse
import asyncio
import time

import untax
from benchmarks import _measure
from benchmarks._measure import Row

EACH_MS = 5.0  # DESIGN §8
FLAT = 1.2
MANY = 100
MANY_S = 0.5
WRITTEN_MIB = 1024
LIMITS = untax.Limits(disk_mib=2 * WRITTEN_MIB)


async def _snapshot_of(engine: untax.Engine, spec: untax.EnvSpec, script: str) -> untax.Snapshot:
    async with engine.lease(spec, limits=LIMITS) as box:
        (await box.shell(script)).check()
        return await box.snapshot()


async def _fork_s(engine: untax.Engine, snapshot: untax.Snapshot) -> float:
    begin = time.perf_counter()
    async with engine.fork(snapshot, 1):
        return time.perf_counter() - begin


async def _many(engine: untax.Engine, snapshot: untax.Snapshot) -> tuple[float, int]:
    """Seconds for all of them, and how many saw what they should not have."""
    begin = time.perf_counter()
    async with engine.fork(snapshot, MANY) as group:
        took = time.perf_counter() - begin
        await asyncio.gather(*(box.write(f"token-{i}", str(i).encode()) for i, box in enumerate(group)))
        seen = await asyncio.gather(*(box.list() for box in group))
    wrong = sum({e.name for e in entries if e.name.startswith("token-")} != {f"token-{i}"} for i, entries in enumerate(seen))
    return took, wrong


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    spec = _measure.spec_for(substrate)
    async with _measure.engine_on(substrate) as engine:
        empty = await _snapshot_of(engine, spec, "true")
        full = await _snapshot_of(engine, spec, f"head -c {WRITTEN_MIB}M /dev/zero > large")
        small: list[float] = []
        large: list[float] = []
        for turn in range(arguments.count + _measure.WARM_UP):
            order = [(small, empty), (large, full)]
            for samples, snapshot in order if turn % 2 else order[::-1]:
                samples.append(await _fork_s(engine, snapshot))
        small, large = small[_measure.WARM_UP :], large[_measure.WARM_UP :]
        rounds = [await _many(engine, full) for _ in range(max(1, arguments.count // 20))]
    ratio = _measure.percentile(large, 0.5) / _measure.percentile(small, 0.5)
    many_s = [took for took, _ in rounds]
    return [
        _measure.compare(
            f"fork over {WRITTEN_MIB} MiB", substrate, large, budget=f"≤ {EACH_MS:g} ms at p50", holds=lambda row: row.p50 <= EACH_MS
        ),
        _measure.number("÷ fork over nothing", substrate, ratio, "×", budget=f"≤ {FLAT:g} ×", holds=ratio <= FLAT),
        _measure.compare(
            f"{MANY} forks in one call",
            substrate,
            many_s,
            budget=f"≤ {MANY_S:g} s at p50, none sees another's",
            holds=lambda row: row.p50 <= MANY_S * 1e3 and not any(wrong for _, wrong in rounds),
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("fork", __doc__, measure, count=200, only=("namespace",)))
