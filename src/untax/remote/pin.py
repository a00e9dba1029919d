"""Layers that stay where they are on the server's side."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from untax.layers.store import Pin

if TYPE_CHECKING:
    from untax.remote.engine import RemoteEngine


class RemotePin(Pin):
    """Until `close`, or until the connection ends."""

    def __init__(self, engine: RemoteEngine, pin_id: str, ids: tuple[str, ...]) -> None:
        super().__init__(lambda _: None)
        for one in ids:
            self._add(str(one))
        self._engine = engine
        self._pin_id = pin_id
        self._loop = asyncio.get_running_loop()
        self._is_closed = False

    def close(self) -> None:
        """Safe to call twice, and from any thread; the server lets go a moment later."""
        super().close()
        if not self._is_closed:
            self._is_closed = True
            if not self._loop.is_closed():
                self._loop.call_soon_threadsafe(self._unpin)

    def _unpin(self) -> None:
        self._engine.chore(self._engine.ask("unpin", pin=self._pin_id)).add_done_callback(_heard)


def _heard(asking: asyncio.Task[dict[str, object]]) -> None:
    if not asking.cancelled():
        asking.exception()  # a server that is gone holds nothing
