"""The process of an agent: what `untax.cluster.apart` asks of it is carried out here. It ends with whoever started it, however that ended."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import pickle
import signal
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import untax
from untax.cluster.apart import next_of, write
from untax.cluster.scaling import Load
from untax.cluster.terms import Member, Roll
from untax.core.errors import BackendError, UntaxError

if TYPE_CHECKING:
    from untax.cluster.agent import Agent

log = logging.getLogger("untax.cluster")

NAME = "untax-agent"
"""As `ps` and `top` show it."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


def main(said: Mapping[str, int]) -> None:
    os.set_inheritable(said["fd"], False)  # whatever comes over it is carried out by whoever started us
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_NAME, NAME.encode(), 0, 0, 0)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != said["parent"]:
        return  # it went before that held
    asyncio.run(_serve(socket.socket(fileno=said["fd"])))


async def _serve(ours: socket.socket) -> None:
    """Until whoever started this hangs up. Whatever is held then is left to the reaper, as after any other death."""
    reader, writer = await asyncio.open_connection(sock=ours)
    desk = _Desk()
    asked: set[asyncio.Task[None]] = set()
    while (said := await next_of(reader)) is not None:
        task = asyncio.ensure_future(_answer(desk, writer, *said))
        asked.add(task)
        task.add_done_callback(asked.discard)
    if not desk.is_closed:
        os._exit(1)


async def _answer(desk: _Desk, writer: asyncio.StreamWriter, number: int, name: str, args: tuple[Any, ...]) -> None:
    try:
        write(writer, (number, await getattr(desk, name)(*args), None))
    except Exception as exc:
        log.exception("%s", name)
        write(writer, (number, None, f"{type(exc).__name__}: {exc}"))


class _Desk:
    """Where the agent is asked."""

    def __init__(self) -> None:
        self._agent: Agent | None = None
        self.is_closed = False

    async def begin(self, made_of: bytes) -> Member | str:
        """The member, or why there is none."""
        try:
            from untax.cluster.agent import Agent  # here, so that there is somebody to tell what a node lacks for it

            agent = Agent(*pickle.loads(made_of))  # noqa: S301  of our own parent
            member = await agent.start()
        except ImportError as exc:
            self.is_closed = True
            return f"{type(exc).__name__}: {exc}: install the fleet's release there: pip install 'untax[ray]=={untax.__version__}'"
        except (UntaxError, OSError) as exc:
            self.is_closed = True
            return f"{type(exc).__name__}: {exc}"
        self._agent = agent
        # Modules are most of what there is here, and nothing of them ever becomes garbage: it is not looked for among them.
        gc.collect()
        gc.freeze()
        return member

    async def now(self) -> Member | None:
        return self._there.now

    async def meet(self, roll: Roll) -> None:
        self._there.meet(roll)

    async def drained(self) -> None:
        self._there.drain()
        await self._there.wait_idle()

    async def news(self, known: Load | None) -> Load:
        return await self._there.gauge.wait_news(known)

    async def rest(self, idle_s: float) -> float:
        return self._there.rest(idle_s)

    async def leases(self) -> int:
        return self._there.leases

    async def aclose(self) -> None:
        await self._there.aclose()
        self.is_closed = True

    @property
    def _there(self) -> Agent:
        if self._agent is None:
            raise BackendError("", "the agent has not begun")
        return self._agent
