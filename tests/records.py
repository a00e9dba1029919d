"""Files of records as `untax bench` would write them, drawn from a seed: for tests of what reads them, never for published numbers."""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from untax.meter.record import Batch, Case, End, Gap, Record, Run, Trial, no_parts, to_line


@dataclass(frozen=True)
class Profile:
    """Median seconds of one imagined way to run."""

    create: float
    ready: float
    dispatch: float
    cleanup: float
    control_plane: float = 0.0  # share of create and ready
    spread: float = 0.08  # standard deviation of the logarithm
    setup_factor: float = 1.0


# Of the order of what such substrates cost; what the reports make of them is the subject.
PROFILES: Mapping[tuple[str, str], Profile] = {
    ("process", "channel"): Profile(0.0003, 0.0015, 0.00012, 0.0004, spread=0.05),
    ("namespace", "channel"): Profile(0.0012, 0.0011, 0.00015, 0.0006, spread=0.06),
    ("container", "channel"): Profile(0.19, 0.11, 0.0008, 0.09, 0.2),
    ("container", "incumbent"): Profile(0.19, 0.08, 0.052, 0.09, 0.2, 0.12),
    ("kubernetes", "incumbent"): Profile(0.35, 0.62, 0.061, 0.2, 0.7, 0.10),
    ("vm", "channel"): Profile(0.4, 2.4, 0.0011, 0.15, 0.05, 0.15, 1.25),
}
_TIER_ACTIONS = {"T0": (3, 0.001), "T1": (8, 0.012), "T2": (12, 0.21)}
_SETUP = {"T0": 0.0, "T1": 0.0, "T2": 0.35}
HOST: dict[str, Any] = {
    "kernel": "6.1.0-test", "cpu": "Imagined CPU", "cores": 8, "memory_mib": 16384, "python": "3.11.7", "untax": "0.1.0",
    "engines": {"docker": "20.10.24"}, "load_1m": 0.12,
}  # fmt: skip


def a_run(**fields: Any) -> Run:
    return Run(**{"run": "r1", "started_at": "2026-11-16T10:00:00Z", "seed": 7, "plan": {"trials": 30}, "host": HOST, "span_cost_ns": 300,
                  "command": "untax bench --quick", **fields})  # fmt: skip


def a_trial(case: Case, number: int = 0, *, rng: random.Random | None = None, profile: Profile | None = None, **fields: Any) -> Trial:
    """One trial of `case`; `fields` win over what is drawn."""
    rng = rng or random.Random(number)
    profile = profile or PROFILES[case.substrate, case.path]
    actions, own_s = (case.length, 0.13) if case.length else _TIER_ACTIONS.get(case.tier, (5, 0.01))

    def ns(seconds: float) -> int:
        return int(rng.lognormvariate(0, profile.spread) * seconds * 1e9)

    parts = no_parts()
    if case.warmth == "cold":
        parts |= {"create": ns(profile.create), "ready": ns(profile.ready), "setup": ns(_SETUP.get(case.tier, 0) * profile.setup_factor)}
    else:
        parts |= {"queue": ns(0.00005), "ready": ns(0.0004)}
    parts |= {"action": ns(actions * own_s), "dispatch": ns(actions * profile.dispatch), "observe": ns(actions * 0.00002)}
    parts |= {"reset": ns(0.002) if case.tier == "T2" else 0, "cleanup": ns(profile.cleanup), "unattributed": ns(0.000004)}
    if case.concurrency > 1:
        parts["queue"] = ns(0.01 * case.concurrency)
    if case.contention != "none":
        parts = {name: int(value * rng.uniform(1.2, 2.5)) for name, value in parts.items()}
    if case.image == "absent":
        parts["create"] += ns(4.0)
    total = sum(parts.values())
    first = sum(parts[name] for name in ("queue", "create", "ready", "setup"))
    return Trial(**{
        "run": "r1", "case": case, "trial": number, "order": number, "warmup": False, "started_at": "2026-11-16T10:00:01Z", "outcome": "ok",
        "parts_ns": parts, "total_ns": total,
        "metrics_ns": {"first_command": first, "fresh_episode": total, "amortised_action": total // max(1, actions)},
        "actions": actions, "control_plane_ns": int((parts["create"] + parts["ready"]) * profile.control_plane),
        "limits": {"cpus": 1.0, "memory_mib": 1024}, "software": {"image": "debian"}, **fields,
    })  # fmt: skip


def plain_cases(*, tiers: Iterable[str] = ("T0", "T1", "T2"), lengths: Iterable[int] = (10, 50, 150)) -> list[Case]:
    found = [Case(substrate, path, "cold", tier) for substrate, path in PROFILES for tier in tiers]  # type: ignore[arg-type]
    found += [Case(substrate, path, "cold", "T2", length) for substrate, path in PROFILES for length in lengths]  # type: ignore[arg-type]
    return found + [Case("namespace", "channel", "warm", "T2", length) for length in lengths]


def more_cases() -> list[Case]:
    """One or more of every further axis."""
    found = [Case("namespace", tier="T0", concurrency=n) for n in (8, 32)] + [Case("container", tier="T0", concurrency=n) for n in (8, 32)]
    found += [Case("container", tier="T0", contention=kind) for kind in ("cpu", "disk", "network")]  # type: ignore[arg-type]
    return [*found, Case("container", "incumbent", tier="T0", image="absent")]


def whole_run(cases: Iterable[Case], trials: int = 30, *, seed: int = 7, failures: bool = True) -> list[Record]:
    """A complete run: warm-up, trials interleaved in random order, some failures, batches, gaps, the end."""
    rng = random.Random(seed)
    cases = list(cases)
    made: list[Record] = [a_run(seed=seed)]
    order = 0
    for number in range(-2, trials):
        rng.shuffle(cases)
        for case in cases:
            trial = a_trial(case, max(0, number), rng=rng, order=order, warmup=number < 0)
            if failures and number >= 0 and case.substrate == "kubernetes" and rng.random() < 0.04:
                error = {"type": "ReadinessTimeout", "message": "pod <untax-7> | never became ready & was given up"}
                trial = a_trial(case, number, rng=rng, order=order, outcome="infra", error=error, attempts=3, wasted_ns=2_000_000_000)
            made.append(trial)
            order += 1
            if case.concurrency > 1 and number >= 0 and number % 5 == 0:
                wall = int(1e9 * (0.01 + case.concurrency * PROFILES[case.substrate, case.path].create / 3))
                made.append(Batch("r1", case, number // 5, order, False, "2026-11-16T10:00:02Z", case.concurrency, 0, wall))
    made.append(Gap("r1", "2026-11-16T10:30:00Z", "gvisor", "runsc is not installed; see `untax doctor`"))
    made.append(Gap("r1", "2026-11-16T10:30:00Z", "vm", "no time left for 5 trials", Case("vm", tier="T2", length=300), 30))
    return [*made, End("r1", "2026-11-16T11:00:00Z", order, 0, 3_600_000_000_000)]


def write(path: Path, records: Iterable[Record]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"".join(to_line(record) for record in records))
    return path
