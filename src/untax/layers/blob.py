"""The bytes of one blob as they were before it was compressed: counted, capped and hashed on the way.

A blob is as hostile as its author: what it unpacks to has a cap of its own and one in proportion to what was read, and no
step takes more memory than a few megabytes, whatever the blob says about itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import lzma
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from untax.core.errors import StageFailed

_STEP = 256 << 10  # read from the blob at a time
_PIECE = 1 << 20  # and unpacked at a time: large enough that Python's own cost vanishes
# `xz -9` needs 65 MiB to unpack and zstd's largest ordinary window is 8 MiB (128 MiB with --ultra --long); a blob may ask for gigabytes.
_XZ_MEMORY = 128 << 20
_ZSTD_WINDOW = 128 << 20


@dataclass(frozen=True, slots=True)
class Caps:
    """What one layer may come to. Declared here so that a refusal can name them."""

    bytes: int = 64 << 30
    entries: int = 1_000_000
    ratio: int = 100
    """Unpacked bytes for each one read: programs reach 4, text 20, zeros by gzip 1000."""
    slack_bytes: int = 256 << 20
    """May be reached at any ratio: an archive of a few empty tables is not a bomb."""
    deepest: int = 128
    extended_bytes: int = 1 << 20
    """Of one extended header, extended attributes included."""


class Readable(Protocol):
    def read(self, size: int, /) -> bytes | None: ...


def refused(message: str) -> StageFailed:
    return StageFailed("image", message)


class Blob:
    """Reads `source` to its end. `digest` and `diff_id` are what the bytes must hash to, packed and unpacked."""

    def __init__(
        self,
        source: Readable,
        *,
        digest: str | None = None,
        diff_id: str | None = None,
        caps: Caps | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.packed_bytes = 0
        self.bytes = 0
        self._source = source
        # What nobody wants to know the hash of need not be read to be left out.
        self._file = source if isinstance(source, io.FileIO) and digest is None and diff_id is None else None
        self._caps = caps or Caps()
        self._on_read = on_read
        self._packed_hash = _Hash(digest, "digest")
        self._plain_hash = _Hash(diff_id, "diff_id")
        self._plain = self._pieces()
        self._piece = memoryview(b"")
        self._end: int | None = None  # of a file that is not compressed, in which one can go ahead

    def read(self, size: int) -> bytes:
        """So many bytes, or fewer at the end."""
        if len(self._piece) >= size:
            taken, self._piece = self._piece[:size], self._piece[size:]
            return bytes(taken)
        return b"".join(bytes(part) for part in self.parts(size))

    def parts(self, size: int) -> Iterator[memoryview]:
        """So many bytes in parts as they come, or fewer at the end."""
        while size:
            if not self._piece and not self._next():
                return
            taken, self._piece = self._piece[:size], self._piece[size:]
            size -= len(taken)
            yield taken

    def skip(self, size: int) -> int:
        """Leave so many bytes out, and say how many there were."""
        buffered = min(size, len(self._piece))
        self._piece = self._piece[buffered:]
        if size > buffered and self._end is not None and self._file is not None:
            at = self.packed_bytes
            self.packed_bytes = self.bytes = self._file.seek(min(self._end, at + size - buffered))
            return buffered + self.packed_bytes - at
        return buffered + sum(len(part) for part in self.parts(size - buffered))

    def finish(self) -> None:
        """Read what is left, and compare the hashes."""
        while self._next():
            pass
        self._packed_hash.check()
        self._plain_hash.check()

    def _next(self) -> bool:
        piece = next(self._plain, b"")
        self._piece = memoryview(piece)
        return bool(piece)

    def _pieces(self) -> Iterator[bytes]:
        first = self._read_packed()
        while 0 < len(first) < _MAGIC_SIZE and (more := self._read_packed()):
            first += more
        if self._file is not None and _unpacker(first) is _plain:
            self._end = os.fstat(self._file.fileno()).st_size
        unpacked = (piece for piece in _unpacker(first)(first, self._read_packed) if piece)
        try:
            for piece in unpacked:
                self.bytes += len(piece)
                self._plain_hash.update(piece)
                self._check_caps()
                yield piece
        except (zlib.error, lzma.LZMAError, EOFError) as exc:
            raise refused(f"the compressed data is damaged: {exc}") from exc

    def _read_packed(self) -> bytes:
        data = self._source.read(_STEP)
        if data is None:  # a file that would make its reader wait, and was opened so that it cannot
            raise refused("it is not a file that can be read to its end")
        self.packed_bytes += len(data)
        self._packed_hash.update(data)
        if self._on_read is not None:
            self._on_read(self.packed_bytes)
        return data

    def _check_caps(self) -> None:
        caps = self._caps
        if self.bytes > caps.bytes:
            raise refused(f"it unpacks to more than {caps.bytes} bytes")
        if self.bytes > caps.slack_bytes + caps.ratio * self.packed_bytes:
            raise refused(
                f"{self.packed_bytes} bytes unpack to more than {self.bytes - 1}: above {caps.slack_bytes} bytes no more than {caps.ratio} for each one are taken"
            )


class _Hash:
    """Nothing is computed unless something was promised."""

    def __init__(self, promised: str | None, what: str) -> None:
        self._promised = promised
        self._what = what
        self._name = promised.partition(":")[0] if promised else "sha256"
        if self._name not in ("sha256", "sha512"):
            raise refused(f"a {what} by {self._name!r}, which is not one of sha256 and sha512")
        self._hash = hashlib.new(self._name)

    def update(self, data: bytes) -> None:
        if self._promised is not None:
            self._hash.update(data)

    def check(self) -> None:
        found = f"{self._name}:{self._hash.hexdigest()}"
        if self._promised is not None and found != self._promised:
            raise refused(f"its {self._what} is {found}, and {self._promised} was promised")


# ---- compressions, told by the first bytes: names and media types may say anything ----

_MAGIC_SIZE = 6
_More = Callable[[], bytes]
_Unpack = Callable[[bytes, _More], Iterator[bytes]]


def _unpacker(first: bytes) -> _Unpack:
    if first.startswith(b"\x1f\x8b"):
        return _gzip
    if first.startswith(b"\xfd7zXZ\0"):
        return _xz
    if first.startswith(b"\x28\xb5\x2f\xfd"):
        return _zstd
    if first.startswith(b"BZh"):
        raise refused("it is compressed with bzip2; compress it with gzip, xz or zstd instead")
    return _plain


def _plain(data: bytes, more: _More) -> Iterator[bytes]:
    while data:
        yield data
        data = more()


def _gzip(data: bytes, more: _More) -> Iterator[bytes]:
    """One member after the other, as gzip reads them; zeros may fill up the end."""
    while data:
        member = zlib.decompressobj(wbits=31)
        while not member.eof:
            yield member.decompress(data, _PIECE)
            data = member.unconsumed_tail or member.unused_data or (b"" if member.eof else more())
            if not data and not member.eof:
                raise refused("the compressed data ends in the middle")
        data = _after(member.unused_data, more, b"\x1f\x8b")


def _xz(data: bytes, more: _More) -> Iterator[bytes]:
    while data:
        stream = lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=_XZ_MEMORY)
        while not stream.eof:
            yield stream.decompress(data, _PIECE)
            data = b""
            if stream.needs_input and not stream.eof:
                data = more()
                if not data:
                    raise refused("the compressed data ends in the middle")
        data = _after(stream.unused_data, more, b"\xfd7zXZ\0")


def _after(data: bytes, more: _More, magic: bytes) -> bytes:
    """What follows an end: nothing, zeros up to the end of everything, or another of the kind, whose beginning is returned."""
    data = data or more()
    while data and len(data) < len(magic):
        added = more()
        if not added:
            break
        data += added
    if data.startswith(magic):
        return data
    while data:
        if data.strip(b"\0"):
            raise refused("something follows the end of the compressed data")
        data = more()
    return b""


def _zstd(data: bytes, more: _More) -> Iterator[bytes]:
    """A stream that ends in the middle of a frame just ends, to one of the libraries: the tar in it is then not whole."""
    opened, error = _zstd_library()
    with contextlib.closing(opened(_Rest(data, more))) as stream:
        try:
            while piece := stream.read(_PIECE):
                yield piece
        except error as exc:
            raise refused(f"the compressed data is damaged: {exc}") from exc


class _Rest:
    """What was read already and what follows it, as a file."""

    def __init__(self, first: bytes, more: _More) -> None:
        self._data = first
        self._more = more

    def read(self, size: int = -1) -> bytes:
        data = self._data or self._more()
        if size < 0:
            size = len(data)
        self._data = data[size:]
        return data[:size]


def _zstd_library() -> tuple[Callable[[_Rest], Any], type[Exception]]:
    """Python's own, which there is since 3.14, or the package `zstandard`."""
    with contextlib.suppress(ImportError):
        own: Any = importlib.import_module("compression.zstd")
        options = {own.DecompressionParameter.window_log_max: _ZSTD_WINDOW.bit_length() - 1}
        return lambda source: own.ZstdFile(source, options=options), own.ZstdError
    with contextlib.suppress(ImportError):
        other: Any = importlib.import_module("zstandard")
        unpacker = other.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
        return lambda source: unpacker.stream_reader(source, read_across_frames=True), other.ZstdError
    raise refused("it is compressed with zstd, which needs the package zstandard: pip install zstandard, or compress it with gzip")
