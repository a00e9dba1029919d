"""Cold create: from asking for a sandbox until the result of its first `true`, beside `subprocess.run(["true"])`.

The span holds everything a rollout waits for: namespaces, overlay, limits, agent, channel, the command and its
answer. The sandbox's end is outside; `destroy.py` has it. On `namespace` what was asked for before is made ahead (decision 0015), beside native too;
so native is also measured with nothing of ours at work, and creates over what nobody has asked for before are shown without a budget.
"""

import argparse
import asyncio
import dataclasses
import time

import untax
from benchmarks import _measure
from benchmarks._measure import Row

RATIO = 5.0  # DESIGN §8
SETTLE_S = 0.05  # what is made ahead after a create that found nothing shall not stand beside the next one


async def _create_s(engine: untax.Engine, spec: untax.EnvSpec) -> float:
    begin = time.perf_counter()
    box = await engine.acquire(spec)
    try:
        (await box.run(["true"])).check()
        return time.perf_counter() - begin
    finally:
        await box.release()


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    spec = _measure.spec_for(substrate)
    alone = [_measure.native_s() for _ in range(arguments.count + _measure.WARM_UP)][_measure.WARM_UP :]
    async with _measure.engine_on(substrate) as engine:
        ours, native = await _measure.interleaved(arguments.count, lambda: _create_s(engine, spec))
        firsts = []
        for turn in range(arguments.count // 5):
            await asyncio.sleep(SETTLE_S)
            firsts.append(await _create_s(engine, dataclasses.replace(spec, workdir=f"/first-{turn}")))

    return [
        _measure.compare(
            "cold create to first result",
            substrate,
            ours,
            native,
            budget=f"≤ {RATIO:g} × native at p50",
            holds=lambda row: row.ratio is not None and row.ratio <= RATIO,
        ),
        _measure.compare("the same, beside native alone", substrate, ours, alone),
        _measure.compare("the first of its kind", substrate, firsts, alone),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("cold_create", __doc__, measure, count=300))
