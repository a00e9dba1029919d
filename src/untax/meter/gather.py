"""A file of records as columns: for each case the times of its trials, in the order in which they were run, and what went wrong.

Everything that reads a run (statistics, checks, figures, projection, advice) starts here. A million records take about 100 MiB.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from untax.core.errors import RecordError, UsageError
from untax.meter.record import METRICS, PARTS, Batch, Case, End, Gap, Reader, Resume, Run, Trial

RECORDS = "records.jsonl"
_NS = 1e-9
_TELL_EVERY = 20_000  # records between two calls of `tell`
# What no part covers may be a hundredth of a trial or this, whichever is more (DESIGN §6).
_UNATTRIBUTED_SHARE, _UNATTRIBUTED_NS = 0.01, 50_000


@dataclass(frozen=True, slots=True, order=True)
class Series:
    """What a reader compares: a substrate, how actions reach it, and whether it was warm."""

    substrate: str
    path: str = "channel"
    warmth: str = "cold"

    def __str__(self) -> str:
        words = [self.substrate]
        if self.path != "channel":
            words.append(self.path)
        if self.warmth != "cold":
            words.append(self.warmth)
        return " · ".join(words)


@dataclass(slots=True)
class Samples:
    """The trials of one case. Seconds; warm-up left out; latencies are those of trials that went well."""

    case: Case
    total: array[float] = field(default_factory=lambda: array("d"))
    order: array[int] = field(default_factory=lambda: array("q"))
    metrics: dict[str, array[float]] = field(default_factory=lambda: {name: array("d") for name in METRICS})
    dispatch: array[float] = field(default_factory=lambda: array("d"))
    """Of one action, the mean of a trial."""
    worker: array[float] = field(default_factory=lambda: array("d"))
    """How long a worker was busy, retries included; of trials that went well."""
    lost: array[float] = field(default_factory=lambda: array("d"))
    """The same, of trials that did not."""
    unattributed: array[float] = field(default_factory=lambda: array("f"))
    """As a multiple of what is allowed."""
    parts: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    """Sums over the trials that went well."""
    control_plane: float = 0.0
    start_parts: dict[str, array[float]] = field(default_factory=dict)
    """What a control plane told of each step of a start, where it did."""
    setup_own: float = 0.0
    """Of the part setup, the own time of the workload's set-up commands; a sum as well."""
    actions: int = 0
    retried: int = 0
    warmups: int = 0
    missed: int = 0
    """Trials that went well and that the pool served otherwise than the case says: a warm one that found nothing ready, a cold one that did."""
    errors: Counter[str] = field(default_factory=Counter)
    """Kinds of failure, as "infra: SandboxLost"."""
    example: str = ""
    """What the first failure said."""
    limits: set[str] = field(default_factory=set)
    software: set[str] = field(default_factory=set)
    detail: dict[str, str] = field(default_factory=dict)
    """What the substrate said about itself."""

    @property
    def n(self) -> int:
        return len(self.total)

    @property
    def failed(self) -> int:
        return len(self.lost)

    @property
    def series(self) -> Series:
        return Series(self.case.substrate, self.case.path, self.case.warmth)

    @property
    def ran_as(self) -> str:
        """What the substrate called itself; another name than the case's is another thing than what was asked for."""
        return self.detail.get("substrate", self.case.substrate)

    def is_of(self, isolation: str) -> bool:
        """Whether it ran with this boundary: as what it was asked for as, or as a kind of it whose sandboxes promised it in the records."""
        return self.ran_as == self.case.substrate or self.detail.get("isolation") == isolation

    @property
    def mean_parts(self) -> dict[str, float]:
        """What a trial divides into, on average; together the mean total."""
        return {name: total / self.n for name, total in self.parts.items()}

    @property
    def orchestration(self) -> float:
        """Mean of queue + dispatch + the control plane's share of create and ready: the paper's orchestration overhead."""
        return (self.parts["queue"] + self.parts["dispatch"] + self.control_plane) / self.n

    @property
    def tax(self) -> float:
        """Mean of everything that is not the workload's own commands."""
        return (sum(seconds for name, seconds in self.parts.items() if name != "action") - self.setup_own) / self.n

    @property
    def tax_share(self) -> float:
        """Of all time of the trials that went well."""
        total = sum(self.parts.values())
        return self.tax * self.n / total if total else 0.0

    @property
    def worker_per_trajectory(self) -> float:
        """Seconds of a worker for each trajectory that went well: failures and retries are paid for as well."""
        return (sum(self.worker) + sum(self.lost)) / self.n


