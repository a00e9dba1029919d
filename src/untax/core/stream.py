"""ByteStream: what a channel runs over. Whoever opened the stream implements it; the channel only uses it."""

from __future__ import annotations

from typing import Protocol


class Receiver(Protocol):
    """The side that the stream calls, always from the event loop's own thread."""

    def data_received(self, data: bytes) -> None:
        """Some bytes have arrived; never empty."""

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more will arrive. Called once; `exc` is None when the other end closed in good order."""


class ByteStream(Protocol):
    """A connected, ordered, two-way stream of bytes."""

    def start(self, receiver: Receiver) -> None:
        """Begin to deliver to `receiver`, in the running event loop. Called once."""

    def write(self, data: bytes) -> None:
        """Send, or keep until it can be sent; never blocks. Ignored once the stream is closed or lost."""

    @property
    def write_buffer_size(self) -> int:
        """How many bytes are kept because the other end is not reading."""

    async def drain(self) -> None:
        """Return once nothing is kept, or the stream has ended."""

    def pause_reading(self) -> None:
        """Deliver nothing until `resume_reading`."""

    def resume_reading(self) -> None: ...

    def close(self) -> None:
        """End the stream at once, dropping what is kept; `connection_lost(None)` follows. Safe to call twice."""
