"""The stages that an engine has found or built: each looked for once, then kept at hand.

A lease of a spec whose stages are at hand costs a look into a dictionary. What a name of an image stands for is therefore
asked once per engine; `Engine.prepare` asks again.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from untax.core.spec import EnvSpec, Repo
from untax.core.stage import Stage
from untax.ground import Ground, Support

if TYPE_CHECKING:
    from untax.layers.build import Prepared, Stages
    from untax.layers.sources import Progress
    from untax.layers.store import LayerStore

# Stages that no lease uses are kept at hand, and pinned in the store, up to this many; further ones are looked for again.
_AT_HAND = 64

Recipe = tuple[str, Repo | None, tuple[str, ...], str | None]


class Grounds:
    def __init__(self, store: LayerStore, stages: Stages) -> None:
        self.store = store
        self._stages = stages
        self._at_hand: OrderedDict[Recipe, Ground] = OrderedDict()
        self._uses: Counter[Recipe] = Counter()  # of what is at hand, since it was found

    def at_hand(self, spec: EnvSpec) -> Ground | None:
        """Held for the caller; None when it has to be looked for."""
        key = recipe_of(spec)
        ground = self._at_hand.get(key)
        if ground is None:
            return None
        self._at_hand.move_to_end(key)
        self._uses[key] += 1
        return ground.hold()

    async def find(self, spec: EnvSpec, progress: Progress | None = None) -> tuple[Ground, Mapping[str, float]]:
        """Held for the caller, with the seconds that went into each stage that was missing."""
        prepared = await self._stages.root(spec, progress=progress)
        return self._keep(spec, prepared).hold(), prepared.built

    async def ladder(self, spec: EnvSpec) -> tuple[tuple[Stage, ...], frozenset[str]]:
        """The rungs of `spec`, and the keys of those that are here already."""
        return await self._stages.ladder(spec)

    async def prepare(self, spec: EnvSpec, progress: Progress | None = None) -> Prepared:
        """As the image is now. Leases of that image look for it again; the pin is the caller's."""
        prepared = await self._stages.root(spec, progress=progress, ask_again=True)
        for key in [key for key in self._at_hand if key[0] == spec.image]:
            self._put_back(key)
        return prepared

    def forget(self, spec: EnvSpec) -> None:
        """Look for it again next time: what was at hand did not serve."""
        if recipe_of(spec) in self._at_hand:
            self._put_back(recipe_of(spec))

    def let_go_unused(self) -> bool:
        """Of what is at hand and nobody stands on, so that the store may evict it; whether there was any."""
        unused = [key for key, ground in self._at_hand.items() if all(support.users == 1 for support in ground.supports)]
        for key in unused:
            self._put_back(key)
        return bool(unused)

    def close(self) -> None:
        for key in list(self._at_hand):
            self._put_back(key)

    def _put_back(self, key: Recipe) -> None:
        """Let go of it, and tell the store how much use it was: that decides what is evicted first."""
        ground = self._at_hand.pop(key)
        uses = self._uses.pop(key, 0)
        for stage in ground.stages if uses else ():
            self.store.used(stage.key, uses)
        ground.release()

    def _keep(self, spec: EnvSpec, prepared: Prepared) -> Ground:
        pin = prepared.pin
        ground = Ground(
            prepared.root,
            prepared.stages,
            len(prepared.root.layers),
            (Support(lambda: pin.close() if pin is not None else None),),
        )
        self.forget(spec)
        self._at_hand[recipe_of(spec)] = ground
        while len(self._at_hand) > _AT_HAND:
            self._put_back(next(iter(self._at_hand)))
        return ground


def recipe_of(spec: EnvSpec) -> Recipe:
    """Exactly what the stages of a spec depend on."""
    return spec.image, spec.repo, spec.setup, spec.workdir
