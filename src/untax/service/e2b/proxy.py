"""Requests to a port inside a sandbox: HTTP and WebSocket from outside, carried over the channel to its own loopback.

What goes in is one request per connection, its head written anew from what was parsed here, so that nothing a client sends can be read as two. What
comes out is parsed by `h11`, with its bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from typing import TYPE_CHECKING
from urllib.parse import quote

import h11
from starlette.types import Receive, Scope, Send
from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.uri import parse_uri

from untax.core.errors import FileError, SandboxLost, UntaxError
from untax.service.e2b.envd import closed, gone
from untax.service.errors import Refused

if TYPE_CHECKING:
    from untax.channel.process import Connection
    from untax.service.e2b.sandbox import Sandbox

_HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
_OURS = {b"e2b-traffic-access-token", b"e2b-sandbox-id", b"e2b-sandbox-port", b"x-api-key"}
# Of a WebSocket's opening, said anew by our own end.
_OPENING = {
    b"host",
    b"content-length",
    b"sec-websocket-key",
    b"sec-websocket-version",
    b"sec-websocket-extensions",
    b"sec-websocket-protocol",
}
_MESSAGE_MAX = 16 << 20
_NORMAL, _AWAY, _TRY_LATER = 1000, 1001, 1013  # why a WebSocket is closed
_HEAD_S = 60.0  # until a server inside must have begun to answer


def is_allowed(sandbox: Sandbox, scope: Scope) -> bool:
    """Whether traffic may come in: anybody's, or only with the token."""
    if sandbox.rules.public_traffic:
        return True
    given = next((value for name, value in scope["headers"] if name == b"e2b-traffic-access-token"), b"")
    return hmac.compare_digest(given, sandbox.traffic_token.encode())


async def forward(sandbox: Sandbox, port: int, scope: Scope, receive: Receive, send: Send) -> None:
    """One HTTP request to that port, and its answer."""
    try:
        connection = await sandbox.box.connect(port)
    except (FileError, OSError):
        await closed(sandbox.id, port)(scope, receive, send)
        return
    except SandboxLost:
        await gone(sandbox.id)(scope, receive, send)
        return
    async with connection:
        await _Exchange(connection, sandbox, port).carry(scope, receive, send)


class _Exchange:
    def __init__(self, connection: Connection, sandbox: Sandbox, port: int) -> None:
        self._connection = connection
        self._sandbox = sandbox
        self._port = port
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=64 << 10)
        self._begun = False

    async def carry(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_request(scope, receive))
        sending.add_done_callback(self._sent)
        try:
            await self._take_answer(send)
        except (h11.RemoteProtocolError, UntaxError, OSError, TimeoutError):
            if not self._begun:
                await closed(self._sandbox.id, self._port)(scope, receive, send)
            else:
                raise Refused(502, "BadGateway", "the server inside broke off its answer") from None
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def _send_request(self, scope: Scope, receive: Receive) -> None:
        target = scope.get("raw_path") or scope["path"].encode()
        if scope["query_string"]:
            target += b"?" + scope["query_string"]
        headers = [(name, value) for name, value in scope["headers"] if name not in _HOP and name not in _OURS and name != b"host"]
        host = next((value for name, value in scope["headers"] if name == b"host"), b"localhost")
        if self._sandbox.rules.mask_host:
            host = self._sandbox.rules.mask_host.replace("${PORT}", str(self._port)).encode()
        message = await receive()
        has_length = any(name == b"content-length" for name, _ in headers)
        if (message.get("body") or message.get("more_body")) and not has_length:
            headers.append((b"transfer-encoding", b"chunked"))
        written = [
            (name.title(), value) for name, value in ((b"host", host), *headers, (b"connection", b"close"))
        ]  # as most programs write them
        request = h11.Request(method=scope["method"], target=target, headers=written)
        await self._write(self._http.send(request))
        while message["type"] == "http.request":
            if message.get("body"):
                await self._write(self._http.send(h11.Data(data=message["body"])))
            if not message.get("more_body"):
                await self._write(self._http.send(h11.EndOfMessage()))
                return
            message = await receive()

    async def _write(self, data: bytes | None) -> None:
        if data:
            await self._connection.write(data)

    def _sent(self, sending: asyncio.Future[None]) -> None:
        if not sending.cancelled() and sending.exception() is not None:
            self._connection.close()  # nobody will answer a request that could not be sent

    async def _take_answer(self, send: Send) -> None:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(None if self._begun else _HEAD_S):
                    data = await self._connection.read()
                self._http.receive_data(data)
            elif isinstance(event, h11.Response):
                self._begun = True
                headers = [(name, value) for name, value in event.headers if name not in _HOP]
                await send({"type": "http.response.start", "status": event.status_code, "headers": headers})
            elif isinstance(event, h11.Data):
                await send({"type": "http.response.body", "body": bytes(event.data), "more_body": True})
            elif isinstance(event, h11.EndOfMessage):
                await send({"type": "http.response.body", "body": b""})
                return
            elif isinstance(event, h11.ConnectionClosed):
                raise h11.RemoteProtocolError("it hung up")


