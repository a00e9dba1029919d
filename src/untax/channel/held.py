"""HeldStream: a channel's stream that goes on over another connection when the one that carries it breaks.

For substrates that reach a sandbox through somebody else's connection, such as an API server's. The cell inside
(`cell agent --held`) and this class keep what the other has not acknowledged; a new connection begins where the old one
ended, so the channel above sees one stream and nothing is lost or done twice. See docs/protocol.md, "Held streams".
"""

from __future__ import annotations

import asyncio
import secrets
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from untax.core.errors import BackendError, ProtocolError, SandboxLost, SubstrateError
from untax.core.stream import Receiver

_MAGIC = b"utxheld1"
_HEADER = struct.Struct("<IQ")  # size, received
_ANSWER = struct.Struct("<8sQI")  # magic, received, size of the facts
_RECORD_MAX = 1 << 20
_PIECE = 256 << 10
_ACKNOWLEDGE_EVERY = 256 << 10
_FACTS_MAX = 256 << 10
_OPENING_S = 15.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0


class Carrier(Protocol):
    """A connection that may break. It calls `on_data` and `on_lost` of whoever opened it, from the event loop's thread."""

    def write(self, data: bytes) -> None: ...

    @property
    def write_buffer_size(self) -> int: ...

    async def drain(self) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        """End it; `on_lost` is not called for it any more."""


Open = Callable[[Callable[[bytes], None], Callable[[Exception | None], None]], Awaitable[Carrier]]
"""Connects to the sandbox: given `on_data` and `on_lost`. `SandboxLost` when there is no sandbox to connect to any more."""


@dataclass(frozen=True, slots=True)
class Within:
    """What the agent found where it was started: the image's own doing, before anything else ran."""

    machine: int
    """For which processor the image's programs are, as ELF numbers them; 0 when none says."""
    uid: int
    gid: int
    cwd: str
    env: dict[str, str]


