"""Rank substrates, isolation and pool sizes for rollouts that you describe, from a run's measurements.

Nothing with a weaker boundary than asked for is ever offered. With the reasoning, and the lengths at which one way gives way to another.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from untax import substrates
from untax.cli._progress import Progress
from untax.cli._terminal import one_line
from untax.core.errors import UsageError
from untax.core.spec import ISOLATION_LEVELS
from untax.meter import units
from untax.meter.advise import Advice, Option, Rollouts, advise
from untax.meter.gather import Gathered, gather
from untax.meter.prices import by_the_hour
from untax.meter.profile import profiles
from untax.meter.table import Table, Value, as_text

_SHOWN = 12
_KINDS = {"command": "T0", "inspect": "T1", "work": "T2"}
"""What the actions of each tier resemble."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="directory or records.jsonl of `untax bench`")
    parser.add_argument("--length", type=float, default=150, metavar="N", help="actions of a rollout (default: %(default)s)")
    parser.add_argument("--parallel", type=int, default=1, metavar="N", help="rollouts under way at once (default: %(default)s)")
    parser.add_argument(
        "--isolation", choices=ISOLATION_LEVELS, default="namespace", help="weakest boundary accepted (default: %(default)s)"
    )
    parser.add_argument(
        "--resets", type=float, default=0, metavar="N", help="clean sandboxes a rollout needs beside its first (default: 0)"
    )
    parser.add_argument(
        "--mix",
        metavar="KIND=SHARE,…",
        help="of actions: command (as in T0), inspect (T1), work (T2), or a tier's name (default: as measured)",
    )
    parser.add_argument("--together", action="store_true", help="rollouts begin in batches of --parallel rather than one by one")
    parser.add_argument("--price", type=float, default=1.0, metavar="P", help="of a worker-hour (default: %(default)s)")
    parser.add_argument(
        "--price-of",
        action="append",
        metavar="NAME=P",
        help="of an hour of one substrate (default: its usd_per_s in the run's plan; repeatable)",
    )
    parser.add_argument(
        "--idle-share", type=float, default=1.0, metavar="X", help="what an idle sandbox costs of a busy one (default: %(default)s)"
    )
    parser.add_argument("--by", choices=("cost", "time"), default="cost", help="what to rank by (default: %(default)s)")
    parser.add_argument("--tier", metavar="T", help="whose trajectories (default: the heaviest that the run has)")
    parser.add_argument(
        "--isolation-of", action="append", metavar="NAME=LEVEL", help="of a substrate that this installation does not know (repeatable)"
    )


def carry_out(arguments: argparse.Namespace) -> int:
    rollouts = Rollouts(
        length=arguments.length,
        isolation=arguments.isolation,
        parallel=arguments.parallel,
        resets=arguments.resets,
        mix=_mix(arguments.mix),
        price=arguments.price,
        idle_share=arguments.idle_share,
        burst=float(arguments.parallel) if arguments.together else 1.0,
    )
    with Progress() as progress:
        run = gather(Path(arguments.run), tell=lambda done, of: progress("reading records", done, of))
    levels = _levels(run, arguments.isolation_of or [])
    unknown = sorted({case.substrate for case in run.cases} - levels.keys())
    absent = _left_out(run, levels, unknown)
    try:
        advice = advise(profiles(run, levels, arguments.tier, by_the_hour(run, arguments.price_of or [])), rollouts, by=arguments.by)
    except UsageError as exc:
        if not absent:
            raise
        raise UsageError(f"{exc}; left out: {'; '.join(f'{name}: {reason}' for name, reason in absent.items())}") from exc
    if arguments.json:
        print(json.dumps(_document(advice, absent)))
    else:
        print("\n".join(one_line(line) for line in _text(advice, rollouts, absent).splitlines()))
    return 0


def _mix(text: str | None) -> dict[str, float]:
    found = {}
    for part in text.split(",") if text else ():
        kind, _, share = part.partition("=")
        try:
            found[_KINDS.get(kind.strip(), kind.strip())] = float(share)
        except ValueError:
            raise UsageError(f"--mix: {part!r} is not KIND=SHARE; write something like inspect=0.6,work=0.4") from None
    return found


