"""Layers from other nodes into this one's store: from the nearest first, several chunks at a time, each checked as it comes.

A layer lies in the store whole or not at all, exactly as if it had been built here. A node that gives something else, or too slowly,
or nothing, is left for the next one, which goes on where it stopped; so does the next fetch after a process that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from untax._remove import remove_tree
from untax.cluster.transfer.arrival import Arrival, Large, Mismatch, read_map
from untax.cluster.transfer.outgoing import STEP
from untax.cluster.transfer.pace import Wanted, locked
from untax.cluster.transfer.plan import CHUNK_BYTES
from untax.cluster.transfer.wire import SILENCE_S, Dialer, Peer, PeerFault, Wire, Wires
from untax.core.errors import StageFailed, StageUnavailable
from untax.layers._descent import Descent
from untax.layers.rows import MOST_BYTES
from untax.layers.spares import using
from untax.layers.store import Layer, LayerStore

_log = logging.getLogger("untax.transfer")
CONNECTIONS = 3
"""To one node at a time. On two cores over loopback 1 to 4 took about the same; several ride out a slow hash or disk."""
_AHEAD = 2  # chunks that are asked for on each, so that the way there and back is not waited for
_TRIES = 3  # of one node that is cut off, as long as each brings something
_MOST_MAP = 16 << 20  # bytes: a million extents
_FULL = (errno.ENOSPC, errno.EDQUOT)
# What a file system answers to an entry that it cannot have: a size, name, target, number of links, owner or attribute beyond what it keeps.
_CANNOT_BE = (
    *(errno.EINVAL, errno.EFBIG, errno.ENAMETOOLONG, errno.E2BIG, errno.ERANGE, errno.EOVERFLOW, errno.EMLINK),
    *(errno.EPERM, errno.EOPNOTSUPP, errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ELOOP),
)

Told = Callable[[int, int], None]
"""Of bytes that have come, and of how many."""


class Throttle:
    """So many bytes in a second, for all who share it; None for as many as there are."""

    def __init__(self, bytes_per_s: float | None) -> None:
        self._rate = bytes_per_s
        self._guard = threading.Lock()
        self._free_at = 0.0

    @property
    def is_patient(self) -> bool:
        return self._rate is not None

    def take(self, size: int, hurried: threading.Event) -> None:
        if self._rate is None:
            return
        with self._guard:
            now = time.monotonic()
            self._free_at = max(self._free_at, now) + size / self._rate
            wait_s = self._free_at - now
        hurried.wait(wait_s)


@dataclass(slots=True)
class Fetch:
    """One piece of work, in a thread of its own and a few more. `wires.stop()` ends it from any other."""

    store: LayerStore
    dialer: Dialer
    wires: Wires = field(default_factory=Wires)
    throttle: Throttle = field(default_factory=lambda: Throttle(None))
    told: Told = lambda _done, _total: None
    connections: int = CONNECTIONS
    wanted: Wanted = field(default_factory=Wanted)

    def layer(self, layer_id: str, peers: Sequence[Peer], *, may_climb: bool = True) -> Layer:
        """The layer, held in the store until a record names it. Blocks; once for all on this machine who want it at a time.

        `StageUnavailable` when none of `peers`, the nearest first, gave it, or when the disk is full; `StageFailed` when they
        gave what is no layer.
        """
        if (found := self.store.reuse(layer_id)) is not None:
            return found
        place = self.store.arrivals / layer_id
        is_wanted = self.wanted.by(layer_id, self.wires, is_patient=self.throttle.is_patient)
        with self.store.telling(), is_wanted, locked(place.with_name(f"{layer_id}.lock"), self.wires), using(place):
            if (found := self.store.reuse(layer_id)) is not None:
                return found
            try:
                return self._fetched(layer_id, peers, may_climb)
            except OSError as exc:
                if exc.errno in _FULL:  # what has come of it goes: nobody knows how much it lacked
                    remove_tree(place)
                    with contextlib.suppress(StageUnavailable):
                        self.store.evict()
                raise

    def _fetched(self, layer_id: str, peers: Sequence[Peer], may_climb: bool) -> Layer:
        faults: list[str] = []
        refusal: StageFailed | None = None
        for peer in peers:
            for _ in range(_TRIES):
                before = len(faults)
                try:
                    return self._from(peer, layer_id, may_climb)
                except _Cut as exc:
                    faults.append(str(exc))
                    if self.wires.stopped.is_set():
                        raise StageUnavailable("layer", f"the transfer of {layer_id} was stopped") from None
                    if not exc.brought:
                        break
                except (PeerFault, Mismatch) as exc:
                    faults.append(f"{peer.node} gave what it is not: {exc}" if isinstance(exc, Mismatch) else str(exc))
                    break
                except StageFailed as exc:  # of rows or attributes, before anything was made of them
                    refusal = exc
                    faults.append(f"{peer.node}: {exc.message}")
                    break
                except OSError as exc:
                    if exc.errno not in _CANNOT_BE:
                        raise
                    faults.append(f"{peer.node} gave what cannot be made here: {exc.strerror}")
                    break
            _log.warning("layer %s: %s", layer_id[:19], "; ".join(faults[before:]))
        if refusal is not None and len(peers) == 1:
            raise refusal
        raise StageUnavailable("layer", f"no node gave {layer_id}: {'; '.join(faults) or 'none has it'}")

    def _from(self, peer: Peer, layer_id: str, may_climb: bool) -> Layer:
        place = self.store.arrivals / layer_id
        with self.wires.holding(self.dialer.dial(peer)) as wire:
            said = wire.ask("layer", layer=layer_id)
            rows = _body(wire, said.get("rows"))
            rest = _body(wire, said.get("rest"))
            is_resumed = False
            arrival = Arrival(place, layer_id, bytes(rows), bytes(rest), self.store.marks, may_climb=may_climb)
            try:
                self._require_room(arrival.stored)
                is_resumed = arrival.begin()
                _Crew(self, arrival, peer, layer_id).run(wire)
            except Mismatch as exc:
                if is_resumed:  # it may be what another node gave before: of what did not fit nothing is left, so this one gives all of it
                    raise _Cut(f"{peer.node}, after another: {exc}", 1) from None
                raise
            finally:
                arrival.close()
        with self.store.draft() as draft:
            draft.adopt(arrival.tree)
            arrival.finish(draft.tree)
            layer = draft.publish(expect=layer_id, known=arrival.known)
        remove_tree(place)
        for beside in ("use", "lock"):
            place.with_name(f"{layer_id}.{beside}").unlink(missing_ok=True)
        return layer

    def _require_room(self, wanted: int) -> None:
        short = self.store.shortage_bytes(wanted)
        if short > 0:
            if self.throttle.is_patient:  # it may have been said to be smaller
                raise StageUnavailable("layer", f"{short} bytes short of a layer that nobody waits for, and nothing goes for one of those")
            # What all of the store together has no room for evicts nothing of it.
            there = sum(layer.bytes for layer in self.store.layers()) + sum(spare.bytes for spare in self.store.spares())
            if short <= there:
                self.store.evict(wanted_bytes=wanted)
            free = -self.store.shortage_bytes(wanted)
            if free < 0 and self.store.budget_bytes is None:
                raise OSError(errno.ENOSPC, f"{-free} bytes short of a layer of {wanted}")


class _Cut(PeerFault):
    """The way to a node ended. `brought` says whether anything came of this try."""

    def __init__(self, message: str, brought: int) -> None:
        super().__init__(message)
        self.brought = brought


class _Crew:
    """The connections that fill one arrival from one node."""

    def __init__(self, fetch: Fetch, arrival: Arrival, peer: Peer, layer_id: str) -> None:
        self._fetch = fetch
        self._arrival = arrival
        self._peer = peer
        self._layer_id = layer_id
        self._guard = threading.Lock()
        missing = arrival.missing
        self._files = deque(at for at in missing if not arrival.is_part(at))
        self._parts = deque(at for at in missing if arrival.is_part(at))
        self._total = arrival.contents_bytes
        self._done = self._total - sum(piece.length for at in missing for piece in arrival.chunks[at])
        self._brought = 0
        self._fault: BaseException | None = None

    def run(self, wire: Wire) -> None:
        """All that is missing. What one of them met with ends the others, and is raised."""
        more = min(self._fetch.connections, len(self._files) + len(self._parts)) - 1
        threads = [threading.Thread(target=self._work, name="untax-fetch", daemon=True) for _ in range(more)]
        for thread in threads:
            thread.start()
        self._work(wire)
        for thread in threads:
            thread.join()
        if self._fault is None and self._arrival.missing:
            self._fault = Mismatch("parts of a large file, which is fetched again")
        if isinstance(self._fault, PeerFault):
            raise _Cut(str(self._fault), self._brought) from None
        if self._fault is not None:
            raise self._fault

    def _work(self, wire: Wire | None = None) -> None:
        try:
            if wire is not None:
                self._fill(wire, self._files, self._parts)
                return
            with contextlib.ExitStack() as stack:
                try:
                    own = stack.enter_context(self._fetch.wires.holding(self._fetch.dialer.dial(self._peer)))
                    own.ask("layer", layer=self._layer_id, is_known=True)
                except PeerFault as exc:  # nothing was asked of it yet; should the node be gone, the first one learns it too
                    _log.debug("%s: one connection fewer: %s", self._layer_id[:19], exc)
                    return
                self._fill(own, self._parts, self._files)
        except BaseException as exc:  # told by `run`, in the thread that waits for all
            with self._guard:
                self._fault = self._fault or exc
                self._files.clear()
                self._parts.clear()

    def _fill(self, wire: Wire, first: deque[int], then: deque[int]) -> None:
        """Small files keep the interpreter busy, parts of large ones the wire and the disk: one connection begins with the former, the others with
        the latter, so that neither waits for the other to end.
        """
        buffer = memoryview(bytearray(CHUNK_BYTES))
        asked: deque[int] = deque()
        with Descent(self._arrival.tree) as descent:
            while True:
                while len(asked) < _AHEAD and (at := self._next(first, then)) is not None:
                    wire.send({"op": "chunk", "chunk": at})
                    asked.append(at)
                if not asked:
                    return
                self._take(wire, descent, asked.popleft(), buffer)

    def _next(self, first: deque[int], then: deque[int]) -> int | None:
        with self._guard:
            some = first or then
            return some.popleft() if some else None

    def _take(self, wire: Wire, descent: Descent, at: int, buffer: memoryview) -> None:
        chunk = self._arrival.chunks[at]
        length = sum(piece.length for piece in chunk)
        said = wire.answer()
        size, data = said.get("map"), said.get("bytes")
        if type(size) is not int or type(data) is not int or not 0 <= size <= _MOST_MAP or not 0 <= data <= length:
            raise PeerFault(f"{wire.who}: a chunk that is longer than what it is of")
        maps = read_map(memoryview(wire.read(size, within_s=SILENCE_S)), chunk)
        if sum(part for extents in maps for _, part in extents) != data:
            raise PeerFault(f"{wire.who}: a chunk that is not as long as its map says")
        large = self._arrival.part(descent, at)
        if large is None:
            wire.read_into(buffer[:data], within_s=SILENCE_S)
            self._arrival.put_files(descent, at, maps, buffer[:data])
        else:
            for offset, part in maps[0]:
                self._stream(wire, large, offset, part, buffer)
            large.begin_writing(chunk[0].offset, length)
            self._arrival.put_part(at)
        self._fetch.throttle.take(data, self._fetch.wires.hurried)
        with self._guard:
            self._done += length
            self._brought += 1
            self._fetch.told(self._done, self._total)

    def _stream(self, wire: Wire, large: Large, offset: int, size: int, buffer: memoryview) -> None:
        end = offset + size
        while offset < end:
            view = buffer[: min(STEP, end - offset)]
            wire.read_into(view, within_s=SILENCE_S)
            large.write(view, offset)
            offset += len(view)


def _body(wire: Wire, size: object) -> bytearray:
    if type(size) is not int or not 0 <= size <= MOST_BYTES:
        raise PeerFault(f"{wire.who}: a list of entries of {size!r:.40} bytes")
    return wire.read(size, within_s=3 * SILENCE_S)