class HeldStream:
    """`await open()` first; then it is a `ByteStream`. `patience_s` is how long a broken connection is tried again."""

    def __init__(self, sandbox_id: str, opener: Open, *, patience_s: float) -> None:
        self.within: Within | None = None
        self.reopened = 0
        """How often the connection broke and was made anew."""
        self._id = sandbox_id
        self._opener = opener
        self._patience_s = patience_s
        self._token = secrets.token_bytes(16)
        self._carrier: Carrier | None = None
        self._receiver: Receiver | None = None
        self._early: list[bytes] = []
        self._kept: deque[bytes] = deque()  # sent, not acknowledged
        self._kept_size = 0
        self._acknowledged = 0
        self._received = 0
        self._told = 0
        self._got = bytearray()
        self._left = 0  # of the record that is being read
        self._answered: asyncio.Future[None] | None = None
        self._reopening: asyncio.Task[None] | None = None
        self._drained: list[asyncio.Future[None]] = []
        self._paused = False
        self._lost: Exception | None = None
        self._closed = False

    # ---- connections ----

    async def open(self) -> None:
        """Connect for the first time; what is in the way is raised."""
        try:
            await self._connect()
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> None:
        self._got.clear()
        self._left = 0
        answered = self._answered = asyncio.get_running_loop().create_future()
        ended: list[Exception | None] = []

        def lost(exc: Exception | None) -> None:
            ended.append(exc)
            if not answered.done():
                answered.set_exception(exc or BackendError(self._id, "the stream ended before the cell answered"))
            elif self._carrier is not None and self._carrier is carrier:
                self._carrier_lost(exc)

        carrier = await self._opener(self._data, lost)
        try:
            carrier.write(_MAGIC + self._token + struct.pack("<Q", self._received))
            async with asyncio.timeout(_OPENING_S):
                await answered
        except TimeoutError:
            carrier.close()
            raise BackendError(self._id, f"the cell did not answer on a new stream within {_OPENING_S:g} s") from None
        except BaseException:
            carrier.close()
            raise
        finally:
            self._answered = None
        if self._closed:
            carrier.close()
            return
        if ended:  # between its answer and now
            raise BackendError(self._id, "the stream ended as soon as the cell had answered")
        self._carrier = carrier
        if self._paused:
            carrier.pause_reading()
        for piece in self._kept:
            carrier.write(_HEADER.pack(len(piece), self._received) + piece)
        self._told = self._received
        self._wake()

    def _carrier_lost(self, exc: Exception | None) -> None:
        self._carrier = None
        if not self._closed and self._reopening is None:
            self._reopening = asyncio.ensure_future(self._reopen(exc))

    async def _reopen(self, broken: Exception | None) -> None:
        """Until there is a connection again, the sandbox is known to be gone, or patience is at its end."""
        loop = asyncio.get_running_loop()
        end = loop.time() + self._patience_s
        pause = _FIRST_PAUSE_S
        last: Exception | None = broken
        while True:
            try:
                async with asyncio.timeout_at(end):
                    await self._connect()
            except SandboxLost as exc:
                self._reopening = None
                self.lose(exc)
                return
            except (SubstrateError, OSError, TimeoutError, ProtocolError) as exc:
                last = exc if not isinstance(exc, TimeoutError) else last
            else:
                self._reopening = None
                self.reopened += 1
                return
            if loop.time() + pause >= end:
                self._reopening = None
                reason = f"its stream broke and could not be opened again within {self._patience_s:g} s"
                self.lose(SandboxLost(self._id, f"{reason}: {last}" if last else reason))
                return
            await asyncio.sleep(pause)  # nobody announces that the way is free again
            pause = min(pause * 2, _LONGEST_PAUSE_S)

    # ---- what arrives ----

    def _data(self, data: bytes) -> None:
        if self._closed:
            return
        if self._answered is not None:
            self._got += data
            self._take_answer()
            return
        self._take(data)

    def _take_answer(self) -> None:
        got = self._got
        if len(got) < _ANSWER.size:
            return
        magic, received, size = _ANSWER.unpack_from(got)
        if magic != _MAGIC or size > _FACTS_MAX:
            self._nonsense("no held stream of this protocol")
            return
        if len(got) < _ANSWER.size + size:
            return
        if not self._acknowledge(received):
            self._nonsense("it has received what was never sent")
            return
        if self.within is None:
            try:
                self.within = _read_facts(bytes(got[_ANSWER.size : _ANSWER.size + size]))
            except (struct.error, IndexError):
                self._nonsense("facts that cannot be read")
                return
        rest = bytes(got[_ANSWER.size + size :])
        got.clear()
        answered, self._answered = self._answered, None
        if answered is not None and not answered.done():
            answered.set_result(None)
        if rest:
            self._take(rest)

    def _take(self, data: bytes) -> None:
        if self._got:
            self._got += data
            data = bytes(self._got)
            self._got.clear()
        at, end = 0, len(data)
        while at < end:
            if not self._left:
                if end - at < _HEADER.size:
                    break
                self._left, received = _HEADER.unpack_from(data, at)
                at += _HEADER.size
                if self._left > _RECORD_MAX or not self._acknowledge(received):
                    self._nonsense("a record that breaks the rules")
                    return
                continue
            piece = data[at : at + self._left]
            at += len(piece)
            self._left -= len(piece)
            self._received += len(piece)
            if self._receiver is None:
                self._early.append(piece)
            else:
                self._receiver.data_received(piece)
            if self._closed:
                return
        if at < end:
            self._got += data[at:]
        if self._received - self._told >= _ACKNOWLEDGE_EVERY and self._carrier is not None:
            self._told = self._received
            self._carrier.write(_HEADER.pack(0, self._received))

    def _acknowledge(self, received: int) -> bool:
        if not self._acknowledged <= received <= self._acknowledged + self._kept_size:
            return False
        gone = received - self._acknowledged
        self._acknowledged = received
        self._kept_size -= gone
        while gone:
            first = self._kept[0]
            if len(first) > gone:
                self._kept[0] = first[gone:]
                break
            gone -= len(first)
            self._kept.popleft()
        return True

    def _nonsense(self, what: str) -> None:
        exc = ProtocolError(f"held stream: {what}")
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc)
        else:
            self.lose(exc)

    # ---- as a stream ----

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._closed:
            asyncio.get_running_loop().call_soon(receiver.connection_lost, self._lost)
            return
        early, self._early = self._early, []
        for piece in early:
            receiver.data_received(piece)

    def write(self, data: bytes | memoryview) -> None:
        if self._closed:
            return
        data = bytes(data)
        for at in range(0, len(data), _PIECE):
            piece = data[at : at + _PIECE] if len(data) > _PIECE else data
            self._kept.append(piece)
            self._kept_size += len(piece)
            if self._carrier is not None:
                self._told = self._received
                self._carrier.write(_HEADER.pack(len(piece), self._received) + piece)

    @property
    def write_buffer_size(self) -> int:
        return self._carrier.write_buffer_size if self._carrier is not None else self._kept_size

    async def drain(self) -> None:
        while self._carrier is None and self._kept and not self._closed:
            drained: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._drained.append(drained)
            await drained
        if self._carrier is not None:
            await self._carrier.drain()

    def pause_reading(self) -> None:
        self._paused = True
        if self._carrier is not None:
            self._carrier.pause_reading()

    def resume_reading(self) -> None:
        self._paused = False
        if self._carrier is not None:
            self._carrier.resume_reading()

    def close(self) -> None:
        self.lose(None)

    def lose(self, exc: Exception | None) -> None:
        """End the stream for good: `connection_lost(exc)` follows. Safe to call twice."""
        if self._closed:
            return
        self._closed = True
        self._lost = exc
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()
        if self._reopening is not None:
            self._reopening.cancel()
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(exc or SandboxLost(self._id, "the stream was closed"))
        self._kept.clear()
        self._kept_size = 0
        self._wake()
        if self._receiver is not None:
            self._receiver.connection_lost(exc)

    def _wake(self) -> None:
        waiting, self._drained = self._drained, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


def _read_facts(data: bytes) -> Within:
    machine, uid, gid = struct.unpack_from("<HII", data)
    at = 10

    def text() -> str:
        nonlocal at
        (size,) = struct.unpack_from("<I", data, at)
        at += 4 + size
        if at > len(data):
            raise IndexError
        return data[at - size : at].decode("utf-8", "surrogateescape")

    cwd = text()
    (count,) = struct.unpack_from("<I", data, at)
    at += 4
    env = dict(variable.partition("=")[::2] for variable in (text() for _ in range(count)))
    return Within(machine, uid, gid, cwd, env)
