"""Ray's part of a fleet: who keeps it.

The *keeper* is one named actor. It sees to it that every node that lives has an agent and tells clients who is in the fleet. It is asked when a client joins
and then tells of changes; no lease and no action waits for it, and while it is away everything goes on with what is known.
Nodes that join are looked for, since Ray tells nobody of them; deaths are told by calls that return only by failing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import untax
from untax.cluster.agent import Plan, Post
from untax.cluster.resident import AGAIN_S, LOOK_S, NAMESPACE, NodeActor, keeper_name, node_actor_name, until_failed
from untax.cluster.scaler import Scaler
from untax.cluster.scaling import Load, Resources
from untax.cluster.terms import Member, Refusal, Roll, Ticket, skew_trouble, version_trouble
from untax.cluster.trust import Trust
from untax.remote.engine import RemoteSubstrate

log = logging.getLogger("untax.cluster")

__all__ = ["NAMESPACE", "Keeper", "NodeActor", "keeper_name", "node_actor_name"]

_END_S = 30.0  # for an agent to give everything back
HEAD = "node:__internal_head__"
"""The resource by which Ray marks the head."""
_CALLS = 10_000  # at once: every client waits for changes


class _Node:
    """A node that lives, and what was made of it."""

    def __init__(self, said: Mapping[str, Any]) -> None:
        """As Ray lists it."""
        self.node_id = str(said["NodeID"])
        self.address = str(said["NodeManagerAddress"])
        self.name = str(said.get("NodeName") or self.address)
        self.resources: Resources = dict(said.get("Resources") or {})
        self.is_head = HEAD in self.resources
        self.actor: Any = None
        self.member: Member | None = None
        self.refused: str | None = None
        self.is_draining = False
        self.is_resting = False
        """Whether it was drained for want of use, and not because somebody said so."""
        self.is_waking = False
        self.load: Load | None = None
        self.idle_since_s: float | None = None
        self.tending: asyncio.Task[None] | None = None
        self.resting: asyncio.Task[None] | None = None
        self.tried = asyncio.Event()
        """Set once it is known whether there is an agent."""

    @property
    def is_coming(self) -> bool:
        return self.load is None and (self.is_waking or (self.refused is None and not self.is_draining))


class Keeper:
    """Made with everything that it needs to begin anew elsewhere, should its own node die."""

    def __init__(self, plan: Plan, trust: Trust, ray_address: str, *, is_lasting: bool) -> None:
        self._plan = plan
        self._trust = trust
        self._ray_address = ray_address
        self._is_lasting = is_lasting
        self._nodes: dict[str, _Node] = {}
        self._version = 0
        self._changed = asyncio.Event()
        self._is_ending = False
        self._first = asyncio.Event()
        self._scaler = Scaler(
            plan.scaling,
            self._nodes.values,
            rest=self._rest,
            wake=self._wake,
            told=self._tell,
            may_have_asked=_is_restarted(),
        )
        self._chores = [asyncio.ensure_future(one) for one in (self._look(), self._spread(), self._scaler.run())]

    # ---- for clients ----

    async def ticket(self) -> str:
        """Once it is known of every node whether it can be used."""
        await self._first.wait()
        members = self._roll().members
        offer = RemoteSubstrate(members[0].substrate, members[0].isolation, members[0].usual) if members else None
        return Ticket(
            self._plan.name, self._trust.token, self._trust.authority.certificate, untax.__version__, self._ray_address, offer, members
        ).to_json()

    async def plan(self) -> Plan:
        return self._plan

    async def members(self, since: int) -> str:
        """Who is in the fleet, once that differs from what was said as version `since`."""
        while self._version == since or not self._first.is_set():
            await self._changed.wait()
        return self._roll().to_json()

    async def forever(self) -> None:
        """Returns only by failing, with the keeper's death."""
        await asyncio.Event().wait()

    async def status(self) -> dict[str, Any]:
        roll = self._roll()
        return {
            "fleet": self._plan.name,
            "version": untax.__version__,
            "is_lasting": self._is_lasting,
            "members": [one.to_data() for one in roll.members],
            "refusals": [one.to_data() for one in roll.refusals],
            "wanted": roll.wanted,
        }

    async def drain(self, node: str, *, wait: bool = True) -> str:
        """No new leases on the node that has this id (or a beginning of it), name or address; once the last is over, its agent ends."""
        found = self._named(node)
        if isinstance(found, str):
            return found
        found.is_resting = False
        self._drain(found)
        draining = asyncio.ensure_future(self._drained(found))
        if wait:
            await asyncio.shield(draining)
        return ""

    async def down(self) -> None:
        """End every agent, and what they hold. The keeper itself is its caller's to kill."""
        self._is_ending = True
        for chore in self._chores:
            chore.cancel()
        nodes = list(self._nodes.values())
        for node in nodes:
            if node.tending is not None:
                node.tending.cancel()
        await asyncio.gather(self._scaler.close(), *(self._ended(node) for node in nodes), return_exceptions=True)
        self._nodes.clear()
        self._tell()

    # ---- the nodes ----

    async def _look(self) -> None:
        """For nodes that join; those that leave are told by their actor's death."""
        while True:
            try:
                alive = {one["NodeID"]: one for one in await asyncio.to_thread(ray.nodes) if one["Alive"]}
            except Exception as exc:  # Ray's head is away: what is there goes on
                log.warning("the nodes of the cluster are not known at the moment: %s", exc)
                await asyncio.sleep(LOOK_S)
                continue
            for node_id, said in alive.items():
                if node_id not in self._nodes:
                    node = self._nodes[node_id] = _Node(said)
                    node.tending = asyncio.ensure_future(self._tend(node))
            for node_id in [one for one in self._nodes if one not in alive]:
                self._gone(self._nodes[node_id])
            if not self._first.is_set():
                await asyncio.gather(*(node.tried.wait() for node in list(self._nodes.values())))
                self._first.set()
                self._tell()
            await asyncio.sleep(LOOK_S)  # Ray has no public way to be told

    async def _tend(self, node: _Node) -> None:
        """See to it that it has an agent, for as long as it lives."""
        while node.node_id in self._nodes and not node.is_draining:
            reason = await self._try(node)
            node.refused = reason
            node.tried.set()
            self._tell()
            if reason is None:
                await self._listen(node)
                log.warning("the agent of node %s has ended", node.name)
                node.member = None
                self._tell()
            else:
                log.warning("node %s is not in the fleet: %s", node.name, reason)
                await asyncio.sleep(AGAIN_S)

    async def _listen(self, node: _Node) -> None:
        """Hear what it has to do, until its agent has ended."""
        known: Load | None = None
        try:
            while True:
                known = await node.actor.load.remote(known)
                self._scaler.changed(node, None if node.is_draining else known)
        except RayError as exc:
            log.debug("node %s says no more: %s", node.name, exc)
        finally:
            self._scaler.changed(node, None)
        await until_failed(node.actor)

    async def _try(self, node: _Node) -> str | None:
        """Why there is no agent, or None."""
        try:
            node.actor = self._actor_on(node)
            asked_s = time.time()
            version, said_s = await node.actor.version.remote()
            if trouble := version_trouble(version, untax.__version__) or skew_trouble(asked_s, said_s, time.time()):
                ray.kill(node.actor)
                return trouble
            post = Post(
                node.node_id,
                node.name,
                node.address,
                self._trust.token,
                self._trust.authority.certificate,
                self._trust.identity_for(node.address),
            )
            said = await node.actor.begin.remote(self._plan, post)
            if "refused" in said:
                ray.kill(node.actor)
                return str(said["refused"])
            node.member = Member.from_data(said["member"])
        except RayError as exc:
            return _words(exc)
        return None

    def _actor_on(self, node: _Node) -> Any:
        return (
            ray.remote(NodeActor)
            .options(
                name=node_actor_name(self._plan.name, node.node_id),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=_CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            )
            .remote(self._plan.name)
        )

    def _gone(self, node: _Node) -> None:
        """It left the cluster."""
        self._nodes.pop(node.node_id, None)
        if node.tending is not None:
            node.tending.cancel()
        node.tried.set()
        self._tell()

    def _drain(self, node: _Node) -> None:
        node.is_draining = True
        self._scaler.changed(node, None)
        if node.member is not None:
            node.member = node.member.drained()
        self._tell()

    async def _rest(self, node: _Node) -> float:
        """Have it drained if nobody has needed it for long enough: 0 then, and else in how long it can be."""
        assert self._plan.scaling.idle_s is not None
        try:
            left_s = float(await node.actor.rest.remote(self._plan.scaling.idle_s))
        except RayError:
            return self._plan.scaling.idle_s
        if left_s <= 0:
            node.is_resting = True
            self._drain(node)
            node.resting = asyncio.ensure_future(self._drained(node))
        return left_s

    def _wake(self, node: _Node) -> None:
        """Take it in again, once it is quite out."""
        before = [one for one in (node.tending, node.resting) if one is not None]
        node.is_resting, node.is_waking = False, True
        node.tending = asyncio.ensure_future(self._woken(node, before))

    async def _woken(self, node: _Node, before: list[asyncio.Task[None]]) -> None:
        await asyncio.wait(before)
        node.is_draining, node.is_waking, node.refused = False, False, None
        await self._tend(node)

    async def _drained(self, node: _Node) -> None:
        if node.actor is not None:
            try:
                await node.actor.drain.remote()
            except RayError as exc:
                log.warning("node %s ended while it was drained: %s", node.name, exc)
        await self._ended(node)
        node.member, node.refused = (
            None,
            "it rests: nobody needed it; it is woken when somebody waits" if node.is_resting else "it was drained",
        )
        self._tell()

    async def _ended(self, node: _Node) -> None:
        if node.actor is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                await node.actor.end.remote()
        except (RayError, TimeoutError) as exc:
            log.warning("the agent of node %s did not end by itself: %s", node.name, exc)
        ray.kill(node.actor)

    def _named(self, node: str) -> _Node | str:
        found = [
            one for one in self._nodes.values() if node in (one.name, one.address) or (len(node) >= 4 and one.node_id.startswith(node))
        ]
        if len(found) == 1:
            return found[0]
        there = ", ".join(f"{one.node_id[:12]} ({one.name})" for one in self._nodes.values()) or "none"
        return f"{'several nodes are' if found else 'no node is'} named {node!r}: there are {there}"

    # ---- telling ----

    async def _spread(self) -> None:
        """Tell the agents who else there is, after each change."""
        told = 0
        while True:
            while self._version == told:
                await self._changed.wait()
            roll = self._roll()
            told = roll.version
            await asyncio.gather(*(_told(node.actor, roll.to_json()) for node in self._nodes.values() if node.member is not None))

    def _roll(self) -> Roll:
        nodes = list(self._nodes.values())
        return Roll(
            self._version,
            tuple(node.member for node in nodes if node.member is not None),
            tuple(Refusal(node.node_id, node.name, node.refused) for node in nodes if node.refused is not None),
            self._scaler.wanted,
        )

    def _tell(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _is_restarted() -> bool:
    """Whether there was one before this, of which nobody knows what it did."""
    try:
        return bool(ray.get_runtime_context().was_current_actor_reconstructed)
    except Exception as exc:  # Ray's head is away
        log.debug("%s", exc)
        return True


async def _told(actor: Any, roll: str) -> None:
    try:
        await actor.meet.remote(roll)
    except RayError as exc:
        log.debug("an agent was not told who is in the fleet: %s", exc)


def _words(exc: RayError) -> str:
    cause = str(exc).strip().splitlines()
    missing = next((line for line in cause if "ModuleNotFoundError" in line), None)
    if missing is not None:
        return f"{missing.strip()}: install the fleet's release there: pip install 'untax[ray]=={untax.__version__}'"
    return f"Ray could not start its agent: {cause[0] if cause else type(exc).__name__}"
