"""What the budget programs share: samples, the native floor beside them, verdicts, a table for people and JSON for machines.

A program is a coroutine that gives rows. Native is measured interleaved with ours in the same run, because the
machine's mood changes faster than one can measure two things one after the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import untax
from untax import substrates

SUBSTRATES = ("process", "namespace")
NATIVE = ("true",)
WARM_UP = 10  # measured, and discarded: the first calls fault code in and fill caches


@dataclass
class Row:
    """One budget: what was measured, beside native where there is one, and whether it holds."""

    what: str
    substrate: str
    p50: float
    p95: float
    unit: str = "ms"
    native_p50: float | None = None
    native_p95: float | None = None
    ratio: float | None = None
    budget: str = ""
    holds: bool | None = None  # None: reported, no budget
    count: int = 0
    note: str = ""
    samples: list[float] = field(default_factory=list, repr=False)
    native_samples: list[float] = field(default_factory=list, repr=False)

    @property
    def verdict(self) -> str:
        return {True: "holds", False: "MISSED", None: ""}[self.holds]


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` of all do not exceed; NaN of nothing."""
    if not samples:
        return math.nan
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def compare(
    what: str,
    substrate: str,
    ours_s: Sequence[float],
    native_s: Sequence[float] = (),
    *,
    budget: str = "",
    holds: Callable[[Row], bool] | None = None,
    note: str = "",
) -> Row:
    """A row in milliseconds from samples in seconds; `holds` is asked with the row filled in."""
    row = Row(
        what,
        substrate,
        p50=percentile(ours_s, 0.50) * 1e3,
        p95=percentile(ours_s, 0.95) * 1e3,
        budget=budget,
        count=len(ours_s),
        note=note,
        samples=[round(s * 1e3, 6) for s in ours_s],
        native_samples=[round(s * 1e3, 6) for s in native_s],
    )
    if native_s:
        row.native_p50 = percentile(native_s, 0.50) * 1e3
        row.native_p95 = percentile(native_s, 0.95) * 1e3
        row.ratio = row.p50 / row.native_p50
    if holds is not None:
        row.holds = holds(row)
    return row


def number(what: str, substrate: str, value: float, unit: str, *, budget: str, holds: bool | None, note: str = "") -> Row:
    """A row for something that is one number and not a distribution."""
    return Row(what, substrate, value, value, unit=unit, budget=budget, holds=holds, count=1, note=note)


def native_s(argv: Sequence[str] = NATIVE, *, capture: bool = False) -> float:
    """The same command by `subprocess.run`. It is one single-threaded process, which a limit of one CPU does not slow down."""
    begin = time.perf_counter()
    subprocess.run(argv, check=True, capture_output=capture)
    return time.perf_counter() - begin


async def timed(work: Awaitable[Any]) -> float:
    begin = time.perf_counter()
    await work
    return time.perf_counter() - begin


async def interleaved(
    count: int,
    ours: Callable[[], Awaitable[float]],
    native: Callable[[], float] | None = native_s,
) -> tuple[list[float], list[float]]:
    """`count` samples of each, one beside the other; which goes first alternates."""
    mine: list[float] = []
    theirs: list[float] = []
    for turn in range(count + WARM_UP):
        if native is not None and turn % 2:
            theirs.append(native())
        mine.append(await ours())
        if native is not None and not turn % 2:
            theirs.append(native())
    return mine[WARM_UP:], theirs[WARM_UP:]


# ---- engines ----


def spec_for(substrate: str, **fields: Any) -> untax.EnvSpec:
    """The default spec; on the substrate without a boundary it must say that it accepts none."""
    if substrates.load(substrate).isolation == "none":
        fields["isolation"] = "none"
    return untax.EnvSpec(**fields)


@contextlib.asynccontextmanager
async def engine_on(substrate: str, state_dir: Path | None = None, **options: Any) -> AsyncIterator[untax.Engine]:
    with contextlib.ExitStack() as stack:
        if state_dir is None:
            state_dir = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="untax-bench-")))
        async with untax.Engine(substrate, state_dir=str(state_dir), **options) as engine:
            yield engine


