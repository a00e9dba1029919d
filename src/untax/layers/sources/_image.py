"""Packed layers into the store, in their order: what every source that has layers ends with. Blocking."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from untax.core.errors import StageFailed
from untax.layers.sources import Fetched, Progress
from untax.layers.sources.config import ReadConfig
from untax.layers.unpack import unpack

if TYPE_CHECKING:
    from untax.layers.store import LayerStore

MOST_BYTES = 256 << 30
"""Of all layers of one image, unpacked."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    open: Callable[[], BinaryIO]
    """A file to read it from, from the beginning; closed by whoever asked."""
    size: int
    digest: str | None = None
    """Of the packed bytes; None where nobody promised one, or where it was checked already."""


def put_image(
    store: LayerStore, what: str, config: ReadConfig, layers: Sequence[PackedLayer], *, check: Callable[[], None], progress: Progress
) -> Fetched:
    """Unpack the layers, bottom first, each held to its digest in the config. `check` raises when nobody waits for it any more."""
    if len(layers) != len(config.diff_ids):
        raise StageFailed("image", f"{what}: it has {len(layers)} layers and its config names {len(config.diff_ids)}")
    placed: dict[str, Path] = {}
    notes = list(config.notes)
    total, done, unpacked = sum(layer.size for layer in layers), 0, 0
    for number, (layer, diff_id) in enumerate(zip(layers, config.diff_ids, strict=True), 1):
        title = f"unpacking layer {number} of {len(layers)}"

        def on_read(read: int, title: str = title, before: int = done) -> None:
            check()
            progress(title, before + read, total)

        with contextlib.closing(layer.open()) as source, store.draft() as draft:
            try:
                found = unpack(
                    source,
                    draft.tree,
                    marks=store.marks,
                    below=tuple(placed.values()),
                    digest=layer.digest,
                    diff_id=diff_id,
                    on_read=on_read,
                )
            except StageFailed as exc:
                raise StageFailed("image", f"{what}, layer {number}: {exc.message}", exc.log) from exc
            unpacked += found.bytes
            if unpacked > MOST_BYTES:
                raise StageFailed("image", f"{what}: its layers unpack to more than {MOST_BYTES} bytes")
            if found.entries:
                published = draft.publish()
                # A layer that comes twice counts where it comes last: overlay takes no directory twice.
                placed.pop(published.id, None)
                placed[published.id] = published.tree
        done += layer.size
        notes += [f"left out of layer {number}: {note}" for note in found.notes]
    if not placed:
        raise StageFailed("image", f"{what}: there is nothing in it")
    return Fetched(tuple(placed), config.config, tuple(notes[:1000]))
