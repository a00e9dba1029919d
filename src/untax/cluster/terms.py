"""What a fleet's processes tell each other about it: plain data, to JSON and back, and the words of what can be wrong with a node.

JSON and not pickles, so that a release that is not this one is told from its version and not by a field that is missing.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Protocol, Self, TypeVar

from untax import __version__
from untax.core.errors import BackendError, PoolClosed, ProtocolError, SubstrateUnavailable, UsageError
from untax.remote.engine import RemoteSubstrate

DEFAULT_NAME = "untax"
SKEW_MAX_S = 30.0
"""Between the clocks of two nodes. Certificates and the times in ledgers are read by them."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

D = TypeVar("D", bound="_Data")
N = TypeVar("N", bound="_Named")


@dataclass(frozen=True, slots=True)
class _Data:
    def to_data(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_data(cls, data: Mapping[str, Any]) -> Self:
        """What a later release says beside it is left out; `ProtocolError` for what lacks something."""
        try:
            return cls(**{one.name: data[one.name] for one in fields(cls) if one.name in data})
        except (KeyError, TypeError) as exc:
            raise ProtocolError(f"a {cls.__name__.lower()} without its facts: {exc}; install one release of untax on all nodes") from exc


@dataclass(frozen=True, slots=True)
class Member(_Data):
    """One node's agent."""

    node_id: str
    """Ray's."""
    name: str
    """For people: what Ray's own lists call the node, or its address."""
    address: str
    url: str
    """Where it is reached over TLS."""
    socket: str
    boot_id: str | None
    """The socket is one for a client's own use where both have the same."""
    version: str
    substrate: str
    isolation: str
    usual: str
    is_draining: bool = False
    layers: str = ""
    """`host:port` where other nodes get its layers from; empty where it has none to give."""
    agent: str = ""
    """Another one for each agent that a node had, which may all have had one address."""

    @property
    def key(self) -> tuple[str, str]:
        """Of this agent; one that took its place on the same node has another."""
        return self.node_id, self.agent

    def drained(self) -> Member:
        return replace(self, is_draining=True)


@dataclass(frozen=True, slots=True)
class Refusal(_Data):
    """A node that is not in the fleet, and why, with the remedy."""

    node_id: str
    name: str
    reason: str

    def __str__(self) -> str:
        return f"node {self.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Ticket:
    """What lets a process into a fleet: all that a pickled handle is. Whoever has it may lease from every node."""

    name: str
    token: str = field(repr=False)
    authority: str = field(repr=False)
    """The certificate that signed every agent's; nobody else's signature counts."""
    version: str
    ray_address: str
    offer: RemoteSubstrate | None = None
    members: tuple[Member, ...] = ()
    """Who was in it when the ticket was made, to begin with."""

    @property
    def instance(self) -> str:
        return instance_of(self.authority)

    def to_json(self) -> str:
        return json.dumps(
            {
                "name": self.name,
                "token": self.token,
                "authority": self.authority,
                "version": self.version,
                "ray_address": self.ray_address,
                "offer": None if self.offer is None else asdict(self.offer),
                "members": [one.to_data() for one in self.members],
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Ticket:
        """`UsageError` for one of another release, `ProtocolError` for what is none."""
        try:
            data = json.loads(text)
            check_version(str(data["name"]), str(data["version"]))
            return cls(
                str(data["name"]),
                str(data["token"]),
                str(data["authority"]),
                str(data["version"]),
                str(data["ray_address"]),
                None if data["offer"] is None else RemoteSubstrate(**data["offer"]),
                tuple(Member.from_data(one) for one in data["members"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            if isinstance(exc, UsageError):
                raise
            raise ProtocolError(f"a fleet's ticket that is none: {exc!r}") from exc


@dataclass(frozen=True, slots=True)
class Roll:
    """Who is in the fleet. `version` grows with each change."""

    version: int
    members: tuple[Member, ...]
    refusals: tuple[Refusal, ...]
    wanted: int = 0
    """How many nodes more Ray's autoscaler was asked for."""

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": self.version,
                "members": [one.to_data() for one in self.members],
                "refusals": [one.to_data() for one in self.refusals],
                "wanted": self.wanted,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Roll:
        try:
            data = json.loads(text)
            return cls(
                int(data["version"]),
                tuple(Member.from_data(one) for one in data["members"]),
                tuple(Refusal.from_data(one) for one in data["refusals"]),
                int(data.get("wanted", 0)),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ProtocolError(f"a fleet's roll that is none: {exc!r}") from exc


# ---- which one ----


class _Named(Protocol):
    @property
    def node_id(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...


def named(nodes: Iterable[N], node: str) -> N:
    """The one that has this id (or a beginning of it), name or address; `UsageError` unless it is exactly one."""
    everybody = list(nodes)
    found = [one for one in everybody if node in (one.name, one.address) or (len(node) >= 4 and one.node_id.startswith(node))]
    if len(found) != 1:
        there = ", ".join(f"{one.node_id[:12]} ({one.name})" for one in everybody) or "none"
        raise UsageError(f"{'several nodes are' if found else 'no node is'} named {node!r}: there are {there}")
    return found[0]


def instance_of(authority: str) -> str:
    """Which of the fleets that have one name, one after the other: each has an authority of its own, which this tells of and does not give away."""
    return hashlib.sha256(authority.encode()).hexdigest()[:16]


# ---- what can be wrong ----


def checked_name(name: object) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise UsageError(f"a fleet's name has 1 to 63 letters, digits, '.', '_' or '-', unlike {name!r}")
    return name


def check_version(name: str, version: str) -> None:
    if version != __version__:
        raise UsageError(
            f"the fleet {name!r} runs untax {version}, this process {__version__}: install untax=={version} here, or take the fleet "
            f"down and up again with {__version__}"
        )


def version_trouble(version: str, expected: str) -> str | None:
    if version == expected:
        return None
    return f"it has untax {version}, the fleet {expected}: install untax=={expected} there"


def skew_trouble(asked_s: float, said_s: float, answered_s: float) -> str | None:
    """Of a node that said what its clock reads between two readings of ours."""
    ahead_s = said_s - answered_s if said_s > answered_s else min(0.0, said_s - asked_s)
    if abs(ahead_s) <= SKEW_MAX_S:
        return None
    return f"its clock is {abs(ahead_s):.0f} s {'ahead' if ahead_s > 0 else 'behind'}: set it, and keep it so with NTP (chrony)"


def replaced(name: str) -> PoolClosed:
    return PoolClosed(
        f"the fleet {name!r} that this handle is of was taken down, and there is another of this name now: get a new handle of it "
        "(Fleet.current(), or from the program that brought it up)"
    )


def down(name: str) -> PoolClosed:
    return PoolClosed(f"the fleet {name!r} was taken down; bring it up again with untax.Fleet() or `untax fleet up`, and get a new handle")


def elsewhere(name: str, there: str, address: str) -> UsageError:
    return UsageError(
        f"this process is connected to the Ray cluster at {there}, and this handle is of a fleet {name!r} on that at {address}: "
        "ray.shutdown() first, or get a handle of this one's (Fleet.current())"
    )


def silent(name: str) -> BackendError:
    return BackendError(
        "",
        f"no node of the fleet {name!r} that this handle knows of answers, nor does Ray's head: see that it runs (`ray status`), and ask again",
    )


def stranger(name: str, member: Member, exc: UsageError) -> UsageError:
    return UsageError(
        f"node {member.name}: {exc}. This handle is not of the fleet {name!r} that runs there now: get a new handle of it "
        "(Fleet.current(), or from the program that brought it up); if it is a new one, set this machine's clock"
    )


def empty(name: str) -> SubstrateUnavailable:
    return SubstrateUnavailable(
        "", f"no node was in the fleet {name!r} when this handle was made: get a new handle once `untax fleet status` shows one"
    )


def nobody(name: str, refusals: Iterable[Refusal]) -> SubstrateUnavailable:
    reasons = "; ".join(str(one) for one in refusals)
    return SubstrateUnavailable(
        "", f"no node is in the fleet {name!r}: {reasons or 'the Ray cluster has none that lives; start one: ray start'}"
    )
