"""A run as its report looks at it: which series, in which order and style, and spreads computed once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from untax.meter.gather import Gathered, Samples, Series
from untax.meter.project import ByLength, models
from untax.meter.stats import Spread, spread


@dataclass(frozen=True, slots=True)
class Style:
    """How a series is drawn: a colour for its substrate, a mark that can be told apart without it."""

    colour: int
    is_hollow: bool
    """The incumbent path."""
    is_diamond: bool
    """Warm."""

    @property
    def dash(self) -> str:
        return "5 3" if self.is_hollow else "2 3" if self.is_diamond else ""


@dataclass(slots=True)
class View:
    run: Gathered
    series: list[Series] = field(init=False)
    styles: dict[Series, Style] = field(init=False)
    heaviest: str = field(init=False)
    """The tier that most resembles real work; "" when no plain case has a tier."""
    models: dict[Series, ByLength] = field(init=False)
    """Seconds by length, on the heaviest tier."""
    _spreads: dict[tuple[int, str], Spread] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.series = self.run.series
        colours = {name: n for n, name in enumerate(dict.fromkeys(one.substrate for one in self.series))}
        self.styles = {one: Style(colours[one.substrate], one.path != "channel", one.warmth != "cold") for one in self.series}
        tiers = self.run.tiers
        self.heaviest = next((tier for tier in reversed(tiers) if self.run.lengths(tier)), tiers[-1] if tiers else "")
        self.models = models(self.run, self.heaviest) if self.heaviest else {}

    @property
    def cold(self) -> list[Series]:
        return [one for one in self.series if one.warmth == "cold"]

    def spread(self, samples: Samples, metric: str = "total") -> Spread | None:
        """Of a column of a case; None where it has none."""
        values = column(samples, metric)
        if not values:
            return None
        key = (id(samples), metric)
        if key not in self._spreads:
            self._spreads[key] = spread(values)
        return self._spreads[key]

    def lengths(self) -> list[int]:
        """Of the trajectories on the heaviest tier."""
        return self.run.lengths(self.heaviest)


def column(samples: Samples, metric: str) -> Sequence[float]:
    """`total`, `dispatch` (of one action) or one of the named metrics, in seconds."""
    if metric == "total":
        return samples.total
    return samples.dispatch if metric == "dispatch" else samples.metrics[metric]
