"""The report's tables, from a view of a run. Every measured cell says how many trials are behind it, or its row or the cell before it does."""

from __future__ import annotations

import math
from dataclasses import replace

from untax.meter import project, published, units
from untax.meter.checks import RESOLUTION, narrowing
from untax.meter.gather import Gathered, Samples, Series, is_plain
from untax.meter.stats import Interval, Spread, difference, of_ordered, percentile, percentile_interval
from untax.meter.table import Cell, Table, Value
from untax.meter.view import View, column

MILLION = published.TRAJECTORIES
_NONE = "–"
_MOST_PAIRS = 60  # of series at one step; all pairs of more would be read by nobody


def summary(view: View) -> Table:
    """The referee's table: per series cold start, its spread, and worker-hours."""
    tiers = view.run.tiers
    lightest = tiers[0] if tiers else ""
    table = Table(
        "summary",
        "Summary by substrate",
        ["", f"start {lightest} p50", "p95", "SD", f"tax of {view.heaviest}", f"{published.STEPS} actions", "worker-hours / 1 M", "failed"],
    )
    hours = {one.series: one for one in projected(view)}
    least_s = RESOLUTION * view.run.run.span_cost_ns * 1e-9
    for series in view.series:
        light, heavy = view.run.of(series, lightest), view.run.of(series, view.heaviest)
        start = view.spread(light, "first_command") if light else None
        one = hours.get(series)
        beyond = " *" if one and one.seconds.is_extrapolated else ""
        table.add(
            str(series),
            *_start(start, least_s),
            Value(units.share(heavy.tax_share), heavy.tax_share, f"n {heavy.n}") if heavy else _NONE,
            Value(units.seconds(one.seconds.value) + beyond, one.seconds.value, f"{units.between(one.seconds.interval)}\nn {one.n}")
            if one
            else _NONE,
            Value(units.hours(one.hours.value) + beyond, one.hours.value, units.between(one.hours.interval, units.hours)) if one else _NONE,
            _failed(view, series),
        )
    table.notes.append(
        f"Start: asking for a sandbox until its first command could run ({lightest}). Tax: share of a {view.heaviest} episode that is neither the agent’s own commands nor those of the set-up. "
        f"Small: 95 % bootstrap intervals, and the number of trials of a cell and of those to its right that have none of their own."
    )
    text = " ".join(str(cell) for row in table.rows for cell in row)
    if " *" in text:
        lengths = {length for one in hours.values() if one.seconds.is_extrapolated for length in view.models[one.series].points}
        measured = ", ".join(map(str, sorted(lengths)))
        table.notes.append(f"* extrapolated: no trajectory of {published.STEPS} actions was measured there (only of {measured}).")
    if " †" in text:
        table.notes.append(f"† below resolution: under {RESOLUTION} × what a span costs here. Not to be compared.")
    return table


def _start(start: Spread | None, least_s: float) -> tuple[Cell, Cell, Cell]:
    if start is None:
        return _NONE, _NONE, _NONE
    mark = " †" if start.p50 < least_s else ""
    return (
        Value(units.seconds(start.p50) + mark, start.p50, f"{units.between(start.p50_interval)}\nn {start.n}"),
        Value(units.seconds(start.p95) + mark, start.p95, units.between(start.p95_interval)),
        Value(units.seconds(start.sd) + mark, start.sd, units.between(start.sd_interval)),
    )


def _failed(view: View, series: Series) -> Value:
    cases = [one for one in view.run.cases.values() if one.series == series]
    failed, all_ = sum(one.failed for one in cases), sum(one.failed + one.n for one in cases)
    return Value(f"{failed} of {all_:,}", failed)


def projected(view: View) -> list[project.Projection]:
    """A million trajectories of the paper's length, the fastest series first."""
    return project.project(view.models, steps=published.STEPS, trajectories=MILLION)


# ---- the paper's tables ----


