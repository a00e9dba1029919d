"""Cold create: from asking for a sandbox until the result of its first `true`, beside `subprocess.run(["true"])`.

The span holds everything a rollout waits for: namespaces, overlay, limits, agent, channel, the command and its
answer. The sandbox's end is outside; `destroy.py` has it.
"""

import argparse
import time

from benchmarks import _measure
from benchmarks._measure import Row

RATIO = 5.0  # DESIGN §8


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    spec = _measure.spec_for(substrate)
    async with _measure.engine_on(substrate) as engine:

        async def create() -> float:
            begin = time.perf_counter()
            box = await engine.acquire(spec)
            try:
                (await box.run(["true"])).check()
                return time.perf_counter() - begin
            finally:
                await box.release()

        ours, native = await _measure.interleaved(arguments.count, create)
    return [
        _measure.compare(
            "cold create to first result",
            substrate,
            ours,
            native,
            budget=f"≤ {RATIO:g} × native at p50",
            holds=lambda row: row.ratio is not None and row.ratio <= RATIO,
        )
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("cold_create", __doc__, measure, count=300))
