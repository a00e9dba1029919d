"""What is asked of an engine, checked before anything is made, and the promise that is given for it."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

from untax.channel.egress import Policy
from untax.core.errors import UsageError
from untax.core.spec import EnvSpec, FrozenEnv, Limits, Network, freeze_env, is_as_strong, require_duration
from untax.core.stage import Stage
from untax.ground import Ground
from untax.snapshot import Snapshot

T = TypeVar("T")

DEFAULT_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Bindings:
    """What a lease may say over its spec. All of it applies at lease time and is in no stage's key."""

    env: Mapping[str, str] | None = None
    user: str | None = None
    files: Mapping[str, bytes] | None = None
    limits: Limits | None = None
    network: Network | None = None
    wait_s: float | None = None
    ttl_s: float = DEFAULT_TTL_S


@dataclass(frozen=True, slots=True)
class Request:
    """A lease that was asked for, checked: the spec with everything bound late already in it."""

    spec: EnvSpec
    files: Mapping[str, bytes]
    wait_s: float | None
    ttl_s: float
    snapshot: Snapshot | None = None
    """What it begins with instead of the spec's own stages."""
    ground: Ground | None = None
    """The same, already found; the engine's own builds begin so, with a `cache` that they share."""
    cache: Path | None = None
    on_asked: Callable[[], object] | None = field(default=None, compare=False)
    """Called once a pool knows of it: what is told of that pool from then on has it in."""
    may_refuse: bool = False
    """Whoever asks has others to ask: on a full disk no lease's end is waited for."""
    is_ahead: bool = False
    """Nobody has asked for it yet, and whoever does looks for its end first: one of the pool that answered lately need not answer again (decision 0019)."""

    @property
    def is_plain(self) -> bool:
        """Whether it begins with its spec's own stages and nothing else, so that a pool serves it."""
        return self.snapshot is None and self.ground is None

    def neutral(self, stages: Sequence[Stage] | None = None) -> Request:
        """The same with nothing in it that binds late, with `stages` of no more than these; what cannot bind late stays."""
        spec = self.spec
        changes: dict[str, Any] = {"env": FrozenEnv(), "network": "none"}
        if self.snapshot is not None:
            return Request(replace(spec, **changes), {}, None, self.ttl_s, self.snapshot)
        names = {stage.name for stage in stages} if stages is not None else {"repo", "deps"}
        if "repo" not in names:
            changes["repo"] = None
        if "deps" not in names:
            changes["setup"] = ()
        if not names & {"repo", "deps"} and (spec.repo is not None or spec.setup):
            changes["workdir"] = None  # of what is left out
        return Request(replace(spec, **changes), {}, None, self.ttl_s)


class Offer(Protocol):
    """What a spec is measured against: a substrate here, or what a server says about its own."""

    @property
    def name(self) -> str: ...

    @property
    def isolation(self) -> str: ...


@runtime_checkable
class Choosing(Protocol):
    """One that stands for several: without a spec its strongest boundary would be paid for by who asked for none."""

    def default_spec(self) -> EnvSpec: ...


def usual_isolation(offer: Offer) -> str:
    """What is meant where nothing is said: the substrate's own, and with several to choose from what a spec has by itself."""
    choosing: Callable[[], EnvSpec] | None = getattr(
        offer, "default_spec", None
    )  # to ask whether it is `Choosing` takes longer than all the rest of a lease's checks
    return choosing().isolation if choosing is not None else offer.isolation


@functools.cache
def plain_spec(isolation: str) -> EnvSpec:
    """What is leased where no spec is given."""
    return EnvSpec(isolation=isolation)


def checked(substrate: Offer, spec: EnvSpec | None, late: Bindings) -> Request:
    """Everything that can be checked is, before anything is made."""
    if spec is None:
        spec = plain_spec(usual_isolation(substrate))
    elif not isinstance(spec, EnvSpec):
        raise UsageError(f"spec must be an untax.EnvSpec, not {type(spec).__name__}")
    if not is_as_strong(substrate.isolation, as_required=spec.isolation):
        raise UsageError(
            f"substrate {substrate.name!r} has isolation {substrate.isolation!r}, the spec asks for {spec.isolation!r} or "
            f"stronger: use another substrate, or accept it with EnvSpec(isolation={substrate.isolation!r})"
        )
    if late.env or late.user is not None or late.limits is not None or late.network is not None:
        changes: dict[str, Any] = {"user": late.user, "limits": late.limits, "network": late.network}
        changes = {name: value for name, value in changes.items() if value is not None}
        if late.env:
            changes["env"] = FrozenEnv({**spec.env, **freeze_env(late.env)})
        spec = replace(spec, **changes)
    if late.wait_s is not None:
        require_duration("wait_s", late.wait_s)
    if spec.network != "none":
        Policy(spec.network)  # reads the patterns as it will read them later, and refuses what it could not
    return Request(spec, _checked_files(late.files), late.wait_s, require_duration("ttl_s", late.ttl_s))


def _checked_files(files: Mapping[str, bytes] | None) -> Mapping[str, bytes]:
    if not isinstance(files, Mapping | None):
        raise UsageError(f"files must be a mapping of paths to bytes, not {type(files).__name__}")
    for path, data in (files or {}).items():
        if not isinstance(path, str) or not path or "\0" in path:
            raise UsageError(f"files: {path!r} is not a path")
        if not isinstance(data, (bytes, bytearray, memoryview)):
            raise UsageError(f"files: the content of {path!r} must be bytes, not {type(data).__name__}")
    return dict(files or {})


class Lease(Generic[T]):
    """What `lease`, `fork`, `restore` and `grader` return: `async with` gives it back at the end of the block, `await` leaves that to you."""

    def __init__(self, take: Callable[[], Awaitable[T]], give_back: Callable[[T], Awaitable[object]]) -> None:
        self._take: Callable[[], Awaitable[T]] | None = take
        self._give_back = give_back
        self._taken: list[T] = []

    def __await__(self) -> Generator[Any, Any, T]:
        return self._taking().__await__()

    async def __aenter__(self) -> T:
        self._taken.append(await self._taking())
        return self._taken[0]

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        await self._give_back(self._taken[0])

    async def _taking(self) -> T:
        if self._take is None:
            raise UsageError("a lease is entered once; ask the engine for another")
        take, self._take = self._take, None
        return await take()
