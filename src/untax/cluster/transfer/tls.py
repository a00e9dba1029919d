"""A blocking TLS stream: records are packed and unpacked in memory, and the kernel is asked for many at a time.

Python's own TLS socket makes two calls of the kernel's for each record of 16 KiB. For 1 GiB over loopback, both ends together took
1.5 s of processor time with it and 1.25 s with this.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from untax.cluster.transfer.held import Held

_STEP = 256 << 10  # bytes that the kernel is asked for, or given, at a time: 16 records
_LEAST = 16 << 10  # bytes that it is asked for by who has never had more: most connections carry questions, and wait


class TlsStream(Held):
    """Of one thread, but for `cut`. Raises `OSError`, of which `ssl.SSLError` is one."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, within_s: float, server_hostname: str | None = None) -> None:
        """Shakes hands, as the server unless the other end has a name. `TimeoutError` when that took longer, byte by byte or not."""
        super().__init__(sock)
        self._in, self._out = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._in, self._out, server_side=server_hostname is None, server_hostname=server_hostname)
        self._packed = memoryview(bytearray(_LEAST))
        until = time.monotonic() + within_s
        while True:
            try:
                self._tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                # What is left of the time, not the whole of it for each byte: whoever sends one now and then would hold us for ever.
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError(f"no handshake within {within_s:g} s") from None
                sock.settimeout(left_s)
                self._flush()
                self._fill()
            except ssl.SSLError:
                with contextlib.suppress(OSError):
                    self._flush()  # the alert that says why
                raise
        self._flush()

    def sendall(self, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data)
        at = 0
        while at < len(view):
            at += self._tls.write(view[at : at + _STEP])
            if self._out.pending >= _STEP:
                self._flush()
        self._flush()

    def read_into(self, view: memoryview, until: float | None) -> int:
        """Fill it. Gives how much came, which is less at the end, and when it is later than `until` by the monotonic clock."""
        read, at, size = self._tls.read, 0, len(view)
        while at < size:
            try:
                # A record at most. With somewhere to put it, how much it was is what it gives; typeshed says otherwise.
                at += read(size - at, view[at:])  # type: ignore[operator]
            except ssl.SSLWantReadError:
                if until is not None and time.monotonic() > until:
                    break
                self._flush()  # a new key may have to be confirmed
                self._fill()
            except ssl.SSLZeroReturnError:
                break
        return at

    def has_more(self, within_s: float) -> bool:
        """Whether something has come, or comes within that time, that was not given yet. The end is something, too."""
        if self._tls.pending() or self._in.pending:
            return True
        return self._comes(within_s)

    def leave(self) -> socket.socket:
        """The connection, for who goes on without TLS. `ConnectionError` where the other end has said more inside it: that would be lost, or
        taken for something else.
        """
        if self._tls.pending() or self._in.pending or self._out.pending:
            raise ConnectionAbortedError("more was said inside TLS than its last message")
        return self._sock

    def _fill(self) -> None:
        got = self._sock.recv_into(self._packed)
        if got == 0:
            raise ConnectionResetError("the connection ended")
        self._in.write(self._packed[:got])
        if got == len(self._packed) < _STEP:
            self._packed = memoryview(bytearray(_STEP))

    def _flush(self) -> None:
        if self._out.pending:
            self._sock.sendall(self._out.read())
