"""Bytes to frames and back, as docs/protocol.md has them; no sockets.

What comes from the cell is hostile: every length is checked before it is believed, and whatever breaks the rules is a
`ProtocolError`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from struct import Struct
from struct import error as StructError

from untax.core.errors import ProtocolError

MAGIC = 0x31787475  # "utx1"
MAJOR = 1
MINOR = 0

FRAME_MAX_OUT = 4 << 20  # host to cell, counted after the length field
FRAME_MAX_IN = (256 + 8) << 10  # cell to host
DATA_MAX = 256 << 10  # data in one frame of a stream
STREAM_WINDOW = 1 << 20
REQUESTS_MAX = 1024
EGRESS_BIT = 0x80000000
ID_MAX = EGRESS_BIT - 1
KEY_SIZE = 16

# Host to cell.
HELLO, CONFIGURE, CANCEL, BATCH, PING, CREDIT, DATA = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07
QUIESCE, GO_ON, REBORN = 0x08, 0x09, 0x0A
SPAWN, SIGNAL, RESIZE, PROCESSES, ATTACH = 0x10, 0x12, 0x13, 0x14, 0x15
SESSION_OPEN, SESSION_RUN, SESSION_CLOSE = 0x18, 0x19, 0x1A
READ, WRITE, LIST, STAT, MKDIR, REMOVE, MOVE = 0x20, 0x21, 0x23, 0x24, 0x25, 0x26, 0x27
UPLOAD, DOWNLOAD, SEARCH, EDIT, PATCH, WATCH, MARK, MARKS = 0x28, 0x29, 0x2A, 0x2B, 0x2C, 0x2D, 0x2E, 0x2F
CONNECT, EGRESS_OK, EGRESS_DENY = 0x30, 0x31, 0x32
# Cell to host; HELLO and CREDIT go both ways.
DONE, STARTED, OUT, ITEMS, ERROR, EGRESS = 0x80, 0x81, 0x82, 0x83, 0x8F, 0x90

# Flags of a request's header.
HAS_DEADLINE, HAS_KEY = 1, 2

# SPAWN options.
MERGE, STREAM, STDIN, PTY, SHELL = 1, 2, 4, 8, 16

# ERROR codes.
REJECTED, OS, SPAWN_FAILED, GONE, TOO_LARGE, UNSUPPORTED, VERSION = 1, 2, 3, 4, 5, 6, 7
CANCELLED, DEADLINE, CONFLICT, BUSY, NO_WORKER = 8, 9, 10, 11, 12

Frame = tuple[int, int, bytes]  # id, kind, payload

_HEADER = Struct("<IIBBH")
_HEADER_DEADLINE = Struct("<IIBBHI")
_REST = 8  # bytes of the header that `length` counts
_LENGTH = 4
_U8, _U16, _U32, _U64, _I32, _I64 = (Struct("<" + c) for c in "BHIQiq")
_HELLO = Struct("<IHHI")
_CREDIT = Struct("<IIBBHBI")
_DATA = Struct("<IIBBHB")


def frame(request_id: int, kind: int, payload: bytes, deadline_ms: int = 0, key: bytes = b"") -> bytes:
    """One whole frame. A deadline of 0 and an empty key are left out."""
    size = _REST + len(payload)
    if deadline_ms:
        flags = HAS_DEADLINE | HAS_KEY if key else HAS_DEADLINE
        return _HEADER_DEADLINE.pack(size + 4 + len(key), request_id, kind, flags, 0, deadline_ms) + key + payload
    return _HEADER.pack(size + len(key), request_id, kind, HAS_KEY if key else 0, 0) + key + payload


def hello(version: str) -> bytes:
    name = version.encode()
    return frame(0, HELLO, _HELLO.pack(MAGIC, MAJOR, MINOR, len(name)) + name)


def credit(request_id: int, stream: int, count: int) -> bytes:
    return _CREDIT.pack(13, request_id, CREDIT, 0, 0, stream, count)


def data(request_id: int, body: bytes, *, eof: bool) -> bytes:
    return _DATA.pack(9 + len(body), request_id, DATA, 0, 0, eof) + body


def cancel(request_id: int) -> bytes:
    return _HEADER.pack(_REST, request_id, CANCEL, 0, 0)


u8, u16, u32, u64, i32 = _U8.pack, _U16.pack, _U32.pack, _U64.pack, _I32.pack


def blob(value: bytes) -> bytes:
    """A `bytes` field."""
    return _U32.pack(len(value)) + value


def blobs(values: Iterable[bytes]) -> bytes:
    """A `strs` field."""
    parts = [blob(value) for value in values]
    return _U32.pack(len(parts)) + b"".join(parts)


_PIECES_MAX = 4096  # a frame that comes byte by byte must not cost an object for each


class FrameParser:
    """Cuts a byte stream into frames; keeps at most one unfinished frame of `max_frame` bytes.

    `feed` yields the frames that are whole now and must be run to its end before it is called again. After it has raised
    `ProtocolError` the stream cannot be made sense of any more.
    """

    __slots__ = ("_kept", "_max", "_need", "buffered")

    def __init__(self, max_frame: int = FRAME_MAX_IN) -> None:
        self._max = max_frame
        self._kept: list[bytes] = []  # pieces of the unfinished frame, joined once when it is whole
        self.buffered = 0
        self._need = _LENGTH + _REST  # how much must be kept before there is anything new to say

    def feed(self, received: bytes) -> Iterator[Frame]:
        if self._kept:
            self._kept.append(received)
            self.buffered += len(received)
            if self.buffered < self._need:
                if len(self._kept) >= _PIECES_MAX:
                    self._kept = [b"".join(self._kept)]
                return
            received = b"".join(self._kept)
            self._kept.clear()
            self.buffered = 0
        at, end = 0, len(received)
        unpack = _HEADER.unpack_from
        while end - at >= 12:
            length, request_id, kind, flags, zero = unpack(received, at)
            if not 8 <= length <= self._max:
                raise ProtocolError(f"a frame of {length} bytes: allowed are 8 to {self._max}")
            if flags or zero:
                raise ProtocolError(f"a frame of kind {kind:#x} with flags {flags:#x} and padding {zero:#x}")
            stop = at + 4 + length
            if stop > end:
                self._need = 4 + length
                break
            yield request_id, kind, received[at + 12 : stop]
            at = stop
        else:
            self._need = 12
        if at < end:
            self._kept.append(received[at:])
            self.buffered = end - at

    def rest(self) -> bytes:
        """What is kept of the unfinished frame."""
        return b"".join(self._kept)


class Reader:
    """Takes the fields of one payload, in order. Anything missing, and anything left over at `end`, is nonsense."""

    __slots__ = ("_payload", "at")

    def __init__(self, payload: bytes, at: int = 0) -> None:
        self._payload = payload
        self.at = at

    def __len__(self) -> int:
        """How many bytes are left."""
        return len(self._payload) - self.at

    def _take(self, form: Struct) -> int:
        try:
            value: int = form.unpack_from(self._payload, self.at)[0]
        except StructError as exc:
            raise ProtocolError("a payload that is too short") from exc
        self.at += form.size
        return value

    def u8(self) -> int:
        return self._take(_U8)

    def u16(self) -> int:
        return self._take(_U16)

    def u32(self) -> int:
        return self._take(_U32)

    def u64(self) -> int:
        return self._take(_U64)

    def i32(self) -> int:
        return self._take(_I32)

    def i64(self) -> int:
        return self._take(_I64)

    def blob(self, most: int = FRAME_MAX_IN) -> bytes:
        size = self._take(_U32)
        start, stop = self.at, self.at + size
        if size > most or stop > len(self._payload):
            raise ProtocolError(f"a field of {size} bytes where {min(most, len(self._payload) - start)} can be")
        self.at = stop
        return self._payload[start:stop]

    def rest(self) -> bytes:
        start, self.at = self.at, len(self._payload)
        return self._payload[start:]

    def end(self) -> None:
        if self.at != len(self._payload):
            raise ProtocolError(f"{len(self._payload) - self.at} bytes too many in a payload")
