"""The client's end of a held connection to a server over HTTP: one WebSocket for requests and for the channels of all boxes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from untax.core.errors import BackendError, ProtocolError, UntaxError, UsageError
from untax.remote import tls, websocket
from untax.remote.lanes import ACK, DATA, END, FERRIED, HEAD, MESSAGE, Lane, read_ack
from untax.remote.messages import decode, encode, error_of
from untax.remote.stream import Receiver

if TYPE_CHECKING:
    from untax.remote.ferried import Ferried

_PATH = "/v1/channel"
SEALED_PATH = "/v1/sealed"
"""Where a connection beside it is asked for (`untax.remote.sealed`)."""
_DIAL_S = 10.0
_HEAD_MAX = 64 << 10
_UNSENT_MAX = 64 << 20


@dataclass(frozen=True, slots=True)
class WebAddress:
    """Where a server is, and what lets one in."""

    host: str
    port: int
    is_secure: bool
    path: str = ""
    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    """Instead of what `ca_file` says."""

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_secure else 'http'}://{host}:{self.port}{self.path}"


class WebStream(asyncio.Protocol):
    """Messages and lanes over one WebSocket. `lanes` outlives it: the next connection goes on with them."""

    def __init__(self, address: WebAddress, lanes: dict[int, Lane]) -> None:
        self._address = address
        self._lanes = lanes
        self._loop = asyncio.get_running_loop()
        self._opened: asyncio.Future[None] = self._loop.create_future()
        self._transport: asyncio.Transport | None = None
        self._head: bytes | None = b""
        self._key = websocket.new_key()
        self._parser = websocket.Parser(is_client=True)
        self._receiver: Receiver | None = None
        self.ferried: Ferried | None = None
        """The lanes that go by another connection, where the server offers one."""
        self._is_closed = False

    async def open(self) -> None:
        """`BackendError` when nobody answers, `UsageError` when the token is not taken."""
        address = self._address
        try:
            async with asyncio.timeout(_DIAL_S):
                context = tls_of(address)
                if context is None:
                    await self._loop.create_connection(lambda: self, address.host, address.port)
                else:
                    await tls.connect(self, address.host, address.port, context, handshake_s=_DIAL_S)
                await self._opened
        except TimeoutError:
            self._end()
            raise BackendError("", f"the server at {address} did not answer within {_DIAL_S:g} s") from None
        except ssl.SSLCertVerificationError as exc:
            self._end()
            raise UsageError(f"{address}: its certificate is not trusted ({exc.verify_message}); name its authority with ca_file=") from exc
        except OSError as exc:
            self._end()
            raise BackendError("", f"no server answers at {address} ({exc.strerror or exc}); start one: untax serve") from exc
        except BaseException:
            self._end()
            raise

    # ---- as a MessageStream ----

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    @property
    def unsent(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def send(self, body: Mapping[str, Any], fd: int | None = None) -> None:  # noqa: ARG002  a client has none to pass
        if not self._is_closed:
            self._put(HEAD.pack(MESSAGE, 0) + encode(body)[4:])

    def close(self) -> None:
        self._receiver = None
        self._end()

    # ---- from the transport ----

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast("asyncio.Transport", transport)  # that of another event loop need not be one by name
        self._transport = transport
        address = self._address
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [
            f"GET {address.path}{_PATH} HTTP/1.1",
            f"Host: {host}:{address.port}",
            "Upgrade: websocket",
            "Connection: Upgrade",
            f"Sec-WebSocket-Key: {self._key.decode()}",
            "Sec-WebSocket-Version: 13",
            *([f"Authorization: Bearer {address.token}"] if address.token else []),
        ]
        transport.write("\r\n".join([*lines, "", ""]).encode())

    def data_received(self, data: bytes) -> None:
        try:
            if self._head is not None:
                data = self._read_head(data)
            for opcode, message in self._parser.feed(data):
                self._took(opcode, message)
        except UntaxError as exc:
            if not self._opened.done():
                self._opened.set_exception(exc)
                self._end()
            else:
                self._lose(f"nonsense was received: {exc}")

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._opened.done():
            self._opened.set_exception(BackendError("", f"the server at {self._address} hung up"))
        self._lose(f"the connection broke: {exc}" if exc is not None else "the other end hung up")

    # ---- inside ----

    def _read_head(self, data: bytes) -> bytes:
        """Of the answer to the upgrade; gives what came after it."""
        assert self._head is not None
        self._head += data
        head, end, rest = self._head.partition(b"\r\n\r\n")
        if not end:
            if len(self._head) > _HEAD_MAX:
                raise ProtocolError("an answer without end")
            return b""
        lines = head.split(b"\r\n")
        status = lines[0].split(b" ", 2)[1:2]
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])}
        if status != [b"101"]:
            size = int(headers.get(b"content-length", b"0") or 0) if headers.get(b"content-length", b"0").isdigit() else 0
            if len(rest) < min(size, _HEAD_MAX):
                return b""
            raise _refusal(self._address, b"".join(status), rest)
        if headers.get(b"sec-websocket-accept") != websocket.accept_for(self._key):
            raise ProtocolError(f"{self._address} does not speak WebSocket")
        self._head = None
        self._opened.set_result(None)
        return rest

    def _took(self, opcode: int, message: bytes) -> None:
        if opcode == websocket.BINARY and len(message) >= HEAD.size:
            kind, number = HEAD.unpack_from(message)
            if kind == MESSAGE:
                self._told(message[HEAD.size :], lambda: self._lane(number))
            elif kind == FERRIED:
                self._told(message[HEAD.size :], lambda: self._ferried_lane(number))
            elif (lane := self._lanes.get(number)) is None:
                pass  # closed here a moment ago
            elif kind == DATA:
                lane.data_received(message[HEAD.size :])
            elif kind == ACK:
                lane.acknowledged(read_ack(message))
            elif kind == END:
                lane.end(None)
        elif opcode == websocket.PING:
            self._write(websocket.frame(websocket.PONG, message, is_client=True))
        elif opcode == websocket.CLOSE:
            self._lose("the other end hung up")
        elif opcode != websocket.PONG:
            raise ProtocolError("a message that is none")

    def _told(self, message: bytes, new_lane: Callable[[], Lane]) -> None:
        body, with_channel = decode(message)
        stream = new_lane() if with_channel else None
        if self._receiver is not None:
            self._receiver.message_received(body, stream)

    def _lane(self, number: int) -> Lane:
        lane = self._lanes[number] = Lane(number, self._put, self._forget)
        return lane

    def _ferried_lane(self, number: int) -> Lane:
        if self.ferried is None:
            raise ProtocolError("a channel by a connection that was never asked for")
        return self.ferried.lane(number)

    def take_up(self, seen: Mapping[str, Any]) -> None:
        """The server has greeted again and said how much it has of each lane; those it does not know are over."""
        for lane in list(self._lanes.values()):
            at = seen.get(str(lane.number))
            if isinstance(at, int):
                lane.resume(self._put, at)
            else:
                lane.end(None)

    def _forget(self, lane: Lane) -> None:
        self._lanes.pop(lane.number, None)

    def _put(self, message: bytes) -> None:
        self._write(websocket.frame(websocket.BINARY, message, is_client=True))

    def _write(self, data: bytes) -> None:
        if self._transport is None or self._is_closed:
            return
        self._transport.write(data)
        if self._transport.get_write_buffer_size() > _UNSENT_MAX:
            self._loop.call_soon(self._lose, "it does not read what is sent to it")

    def _lose(self, reason: str) -> None:
        receiver, self._receiver = self._receiver, None
        was_closed = self._is_closed
        self._end()
        if receiver is not None and not was_closed:
            receiver.connection_lost(reason)

    def _end(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        for lane in self._lanes.values():
            lane.suspend()
        if self.ferried is not None:
            self.ferried.rest()
        if not self._opened.done():
            self._opened.cancel()
        if self._transport is not None:
            self._transport.close()


def _refusal(address: WebAddress, status: bytes, body: bytes) -> UntaxError:
    try:
        said = json.loads(body)["error"]
        message = f"{address}: {said['message']}"
    except (ValueError, KeyError, TypeError):
        said, message = {}, f"{address} answered {status.decode('latin-1')} instead of a held connection; is it an untax server?"
    if status == b"401":
        return UsageError(f"{address} does not know this token: give token=, or set UNTAX_TOKEN")
    if status in (b"429", b"503"):
        return BackendError("", message)
    return error_of({"kind": said.get("kind"), "args": [message]}) if said.get("kind") == "UsageError" else UsageError(message)


def tls_of(address: WebAddress) -> ssl.SSLContext | None:
    """None where it is spoken to in the clear; `UsageError` when nobody can be trusted by what `ca_file` names."""
    if not address.is_secure:
        return None
    if address.tls is not None:
        return address.tls
    try:
        context = ssl.create_default_context(cafile=address.ca_file)
    except (OSError, ssl.SSLError) as exc:
        raise UsageError(f"ca_file {address.ca_file!r}: {exc}") from exc
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context
