"""Whether a client looks at what nodes say of themselves: who leases by that is told as it happens, who does not *rests* and is told less.

Every node tells every client, and most of these place nothing at the moment: they hold what they leased, wait for a trainer, or lease from their hand.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

REST_S = 1.0
"""From the last look on, until it rests. To rest and to wake are a message each to every node, and a node at full load pushes five a second to who does not rest."""


class Attention:
    """`tell` is called when it begins or ceases to rest; while `is_needed` says so, it does not begin. At rest at first. Belongs to one event loop."""

    def __init__(self, tell: Callable[[], object], is_needed: Callable[[], bool]) -> None:
        self.is_resting = True
        self._tell = tell
        self._is_needed = is_needed
        self._looked_s = -math.inf
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """It looks, now and perhaps soon again."""
        loop = asyncio.get_running_loop()
        self._looked_s = loop.time()
        if self.is_resting:
            self.is_resting = False
            self._timer = loop.call_later(REST_S, self._look)
            loop.call_soon(self._tell)  # behind the request for a lease, which nothing is to hold up

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        left_s = REST_S if self._is_needed() else self._looked_s + REST_S - loop.time()
        if left_s > 0:
            self._timer = loop.call_later(left_s, self._look)
        else:
            self.is_resting = True
            self._tell()
