"""What ledgers of real rollouts tell a simulation: what steps took, and, where they say so, who came when and for what.

A file has one ledger a line, as `Ledger.to_json()` writes them. Rollouts that the infrastructure failed are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from untax.core.errors import UsageError
from untax.core.ledger import SCHEMA

_BEFORE = ("queue_s", "create_s", "ready_s", "setup_s")
_AFTER = ("cleanup_s",)


@dataclass(frozen=True, slots=True)
class Measured:
    """Mean seconds, by the name of a stage and by the name that a description has for an operation."""

    stages: Mapping[str, float]
    """Of those that were built."""
    operations: Mapping[str, float]
    fetched: Mapping[str, float]
    """Of those that came from another node."""


class Recorded(NamedTuple):
    """One rollout as it was: when it was asked for, the rungs it wanted (name and key, lowest first), how long it was held."""

    asked_at: float
    wanted: tuple[tuple[str, str], ...]
    hold_s: float


def measured(file: Path) -> Measured:
    """What the steps in these ledgers took on the average; a step that none of them has is absent."""
    stages: dict[str, list[float]] = {}
    operations: dict[str, list[float]] = {}
    fetched: dict[str, list[float]] = {}
    for number, ledger in _ledgers(file):
        numbers = _metrics(ledger, file, number)
        came = ledger.get("fetched", {})
        for name, seconds in ledger.get("stages", {}).items():
            if name not in came:
                stages.setdefault(name, []).append(_seconds(seconds, file, number))
        for name, seconds in came.items():
            fetched.setdefault(name, []).append(_seconds(seconds, file, number))
        if numbers.get("create_s", 0.0):
            operations.setdefault("create_s", []).append(numbers["create_s"] + numbers.get("ready_s", 0.0))
        elif bind_s := numbers.get("ready_s", 0.0):  # one that was idle
            operations.setdefault("bind_s", []).append(bind_s)
        if resets := numbers.get("resets", 0.0):
            operations.setdefault("reset_s", []).append(numbers.get("reset_s", 0.0) / resets)
    return Measured(_means(stages), _means(operations), _means(fetched))


def rollouts(file: Path) -> list[Recorded]:
    """All of them by the time at which they were asked for. `UsageError` when a ledger does not say when, or for what."""
    found = []
    for number, ledger in _ledgers(file):
        try:
            asked_at = float(ledger["asked_at"])
            wanted = tuple((str(name), str(key)) for name, key in ledger["wanted"])
        except KeyError as exc:
            raise UsageError(
                f"{file}, line {number}: the ledger has no {exc}, so it cannot be replayed; "
                "it still tells what steps cost: name the file as `ledgers` under [stages], and draw the trace"
            ) from exc
        except (TypeError, ValueError) as exc:
            raise UsageError(f"{file}, line {number}: {exc}") from exc
        numbers = _metrics(ledger, file, number)
        around_s = sum(numbers.get(name, 0.0) for name in (*_BEFORE, *_AFTER))
        found.append(Recorded(asked_at, wanted, max(0.0, numbers.get("total_s", 0.0) - around_s)))
    if not found:
        raise UsageError(f"{file} has no ledger of a rollout that can be trusted")
    return sorted(found, key=lambda one: one.asked_at)


def _ledgers(file: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    try:
        with file.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    ledger = _ledger(line, file, number)
                    if ledger.get("verdict") == "trusted":
                        yield number, ledger
    except OSError as exc:
        raise UsageError(f"{file}: {exc.strerror}") from exc


def _ledger(line: str, file: Path, number: int) -> Mapping[str, Any]:
    try:
        ledger = json.loads(line)
    except ValueError as exc:
        raise UsageError(f"{file}, line {number} is not JSON: {exc}") from exc
    if not isinstance(ledger, dict) or ledger.get("untax_ledger") != SCHEMA:
        raise UsageError(f"{file}, line {number} is no ledger of version {SCHEMA}")
    return ledger


def _metrics(ledger: Mapping[str, Any], file: Path, number: int) -> Mapping[str, float]:
    numbers = ledger.get("metrics")
    if not isinstance(numbers, dict):
        raise UsageError(f"{file}, line {number}: the ledger has no metrics")
    return {str(name): _seconds(value, file, number) for name, value in numbers.items()}


def _seconds(value: Any, file: Path, number: int) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1e12:
        raise UsageError(f"{file}, line {number}: {value!r} is no number of seconds")
    return float(value)


def _means(samples: Mapping[str, list[float]]) -> dict[str, float]:
    return {name: sum(values) / len(values) for name, values in samples.items()}
