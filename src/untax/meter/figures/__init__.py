"""Records in, pictures out: one file for each figure. The paper's figures have its numbers; ours come after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from untax.meter.figures._svg import Canvas
from untax.meter.table import Table


@dataclass(slots=True)
class Figure:
    """`draw(width)` gives a canvas. Where the records do not have what it shows, `missing` says what to run, and nothing is drawn."""

    number: int
    name: str
    title: str
    caption: str
    records: str
    """Which records are behind it."""
    draw: Callable[[float], Canvas] | None = None
    missing: str = ""
    data: list[Table] = field(default_factory=list)
