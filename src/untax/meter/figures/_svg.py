"""Drawing: a canvas that becomes SVG, scales, and colours for light and dark. No plotting library.

Text cannot shrink with a picture on a phone and stay readable, so every figure is drawn for a width: `WIDE` and `NARROW`. Colours are CSS
variables: a page or a file with `CSS` in it follows the reader's colour scheme, and `with_colours` fixes them where nothing can follow.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from html import escape

from untax.meter.view import Style

WIDE, NARROW = 840, 358
MARGIN, _TITLE = 20, 28  # of a picture that stands alone

SERIES = (
    ("#2463ae", "#74adf2"), ("#c24d17", "#f28b4f"), ("#18805a", "#4fc492"), ("#8a45b5", "#c896ea"), ("#94760f", "#dcbc4a"),
    ("#b42f5b", "#f0839f"), ("#0d7c89", "#4ac3d1"), ("#556473", "#a9b8c6"),
)  # fmt: skip
PART_COLOURS: Mapping[str, tuple[str, str]] = {
    "queue": ("#1b3a5f", "#41638f"),
    "create": ("#2d6cb4", "#5593dc"),
    "ready": ("#6ba4e2", "#83b8f2"),
    "setup": ("#aacbf0", "#b5d5f8"),
    "action": ("#4f9d72", "#4f9d72"),
    "dispatch": ("#d6602a", "#f07f45"),
    "observe": ("#f0a87c", "#f7bd95"),
    "reset": ("#7d58a8", "#a07dce"),
    "cleanup": ("#b79dd6", "#cbb3e8"),
    "unattributed": ("#9a9a9a", "#7d7d7d"),
}
INK: Mapping[str, tuple[str, str]] = {
    "ink": ("#1c2024", "#e9ecef"),
    "muted": ("#5b646d", "#a4adb6"),
    "grid": ("#e1e5e9", "#333a41"),
    "axis": ("#aab2ba", "#5b646d"),
    "paper": ("#ffffff", "#14181c"),
    "band": ("#eef2f6", "#20262c"),
}
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'DejaVu Sans', sans-serif"


def _variables(scheme: int) -> str:
    colours = {**INK, **{f"s{n}": pair for n, pair in enumerate(SERIES)}, **{f"part-{name}": pair for name, pair in PART_COLOURS.items()}}
    return "".join(f"--{name}:{pair[scheme]};" for name, pair in colours.items())


CSS = f":root{{{_variables(0)}}}@media (prefers-color-scheme:dark){{:root{{{_variables(1)}}}}}"
"""The colours, for a page."""
SHAPES = (
    f"svg.figure{{font-family:{_FONT};font-size:12px}}svg.figure text{{fill:var(--ink)}}svg.figure .muted{{fill:var(--muted)}}"
    "svg.figure .title{font-size:16px;font-weight:600}svg.figure .small{font-size:11px}svg.figure .strong{font-weight:600}svg.figure .end{text-anchor:end}svg.figure .middle{text-anchor:middle}"
    "svg.figure .halo{paint-order:stroke;stroke:var(--paper);stroke-width:5px;stroke-linejoin:round}"
    "svg.figure .grid{stroke:var(--grid)}svg.figure .axis{stroke:var(--axis)}"
)


def series_colour(style: Style) -> str:
    return f"var(--s{style.colour % len(SERIES)})"


def part_colour(name: str) -> str:
    return f"var(--part-{name})"


def text_width(text: str, size: float = 12) -> float:
    """About how wide a text is: enough to lay out by, on the safe side for the usual fonts."""
    return sum(0.35 if c in " .,:;·|ilj'()1" else 0.9 if c in "mwMW—…×≥" else 0.62 for c in text) * size


class Canvas:
    """Elements in drawing order. `height` may be set last, when it is known."""

    def __init__(self, width: float) -> None:
        self.width = width
        self.height = 0.0
        self._parts: list[str] = []

    @property
    def is_narrow(self) -> bool:
        return self.width < 600

    def text(self, x: float, y: float, text: str, kind: str = "", title: str = "") -> None:
        hint = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f'<text x="{x:.1f}" y="{y:.1f}"{_class(kind)}>{escape(text)}{hint}</text>')

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str, *, title: str = "", radius: float = 0, opacity: float = 1
    ) -> None:
        more = (f' rx="{radius}"' if radius else "") + (f' opacity="{opacity}"' if opacity < 1 else "")
        self._add("rect", f'x="{x:.2f}" y="{y:.1f}" width="{max(0, width):.2f}" height="{height:.1f}"{more} style="fill:{fill}"', title)

    def line(
        self, x1: float, y1: float, x2: float, y2: float, stroke: str = "", *, kind: str = "", width: float = 1, dash: str = ""
    ) -> None:
        paint = f' style="stroke:{stroke}"' if stroke else ""
        more = f' stroke-dasharray="{dash}"' if dash else ""
        self._add("line", f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke-width="{width}"{more}{_class(kind)}{paint}')

    def polyline(self, points: Sequence[tuple[float, float]], stroke: str, *, width: float = 2, dash: str = "") -> None:
        more = f' stroke-dasharray="{dash}"' if dash else ""
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polyline", f'points="{at}" stroke-width="{width}" stroke-linejoin="round"{more} style="fill:none;stroke:{stroke}"')

    def polygon(self, points: Sequence[tuple[float, float]], fill: str, opacity: float) -> None:
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._add("polygon", f'points="{at}" opacity="{opacity}" style="fill:{fill}"')

    def dot(self, x: float, y: float, radius: float, fill: str, *, opacity: float = 1, title: str = "") -> None:
        more = f' opacity="{opacity}"' if opacity < 1 else ""
        self._add("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"{more} style="fill:{fill}"', title)

    def mark(self, x: float, y: float, style: Style, *, radius: float = 4.5, title: str = "") -> None:
        """The mark of a series: a circle, hollow for the incumbent path, a diamond when warm."""
        colour = series_colour(style)
        paint = f"fill:{'var(--paper)' if style.is_hollow else colour};stroke:{colour}"
        if style.is_diamond:
            r = radius * 1.25
            shape = f'd="M{x:.1f} {y - r:.1f}L{x + r:.1f} {y:.1f}L{x:.1f} {y + r:.1f}L{x - r:.1f} {y:.1f}Z"'
            self._add("path", f'{shape} stroke-width="2" style="{paint}"', title)
        else:
            self._add("circle", f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}" stroke-width="2" style="{paint}"', title)

    def svg(self, label: str, kind: str = "") -> str:
        """As an element of a page that has `CSS` and `SHAPES`."""
        return self._svg(label, kind, "")

    def file(self, label: str) -> str:
        """As a file of its own, with a title and a margin."""
        box = (-MARGIN, -MARGIN - _TITLE, self.width + 2 * MARGIN, self.height + 2 * MARGIN + _TITLE)
        ground = f'<rect x="{box[0]}" y="{box[1]}" width="100%" height="100%" style="fill:var(--paper)"/>'
        title = f'<text x="0" y="{6 - _TITLE}" class="title">{escape(label)}</text>'
        return self._svg(label, "", f"<style>{CSS}{SHAPES}</style>{ground}{title}", box) + "\n"

    def _svg(self, label: str, kind: str, first: str, box: tuple[float, float, float, float] | None = None) -> str:
        x, y, width, height = box or (0, 0, self.width, self.height)
        size = f'width="{width:g}" height="{height:.0f}" viewBox="{x:g} {y:g} {width:g} {height:.0f}"'
        names = f"figure {kind}".strip()
        head = f'<svg xmlns="http://www.w3.org/2000/svg" class="{names}" {size} role="img" aria-label="{escape(label)}">'
        return f"{head}{first}{''.join(self._parts)}</svg>"

    def _add(self, tag: str, attributes: str, title: str = "") -> None:
        inside = f"><title>{escape(title)}</title></{tag}>" if title else "/>"
        self._parts.append(f"<{tag} {attributes}{inside}")


def with_colours(svg: str, scheme: int = 0) -> str:
    """The colours written out (0 light, 1 dark), for readers that know no variables."""
    colours = dict(re.findall(r"--([\w-]+):([^;]+);", _variables(scheme)))
    svg = svg.replace(CSS, "")
    return re.sub(r"var\(--([\w-]+)\)", lambda found: colours[found.group(1)], svg)


def _class(kind: str) -> str:
    return f' class="{kind}"' if kind else ""


# ---- scales ----


class Scale:
    """Maps values to places between `start` and `end`."""

    def __init__(self, low: float, high: float, start: float, end: float, *, is_log: bool = False) -> None:
        self.low, self.high, self.start, self.end, self.is_log = low, high, start, end, is_log

    def __call__(self, value: float) -> float:
        if self.is_log:
            value = max(value, self.low * 1e-3)
            part = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            part = (value - self.low) / (self.high - self.low)
        return self.start + part * (self.end - self.start)

    def ticks(self, most: int = 6) -> list[float]:
        return _log_ticks(self.low, self.high, most) if self.is_log else _linear_ticks(self.low, self.high, most)


def log_scale(values: Sequence[float], start: float, end: float) -> Scale:
    """Over all positive values, with a little room on both sides."""
    positive = [value for value in values if value > 0 and math.isfinite(value)] or [1.0]
    low, high = min(positive) / 1.25, max(positive) * 1.25
    return Scale(low, max(high, low * 2), start, end, is_log=True)


def linear_scale(most: float, start: float, end: float) -> Scale:
    return Scale(0.0, most if most > 0 else 1.0, start, end)


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    for steps in ((1, 1.1, 1.2, 1.4, 1.6, 2, 2.5, 3, 4, 5, 6, 7, 8, 9), (1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
        found = [tick for tick in found if low <= tick <= high]
        if len(found) <= most:
            return found
    return found[:: math.ceil(len(found) / most)]


def _linear_ticks(low: float, high: float, most: int) -> list[float]:
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    return [step * n for n in range(math.ceil(low / step), math.floor(high / step + 1e-9) + 1)]


# ---- what several figures share ----


def legend(canvas: Canvas, y: float, items: Sequence[tuple[str, str | Style]], x: float = 0) -> float:
    """Marks with words, wrapped to the width; gives the y below it."""
    at = x
    for words, paint in items:
        width = 16 + text_width(words) + 14
        if at > x and at + width - 14 > canvas.width:
            at, y = x, y + 18
        if isinstance(paint, Style):
            canvas.mark(at + 6, y - 4, paint, radius=4)
        else:
            canvas.rect(at, y - 10, 11, 11, paint, radius=2)
        canvas.text(at + 16, y, words)
        at += width
    return y + 18


def apart(places: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Places for labels near where they belong, none closer to another than `least`, all between `low` and `high` where they fit."""
    order = sorted(range(len(places)), key=lambda n: places[n])
    found = [0.0] * len(places)
    last = -math.inf
    for n in order:
        last = found[n] = max(places[n], last + least, low)
    limit = high
    for n in reversed(order):  # push back up what ran over the end
        found[n] = min(found[n], limit)
        limit = found[n] - least
    return found
