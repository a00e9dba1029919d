"""WebSocket frames (RFC 6455) to messages and back, for both ends; no sockets.

Only what the held channel needs: binary messages, pings and closes, no extensions. Lengths are checked before they are believed, and
whatever breaks the rules is a `ProtocolError`.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterator
from struct import Struct

from untax.core.errors import ProtocolError

CONTINUATION, TEXT, BINARY, CLOSE, PING, PONG = 0x0, 0x1, 0x2, 0x8, 0x9, 0xA
MESSAGE_MAX = (64 << 20) + 1024
"""Bytes of one message; a control message of 64 MiB and its head."""

_FINAL, _MASKED = 0x80, 0x80
_SHORT, _MIDDLE = 126, 127
_U16, _U64 = Struct(">H"), Struct(">Q")
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept_for(key: bytes) -> bytes:
    """What a server answers to `Sec-WebSocket-Key`."""
    return base64.b64encode(hashlib.sha1(key + _GUID, usedforsecurity=False).digest())


def new_key() -> bytes:
    return base64.b64encode(os.urandom(16))


def masked(data: bytes, key: bytes) -> bytes:
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
    key = os.urandom(4)
    return head + key + masked(payload, key)


class Parser:
    """Cuts what arrives into messages; keeps at most one unfinished one. `is_client`: whose end this is."""

    def __init__(self, *, is_client: bool, most: int = MESSAGE_MAX) -> None:
        self.most = most
        self._is_client = is_client
        self._kept = b""
        self._need = 2
        self._pieces: list[bytes] = []  # of a message in several frames
        self._pieces_size = 0
        self._opcode = CONTINUATION

    def feed(self, received: bytes) -> Iterator[tuple[int, bytes]]:
        """Messages that are whole now, as opcode and payload. Must be run to its end before it is called again."""
        data = self._kept + received if self._kept else received
        at = 0
        while len(data) - at >= self._need:
            found = self._frame(data, at)
            if found is None:
                break
            opcode, payload, at = found
            self._need = 2
            yield from self._message(opcode, payload)
        self._kept = data[at:] if at else data

    def _frame(self, data: bytes, at: int) -> tuple[int, bytes, int] | None:
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
        payload = data[at:end] if self._is_client else masked(data[at + 4 : end], data[at : at + 4])
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