@dataclass(slots=True)
class Gathered:
    """One run, or what a filter left of it."""

    path: Path
    run: Run
    cases: dict[Case, Samples]
    batches: dict[Case, list[Batch]] = field(default_factory=dict)
    gaps: list[Gap] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    end: End | None = None
    truncated: bool = False
    records: int = 0

    @property
    def trials(self) -> int:
        return sum(one.n + one.failed for one in self.cases.values())

    @property
    def series(self) -> list[Series]:
        """Of all plain cases, in the order in which a reader looks for them: by substrate, channel first, cold first."""
        found = {one.series for one in self.cases.values() if is_plain(one.case)}
        return sorted(found, key=lambda s: (s.substrate, s.path != "channel", s.warmth != "cold"))

    @property
    def tiers(self) -> list[str]:
        return sorted({case.tier for case in self.cases if is_plain(case)})

    def lengths(self, tier: str) -> list[int]:
        """Of trajectories on a tier, the tier itself left out."""
        return sorted({case.length for case in self.cases if is_plain(case) and case.tier == tier and case.length})

    def of(self, series: Series, tier: str, length: int = 0) -> Samples | None:
        """The plain case with at least one good trial; None where there is none."""
        found = self.cases.get(Case(series.substrate, series.path, series.warmth, tier, length))  # type: ignore[arg-type]
        return found if found is not None and found.n else None

    def where(self, wanted: Callable[[Case], bool]) -> list[Samples]:
        return [one for case, one in self.cases.items() if one.n and wanted(case)]


def is_plain(case: Case) -> bool:
    """Without a further axis: one rollout at a time, on a quiet machine that has the image."""
    return case.concurrency == 1 and case.image == "present" and case.contention == "none"


def records_path(run: Path) -> Path:
    """The file of a run that was named by its directory or by the file itself."""
    return run / RECORDS if run.is_dir() else run


def gather(
    run: Path,
    *,
    tiers: Iterable[str] = (),
    substrates: Iterable[str] = (),
    tell: Callable[[int, int], None] | None = None,
) -> Gathered:
    """Read a run. `RecordError` for a file that is not one, `UsageError` for a filter that names what the run does not have.

    `tell` is called now and then with the bytes read and of how many.
    """
    path = records_path(run)
    cases: dict[Case, Samples] = {}
    with Reader(path) as reader:
        found = Gathered(path, reader.run, cases)
        size = path.stat().st_size
        try:
            _check_head(reader.run)
            for record in reader:
                found.records += 1
                if type(record) is Trial:
                    samples = cases.get(record.case)
                    if samples is None:
                        samples = cases[record.case] = Samples(_checked(record.case))
                    _take(samples, record)
                else:
                    _note(found, record)
                if tell is not None and found.records % _TELL_EVERY == 0:
                    tell(reader.whole_bytes, size)
        except (TypeError, AttributeError, KeyError, OverflowError) as exc:
            raise RecordError(f"{path}, record {found.records}: a field that is not what it should be ({exc})") from None
        found.truncated = reader.truncated
    if not cases and not found.gaps:
        raise RecordError(f"{path}: the run was begun and has no trials; go on with it by `untax bench --resume`")
    return _filtered(found, tuple(tiers), tuple(substrates))


def _check_head(run: Run) -> None:
    _check_text(run.run, run.started_at, run.command)
    if not isinstance(run.host, Mapping) or type(run.span_cost_ns) is not int:
        raise TypeError("the host or the cost of a span")


def _check_text(*values: object) -> None:
    for value in values:
        if not isinstance(value, str):
            raise TypeError(f"{value!r} instead of text")


def _checked(case: Case) -> Case:
    """A case whose fields can be counted with and sorted by."""
    if type(case.length) is not int or type(case.concurrency) is not int or case.length < 0 or case.concurrency < 1:
        raise TypeError(f"a case of {case.length!r} actions, {case.concurrency!r} at once")
    _check_text(case.substrate, case.tier)
    return case


