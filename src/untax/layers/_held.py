"""Blocking work and blocking locks from a coroutine, so that cancelling it at any point loses nothing."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import fcntl
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


async def blocking(work: Callable[[], T], *, undo: Callable[[T], object] | None = None, stop: Callable[[], object] | None = None) -> T:
    """Run `work` in a thread and wait for its end even when cancelled, which `stop` may bring about sooner; what it gave then is nobody's, and is undone."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await ended(running)
        if undo is not None and not running.cancelled() and running.exception() is None:
            undo(running.result())
        raise


async def alone(work: Callable[[], T], stop: Callable[[], object] | None = None) -> T:
    """Run long `work` in a thread of its own. When cancelled, `stop` is called to end it sooner, and the thread has ended before this returns."""
    # Not one of the loop's own: a download or an image of minutes would keep one of those few from everybody else.
    executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="untax-alone")
    running = asyncio.get_running_loop().run_in_executor(executor, work)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if stop is not None:
            stop()
        await ended(running)
        raise
    finally:
        executor.shutdown(wait=False)


async def ended(task: asyncio.Future[T]) -> None:
    """Wait for a task's end, however often the caller is cancelled meanwhile, and take note of how it ended."""
    while not task.done():
        try:
            await asyncio.shield(asyncio.wait((task,)))
        except asyncio.CancelledError:
            continue  # told again; the answer is the same
    task.cancelled() or task.exception()  # seen, so that nobody is told of it later


@contextlib.asynccontextmanager
async def held(manager: AbstractContextManager[T]) -> AsyncIterator[T]:
    """Enter `manager` in a thread of its own, and leave it there when the block ends.

    The loop's shared threads would all be waiting one day, each for a lock whose holder needs one of them to go on. Who is
    cancelled while it waits leaves at once, and the thread lets go by itself when it gets what it waited for.
    """
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
def file_lock(path: Path, *, waits: bool = True) -> Iterator[int]:
    """An exclusive lock on a file that is made when it is missing; gives its descriptor. Whoever inherits that, holds the lock too.

    `BlockingIOError` when somebody has it, unless one `waits`.
    """
    while True:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            if not _is_still(fd, path):  # its holder removed it: the name is another file's by now, or nobody's
                continue
            yield fd
            return
        finally:
            os.close(fd)


def _is_still(fd: int, path: Path) -> bool:
    try:
        named = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)
