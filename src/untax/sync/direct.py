"""How the socket gets into the callers' threads."""

from __future__ import annotations

import asyncio
import concurrent.futures
from builtins import list as list_
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from untax.auto import AutoEngine
from untax.box import TIMEOUT_S
from untax.channel.arguments import Name
from untax.channel.blocking import BlockingChannel
from untax.channel.call import Call
from untax.channel.client import Channel
from untax.channel.handover import Resumed
from untax.channel.replies import TreeSize
from untax.channel.stream import SocketStream
from untax.core.errors import SandboxLost
from untax.core.spec import EnvSpec, Network
from untax.core.stream import ByteStream
from untax.engine import Engine as AsyncEngine
from untax.remote.box import RemoteBox
from untax.remote.engine import RemoteEngine
from untax.sync.loop import Loop

T = TypeVar("T")

# Threads that wait for set-up steps of direct boxes; each waits on its own socket and costs nothing meanwhile.
_SET_UP_THREADS = 256


class Direct:
    """A `BlockingChannel` where a box of the loop expects a `Channel`: for configuring, set-up steps and the end."""

    def __init__(self, blocking: BlockingChannel, threads: concurrent.futures.Executor) -> None:
        self.blocking = blocking
        self._threads = threads

    @property
    def is_lost(self) -> bool:
        return self.blocking.is_lost

    @property
    def cell_version(self) -> str:
        return self.blocking.cell_version

    @property
    def is_idle(self) -> bool:
        return self.blocking.is_idle

    async def call(self, call: Call[T]) -> T:
        return await self._in_thread(lambda: self.blocking.call(call))

    async def batch(self, calls: Sequence[Call[Any]], *, stop: bool = False) -> list_[object]:
        return await self._in_thread(lambda: self.blocking.batch(calls, stop=stop))

    async def upload(self, local: Name, remote: Name, *, timeout_s: float | None = TIMEOUT_S) -> TreeSize:
        return await self._in_thread(lambda: self.blocking.upload(local, remote, timeout_s=timeout_s))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @property
    def lost_reason(self) -> str | None:
        return self.blocking.lost_reason

    def stop_listening(self) -> None:
        pass  # it is read from by whoever waits for an answer, in its own thread

    def close(self) -> None:
        self.blocking.close()


class Threaded:
    """What an engine has beside its own when a loop in another thread carries it."""

    thread: Loop | None = None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.threads = concurrent.futures.ThreadPoolExecutor(_SET_UP_THREADS, "untax-setup")

    def direct(
        self, stream: SocketStream, sandbox_id: str, on_lost: Callable[[SandboxLost], None], resumed: Resumed | None = None
    ) -> Channel:
        """The sandbox's socket in the callers' own threads."""

        def lost(exc: SandboxLost) -> None:  # in whatever thread was reading
            assert self.thread is not None
            self.thread.call_soon(on_lost, exc)

        direct = Direct(BlockingChannel(stream.detach(), sandbox_id=sandbox_id, on_lost=lost, resumed=resumed), self.threads)
        return cast("Channel", direct)  # has what the box itself uses; actions do not come this way


class DirectEngine(Threaded, AsyncEngine):
    def channel_over(self, stream: ByteStream, sandbox_id: str, network: Network, on_lost: Callable[[SandboxLost], None]) -> Channel:
        if network != "none" or not isinstance(stream, SocketStream):
            return super().channel_over(stream, sandbox_id, network, on_lost)
        return self.direct(stream, sandbox_id, on_lost)

    def fixed(self, spec: EnvSpec) -> tuple[object, ...]:
        # Egress is served by the loop: a socket that was given to the callers' threads cannot serve any.
        return (*super().fixed(spec), spec.network != "none")


class DirectAutoEngine(Threaded, AutoEngine):
    def make(self, name: str) -> AsyncEngine:
        engine = DirectEngine(name, **self._given, **self._options.get(name, {}))
        engine.thread, engine.threads = self.thread, self.threads
        return engine


class DirectRemoteBox(RemoteBox):
    def _channel_over(self, stream: ByteStream, resumed: Resumed) -> Channel:
        if self.spec.network != "none" or not isinstance(stream, SocketStream):
            return super()._channel_over(stream, resumed)
        channel: Channel
        channel = cast("Threaded", self._engine).direct(stream, self.id, lambda lost: self._lost(channel, lost), resumed)
        return channel


class DirectRemoteEngine(Threaded, RemoteEngine):
    box_class = DirectRemoteBox