async def warm_first(engine: untax.Engine, spec: untax.EnvSpec, label: str, count: int, beside_ms: float) -> list[Row]:
    """A lease from the pool to the result of one `true`, each after the pool was full again. Budget: `beside_ms` and the `true` itself."""
    trips: list[float] = []
    inside: list[float] = []
    kinds: set[str] = set()
    for _ in range(count + 1):
        await engine.warm(spec, 1)
        await engine.pooling.driver.wait_settled()
        begin = time.perf_counter()
        async with engine.lease(spec) as box:
            result = (await box.run(["true"])).check()
            trips.append(time.perf_counter() - begin)
        inside.append(result.elapsed_s)
        assert box.ledger.hit is not None
        kinds.add(box.ledger.hit.kind)
    await engine.warm(spec, 0)
    own_ms = percentile(inside[1:], 0.5) * 1e3
    return [
        compare(
            "warm lease to first result",
            label,
            trips[1:],
            budget=f"≤ {beside_ms:g} ms and one `true` at p50",
            holds=lambda row: row.p50 <= beside_ms + own_ms,
            note=f"{own_ms:.2f} ms of it inside; hits: {', '.join(sorted(kinds))}",
        )
    ]


def more_descriptors() -> None:
    """Up to the hard limit, as a server would: a thousand held channels do not fit the customary 1,024."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


# ---- the shape of a program ----

Measure = Callable[[argparse.Namespace, str], Coroutine[Any, Any, list[Row]]]
Options = Callable[[argparse.ArgumentParser], None]


def main(
    name: str,
    doc: str,
    measure: Measure,
    *,
    count: int,
    options: Options | None = None,
    only: Sequence[str] = SUBSTRATES,
) -> int:
    """Parse, measure on each substrate that this machine has, print; 0 when every budget holds, else 1."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=doc.partition("\n")[0])
    parser.add_argument("--substrate", action="append", choices=only, help="only this one; may be repeated")
    parser.add_argument("--count", type=int, default=count, help="samples of each case (default: %(default)s)")
    parser.add_argument("--json", metavar="FILE", help="also write rows and raw samples to FILE; - for standard output")
    if options is not None:
        options(parser)
    arguments = parser.parse_args()
    rows: list[Row] = []
    lacking: dict[str, str] = {}
    for substrate in arguments.substrate or only:
        if reason := substrates.load(substrate).unavailable_reason():
            lacking[substrate] = reason
            print(f"{name}: {substrate} skipped: {reason}", file=sys.stderr)
            continue
        rows += asyncio.run(measure(arguments, substrate))
    print(table(rows), file=sys.stderr if arguments.json == "-" else sys.stdout)
    if arguments.json:
        report = {
            "version": 1,
            "program": name,
            "host": host_facts(),
            "skipped": lacking,
            "rows": [as_json(row) for row in rows],
        }
        write_json(arguments.json, report)
    return 1 if any(row.holds is False for row in rows) else 0


def as_json(row: Row) -> dict[str, Any]:
    fields = {**row.__dict__, "verdict": row.verdict or None}
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in fields.items()}


def write_json(target: str, report: dict[str, Any]) -> None:
    text = json.dumps(report)
    if target == "-":
        print(text)
        return
    path = Path(target)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")


def table(rows: Sequence[Row]) -> str:
    head = (
        "what",
        "substrate",
        "p50",
        "p95",
        "unit",
        "native p50",
        "native p95",
        "× native",
        "n",
        "budget",
        "verdict",
        "note",
    )
    lines = [head] + [
        (
            row.what,
            row.substrate,
            _figure(row.p50),
            _figure(row.p95),
            row.unit,
            _figure(row.native_p50),
            _figure(row.native_p95),
            _figure(row.ratio),
            str(row.count),
            row.budget,
            row.verdict,
            row.note,
        )
        for row in rows
    ]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines)


def _figure(value: float | None) -> str:
    if value is None or math.isnan(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def host_facts() -> dict[str, Any]:
    """What a reader must know to compare two results."""
    with open("/proc/loadavg") as load:
        load_1 = float(load.read().split()[0])
    model = ""
    with contextlib.suppress(OSError), open("/proc/cpuinfo") as cpus:
        model = next((line.partition(":")[2].strip() for line in cpus if line.startswith("model name")), "")
    return {
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cpu": model,
        "cpus": len(os.sched_getaffinity(0)),
        "memory_mib": meminfo_kib("MemTotal") // 1024,
        "python": platform.python_version(),
        "root": os.geteuid() == 0,
        "load_1min": load_1,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def meminfo_kib(name: str) -> int:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def status_kib(name: str, pid: int | str = "self") -> int:
    with open(f"/proc/{pid}/status") as lines:
        return next((int(line.split()[1]) for line in lines if line.startswith(name + ":")), 0)
