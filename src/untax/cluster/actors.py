"""Ray's part of a fleet: who keeps it, and the actor that holds each node's agent.

The *keeper* is one named actor. It sees to it that every node that lives has an agent and tells clients who is in the fleet. It is asked when a client joins
and then tells of changes; no lease and no action waits for it, and while it is away everything goes on with what is known.
Nodes that join are looked for, since Ray tells nobody of them; deaths are told by calls that return only by failing.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import time
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import untax
from untax.cluster.agent import Agent, Plan, Post
from untax.cluster.terms import Member, Refusal, Roll, Ticket, skew_trouble, version_trouble
from untax.cluster.trust import Trust
from untax.core.errors import UntaxError
from untax.remote.engine import RemoteSubstrate

log = logging.getLogger("untax.cluster")

NAMESPACE = "untax"
"""Ray's, in which the actors have their names."""

_LOOK_S = 1.0
_AGAIN_S = 5.0  # until a node that was refused, or whose agent ended by itself, is tried again
_END_S = 30.0  # for an agent to give everything back
_CALLS = 10_000  # at once: every client waits for changes


def keeper_name(fleet: str) -> str:
    return f"untax:{fleet}"


def node_actor_name(fleet: str, node_id: str) -> str:
    return f"untax:{fleet}:{node_id}"


class NodeActor:
    """Holds the agent of the node that it runs on. It ends by itself when whoever keeps the fleet is no more."""

    def __init__(self, fleet: str) -> None:
        self._fleet = fleet
        self._agent: Agent | None = None
        self._starting = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    async def version(self) -> tuple[str, float]:
        """Of untax here, and what this node's clock reads."""
        return untax.__version__, time.time()

    async def begin(self, plan: Plan, post: Post) -> dict[str, Any]:
        """The member, or why there is none. Asked twice, what there is."""
        async with self._starting:
            if self._agent is None:
                _take_priority()
                agent = Agent(plan, post)
                try:
                    await agent.start()
                except (UntaxError, OSError) as exc:
                    return {"refused": f"{type(exc).__name__}: {exc}"}
                self._agent = agent
                # Ray's modules are most of what there is here, and nothing of them ever becomes garbage: it is not looked for among them.
                gc.collect()
                gc.freeze()
                self._watching = asyncio.ensure_future(self._watch_keeper())
        assert self._agent.member is not None
        return {"member": self._agent.member.to_data()}

    async def meet(self, roll: str) -> None:
        """Who is in the fleet from here on."""
        if self._agent is not None:
            self._agent.meet(Roll.from_json(roll).members)

    async def forever(self) -> None:
        """Returns only by failing, with the actor's death."""
        await asyncio.Event().wait()

    async def drain(self) -> None:
        """No new leases; returns once the last one is over."""
        if self._agent is not None:
            self._agent.drain()
            await self._agent.wait_idle()

    async def leases(self) -> int:
        return 0 if self._agent is None else self._agent.leases

    async def end(self) -> None:
        """Give everything back. The actor itself is its caller's to kill."""
        async with self._starting:  # an agent that is about to be there would be left
            if self._watching is not None:
                self._watching.cancel()
            await asyncio.shield(self._end())

    def _end(self) -> asyncio.Task[None]:
        if self._ending is None:
            self._ending = asyncio.ensure_future(_closed(self._agent))
        return self._ending

    async def _watch_keeper(self) -> None:
        """Until it is no more and nobody starts it again: then this agent is nobody's."""
        await _until_dead(keeper_name(self._fleet))
        log.warning("the fleet %s has no keeper any more: its agent ends", self._fleet)
        await asyncio.shield(self._end())
        ray.kill(ray.get_runtime_context().current_actor)


