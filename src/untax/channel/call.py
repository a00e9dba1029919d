"""A call: one request and what its replies amount to. No I/O.

A driver (`client`, `blocking`) sends `call.encode(id)`, gives every frame for that id to `call.feed` until it says that
it was the last, and takes `call.result()`. Replies are held to what was asked for, so a hostile cell can neither fill
the memory nor pass nonsense on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from struct import Struct
from struct import error as StructError
from typing import Generic, TypeVar

from untax.channel import wire
from untax.channel.arguments import timeout_ms
from untax.channel.replies import Failure, FileInfo
from untax.channel.wire import Reader
from untax.core.errors import ProtocolError, UsageError
from untax.core.result import CommandResult, Outcome, derive_outcome

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741

TIMEOUT_S = 300.0  # of every action that is not told otherwise
ITEMS_BYTES_MAX = 64 << 20  # what all items of one reply may take together
_PART_SMALL = 4096  # bytes: below this a part of an answer is copied to its neighbour
_SIGKILL = 9
_RUN_DONE = Struct("<BiQQQQIIBQQ")


class Call(Generic[T]):
    """One request and the state of its answer."""

    __slots__ = ("_decode", "_failure", "_value", "body", "finished", "key", "kind", "path", "payload", "timeout_s", "window")

    def __init__(
        self,
        kind: int,
        payload: bytes,
        *,
        timeout_s: float | None = TIMEOUT_S,
        path: str | None = None,
        decode: Callable[[Reader], T] | None = None,
        body: Iterator[bytes] | None = None,
    ) -> None:
        if timeout_s.__class__ is not float or not 0.0 < timeout_s < 1e6:
            timeout_ms(timeout_s)  # refuses with words; what is plainly right is not looked at twice
        self.kind = kind
        self.payload = payload
        self.timeout_s = timeout_s
        self.key = b""  # 16 bytes make the request idempotent
        self.path = path  # for the words of a FileError
        self.body = body  # DATA frames to send after the request, the last one with eof
        self.window = wire.STREAM_WINDOW  # how much of the body may be sent now
        self.finished = False
        self._decode = decode
        self._failure: Failure | None = None
        self._value: T | None = None

    def encode(self, request_id: int) -> bytes:
        """The request. A call that the cell refused may be encoded, and so asked, once more."""
        self.finished, self._failure = False, None
        if len(self.payload) > wire.FRAME_MAX_OUT - 64:
            raise UsageError(f"the request takes {len(self.payload)} bytes: at most 4 MiB go into one; split it")
        return wire.frame(request_id, self.kind, self.payload, timeout_ms(self.timeout_s), self.key)

    def feed(self, kind: int, payload: bytes) -> bool:
        """Take one frame of the answer; true when it was the final one."""
        if self.finished:
            raise ProtocolError("a second final frame")
        if kind == wire.DONE:
            self._value = self.done(payload)
        elif kind == wire.ERROR:
            self._failure = Failure.read(payload)
        else:
            self.progress(kind, payload)
            return False
        self.finished = True
        return True

    def result(self, sandbox_id: str = "", round_trip_ns: int = 0) -> T:
        """The value, once finished; raises what the cell answered instead."""
        if self._failure is not None:
            raise self._failure.error(sandbox_id, self.path)
        return self.conclude(self._value, round_trip_ns)  # type: ignore[arg-type]

    @property
    def is_failed(self) -> bool:
        """The cell answered with an error; `result` raises it."""
        return self._failure is not None

    # ---- what kinds of calls differ in ----

    def done(self, payload: bytes) -> T:
        """Read the payload of DONE."""
        reader = Reader(payload)
        value = self._decode(reader) if self._decode is not None else None
        reader.end()
        return value  # type: ignore[return-value]

    def progress(self, kind: int, payload: bytes) -> None:
        """Take a frame that is not final."""
        if kind == wire.CREDIT and self.body is not None:
            self.add_window(payload)
            return
        raise ProtocolError(f"a frame of kind {kind:#x} in answer to a request of kind {self.kind:#x}")

    def conclude(self, value: T, round_trip_ns: int) -> T:  # noqa: ARG002
        return value

    def add_window(self, payload: bytes) -> None:
        reader = Reader(payload)
        stream, count = reader.u8(), reader.u32()
        reader.end()
        self.window += count
        if stream != 0 or self.window > wire.STREAM_WINDOW:
            raise ProtocolError(f"credit for {count} bytes of stream {stream} that were never sent")


Parts = list[bytes | bytearray]


def add_part(parts: Parts, part: bytes) -> None:
    """Keep a part of an answer. Small ones are put together: as objects a byte each they would take fifty times their size."""
    if len(part) >= _PART_SMALL:
        parts.append(part)
    elif parts and isinstance(parts[-1], bytearray):
        parts[-1] += part
    elif part:
        parts.append(bytearray(part))


class CommandCall(Call[CommandResult]):
    """A command whose output comes back with its end."""

    __slots__ = ("_cap", "_heads", "_sizes")

    def __init__(self, kind: int, payload: bytes, cap: int, timeout_s: float | None, body: Iterator[bytes] | None = None) -> None:
        super().__init__(kind, payload, timeout_s=timeout_s, body=body)
        self._cap = cap
        self._heads: tuple[Parts, Parts] | None = None
        self._sizes = [0, 0]

    def progress(self, kind: int, payload: bytes) -> None:
        if kind != wire.OUT:
            super().progress(kind, payload)
            return
        if len(payload) < 2 or payload[0] not in (1, 2):
            raise ProtocolError("output of no stream, or none at all")
        index = payload[0] - 1
        self._sizes[index] += len(payload) - 1
        if self._sizes[index] > self._cap:
            raise ProtocolError(f"more output than the {self._cap} bytes asked for")
        if self._heads is None:
            self._heads = ([], [])
        add_part(self._heads[index], payload[1:])

    def done(self, payload: bytes) -> CommandResult:
        result, at = read_command(payload, self._heads)
        if at != len(payload):
            raise ProtocolError("bytes too many at the end of a command's result")
        if len(result.stdout) > self._cap or len(result.stderr) > self._cap:
            raise ProtocolError(f"more output than the {self._cap} bytes asked for")
        return result

    def conclude(self, value: CommandResult, round_trip_ns: int) -> CommandResult:
        object.__setattr__(value, "round_trip_s", round_trip_ns / 1e9)  # nobody else has seen it yet
        return value


class SessionCall(CommandCall):
    """A command in a session, which also tells whether the session's shell lives on."""

    __slots__ = ("alive",)

    def done(self, payload: bytes) -> CommandResult:
        if not payload or payload[-1] > 1:
            raise ProtocolError("a session's result without a word on its shell")
        self.alive = payload[-1] == 1
        return super().done(payload[:-1])


