"""Which substrate suits a spec, from what rollouts are expected to cost on each. Pure: the engine that chooses and the advice both use it.

Nothing weaker than the boundary asked for is ever chosen. Of those strong enough the one wins on which a rollout is expected to take a worker
the least time; what was measured on this machine goes before what is typical elsewhere.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from untax.core.errors import UsageError
from untax.core.spec import ISOLATION_LEVELS, is_as_strong
from untax.core.substrate import Typical

Source = Literal["measured", "learnt", "typical"]

ACTIONS = 50.0
"""Of a rollout, unless told: the middle one of the lengths that are measured."""
_VERSION = 1
# For a substrate that says nothing of itself: of the order of what each boundary cost where all were measured beside each other.
_BY_ISOLATION: Mapping[str, Typical] = {
    "none": Typical(0.003, 0.0002),
    "namespace": Typical(0.005, 0.0003),
    "container": Typical(0.4, 0.0005),
    "gvisor": Typical(0.6, 0.001),
    "vm": Typical(6.0, 0.005),
}
_SAID: Mapping[Source, str] = {
    "measured": "measured here",
    "learnt": "its start learnt here, its actions as elsewhere",
    "typical": "as elsewhere, not measured here",
}


@dataclass(frozen=True, slots=True)
class Expected:
    """What one rollout is expected to cost on a substrate beside its own commands."""

    substrate: str
    isolation: str
    start_s: float
    """Until a command can run, cold."""
    action_s: float
    """Added to every action."""
    end_s: float = 0.0
    source: Source = "typical"

    def rollout_s(self, actions: float) -> float:
        return rollout_s(start_s=self.start_s, action_s=self.action_s, actions=actions, end_s=self.end_s)


@dataclass(frozen=True, slots=True)
class Choice:
    substrate: str
    reason: str
    """For people: what it costs, where that is known from, and what the next best would."""
    left_out: Mapping[str, str]
    """The others by name: too weak, not usable, or dearer."""


def rollout_s(
    *, start_s: float, action_s: float, actions: float, end_s: float = 0.0, resets: float = 0.0, replacement_s: float = 0.0
) -> float:
    """Seconds of a worker for one rollout: what comes once, what comes with every action, and with every clean sandbox in between."""
    return start_s + actions * action_s + resets * replacement_s + end_s


def expected(name: str, isolation: str, typical: Typical | None, measured: Expected | None, learnt_s: float | None) -> Expected:
    """The best that is known of a substrate: a run of the meter, or what its pools have learnt, or what is typical."""
    if measured is not None and measured.isolation == isolation:
        return measured
    typical = typical or _BY_ISOLATION[isolation]
    if learnt_s is not None:
        return Expected(name, isolation, learnt_s, typical.action_s, source="learnt")
    return Expected(name, isolation, typical.start_s, typical.action_s)


def choose(candidates: Sequence[Expected], asked: str, *, actions: float = ACTIONS, unusable: Mapping[str, str] | None = None) -> Choice:
    """`UsageError` when nothing usable is strong enough; it names what each of the others lacks."""
    left_out = dict(unusable or {})
    strong = []
    for one in candidates:
        if is_as_strong(one.isolation, as_required=asked):
            strong.append(one)
        else:
            left_out[one.substrate] = f"its isolation is {one.isolation!r}, weaker than {asked!r}"
    if not strong:
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(left_out.items())) or "there is none"
        raise UsageError(f"no usable substrate has isolation {asked!r} or stronger ({why}); `untax doctor` says what each lacks")
    # Equal in time, the stronger boundary wins.
    ranked = sorted(strong, key=lambda one: (one.rollout_s(actions), -ISOLATION_LEVELS.index(one.isolation), one.substrate))
    best, *others = ranked
    for one in others:
        left_out[one.substrate] = f"a rollout is expected to cost {_words(one, actions)}"
    reason = f"{best.substrate} (isolation {best.isolation!r}, {asked!r} asked for): a rollout of {actions:g} actions is expected to cost {_words(best, actions)}"
    if others:
        reason += f"; next best {others[0].substrate}, {_words(others[0], actions)}"
    return Choice(best.substrate, reason, left_out)


def _words(one: Expected, actions: float) -> str:
    return f"{_duration(one.rollout_s(actions))} beside its own commands ({_SAID[one.source]})"


def _duration(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


# ---- kept between a run of the meter and the engines after it ----


def to_json(measured: Sequence[Expected]) -> str:
    return json.dumps({"version": _VERSION, "substrates": [asdict(one) for one in measured]}, indent=1)


def from_json(text: str) -> dict[str, Expected]:
    """By substrate. `UsageError` for what is no such record; one of a later release says so."""
    try:
        value: Any = json.loads(text)
        if value["version"] != _VERSION:
            raise UsageError(f"measured costs of version {value['version']!r}: this release knows {_VERSION}; run `untax bench` again")
        found = [Expected(**one) for one in value["substrates"]]
        for one in found:
            _check(one)
    except (ValueError, KeyError, TypeError) as exc:
        if isinstance(exc, UsageError):
            raise
        raise UsageError(f"not a record of measured costs: {exc!r}; remove the file, or run `untax bench` again") from exc
    return {one.substrate: one for one in found}


def _check(one: Expected) -> None:
    if not isinstance(one.substrate, str) or one.isolation not in ISOLATION_LEVELS or one.source != "measured":
        raise ValueError(f"{one.substrate!r} with isolation {one.isolation!r} from {one.source!r}")
    for value in (one.start_s, one.action_s, one.end_s):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
            raise ValueError(f"{value!r} is no number of seconds")
