"""Single flight: work that is done once however many ask for it at a time."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Generic, TypeVar

from untax.core.errors import StageUnavailable
from untax.layers._held import ended

T = TypeVar("T")


class _Flight(Generic[T]):
    def __init__(self, task: asyncio.Task[T]) -> None:
        self.task = task
        self.waiting = 0


class Flights(Generic[T]):
    """Work under way, by its key. A result lasts until the last of those who waited for it has left the block; then `drop` gets it."""

    def __init__(self, drop: Callable[[T], object]) -> None:
        self._drop = drop
        self._under_way: dict[str, _Flight[T]] = {}

    @contextlib.asynccontextmanager
    async def join(self, key: str, start: Callable[[], Coroutine[Any, Any, T]]) -> AsyncIterator[T]:
        """Wait for the work of this key, begun by `start` unless it is under way.

        All who wait are told of a failure, each by an exception of its own; nobody who comes later is. Leaving early leaves
        the work to the others; the last one to leave cancels it, and is held until it has cleaned up.
        """
        flight = self._under_way.get(key)
        if flight is None:
            flight = self._under_way[key] = _Flight(asyncio.ensure_future(start()))
            flight.task.add_done_callback(lambda _, flight=flight: self._forget(key, flight))  # type: ignore[misc]
        flight.waiting += 1
        try:
            yield await _share(flight.task)
        finally:
            flight.waiting -= 1
            if flight.waiting == 0:
                self._forget(key, flight)  # whoever comes now begins anew
                await self._finish(flight.task)

    async def _finish(self, task: asyncio.Task[T]) -> None:
        if not task.done():
            task.cancel()
            await ended(task)
        if not task.cancelled() and task.exception() is None:
            self._drop(task.result())

    def _forget(self, key: str, flight: _Flight[T]) -> None:
        if self._under_way.get(key) is flight:
            del self._under_way[key]


async def _share(task: asyncio.Task[T]) -> T:
    await asyncio.wait((task,))
    if task.cancelled():
        raise StageUnavailable("", "the work was given up; ask again")
    error = task.exception()
    if error is not None:
        # A traceback grows at each place that an exception passes, so each gets one of its own.
        try:
            raise copy.copy(error) from error
        except TypeError:
            raise error from None
    return task.result()
