"""Measure what substrates cost: workloads of three tiers and trajectories, interleaved in random order, every trial a record.

A plan comes from flags, from a TOML file, or from both (flags win). Records go to DIR/records.jsonl as they come: Ctrl-C keeps what is done,
and --resume goes on where it stopped. docs/measurement.md says what is inside each number.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import logging
import os
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import untax
from untax import auto, substrates
from untax.cli import EXIT_INFRASTRUCTURE
from untax.cli._progress import seconds
from untax.cli._terminal import one_line
from untax.core.errors import UntaxError, UsageError
from untax.core.spec import require_duration
from untax.core.substrate import Fastidious, Importing, Priced, Reluctant, Substrate
from untax.meter import begun, profile
from untax.meter import plan as plans
from untax.meter import run as runs
from untax.meter import summary as summaries
from untax.meter.gather import gather
from untax.meter.plan import Plan
from untax.meter.record import Run
from untax.pool import choice
from untax.rollout import workload as workloads
from untax.rollout.material import Material
from untax.substrates._host import chosen_state_dir, ensure_private_dir

_RECORDS = "records.jsonl"
_HOST = "host"
_SMALL = "debian:bookworm+python3,git"
"""What stands in for the host's own files in a time box where they would have to be exported whole: it has what T0, T1 and T2 run."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is measured")
    what.add_argument("plan", nargs="?", metavar="PLAN.toml", help="a plan; flags win over it")
    what.add_argument("--substrate", action="append", metavar="NAME", help="repeatable (default: all this machine can use)")
    what.add_argument(
        "--tier", action="append", metavar="TIER", help="T0, T1, T2 or a workload's .toml file; repeatable (default: all three)"
    )
    what.add_argument("--length", action="append", type=int, metavar="N", help="actions of a trajectory, 0 for the tier itself; repeatable")
    what.add_argument("--cold", action="store_true", help="only cold trials (default: cold and warm)")
    what.add_argument("--warm", action="store_true", help="only warm trials")
    what.add_argument("--path", action="append", choices=("channel", "incumbent"), help="repeatable (default: both, where there are both)")
    what.add_argument("--concurrency", metavar="N,N,…", help="rollouts at once, as in 1,8,32; `auto` goes on to the knee (default: 1)")
    what.add_argument("--image-state", action="append", choices=("present", "absent"), help="repeatable (default: present)")
    what.add_argument(
        "--contention", action="append", choices=("none", "cpu", "disk", "network"), help="load beside the trials; repeatable"
    )
    what.add_argument("--workers", type=int, metavar="N", help="rollouts that may run at once, the others queue (default: all)")
    what.add_argument("--image", action="append", metavar="NAME=IMAGE", help="for a substrate, instead of the workload's; repeatable")
    how = parser.add_argument_group("how")
    how.add_argument("--trials", type=int, metavar="N", help="of each case (default: 100)")
    how.add_argument("--quick", action="store_true", help="10 trials after one warm-up")
    how.add_argument("--warmup", type=int, metavar="N", help="trials of each case before them, which are marked (default: 2)")
    how.add_argument("--seed", type=int, help="of the order (default: drawn, and kept with the records)")
    how.add_argument("--retries", type=int, metavar="N", help="attempts after a failure of the infrastructure that may pass (default: 1)")
    how.add_argument(
        "--budget",
        type=float,
        metavar="S",
        help="seconds for all cases, the cheapest first; one that gets fewer than 5 trials is dropped and named",
    )
    how.add_argument("--cpus", type=float, metavar="N", help="limit of every sandbox (default: the workload's)")
    how.add_argument("--memory-mib", type=int, metavar="N", help="the same")
    how.add_argument("--out", metavar="DIR", help="where the records and the report go (default: results/TIME)")
    how.add_argument("--resume", metavar="DIR", help="go on with the run there")
    how.add_argument(
        "--stop-after", type=float, metavar="S", help="begin no trial after so many seconds; --resume goes on, and may stop as well"
    )
    how.add_argument("--parquet", action="store_true", help="also DIR/records.parquet (needs untax[parquet])")
    how.add_argument("--no-report", action="store_true", help="records only")
    how.add_argument("--downloads", metavar="DIR", help="source distributions and wheels for a machine without a package index")
    how.add_argument("--state-dir", metavar="DIR", help="where the engines keep their state")


