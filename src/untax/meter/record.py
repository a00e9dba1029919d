"""The records of a run: one JSON line each, the contract between the meter that writes and whatever reads.

```text
run      the first line: plan, seed, host, what a span costs, the command
trial    one trial, good or bad; its parts add up to its total
batch    rollouts that were under way at once, and how long all of them took (the concurrency axis)
gap      a case that was dropped, or a substrate that vanished, with the reason
resume   the run went on later, perhaps under other conditions
end      the run is complete
```

A file holds one run. Times are whole nanoseconds, instants are ISO 8601 in UTC. A reader refuses another version or a second run in
the same file, passes over keys that it does not know, and takes a last line without an end for what it is: a write that was cut off.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, get_args

from untax.core.errors import RecordError
from untax.core.span import PARTS as SPANS

VERSION = 1

PARTS = (*SPANS, "unattributed")
"""What a trial's time divides into; `untax.core.span.PARTS` says what is inside each."""

METRICS = ("first_command", "fresh_episode", "amortised_action")
"""first_command     from asking for a sandbox until its first command could run: queue + create + ready, and of setup what the lease was missing;
                  the workload's own set-up commands come after it
fresh_episode     from asking for a sandbox until it is gone
amortised_action  total ÷ actions
"""

HELD = "held by the meter"
"""`substrate_detail.warm` of a trial whose sandbox the meter had leased ahead, so that no lease from a pool is in it."""

Path_ = Literal["channel", "incumbent"]
Warmth = Literal["cold", "warm"]
ImageState = Literal["present", "absent"]
Contention = Literal["none", "cpu", "disk", "network"]
Outcome = Literal["ok", "failed", "infra"]

_LONGEST_LINE = 1 << 24  # bytes; a record is about 1 KiB, so a longer line is not one of ours


@dataclass(frozen=True, slots=True)
class Case:
    """One row of a plan: all trials of a case do the same under the same conditions."""

    substrate: str
    path: Path_ = "channel"
    """`channel`: the held channel. `incumbent`: one exec per action, as the substrate's users do today."""
    warmth: Warmth = "cold"
    tier: str = "T0"
    length: int = 0
    """Actions of the trajectory; 0 for the tier itself."""
    concurrency: int = 1
    image: ImageState = "present"
    contention: Contention = "none"

    def __str__(self) -> str:
        words = [self.substrate, self.tier if not self.length else f"{self.tier}×{self.length}", self.warmth]
        if self.path != "channel":
            words.append(self.path)
        if self.concurrency != 1:
            words.append(f"{self.concurrency} at once")
        if self.image != "present":
            words.append(f"image {self.image}")
        if self.contention != "none":
            words.append(f"{self.contention} contention")
        return " ".join(words)


@dataclass(frozen=True, slots=True)
class Run:
    """The first line."""

    run: str
    started_at: str
    seed: int
    plan: Mapping[str, Any]
    host: Mapping[str, Any]
    span_cost_ns: int
    command: str = ""


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial. `ok`: every action did what its workload says. `failed`: one did not. `infra`: the substrate failed."""

    run: str
    case: Case
    trial: int
    """Which of its case; warm-up trials are counted apart."""
    order: int
    """Which of the run."""
    warmup: bool
    started_at: str
    outcome: Outcome
    parts_ns: Mapping[str, int]
    """All of `PARTS`, of the last attempt; together `total_ns`."""
    total_ns: int
    metrics_ns: Mapping[str, int]
    """Those of `METRICS` that the trial got far enough to have."""
    actions: int = 0
    attempts: int = 1
    wasted_ns: int = 0
    """Of the attempts before the last. A rollout worker was busy for `total_ns + wasted_ns`."""
    control_plane_ns: int = 0
    """Of create + ready; 0 where there is no control plane."""
    setup_own_ns: int = 0
    """Of setup: the own time of the workload's set-up commands, measured inside. No tax: a plain script would spend it as well."""
    error: Mapping[str, str] | None = None
    limits: Mapping[str, float] = field(default_factory=dict)
    software: Mapping[str, Any] = field(default_factory=dict)
    substrate_detail: Mapping[str, Any] = field(default_factory=dict)

    @property
    def worker_ns(self) -> int:
        """How long a rollout worker was busy with it, failed attempts included."""
        return self.total_ns + self.wasted_ns

    @property
    def orchestration_ns(self) -> int:
        """Orchestration overhead in the paper's sense."""
        return self.parts_ns["queue"] + self.parts_ns["dispatch"] + self.control_plane_ns


