"""What a store would let go of, without letting go of it."""

from __future__ import annotations

import time
from collections.abc import Collection

from untax.layers import eviction, spares
from untax.layers.store import Freed, LayerStore


def would_free(store: LayerStore, *, removed: Collection[str] = ()) -> Freed:
    """What `store.evict()` would remove now, once the stages `removed` are gone, as far as can be known ahead."""
    known = store.candidates()
    candidates = [one for one in known if one.key not in removed]
    sizes = {layer.id: layer.bytes for layer in store.layers()}
    foreign = store.needed() - {layer_id for one in known for layer_id in one.adds}  # named by what a later release wrote
    needed = foreign | {layer_id for one in candidates for layer_id in one.adds}
    layers = [one for one in sizes if one not in needed and not store.is_in_use(one)]
    freed = sum(sizes[one] for one in layers)
    spare = _spare(store, store.shortage_bytes() - freed)
    freed += sum(one.bytes for one in spare)
    stages = eviction.choose(candidates, sizes, store.shortage_bytes() - freed)
    still_needed = foreign | {layer_id for one in candidates if one.key not in stages for layer_id in one.adds}
    gone = [one for one in needed - still_needed if one in sizes]
    return Freed(tuple(stages), tuple(sorted([*layers, *gone])), tuple(one.name for one in spare), freed + sum(sizes[one] for one in gone))


def _spare(store: LayerStore, short: int) -> list[spares.Spare]:
    """What would go beside the layers: all that is old, and then as much as is needed."""
    now = time.time()
    can_go = [one for one in store.spares() if not spares.is_in_use(one)]
    gone = [one for one in can_go if one.is_old(now)]
    for one in can_go:
        if not one.is_old(now) and sum(other.bytes for other in gone) < short:
            gone.append(one)
    return gone
