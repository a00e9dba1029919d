"""What a node answers to others of its fleet about layers: which stages it has, what is in them, and whatever else it is given to answer.

A thread for each connection, and only so many. Before it has said hello with the fleet's token a connection is nobody's and has
seconds; afterwards it is one of the fleet's nodes, and may still be broken.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import socket
import ssl
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from untax import __version__
from untax.cluster.transfer.claims import Ticket
from untax.cluster.transfer.errand import kind_of
from untax.cluster.transfer.outgoing import Outgoing
from untax.cluster.transfer.tls import TlsStream
from untax.cluster.transfer.wire import CONNECT_S, PROTOCOL, PeerFault, Wire, tune
from untax.core.errors import StageError, UntaxError
from untax.layers.record import SNAPSHOT, is_layer_id
from untax.layers.store import LayerStore, Pin

_log = logging.getLogger("untax.transfer")
_MOST = 256  # connections: three for each fetch and one for each claim, of every node in the fleet
_READ_ONCE = 4  # layers whose rows are kept in memory, those asked for last


class Session:
    """One connection of another node. `on_end` is called when it ends, however it does."""

    def __init__(self, wire: Wire, node: str) -> None:
        self.wire = wire
        self.node = node
        self.ends: list[Callable[[], None]] = []
        self.ticket: Ticket | None = None
        self.pin: Pin | None = None
        self.outgoing: Outgoing | None = None

    def on_end(self, call: Callable[[], None]) -> None:
        self.ends.append(call)

    def end(self) -> None:
        if self.pin is not None:
            self.pin.close()
        for call in self.ends:
            call()
        self.wire.close()


Op = Callable[[Session, dict[str, Any]], None]


class Server:
    """Serves one store. `ops` are further questions by their names."""

    def __init__(
        self, node: str, store: LayerStore, context: ssl.SSLContext, token: str, *, host: str, port: int = 0, ops: Mapping[str, Op] = {}
    ) -> None:
        self.node = node
        self._store = store
        self._context = context
        self._token = token.encode()
        self._ops: dict[str, Op] = {"stage": self._stage, "layer": self._layer, "chunk": self._chunk, **ops}
        self._guard = threading.Lock()
        self._wires: set[Wire] = set()
        self._greeting: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._recent: OrderedDict[str, Outgoing] = OrderedDict()
        self._is_closed = False
        self._listener = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=_MOST)
        self.address: tuple[str, int] = (host, self._listener.getsockname()[1])
        self._accepting = threading.Thread(target=self._accept, name="untax-layers", daemon=True)

    def start(self) -> None:
        self._accepting.start()

    def close(self) -> None:
        """No connection is left afterwards. Safe to call twice."""
        with self._guard:
            self._is_closed = True
            for wire in self._wires:
                wire.cut()
            for sock in self._greeting:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)
            threads = list(self._threads)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes whoever waits in `accept`
        self._listener.close()
        for thread in threads:
            thread.join()
        if self._accepting.is_alive():
            self._accepting.join()

    def part(self, nodes: Collection[str]) -> None:
        """End the connections of nodes that are no longer of the fleet."""
        with self._guard:
            for wire in self._wires:
                if wire.who in nodes:
                    wire.cut()

    # ---- connections ----

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                sock, address = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._serve, args=(sock, address), name="untax-layers", daemon=True)
            with self._guard:
                self._threads = {one for one in self._threads if one.is_alive()}
                if self._is_closed or len(self._threads) >= _MOST:
                    sock.close()
                    continue
                self._threads.add(thread)
                self._greeting.add(sock)
                thread.start()

    def _serve(self, sock: socket.socket, address: tuple[Any, ...]) -> None:
        try:
            sock.settimeout(CONNECT_S)
            tune(sock)
            wire = Wire(TlsStream(sock, self._context), str(address[0]))
        except OSError as exc:
            _log.debug("somebody at %s spoke no TLS of ours: %s", address[0], exc)
            with self._guard:
                self._greeting.discard(sock)
            sock.close()
            return
        with self._guard:
            self._greeting.discard(sock)
            self._wires.add(wire)
        try:
            if not self._is_closed:
                self._talk(wire)
        finally:
            with self._guard:
                self._wires.discard(wire)
            wire.close()

    def _talk(self, wire: Wire) -> None:
        session: Session | None = None
        try:
            session = self._greeted(wire)
            while session is not None:
                # Between two questions a node may be silent for as long as it lives, which the kernel asks it.
                said = wire.receive(waits_s=None)
                op = self._ops.get(str(said.get("op")))
                if op is None:
                    wire.send({"error": f"what is {said.get('op')!r:.80}?"})
                    continue
                try:
                    op(session, said)
                except StageError as exc:
                    wire.send({"error": exc.message})
                except UntaxError as exc:
                    wire.send({"error": str(exc)})
        except PeerFault as exc:
            _log.debug("a node's connection ended: %s", exc)
        except OSError as exc:
            _log.warning("a layer could not be read for %s: %s", wire.who, exc)  # it is told by the connection's end
        finally:
            if session is not None:
                session.end()

    def _greeted(self, wire: Wire) -> Session | None:
        said = wire.receive(waits_s=CONNECT_S)
        if said.get("op") != "hello" or not hmac.compare_digest(str(said.get("token")).encode(errors="replace"), self._token):
            _log.warning("somebody at %s has not this fleet's token", wire.who)
            wire.send({"error": f"node {self.node}: this is not its fleet's token; take one with Fleet.ticket from a running fleet"})
            return None
        if said.get("protocol") != PROTOCOL or said.get("version") != __version__:
            wire.send(
                {"error": f"node {self.node} runs untax {__version__}, you {said.get('version')!r:.40}: install one release on all nodes"}
            )
            return None
        wire.send({"node": self.node})
        wire.who = str(said.get("node"))[:200]
        return Session(wire, wire.who)

    # ---- answers ----

    def _stage(self, session: Session, said: dict[str, Any]) -> None:
        """The record of a stage that may travel, or none."""
        record = self._store.stage(str(said.get("key")))
        if record is not None and not record.is_portable:
            what = (
                "a snapshot over what is only on that machine, or of running processes"
                if record.name == SNAPSHOT
                else "a stage of that machine's own"
            )
            session.wire.send({"error": f"{record.key[:40]} does not travel: {what}"})
            return
        session.wire.send({"record": None if record is None else record.to_json(), "kind": kind_of(self._store)})

    def _layer(self, session: Session, said: dict[str, Any]) -> None:
        """Hold a layer for as long as this connection lasts, or another is asked for; and say what is in it."""
        layer_id = str(said.get("layer"))
        if not is_layer_id(layer_id):
            session.wire.send({"error": "that is not the id of a layer"})
            return
        pin = self._store.pin((layer_id,))
        if session.pin is not None:
            session.pin.close()
        session.pin = pin
        outgoing = session.outgoing = self._read(layer_id)
        if said.get("is_known"):
            session.wire.send({})
            return
        session.wire.send({"rows": len(outgoing.packed_rows), "rest": len(outgoing.rest)})
        session.wire.send_bytes(outgoing.packed_rows + outgoing.rest)

    def _read(self, layer_id: str) -> Outgoing:
        with self._guard:
            known = self._recent.get(layer_id)
            if known is not None:
                self._recent.move_to_end(layer_id)
                return known
        found = Outgoing(self._store, layer_id)
        with self._guard:
            self._recent[layer_id] = found
            while len(self._recent) > _READ_ONCE:
                self._recent.popitem(last=False)
        return found

    def _chunk(self, session: Session, said: dict[str, Any]) -> None:
        number = said.get("chunk")
        if session.outgoing is None or type(number) is not int:
            session.wire.send({"error": "a chunk of no layer"})
            return
        session.outgoing.send_chunk(session.wire, number)
