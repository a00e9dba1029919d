"""Worker-hours, money and workers at the scale of a training run, from a run's records or from a number of seconds.

Worker-hours = trajectories × seconds ÷ 3600. Intervals are carried through; lengths beyond those measured are marked.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from untax.cli._progress import Progress
from untax.cli._terminal import one_line
from untax.core.errors import UsageError
from untax.meter import project, published, units
from untax.meter.gather import Gathered, gather
from untax.meter.prices import by_the_hour
from untax.meter.stats import Interval
from untax.meter.table import Table, Value, as_text

_MOST = 1e15  # trajectories or hours; beyond, a slip of the keyboard


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", nargs="?", metavar="RUN", help="directory or records.jsonl of `untax bench`")
    parser.add_argument("--seconds-per-trajectory", action="append", metavar="S", help="instead of a run; repeatable, to compare")
    parser.add_argument(
        "--seconds-per-action", action="append", metavar="S", help="instead of a run: S × --steps for each trajectory; repeatable"
    )
    parser.add_argument("--trajectories", type=_number, default=1e6, metavar="N", help="of the training run (default: 1000000)")
    parser.add_argument("--steps", type=_number, default=150, metavar="N", help="actions in a trajectory (default: %(default)s)")
    parser.add_argument("--tier", metavar="T", help="whose trajectories (default: the heaviest that the run has)")
    parser.add_argument("--price", type=_number, metavar="P", help="of a worker-hour")
    parser.add_argument(
        "--price-of",
        action="append",
        metavar="NAME=P",
        help="of an hour of one substrate (default: its usd_per_s in the run's plan; repeatable)",
    )
    parser.add_argument("--currency", default="USD", help="of the price (default: %(default)s)")
    parser.add_argument("--goal-hours", type=_number, metavar="H", help="say how many workers it takes to be done in so many hours")
    parser.add_argument(
        "--batch", type=int, action="append", metavar="N", help="rollouts of a synchronous batch (repeatable; default: 8 to 512)"
    )
    parser.add_argument("--sensitivity", action="store_true", help="also the hours for 10 to 300 actions and 10⁴ to 10⁷ trajectories")


def carry_out(arguments: argparse.Namespace) -> int:
    typed = arguments.seconds_per_trajectory or arguments.seconds_per_action
    if bool(arguments.run) == bool(typed):
        raise UsageError("name either a RUN or --seconds-per-trajectory (or --seconds-per-action)")
    if typed and arguments.price_of:
        raise UsageError("--price-of is of a RUN's substrates; for a number give --price")
    if any(batch < 1 for batch in arguments.batch or ()):
        raise UsageError("--batch needs at least one rollout")
    document, tables = _typed(arguments) if typed else _measured(arguments)
    print(json.dumps(document) if arguments.json else "\n\n".join(one_line_each(as_text(table)) for table in tables))
    return 0


def one_line_each(text: str) -> str:
    """Names in a table come from a file; none may drive the terminal."""
    return "\n".join(one_line(line) for line in text.splitlines())


def _number(text: str) -> float:
    try:
        value = float(text.replace(",", "").replace("_", ""))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value < _MOST:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and {_MOST:g}")
    return value


# ---- from a number ----


def _typed(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Table]]:
    times = [project.as_printed(text) for text in arguments.seconds_per_trajectory or ()]
    for text in arguments.seconds_per_action or ():
        value, interval = project.as_printed(text)
        times.append((value * arguments.steps, interval.scaled(arguments.steps)))
    scale = arguments.trajectories
    table = Table(
        "projection", f"{units.count(scale)} trajectories", ["a trajectory", "worker-hours", "as printed", *_extra_head(arguments)]
    )
    rows: list[dict[str, Any]] = []
    for value, interval in times:
        hours = project.worker_hours(value, scale)
        span = interval.scaled(scale / 3600)
        extra, fields = _extra(arguments, hours, span, arguments.price)
        table.add(f"{value:g} s", units.hours(hours), units.between(span, units.hours) if span.half_width else "exact", *extra)
        rows.append({"seconds_per_trajectory": value, "worker_hours": hours, "worker_hours_as_printed": _pair(span), **fields})
        if note := published.rounding(value, scale):
            table.notes.append(note)
            rows[-1]["note"] = note
    document: dict[str, Any] = {"untax_projection": 1, "trajectories": scale, "projections": rows}
    if len(times) > 1:
        slow, fast = max(value for value, _ in times), min(value for value, _ in times)
        more = project.worker_hours(slow - fast, scale)
        table.notes.insert(0, f"Slowest − fastest: {slow - fast:g} s, {units.hours(more)}; slowest ÷ fastest: {units.times(slow / fast)}.")
        document |= {"difference_hours": more, "ratio": slow / fast}
    table.notes.append("“As printed”: of all times that round to the digits given. Worker-hours = trajectories × seconds ÷ 3600.")
    return document, [table]


def _extra_head(arguments: argparse.Namespace, prices: Mapping[str, float] | None = None) -> list[str]:
    found = ["cost"] if prices else [f"cost at {arguments.price:g}/h"] if arguments.price else []
    return found + ([f"workers for {arguments.goal_hours:g} h"] if arguments.goal_hours else [])


def _extra(
    arguments: argparse.Namespace, hours: float, interval: Interval, price: float | None, *, has_cost: bool = False
) -> tuple[list[Value | str], dict[str, Any]]:
    """`has_cost`: other rows have a cost, so that this one has an empty place where it has no `price`."""
    cells: list[Value | str] = []
    fields: dict[str, Any] = {}
    if price:
        cost = interval.scaled(price)
        under = f"{units.money(cost.low, '').strip()}–{units.money(cost.high, '').strip()}"
        cells.append(Value(units.money(hours * price, arguments.currency), hours * price, under))
        fields |= {"cost": hours * price, "cost_interval": _pair(cost), "currency": arguments.currency, "price": price}
    elif has_cost:
        cells.append("")
    if arguments.goal_hours:
        workers = project.workers_for(hours, arguments.goal_hours)
        cells.append(Value(f"{workers:,}", workers))
        fields |= {"workers": workers, "goal_hours": arguments.goal_hours}
    return cells, fields


# ---- from a run ----


def _measured(arguments: argparse.Namespace) -> tuple[dict[str, Any], list[Table]]:
    with Progress() as progress:
        run = gather(Path(arguments.run), tell=lambda done, of: progress("reading records", done, of))
    tier = project.tier_for(run, arguments.tier)
    made, rows = _projections(arguments, run, tier)
    if not rows:
        raise UsageError(f"no trial of {tier} went well, so there is nothing to project from")
    batches, stalls = _stalls(arguments, run, tier)
    grids, cells = _grids(run, tier)
    document = {
        "untax_projection": 1,
        "run": run.run.run,
        "tier": tier,
        "steps": arguments.steps,
        "trajectories": arguments.trajectories,
        "measured_lengths": run.lengths(tier),
        "projections": rows,
        "synchronous": stalls,
        "sensitivity": cells,
    }
    return document, [made, batches, *(grids if arguments.sensitivity else ())]


def _projections(arguments: argparse.Namespace, run: Gathered, tier: str) -> tuple[Table, list[dict[str, Any]]]:
    models = project.models(run, tier)
    found = project.project(models, steps=arguments.steps, trajectories=arguments.trajectories)
    lengths = run.lengths(tier)
    prices = by_the_hour(run, arguments.price_of or [])
    table = Table(
        "projection",
        f"{units.count(arguments.trajectories)} trajectories of {arguments.steps:g} actions ({tier}), with 95 % intervals",
        ["", "n", "a trajectory", "worker-hours", "× fastest", "more than fastest", *_extra_head(arguments, prices)],
    )
    rows = []
    for one in found:
        price = prices.get(one.series.substrate, arguments.price)
        extra, fields = _extra(arguments, one.hours.value, one.hours.interval, price, has_cost=bool(prices))
        mark = " (extrapolated)" if one.seconds.is_extrapolated else ""
        table.add(
            f"{one.series}{mark}",
            str(one.n),
            Value(units.seconds(one.seconds.value), one.seconds.value, units.between(one.seconds.interval)),
            Value(units.hours(one.hours.value), one.hours.value, units.between(one.hours.interval, units.hours)),
            units.times(one.ratio),
            units.hours(one.more_hours),
            *extra,
        )
        rows.append(
            {
                "series": str(one.series), "n": one.n, "seconds_per_trajectory": one.seconds.value, "seconds_interval": _pair(one.seconds.interval),
                "worker_hours": one.hours.value, "worker_hours_interval": _pair(one.hours.interval), "extrapolated": one.seconds.is_extrapolated,
                "ratio_to_fastest": _finite(one.ratio), "more_hours_than_fastest": one.more_hours, **fields,
            }
        )  # fmt: skip
    measured = ", ".join(map(str, lengths)) if lengths else "the tier itself"
    for name, price in sorted(prices.items()):
        table.notes.append(f"An hour of {name} is taken to cost {price:g} {arguments.currency}.")
    if without := ", ".join(map(str, project.unprojected(run, tier, models))):
        table.notes.append(f"Not here, because no trajectory of theirs was measured: {without}.")
    table.notes.append(f"Measured lengths: {measured}. Mean time of a worker, failures and retries included; run {run.run.run}.")
    return table, rows


def _stalls(arguments: argparse.Namespace, run: Gathered, tier: str) -> tuple[Table, list[dict[str, Any]]]:
    lengths = run.lengths(tier)
    length = min(lengths, key=lambda one: abs(one - arguments.steps)) if lengths else 0
    sizes = arguments.batch or project.BATCHES
    table = Table(
        "stall",
        f"A synchronous batch waits for its slowest rollout ({tier}{f', {length} actions' if length else ''}): its time, and what workers wait",
        ["", "n", *(f"{size} rollouts" for size in sizes)],
    )
    rows = []
    for series in run.series:
        samples = run.of(series, tier, length)
        if samples is None:
            continue
        found = project.stalls(samples.total, sizes)
        cells = [
            Value(f"{'≥ ' if one.is_floor else ''}{units.seconds(one.slowest.value)}", one.slowest.value, units.share(one.waiting))
            for one in found
        ]
        table.add(str(series), str(samples.n), *cells)
        rows += [
            {
                "series": str(series), "length": length, "batch": one.batch, "slowest_s": one.slowest.value,
                "slowest_interval": _pair(one.slowest.interval), "waiting": one.waiting, "floor": one.is_floor,
            }
            for one in found
        ]  # fmt: skip
    table.notes.append("≥: the batch has more rollouts than there were trials, and slower ones than were measured are to be expected.")
    return table, rows


def _grids(run: Gathered, tier: str) -> tuple[list[Table], list[dict[str, Any]]]:
    tables, cells = [], []
    for series in run.series:
        model = project.by_length(run, series, tier)
        if model is None:
            continue
        table = Table(
            f"sensitivity-{series}", f"{series}: worker-hours by length and scale", ["actions", *map(units.count, project.SCALES)]
        )
        for steps, row in project.sensitivity(model).items():
            is_beyond = next(iter(row.values())).is_extrapolated
            found = [Value(units.hours(one.value), one.value, units.between(one.interval, units.hours)) for one in row.values()]
            table.add(f"{steps}{' *' if is_beyond else ''}", *found)
            cells += [
                {
                    "series": str(series), "steps": steps, "trajectories": scale, "worker_hours": one.value,
                    "worker_hours_interval": _pair(one.interval), "extrapolated": one.is_extrapolated,
                }
                for scale, one in row.items()
            ]  # fmt: skip
        tables.append(table)
    if tables:
        tables[-1].notes.append("* extrapolated: no trajectory as long or as short was measured.")
    return tables, cells


def _pair(interval: Interval) -> list[float]:
    return [interval.low, interval.high]


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
