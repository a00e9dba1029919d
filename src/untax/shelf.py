"""The snapshots of an engine: those it keeps, and how one is put into the store and found there again.

A saved snapshot is a record in the store with every stored layer of its chain in it, the stages' own included, so that
nothing it stands on is evicted or built anew below it. Only an image that is used in place (the host's files, a directory) lies
outside; when that has changed, the snapshot is refused rather than laid over something else. A live one is the substrate's own files, in layers of their own.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from untax.core.errors import PoolClosed, StageUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import EnvSpec, Limits, Repo
from untax.core.substrate import Frozen, Remembered, Reviving
from untax.flats import DEEPEST, Flats
from untax.ground import Ground, Own, Support
from untax.layers.record import SNAPSHOT
from untax.snapshot import Snapshot

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.grounds import Grounds
    from untax.layers.store import LayerStore, Pin, StageRecord

_ID = re.compile(r"snap-[0-9a-f]{24}")


class Shelf:
    def __init__(self, engine: Engine, grounds: Grounds) -> None:
        self._engine = engine
        self._grounds = grounds
        self._kept: dict[str, Snapshot] = {}
        self._flats = Flats(engine, grounds.store)
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, snapshot: Snapshot) -> Snapshot:
        self._kept[snapshot.id] = snapshot
        return snapshot

    def close(self) -> None:
        self._is_closed = True
        for snapshot in self._kept.values():
            snapshot.let_go()
        self._kept.clear()

    async def drop(self, snapshot: Snapshot) -> None:
        if self._is_closed and snapshot.is_saved:
            raise PoolClosed(f"the engine is closed; drop {snapshot.id} by `await (await engine.find_snapshot(id)).drop()` of another")
        if self._kept.pop(snapshot.id, None) is not None:
            snapshot.let_go()
            self._engine.pooling.dropped(snapshot)
            if snapshot.is_saved:
                await asyncio.to_thread(self._grounds.store.remove_stage, snapshot.id)

    def support(self, frozen: Frozen) -> Support:
        """Of a frozen layer: let go of behind everybody's back, once the last who needs it is gone."""
        return Support(lambda: self._engine.chore(frozen.discard()))

    # ---- what boxes begin from ----

    async def ground(self, snapshot: Snapshot) -> Ground:
        """Held for the caller, and not deeper than is cheap to stand on."""
        ground = snapshot.ground.hold()
        if len(ground.own) <= DEEPEST:
            return ground
        try:
            flat = await self._flats.shallow(ground)
        finally:
            ground.release()
        snapshot.moved_to(flat.hold())
        return flat

    # ---- in the store ----

    async def save(self, snapshot: Snapshot) -> None:
        """Whoever waits may leave: what was begun is finished, because a half is of use to nobody."""
        saving = self._engine.chore(self._saved(snapshot))
        saving.add_done_callback(_heard)
        await asyncio.shield(saving)

    async def _saved(self, snapshot: Snapshot) -> None:
        ground = await self.ground(snapshot)
        try:
            if snapshot.is_live:
                await asyncio.to_thread(_store_live, self._grounds.store, snapshot, ground, self._reviving())
            else:
                await asyncio.to_thread(_store, self._grounds.store, snapshot, ground)
            snapshot.was_saved()
        finally:
            ground.release()

    async def find(self, snapshot_id: str) -> Snapshot:
        """One that this engine keeps, or a saved one, by its id."""
        if not isinstance(snapshot_id, str) or not _ID.fullmatch(snapshot_id):
            raise UsageError(f"{snapshot_id!r} is not a snapshot's id; they are as `await snapshot.save()` gives them")
        if (kept := self._kept.get(snapshot_id)) is not None:
            return kept
        store = self._grounds.store
        record = await asyncio.to_thread(store.stage, snapshot_id)
        if record is None or record.name != SNAPSHOT:
            raise UsageError(f"there is no saved snapshot {snapshot_id} in {store.root}")
        spec = spec_of(record.recipe["spec"])
        live = record.recipe.get("live")
        is_live = live is not None
        self._check_kind(snapshot_id, None if live is None else live["substrate"])
        ground = await (self._taken_up(record) if is_live else self._restored(record, spec))
        if (kept := self._kept.get(snapshot_id)) is not None:  # somebody else asked at the same time
            ground.release()
            return kept
        return self.put(Snapshot(self._engine, spec, ground, "live" if is_live else "stored", 0.0, snapshot_id))

    def _reviving(self) -> Reviving:
        substrate = self._engine.substrate
        assert isinstance(substrate, Reviving)
        return substrate

    def _check_kind(self, snapshot_id: str, by: str | None) -> None:
        """One with the memory of processes goes on where it was left, and one of files needs layers."""
        mine = self._engine.substrate.name
        if by is None and self._engine.layered is None:
            raise UsageError(f"snapshot {snapshot_id} is one of files; substrate {mine!r} has no layers to begin from them")
        if by is not None and by != mine:
            raise UsageError(f"snapshot {snapshot_id} holds the memory of processes on {by!r}; restore it with Engine({by!r})")

    async def _taken_up(self, record: StageRecord) -> Ground:
        store, said = self._grounds.store, record.recipe["live"]
        pin = await asyncio.to_thread(store.pin, record.adds)
        try:
            root = Root((), config=record.config, path=said["path"], is_furnished=said["is_furnished"])
            remembered = await self._reviving().take_up(root, [store.layer(one).tree for one in record.adds])
        except BaseException:
            pin.close()
            raise
        # The pin last: what leads to the layers goes before them.
        return Ground(remembered.root, (), 0, (Support(lambda: self._engine.chore(_discarded(remembered, pin))),))

    async def _restored(self, record: StageRecord, spec: EnvSpec) -> Ground:
        store = self._grounds.store
        pin = await asyncio.to_thread(store.pin, record.adds)
        try:
            layers = tuple(str(store.layer(one).tree) for one in record.adds)
            in_place = record.recipe["in_place"]
            if not isinstance(in_place, Mapping):
                root = Root(layers, config=record.config, is_furnished=True)
                stage_layers = int(record.recipe["stage_layers"])
                return Ground(root, (), stage_layers, (Support(pin.close),), _stored(layers[stage_layers:]))
            below, _ = await self._grounds.find(EnvSpec(image=spec.image, isolation=spec.isolation))
        except BaseException:
            pin.close()
            raise
        if below.stages[-1].key != in_place["key"]:
            below.release()
            pin.close()
            raise StageUnavailable(
                SNAPSHOT, f"the image {spec.image!r} has changed since {record.key} was saved over it; take the snapshot again, or drop it"
            )
        root = below.root.with_layers(*layers)
        stage_layers = len(below.root.layers) + int(record.recipe["stage_layers"])
        supports = (*below.supports, Support(pin.close))
        return Ground(root, below.stages, stage_layers, supports, _stored(root.layers[stage_layers:]))


