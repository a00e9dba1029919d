"""An agent in a process of its own, beside the actor by which Ray knows it. No Ray in here.

A process of Ray's has threads of Ray's, and its main one takes the interpreter's lock many times a second: on a busy machine an agent that lived there had half as many turns
again on a processor for each lease as a server has (decision 0021). Here it has a process like any server's. The two belong together: neither outlives the other.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import subprocess
from collections.abc import Callable
from struct import Struct
from typing import Any

from untax.cluster.interpreter import command
from untax.cluster.scaling import Load
from untax.cluster.terms import Member, Roll
from untax.core.errors import BackendError
from untax.substrates._host import wait_exit

_SIZE = Struct("<I")
_EXIT_S = 5.0  # for a process whose agent has ended


class Apart:
    """The agent's methods, carried out there. `on_end` is called when its process ends by itself. Belongs to one event loop, whose thread it must not outlive."""

    def __init__(self, on_end: Callable[[], object]) -> None:
        self._on_end = on_end
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._has_begun = False

    async def start(self, made_of: bytes) -> Member:
        """`made_of`: a pickled plan and post. `BackendError` with what the agent said where it cannot be; then nothing is left of it."""
        ours, its = socket.socketpair()
        with its:
            try:
                # By this thread: the process ends with the thread that made it.
                self._process = subprocess.Popen(
                    command("untax.cluster.desk", {"fd": its.fileno(), "parent": os.getpid()}),
                    stdin=subprocess.DEVNULL,
                    pass_fds=[its.fileno()],
                    # Not meant by Ctrl-C, and in the session of its node all the same: a kernel that shares processors out by session would let it go before all who lease of it.
                    process_group=0,
                )
            except BaseException:
                ours.close()
                raise
        try:
            reader, self._writer = await asyncio.open_connection(sock=ours)
            self._reading = asyncio.ensure_future(self._read(reader))
            found: Member | str = await self._ask("begin", made_of)
            if isinstance(found, str):
                raise BackendError("", found)
        except BaseException as exc:
            await self.aclose()
            if isinstance(exc, BackendError) and self._process.returncode:
                raise BackendError(
                    "", f"{exc.message} (exit status {self._process.returncode}); Ray's log of its actor may say why"
                ) from None
            raise
        self._has_begun = True
        return found

    async def now(self) -> Member | None:
        found: Member | None = await self._ask("now")
        return found

    async def meet(self, roll: Roll) -> None:
        await self._ask("meet", roll)

    async def drained(self) -> None:
        await self._ask("drained")

    async def news(self, known: Load | None) -> Load:
        found: Load = await self._ask("news", known)
        return found

    async def rest(self, idle_s: float) -> float:
        found: float = await self._ask("rest", idle_s)
        return found

    async def leases(self) -> int:
        found: int = await self._ask("leases")
        return found

    async def aclose(self) -> None:
        """As the agent's; afterwards its process is no more, also when this is cancelled meanwhile. Safe to call twice."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    # ---- inside ----

    async def _close(self) -> None:
        try:
            if self._has_begun and self._reading is not None and not self._reading.done():
                await self._ask("aclose")
        finally:
            if self._writer is not None:
                self._writer.close()  # which ends it
            if self._process is not None:
                await wait_exit(self._process, _EXIT_S, self._process.kill)

    async def _ask(self, name: str, *args: Any) -> Any:
        if self._writer is None or self._reading is None or self._reading.done():
            raise BackendError("", "the agent's process has ended")
        number = self._number = self._number + 1
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            write(self._writer, (number, name, args))
            return await answer
        finally:
            del self._asked[number]

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while (said := await next_of(reader)) is not None:
                number, value, trouble = said
                answer = self._asked.get(number)
                if answer is None or answer.done():
                    continue  # who asked has gone
                if trouble is None:
                    answer.set_result(value)
                else:
                    answer.set_exception(BackendError("", trouble))
        finally:
            for answer in self._asked.values():
                if not answer.done():
                    answer.set_exception(BackendError("", "the agent's process has ended"))
            if self._has_begun and self._closing is None:
                self._on_end()


# ---- what they say to each other ----


def write(writer: asyncio.StreamWriter, said: object) -> None:
    data = pickle.dumps(said)
    writer.write(_SIZE.pack(len(data)) + data)


async def next_of(reader: asyncio.StreamReader) -> Any:
    """None once the other has hung up."""
    try:
        (size,) = _SIZE.unpack(await reader.readexactly(_SIZE.size))
        return pickle.loads(await reader.readexactly(size))  # noqa: S301  of our own parent or child
    except (asyncio.IncompleteReadError, ConnectionError):
        return None
