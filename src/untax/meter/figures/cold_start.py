"""Figure 2: cold starts by substrate and tier."""

from __future__ import annotations

from untax.meter import units
from untax.meter.checks import below_resolution
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, legend, log_scale, series_colour, text_width
from untax.meter.gather import Samples
from untax.meter.stats import Spread
from untax.meter.table import Table, Value
from untax.meter.view import Style, View

_ROW = 24
Row = tuple[str, Style, Samples, Spread, Spread | None]


def make(view: View) -> Figure:
    groups: dict[str, list[Row]] = {}
    for tier in view.run.tiers:
        for series in view.cold:
            samples = view.run.of(series, tier)
            episode = samples and (view.spread(samples, "fresh_episode") or view.spread(samples))
            if samples and episode:
                groups.setdefault(tier, []).append(
                    (str(series), view.styles[series], samples, episode, view.spread(samples, "first_command"))
                )
    figure = Figure(
        2,
        "cold-start",
        "Cold starts, by substrate and tier",
        "Median of a fresh episode (create, the tier’s work, gone again) with its 95 % interval, on a logarithmic axis; the fine line goes on "
        "to the p95. The small tick is the median until the first command could run.",
        "cold cases of the tiers themselves, one rollout at a time, good trials without warm-up",
    )
    if not groups:
        figure.missing = "No cold case of a tier went well. Run `untax bench` with a tier and cold starts."
        return figure
    for rows in groups.values():
        rows.sort(key=lambda row: row[3].p50)
    figure.data = [_table(groups, view.run.run.span_cost_ns)]
    figure.draw = lambda width: _draw(groups, width)
    return figure


def _draw(groups: dict[str, list[Row]], width: float) -> Canvas:
    canvas = Canvas(width)
    rows = [row for group in groups.values() for row in group]
    values = [value for row in rows for value in (row[3].p50, row[3].p95, row[4].p50 if row[4] else row[3].p50)]
    left = 4.0 if canvas.is_narrow else max(text_width(row[0]) for row in rows) + 22
    tail = text_width(max((units.seconds(row[3].p50) for row in rows), key=len)) + 12
    scale = log_scale(values, left, width - tail)
    height = _ROW + (14 if canvas.is_narrow else 0)
    y = legend(canvas, 14, [("fresh episode, p50 and 95 % interval", Style(7, False, False)), ("first command, p50", "var(--muted)")]) + 4
    for tier, group in groups.items():
        slow, fast = group[-1][3].p50, group[0][3].p50
        gap = f"slowest ÷ fastest {units.times(slow / fast)}" if len(group) > 1 and fast else ""
        canvas.text(0, y + 10, tier, "strong")
        canvas.text(width, y + 10, gap, "muted end")
        y += 20
        bottom = y + height * len(group)
        for tick in scale.ticks(4 if canvas.is_narrow else 8):
            canvas.line(scale(tick), y, scale(tick), bottom, kind="grid")
            canvas.text(scale(tick), bottom + 13, units.tick(tick), "muted small middle")
        for n, row in enumerate(group):
            _row(canvas, row, y + n * height + (height if not canvas.is_narrow else height + 10) / 2, scale, left, width)
        y = bottom + 30
    canvas.height = y - 8
    return canvas


def _row(canvas: Canvas, row: Row, y: float, scale: object, left: float, width: float) -> None:
    assert callable(scale)
    name, style, _, episode, first = row
    colour = series_colour(style)
    if canvas.is_narrow:
        canvas.text(0, y - 9, name)
    else:
        canvas.text(left - 14, y + 4, name, "end")
    hint = f"{name}: p50 {units.seconds(episode.p50)} ({units.between(episode.p50_interval)}), p95 {units.seconds(episode.p95)}, n = {episode.n}"
    if first is not None:
        canvas.line(scale(first.p50), y, scale(episode.p50), y, "var(--axis)", width=1)
        canvas.line(scale(first.p50), y - 6, scale(first.p50), y + 6, "var(--muted)", width=2)
    canvas.line(scale(episode.p50), y, scale(episode.p95), y, colour, width=1)
    canvas.line(scale(episode.p50_interval.low), y, scale(episode.p50_interval.high), y, colour, width=4)
    canvas.mark(scale(episode.p50), y, style, title=hint)
    canvas.text(width, y + 4, units.seconds(episode.p50), "end")


def _table(groups: dict[str, list[Row]], span_cost_ns: int) -> Table:
    head = ["tier", "series", "n", "fresh episode p50", "p95", "first command p50", "p95", "× fastest", "marked"]
    table = Table("cold-start", "Cold starts", head, key=2)
    for tier, rows in groups.items():
        for name, _, samples, episode, first in rows:
            under = units.between(episode.p50_interval)
            low = "below resolution" if below_resolution(samples, span_cost_ns) else ""
            table.add(
                tier,
                name,
                Value(str(samples.n), samples.n),
                Value(units.seconds(episode.p50), episode.p50, under),
                Value(units.seconds(episode.p95), episode.p95),
                Value(units.seconds(first.p50), first.p50) if first else "–",
                Value(units.seconds(first.p95), first.p95) if first else "–",
                Value(units.times(episode.p50 / rows[0][3].p50), episode.p50 / rows[0][3].p50) if rows[0][3].p50 else "–",
                low,
            )
    return table
