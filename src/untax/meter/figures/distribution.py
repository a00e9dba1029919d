"""Figure 3: how cold starts are distributed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from untax.meter import units
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, Scale, log_scale, series_colour, text_width
from untax.meter.stats import Spread
from untax.meter.table import Table, Value
from untax.meter.view import Style, View, column

_ROW = 34
_MOST_DOTS = 150  # of one row; of more samples an even selection, and all that lie far out up to as many
Row = tuple[str, Style, Sequence[float], Spread]


def make(view: View) -> Figure:
    groups: dict[str, list[Row]] = {}
    for tier in view.run.tiers:
        for series in view.cold:
            samples = view.run.of(series, tier)
            found = view.spread(samples, "first_command") if samples else None
            if samples and found and found.p50 > 0:
                groups.setdefault(tier, []).append((str(series), view.styles[series], column(samples, "first_command"), found))
    figure = Figure(
        3,
        "distribution",
        "How cold starts are distributed",
        "Time until the first command could run, divided by its own median, so that steady and unsteady substrates can be told apart whatever their "
        "speed. Each dot is a trial; the box holds the middle half, the line reaches from the 5th to the 95th percentile. Outliers are shown and counted, never dropped.",
        "cold cases of the tiers themselves, one rollout at a time, good trials without warm-up",
    )
    if not groups:
        figure.missing = "No cold case of a tier went well. Run `untax bench` with a tier and cold starts."
        return figure
    for rows in groups.values():
        rows.sort(key=lambda row: row[3].p50)
    figure.data = [_table(groups)]
    figure.draw = lambda width: _draw(groups, width)
    return figure


def _draw(groups: dict[str, list[Row]], width: float) -> Canvas:
    canvas = Canvas(width)
    rows = [row for group in groups.values() for row in group]
    left = 4.0 if canvas.is_narrow else max(text_width(row[0]) for row in rows) + 22
    tail = 12 if canvas.is_narrow else 128
    scale = log_scale([0.85, 1.2, *(value / row[3].p50 for row in rows for value in (row[3].min, row[3].max))], left, width - tail)
    height = _ROW + (14 if canvas.is_narrow else 0)
    y = 4.0
    for tier, group in groups.items():
        canvas.text(0, y + 10, tier, "strong")
        canvas.text(width, y + 10, "p50,  p95 ÷ p50", "muted end")
        y += 18
        bottom = y + height * len(group)
        for tick in scale.ticks(4 if canvas.is_narrow else 8):
            canvas.line(scale(tick), y, scale(tick), bottom, kind="grid")
            canvas.text(scale(tick), bottom + 13, f"{tick:g} ×", "muted small middle")
        for n, row in enumerate(group):
            _row(canvas, row, y + n * height + (14 if canvas.is_narrow else 0) + _ROW / 2, scale, left, width)
        y = bottom + 30
    canvas.height = y - 8
    return canvas


def _row(canvas: Canvas, row: Row, y: float, scale: Scale, left: float, width: float) -> None:
    name, style, values, found = row
    colour = series_colour(style)
    median = found.p50
    spread = f"{units.seconds(median)},  {units.times(found.p95 / median)}"
    canvas.text(width, y - 15 if canvas.is_narrow else y + 4, spread, "end")
    if canvas.is_narrow:
        canvas.text(0, y - 15, name)
    else:
        canvas.text(left - 14, y + 4, name, "end")
    rng = random.Random(found.n)  # a dot's height says nothing; the same file gives the same picture
    for value in selection(values, found):
        canvas.dot(scale(value / median), y + rng.uniform(-9, 9), 1.7, colour, opacity=0.5)
    canvas.line(scale(found.p05 / median), y, scale(found.p95 / median), y, "var(--ink)", width=1.2)
    canvas.rect(
        scale(found.p25 / median),
        y - 8,
        max(2.0, scale(found.p75 / median) - scale(found.p25 / median)),
        16,
        colour,
        opacity=0.35,
        radius=2,
    )
    hint = (
        f"{name}: p50 {units.seconds(found.p50)}, p95 {units.seconds(found.p95)}, p99 {units.seconds(found.p99)}, SD {units.seconds(found.sd)}, "
        f"from {units.seconds(found.min)} to {units.seconds(found.max)}, {found.far_out} far out, n = {found.n}"
    )
    canvas.rect(scale(1.0) - 1, y - 10, 2, 20, "var(--ink)", title=hint)


def selection(values: Sequence[float], found: Spread) -> list[float]:
    """At most so many samples that a picture can show: evenly through their order, and the far out ones all, or the extreme ones of them."""
    ordered = sorted(values)
    n = len(ordered)
    if n <= _MOST_DOTS:
        return ordered
    wide = 3 * (found.p75 - found.p25)
    far = [value for value in ordered if value < found.p25 - wide or value > found.p75 + wide]
    shown = [ordered[k * (n - 1) // (_MOST_DOTS - 1)] for k in range(_MOST_DOTS)]
    return shown + far[-_MOST_DOTS:]


def _table(groups: dict[str, list[Row]]) -> Table:
    head = ["tier", "series", "n", "min", "p50", "p95", "p99", "max", "mean", "SD", "far out"]
    table = Table("distribution", "Time to the first command", head, key=2)
    for tier, rows in groups.items():
        for name, _, _, found in rows:
            table.add(
                tier,
                name,
                Value(str(found.n), found.n),
                Value(units.seconds(found.min), found.min),
                Value(units.seconds(found.p50), found.p50, units.between(found.p50_interval)),
                Value(units.seconds(found.p95), found.p95, units.between(found.p95_interval)),
                Value(units.seconds(found.p99), found.p99, units.between(found.p99_interval)),
                Value(units.seconds(found.max), found.max),
                Value(units.seconds(found.mean), found.mean, units.between(found.mean_interval)),
                Value(units.seconds(found.sd), found.sd, units.between(found.sd_interval)),
                Value(str(found.far_out), found.far_out),
            )
    table.notes.append(
        "Below: 95 % bootstrap intervals. “≥”: so many trials do not bound it from above. Far out: beyond three quartile distances."
    )
    return table
