"""Output floods: 1 GiB from one command, and one that never stops printing; the engine's memory and the deadline hold.

A turn is both floods and native, some 1.5 s, so 200 of them are five minutes on each substrate.
"""

import argparse
import time
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import Row

FLOOD_BYTES = 1 << 30
GROWTH_MIB = 64.0
CAP_BYTES = 1 << 20  # of each stream, as returned by default
DEADLINE_S, LATE_S = 0.5, 1.0


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    took: list[float] = []
    native: list[float] = []
    ended: list[float] = []
    growth: list[float] = []
    capped = True
    async with _measure.engine_on(substrate) as engine, engine.lease(_measure.spec_for(substrate)) as box:
        (await box.run(["true"])).check()
        for _ in range(arguments.count):
            before = _reset_peak()
            begin = time.perf_counter()
            result = await box.run(["head", "-c", str(FLOOD_BYTES), "/dev/zero"], timeout_s=120)
            took.append(time.perf_counter() - begin)
            growth.append((_measure.status_kib("VmHWM") - before) / 1024)
            capped = capped and result.exit_code == 0 and result.truncated and len(result.stdout) <= CAP_BYTES
            native.append(_measure.native_s(["sh", "-c", f"head -c {FLOOD_BYTES} /dev/zero | cat > /dev/null"]))

            before = _reset_peak()
            begin = time.perf_counter()
            endless = await box.run(["yes"], timeout_s=DEADLINE_S)
            ended.append(time.perf_counter() - begin)
            growth.append((_measure.status_kib("VmHWM") - before) / 1024)
            capped = capped and endless.timed_out and len(endless.stdout) <= CAP_BYTES
    most = max(growth)
    return [
        _measure.compare(
            "1 GiB of output",
            substrate,
            took,
            native,
            budget=f"result ≤ {CAP_BYTES >> 20} MiB",
            holds=lambda _: capped,
            note="native: through one pipe into cat",
        ),
        _measure.number(
            "growth of the engine's memory",
            substrate,
            most,
            "MiB",
            budget=f"≤ {GROWTH_MIB:g} MiB",
            holds=most <= GROWTH_MIB,
            note="worst",
        ),
        _measure.compare(
            f"endless output, deadline {DEADLINE_S:g} s",
            substrate,
            ended,
            budget=f"ends by the deadline + {LATE_S:g} s",
            holds=lambda _: max(ended) <= DEADLINE_S + LATE_S,
        ),
    ]


def _reset_peak() -> int:
    """Start a new peak at the present size; gives that size in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return _measure.status_kib("VmHWM")


if __name__ == "__main__":
    raise SystemExit(_measure.main("flood", __doc__, measure, count=200))