def _stored(directories: Sequence[str]) -> tuple[Own, ...]:
    return tuple(Own(directory, Path(directory), None) for directory in directories)


def _heard(saving: asyncio.Task[None]) -> None:
    if not saving.cancelled():
        saving.exception()  # told to whoever waits, if anybody still does


def _store(store: LayerStore, snapshot: Snapshot, ground: Ground) -> None:
    """Blocking: copy what is not in the store yet, layer by layer, and write the record."""
    from untax.layers.store import StageRecord

    began = time.monotonic()
    stage_ids = [found for directory in ground.root.layers[: ground.stage_layers] if (found := layer_id(store, directory))]
    ids = [_kept(store, one.tree) for one in ground.own]
    in_place = len(stage_ids) < ground.stage_layers or bool(ground.root.views)
    image = next((stage for stage in ground.stages if stage.name == "image"), None)
    if in_place and image is None:
        raise AssertionError("a root in place without its image's stage")
    store.put_stage(
        StageRecord(
            key=snapshot.id,
            name=SNAPSHOT,
            parent=image.key if in_place and image is not None else None,
            adds=(*stage_ids, *ids),
            config=ground.root.config,
            recipe={
                "spec": data_of(snapshot.spec),
                "in_place": {"key": image.key} if in_place and image is not None else None,
                "stage_layers": len(stage_ids),
            },
            cost_s=time.monotonic() - began,
            created=time.time(),
            is_portable=not in_place,
        )
    )


async def _discarded(remembered: Remembered, pin: Pin) -> None:
    try:
        await remembered.discard()
    finally:
        await asyncio.to_thread(pin.close)


def _store_live(store: LayerStore, snapshot: Snapshot, ground: Ground, substrate: Reviving) -> None:
    """Blocking: a layer for each part, and the record. What several snapshots have in common is one layer for all of them."""
    from untax.layers.store import StageRecord

    began = time.monotonic()
    root = ground.root
    ids = tuple(_kept(store, part) for part in substrate.parts(root))
    live = {"substrate": snapshot.engine.substrate.name, "path": root.path, "is_furnished": root.is_furnished}
    store.put_stage(
        StageRecord(
            key=snapshot.id,
            name=SNAPSHOT,
            parent=None,
            adds=ids,
            config=root.config,
            recipe={"spec": data_of(snapshot.spec), "live": live},
            cost_s=time.monotonic() - began,
            created=time.time(),
            is_portable=False,
        )
    )


def _kept(store: LayerStore, tree: Path) -> str:
    """The id of a layer with what is in `tree`: as it lies there, or a copy."""
    from untax.layers.copy import copy_tree

    found = layer_id(store, tree)
    if found is None:
        with store.draft() as draft:
            copy_tree(tree, draft.tree)
            found = draft.publish().id
    return found


def layer_id(store: LayerStore, tree: str | Path) -> str | None:
    """The id of the stored layer that lies at `tree`, or None when it is not one of the store's."""
    path = Path(tree)
    return path.parent.name if path.name == "tree" and path.parent.parent == store.root / "trees" else None


# ---- a spec as plain data ----


def data_of(spec: EnvSpec) -> dict[str, Any]:
    data = {name: getattr(spec, name) for name in ("image", "workdir", "user", "isolation")}
    network = spec.network if isinstance(spec.network, str) else list(spec.network)
    repo = asdict(spec.repo) if spec.repo is not None else None
    return data | {"repo": repo, "setup": list(spec.setup), "env": dict(spec.env), "limits": asdict(spec.limits), "network": network}


def spec_of(data: Mapping[str, Any]) -> EnvSpec:
    repo = Repo(**data["repo"]) if data["repo"] is not None else None
    network = data["network"] if isinstance(data["network"], str) else tuple(data["network"])
    return EnvSpec(**{**data, "repo": repo, "setup": tuple(data["setup"]), "limits": Limits(**data["limits"]), "network": network})
