"""Requests to a port inside a sandbox: HTTP and WebSocket from outside, carried over the channel to its own loopback.

What goes in is one request per connection, its head written anew from what was parsed here, so that nothing a client sends can be read as two. What
comes out is parsed by `h11`, with its bounds.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING

import h11
from starlette.types import Message, Receive, Scope, Send

from untax.core.errors import FileError, SandboxLost, UntaxError
from untax.service.e2b.envd import closed, gone
from untax.service.errors import Refused

if TYPE_CHECKING:
    from untax.channel.process import Connection
    from untax.service.e2b.sandbox import Sandbox

_HOP = {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
_OURS = {b"e2b-traffic-access-token", b"e2b-sandbox-id", b"e2b-sandbox-port", b"x-api-key"}
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
        try:
            await self._take_answer(send, sending)
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
        if message.get("more_body") and not has_length:
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

    async def _take_answer(self, send: Send, sending: asyncio.Future[None]) -> None:
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                async with asyncio.timeout(None if self._begun else _HEAD_S):
                    data = await self._connection.read()
                self._http.receive_data(data)
                if sending.done() and not sending.cancelled() and (exc := sending.exception()) is not None and not data:
                    raise exc
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


async def refuse_socket(receive: Receive, send: Send) -> None:
    """WebSockets are not carried."""
    message: Message = await receive()
    if message["type"] == "websocket.connect":
        await send({"type": "websocket.close", "code": 1013, "reason": "WebSockets to ports of sandboxes are not carried by this server"})
