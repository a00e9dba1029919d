"""Figure 4: how the composition shifts as trajectories grow."""

from __future__ import annotations

from untax.meter import units
from untax.meter.figures import Figure
from untax.meter.figures._svg import Canvas, Scale, legend, part_colour
from untax.meter.gather import Samples
from untax.meter.record import PARTS
from untax.meter.table import Table, Value
from untax.meter.view import View

_BAR, _GAP = 17, 5


def make(view: View) -> Figure:
    panels: dict[str, dict[int, Samples]] = {}
    for series in view.series:
        found = {length: samples for length in view.lengths() if (samples := view.run.of(series, view.heaviest, length))}
        if found:
            panels[str(series)] = found
    figure = Figure(
        4,
        "amortisation",
        "Composition as trajectories grow",
        "Shares of the mean trajectory time, by number of actions. What comes once shrinks (blue, violet); what comes with every action stays.",
        f"trajectories of {view.heaviest}, one rollout at a time, good trials without warm-up",
    )
    if not panels:
        figure.missing = "The run has no trajectories. Run `untax bench` with lengths (10, 50 and 150 actions are the paper’s)."
        return figure
    figure.data = [_table(panels)]
    figure.draw = lambda width: _draw(panels, width)
    return figure


def _draw(panels: dict[str, dict[int, Samples]], width: float) -> Canvas:
    canvas = Canvas(width)
    every = [samples for panel in panels.values() for samples in panel.values()]
    shown = [part for part in PARTS if any(samples.parts[part] > 0.004 * sum(samples.parts.values()) for samples in every)]
    top = legend(canvas, 14, [(part, part_colour(part)) for part in shown]) + 6
    columns = 1 if canvas.is_narrow else 2
    space = 34
    panel_width = (width - space * (columns - 1)) / columns
    most = max(len(panel) for panel in panels.values())
    height = 22 + most * (_BAR + _GAP) + 22
    for n, (name, panel) in enumerate(panels.items()):
        x, y = (n % columns) * (panel_width + space), top + (n // columns) * height
        _panel(canvas, name, panel, x, y, panel_width)
    canvas.height = top + ((len(panels) + columns - 1) // columns) * height
    return canvas


def _panel(canvas: Canvas, name: str, panel: dict[int, Samples], x: float, y: float, width: float) -> None:
    canvas.text(x, y + 10, name, "strong")
    scale = Scale(0, 1, x + 34, x + width - 52)
    canvas.text(x + width, y + 10, "tax", "muted end small")
    for n, (length, samples) in enumerate(panel.items()):
        top = y + 20 + n * (_BAR + _GAP)
        canvas.text(x + 26, top + 13, str(length), "end")
        total = sum(samples.parts.values()) or 1.0
        at = 0.0
        for part, seconds in samples.parts.items():
            share = seconds / total
            if share > 0:
                hint = f"{name}, {length} actions: {part} {units.share(share)}, {units.seconds(seconds / samples.n)} (n = {samples.n})"
                canvas.rect(scale(at), top, scale(at + share) - scale(at), _BAR, part_colour(part), title=hint)
            at += share
        canvas.text(x + width, top + 13, units.share(samples.tax_share), "end")


def _table(panels: dict[str, dict[int, Samples]]) -> Table:
    table = Table("amortisation", "Shares of the mean trajectory time", ["series", "actions", "n", "tax", *PARTS], key=2)
    for name, panel in panels.items():
        for length, samples in panel.items():
            total = sum(samples.parts.values()) or 1.0
            shares = [samples.tax_share, *(seconds / total for seconds in samples.parts.values())]
            counted = Value(str(samples.n), samples.n)
            table.add(name, Value(str(length), length), counted, *(Value(units.share(one), one) for one in shares))
    return table
