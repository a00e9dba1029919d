"""A thousand idle sandboxes at once: memory of each, whether the last is created as fast as the first, how soon all are gone."""

import argparse
import gc
import os
import tempfile
import time
from pathlib import Path

from benchmarks import _census, _measure
from benchmarks._measure import Row

MIB_EACH = 1.0
GROWTH = 2.0
GONE_S = 10.0
WINDOW = 25  # creations whose median stands for "the first" and "the thousandth"


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    _measure.more_descriptors()
    count = arguments.count
    created: list[float] = []
    native: list[float] = []
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
        state = Path(place)
        bystanders = set(_census.descendants(os.getpid()))
        async with _measure.engine_on(substrate, state) as engine:
            spec = _measure.spec_for(substrate)
            for _ in range(_measure.WARM_UP):
                async with engine.lease(spec) as box:
                    (await box.run(["true"])).check()
            gc.collect()
            time.sleep(1)  # what was freed comes back a little later
            available = _measure.meminfo_kib("MemAvailable")
            for _ in range(count):
                begin = time.perf_counter()
                box = await engine.acquire(spec)
                (await box.run(["true"])).check()
                created.append(time.perf_counter() - begin)
                native.append(_measure.native_s())
            time.sleep(1)
            each_mib = (available - _measure.meminfo_kib("MemAvailable")) / 1024 / count
            everyone = set(_census.descendants(os.getpid())) - bystanders
            mark = _census.group_mark(everyone)
            doomed = _census.Doomed(everyone)
            begin = time.perf_counter()
        closed_s = time.perf_counter() - begin
        ended = doomed.wait_gone(GONE_S)
        while (left := _census.groups_named(mark) + _census.mounts_naming(state)) and time.perf_counter() - begin < GONE_S:
            time.sleep(0.02)
        gone_s = time.perf_counter() - begin
    first, last = created[:WINDOW], created[-WINDOW:]
    growth = _measure.percentile(last, 0.5) / _measure.percentile(first, 0.5)
    native_growth = _measure.percentile(native[-WINDOW:], 0.5) / _measure.percentile(native[:WINDOW], 0.5)
    return [
        _measure.number(
            f"memory of one of {count:,} idle",
            substrate,
            each_mib,
            "MiB",
            budget=f"≤ {MIB_EACH:g} MiB",
            holds=each_mib <= MIB_EACH,
        ),
        _measure.compare(f"create, first {WINDOW}", substrate, first, native[:WINDOW]),
        _measure.compare(f"create, last {WINDOW} of {count:,}", substrate, last, native[-WINDOW:]),
        _measure.number(
            "last ÷ first",
            substrate,
            growth,
            "×",
            budget=f"≤ {GROWTH:g} ×",
            holds=growth <= GROWTH,
            note=f"native alone changed {native_growth:.2f} ×",
        ),
        _measure.number(
            f"{count:,} gone after close",
            substrate,
            gone_s,
            "s",
            budget=f"≤ {GONE_S:g} s",
            holds=ended is not None and not left and gone_s <= GONE_S,
            note=f"close returned after {closed_s:.2f} s" + (f"; {left} mounts and groups left" if left else ""),
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("thousand", __doc__, measure, count=1000))
