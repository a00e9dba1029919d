"""The server's end of a held connection: one WebSocket at `/v1/channel` with a client's requests and the channels of all its boxes.

The bytes of an action are carried between the connection and the sandbox's own socket as they are. It is taken over from the HTTP server at the
upgrade, below ASGI: a frame then costs one callback, not a task and two queues.
"""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import os
import socket
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from untax.channel import wire
from untax.channel.handover import Resumed
from untax.channel.stream import SocketStream
from untax.core.errors import BackendError, PoolTimeout, ProtocolError, UntaxError, UsageError
from untax.remote import websocket
from untax.remote.lanes import ACK, DATA, END, FERRIED, HEAD, MESSAGE, Lane, Send, read_ack
from untax.remote.messages import Body, decode, encode
from untax.remote.stream import GREETING_MAX, Receiver
from untax.remote.tls import TlsTransport
from untax.remote.web import SEALED_PATH
from untax.server.handed import Handed
from untax.server.owners import Open, Owner
from untax.server.service import Session
from untax.service.auth import authenticate
from untax.service.egress import Served, Splitter
from untax.service.errors import Refused, error_body, error_headers, status_of
from untax.service.ferry import KEYS_SIZE, Ferry
from untax.service.gate import TenantGate
from untax.service.hosting import Hosting
from untax.service.tenants import Tenant

if TYPE_CHECKING:
    from collections.abc import Iterable

    from untax.channel.egress import EgressAttempt
    from untax.tenancy import Tenancy

log = logging.getLogger("untax.service")

PATH = "/v1/channel"
PATHS = frozenset({PATH, SEALED_PATH})
"""Where a connection is taken over from HTTP."""
_GREETING_S = 10.0
_UNSENT_MAX = 64 << 20  # a client that asks and does not read is dropped above this
_HIGH = 256 << 10  # unsent bytes of one sandbox above which its lane is not read from


class Carrier:
    """Between one lane and the socket of one sandbox. With a network, its egress streams are taken out on the way."""

    def __init__(self, sock: socket.socket, owner: Owner, number: int, send: Send, box: Tenancy | None, resumed: Resumed) -> None:
        self._owner = owner
        self._served: Served | None = None
        self.lane = Lane(number, send, self._ended)
        self._stream = SocketStream(sock)
        self._waiting: set[asyncio.Task[None]] = set()
        self.is_stalled = False
        self._is_full = False
        self._is_choked = False
        if box is not None and box.spec.network != "none":
            self._served = Served(box, self._stream, resumed.cell_version, self._choke, lambda attempt: self._attempted(box, attempt))
            self._from_client = Splitter(wire.FRAME_MAX_OUT)
            self._from_cell = Splitter(wire.FRAME_MAX_IN)
            if resumed.kept:
                self.from_cell(resumed.kept)
        self.lane.start(self)
        self._stream.start(_FromCell(self))

    # ---- from the client, by its lane ----

    def data_received(self, data: bytes) -> None:
        if self._served is None:
            self._stream.write(data)
        else:  # whole frames, so that ours come between them and not into them
            for is_egress, frames in self._from_client.feed(data):
                if is_egress:
                    raise ProtocolError("a client does not serve its sandbox's network")
                self._stream.write(frames)
        if self._stream.write_buffer_size > _HIGH:
            self.lane.pause_reading()
            self._later(self._go_on())

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._stream.close()

    async def _go_on(self) -> None:
        await self._stream.drain()
        self.lane.resume_reading()

    # ---- from the sandbox ----

    def from_cell(self, data: bytes) -> None:
        if self._served is None:
            self.lane.write(data)
        else:
            self._sort(self._served, data)
        if self.lane.write_buffer_size and not self._is_full:
            self._is_full = True
            self._stream.pause_reading()
            self._later(self._read_on())

    def _sort(self, served: Served, data: bytes) -> None:
        try:
            for is_egress, frames in self._from_cell.feed(data):
                if is_egress:
                    served.frames(frames)
                else:
                    self.lane.write(frames)
        except ProtocolError as exc:
            log.warning("a sandbox of %s spoke nonsense: %s", self._owner.label, exc)
            self.lane.close()

    def _attempted(self, box: Tenancy, attempt: EgressAttempt) -> None:
        """Into our ledger, and into the client's: it did not see it."""
        box._note_egress(attempt)
        session = self._owner.attachment
        if isinstance(session, Session):
            said = [attempt.host, attempt.port, attempt.verdict, attempt.reason]
            session.say({"event": "egress", "sandbox": box.id, "attempt": said})

    async def _read_on(self) -> None:
        await self.lane.drain()
        self._is_full = False
        self._set_reading()

    def stall(self, is_stalled: bool) -> None:
        """Whether the connection takes more at the moment."""
        self.is_stalled = is_stalled
        self._set_reading()

    def _choke(self, is_choked: bool) -> None:
        """More waits to be sent into the sandbox than should."""
        self._is_choked = is_choked
        self._set_reading()

    def _set_reading(self) -> None:
        if self.is_stalled or self._is_full or self._is_choked:
            self._stream.pause_reading()
        else:
            self._stream.resume_reading()

    def forsake(self) -> None:
        """The client does not know it. One that nothing went over is in an answer that was lost, and will be asked for again."""
        if not self.lane.is_untouched:
            self.lane.close()
            return
        cast("dict[int, Carrier]", self._owner.carriers).pop(self.lane.number, None)
        if self._served is not None:
            self._served.end()
        self._stream.detach().close()  # our copy only; the box keeps its own

    def cell_ended(self) -> None:
        """What it said last goes first."""
        self._later(self._finish())

    async def _finish(self) -> None:
        await self.lane.drain()
        self.lane.close()

    # ---- inside ----

    def _ended(self, lane: Lane) -> None:
        cast("dict[int, Carrier]", self._owner.carriers).pop(lane.number, None)
        if self._served is not None:
            self._served.end()
        self._stream.close()

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._waiting.add(task)
        task.add_done_callback(self._waiting.discard)


