"""`untax.Fleet`: the engines of all nodes of a Ray cluster, used as one.

A lease goes to the node that placement chose, straight from this process: over a Unix socket to an agent on the same node, over TLS to the others. Ray is asked
when a fleet is joined, and tells of nodes that come and go; nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from untax.box import Box
from untax.cluster import access, copies, handles, terms, tickets
from untax.cluster.elsewhere import is_better_elsewhere, named
from untax.cluster.joining import AGAIN_S, Joining, Why
from untax.cluster.node import NodeEngine
from untax.cluster.placing import Placing
from untax.cluster.plan import Plan
from untax.cluster.scaling import Resources, Scaling
from untax.cluster.terms import Member, Refusal, Roll, Ticket
from untax.cluster.warming import Warming
from untax.core.errors import (
    BackendError,
    PoolClosed,
    ProtocolError,
    SubstrateUnavailable,
    UntaxError,
    UsageError,
)
from untax.core.ledger import Placed
from untax.core.span import Clock, now_ns
from untax.core.spec import EnvSpec, Limits
from untax.layers._held import blocking
from untax.leases import Bindings, Request, checked
from untax.leasing import Leasing
from untax.pool.status import PoolStatus, together
from untax.remote.engine import RemoteSubstrate
from untax.server.service import LEASE_S
from untax.service.fleet import labels
from untax.snapshot import Snapshot

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.sources import Progress

log = logging.getLogger("untax.cluster")


class Fleet(Leasing):
    """Leases sandboxes of every node. `async with`, or `start()` and `aclose()`. For one process and one event loop.

    Joins the fleet of this `name` on the Ray cluster, or brings one up: then each node gets an engine with these options, and closing this takes it down again.
    `state_dir` may have `{node}` in it; where Ray's autoscaler runs, the fleet grows with those who wait for room, up to `max_nodes`, and lets nodes go
    after `idle_s` without a lease, down to `min_nodes` (`docs/fleet.md`); `lease_s` is how long a client that lost its connection may take to come back. Pickled, it is a handle for any task or actor of the cluster, and begins by itself there.
    """

    node_class: type[NodeEngine] = NodeEngine

    def __init__(
        self,
        address: str = "auto",
        *,
        name: str = terms.DEFAULT_NAME,
        substrate: str | None = None,
        state_dir: str | os.PathLike[str] | None = None,
        lease_s: float | None = None,
        node_resources: Resources | None = None,
        min_nodes: int | None = None,
        max_nodes: int | None = None,
        idle_s: float | None = None,
        clock: Clock = now_ns,
        **options: Any,
    ) -> None:
        super().__init__(clock)
        self.address = address
        self.name = terms.checked_name(name)
        scaling = Scaling(node_resources, 1 if min_nodes is None else min_nodes, max_nodes, idle_s)
        given = {
            "substrate": substrate,
            "state_dir": None if state_dir is None else os.fsdecode(state_dir),
            "lease_s": lease_s,
            "node_resources": scaling.node_resources,
            "min_nodes": min_nodes,
            "max_nodes": max_nodes,
            "idle_s": idle_s,
            **options,
        }
        given = {name: value for name, value in given.items() if value is not None}
        plan = Plan(
            self.name,
            "namespace" if substrate is None else substrate,
            given.get("state_dir"),
            options,
            LEASE_S if lease_s is None else lease_s,
            scaling=scaling,
        )
        if given:  # or nothing can be wrong with it, as with handles, which are made often
            plan.check()
        self._joining = Joining(plan, given)
        self._ticket: Ticket | None = None
        self._is_handle = False
        self._may_be_outdated = False
        """Whether the ticket was kept from before, and nobody has leased by it since."""
        self._renewing: asyncio.Task[None] | None = None
        self._has_ray = False
        self._own_node: str | None = None
        self._nodes: dict[tuple[str, str], NodeEngine] = {}
        self._left: set[NodeEngine] = set()
        """Not in the fleet any more, and not over yet."""
        self._roll = Roll(0, (), ())
        self._following: asyncio.Task[None] | None = None
        self._placing = Placing()
        self._warming = Warming(self._usable)
        self._meeting = asyncio.Lock()
        self._down: Why | None = None
        """What its callers are told, once nobody keeps it any more."""

    # ---- handles ----

    @classmethod
    def current(cls, name: str = terms.DEFAULT_NAME) -> Self:
        """Inside a task or an actor of the cluster: a handle of its fleet, which begins with its first lease. `UsageError` where there is none.

        Blocks once in a process, to ask for the fleet's ticket.
        """
        ticket, is_new = tickets.current(name)
        fleet = cls._of(ticket)
        fleet._may_be_outdated = not is_new
        return fleet

    @classmethod
    def from_ticket(cls, text: str) -> Self:
        """A handle of the fleet that gave the ticket. Used without `async with` it is one with all others of its event loop."""
        return cls._of(Ticket.from_json(text))

    @classmethod
    def _of(cls, ticket: Ticket) -> Self:
        fleet = cls(ticket.ray_address, name=ticket.name)
        fleet._ticket = ticket
        fleet._is_handle = True
        fleet._roll = Roll(0, ticket.members, ())
        return fleet

    def ticket(self) -> str:
        """What lets another process in; a secret, as a token is."""
        if self._ticket is None:
            raise UsageError("the fleet is not started, so there is no handle of it yet: use `async with Fleet()`")
        return replace(self._ticket, members=tuple(self.members) or self._ticket.members).to_json()

    def __reduce__(self) -> tuple[Any, ...]:
        return _from_ticket, (type(self), self.ticket())

    # ---- its own life ----

    async def start(self) -> None:
        """Join the fleet, or bring it up. `SubstrateUnavailable` when there is no cluster, or no node of it can be used."""
        if self._state != "new":
            raise UsageError(f"this fleet is {self._state}; make a new one")
        try:
            await self._start()
        except BaseException:
            self._state = "closed"
            await self.finish(self.chore(self._close()))
            raise
        self._state = "running"

    async def _start(self) -> None:
        given_up = access.GivenUp()
        there = await blocking(functools.partial(self._connect_ray, given_up), stop=given_up.say)
        join = self._joining
        ticket = self._ticket = await (join.join(there) if self._ticket is None else self._rejoined(self._ticket, there))
        self._roll = Roll(0, ticket.members, ())
        await self._meet(self._roll.members)
        self._following = asyncio.ensure_future(self._follow())
        if not any(node.is_usable for node in self._nodes.values()):
            self._take(await join.roll())
            await self._meet(self._roll.members)
            if not self._roll.members:
                raise terms.nobody(self.name, self._roll.refusals)

    async def _rejoined(self, ticket: Ticket, there: str) -> Ticket:
        """A ticket that this process has kept may be of a fleet that another has followed since: it is asked for anew, once."""
        try:
            return await self._joining.rejoin(ticket, there)
        except PoolClosed:
            tickets.forget(ticket)
            if not self._may_be_outdated:
                raise
        self._may_be_outdated = False
        return await self._joining.rejoin(await blocking(functools.partial(tickets.asked, self.name)), there)

    def _connect_ray(self, given_up: access.GivenUp) -> str:
        """Blocks. What it comes to is known to `_close` also when nobody waits for it any more."""
        # A handle is of a fleet, which says itself whether it is the one: the nodes of a cluster may each know its head by another name.
        there = access.connect(self.address, anywhere=self._is_handle, given_up=given_up)
        self._has_ray = True
        self._own_node = access.own_node()
        return there

    async def aclose(self) -> None:
        """Release every box and leave; whoever brought the fleet up takes it down. Safe to call twice."""
        if self._state != "closed":
            self._state = "closed"
            await self.finish(self.chore(self._close()))

    async def _close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self._warming.aclose()
        await self._placing.aclose()
        await asyncio.gather(*(node.aclose() for node in (*self._nodes.values(), *self._left)), return_exceptions=True)
        while chores := [chore for chore in self._chores if chore is not asyncio.current_task()]:
            await asyncio.wait(chores)
        await self._joining.take_down()
        if self._has_ray:
            self._has_ray = False
            await asyncio.to_thread(access.disconnect)

    @property
    def offer(self) -> RemoteSubstrate:
        for ticket in (self._used._ticket, self._ticket):
            if ticket is not None and ticket.offer is not None:
                return ticket.offer
        for member in self.members:
            return RemoteSubstrate(member.substrate, member.isolation, member.usual)
        if self._is_handle:
            raise terms.empty(self.name)
        raise UsageError("the fleet is not started: use `async with Fleet()`, or await fleet.start()")

    @property
    def substrate(self) -> RemoteSubstrate:
        return self.offer

    @property
    def members(self) -> tuple[Member, ...]:
        """The nodes that are in the fleet, as last told."""
        return self._used._roll.members

    @property
    def wanted(self) -> int:
        """How many nodes more Ray's autoscaler was asked for, as last told."""
        return self._used._roll.wanted

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The nodes that are not, and why."""
        return self._used._roll.refusals

    # ---- who is there ----

    async def _follow(self) -> None:
        """Hear of nodes that come and go. While nobody tells, what is known stays."""
        telling: asyncio.Future[str] | None = None
        try:
            while self._down is None:
                if telling is None:
                    telling = asyncio.ensure_future(self._joining.news(self._roll.version))
                # Those that did not answer are tried again meanwhile.
                is_whole = all(member.key in self._nodes for member in self._roll.members)
                if (await asyncio.wait([telling], timeout=None if is_whole else AGAIN_S))[0]:
                    await self._heard(telling)
                    telling = None
                try:
                    await self._meet(self._roll.members)
                except UsageError as exc:
                    log.error("%s", exc)
                except Exception:  # it is told of the next change all the same
                    log.exception("the nodes of the fleet %s could not be met", self.name)
                self._warming.changed()
        finally:
            if telling is not None:
                telling.cancel()
                await asyncio.wait([telling])

    async def _heard(self, telling: asyncio.Future[str]) -> None:
        try:
            if said := telling.result():
                self._take(Roll.from_json(said))
            return
        except UntaxError as exc:
            log.info("nobody tells who is in the fleet: %s", exc)
        except Exception:  # Ray's own, say, as its connection ends: the fleet is followed all the same
            log.exception("nobody tells who is in the fleet %s", self.name)
        await asyncio.sleep(AGAIN_S)  # Ray tells nobody when an actor is there again
        await self._look_up()
        self._roll = replace(self._roll, version=-1)

    async def _check_up(self) -> None:
        """Raise if nobody keeps it any more, which may not have been told yet. Only asked when nodes do not answer, or not as they should."""
        if self._down is None:
            await self._look_up()
        if self._down is not None:
            raise self._down(self.name)

    async def _look_up(self) -> None:
        assert self._ticket is not None
        if (why := await self._joining.look_up(self._ticket)) is not None:
            self._was_taken_down(why)

    def _was_taken_down(self, why: Why) -> None:
        self._down = why
        assert self._ticket is not None
        tickets.forget(self._ticket)
        for node in self._nodes.values():
            self._placing.leave(node.label, node)
            node.left()

    def _take(self, roll: Roll) -> None:
        self._roll = roll
        assert self._ticket is not None
        tickets.renew(self._ticket, roll.members)
        for key, node in list(self._nodes.items()):
            member = next((one for one in roll.members if one.key == key), None)
            if member is not None:
                node.member = member
                if member.is_draining:
                    self._placing.views.drained(node.label)
            else:
                del self._nodes[key]
                self._placing.leave(node.label, node)
                self._left.add(node)
                node.left()
                node.on_over = self._left.discard

    async def _meet(self, members: Iterable[Member]) -> None:
        """Connect to those that are new. One that does not answer is tried again with the next change, or a moment later."""
        async with self._meeting:  # or two would connect to one node, and one of the connections be nobody's
            fresh = [member for member in members if member.key not in self._nodes]
            failed = [one for one in await asyncio.gather(*map(self._connect, fresh), return_exceptions=True) if one is not None]
            strangers = [one for one in failed if isinstance(one, UsageError)]
            for other in failed:
                if not isinstance(other, UsageError):
                    raise other
            if not strangers:
                return
            # Another node has taken the token, so the handle is right and they are not: at a port, say, that was their fleet's before.
            # The own node's socket asks for none.
            if any(node.member.node_id != self._own_node for node in self._nodes.values()):
                log.warning("%s", "; ".join(map(str, strangers)))
            else:
                raise strangers[0]

    async def _connect(self, member: Member) -> None:
        assert self._ticket is not None
        node = self._made(member, is_here=member.node_id == self._own_node)
        try:
            try:
                await node.start()
            except (BackendError, ProtocolError, UsageError):
                if not node.is_here:
                    raise
                node = self._made(member, is_here=False)  # a socket of that name that is not the agent's, or is out of reach
                await node.start()
        except (BackendError, PoolClosed, ProtocolError) as exc:
            log.warning("node %s does not answer as it should: %s", member.name, exc)
            return
        except UsageError as exc:
            raise terms.stranger(self.name, member, exc) from exc
        if all(one.key != member.key for one in self._roll.members):
            await node.aclose()  # it left meanwhile
            return
        self._nodes[member.key] = node
        node.label = self._label(member)
        if node.is_here:
            self._placing.views.here = node.label
        node.is_favoured = functools.partial(self._placing.is_favoured, node.label)
        self._placing.follow(node.label, node)

    def _label(self, member: Member) -> str:
        """What the node is called in ledgers and messages, as the page and the metrics call it."""
        return labels((*self._roll.members, member))[member.node_id]

    def _made(self, member: Member, *, is_here: bool) -> NodeEngine:
        assert self._ticket is not None
        return self.node_class(member, self._ticket, is_here=is_here, clock=self.clock)

    # ---- how a box comes to be ----

    async def _ready(self) -> Fleet:
        """The one whose connections are used: this, or for a handle that was never started the one of its event loop."""
        if self._is_handle and self._state == "new":
            return await self._ready_to_share()
        self._check_running()
        if self._down is not None:
            raise self._down(self.name)
        return self

    async def _ready_to_share(self) -> Fleet:
        ticket = self._ticket
        assert ticket is not None
        try:
            fleet = await (await handles.shared(self._key, lambda: type(self)._of(ticket)))._ready()
        except PoolClosed:
            tickets.forget(ticket)
            if self._ticket is ticket:  # or another lease has renewed it meanwhile
                if not self._may_be_outdated:
                    raise
                await asyncio.shield(self._renewal())
            return await self._ready_to_share()
        self._may_be_outdated = False
        return fleet

    def _renewal(self) -> asyncio.Task[None]:
        """One for all leases of this event loop that wait for it."""
        if self._renewing is None or self._renewing.get_loop() is not asyncio.get_running_loop():
            self._renewing = self.chore(self._renew())
        return self._renewing

    async def _renew(self) -> None:
        try:
            self._ticket = await blocking(functools.partial(tickets.asked, self.name))
            self._may_be_outdated = False
        finally:
            self._renewing = None

    @property
    def _used(self) -> Fleet:
        """As `_ready`, without waiting; this where there is no other yet."""
        return (handles.there(self._key) if self._is_handle and self._state == "new" else None) or self

    @property
    def _key(self) -> Hashable:
        assert self._ticket is not None
        return type(self), self.name, self._ticket.token

    def _usable(self) -> list[NodeEngine]:
        """The least loaded by this client first."""
        usable = [node for node in self._nodes.values() if node.is_usable]
        return sorted(usable, key=lambda node: (not node.is_connected, node.load, node.member.node_id != self._own_node))

    def stir(self) -> None:
        if (fleet := self._used)._state == "running":
            fleet._placing.stir()

    async def fulfil(self, request: Request) -> Box:
        fleet = await self._ready()
        if request.snapshot is None:
            return await fleet._fulfil(request)
        node = fleet._holding(request.snapshot)
        box = await node.fulfil(request)
        box.was_placed(Placed(node.label, "its snapshot is there"))
        return box

    async def _fulfil(self, request: Request) -> Box:
        try:
            return await self._placing.fulfil(request)
        except (BackendError, PoolClosed, SubstrateUnavailable):
            self._check_running()
            await self._check_up()
            if not self._placing.views.nodes:
                raise terms.nobody(self.name, self._roll.refusals) from None
            raise

    def _holding(self, snapshot: Snapshot) -> NodeEngine:
        node: object = snapshot.engine
        assert isinstance(node, NodeEngine)
        return node

    # ---- what is in store ----

    async def prepare(self, spec: EnvSpec, *, progress: Progress | None = None) -> Prepared:
        """As `untax.Engine.prepare`, on the node where a lease of it would go."""
        fleet = await self._ready()
        failure: UntaxError | None = None
        for best in await fleet._placing.ranked(checked(fleet.offer, spec, Bindings()).spec):
            try:
                prepared = await fleet._placing.engine(best.node).prepare(spec, progress=progress)
            except UntaxError as exc:
                failure = failure or named(best.node, exc)
                if not is_better_elsewhere(exc) and not await fleet._placing.is_lacking(spec, best.node, exc):
                    raise failure from exc
            else:
                fleet._placing.wake()
                return prepared
        raise failure or terms.nobody(fleet.name, fleet.refusals)

    async def warm(self, spec: EnvSpec | Snapshot | str | None = None, n: int = 1, *, limits: Limits | None = None) -> None:
        """As `untax.Engine.warm`: that many in all, spread evenly over the nodes, also those that join later; those of a snapshot on the node that has it."""
        fleet = await self._ready()
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise UsageError(f"n must be a whole number, not {n!r}")
        if isinstance(spec, (Snapshot, str)):
            request = await fleet._request_from(spec, Bindings(limits=limits))
            assert request.snapshot is not None
            await fleet._holding(request.snapshot).warm(request.snapshot, n, limits=limits)
            return
        spec = checked(fleet.offer, spec, Bindings(limits=limits)).spec
        if not fleet._usable():
            raise terms.nobody(fleet.name, fleet.refusals)
        await fleet._warming.warm(spec, n)
        fleet._placing.wake()

    async def pools(self) -> PoolStatus:
        """All nodes' pools together; a node that does not answer is left out, and if none does that is raised."""
        nodes = [node for node in (await self._ready())._nodes.values() if node.is_usable]
        found = await asyncio.gather(*(node.pools() for node in nodes), return_exceptions=True)
        pools = [one for one in found if isinstance(one, PoolStatus)]
        for node, one in zip(nodes, found, strict=True):
            if isinstance(one, UntaxError) and not pools:
                raise named(node.label, one)
        return together("fleet", pools)

    async def ledgers(self) -> tuple[dict[str, Any], ...]:
        """The latest ledgers that are final, of all clients and nodes."""
        nodes = (await self._ready())._nodes
        found = await asyncio.gather(*(node.ledgers() for node in nodes.values()), return_exceptions=True)
        return tuple(one for ledgers in found if not isinstance(ledgers, BaseException) for one in ledgers)

    async def find_snapshot(self, snapshot_id: str) -> Snapshot:
        """A saved snapshot by its id, wherever it is; `UsageError` when no node has it."""
        fleet = await self._ready()
        nodes = [node for node in fleet._nodes.values() if node.is_usable]
        found = await asyncio.gather(*(node.find_snapshot(snapshot_id) for node in nodes), return_exceptions=True)
        for one in found:
            if isinstance(one, Snapshot):
                return one
        for node, one in zip(nodes, found, strict=True):
            if isinstance(one, UntaxError) and not isinstance(one, UsageError):  # it may be the one that has it
                raise BackendError(
                    "", f"node {node.label} does not say whether it has the snapshot {snapshot_id}, and no other has it: {one}"
                )
        if not nodes:
            raise terms.nobody(fleet.name, fleet.refusals)
        raise UsageError(
            f"no node of the fleet has a snapshot {snapshot_id!r}: save() what is to last, and copy() what is to outlive its node"
        )

    async def copy(self, snapshot: Snapshot | str, node: str) -> Snapshot:
        """Copy a snapshot to a second node, named by its id, name or address; gives it as it is there. It is saved first, and each is dropped for itself.

        `UsageError` for one of running processes; `StageUnavailable` for one over the host's own files, which are that node's alone, or when
        the disk there is full.
        """
        fleet = await self._ready()
        assert fleet._ticket is not None
        found = snapshot if isinstance(snapshot, Snapshot) else await fleet.find_snapshot(snapshot)
        return await copies.copy(found, node, fleet.members, fleet._nodes, fleet._ticket)

    async def _request_from(self, snapshot: Snapshot | str, late: Bindings) -> Request:
        fleet = await self._ready()
        engine: object = snapshot.engine if isinstance(snapshot, Snapshot) else None
        if isinstance(snapshot, Snapshot) and not any(engine is node for node in fleet._nodes.values()):
            if not snapshot.is_saved:
                raise UsageError(f"snapshot {snapshot.id} is another engine's, or its node left the fleet; save() it to use it here")
            snapshot = snapshot.id
        found = snapshot if isinstance(snapshot, Snapshot) else await fleet.find_snapshot(snapshot)
        return await fleet._holding(found)._request_from(found, late)


def _from_ticket(kind: type[Fleet], text: str) -> Fleet:
    return kind.from_ticket(text)
