"""What passes between a pool's driver, the hands that it works with and those it serves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from untax.core.errors import StageError, UntaxError
from untax.core.stage import Stage
from untax.pool import events as ev


class Named(Protocol):
    """What a pool keeps."""

    @property
    def name(self) -> str: ...


E = TypeVar("E", bound=Named)
R_contra = TypeVar("R_contra", contravariant=True)


class Hands(Protocol[R_contra, E]):
    """What a pool cannot do itself."""

    async def make(self, order: ev.Create, request: R_contra) -> E:
        """A sandbox with all the order's stages in place, ready to be handed out. What it took is given back when it fails or is cancelled."""

    async def destroy(self, entry: E) -> None:
        """Free one that is idle; returns when it is gone, and never raises."""


@dataclass(frozen=True, slots=True)
class Grant(Generic[E]):
    """A sandbox for a ticket, not bound yet. It is answered with `bound`, `again` or `give_back`."""

    ticket: str
    entry: E
    order: ev.HandOut


@dataclass(slots=True)
class Counts:
    """Since the engine started."""

    exact: int = 0
    partial: int = 0
    cold: int = 0
    refused: int = 0
    rejected: int = 0
    """Idle ones that were dead, or could not be given what a lease asked for, when they were to be handed out."""
    died: int = 0
    """Idle ones whose death was noticed while they were parked."""
    made: int = 0
    failed: int = 0
    waited_s: float = 0.0
    """Of all leases together."""


def blame(exc: Exception, stages: tuple[Stage, ...]) -> tuple[bool, str | None]:
    """Whether another attempt makes sense, and for which stage it does not. A stage that cannot be had is told to all who wait for it."""
    key = next((stage.key for stage in stages if stage.name == exc.stage), None) if isinstance(exc, StageError) else None
    return key is None, key  # one of the store names no stage: it may have room the next time


def copy_of(exc: Exception) -> Exception:
    """One for each who is told, since raising writes into it."""
    if not isinstance(exc, UntaxError):
        return exc
    try:
        other = type(exc)(*exc.args)
    except TypeError:
        return exc
    other.__cause__ = exc.__cause__
    return other
