"""How a client comes to whoever keeps its fleet, finds that one again, and hears from it who is in."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from untax.cluster import access, terms, tickets
from untax.cluster.plan import Plan
from untax.cluster.terms import Roll, Ticket
from untax.core.errors import BackendError, PoolClosed, UntaxError, UsageError
from untax.layers._held import blocking

log = logging.getLogger("untax.cluster")

AGAIN_S = 1.0  # until Ray is asked again, when its head or the keeper is away
_ASK_S = 2.0  # for whoever keeps the fleet to be found, and to say which it is
_LEAST_S = 10.0  # between two questions that had no news for an answer
_TRIES = 10  # to join or bring up, while one is about to go

Why = Callable[[str], PoolClosed]
"""What a fleet's callers are told when it is no more, by its name."""


class Joining:
    """One client's. `given` are the options that its caller meant, for a fleet that is there already."""

    def __init__(self, plan: Plan, given: Mapping[str, Any]) -> None:
        self._plan = plan
        self._given = given
        self.name = plan.name
        self.keeper: Any = None
        """None while nobody was found."""
        self.is_maker = False

    async def join(self, there: str) -> Ticket:
        """Or bring one up. A keeper that is found may be about to go with the program that made it; a moment later there is none."""
        for left in reversed(range(_TRIES)):
            await blocking(functools.partial(self._find, there))
            try:
                ticket = Ticket.from_json(await self.asked(self.keeper.ticket))
                break
            except PoolClosed:
                if self.is_maker or not left:
                    raise
                await asyncio.sleep(AGAIN_S)  # nothing tells when a name is free
        if not self.is_maker and self._given:
            await self._check_plan()
        return ticket

    def _find(self, there: str) -> None:
        """Blocks. What it comes to is known to `take_down` also when nobody waits for it any more."""
        self.keeper, self.is_maker = access.start_keeper(self._plan, there, is_lasting=False)

    async def _check_plan(self) -> None:
        """Options that were given are those of the fleet that is there, or it is not the one that was meant."""
        plan = await self.asked(self.keeper.plan)
        there = {"substrate": plan.substrate, "state_dir": plan.state_dir, "lease_s": plan.lease_s, **asdict(plan.scaling), **plan.options}
        for name, value in self._given.items():
            if there.get(name) != value:
                raise UsageError(
                    f"the fleet {self.name!r} is up with {name}={there.get(name)!r}, not {value!r}: join it without options, "
                    "take it down first, or give this one another name"
                )

    async def rejoin(self, ticket: Ticket, there: str) -> Ticket:
        """With a ticket. The nodes that are in it are enough to begin with while Ray's head is away; whoever keeps the fleet is found later."""
        if ticket.members:
            finding = asyncio.ensure_future(asyncio.to_thread(access.found, self.name))
            found = finding.result() if (await asyncio.wait([finding], timeout=_ASK_S))[0] else None
        else:
            found = await blocking(functools.partial(access.find_keeper, self.name)) or False
        if found is None:
            log.warning("Ray's head does not answer: the fleet %s begins with the nodes that its handle knows", self.name)
            return ticket
        if found is False:
            raise await self._gone(ticket, there, terms.down)
        if await self._is_ours(found, ticket) is False:
            raise await self._gone(ticket, there, terms.replaced)
        self.keeper = found
        return ticket if ticket.members else Ticket.from_json(await self.asked(found.ticket))

    async def _gone(self, ticket: Ticket, there: str, why: Why) -> UntaxError:
        """The fleet may be well, on a cluster that this process is not part of. The head of its own may have moved since, and be silent where it was."""
        is_elsewhere = not tickets.is_own(ticket) and await blocking(functools.partial(access.is_another, there, ticket.ray_address))
        return terms.elsewhere(self.name, there, ticket.ray_address) if is_elsewhere else why(self.name)

    # ---- from then on ----

    async def asked(self, method: Any, *args: Any, **kwargs: Any) -> Any:
        """What the keeper says to that; its death is the fleet's end."""
        return await access.asked(self.name, method, *args, **kwargs)

    async def roll(self) -> Roll:
        """As it is now."""
        if self.keeper is None:
            raise terms.silent(self.name)
        return Roll.from_json(await self.asked(self.keeper.members, -1))

    async def news(self, version: int) -> str:
        """The roll that follows; nothing where that is long in coming."""
        if self.keeper is None:
            raise BackendError("", "Ray's head has not answered yet")
        loop = asyncio.get_running_loop()
        began_s, call = loop.time(), access.ask(self.name, self.keeper.members, version)
        try:
            said = str(await access.answer(self.name, call))
        except asyncio.CancelledError:
            access.cancel(call)
            raise
        if not said:  # at once, where more clients ask than can wait
            await asyncio.sleep(began_s + _LEAST_S - loop.time())
        return said

    async def look_up(self, ticket: Ticket) -> Why | None:
        """Find whoever keeps this fleet now. Why nobody does any more; None also while Ray does not say."""
        found = await asyncio.to_thread(access.found, self.name)
        if found is False:
            return terms.down
        is_ours = None if found is None else await self._is_ours(found, ticket)
        if is_ours and not self.is_maker:  # Ray ends an actor whose maker has let go of the handle it was made with
            self.keeper = found
        return terms.replaced if is_ours is False else None

    async def _is_ours(self, keeper: Any, ticket: Ticket) -> bool | None:
        """Whether it keeps this fleet, and not another that has its name; None while it does not say, about to go or to be there again."""
        try:
            async with asyncio.timeout(_ASK_S):
                return bool(await self.asked(keeper.instance) == ticket.instance)
        except Exception:  # of Ray's too, while this process leaves its cluster
            return None

    async def take_down(self) -> None:
        """Where it was brought up here."""
        if self.is_maker and self.keeper is not None:
            await access.take_down(self.keeper)
