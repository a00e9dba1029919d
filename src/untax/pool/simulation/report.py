"""Outcomes side by side, as text for people and as one document for machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from untax.pool.simulation.description import Description
from untax.pool.simulation.outcome import WAYS, Outcome

SCHEMA = 1

Cell = tuple[float, float]
"""Zipf exponent and utilisation."""


def document(description: Description, seed: int, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    return {**_head(description, seed), "outcomes": [outcome.as_dict() for outcome in outcomes]}


def grid_document(description: Description, seed: int, cells: Mapping[Cell, Sequence[Outcome]]) -> dict[str, Any]:
    grid = [
        {"zipf": zipf, "utilisation": utilisation, "outcomes": [one.as_dict() for one in outcomes]}
        for (zipf, utilisation), outcomes in cells.items()
    ]
    return {**_head(description, seed), "grid": grid}


def heading(description: Description, seed: int, *, is_grid: bool = False) -> list[str]:
    """What was played, in two lines."""
    fleet, arrivals = description.fleet, description.arrivals
    first = f"{fleet.nodes} nodes for {fleet.room} sandboxes, {fleet.store_mib / 1024:.0f} GiB of layers and {fleet.starts} starts each"
    if description.ledgers is not None:
        return [first, f"rollouts as recorded in {description.ledgers.name}, the first {description.warmup:.0%} not counted; seed {seed}"]
    load = "" if is_grid else f", Zipf {arrivals.zipf:g}, utilisation {arrivals.utilisation:g}"
    specs = f"{arrivals.specs} specs over {arrivals.repos} repositories and {arrivals.images} images"
    rollouts = f"{description.grid.rollouts or arrivals.rollouts} rollouts in each cell" if is_grid else f"{arrivals.rollouts} rollouts"
    counted = f"{rollouts}, the first {description.warmup:.0%} not counted"
    return [first, f"{counted}; {specs}{load}, burst {arrivals.burst:g}, held {arrivals.hold_s:g} s; seed {seed}"]


def table(outcomes: Sequence[Outcome]) -> list[str]:
    """One line for each policy: time to ready, and how it came about."""
    ways = "".join(f"{way:>9}" for way in WAYS)
    lines = [f"{'':<16}{'mean':>10}{'p50':>10}{'p95':>10}{'p99':>10}{'queued':>10}{ways}{'builds':>10}{'fetches':>10}"]
    for one in outcomes:
        times = "".join(f"{seconds(value):>10}" for value in (one.mean_s, one.p50_s, one.p95_s, one.p99_s, one.queue_s))
        shares = "".join(f"{one.shares[way]:>9.1%}" for way in WAYS)
        lines.append(f"{one.policy:<16}{times}{shares}{one.builds:>10}{one.fetches:>10}")
    return lines


def ratios(outcomes: Sequence[Outcome]) -> list[str]:
    """How the last policy compares with each of the others, in mean time to ready."""
    *others, best = outcomes
    return [f"{best.policy}: {best.mean_s / other.mean_s:.3f} × {other.policy}" for other in others if other.mean_s > 0]


def grid_table(cells: Mapping[Cell, Sequence[Outcome]]) -> list[str]:
    """Mean time to ready, a line for each cell and a column for each policy; then the last policy over each of the others."""
    policies = [outcome.policy for outcome in next(iter(cells.values()))]
    over = [f"÷ {name}" for name in policies[:-1]]
    lines = ["".join([f"{'zipf':>5}{'util':>6}", *(f"{name:>16}" for name in policies), *(f"{name:>18}" for name in over)])]
    for (zipf, utilisation), outcomes in cells.items():
        means = "".join(f"{seconds(one.mean_s) + ('*' if is_crowded(one) else ' '):>16}" for one in outcomes)
        parts = "".join(f"{outcomes[-1].mean_s / one.mean_s:>18.3f}" for one in outcomes[:-1])
        lines.append(f"{zipf:>5g}{utilisation:>6g}{means}{parts}")
    if any(is_crowded(one) for outcomes in cells.values() for one in outcomes):
        lines.append("* the fleet was full at times: more than a tenth of the time to ready was the wait for a node with room")
    return lines


def is_crowded(outcome: Outcome) -> bool:
    return outcome.queue_s > 0.1 * outcome.mean_s


def seconds(value: float) -> str:
    return f"{value * 1e3:.2f} ms" if value < 0.1 else f"{value:.2f} s"


def _head(description: Description, seed: int) -> dict[str, Any]:
    fleet, stages, operations, arrivals = description.fleet, description.stages, description.operations, description.arrivals
    return {
        "untax_simulation": SCHEMA,
        "seed": seed,
        "warmup": description.warmup,
        "fleet": {
            "nodes": fleet.nodes,
            "memory_mib": fleet.memory_mib,
            "sandbox_mib": fleet.sandbox_mib,
            "store_mib": fleet.store_mib,
            "starts": fleet.starts,
            "link_mib_s": fleet.link_mib_s,
        },
        "stages": {
            name: {"seconds": stages.of(name).seconds, "mib": stages.of(name).mib, "fetch_s": description.fetch_s(name)}
            for name in ("image", "repo", "deps")
        },
        "spread": stages.spread,
        "operations": asdict(operations),
        "trace": {"ledgers": str(description.ledgers)}
        if description.ledgers is not None
        else {
            "rollouts": arrivals.rollouts,
            "specs": arrivals.specs,
            "repos": arrivals.repos,
            "images": arrivals.images,
            "zipf": arrivals.zipf,
            "utilisation": arrivals.utilisation,
            "burst": arrivals.burst,
            "hold_s": arrivals.hold_s,
        },
    }
