"""The table at the end of `untax bench`: per case how many trials, how long until the first command, the episode, and where it went."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from untax.meter.record import Case, End, Gap, Reader, Trial
from untax.meter.stats import percentile

BELOW_RESOLUTION = 50
"""A median under so many times the cost of a span is marked: the harness would be more than 2 % of it."""

_TAX = ("queue", "create", "ready", "setup", "dispatch", "observe", "reset", "cleanup", "unattributed")


@dataclass(slots=True)
class Row:
    """Seconds of good trials, warm-up left out; failed ones are counted."""

    first_command: array[float] = field(default_factory=lambda: array("d"))
    total: array[float] = field(default_factory=lambda: array("d"))
    tax: array[float] = field(default_factory=lambda: array("d"))
    failed: int = 0

    @property
    def tax_share(self) -> float:
        """Of all time of the good trials, as the report has it; not a number where there is none."""
        total = sum(self.total)
        return sum(self.tax) / total if total else math.nan


@dataclass(slots=True)
class Summary:
    rows: dict[Case, Row]
    gaps: list[Gap]
    span_cost_ns: int
    is_complete: bool
    unattributed_p95: float
    """As a share of what is allowed: max(1 % of the total, 50 µs). Above 1 the account of time has a hole."""


def summarise(path: Path) -> Summary:
    """Read a run's file once, keeping three numbers of each trial."""
    rows: dict[Case, Row] = {}
    gaps: list[Gap] = []
    holes = array("d")
    is_complete = False
    with Reader(path) as reader:
        for record in reader:
            if isinstance(record, Gap):
                gaps.append(record)
            elif isinstance(record, End):
                is_complete = True
            elif isinstance(record, Trial) and not record.warmup:
                row = rows.setdefault(record.case, Row())
                if record.outcome != "ok":
                    row.failed += 1
                    continue
                row.first_command.append(record.metrics_ns["first_command"] / 1e9)
                row.total.append(record.total_ns / 1e9)
                row.tax.append((sum(record.parts_ns[part] for part in _TAX) - record.setup_own_ns) / 1e9)
                holes.append(abs(record.parts_ns["unattributed"]) / max(0.01 * record.total_ns, 50_000))
        return Summary(dict(sorted(rows.items(), key=_order)), gaps, reader.run.span_cost_ns, is_complete, percentile(holes, 95))


def lines(summary: Summary) -> list[str]:
    """For people."""
    head = ("case", "n", "failed", "first command p50", "p95", "episode p50", "p95", "tax p50", "share")
    table: list[tuple[str, ...]] = [head]
    cost_s = summary.span_cost_ns / 1e9
    is_marked = False
    for case, row in summary.rows.items():
        cells = []
        for samples in (row.first_command, row.total):
            p50 = percentile(samples, 50)
            mark = "*" if p50 < BELOW_RESOLUTION * cost_s else ""
            is_marked = is_marked or bool(mark)
            cells += [_time(p50) + mark, _time(percentile(samples, 95))]
        share = "–" if math.isnan(row.tax_share) else f"{row.tax_share:.1%}"
        table.append((str(case), str(len(row.total)), str(row.failed or ""), *cells, _time(percentile(row.tax, 50)), share))
    widths = [max(len(line[n]) for line in table) for n in range(len(head))]
    said = [
        "  ".join(cell.ljust(w) if n == 0 else cell.rjust(w) for n, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in table
    ]
    said.append(
        f"a span costs {summary.span_cost_ns} ns" + (f"; * is under {BELOW_RESOLUTION} × that: below resolution" if is_marked else "")
    )
    if not math.isnan(summary.unattributed_p95):
        said.append(f"unattributed time at p95: {summary.unattributed_p95:.0%} of the allowed max(1 %, 50 µs)")
    said += [f"left out: {', '.join(names)}: {reason}" for reason, names in _by_reason(summary.gaps).items()]
    if not summary.is_complete:
        said.append("the run is not complete: go on with --resume")
    return said


def as_json(summary: Summary) -> dict[str, Any]:
    def numbers(samples: Sequence[float]) -> dict[str, float | None]:
        return {f"{name}_s": _plain(percentile(samples, share)) for name, share in (("p50", 50), ("p95", 95))}

    rows = [
        {
            "case": {name: getattr(case, name) for name in Case.__dataclass_fields__},
            "n": len(row.total),
            "failed": row.failed,
            "first_command": numbers(row.first_command),
            "fresh_episode": numbers(row.total),
            "tax": {**numbers(row.tax), "share": _plain(row.tax_share)},
            "below_resolution": bool(row.first_command)
            and min(percentile(row.first_command, 50), percentile(row.total, 50)) < BELOW_RESOLUTION * summary.span_cost_ns / 1e9,
        }
        for case, row in summary.rows.items()
    ]
    gaps = [{"case": str(gap.case) if gap.case else None, "substrate": gap.substrate, "reason": gap.reason} for gap in summary.gaps]
    return {
        "cases": rows,
        "gaps": gaps,
        "span_cost_ns": summary.span_cost_ns,
        "complete": summary.is_complete,
        "unattributed_p95_of_allowed": _plain(summary.unattributed_p95),
    }


def _by_reason(gaps: Sequence[Gap]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for gap in gaps:
        found.setdefault(gap.reason, []).append(str(gap.case or gap.substrate))
    return found


def _order(item: tuple[Case, Row]) -> tuple[Any, ...]:
    case = item[0]
    return case.tier, case.length, case.concurrency, case.contention, case.image, case.substrate, case.path, case.warmth


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return "–"
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def _plain(value: float) -> float | None:
    return None if math.isnan(value) else value
