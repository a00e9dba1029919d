"""Figure 5: trajectory completion time, and time per action, by number of actions."""

from __future__ import annotations

from collections.abc import Callable

from untax.meter import units
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, Scale, apart, legend, log_scale, series_colour, text_width
from untax.meter.stats import Spread
from untax.meter.table import Table, Value
from untax.meter.view import Style, View

Curve = tuple[str, Style, dict[int, Spread]]
Middle = Callable[[int, Spread], float]


def make(view: View) -> Figure:
    curves: list[Curve] = []
    for series in view.series:
        found = {}
        for length in view.lengths():
            samples = view.run.of(series, view.heaviest, length)
            if samples and (one := view.spread(samples)):
                found[length] = one
        if found:
            curves.append((str(series), view.styles[series], found))
    figure = Figure(
        5,
        "completion",
        "Completion time by number of actions",
        "Median time of a whole trajectory with a line to its p95, and the same divided by its actions. The second is an average that includes the start and "
        "set-up, not the latency of one command: it falls as what comes once is shared by more actions.",
        f"trajectories of {view.heaviest}, one rollout at a time, good trials without warm-up",
    )
    if not curves:
        figure.missing = "The run has no trajectories. Run `untax bench` with lengths (10, 50 and 150 actions are the paper’s)."
        return figure
    figure.data = [_table(curves)]
    figure.draw = lambda width: _draw(curves, width)
    return figure


def _draw(curves: list[Curve], width: float) -> Canvas:
    canvas = Canvas(width)
    labels = 0.0 if canvas.is_narrow else max(text_width(name) for name, _, _ in curves) + 16
    y = legend(canvas, 14, [(name, style) for name, style, _ in curves]) if canvas.is_narrow else 6.0
    if canvas.is_narrow:
        y = _panel(canvas, curves, "whole trajectory", lambda _, one: one.p50, 52, width - 12, y + 4, 210, labelled=False) + 18
        y = _panel(canvas, curves, "per action", lambda n, one: one.p50 / n, 52, width - 12, y, 210, labelled=False)
    else:
        room = (width - labels - 2 * 52 - 20) / 2
        _panel(canvas, curves, "whole trajectory", lambda _, one: one.p50, 52, 52 + room, y, 290, labelled=False)
        y = _panel(canvas, curves, "per action", lambda n, one: one.p50 / n, 52 + room + 72, width - labels, y, 290, labelled=True)
    gaps = _gaps(curves)
    if gaps:
        canvas.text(0, y + 12, "Slowest ÷ fastest", "muted")
        at = text_width("Slowest ÷ fastest") + 10.0
        if canvas.is_narrow:
            at, y = 0.0, y + 18
        canvas.text(at, y + 12, " → ".join(f"{units.times(gap)} at {length}" for length, gap in gaps.items()), "strong")
        y += 20
    canvas.height = y + 2
    return canvas


def _panel(
    canvas: Canvas, curves: list[Curve], title: str, middle: Middle, x0: float, x1: float, y: float, height: float, *, labelled: bool
) -> float:
    lengths = sorted({length for _, _, points in curves for length in points})
    values = [middle(length, one) for _, _, points in curves for length, one in points.items()]
    tails = [middle(length, one) * one.p95 / one.p50 for _, _, points in curves for length, one in points.items() if one.p50]
    top, bottom = y + 22, y + height - 18
    ys = log_scale(values + tails, bottom, top)
    first = lengths[0] if len(lengths) > 1 else lengths[0] / 2  # a single length lies beside the labels
    xs = Scale(first, lengths[-1], x0 + 8, x1 - 12, is_log=True)
    canvas.text(x0 - 40 if x0 > 300 else 0, y + 10, title, "muted")
    for tick in ys.ticks(6):
        canvas.line(x0, ys(tick), x1, ys(tick), kind="grid")
        canvas.text(x0 - 6, ys(tick) + 4, units.tick(tick), "muted small end")
    for length in lengths:
        canvas.text(xs(length), bottom + 15, str(length), "muted small middle")
    canvas.line(x0, bottom, x1, bottom, kind="axis")
    for name, style, points in curves:
        colour = series_colour(style)
        canvas.polyline([(xs(length), ys(middle(length, one))) for length, one in points.items()], colour, dash=style.dash)
        for length, one in points.items():
            value = middle(length, one)
            if one.p50:
                canvas.line(xs(length), ys(value), xs(length), ys(value * one.p95 / one.p50), colour, width=1)
            hint = f"{name}, {length} actions, {title}: p50 {units.seconds(value)}, n = {one.n}"
            canvas.mark(xs(length), ys(value), style, radius=3.6, title=hint)
    if labelled:
        ends = [ys(middle(max(points), points[max(points)])) for _, _, points in curves]
        for (name, style, _), end, place in zip(curves, ends, apart(ends, 15, top, bottom), strict=True):
            canvas.line(x1 - 6, end, x1 + 6, place, series_colour(style), width=0.8)
            canvas.text(x1 + 10, place + 4, name)
    return y + height + 4


def _gaps(curves: list[Curve]) -> dict[int, float]:
    cold = [points for _, style, points in curves if not style.is_diamond]
    found = {}
    for length in sorted(set.intersection(*(set(points) for points in cold))) if len(cold) > 1 else ():
        medians = [points[length].p50 for points in cold]
        if min(medians) > 0:
            found[length] = max(medians) / min(medians)
    return found


def _table(curves: list[Curve]) -> Table:
    head = ["series", "actions", "n", "p50", "p95", "mean", "SD", "p50 per action"]
    table = Table("completion", "Trajectory completion time", head, key=2)
    for name, _, points in curves:
        for length, one in points.items():
            table.add(
                name,
                Value(str(length), length),
                Value(str(one.n), one.n),
                Value(units.seconds(one.p50), one.p50, units.between(one.p50_interval)),
                Value(units.seconds(one.p95), one.p95, units.between(one.p95_interval)),
                Value(units.seconds(one.mean), one.mean, units.between(one.mean_interval)),
                Value(units.seconds(one.sd), one.sd),
                Value(units.seconds(one.p50 / length), one.p50 / length),
            )
    return table
