"""Carries spreading out: asks the other nodes now and then what is hot, and brings it at a pace that leases do not notice."""

from __future__ import annotations

import concurrent.futures
import logging
import random
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from untax.cluster.transfer.errand import Errand
from untax.cluster.transfer.fetch import Throttle
from untax.cluster.transfer.serve import Session
from untax.cluster.transfer.spread import MOST_SAID, Budget, Heat, Order, hottest, orders
from untax.cluster.transfer.wire import Peer, PeerFault, Wire
from untax.core.errors import StageError
from untax.core.stage import LADDER

if TYPE_CHECKING:
    from untax.cluster.transfer.node import Transfer

_log = logging.getLogger("untax.transfer")
_ASKED_S = 3.0
_AT_ONCE = 16
_OWN_USE = 1.0  # what the store notes when a stage is put into it


class Ahead:
    """A thread of its own, from `start` to `close`. It looks at a slow pace of its own because hotness has no event; nobody waits for it."""

    def __init__(self, transfer: Transfer, budget: Budget) -> None:
        self._transfer = transfer
        self._budget = budget
        self._throttle = Throttle(budget.bytes_per_s)
        self._closed = threading.Event()
        self._errand: Errand | None = None
        self._brought: dict[str, int] = {}  # stages that came, and their bytes, until somebody uses them
        self._refused: dict[str, float] = {}  # stages that did not come, and when
        self._wires: dict[Peer, Wire] = {}  # held from one look to the next: to greet anew costs both ends more than the question does
        self._thread = threading.Thread(target=self._run, name="untax-ahead", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Safe to call twice."""
        self._closed.set()
        errand = self._errand
        if errand is not None:
            errand.stop()
        if self._thread.is_alive():
            self._thread.join()
        self._let_go(self._wires)

    def tell(self, session: Session, _said: dict[str, Any]) -> None:
        """To another node: what is hot here."""
        store = self._transfer.store
        records = store.stages()
        uses = self._uses()
        sizes = {layer.id: layer.bytes for layer in store.layers()}
        told = hottest(records, uses, sizes, self._transfer.node, self._budget.least_uses)
        session.wire.send({"hot": [one.to_data() for one in told]})

    def look(self) -> list[Order]:
        """Once: what is to be brought now."""
        store = self._transfer.store
        here = {one.key for one in store.stages()}
        uses = self._uses()
        self._brought = {key: size for key, size in self._brought.items() if key in here and uses.get(key, 0.0) <= _OWN_USE}
        room = min(-store.shortage_bytes(1) * self._budget.share, self._budget.disk_bytes - sum(self._brought.values()))
        if room <= 0:
            return []
        said = self._asked(self._transfer.peers())
        kept_off = {key for key, since in self._refused.items() if time.monotonic() - since < 60 * self._budget.every_s}
        return orders(said, here | kept_off, room, self._budget.least_uses)

    def _uses(self) -> dict[str, float]:
        found = {one.key: one.uses for one in self._transfer.store.candidates()}
        for key, times in self._transfer.untold_uses().items():
            found[key] = found.get(key, 0.0) + times
        return found

    def bring(self, order: Order) -> bool:
        """One stage, at the budget's pace; whether it came."""
        peers = [peer for peer in self._transfer.peers() if peer.node in order.nodes]
        errand = self._errand = Errand(self._transfer, order.key, order.name, _untold, throttle=self._throttle)
        try:
            if self._closed.is_set():
                return False
            found = errand.look(peers)
            record = errand.bring(found) if found else None
            # Somebody may have built it here meanwhile: what there is, stays.
            if record is not None and record.name in LADDER and self._transfer.store.stage(order.key) is None:
                self._transfer.store.put_stage(record)
                # What it takes, and not what it was said to take.
                self._brought[order.key] = sum(self._transfer.store.layer(layer_id).bytes for layer_id in record.adds)
                self._transfer.arrived([order.key])
            return record is not None
        except StageError as exc:
            _log.info("stage %s does not come ahead of demand: %s", order.key[:12], exc.message)
            return False
        except (
            Exception
        ):  # told here: what one node said of it is no reason to bring nothing any more, nor to bring this one again and again
            _log.exception("stage %s does not come ahead of demand", order.key[:12])
            return False
        finally:
            self._errand = None

    def _run(self) -> None:
        # Not all nodes at once: what the first has brought, the next may have from it.
        while not self._closed.wait(self._budget.every_s * random.uniform(0.75, 1.25)):
            try:
                for order in self.look():
                    if self._closed.is_set():
                        return
                    if not self.bring(order):
                        self._refused[order.key] = time.monotonic()
                        break  # what was ordered after it may stand on it
            except (StageError, OSError) as exc:
                _log.warning("nothing could be brought ahead of demand: %s", exc)
            except Exception:  # told here; whatever one node says, the others' stages still come
                _log.exception("nothing could be brought ahead of demand")

    def _asked(self, peers: list[Peer]) -> list[Heat]:
        self._let_go(self._wires.keys() - set(peers))
        if not peers:
            return []
        with concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(peers)), thread_name_prefix="untax-ahead") as pool:
            return [heat for some in pool.map(self._ask, peers) for heat in some]

    def _ask(self, peer: Peer) -> list[Heat]:
        held = self._wires.pop(peer, None)
        try:
            said = self._hot(peer, held)
        except PeerFault as exc:
            _log.debug("%s", exc)
            if held is None:
                return []
            try:
                said = self._hot(peer, None)  # what was held had ended meanwhile
            except PeerFault as exc:
                _log.debug("%s", exc)
                return []
        some = said[: 4 * MOST_SAID] if isinstance(said, list) else []
        return [heat for one in some if isinstance(one, dict) and (heat := Heat.from_data(peer.node, one)) is not None]

    def _hot(self, peer: Peer, held: Wire | None) -> Any:
        wire = held if held is not None else self._transfer.dialer.dial(peer, timeout_s=_ASKED_S)
        try:
            said = wire.ask("hot", waits_s=_ASKED_S).get("hot")
        except BaseException:
            wire.close()
            raise
        self._wires[peer] = wire
        return said

    def _let_go(self, peers: Iterable[Peer]) -> None:
        for peer in list(peers):
            self._wires.pop(peer).close()


def _untold(_what: str, _done: int, _total: int | None) -> None:
    pass
