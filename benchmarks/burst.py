"""A hundred leases at once: on a pool of a hundred, and where only twenty sandboxes may be at a time.

Each holder runs one command and releases. With twenty nobody may fail, and every wait must be explained in its ledger.
"""

import argparse
import asyncio
import time

import untax
from benchmarks import _measure
from benchmarks._measure import Row

P95_MS = 50.0
SMALL = 20


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    _measure.more_descriptors()
    spec = _measure.spec_for(substrate)
    count = arguments.count
    rows = []
    async with _measure.engine_on(substrate) as engine:
        await engine.warm(spec, count)
        boxes, took = await _burst(engine, spec, count)
        kinds = sorted({box.ledger.hit.kind for box in boxes if box.ledger.hit is not None})
        rows.append(
            _measure.compare(
                f"one of {count} leases at once, {count} warm",
                substrate,
                took,
                budget=f"≤ {P95_MS:g} ms at p95",
                holds=lambda row: row.p95 <= P95_MS,
                note=f"hits: {', '.join(kinds)}",
            )
        )
    async with _measure.engine_on(substrate, pool=untax.PoolOptions(entries=SMALL)) as engine:
        await engine.warm(spec, SMALL)
        boxes, took = await _burst(engine, spec, count)
        unexplained = [box for box in boxes if (hit := box.ledger.hit) is None or (hit.waited_s > 1e-3 and not hit.waited_for)]
        waits = sorted({hit.waited_for for box in boxes if (hit := box.ledger.hit) is not None and hit.waited_for})
        is_good = len(boxes) == count and not unexplained and all(box.ledger.verdict == "trusted" for box in boxes)
        rows.append(_measure.compare(f"one of {count} leases at once, {SMALL} at a time", substrate, took, note="; ".join(waits)))
        rows.append(
            _measure.number("failed or unexplained", substrate, count - len(boxes) + len(unexplained), "leases", budget="0", holds=is_good)
        )
    return rows


async def _burst(engine: untax.Engine, spec: untax.EnvSpec, count: int) -> tuple[list[untax.Box], list[float]]:
    async def one() -> tuple[untax.Box, float]:
        begin = time.perf_counter()
        async with engine.lease(spec) as box:
            took = time.perf_counter() - begin
            (await box.run(["true"])).check()
        return box, took

    done = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
    good = [one for one in done if not isinstance(one, BaseException)]
    return [box for box, _ in good], [took for _, took in good]


if __name__ == "__main__":
    raise SystemExit(_measure.main("burst", __doc__, measure, count=100, only=("namespace",)))
