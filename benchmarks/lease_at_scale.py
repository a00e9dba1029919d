"""A warm lease with one live sandbox and with a thousand."""

import argparse
import asyncio
import time

import untax
from benchmarks import _measure
from benchmarks._measure import Row

RATIO = 1.5
SAMPLES = 100
POOL = 4


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    _measure.more_descriptors()
    spec = _measure.spec_for(substrate)
    async with _measure.engine_on(substrate) as engine:
        await engine.warm(spec, POOL)
        few = await _leases(engine, spec)
        held: list[untax.Box] = []
        while len(held) < arguments.count:
            held += await asyncio.gather(*(engine.acquire(spec) for _ in range(min(50, arguments.count - len(held)))))
        await engine.warm(spec, POOL)
        many = await _leases(engine, spec)
    ratio = _measure.percentile(many, 0.5) / _measure.percentile(few, 0.5)
    return [
        _measure.compare("warm lease, one live", substrate, few),
        _measure.compare(f"warm lease, {arguments.count:,} live", substrate, many),
        _measure.number("many ÷ one", substrate, ratio, "×", budget=f"≤ {RATIO:g} ×", holds=ratio <= RATIO),
    ]


async def _leases(engine: untax.Engine, spec: untax.EnvSpec) -> list[float]:
    took = []
    for _ in range(SAMPLES + _measure.WARM_UP):
        begin = time.perf_counter()
        box = await engine.acquire(spec)
        took.append(time.perf_counter() - begin)
        (await box.run(["true"])).check()
        await box.release()
        await engine.warm(spec, POOL)
    return took[_measure.WARM_UP :]


if __name__ == "__main__":
    raise SystemExit(_measure.main("lease_at_scale", __doc__, measure, count=1000, only=("namespace",)))
