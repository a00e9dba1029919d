"""A sandbox of a provider, and the held stream to the cell in it: what is the same whoever the provider is."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import ClassVar, Protocol, TypeVar

from untax.core.errors import BackendError, SandboxLost, UntaxError
from untax.core.stream import Receiver
from untax.core.substrate import Unenforced
from untax.substrates._host import cell_path

T = TypeVar("T")

log = logging.getLogger("untax.hosted")

CELL = "/tmp/.untax-cell"  # inside; each sandbox is one lease's
PROXY_PORT = 3129  # a server of ours in the provider's place has a cell there already, at the usual one
_SEND_MAX = 256 << 10
_RENEWALS = 3  # of a sandbox's time within it, so that two may fail


def unenforced(names: Sequence[str], reason: str, remedy: str) -> tuple[Unenforced, ...]:
    return tuple(Unenforced(name, reason, remedy) for name in names)


class Asking(Protocol):
    """Who asks the provider on a sandbox's behalf: its substrate."""

    timeout_s: int

    async def asked(self, sandbox_id: str, call: Callable[[], Awaitable[T]]) -> T: ...


class HostedSandbox(ABC):
    """One sandbox. The provider ends it at its time, so that nothing outlives a dead engine for long; a living engine puts that off."""

    is_renewable: ClassVar[bool] = True

    def __init__(self, sandbox_id: str, asking: Asking, limits: Sequence[Unenforced]) -> None:
        self.id = sandbox_id
        self.unenforced = tuple(limits)
        self._asking = asking
        self._stream: HeldStream | None = None
        self._renewing: asyncio.Task[None] | None = None

    # ---- what each provider has of its own ----

    @abstractmethod
    async def open_channel(self) -> HeldStream: ...

    @abstractmethod
    async def _is_running(self) -> bool:
        """Whether the provider says that it runs. What the SDK raises comes through."""

    @abstractmethod
    async def _end(self) -> None:
        """One call of the SDK that ends it; what is gone already has ended."""

    async def _put_off(self) -> None:
        """One call of the SDK that puts its end off by its whole time; asked for where it `is_renewable`."""
        raise AssertionError

    # ---- as a sandbox ----

    def keep(self) -> None:
        """It has a holder: put its end off from now on, again and again."""
        if self.is_renewable:
            self._renewing = asyncio.ensure_future(self._renew())

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._asking.timeout_s / _RENEWALS)
            try:
                await self._asked(self._put_off)
            except UntaxError as exc:
                log.warning("the time of sandbox %s could not be put off: %s", self.id, exc)

    async def wait_ready(self) -> None:
        return  # the SDK answers when it runs

    async def destroy(self) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
        if self._stream is not None:
            self._stream.close()
        try:
            await self._asked(self._end)
        except SandboxLost:
            pass  # it is not there, which is what was wanted

    async def _asked(self, call: Callable[[], Awaitable[T]]) -> T:
        return await self._asking.asked(self.id, call)

    async def _fault(self, exc: Exception) -> UntaxError:
        """What a command's call that failed in the SDK is: the sandbox's end or the provider's failure, never a result."""
        try:
            is_running = await self._is_running()
        except Exception:  # the SDK has many; none of them says that it runs
            is_running = False
        return (BackendError if is_running else SandboxLost)(self.id, str(exc) or type(exc).__name__)


async def cell() -> bytes:
    """The program that is uploaded into each sandbox."""
    return await asyncio.to_thread(Path(cell_path()).read_bytes)


class HeldStream:
    """A `ByteStream` over a running command: pieces of its output as they come, its input in one call of the SDK after another."""

    def __init__(self, sandbox_id: str) -> None:
        self._id = sandbox_id
        self._receiver: Receiver | None = None
        self._early: deque[bytes] = deque()
        self._kept: deque[bytes] = deque()
        self._kept_size = 0
        self._is_paused = False
        self._is_closed = False
        self._reason: Exception | None = None
        self._has_more = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._tasks: list[asyncio.Task[None]] = []

    def attach(self, wait: Callable[[], Awaitable[object]], send: Callable[[bytes], Awaitable[object]]) -> None:
        """`wait` returns when the command has ended, however; `send` gives it input."""
        self._tasks = [asyncio.ensure_future(self._wait(wait)), asyncio.ensure_future(self._send(send))]

    def arrived(self, data: bytes) -> None:
        if not data or self._is_closed:
            return
        if self._receiver is None or self._is_paused:
            self._early.append(data)  # bounded by what the cell may send ahead of credit
        else:
            self._receiver.data_received(data)

    async def _wait(self, wait: Callable[[], Awaitable[object]]) -> None:
        reason: Exception | None = None
        try:
            await wait()
        except Exception as exc:  # of the SDK: whatever ended the command ended the stream
            reason = SandboxLost(self._id, f"its command ended: {exc}")
        self._lose(reason)

    async def _send(self, send: Callable[[bytes], Awaitable[object]]) -> None:
        while not self._is_closed:
            await self._has_more.wait()
            self._has_more.clear()
            while self._kept:
                pieces, size = [], 0
                while self._kept and size < _SEND_MAX:
                    pieces.append(self._kept.popleft())
                    size += len(pieces[-1])
                try:
                    await send(b"".join(pieces))
                except Exception as exc:  # of the SDK: input is lost, so the stream is
                    self._lose(SandboxLost(self._id, f"its input is closed: {exc}"))
                    return
                self._kept_size -= size
            self._is_sent.set()

    # ---- as a stream ----

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._is_closed:
            asyncio.get_running_loop().call_soon(receiver.connection_lost, self._reason)
            return
        self.resume_reading()

    def write(self, data: bytes) -> None:
        if not self._is_closed:
            self._kept.append(bytes(data))
            self._kept_size += len(data)
            self._is_sent.clear()
            self._has_more.set()

    @property
    def write_buffer_size(self) -> int:
        return self._kept_size

    async def drain(self) -> None:
        await self._is_sent.wait()

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        while self._early and self._receiver is not None and not (self._is_paused or self._is_closed):
            self._receiver.data_received(self._early.popleft())

    def close(self) -> None:
        self._lose(None)

    def _lose(self, exc: Exception | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._reason = exc
        self._kept.clear()
        self._is_sent.set()
        self._has_more.set()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        if self._receiver is not None:
            self._receiver.connection_lost(exc)
