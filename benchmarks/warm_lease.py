"""A lease from a warm pool until the result of its first `true`, beside `subprocess.run(["true"])`; with a repository and dependencies too.

Between two samples the pool fills up again, as it does between rollouts: what is measured is a hit.
"""

import argparse
import tempfile
import time
from pathlib import Path

import untax
from benchmarks import _measure
from benchmarks._measure import Row
from benchmarks.stages import repository

P50, P95 = 1.5, 3.0  # × native
POOL = 4


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="untax-bench-repo-") as place:
        cases = {"warm lease to first result": _measure.spec_for(substrate)}
        if substrate == "namespace":
            setup = ("mkdir -p /opt/deps && for i in $(seq 200); do echo x = $i > /opt/deps/module$i.py; done",)
            cases["the same, dependencies warm"] = _measure.spec_for(substrate, repo=repository(Path(place)), setup=setup)
        async with _measure.engine_on(substrate) as engine:
            rows = []
            for what, spec in cases.items():
                await engine.warm(spec, POOL)
                rows += await _case(arguments.count, engine, spec, what, substrate)
                await engine.warm(spec, 0)
    return rows


async def _case(count: int, engine: untax.Engine, spec: untax.EnvSpec, what: str, substrate: str) -> list[Row]:
    leases: list[float] = []
    kinds: set[str] = set()

    async def lease() -> float:
        begin = time.perf_counter()
        box = await engine.acquire(spec)
        leased = time.perf_counter()
        (await box.run(["true"])).check()
        took = time.perf_counter() - begin
        leases.append(leased - begin)
        assert box.ledger.hit is not None
        kinds.add(box.ledger.hit.kind)
        await box.release()
        await engine.warm(spec, POOL)
        return took

    ours, native = await _measure.interleaved(count, lease)

    def holds(row: Row) -> bool:
        assert row.native_p50 is not None
        assert row.native_p95 is not None
        return row.p50 <= P50 * row.native_p50 and row.p95 <= P95 * row.native_p95

    budget = f"≤ {P50:g} × native at p50, {P95:g} × at p95"
    return [
        _measure.compare(what, substrate, ours, native, budget=budget, holds=holds, note=f"hits: {', '.join(sorted(kinds))}"),
        _measure.compare("  of it the lease", substrate, leases[_measure.WARM_UP :]),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("warm_lease", __doc__, measure, count=300))
