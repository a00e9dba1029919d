"""Seven ordinary sandboxes, quiet and beside one that runs a fork bomb, eats memory, fills its disk and floods its output, all at once (THREATS Q9).

Both take turns, so that the machine's mood is the same for both: a round of commands in each of the seven while the attacker rests, one while it
attacks. What the attacker may use is what its limits say; what it costs the others beside that is the boundary's doing.
"""

import argparse
import asyncio
import contextlib
import time

import untax
from benchmarks import _measure
from benchmarks._measure import Row

SEVEN = 7
RATIO = 1.5  # of the 95th percentiles
COMMAND = "seq 500 | sha256sum >f; cat f"
ATTACKS = (":(){ :|:& };:", "python3 -c 'x = bytearray(8 << 30)'", "dd if=/dev/zero of=big bs=1M; rm -f big", "yes | head -c 268435456")
LIMITS = untax.Limits(memory_mib=256, pids=64, disk_mib=64)
ROUNDS = 4
REST_S = 0.5  # until what an attack left behind is over


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    spec = _measure.spec_for(substrate)
    quiet: list[float] = []
    beside: list[float] = []
    failed = 0

    async def ordinary(box: untax.Box, times: int, into: list[float]) -> None:
        nonlocal failed
        for _ in range(times):
            begin = time.perf_counter()
            try:
                done = await box.shell(COMMAND)
                failed += done.exit_code != 0
            except untax.UntaxError:
                failed += 1
            into.append(time.perf_counter() - begin)

    async def attack(box: untax.Box, text: str) -> None:
        while True:
            with contextlib.suppress(untax.SpawnFailed):  # its own bomb is in the way of its own commands
                await box.shell(text, timeout_s=1)

    async with _measure.engine_on(substrate) as engine, contextlib.AsyncExitStack() as stack:
        seven = [await stack.enter_async_context(engine.lease(spec)) for _ in range(SEVEN)]
        times = max(1, arguments.count // SEVEN // ROUNDS)
        for _ in range(ROUNDS):
            await asyncio.gather(*(ordinary(box, times, quiet) for box in seven))
            async with engine.lease(spec, limits=LIMITS) as attacker:
                tasks = [asyncio.create_task(attack(attacker, text)) for text in ATTACKS]
                await asyncio.sleep(REST_S)
                await asyncio.gather(*(ordinary(box, times, beside) for box in seven))
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.sleep(REST_S)
    ratio = _measure.percentile(beside, 0.95) / _measure.percentile(quiet, 0.95)
    return [
        _measure.compare("a command of seven at once, quiet", substrate, quiet),
        _measure.compare("beside an attacker", substrate, beside),
        _measure.number("beside ÷ quiet, p95", substrate, ratio, "×", budget=f"≤ {RATIO:g} ×", holds=ratio <= RATIO),
        _measure.number("commands that failed", substrate, failed, "commands", budget="0", holds=failed == 0),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("neighbours", __doc__, measure, count=560, only=("namespace",)))
