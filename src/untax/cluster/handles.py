"""What all handles of one event loop share: one fleet for each that they are of, which begins with the first lease and ends with the loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Hashable
from typing import TYPE_CHECKING

from untax.cluster import access

if TYPE_CHECKING:
    from untax.cluster.fleet import Fleet


class _Shared:
    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.starting = asyncio.ensure_future(self._start())
        self._lasting: AsyncGenerator[None, None] | None = None

    async def _start(self) -> None:
        await self.fleet.start()
        self._lasting = _lasting(self.fleet)
        await anext(self._lasting)

    @property
    def is_over(self) -> bool:
        return self.starting.done() and self.fleet._state == "closed"

    def abandon(self) -> None:
        """Its loop is closed, and nobody ended it: the sockets go with the objects."""
        if self.fleet._has_ray:
            self.fleet._has_ray = False
            access.disconnect()


async def _lasting(fleet: Fleet) -> AsyncGenerator[None, None]:
    """`asyncio.run` closes generators that are not at their end, and tells of the loop's end in no other way while there is time to say good-bye."""
    try:
        yield
    finally:
        _drop(asyncio.get_running_loop(), fleet)
        await fleet.aclose()


_handles: dict[asyncio.AbstractEventLoop, dict[Hashable, _Shared]] = {}


async def shared(key: Hashable, make: Callable[[], Fleet]) -> Fleet:
    """The fleet of this loop under `key`, started. One whose start failed is over, and so is that of a loop that is closed."""
    handles = _of(asyncio.get_running_loop())
    found = handles.get(key)
    if found is None or found.is_over:
        found = handles[key] = _Shared(make())
    try:
        await asyncio.shield(found.starting)
    except Exception:
        if handles.get(key) is found:
            del handles[key]  # the next who asks begins anew
        raise
    return found.fleet


def there(key: Hashable) -> Fleet | None:
    """The fleet of this loop under `key`, where it has one that was started."""
    try:
        found = _handles.get(asyncio.get_running_loop(), {}).get(key)
    except RuntimeError:
        return None  # no loop runs in this thread
    return found.fleet if found is not None and found.fleet._state == "running" else None


def _drop(loop: asyncio.AbstractEventLoop, fleet: Fleet) -> None:
    handles = _handles.get(loop, {})
    for key in [key for key, one in handles.items() if one.fleet is fleet]:
        del handles[key]
    if not handles:
        _handles.pop(loop, None)


def _of(loop: asyncio.AbstractEventLoop) -> dict[Hashable, _Shared]:
    for other in [one for one in list(_handles) if one.is_closed()]:
        for one in (_handles.pop(other, None) or {}).values():
            one.abandon()
    return _handles.setdefault(loop, {})