def table_1(view: View) -> Table:
    """The paper's rows, and the same arithmetic over what each series pays once and with every action."""
    table = Table(
        "table-1",
        "Table 1: small overheads at scale",
        ["", "n", "per rollout", "hours / 1 M rollouts", "per action", f"hours / 1 M × {published.STEPS} actions"],
    )
    for row in published.TABLE_1:
        hours = Value(
            units.hours(project.worker_hours(row.seconds_per_trajectory, MILLION)),
            project.worker_hours(row.seconds_per_trajectory, MILLION),
        )
        each = row.seconds_per_trajectory / published.STEPS
        is_once = row.words.endswith("rollout")
        cells: tuple[Cell, ...] = (units.seconds(1.0), hours, "", "") if is_once else ("", "", units.seconds(each), hours)
        table.add("paper: " + row.words, "", *cells)
    for series in view.series:
        samples = view.run.of(series, view.heaviest, max(view.lengths(), default=0)) or view.run.of(series, view.heaviest)
        if samples is None:
            continue
        parts = samples.mean_parts
        once = sum(parts[name] for name in ("queue", "create", "ready", "reset", "cleanup"))
        each = (parts["dispatch"] + parts["observe"]) * samples.n / samples.actions if samples.actions else 0.0
        more = project.worker_hours(once, MILLION), project.worker_hours(each * published.STEPS, MILLION)
        table.add(
            str(series),
            Value(str(samples.n), samples.n),
            Value(units.seconds(once), once),
            Value(units.hours(more[0]), more[0]),
            Value(units.seconds(each), each),
            Value(units.hours(more[1]), more[1]),
        )
    table.notes.append(
        "Per rollout: queue, create, ready, reset, cleanup. Per action: dispatch and observe. The repository’s set-up and the commands themselves are in neither."
    )
    return table


def table_2(view: View) -> Table:
    """Slowest, fastest and what lies between them, at a million trajectories."""
    table = Table(
        "table-2",
        f"Table 2: {published.STEPS} actions, one million trajectories",
        ["case", "series", "n", "a trajectory", "worker-hours"],
        key=2,
    )
    found = projected(view)
    if found:
        for words, one in (("slowest", found[-1]), ("fastest", found[0])):
            mark = " (extrapolated)" if one.seconds.is_extrapolated else ""
            table.add(
                words + mark,
                str(one.series),
                Value(str(one.n), one.n),
                Value(units.seconds(one.seconds.value), one.seconds.value, units.between(one.seconds.interval)),
                Value(units.hours(one.hours.value), one.hours.value, units.between(one.hours.interval, units.hours)),
            )
        apart = found[-1].seconds.value - found[0].seconds.value
        table.add("difference", "", "", Value(units.seconds(apart), apart), Value(units.hours(found[-1].more_hours), found[-1].more_hours))
    for row in published.TABLE_2:
        table.add(f"paper: {row.words}", "", "", Value(f"{row.seconds:g} s", row.seconds), Value(f"{row.hours:,} h", row.hours))
    table.notes.append(
        f"The paper’s hours were computed before its seconds were rounded: {published.TABLE_2[0].hours:,} h is {published.TABLE_2[0].computed_from:.2f} s a trajectory, "
        f"printed as {published.TABLE_2[0].seconds:g} s (exactly {published.TABLE_2[0].seconds:g} s would be {project.worker_hours(published.TABLE_2[0].seconds, MILLION):,.0f} h)."
    )
    return table


