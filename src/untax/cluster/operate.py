"""What an operator does to a fleet: bring it up to stay, look at it, drain a node, take it down. For the command line and for programs that do the same."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from untax.cluster import access, terms
from untax.cluster.access import asked, take_down
from untax.cluster.agent import introduce
from untax.cluster.known import HEAD, Node
from untax.cluster.plan import Plan
from untax.cluster.terms import Member, Roll, Ticket
from untax.cluster.trust import pinned
from untax.core.errors import UsageError
from untax.layers._held import blocking, ended
from untax.service.fleet import NodeStatus, Peers


@dataclass(frozen=True, slots=True)
class FleetStatus:
    """All nodes at one moment, those that are refused among them."""

    fleet: str
    ray_address: str
    release: str
    substrate: str
    nodes: tuple[NodeStatus, ...]
    wanted: int = 0
    """How many nodes more Ray's autoscaler was asked for."""

    def as_dict(self) -> dict[str, Any]:
        return {
            "fleet": self.fleet,
            "ray_address": self.ray_address,
            "release": self.release,
            "substrate": self.substrate,
            "nodes": [one.as_dict() for one in self.nodes],
            "wanted": self.wanted,
        }


class Operated:
    """One fleet that is up. Made by `operating` and `up`."""

    def __init__(self, keeper: Any, ticket: Ticket) -> None:
        self._keeper = keeper
        self.ticket = ticket
        self._peers = Peers(ticket.token, pinned(ticket.authority))

    async def roll(self) -> Roll:
        return Roll.from_json(await asked(self.ticket.name, self._keeper.members, -1))

    async def plan(self) -> Plan:
        """How its engines were made."""
        plan: Plan = await asked(self.ticket.name, self._keeper.plan)
        return plan

    async def status(self) -> FleetStatus:
        """How every node is doing, asked of each. One that does not say is in it with the reason."""
        ticket, roll = self.ticket, await self.roll()
        introduce(self._peers, roll)
        nodes = await self._peers.statuses()
        substrate = next((one.substrate for one in roll.members), "")
        return FleetStatus(ticket.name, ticket.ray_address, ticket.version, substrate, tuple(nodes), roll.wanted)

    async def find(self, node: str) -> Node:
        """The node of the cluster that has this id (or a beginning of it), name or address; `UsageError` unless it is exactly one."""
        return terms.named([Node(one) for one in await _living()], node)

    async def drain(self, node: str, *, wait: bool = True) -> None:
        """No new leases there; returns once the last is over and its agent has ended. `UsageError` for a node that is not in the fleet."""
        if trouble := await asked(self.ticket.name, self._keeper.drain, node, wait=wait):
            raise UsageError(str(trouble))

    async def down(self) -> None:
        """To its end, also when cancelled: of a fleet that was taken down half-way a keeper would be left that keeps nothing."""
        taking = asyncio.ensure_future(take_down(self._keeper))
        try:
            await asyncio.shield(taking)
        except asyncio.CancelledError:
            await ended(taking)
            raise

    async def write_access(self, directory: Path) -> list[Path]:
        """What Prometheus and browsers need, readable by nobody else: the token, the authority's certificate, and a scrape configuration."""
        members = head_first((await self.roll()).members, await _living())
        if not members:
            raise UsageError(f"no node is in the fleet {self.ticket.name!r} at the moment, so there is none to scrape: untax fleet status")
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        first, *others = (one.url.removeprefix("https://") for one in members)
        scrape = _SCRAPE.format(target=first, others=", ".join(others) or "none", directory=directory.absolute())
        files = {"token": self.ticket.token, "ca.pem": self.ticket.authority, "prometheus.yml": scrape}
        return [_private(directory / name, text) for name, text in files.items()]


_SCRAPE = """scrape_configs:
  - job_name: untax
    scheme: https
    metrics_path: /fleet/metrics  # any node answers for all of them: name one, or every sample is there several times
    authorization: {{credentials_file: {directory}/token}}
    tls_config: {{ca_file: {directory}/ca.pem}}
    static_configs: [{{targets: ["{target}"]}}]  # others that were there: {others}
"""


def head_first(members: Sequence[Member], nodes: Iterable[Mapping[str, Any]]) -> list[Member]:
    """Ray's head is never let go for want of use; one that is drained is the last to be asked. `nodes` are as Ray lists them."""
    heads = {one["NodeID"] for one in nodes if HEAD in (one.get("Resources") or {})}
    return sorted(members, key=lambda one: (one.is_draining, one.node_id not in heads))


async def _living() -> list[dict[str, Any]]:
    """The cluster's nodes, as Ray lists them."""
    import ray

    return [one for one in await asyncio.to_thread(ray.nodes) if one["Alive"]]


@asynccontextmanager
async def operating(address: str, name: str) -> AsyncIterator[Operated]:
    """The fleet that is up; `UsageError` where there is none of this name."""
    terms.checked_name(name)
    async with _connected(address):
        keeper = await asyncio.to_thread(access.find_keeper, name)
        if keeper is None:
            raise UsageError(f"no fleet {name!r} is up on this Ray cluster: untax fleet up, or give its --name")
        yield Operated(keeper, Ticket.from_json(await asked(name, keeper.ticket)))


@asynccontextmanager
async def up(address: str, plan: Plan) -> AsyncIterator[tuple[Operated, bool]]:
    """The fleet, which stays up, and whether it was up before. One that has no node in it, or whose start was interrupted, is taken down again."""
    terms.checked_name(plan.name)
    plan.check()
    async with _connected(address) as there:
        started: list[tuple[Any, bool]] = []  # filled in the thread, so that who is interrupted meanwhile knows of it too
        try:
            await blocking(lambda: started.append(access.start_keeper(plan, there, is_lasting=True)))
            ((keeper, is_new),) = started
            ticket = Ticket.from_json(await asked(plan.name, keeper.ticket))
            operated = Operated(keeper, ticket)
            roll = await operated.roll()
            if not roll.members:
                raise terms.nobody(plan.name, roll.refusals)
        except BaseException:
            for keeper, is_new in started:
                if is_new:
                    await asyncio.shield(take_down(keeper))
            raise
        yield operated, is_new


@asynccontextmanager
async def _connected(address: str) -> AsyncIterator[str]:
    given_up = access.GivenUp()
    connecting = functools.partial(access.connect, address, given_up=given_up)
    there = await blocking(connecting, undo=lambda _: access.disconnect(), stop=given_up.say)
    _take_sigterm_back()
    try:
        yield there
    finally:
        await asyncio.to_thread(access.disconnect)


def _take_sigterm_back() -> None:
    """Ray's own code has put a handler below Python's that ends the process after 3 s, whatever is being cleaned up."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM) or signal.SIG_DFL)


def _private(path: Path, text: str) -> Path:
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600), "w") as file:
        file.write(text)
    return path
