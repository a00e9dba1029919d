"""The file that describes a fleet: its nodes, what its stages cost, what arrives. Checked once, here."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from untax.core.errors import UsageError
from untax.pool.simulation.ledgers import Measured, measured

_MOST_NODES = 100_000
_MOST_ROLLOUTS = 10_000_000


@dataclass(frozen=True, slots=True)
class Nodes:
    """What every node of the fleet has."""

    nodes: int
    memory_mib: int
    """For sandboxes, live and parked together."""
    sandbox_mib: int
    store_mib: int
    """For layers; the stages worth least go when it is full."""
    starts: int = 4
    """How much may be starting at once: sandboxes being created, stages being built."""
    link_mib_s: int = 0
    """How fast a layer comes from another node; 0: none does, and every node builds for itself."""

    @property
    def room(self) -> int:
        """How many sandboxes fit into the memory of one node."""
        return self.memory_mib // self.sandbox_mib


@dataclass(frozen=True, slots=True)
class Step:
    """One rung: what it takes to build on the average, and on the disk."""

    seconds: float
    mib: int
    fetch_s: float | None = None
    """What it takes to come from a node that has it, on the average; None: what its MiB take over the link."""


@dataclass(frozen=True, slots=True)
class Steps:
    # Of the order that images of one or two gigabytes, clones and `pip install` take; a file says what its own records show.
    image: Step = Step(20.0, 1500)
    repo: Step = Step(5.0, 200)
    deps: Step = Step(30.0, 1000)
    spread: float = 0.5
    """How far single stages are from the average: the standard deviation of the logarithm of their seconds."""

    def of(self, name: str) -> Step:
        step: Step = getattr(self, name)
        return step


@dataclass(frozen=True, slots=True)
class Operations:
    # As `untax bench` measures them for the `namespace` substrate.
    create_s: float = 0.005
    bind_s: float = 0.0005
    reset_s: float = 0.005
    # Of a layer of a few KiB between two nodes, `python -m benchmarks.layer_transfer --mib 0`.
    arrive_s: float = 0.03
    """What a stage that comes from another node takes beside its bytes: finding out who has it, checking, putting it into the store."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What is drawn: popularity of specs by Zipf, groups of rollouts of one spec as a Poisson process, exponential hold times."""

    rollouts: int = 100_000
    specs: int = 5000
    repos: int = 2500
    images: int = 50
    zipf: float = 1.0
    """The spec of rank r is asked for in proportion to 1 / r^zipf; 0: all alike."""
    utilisation: float = 0.7
    """The share of the fleet's room that rollouts hold on the average; the time until they are ready comes on top."""
    burst: float = 1.0
    """How many rollouts of one spec arrive together, on the average."""
    hold_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Grid:
    zipf: tuple[float, ...] = ()
    utilisation: tuple[float, ...] = ()
    rollouts: int | None = None
    """Of each cell; those of the trace unless it says otherwise."""


@dataclass(frozen=True, slots=True)
class Description:
    fleet: Nodes
    stages: Steps = field(default_factory=Steps)
    operations: Operations = field(default_factory=Operations)
    arrivals: Arrivals = field(default_factory=Arrivals)
    grid: Grid = field(default_factory=Grid)
    ledgers: Path | None = None
    """A recorded trace, which takes the place of the drawn one."""
    warmup: float = 0.5
    """The share of the rollouts, the first ones, that are played and not counted: nodes begin with nothing on them."""

    def fetch_s(self, name: str) -> float | None:
        """What a stage of this rung takes to come from a node that has it; None where stages do not travel."""
        step = self.stages.of(name)
        if step.fetch_s is not None:
            return step.fetch_s
        return self.operations.arrive_s + step.mib / self.fleet.link_mib_s if self.fleet.link_mib_s else None

    def with_rollouts(self, rollouts: int) -> Description:
        """Of one trace, and of each cell of the grid."""
        _whole(rollouts, "rollouts", 1, _MOST_ROLLOUTS)
        return replace(self, arrivals=replace(self.arrivals, rollouts=rollouts), grid=replace(self.grid, rollouts=rollouts))

    def with_cell(self, zipf: float, utilisation: float) -> Description:
        rollouts = self.grid.rollouts or self.arrivals.rollouts
        return replace(self, arrivals=replace(self.arrivals, zipf=zipf, utilisation=utilisation, rollouts=rollouts))


def read_fleet(file: Path) -> Description:
    """`UsageError` for a file that cannot be read, or that says something that is not known or cannot be."""
    try:
        said = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"{file}: {exc.strerror}") from exc
    except ValueError as exc:
        raise UsageError(f"{file} is not TOML: {exc}") from exc
    return describe(said, beside=file.parent)


def describe(said: Mapping[str, Any], *, beside: Path) -> Description:
    """From what a file says; the files that it names lie `beside` it."""
    tables = _only(said, "the file", ("fleet", "stages", "operations", "trace", "grid"))
    if "fleet" not in tables:
        raise UsageError("there is no [fleet]: say nodes, memory_mib, sandbox_mib and store_mib")
    stages, operations = _costs(tables.get("stages", {}), tables.get("operations", {}), beside)
    trace = dict(_only(tables.get("trace", {}), "[trace]", (*_names(Arrivals), "ledgers", "warmup")))
    ledgers = trace.pop("ledgers", None)
    warmup = _number(trace.pop("warmup", Description.__dataclass_fields__["warmup"].default), "[trace] warmup", 0.0, 0.99)
    description = Description(
        _fleet(tables["fleet"]),
        stages,
        operations,
        _arrivals(trace),
        _grid(tables.get("grid", {})),
        beside / _text(ledgers, "[trace] ledgers") if ledgers is not None else None,
        warmup,
    )
    _check_store(description)
    return description