def carry_out(arguments: argparse.Namespace) -> int:
    if not arguments.verbose:
        logging.getLogger("untax").setLevel(logging.ERROR)  # a limit that is not enforced is in the records
    command = "untax " + shlex.join(sys.argv[1:])
    part_s = float("inf") if arguments.stop_after is None else require_duration("--stop-after", arguments.stop_after)
    if arguments.stop_after is not None and arguments.budget is not None:
        raise UsageError("--budget fits a whole run into a time, --stop-after runs a part of one: name one of them")
    if arguments.resume:
        out = Path(arguments.resume)
        journal, first, done = begun.reopen(out / _RECORDS, command=command, accept=_check_workloads)
        plan, run = _plan_of(first), first.run
        if done.is_complete:
            journal.close()
            print(f"untax: the run in {out} is complete; there is nothing left to do", file=sys.stderr)
            return _conclude(arguments, out)
        known = _known(plan)
    else:
        plan = _plan(arguments)
        known = _known(plan)
        plan = _in_time(plan, known)
        out = Path(arguments.out) if arguments.out else Path("results") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}"
        done = begun.Done()
        journal, run = begun.begin(plan, out, command=command)
    state = chosen_state_dir(arguments.state_dir)
    ensure_private_dir(state)
    progress = _Progress()
    downloads = Path(arguments.downloads) if arguments.downloads else None
    material = Material(state / "bench", downloads=downloads, say=progress.say)
    bench = runs.Bench(
        plan,
        known,
        journal,
        run,
        material,
        state / "bench" / "scratch",
        _maker(arguments.state_dir),
        done=done,
        part_s=part_s,
        say=progress.say,
        tell=progress,
    )
    try:
        asyncio.run(bench.carry_out())
    except KeyboardInterrupt:
        progress.say(f"interrupted; what was measured is kept. Go on with: untax bench --resume {shlex.quote(str(out))}")
        raise
    finally:
        journal.close()
        progress.clear()
    if bench.is_cut:
        print(
            f"untax: this part is over; what was measured is kept. Go on with: untax bench --resume {shlex.quote(str(out))}",
            file=sys.stderr,
        )
        return 0
    return _conclude(arguments, out)


# ---- the plan ----


def _plan(arguments: argparse.Namespace) -> Plan:
    said: dict[str, Any] = plans.read_file(Path(arguments.plan)) if arguments.plan else {}
    flags: dict[str, Any] = {
        "substrates": list(dict.fromkeys(arguments.substrate)) if arguments.substrate else None,
        "warmth": ["cold"] if arguments.cold and not arguments.warm else ["warm"] if arguments.warm and not arguments.cold else None,
        "paths": arguments.path,
        "images": arguments.image_state,
        "contention": arguments.contention,
        "workers": arguments.workers,
        "trials": arguments.trials if arguments.trials is not None else plans.QUICK_TRIALS if arguments.quick else None,
        "warmup": arguments.warmup if arguments.warmup is not None else 1 if arguments.quick or arguments.budget else None,
        "seed": arguments.seed,
        "retries": arguments.retries,
        "budget_s": arguments.budget,
    }
    if arguments.concurrency:
        flags |= _levels(arguments.concurrency)
    if arguments.tier or arguments.length:
        said = {name: value for name, value in said.items() if name not in ("works", "tiers", "lengths")}
        flags |= {"tiers": arguments.tier, "lengths": arguments.length}
    limits = {name: getattr(arguments, name) for name in ("cpus", "memory_mib") if getattr(arguments, name) is not None}
    if limits:
        flags["limits"] = {**said.get("limits", {}), **limits}
    said = _narrowed(said, flags) | {name: value for name, value in flags.items() if value is not None}
    if "substrates" not in said:
        said["substrates"] = _usable()
    said.setdefault("seed", int.from_bytes(os.urandom(2), "big"))
    for name in said["substrates"] if isinstance(said["substrates"], list) else []:
        if (real := _real(name, said.get("options"))) not in (known := (*substrates.names(), *substrates.HOSTED)):
            raise UsageError(f"no substrate {real!r}; there are {', '.join(known)}")
    if arguments.image:
        said["options"] = _with_images(said, arguments.image)
    return plans.from_mapping(said, where=arguments.plan or "the plan")


