"""The account of one rollout: where its time went, what happened, and whether it can be trusted.

The engine writes, everybody else reads. Writing one action costs a tuple and a list append, because it happens
on every action; everything that can be computed is computed when it is asked for.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from untax.core.span import PARTS, Clock, Span, now_ns
from untax.core.stage import Fetched, Stage
from untax.core.substrate import Unenforced, said_together

SCHEMA = 1
"""Of `to_json`. A reader refuses a number it does not know."""

# A rollout has hundreds of actions. Beyond this many only their sums are kept, so that a lease that is used as
# a service for days does not grow without bound (a record is about 200 bytes).
KEPT_ACTIONS = 20_000
KEPT_EGRESS = 1_000
_FOLD_AT = 4_096

Verdict = Literal["trusted", "infra"]


class ActionRecord(NamedTuple):
    """One action, in nanoseconds of the measuring clock.

    `inside_ns` is the command's own time as the cell measured it; 0 for file actions, which spawn nothing.
    """

    name: str
    start_ns: int
    received_ns: int
    end_ns: int
    inside_ns: int
    outcome: str


@dataclass(frozen=True, slots=True)
class EgressRecord:
    """One attempt of a program inside to reach a destination outside."""

    host: str
    port: int
    verdict: str
    """`"allowed"`, `"denied"` by the policy, or `"failed"` to be reached."""
    reason: str
    at_ns: int


@dataclass(slots=True)
class Hit:
    """How the pool served a lease, and what that took beside waiting."""

    kind: Literal["exact", "partial", "cold"]
    """`exact`: a sandbox with everything in place was idle. `partial`: one at a lower stage was, and was raised. `cold`: one was created."""
    start: str | None
    """The stage that was in place already."""
    missing: tuple[str, ...]
    """Those that were not."""
    waited_s: float
    waited_for: str
    """In words; empty when it did not wait."""
    why: str
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of each step up from `start`: stages that were built, and the sandbox's own creation."""


@dataclass(frozen=True, slots=True)
class Placed:
    """Where in a fleet a lease went."""

    node: str
    why: str
    """In words: how near that node was to what the lease needed, and how near the next."""
    tried: tuple[tuple[str, str], ...] = ()
    """The nodes that were asked before, and what each said."""


