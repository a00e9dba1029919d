"""WebSocket frames (RFC 6455) to messages and back, for both ends; no sockets.

Only what the held channel needs: binary messages, pings and closes, no extensions. Lengths are checked before they are believed, and
whatever breaks the rules is a `ProtocolError`.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator
from struct import Struct

from untax.core.errors import ProtocolError

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
MESSAGE_MAX = (64 << 20) + 1024
"""Bytes of one message; a control message of 64 MiB and its head."""

_FINAL, _MASKED = 0x80, 0x80
_SHORT, _MIDDLE = 126, 127
_U16, _U64 = Struct(">H"), Struct(">Q")
_USUAL = _FINAL | BINARY
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_DRAWN = 4096  # bytes for masks that the kernel is asked for at a time: each question was 0.4 of the 2 µs that a short frame took
_masks: list[bytes] = []


def accept_for(key: bytes) -> bytes:
    """What a server answers to `Sec-WebSocket-Key`."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


def new_key() -> bytes:
    return base64.b64encode(os.urandom(16))


def _new_mask() -> bytes:
    """Four bytes that whoever has what is sent chosen cannot foretell; RFC 6455 asks for no more."""
    try:
        return _masks.pop()  # in one step, whichever thread asks
    except IndexError:
        drawn = os.urandom(_DRAWN)
        fresh = [drawn[at : at + 4] for at in range(0, _DRAWN, 4)]
        mask = fresh.pop()
        _masks.extend(fresh)
        return mask


def masked(data: bytes | memoryview, key: bytes) -> bytes:
    """`data` under a mask; the same again takes it off."""
    size = len(data)
    pattern = (key * (size // 4 + 1))[:size]
    return (int.from_bytes(data, "little") ^ int.from_bytes(pattern, "little")).to_bytes(size, "little")


def frame(opcode: int, payload: bytes, *, is_client: bool) -> bytes:
    """One whole message in one frame. Clients mask what they send, servers do not."""
    size = len(payload)
    bit = _MASKED if is_client else 0
    if size < _SHORT:
        head = bytes((_FINAL | opcode, bit | size))
    elif size < 1 << 16:
        head = bytes((_FINAL | opcode, bit | _SHORT)) + _U16.pack(size)
    else:
        head = bytes((_FINAL | opcode, bit | _MIDDLE)) + _U64.pack(size)
    if not is_client:
        return head + payload
    key = _new_mask()
    return head + key + masked(payload, key)


class Parser:
    """Cuts what arrives into messages; keeps at most one unfinished one. `is_client`: whose end this is."""

    def __init__(self, *, is_client: bool, most: int = MESSAGE_MAX) -> None:
        self.most = most
        self._is_client = is_client
        self._kept = bytearray()  # not yet whole
        self._need = 2  # bytes of it, before anything more can be said
        self._pieces: list[bytes] = []  # of a message in several frames
        self._pieces_size = 0
        self._opcode = CONTINUATION

    def feed(self, received: bytes) -> Iterable[tuple[int, bytes]]:
        """Messages that are whole now, as opcode and payload. Must be run to its end before it is called again."""
        if not self._kept and (payload := self._usual(received)) is not None:
            return ((BINARY, payload),)
        return self._cut(received)

    def _usual(self, data: bytes) -> bytes | None:
        """The payload of a frame that is a whole message, where that is all that came and nothing is wrong with it; None for everything else."""
        if len(data) < 2 or data[0] != _USUAL or self._opcode != CONTINUATION:
            return None
        # A mask where none belongs leaves a size that no frame has, and so does none where one belongs.
        size = data[1] if self._is_client else data[1] ^ _MASKED
        at = 2
        if size == _SHORT and len(data) >= 4:
            size = data[2] << 8 | data[3]
            at = 4
        elif size == _MIDDLE and len(data) >= 10:
            size = _U64.unpack_from(data, 2)[0]
            at = 10
        elif size >= _SHORT:
            return None
        if size > self.most:
            return None
        if self._is_client:
            return data[at:] if len(data) == at + size else None
        return masked(data[at + 4 :], data[at : at + 4]) if len(data) == at + 4 + size else None

    def _cut(self, received: bytes) -> Iterator[tuple[int, bytes]]:
        data: bytes | bytearray = received
        if self._kept:
            data = self._kept
            data += received  # in place: of a large message, what is here is not copied again for each piece that comes
        at = 0
        while len(data) - at >= self._need:
            found = self._frame(data, at)
            if found is None:
                break
            opcode, payload, at = found
            self._need = 2
            yield from self._message(opcode, payload)
        if data is self._kept:
            del self._kept[:at]
        else:
            self._kept += memoryview(data)[at:]

    def _frame(self, data: bytes | bytearray, at: int) -> tuple[int, bytes, int] | None:
        """The frame at `at` and where the next begins; None while it is not whole."""
        start = at
        first, second = data[at], data[at + 1]
        at += 2
        if first & 0x70 or bool(second & _MASKED) is self._is_client:
            raise ProtocolError("a WebSocket frame with bits set that mean nothing here")
        size = second & 0x7F
        if size >= _SHORT:
            width = 2 if size == _SHORT else 8
            if len(data) - at < width:
                self._need = at - start + width
                return None
            size = (_U16 if width == 2 else _U64).unpack_from(data, at)[0]
            at += width
        opcode = first & 0x0F
        is_control = opcode >= CLOSE
        if size + self._pieces_size > self.most or (is_control and (size >= _SHORT or not first & _FINAL)):
            raise ProtocolError(f"a WebSocket frame of {size} bytes: allowed are {self.most}")
        end = at + (0 if self._is_client else 4) + size
        if len(data) < end:
            self._need = end - start
            return None
        view = memoryview(data)
        payload = bytes(view[at:end]) if self._is_client else masked(view[at + 4 : end], bytes(view[at : at + 4]))
        return (opcode | (first & _FINAL), payload, end)

    def _message(self, head: int, payload: bytes) -> Iterator[tuple[int, bytes]]:
        opcode, is_final = head & 0x0F, bool(head & _FINAL)
        if opcode >= CLOSE:
            if opcode > PONG:
                raise ProtocolError(f"a WebSocket frame of kind {opcode}")
            yield opcode, payload
        elif opcode > BINARY or (opcode == CONTINUATION) is not (self._opcode != CONTINUATION):
            raise ProtocolError("a WebSocket frame that continues nothing, or breaks off what was begun")
        elif is_final and opcode != CONTINUATION:
            yield opcode, payload
        else:
            self._opcode = self._opcode or opcode
            self._pieces.append(payload)
            self._pieces_size += len(payload) + 64  # an object for each empty piece is memory too
            if self._pieces_size > self.most:
                raise ProtocolError("a WebSocket message that does not end")
            if is_final:
                whole, opcode = b"".join(self._pieces), self._opcode
                self._pieces, self._pieces_size, self._opcode = [], 0, CONTINUATION
                yield opcode, whole
