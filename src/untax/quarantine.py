"""Sandboxes that could not be proven gone: never leased again, tried again, counted, and visible while they last."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from untax.core.substrate import Bare

log = logging.getLogger("untax.engine")

# Destroying takes milliseconds; a sandbox that takes longer than this is not waited for, and tried again.
DESTROY_PATIENCE_S = 30.0
# A process in uninterruptible sleep may stay there for seconds or for good: try soon, then ever more seldom.
_FIRST_RETRY_S = 1.0
_LAST_RETRY_S = 60.0


async def try_destroy(sandbox: Bare) -> str | None:
    """Destroy it; what stood in the way, or None when it is gone."""
    try:
        async with asyncio.timeout(DESTROY_PATIENCE_S):
            await sandbox.destroy()
    except Exception as exc:  # told: whoever asks; a holder that has its result must not lose it to the cleaning up
        return f"{type(exc).__name__}: {exc}"
    return None


class Quarantine:
    """`on_gone` of each is called once its sandbox is proven gone, however late."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Bare, Callable[[], object]]] = {}
        self._retrying: asyncio.Task[None] | None = None
        self.total = 0
        """How many there ever were."""

    @property
    def ids(self) -> tuple[str, ...]:
        return tuple(self._kept)

    def add(self, sandbox: Bare, why: str, on_gone: Callable[[], object]) -> None:
        log.warning("sandbox %s may have left something behind: %s; it is in quarantine and tried again", sandbox.id, why)
        self._kept[sandbox.id] = (sandbox, on_gone)
        self.total += 1
        if self._retrying is None or self._retrying.done():
            self._retrying = asyncio.ensure_future(self._retry())

    def when_gone(self, sandbox_id: str, also: Callable[[], object]) -> None:
        """Call `also` too, once the sandbox is proven gone."""
        sandbox, on_gone = self._kept[sandbox_id]

        def both() -> None:
            on_gone()
            also()

        self._kept[sandbox_id] = (sandbox, both)

    async def aclose(self) -> None:
        """Try each a last time; the next start of the substrate sweeps what is left."""
        if self._retrying is not None:
            self._retrying.cancel()
            await asyncio.wait([self._retrying])
        await self._try_all()
        for sandbox_id in self._kept:
            log.warning("sandbox %s is still in quarantine; the next start tries again", sandbox_id)

    async def _retry(self) -> None:
        delay_s = _FIRST_RETRY_S
        while self._kept:
            await asyncio.sleep(delay_s)
            await self._try_all()
            delay_s = min(2 * delay_s, _LAST_RETRY_S)

    async def _try_all(self) -> None:
        await asyncio.gather(*(self._try(sandbox, on_gone) for sandbox, on_gone in list(self._kept.values())))

    async def _try(self, sandbox: Bare, on_gone: Callable[[], object]) -> None:
        if await try_destroy(sandbox) is None and self._kept.pop(sandbox.id, None) is not None:
            log.info("sandbox %s has left quarantine: it is gone", sandbox.id)
            on_gone()
