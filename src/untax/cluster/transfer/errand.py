"""One stage that this node lacks: who has it, who builds it, and bringing it here. Blocks, in a thread of its own."""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from untax.cluster.transfer.claims import Ticket, Verdict, owners
from untax.cluster.transfer.fetch import Fetch, Throttle
from untax.cluster.transfer.wire import Peer, PeerFault, Refused, Wire, Wires
from untax.core.errors import StageError, StageFailed, StageUnavailable, UsageError
from untax.layers.record import StageRecord, Unreadable
from untax.layers.sources import Progress
from untax.layers.store import LayerStore

if TYPE_CHECKING:
    from untax.cluster.transfer.node import Transfer

_log = logging.getLogger("untax.transfer")
_ROUNDS = 4  # claims, each after nodes that were said to have it and gave nothing
_ASKED_S = 3.0  # of a node that is to say what it has; a build is longer
_GRACE_S = 0.02  # after the first who has it, for others to go on with if that one fails
_AT_ONCE = 32  # nodes that are asked
_LONGEST_MESSAGE, _LONGEST_LOG = 4000, 1 << 16  # of a failure, as it is told to others


class Found(NamedTuple):
    peer: Peer
    record: StageRecord


def kind_of(store: LayerStore) -> str:
    """Layers are of use to stores of the same kind only: root's, or those of one user id."""
    return store.marks if store.marks == "trusted" else f"user:{os.geteuid()}:{os.getegid()}"


