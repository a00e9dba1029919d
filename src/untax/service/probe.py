"""Whether the backend works: a sandbox is made, a command run in it, and it is given back. Asked at most so often, whoever asks."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from untax.core.errors import UntaxError

if TYPE_CHECKING:
    from untax.engine import Engine

FRESH_S = 5.0
"""How long an answer holds."""
PATIENCE_S = 5.0
"""How long the backend may take; a slow substrate that is asked less often still answers in time."""


class Probe:
    """Shared by everybody who asks at the same time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._found: str | None = None
        self._found_at = float("-inf")
        self._asking: asyncio.Task[str | None] | None = None

    async def trouble(self) -> str | None:
        """What is wrong; None when a command ran."""
        if asyncio.get_running_loop().time() - self._found_at < FRESH_S:
            return self._found
        if self._asking is None:
            self._asking = self._engine.chore(self._ask())
        return await asyncio.shield(self._asking)

    async def _ask(self) -> str | None:
        try:
            async with asyncio.timeout(PATIENCE_S), self._engine.lease(ttl_s=60) as box:
                result = await box.run(["true"], timeout_s=PATIENCE_S)
                self._found = None if result.outcome == "exited" else f"a command ended with {result.outcome}"
        except TimeoutError:
            self._found = f"no sandbox ran a command within {PATIENCE_S:g} s"
        except UntaxError as exc:
            self._found = f"{type(exc).__name__}: {exc}"
        finally:
            self._found_at = asyncio.get_running_loop().time()
            self._asking = None
        return self._found
