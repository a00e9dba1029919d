"""Frames of docs/protocol.md, written from the page alone, to speak to a cell (or as one) without the code under test."""

import os
import select
import socket
import struct
import subprocess
import time
from collections.abc import Sequence

MAGIC, MAJOR, MINOR = 0x31787475, 1, 0
HELLO, CONFIGURE, CANCEL, BATCH, PING, CREDIT, DATA = 0x01, 0x02, 0x03, 0x04, 0x05, 0x06, 0x07
SPAWN, READ, WRITE, LIST = 0x10, 0x20, 0x21, 0x23
DONE, STARTED, OUT, ITEMS, ERROR = 0x80, 0x81, 0x82, 0x83, 0x8F
REJECTED, VERSION = 1, 7


def frame(identity: int, kind: int, payload: bytes = b"", *, flags: int = 0, zero: int = 0) -> bytes:
    return struct.pack("<IIBBH", 8 + len(payload), identity, kind, flags, zero) + payload


def raw(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def strs(items: Sequence[bytes]) -> bytes:
    return struct.pack("<I", len(items)) + b"".join(raw(item) for item in items)


def hello(major: int = MAJOR, minor: int = MINOR, version: bytes = b"test") -> bytes:
    return frame(0, HELLO, struct.pack("<IHH", MAGIC, major, minor) + raw(version))


def spawn(identity: int, argv: Sequence[bytes], *, options: int = 0, cap: int = 1 << 20, stdin: bytes = b"") -> bytes:
    payload = struct.pack("<HIHH", options, cap, 0, 0) + raw(b"") + raw(b"") + strs(argv) + strs([]) + raw(stdin)
    return frame(identity, SPAWN, payload)


def finished(*, code: int = 0, out: bytes = b"") -> bytes:
    """The payload of a SPAWN's DONE."""
    return struct.pack("<BiQQQQIIBQQ", 0, code, 1, 1, 1, 1, 0, 0, 0, 0, 0) + raw(out) + raw(b"")


def parse_finished(payload: bytes) -> tuple[int, int, bytes, bytes]:
    """(outcome, code, stdout, stderr) of a SPAWN's DONE."""
    head = struct.Struct("<BiQQQQIIBQQ")
    outcome, code, *_ = head.unpack_from(payload)
    at = head.size
    parts = []
    for _ in range(2):
        (length,) = struct.unpack_from("<I", payload, at)
        parts.append(payload[at + 4 : at + 4 + length])
        at += 4 + length
    return outcome, code, parts[0], parts[1]


class Peer:
    """One connection to `cell agent --stdio`, speaking whatever bytes the test likes."""

    def __init__(self, cell: str, directory: str | os.PathLike[str]) -> None:
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.process = subprocess.Popen([cell, "agent", "--stdio"], stdin=theirs, stdout=theirs, cwd=directory)
        theirs.close()
        self._held = b""

    def send(self, data: bytes) -> None:
        """All of it, or as much as the cell took before it hung up."""
        self.socket.settimeout(10)
        try:
            self.socket.sendall(data)
        except (BrokenPipeError, ConnectionResetError):
            pass

    def next(self, within_s: float = 5.0) -> tuple[int, int, bytes] | None:
        """The next frame as (id, kind, payload); None at the end of the stream; TimeoutError when nothing comes."""
        end = time.monotonic() + within_s
        while True:
            if len(self._held) >= 4:
                (length,) = struct.unpack_from("<I", self._held)
                if len(self._held) >= 4 + length:
                    body, self._held = self._held[4 : 4 + length], self._held[4 + length :]
                    identity, kind = struct.unpack_from("<IB", body)
                    return identity, kind, body[8:]
            if not select.select([self.socket], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("no frame came")
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._held += data

    def until(self, identity: int, within_s: float = 5.0) -> tuple[int, bytes] | None:
        """(kind, payload) of the final frame for `identity`, skipping all others; None at the end of the stream."""
        while (found := self.next(within_s)) is not None:
            if found[0] == identity and found[1] in (DONE, ERROR):
                return found[1:]
        return None

    def is_closed(self, within_s: float = 5.0) -> bool:
        """The stream ends (frames before that are read and dropped)."""
        try:
            while self.next(within_s) is not None:
                pass
        except TimeoutError:
            return False
        return True

    def close(self) -> int:
        """Hang up; the exit status of the cell, which must follow by itself."""
        self.socket.close()
        try:
            return self.process.wait(10)
        finally:
            if self.process.poll() is None:
                self.process.kill()
                self.process.wait()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
