"""Figure 8: rollouts per second and p95 as more run at once, up to the knee."""

from __future__ import annotations

import math
from itertools import pairwise

from untax.meter import units
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, Scale, legend, log_scale, series_colour
from untax.meter.gather import Gathered, Series
from untax.meter.record import Case
from untax.meter.stats import percentile
from untax.meter.table import Table, Value
from untax.meter.view import Style, View

_KNEE = 1.1  # less than this for twice as many at once is no gain any more
Point = tuple[int, float, float, int]
Curve = tuple[str, Style, list[Point]]


def make(view: View) -> Figure:
    curves = [(name, _style(view, series), points) for (series, name), points in _points(view.run).items() if len(points) > 1]
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
    figure.data = [_table(curves)]
    figure.draw = lambda width: _draw(curves, width)
    return figure


def _points(run: Gathered) -> dict[tuple[Series, str], list[Point]]:
    found: dict[tuple[Series, str], list[Point]] = {}
    for case, samples in sorted(run.cases.items(), key=lambda one: one[0].concurrency):
        if samples.n and case.image == "present" and case.contention == "none":
            name = f"{samples.series}, {case.tier}" + (f" × {case.length}" if case.length else "")
            point = (case.concurrency, _rate(run, case, samples.total), percentile(samples.total, 95), samples.n)
            found.setdefault((samples.series, name), []).append(point)
    return found


def _rate(run: Gathered, case: Case, totals: object) -> float:
    """Good rollouts for each second of wall clock; without batches, what so many in a closed loop come to."""
    batches = run.batches.get(case, [])
    wall = sum(batch.wall_ns for batch in batches) * 1e-9
    if wall > 0:
        return sum(batch.rollouts - batch.failed for batch in batches) / wall
    values = list(totals)  # type: ignore[call-overload]
    return case.concurrency * len(values) / math.fsum(values)


def knee(points: list[Point]) -> int:
    """The concurrency from which on twice as many bring less than a tenth more."""
    for (at, rate, _, _), (to, more, _, _) in pairwise(points):
        doublings = math.log2(to / at)
        if doublings > 0 and rate > 0 and (more / rate) ** (1 / doublings) < _KNEE:
            return at
    return points[-1][0]


def _style(view: View, series: Series) -> Style:
    return view.styles.get(series, Style(len(view.styles), series.path != "channel", series.warmth != "cold"))


def _draw(curves: list[Curve], width: float) -> Canvas:
    canvas = Canvas(width)
    y = legend(canvas, 14, [(name, style) for name, style, _ in curves]) + 4
    if canvas.is_narrow:
        y = _panel(canvas, curves, "rollouts per second", 1, 0, width, y, 190) + 8
        y = _panel(canvas, curves, "p95 of one rollout", 2, 0, width, y, 190)
    else:
        _panel(canvas, curves, "rollouts per second", 1, 0, width / 2 - 14, y, 240)
        y = _panel(canvas, curves, "p95 of one rollout", 2, width / 2 + 14, width, y, 240)
    canvas.height = y
    return canvas


def _panel(canvas: Canvas, curves: list[Curve], title: str, which: int, x0: float, x1: float, y: float, height: float) -> float:
    steps = sorted({point[0] for _, _, points in curves for point in points})
    top, bottom = y + 22, y + height - 18
    left = x0 + 52
    ys = log_scale([float(point[which]) for _, _, points in curves for point in points], bottom, top)
    xs = Scale(steps[0], max(steps[-1], steps[0] * 1.01), left + 8, x1 - 12, is_log=True)
    canvas.text(x0, y + 10, title, "muted")
    for tick in ys.ticks(5):
        canvas.line(left, ys(tick), x1, ys(tick), kind="grid")
        canvas.text(left - 6, ys(tick) + 4, units.tick(tick) if which == 2 else units.digits(tick), "muted small end")
    for step in steps:
        canvas.text(xs(step), bottom + 15, str(step), "muted small middle")
    canvas.line(left, bottom, x1, bottom, kind="axis")
    for name, style, points in curves:
        canvas.polyline([(xs(point[0]), ys(point[which])) for point in points], series_colour(style), dash=style.dash)
        for point in points:
            hint = f"{name}: {point[0]} at once, {units.digits(point[1])}/s, p95 {units.seconds(point[2])}, n = {point[3]}"
            canvas.mark(xs(point[0]), ys(point[which]), style, radius=3.6, title=hint)
    return y + height + 4


def _table(curves: list[Curve]) -> Table:
    table = Table("concurrency", "Many at once", ["series", "at once", "n", "rollouts per second", "p95", "knee"], key=2)
    for name, _, points in curves:
        at = knee(points)
        for count, rate, p95, n in points:
            is_knee = "knee" if count == at and at != points[-1][0] else "none yet" if count == at else ""
            cells = (Value(units.digits(rate), rate), Value(units.seconds(p95), p95), is_knee)
            table.add(name, Value(str(count), count), Value(str(n), n), *cells)
    return table
