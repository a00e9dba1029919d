"""Figure 7: what one action costs on its way, over the held channel and the way people do it today."""

from __future__ import annotations

from untax.meter import units
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, legend, log_scale, series_colour, text_width
from untax.meter.stats import Spread
from untax.meter.table import Table, Value
from untax.meter.view import Style, View

_ROW = 30
Row = tuple[str, list[tuple[str, Style, Spread]]]


def make(view: View) -> Figure:
    rows: dict[str, list[tuple[str, Style, Spread]]] = {}
    for series in view.series:
        if series.warmth != "cold" and any(
            s.substrate == series.substrate and s.path == series.path and s.warmth == "cold" for s in view.series
        ):
            continue
        samples = view.run.of(series, view.heaviest, max(view.lengths(), default=0)) or view.run.of(series, view.heaviest)
        found = view.spread(samples, "dispatch") if samples else None
        if found:
            rows.setdefault(series.substrate, []).append((str(series), view.styles[series], found))
    figure = Figure(
        7,
        "paths",
        "What one action pays on its way",
        "Dispatch: a round trip less the command’s own time inside, mean of a trial’s actions. Median over trials with a line to the p95; filled: held "
        "channel, hollow: one exec per action, as people do today.",
        f"{view.heaviest}, the longest trajectories, one rollout at a time, good trials without warm-up",
    )
    if not rows:
        figure.missing = "No trial had actions. Run `untax bench` with a tier."
        return figure
    ordered = sorted(rows.items(), key=lambda row: row[1][0][2].p50)
    figure.data = [_table(ordered)]
    figure.draw = lambda width: _draw(ordered, width)
    return figure


def _draw(rows: list[Row], width: float) -> Canvas:
    canvas = Canvas(width)
    left = 20.0 if canvas.is_narrow else max(text_width(name) for name, _ in rows) + 24
    values = [value for _, marks in rows for _, _, found in marks for value in (found.p50, found.p95)]
    scale = log_scale(values, left, width - (12 if canvas.is_narrow else 150))
    styles = {style.is_hollow: Style(7, style.is_hollow, False) for _, marks in rows for _, style, _ in marks}
    y = legend(canvas, 14, [("incumbent path" if hollow else "held channel", style) for hollow, style in sorted(styles.items())]) + 2
    height = _ROW + (12 if canvas.is_narrow else 0)
    bottom = y + height * len(rows)
    for tick in scale.ticks(4 if canvas.is_narrow else 7):
        canvas.line(scale(tick), y, scale(tick), bottom, kind="grid")
        canvas.text(scale(tick), bottom + 14, units.tick(tick), "muted small middle")
    for n, (name, marks) in enumerate(rows):
        middle = y + n * height + (height + (12 if canvas.is_narrow else 0)) / 2
        words = " vs ".join(units.seconds(found.p50) for _, _, found in marks)
        if canvas.is_narrow:
            canvas.text(0, middle - 11, name)
            canvas.text(width, middle - 11, words, "end")
        else:
            canvas.text(left - 14, middle + 4, name, "end")
            canvas.text(width, middle + 4, words, "end")
        if len(marks) > 1:
            places = [scale(found.p50) for _, _, found in marks]
            canvas.line(min(places), middle, max(places), middle, "var(--axis)", width=1, dash="2 3")
        for label, style, found in marks:
            canvas.line(scale(found.p50), middle, scale(found.p95), middle, series_colour(style), width=1.5)
            hint = f"{label}: dispatch p50 {units.seconds(found.p50)}, p95 {units.seconds(found.p95)}, n = {found.n}"
            canvas.mark(scale(found.p50), middle, style, title=hint)
    canvas.height = bottom + 22
    return canvas


def _table(rows: list[Row]) -> Table:
    table = Table("paths", "Dispatch of one action", ["series", "n", "p50", "p95", "held channel ÷ incumbent"])
    for _, marks in rows:
        held = next((found.p50 for _, style, found in marks if not style.is_hollow), None)
        for label, style, found in marks:
            part = held / found.p50 if style.is_hollow and held is not None and found.p50 else None
            table.add(
                label,
                Value(str(found.n), found.n),
                Value(units.seconds(found.p50), found.p50, units.between(found.p50_interval)),
                Value(units.seconds(found.p95), found.p95, units.between(found.p95_interval)),
                Value(f"1/{1 / part:,.0f}" if part and part < 0.5 else units.times(part), part) if part else "",
            )
    return table
