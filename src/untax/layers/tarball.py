"""The entries of a tar stream, one after the other, in all the dialects that images come in.

Strict where two readers could see two archives: such a stream raises `TarError`. What the names mean, and whether they are
allowed, is left to whoever asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from untax.core import tar
from untax.core.tar import BLOCK, Header, TarError
from untax.layers.blob import Blob, Caps

FILE, HARD_LINK, LINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO = b"0", b"1", b"2", b"3", b"4", b"5", b"6"
_PLAIN_FILES = (b"0", b"\0", b"7")
_LONG_NAME, _LONG_TARGET, _SPARSE, _LABEL = b"L", b"K", b"S", b"V"
_LONGEST_PATH = 4096  # PATH_MAX: a longer one could not be named by any program inside
_TIMES = (1 << 40) * 10**9  # nanoseconds from 1970 either way; file systems end long before
_ATTRIBUTE = b"SCHILY.xattr."
_REPEATED = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
# For every entry that follows: only what is harmless when a reader overlooks it.
_GLOBAL = (b"comment", b"mtime", b"atime", b"ctime", b"uid", b"gid", b"uname", b"gname", b"charset", b"hdrcharset")


@dataclass(slots=True)
class Entry:
    name: bytes
    kind: bytes
    """One of the seven above, whatever the archive wrote."""
    mode: int
    uid: int
    gid: int
    size: int
    """Of a file as it will be, holes included; `stored` bytes of it are in the archive."""
    mtime_ns: int
    target: bytes
    device: tuple[int, int]
    stored: int
    pieces: list[tuple[int, int]] | None = None
    """Where a sparse file's stored bytes belong; None for one without holes."""
    attributes: list[tuple[bytes, bytes]] = field(default_factory=list)


