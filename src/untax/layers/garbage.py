"""What a store would let go of, without letting go of it."""

from __future__ import annotations

from collections.abc import Collection

from untax.layers import eviction
from untax.layers.store import Freed, LayerStore


def would_free(store: LayerStore, *, removed: Collection[str] = ()) -> Freed:
    """What `store.evict()` would remove now, once the stages `removed` are gone, as far as can be known ahead."""
    candidates = [one for one in store.candidates() if one.key not in removed]
    sizes = {layer.id: layer.bytes for layer in store.layers()}
    needed = {layer_id for one in candidates for layer_id in one.adds}
    layers = [one for one in sizes if one not in needed and not store.is_in_use(one)]
    freed = sum(sizes[one] for one in layers)
    stages = eviction.choose(candidates, sizes, store.shortage_bytes() - freed)
    still_needed = {layer_id for one in candidates if one.key not in stages for layer_id in one.adds}
    gone = [one for one in needed - still_needed if one in sizes]
    return Freed(tuple(stages), tuple(sorted([*layers, *gone])), freed + sum(sizes[one] for one in gone))