class _Node:
    """A node that lives, and what was made of it."""

    def __init__(self, node_id: str, name: str, address: str) -> None:
        self.node_id = node_id
        self.name = name
        self.address = address
        self.actor: Any = None
        self.member: Member | None = None
        self.refused: str | None = None
        self.is_draining = False
        self.tending: asyncio.Task[None] | None = None
        self.tried = asyncio.Event()
        """Set once it is known whether there is an agent."""


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
        self._looking = asyncio.ensure_future(self._look())
        self._spreading = asyncio.ensure_future(self._spread())

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
        }

    async def drain(self, node: str, *, wait: bool = True) -> str:
        """No new leases on the node that has this id (or a beginning of it), name or address; once the last is over, its agent ends."""
        found = self._named(node)
        if isinstance(found, str):
            return found
        found.is_draining = True
        if found.member is not None:
            found.member = found.member.drained()
        self._tell()
        draining = asyncio.ensure_future(self._drained(found))
        if wait:
            await asyncio.shield(draining)
        return ""

    async def down(self) -> None:
        """End every agent, and what they hold. The keeper itself is its caller's to kill."""
        self._is_ending = True
        self._looking.cancel()
        self._spreading.cancel()
        nodes = list(self._nodes.values())
        for node in nodes:
            if node.tending is not None:
                node.tending.cancel()
        await asyncio.gather(*(self._ended(node) for node in nodes), return_exceptions=True)
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
                await asyncio.sleep(_LOOK_S)
                continue
            for node_id, said in alive.items():
                if node_id not in self._nodes:
                    node = self._nodes[node_id] = _Node(node_id, str(said.get("NodeName") or said["NodeManagerAddress"]), str(said["NodeManagerAddress"]))  # fmt: skip
                    node.tending = asyncio.ensure_future(self._tend(node))
            for node_id in [one for one in self._nodes if one not in alive]:
                self._gone(self._nodes[node_id])
            if not self._first.is_set():
                await asyncio.gather(*(node.tried.wait() for node in list(self._nodes.values())))
                self._first.set()
                self._tell()
            await asyncio.sleep(_LOOK_S)  # Ray has no public way to be told

    async def _tend(self, node: _Node) -> None:
        """See to it that it has an agent, for as long as it lives."""
        while node.node_id in self._nodes and not node.is_draining:
            reason = await self._try(node)
            node.refused = reason
            node.tried.set()
            self._tell()
            if reason is None:
                await _until_failed(node.actor)
                log.warning("the agent of node %s has ended", node.name)
                node.member = None
                self._tell()
            else:
                log.warning("node %s is not in the fleet: %s", node.name, reason)
                await asyncio.sleep(_AGAIN_S)

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

    async def _drained(self, node: _Node) -> None:
        if node.actor is not None:
            try:
                await node.actor.drain.remote()
            except RayError as exc:
                log.warning("node %s ended while it was drained: %s", node.name, exc)
        await self._ended(node)
        node.member, node.refused = None, "it was drained"
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
        )

    def _tell(self) -> None:
        self._version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _take_priority() -> None:
    """That of the node's own processes: Ray gives its workers the last turn (nice 15), and every sandbox would have it too."""
    try:
        usual = os.getpriority(os.PRIO_PROCESS, os.getppid())
        for thread in os.listdir("/proc/self/task"):  # each has its own
            os.setpriority(os.PRIO_PROCESS, int(thread), usual)
    except OSError as exc:
        log.info("the agent keeps the low priority of Ray's workers (%s); start Ray with RAY_worker_niceness=0", exc.strerror)


async def _told(actor: Any, roll: str) -> None:
    try:
        await actor.meet.remote(roll)
    except RayError as exc:
        log.debug("an agent was not told who is in the fleet: %s", exc)


async def _closed(agent: Agent | None) -> None:
    if agent is not None:
        await agent.aclose()


async def _until_failed(actor: Any) -> None:
    try:
        await actor.forever.remote()
    except RayError:
        pass


async def _until_dead(name: str) -> None:
    """Return once no actor has this name any more; one that is started again is the same."""
    while True:
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        except ValueError:
            return
        except Exception as exc:  # Ray's head is away
            log.debug("%s: %s", name, exc)
            await asyncio.sleep(_AGAIN_S)
            continue
        await _until_failed(actor)
        await asyncio.sleep(_LOOK_S)  # a restart takes longer


def _words(exc: RayError) -> str:
    cause = str(exc).strip().splitlines()
    missing = next((line for line in cause if "ModuleNotFoundError" in line), None)
    if missing is not None:
        return f"{missing.strip()}: install the fleet's release there: pip install 'untax[ray]=={untax.__version__}'"
    return f"Ray could not start its agent: {cause[0] if cause else type(exc).__name__}"
