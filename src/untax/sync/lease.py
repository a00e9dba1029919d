"""What `lease`, `fork`, `restore` and `grader` return, blocking. Nothing that was taken is lost to an interrupt (KeyboardInterrupt), which may come between any two steps of the
caller's thread: Ray cancels a task so, and the process goes on with the next one.
"""

from __future__ import annotations

import os
import weakref
from builtins import list as list_
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, Generic, TypeVar

from untax.sync.box import Box, release_all
from untax.sync.loop import Loop

T = TypeVar("T")


class Lease(Generic[T]):
    """`with` gives it back at the end of the block, `get()` leaves that to you.

    After an interrupt everything is given back before it is raised, or soon after. Where it came in the first step of the block's end, which no code can guard, that is once nothing
    refers to the lease any more, the exception's traceback included: who enters one by hand keeps it for as long as the boxes.
    """

    def __init__(
        self, running: Callable[[], Loop], take: Callable[[Loop], Coroutine[Any, Any, T]], boxes: Callable[[T], Iterable[Box]]
    ) -> None:
        """`take` is carried out by the loop that `running` gives; `boxes` are those in what it gave."""
        self._running = running
        self._take = take
        self._boxes = boxes
        self._taken: list_[_Taken[T]] = []

    def get(self) -> T:
        return self._took(lambda taken: taken.hand_over())

    def __enter__(self) -> T:
        return self._took(self._taken.append)

    def _took(self, then: Callable[[_Taken[T]], object]) -> T:
        taken = _Taken(self, self._running())
        try:
            taken.loop.run(taken.take())
            then(taken)
            return taken.value  # on the way out from here nothing is called, and so no interrupt comes
        except BaseException:
            taken.give_back()
            raise

    def __exit__(self, *exc: object) -> None:
        taken = self._taken[-1]
        del self._taken[-1]  # not `pop()`: an interrupt comes when a call returns, and would drop what it gave
        try:
            taken.release()
        except BaseException:
            taken.give_back()  # the interrupt may have come before the loop was told, or woken for it
            raise


class _Taken(Generic[T]):
    """What a lease came to, and who gives it back."""

    value: T

    def __init__(self, lease: Lease[T], loop: Loop) -> None:
        self.loop = loop
        self._pid = os.getpid()
        self._take = lease._take
        self._boxes = lease._boxes
        self._has_come = False
        self._is_unwanted = False
        # Only the net below what no code can guard: an interrupt at the entry of `__exit__`, and a second one where the first is seen to. Whoever gets as far as to give it back takes
        # the net away, in the loop's thread: in a caller's it would run at the end of every lease, and Python drops the interrupts that come in finalizers.
        self._net = weakref.finalize(lease, self._forgotten)
        self._net.atexit = False

    async def take(self) -> None:
        # Here and not by who waits: an interrupt may come after the end of this and before the word of it.
        self.value = await self._take(self.loop)
        self._has_come = True
        if self._is_unwanted:
            self._give_back()

    def hand_over(self) -> None:
        """Whoever asked for it gives it back from here on."""
        self._net.detach()

    def release(self) -> None:
        """Give it back and wait for that."""
        release_all(self._boxes(self.value), self._net.detach)

    def give_back(self) -> None:
        """Begin with it, now or once it comes. Safe to call at any time, and twice."""
        self._is_unwanted = True  # before it is looked whether it came: `take` looks at both in the other order
        self.loop.call_soon(self._give_back)

    def _give_back(self) -> None:
        self._net.detach()
        if self._has_come:
            for box in self._boxes(self.value):
                box._inner._begin_release()

    def _forgotten(self) -> None:
        is_asked_for = hasattr(self, "_net")  # no, if the interrupt came before it had that name
        if is_asked_for and os.getpid() == self._pid:  # a fork's copy holds nothing
            self.give_back()
