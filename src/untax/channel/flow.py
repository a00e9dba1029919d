"""Flows: requests whose answer is a windowed stream rather than one value. No I/O.

A flow holds what has come and was not yet taken, at most one window of it for each stream, and knows how much
may be sent. Drivers wait, take, and return credit.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeVar

from untax.channel import wire
from untax.channel.actions import in_directory, shell_argv, spawn_payload
from untax.channel.arguments import Name, argv_bytes, path_bytes, whole_number
from untax.channel.call import TIMEOUT_S, Call, read_command
from untax.channel.replies import Event, TreeSize, name_text, read_event
from untax.channel.wire import Reader, blob
from untax.core.errors import ProtocolError
from untax.core.result import CommandResult

T = TypeVar("T")

STDOUT, STDERR = 1, 2
CREDIT_STEP = 64 << 10  # a quarter of the window: credit is returned in steps of this, to spare frames
_PIECES_MAX = 4096  # above this many pieces their order between stdout and stderr is given up to bound the memory
EVENTS_MAX = 10_000  # events kept for a caller who does not take them; then they become one overflow


class Flow(Call[T]):
    """One stream in each direction; a process has two that come."""

    __slots__ = ("_held", "_last", "_owed", "_pieces", "ended", "pid", "started")

    _streams = 1
    _has_start = True

    def __init__(self, kind: int, payload: bytes, *, timeout_s: float | None = None, path: str | None = None) -> None:
        super().__init__(kind, payload, timeout_s=timeout_s, path=path)
        self.started = not self._has_start
        self.pid = 0
        self.ended = [False, False]  # stdout, stderr: nothing more will come
        self._pieces: deque[tuple[int, bytes | bytearray]] = deque()
        self._last: list[bytearray | None] = [None, None]
        self._held = [0, 0]  # come and not yet credited
        self._owed = [0, 0]  # of that, taken

    # ---- from the cell ----

    def progress(self, kind: int, payload: bytes) -> None:
        if kind == wire.OUT:
            self._output(payload)
        elif kind == wire.CREDIT:
            self.add_window(payload)
        elif kind == wire.STARTED and not self.started:
            reader = Reader(payload)
            self.pid = reader.u32()
            reader.end()
            self.started = True
        else:
            raise ProtocolError(f"a frame of kind {kind:#x} that does not fit a stream")

    def _output(self, payload: bytes) -> None:
        if not self.started or not payload or not 1 <= payload[0] <= self._streams:
            raise ProtocolError("output before its start, or of a stream that does not exist")
        index = payload[0] - 1
        if self.ended[index]:
            raise ProtocolError("output after its end")
        if len(payload) == 1:
            self.ended[index] = True
            return
        self._held[index] += len(payload) - 1
        if self._held[index] > wire.STREAM_WINDOW:
            raise ProtocolError("more than the window of a stream")
        self._keep(payload[0], payload[1:])

    def _keep(self, stream: int, data: bytes) -> None:
        last = self._last[stream - 1]
        if last is not None and (len(self._pieces) >= _PIECES_MAX or (last is self._pieces[-1][1] and len(last) < CREDIT_STEP)):
            last += data
            return
        if len(data) >= CREDIT_STEP // 2:  # passed on as it came
            self._last[stream - 1] = None
            self._pieces.append((stream, data))
            return
        piece = bytearray(data)
        self._last[stream - 1] = piece
        self._pieces.append((stream, piece))

    # ---- to the caller ----

    def take(self) -> tuple[int, bytes] | None:
        """The next piece and its stream, or None when there is none now."""
        if not self._pieces:
            return None
        stream, piece = self._pieces.popleft()
        if self._last[stream - 1] is piece:
            self._last[stream - 1] = None
        self._owed[stream - 1] += len(piece)
        return stream, piece if isinstance(piece, bytes) else bytes(piece)

    def credit(self, request_id: int) -> bytes:
        """The CREDIT frames that are due for what was taken; often none."""
        frames = b""
        for index, owed in enumerate(self._owed):
            if owed >= CREDIT_STEP and not self.finished:
                self._owed[index] = 0
                self._held[index] -= owed
                frames += wire.credit(request_id, index + 1, owed)
        return frames

    @property
    def has_pieces(self) -> bool:
        return bool(self._pieces)

    @property
    def is_ended(self) -> bool:
        """Nothing more will come than what is held."""
        return self.finished or all(self.ended[: self._streams])


class ProcessFlow(Flow[CommandResult]):
    """A started process: its output as it comes, its standard input, and in the end its result without output."""

    __slots__ = ()
    _streams = 2

    def done(self, payload: bytes) -> CommandResult:
        result, at = read_command(payload, None)
        if at != len(payload):
            raise ProtocolError("bytes too many at the end of a command's result")
        for stream, rest in ((STDOUT, result.stdout), (STDERR, result.stderr)):
            if rest:
                self._keep(stream, rest)
        return result


class PlainFlow(Flow[None]):
    """A connection to a port inside."""

    __slots__ = ()


class DownloadFlow(Flow[TreeSize]):
    __slots__ = ()
    _has_start = False

    def done(self, payload: bytes) -> TreeSize:
        reader = Reader(payload)
        size = TreeSize(reader.u64(), reader.u64())
        reader.end()
        return size


class EgressFlow(Flow[None]):
    """A stream that the cell opened, to a destination that the host dials."""

    __slots__ = ()
    _has_start = True  # until the host has said EGRESS_OK nothing may come

    def __init__(self) -> None:
        super().__init__(wire.EGRESS, b"")

    def progress(self, kind: int, payload: bytes) -> None:
        if kind == wire.STARTED:
            raise ProtocolError("a start on a stream of the cell's own")
        super().progress(kind, payload)


class WatchFlow(Call[None]):
    """Events below a path, until cancelled."""

    __slots__ = ("events", "started")

    def __init__(self, payload: bytes, path: str) -> None:
        super().__init__(wire.WATCH, payload, timeout_s=None, path=path)
        self.started = False
        self.events: deque[Event] = deque()

    def progress(self, kind: int, payload: bytes) -> None:
        reader = Reader(payload)
        if kind == wire.STARTED and not self.started:
            reader.u32()
            self.started = True
        elif kind == wire.ITEMS and self.started:
            for _ in range(reader.u32()):
                self._keep(read_event(reader))
        else:
            raise ProtocolError(f"a frame of kind {kind:#x} that does not fit a watch")
        reader.end()

    def _keep(self, event: Event) -> None:
        if len(self.events) >= EVENTS_MAX:
            self.events.clear()
            self.events.append(Event("overflow", "", None))
        self.events.append(event)


# ---- requests ----


def start(
    argv: Sequence[Name],
    *,
    cwd: Name | None = None,
    env: Mapping[str, str | None] | None = None,
    user: str | None = None,
    timeout_s: float | None = None,
    merge: bool = False,
    stdin: bool = True,
) -> ProcessFlow:
    """Start `argv` and stream it. `stdin=False` gives it an empty standard input."""
    return _spawn(argv_bytes(argv), merge, stdin, cwd, env, user, timeout_s)


def start_shell(
    text: str | bytes,
    *,
    cwd: Name | None = None,
    env: Mapping[str, str | None] | None = None,
    user: str | None = None,
    timeout_s: float | None = None,
    merge: bool = False,
    stdin: bool = True,
) -> ProcessFlow:
    return _spawn(shell_argv(text), merge, stdin, cwd, env, user, timeout_s, wire.SHELL)


def pty(
    argv: Sequence[Name],
    *,
    rows: int = 24,
    cols: int = 80,
    cwd: Name | None = None,
    env: Mapping[str, str | None] | None = None,
    user: str | None = None,
    timeout_s: float | None = None,
) -> ProcessFlow:
    """Start `argv` on a terminal of its own."""
    whole_number(rows, "rows", 1, 0xFFFF)
    whole_number(cols, "cols", 1, 0xFFFF)
    options = wire.PTY | wire.MERGE | wire.STREAM | wire.STDIN
    payload, _ = spawn_payload(argv_bytes(argv), options, 0, cwd, env, user, None, rows, cols)
    return in_directory(ProcessFlow(wire.SPAWN, payload, timeout_s=timeout_s), cwd)


def _spawn(
    argv: list[bytes],
    merge: bool,
    stdin: bool,
    cwd: Name | None,
    env: Mapping[str, str | None] | None,
    user: str | None,
    timeout_s: float | None,
    options: int = 0,
) -> ProcessFlow:
    options |= wire.STREAM | (wire.MERGE if merge else 0) | (wire.STDIN if stdin else 0)
    payload, _ = spawn_payload(argv, options, 0, cwd, env, user, None)
    return in_directory(ProcessFlow(wire.SPAWN, payload, timeout_s=timeout_s), cwd)


def attach(pid: int) -> ProcessFlow:
    """Take over the stream of a process that was started earlier."""
    return ProcessFlow(wire.ATTACH, wire.u32(whole_number(pid, "pid", 1, 0x7FFFFFFF)))


def connect(port: int) -> PlainFlow:
    """A connection to a port on the sandbox's loopback."""
    return PlainFlow(wire.CONNECT, wire.u16(whole_number(port, "port", 1, 0xFFFF)))


def download(path: Name, *, max_bytes: int, timeout_s: float | None = TIMEOUT_S) -> DownloadFlow:
    """A file or tree as a tar stream."""
    raw = path_bytes(path)
    return DownloadFlow(wire.DOWNLOAD, blob(raw) + wire.u64(max_bytes), timeout_s=timeout_s, path=name_text(raw))


def watch(path: Name = ".", *, recursive: bool = True) -> WatchFlow:
    raw = path_bytes(path)
    return WatchFlow(blob(raw) + wire.u8(recursive), name_text(raw))
