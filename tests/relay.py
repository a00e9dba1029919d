"""A link between a client and a server that can fall silent or be cut: bytes go through another port of the server's address."""

from __future__ import annotations

import asyncio
import contextlib
from types import TracebackType


class Relay:
    """`async with Relay(host, port) as relay`: connect to `relay.port` at the same host instead."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._writers: set[asyncio.StreamWriter] = set()
        self._open = asyncio.Event()
        self._open.set()
        self.swallowed = asyncio.Event()
        """Set when something was sent over a link that is silent."""

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._carry, self._host, 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None) -> None:
        self.cut()
        await self._server.wait_closed()

    def silence(self) -> None:
        """Nothing passes, and nobody is told, as when a machine is gone or a cable is out: what is sent stays on the way."""
        self.swallowed.clear()
        self._open.clear()

    def restore(self) -> None:
        """What was on its way arrives."""
        self._open.set()

    def cut(self) -> None:
        """Connections are reset, and there is nobody to connect to."""
        self._server.close()
        self._open.set()
        for writer in self._writers:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        there, back = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, back}
        await asyncio.gather(self._pipe(reader, back), self._pipe(there, writer))

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                if not self._open.is_set():
                    self.swallowed.set()
                    await self._open.wait()
                writer.write(data)
                await writer.drain()
        writer.close()
