"""How a server is reached: a Unix socket, or HTTP."""

from __future__ import annotations

import asyncio
import socket
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from untax.core.errors import BackendError, UsageError
from untax.remote.address import is_trusted
from untax.remote.lanes import Lane
from untax.remote.messages import Body
from untax.remote.stream import MessageStream, UnixStream
from untax.remote.web import WebAddress, WebStream

if TYPE_CHECKING:
    from untax.remote.ferried import Ferried

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

    def close(self) -> None:
        """Nobody will dial any more."""


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

    def close(self) -> None:
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
        self._ferried: Ferried | None = None

    def __str__(self) -> str:
        return str(self._address)

    async def dial(self) -> MessageStream:
        stream = WebStream(self._address, self._lanes)
        await stream.open()
        stream.ferried = self._ferried
        return stream

    def greeting(self) -> Body:
        lanes = {str(lane.number): lane.received for lane in self._lanes.values()}
        return {"lanes": lanes, "ferried": [] if self._ferried is None else list(self._ferried.lanes)}

    def greeted(self, stream: MessageStream, body: Body) -> None:
        if isinstance(stream, WebStream):
            stream.take_up(body.get("lanes") or {})
            self._take_ferry(stream, body)

    def _take_ferry(self, stream: WebStream, body: Body) -> None:
        """Have a connection beside the held one, where the server offers it and this process can seal."""
        offers = body.get("ferry") is True
        if self._ferried is None and offers:
            kind = _ferried()
            self._ferried = None if kind is None else kind(self._address)
        if self._ferried is None:
            return
        stream.ferried = self._ferried
        if offers:
            self._ferried.begin(str(body.get("owner")), str(body.get("secret")), float(body.get("lease_s") or 0.0))

    def close(self) -> None:
        if self._ferried is not None:
            self._ferried.close()


def _ferried() -> type[Ferried] | None:
    """None without what seals (`cryptography`, a part of `untax[ray]`), or where that may not."""
    try:
        from untax.remote.ferried import Ferried
        from untax.remote.sealed import can_seal
    except ImportError:
        return None
    return Ferried if can_seal() else None