class _FromCell:
    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def data_received(self, data: bytes) -> None:
        self._carrier.from_cell(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._carrier.cell_ended()


class HeldConnection(asyncio.Protocol):
    """A `MessageStream` for a `Session`, and the lanes of its owner."""

    def __init__(self, hosting: Hosting, tenant: Tenant, transport: asyncio.Transport) -> None:
        self._hosting = hosting
        self._hosting.connections[tenant.name] += 1
        self._tenant = tenant
        self._transport = transport
        self._parser = websocket.Parser(is_client=False, most=GREETING_MAX)
        self._receiver: Receiver | None = None
        self._owner: Owner | None = None
        self._carriers: dict[int, Carrier] = {}
        self._is_closed = False
        session = Session(hosting.owners, self, f"tenant {tenant.name}", proves_life=False, on_owner=self._known)
        self._late = asyncio.get_running_loop().call_later(
            _GREETING_S, session.refuse, 0, ProtocolError(f"no greeting within {_GREETING_S:g} s")
        )
        self._receiver = session

    def _known(self, owner: Owner, greeting: Body) -> Body:
        """Whose connection it is: a new owner gets this tenant's gate, an earlier one must have it, and goes on with its lanes."""
        if isinstance(owner.gate, Open):
            mine = sum(one.gate.name == self._tenant.name for one in self._hosting.owners.owners)
            if mine >= self._tenant.allowance.connections:
                raise PoolTimeout(
                    f"{mine} clients of {self._tenant.name} hold a connection, or may come back to theirs: close some of them"
                )
            if not self._tenant.is_trusted:
                owner.gate = TenantGate(self._hosting, self._tenant)
        if owner.gate.name != ("" if self._tenant.is_trusted else self._tenant.name):
            raise UsageError("the secret does not fit the owner")
        self._late.cancel()
        self._owner = owner
        self._parser.most = websocket.MESSAGE_MAX
        self._carriers = cast("dict[int, Carrier]", owner.carriers)
        seen = greeting.get("lanes")
        known = {str(number): carrier.lane.received for number, carrier in self._carriers.items()}
        asyncio.get_running_loop().call_soon(self._take_up, seen if isinstance(seen, dict) else {})  # behind the greeting's answer
        ferry = self._ferry
        if ferry is not None:
            ferried = greeting.get("ferried")
            ferry.keep(
                owner, [one for one in ferried if isinstance(one, int) and 0 < one < 1 << 32] if isinstance(ferried, list | tuple) else []
            )
        return {"lanes": known, "ferry": ferry is not None}

    @property
    def _ferry(self) -> Ferry | None:
        return self._hosting.ferry if self._tenant.is_trusted else None

    def _take_up(self, seen: Mapping[str, Any]) -> None:
        for carrier in list(self._carriers.values()):
            at = seen.get(str(carrier.lane.number))
            try:
                if isinstance(at, int):
                    carrier.lane.resume(self._put, at)
                    carrier.stall(is_stalled=False)
                else:
                    carrier.forsake()
            except ProtocolError as exc:
                log.warning("a channel of %s ended: %s", self._tenant.name, exc)
                carrier.lane.close()

    # ---- as a MessageStream ----

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def send(self, body: Mapping[str, Any], fd: int | None = None) -> None:
        if self._is_closed:
            return
        if fd is None:
            self._put(HEAD.pack(MESSAGE, 0) + encode(body)[4:])
            return
        owner = self._owner
        assert owner is not None
        number = owner.next_carrier
        owner.next_carrier += 1
        box, resumed = _box_of(owner, fd)
        has_network = box is not None and box.spec.network != "none"
        if self._ferry is not None and not has_network and self._ferry.carry(owner, number, fd):
            self._put(HEAD.pack(FERRIED, number) + encode(body, 1)[4:])
            return
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError as exc:
            raise BackendError("", f"no descriptor for a channel: {exc.strerror}") from exc
        if has_network:
            body = _without_beginning(body)  # of a frame: it may be one of ours
        self._put(HEAD.pack(MESSAGE, number) + encode(body, 1)[4:])
        self._carriers[number] = Carrier(sock, owner, number, self._put, box, resumed)

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size()

    def close(self) -> None:
        self._receiver = None
        self._end()

    # ---- from the transport ----

    def data_received(self, data: bytes) -> None:
        try:
            for opcode, message in self._parser.feed(data):
                if opcode == websocket.BINARY:
                    self._took(message)
                elif opcode == websocket.PING:
                    self._transport.write(websocket.frame(websocket.PONG, message, is_client=False))
                elif opcode == websocket.CLOSE:
                    self._lose("the client hung up")
                elif opcode != websocket.PONG:
                    raise ProtocolError("text, where messages are binary")
                if self._is_closed:
                    return
        except ProtocolError as exc:
            self._lose(f"nonsense was received: {exc}")

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(f"the connection broke: {exc}" if exc is not None else "the client hung up")

    def pause_writing(self) -> None:
        for carrier in self._carriers.values():
            carrier.stall(is_stalled=True)

    def resume_writing(self) -> None:
        for carrier in self._carriers.values():
            carrier.stall(is_stalled=False)

    # ---- inside ----

    def _took(self, message: bytes) -> None:
        if len(message) < HEAD.size:
            raise ProtocolError("a message that is too short")
        kind, number = HEAD.unpack_from(message)
        if kind == MESSAGE:
            body, with_channel = decode(message[HEAD.size :])
            if with_channel:
                raise ProtocolError("a channel from a client")
            if self._receiver is not None:
                self._receiver.message_received(body, None)
            return
        carrier = self._carriers.get(number)
        if carrier is None:
            return  # it ended a moment ago
        if kind == DATA:
            carrier.lane.data_received(message[HEAD.size :])
        elif kind == ACK:
            carrier.lane.acknowledged(read_ack(message))
        elif kind == END:
            carrier.lane.end(None)
        else:
            raise ProtocolError(f"a message of kind {kind}")

    def _put(self, message: bytes) -> None:
        if self._is_closed:
            return
        self._transport.write(websocket.frame(websocket.BINARY, message, is_client=False))
        if self._transport.get_write_buffer_size() > _UNSENT_MAX:
            asyncio.get_running_loop().call_soon(self._lose, "it does not read what is sent to it")

    def _lose(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        self._end()
        if receiver is not None:
            receiver.connection_lost(reason)

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._hosting.connections[self._tenant.name] -= 1
        self._late.cancel()
        for carrier in self._carriers.values():
            carrier.lane.suspend()
            carrier.stall(is_stalled=True)
        if self._transport.get_write_buffer_size() > _HIGH:
            self._transport.abort()
        else:
            self._transport.close()


def _box_of(owner: Owner, fd: int) -> tuple[Tenancy | None, Resumed]:
    """Whose channel is about to be carried, and where it was when it was handed over."""
    for box in owner.leases.values():
        handed: object = box._channel
        if isinstance(handed, Handed) and not handed.is_lost and handed.descriptor() == fd:
            return box, handed.resumed
    return None, Resumed("", 1)


def _without_beginning(body: Mapping[str, Any]) -> Mapping[str, Any]:
    answer = dict(body["ok"])
    answer["channel"] = {**answer["channel"], "kept": b""}
    return {**body, "ok": answer}


def take_over(hosting: Hosting, transport: asyncio.Transport, path: str, headers: Iterable[tuple[bytes, bytes]]) -> asyncio.Protocol | None:
    """The upgrade of an HTTP connection, answered; None where it was refused, and the connection is closed."""
    named = dict(headers)
    try:
        tenant = authenticate(hosting.tenants, headers)
        if hosting.connections[tenant.name] >= tenant.allowance.connections:
            raise Refused(
                429, "TooMany", f"{tenant.name} holds {tenant.allowance.connections} connections: close some of them", retry_after_s=1.0
            )
        # A server that is stopping is no reason: who holds something here comes back to it, and the greeting refuses the others.
        key = named.get(b"sec-websocket-key", b"")
        if path not in PATHS or len(key) != 24 or named.get(b"sec-websocket-version") != b"13":
            raise Refused(400, "UsageError", "not a WebSocket's opening")
        if path == SEALED_PATH:
            _ferry_across(hosting, tenant, transport, key, named)
            return None
    except UntaxError as exc:
        _refuse(transport, exc)
        return None
    transport.write(_switched(key))
    hosting.counters["connections", "held"] += 1
    return HeldConnection(hosting, tenant, transport)


def _switched(key: bytes, *more: bytes) -> bytes:
    lines = [
        b"HTTP/1.1 101 Switching Protocols",
        b"upgrade: websocket",
        b"connection: Upgrade",
        b"sec-websocket-accept: " + websocket.accept_for(key),
    ]
    return b"\r\n".join([*lines, *more, b"", b""])


def _ferry_across(hosting: Hosting, tenant: Tenant, transport: asyncio.Transport, key: bytes, named: Mapping[bytes, bytes]) -> None:
    """A connection beside the held one of the same client, for the native process."""
    owner_id, secret = (named.get(name, b"").decode("latin-1") for name in (b"untax-owner", b"untax-secret"))
    ferry = hosting.ferry
    if ferry is None or not tenant.is_trusted or not isinstance(transport, TlsTransport):
        raise Refused(404, "UsageError", "channels go over the held connection here")
    if not hosting.owners.owners.is_known(owner_id):
        raise Refused(404, "UsageError", "no client of that name holds a connection")
    owner, _ = hosting.owners.owners.take_up(owner_id, secret, "")
    keys = os.urandom(KEYS_SIZE)
    transport.write(_switched(key, b"untax-keys: " + base64.b64encode(keys)))
    try:
        with transport.leave() as sock:
            ferry.connect(owner, sock, keys)
    except OSError as exc:
        log.warning("a client's channels go over its held connection: %s", exc)
        transport.abort()
        return
    hosting.counters["connections", "ferried"] += 1


def _refuse(transport: asyncio.Transport, exc: UntaxError) -> None:
    body = json.dumps(error_body(exc)).encode()
    lines = [f"HTTP/1.1 {status_of(exc)} Refused", "connection: close", "content-type: application/json", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in error_headers(exc).items()]
    transport.write("\r\n".join([*lines, "", ""]).encode() + body)
    transport.close()
