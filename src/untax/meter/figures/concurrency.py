"""Figure 8: rollouts per second and p95 as more run at once, up to the knee."""

from __future__ import annotations

from collections.abc import Callable

from untax.meter import units
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, Scale, legend, log_scale, series_colour
from untax.meter.knee import Load, Point, loads
from untax.meter.table import Table, Value
from untax.meter.view import Style, View

Curve = tuple[Load, Style]


def make(view: View) -> Figure:
    curves = sorted(
        ((load, _style(view, load)) for load in loads(view.run)), key=lambda curve: (curve[0].tier, curve[0].length, curve[0].series)
    )
    figure = Figure(
        8,
        "concurrency",
        "Many at once",
        "Rollouts per second, and the p95 of one, by how many were under way together. The knee is where twice as many no longer bring a tenth more.",
        "batches of rollouts that were begun together, without warm-up; quiet machine, image present",
    )
    if not curves:
        figure.missing = "The run has one concurrency only. Run `untax bench` with several (1, 8, 32 …) to see the knee."
        return figure
    figure.data = [_table([load for load, _ in curves])]
    figure.draw = lambda width: _draw(curves, width)
    return figure


def _style(view: View, load: Load) -> Style:
    series = load.series
    return view.styles.get(series, Style(len(view.styles), series.path != "channel", series.warmth != "cold"))


def _draw(curves: list[Curve], width: float) -> Canvas:
    canvas = Canvas(width)
    y = legend(canvas, 14, list(dict.fromkeys((str(load.series), style) for load, style in curves))) + 4
    for tier, length in dict.fromkeys((load.tier, load.length) for load, _ in curves):
        step = f"{tier} × {length}" if length else tier
        of_step = [curve for curve in curves if (curve[0].tier, curve[0].length) == (tier, length)]
        rate = (f"{step}: rollouts per second", lambda point: point.per_s, "{:g}".format)
        p95 = (f"{step}: p95 of one rollout", lambda point: point.p95_s, units.tick)
        if canvas.is_narrow:
            y = _panel(canvas, of_step, *rate, 0, width, y, 180) + 8
            y = _panel(canvas, of_step, *p95, 0, width, y, 180) + 8
        else:
            _panel(canvas, of_step, *rate, 0, width / 2 - 14, y, 220)
            y = _panel(canvas, of_step, *p95, width / 2 + 14, width, y, 220) + 8
    canvas.height = y
    return canvas


def _panel(
    canvas: Canvas,
    curves: list[Curve],
    title: str,
    value: Callable[[Point], float],
    show: Callable[[float], str],
    x0: float,
    x1: float,
    y: float,
    height: float,
) -> float:
    steps = sorted({point.at_once for load, _ in curves for point in load.points})
    top, bottom, left = y + 22, y + height - 18, x0 + 52
    ys = log_scale([value(point) for load, _ in curves for point in load.points], bottom, top)
    xs = Scale(steps[0], max(steps[-1], steps[0] * 1.01), left + 8, x1 - 12, is_log=True)
    canvas.text(x0, y + 10, title, "muted")
    for tick in ys.ticks(5):
        canvas.line(left, ys(tick), x1, ys(tick), kind="grid")
        canvas.text(left - 6, ys(tick) + 4, show(tick), "muted small end")
    for step in steps:
        canvas.text(xs(step), bottom + 15, str(step), "muted small middle")
    canvas.line(left, bottom, x1, bottom, kind="axis")
    for load, style in curves:
        canvas.polyline([(xs(point.at_once), ys(value(point))) for point in load.points], series_colour(style), dash=style.dash)
        for point in load.points:
            hint = f"{load}: {point.at_once} at once, {units.digits(point.per_s)}/s, p95 {units.seconds(point.p95_s)}, n = {point.n}"
            canvas.mark(xs(point.at_once), ys(value(point)), style, radius=3.6, title=hint)
    return y + height + 4


def _table(found: list[Load]) -> Table:
    table = Table("concurrency", "Many at once", ["series", "at once", "n", "rollouts per second", "p95", "knee"], key=2)
    for load in found:
        for point in load.points:
            mark = "knee" if point.at_once == load.knee else "none yet" if load.knee is None and point is load.points[-1] else ""
            cells = (Value(units.digits(point.per_s), point.per_s), Value(units.seconds(point.p95_s), point.p95_s), mark)
            table.add(str(load), Value(str(point.at_once), point.at_once), Value(str(point.n), point.n), *cells)
    return table
