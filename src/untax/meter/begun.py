"""The file of a run: begun, or gone on with where it stopped, and what it has already."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from untax.meter import conditions, host
from untax.meter.journal import Journal
from untax.meter.plan import Plan
from untax.meter.record import Batch, Case, End, Gap, Reader, Resume, Run, Trial


@dataclass(slots=True)
class Done:
    """What a run's file has already."""

    trials: set[tuple[Case, int, bool]] = field(default_factory=set)
    dropped: set[Case] = field(default_factory=set)
    throughput: dict[Case, list[float]] = field(default_factory=dict)
    order: int = 0
    failed: int = 0
    is_complete: bool = False
    workloads: dict[str, str] = field(default_factory=dict)
    """The digest of each tier's workload, as its trials have it."""


def begin(plan: Plan, out: Path, *, command: str) -> tuple[Journal, str]:
    """A new run below `out`; nothing is measured yet but the machine's own noise."""
    run = f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
    first = Run(run, instant(), plan.seed, plan.to_json(), _host(), conditions.span_cost_ns(), command)
    return Journal.create(out / "records.jsonl", first), run


def reopen(path: Path, *, command: str, accept: Callable[[Run, Done], None] = lambda *_: None) -> tuple[Journal, Run, Done]:
    """Go on with a run; its plan is in the first record. `accept` is asked before anything is written, and raises to leave it as it is."""
    done = Done()
    with Reader(path) as reader:
        for record in reader:
            note(done, record)
        first = reader.run
    accept(first, done)
    journal = Journal.resume(path)
    if not done.is_complete:
        try:
            journal.append(Resume(first.run, instant(), _host(), command))
            journal.sync()
        except BaseException:
            journal.close()
            raise
    return journal, first, done


def note(done: Done, record: object) -> None:
    if isinstance(record, Trial):
        done.trials.add((record.case, record.trial, record.warmup))
        done.order = max(done.order, record.order + 1)
        done.failed += record.outcome != "ok" and not record.warmup
        if "workload" in record.software:
            done.workloads[record.case.tier] = record.software["workload"]
    elif isinstance(record, Batch) and not record.warmup and record.wall_ns > 0:  # 0: none of its rollouts was begun
        good = record.rollouts - record.failed
        done.throughput.setdefault(record.case, []).append(good * 1e9 / record.wall_ns)
    elif isinstance(record, Gap) and record.case is not None:
        done.dropped.add(record.case)
    elif isinstance(record, End):
        done.is_complete = True


def instant() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z")


def _host() -> dict[str, Any]:
    clock = conditions.ClockCheck()
    return {**host.facts(), "engines": conditions.engine_versions(), "noise_probe": conditions.noise_probe(), "clock": clock.report()}