def _narrowed(said: Mapping[str, Any], flags: Mapping[str, Any]) -> dict[str, Any]:
    """A file's plan without what is only about substrates, paths or warmths that the flags leave out, and with no more trials than they allow."""
    kept = dict(said)
    if (chosen := flags["substrates"]) is not None and isinstance(kept.get("options"), Mapping):
        kept["options"] = {name: one for name, one in kept["options"].items() if name in chosen}
    counts = []
    for count in said["counts"] if isinstance(said.get("counts"), list) else ():
        if not isinstance(count, Mapping):
            return kept  # and is refused as it is
        left = {
            name: [one for one in value if flags.get(name) is None or one in flags[name]] if isinstance(value, list) else value
            for name, value in count.items()
        }
        if flags["trials"] is not None and isinstance(left.get("trials"), int):
            left["trials"] = min(left["trials"], flags["trials"])
        if all(value != [] for value in left.values()):
            counts.append(left)
    if "counts" in said:
        kept["counts"] = counts
    return kept


def _real(name: str, options: object) -> str:
    """What a name of a plan stands for: itself, or the substrate that its options name."""
    said = options.get(name) if isinstance(options, Mapping) else None
    return str(said["substrate"]) if isinstance(said, Mapping) and "substrate" in said else name


def _with_images(said: Mapping[str, Any], images: Sequence[str]) -> dict[str, Any]:
    """The plan's options with an image for each that the command line names one for."""
    found = dict(said.get("options", {}))
    for text in images:
        name, _, image = text.partition("=")
        if not image or name not in said["substrates"]:
            raise UsageError(f"--image {text!r}: write NAME=IMAGE with a substrate of the plan: {', '.join(map(str, said['substrates']))}")
        found[name] = {**found.get(name, {}), "image": image}
    return found


def _in_time(plan: Plan, known: Mapping[str, workloads.Workload]) -> Plan:
    """In a time box the cheapest substrate first, so that a dear one takes time from nobody but itself, and a small image where `host` would
    mean to export all of this machine's files, which takes minutes.
    """
    if not plan.budget_s:
        return plan
    real = {name: substrates.load(_real(name, plan.options)) for name in plan.substrates}
    plan = replace(plan, substrates=tuple(sorted(plan.substrates, key=lambda name: _expected_s(real[name]))))
    if any(workload.image != _HOST for workload in known.values()):
        return plan
    options = {name: dict(said) for name, said in plan.options.items()}
    for name in plan.substrates:
        if isinstance(real[name], Importing):
            options.setdefault(name, {}).setdefault("image", _SMALL)
    return replace(plan, options=options)


def _expected_s(substrate: Substrate) -> float:
    """Of a rollout, as it is elsewhere."""
    typical = substrate.typical if isinstance(substrate, Priced) else None
    return choice.expected(substrate.name, substrate.isolation, typical, None, None).rollout_s(choice.ACTIONS)


def _plan_of(first: Run) -> Plan:
    return plans.from_mapping(first.plan, where="the run's first record")


def _check_workloads(first: Run, done: begun.Done) -> None:
    """`UsageError` when a trial from now on would do something else than those in the file."""
    if done.is_complete:
        return
    known = _known(_plan_of(first))
    for tier, digest in done.workloads.items():
        if tier in known and known[tier].digest() != digest:
            raise UsageError(f"workload {tier!r} has changed since the run began; start a new one, its trials do not belong with these")


def _levels(text: str) -> dict[str, Any]:
    words = [word.strip() for word in text.split(",") if word.strip()]
    numbers = [word for word in words if word != "auto"]
    if not words or not all(word.isdecimal() and int(word) for word in numbers):
        raise UsageError(f"--concurrency {text!r}: write numbers as in 1,8,32, or auto")
    levels = [int(word) for word in numbers]
    return {"concurrency": levels or [1, 8, 32], "knee": True} if "auto" in words else {"concurrency": levels}


