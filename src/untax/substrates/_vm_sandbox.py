"""One virtual machine, from its process to its end."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from untax.channel.stream import SocketStream
from untax.core.errors import CreateError, ReadinessTimeout, SandboxLost, UsageError
from untax.core.spec import Limits
from untax.core.substrate import Facts, Unenforced
from untax.substrates._vm_machines import Started, not_up, wait_up, with_console

log = logging.getLogger("untax.vm")

_SEED_BYTES = 64
_WORKERS = 1  # the cell's own process in there, which starts commands, is counted with them
_CPU_PERIOD_US = 100_000
_CLOCK_S = 5.0  # an emulated machine on a busy host
_ROOM = 1 << 20  # a stream window, as the launcher gives its sockets


class VmStream(SocketStream):
    """A channel that knows why it ended: a machine whose kernel panicked stands still, and hangs up on nobody."""

    def __init__(self, sock: socket.socket, sandbox_id: str) -> None:
        super().__init__(sock)
        self._sandbox_id = sandbox_id
        self.reason: str | None = None

    def fail(self, reason: str) -> None:
        self.reason = reason
        self._lose(None)

    def _lose(self, exc: Exception | None) -> None:
        super()._lose(SandboxLost(self._sandbox_id, self.reason) if self.reason is not None else exc)


@dataclass(frozen=True, slots=True)
class Birth:
    """What makes a machine this sandbox and no other; told to it when it is up, booted or restored."""

    sandbox_id: str
    limits: Limits
    user: str
    own: Sequence[str]

    def words(self) -> str:
        limits = self.limits
        memory = int(limits.memory_mib * (1 << 20))
        lines = [
            f"seed={secrets.token_hex(_SEED_BYTES)}",
            f"hostname={self.sandbox_id}",
            f"machine-id={secrets.token_hex(16)}",
            f"tmp={max(memory // 2, 1 << 20)}",
            f"memory={memory}",
            f"pids={limits.pids + _WORKERS}",
            f"cpu={max(1000, round(limits.cpus * _CPU_PERIOD_US))} {_CPU_PERIOD_US}",
            f"user={self.user}",
            *(f"own={one}" for one in self.own),
            f"clock={time.time():.9f}",  # last: it is right when it is read
        ]
        if any("\n" in line for line in lines):
            raise UsageError("a user or directory with a line break in its name cannot be had in a virtual machine")
        return "\n".join(lines) + "\n\n"


class VmSandbox:
    def __init__(
        self,
        started: Started,
        birth: Birth,
        facts: Facts,
        unenforced: tuple[Unenforced, ...],
        ready_s: float,
        forget: Callable[[str], None],
    ) -> None:
        self.id = birth.sandbox_id
        self.pid = started.qemu.process.pid
        self.unenforced = unenforced
        self._qemu = started.qemu
        self._was_up = started.was_up
        self._birth = birth
        self._facts = facts
        self._ready_s = ready_s
        self._remedy = started.remedy
        self._forget = forget
        self._stream: VmStream | None = None
        self._is_gone = False
        self._telling: asyncio.Task[None] | None = None

    def facts(self) -> Facts:
        return self._facts

    async def wait_ready(self) -> None:
        """Wait until the cell inside is up, tell it who it is, and wait until it is that."""
        try:
            async with asyncio.timeout(self._ready_s):
                if not self._was_up:
                    await wait_up(self._qemu, self.id, self._remedy)
                await self._qemu.tell(self._birth.words())
                said = await self._qemu.wait_line()
        except TimeoutError:
            said = await self._qemu.console()
            raise ReadinessTimeout(
                self.id, with_console(f"the machine was not up within {self._ready_s:g} s; allow more with ready_s=…", said)
            ) from None
        if said is None:
            raise await not_up(self._qemu, self.id, self._remedy)
        if said.startswith("no such user"):
            raise UsageError(f"user {self._birth.user!r}: there is no such user in the sandbox")
        if said != "born":
            raise CreateError(self.id, f"the cell did not start in it: {said}")

    async def open_channel(self) -> VmStream:
        if self._is_gone or self._stream is not None:
            raise SandboxLost(self.id, "its channel has been taken already, or it is gone")
        self._qemu.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self._stream = VmStream(self._qemu.channel, self.id)
        if self._qemu.how is not None:
            self.died()
        return self._stream

    def died(self) -> None:
        """Called from the event loop when the machine has stopped by itself."""
        if not self._is_gone and self._stream is not None and self._telling is None:
            self._telling = asyncio.ensure_future(self._tell_end(self._stream))

    async def _tell_end(self, stream: VmStream) -> None:
        said = await self._qemu.console()
        stream.fail(with_console(str(self._qemu.how), said))

    async def loss_reason(self) -> str | None:
        return self._stream.reason if self._stream is not None else self._qemu.how

    # ---- while it lives ----

    async def pause(self) -> None:
        await self._qemu.monitor.ask("stop")

    async def resume(self) -> None:
        await self._qemu.monitor.ask("cont")
        await self._qemu.tell(f"clock={time.time():.9f}\n")
        try:
            async with asyncio.timeout(_CLOCK_S):
                await self._qemu.wait_line()
        except TimeoutError:  # root inside may have ended whoever sets it
            log.warning("%s: the clock inside was not set after a pause, and is behind by all of it", self.id)

    # ---- its end ----

    async def destroy(self) -> None:
        if self._is_gone:
            return
        if self._telling is not None:
            self._telling.cancel()
        if self._stream is not None:
            self._stream.close()
        else:
            self._qemu.channel.close()
        await self._qemu.end()
        self._is_gone = True
        self._forget(self.id)
