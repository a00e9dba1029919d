"""The actor by which Ray knows a node's agent, which has a process of its own. It ends by itself when whoever keeps the fleet is no more, and when the agent is."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

import ray
from ray import cloudpickle
from ray.exceptions import RayError

import untax
from untax.cluster import autoscaler
from untax.cluster.apart import Apart
from untax.cluster.plan import Plan, Post
from untax.cluster.scaling import Load
from untax.cluster.terms import Roll
from untax.core.errors import UntaxError

log = logging.getLogger("untax.cluster")

_exit = os._exit  # at once, and without Ray

NAMESPACE = "untax"
"""Ray's, in which the actors have their names."""

LOOK_S = 1.0
AGAIN_S = 5.0  # until a node that was refused, or whose agent ended by itself, is tried again
END_S = 30.0  # for an agent to give everything back
HOLD_S = 60.0  # that a call waits for what may never come: of a caller that died nobody tells, and its calls stay


def keeper_name(fleet: str) -> str:
    return f"untax:{fleet}"


def node_actor_name(fleet: str, instance: str, node_id: str) -> str:
    """Fleets that follow each other under one name have actors of their own: what is left of one is not taken for the next one's."""
    return f"untax:{fleet}:{instance}:{node_id}"


def is_forerunner(name: str, fleet: str, instance: str, node_id: str) -> bool:
    """Whether the actor of this name is that of an earlier fleet on the same node. Names of fleets have no colon."""
    parts = name.split(":")
    return len(parts) == 4 and parts[:2] == ["untax", fleet] and parts[2] != instance and parts[3] == node_id


class NodeActor:
    """On the node that it is for. While it is there the node is busy to Ray's autoscaler, whatever its agent has to do."""

    def __init__(self, fleet: str, instance: str) -> None:
        self._fleet = fleet
        self._instance = instance
        self._agent: Apart | None = None
        self._starting = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._has_asked = False
        """Whether Ray's autoscaler was asked for more nodes, as last told."""
        self._watching = asyncio.ensure_future(self._watch_keeper())  # also of a keeper that dies before there is an agent

    async def version(self) -> tuple[str, float]:
        """Of untax here, and what this node's clock reads. An agent that does not answer is one that does not say that either."""
        if self._agent is not None:
            await self._agent.now()
        return untax.__version__, time.time()

    async def begin(self, plan: Plan, post: Post) -> dict[str, Any]:
        """The member, or why there is none. Asked twice, what there is."""
        async with self._starting:
            if self._ending is not None:
                return {"refused": "the agent that was there is ending"}
            if self._agent is None:
                _take_priority()
                agent = Apart(self._lost)
                try:
                    # What its caller's options are of may be known to nobody else by name.
                    await agent.start(cloudpickle.dumps((plan, post)))  # type: ignore[no-untyped-call]
                except (UntaxError, OSError) as exc:
                    return {"refused": str(exc)}
                self._agent = agent
        return {"member": await self.member()}

    async def member(self) -> dict[str, Any] | None:
        """What there is, for who does not want one."""
        found = None if self._agent is None else await self._agent.now()
        return None if found is None else found.to_data()

    async def meet(self, roll: str) -> None:
        """Who is in the fleet from here on."""
        said = Roll.from_json(roll)
        self._has_asked = said.wanted > 0
        if self._agent is not None:
            await self._agent.meet(said)

    async def forever(self) -> None:
        """Fails with the actor's death, and is asked again until it does."""
        await asyncio.sleep(HOLD_S)

    async def drain(self) -> None:
        """No new leases; returns once the last one is over."""
        if self._agent is not None:
            await self._agent.drained()

    async def load(self, known: Load | None) -> Load:
        """What the node has to do, once that is not what is known."""
        assert self._agent is not None
        return await self._agent.news(known)

    async def rest(self, idle_s: float) -> float:
        """No new leases, if nobody has needed the node for so long: 0 then, and else for how much longer that has to be so."""
        return idle_s if self._agent is None else await self._agent.rest(idle_s)

    async def leases(self) -> int:
        """How many are held."""
        return 0 if self._agent is None else await self._agent.leases()

    async def end(self) -> None:
        """Give everything back. The actor itself is its caller's to kill, or goes with whoever keeps the fleet."""
        async with self._starting:  # an agent that is about to be there would be left
            await asyncio.shield(self._end())

    def _end(self) -> asyncio.Task[None]:
        if self._ending is None:
            self._ending = asyncio.ensure_future(_closed(self._agent))
        return self._ending

    def _lost(self) -> None:
        """The agent has died; Ray tells whoever keeps the fleet, as it would of an agent in this process. Its head need not be there for it."""
        log.error("the agent's process has ended by itself")
        _exit(1)

    async def _watch_keeper(self) -> None:
        """Until it is no more and nobody starts it again: then this agent is nobody's, and nothing may keep this process."""
        try:
            await _until_dead(keeper_name(self._fleet), self._instance)
            log.warning("the fleet %s has no keeper any more: its agent ends", self._fleet)
            if self._has_asked:
                await autoscaler.ask([])
            async with asyncio.timeout(END_S):
                await self.end()
        except Exception as exc:
            log.error("the agent did not end in order, and is killed: %r", exc)
        finally:
            _kill_self()


def _take_priority() -> None:
    """That of the node's own processes, for this thread and what it starts: Ray gives its workers the last turn (nice 15), and every sandbox would have it too."""
    try:
        os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
    except OSError as exc:
        log.info("the agent keeps the low priority of Ray's workers (%s); start Ray with RAY_worker_niceness=0", exc.strerror)


async def _closed(agent: Apart | None) -> None:
    if agent is not None:
        await agent.aclose()


def _kill_self() -> None:
    try:
        ray.kill(ray.get_runtime_context().current_actor)
    except Exception as exc:  # Ray's head is away, and would not hear of it
        log.debug("%s", exc)
        _exit(1)


async def until_failed(actor: Any) -> None:
    try:
        while True:
            await actor.forever.remote()
    except RayError:
        pass


async def _until_dead(name: str, instance: str) -> None:
    """Return once nobody keeps this fleet any more. A keeper that is started again is the same; that of a later fleet is not."""
    while True:
        try:
            actor = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
        except ValueError:
            return
        except Exception as exc:  # Ray's head is away
            log.debug("%s: %s", name, exc)
            await asyncio.sleep(AGAIN_S)
            continue
        try:
            if await actor.instance.remote() != instance:
                return
        except RayError as exc:
            log.debug("%s: %s", name, exc)
        else:
            await until_failed(actor)
        await asyncio.sleep(LOOK_S)  # a restart takes longer
