"""One node's part in the travel of layers: it serves its own store, owns its share of the claims, and brings what the engine lacks."""

from __future__ import annotations

import contextlib
import functools
import logging
import ssl
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

from untax.cluster.transfer.ahead import Ahead
from untax.cluster.transfer.beats import Beats
from untax.cluster.transfer.claims import Claims, Ticket
from untax.cluster.transfer.errand import Errand, settle
from untax.cluster.transfer.pace import Wanted
from untax.cluster.transfer.serve import Server, Session
from untax.cluster.transfer.spread import Budget
from untax.cluster.transfer.wire import Dialer, Peer, PeerFault, Refused
from untax.core.errors import StageError, StageFailed, StageUnavailable, UntaxError, UsageError
from untax.core.stage import Stage
from untax.layers._held import alone
from untax.layers.build import Obtained
from untax.layers.record import SNAPSHOT, is_key
from untax.layers.sources import Progress
from untax.layers.store import LayerStore

_log = logging.getLogger("untax.transfer")
_MOST_COPIES = 64  # that others have asked for, at once: each has a thread


class Transfer:
    """`start`, `meet` whenever the fleet's members change, `close`. What it gives the engine is a `StageSource`."""

    def __init__(
        self,
        node: str,
        store: LayerStore,
        *,
        server_context: ssl.SSLContext,
        client_context: ssl.SSLContext,
        token: str,
        host: str,
        port: int = 0,
        untold_uses: Callable[[], Mapping[str, int]] = dict,
        arrived: Callable[[Sequence[str]], object] = list,
        budget: Budget | None = Budget(),  # noqa: B008 — frozen
    ) -> None:
        """`untold_uses`: of stages, beyond what the store knows of. `arrived` is told, in any thread, the keys of stages that came without a
        lease having asked for them. `budget`: of what is brought ahead of demand; None for nothing.
        """
        self.node = node
        self.store = store
        self.claims = Claims()
        self.dialer = Dialer(node, client_context, token)
        self._guard = threading.Lock()
        self._peers: dict[str, Peer] = {}
        self._errands: set[Errand] = set()
        self._copying: set[threading.Thread] = set()
        self._is_closed = False
        self.beats = Beats({"op": "beat"})
        """To the owners of what this node has claimed."""
        self.wanted = Wanted()
        self.untold_uses = untold_uses
        self.arrived = arrived
        self.ahead = Ahead(self, budget or Budget())
        self._is_spreading = budget is not None
        ops = {"claim": self._claim, "there": self._settle, "done": self._settle, "bring": self._bring, "hot": self.ahead.tell}
        self._server = Server(node, store, server_context, token, host=host, port=port, ops=ops)

    @property
    def address(self) -> str:
        """`host:port`, as others are told."""
        host, port = self._server.address
        return f"{host}:{port}"

    def start(self) -> None:
        self._server.start()
        if self._is_spreading:
            self.ahead.start()

    def meet(self, peers: Iterable[Peer]) -> None:
        """Who is in the fleet now. Connections with those who no longer are end, and with them what they had claimed."""
        now = {peer.node: peer for peer in peers if peer.node != self.node}
        with self._guard:
            gone = {node for node, peer in self._peers.items() if now.get(node) != peer}
            self._peers = now
            errands = list(self._errands)
        if gone:
            self._server.part(gone)
            for errand in errands:
                errand.wires.part(gone)

    def peers(self) -> list[Peer]:
        with self._guard:
            return list(self._peers.values())

    def close(self) -> None:
        """Nothing of it runs afterwards. Safe to call twice."""
        with self._guard:
            self._is_closed = True
            errands = list(self._errands)
        for errand in errands:
            errand.stop()
        self.ahead.close()
        self.claims.close()
        self._server.close()
        self.beats.close()
        with self._guard:
            copying = list(self._copying)
        for thread in copying:
            thread.join()

    # ---- for the engine ----

    @contextlib.asynccontextmanager
    async def obtain(self, stage: Stage, progress: Progress) -> AsyncIterator[Obtained | None]:
        """As `StageSource` promises. One that is alone in its fleet builds."""
        if not self.peers():
            yield None
            return
        errand = self._begun(stage.key, stage.name, progress)
        try:
            record = await alone(errand.begin, errand.stop)
            try:
                yield None if record is None else Obtained(record, errand.fetch_s)
            except StageFailed as exc:
                if exc.found_no_room:  # which is true of this node: the next in line may have some
                    raise
                await alone(functools.partial(errand.failed, exc), errand.stop)
                raise
            await alone(errand.done, errand.stop)
        finally:
            self._ended(errand)

    # ---- snapshots ----

    def bring(self, key: str, node: str) -> None:
        """A saved snapshot, or a stage, from another node into this one's store. Blocks."""
        if self.store.stage(key) is not None:
            return
        with self._guard:
            peer = self._peers.get(node)
        if peer is None:
            raise UsageError(f"node {self.node} knows no node {node!r} to bring {key} from")
        errand = self._begun(key, SNAPSHOT, lambda _what, _done, _total: None)
        try:
            found = errand.look([peer])
            record = errand.bring(found) if found else None
            if record is None:
                raise StageUnavailable(SNAPSHOT, f"node {node} gave no {key} to {self.node}: {'; '.join(errand.reasons) or 'it has none'}")
            self.store.put_stage(record)
            if record.name != SNAPSHOT:
                self.arrived([key])
        finally:
            self._ended(errand)

    def _begun(self, key: str, name: str, progress: Progress) -> Errand:
        errand = Errand(self, key, name, progress)
        with self._guard:
            self._errands.add(errand)
            is_closed = self._is_closed
        if is_closed:
            errand.stop()
        return errand

    def _ended(self, errand: Errand) -> None:
        errand.left()
        with self._guard:
            self._errands.discard(errand)

    # ---- for other nodes ----

    def _claim(self, session: Session, said: dict[str, Any]) -> None:
        key, not_at = str(said.get("key")), said.get("not_at")
        if not is_key(key) or not isinstance(not_at, list) or session.ticket is not None:
            session.wire.send({"error": "a claim to no stage"})
            return
        ticket = session.ticket = self.claims.claim(key, session.node, not_at=[str(one) for one in not_at[:1000]], tell=session.ring)
        session.on_end(functools.partial(self.claims.leave, ticket))
        session.owe(functools.partial(_decided, ticket))

    def _settle(self, session: Session, said: dict[str, Any]) -> None:
        if session.ticket is None:
            session.wire.send({"error": "there is no claim of yours"})
            return
        settle(self, session.ticket, str(said.get("op")), said)
        session.wire.send({})

    def _bring(self, session: Session, said: dict[str, Any]) -> None:
        key = str(said.get("key"))
        if not is_key(key):
            raise UsageError(f"{key!r:.80} is not the key of anything")
        answers: list[dict[str, Any]] = []

        def work() -> None:
            try:
                answers.append(self._brought(key, str(said.get("from"))))
            finally:
                with self._guard:
                    self._copying.discard(threading.current_thread())
                session.ring()

        thread = threading.Thread(target=work, name="untax-copy", daemon=True)
        with self._guard:
            if len(self._copying) >= _MOST_COPIES:
                raise UsageError(f"node {self.node} brings {_MOST_COPIES} other things at the moment; ask again later")
            session.owe(lambda: answers[0] if answers else None)
            thread.start()
            self._copying.add(thread)

    def _brought(self, key: str, node: str) -> dict[str, Any]:
        """What is answered to who had something brought."""
        try:
            self.bring(key, node)
        except StageError as exc:
            return {"error": exc.message}
        except UntaxError as exc:
            return {"error": str(exc)}
        except Exception as exc:  # told to who asked, and here
            _log.exception("%s could not be brought from %s", key, node)
            return {"error": f"node {self.node}: {type(exc).__name__}"}
        return {}


def _decided(ticket: Ticket) -> dict[str, Any] | None:
    verdict = ticket.verdict
    if verdict is None:
        return None
    return {"outcome": verdict.outcome, "holders": verdict.holders, "message": verdict.message, "log": verdict.log}


def copy(dialer: Dialer, to: Peer, key: str, source: str) -> None:
    """Ask a node to bring something from another; returns when it is there. `StageUnavailable` in that node's words."""
    try:
        with dialer.dial(to) as wire:
            wire.send({"op": "bring", "key": key, "from": source})
            wire.answer()
    except Refused as exc:
        raise StageUnavailable(SNAPSHOT, f"it was not copied: {exc}") from None
    except PeerFault as exc:
        raise StageUnavailable(SNAPSHOT, f"it was not copied, because node {to.node} cannot be reached: {exc}") from None
