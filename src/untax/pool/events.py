"""What a pool is told, and what it orders: plain data, with the clock in every event.

Which event answers which order:

| order | is answered by exactly one of |
|---|---|
| `Create`  | `Made` (same order number), `Failed`, or `Abandoned` when nobody was left who wanted it |
| `HandOut` | `Bound` (it is leased now), `Rejected` (dead, dirty, or the missing stages could not be added), or, when the ticket's holder has gone meanwhile, `Returned` |
| `Destroy` | `Gone`; until then what the sandbox takes still counts |
| `Refuse`  | nothing; what is still held for the ticket (an upgrade that was cut off) is given back with `Returned` |

A leased sandbox comes back with `Returned`, however the lease ended. `Died` is for one that was found dead: an idle one is
destroyed at once, a leased one when it is returned. Every order may be carried out in parallel with every other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from untax.core.stage import Stage

Kind = Literal["exact", "partial", "cold"]


# ---- what happened. `now_s` is seconds on one clock that never goes back; so are deadlines ----


@dataclass(frozen=True, slots=True)
class Asked:
    """A lease is wanted: of a sandbox with all `stages` (lowest first) in place."""

    now_s: float
    ticket: str
    stages: tuple[Stage, ...]
    deadline_s: float
    """A point on the clock, `math.inf` for none. One that has passed already gets what is idle and exact, or a refusal."""
    memory_mib: float = 0.0
    """What a sandbox for it counts in the pool's budget."""
    is_ahead: bool = False
    """Nobody is about to use it: what takes its place can be made at once."""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """Whoever asked waits no longer. After `HandOut` it has no effect: the sandbox is then given back with `Returned`."""

    now_s: float
    ticket: str


@dataclass(frozen=True, slots=True)
class Made:
    """A `Create` is done: a sandbox that has never been leased, with all the order's stages in place."""

    now_s: float
    order: int
    entry: str


@dataclass(frozen=True, slots=True)
class Failed:
    """A `Create` came to nothing, and has given back what it took."""

    now_s: float
    order: int
    why: str
    is_retryable: bool = True
    """False for what would fail again: a set-up step that exits with 1, an image that does not exist."""
    stage: str | None = None
    """The key of the stage that could not be put in place: with `is_retryable=False`, all that wait for it are refused."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """A `Create` was broken off because nobody waits for it any more; it has given back what it took, and nothing has failed."""

    now_s: float
    order: int


@dataclass(frozen=True, slots=True)
class Bound:
    """A `HandOut` is done: its holder has the sandbox."""

    now_s: float
    ticket: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """A `HandOut` came to nothing. The sandbox is destroyed and the ticket is served again, before those who came after it."""

    now_s: float
    ticket: str
    why: str
    is_retryable: bool = True
    stage: str | None = None
    """As in `Failed`."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A lease has ended. `clean` means that a reset was *verified*."""

    now_s: float
    entry: str
    clean: bool
    at: str | None = None
    """The key of its uppermost stage after the reset. None: the one it was handed out at; one that was upgraded since is
    then destroyed, because what it stands on is not known."""


@dataclass(frozen=True, slots=True)
class Died:
    now_s: float
    entry: str


@dataclass(frozen=True, slots=True)
class Gone:
    """A `Destroy` is done."""

    now_s: float
    entry: str


@dataclass(frozen=True, slots=True)
class Stored:
    """The layers of a stage are here now, so that a sandbox can begin with it. `Made` says the same of the order's stages."""

    now_s: float
    key: str


@dataclass(frozen=True, slots=True)
class Evicted:
    now_s: float
    key: str


@dataclass(frozen=True, slots=True)
class Unkept:
    """All stages whose layers are here only as long as something stands on them: the store has no room to keep them besides."""

    now_s: float
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Target:
    """How many sandboxes are to be idle with these stages in place."""

    stages: tuple[Stage, ...]
    count: int
    memory_mib: float = 0.0
    may_build: bool = True
    """False: only as long as all its stages are here. What was evicted is built again for somebody who waits, not to be kept ready: it
    would cost another its place in the store."""


@dataclass(frozen=True, slots=True)
class Resized:
    """All targets there are; a stage that is not among them has the target 0."""

    now_s: float
    targets: tuple[Target, ...]


@dataclass(frozen=True, slots=True)
class Pressed:
    """The disk has no room for a stage that somebody waits for: an idle sandbox that keeps layers in it is to go."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed. Due at `Pool.next_due_s()` at the latest."""

    now_s: float


@dataclass(frozen=True, slots=True)
class Closed:
    """No more: what waits is refused, what is idle is destroyed, what is leased or being made when it comes back."""

    now_s: float


Event: TypeAlias = (
    Asked
    | Withdrawn
    | Made
    | Failed
    | Abandoned
    | Bound
    | Rejected
    | Returned
    | Died
    | Gone
    | Stored
    | Evicted
    | Unkept
    | Resized
    | Pressed
    | Tick
    | Closed
)


# ---- what is to be done ----


@dataclass(frozen=True, slots=True)
class HandOut:
    """Prove that `entry` is alive and clean, add `missing` to it, bind what binds late, and give it to the ticket's holder."""

    ticket: str
    entry: str
    missing: tuple[Stage, ...]
    kind: Kind
    """`cold` for a sandbox that was created while the ticket waited."""
    waited_s: float
    waited_for: str
    """What it waited for last, in words; empty when it did not wait."""
    why: str
    start: Stage | None = None
    """The uppermost stage that it has."""
    order: int | None = None
    """Of the `Create` that it came of, for `cold`: whose spans belong into this lease's ledger."""


@dataclass(frozen=True, slots=True)
class Create:
    """Make a sandbox with all `stages` in place. `ticket` is who it was decided for, None for a refill; who gets it is decided
    when it is made, so that those who came first are served first.
    """

    order: int
    stages: tuple[Stage, ...]
    ticket: str | None
    start: Stage | None
    """The uppermost stage whose layers are here, as far as the pool knows."""
    missing: tuple[Stage, ...]
    why: str
    memory_mib: float = 0.0


@dataclass(frozen=True, slots=True)
class Destroy:
    entry: str
    why: str


@dataclass(frozen=True, slots=True)
class Refuse:
    ticket: str
    why: str
    reason: Literal["deadline", "failed", "too_large", "closed"]


Order: TypeAlias = HandOut | Create | Destroy | Refuse