def _known(plan: Plan) -> dict[str, workloads.Workload]:
    """Every workload of the plan, read now: a wrong name or length is said before anything is measured."""
    known = {tier: workloads.load(tier) for tier, _ in plan.works}
    for tier, length in plan.works:
        if not known[tier].of_length(length):
            raise UsageError(
                f"workload {tier!r} has no actions of its own; name one of its lengths: {', '.join(map(str, known[tier].lengths))}"
            )
    return known


def _usable() -> list[str]:
    usable = []
    for name in substrates.names():
        substrate = substrates.load(name)
        reason = substrate.unavailable_reason()
        if reason is None and isinstance(substrate, Reluctant) and substrate.is_slow_to_try:
            reason = f"it would be emulated here, which is measured on request only: --substrate {name}"
        if reason is None and isinstance(substrate, Fastidious) and substrate.image_trouble(_HOST):
            reason = "it has no image 'host', which all are timed on"
        if reason is None:
            usable.append(name)
        else:
            print(f"untax: leaving {name} out: {one_line(reason)}", file=sys.stderr)
    return usable


def _maker(state_dir: str | None) -> runs.MakeEngine:
    def make(name: str, options: Mapping[str, Any]) -> untax.Engine:
        try:
            given = dict(options)
            return untax.Engine(given.pop("substrate", name), state_dir=state_dir, **given)
        except TypeError as exc:
            raise UsageError(f"[options.{name}]: {exc}") from exc

    return make


# ---- what is said ----


class _Progress:
    """One line on a terminal, with the time left; elsewhere a line now and then."""

    _EVERY_S = 15.0

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._said_at = time.monotonic()

    def __call__(self, done: int, total: int, left_s: float | None, case: str) -> None:
        now = time.monotonic()
        if not self._is_terminal and now - self._said_at < self._EVERY_S:
            return
        left = f", about {seconds(left_s)} left" if left_s is not None else ""
        line = f"{done} of {total} slots{left}: {one_line(case)}"
        if not self._is_terminal:
            self.say(line)
        else:
            with contextlib.suppress(OSError):
                print(f"\r\x1b[K{line[: _columns() - 1]}", end="", file=sys.stderr, flush=True)
        self._said_at = now

    def say(self, line: str) -> None:
        self.clear()
        with contextlib.suppress(OSError):  # a terminal that was closed; what is measured is more than what is said of it
            print(f"untax: {one_line(line)}", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._is_terminal:
            with contextlib.suppress(OSError):
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _columns() -> int:
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


def _conclude(arguments: argparse.Namespace, out: Path) -> int:
    records = out / _RECORDS
    files: list[Path] = [records]
    if arguments.parquet:
        from untax.meter import parquet

        parquet.write(records, out / "records.parquet")
        files.append(out / "records.parquet")
    summary = summaries.summarise(records)
    _keep_costs(arguments, records)
    page = None if arguments.no_report else _report(records, out)
    if arguments.json:
        document = {"untax_bench": 2, "records": str(records), "report": str(page) if page else None, **summaries.as_json(summary)}
        print(json.dumps(document))
    else:
        print("\n".join(one_line(line) for line in summaries.lines(summary)))
        for file in files:
            print(f"written: {file}", file=sys.stderr)
        if page is not None:
            print(f"report: {page}")
    return EXIT_INFRASTRUCTURE if any(row.failed for row in summary.rows.values()) or not summary.rows else 0


def _keep_costs(arguments: argparse.Namespace, records: Path) -> None:
    """For engines that choose among substrates. Its failure loses no record."""
    levels = {name: substrates.load(name).isolation for name in (*substrates.names(), *substrates.HOSTED)}
    try:
        found = profile.expected(profile.profiles(gather(records), levels))
        auto.keep_measured(chosen_state_dir(arguments.state_dir), found)
    except (UntaxError, OSError) as exc:
        print(f"untax: costs for Engine('auto') were not kept: {one_line(str(exc))}", file=sys.stderr)


def _report(records: Path, out: Path) -> Path | None:
    """The HTML report, where this installation can make one. Its failure loses no record."""
    if importlib.util.find_spec("untax.meter.report") is None:
        return None
    report = importlib.import_module("untax.meter.report")
    try:
        written: Sequence[Path] = report.write(records, out)
    except UntaxError as exc:
        print(f"untax: no report: {one_line(str(exc))}", file=sys.stderr)
        return None
    return written[0] if written else None