class Ledger:
    """Live while the lease lasts: reading it twice may give different numbers. Final once the box is released."""

    def __init__(self, *, rollout: str, substrate: str, isolation: str, start_ns: int, clock: Clock = now_ns) -> None:
        self.rollout = rollout
        self.substrate = substrate
        self.isolation = isolation
        self.sandboxes: list[str] = []
        self.unenforced: tuple[Unenforced, ...] = ()
        self.stages: dict[str, float] = {}
        """The stages that were missing and how many seconds each took to build, or to come; the wait for them is in the part `setup`."""
        self.fetched: dict[str, float] = {}
        """Those of them that came from another node, and how many seconds that took without the wait for whoever built it."""
        self.resets: dict[str, int] = {}
        """How often the box was reset, by how: `pristine` (kept, for nothing had happened) or `replaced`."""
        self.asked_at = time.time()
        """When the lease was asked for, in seconds since 1970."""
        self.wanted: tuple[Stage, ...] = ()
        """The stages that the lease needed in place, lowest first; empty for what a pool does not serve."""
        self.hit: Hit | None = None
        """How the pool served it; None for what a pool does not serve (forks, restored snapshots, builds)."""
        self.choice = ""
        """Why this substrate, where the engine chose among several."""
        self.placed: Placed | None = None
        """Which node of a fleet it went to, and why; None for what one engine served."""
        self._clock = clock
        self._start_ns = start_ns
        self._held_from_ns: int | None = None
        self._held_to_ns: int | None = None
        self._end_ns: int | None = None
        self._parts: list[tuple[str, int, int]] = []
        self._kept: list[ActionRecord] = []
        self._recent: list[ActionRecord] = []
        self._folded = _Sums()
        self._reasons: list[str] = []
        self._egress: list[EgressRecord] = []
        self._egress_allowed = 0
        self._egress_refused = 0

    # ---- written by the engine ----

    def add(self, name: str, start_ns: int, end_ns: int) -> None:
        """A part other than an action's."""
        self._parts.append((name, start_ns, end_ns))

    def put_in_place(self, took: Mapping[str, float]) -> None:
        """Stages that were missing, and what the lease waited for each."""
        for name, seconds in took.items():
            self.stages[name] = float(seconds)
            if isinstance(seconds, Fetched):
                self.fetched[name] = seconds.fetch_s

    def record(self, action: ActionRecord) -> None:
        recent = self._recent
        recent.append(action)
        if len(recent) >= _FOLD_AT:
            self._fold()

    def held(self, from_ns: int) -> None:
        """The holder has it from now on: what is not an action is the holder's own time."""
        self._held_from_ns = from_ns

    def released(self, at_ns: int) -> None:
        if self._held_to_ns is None:
            self._held_to_ns = at_ns

    def closed(self, at_ns: int) -> None:
        if self._end_ns is None:
            self._end_ns = at_ns

    def was_reset(self, how: str) -> None:
        self.resets[how] = self.resets.get(how, 0) + 1

    def fault(self, reason: str) -> None:
        """The infrastructure failed: whatever this rollout shows is not the workload's doing."""
        if len(self._reasons) < 16 and reason not in self._reasons:
            self._reasons.append(reason)

    def egress_attempt(self, attempt: EgressRecord) -> None:
        if attempt.verdict == "allowed":
            self._egress_allowed += 1
        else:
            self._egress_refused += 1
        if len(self._egress) < KEPT_EGRESS:
            self._egress.append(attempt)

    # ---- read by everybody ----

    @property
    def verdict(self) -> Verdict:
        return "infra" if self._reasons else "trusted"

    @property
    def reason(self) -> str | None:
        """Why the verdict is `"infra"`; None when it is not."""
        return self._reasons[0] if self._reasons else None

    @property
    def has_acted(self) -> bool:
        """Whether there was any action at all."""
        return bool(self._recent or self._kept or self._folded.count)

    @property
    def is_closed(self) -> bool:
        """Whether it is final."""
        return self._end_ns is not None

    @property
    def held_s(self) -> float:
        """How long the holder had it, up to now."""
        if self._held_from_ns is None:
            return 0.0
        return ((self._held_to_ns if self._held_to_ns is not None else self._clock()) - self._held_from_ns) / 1e9

    @property
    def start_ns(self) -> int:
        """When the lease was asked for, on the measuring clock: what the spans count from."""
        return self._start_ns

    @property
    def held_ns(self) -> int | None:
        """When the holder had it, on the same clock."""
        return self._held_from_ns

    @property
    def released_ns(self) -> int | None:
        """When the holder gave it up, on the same clock."""
        return self._held_to_ns

    @property
    def actions(self) -> tuple[ActionRecord, ...]:
        """The first `KEPT_ACTIONS` of them, and the latest."""
        return (*self._kept, *self._recent)

    @property
    def egress(self) -> tuple[EgressRecord, ...]:
        """The first `KEPT_EGRESS` attempts; `metrics()` counts them all."""
        return tuple(self._egress)

    @property
    def spans(self) -> tuple[Span, ...]:
        """All parts in order of their beginning, from the start of the ledger.

        Of an action only the length of the command's own time is known; it is shown at the end of the way there and
        back, so `dispatch`, `action` and `observe` of one action are neighbours.
        """
        zero = self._start_ns
        spans = [Span(name, start - zero, end - zero) for name, start, end in self._parts]
        for action in self.actions:
            spans.extend(Span(name, start - zero, end - zero) for name, start, end in _parts_of(action))
        spans.sort(key=lambda span: (span.start_ns, span.end_ns))
        return tuple(spans)

    @property
    def total_s(self) -> float:
        """From the request for the lease until the sandbox was given up, or until now."""
        return self._total_ns() / 1e9

    @property
    def tax_s(self) -> float:
        """All parts but `action`: what the execution system took. The holder's own time is not in it."""
        sums = self._sums()
        return sum(ns for name, ns in sums.parts.items() if name != "action") / 1e9

    def metrics(self) -> dict[str, float]:
        """Flat numbers for a training log: seconds in each part, `holder_s`, `unattributed_s`, counts.

        One action at a time, the parts, `holder_s` and `unattributed_s` add up to `total_s`. Actions that overlap are
        each counted in full.
        """
        sums = self._sums()
        held_ns, uncovered_ns = self._uncovered_ns(sums)
        numbers = {f"{name}_s": sums.parts.get(name, 0) / 1e9 for name in PARTS}
        numbers["holder_s"] = held_ns / 1e9
        numbers["unattributed_s"] = uncovered_ns / 1e9
        numbers["total_s"] = self.total_s
        numbers["tax_s"] = self.tax_s
        numbers["actions"] = float(sums.count)
        numbers["egress_allowed"] = float(self._egress_allowed)
        numbers["egress_refused"] = float(self._egress_refused)
        numbers["resets"] = float(sum(self.resets.values()))
        numbers["unenforced"] = float(len(self.unenforced))
        numbers["trusted"] = 1.0 if self.verdict == "trusted" else 0.0
        return numbers

    def to_json(self) -> str:
        """One line of JSON that carries its own version (`docs/api.md` lists the fields)."""
        zero = self._start_ns
        return json.dumps(
            {
                "untax_ledger": SCHEMA,
                "rollout": self.rollout,
                "substrate": self.substrate,
                "isolation": self.isolation,
                **({"choice": self.choice} if self.choice else {}),
                **({"placed": asdict(self.placed)} if self.placed is not None else {}),
                "sandboxes": self.sandboxes,
                "verdict": self.verdict,
                "reasons": self._reasons,
                "asked_at": self.asked_at,
                **({"wanted": [[stage.name, stage.key] for stage in self.wanted]} if self.wanted else {}),
                "hit": asdict(self.hit) if self.hit is not None else None,
                "stages": self.stages,
                **({"fetched": self.fetched} if self.fetched else {}),
                "resets": self.resets,
                "unenforced": [asdict(limit) for limit in self.unenforced],
                "total_ns": self._total_ns(),
                "metrics": self.metrics(),
                "parts": [[name, start - zero, end - zero] for name, start, end in self._parts],
                "actions": [
                    [a.name, a.start_ns - zero, a.received_ns - zero, a.end_ns - zero, a.inside_ns, a.outcome] for a in self.actions
                ],
                "egress": [asdict(attempt) | {"at_ns": attempt.at_ns - zero} for attempt in self._egress],
            },
            separators=(",", ":"),
        )

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return f"<Ledger {self.rollout} {self.verdict} total={self.total_s:.6f}s tax={self.tax_s:.6f}s>"

    # ---- inside ----

    def _lines(self) -> Iterator[str]:
        numbers = self.metrics()
        because = f" ({self.reason})" if self.reason else ""
        yield f"rollout {self.rollout} on {self.substrate}: {self.verdict}{because}"
        if self.choice:
            yield f"  chosen: {self.choice}"
        if self.placed is not None:
            before = "".join(f"; before that {node}: {said}" for node, said in self.placed.tried)
            yield f"  placed: {self.placed.node}: {self.placed.why}{before}"
        for name in (*PARTS, "holder", "unattributed"):
            seconds = numbers[f"{name}_s"]
            if seconds > 0:
                yield f"  {name:<13}{seconds * 1e3:>12.3f} ms"
        yield f"  {'total':<13}{numbers['total_s'] * 1e3:>12.3f} ms, of it tax {numbers['tax_s'] * 1e3:.3f} ms; {int(numbers['actions'])} actions"
        if self.hit is not None:
            yield f"  hit: {self.hit.kind}{f' from {self.hit.start}' if self.hit.start else ''}{_waited(self.hit)}"
        for name, seconds in self.stages.items():
            yield f"  {'fetched' if name in self.fetched else 'built'}: {name} in {seconds:.3f} s"
        for names, reason, remedy in said_together(self.unenforced):
            yield f"  not enforced: {names} ({reason}); {remedy}"

    def _total_ns(self) -> int:
        end = self._end_ns if self._end_ns is not None else self._clock()
        return end - self._start_ns

    def _fold(self) -> None:
        """Keep the first records as they are; of later ones only the sums."""
        room = KEPT_ACTIONS - len(self._kept)
        if room > 0:
            self._kept.extend(self._recent[:room])
            del self._recent[:room]
        self._folded.take(self._recent)
        self._recent.clear()

    def _sums(self) -> _Sums:
        sums = _Sums()
        sums.count = self._folded.count
        sums.busy_ns = self._folded.busy_ns
        sums.parts = dict(self._folded.parts)
        sums.take(self._kept)
        sums.take(self._recent)
        for name, start, end in self._parts:
            sums.parts[name] = sums.parts.get(name, 0) + end - start
        return sums

    def _uncovered_ns(self, sums: _Sums) -> tuple[int, int]:
        """What no part covers: first while the holder had the box (its own time), then the rest (nobody's)."""
        now = self._clock() if self._end_ns is None else self._end_ns
        held_from = self._held_from_ns
        if held_from is None:
            lifecycle = _covered_ns((start, end) for _, start, end in self._parts)
            return 0, max(0, now - self._start_ns - lifecycle)
        held_to = self._held_to_ns if self._held_to_ns is not None else now
        within = _covered_ns((s, e) for _, s, e in self._parts if s >= held_from and e <= held_to)
        outside = _covered_ns((s, e) for _, s, e in self._parts if not (s >= held_from and e <= held_to))
        holder = max(0, held_to - held_from - within - sums.busy_ns)
        return holder, max(0, now - self._start_ns - (held_to - held_from) - outside)