def against_the_paper(view: View) -> Table:
    """Its findings beside this run's. Sizes depend on hardware; whether they move the same way is what can be compared."""
    table = Table("paper", "Beside the paper’s published values", ["finding", "paper", "this run", "same way?"])
    found = projected(view)
    by_axis = {(one.axis, one.steps): one for one in narrowing(view.run)}
    tiers = next((one for (axis, _), one in by_axis.items() if axis == "tier"), None)
    if tiers is not None:
        first, last = tiers.steps[0], tiers.steps[-1]
        table.add(
            f"slowest ÷ fastest, fresh {first} episode",
            f"{published.COLD_START_SPREAD:g} × (T0)",
            Value(units.times(tiers.gaps[0]), tiers.gaps[0]),
            "",
        )
        table.add(
            f"slowest ÷ fastest, fresh {last} episode",
            f"{published.T2_SPREAD:g} × (T2)",
            Value(units.times(tiers.gaps[-1]), tiers.gaps[-1]),
            "",
        )
        way = " → ".join(units.times(gap) for gap in tiers.gaps)
        table.add("the gap narrows with heavier tiers", "yes", way, "yes" if tiers.narrows else "no")
    for (axis, _), one in by_axis.items():
        if axis == "length":
            way = " → ".join(units.times(gap) for gap in one.gaps)
            table.add(f"the gap narrows with length ({one.steps[0]} … {one.steps[-1]})", "yes", way, "yes" if one.narrows else "no")
    if len(found) > 1:
        spread = found[-1].ratio
        is_apart = not found[-1].seconds.interval.overlaps(found[0].seconds.interval)
        words = "yes" if is_apart else "not told apart"
        table.add(
            f"slowest ÷ fastest worker-hours, {published.STEPS} actions",
            f"{published.WORKER_HOUR_SPREAD:g} ×",
            Value(units.times(spread), spread),
            words,
        )
        table.add(
            "hours between them, one million",
            f"{published.TABLE_2[2].hours:,} h",
            Value(units.hours(found[-1].more_hours), found[-1].more_hours),
            words,
        )
    if not table.rows:
        table.notes.append("Nothing to compare: it takes two substrates that were measured on the same tiers or lengths.")
    else:
        table.notes.append("The paper measured other substrates on other machines: compare how things move rather than how large they are.")
    return table


# ---- differences ----


def differences(view: View) -> Table:
    """Each cold series against the fastest of its step."""
    table = Table(
        "differences",
        "Differences between substrates",
        ["step", "series", "against the fastest", "n", "difference of medians", "ratio", "Cliff’s delta"],
        key=3,
    )
    for step, rows in _steps(view):
        fastest = min(rows, key=lambda row: percentile(column(row[1], "total"), 50))
        for series, samples in rows:
            if samples is not fastest[1]:
                table.add(step, str(series), str(fastest[0]), *_difference(fastest[1], samples))
    table.notes.append(
        "Total time of a trial. 95 % intervals of medians by bootstrap; delta 1: every trial of it was slower than every one of the fastest."
    )
    return table


def all_pairs(view: View) -> Table:
    """For the CSV: every two cold series at every step."""
    table = Table(
        "pairs",
        "All pairs",
        ["step", "a", "b", "n a", "n b", "b − a, s", "low", "high", "b ÷ a", "low", "high", "Cliff’s delta", "effect"],
        key=3,
    )
    for step, rows in _steps(view):
        pairs = [(a, b) for n, a in enumerate(rows) for b in rows[n + 1 :]][:_MOST_PAIRS]
        for (a_series, a), (b_series, b) in pairs:
            found = difference(a.total, b.total)
            numbers = [
                found.seconds, found.seconds_interval.low, found.seconds_interval.high, found.ratio, found.ratio_interval.low,
                found.ratio_interval.high, found.delta,
            ]  # fmt: skip
            counts = (Value(str(a.n), a.n), Value(str(b.n), b.n))
            table.add(step, str(a_series), str(b_series), *counts, *(Value(f"{number:g}", number) for number in numbers), found.effect)
    return table


def _steps(view: View) -> list[tuple[str, list[tuple[Series, Samples]]]]:
    found = []
    for tier in view.run.tiers:
        for length in (0, *view.run.lengths(tier)):
            rows = [(series, samples) for series in view.cold if (samples := view.run.of(series, tier, length))]
            if len(rows) > 1:
                found.append((f"{tier} × {length}" if length else tier, rows))
    return found


