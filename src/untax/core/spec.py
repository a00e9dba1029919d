"""What a rollout needs in place: image, set-up, limits, network policy, isolation.

Everything is checked once, here, where it enters; a spec that exists is well formed. Whether a machine can provide it
is the substrate's to say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from untax.core.errors import UsageError

Network = Literal["none", "all"] | tuple[str, ...]
"""`"none"`, `"all"`, or the `host:port` patterns that may be reached."""

ISOLATION_LEVELS = ("none", "namespace", "container", "gvisor", "vm")
"""How strong a boundary is, weakest first."""

# Far above any machine, far below what a kernel interface would misread.
_MOST_CPUS = 65_536.0
_MOST_MIB = 1 << 40
_MOST_PIDS = 4_194_304  # the kernel's own PID_MAX_LIMIT

_PATTERN = re.compile(
    r"(?P<host>\[[0-9A-Fa-f:.]+(?:/[0-9]{1,3})?\]"  # an IPv6 address or range
    r"|[0-9.]+/[0-9]{1,2}"  # a range of IPv4 addresses
    r"|\*|(?:\*\.)?[A-Za-z0-9_](?:[A-Za-z0-9_.-]*[A-Za-z0-9_])?)"  # any, a name, all names below one
    r":(?P<port>\*|[0-9]{1,5})"
)


class FrozenEnv(Mapping[str, str]):
    """Environment variables as a value: ordered by name, hashable, never changed after it was made."""

    __slots__ = ("_hash", "_items")

    def __init__(self, variables: Mapping[str, str] | None = None) -> None:
        self._items: dict[str, str] = dict(sorted(variables.items())) if variables else {}
        self._hash = hash(tuple(self._items.items()))

    def __getitem__(self, name: str) -> str:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FrozenEnv):
            return self._items == other._items
        return self._items == other if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[type[FrozenEnv], tuple[dict[str, str]]]:
        return FrozenEnv, (dict(self._items),)


@dataclass(frozen=True)
class Limits:
    """What one sandbox may use. A limit that the host cannot enforce is said once and marked in the ledger."""

    cpus: float = 1.0
    memory_mib: int = 1024
    disk_mib: int = 4096
    pids: int = 512

    def __post_init__(self) -> None:
        _require_number("cpus", self.cpus, most=_MOST_CPUS)
        _require_whole("memory_mib", self.memory_mib, most=_MOST_MIB)
        _require_whole("disk_mib", self.disk_mib, most=_MOST_MIB)
        _require_whole("pids", self.pids, most=_MOST_PIDS)


@dataclass(frozen=True)
class Repo:
    """A repository at one commit: a URL, a local path or a bundle file. `depth` is how many commits of history; None: all."""

    url: str
    commit: str
    depth: int | None = None

    def __post_init__(self) -> None:
        for name in ("url", "commit"):
            require_text(f"Repo.{name}", getattr(self, name))
            if getattr(self, name).startswith("-"):
                raise UsageError(f"Repo.{name} must not begin with '-', which git would take for an option")
        if self.depth is not None:
            _require_whole("Repo.depth", self.depth, most=_MOST_PIDS)


@dataclass(frozen=True)
class EnvSpec:
    """What a rollout needs in place before its first action. Frozen and hashable: equal specs are interchangeable.

    `isolation` is the weakest boundary accepted; a substrate below it refuses.
    """

    image: str = "host"
    repo: Repo | None = None
    setup: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=FrozenEnv)
    workdir: str | None = None
    user: str | None = None
    limits: Limits = field(default_factory=Limits)
    network: Network = "none"
    isolation: str = "namespace"

    def __post_init__(self) -> None:
        require_text("image", self.image)
        if self.repo is not None and not isinstance(self.repo, Repo):
            raise UsageError(f"repo must be an untax.Repo, not {type(self.repo).__name__}")
        if isinstance(self.setup, str):
            raise UsageError("setup must be a tuple of commands, not one string: write setup=('…',)")
        object.__setattr__(self, "setup", tuple(self.setup))
        for step in self.setup:
            require_text("setup", step)
        object.__setattr__(self, "env", freeze_env(self.env))
        if self.workdir is not None:
            require_text("workdir", self.workdir)
            if not self.workdir.startswith("/"):
                raise UsageError(f"workdir must be an absolute path inside the sandbox, not {self.workdir!r}")
        if self.user is not None:
            require_user(self.user)
        if not isinstance(self.limits, Limits):
            raise UsageError(f"limits must be an untax.Limits, not {type(self.limits).__name__}")
        object.__setattr__(self, "network", freeze_network(self.network))
        if self.isolation not in ISOLATION_LEVELS:
            raise UsageError(f"isolation must be one of {', '.join(ISOLATION_LEVELS)}, not {self.isolation!r}")


def is_as_strong(isolation: str, *, as_required: str) -> bool:
    """Whether a boundary of level `isolation` satisfies the level `as_required`."""
    return ISOLATION_LEVELS.index(isolation) >= ISOLATION_LEVELS.index(as_required)


def freeze_env(variables: Mapping[str, str]) -> FrozenEnv:
    """Check variables and make a value of them; `UsageError` for a name or value no process could be given."""
    if isinstance(variables, FrozenEnv):
        return variables
    if not isinstance(variables, Mapping):
        raise UsageError(f"env must be a mapping of names to values, not {type(variables).__name__}")
    for name, value in variables.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise UsageError(f"env: names and values must be strings, got {name!r}: {type(value).__name__}")
        if not name or "=" in name or "\0" in name:
            raise UsageError(f"env: {name!r} is not a variable name (empty, or has '=' or NUL in it)")
        if "\0" in value:
            raise UsageError(f"env: the value of {name!r} has a NUL in it")
    return FrozenEnv(variables)


def freeze_network(network: object) -> Network:
    """Check a network policy and make a value of it."""
    if network == "none":
        return "none"
    if network == "all":
        return "all"
    if isinstance(network, (tuple, list, set, frozenset)):
        return tuple(_checked_pattern(pattern) for pattern in (sorted(network) if isinstance(network, (set, frozenset)) else network))
    raise UsageError(f"network must be 'none', 'all' or a tuple of 'host:port' patterns, not {network!r}")


def _checked_pattern(pattern: object) -> str:
    found = _PATTERN.fullmatch(pattern) if isinstance(pattern, str) else None
    if found is None or (found["port"] != "*" and not 1 <= int(found["port"]) <= 65_535):
        raise UsageError(
            f"network: {pattern!r} is not a 'host:port' pattern; examples: 'index.example.org:443', '*.example.com:*', '[::1]:80'"
        )
    return str(pattern)


def require_user(user: str) -> str:
    """A user is a name or a number as /etc/passwd would hold it."""
    require_text("user", user)
    if any(c in user for c in ":\n/") or user.startswith("-"):
        raise UsageError(f"user must be a name or a number, not {user!r}")
    return user


def require_text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise UsageError(f"{name} must be a string, not {type(value).__name__}")
    if not value:
        raise UsageError(f"{name} must not be empty")
    if "\0" in value:
        raise UsageError(f"{name} has a NUL in it")
    return value


def require_duration(name: str, value: object) -> float:
    """A positive, finite number of seconds."""
    return _require_number(name, value, most=math.inf)


def _require_number(name: str, value: object, *, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UsageError(f"{name} must be a number, not {type(value).__name__}")
    if not (math.isfinite(value) and 0 < value <= most):
        raise UsageError(f"{name} must be a positive number{'' if most == math.inf else f' up to {most:g}'}, not {value!r}")
    return float(value)


def _require_whole(name: str, value: object, *, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, not {value!r}")
    if not 0 < value <= most:
        raise UsageError(f"{name} must be between 1 and {most}, not {value}")
    return value