def read_command(payload: bytes, heads: tuple[Parts, Parts] | None) -> tuple[CommandResult, int]:
    """The DONE of a command behind the output that came before it, and where its fields end."""
    try:
        (how, code, wall_ns, user_ns, system_ns, peak_kib, oom_kills, pids_refused, disk_full, dropped_out, dropped_err) = (
            _RUN_DONE.unpack_from(payload)
        )
    except StructError as exc:
        raise ProtocolError("a command's result that is too short") from exc
    reader = Reader(payload, _RUN_DONE.size)
    out, err = reader.blob(), reader.blob()
    if heads is not None:
        out, err = b"".join((*heads[0], out)), b"".join((*heads[1], err))
    if how == 3:  # cancelled: killed on request
        how, code = 1, _SIGKILL
    if how > 2 or (how == 0 and not 0 <= code <= 255) or (how == 1 and not 1 <= code <= 64):
        raise ProtocolError(f"a command that ended in way {how} with code {code}")
    if how == 0 and not (oom_kills or pids_refused or disk_full):
        exit_code, outcome, limit_kind = _plain_exit(code)
    else:
        exit_code, outcome, limit_kind = derive_outcome(
            signaled=how == 1, timed_out=how == 2, code=code, oom_kills=oom_kills, pids_refused=pids_refused, disk_full=bool(disk_full)
        )
    result = CommandResult(
        exit_code, out, err, outcome, limit_kind, wall_ns / 1e9, 0.0, user_ns / 1e9, system_ns / 1e9, peak_kib, oom_kills,
        dropped_out, dropped_err,
    )  # fmt: skip
    return result, reader.at


def _plain_exit(code: int) -> tuple[int, Outcome, str | None]:
    return code, "exited", None


class ReadCall(Call[tuple[bytes, FileInfo]]):
    __slots__ = ("_limit", "_parts", "_size")

    def __init__(self, payload: bytes, limit: int, path: str, timeout_s: float | None) -> None:
        super().__init__(wire.READ, payload, path=path, timeout_s=timeout_s)
        self._limit = limit
        self._parts: Parts = []
        self._size = 0

    def progress(self, kind: int, payload: bytes) -> None:
        if kind != wire.OUT or payload[:1] != b"\1":
            super().progress(kind, payload)
        self._add(payload[1:])

    def done(self, payload: bytes) -> tuple[bytes, FileInfo]:
        reader = Reader(payload)
        info = FileInfo(reader.u64(), reader.u32() & 0o7777, reader.i64())
        self._add(reader.blob())
        reader.end()
        return b"".join(self._parts), info

    def _add(self, part: bytes) -> None:
        self._size += len(part)
        if self._size > self._limit:
            raise ProtocolError(f"more than the {self._limit} bytes asked for")
        add_part(self._parts, part)


class ItemsCall(Call[T], Generic[T, I]):
    """Items in ITEMS frames and in the DONE, at most as many as asked for."""

    __slots__ = ("_finish", "_most", "_read", "_size", "items")

    def __init__(
        self,
        kind: int,
        payload: bytes,
        most: int,
        read: Callable[[Reader], I],
        finish: Callable[[Reader, Callable[[Reader], None]], Callable[[list[I]], T]],
        *,
        timeout_s: float | None,
        path: str,
    ) -> None:
        super().__init__(kind, payload, timeout_s=timeout_s, path=path)
        self._most = most
        self._read = read
        self._finish = finish
        self._size = 0
        self.items: list[I] = []

    def progress(self, kind: int, payload: bytes) -> None:
        if kind != wire.ITEMS:
            super().progress(kind, payload)
        reader = Reader(payload)
        self._take(reader)
        reader.end()

    def done(self, payload: bytes) -> T:
        reader = Reader(payload)
        make = self._finish(reader, self._take)
        reader.end()
        return make(self.items)

    def _take(self, reader: Reader) -> None:
        count = reader.u32()
        self._size += len(reader)
        if len(self.items) + count > self._most or self._size > ITEMS_BYTES_MAX:
            raise ProtocolError(f"more than the {self._most} items asked for")
        for _ in range(count):
            self.items.append(self._read(reader))


class Discarded(Call[None]):
    """Takes the place of a cancelled call until its final frame has come."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(wire.CANCEL, b"", timeout_s=None)

    def feed(self, kind: int, payload: bytes) -> bool:  # noqa: ARG002
        return kind in (wire.DONE, wire.ERROR)