async def refuse_socket(receive: Receive, send: Send, reason: str) -> None:
    if (await receive())["type"] == "websocket.connect":
        await send({"type": "websocket.close", "code": _TRY_LATER, "reason": reason})


async def forward_socket(sandbox: Sandbox, port: int, scope: Scope, receive: Receive, send: Send) -> None:
    """A WebSocket to that port: both ends speak to us, and messages pass from one to the other."""
    try:
        connection = await sandbox.box.connect(port)
    except (FileError, OSError, SandboxLost):
        await refuse_socket(receive, send, "The sandbox is running but port is not open")
        return
    async with connection:
        await _Socket(connection, sandbox, port, scope).carry(receive, send)


class _Socket:
    def __init__(self, connection: Connection, sandbox: Sandbox, port: int, scope: Scope) -> None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = headers.get(b"host", "localhost")
        if sandbox.rules.mask_host:
            host = sandbox.rules.mask_host.replace("${PORT}", str(port))
        target = scope["path"] + (f"?{scope['query_string'].decode('latin-1')}" if scope["query_string"] else "")
        self._connection = connection
        self._headers = [
            (name.decode("latin-1").title(), value.decode("latin-1"))
            for name, value in scope["headers"]
            if name not in _HOP and name not in _OURS and name not in _OPENING
        ]
        self._protocol = ClientProtocol(
            parse_uri(f"ws://{host}{quote(target, safe='/?&=%:+,;@~!$*()')}"),
            subprotocols=scope.get("subprotocols") or None,
            max_size=_MESSAGE_MAX,
        )

    async def carry(self, receive: Receive, send: Send) -> None:
        if (await receive())["type"] != "websocket.connect":
            return
        try:
            async with asyncio.timeout(_HEAD_S):
                await self._open()
        except (TimeoutError, UntaxError, OSError, InvalidHandshake):
            await send({"type": "websocket.close", "code": _TRY_LATER, "reason": "the server inside speaks no WebSocket there"})
            return
        await send({"type": "websocket.accept", "subprotocol": self._protocol.subprotocol})
        tasks = [asyncio.ensure_future(self._outwards(send)), asyncio.ensure_future(self._inwards(receive))]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with contextlib.suppress(RuntimeError):  # it was the client that went
            await send({"type": "websocket.close", "code": self._protocol.close_code or _AWAY})

    async def _open(self) -> None:
        request = self._protocol.connect()
        for name, value in self._headers:
            request.headers[name] = value
        self._protocol.send_request(request)
        await self._flush()
        while self._protocol.state is State.CONNECTING:
            if not await self._read():
                raise InvalidHandshake("it hung up")
        if self._protocol.handshake_exc is not None:
            raise InvalidHandshake("it refused")

    async def _read(self) -> bytes:
        data = await self._connection.read()
        if data:
            self._protocol.receive_data(data)
        else:
            self._protocol.receive_eof()
        await self._flush()
        return data

    async def _outwards(self, send: Send) -> None:
        message, is_text = bytearray(), True
        while True:
            for event in self._protocol.events_received():
                if not isinstance(event, Frame) or event.opcode not in (Opcode.TEXT, Opcode.BINARY, Opcode.CONT):
                    continue  # the answer to our greeting, pings, closes: the protocol deals with them
                if event.opcode is not Opcode.CONT:
                    message, is_text = bytearray(), event.opcode is Opcode.TEXT
                message += event.data
                if event.fin:
                    await send({"type": "websocket.send", **({"text": message.decode()} if is_text else {"bytes": bytes(message)})})
            if self._protocol.state is State.CLOSED or not await self._read():
                return

    async def _inwards(self, receive: Receive) -> None:
        while (message := await receive())["type"] == "websocket.receive":
            if message.get("text") is not None:
                self._protocol.send_text(message["text"].encode())
            else:
                self._protocol.send_binary(message["bytes"])
            await self._flush()
        self._protocol.send_close(_NORMAL)
        await self._flush()

    async def _flush(self) -> None:
        for data in self._protocol.data_to_send():
            if data:
                await self._connection.write(data)
