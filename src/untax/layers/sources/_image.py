"""What the sources that have layers say of them to `_chain.py`, which puts them into the store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO

MOST_BYTES = 256 << 30
"""Of all layers of one image, unpacked."""


@dataclass(frozen=True, slots=True)
class PackedLayer:
    open: Callable[[], BinaryIO]
    """A file to read it from, from the beginning; closed by whoever asked."""
    size: int
    digest: str | None = None
    """Of the packed bytes; None where nobody promised one, or where it was checked already."""
