"""How a server is reached: a Unix socket, or HTTP."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import Protocol

from untax.core.errors import BackendError, UsageError
from untax.remote.address import is_trusted
from untax.remote.lanes import Lane
from untax.remote.messages import Body
from untax.remote.stream import MessageStream, UnixStream
from untax.remote.web import WebAddress, WebStream

GREETING_S = 10.0
_TIMEVAL = struct.Struct("@ll")


class Dialler(Protocol):
    """Knows how a server is reached. `str` of it names the place."""

    carries_channels: bool
    """Whether the channels of boxes go through the connection, and are over when it is."""

    async def dial(self) -> MessageStream:
        """`BackendError` when nobody listens there, `UsageError` when it is not for us."""

    def greeting(self) -> Body:
        """What the greeting says beside the rest."""

    def greeted(self, stream: MessageStream, body: Body) -> None:
        """The server has answered it."""


class UnixDialler:
    carries_channels = False

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        return str(self._path)

    def greeting(self) -> Body:
        return {}

    def greeted(self, stream: MessageStream, body: Body) -> None:
        pass

    async def dial(self) -> MessageStream:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A queue of connections that is full holds `connect` up, which no event loop can wait for: a thread does, and not for ever.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIMEVAL.pack(int(GREETING_S), 0))
        try:
            await asyncio.get_running_loop().run_in_executor(None, sock.connect, str(self._path))
        except (FileNotFoundError, ConnectionRefusedError) as exc:
            sock.close()
            raise BackendError("", f"no server listens at {self._path}; start one: untax serve --socket {self._path}") from exc
        except PermissionError as exc:
            sock.close()
            raise UsageError(f"{self._path} is another user's; start a server of your own: untax serve --socket PATH") from exc
        except OSError as exc:
            sock.close()
            raise BackendError("", f"{self._path}: {exc.strerror}") from exc
        except BaseException:
            sock.close()
            raise
        stream = UnixStream(sock, is_known=True)
        _, uid = stream.peer
        if not is_trusted(uid):
            stream.close()
            raise UsageError(f"the server at {self._path} runs as user {uid}, who is neither you nor root; connect to your own")
        return stream


class WebDialler:
    """Lanes outlive the connection that carries them."""

    carries_channels = True

    def __init__(self, address: WebAddress) -> None:
        self._address = address
        self._lanes: dict[int, Lane] = {}

    def __str__(self) -> str:
        return str(self._address)

    async def dial(self) -> MessageStream:
        stream = WebStream(self._address, self._lanes)
        await stream.open()
        return stream

    def greeting(self) -> Body:
        return {"lanes": {str(lane.number): lane.received for lane in self._lanes.values()}}

    def greeted(self, stream: MessageStream, body: Body) -> None:
        if isinstance(stream, WebStream):
            stream.take_up(body.get("lanes") or {})
