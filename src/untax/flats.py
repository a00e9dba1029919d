"""Long chains made shallow: the lower part of one is flattened once, for all snapshots that share it, and kept while one needs it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from untax.ground import Ground, Support

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.layers.store import LayerStore

# A mount of 60 layers costs half as much again as one of 3, of 200 three times as much, and the kernel takes 500 (KERNEL.md).
DEEPEST = 50
# The part that is flattened is a multiple of this long, so that the next snapshots of a long-lived box find it made.
STEP = 40


class Flats:
    def __init__(self, engine: Engine, store: LayerStore) -> None:
        self._engine = engine
        self._store = store
        self._made: dict[tuple[Path, ...], tuple[Path, Support]] = {}
        self._making: dict[tuple[Path, ...], asyncio.Task[tuple[Path, Support]]] = {}

    async def shallow(self, ground: Ground) -> Ground:
        """The same files over fewer layers, held for the caller."""
        count = max(len(ground.own) // STEP * STEP, 1)
        base = replace(ground.root, layers=ground.root.layers[: ground.stage_layers])
        tree, support = await self._hold(ground, ground.own[:count])
        above = ground.own[count:]
        # Of the layers above, the youngest have supports of their own, in the same order; what was restored is kept by the stages'.
        single = ground.supports[ground.stage_supports :]
        kept = (*ground.supports[: ground.stage_supports], *single[max(len(single) - len(above), 0) :])
        for one in kept:
            one.hold()
        root = base.with_layers(str(tree), *ground.root.layers[ground.stage_layers + count :])
        supports = (*kept[: ground.stage_supports], support, *kept[ground.stage_supports :])
        return replace(ground, root=root, supports=supports, own=(tree, *above))

    async def _hold(self, ground: Ground, part: tuple[Path, ...]) -> tuple[Path, Support]:
        while True:
            if (made := self._made.get(part)) is not None:
                made[1].hold()
                return made
            if (making := self._making.get(part)) is not None:
                await asyncio.shield(making)
                continue
            making = self._making[part] = self._engine.chore(self._make(ground.hold(), part))
            making.add_done_callback(lambda _: self._making.pop(part))
            try:
                return await asyncio.shield(making)
            except asyncio.CancelledError:
                making.add_done_callback(_let_go)
                raise

    async def _make(self, ground: Ground, part: tuple[Path, ...]) -> tuple[Path, Support]:
        from untax.layers.flatten import flatten

        try:
            base = replace(ground.root, layers=ground.root.layers[: ground.stage_layers])
            layer = await asyncio.to_thread(flatten, self._store, part, base)
        finally:
            ground.release()

        def give_back() -> None:
            del self._made[part]
            self._engine.chore(asyncio.to_thread(layer.remove))

        made = self._made[part] = (layer.tree, Support(give_back))
        return made


def _let_go(making: asyncio.Task[tuple[Path, Support]]) -> None:
    """Whoever asked first has left; those who asked after it hold theirs, or make it anew."""
    if not making.cancelled() and making.exception() is None:
        making.result()[1].release()
