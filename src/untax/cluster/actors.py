"""Ray's part of a fleet: who keeps it.

The *keeper* is one named actor. It sees to it that every node that lives has an agent and tells clients who is in the fleet. It is asked when a client joins
and then tells of changes; no lease and no action waits for it, and while it is away everything goes on with what is known.
Nodes that join are looked for, since Ray tells nobody of them; deaths are told by calls that fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import untax
from untax.cluster import autoscaler, drains
from untax.cluster.known import Node
from untax.cluster.plan import Plan, Post
from untax.cluster.resident import (
    AGAIN_S,
    END_S,
    HOLD_S,
    LOOK_S,
    NAMESPACE,
    NodeActor,
    is_forerunner,
    keeper_name,
    node_actor_name,
    until_failed,
)
from untax.cluster.scaler import Scaler
from untax.cluster.scaling import Load
from untax.cluster.terms import Member, Refusal, Roll, Ticket, instance_of, named, skew_trouble, version_trouble
from untax.cluster.trust import Trust
from untax.core.errors import UsageError
from untax.remote.engine import RemoteSubstrate

log = logging.getLogger("untax.cluster")

T = TypeVar("T")

__all__ = ["NAMESPACE", "Keeper", "NodeActor", "keeper_name", "node_actor_name"]

_ANSWER_S = 60.0  # for an actor to be there and to answer: Ray starts a process for it
_BEGIN_S = 60.0  # for an agent to start
_SETTLE_S = 20.0  # for the first look at all nodes, where some are in the fleet already
_PATIENCE = 3.0  # the same as a multiple of what the first of them took: on a busy machine Ray's processes alone take longer than that
_TELL_S = 5.0  # for an agent to hear who else there is, before the others hear of the next change
CALLS = 10_000
"""How many Ray lets begin before others have ended."""
WAITING = 9_000
"""How many of those may wait for a change, one for each client. Ray's own groups of calls would not do: each has a thread and an event loop of its own."""
_RESTS = "it rests: nobody needed it; it is woken when leases wait"


