"""The network of sandboxes whose channel a client holds over HTTP: this server dials, enforces and logs, and not the client.

The frames of a channel are told apart by their number alone, each way: those of egress streams are between the cell and us, all others between
the cell and the client. Nothing else in them is looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from typing import TYPE_CHECKING

from untax.channel import wire
from untax.channel.client import Channel
from untax.channel.egress import Egress, EgressAttempt
from untax.channel.handover import Resumed
from untax.core.errors import ProtocolError
from untax.core.stream import Receiver

if TYPE_CHECKING:
    from untax.channel.stream import SocketStream
    from untax.tenancy import Tenancy

_HEAD = Struct("<II")  # length, request id


class Splitter:
    """Cuts bytes into whole frames and says whether each is of an egress stream; keeps at most one unfinished one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept = b""

    def feed(self, received: bytes) -> Iterator[tuple[bool, bytes]]:
        """Neighbours of one kind come as one piece. `ProtocolError` for a frame that nobody may send."""
        data = self._kept + received if self._kept else received
        at = start = 0
        kind: bool | None = None
        while len(data) - at >= _HEAD.size:
            size, request_id = _HEAD.unpack_from(data, at)
            if not 8 <= size <= self._most:
                raise ProtocolError(f"a frame of {size} bytes")
            if len(data) - at < 4 + size:
                break
            is_egress = bool(request_id & wire.EGRESS_BIT)
            if kind is not None and kind is not is_egress:
                yield kind, data[start:at]
                start = at
            kind = is_egress
            at += 4 + size
        if kind is not None and at > start:
            yield kind, data[start:at]
        self._kept = data[at:]


class Served:
    """The egress streams of one sandbox: a channel of which only they are left. `write` puts whole frames on the cell's socket."""

    def __init__(
        self,
        box: Tenancy,
        stream: SocketStream,
        cell_version: str,
        choke: Callable[[bool], None],
        on_attempt: Callable[[EgressAttempt], None],
    ) -> None:
        self._stream = stream
        self._choke = choke
        self._receiver: Receiver | None = None
        self._channel = Channel(
            self,
            sandbox_id=box.id,
            egress=Egress(box.spec.network, on_attempt=on_attempt),
            resumed=Resumed(cell_version, 1),
        )

    def frames(self, data: bytes) -> None:
        """From the cell. What breaks the rules ends the channel, and with it the streams; the box is told by its own end."""
        self._channel.data_received(data)

    def end(self) -> None:
        self._channel.close()

    # ---- as the channel's ByteStream ----

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver

    def write(self, data: bytes) -> None:
        self._stream.write(data)

    @property
    def write_buffer_size(self) -> int:
        return self._stream.write_buffer_size

    async def drain(self) -> None:
        await self._stream.drain()

    def pause_reading(self) -> None:
        self._choke(True)

    def resume_reading(self) -> None:
        self._choke(False)

    def close(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.connection_lost(None)
