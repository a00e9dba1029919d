"""Which cases, how many trials, in which order. Pure: the same plan and seed give the same order.

A plan comes from a TOML file, from flags, or from both, flags first. It is kept in the first record of its run, from which `--resume` reads
it again.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import product
from pathlib import Path
from typing import Any, get_args

from untax.core.errors import UsageError
from untax.core.spec import Limits
from untax.meter.record import Case, Contention, ImageState, Path_, Warmth

TRIALS = 100
QUICK_TRIALS = 10
LEAST_TRIALS = 5
"""A case that a time box cannot give so many is dropped: from fewer, a tail is a guess."""
TIERS = ("T0", "T1", "T2")
WORKS = (("T0", 0), ("T1", 0), ("T2", 0), ("T2", 10), ("T2", 50), ("T2", 150))
"""Tier and length of what is measured unless asked otherwise: as the paper, fresh episodes of each tier and trajectories of the heaviest."""

_MOST = 1_000_000
_COUNTED = {"substrates": "substrate", "tiers": "tier", "lengths": "length", "paths": "path", "warmth": "warmth"}


@dataclass(frozen=True, slots=True)
class Plan:
    """`trials` rounds; in each round every case once, in an order drawn from `seed`. `warmup` rounds come first, and are marked."""

    substrates: tuple[str, ...]
    works: tuple[tuple[str, int], ...] = WORKS
    warmth: tuple[Warmth, ...] = ("cold", "warm")
    paths: tuple[Path_, ...] = ("channel", "incumbent")
    """Both, where a substrate has both."""
    concurrency: tuple[int, ...] = (1,)
    """How many rollouts are begun at once."""
    knee: bool = False
    """Whether to go on beyond the last level, four times as many at once each time, until throughput grows no more."""
    images: tuple[ImageState, ...] = ("present",)
    contention: tuple[Contention, ...] = ("none",)
    trials: int = TRIALS
    warmup: int = 2
    seed: int = 0
    retries: int = 1
    """How often a trial is tried again after a failure of the infrastructure that may pass."""
    workers: int = 0
    """How many rollouts may run at once; the others wait, which is `queue`. 0: all of them."""
    budget_s: float = 0.0
    """A time box for all cases together; 0: none."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Over those of the workloads, on every substrate."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """For each substrate: `image`, and what else its engine takes. With `substrate` in it, the name is only a label for another's options."""
    counts: tuple[Mapping[str, Any], ...] = ()
    """Other numbers of trials for some cases: `trials`, and of `substrates`, `tiers`, `lengths`, `paths`, `warmth` those that it is for.

    The first that fits counts, and 0 leaves the case out."""

    def __post_init__(self) -> None:
        if not self.substrates:
            raise UsageError("a plan needs at least one substrate; `untax doctor` says which this machine can use")
        if not self.works:
            raise UsageError("a plan needs at least one tier")
        for name, least in (("trials", 1), ("warmup", 0), ("retries", 0), ("workers", 0), ("seed", 0)):
            _whole(name, getattr(self, name), least)
        for name in ("warmth", "paths", "concurrency", "images", "contention"):
            if not getattr(self, name):
                raise UsageError(f"{name} must not be empty")
        for level in self.concurrency:
            _whole("concurrency", level, 1)
        for _, length in self.works:
            _whole("length", length, 0)
        for name, kind in (("warmth", Warmth), ("paths", Path_), ("images", ImageState), ("contention", Contention)):
            for one in getattr(self, name):
                _among(name, one, get_args(kind))
        if isinstance(self.budget_s, bool) or not isinstance(self.budget_s, (int, float)) or not 0 <= self.budget_s < float("inf"):
            raise UsageError(f"budget_s must be a number of seconds, not {self.budget_s!r}")
        if unknown := sorted(set(self.options) - set(self.substrates)):
            raise UsageError(f"options for {', '.join(unknown)}, which the plan does not measure")
        if self.limits:
            checked_limits(self.limits)
        for count in self.counts:
            self._check_count(count)

    def _check_count(self, count: Mapping[str, Any]) -> None:
        if unknown := sorted(set(count) - {*_COUNTED, "trials"}):
            raise UsageError(f"counts: {', '.join(unknown)} is not known; there are: trials, {', '.join(_COUNTED)}")
        if "trials" not in count:
            raise UsageError("counts: each has trials")
        _whole("counts: trials", count["trials"], 0)
        there = {"substrates": self.substrates, "paths": self.paths, "warmth": self.warmth}
        for name in set(count) - {"trials"}:
            for one in _list(count[name], f"counts: {name}"):
                if name in there and one not in there[name]:
                    raise UsageError(f"counts: {name} names {one!r}, which the plan does not measure")

    def trials_for(self, case: Case) -> int:
        """Of one case, as far as its rounds are whole."""
        for count in self.counts:
            if all(name not in count or getattr(case, attribute) in count[name] for name, attribute in _COUNTED.items()):
                return int(count["trials"])
        return self.trials

    def slots(self, case: Case) -> int:
        """In how many rounds a case takes part."""
        return slots(self.trials_for(case), case)

    def cases(self) -> list[Case]:
        """Every combination, none twice."""
        axes = product(self.substrates, self.paths, self.warmth, self.works, sorted(set(self.concurrency)), self.images, self.contention)
        found = [Case(s, path, warmth, tier, length, level, image, load) for s, path, warmth, (tier, length), level, image, load in axes]
        # A warm sandbox has its image: there is nothing to compare.
        return list(
            dict.fromkeys(case for case in found if self.trials_for(case) and not (case.warmth == "warm" and case.image == "absent"))
        )

    def order(self, cases: Sequence[Case]) -> Iterator[tuple[int, Case]]:
        """All slots as (round, case); rounds below 0 are warm-up. A slot of a case of n at once is n trials, so it has as many fewer slots."""
        rng = random.Random(self.seed)
        for number in range(-self.warmup, max((self.slots(case) for case in cases), default=0)):
            shuffled = list(cases)
            rng.shuffle(shuffled)
            for case in shuffled:
                if number < self.slots(case):
                    yield number, case

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def slots(trials: int, case: Case) -> int:
    """In how many rounds a case takes part."""
    return -(-trials // case.concurrency)


def trials_of(trials: int, case: Case) -> int:
    """How many trials of a case a whole run has."""
    return slots(trials, case) * case.concurrency


def from_mapping(given: Mapping[str, Any], *, where: str) -> Plan:
    """A plan from a file's or a record's mapping; `UsageError` names what is wrong in `where`."""
    known = {f.name for f in fields(Plan)} | {"tiers", "lengths"}
    if unknown := sorted(set(given) - known):
        raise UsageError(f"{where}: {', '.join(unknown)} is not known; there are: {', '.join(sorted(known))}")
    values = dict(given)
    tiers, lengths = values.pop("tiers", None), values.pop("lengths", None)
    try:
        if tiers is not None or lengths is not None:
            if "works" in values:
                raise UsageError("name works, or tiers and lengths, not both")
            values["works"] = works(
                _list(tiers, "tiers") if tiers is not None else TIERS, _list(lengths, "lengths") if lengths is not None else (0,)
            )
        elif "works" in values:
            values["works"] = tuple(_work(one) for one in _list(values["works"], "works"))
        for name in ("substrates", "warmth", "paths", "concurrency", "images", "contention"):
            if name in values:
                values[name] = tuple(_list(values[name], name))
        if "counts" in values:
            values["counts"] = tuple(_list(values["counts"], "counts"))
            if not all(isinstance(one, Mapping) for one in values["counts"]):
                raise UsageError("counts must be tables, as [[counts]]")
        if "options" in values and not all(isinstance(one, Mapping) for one in dict(values["options"]).values()):
            raise UsageError("options must be a table for each substrate, as [options.NAME]")
        return Plan(**{"substrates": (), **values})
    except UsageError as exc:
        raise UsageError(f"{where}: {exc}") from None
    except (TypeError, ValueError) as exc:
        raise UsageError(f"{where}: {exc}") from None


def read_file(path: Path) -> dict[str, Any]:
    """What a plan file says, unchecked; flags go over it before it is."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from exc
    except ValueError as exc:
        raise UsageError(f"{path} is not TOML: {exc}") from None


def works(tiers: Sequence[str], lengths: Sequence[int]) -> tuple[tuple[str, int], ...]:
    return tuple((tier, length) for tier in tiers for length in lengths)


def quick(plan: Plan) -> Plan:
    return replace(plan, trials=QUICK_TRIALS, warmup=1)


def checked_limits(limits: Mapping[str, Any]) -> Limits:
    if unknown := sorted(set(limits) - {f.name for f in fields(Limits)}):
        raise UsageError(f"limits: {', '.join(unknown)} is not known; there are: {', '.join(f.name for f in fields(Limits))}")
    return Limits(**limits)


def _work(given: object) -> tuple[str, int]:
    if isinstance(given, (list, tuple)) and len(given) == 2 and isinstance(given[0], str):
        return given[0], _whole("length", given[1], 0)
    raise UsageError(f"works has pairs of a tier and a length, as in ['T2', 150], not {given!r}")


def _list(given: object, name: str) -> list[Any]:
    if not isinstance(given, (list, tuple)):
        raise UsageError(f"{name} must be a list, not {given!r}")
    return list(given)


def _whole(name: str, value: object, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise UsageError(f"{name} must be a whole number from {least} to {_MOST}, not {value!r}")
    return value


def _among(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise UsageError(f"{name}: {value!r} is not one of {', '.join(choices)}")