class Keeper:
    """Made with everything that it needs to begin anew elsewhere, should its own node die."""

    def __init__(self, plan: Plan, trust: Trust, ray_address: str, most_waiting: int = WAITING) -> None:
        self._plan = plan
        self._trust = trust
        self._instance = instance_of(trust.authority.certificate)
        self._ray_address = ray_address
        self._nodes: dict[str, Node] = {}
        self._version = 0
        self._most_waiting = most_waiting
        self._waiting = 0
        self._changed = asyncio.Event()
        self._first = asyncio.Event()
        self._drains: set[str] | None = None
        """Ids of nodes that were drained, by whoever kept the fleet before this as well; None until that is known."""
        self._settling: asyncio.Task[None] | None = None
        self._scaler = Scaler(
            plan.scaling,
            self._nodes.values,
            rest=self._rest,
            wake=self._wake,
            told=self._tell,
            ask=autoscaler.ask,
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
        """Who is in the fleet, once that differs from what was said as version `since`. Nothing after a minute, or at once where too many wait: ask again.

        Nobody tells of a client that has died, and what it asked for would be waited for ever.
        """
        await self._first.wait()
        if self._version == since and self._waiting < self._most_waiting:
            self._waiting += 1
            try:
                async with asyncio.timeout(HOLD_S):
                    while self._version == since:
                        await self._changed.wait()
            except TimeoutError:
                pass
            finally:
                self._waiting -= 1
        return "" if self._version == since else self._roll().to_json()

    async def forever(self) -> None:
        """Fails with the keeper's death, and is asked again until it does."""
        await asyncio.sleep(HOLD_S)

    async def instance(self) -> str:
        """Which fleet of this name it is: one that was taken down, and one that was brought up later, are two."""
        return self._instance

    async def drain(self, node: str, *, wait: bool = True) -> str:
        """No new leases on the node that has this id (or a beginning of it), name or address; once the last is over, its agent ends."""
        try:
            found = named(self._nodes.values(), node)
        except UsageError as exc:
            return str(exc)
        await self._note_drain(found)
        found.is_resting = False
        self._drain(found)
        draining = asyncio.ensure_future(self._drained(found))
        if wait:
            await asyncio.shield(draining)
        return ""

    async def down(self) -> None:
        """End every agent, and what they hold. The keeper itself is its caller's to kill."""
        for task in (*self._chores, self._settling):
            if task is not None:
                task.cancel()
        nodes = list(self._nodes.values())
        for node in nodes:
            if node.tending is not None:
                node.tending.cancel()
        await asyncio.gather(self._forget_drains(), self._scaler.close(), *(self._ended(node) for node in nodes), return_exceptions=True)
        self._nodes.clear()
        self._tell()

    # ---- the nodes ----

    async def _look(self) -> None:
        """For nodes that join; those that leave are told by their actor's death."""
        while True:
            try:
                if self._drains is None:
                    self._drains = await asyncio.to_thread(drains.noted, self._plan.name, self._instance)
                alive = {one["NodeID"]: one for one in await asyncio.to_thread(ray.nodes) if one["Alive"]}
            except Exception as exc:  # Ray's head is away: what is there goes on
                log.warning("the nodes of the cluster are not known at the moment: %s", exc)
                await asyncio.sleep(LOOK_S)
                continue
            for node_id, said in alive.items():
                if node_id not in self._nodes:
                    node = self._nodes[node_id] = Node(said)
                    node.is_draining = node_id in self._drains
                    node.tending = asyncio.ensure_future(self._drain_on(node) if node.is_draining else self._tend(node))
            for node_id in [one for one in self._nodes if one not in alive]:
                self._gone(self._nodes[node_id])
            if self._settling is None:
                self._settling = asyncio.ensure_future(self._settle())
            await asyncio.sleep(LOOK_S)  # Ray has no public way to be told

    async def _settle(self) -> None:
        """Clients wait until it is known of each node whether it can be used, and not much longer than others take for one that hangs."""
        loop = asyncio.get_running_loop()
        began_s, took_s = loop.time(), 0.0
        late: set[asyncio.Future[bool]] = {asyncio.ensure_future(node.tried.wait()) for node in self._nodes.values()}
        while late:
            left_s = began_s + max(_SETTLE_S, _PATIENCE * took_s) - loop.time()
            if left_s <= 0 and any(node.member is not None for node in self._nodes.values()):
                break
            # While there is none at all, also one that joins by now would do.
            tried, late = await asyncio.wait(late, timeout=left_s if left_s > 0 else LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if tried and not took_s:
                took_s = loop.time() - began_s
        for one in late:
            one.cancel()
        for node in self._nodes.values():
            if not node.tried.is_set():
                node.refused = "its agent has not started yet"
        self._first.set()
        self._tell()

    async def _tend(self, node: Node) -> None:
        """See to it that it has an agent, for as long as it lives."""
        while node.node_id in self._nodes and not node.is_draining:
            try:
                reason = await self._try(node)
            finally:
                node.tried.set()  # whatever became of it: everybody waits for it at first
            if node.is_draining:
                await self._drained(node)  # who drained it may have found no agent yet
                break
            node.refused = reason
            self._tell()
            if reason is None:
                await self._listen(node)
                if node.is_draining:
                    break  # it leaves the roll where its reason comes into it, in one step
                log.warning("the agent of node %s has ended", node.name)
                node.member = None
                self._tell()
            else:
                log.warning("node %s is not in the fleet: %s", node.name, reason)
                await asyncio.sleep(AGAIN_S)

    async def _listen(self, node: Node) -> None:
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

    async def _try(self, node: Node) -> str | None:
        """Why there is no agent, or None."""
        try:
            await self._clear(node)
            node.actor = await asyncio.to_thread(self._actor_on, node)
            asked_s = time.time()
            # One that does not answer is left as it is: it may be an agent with leases, which are not ended for being slow.
            version, said_s = await _within(_ANSWER_S, node.actor.version.remote())
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
            try:
                said = await _within(_BEGIN_S, node.actor.begin.remote(self._plan, post))
            except TimeoutError:
                ray.kill(node.actor)  # one that has begun says so at once
                return f"its agent did not start within {_BEGIN_S:g} s, and was ended; `untax doctor` there may say what it lacks"
            if "refused" in said:
                ray.kill(node.actor)
                return str(said["refused"])
            node.member = Member.from_data(said["member"])
            if node.member.is_draining:
                return await self._renewed(node)
        except TimeoutError:
            return f"its agent does not answer within {_ANSWER_S:g} s; Ray's logs on that node may say why"
        except Exception as exc:  # whatever it is, it is this node's alone
            return _words(exc)
        return None

    async def _renewed(self, node: Node) -> str:
        """Its agent takes no leases, and no drain was noted: whoever kept the fleet before this did not live to end it. It goes, and another one comes."""
        node.tried.set()
        self._tell()
        await self._drained(node)
        return "its agent took no more leases and was ended; another one is about to be there"

    async def _clear(self, node: Node) -> None:
        """End what an earlier fleet of this name has left on the node. Nobody keeps it, since this one has its name; it would hold the state directory."""
        for one in await asyncio.to_thread(ray.util.list_named_actors, all_namespaces=True):
            if one["namespace"] == NAMESPACE and is_forerunner(one["name"], self._plan.name, self._instance, node.node_id):
                with contextlib.suppress(ValueError):  # it went by itself
                    await _ended(await asyncio.to_thread(ray.get_actor, one["name"], NAMESPACE), node.name)

    def _actor_on(self, node: Node) -> Any:
        """Blocks."""
        return (
            ray.remote(NodeActor)
            .options(
                name=node_actor_name(self._plan.name, self._instance, node.node_id),
                namespace=NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                num_cpus=0,
                max_concurrency=CALLS,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node.node_id, soft=False),
            )
            .remote(self._plan.name, self._instance)
        )

    def _gone(self, node: Node) -> None:
        """It left the cluster."""
        self._nodes.pop(node.node_id, None)
        if node.tending is not None:
            node.tending.cancel()
        node.tried.set()
        self._tell()

    def _drain(self, node: Node) -> None:
        node.is_draining = True
        self._scaler.changed(node, None)
        if node.member is not None:
            node.member = node.member.drained()
        self._tell()

    async def _rest(self, node: Node) -> float:
        """Have it drained if nobody has needed it for long enough: 0 then, and else in how long it can be."""
        assert self._plan.scaling.idle_s is not None
        try:
            left_s = float(await _within(_TELL_S, node.actor.rest.remote(self._plan.scaling.idle_s)))
        except (RayError, TimeoutError):
            return self._plan.scaling.idle_s
        if left_s <= 0:
            node.is_resting = True
            self._drain(node)
            node.resting = asyncio.ensure_future(self._drained(node))
        return left_s

    def _wake(self, node: Node) -> None:
        """Take it in again, once it is quite out."""
        before = [one for one in (node.tending, node.resting) if one is not None]
        node.is_resting, node.is_waking = False, True
        node.tending = asyncio.ensure_future(self._woken(node, before))

    async def _woken(self, node: Node, before: list[asyncio.Task[None]]) -> None:
        await asyncio.wait(before)
        node.is_draining, node.is_waking, node.refused = False, False, None
        await self._tend(node)

    async def _drained(self, node: Node) -> None:
        if node.actor is not None:
            try:
                await node.actor.drain.remote()
            except RayError as exc:
                log.warning("node %s ended while it was drained: %s", node.name, exc)
        await self._ended(node)
        node.member, node.refused = None, _RESTS if node.is_resting else "it was drained"
        self._tell()

    async def _drain_on(self, node: Node) -> None:
        """It was drained by whoever kept the fleet before this, or was about to be: its agent, if it still has one, goes with its last lease."""
        try:
            name = node_actor_name(self._plan.name, self._instance, node.node_id)
            node.actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            if (said := await _within(_ANSWER_S, node.actor.member.remote())) is not None:
                node.member = Member.from_data(said).drained()
        except ValueError:
            log.debug("node %s has no agent any more", node.name)
        except Exception as exc:
            log.warning("node %s, which is drained, does not say what it has: %s", node.name, exc)
        finally:
            if node.member is None:
                node.refused = "it was drained"
            node.tried.set()
            self._tell()
        await self._drained(node)

    async def _note_drain(self, node: Node) -> None:
        """For whoever keeps the fleet after this one."""
        try:
            await _within(_TELL_S, asyncio.to_thread(drains.note, self._plan.name, self._instance, node.node_id))
        except Exception as exc:  # Ray's head is away
            log.warning("that node %s is drained is forgotten if the keeper of the fleet is started again: %s", node.name, exc)

    async def _forget_drains(self) -> None:
        await _within(_TELL_S, asyncio.to_thread(drains.forget, self._plan.name, self._instance))

    async def _ended(self, node: Node) -> None:
        if node.actor is not None:
            await _ended(node.actor, node.name)

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


async def _within(seconds: float, call: Awaitable[T]) -> T:
    async with asyncio.timeout(seconds):
        return await call


async def _ended(actor: Any, node: str) -> None:
    try:
        await _within(END_S, actor.end.remote())
    except (RayError, TimeoutError) as exc:
        log.warning("the agent of node %s did not end by itself: %r", node, exc)
    try:
        await asyncio.to_thread(ray.kill, actor)
    except Exception as exc:  # Ray's head is away; it ends with whoever keeps the fleet
        log.warning("the agent of node %s could not be killed: %s", node, exc)


async def _told(actor: Any, roll: str) -> None:
    try:
        await _within(_TELL_S, actor.meet.remote(roll))
    except (RayError, TimeoutError) as exc:
        log.debug("an agent was not told who is in the fleet: %s", exc)


def _words(exc: Exception) -> str:
    if not isinstance(exc, RayError):
        return f"{type(exc).__name__}: {exc}"
    cause = str(exc).strip().splitlines()
    missing = next((line for line in cause if "ModuleNotFoundError" in line), None)
    if missing is not None:
        return f"{missing.strip()}: install the fleet's release there: pip install 'untax[ray]=={untax.__version__}'"
    if isinstance(exc, RayTaskError):
        return f"its agent failed: {exc.cause!r}"
    return f"Ray could not start its agent: {cause[0] if cause else type(exc).__name__}"
