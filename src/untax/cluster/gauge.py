"""What a node tells whoever keeps its fleet: how many hold and wait, and since when nobody did. Fed by the view that the node's clients are told."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Any

from untax.cluster.scaling import Load
from untax.remote.messages import Body

TELL_S = 1.0
"""Between two times that it is told: nodes are started in minutes."""
_CALM_S = 5.0  # the same for what changes nothing: while nobody waits for room, and it is not about who does nothing at all

_READ = ("leased", "waiting", "free_sandboxes", "free_mib", "most_mib")


class Gauge:
    """A watcher of `untax.server.view.Views`. Belongs to one event loop."""

    unsent = asked = 0  # it asks for no leases, and has heard everything

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._view: dict[str, Any] = {}
        self._changed = asyncio.Event()
        self._idle_since_s: float | None = clock()
        self._told_s = -TELL_S
        self.load = Load()

    def say(self, body: Body, fd: int | None = None) -> None:  # noqa: ARG002  what a session is told besides
        part = body.get("part")
        if not isinstance(part, dict):
            return
        self._view.update({name: part[name] for name in _READ if name in part})
        load = Load.of_view(self._view)
        if load == self.load:
            return
        self.load = load
        if not load.is_idle:
            self._idle_since_s = None
        elif self._idle_since_s is None:
            self._idle_since_s = self._clock()
        self._changed.set()

    @property
    def idle_s(self) -> float:
        """For how long nobody has held or waited for anything; 0 while somebody does."""
        return 0.0 if self._idle_since_s is None else self._clock() - self._idle_since_s

    async def wait_news(self, known: Load | None) -> Load:
        """What it is, once that is not what is known; not more often than every `TELL_S`, and less often what nobody acts on."""
        await asyncio.sleep(self._told_s + TELL_S - self._clock())
        while self.load == known or ((left_s := self._told_s + _CALM_S - self._clock()) > 0 and not _matters(known, self.load)):
            self._changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if self.load == known else left_s):
                    await self._changed.wait()
        self._told_s = self._clock()
        return self.load


def _matters(known: Load | None, load: Load) -> bool:
    if known is None or known.short or load.short:
        return True
    return known.is_idle != load.is_idle or (known.spare < 1) != (load.spare < 1)
