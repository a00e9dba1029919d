"""How two nodes speak about layers: one question and one answer at a time, each a length and JSON, bytes behind an answer that says so.

Hello and its answer go inside TLS, and everything after them in sealed records where both ends can (`sealed`), or inside TLS still.
Blocking, in threads of their own: a stream of gigabytes is nothing for the loop that leases and actions run on, and ciphers and the disk
do their work without holding up other threads. Each end takes the other for broken: every length is bounded, every wait has an end.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

from untax import __version__
from untax.cluster.transfer.sealed import Keys, SealedStream, can_seal
from untax.cluster.transfer.tls import TlsStream

PROTOCOL = 1
_LENGTH = struct.Struct("<I")
_LONGEST = 1 << 20  # bytes of one question or answer, without what follows it; a record's log tail is 64 KiB of it at most
CONNECT_S = 5.0
SILENCE_S = 20.0
"""Without a single byte, where some are due: the other end, or the way to it, is gone."""
BEAT_S = 5.0
"""Whoever makes the other end wait says so this often: a process that is stopped still has a kernel that answers for it."""
_DEAD_AFTER_S = 12  # of a machine that vanished without a word, while nothing is due: 3 questions of the kernel's, 3 s apart


class Peer(NamedTuple):
    """Where a node gives layers away."""

    node: str
    host: str
    port: int

    @classmethod
    def at(cls, node: str, address: str) -> Peer:
        """`address` is `host:port`, an IPv6 host as it is."""
        host, _, port = address.rpartition(":")
        return cls(node, host, int(port))


class PeerFault(Exception):
    """A node that did not answer, or not as it should. Another one is asked in its place."""


class Refused(PeerFault):
    """It answered, with a reason why not."""


class Wire:
    """One connection. Used by one thread at a time; `cut` may come from any."""

    def __init__(self, stream: TlsStream, who: str) -> None:
        self._stream: TlsStream | SealedStream = stream
        self.who = who

    # ---- hello ----

    def greet(self, hello: dict[str, Any], *, until: float) -> None:
        """As who dialled. `Refused` in the other end's words."""
        self.send({**hello, "seals": can_seal()})
        said = self.answer(until=until)
        if "keys" in said:
            try:
                keys = Keys.from_data(said["keys"])
            except ValueError:
                raise PeerFault(f"{self.who}: keys that are none") from None
            self._leave_tls(sends=keys.dialler, receives=keys.server)

    def welcome(self, hello: dict[str, Any], answer: dict[str, Any]) -> None:
        """As who was dialled, to whom nothing is said between hello and the answer. Never waits."""
        if hello.get("seals") is not True or not can_seal():
            self.send_at_once(answer)
            return
        keys = Keys.new()
        self.send_at_once({**answer, "keys": keys.to_data()})
        self._leave_tls(sends=keys.server, receives=keys.dialler)

    def _leave_tls(self, *, sends: bytes, receives: bytes) -> None:
        assert isinstance(self._stream, TlsStream)
        with self._faults():
            self._stream = SealedStream(self._stream.leave(), sends=sends, receives=receives)

    # ---- messages ----

    def send(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        with self._faults():
            self._stream.sendall(_LENGTH.pack(len(data)) + data)

    def send_bytes(self, data: bytes | bytearray | memoryview) -> None:
        with self._faults():
            self._stream.sendall(data)

    def receive(self, *, waits_s: float | None = None, until: float | None = None, most: int = _LONGEST) -> dict[str, Any]:
        """The next message, which has to begin within `waits_s`, or `SILENCE_S`, and to end `SILENCE_S` later; or both by `until` of the
        monotonic clock.
        """
        (length,) = _LENGTH.unpack(self._due(_LENGTH.size, (waits_s or SILENCE_S) if until is None else until - time.monotonic()))
        if length > most:
            raise PeerFault(f"{self.who}: a message of {length} bytes")
        data = self._due(length, SILENCE_S if until is None else until - time.monotonic())
        if until is not None:
            with self._faults():
                self._stream.settimeout(SILENCE_S)
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            raise PeerFault(f"{self.who}: a message that is none") from None
        if not isinstance(message, dict):
            raise PeerFault(f"{self.who}: a message that is none")
        return message

    def ask(self, op: str, *, waits_s: float | None = None, **said: Any) -> dict[str, Any]:
        """The answer; `Refused` in the other end's words."""
        self.send({"op": op, **said})
        return self.answer(waits_s=waits_s)

    def send_at_once(self, message: dict[str, Any]) -> None:
        """A few bytes to whom they can be sent without waiting; `PeerFault` for one that has taken none for long."""
        with self._faults():
            self._stream.settimeout(0)
        try:
            self.send(message)
        finally:
            with contextlib.suppress(OSError):
                self._stream.settimeout(SILENCE_S)

    def answer(self, *, waits_s: float | None = None, until: float | None = None) -> dict[str, Any]:
        """However long it takes, as long as the other end says every `BEAT_S` that it is still to come; but no later than `until`."""
        while (message := self.receive(waits_s=waits_s, until=until)).get("wait") is True:
            pass
        if "error" in message:
            raise Refused(f"{self.who}: {str(message['error'])[:1000]}")
        return message

    # ---- bytes ----

    def read(self, size: int, *, within_s: float | None) -> bytearray:
        data = bytearray(size)
        self.read_into(memoryview(data), within_s=within_s)
        return data

    def _due(self, size: int, within_s: float) -> bytearray:
        within_s = max(within_s, 0.001)
        with self._faults():
            self._stream.settimeout(within_s)
        return self.read(size, within_s=within_s)

    def read_into(self, view: memoryview, *, within_s: float | None) -> None:
        """Fill it. Who sends so slowly that it takes longer than `within_s` is cut off."""
        until = None if within_s is None else time.monotonic() + within_s
        with self._faults():
            came = self._stream.read_into(view, until)
        if came == len(view):
            return
        if until is not None and time.monotonic() > until:
            raise PeerFault(f"{self.who}: {came} of {len(view)} bytes in {within_s:.0f} s")
        raise PeerFault(f"{self.who}: the connection ended")

    def has_more(self, within_s: float) -> bool:
        """Whether the other end has said, or says within that time, more than was received."""
        with self._faults():
            return self._stream.has_more(within_s)

    def fileno(self) -> int:
        return self._stream.fileno()

    def cut(self) -> None:
        """From any thread: whoever waits on it is told of its end."""
        self._stream.cut()

    def close(self) -> None:
        self._stream.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _faults(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise PeerFault(f"{self.who}: {exc if str(exc) else type(exc).__name__}") from None


class Dialer:
    """Opens connections to other nodes of one fleet, as one of its nodes."""

    def __init__(self, node: str, context: ssl.SSLContext, token: str) -> None:
        self.node = node
        self._context = context
        self._token = token
        self._last: Wire | None = None

    def cut(self) -> None:
        """End the connection that was opened last; for who has but one."""
        if self._last is not None:
            self._last.cut()

    def dial(self, peer: Peer, *, timeout_s: float = CONNECT_S) -> Wire:
        """`PeerFault` when there is nobody, or somebody else; or when it takes longer to find that out."""
        until = time.monotonic() + timeout_s
        try:
            plain = socket.create_connection((peer.host, peer.port), timeout_s)
        except OSError as exc:
            raise PeerFault(f"{peer.node}: {exc.strerror or exc}") from None
        try:
            tune(plain)
            stream = TlsStream(plain, self._context, within_s=max(until - time.monotonic(), 0.0), server_hostname=peer.host)
            wire = Wire(stream, peer.node)
        except OSError as exc:
            plain.close()
            raise PeerFault(f"{peer.node}: {exc}") from None
        try:
            hello = {"op": "hello", "protocol": PROTOCOL, "version": __version__, "token": self._token, "node": self.node}
            wire.greet(hello, until=until)
        except BaseException:
            wire.close()
            raise
        self._last = wire
        return wire


def tune(sock: socket.socket) -> None:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 3), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", _DEAD_AFTER_S * 1000)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class Wires:
    """Connections that one piece of work has open, so that it can be stopped from another thread."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._open: set[Wire] = set()
        self._told: list[Callable[[], None]] = []
        self.stopped = threading.Event()
        self.hurried = threading.Event()
        """Somebody waits for it, or it was stopped: nobody takes their time over it any longer."""

    def stop(self) -> None:
        with self._guard:
            self.stopped.set()
            for wire in self._open:
                wire.cut()
            told = list(self._told)
        self.hurried.set()
        for call in told:
            call()

    def hurry(self) -> None:
        self.hurried.set()

    @contextlib.contextmanager
    def told_of_stop(self, call: Callable[[], None]) -> Iterator[None]:
        """`call` is called when it is stopped while the block lasts, or was before it; in any thread."""
        with self._guard:
            self._told.append(call)
            is_stopped = self.stopped.is_set()
        try:
            if is_stopped:
                call()
            yield
        finally:
            with self._guard:
                self._told.remove(call)

    def part(self, nodes: Collection[str]) -> None:
        """End the connections with some nodes."""
        with self._guard:
            for wire in self._open:
                if wire.who in nodes:
                    wire.cut()

    @contextlib.contextmanager
    def holding(self, wire: Wire) -> Iterator[Wire]:
        """Closed at the end of the block; `PeerFault` once it was stopped."""
        with self._guard:
            self._open.add(wire)
            is_stopped = self.stopped.is_set()
        try:
            if is_stopped:
                raise PeerFault("stopped")
            yield wire
        finally:
            with self._guard:
                self._open.discard(wire)
            wire.close()
