"""The rows of a layer's digest read back: all that a tree must become to be the layer of that id, its contents by their hashes.

Their hash is the id, so nobody on the way can change one. But whoever makes up an id can make up rows for it: each is held to
what an archive is held to, before anything is made of it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from untax.core.errors import StageFailed
from untax.layers.digest import UP, id_of_rows
from untax.layers.unpack import HIGHEST_ID, NAME_MAX, climbs, shown

MOST_ROWS = 1_000_000
"""As for archives. Each way up is one, too, so half of it are directories at most."""
MOST_BYTES = 256 << 20  # of rows, unpacked: a million of them come to half of it
_DEEPEST = 4096  # a workload may dig as deep as it likes; each level costs a step in memory
_LARGEST = 1 << 50  # bytes of one file, holes included: file systems end at 16 TiB to 8 EiB
_TIMES = (1 << 40) * 10**9  # nanoseconds from 1970 either way
_NUMBER = re.compile(rb"-?[0-9]{1,22}")
_HASH = re.compile(rb"[0-9a-f]{64}")


@dataclass(slots=True)
class Row:
    """One entry. The first is the top of the tree, which has no name and is its own parent."""

    kind: str
    """`d`irectory, `f`ile, `l`ink, `p`ipe, `s`ocket, `w`hiteout, or `h`: one more name of an entry before it."""
    name: bytes
    parent: int
    """Numbers are places in the list of all rows."""
    mode: int = 0
    uid: int = 0
    gid: int = 0
    attributes: bytes = b""
    """The hash of its extended attributes; empty for one that has none."""
    size: int = 0
    mtime_ns: int = 0
    contents: str = ""
    """The hash of a file's contents, as `digest.contents_of` gives it."""
    target: bytes = b""
    first: int = 0


def read_rows(packed: bytes, layer_id: str, *, may_climb: bool = True) -> list[Row]:
    """`StageFailed` unless they are the rows of that id, and of a tree that a layer may be.

    A link that climbs above the root by its text is refused in what came out of an archive, and is a file with a target where a
    workload may have made it (`may_climb`), as it is in a layer that was built here.
    """
    texts = list(_unpacked(packed))
    if id_of_rows(texts) != layer_id:
        raise _refused("its list of entries is that of another layer")
    return _Reader(may_climb).read(texts)


def path_of(rows: Sequence[Row], number: int) -> list[bytes]:
    """The names from the top to an entry."""
    names: list[bytes] = []
    while number:
        names.append(rows[number].name)
        number = rows[number].parent
    names.reverse()
    return names


def _unpacked(packed: bytes) -> Iterator[bytes]:
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(packed, MOST_BYTES + 1)
    except zlib.error as exc:
        raise _refused(f"its list of entries is damaged ({exc})") from None
    if len(data) > MOST_BYTES or not unpacker.eof or unpacker.unused_data:
        raise _refused("its list of entries does not end, or ends too late")
    at = count = 0
    while at < len(data):
        count += 1
        if count > 2 * MOST_ROWS:
            # Before they are all in memory: an empty one takes four bytes here, and more there.
            raise _refused(f"more than {MOST_ROWS} entries")
        begin = at + 4
        at = begin + int.from_bytes(data[at:begin], "little")
        if at > len(data) or begin > len(data):
            raise _refused("its list of entries is cut off")
        yield data[begin:at]


class _Reader:
    def __init__(self, may_climb: bool) -> None:
        self._may_climb = may_climb
        self._rows: list[Row] = []
        self._trail: list[int] = []
        self._last: list[bytes] = []  # the name before, in each directory of the trail

    def read(self, texts: list[bytes]) -> list[Row]:
        if not texts or not texts[0].startswith(b"d\0\0"):
            raise _refused("a list of entries without a top")
        for text in texts:
            if self._rows and not self._trail:
                raise _refused("entries above its top")
            if text == UP:
                self._trail.pop()
                self._last.pop()
                continue
            row = self._row(text)
            self._rows.append(row)
            if len(self._rows) > MOST_ROWS:
                raise _refused(f"more than {MOST_ROWS} entries")
            if row.kind == "d":
                self._trail.append(len(self._rows) - 1)
                self._last.append(b"")
                if len(self._trail) > _DEEPEST:
                    raise _refused(f"directories more than {_DEEPEST} deep")
        if self._trail:
            raise _refused("a list of entries that breaks off")
        return self._rows

    def _row(self, text: bytes) -> Row:
        if b"\0" not in text:
            raise _refused("what is no entry at all")
        kind, name, *fields = text.split(b"\0")
        parent = self._trail[-1] if self._trail else 0
        if self._rows:
            self._check_name(name)
        if kind == b"w" and fields == [b""]:
            return Row("w", name, parent)
        if kind == b"h" and len(fields) == 2:
            return Row("h", name, parent, first=self._linked(fields[0], name))
        if kind not in (b"d", b"f", b"l", b"p", b"s") or len(fields) != 6 or fields[5]:
            raise _refused(f"a device, or what is no entry at all: {shown(name)}")
        mode, uid, gid, what, attributes = fields[:5]
        row = Row(kind.decode(), name, parent, _octal(mode), _number(uid), _number(gid), attributes)
        if not 0 <= row.uid <= HIGHEST_ID or not 0 <= row.gid <= HIGHEST_ID:
            raise _refused(f"an owner above {HIGHEST_ID}: {shown(name)}")
        if attributes and not _HASH.fullmatch(attributes):
            raise _refused(f"attributes without a hash: {shown(name)}")
        if kind == b"f":
            self._describe(row, what)
        elif kind == b"l":
            self._aim(row, what)
        elif what:
            raise _refused(f"contents where there can be none: {shown(name)}")
        return row

    def _check_name(self, name: bytes) -> None:
        """Ascending, as a digest lists them: so no name comes twice."""
        if not name or b"/" in name or name in (b".", b"..") or len(name) > NAME_MAX:
            raise _refused(f"a name that is none: {shown(name)}")
        if name <= self._last[-1]:
            raise _refused(f"names out of their order, or twice: {shown(name)}")
        self._last[-1] = name

    def _linked(self, first: bytes, name: bytes) -> int:
        number = _number(first)
        if not 0 < number < len(self._rows) or self._rows[number].kind in "dwh":
            raise _refused(f"a hard link to no file before it: {shown(name)}")
        return number

    def _describe(self, row: Row, what: bytes) -> None:
        parts = what.split(b" ")
        if len(parts) != 3 or not _HASH.fullmatch(parts[2]):
            raise _refused(f"a file without its contents' hash: {shown(row.name)}")
        row.mtime_ns, row.size, row.contents = _number(parts[0]), _number(parts[1]), parts[2].decode()
        if not 0 <= row.size <= _LARGEST or not -_TIMES <= row.mtime_ns <= _TIMES:
            raise _refused(f"a size or a time that no file has: {shown(row.name)}")

    def _aim(self, row: Row, target: bytes) -> None:
        if not target or len(target) > 4095:
            raise _refused(f"a link to nothing: {shown(row.name)}")
        row.target = target
        if not self._may_climb and climbs([*path_of(self._rows, row.parent), row.name], target):
            raise _refused(f"a link out of the tree: {shown(row.name)} to {shown(target)}")


def _octal(text: bytes) -> int:
    if not re.fullmatch(rb"[0-7]{1,4}", text):
        raise _refused("a mode that is none")
    return int(text, 8)


def _number(text: bytes) -> int:
    if not _NUMBER.fullmatch(text):
        raise _refused("a number that is none")
    return int(text)


def _refused(message: str) -> StageFailed:
    return StageFailed("layer", f"the layer is refused: {message}")
