"""The stages that an engine has found or built: each looked for once, then kept at hand.

A lease of a spec whose stages are at hand costs a look into a dictionary. What a name of an image stands for is therefore
asked once per engine; `Engine.prepare` asks again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from untax.core.spec import EnvSpec, Repo
from untax.ground import Ground, Support

if TYPE_CHECKING:
    from untax.layers.build import Prepared, Stages
    from untax.layers.sources import Progress
    from untax.layers.store import LayerStore

# Stages that no lease uses are kept at hand, and pinned in the store, up to this many; further ones are looked for again.
_AT_HAND = 64

_Key = tuple[str, Repo | None, tuple[str, ...], str | None]


class Grounds:
    def __init__(self, store: LayerStore, stages: Stages) -> None:
        self.store = store
        self._stages = stages
        self._at_hand: OrderedDict[_Key, Ground] = OrderedDict()

    def at_hand(self, spec: EnvSpec) -> Ground | None:
        """Held for the caller; None when it has to be looked for."""
        key = _key(spec)
        ground = self._at_hand.get(key)
        if ground is None:
            return None
        self._at_hand.move_to_end(key)
        return ground.hold()

    async def find(self, spec: EnvSpec, progress: Progress | None = None) -> tuple[Ground, Mapping[str, float]]:
        """Held for the caller, with the seconds that went into each stage that was missing."""
        prepared = await self._stages.root(spec, progress=progress)
        return self._keep(spec, prepared).hold(), prepared.built

    async def prepare(self, spec: EnvSpec, progress: Progress | None = None) -> Prepared:
        """As the image is now. Leases of that image look for it again; the pin is the caller's."""
        prepared = await self._stages.root(spec, progress=progress, ask_again=True)
        for key in [key for key in self._at_hand if key[0] == spec.image]:
            self._at_hand.pop(key).release()
        return prepared

    def forget(self, spec: EnvSpec) -> None:
        """Look for it again next time: what was at hand did not serve."""
        ground = self._at_hand.pop(_key(spec), None)
        if ground is not None:
            ground.release()

    def close(self) -> None:
        while self._at_hand:
            self._at_hand.popitem()[1].release()

    def _keep(self, spec: EnvSpec, prepared: Prepared) -> Ground:
        pin = prepared.pin
        ground = Ground(
            prepared.root,
            prepared.stages,
            len(prepared.root.layers),
            (Support(lambda: pin.close() if pin is not None else None),),
        )
        self.forget(spec)
        self._at_hand[_key(spec)] = ground
        while len(self._at_hand) > _AT_HAND:
            self._at_hand.popitem(last=False)[1].release()
        return ground


def _key(spec: EnvSpec) -> _Key:
    """Exactly what the stages of a spec depend on."""
    return spec.image, spec.repo, spec.setup, spec.workdir
