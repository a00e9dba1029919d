"""Where connections of other nodes come in. Before it has said hello with the fleet's token a connection is nobody's: it has seconds, in all,
and when too many are at the door the one that has stood there for longest goes. So whoever only holds the door up holds up nobody else.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any

from untax import __version__
from untax.cluster.transfer.tls import TlsStream
from untax.cluster.transfer.wire import CONNECT_S, PROTOCOL, PeerFault, Wire, tune

_log = logging.getLogger("untax.transfer")
_MOST = 64  # connections that have not said hello yet, each with a thread: a node takes milliseconds for it
_BACKLOG = 256
_LONGEST_HELLO = 4096  # bytes
_WARN_S = 10.0  # between two warnings of somebody without a token: anybody can make us write them
_PAUSE_S = 0.1  # while there are no descriptors or threads to be had: nothing tells when there are again


class Door:
    """`greeted` is called, in any thread, with each connection that has said hello, and with that, which is to be answered."""

    def __init__(
        self, node: str, context: ssl.SSLContext, token: str, *, host: str, port: int, greeted: Callable[[Wire, dict[str, Any]], None]
    ) -> None:
        self._node = node
        self._context = context
        self._token = token.encode()
        self._greeted = greeted
        self._guard = threading.Lock()
        self._greeting: dict[socket.socket, None] = {}  # the oldest first
        self._threads: set[threading.Thread] = set()
        self._closed = threading.Event()
        self._warned_at = float("-inf")
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_BACKLOG)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, name="untax-layers-door", daemon=True)

    def start(self) -> None:
        self._accepting.start()

    def close(self) -> None:
        """Nobody comes in afterwards. Safe to call twice."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in `accept`
        self._listener.close()
        if self._accepting.ident is not None:
            self._accepting.join()
        with self._guard:
            while self._greeting:
                self._send_away()
            threads = list(self._threads)
        for thread in threads:
            thread.join()

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except OSError as exc:
                # One that ended too soon, or no descriptors, of which those at the door give theirs back in seconds. The next may fare better.
                if not self._closed.is_set():
                    _log.warning("no connection could be taken: %s", exc)
                    self._closed.wait(_PAUSE_S)
                continue
            thread = threading.Thread(target=self._greet, args=(sock, address), name="untax-layers-greet", daemon=True)
            with self._guard:
                self._threads = {one for one in self._threads if one.is_alive()}
                while len(self._greeting) >= _MOST:
                    self._send_away()
                self._greeting[sock] = None
                try:
                    thread.start()
                    self._threads.add(thread)
                except RuntimeError as exc:
                    del self._greeting[sock]
                    sock.close()
                    _log.warning("no thread for a connection: %s", exc)
                    self._closed.wait(_PAUSE_S)

    def _send_away(self) -> None:
        """The oldest; its thread learns it from the connection's end, and closes that."""
        oldest = next(iter(self._greeting))
        del self._greeting[oldest]
        with contextlib.suppress(OSError):
            oldest.shutdown(socket.SHUT_RDWR)

    def _greet(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        until = time.monotonic() + CONNECT_S
        try:
            tune(sock)
            sock.settimeout(CONNECT_S)
            wire = Wire(TlsStream(sock, self._context, within_s=CONNECT_S), str(address[0]))
            hello = self._hello(wire, until)
        except (OSError, PeerFault) as exc:
            _log.debug("somebody at %s spoke no TLS of ours, or not in time: %s", address[0], exc)
            hello = None
        finally:
            with self._guard:
                self._greeting.pop(sock, None)  # from here on only this thread touches it
        if hello is not None:
            self._greeted(wire, hello)
        else:
            sock.close()

    def _warn(self, who: str) -> None:
        level = logging.DEBUG
        if time.monotonic() - self._warned_at > _WARN_S:
            level, self._warned_at = logging.WARNING, time.monotonic()
        _log.log(level, "somebody at %s has not this fleet's token", who)

    def _hello(self, wire: Wire, until: float) -> dict[str, Any] | None:
        """None of who is not of this fleet, or of another release, and was told so."""
        said = wire.receive(until=until, most=_LONGEST_HELLO)
        if said.get("op") != "hello" or not hmac.compare_digest(str(said.get("token")).encode(errors="replace"), self._token):
            self._warn(wire.who)
            wire.send_at_once(
                {"error": f"node {self._node}: this is not its fleet's token; take one with Fleet.ticket from a running fleet"}
            )
            return None
        if said.get("protocol") != PROTOCOL or said.get("version") != __version__:
            theirs = f"{said.get('version')!r:.40}"
            wire.send_at_once({"error": f"node {self._node} runs untax {__version__}, you {theirs}: install one release on all nodes"})
            return None
        # A name goes into logs, and into answers to others.
        wire.who = ascii(str(said.get("node"))[:200])[1:-1]
        return said