def _fleet(said: Any) -> Nodes:
    table = _only(said, "[fleet]", _names(Nodes))
    if absent := [name for name in ("nodes", "memory_mib", "sandbox_mib", "store_mib") if name not in table]:
        raise UsageError(f"[fleet] does not say {', '.join(absent)}")
    least, most = {"link_mib_s": 0}, {"nodes": _MOST_NODES}
    fleet = Nodes(**{name: _whole(value, f"[fleet] {name}", least.get(name, 1), most.get(name, 1 << 40)) for name, value in table.items()})
    if fleet.room < 1:
        raise UsageError(f"[fleet] memory_mib = {fleet.memory_mib} holds no sandbox of {fleet.sandbox_mib} MiB")
    return fleet


def _costs(stages: Any, operations: Any, beside: Path) -> tuple[Steps, Operations]:
    said = dict(_only(stages, "[stages]", (*_names(Steps), "ledgers")))
    ledgers = said.pop("ledgers", None)
    known = measured(beside / _text(ledgers, "[stages] ledgers")) if ledgers is not None else Measured({}, {}, {})
    usual = Steps()
    values: dict[str, Any] = {}
    for name in ("image", "repo", "deps"):
        step = _only(said.get(name, {}), f"[stages] {name}", _names(Step))
        seconds = step.get("seconds", known.stages.get(name, usual.of(name).seconds))
        fetch_s = step.get("fetch_s", known.fetched.get(name))
        values[name] = Step(
            _number(seconds, f"[stages] {name}.seconds", 0.0, 1e6),
            _whole(step.get("mib", usual.of(name).mib), f"[stages] {name}.mib", 0, 1 << 30),
            None if fetch_s is None else _number(fetch_s, f"[stages] {name}.fetch_s", 0.0, 1e6),
        )
    values["spread"] = _number(said.get("spread", usual.spread), "[stages] spread", 0.0, 3.0)
    given = _only(operations, "[operations]", _names(Operations))
    took = {**known.operations, **given}
    return Steps(**values), Operations(**{name: _number(value, f"[operations] {name}", 0.0, 1e6) for name, value in took.items()})


def _arrivals(said: Mapping[str, Any]) -> Arrivals:
    wholes = {"rollouts": _MOST_ROLLOUTS, "specs": 1_000_000, "repos": 1_000_000, "images": 1_000_000}
    numbers = {"zipf": (0.0, 5.0), "utilisation": (0.001, 2.0), "burst": (1.0, 1e4), "hold_s": (0.001, 1e6)}
    values: dict[str, Any] = {}
    for name, value in said.items():
        where = f"[trace] {name}"
        values[name] = _whole(value, where, 1, wholes[name]) if name in wholes else _number(value, where, *numbers[name])
    return Arrivals(**values)


def _grid(said: Any) -> Grid:
    table = _only(said, "[grid]", _names(Grid))
    rollouts = table.get("rollouts")
    return Grid(
        _numbers(table.get("zipf", ()), "[grid] zipf", 0.0, 5.0),
        _numbers(table.get("utilisation", ()), "[grid] utilisation", 0.001, 2.0),
        None if rollouts is None else _whole(rollouts, "[grid] rollouts", 1, _MOST_ROLLOUTS),
    )


def _check_store(description: Description) -> None:
    """What live sandboxes stand on is never evicted: the store must hold that, and one more ladder that is being built."""
    fleet, stages = description.fleet, description.stages
    least = (fleet.room + 1) * sum(stages.of(name).mib for name in ("image", "repo", "deps"))
    if fleet.store_mib < least:
        raise UsageError(
            f"[fleet] store_mib = {fleet.store_mib} cannot hold what {fleet.room} sandboxes of different specs stand on: say at least {least}"
        )


# ---- one value ----


def _names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(one.name for one in fields(kind))


def _only(value: Any, where: str, known: Sequence[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UsageError(f"{where} must be a table with some of: {', '.join(known)}")
    if unknown := sorted(set(value) - set(known)):
        raise UsageError(f"{where}: {', '.join(unknown)} is not known; there are: {', '.join(known)}")
    return value


def _number(value: Any, where: str, least: float, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and least <= value <= most):
        raise UsageError(f"{where} = {value!r}: must be a number from {least:g} to {most:g}")
    return float(value)


def _numbers(value: Any, where: str, least: float, most: float) -> tuple[float, ...]:
    if not isinstance(value, (list, tuple)):
        raise UsageError(f"{where} must be a list of numbers")
    return tuple(_number(one, where, least, most) for one in value)


def _whole(value: Any, where: str, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise UsageError(f"{where} = {value!r}: must be a whole number from {least} to {most}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{where} must be the name of a file")
    return value