def _difference(a: Samples, b: Samples) -> tuple[Cell, ...]:
    found = difference(a.total, b.total)
    is_sure = "" if found.is_told_apart else "\nnot told apart"
    return (
        Value(f"{b.n} / {a.n}", b.n),
        Value(f"+{units.seconds(found.seconds)}", found.seconds, _signed(found.seconds_interval)),
        Value(units.times(found.ratio), found.ratio, units.between(found.ratio_interval, units.times)),
        Value(f"{found.delta:+.2f}", found.delta, found.effect + is_sure),
    )


def _signed(interval: Interval) -> str:
    return f"{units.seconds(interval.low)} to {units.seconds(interval.high)}"


# ---- further axes, projection, batches ----


def conditions(view: View) -> Table | None:
    """What contention and a missing image do to a case; None where the run has neither."""
    table = Table(
        "conditions", "Under contention, and without the image", ["case", "n", "p50", "p95", "p50 ÷ undisturbed", "p95 ÷ undisturbed"]
    )
    for case, samples in sorted(
        view.run.cases.items(), key=lambda one: (str(replace(one[0], contention="none", image="present")), str(one[0]))
    ):
        if not samples.n or (case.contention == "none" and case.image == "present"):
            continue
        quiet = view.run.cases.get(replace(case, contention="none", image="present"))
        found, base = view.spread(samples), view.spread(quiet) if quiet else None
        assert found is not None
        ratios = [_ratio(found.p50, base.p50), _ratio(found.p95, base.p95)] if base else [_NONE, _NONE]
        table.add(
            str(case),
            Value(str(found.n), found.n),
            Value(units.seconds(found.p50), found.p50, units.between(found.p50_interval)),
            Value(units.seconds(found.p95), found.p95, units.between(found.p95_interval)),
            *ratios,
        )
    return table if table.rows else None


def starts(view: View) -> Table | None:
    """What a control plane told of each step of a cold start, over all plain cases; None where no record has it."""
    found: dict[Series, dict[str, list[float]]] = {}
    for samples in view.run.where(lambda case: is_plain(case) and case.warmth == "cold"):
        for name, values in samples.start_parts.items():
            found.setdefault(samples.series, {}).setdefault(name, []).extend(values)
    names = list(dict.fromkeys(name for parts in found.values() for name in parts))
    table = Table("starts", "Where a pod’s start goes", ["", *names])
    for series in view.cold:
        if series in found:
            table.add(str(series), *(_median(found[series].get(name)) for name in names))
    table.notes.append(
        "Medians, each by itself: they need not add up to that of a start. From the control plane’s own events, as they reached the meter."
    )
    return table if table.rows else None


def _median(values: list[float] | None) -> Cell:
    if not values:
        return _NONE
    ordered = sorted(values)
    middle = of_ordered(ordered, 50)
    return Value(units.seconds(middle), middle, f"{units.between(percentile_interval(ordered, 50))}\nn {len(ordered)}")


def _ratio(above: float, below: float) -> Cell:
    return Value(units.times(above / below), above / below) if below else _NONE


def sensitivity(view: View) -> list[Table]:
    """Worker-hours of each series by length and scale."""
    tables: list[Table] = []
    for series, model in view.models.items():
        table = Table(f"sensitivity-{len(tables)}", str(series), ["actions", *map(units.count, project.SCALES)])
        for steps, row in project.sensitivity(model).items():
            is_beyond = next(iter(row.values())).is_extrapolated
            cells = [Value(units.hours(one.value), one.value, units.between(one.interval, units.hours)) for one in row.values()]
            table.add(Value(f"{steps}", steps, "extrapolated" if is_beyond else ""), *cells)
        table.notes.append("Measured at " + ", ".join(f"{length} actions (n {n})" for length, n in sorted(model.trials.items())) + ".")
        tables.append(table)
    return tables


