"""An event loop in a thread of its own, and the streams that it carries for others."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from untax.channel.blocking_link import BlockingLink
from untax.channel.link import Link
from untax.core.errors import PoolClosed, UntaxError, UsageError

T = TypeVar("T")


class Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="untax", daemon=True)
        self._thread.start()

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this process is a fork of the one that made the engine, whose thread it lacks: make a new engine here")

    def check(self) -> None:
        self.check_process()
        if self._loop.is_closed():
            raise PoolClosed("the engine is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry `work` out over there and wait for it. An interrupt cancels it first, and waits for that."""
        try:
            self.check()
        except UntaxError:
            work.close()
            raise
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("untax.sync was called from its own loop's thread, which would wait for itself")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=10)
            raise

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def catch_up(self) -> None:
        """Wait until all that was passed to `call_soon` before has been done; not at all where that is impossible."""

        async def nothing() -> None:
            pass

        with contextlib.suppress(UntaxError):
            self.run(nothing())

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class LoopLink(Generic[T]):
    """A link that lives in the loop, used from here."""

    def __init__(self, loop: Loop, link: Link[T]) -> None:
        self.flow = link.flow
        self._loop = loop
        self._link = link

    def receive(self) -> tuple[int, bytes] | None:
        return self._loop.run(self._link.receive())

    def send(self, data: bytes) -> None:
        self._loop.run(self._link.send(data))

    def send_eof(self) -> None:
        self._loop.call_soon(self._link.send_eof)

    def wait(self) -> T:
        return self._loop.run(self._link.wait())

    def kill(self) -> None:
        self._loop.call_soon(self._link.kill)

    def cancel(self) -> None:
        self._loop.call_soon(self._link.cancel)


AnyLink = BlockingLink[T] | LoopLink[T]
