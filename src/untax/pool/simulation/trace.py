"""The rollouts that arrive: when, for which spec, for how long. Drawn from a seed, or as ledgers recorded them.

One trace is played through every policy, so that they are compared on the same arrivals, hold times and stage costs.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from untax.core.errors import UsageError
from untax.core.stage import LADDER, Stage, StageName
from untax.pool.simulation import ledgers
from untax.pool.simulation.description import Description

_RUNGS: dict[str, StageName] = {name: name for name in LADDER}

Spec = tuple[Stage, ...]
"""The rungs that a rollout wants, lowest first. `base` is not among them: it costs nothing and lies everywhere."""


@dataclass(frozen=True, slots=True)
class Trace:
    specs: tuple[Spec, ...]
    build_s: Mapping[str, float]
    """What each stage takes to build, by key."""
    arrive_s: array[float]
    spec: array[int]
    """The number of its spec, for each arrival."""
    hold_s: array[float]
    fetch_s: Mapping[str, float] = field(default_factory=dict)
    """What each takes to come from a node that has it, by key; a stage that is not in it is built wherever it is wanted."""

    def __len__(self) -> int:
        return len(self.arrive_s)

    def __iter__(self) -> Iterator[tuple[float, int, float]]:
        return zip(self.arrive_s, self.spec, self.hold_s, strict=True)


def drawn(description: Description, seed: int) -> Trace:
    """As the description says; the same for the same seed on every machine."""
    wanted = description.arrivals
    of_specs = random.Random(f"specs {seed}")
    repos = [of_specs.randrange(wanted.images) for _ in range(wanted.repos)]
    specs = []
    for number in range(wanted.specs):
        repo = of_specs.randrange(wanted.repos)
        specs.append(_ladder([("image", f"image-{repos[repo]}"), ("repo", f"repo-{repo}"), ("deps", f"deps-{number}")]))

    draws = random.Random(f"arrivals {seed}")
    count = wanted.rollouts
    weights = list(accumulate((rank + 1) ** -wanted.zipf for rank in range(wanted.specs)))
    rate = wanted.utilisation * description.fleet.nodes * description.fleet.room / wanted.hold_s
    arrive, spec = array("d"), array("l")
    now = 0.0
    while len(arrive) < count:
        now += draws.expovariate(rate / wanted.burst)
        number = draws.choices(range(wanted.specs), cum_weights=weights)[0]
        together = min(_group(draws, wanted.burst), count - len(arrive))
        arrive.extend([now] * together)
        spec.extend([number] * together)
    hold = array("d", (draws.expovariate(1.0 / wanted.hold_s) for _ in range(count)))
    return Trace(tuple(specs), _build_seconds(specs, description, seed), arrive, spec, hold, _fetch_seconds(specs, description))


def recorded(description: Description, seed: int) -> Trace:
    """As the ledgers say, which the description names; only what a stage costs on a node without it is drawn."""
    if description.ledgers is None:
        raise UsageError("the file names no ledgers under [trace]")
    came = ledgers.rollouts(description.ledgers)
    numbers: dict[tuple[tuple[str, str], ...], int] = {}
    for one in came:
        numbers.setdefault(_rungs(one.wanted), len(numbers))
    specs = tuple(_ladder(rungs) for rungs in numbers)
    start = came[0].asked_at
    return Trace(
        specs,
        _build_seconds(specs, description, seed),
        array("d", (one.asked_at - start for one in came)),
        array("l", (numbers[_rungs(one.wanted)] for one in came)),
        array("d", (one.hold_s for one in came)),
        _fetch_seconds(specs, description),
    )


def _rungs(wanted: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
    rungs = tuple(rung for rung in wanted if rung[0] != "base")
    if unknown := [name for name, _ in rungs if name not in LADDER]:
        raise UsageError(f"a recorded rollout wants the stage {unknown[0]!r}; there are: {', '.join(LADDER)}")
    if not rungs:
        raise UsageError("a recorded rollout wants no stage at all")
    return rungs


def _ladder(rungs: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> Spec:
    ladder: list[Stage] = []
    for name, key in rungs:
        ladder.append(Stage(_RUNGS[name], key, {}, ladder[-1].key if ladder else None, is_portable=True))
    return tuple(ladder)


def _group(draws: random.Random, mean: float) -> int:
    """A geometric number, at least 1."""
    size = 1
    while draws.random() >= 1.0 / mean:
        size += 1
    return size


def _build_seconds(specs: tuple[Spec, ...] | list[Spec], description: Description, seed: int) -> dict[str, float]:
    """Around the average of its rung, the same for a key whichever specs stand on it."""
    draws = random.Random(f"costs {seed}")
    spread = description.stages.spread
    took: dict[str, float] = {}
    for spec in specs:
        for stage in spec:
            if stage.key not in took:
                # The mean of a log-normal value is exp(mu + sigma² / 2): this mu makes it 1.
                took[stage.key] = description.stages.of(stage.name).seconds * draws.lognormvariate(-spread * spread / 2, spread)
    return took


def _fetch_seconds(specs: Sequence[Spec], description: Description) -> dict[str, float]:
    found = {stage.key: description.fetch_s(stage.name) for spec in specs for stage in spec}
    return {key: seconds for key, seconds in found.items() if seconds is not None}