def _levels(run: Gathered, given: list[str]) -> dict[str, str]:
    known = set(substrates.names())
    found = {name: substrates.load(name).isolation for name in {case.substrate for case in run.cases} & known}
    found |= _hosted_levels(run)
    for text in given:
        name, _, level = text.rpartition("=")
        if level not in ISOLATION_LEVELS:
            raise UsageError(f"--isolation-of: {text!r} is not NAME=LEVEL with a level of {', '.join(ISOLATION_LEVELS)}")
        if name in found and found[name] != level:
            raise UsageError(f"--isolation-of: {name} has isolation {found[name]!r}, which is not a matter of choice")
        found[name] = level
    return found


def _hosted_levels(run: Gathered) -> dict[str, str]:
    """Of providers' sandboxes, by what the records say that they promised: one adapter serves providers of several kinds."""
    return {
        one.case.substrate: one.detail["isolation"]
        for one in run.cases.values()
        if one.ran_as in substrates.HOSTED and one.detail.get("isolation") in ISOLATION_LEVELS
    }


def _left_out(run: Gathered, levels: Mapping[str, str], unknown: list[str]) -> dict[str, str]:
    """What was measured and cannot be advised, and why."""
    found = {
        one.case.substrate: f"it ran as {one.ran_as}, which is another boundary and another speed"
        for one in run.cases.values()
        if one.n and not one.is_of(levels.get(one.case.substrate, ""))
    }
    return found | {name: f"its isolation level is not known here; say it with --isolation-of {name}=LEVEL" for name in unknown}


def _text(advice: Advice, rollouts: Rollouts, absent: Mapping[str, str]) -> str:
    table = Table(
        "advice",
        f"Rollouts of {rollouts.length:g} actions, {rollouts.parallel} at once, isolation {rollouts.isolation} or stronger; best by {advice.by} first",
        ["", "isolation", "pool", "found", "a rollout", "tax", "cost of 1,000", "by cost", "by time", "n"],
    )
    ranks = {name: sorted(advice.options, key=key) for name, key in (("cost", lambda one: one.cost), ("time", lambda one: one.seconds))}
    for option in advice.options[:_SHOWN]:
        table.add(
            option.profile.name,
            option.profile.isolation,
            str(option.pool) + (" *" if option.is_assumed else ""),
            units.share(option.hit_rate) if option.pool else "–",
            Value(units.seconds(option.seconds), option.seconds, units.between(option.interval)),
            units.share(option.tax_share),
            units.money(option.cost * 1000, "").strip(),
            *(f"{ranks[name].index(option) + 1}." for name in ("cost", "time")),
            str(option.profile.n),
        )
    if any(option.is_assumed for option in advice.options):
        table.notes.append("* no warm start was measured; the pool is taken to hide create and ready, and nothing else")
    lines = [as_text(table), "", f"Advice: {advice.best.name}.", *(f"  {reason}" for reason in advice.reasons)]
    if advice.break_evens:
        lines += ["", "Break-even lengths, without pools:"]
        for one in advice.break_evens:
            where = f"up to {one.length:,.0f} actions, {one.long} beyond" if one.length is not None else "at any length"
            lines.append(f"  {one.short} rather than {one.long}: {where}" if one.length is None else f"  {one.short} {where}")
    lines += [f"Left out: {name}: {reason}" for name, reason in {**advice.left_out, **absent}.items()]
    return "\n".join(lines)


def _document(advice: Advice, absent: Mapping[str, str]) -> dict[str, Any]:
    return {
        "untax_advice": 1,
        "by": advice.by,
        "options": [_option(option) for option in advice.options],
        "reasons": list(advice.reasons),
        "break_evens": [{"short": one.short, "long": one.long, "length": one.length} for one in advice.break_evens],
        "left_out": {**advice.left_out, **absent},
    }


def _option(option: Option) -> dict[str, Any]:
    profile = option.profile
    assert math.isfinite(option.cost)
    return {
        "substrate": profile.substrate, "path": profile.path, "isolation": profile.isolation, "pool": option.pool, "hit_rate": option.hit_rate,
        "seconds": option.seconds, "seconds_interval": [option.interval.low, option.interval.high], "cost": option.cost, "tax_share": option.tax_share,
        "assumed_warm_start": option.is_assumed, "n": profile.n,
    }  # fmt: skip
