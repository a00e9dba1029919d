"""Leases from a warm pool of which one sandbox in a hundred is killed while it is parked: none may see a dead one."""

import argparse
import os
import random
import signal
import time

import untax
from benchmarks import _measure
from benchmarks._measure import Row

POOL = 8
SHARE = 0.01


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    spec = _measure.spec_for(substrate)
    draws = random.Random(1)
    killed = failed = 0
    took: list[float] = []
    async with _measure.engine_on(substrate) as engine:
        await engine.warm(spec, POOL)
        for _ in range(arguments.count):
            parked = [entry for entry in engine.pooling.driver.parked() if entry.sandbox.id]
            if parked and draws.random() < SHARE:
                os.kill(draws.choice(parked).sandbox.agent_pid, signal.SIGKILL)  # type: ignore[attr-defined]
                killed += 1
            begin = time.perf_counter()
            try:
                async with engine.lease(spec) as box:
                    (await box.run(["true"])).check()
                    took.append(time.perf_counter() - begin)
            except untax.UntaxError:
                failed += 1
        status = engine.pools()
    note = f"{killed} killed; {status.rejected} found dead at hand-out, {status.died} before; {status.exact} exact, {status.cold} cold"
    return [
        _measure.compare("warm lease to first result", substrate, took, note=note),
        _measure.number("leases that saw a dead one", substrate, failed, "leases", budget="0", holds=failed == 0),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("parked_kills", __doc__, measure, count=10_000, only=("namespace",)))
