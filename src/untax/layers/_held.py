"""Holding what may block to take, such as a lock between processes, from a coroutine.

A thread of its own takes it and gives it back: the loop's shared threads would all be waiting one day, each for something
that another one of them was to finish. Who is cancelled while it waits leaves at once, and the thread lets go by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@contextlib.asynccontextmanager
async def held(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter `manager` in a thread, and leave it there when the block ends."""
    loop = asyncio.get_running_loop()
    entered: asyncio.Future[T] = loop.create_future()
    left = loop.create_future()
    leave = threading.Event()

    def tell(future: asyncio.Future[T], value: T | None, error: BaseException | None) -> None:
        def settle() -> None:
            if not future.done():
                future.set_exception(error) if error is not None else future.set_result(value)  # type: ignore[arg-type]

        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits
            loop.call_soon_threadsafe(settle)

    def hold() -> None:
        try:
            with manager as value:
                tell(entered, value, None)
                leave.wait()
        except BaseException as exc:  # told: whoever waits to enter; afterwards there is nothing left to fail
            tell(entered, None, exc)
        finally:
            tell(left, None, None)

    threading.Thread(target=hold, name="untax-held", daemon=True).start()
    try:
        yield await entered
    finally:
        leave.set()
        if entered.done() and not entered.cancelled():
            await asyncio.shield(left)


@contextlib.contextmanager
def file_lock(path: Path) -> Iterator[int]:
    """An exclusive lock on a file that is made when it is missing; gives its descriptor. Whoever inherits that, holds the lock too."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield fd
    finally:
        os.close(fd)
