"""What a node answers to others of its fleet about layers: which stages it has, what is in them, and whatever else it is given to answer.

A connection that has been greeted (`door`) is one of the fleet's nodes, and may still be broken. It waits in a room with all others
(`room`) and has one of a few threads for each question, in the order in which they come.
"""

from __future__ import annotations

import concurrent.futures
import logging
import ssl
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any

from untax.cluster.transfer.beats import Beats
from untax.cluster.transfer.claims import Ticket
from untax.cluster.transfer.door import Door
from untax.cluster.transfer.errand import kind_of
from untax.cluster.transfer.outgoing import Outgoing
from untax.cluster.transfer.room import Room
from untax.cluster.transfer.wire import SILENCE_S, PeerFault, Wire
from untax.core.errors import StageError, UntaxError
from untax.layers.record import SNAPSHOT, is_layer_id
from untax.layers.store import LayerStore, Pin

_log = logging.getLogger("untax.transfer")
_MOST = 4096  # connections: three for each fetch and one for each claim, of every node in the fleet
_THREADS = 128  # questions that are answered at once; others wait for their turn, and are told so
_LINGER_S = 0.02  # that a thread waits for the next question of who is being sent a layer: it is on its way
_IDLE_S = 3600.0  # without a word from who has no claim; to read again what had come of a large layer takes minutes
_READ_ONCE = 4  # layers whose rows are kept in memory, those asked for last

Owed = Callable[[], dict[str, Any] | None]
"""The answer, once there is one. Never waits."""


class Session:
    """One connection of another node. What is called `on_end` is called when it ends, however it does."""

    def __init__(self, wire: Wire, rung: Callable[[Session], None]) -> None:
        self.wire = wire
        self.node = wire.who
        self.ends: list[Callable[[], None]] = []
        self.ticket: Ticket | None = None
        self.pin: Pin | None = None
        self.outgoing: Outgoing | None = None
        self.owed: Owed | None = None
        self.heard = time.monotonic()
        self.is_over = False
        self._rung = rung

    def on_end(self, call: Callable[[], None]) -> None:
        self.ends.append(call)

    def owe(self, owed: Owed) -> None:
        """The answer to what was asked comes later: whoever makes it calls `ring` when `owed` has it. The other end is told meanwhile that it waits."""
        self.owed = owed

    def ring(self) -> None:
        """From any thread. Never waits."""
        self._rung(self)

    def end(self) -> None:
        if self.pin is not None:
            self.pin.close()
        for call in self.ends:
            call()
        self.wire.close()

    # ---- in the room ----

    def fileno(self) -> int:
        return self.wire.fileno()

    def is_due(self) -> bool:
        return self.owed is not None and self.owed() is not None

    def tick(self, now: float) -> bool:
        """A node that is stopped is not gone: its kernel answers for it. So whoever has a claim says now and then that it is at it."""
        if self.owed is not None:
            try:
                self.wire.send_at_once({"wait": True})
            except PeerFault as exc:
                _log.debug("a node that waits takes no more: %s", exc)
                return False
            return True
        has_claim = self.ticket is not None and self.ticket.verdict is not None and self.ticket.verdict.outcome == "granted"
        is_silent = now - self.heard > (SILENCE_S if has_claim else _IDLE_S)
        if is_silent and has_claim:
            _log.warning("node %s has not said for %.0f s that it still builds: the next one may", self.node, SILENCE_S)
        return not is_silent


Op = Callable[[Session, dict[str, Any]], None]


