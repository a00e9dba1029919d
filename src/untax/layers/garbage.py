"""What a store would let go of, without letting go of it."""

from __future__ import annotations

import time
from collections.abc import Collection

from untax.layers import eviction
from untax.layers.record import SNAPSHOT
from untax.layers.store import Freed, LayerStore


def would_free(store: LayerStore, *, removed: Collection[str] = ()) -> Freed:
    """What `store.evict()` would remove now, once the stages `removed` are gone, as far as can be known ahead."""
    records = [one for one in store._records() if one.key not in removed]
    sizes = {layer.id: layer.bytes for layer in store.layers()}
    needed = {layer_id for one in records for layer_id in one.adds}
    layers = [one for one in sizes if one not in needed and not store._is_in_use(one)]
    freed = sum(sizes[one] for one in layers)
    now = time.time()
    candidates = [
        eviction.Candidate(
            one.key,
            one.parent,
            one.adds,
            one.cost_s,
            store._uses(one.key, now),
            is_kept=one.name == SNAPSHOT or any(store._is_in_use(layer_id) for layer_id in one.adds),
        )
        for one in records
    ]
    stages = eviction.choose(candidates, sizes, store._shortage(0) - freed)
    still_needed = {layer_id for one in records if one.key not in stages for layer_id in one.adds}
    gone = [one for one in needed - still_needed if one in sizes]
    return Freed(tuple(stages), tuple(sorted([*layers, *gone])), freed + sum(sizes[one] for one in gone))
