"""What `lease`, `fork`, `restore` and `grader` return, blocking. Nothing that was taken is lost to an interrupt, which may come between any two steps of the caller's thread:
Ray cancels a task so, and the process goes on with the next one.
"""

from __future__ import annotations

from builtins import list as list_
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from untax.sync.box import Box, release_all
from untax.sync.loop import Loop

T = TypeVar("T")


class Lease(Generic[T]):
    """`with` gives it back at the end of the block, `get()` leaves that to you."""

    def __init__(
        self, running: Callable[[], Loop], take: Callable[[Loop], Coroutine[Any, Any, T]], boxes: Callable[[T], Iterable[Box]]
    ) -> None:
        """`take` is carried out by the loop that `running` gives; `boxes` are those in what it gave."""
        self._running = running
        self._take = take
        self._boxes = boxes
        self._taken: list_[T] = []

    def get(self) -> T:
        self.__enter__()
        return self._taken.pop()

    def __enter__(self) -> T:
        loop = self._running()
        came: list_[T] = []
        is_unwanted = False

        async def take() -> None:
            # Here and not by who waits: an interrupt may come after the end of this and before the word of it.
            came.append(await self._take(loop))
            if is_unwanted:
                give_back()

        def give_back() -> None:
            for one in came:
                for box in self._boxes(one):
                    box._inner._begin_release()

        try:
            loop.run(take())
            self._taken.append(came[0])
            return came[0]
        except BaseException:
            is_unwanted = True  # before it is looked whether it came: `take` looks at both in the other order
            loop.call_soon(give_back)
            raise

    def __exit__(self, *exc: object) -> None:
        release_all(self._boxes(self._taken.pop()))