class Tarball:
    """Iterate over it; between two entries, `content()` gives the bytes of the one just seen."""

    def __init__(self, blob: Blob, caps: Caps) -> None:
        self._blob = blob
        self._caps = caps
        self._left = 0  # of the current entry's bytes
        self._padding = 0
        self._global: dict[bytes, bytes] = {}
        self._long: dict[bytes, bytes] = {}  # the GNU dialect's long names, for the entry that follows
        self._extended: list[tuple[bytes, bytes]] | None = None
        self.offset = 0
        """Where in the unpacked stream we are: at an entry, where its contents begin."""
        self.entries = 0

    def __iter__(self) -> Iterator[Entry]:
        while (header := self._header()) is not None:
            if (entry := self._take(header)) is not None:
                self.entries += 1
                if self.entries > self._caps.entries:
                    raise TarError(f"more than {self._caps.entries} entries")
                yield entry
        self._expect_zeros()

    def content(self) -> Iterator[memoryview]:
        """The stored bytes of the current entry that were not read yet."""
        for part in self._blob.parts(self._left):
            self._left -= len(part)
            self.offset += len(part)
            yield part
        if self._left:
            raise TarError("it ends in the middle of a file")

    def _exactly(self, size: int) -> bytes:
        data = self._blob.read(size)
        if len(data) != size:
            raise TarError("it ends in the middle")
        self.offset += size
        return data

    # ---- headers ----

    def _header(self) -> Header | None:
        """The next one, or None at the end of the archive."""
        self._skip()
        block = self._exactly(BLOCK)
        if block.count(0) == BLOCK:
            if self._extended is not None or self._long:
                raise TarError("it ends after an extended header")
            return None
        header = Header(block)
        if not header.has_known_magic:
            raise TarError("a header of no known dialect")
        return header

    def _skip(self) -> None:
        left = self._left + self._padding
        if left and self._blob.skip(left) != left:
            raise TarError("it ends in the middle of a file")
        self.offset += left
        self._left = self._padding = 0

    def _begin(self, size: int) -> None:
        self._left, self._padding = size, -size % BLOCK

    def _expect_zeros(self) -> None:
        """Behind the end there may be padding and nothing else: another archive would be seen by some readers only."""
        while data := self._blob.read(1 << 16):
            if data.count(0) != len(data):
                raise TarError("something follows its end")

    def _take(self, header: Header) -> Entry | None:
        """An entry, or None for a header that only prepares one."""
        kind = header.kind
        if kind == b"x":
            if self._extended is not None:
                raise TarError("two extended headers for one entry")
            self._extended = self._records(header)
        elif kind == b"g":
            self._take_global(self._records(header))
        elif kind in (_LONG_NAME, _LONG_TARGET):
            if kind in self._long:
                raise TarError("two long names for one entry")
            self._long[kind] = self._whole(header, _LONGEST_PATH).rstrip(b"\0")
        elif kind == _LABEL:
            if header.size:
                raise TarError("a volume's label with contents")
        else:
            return self._entry(header)
        return None

    def _whole(self, header: Header, most: int) -> bytes:
        size = header.size
        if size > most:
            raise TarError(f"an extended header of {size} bytes; {most} are allowed")
        self._begin(size)
        return b"".join(bytes(part) for part in self.content())

    def _records(self, header: Header) -> list[tuple[bytes, bytes]]:
        return tar.records(self._whole(header, self._caps.extended_bytes))

    def _take_global(self, records: list[tuple[bytes, bytes]]) -> None:
        for key, value in records:
            if key not in _GLOBAL:
                raise TarError(f"a global header that sets {key[:40]!r}")
            self._global[key] = value

    # ---- one entry ----

    def _entry(self, header: Header) -> Entry:
        kind, size = header.kind, header.size
        device = header.device if kind in (CHARACTER, BLOCK_DEVICE) else (0, 0)
        entry = Entry(
            header.name, kind, header.mode & 0o7777, header.uid, header.gid, size, header.mtime * 10**9, header.target, device, size
        )
        records, values = self._extend(entry) if self._extended is not None or self._long or self._global else ([], self._global)
        if not -_TIMES <= entry.mtime_ns <= _TIMES:
            raise TarError("a time that no clock reaches")
        entry.kind = _kind(kind, entry.name)
        if entry.kind != FILE and entry.stored:
            raise TarError("contents where there can be none")  # some readers would skip them and some would not
        self._begin(entry.stored)
        if kind == _SPARSE:
            self._old_sparse(header, entry)
        elif any(key.startswith(b"GNU.sparse.") for key in values):
            self._extended_sparse(entry, records, values)
        return entry

    def _extend(self, entry: Entry) -> tuple[list[tuple[bytes, bytes]], dict[bytes, bytes]]:
        """Replace what the headers before this one say better."""
        records, self._extended = self._extended or [], None
        long, self._long = self._long, {}
        keys = [key for key, _ in records if key not in _REPEATED]
        if len(set(keys)) != len(keys):
            raise TarError("an extended header that says one thing twice")
        values = {**self._global, **dict(records)}
        if (_LONG_NAME in long and b"path" in values) or (_LONG_TARGET in long and b"linkpath" in values):
            raise TarError("two long names for one entry")
        entry.name = _path(values.get(b"path", long.get(_LONG_NAME, entry.name)))
        target = values.get(b"linkpath", long.get(_LONG_TARGET))
        if target is not None:
            entry.target = _path(target)
        if b"size" in values:
            entry.size = entry.stored = tar.decimal(values[b"size"])
        if b"mtime" in values:
            entry.mtime_ns = tar.nanoseconds(values[b"mtime"])
        if b"uid" in values:
            entry.uid = tar.decimal(values[b"uid"])
        if b"gid" in values:
            entry.gid = tar.decimal(values[b"gid"])
        entry.attributes = [(key[len(_ATTRIBUTE) :], value) for key, value in records if key.startswith(_ATTRIBUTE)]
        return records, values

    # ---- sparse files ----

    def _old_sparse(self, header: Header, entry: Entry) -> None:
        pieces, entry.size, goes_on = header.sparse()
        while goes_on:
            block = self._exactly(BLOCK)
            pieces += tar.sparse_entries(block[:504])
            goes_on = block[504] != 0
            self._check_pieces(len(pieces))
        self._set_pieces(entry, pieces)

    def _extended_sparse(self, entry: Entry, records: list[tuple[bytes, bytes]], values: dict[bytes, bytes]) -> None:
        """The three ways in which GNU tar has written maps into extended headers."""
        if entry.kind != FILE:
            raise TarError("a sparse map of what is not a file")
        version = (values.get(b"GNU.sparse.major", b"0"), values.get(b"GNU.sparse.minor", b"0"))
        real = values.get(b"GNU.sparse.realsize", values.get(b"GNU.sparse.size"))
        if real is None:
            raise TarError("a sparse file without its size")
        entry.size = tar.decimal(real)
        entry.name = _path(values.get(b"GNU.sparse.name", entry.name))
        if version == (b"1", b"0"):
            numbers = self._numbers(entry)
        elif b"GNU.sparse.map" in values:
            numbers = [tar.decimal(number) for number in values[b"GNU.sparse.map"].split(b",")] if values[b"GNU.sparse.map"] else []
        elif version[0] == b"0":
            numbers = [tar.decimal(value) for key, value in records if key in (b"GNU.sparse.offset", b"GNU.sparse.numbytes")]
        else:
            raise TarError("a sparse file of an unknown version")
        if len(numbers) % 2:
            raise TarError("half a sparse map")
        self._set_pieces(entry, list(zip(numbers[::2], numbers[1::2], strict=True)))

    def _numbers(self, entry: Entry) -> list[int]:
        """The map at the beginning of the contents: a count and as many pairs, a line each, filled up to a block."""
        data = bytearray()
        lines, wanted = 0, 1
        while lines < wanted:
            if self._left < BLOCK or len(data) > self._caps.extended_bytes:
                raise TarError("a sparse map that does not end")
            block = self._exactly(BLOCK)
            self._left -= BLOCK
            data += block
            lines += block.count(b"\n")
            if wanted == 1 and lines:
                count = tar.decimal(bytes(data[: data.index(b"\n")]))
                self._check_pieces(count)
                wanted += 2 * count
        entry.stored = self._left
        return [tar.decimal(line) for line in bytes(data).split(b"\n")[1:wanted]]

    def _check_pieces(self, count: int) -> None:
        if count > self._caps.extended_bytes // 8:
            raise TarError("a sparse map that is too long")

    def _set_pieces(self, entry: Entry, pieces: list[tuple[int, int]]) -> None:
        tar.check_sparse(pieces, stored=entry.stored, whole=entry.size)
        entry.pieces = [piece for piece in pieces if piece[1]]


def _path(value: bytes) -> bytes:
    if not value or len(value) >= _LONGEST_PATH or b"\0" in value:
        raise TarError("a path that is none")
    return value


def _kind(letter: bytes, name: bytes) -> bytes:
    if letter in _PLAIN_FILES:
        return DIRECTORY if name.endswith(b"/") else FILE  # as the oldest dialect wrote directories
    if letter == _SPARSE:
        return FILE
    if letter in (HARD_LINK, LINK, CHARACTER, BLOCK_DEVICE, DIRECTORY, FIFO):
        return letter
    raise TarError(f"an entry of the unknown kind {letter!r}")
