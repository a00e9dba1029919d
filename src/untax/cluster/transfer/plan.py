"""Into which chunks a layer's contents are cut. Pure, and from the rows of its digest alone: so every node that has the layer cuts it
alike, and what one of them gave is of use with what another gives.

A chunk is either several whole files or a part of one large one. Holes are a matter of whoever sends it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from untax.core.errors import StageFailed
from untax.layers.digest import BLOCK
from untax.layers.rows import Row

CHUNK_BYTES = 4 << 20
"""Enough that a question for each costs nothing, little enough to be kept in memory by each of a few threads."""
_FILES = 2048  # in one chunk, so that what describes it stays small
_PARTS = 4096  # of one file: those of a giant that is almost all hole are longer
_MOST_PARTS = (
    1 << 20
)  # of all files: 4 TiB, and no list of parts that takes all memory for a workload's million of giants that are all hole


class Piece(NamedTuple):
    row: int
    offset: int
    length: int


Chunk = tuple[Piece, ...]


def chunks_of(rows: Sequence[Row]) -> list[Chunk]:
    """In the tree's order. Files without contents are in none. `StageFailed` for more of them than can be kept count of."""
    if sum(-(-row.size // _step(row.size)) for row in rows if row.kind == "f" and is_large(row)) > _MOST_PARTS:
        raise StageFailed("layer", f"the layer does not travel: its large files are more than {_MOST_PARTS} parts")
    chunks: list[Chunk] = []
    some: list[Piece] = []
    size = 0
    for number, row in enumerate(rows):
        if row.kind != "f" or row.size == 0:
            continue
        if is_large(row):
            chunks += [(part,) for part in _parts(number, row.size)]
            continue
        if some and (size + row.size > CHUNK_BYTES or len(some) == _FILES):
            chunks.append(tuple(some))
            some, size = [], 0
        some.append(Piece(number, 0, row.size))
        size += row.size
    if some:
        chunks.append(tuple(some))
    return chunks


def is_large(row: Row) -> bool:
    """Whether it comes in parts, each a chunk of its own."""
    return row.size > CHUNK_BYTES


def _parts(number: int, size: int) -> list[Piece]:
    step = _step(size)
    return [Piece(number, at, min(step, size - at)) for at in range(0, size, step)]


def _step(size: int) -> int:
    return max(CHUNK_BYTES, -(-size // (_PARTS * BLOCK)) * BLOCK)