class _Sums:
    """What is kept of actions when they themselves are not."""

    __slots__ = ("busy_ns", "count", "parts")

    def __init__(self) -> None:
        self.count = 0
        self.busy_ns = 0
        self.parts: dict[str, int] = {}

    def take(self, actions: Sequence[ActionRecord]) -> None:
        parts = self.parts
        for action in actions:
            for name, start, end in _parts_of(action):
                parts[name] = parts.get(name, 0) + end - start
        self.count += len(actions)
        self.busy_ns += _covered_ns((action.start_ns, action.end_ns) for action in actions)


def _waited(hit: Hit) -> str:
    return f", after {hit.waited_s * 1e3:.3f} ms for {hit.waited_for}" if hit.waited_for else ""


def _parts_of(action: ActionRecord) -> tuple[tuple[str, int, int], ...]:
    # A cell that claims more time inside than the whole way took (it may be hostile) gets the whole way.
    began_ns = max(action.start_ns, action.received_ns - action.inside_ns)
    return (
        ("dispatch", action.start_ns, began_ns),
        ("action", began_ns, action.received_ns),
        ("observe", action.received_ns, action.end_ns),
    )


def _covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """The length of the union."""
    covered = 0
    until: int | None = None
    for start, end in sorted(intervals):
        if until is None or start >= until:
            covered += end - start
            until = end
        elif end > until:
            covered += end - until
            until = end
    return covered


def as_dict(ledger: Ledger) -> dict[str, Any]:
    """`to_json` as a mapping, for programs that put it inside a larger document."""
    document: dict[str, Any] = json.loads(ledger.to_json())
    return document
