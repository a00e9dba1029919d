"""Where missing stages are built: set-up commands in a sandbox of their own, and what they wrote, frozen."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from untax.core.errors import StageFailed
from untax.core.root import Root
from untax.core.spec import EnvSpec, FrozenEnv, Network
from untax.core.stage import WORKDIR
from untax.ground import Ground
from untax.leases import Request
from untax.standby import SETUP_TIMEOUT_S

if TYPE_CHECKING:
    from untax.box import Box
    from untax.engine import Engine
    from untax.layers.build import Built

# What is kept of what the commands printed: of each its first and last bytes, of all of them the end.
_LOG_OF_A_STEP = 64 << 10
_LOG_TAIL = 64 << 10
_BUILD_TTL_S = 24 * 3600.0


class Workshop:
    """Builds in boxes of its engine. As root inside where the engine is root, and under a network policy of its own."""

    def __init__(self, engine: Engine, network: Network, wheels: Path | None) -> None:
        self._engine = engine
        self._network = network
        self._wheels = wheels

    @contextlib.asynccontextmanager
    async def build(self, root: Root, spec: EnvSpec, cache: Path) -> AsyncIterator[Built]:
        """What the set-up commands of `spec` write over `root`, frozen for as long as the block lasts.

        A command that fails is a `StageFailed` with the log; a sandbox that fails stays a `SubstrateError`.
        """
        from untax.layers import deps
        from untax.layers.build import Built

        box = await self._engine.fulfil(self._request(root, spec, cache))
        try:
            if self._wheels is not None:
                await box.upload(self._wheels, deps.WHEELS, timeout_s=SETUP_TIMEOUT_S)
            log = await self._run(box, spec)
            frozen = await box.freeze()
            try:
                yield Built(frozen.tree, log)
            finally:
                await frozen.discard()
        finally:
            await box.release()

    def _request(self, root: Root, spec: EnvSpec, cache: Path) -> Request:
        from untax.layers import deps

        bare = replace(
            spec,
            repo=None,
            setup=(),
            # A repository is where the spec says and not where its image would begin.
            workdir=spec.workdir or (WORKDIR if spec.repo is not None else None),
            env=FrozenEnv({**deps.ENV, **(deps.wheels_env(self._network) if self._wheels is not None else {}), **spec.env}),
            user="root" if self._engine.warehouse.has_users else None,
            network=self._network,
        )
        ground = Ground(root, (), len(root.layers), ())
        return Request(bare, {}, None, _BUILD_TTL_S, ground=ground, cache=cache)

    async def _run(self, box: Box, spec: EnvSpec) -> bytes:
        """The end of what the commands printed."""
        log = bytearray()
        for step in spec.setup:
            result = await box.shell(step, timeout_s=SETUP_TIMEOUT_S, merge=True, cap=_LOG_OF_A_STEP)
            log += b"$ " + step.encode(errors="replace") + b"\n" + result.stdout
            del log[:-_LOG_TAIL]
            if result.outcome != "exited" or result.exit_code != 0:
                raise StageFailed("deps", f"set-up command {step!r}: {result.summary()}", bytes(log))
        return bytes(log)
