"""The stages that an engine has found or built: each looked for once, then kept at hand.

A lease of a spec whose stages are at hand costs a look into a dictionary. What a name of an image stands for is therefore
asked once per engine; `Engine.prepare` asks again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from untax.core.root import Root
from untax.core.spec import EnvSpec, Repo
from untax.core.stage import Stage
from untax.ground import Ground, Support

if TYPE_CHECKING:
    from untax.layers.build import Prepared, Stages
    from untax.layers.sources import Progress
    from untax.layers.store import LayerStore, Pin

# Stages that no lease uses are kept at hand, and in a store without a budget pinned there, up to this many; further ones are looked for again.
_AT_HAND = 64

Recipe = tuple[str, Repo | None, tuple[str, ...], str | None]


@dataclass(slots=True)
class _Found:
    """What a spec stands on, and the ground over it while somebody holds that."""

    root: Root
    stages: tuple[Stage, ...]
    layers: tuple[str, ...]
    """In the store; what is in place is none of them."""
    ground: Ground | None = None
    uses: int = 0
    """Which the store does not know of yet."""


class Grounds:
    """Where the store has a budget, what is at hand is pinned while it is used and no longer, so that what the store keeps is its own choice."""

    def __init__(self, store: LayerStore, stages: Stages) -> None:
        self.store = store
        self.changed: Callable[[], None] = _nothing
        """Called when something was used or is in use no more, where the store has a budget; must be cheap."""
        self._stages = stages
        self._at_hand: OrderedDict[Recipe, _Found] = OrderedDict()

    def at_hand(self, spec: EnvSpec) -> Ground | None:
        """Held for the caller; None when it has to be looked for."""
        key = recipe_of(spec)
        found = self._at_hand.get(key)
        if found is None:
            return None
        if found.ground is not None:
            ground = found.ground.hold()
        elif (pin := self.store.pin_at_once(found.layers)) is not None:
            ground = self._grounded(found, pin)
        else:
            return None  # evicted, or about to be
        self._at_hand.move_to_end(key)
        self._used(found)
        return ground

    async def find(self, spec: EnvSpec, progress: Progress | None = None) -> tuple[Ground, Mapping[str, float]]:
        """Held for the caller, with the seconds that went into each stage that was missing."""
        prepared = await self._stages.root(spec, progress=progress)
        return self._keep(spec, prepared), prepared.built

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
        if self._is_bounded:
            return False
        unused = [key for key, found in self._at_hand.items() if found.ground is not None and _users(found.ground) == 1]
        for key in unused:
            self._put_back(key)
        return bool(unused)

    def take_uses(self) -> list[tuple[str, int]]:
        """Stage keys, and how often each was used since this was last asked: for the store, which is then to be told."""
        counted = [(stage.key, found.uses) for found in self._at_hand.values() if found.uses for stage in found.stages]
        for found in self._at_hand.values():
            found.uses = 0
        return counted

    def untold_uses(self) -> dict[str, int]:
        """The same, and still to be told. From any thread; nothing when leases are quicker."""
        counted: dict[str, int] = {}
        try:
            for found in list(self._at_hand.values()):
                for stage in found.stages if found.uses else ():
                    counted[stage.key] = counted.get(stage.key, 0) + found.uses
        except RuntimeError:  # it changed meanwhile
            return {}
        return counted

    def close(self) -> None:
        for key in list(self._at_hand):
            self._put_back(key)

    @property
    def _is_bounded(self) -> bool:
        return self.store.budget_bytes is not None

    def _put_back(self, key: Recipe) -> None:
        """Let go of it, and tell the store how much use it was: that decides what is evicted first."""
        found = self._at_hand.pop(key)
        for stage in found.stages if found.uses else ():
            self.store.used(stage.key, found.uses)
        if found.ground is not None and not self._is_bounded:
            found.ground.release()

    def _keep(self, spec: EnvSpec, prepared: Prepared) -> Ground:
        """Held for the caller."""
        self.forget(spec)
        found = self._at_hand[recipe_of(spec)] = _Found(prepared.root, prepared.stages, prepared.pin.ids)
        ground = self._grounded(found, prepared.pin)
        if self._is_bounded:
            self.changed()
        else:
            ground.hold()  # for as long as it is at hand
        while len(self._at_hand) > _AT_HAND:
            self._put_back(next(iter(self._at_hand)))
        return ground

    def _grounded(self, found: _Found, pin: Pin) -> Ground:
        def let_go() -> None:
            pin.close()
            if found.ground is ground:
                found.ground = None
            if self._is_bounded:
                self.changed()

        ground = Ground(found.root, found.stages, len(found.root.layers), (Support(let_go),))
        found.ground = ground
        return ground

    def _used(self, found: _Found) -> None:
        found.uses += 1
        if self._is_bounded:
            self.changed()


def _users(ground: Ground) -> int:
    return max(support.users for support in ground.supports)


def _nothing() -> None:
    pass


def recipe_of(spec: EnvSpec) -> Recipe:
    """Exactly what the stages of a spec depend on."""
    return spec.image, spec.repo, spec.setup, spec.workdir
