"""A layer of this node's store as another node wants it: what its rows do not say, and its contents by chunks.

Whoever reads from one holds the layer pinned meanwhile.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import json
import os
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from untax.cluster.transfer.plan import Piece, chunks_of
from untax.cluster.transfer.sealed import RECORD
from untax.cluster.transfer.wire import Wire
from untax.layers import marks
from untax.layers._descent import Descent
from untax.layers.rows import Row, path_of, read_rows
from untax.layers.store import LayerStore

COUNT = struct.Struct("<I")
EXTENT = struct.Struct("<QQ")
STEP = RECORD
"""Bytes that are read, sent, received and written at a time."""
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class Outgoing:
    """Safe for several threads at once."""

    def __init__(self, store: LayerStore, layer_id: str) -> None:
        self.packed_rows = store.rows(layer_id)
        self._tree: Path = store.layer(layer_id).tree
        self._rows: list[Row] = read_rows(self.packed_rows, layer_id)
        self._chunks = chunks_of(self._rows)
        self.rest = _rest(self._tree, self._rows)

    def send_chunk(self, wire: Wire, number: int) -> None:
        if not 0 <= number < len(self._chunks):
            wire.send({"error": f"there is no chunk {number}"})
            return
        chunk = self._chunks[number]
        with Descent(self._tree) as descent:
            if len(chunk) == 1:
                with self._opened(descent, chunk[0].row) as (fd, is_sparse):
                    self._send_part(wire, fd, chunk[0], is_sparse)
            else:
                self._send_files(wire, descent, chunk)

    def _send_files(self, wire: Wire, descent: Descent, chunk: tuple[Piece, ...]) -> None:
        counts, extents = bytearray(), bytearray()
        data = memoryview(bytearray(sum(piece.length for piece in chunk)))
        end = 0
        for piece in chunk:
            with self._opened(descent, piece.row) as (fd, is_sparse):
                found = _extents(fd, 0, piece.length, is_sparse)
                counts += COUNT.pack(len(found))
                for at, length in found:
                    extents += EXTENT.pack(at, length)
                    _read_into(fd, data[end : end + length], at)
                    end += length
        wire.send({"map": len(counts) + len(extents), "bytes": end})
        wire.send_bytes(counts + extents)
        wire.send_bytes(data[:end])

    def _send_part(self, wire: Wire, fd: int, piece: Piece, is_sparse: bool) -> None:
        found = _extents(fd, piece.offset, piece.length, is_sparse)
        head = COUNT.pack(len(found)) + b"".join(EXTENT.pack(at, length) for at, length in found)
        wire.send({"map": len(head), "bytes": sum(length for _, length in found)})
        wire.send_bytes(head)
        buffer = memoryview(bytearray(STEP))
        for at, length in found:
            end = at + length
            while at < end:
                view = buffer[: min(STEP, end - at)]
                _read_into(fd, view, at)
                wire.send_bytes(view)
                at += len(view)

    @contextlib.contextmanager
    def _opened(self, descent: Descent, number: int) -> Iterator[tuple[int, bool]]:
        """Its descriptor, and whether there may be holes in it."""
        row = self._rows[number]
        fd = os.open(row.name, _READ, dir_fd=descent.seek(path_of(self._rows, row.parent)))
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != row.size:
                raise OSError(errno.EIO, "a file is not what it was when it was stored")
            yield fd, found.st_blocks * 512 < found.st_size
        finally:
            os.close(fd)


def _rest(tree: Path, rows: list[Row]) -> bytes:
    """What the digest leaves out and a copy keeps, and what it has only a hash of: times of directories and links, extended attributes."""
    times: list[int] = []
    attributes: dict[int, list[tuple[str, str]]] = {}
    stored = 0
    with Descent(tree) as descent:
        for number, row in enumerate(rows):
            if row.kind in "wh":
                continue
            within = descent.seek(path_of(rows, number if row.kind == "d" else row.parent))
            found = os.fstat(within) if row.kind == "d" else os.stat(row.name, dir_fd=within, follow_symlinks=False)
            stored += min(found.st_blocks * 512, max(found.st_size, 0)) if row.kind == "f" else 0
            if row.kind != "f":
                times.append(found.st_mtime_ns)
            if row.attributes:
                path = within if row.kind == "d" else b"/proc/self/fd/%d/%s" % (within, row.name)
                attributes[number] = [(name, base64.b64encode(value).decode()) for name, value in _attributes(path)]
    return zlib.compress(json.dumps({"times": times, "attributes": attributes, "stored": stored}).encode(), 1)


def _attributes(at: int | bytes) -> Iterator[tuple[str, bytes]]:
    follow = isinstance(at, int)
    for name in sorted(os.listxattr(at, follow_symlinks=follow)):
        if not marks.is_volatile(name):
            yield name, os.getxattr(at, name, follow_symlinks=follow)


def _extents(fd: int, at: int, length: int, is_sparse: bool) -> list[tuple[int, int]]:
    """Where there is data in a part of a file."""
    if not is_sparse:
        return [(at, length)]
    found = []
    end = at + length
    while at < end:
        try:
            at = os.lseek(fd, at, os.SEEK_DATA)
        except OSError as exc:
            if exc.errno == errno.ENXIO:  # a hole up to the end
                break
            raise
        stop = min(os.lseek(fd, at, os.SEEK_HOLE), end)
        if at < stop:
            found.append((at, stop - at))
        at = stop
    return found


def _read_into(fd: int, view: memoryview, at: int) -> None:
    if os.preadv(fd, [view], at) != len(view):
        raise OSError(errno.EIO, "a file became shorter while it was sent")
