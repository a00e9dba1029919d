"""An event loop in a thread of its own, and the streams that it carries for others.

An interrupt (KeyboardInterrupt) may come between any two steps of a caller's thread, also within a lock's or a condition's own Python code, which then stays locked:
what the loop's thread shares with its callers is C's alone, the loop's own queue of calls and `SimpleQueue`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import os
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

from untax.channel.blocking_link import BlockingLink
from untax.channel.link import Link
from untax.core.errors import PoolClosed, UntaxError, UsageError

T = TypeVar("T")

# How long who was interrupted waits for the end of what it had asked for, which ends by itself if that takes longer.
_CANCEL_S = 10.0


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
            if threading.get_ident() == self._thread.ident:
                raise UsageError("untax.sync was called from its own loop's thread, which would wait for itself")
        except BaseException:
            work.close()
            raise
        order = _Order(work)
        try:
            self._loop.call_soon_threadsafe(order.begin)
            order.ended.get()
        except BaseException:
            if self._loop.is_closed():
                if not order.has_begun:
                    work.close()
            elif not order.is_over:
                # Behind `begin`, which is there or will never be: the interrupt may have come before the loop was told, or before it was woken.
                self.call_soon(order.cancel)
                with contextlib.suppress(queue.Empty):
                    order.ended.get(timeout=_CANCEL_S)
            raise
        return order.result()

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


class _Order(Generic[T]):
    """Work of the loop that another thread waits for. All but `result` is done in the loop's thread, where no interrupt comes."""

    def __init__(self, work: Coroutine[Any, Any, T]) -> None:
        self.has_begun = self.is_over = False
        self.ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        """Has one item, for one who waits, when it is over."""
        self._work = work
        self._task: asyncio.Task[T] | None = None
        self._value: T
        self._error: BaseException | None = None

    def begin(self) -> None:
        self.has_begun = True
        self._task = asyncio.get_running_loop().create_task(self._work)
        self._task.add_done_callback(self._end)

    def cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()
        elif not self.is_over:
            self._work.close()
            self._tell(concurrent.futures.CancelledError())

    def _end(self, task: asyncio.Task[T]) -> None:
        self._task = None  # here, or its end may come in the waiting thread, in whose finalizers an interrupt would be dropped
        if task.cancelled():
            self._tell(concurrent.futures.CancelledError())
        elif (error := task.exception()) is not None:
            self._tell(error)
        else:
            self._value = task.result()
            self._tell(None)

    def _tell(self, error: BaseException | None) -> None:
        self._error = error
        self.is_over = True
        self.ended.put(None)

    def result(self) -> T:
        if self._error is None:
            return self._value
        try:
            raise self._error
        finally:
            self._error = None  # whose traceback has this frame: a cycle


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
