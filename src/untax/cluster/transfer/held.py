"""What a connection for layers is by itself, whatever is spoken on it."""

from __future__ import annotations

import contextlib
import select
import socket


class Held:
    """Of one thread, but for `cut`. Raises `OSError`."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock

    def settimeout(self, seconds: float | None) -> None:
        """Of each wait for the other end."""
        self._sock.settimeout(seconds)

    def fileno(self) -> int:
        return self._sock.fileno()

    def cut(self) -> None:
        """From any thread: whoever waits on it is told of its end."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._sock.close()

    def _comes(self, within_s: float) -> bool:
        """Whether anything does, its end too."""
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        return bool(poll.poll(within_s * 1000))
