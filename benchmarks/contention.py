"""Sixty-four clients on a pool of eight: no sandbox leased twice at once, none with traces of another lease, served in order.

Every lease looks for the mark of an earlier one, leaves its own, and gives the sandbox back. Order is fair when nobody who
asked later is handed a sandbox while more than a pool's worth of earlier ones still wait.
"""

import argparse
import asyncio
import bisect
import time

import untax
from benchmarks import _measure
from benchmarks._measure import Row

CLIENTS, POOL = 64, 8
MARK = "/workspace/mark"


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    spec = _measure.spec_for(substrate)
    live: set[str] = set()
    waiting: list[int] = []
    doubles = dirty = overtaken = failed = asked = 0
    waits: list[float] = []

    async def client(leases: int) -> None:
        nonlocal doubles, dirty, overtaken, failed, asked
        for _ in range(leases):
            asked += 1
            turn = asked
            waiting.append(turn)
            begin = time.perf_counter()
            try:
                async with engine.lease(spec) as box:
                    waits.append(time.perf_counter() - begin)
                    at = bisect.bisect_left(waiting, turn)
                    overtaken = max(overtaken, at)
                    del waiting[at]
                    doubles += box.id in live
                    live.add(box.id)
                    result = await box.shell(f"test -e {MARK}; echo $?; echo {turn} > {MARK}")
                    dirty += result.stdout != b"1\n"
                    live.discard(box.id)
            except untax.UntaxError:
                failed += 1

    async with _measure.engine_on(substrate, pool=untax.PoolOptions(entries=POOL)) as engine:
        await engine.warm(spec, POOL)
        begin = time.perf_counter()
        shares = [arguments.count // CLIENTS + (n < arguments.count % CLIENTS) for n in range(CLIENTS)]
        await asyncio.gather(*map(client, shares))
        took = time.perf_counter() - begin
        most = engine.pools()
    count = len(waits)
    note = f"{count / took:.0f} leases/s; {most.exact} exact, {most.cold} cold"
    return [
        _measure.compare(f"a lease of {CLIENTS} clients on {POOL}", substrate, waits, note=note),
        _measure.number("leased twice at once", substrate, doubles, "leases", budget="0", holds=doubles == 0),
        _measure.number("with traces of another lease", substrate, dirty, "leases", budget="0", holds=dirty == 0),
        _measure.number("failed", substrate, failed, "leases", budget="0", holds=failed == 0),
        _measure.number("most that were overtaken by one", substrate, overtaken, "leases", budget=f"≤ {POOL}", holds=overtaken <= POOL),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("contention", __doc__, measure, count=10_000, only=("namespace",)))
