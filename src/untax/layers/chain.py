"""From the key of something in the store to the chain of layers that it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from untax.core.errors import UsageError
from untax.core.root import Root
from untax.core.spec import EnvSpec
from untax.layers.build import Prepared, Stages
from untax.layers.record import SNAPSHOT
from untax.layers.store import LayerStore, Pin, StageRecord

_SHORTEST = 4  # characters that a key may be shortened to


@dataclass(frozen=True, slots=True)
class Chain:
    records: tuple[StageRecord, ...]
    """Lowest first; the last is what was asked for."""
    below: str | None
    """The key of what it stands on that is not in the store: an image that is used in place."""

    @property
    def key(self) -> str:
        return self.records[-1].key

    @property
    def layer_ids(self) -> tuple[str, ...]:
        return tuple(one for record in self.records for one in record.adds)

    @property
    def is_portable(self) -> bool:
        return all(record.is_portable for record in self.records)

    @property
    def workdir(self) -> str | None:
        """Where its repository lies, or its set-up commands ran."""
        last = self.records[-1]
        spec = last.recipe.get("spec")
        place = spec.get("workdir") if last.name == SNAPSHOT and isinstance(spec, Mapping) else last.recipe.get("at")
        return place if isinstance(place, str) else last.config.workdir


def find_chain(store: LayerStore, key: str) -> Chain:
    """What is in the store under `key`, or under the only key that begins with it; `UsageError` otherwise."""
    found = {record.key: record for record in store.stages()}
    matches = [key] if key in found else [one for one in found if one.startswith(key) and len(key) >= _SHORTEST]
    if len(matches) != 1:
        what = f"begins with {key!r}" if not matches else f"is {key!r} alone: {', '.join(sorted(one[:16] for one in matches))}"
        raise UsageError(f"no key in {store.root} {what}; `untax image list` shows them, and images have a colon, as in registry:host/name")
    records = [found[matches[0]]]
    while records[-1].name not in ("image", SNAPSHOT) and records[-1].parent in found:
        records.append(found[records[-1].parent])
    records.reverse()
    bottom = records[0]
    if bottom.name == SNAPSHOT and "live" in bottom.recipe:
        raise UsageError(
            f"{bottom.key} is a live snapshot: memory of processes, and no files to export; take one without live=True for that"
        )
    return Chain(tuple(records), None if bottom.name == "image" else bottom.parent)


async def root_of(store: LayerStore, chain: Chain, stages: Stages) -> Prepared:
    """The chain to stand on, pinned. `UsageError` when it stands on an image in place that is not (or no longer) here."""
    below = Root(layers=()) if chain.below is None else await _in_place(chain, stages)
    pin: Pin = store.pin(chain.layer_ids)
    try:
        trees = [str(store.layer(one).tree) for one in chain.layer_ids]
    except BaseException:
        pin.close()
        raise
    root = replace(below.with_layers(*trees), config=chain.records[-1].config)
    return Prepared(root, (), {}, pin)


async def _in_place(chain: Chain, stages: Stages) -> Root:
    spec = chain.records[-1].recipe.get("spec")
    image = spec["image"] if isinstance(spec, Mapping) and isinstance(spec.get("image"), str) else "host"
    found = await stages.root(EnvSpec(image=image))
    if found.stages[-1].key != chain.below:
        raise UsageError(
            f"{chain.key[:16]} stands on an image that is not in the store: one that is used in place (dir:), this machine before its software "
            "changed, or one that was removed; name the image, with --repo and --setup, in place of the key"
        )
    return found.root