class Server:
    """Serves one store. `ops` are further questions by their names."""

    def __init__(
        self,
        node: str,
        store: LayerStore,
        context: ssl.SSLContext,
        token: str,
        *,
        host: str,
        port: int = 0,
        ops: Mapping[str, Op] = {},
    ) -> None:
        self.node = node
        self._store = store
        self._ops: dict[str, Op] = {"stage": self._stage, "layer": self._layer, "chunk": self._chunk, "beat": _heard, **ops}
        self._guard = threading.Lock()
        self._sessions: set[Session] = set()
        self._queued = 0
        self._recent: OrderedDict[str, Outgoing] = OrderedDict()
        self._is_closed = False
        self._door = Door(node, context, token, host=host, port=port, greeted=self._welcome)
        self.address = self._door.address
        self._room: Room[Session] = Room(self._called)
        self._threads = concurrent.futures.ThreadPoolExecutor(_THREADS, thread_name_prefix="untax-layers")
        self._line = Beats({"wait": True})  # those who wait for a thread

    def start(self) -> None:
        self._room.start()
        self._door.start()

    def close(self) -> None:
        """No connection is left afterwards. Safe to call twice."""
        with self._guard:
            self._is_closed = True
            for session in self._sessions:
                session.wire.cut()
        self._door.close()
        for session in self._room.close():
            self._end(session)
        self._threads.shutdown()
        self._line.close()
        for session in list(self._sessions):
            self._end(session)

    def part(self, nodes: Collection[str]) -> None:
        """End the connections of nodes that are no longer of the fleet."""
        with self._guard:
            for session in self._sessions:
                if session.node in nodes:
                    session.wire.cut()

    # ---- connections ----

    def _welcome(self, wire: Wire, hello: dict[str, Any]) -> None:
        session = Session(wire, self._room.ring)
        with self._guard:
            is_full = len(self._sessions) >= _MOST
            is_in = not is_full and not self._is_closed
            if is_in:
                self._sessions.add(session)
        try:
            if is_in:
                wire.welcome(hello, {"node": self.node})
                self._wait(session)
                return
            if is_full:
                wire.send_at_once({"error": f"node {self.node} has {_MOST} connections already"})
        except PeerFault as exc:
            _log.debug("a node left at the door: %s", exc)
        self._end(session)

    def _wait(self, session: Session) -> None:
        session.heard = time.monotonic()
        if not self._room.enter(session):
            self._end(session)

    def _called(self, session: Session) -> None:
        """It has said something, or ended; or its answer is there; or it may wait no longer. In the room's thread."""
        if session.is_over or (session.owed is not None and not session.is_due()):
            self._end(session)  # who says something while an answer is owed to it has gone, or speaks out of turn
        else:
            self._queue(session)

    def _queue(self, session: Session) -> None:
        with self._guard:
            self._queued += 1
        self._line.add(session.wire)
        try:
            self._threads.submit(self._talk, session)
        except RuntimeError as exc:  # closed, or there are no threads to be had
            _log.debug("a connection ends: %s", exc)
            self._begun(session)
            self._end(session)

    def _begun(self, session: Session) -> None:
        self._line.drop(session.wire)
        with self._guard:
            self._queued -= 1

    def _end(self, session: Session) -> None:
        with self._guard:
            self._sessions.discard(session)
        session.end()

    def _talk(self, session: Session) -> None:
        """One question, and those behind it unless others wait for a thread."""
        self._begun(session)
        try:
            while True:
                self._turn(session)
                linger_s = 0.0 if self._queued or session.outgoing is None else _LINGER_S
                has_more = session.wire.has_more(0.0 if session.owed is not None else linger_s)
                if has_more and session.owed is not None:
                    raise PeerFault(f"{session.node} left, or spoke out of turn")
                if not has_more:
                    then = self._wait
                    break
                if self._queued:
                    then = self._queue  # and not into the room, which sees nothing of what has been read already
                    break
        except PeerFault as exc:
            _log.debug("a node's connection ended: %s", exc)
            then = self._end
        except OSError as exc:
            _log.warning("a layer could not be read for %s: %s", session.node, exc)  # it is told by the connection's end
            then = self._end
        except Exception:  # told here, and to the other end by the connection's end
            _log.exception("a question of node %s could not be answered", session.node)
            then = self._end
        then(session)

    def _turn(self, session: Session) -> None:
        wire = session.wire
        if session.owed is None:
            said = wire.receive()
            session.heard = time.monotonic()
            op = self._ops.get(str(said.get("op")))
            try:
                if op is None:
                    wire.send({"error": f"what is {said.get('op')!r:.80}?"})
                else:
                    op(session, said)
            except StageError as exc:
                wire.send({"error": exc.message})
            except UntaxError as exc:
                wire.send({"error": str(exc)})
        if session.owed is not None and (answer := session.owed()) is not None:
            session.owed = None
            wire.send(answer)

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


def _heard(_session: Session, _said: dict[str, Any]) -> None:
    """Whoever has a claim is at it. Not answered: it says so while it waits for nothing."""