def stalls(view: View) -> Table | None:
    """What a synchronous batch waits for its slowest."""
    length = max(view.lengths(), default=0)
    step = f"{view.heaviest}, {length} actions" if length else view.heaviest
    table = Table(
        "stall", f"A synchronous batch waits for its slowest rollout ({step})", ["", "n", *(f"{size} rollouts" for size in project.BATCHES)]
    )
    for series in view.series:
        samples = view.run.of(series, view.heaviest, length)
        if samples is None:
            continue
        found = project.stalls(samples.total, project.BATCHES)
        cells = [
            Value(
                f"{'≥ ' if one.is_floor else ''}{units.seconds(one.slowest.value)}",
                one.slowest.value,
                f"{units.between(one.slowest.interval)}\nwaiting {units.share(one.waiting)}",
            )
            for one in found
        ]
        table.add(str(series), Value(str(samples.n), samples.n), *cells)
    table.notes.append(
        "Expected time of the slowest, and the share of workers’ time spent waiting for it, from the measured distribution. “≥”: more rollouts than there were "
        "trials, so slower ones than were measured are to be expected."
    )
    return table if table.rows else None


def against(view: View, other: Gathered) -> Table:
    """The cases that two runs have in common: whether they agree within their intervals."""
    table = Table(
        "against",
        f"Beside run {other.run.run}",
        ["case", "n", "p50 here", "p50 there", "here ÷ there", "agree?"],
    )
    agreed = 0
    for case, samples in sorted(view.run.cases.items(), key=lambda one: str(one[0])):
        there = other.cases.get(case)
        if not samples.n or there is None or not there.n:
            continue
        found = difference(there.total, samples.total)
        mine, theirs = sorted(samples.total), sorted(there.total)
        agreed += not found.is_told_apart
        table.add(
            str(case),
            Value(f"{samples.n} / {there.n}", samples.n),
            Value(units.seconds(of_ordered(mine, 50)), of_ordered(mine, 50), units.between(percentile_interval(mine, 50))),
            Value(units.seconds(of_ordered(theirs, 50)), of_ordered(theirs, 50), units.between(percentile_interval(theirs, 50))),
            Value(units.times(found.ratio), found.ratio, units.between(found.ratio_interval, units.times)),
            "no" if found.is_told_apart else "yes",
        )
    share = f"{agreed} of {len(table.rows)} cases agree within their intervals; of runs that measure the same, about one case in twenty does not."
    table.notes.append(share if table.rows else "The two runs have no case in common.")
    return table


def every_case(view: View) -> Table:
    """For the CSV and the appendix: all cases, all statistics."""
    head = [
        "substrate", "path", "warmth", "tier", "actions", "at once", "image", "contention", "n", "failed", "p50", "p95", "p99", "mean", "SD", "min", "max",
        "far out", "worker seconds",
    ]  # fmt: skip
    table = Table("cases", "Every case", head, key=8)
    for case, samples in sorted(view.run.cases.items(), key=lambda one: (not is_plain(one[0]), str(one[0]))):
        found = view.spread(samples)
        numbers = [found.p50, found.p95, found.p99, found.mean, found.sd, found.min, found.max] if found else [math.nan] * 7
        worker = samples.worker_per_trajectory if samples.n else math.nan
        table.add(
            case.substrate, case.path, case.warmth, case.tier, Value(str(case.length), case.length), Value(str(case.concurrency), case.concurrency),
            case.image, case.contention, Value(str(samples.n), samples.n), Value(str(samples.failed), samples.failed),
            *(Value(units.seconds(number), number) for number in numbers), Value(str(found.far_out) if found else _NONE, found.far_out if found else math.nan),
            Value(units.seconds(worker), worker),
        )  # fmt: skip
    table.notes.append("Seconds of a whole trial. Worker seconds: for each trajectory that went well, failures and retries included.")
    return table
