"""A blocking stream for much data that has left TLS: records of up to 256 KiB, each sealed by AES-256-GCM, that nobody can read or change on their way.

The keys are of this connection alone, one for each direction, and came inside TLS (`docs/protocol.md`). TLS's own records hold 16 KiB
at most: a turn of the interpreter and two copies for each of them took more time than what sealed them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from struct import Struct
from typing import NamedTuple, NoReturn

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from untax.cluster.transfer.held import Held

RECORD = 256 << 10
"""Bytes that are sealed together: still in the processor's own cache when they are sent, or written."""
_SIZE = Struct(">I")  # so a record of TLS, which begins with 23 or less and 3, is too long for one of these and refused at its fourth byte
_TAG = 16
_NONCE = Struct("<4xQ")
_KEY = 32
_WHOLE = _SIZE.size + RECORD + _TAG
_LEAST = 16 << 10  # bytes for the records of who has never had a longer one: most connections carry questions, and wait

Into = Callable[[bytes, memoryview, memoryview, memoryview], object]
"""Seals, or opens, with a nonce; what it is given, and with it what is only proven, into a place of just the size that it takes."""


class Keys(NamedTuple):
    """Of the end that dialled, and of the end that serves, each for what it sends."""

    dialler: bytes
    server: bytes

    @classmethod
    def new(cls) -> Keys:
        return cls(os.urandom(_KEY), os.urandom(_KEY))

    @classmethod
    def from_data(cls, said: object) -> Keys:
        """As `to_data` gave them; `ValueError` for anything else."""
        keys = bytes.fromhex(said) if isinstance(said, str) else b""
        if len(keys) != 2 * _KEY:
            raise ValueError("keys of another length")
        return cls(keys[:_KEY], keys[_KEY:])

    def to_data(self) -> str:
        return (self.dialler + self.server).hex()


def can_seal() -> bool:
    """False where the machine's rules leave AES-GCM out."""
    try:
        AESGCM(bytes(_KEY))
    except UnsupportedAlgorithm:
        return False
    return True


class SealedStream(Held):
    """Of one thread, but for `cut`. Raises `OSError`."""

    def __init__(self, sock: socket.socket, *, sends: bytes, receives: bytes) -> None:
        """With the key that this end seals with, and the other end's."""
        super().__init__(sock)
        self._seal, self._open = _sealing(sends), _opening(receives)
        self._sent = self._opened = 0
        # A nonce that is used twice gives the key away: that no second thread sends meanwhile is made sure of here, too.
        self._sending = threading.Lock()
        self._out = memoryview(b"")
        self._packed = memoryview(bytearray(_LEAST))
        self._begin = self._end = 0  # of what has come and was not opened
        self._clear = memoryview(b"")  # of the last record what nobody wanted yet

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        with self._sending:
            for at in range(0, len(view), RECORD):
                self._send(view[at : at + RECORD])

    def read_into(self, view: memoryview, until: float | None) -> int:
        """Fill it. Gives how much came, which is less when it is later than `until` by the monotonic clock. An end is a cut, wherever it comes."""
        at, size = 0, len(view)
        while at < size:
            if self._clear:
                length = min(len(self._clear), size - at)
                view[at : at + length] = self._clear[:length]
                self._clear = self._clear[length:]
            elif (length := self._wait_record(until)) == 0:
                break
            elif length <= size - at:
                self._take(view[at : at + length])
            else:
                clear = memoryview(bytearray(length))
                self._take(clear)
                self._clear, length = clear, 0
            at += length
        return at

    def has_more(self, within_s: float) -> bool:
        """Whether something has come, or comes within that time, that was not given yet. The end is something, too."""
        if self._clear or self._end > self._begin:
            return True
        return self._comes(within_s)

    # ---- records ----

    def _send(self, data: memoryview) -> None:
        size = len(data) + _TAG
        whole = _SIZE.size + size
        if whole <= _LEAST:
            record = memoryview(bytearray(whole))
        else:
            self._out = self._out or memoryview(bytearray(_WHOLE))
            record = self._out[:whole]
        _SIZE.pack_into(record, 0, size)
        nonce, self._sent = _NONCE.pack(self._sent), self._sent + 1
        self._seal(nonce, data, record[: _SIZE.size], record[_SIZE.size :])
        self._sock.sendall(record)

    def _wait_record(self, until: float | None) -> int:
        """How many bytes are in the next record, once all of it is there; 0 when that was not so in time."""
        while True:
            have, whole = self._end - self._begin, 0
            if have >= _SIZE.size:
                (size,) = _SIZE.unpack_from(self._packed, self._begin)
                if not _TAG < size <= RECORD + _TAG:
                    self._fail(f"a record of {size} bytes")
                whole = _SIZE.size + size
                if have >= whole:
                    return int(size) - _TAG
            if until is not None and time.monotonic() > until:
                return 0
            self._fill(whole)

    def _fill(self, whole: int) -> None:
        """More of a record that has so many bytes, and of the one behind it no more than says how long that is: so none has to be moved. Of
        one that has not said how many yet, whatever is there.
        """
        most = whole + _SIZE.size if whole else _LEAST
        if self._begin + most > len(self._packed):
            kept = self._packed[self._begin : self._end]
            if most > len(self._packed):
                self._packed = memoryview(bytearray(_WHOLE + _SIZE.size))
            self._packed[: len(kept)] = kept
            self._begin, self._end = 0, len(kept)
        got = self._sock.recv_into(self._packed[self._end : self._begin + most])
        if got == 0:
            raise ConnectionResetError("the connection ended")
        self._end += got

    def _take(self, clear: memoryview) -> None:
        """The next record, which is there, into a place of its size."""
        head = self._begin + _SIZE.size
        end = head + len(clear) + _TAG
        try:
            self._open(_NONCE.pack(self._opened), self._packed[head:end], self._packed[self._begin : head], clear)
        except InvalidTag:
            self._fail("a record that is not the other end's")
        self._opened += 1
        self._begin = end

    def _fail(self, why: str) -> NoReturn:
        """For good: what did not open is still the next record to whoever reads on."""
        self.cut()
        raise ConnectionAbortedError(why)


# ---- releases of cryptography ----


def _sealing(key: bytes) -> Into:
    cipher = AESGCM(key)
    if hasattr(cipher, "encrypt_into"):
        return cipher.encrypt_into

    def encrypt_into(nonce: bytes, data: memoryview, proven: memoryview, into: memoryview) -> None:
        into[:] = cipher.encrypt(nonce, data, proven)

    return encrypt_into


def _opening(key: bytes) -> Into:
    cipher = AESGCM(key)
    if hasattr(cipher, "decrypt_into"):
        return cipher.decrypt_into

    def decrypt_into(nonce: bytes, data: memoryview, proven: memoryview, into: memoryview) -> None:
        into[:] = cipher.decrypt(nonce, data, proven)

    return decrypt_into
