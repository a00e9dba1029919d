"""Carries a plan out: one record for each trial, raw, with the facts of the host.

T0 is the smallest tier. One trial of a substrate: lease a fresh sandbox, run `true` for the first time, run it
`actions` times more, release. One trial of the baseline: the same `true` by `subprocess.run`, as often.
"""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import untax
from untax.core.span import now_ns
from untax.meter.plan import NATIVE, Plan
from untax.meter.stats import Summary, percentile, summarise

COMMAND = ("true",)
SCHEMA = 1

METRICS = ("first_command", "action", "fresh_episode")
"""first_command   from asking for a sandbox to the first result; for the baseline one plain call
action          one further call, the median of a trial
fresh_episode   from asking for a sandbox until it is gone
"""


@dataclass(frozen=True, slots=True)
class Trial:
    """What one trial came to; `seconds` is empty where it failed, and `error` says how."""

    number: int
    case: str
    seconds: dict[str, float] = field(default_factory=dict)
    error: str | None = None
    ledger: dict[str, float] = field(default_factory=dict)

    def as_record(self, host: dict[str, Any], seed: int) -> dict[str, Any]:
        return {
            "untax_record": SCHEMA,
            "tier": "T0",
            "trial": self.number,
            "case": self.case,
            "seconds": self.seconds,
            "error": self.error,
            "ledger": self.ledger,
            "seed": seed,
            "host": host,
        }


async def run_plan(plan: Plan, make_engine: Callable[[str], untax.Engine]) -> AsyncIterator[Trial]:
    """Give each trial as it ends, warm-up excluded. A trial that fails is a trial with an error, and the others go on."""
    async with AsyncExitStack() as stack:
        engines = {case: await stack.enter_async_context(make_engine(case)) for case in plan.cases if case != NATIVE}
        for number, case in plan.order():
            trial = _native(number, plan) if case == NATIVE else await _sandboxed(number, case, engines[case], plan)
            if number >= 0:
                yield trial


def _native(number: int, plan: Plan) -> Trial:
    start_ns = now_ns()
    times = []
    for _ in range(plan.actions + 1):
        before_ns = now_ns()
        subprocess.run(COMMAND, capture_output=True, check=True)
        times.append((now_ns() - before_ns) / 1e9)
    total_s = (now_ns() - start_ns) / 1e9
    return Trial(number, NATIVE, {"first_command": times[0], "action": percentile(times[1:], 50), "fresh_episode": total_s})


async def _sandboxed(number: int, case: str, engine: untax.Engine, plan: Plan) -> Trial:
    start_ns = now_ns()
    times = []
    try:
        async with engine.lease() as box:
            (await box.run(COMMAND)).check()
            first_ns = now_ns()
            for _ in range(plan.actions):
                before_ns = now_ns()
                (await box.run(COMMAND)).check()
                times.append((now_ns() - before_ns) / 1e9)
    except untax.UntaxError as exc:
        return Trial(number, case, error=f"{type(exc).__name__}: {exc}")
    end_ns = now_ns()
    seconds = {
        "first_command": (first_ns - start_ns) / 1e9,
        "action": percentile(times, 50),
        "fresh_episode": (end_ns - start_ns) / 1e9,
    }
    return Trial(number, case, seconds, ledger=box.ledger.metrics())


def summaries(trials: Sequence[Trial]) -> dict[str, dict[str, Summary]]:
    """For each case and metric: p50, p95 and the ratio to the baseline of the same run."""
    cases = dict.fromkeys(trial.case for trial in trials)
    samples = {
        (case, metric): [t.seconds[metric] for t in trials if t.case == case and metric in t.seconds]
        for case in cases
        for metric in METRICS
    }
    return {case: {metric: summarise(samples[case, metric], samples.get((NATIVE, metric), [])) for metric in METRICS} for case in cases}
