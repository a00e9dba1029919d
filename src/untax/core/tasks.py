"""Waiting for a task that goes on whatever becomes of who waits."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

T = TypeVar("T")


class EndOf(Generic[T]):
    """`await EndOf(task)`: what came of it, once it is over. Cancelling who waits is put off until then, and never reaches the task.

    As `asyncio.shield` in a loop would do it, without a future and a turn of the event loop of its own: this is on the way of every lease's end. It is a future in
    the sense of `asyncio.isfuture`, which a task waits for by these methods alone; one whose `cancel` says no is asked again by the task once it is done.
    """

    __slots__ = ("_asyncio_future_blocking", "_task")

    def __init__(self, task: asyncio.Future[T]) -> None:
        self._asyncio_future_blocking = False
        self._task = task

    def __await__(self) -> Generator[EndOf[T], None, T]:
        if not self._task.done():
            self._asyncio_future_blocking = True
            yield self
        return self._task.result()

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._task.get_loop()

    def add_done_callback(self, tell: Callable[[asyncio.Future[T]], object], *, context: contextvars.Context | None = None) -> None:
        self._task.add_done_callback(tell, context=context)

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002
        return False
