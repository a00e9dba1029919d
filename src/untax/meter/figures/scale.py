"""Figure 6: worker-hours as a training run grows."""

from __future__ import annotations

from untax.meter import project, published, units
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, Scale, apart, legend, linear_scale, series_colour, text_width
from untax.meter.project import Estimate
from untax.meter.stats import ratio
from untax.meter.table import Table, Value
from untax.meter.view import Style, View

_SCALES = (10_000, 50_000, 100_000, 250_000, 500_000, 1_000_000)
Line = tuple[str, Style, int, Estimate]


def make(view: View) -> Figure:
    found = project.project(view.models, steps=published.STEPS, trajectories=1.0)
    lines: list[Line] = [(str(one.series), view.styles[one.series], one.n, one.seconds) for one in found]
    beyond = any(seconds.is_extrapolated for _, _, _, seconds in lines)
    without = ", ".join(map(str, project.unprojected(view.run, view.heaviest, view.models)))
    figure = Figure(
        6,
        "scale",
        "Worker-hours as a training run grows",
        f"Trajectories × mean seconds of a {published.STEPS}-action trajectory ÷ 3600, with 95 % bands; failures and retries are paid for."
        + (f" Extrapolated where {published.STEPS} actions were not measured." if beyond else "")
        + (f" Not here, because no trajectory of theirs was measured: {without}." if without else ""),
        f"trajectories of {view.heaviest}, one rollout at a time, all trials without warm-up, failed ones included",
    )
    if not lines:
        figure.missing = "Nothing to project from. Run `untax bench` with a tier."
        return figure
    figure.data = [_table(lines)]
    figure.draw = lambda width: _draw(lines, width)
    return figure


def _draw(lines: list[Line], width: float) -> Canvas:
    canvas = Canvas(width)
    largest = _SCALES[-1]
    labels = 0.0 if canvas.is_narrow else max(text_width(_label(line)) for line in lines) + 20
    y = legend(canvas, 14, [(name, style) for name, style, _, _ in lines]) + 6 if canvas.is_narrow else 8.0
    x0, x1 = 58.0, width - max(labels, 14)
    top, bottom = y + 22, y + (250 if canvas.is_narrow else 330)
    most = max(max(s.hours(largest).interval.high, s.hours(largest).value) for _, _, _, s in lines)
    xs, ys = Scale(0, largest, x0, x1 - 8), linear_scale(most * 1.04, bottom, top)
    canvas.text(0, y + 10, "worker-hours", "muted")
    for tick in ys.ticks(6):
        canvas.line(x0, ys(tick), x1, ys(tick), kind="grid")
        canvas.text(x0 - 6, ys(tick) + 4, units.hours(tick) if tick else "0", "muted small end")
    ticks = ((0, "0"), (250_000, ""), (500_000, "500,000"), (1_000_000, "1 million")) if canvas.is_narrow else ((0, "0"), (100_000, "100,000"), (250_000, "250,000"), (500_000, "500,000"), (1_000_000, "1 million"))  # fmt: skip
    for tick, words in ticks:
        canvas.text(xs(tick), bottom + 15, words, "muted small " + ("end" if tick == largest and canvas.is_narrow else "middle"))
    canvas.line(x0, bottom, x1, bottom, kind="axis")
    canvas.text((x0 + x1) / 2, bottom + 32, f"trajectories of {published.STEPS} actions", "muted middle")
    for _, style, _, seconds in lines:
        most_hours = seconds.hours(largest).interval
        band = [(xs(0), ys(0)), (xs(largest), ys(most_hours.high)), (xs(largest), ys(most_hours.low))]
        canvas.polygon(band, series_colour(style), 0.18)
    for name, style, n, seconds in lines:
        canvas.polyline([(xs(0), ys(0)), (xs(largest), ys(seconds.hours(largest).value))], series_colour(style), dash=style.dash)
        for scale in (100_000, 500_000, 1_000_000):
            hours = seconds.hours(scale)
            hint = f"{name}: {units.count(scale)} trajectories, {units.hours(hours.value)} ({units.between(hours.interval, units.hours)}), n = {n}"
            canvas.mark(xs(scale), ys(hours.value), style, radius=3.4, title=hint)
    if not canvas.is_narrow:
        ends = [ys(seconds.hours(largest).value) for _, _, _, seconds in lines]
        for line, end, place in zip(lines, ends, apart(ends, 15, top, bottom), strict=True):
            canvas.line(x1 - 3, end, x1 + 9, place, series_colour(line[1]), width=0.8)
            canvas.text(x1 + 13, place + 4, _label(line))
    _gap(canvas, lines, xs(largest), ys)
    canvas.height = bottom + 42
    return canvas


def _gap(canvas: Canvas, lines: list[Line], x: float, ys: Scale) -> None:
    """Between the slowest and the fastest, at the largest scale."""
    low, high = lines[0][3].hours(_SCALES[-1]).value, lines[-1][3].hours(_SCALES[-1]).value
    if len(lines) < 2 or ys(low) - ys(high) < 8:
        return
    is_apart = not lines[0][3].interval.overlaps(lines[-1][3].interval)
    words = f"{units.hours(high - low)} · {units.times(ratio(high, low))}" if is_apart else "not told apart"
    canvas.line(x - 22, ys(low), x - 22, ys(high), "var(--ink)", width=1.2)
    for end in (low, high):
        canvas.line(x - 26, ys(end), x - 18, ys(end), "var(--ink)", width=1.2)
    canvas.text(x - 30, (ys(low) + ys(high)) / 2 + 4, words, "strong end halo")


def _label(line: Line) -> str:
    return f"{line[0]}  {units.hours(line[3].hours(_SCALES[-1]).value)}"


def _table(lines: list[Line]) -> Table:
    table = Table("scale", "Worker-hours by scale", ["series", "n", "a trajectory", *(units.count(scale) for scale in _SCALES), "marked"])
    for name, _, n, seconds in lines:
        cells = [Value(units.hours(h.value), h.value, units.between(h.interval, units.hours)) for h in (seconds.hours(s) for s in _SCALES)]
        of_one = Value(units.seconds(seconds.value), seconds.value, units.between(seconds.interval))
        table.add(name, Value(str(n), n), of_one, *cells, "extrapolated" if seconds.is_extrapolated else "")
    return table
