"""What each substrate costs beside native, as an SVG of bars on a logarithmic scale. Needs no plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

from untax.meter.run import METRICS
from untax.meter.stats import Summary

_COLOURS = ("#777777", "#1b6ca8", "#c2571a", "#2a8a57", "#8e4ec6", "#a8892b")
_LEFT, _ROW, _GAP, _WIDTH, _TOP = 130, 20, 26, 520, 46


def draw(table: Mapping[str, Mapping[str, Summary]], *, title: str) -> str:
    """One group of bars for each metric, one bar for each case: p50, with a line to p95."""
    shown = [s for row in table.values() for s in row.values() if s.count and s.p50_s > 0]
    low = math.floor(math.log10(min((s.p50_s for s in shown), default=1e-3)))
    high = max(math.ceil(math.log10(max((s.p95_s for s in shown), default=1.0))), low + 1)

    def x(seconds: float) -> float:
        return _LEFT + _WIDTH * (math.log10(max(seconds, 10.0**low)) - low) / (high - low)

    parts = [f'<text x="10" y="20" font-size="15">{escape(title)}</text>']
    y = _TOP
    for metric in METRICS:
        parts.append(f'<text x="10" y="{y - 6}" font-weight="bold">{escape(metric)}</text>')
        for n, (case, row) in enumerate(table.items()):
            summary = row[metric]
            if summary.count:
                parts.extend(_bar(case, summary, _COLOURS[n % len(_COLOURS)], y, x(summary.p50_s), x(summary.p95_s)))
                y += _ROW
        y += _GAP
    for power in range(low, high + 1):
        at = x(10.0**power)
        parts.append(f'<line x1="{at:.1f}" y1="{_TOP - 16}" x2="{at:.1f}" y2="{y - _GAP}" stroke="#ddd"/>')
        parts.append(f'<text x="{at:.1f}" y="{y - 8}" text-anchor="middle" fill="#555">{_duration(10.0**power)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 150}" height="{y + 6}" '
        f'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>{"".join(parts)}</svg>\n'
    )


def _bar(case: str, summary: Summary, colour: str, y: int, p50: float, p95: float) -> list[str]:
    middle = y + (_ROW - 4) / 2
    ratio = f" · {summary.ratio:.2f} ×" if summary.ratio is not None else ""
    return [
        f'<text x="{_LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(case)}</text>',
        f'<rect x="{_LEFT}" y="{y}" width="{max(p50 - _LEFT, 1):.1f}" height="{_ROW - 4}" fill="{colour}"/>',
        f'<line x1="{p50:.1f}" y1="{middle}" x2="{p95:.1f}" y2="{middle}" stroke="{colour}" stroke-width="2"/>',
        f'<text x="{max(p50, p95) + 6:.1f}" y="{y + 12}">{_duration(summary.p50_s)}{ratio}</text>',
    ]


def _duration(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
