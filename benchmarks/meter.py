"""What the meter itself needs: its memory over a whole run, the cost of a span, and how much of a trial nobody accounts for.

`untax bench` runs as a user would start it: `--count` trials of T0, T1 and T2, cold, on both substrates at once (100 is what the budget is for).
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import Row
from untax.meter.record import Reader, Trial
from untax.meter.stats import percentile

MOST_MIB = 200  # issue 6


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--state-dir", metavar="DIR", help="where the repository and packages are kept (default: a temporary directory)")
    parser.add_argument("--tier", action="append", help="only this one; may be repeated")


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    if substrate != "process":
        return []  # one run has both
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as scratch:
        state, out = arguments.state_dir or f"{scratch}/state", Path(scratch) / "out"
        argv = [sys.executable, "-m", "untax.cli", "bench", "--no-report", "--cold", "--trials", str(arguments.count), "--state-dir", state]
        for name in _measure.SUBSTRATES:
            argv += ["--substrate", name]
        for tier in arguments.tier or ("T0", "T1", "T2"):
            argv += ["--tier", tier]
        running = subprocess.Popen([*argv, "--out", str(out)])
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
        if running.returncode:
            raise SystemExit(f"meter: untax bench ended with {running.returncode}")
        holes, count = [], 0
        with Reader(out / "records.jsonl") as reader:
            cost_ns = reader.run.span_cost_ns
            for record in reader:
                if isinstance(record, Trial) and record.outcome == "ok":
                    count += 1
                    holes.append(abs(record.parts_ns["unattributed"]) / max(0.01 * record.total_ns, 50_000))
    mib = used.ru_maxrss / 1024
    p95 = percentile(holes, 95)
    both = "both"
    return [
        _measure.number(
            "memory of untax bench", both, mib, "MiB", budget=f"≤ {MOST_MIB} MiB", holds=mib <= MOST_MIB, note=f"{count} trials"
        ),
        _measure.number("unattributed at p95", both, p95, "×", budget="≤ max(1 %, 50 µs)", holds=p95 <= 1, note="of what is allowed"),
        _measure.number("a span", both, cost_ns / 1e3, "µs", budget="", holds=None, note="cases under 50 × this are marked"),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("meter", __doc__, measure, count=100, options=options))
