"""A service that is one node of a fleet answers for all of them: their metrics at one address, and the nodes of its page.

It knows its peers by what it was last told (`Peers.meet`), and asks each over its own service, with the fleet's token and authority.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar
from urllib.parse import urlsplit

from untax.core.errors import UntaxError
from untax.pool.status import PoolStatus
from untax.remote.get import get
from untax.remote.web import WebAddress
from untax.service import exposition

if TYPE_CHECKING:
    from untax.service.hosting import Hosting

METRICS = "/metrics"
NODE = "/v1/node"

_ASK_S = 3.0  # a node that says nothing for so long is shown as that; the others do not wait longer for it

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peer:
    """One node of the fleet, as its members know it."""

    node_id: str
    name: str
    url: str
    is_draining: bool = False


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """How one node is doing; without a pool where it did not say, and `trouble` then has the reason."""

    node_id: str
    name: str
    url: str = ""
    is_draining: bool = False
    leases: int = 0
    ledgers: int = 0
    """How many leases have ended there, each with its ledger."""
    release: str = ""
    pool: PoolStatus | None = None
    trouble: str | None = None

    @property
    def state(self) -> str:
        return "out" if self.trouble else "draining" if self.is_draining else "in"

    @property
    def idle(self) -> dict[str, int]:
        """By the name of the stage that is uppermost."""
        found: dict[str, int] = {}
        for stage in self.pool.stages if self.pool is not None else ():
            found[stage.name] = found.get(stage.name, 0) + stage.idle
        return found

    @property
    def waiting(self) -> int:
        return sum(stage.waiting for stage in self.pool.stages) if self.pool is not None else 0

    def as_dict(self) -> dict[str, Any]:
        pool = None if self.pool is None else self.pool.as_dict()
        return {**asdict(replace(self, pool=None)), "state": self.state, "idle": self.idle, "waiting": self.waiting, "pool": pool}


@dataclass
class Peers:
    """Who is in the fleet, and how each is asked. For one event loop."""

    token: str = field(repr=False)
    tls: ssl.SSLContext | None = None
    """Trusts the fleet's authority and nobody else."""
    name: str = ""
    """Of the fleet."""
    known: tuple[Peer, ...] = ()
    out: tuple[NodeStatus, ...] = ()
    """Nodes of the cluster that are not in the fleet, with the reason."""
    wanted: int = 0
    """How many nodes more Ray's autoscaler was asked for."""

    def meet(self, peers: Sequence[Peer], out: Sequence[NodeStatus] = (), wanted: int = 0) -> None:
        """These are in it from here on, and no others."""
        self.known = tuple(sorted(peers, key=lambda one: (one.name, one.node_id)))
        self.out = tuple(out)
        self.wanted = wanted

    async def statuses(self) -> list[NodeStatus]:
        """Those that are out come last."""
        return [*await self._of_each(self._status), *self.out]

    async def metrics(self) -> str:
        """Of all that are in it; `untax_node_up` tells which of them did not say."""
        called = labels(self.known)
        said = await self._of_each(self._metrics)
        return exposition.merged((called[peer.node_id], text) for peer, text in zip(self.known, said, strict=True))

    async def _of_each(self, ask: Callable[[Peer], Awaitable[T]]) -> list[T]:
        return list(await asyncio.gather(*map(ask, self.known)))

    async def _status(self, peer: Peer) -> NodeStatus:
        known = NodeStatus(peer.node_id, peer.name, peer.url, peer.is_draining)
        try:
            said = json.loads(await get(self._address(peer), NODE, timeout_s=_ASK_S))
            return replace(
                known,
                is_draining=peer.is_draining or bool(said["draining"]),
                leases=int(said["leases"]),
                ledgers=int(said["ledgers"]),
                release=str(said["release"]),
                pool=PoolStatus.from_dict(said["pool"]),
            )
        except UntaxError as exc:
            return replace(known, trouble=str(exc))
        except (KeyError, TypeError, ValueError) as exc:
            return replace(known, trouble=f"it says nothing that this release understands: {exc!r}")

    async def _metrics(self, peer: Peer) -> str:
        try:
            text, is_up = (await get(self._address(peer), METRICS, timeout_s=_ASK_S)).decode(errors="replace"), 1
        except UntaxError:
            text, is_up = "", 0
        return f"# HELP untax_node_up 1 where the node said how it is\n# TYPE untax_node_up gauge\nuntax_node_up {is_up}\n{text}"

    def _address(self, peer: Peer) -> WebAddress:
        parts = urlsplit(peer.url)
        is_secure = parts.scheme == "https"
        assert self.tls is not None or not is_secure
        port = parts.port or (443 if is_secure else 80)
        return WebAddress(parts.hostname or "", port, is_secure, token=self.token, tls=self.tls)


class _Called(Protocol):
    @property
    def node_id(self) -> str: ...
    @property
    def name(self) -> str: ...


def labels(nodes: Iterable[_Called]) -> dict[str, str]:
    """What each is called, by its id: its name, unless there is another of that name. Ledgers call them the same."""
    names = {one.node_id: one.name for one in nodes}
    shared = list(names.values())
    return {node_id: f"{name} ({node_id[:8]})" if shared.count(name) > 1 else name for node_id, name in names.items()}


def own_status(hosting: Hosting) -> dict[str, Any]:
    """What `NodeStatus` is made of, of this node."""
    import untax

    return {
        "release": untax.__version__,
        "draining": hosting.is_draining,
        "leases": hosting.leases,
        "ledgers": hosting.owners.ledgers_total,
        "pool": hosting.shown(hosting.engine.pools()).as_dict(),
    }
