"""What is noted beside a layer's tree: its size, its seal, and the rows of its digest, to be able to say later what differs."""

from __future__ import annotations

import json
import zlib
from pathlib import Path

from untax.layers._durable import read_json, write_synced
from untax.layers.digest import digest_tree, first_difference, id_of_rows, seal_tree
from untax.layers.marks import Marks

_VERSION = 1


def write_facts(path: Path, marks: Marks, used: int, entries: int) -> None:
    """Note the size and the seal of the tree as it is now."""
    write_synced(path / "layer.json", json.dumps({"version": _VERSION, "marks": marks, "bytes": used, "entries": entries}).encode())
    write_synced(path / "seal", json.dumps({"version": _VERSION, "seal": seal_tree(path / "tree")}).encode())


def which(path: Path) -> tuple[int, int]:
    """Tells a layer from another of the same id that came in its place."""
    st = path.lstat()
    return st.st_ino, st.st_ctime_ns


def seal_in(path: Path) -> object:
    found = read_json(path / "seal")
    return found.get("seal") if found is not None else None


def seal_now(path: Path) -> str:
    try:
        return seal_tree(path / "tree")
    except (FileNotFoundError, NotADirectoryError):
        return "gone"


def facts_in(path: Path) -> tuple[int, int] | None:
    """Bytes and entries; None where that is missing or damaged."""
    facts = read_json(path / "layer.json")
    if facts is None or type(facts.get("bytes")) is not int or type(facts.get("entries")) is not int:
        return None
    return facts["bytes"], facts["entries"]


class Rows:
    """The rows of a digest, packed as they come."""

    def __init__(self) -> None:
        self._packer = zlib.compressobj(1)
        self._packed: list[bytes] = []

    def add(self, row: bytes) -> None:
        self._packed.append(self._packer.compress(len(row).to_bytes(4, "little") + row))

    def packed(self) -> bytes:
        return b"".join([*self._packed, self._packer.flush()])


def _unpacked(data: bytes) -> list[bytes]:
    data = zlib.decompress(data)
    rows = []
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at : at + 4], "little")
        rows.append(data[at + 4 : at + 4 + length])
        at += 4 + length
    return rows


def rows_in(path: Path, layer_id: str) -> bytes | None:
    """As they were packed; None where they are missing or damaged."""
    try:
        packed = (path / "rows").read_bytes()
        return packed if id_of_rows(_unpacked(packed)) == layer_id else None
    except (OSError, zlib.error):
        return None


def difference(path: Path, layer_id: str) -> str:
    """What of a layer's tree is not as it was stored, in words."""
    try:
        known = _unpacked((path / "rows").read_bytes())
    except (OSError, zlib.error):
        return "its digest is another"
    if id_of_rows(known) != layer_id:
        return "its digest is another, and the list of what it held is damaged too"
    found: list[bytes] = []
    digest_tree(path / "tree", found.append)
    return first_difference(known, found)