@dataclass(frozen=True, slots=True)
class Batch:
    """`rollouts` trials of a case that were begun together, and how long it took until the last was over."""

    run: str
    case: Case
    batch: int
    order: int
    warmup: bool
    started_at: str
    rollouts: int
    failed: int
    wall_ns: int


@dataclass(frozen=True, slots=True)
class Gap:
    """Something that the plan asked for and the run does not have. `case` is None when it is about a whole substrate."""

    run: str
    at: str
    substrate: str
    reason: str
    case: Case | None = None
    trials_missing: int = 0


@dataclass(frozen=True, slots=True)
class Resume:
    run: str
    at: str
    host: Mapping[str, Any]
    command: str = ""


@dataclass(frozen=True, slots=True)
class End:
    """The run is complete: nothing of its plan is left to do."""

    run: str
    at: str
    trials: int
    failed: int
    wall_ns: int
    host: Mapping[str, Any] = field(default_factory=dict)


Record = Run | Trial | Batch | Gap | Resume | End

KINDS: Mapping[str, type[Record]] = {
    "run": Run, "trial": Trial, "batch": Batch, "gap": Gap, "resume": Resume, "end": End,
}  # fmt: skip
_NAMES = {kind: name for name, kind in KINDS.items()}
_FIELDS = {kind: tuple(f.name for f in fields(kind)) for kind in KINDS.values()}
_KNOWN = {kind: frozenset(names) for kind, names in _FIELDS.items()}
_CHOICES: Mapping[str, frozenset[str]] = {
    "path": frozenset(get_args(Path_)),
    "warmth": frozenset(get_args(Warmth)),
    "image": frozenset(get_args(ImageState)),
    "contention": frozenset(get_args(Contention)),
}
_OUTCOMES = frozenset(get_args(Outcome))
_ALL_PARTS = frozenset(PARTS)
_NONE_NS = dict.fromkeys(PARTS, 0)


def to_line(record: Record) -> bytes:
    """A record as one whole line."""
    kind = type(record)
    document: dict[str, Any] = {"v": VERSION, "kind": _NAMES[kind]}
    for name in _FIELDS[kind]:
        value = getattr(record, name)
        document[name] = asdict(value) if isinstance(value, Case) else dict(value) if isinstance(value, Mapping) else value
    return json.dumps(document, separators=(",", ":"), ensure_ascii=True).encode() + b"\n"


def from_line(line: bytes | str) -> Record:
    """A line as a record; `RecordError` says what is wrong with it."""
    return _parsed(line, {})


def read(path: Path) -> Iterator[Record]:
    """The records of a file, one at a time: a `Run` first. `RecordError` for what is not one run of this version.

    A last line that was cut off is left out; `Reader` says whether there was one.
    """
    with Reader(path) as reader:
        yield from reader


