"""Started processes and connections: streams that stay open beside other actions."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import NamedTuple

from untax.channel import actions, flow
from untax.channel.client import Channel
from untax.channel.link import Link
from untax.core.result import CommandResult

SIGTERM, SIGKILL = 15, 9


class Output(NamedTuple):
    """A piece of what a process printed."""

    stream: str  # "stdout" or "stderr"
    data: bytes


_STREAMS = {flow.STDOUT: "stdout", flow.STDERR: "stderr"}


class Process:
    """A process that runs beside other actions, on pipes or on a terminal of its own.

    Iterate over it for its output, in the order in which it came; a process whose output nobody takes is held up once
    256 KiB of it wait. `wait` takes the rest itself. The process ends with its sandbox, or at its `timeout_s`.
    """

    def __init__(self, link: Link[CommandResult], *, cap: int = actions.OUTPUT_CAP) -> None:
        self.pid = link.flow.pid
        self._channel = link.channel
        self._link = link
        self._cap = cap

    @classmethod
    async def open(cls, channel: Channel, stream: flow.ProcessFlow) -> Process:
        """Start what `stream` (`flow.start`, `flow.pty`, `flow.attach`) describes."""
        return cls(await channel.open(stream))

    @property
    def is_running(self) -> bool:
        return not self._link.flow.finished and not self._channel.is_lost

    async def read(self) -> Output | None:
        """The next piece of output, or None when there will be no more."""
        piece = await self._link.receive()
        return None if piece is None else Output(_STREAMS[piece[0]], piece[1])

    async def __aiter__(self) -> AsyncIterator[Output]:
        while (output := await self.read()) is not None:
            yield output

    async def write(self, data: bytes) -> None:
        """Write to its standard input, waiting while it does not read. `BrokenPipeError` once it cannot."""
        await self._link.send(data)

    def close_stdin(self) -> None:
        """Give it the end of file."""
        self._link.send_eof()

    async def signal(self, number: int = SIGTERM, *, group: bool = False) -> None:
        """Send a signal to the process, or to its whole process group and session."""
        await self._channel.call(actions.signal(self.pid, number, group=group))

    def kill(self) -> None:
        """Kill it with all its descendants; `wait` then tells how it ended."""
        self._link.kill()

    async def resize(self, rows: int, cols: int) -> None:
        await self._channel.call(actions.resize(self.pid, rows, cols))

    async def wait_exit(self) -> None:
        """Return once it has ended; what it printed is still there to be read."""
        await self._link.wait()

    async def wait(self) -> CommandResult:
        """How it ended, with the output that was not read before: of each stream at most 1 MiB, the rest is counted."""
        kept: tuple[bytearray, bytearray] = (bytearray(), bytearray())
        dropped = [0, 0]
        while (piece := await self._link.receive()) is not None:
            index = piece[0] - 1
            room = self._cap - len(kept[index])
            kept[index].extend(piece[1][:room])
            dropped[index] += max(0, len(piece[1]) - room)
        result = await self._link.wait()
        return dataclasses.replace(
            result,
            stdout=bytes(kept[0]),
            stderr=bytes(kept[1]),
            dropped_stdout=dropped[0],
            dropped_stderr=dropped[1],
        )

    async def __aenter__(self) -> Process:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._link.cancel()  # kills what still runs


class Connection:
    """A byte stream to a port on the sandbox's loopback."""

    def __init__(self, link: Link[None]) -> None:
        self._link = link

    @classmethod
    async def open(cls, channel: Channel, port: int) -> Connection:
        """Connect; `FileError` with ECONNREFUSED when nothing listens there."""
        return cls(await channel.open(flow.connect(port)))

    async def read(self) -> bytes:
        """The next bytes; empty at the end of the stream."""
        piece = await self._link.receive()
        return b"" if piece is None else piece[1]

    async def write(self, data: bytes) -> None:
        await self._link.send(data)

    def write_eof(self) -> None:
        self._link.send_eof()

    def close(self) -> None:
        self._link.cancel()

    async def __aenter__(self) -> Connection:
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.close()