class Errand:
    """`begin`, then one of `done`, `failed` and `left`. `stop` ends a `begin` from any other thread."""

    def __init__(self, transfer: Transfer, key: str, name: str, progress: Progress, *, throttle: Throttle | None = None) -> None:
        self._transfer = transfer
        self._key = key
        self._name = name
        self._progress = progress
        self._throttle = throttle or Throttle(None)
        self.wires = Wires()
        self._owner: Wire | None = None  # the connection that is our claim, where that is another node's to give
        self._ticket: Ticket | None = None  # the claim, where it is our own to give
        self._open = contextlib.ExitStack()
        self.reasons: list[str] = []
        """Why nodes that were asked for it gave nothing, for people."""
        self.fetch_s = 0.0
        """What `begin` took since it was said who has it."""

    # ---- before ----

    def begin(self) -> StageRecord | None:
        """The record of the stage, its layers in the store; None when it is to be built here, which nobody else does meanwhile.

        `StageFailed` in the words of the node that tried while we waited; `StageUnavailable` when the disk is full.
        """
        tried: set[str] = set()
        for _ in range(_ROUNDS):
            verdict = self._claim(tried)
            began_s = time.monotonic()
            if self.wires.stopped.is_set():
                raise StageUnavailable(self._name, "the transfer was stopped")
            if verdict.outcome == "failed":
                raise StageFailed(self._name, verdict.message, _bytes_of(verdict.log))
            if verdict.outcome == "granted":
                found = self.look(self._transfer.peers())
                if not found:
                    return None
                self._say("there", holders=[one.peer.node for one in found])
                record = self.bring(found)
                self.fetch_s = time.monotonic() - began_s
                return record
            found = self.look([peer for peer in self._transfer.peers() if peer.node in verdict.holders])
            record = self.bring(found) if found else None
            if record is not None:
                self.fetch_s = time.monotonic() - began_s
                return record
            tried.update(verdict.holders)
            self.left()
        return None

    def _claim(self, tried: Iterable[str]) -> Verdict:
        by_node = {peer.node: peer for peer in self._transfer.peers()}
        for node in owners(self._key, [self._transfer.node, *by_node]):
            if node == self._transfer.node:
                ticket = self._ticket = self._transfer.claims.claim(self._key, node, not_at=tried)
                if self.wires.stopped.is_set():  # by who saw no ticket yet
                    self._transfer.claims.leave(ticket)
                return ticket.wait()
            try:
                wire = self._open.enter_context(self.wires.holding(self._transfer.dialer.dial(by_node[node])))
                verdict = _verdict(node, wire.ask("claim", key=self._key, not_at=sorted(tried)))
                self._owner = wire
                if verdict.outcome == "granted":
                    self._transfer.beats.add(wire)
                return verdict
            except PeerFault as exc:
                self._open.close()
                if self.wires.stopped.is_set():
                    break
                _log.info("%s cannot say who builds %s (%s): the next one is asked", node, self._key[:12], exc)
        return Verdict("granted")

    def look(self, peers: Sequence[Peer]) -> list[Found]:
        """Those who have it, the first to answer first: it is the nearest, or the one that has least to do."""
        if not peers:
            return []
        pool = concurrent.futures.ThreadPoolExecutor(min(_AT_ONCE, len(peers)), thread_name_prefix="untax-look")
        waiting = {pool.submit(self._ask, peer) for peer in peers}
        found: list[Found] = []
        until = time.monotonic() + _ASKED_S  # whoever has not answered by then is too far away
        try:
            while waiting and (left_s := until - time.monotonic()) > 0:
                answered, waiting = concurrent.futures.wait(waiting, left_s, concurrent.futures.FIRST_COMPLETED)
                for future in answered:
                    if (one := future.result()) is not None:
                        found.append(one)
                        until = min(until, time.monotonic() + _GRACE_S)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return found

    def _ask(self, peer: Peer) -> Found | None:
        try:
            with self.wires.holding(self._transfer.dialer.dial(peer, timeout_s=_ASKED_S)) as wire:
                said = wire.ask("stage", key=self._key, waits_s=_ASKED_S)
            if said.get("record") is None or said.get("kind") != kind_of(self._transfer.store):
                return None
            record = StageRecord.from_json(str(said["record"]))
            return Found(peer, record) if record.key == self._key and record.is_portable else None
        except Refused as exc:
            self.reasons.append(str(exc))
        except (PeerFault, Unreadable, UsageError) as exc:
            self.reasons.append(f"{peer.node}: {exc}")
            _log.warning("node %s could not say whether it has %s: %s", peer.node, self._key[:12], exc)
        return None

    def bring(self, found: Sequence[Found]) -> StageRecord | None:
        """The layers of a record, from the nodes whose record it is; None when they could not be had. A full disk is raised."""
        full: StageUnavailable | None = None
        for record in dict.fromkeys(one.record.adds for one in found):
            some = [one for one in found if one.record.adds == record]
            try:
                for number, layer_id in enumerate(record, 1):
                    what = f"{self._name} from {some[0].peer.node}" + (f", layer {number} of {len(record)}" if len(record) > 1 else "")
                    fetch = Fetch(
                        self._transfer.store,
                        self._transfer.dialer,
                        self.wires,
                        self._throttle,
                        told=lambda done, total, what=what: self._progress(what, done, total),  # type: ignore[misc]
                        wanted=self._transfer.wanted,
                    )
                    is_image = "image" in (self._name, some[0].record.name)
                    fetch.layer(layer_id, [one.peer for one in some], may_climb=not is_image)
                return some[0].record
            except StageError as exc:
                if self.wires.stopped.is_set():
                    raise
                if isinstance(exc, StageUnavailable) and exc.stage != "layer":
                    full = full or exc  # what another says it is may be smaller
                self.reasons.append(exc.message)
                _log.warning("stage %s (%s) did not come: %s", self._name, self._key[:12], exc.message)
        if full is not None:
            raise full
        return None

    # ---- after ----

    def done(self) -> None:
        """It is in our store: others may have it from here."""
        self._say("done", outcome="there")
        self.left()

    def failed(self, error: StageFailed) -> None:
        """Its recipe failed here, and would elsewhere: those who wait are told."""
        log = error.log[-_LONGEST_LOG:].decode(errors="surrogateescape")
        self._say("done", outcome="failed", message=error.message[:_LONGEST_MESSAGE], log=log)
        self.left()

    def left(self) -> None:
        """The claim is the next one's. Never waits; safe to call twice."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._transfer.claims.leave(ticket)
        owner, self._owner = self._owner, None
        if owner is not None:
            self._transfer.beats.drop(owner)
        self._open.close()

    def stop(self) -> None:
        self.wires.stop()
        ticket = self._ticket
        if ticket is not None:
            self._transfer.claims.leave(ticket)

    def _say(self, op: str, **said: Any) -> None:
        """Failing to is no failure: whoever waits learns it from the connection's end, and asks around."""
        if self._ticket is not None:
            settle(self._transfer, self._ticket, op, said)
        elif self._owner is not None:
            self._transfer.beats.drop(self._owner)
            with contextlib.suppress(PeerFault):
                self._owner.ask(op, waits_s=_ASKED_S, **said)
                if op == "there":
                    self._transfer.beats.add(self._owner)


def _verdict(node: str, said: Mapping[str, Any]) -> Verdict:
    """`PeerFault` for what no owner says."""
    outcome, holders = said.get("outcome"), said.get("holders")
    if outcome not in ("granted", "there", "failed") or not isinstance(holders, list):
        raise PeerFault(f"{node}: an answer to a claim that is none")
    return Verdict(outcome, tuple(str(one) for one in holders), str(said.get("message")), str(said.get("log")))


def _bytes_of(log: str) -> bytes:
    """Of what was printed, whatever it was; and of what nobody can have printed, something like it."""
    try:
        return log.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return log.encode(errors="replace")


def settle(transfer: Transfer, ticket: Ticket, op: str, said: Mapping[str, Any]) -> None:
    """What the holder of a claim says, at the owner."""
    holders = said.get("holders")
    if op == "there" and isinstance(holders, list):
        transfer.claims.there(ticket.key, [str(one)[:200] for one in holders[:64]])
    elif said.get("outcome") == "there":
        transfer.claims.there(ticket.key, [ticket.node])
    elif said.get("outcome") == "failed":
        transfer.claims.failed(ticket, str(said.get("message"))[:_LONGEST_MESSAGE], str(said.get("log"))[-_LONGEST_LOG:])
