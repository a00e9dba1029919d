"""Figure 1: what a rollout's time divides into, on each substrate."""

from __future__ import annotations

from untax.meter import units
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, Scale, legend, linear_scale, part_colour, text_width
from untax.meter.gather import Samples
from untax.meter.record import PARTS
from untax.meter.table import Table, Value
from untax.meter.view import View

_ROW, _BAR = 30, 18


def make(view: View) -> Figure:
    length, found = 0, [(series, view.run.of(series, view.heaviest)) for series in view.series]
    if not any(samples for _, samples in found) and view.lengths():  # trajectories alone still have something to divide
        length = view.lengths()[-1]
        found = [(series, view.run.of(series, view.heaviest, length)) for series in view.series]
    rows = sorted(((str(series), samples) for series, samples in found if samples), key=lambda row: sum(row[1].total) / row[1].n)
    step = f"{view.heaviest} trajectory of {length} actions" if length else f"{view.heaviest} episode"
    figure = Figure(
        1,
        "composition",
        "How a rollout’s time divides",
        f"Mean time of one {step} by part; shares of each bar’s own total beside it. Green is the agent’s own work, measured inside "
        "the sandbox: everything else is the tax, but for the own time of the set-up’s commands.",
        f"tier {view.heaviest}, one rollout at a time, good trials without warm-up",
    )
    if not rows:
        figure.missing = "No plain case went well. Run `untax bench` with at least one tier."
        return figure
    figure.data = [_table(rows)]
    figure.draw = lambda width: _draw(rows, width)
    return figure


def _draw(rows: list[tuple[str, Samples]], width: float) -> Canvas:
    canvas = Canvas(width)
    shown = [part for part in PARTS if any(samples.mean_parts[part] > 0.002 * sum(samples.mean_parts.values()) for _, samples in rows)]
    y = legend(canvas, 14, [(part, part_colour(part)) for part in shown]) + 6
    most = max(sum(samples.mean_parts.values()) for _, samples in rows)
    tail = text_width(max((units.seconds(sum(s.mean_parts.values())) for _, s in rows), key=len)) + 10
    if canvas.is_narrow:
        y = _panel(canvas, rows, y, linear_scale(most, 0, width - tail), "mean seconds", labels="above", is_share=False) + 14
        y = _panel(canvas, rows, y, Scale(0, 1, 0, width - 20), "share of its own total", labels="above", is_share=True)
    else:
        left = max(text_width(name) for name, _ in rows) + 14
        middle = left + (width - left) * 0.52
        _panel(canvas, rows, y, linear_scale(most, left, middle - tail), "mean seconds", labels="left", is_share=False)
        y = _panel(canvas, rows, y, Scale(0, 1, middle + 10, width - 20), "share of its own total", labels="", is_share=True)
    canvas.height = y
    return canvas


def _panel(canvas: Canvas, rows: list[tuple[str, Samples]], y: float, scale: Scale, title: str, *, labels: str, is_share: bool) -> float:
    canvas.text(scale.start, y + 8, title, "muted")
    y += 18
    row = _ROW + (10 if labels == "above" else 0)
    bottom = y + row * len(rows)
    for tick in scale.ticks(4):
        canvas.line(scale(tick), y, scale(tick), bottom, kind="grid")
        words = units.share(tick) if is_share else units.tick(tick)
        canvas.text(scale(tick), bottom + 14, words, "muted small " + ("" if tick == 0 else "middle"))
    for n, (name, samples) in enumerate(rows):
        top = y + n * row + (row - _BAR) / 2 + (7 if labels == "above" else 0)
        if labels == "above":
            canvas.text(0, top - 4, name, "strong")
        elif labels == "left":
            canvas.text(scale.start - 10, top + 13, name, "end")
        parts = samples.mean_parts
        total = sum(parts.values()) or 1e-12
        at = 0.0
        for part, seconds in parts.items():
            size = seconds / total if is_share else seconds
            hint = f"{name}: {part} {units.seconds(seconds)}, {units.share(seconds / total)} of {units.seconds(total)} (n = {samples.n})"
            if seconds > 0:
                canvas.rect(scale(at), top, scale(at + size) - scale(at), _BAR, part_colour(part), title=hint)
            at += size
        if not is_share:
            canvas.text(scale(at) + 5, top + 13, units.seconds(total), "small")
    return bottom + 22


def _table(rows: list[tuple[str, Samples]]) -> Table:
    table = Table("composition", "Mean seconds by part", ["series", "n", "total", *PARTS, "orchestration", "tax"])
    for name, samples in rows:
        parts = samples.mean_parts
        values = [sum(parts.values()), *parts.values(), samples.orchestration, samples.tax]
        table.add(name, Value(str(samples.n), samples.n), *(Value(units.seconds(value), value) for value in values))
    table.notes.append(
        "Orchestration: queue + dispatch + the control plane’s share of create and ready. Tax: all but action and the own time of the set-up’s commands."
    )
    return table
