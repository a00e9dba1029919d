"""A file of a million records: how long its report takes, and how much memory. The records are made up; what is timed is real."""

import argparse
import asyncio
import random
import resource
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import Row
from untax.meter.record import Case, End, Run, Trial, no_parts, to_line

MOST_S = 60.0  # for a million, on one core
FULL = 1_000_000
_SUBSTRATES = ("process", "namespace", "container", "vm")
_DIFFERENT = 20_000  # records that are made; a million then repeats them, which changes nothing for the reader


async def measure(arguments: argparse.Namespace, _: str) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="untax-report-") as place:
        size = await asyncio.to_thread(write, Path(place) / "records.jsonl", arguments.count)
        argv = [sys.executable, "-m", "untax.cli", "report", place, "--json"]
        begin = time.perf_counter()
        subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
        took_s = time.perf_counter() - begin
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = used.ru_utime + used.ru_stime
    # What is budgeted is the wait of somebody whose machine does nothing else: processor time, for the report uses one core and hardly waits.
    is_full = arguments.count >= FULL
    return [
        _measure.number(
            f"report of {arguments.count:,} records",
            "none",
            cpu_s,
            "s",
            budget=f"≤ {MOST_S:g} s for a million",
            holds=cpu_s <= MOST_S if is_full else None,
            note=f"{took_s:.1f} s of wall clock, {size / 1e6:.0f} MB of records",
        ),
        _measure.number("memory at its highest", "none", used.ru_maxrss / 1024, "MiB", budget="", holds=None),
    ]


def write(path: Path, count: int) -> int:
    """A run with `count` trials in 48 cases; gives its size."""
    rng = random.Random(1)
    cases = [Case(name, path=way, tier=tier) for name in _SUBSTRATES for way in ("channel", "incumbent") for tier in ("T0", "T1", "T2")]
    cases += [Case(name, path=way, tier="T2", length=n) for name in _SUBSTRATES for way in ("channel", "incumbent") for n in (10, 50, 150)]
    lines = [to_line(_trial(cases[n % len(cases)], n, rng)) for n in range(min(count, _DIFFERENT))]
    with path.open("wb") as file:
        file.write(to_line(Run("r1", "2026-11-16T10:00:00Z", 1, {}, {"cores": 8, "load_1m": 0.1}, 300, "made up by benchmarks/report.py")))
        file.writelines(islice(cycle(lines), count))
        file.write(to_line(End("r1", "2026-11-16T11:00:00Z", count, 0, 1)))
    return path.stat().st_size


def _trial(case: Case, number: int, rng: random.Random) -> Trial:
    speed = (1 + _SUBSTRATES.index(case.substrate)) * rng.lognormvariate(0, 0.2)
    actions = case.length or 10
    parts = no_parts() | {
        "create": int(5e6 * speed),
        "ready": int(3e6 * speed),
        "setup": int(1e8 * speed),
        "action": int(1e8 * actions * rng.lognormvariate(0, 0.1)),
    }
    parts |= {"dispatch": int(2e5 * actions * speed), "observe": 9_000 * actions, "cleanup": int(2e6 * speed), "unattributed": 4_000}
    total = sum(parts.values())
    metrics = {"first_command": parts["create"] + parts["ready"], "fresh_episode": total, "amortised_action": total // actions}
    software = {"image": "host", "repo": "0123456789abcdef0123456789abcdef01234567", "stages": {"image": 0.0, "repo": 0.0}}
    return Trial(
        "r1", case, number, number, False, "2026-11-16T10:00:00.000000Z", "ok", parts, total, metrics, actions,
        limits={"cpus": 1.0, "memory_mib": 1024, "disk_mib": 4096, "pids": 512}, software=software, substrate_detail={"runtime": "runc"},
    )  # fmt: skip


if __name__ == "__main__":
    # No substrate takes part; the floor stands for it, which every machine has.
    raise SystemExit(_measure.main("report", __doc__, measure, count=FULL, only=("process",)))
