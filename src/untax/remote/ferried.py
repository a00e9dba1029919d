"""The lanes of a client that go by a connection of their own, past the server's Python: the client's end of `native/ferry.c`.

It is a second way beside the held connection, asked for once that has greeted. Where it cannot be had, everything goes over the held one. When it breaks, it is
asked for again, and its lanes go on where both ends are; those that the other end does not know any more are over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from struct import Struct, iter_unpack

from untax.core.errors import BackendError, ProtocolError, UntaxError
from untax.remote.lanes import ACK, DATA, END, HEAD, MESSAGE, WINDOW, Lane, read_ack
from untax.remote.sealed import Sealed, dial
from untax.remote.web import WebAddress

log = logging.getLogger("untax.remote")

_DIAL_S = 10.0
_FIRST_RETRY_S, _LAST_RETRY_S = 0.05, 1.0
_IDLE_RETRY_S = 30.0  # while no lane waits for it: the server may have learnt to by then
_GREETED = Struct("<IQ")
_UNSENT_MAX = 64 << 20
_EARLY_MAX = 1024  # ends that came before the answer that tells of the lane


class Ferried:
    """Of one server. Belongs to one event loop."""

    def __init__(self, address: WebAddress) -> None:
        self._address = address
        self._loop = asyncio.get_running_loop()
        self.lanes: dict[int, Lane] = {}
        self._last = 0  # the highest number of a lane that was told of
        self._early: set[int] = set()
        self._sealed: Sealed | None = None
        self._is_open = False  # the other end has greeted
        self._is_held = False  # there is a held connection beside it
        self._greeted_with: frozenset[int] = frozenset()
        self._owner = ""
        self._changed = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None

    def begin(self, owner: str, secret: str, lease_s: float) -> None:
        """The held connection has greeted: have one beside it, in the place of what there was. Lanes wait for it as long as a lease waits for its owner."""
        self._stop()
        self._drop()
        self._is_held = True
        if owner != self._owner:  # whose lanes are numbered anew
            self._owner, self._last = owner, 0
            self._early.clear()
        self._keeping = self._loop.create_task(self._keep(owner, secret, lease_s))

    def rest(self) -> None:
        """There is no held connection. What is there goes on; what breaks waits for `begin`."""
        self._is_held = False
        if not self._is_open:
            self._stop()
            self._drop()

    def close(self) -> None:
        self._stop()
        self._drop()
        self._end_all()

    def lane(self, number: int) -> Lane:
        """One that an answer tells of."""
        self._last = max(self._last, number)
        lane = Lane(number, self._put if self._is_open else None, self._forget)
        if number in self._early:
            self._early.discard(number)
            lane.end(None)
        else:
            self.lanes[number] = lane
        return lane

    # ---- its connection ----

    async def _keep(self, owner: str, secret: str, lease_s: float) -> None:
        delay_s, since_s = _FIRST_RETRY_S, self._loop.time()
        while True:
            try:
                await self._open(owner, secret)
                delay_s = _FIRST_RETRY_S
                await self._until_broken()
                since_s = self._loop.time()
            except (OSError, UntaxError, TimeoutError) as exc:
                log.debug("no connection beside the held one to %s: %s", self._address, exc)
                if self.lanes and self._loop.time() - since_s > lease_s:
                    self._end_all()
            self._drop()
            if not self._is_held:
                return
            await asyncio.sleep(delay_s)  # nothing tells when it can be had
            delay_s = min(2 * delay_s, _LAST_RETRY_S if self.lanes else _IDLE_RETRY_S)

    async def _open(self, owner: str, secret: str) -> None:
        sock, keys = await dial(self._address, owner, secret, _DIAL_S)
        self._changed.clear()
        self._sealed = Sealed(sock, keys, self._received, self._lost)
        self._greeted_with = frozenset(self.lanes)
        greeting = b"".join(_GREETED.pack(number, lane.received) for number, lane in self.lanes.items())
        self._sealed.send(HEAD.pack(MESSAGE, len(self.lanes)) + greeting)
        async with asyncio.timeout(_DIAL_S):
            while self._sealed is not None and not self._is_open:
                await self._changed.wait()
                self._changed.clear()
        if not self._is_open:
            raise BackendError("", "it hung up before it greeted")

    async def _until_broken(self) -> None:
        while self._sealed is not None:
            await self._changed.wait()
            self._changed.clear()

    def _lost(self, reason: str) -> None:
        log.debug("the connection beside the held one to %s was lost: %s", self._address, reason)
        self._drop()
        self._changed.set()

    def _drop(self) -> None:
        sealed, self._sealed, self._is_open = self._sealed, None, False
        if sealed is not None:
            sealed.close()
        for lane in self.lanes.values():
            lane.suspend()

    def _stop(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            self._keeping = None

    def _end_all(self) -> None:
        for lane in list(self.lanes.values()):
            lane.end(None)

    # ---- what goes over it ----

    def _put(self, message: bytes) -> None:
        if self._sealed is not None:
            self._sealed.send(message)
            if self._sealed.unsent > max(_UNSENT_MAX, 2 * WINDOW * len(self.lanes)):  # twice what lanes may have on their way
                self._loop.call_soon(self._lost, "it does not read what is sent to it")

    def _received(self, message: bytes) -> None:
        try:
            self._took(message)
        except ProtocolError as exc:
            self._lost(f"nonsense was received: {exc}")

    def _took(self, message: bytes) -> None:
        kind, number = HEAD.unpack_from(message)
        if (kind == MESSAGE) is self._is_open or kind > END:
            raise ProtocolError(f"a message of kind {kind}")
        lane = self.lanes.get(number)
        if kind == MESSAGE:
            self._greeted(message[HEAD.size :])
        elif lane is None:
            if kind == END and number > self._last and len(self._early) < _EARLY_MAX:
                self._early.add(number)
        elif kind == DATA:
            lane.data_received(message[HEAD.size :])
        elif kind == ACK:
            lane.acknowledged(read_ack(message))
        else:
            lane.end(None)

    def _greeted(self, body: bytes) -> None:
        if len(body) % _GREETED.size:
            raise ProtocolError("a greeting that is none")
        seen: Mapping[int, int] = dict(iter_unpack(_GREETED.format, body))
        self._is_open = True
        for number in (self._greeted_with & seen.keys()) - self.lanes.keys():
            self._put(HEAD.pack(END, number))  # closed since the greeting was sent
        for number, lane in list(self.lanes.items()):
            if number in seen or number not in self._greeted_with:
                lane.resume(self._put, seen.get(number, 0))
            else:
                lane.end(None)
        self._changed.set()

    def _forget(self, lane: Lane) -> None:
        self.lanes.pop(lane.number, None)
