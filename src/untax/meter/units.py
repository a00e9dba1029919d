"""Numbers as people read them: three significant digits, and the unit that suits."""

from __future__ import annotations

import math
from collections.abc import Callable

from untax.meter.stats import Interval


def seconds(value: float) -> str:
    """A duration: "2.31 ms", "42.5 s"."""
    if not math.isfinite(value):
        return "–"
    if value == 0:
        return "0 s"
    size = abs(value)
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if size >= scale * 0.9995:
            return f"{digits(value / scale)} {unit}"
    return f"{digits(value / 1e-9)} ns"


def tick(value: float) -> str:
    """A duration on an axis, where it is a round number: "3 ms"."""
    number, _, unit = seconds(value).partition(" ")
    return f"{number.rstrip('0').rstrip('.') if '.' in number else number} {unit}"


def digits(value: float, count: int = 3) -> str:
    """With `count` significant digits, thousands parted, never in powers of ten."""
    if not math.isfinite(value):
        return "–" if math.isnan(value) else "∞"
    if value == 0:
        return "0"
    places = max(0, count - 1 - math.floor(math.log10(abs(value) * (1 + 0.5 * 10.0**-count))))
    return f"{value:,.{places}f}"


def hours(value: float) -> str:
    """Whole hours from ten on, as the paper prints them."""
    return f"{value:,.0f} h" if abs(value) >= 10 else f"{digits(value)} h"


def times(value: float) -> str:
    return f"{digits(value)} ×"


def share(value: float) -> str:
    """A part of a whole, as per cent."""
    percent = 100 * value
    return f"{percent:.0f} %" if percent >= 10 or percent == 0 else f"{percent:.1f} %" if percent >= 0.1 else "< 0.1 %"


def between(interval: Interval | None, show: Callable[[float], str] = seconds) -> str:
    """As in "2.1–2.5 ms"; "≥ 2.1 ms" where the samples do not bound it from above."""
    if interval is None:
        return ""
    if interval.is_open:
        return f"≥ {show(interval.low)}"
    low, high = show(interval.low), show(interval.high)
    unit = high.rpartition(" ")[2]
    if " " in high and low.endswith(f" {unit}"):
        low = low.removesuffix(f" {unit}")
    return f"{low}–{high}"


def count(value: float) -> str:
    """A number of things: "10,000", "1 million", "10 million"."""
    if value >= 1e6 and value % 1e5 == 0:
        return f"{value / 1e6:g} million"
    return f"{value:,.0f}"


def money(value: float, currency: str) -> str:
    text = f"{value:,.0f}" if abs(value) >= 100 else f"{value:,.2f}" if abs(value) >= 0.01 or value == 0 else digits(value)
    return f"{text} {currency}"
