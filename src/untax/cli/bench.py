"""Time the T0 tier: a fresh sandbox, its first command, further commands, its end, beside native.

Trials of all substrates are interleaved in an order drawn from a seed, which is kept with the records.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import sys
from dataclasses import asdict
from pathlib import Path

import untax
from untax import substrates
from untax.cli import EXIT_INFRASTRUCTURE
from untax.cli._terminal import one_line
from untax.core.errors import UsageError
from untax.meter import host
from untax.meter.figures import cost
from untax.meter.plan import NATIVE, Plan
from untax.meter.run import METRICS, Trial, run_plan, summaries
from untax.meter.stats import Summary


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--substrate", action="append", choices=substrates.names(), help="repeatable (default: all this machine can use)")
    parser.add_argument("--trials", type=int, default=100, metavar="N", help="of each case (default: %(default)s)")
    parser.add_argument("--warmup", type=int, default=5, metavar="N", help="rounds before them that are discarded (default: %(default)s)")
    parser.add_argument("--actions", type=int, default=10, metavar="N", help="commands in a trial after its first (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the order (default: %(default)s)")
    parser.add_argument("--out", metavar="DIR", help="keep records.jsonl, summary.json and cost.svg there")
    parser.add_argument("--state-dir", metavar="DIR", help="where the engines keep their state")


def carry_out(arguments: argparse.Namespace) -> int:
    cases = arguments.substrate or _usable()
    plan = Plan((NATIVE, *dict.fromkeys(cases)), arguments.trials, arguments.warmup, arguments.actions, arguments.seed)
    facts = host.facts()
    if arguments.out:
        _make(Path(arguments.out))
    trials = asyncio.run(_collect(plan, arguments.state_dir))
    table = summaries(trials)
    errors = [trial for trial in trials if trial.error]
    document = {
        "untax_bench": 1,
        "tier": "T0",
        "seed": plan.seed,
        "trials": plan.trials,
        "warmup_discarded": plan.warmup,
        "actions": plan.actions,
        "host": facts,
        "cases": {case: {metric: _plain(summary) for metric, summary in row.items()} for case, row in table.items()},
        "failed": len(errors),
    }
    if arguments.out:
        _keep(Path(arguments.out), trials, document, facts, plan, table)
    if arguments.json:
        print(json.dumps(document))
    else:
        _show(table, plan)
    for trial in errors[:3]:
        print(f"untax: trial {trial.number} of {trial.case} failed: {one_line(trial.error or '')}", file=sys.stderr)
    return EXIT_INFRASTRUCTURE if errors else 0


async def _collect(plan: Plan, state_dir: str | None) -> list[Trial]:
    trials = []
    async for trial in run_plan(plan, lambda name: untax.Engine(name, state_dir=state_dir)):
        trials.append(trial)
        if sys.stderr.isatty():
            print(f"\r{len(trials)} of {plan.trials * len(plan.cases)} trials", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    return trials


def _usable() -> list[str]:
    usable = []
    for name in substrates.names():
        substrate = substrates.load(name)
        reason = substrate.unavailable_reason()
        if reason is None and not getattr(substrate, "has_host_image", True):
            reason = "it has no image 'host', which all are timed on"
        if reason is None:
            usable.append(name)
        else:
            print(f"untax: leaving {name} out: {one_line(reason)}", file=sys.stderr)
    return usable


def _plain(summary: Summary) -> dict[str, float | None]:
    """For JSON, which has no NaN: what no sample gave is null."""
    return {name: None if value is None or math.isnan(value) else value for name, value in asdict(summary).items()}


def _make(out: Path) -> None:
    """Before the trials: after them it would be too late to say that they cannot be kept."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise UsageError(f"--out {out}: {exc.strerror}; name another directory") from exc


def _keep(
    out: Path,
    trials: list[Trial],
    document: dict[str, object],
    facts: dict[str, object],
    plan: Plan,
    table: dict[str, dict[str, Summary]],
) -> None:
    with (out / "records.jsonl").open("w", encoding="utf-8") as records:
        for trial in trials:
            records.write(json.dumps(trial.as_record(facts, plan.seed)) + "\n")
    (out / "summary.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    title = f"T0, p50 with a line to p95, {plan.trials} trials, × of native"
    (out / "cost.svg").write_text(cost.draw(table, title=title), encoding="utf-8")


def _show(table: dict[str, dict[str, Summary]], plan: Plan) -> None:
    print(f"T0: {plan.trials} trials each, {plan.warmup} warm-up rounds discarded, interleaved, seed {plan.seed}")
    print(f"{'':<14}{'':<12}{'p50 ms':>10}{'p95 ms':>10}{'× native':>10}")
    for metric in METRICS:
        for case, row in table.items():
            summary = row[metric]
            ratio = f"{summary.ratio:.2f}" if summary.ratio is not None else "-"
            print(f"{metric:<14}{case:<12}{summary.p50_s * 1e3:>10.3f}{summary.p95_s * 1e3:>10.3f}{ratio:>10}")
