"""The first frame in each direction: who speaks, and in which version. No I/O."""

from __future__ import annotations

from untax import __version__
from untax.channel import wire
from untax.channel.replies import Failure, printable
from untax.channel.wire import Reader
from untax.core.errors import ProtocolError


class Handshake:
    """Takes the frames of id 0."""

    __slots__ = ("_own", "done", "version")

    def __init__(self, version: str = __version__) -> None:
        self._own = version
        self.version = ""  # of the cell
        self.done = False

    @property
    def greeting(self) -> bytes:
        """Ours."""
        return wire.hello(self._own)

    def take(self, kind: int, payload: bytes) -> None:
        """Raises `ProtocolError` for anything but one greeting of our own major version."""
        if kind == wire.ERROR:
            failure = Failure.read(payload)
            raise ProtocolError(failure.message or "the cell refused the connection")
        if kind != wire.HELLO or self.done:
            raise ProtocolError(f"a frame of kind {kind:#x} where a greeting belongs")
        reader = Reader(payload)
        magic, major, minor = reader.u32(), reader.u16(), reader.u16()
        self.version = printable(reader.blob(256))
        reader.end()
        if magic != wire.MAGIC:
            raise ProtocolError("the other end is not a cell: something else writes to its stream")
        if major != wire.MAJOR:
            raise ProtocolError(
                f"the cell {self.version} speaks protocol {major}.{minor}, this client {wire.MAJOR}.{wire.MINOR}:"
                " install the same release on both sides"
            )
        self.done = True

    def resume(self, version: str) -> None:
        """The greetings were exchanged by somebody else, over the same stream."""
        self.version = version
        self.done = True
