"""Chains of layers for a substrate that takes them in as images of its own: found or built here, exported once, and kept at hand.

Missing stages are built in sandboxes of another substrate, which the importing one names: the layers are then the very ones that every
other substrate of this state directory stands on.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from untax.core.root import Root
from untax.core.span import Stopwatch
from untax.core.spec import EnvSpec, Network
from untax.core.stage import Identity, Stage, stages_of
from untax.core.substrate import Evicting, Importing
from untax.ground import Ground
from untax.grounds import Grounds

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.layers.build import Built, Prepared, Stages
    from untax.layers.sources import InPlace, Progress, Source
    from untax.layers.store import LayerStore


_TOLD_EVERY_S = 0.1


class Imports(Grounds):
    """What it gives stands in the substrate's own store; ours holds the chain only while it is taken in."""

    def __init__(self, engine: Engine, substrate: Importing, store: LayerStore, stages: Stages) -> None:
        super().__init__(store, stages)
        self._clock = engine.clock
        self._substrate = substrate
        self._taken: dict[EnvSpec, Ground] = {}

    def at_hand(self, spec: EnvSpec) -> Ground | None:
        ground = self._taken.get(_recipe(spec))
        if ground is not None and isinstance(self._substrate, Evicting) and not self._substrate.has_taken(ground.root):
            del self._taken[_recipe(spec)]
            return None
        return ground

    async def find(self, spec: EnvSpec, progress: Progress | None = None) -> tuple[Ground, Mapping[str, float]]:
        ground = await self._own(spec)
        built: Mapping[str, float] = {}
        if ground is None:
            below, built = await super().find(spec, progress)
            try:
                ground, seconds = await self._take_in(below, progress)
            finally:
                below.release()
            built = {**built, "import": seconds}
        self._taken[_recipe(spec)] = ground
        return ground, built

    async def ladder(self, spec: EnvSpec) -> tuple[tuple[Stage, ...], frozenset[str]]:
        """An image of the substrate's own has the rungs of one that is in place; it is asked for nowhere else."""
        if await self._own(spec) is None:
            return await super().ladder(spec)
        stages = stages_of(spec, Identity(spec.image, is_portable=False))
        return stages, frozenset(stage.key for stage in stages)

    async def prepare(self, spec: EnvSpec, progress: Progress | None = None) -> Prepared:
        prepared = await super().prepare(spec, progress)
        try:
            _, seconds = await self._take_in(Ground(prepared.root, prepared.stages, len(prepared.root.layers), ()), progress)
        except BaseException:
            prepared.pin.close()
            raise
        self._taken = {recipe: ground for recipe, ground in self._taken.items() if recipe.image != spec.image}
        return replace(prepared, built={**prepared.built, "import": seconds})

    def forget(self, spec: EnvSpec) -> None:
        self._taken.pop(_recipe(spec), None)
        super().forget(spec)

    async def discard(self, spec: EnvSpec) -> None:
        """Have the substrate give up what it took in for `spec`."""
        ground = self._taken.pop(_recipe(spec), None)
        if ground is not None:
            await self._substrate.discard(ground.root)

    def close(self) -> None:
        self._taken.clear()
        super().close()

    async def _own(self, spec: EnvSpec) -> Ground | None:
        """An image of the substrate's own, as it is. With stages above it, it is fetched and exported like any other."""
        from untax.layers import sources

        if spec.repo is not None or spec.setup:
            return None
        sources.find(spec.image)  # says what is wrong with the name
        root = await self._substrate.own_root(spec.image)
        return None if root is None else Ground(root, (), 1, ())

    async def _take_in(self, below: Ground, progress: Progress | None) -> tuple[Ground, float]:
        watch = Stopwatch(self._clock)
        told = None if progress is None else Told(progress)
        root = await self._substrate.take_in(below.stages[-1].key, below.root, partial(self._export, told))
        start_ns, end_ns = watch.part()
        return Ground(root, below.stages, 1, ()), (end_ns - start_ns) / 1e9

    def _export(
        self,
        told: Told | None,
        root: Root,
        target: Path,
        name: str,
        labels: Mapping[str, str],
        /,
        to: Literal["oci", "squashfs", "tar"] | None = None,
    ) -> None:
        from untax.layers.export import Options, export

        options = Options(name=name, labels=labels, packing="lz4")
        export(self.store, root, target, to or self._substrate.takes, options, progress=told, has_total=False)


class Told:
    """Progress of what goes on in a thread, told in the loop's: now and then, for a tree has more pieces than anybody reads."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._loop = asyncio.get_running_loop()
        self._said_at = 0.0

    def __call__(self, what: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if now - self._said_at >= _TOLD_EVERY_S:
            self._said_at = now
            self._loop.call_soon_threadsafe(self._progress, what, done, total)


def source_finder(substrate: Importing, cache: Path) -> Callable[[str], Source | InPlace]:
    """Where images come from; those of the substrate's own engine from where it is spoken to, and not from the usual place."""
    from untax.layers import sources
    from untax.layers.sources.engine import EngineImage

    def find(image: str) -> Source | InPlace:
        source = sources.find(image, cache=cache)
        scheme, _, name = image.partition(":")
        socket = substrate.image_sockets.get(scheme)
        return source if socket is None else EngineImage(scheme, name, socket_path=socket)

    return find


def _recipe(spec: EnvSpec) -> EnvSpec:
    """Exactly what the stages of a spec depend on."""
    return EnvSpec(image=spec.image, repo=spec.repo, setup=spec.setup, workdir=spec.workdir)


class BorrowedWorkshop:
    """Builds in boxes of an engine of another substrate, which is started when the first stage is missing."""

    def __init__(self, substrate: str, state_dir: Path, network: Network, wheels: Path | None) -> None:
        self._substrate = substrate
        self._state_dir = state_dir
        self._network = network
        self._wheels = wheels
        self._engine: Engine | None = None

    @contextlib.asynccontextmanager
    async def build(self, root: Root, spec: EnvSpec, cache: Path) -> AsyncIterator[Built]:
        from untax.workshop import Workshop

        engine = await self._started()
        bare = replace(spec, isolation=engine.substrate.isolation)
        async with Workshop(engine, self._network, self._wheels).build(root, bare, cache) as built:
            yield built

    async def aclose(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()

    async def _started(self) -> Engine:
        from untax.engine import Engine

        if self._engine is None:
            engine = self._engine = Engine(self._substrate, state_dir=self._state_dir)
            try:
                await engine.start()
            except BaseException:
                self._engine = None
                raise
        return self._engine
