"""The sockets of the service: where it may listen, and an HTTP server that slow or endless senders cannot hold up.

uvicorn reads the requests. What it leaves open is closed here: a request's head has to come within `HEAD_S` and `HEAD_MAX` bytes. With a
certificate, hands are shaken by `untax.remote.tls` before uvicorn is told of a connection, within `HANDSHAKE_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import ssl
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from untax.core.errors import BackendError, UsageError
from untax.remote.tls import TlsTransport
from untax.service import held

HANDSHAKE_S = 10.0
"""For hands to be shaken; as long as a client of ours waits for a server."""
HEAD_S = 5.0
"""For the head of a request to come, from the connection or the request's first byte on."""
HEAD_MAX = 64 << 10
KEEP_ALIVE_S = 75.0
CONNECTIONS_MAX = 16_384
_BACKLOG = 4096
_WS_MAX = 16 << 20  # bytes of one WebSocket message
_DATE_S = 1.0  # the `date` of answers is as old as that at most
_STOP_S = 2.0  # for requests that are under way when everything they could be about is gone


@dataclass(frozen=True, slots=True)
class Address:
    """Where to listen, and with which certificate."""

    host: str = "127.0.0.1"
    port: int = 0
    tls_cert: str | None = None
    tls_key: str | None = None

    def __post_init__(self) -> None:
        if isinstance(self.port, bool) or not isinstance(self.port, int) or not 0 <= self.port <= 65_535:
            raise UsageError(f"--port must be between 0 and 65535, not {self.port!r}")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise UsageError("--tls-cert and --tls-key belong together")

    @property
    def is_loopback(self) -> bool:
        return all(ipaddress.ip_address(found[4][0]).is_loopback for found in self.resolved())

    def resolved(self) -> list[Any]:
        try:
            return socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        except (OSError, UnicodeError) as exc:
            raise UsageError(f"--host {self.host!r}: {exc}") from exc

    def check_safe(self, *, has_tokens: bool, any_key: bool) -> None:
        """`UsageError` for an address that others reach, unless what is said there is encrypted and nobody without a token is heard."""
        if self.is_loopback:
            return
        if any_key:
            raise UsageError(f"--any-key is for loopback only: anybody could use {self.host}")
        if self.tls_cert is None or not has_tokens:
            raise UsageError(f"{self.host} can be reached by others: give --tls-cert, --tls-key and --token-file, or listen on 127.0.0.1")


Upgrade = Callable[[asyncio.Transport, str, Iterable[tuple[bytes, bytes]]], asyncio.Protocol | None]
"""Takes a connection that asks for a WebSocket over, or refuses it."""


class Protocol(HttpToolsProtocol):
    """uvicorn's, with an end to the patience for heads."""

    _late: asyncio.TimerHandle | None = None
    _head_size = 0
    _in_head = True

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if self._late is None:
                self._await_head()
            self._head_size += len(data)
            if self._head_size > HEAD_MAX + len(data):  # a body may have come with the head's last bytes
                self._refuse(b"431 Request Header Fields Too Large")
                return
        super().data_received(data)

    def on_headers_complete(self) -> None:
        self._stop()
        self._in_head = False
        self._head_size = 0
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    upgrade: Upgrade | None = None

    def handle_websocket_upgrade(self) -> None:
        self._stop()
        path = self.url.partition(b"?")[0].decode("latin-1")
        if self.upgrade is None or path not in held.PATHS:
            super().handle_websocket_upgrade()
            return
        self.connections.discard(self)
        taken = type(self).upgrade(self.transport, path, self.headers)  # type: ignore[misc]
        if taken is not None:
            self.transport.set_protocol(taken)

    def _await_head(self) -> None:
        self._late = asyncio.get_running_loop().call_later(HEAD_S, self._refuse, b"408 Request Timeout")

    def _stop(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes) -> None:
        self._stop()
        if not self.transport.is_closing():
            self.transport.write(b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self.transport.close()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._ending = asyncio.Event()

    async def main_loop(self) -> None:
        # Its own looks ten times a second whether it is to end, and what the date is every tenth time. A fleet's agent that leases all it can is woken for that once in thirty times.
        while not await self.on_tick(0):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_DATE_S):
                    await self._ending.wait()

    def end(self) -> None:
        self.should_exit = True
        self._ending.set()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the command's, which drains first."""
        yield


class HttpListener:
    """Serves `app` from `start` until `close`."""

    def __init__(self, app: ASGIApp, address: Address, upgrade: Upgrade | None = None) -> None:
        self._address = address
        protocol = type("Protocol", (Protocol,), {"upgrade": staticmethod(upgrade)}) if upgrade is not None else Protocol
        http: Any = protocol if address.tls_cert is None else _inside_tls(protocol, _context(address))
        self._server = _Server(
            uvicorn.Config(
                app,
                http=http,
                ws="websockets-sansio",
                ws_max_size=_WS_MAX,
                ws_per_message_deflate=False,
                lifespan="on",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=int(KEEP_ALIVE_S),
                timeout_graceful_shutdown=int(_STOP_S),
                limit_concurrency=CONNECTIONS_MAX,
                proxy_headers=False,
            )
        )
        self._sockets: list[socket.socket] = []
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        host, port = self._sockets[0].getsockname()[:2]
        named = self._address.host if self._address.tls_cert is not None else host
        return f"{'https' if self._address.tls_cert else 'http'}://{f'[{named}]' if ':' in named else named}:{port}"

    async def start(self) -> None:
        """`BackendError` when the address cannot be had."""
        try:
            for family, kind, protocol, _, address in self._address.resolved():
                if self._sockets and self._address.port == 0:
                    break  # a second address would get another port
                sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC, protocol)
                self._sockets.append(sock)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind(address)
                sock.listen(_BACKLOG)
        except OSError as exc:
            self._close_sockets()
            raise BackendError(
                "", f"{self._address.host}:{self._address.port}: {os.strerror(exc.errno or 0)}; choose another --port"
            ) from exc
        self._serving = asyncio.ensure_future(self._server.serve(self._sockets))
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0)  # a lifespan that starts dialects, nothing that would take a while
        if self._serving.done():
            await self._serving
            raise BackendError("", "the HTTP server did not start; its log says why")

    async def close(self) -> None:
        """Take no more connections, let answers that are under way end, and close. Safe to call twice."""
        serving, self._serving = self._serving, None
        if serving is not None:
            self._server.end()
            await asyncio.wait([serving])
        self._close_sockets()

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()


def _context(address: Address) -> ssl.SSLContext:
    """What uvicorn would make of the certificate; no client is asked for one."""
    assert address.tls_cert is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(address.tls_cert, address.tls_key)
    except (OSError, ssl.SSLError) as exc:
        raise UsageError(f"--tls-cert {address.tls_cert}, --tls-key {address.tls_key}: {exc}") from exc
    return context


def _inside_tls(protocol: type[Protocol], context: ssl.SSLContext) -> Callable[..., TlsTransport]:
    """What uvicorn calls for each connection, where it has a class otherwise."""

    def accepted(**wiring: Any) -> TlsTransport:
        return TlsTransport(protocol(**wiring), context, handshake_s=HANDSHAKE_S)

    return accepted