def _take(samples: Samples, trial: Trial) -> None:
    if trial.warmup:
        samples.warmups += 1
        return
    total = trial.total_ns
    if type(total) is not int or type(trial.wasted_ns) is not int or total < 0 or min(trial.parts_ns.values()) < min(0, -total):
        raise TypeError(f"a total of {total!r} ns")
    worker_s = (total + trial.wasted_ns) * _NS
    if trial.attempts > 1:
        samples.retried += 1
    if trial.outcome != "ok":
        samples.lost.append(worker_s)
        error = trial.error if isinstance(trial.error, Mapping) else {}
        samples.errors[f"{trial.outcome}: {error.get('type', 'unknown')}"] += 1
        samples.example = samples.example or str(error.get("message", ""))
        return
    parts = trial.parts_ns
    samples.total.append(total * _NS)
    samples.order.append(trial.order)
    samples.worker.append(worker_s)
    metrics = trial.metrics_ns
    for name, column in samples.metrics.items():
        if name in metrics:
            value = metrics[name]
            if type(value) is not int or value < 0:
                raise TypeError(f"{name} is {value!r}")
            column.append(value * _NS)
    sums = samples.parts
    for name, ns in parts.items():
        if ns:
            sums[name] += ns * _NS
    samples.control_plane += trial.control_plane_ns * _NS
    for name, ns in trial.substrate_detail.get("start_parts_ns", {}).items():
        if type(ns) is not int or ns < 0:
            raise TypeError(f"{name} of a start is {ns!r}")
        samples.start_parts.setdefault(str(name), array("d")).append(ns * _NS)
    if type(trial.setup_own_ns) is not int or not 0 <= trial.setup_own_ns <= parts["setup"]:
        raise TypeError(f"{trial.setup_own_ns!r} ns of set-up commands")
    samples.setup_own += trial.setup_own_ns * _NS
    if trial.actions:
        samples.actions += trial.actions
        samples.dispatch.append(parts["dispatch"] * _NS / trial.actions)
    samples.unattributed.append(abs(parts["unattributed"]) / max(_UNATTRIBUTED_SHARE * total, _UNATTRIBUTED_NS))
    if "missed" in trial.substrate_detail:
        samples.missed += 1
    if len(samples.total) == 1:  # the trials of a case have these in common
        samples.limits.add(_facts(trial.limits))
        samples.software.add(_facts(_identity(trial.software)))
        if trial.software.get("packages") == "uploaded":
            samples.detail["packages"] = "uploaded"
        samples.detail |= {str(name): str(value) for name, value in trial.substrate_detail.items()}


def _note(found: Gathered, record: object) -> None:
    if isinstance(record, Batch):
        if any(type(value) is not int for value in (record.rollouts, record.failed, record.wall_ns)):
            raise TypeError("a batch whose counts are not numbers")
        if not record.warmup:
            found.batches.setdefault(record.case, []).append(record)
    elif isinstance(record, Gap):
        if record.case is not None:
            _checked(record.case)
        _check_text(record.substrate, record.reason)
        found.gaps.append(record)
    elif isinstance(record, Resume):
        _check_text(record.at)
        found.resumes.append(record)
    elif isinstance(record, End):
        if not isinstance(record.host, Mapping) or type(record.wall_ns) is not int:
            raise TypeError("the end's host or wall clock")
        found.end = record


def _identity(software: Mapping[str, Any]) -> dict[str, Any]:
    """What makes two substrates run the same software; where it lay before is the substrate's business."""
    found = {name: software[name] for name in ("image", "workload") if name in software}
    repo = software.get("repo")
    return {**found, "commit": repo.get("commit", "") if isinstance(repo, Mapping) else repo} if repo else found


def _facts(values: object) -> str:
    return ", ".join(f"{name} {value}" for name, value in sorted(values.items())) if isinstance(values, dict) else ""


def _filtered(found: Gathered, tiers: Sequence[str], substrates: Sequence[str]) -> Gathered:
    for what, wanted, there in (
        ("tier", tiers, {case.tier for case in found.cases} | {gap.case.tier for gap in found.gaps if gap.case}),
        ("substrate", substrates, {case.substrate for case in found.cases} | {gap.substrate for gap in found.gaps}),
    ):
        for name in wanted:
            if name not in there:
                raise UsageError(f"the run has no {what} {name!r}; it has {', '.join(sorted(there))}")

    def is_wanted(case: Case) -> bool:
        return (not tiers or case.tier in tiers) and (not substrates or case.substrate in substrates)

    found.cases = {case: samples for case, samples in found.cases.items() if is_wanted(case)}
    found.batches = {case: batches for case, batches in found.batches.items() if is_wanted(case)}
    found.gaps = [gap for gap in found.gaps if (is_wanted(gap.case) if gap.case else not substrates or gap.substrate in substrates)]
    return found
