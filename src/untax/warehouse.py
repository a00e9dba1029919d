"""What an engine has in store: layers on disk, stages at hand, snapshots, and the shop in which missing stages are built."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from untax.channel.egress import Policy
from untax.core.errors import StageUnavailable, UsageError
from untax.core.root import ImageConfig
from untax.core.spec import EnvSpec, Network, Repo, freeze_network
from untax.core.stage import WORKDIR, Identity, Stage, stages_of
from untax.core.substrate import Importing, Reviving
from untax.ground import Ground
from untax.grounds import Grounds
from untax.imports import BorrowedWorkshop, Imports, source_finder
from untax.leases import Request
from untax.shelf import Shelf
from untax.substrates._host import chosen_state_dir, ensure_private_dir, is_host_root
from untax.workshop import Workshop

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.layers.build import Prepared, RepoTree, Stages, StageSource
    from untax.layers.marks import Marks
    from untax.layers.sources import Progress
    from untax.layers.store import LayerStore

_log = logging.getLogger("untax.layers")
_MIB = 1 << 20
_ONE_USER = "user"
HOST_CACHE = "host"  # below the store, where `Stages` has the skeleton of the image of that name made


class Warehouse:
    def __init__(
        self,
        engine: Engine,
        state_dir: str | os.PathLike[str] | None,
        *,
        budget_mib: int | None,
        setup_network: Network,
        setup_wheels: str | os.PathLike[str] | None,
    ) -> None:
        if budget_mib is not None and (isinstance(budget_mib, bool) or not isinstance(budget_mib, int) or budget_mib < 1):
            raise UsageError(f"store_budget_mib must be a whole number of MiB, or None, not {budget_mib!r}")
        self._engine = engine
        self.state_dir = chosen_state_dir(None if state_dir is None else os.fsdecode(state_dir))
        self._path = self.state_dir / "layers"
        self._budget_bytes = None if budget_mib is None else budget_mib * _MIB
        self._setup_network = freeze_network(setup_network)
        Policy(self._setup_network)
        self._setup_wheels = None if setup_wheels is None else Path(os.fsdecode(setup_wheels)).absolute()
        if self._setup_wheels is not None and not self._setup_wheels.is_dir():
            raise UsageError(
                f"setup_wheels: {self._setup_wheels} is not a directory; fill one with `pip download -d DIR …` or `pip wheel -w DIR …`"
            )
        self._grounds: Grounds | None = None
        self._shelf: Shelf | None = None
        self._stages: Stages | None = None
        self._plain: Stages | None = None
        self._borrowed: BorrowedWorkshop | None = None
        self._trees: dict[Repo, RepoTree] = {}
        self._opened: LayerStore | None = None
        self.changed: Callable[[], None] | None = None
        """Called when something in a store with a budget was used, or is in use no more: it is to be settled some time later."""
        self.filled = 0.0
        """The share of the store's budget that is taken, as `settle` saw it last; what is in use counts too, so that it may be above 1."""
        self.has_users = False
        """Whether commands may be of several users inside, root among them: where the engine is not root there is but one id."""

    async def start(self) -> None:
        if self._engine.layered is not None:
            marks = self._engine.layered.marks
            self.has_users = marks == "trusted"
            await self._open(marks)
        elif self._engine.importing is not None:
            self.has_users = True
            await self._open_for(self._engine.importing)

    def let_go(self) -> None:
        """Of every snapshot that is not saved and every stage; what that removes is the engine's chore."""
        if self._shelf is not None:
            self._shelf.close()
        if self._grounds is not None:
            self._grounds.close()

    async def aclose(self) -> None:
        from untax.layers.sources import host

        if self._borrowed is not None:
            await self._borrowed.aclose()

        if self._opened is not None:
            self._opened.close()
            await asyncio.to_thread(_trim, self._opened)  # what stayed for the sandboxes' sake
            if self._grounds is not None:
                host.let_go(self._opened.root / HOST_CACHE)
            self._opened = None

    @property
    def has_stages(self) -> bool:
        return self._grounds is not None

    @property
    def shelf(self) -> Shelf:
        if self._shelf is None:
            name = self._engine.substrate.name
            raise UsageError(f"substrate {name!r} has no layers, so there are no snapshots on it; `untax doctor` lists the others")
        return self._shelf

    @property
    def store(self) -> LayerStore:
        """`UsageError` while it is not open."""
        if self._opened is None:
            raise UsageError("this engine has no store of layers open")
        return self._opened

    def fetch_from(self, source: StageSource | None) -> None:
        """Ask there before a stage is built; None for nowhere. Without layers there is nothing to ask for."""
        if self._stages is not None:
            self._stages.source = source

    def untold_uses(self) -> Mapping[str, int]:
        """How often stages were used beyond what the store knows of, by their keys. From any thread."""
        return self._grounds.untold_uses() if self._grounds is not None else {}

    # ---- what leases begin with ----

    def at_hand(self, request: Request) -> Ground | None:
        """Held for the caller, when nothing has to be looked for."""
        if request.ground is not None:
            return request.ground.hold()
        if self._grounds is None or request.snapshot is not None:
            return None
        return self._grounds.at_hand(request.spec)

    async def find(self, request: Request) -> tuple[Ground, Mapping[str, float] | None]:
        """Held for the caller, with the seconds that went into each stage that was missing; None when there was nothing to look for."""
        if request.snapshot is not None:
            return await self.shelf.ground(request.snapshot), None
        assert self._grounds is not None
        return await self._grounds.find(request.spec)

    async def ladder(self, spec: EnvSpec) -> tuple[tuple[Stage, ...], frozenset[str]]:
        """The rungs of a spec, and the keys of those that need no building. Without layers: what every sandbox has anyway."""
        if self._grounds is not None:
            return await self._grounds.ladder(spec)
        stages = stages_of(spec, Identity(spec.image, is_portable=False))
        return stages, frozenset(stage.key for stage in stages[:2])

    def let_go_unused(self) -> bool:
        """Of stages that are only kept at hand; whether that was any, so that the store may have room now."""
        return self._grounds is not None and self._grounds.let_go_unused()

    async def settle(self) -> frozenset[str]:
        """Tell the store what was used, and have it keep no more than its budget beside what is in use. Gives the keys of those stages that
        are here only as long as something stands on them.
        """
        assert self._grounds is not None
        store, uses = self.store, self._grounds.take_uses()

        def work() -> frozenset[str]:
            for key, times in uses:
                store.used(key, times)
            _trim(store)
            if store.budget_bytes is not None:
                self.filled = sum(layer.bytes for layer in store.layers()) / store.budget_bytes
            return store.unkept()

        return await asyncio.to_thread(work)

    async def stage_keys(self) -> frozenset[str]:
        """Of all stages in the store."""
        if self._opened is None or self._grounds is None:
            return frozenset()
        return frozenset(record.key for record in await asyncio.to_thread(self.store.stages))

    async def missing(self, keys: Collection[str]) -> frozenset[str]:
        """Those of some stages that were here and are in the store no more."""
        if self._opened is None or self._grounds is None:
            return frozenset()
        there = await self.stage_keys()
        return frozenset(key for key in keys if key not in there)

    async def prepare(self, spec: EnvSpec, progress: Progress | None) -> Prepared:
        if self._grounds is None:
            raise UsageError(f"substrate {self._engine.substrate.name!r} has no layers: nothing can be built ahead of a lease")
        return await self._grounds.prepare(spec, progress)

    async def drop_image(self, spec: EnvSpec) -> bool:
        """Remove the image of a spec, and what stands on it, from the store: the next lease brings it anew. False for one that is in place."""
        assert self._grounds is not None
        prepared = await self._grounds.prepare(spec, None)
        keys = [stage.key for stage in prepared.stages]
        prepared.pin.close()
        self._grounds.forget(spec)
        store = self.store
        image = next((stage.key for stage in prepared.stages if stage.name == "image"), None)
        if image is None or store.stage(image) is None:
            return False

        def remove() -> None:
            for key in keys:
                store.remove_stage(key)
            store.evict()

        await asyncio.to_thread(remove)
        return True

    async def discard(self, spec: EnvSpec) -> None:
        """What a substrate took in for `spec`, where it takes things in: for who leaves nothing behind."""
        if isinstance(self._grounds, Imports):
            await self._grounds.discard(spec)

    def forget(self, request: Request) -> None:
        if self._grounds is not None and request.snapshot is None and request.ground is None:
            self._grounds.forget(request.spec)

    def bound(self, spec: EnvSpec, image: ImageConfig) -> EnvSpec:
        """The spec with what its image wishes where it says nothing itself.

        A repository lies where the spec says and commands begin there, so the image's directory counts only without one. Where
        there is but one user id inside, the image's user cannot be had and the sandbox's own takes its place.
        """
        if spec.workdir is None and image.workdir is not None:
            spec = replace(spec, workdir=image.workdir if spec.repo is None and image.workdir.startswith("/") else WORKDIR)
        if spec.user is None and image.user:
            spec = replace(spec, user=image.user.partition(":")[0] if self.has_users else _ONE_USER)
        return spec

    # ---- where there are no layers ----

    async def repository(self, repo: Repo) -> Path:
        """The work tree of a repository at its commit, made once, to be copied into a sandbox that cannot stand on it."""
        from untax.layers.build import Stages

        if self._plain is None:
            self._plain = Stages(await self._open_store("trusted" if is_host_root() else "user"))
        found = self._trees.get(repo)
        if found is None:
            found = await self._plain.repo_tree(repo)
            found = self._trees.setdefault(repo, found)  # whose pin lasts as long as the store is open
        return found.path

    # ---- inside ----

    async def _open(self, marks: Marks) -> None:
        from untax.layers.build import Stages
        from untax.layers.sources import host

        store = await self._open_store(marks)
        host.use(store.root / HOST_CACHE)
        self._stages = Stages(store, Workshop(self._engine, self._setup_network, self._setup_wheels))
        self._grounds = Grounds(store, self._stages)
        self._grounds.changed = self._has_changed
        self._shelf = Shelf(self._engine, self._grounds)

    async def _open_for(self, substrate: Importing) -> None:
        from untax.layers.build import Stages
        from untax.layers.sources import host

        store = await self._open_store("trusted" if is_host_root() else "user")
        host.use(store.root / HOST_CACHE)
        self._borrowed = BorrowedWorkshop(substrate.builder, self._path.parent, self._setup_network, self._setup_wheels)
        self._stages = Stages(store, self._borrowed, find=source_finder(substrate, store.root / HOST_CACHE))
        self._grounds = Imports(self._engine, substrate, store, self._stages)
        self._grounds.changed = self._has_changed
        if isinstance(substrate, Reviving):
            self._shelf = Shelf(self._engine, self._grounds)

    def _has_changed(self) -> None:
        if self.changed is not None:
            self.changed()

    async def _open_store(self, marks: Marks) -> LayerStore:
        from untax.layers.store import LayerStore

        def opened() -> LayerStore:
            ensure_private_dir(self._path.parent)
            return LayerStore(self._path, marks=marks, budget_bytes=self._budget_bytes)

        self._opened = await asyncio.to_thread(opened)
        return self._opened


def _trim(store: LayerStore) -> None:
    try:
        store.trim()
    except StageUnavailable as exc:
        _log.warning("the store could not be brought within its budget: %s", exc.message)  # the next publish tries again
