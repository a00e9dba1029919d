"""A box whose channel is somebody else's: the server keeps a copy of the descriptor and never reads from it.

The copy keeps the sandbox while the holder's connection is broken, can be handed out again when a reply was lost, tells
when the cell has ended, and is what the server closes when the lease is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from untax.channel.handover import Resumed, give
from untax.channel.stream import SocketStream
from untax.core.errors import SandboxLost
from untax.core.stream import ByteStream
from untax.server.relay import Relay

if TYPE_CHECKING:
    from untax.channel.client import Channel
    from untax.tenancy import Tenancy


class HangUps:
    """Tells when the other end of a socket has closed it, without reading: what comes over it is for another process."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._told: dict[int, Callable[[], None]] = {}
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._ready)

    def watch(self, sock: socket.socket, tell: Callable[[], None]) -> None:
        self._told[sock.fileno()] = tell
        self._epoll.register(sock.fileno(), select.EPOLLRDHUP | select.EPOLLONESHOT)  # hang-ups are told unasked

    def forget(self, sock: socket.socket) -> None:
        """Before `sock` is closed: the holder's copy would keep the registration alive."""
        if self._told.pop(sock.fileno(), None) is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(sock.fileno())

    def close(self) -> None:
        """Safe to call twice."""
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _ready(self) -> None:
        for fd, _ in self._epoll.poll(0, 64):
            if (tell := self._told.get(fd)) is not None:
                tell()


class Handed:
    """What a box has in the place of its channel once that was handed out."""

    def __init__(
        self, sandbox_id: str, sock: socket.socket, resumed: Resumed, hang_ups: HangUps, on_lost: Callable[[Handed, SandboxLost], None]
    ) -> None:
        self.sandbox_id = sandbox_id
        self.resumed = resumed
        self.is_idle = False  # the holder says so when it asks for a reset
        self.relay: Relay | None = None
        self._sock: socket.socket | None = sock
        self._hang_ups = hang_ups
        self._on_lost = on_lost
        hang_ups.watch(sock, self._hung_up)

    @property
    def is_lost(self) -> bool:
        return self._sock is None

    @property
    def cell_version(self) -> str:
        return self.resumed.cell_version

    def descriptor(self) -> int:
        """To be handed out; `SandboxLost` once it is closed."""
        if self._sock is None:
            raise SandboxLost(self.sandbox_id, "it ended before its channel was handed out")
        return self._sock.fileno()

    def close(self) -> None:
        sock, self._sock = self._sock, None
        if sock is not None:
            self._hang_ups.forget(sock)
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)  # for the holder's copy too
            sock.close()
        if self.relay is not None:
            self.relay.close()

    def _hung_up(self) -> None:
        if self._sock is not None:
            self._on_lost(self, SandboxLost(self.sandbox_id, "the cell hung up, or its holder did"))


async def hand_over(box: Tenancy, hang_ups: HangUps) -> Handed:
    """The box's channel, to be given to its holder; the same one when that was done before."""
    channel: object = box._live()
    if isinstance(channel, Handed):
        return channel
    stream, resumed = await give(cast("Channel", channel))
    sock, relay = _socket_of(stream, cast("Channel", channel))

    def lost(handed: Handed, exc: SandboxLost) -> None:
        if box._channel is cast("Channel", handed):
            box.was_lost(exc)

    handed = Handed(box.id, sock, resumed, hang_ups, lost)
    handed.relay = relay
    if box._channel is not channel:  # it ended meanwhile
        handed.close()
        box._live()
        raise SandboxLost(box.id, "it was reset while its channel was handed out")
    box._channel = cast("Channel", handed)
    return handed


def _socket_of(stream: ByteStream, channel: Channel) -> tuple[socket.socket, Relay | None]:
    """The stream as a descriptor. One that is not a socket is carried by this process from then on."""
    if isinstance(stream, SocketStream):
        return stream.detach(), None
    ours, its = socket.socketpair()
    return its, Relay(stream, ours, channel)