class Reader:
    """`with Reader(path) as reader`: an iterator over a file's records. `run` is its first line, known from the beginning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.truncated = False
        """Whether the last line was cut off; known once everything was read."""
        self.whole_bytes = 0
        """How many bytes of the file are whole lines, as far as it was read."""
        self._number = 0
        self._cases: dict[tuple[Any, ...], Case] = {}
        self._file = self._opened()
        try:
            self.run = self._first()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __iter__(self) -> Iterator[Record]:
        yield self.run
        while (record := self._next()) is not None:
            yield record

    def _opened(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as exc:
            raise RecordError(f"{self.path}: {exc.strerror}; name a records.jsonl that `untax bench` wrote") from exc

    def _first(self) -> Run:
        found = self._next()
        if found is None:
            what = "its only line was cut off" if self.truncated else "it is empty"
            raise RecordError(f"{self.path}: no records, {what}; run `untax bench` again")
        if not isinstance(found, Run):
            raise RecordError(
                f"{self.path}: the first line is a {_NAMES[type(found)]} record, not a run record; the file's beginning is lost"
            )
        return found

    def _next(self) -> Record | None:
        line = self._file.readline(_LONGEST_LINE)
        if not line:
            return None
        self._number += 1
        if not line.endswith(b"\n"):
            if len(line) < _LONGEST_LINE:
                self.truncated = True
                return None
            raise self._wrong("longer than any record")
        try:
            record = _parsed(line, self._cases)
        except RecordError as exc:
            raise self._wrong(str(exc)) from None
        if self._number > 1:
            self._check_same_run(record)
        self.whole_bytes += len(line)
        return record

    def _check_same_run(self, record: Record) -> None:
        if isinstance(record, Run) or record.run != self.run.run:
            raise self._wrong(f"it belongs to run {record.run}, the file to run {self.run.run}; keep runs in files of their own")

    def _wrong(self, why: str) -> RecordError:
        return RecordError(f"{self.path}, line {self._number}: {why}")


def _parsed(line: bytes | str, cases: dict[tuple[Any, ...], Case]) -> Record:
    try:
        document = json.loads(line)
    except ValueError as exc:
        raise RecordError(f"not JSON ({exc}); the file was changed or damaged") from None
    if not isinstance(document, dict):
        raise RecordError("not a record: a JSON object is expected")
    version = document.pop("v", None)
    if version != VERSION:
        raise RecordError(
            f"a record of version {version!r}, and this untax reads version {VERSION}; read it with the release that wrote it"
            if isinstance(version, int)
            else "not a record of untax: it has no version"
        )
    name = document.pop("kind", None)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise RecordError(f"a record of unknown kind {name!r}; the kinds are {', '.join(KINDS)}")
    if document.get("case") is not None:
        document["case"] = _case(document["case"], cases)
    known = _KNOWN[kind]
    if not known.issuperset(document):
        document = {name: value for name, value in document.items() if name in known}
    try:
        record: Record = kind(**document)
    except TypeError as exc:
        raise RecordError(f"a {name} record with something missing ({str(exc).partition('__init__() ')[2]})") from None
    if isinstance(record, Trial):
        _check_trial(record)
    return record


def _case(document: object, cases: dict[tuple[Any, ...], Case]) -> Case:
    """The one `Case` of all records that name it: a file has few, and comparing them is then comparing identities."""
    if not isinstance(document, dict):
        raise RecordError("a record whose case is not an object")
    try:
        key = tuple(document.items())
        found = cases.get(key)
        if found is None:
            for name, choices in _CHOICES.items():
                if name in document and document[name] not in choices:
                    raise RecordError(f"a case whose {name} is {document[name]!r}; it is one of {', '.join(sorted(choices))}")
            known = _KNOWN_CASE
            found = cases[key] = Case(**{name: value for name, value in document.items() if name in known})
    except TypeError as exc:
        raise RecordError(f"a case that is not one ({exc})") from None
    return found


_KNOWN_CASE = frozenset(f.name for f in fields(Case))


def _check_trial(trial: Trial) -> None:
    if trial.outcome not in _OUTCOMES:
        raise RecordError(f"a trial whose outcome is {trial.outcome!r}; it is one of {', '.join(sorted(_OUTCOMES))}")
    if not isinstance(trial.case, Case):
        raise RecordError("a trial without a case")
    parts = trial.parts_ns
    if not isinstance(parts, dict) or parts.keys() != _ALL_PARTS:
        raise RecordError(f"a trial whose parts are not {', '.join(PARTS)}")
    try:
        total = sum(parts.values())
    except TypeError:
        raise RecordError("a trial with a part that is not a number") from None
    if total != trial.total_ns:
        raise RecordError(f"a trial whose parts come to {total} ns and whose total is {trial.total_ns} ns; the file was changed")


def no_parts() -> dict[str, int]:
    """Every part, at 0 ns."""
    return dict(_NONE_NS)
