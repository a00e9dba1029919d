"""What travels beside the rows of a layer, because its digest leaves it out or has only a hash of it: times of directories and links, extended
attributes, and what the contents take. Each is held to the rows, which the layer's id proves, before anything is made of it.
"""

from __future__ import annotations

import base64
import json
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from untax.core.errors import StageFailed
from untax.layers import marks
from untax.layers.digest import attributes_hash
from untax.layers.rows import Row
from untax.layers.unpack import shown

_MOST = 256 << 20  # bytes, unpacked
_TIMES = (1 << 40) * 10**9
_LONGEST_NAME, _LONGEST_VALUE = 255, 1 << 16  # bytes of an extended attribute: the kernel's own limits
_REDIRECT = re.compile(rb"/?[^/\0]+(/[^/\0]+)*")

Attributes = list[tuple[str, bytes]]


class Rest(NamedTuple):
    """Times and attributes by the numbers of their rows."""

    times: dict[int, int]
    attributes: dict[int, Attributes]
    stored: int
    """What the contents take on the disk, as it is said; no more than the rows prove."""


def read_rest(packed: bytes, rows: Sequence[Row], kind: marks.Marks) -> Rest:
    """`StageFailed` for what is not of these rows, or what a layer of a store of this kind may not have."""
    said = _unpacked(packed)
    try:
        dated = [number for number, row in enumerate(rows) if row.kind in "dlps"]
        times = dict(zip(dated, (int(one) for one in said["times"]), strict=True))
        stored = int(said["stored"])
        attributes = {
            int(number): [(str(name), base64.b64decode(value, validate=True)) for name, value in some]
            for number, some in said["attributes"].items()
        }
        for number, some in attributes.items():
            if not 0 <= number < len(rows):
                raise ValueError(f"those of an entry {number}, of which there is none")
            if any(len(os.fsencode(name)) > _LONGEST_NAME or len(value) > _LONGEST_VALUE for name, value in some):
                raise ValueError(f"one of {shown(rows[number].name)} is too long")
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as exc:
        raise StageFailed("layer", f"the layer is refused: its attributes are damaged ({exc!r:.200})") from None
    if stored < 0 or any(not -_TIMES <= one <= _TIMES for one in times.values()):
        raise StageFailed("layer", "the layer is refused: a time that no clock reaches")
    for number, row in enumerate(rows):
        if (row.attributes or number in attributes) and attributes_hash(attributes.get(number, ())) != row.attributes:
            raise StageFailed("layer", f"the layer is refused: attributes of {shown(row.name)} that are not its own")
    for number, some in attributes.items():
        for name, value in some:
            _check_attribute(rows[number], name, value, kind)
    return Rest(times, attributes, min(stored, sum(row.size for row in rows)))


def _check_attribute(row: Row, name: str, value: bytes, kind: marks.Marks) -> None:
    """A user's own, access lists and capabilities; of overlay's only what layers of this store's kind are made with."""
    if name == marks.opaque(kind):
        is_kept = row.kind == "d" and value in (b"y", b"x")
    elif name == marks.redirect(kind):
        parts = value.split(b"/")
        is_kept = row.kind == "d" and _REDIRECT.fullmatch(value) is not None and b".." not in parts and b"." not in parts
    elif name.startswith(marks.prefix(kind)):
        is_kept = False
    else:
        is_kept = name.startswith("user.") or name in ("security.capability", "system.posix_acl_access", "system.posix_acl_default")
    if not is_kept or "\0" in name:
        raise StageFailed("layer", f"the layer is refused: the extended attribute {name[:80]!r} of {shown(row.name)}")


def _unpacked(packed: bytes) -> Mapping[str, Any]:
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, _MOST)
        value = json.loads(data) if unpacker.eof and not unpacker.unused_data else None
    except (zlib.error, ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise StageFailed("layer", "the layer is refused: its attributes are damaged")
    return value
