"""Long chains made shallow: neighbouring layers are flattened into one, once for all snapshots that share them, and kept while one needs it.

Sixteen layers become one, sixteen of these one again, and so on: what lies at the bottom is copied with the logarithm of a
chain's length and not at every step of it.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from untax.ground import Ground, Own, Support

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.layers.store import LayerStore

# A mount of 60 layers costs half as much again as one of 3 (KERNEL.md), and the budget for it is just that.
DEEPEST = 30
STEP = 16

_Part = tuple[tuple[Path, ...], int]
"""A chain up to some layer, and from which layer on it is flattened."""


class Flats:
    def __init__(self, engine: Engine, store: LayerStore) -> None:
        self._engine = engine
        self._store = store
        self._made: dict[_Part, tuple[Path, Support]] = {}
        self._making: dict[_Part, asyncio.Task[tuple[Path, Support]]] = {}

    async def shallow(self, ground: Ground) -> Ground:
        """The same files over fewer layers, held for the caller."""
        ground.hold()
        while (start := neighbours(ground.own)) is not None:
            try:
                tree, support = await self._hold(ground, start)
                flat = Own(str(tree), tree, support, ground.own[start].level + 1)
                shallower = ground.with_own((*ground.own[:start], flat, *ground.own[start + STEP :])).hold()
                support.release()  # held once by `_hold`, and now with the rest
            finally:
                ground.release()
            ground = shallower
        return ground

    async def _hold(self, ground: Ground, start: int) -> tuple[Path, Support]:
        part = tuple(one.tree for one in ground.own[: start + STEP]), start
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

    async def _make(self, ground: Ground, part: _Part) -> tuple[Path, Support]:
        from untax.layers.flatten import flatten

        chain, start = part
        try:
            layer = await asyncio.to_thread(flatten, self._store, chain[start:], ground.readable(start))
        finally:
            ground.release()

        def give_back() -> None:
            del self._made[part]
            self._engine.chore(asyncio.to_thread(layer.remove))

        made = self._made[part] = (layer.tree, Support(give_back))
        return made


def neighbours(own: tuple[Own, ...]) -> int | None:
    """Where as many layers of one level lie on each other as are flattened into one; None when there are not so many."""
    run = 0
    for at, one in enumerate(own):
        run = run + 1 if at and one.level == own[at - 1].level else 1
        if run == STEP:
            return at + 1 - STEP
    return None


def _let_go(making: asyncio.Task[tuple[Path, Support]]) -> None:
    """Whoever asked first has left; those who asked after it hold theirs, or make it anew."""
    if not making.cancelled() and making.exception() is None:
        making.result()[1].release()
