"""What a report says, before it is a page or a text: headline, checks, figures, tables, and where they come from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from untax.meter import units
from untax.meter.checks import Finding, check
from untax.meter.figures import (
    Figure,
    amortisation,
    cold_start,
    completion,
    composition,
    concurrency,
    distribution,
    paths,
    scale,
)
from untax.meter.gather import Gathered
from untax.meter.report import tables
from untax.meter.table import Table
from untax.meter.view import View

FIGURES = (composition, cold_start, distribution, amortisation, completion, scale, paths, concurrency)


@dataclass(frozen=True, slots=True)
class Card:
    """A headline number."""

    number: str
    words: str


@dataclass(slots=True)
class Contents:
    view: View
    cards: list[Card]
    findings: list[Finding]
    summary: Table
    figures: list[Figure]
    paper: list[Table]
    """Tables 1 and 2, and the comparison."""
    differences: Table
    sensitivity: list[Table]
    stalls: Table | None
    starts: Table | None
    conditions: Table | None
    cases: Table
    pairs: Table
    against: Table | None = None
    """Beside another run, where one was named."""
    facts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def run(self) -> Gathered:
        return self.view.run

    def all_tables(self) -> list[Table]:
        """Everything that becomes a CSV file."""
        found = [self.summary, *self.paper, self.differences, self.pairs, self.cases, *self.sensitivity]
        found += [table for table in (self.stalls, self.starts, self.conditions, self.against) if table is not None]
        return found + [table for figure in self.figures for table in figure.data]


def compile_contents(run: Gathered, against: Gathered | None = None) -> Contents:
    """Everything that there is to say about a run, and how it agrees with another."""
    view = View(run)
    figures = [module.make(view) for module in FIGURES]
    return Contents(
        view=view,
        cards=_cards(view),
        findings=check(run),
        summary=tables.summary(view),
        figures=figures,
        paper=[tables.table_1(view), tables.table_2(view), tables.against_the_paper(view)],
        differences=tables.differences(view),
        sensitivity=tables.sensitivity(view),
        stalls=tables.stalls(view),
        starts=tables.starts(view),
        conditions=tables.conditions(view),
        cases=tables.every_case(view),
        pairs=tables.all_pairs(view),
        against=tables.against(view, against) if against is not None else None,
        facts=_facts(run),
    )


def _cards(view: View) -> list[Card]:
    cards = []
    lightest = view.run.tiers[0] if view.run.tiers else ""
    starts = {s: found.p50 for s in view.cold if (one := view.run.of(s, lightest)) and (found := view.spread(one, "first_command"))}
    if starts:
        fast, slow = min(starts, key=lambda s: starts[s]), max(starts, key=lambda s: starts[s])
        words = f"until a first command could run, cold: {fast}"
        if len(starts) > 1 and starts[fast]:
            words += f"; {slow} takes {units.times(starts[slow] / starts[fast])} that"
        cards.append(Card(units.seconds(starts[fast]), words))
    taxes = {s: one.tax_share for s in view.cold if (one := view.run.of(s, view.heaviest))}
    if taxes:
        low, high = min(taxes.values()), max(taxes.values())
        number = units.share(high) if len(taxes) == 1 else f"{units.share(low).removesuffix(' %')}–{units.share(high)}"
        cards.append(Card(number, f"of a cold {view.heaviest} episode is tax: not the own time of its commands"))
    hours = tables.projected(view)
    if hours:
        number = units.hours(hours[0].hours.value) + (" *" if hours[0].seconds.is_extrapolated else "")
        words = f"of workers for a million trajectories of 150 actions on {hours[0].series}{' (* extrapolated)' if hours[0].seconds.is_extrapolated else ''}"
        if len(hours) > 1 and not hours[-1].seconds.interval.overlaps(hours[0].seconds.interval):
            words += f"; {hours[-1].series} adds {units.hours(hours[-1].more_hours)}"
        cards.append(Card(number, words))
    if card := _dispatch_card(view):
        cards.append(card)
    return cards


def _dispatch_card(view: View) -> Card | None:
    """How much less an action pays over the held channel, on the substrate where that is most."""
    best: tuple[float, str] | None = None
    length = max(view.lengths(), default=0)
    for series in view.cold:
        if series.path == "channel":
            continue
        held = next((s for s in view.cold if s.substrate == series.substrate and s.path == "channel"), None)
        one, other = view.run.of(series, view.heaviest, length), view.run.of(held, view.heaviest, length) if held else None
        a, b = view.spread(one, "dispatch") if one else None, view.spread(other, "dispatch") if other else None
        if a and b and b.p50 > 0 and (best is None or a.p50 / b.p50 > best[0]):
            best = a.p50 / b.p50, f"less dispatch for each action over the held channel than by one exec per action ({series.substrate})"
    return Card(units.times(best[0]), best[1]) if best and best[0] > 1 else None


def _facts(run: Gathered) -> list[tuple[str, str]]:
    head = run.run
    found = [
        ("run", head.run),
        ("started", head.started_at),
        ("command", head.command or "not recorded"),
        ("seed", str(head.seed)),
        ("records", f"{run.records:,} in {run.path.name}"),
        ("trials", f"{run.trials:,} counted, {sum(one.warmups for one in run.cases.values()):,} warm-up trials left out"),
        ("cost of a span", units.seconds(head.span_cost_ns * 1e-9)),
    ]
    return found + [(name.replace("_", " "), _said(value)) for name, value in head.host.items()]


def _said(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name.replace('_', ' ')} {_said(one)}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_said, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
