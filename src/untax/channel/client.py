"""The asyncio driver: many actions at once over one stream that someone else opened.

Nothing here trusts the cell. Whatever breaks the protocol ends the channel, and everybody who waits is told
`SandboxLost`; so is everybody when the stream ends, and when an action with a deadline is not answered by then.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

from untax.channel import actions, flow, tree, wire
from untax.channel.arguments import Name
from untax.channel.batch import BatchCall
from untax.channel.call import Call, Discarded
from untax.channel.flow import EgressFlow, Flow
from untax.channel.handover import Resumed
from untax.channel.handshake import Handshake
from untax.channel.link import PIECE, EgressLink, Entry, Link, Watch
from untax.channel.replies import TreeSize
from untax.channel.stream import SocketStream
from untax.channel.wire import FrameParser, Reader
from untax.core.errors import BackendError, ProtocolError, ReadinessTimeout, SandboxLost, UsageError
from untax.core.span import now_ns
from untax.core.stream import ByteStream

T = TypeVar("T")

GRACE_S = 0.5  # how long after its deadline an action's answer may come; the cell itself answers at the deadline
CANCEL_GRACE_S = 5.0  # how long after CANCEL the final frame may come
READY_TIMEOUT_S = 30.0
_RECHECK_S = 0.02  # before a silence is believed the loop gets one more chance to read what has come
_WRITE_HIGH = 4 << 20  # above this much unsent, nothing more is read: it would only make more to send
_EGRESS_MAX = 256  # streams that a cell may have open at once
_OPEN_MAX = wire.REQUESTS_MAX + _EGRESS_MAX


Begun = tuple[Call[T], int, Entry]
"""A call that is on its way, for `Channel.end`."""


class EgressHandler(Protocol):
    """Serves the streams that programs inside ask for; see `egress.Egress`."""

    async def serve(self, host: bytes, port: int, link: EgressLink) -> None: ...


class Channel:
    """The client's end. Made and used inside one event loop."""

    def __init__(
        self,
        stream: ByteStream,
        *,
        sandbox_id: str,
        egress: EgressHandler | None = None,
        on_lost: Callable[[SandboxLost], None] | None = None,
        grace_s: float = GRACE_S,
        resumed: Resumed | None = None,
    ) -> None:
        self.sandbox_id = sandbox_id
        self.egress = egress
        self._stream = stream
        self._write = stream.write
        self._on_lost = on_lost
        self._grace_s = grace_s
        self._loop = asyncio.get_running_loop()
        self._parser = FrameParser()
        self._open: dict[int, Entry] = {}
        self._next_id = 1
        self._handshake = Handshake()
        self._ready = self._loop.create_future()
        self._closed = self._loop.create_future()
        self._cause: BaseException | None = None
        self._reason: str | None = None  # why the channel has ended
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = float("inf")
        self._room: list[asyncio.Future[None]] = []
        self._egress_tasks: set[asyncio.Task[None]] = set()
        self._resuming: asyncio.Task[None] | None = None
        if resumed is None:
            resumed = getattr(stream, "resumed", None)  # a lane says so itself: whoever leased the sandbox for us has greeted
        stream.start(self)
        if resumed is None:
            stream.write(self._handshake.greeting)
        else:  # greeted and configured by somebody else
            self._handshake.resume(resumed.cell_version)
            self._ready.set_result(None)
            self._next_id = resumed.next_id
            if resumed.kept:
                self.data_received(resumed.kept)

    # ---- life ----

    @property
    def is_lost(self) -> bool:
        """Ended, by whatever end: no action will be answered any more."""
        return self._reason is not None

    @property
    def is_idle(self) -> bool:
        """Nothing is asked for, streamed or watched over it now."""
        return not self._open and not self._egress_tasks

    @property
    def lost_reason(self) -> str | None:
        return self._reason

    @property
    def cell_version(self) -> str:
        """The release that the cell named in its greeting."""
        return self._handshake.version

    async def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once the cell has greeted. `ReadinessTimeout`, `SandboxLost`, or `ProtocolError` when it speaks another version."""
        if not self._ready.done():
            await asyncio.wait((self._ready,), timeout=timeout_s)
        if self._reason is None and not self._ready.done():
            raise ReadinessTimeout(self.sandbox_id, f"the cell did not greet within {timeout_s:g} s")
        if isinstance(self._cause, ProtocolError) and not self._handshake.done:
            raise self._cause
        self._check()

    async def wait_closed(self) -> None:
        """Return once the channel has ended."""
        await asyncio.shield(self._closed)

    def close(self) -> None:
        """End the channel; actions in flight raise `SandboxLost`."""
        self._lose("the channel was closed", None)

    def stop_listening(self) -> None:
        """Nothing that comes from now on is wanted, its end neither: who holds it is about to `close` it."""
        self._stream.pause_reading()

    def _gone(self) -> Resumed:
        """The stream is somebody else's from here on; see `handover.give`."""
        self._reason = "the channel was handed over"
        if self._timer is not None:
            self._timer.cancel()
        self._open.clear()
        self._on_lost = None
        return Resumed(self._handshake.version, self._next_id, self._parser.rest())

    # ---- actions ----

    async def call(self, call: Call[T], timeout_s: float | None = None) -> T:
        """Carry out one action. Cancelling the caller cancels the action inside."""
        if timeout_s is not None:
            call.timeout_s = timeout_s
        if self._reason is not None:
            self._check()
        if call.body is not None or len(self._open) >= wire.REQUESTS_MAX - 1 or self._stream.write_buffer_size > _WRITE_HIGH:
            return await self._call_slowly(call)
        started_ns = now_ns()
        request_id, entry = self._send(call)
        await self._answer(request_id, entry)
        return call.result(self.sandbox_id, now_ns() - started_ns)

    def begin(self, call: Call[T]) -> Begun[T] | None:
        """As `call`, for whoever has something else to do until `end` is asked for the answer; None where it would have to wait first."""
        if self._reason is not None or call.body is not None or len(self._open) >= wire.REQUESTS_MAX - 1 or self._stream.write_buffer_size:
            return None
        return (call, *self._send(call))

    async def end(self, begun: Begun[T]) -> T:
        call, request_id, entry = begun
        if not call.finished:
            if isinstance(self._stream, SocketStream):
                self._stream.read_now()  # what has come already costs no turn of the loop
            if not call.finished:
                self._check()
                await self._answer(request_id, entry)
        return call.result(self.sandbox_id)

    async def batch(self, calls: Sequence[Call[Any]], *, stop: bool = False) -> list[object]:
        """Carry out several actions, sent as one, one after another; `stop` ends at the first failure.

        Gives, in order, each one's value or the `UntaxError` it would have raised (`NotRun` for what was left out).
        """
        whole = BatchCall(calls, stop=stop)
        if not calls:
            return []
        await self._wait_room(len(calls) + 1)
        started_ns = now_ns()
        ids = [self._take_id(Entry(call, float("inf"))) for call in calls]
        try:
            whole.join(ids)
            request_id, entry = self._send(whole)
        except BaseException:
            self._drop(ids)
            raise
        entry.parts = ids
        await self._answer(request_id, entry)
        whole.result(self.sandbox_id)
        trip_ns = now_ns() - started_ns
        if not whole.has_all_answers:
            self._lose_for(ProtocolError("a batch ended before its parts"))
            self._check()
        return whole.outcomes(self.sandbox_id, trip_ns)

    @contextlib.asynccontextmanager
    async def silence(self) -> AsyncIterator[None]:
        """Within it not a byte is on its way in either direction, and the cell is between two frames: a copy of the sandbox can go on from there.

        Actions that are asked for meanwhile wait. `UsageError` when others than streams of started processes are under way,
        and on a stream that cannot be held.
        """
        stream = self._stream
        if not isinstance(stream, SocketStream):
            raise UsageError("the channel to this sandbox goes through somebody else's connection, which cannot be silenced")
        call = actions.quiesce()
        request_id, entry = self._send(call)
        stream.hold_writing()
        try:
            await self._answer(request_id, entry)
            try:
                call.result(self.sandbox_id, 0)
            except BackendError as exc:
                raise UsageError(f"{exc.message} in this box; await them first") from exc
            yield
        finally:
            stream.release_writing(wire.frame(0, wire.GO_ON, b""))

    # ---- streams ----

    async def open(self, stream: Flow[T]) -> Link[T]:
        """Begin a flow (`flow.start`, `flow.connect`, …); returns once it has started, raises what the cell answered instead."""
        self._check()
        await self._wait_room(1)
        request_id, entry = self._send(stream)
        link = Link(self, request_id, entry, stream)
        try:
            while not stream.started and not stream.finished:
                await self._changed(entry)
        except asyncio.CancelledError:
            link.cancel()
            raise
        if stream.is_failed:
            stream.result(self.sandbox_id)
        return link

    async def watch(self, path: Name = ".", *, recursive: bool = True) -> Watch:
        """Watch a path from now on."""
        self._check()
        await self._wait_room(1)
        call = flow.watch(path, recursive=recursive)
        request_id, entry = self._send(call)
        watch = Watch(self, request_id, entry, call)
        try:
            while not call.started and not call.finished:
                await self._changed(entry)
        except asyncio.CancelledError:
            watch.close()
            raise
        if call.is_failed:
            call.result(self.sandbox_id)
        return watch

    async def upload(
        self,
        local: Name,
        remote: Name,
        *,
        max_bytes: int = tree.MAX_BYTES,
        max_entries: int = tree.MAX_ENTRIES,
        timeout_s: float | None = actions.TIMEOUT_S,
    ) -> TreeSize:
        """Copy a local file or directory to `remote`, which is its new name, not the directory around it."""
        dest, body = tree.upload_plan(local, remote, max_bytes=max_bytes, max_entries=max_entries)
        try:
            call = actions.upload(dest, body, max_bytes=max_bytes, max_entries=max_entries, timeout_s=timeout_s)
            return await self.call(call)
        finally:
            body.close()

    async def download(
        self,
        remote: Name,
        local: Name,
        *,
        max_bytes: int = tree.MAX_BYTES,
        max_entries: int = tree.MAX_ENTRIES,
        timeout_s: float | None = actions.TIMEOUT_S,
    ) -> TreeSize:
        """Copy a file or directory out of the sandbox to `local`, its new name. What is unsafe to unpack is refused."""
        link = await self.open(flow.download(remote, max_bytes=max_bytes, timeout_s=timeout_s))
        unpack = tree.Unpacker(local, max_bytes=max_bytes, max_entries=max_entries)
        try:
            while (piece := await link.receive()) is not None:
                pieces = [piece[1], *link.take_now()]
                await _in_thread(self._loop, unpack.feed, *pieces)
            size = await link.wait()
            await _in_thread(self._loop, unpack.finish)
            return TreeSize(size.entries, size.bytes, tuple(unpack.skipped))
        finally:
            link.cancel()
            unpack.close()

    # ---- from the stream ----

    def data_received(self, data: bytes) -> None:
        entries = self._open
        try:
            for request_id, kind, payload in self._parser.feed(data):
                entry = entries.get(request_id)
                if entry is None:
                    self._unasked(request_id, kind, payload)
                    continue
                if not self._handshake.done:
                    raise ProtocolError("an answer before the greeting")
                if entry.call.feed(kind, payload):
                    del entries[request_id]
                    if entry.parts is not None:
                        self._drop(entry.parts)
                    if self._room:
                        self._make_room()
                if entry.waiters:
                    entry.wake()
                if self._reason is not None:
                    return
        except ProtocolError as exc:
            self._lose_for(exc)
        except Exception as exc:  # a bug in a parser: everybody who waits is told, and nothing hangs
            self._lose_for(ProtocolError(f"an answer that could not be read: {exc!r}"), exc)
        if self._stream.write_buffer_size > _WRITE_HIGH and self._resuming is None and self._reason is None:
            self._stream.pause_reading()
            self._resuming = self._loop.create_task(self._resume())

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, SandboxLost):
            self._lose(exc.message, exc)  # who carries the stream knows more
        else:
            self._lose("the connection was reset" if exc is not None else "the cell hung up", exc)

    async def _resume(self) -> None:
        try:
            await self._stream.drain()
        finally:
            self._resuming = None
            self._stream.resume_reading()

    def _unasked(self, request_id: int, kind: int, payload: bytes) -> None:
        if request_id == 0:
            self._handshake.take(kind, payload)
            if not self._ready.done():
                self._ready.set_result(None)
        elif not self._handshake.done:
            raise ProtocolError("a frame before the greeting")
        elif kind == wire.EGRESS and request_id & wire.EGRESS_BIT:
            self._accept(request_id, payload)
        elif request_id & wire.EGRESS_BIT and kind in (wire.OUT, wire.CREDIT, wire.DONE, wire.ERROR):
            pass  # crossed our refusal
        else:
            raise ProtocolError(f"a frame of kind {kind:#x} for id {request_id}, which is not open")

    def _accept(self, request_id: int, payload: bytes) -> None:
        reader = Reader(payload)
        host, port = reader.blob(1024), reader.u16()
        reader.end()
        # Streams that nobody serves any more stay in `_open` until the cell has ended them.
        if self.egress is None or len(self._egress_tasks) >= _EGRESS_MAX or len(self._open) >= _OPEN_MAX:
            status, why = (403, b"this sandbox has no network") if self.egress is None else (503, b"too many connections")
            self._write(wire.frame(request_id, wire.EGRESS_DENY, wire.u16(status) + wire.blob(why)))
            return
        call = EgressFlow()
        entry = self._open[request_id] = Entry(call, float("inf"))
        link = EgressLink(self, request_id, entry, call)
        task = self._loop.create_task(self.egress.serve(host, port, link))
        self._egress_tasks.add(task)
        task.add_done_callback(lambda done: self._served(done, link))

    def _served(self, task: asyncio.Task[None], link: EgressLink) -> None:
        self._egress_tasks.discard(task)
        if not task.cancelled() and task.exception() is not None and not self.is_lost:
            self._loop.call_exception_handler({"message": f"{self.sandbox_id}: egress failed", "exception": task.exception(), "task": task})
        link.end()

    # ---- ids, waiting, deadlines ----

    def _send(self, call: Call[T]) -> tuple[int, Entry]:
        timeout_s = call.timeout_s
        deadline = float("inf") if timeout_s is None else self._loop.time() + timeout_s + self._grace_s
        entry = Entry(call, deadline)
        request_id = self._take_id(entry)
        try:
            frame = call.encode(request_id)
        except BaseException:
            del self._open[request_id]
            raise
        if deadline < self._timer_at:
            self._arm(deadline)
        self._write(frame)
        return request_id, entry

    def _take_id(self, entry: Entry) -> int:
        request_id = self._next_id
        while request_id in self._open:
            request_id = request_id % wire.ID_MAX + 1
        self._next_id = request_id % wire.ID_MAX + 1
        self._open[request_id] = entry
        return request_id

    async def _answer(self, request_id: int, entry: Entry) -> None:
        """Wait for the final frame."""
        future = self._loop.create_future()
        entry.waiters.append(future)
        try:
            await future
            while not entry.call.finished:
                self._check()
                await self._changed(entry)
        except asyncio.CancelledError:
            self._cancel(request_id, entry)
            raise

    async def _changed(self, entry: Entry) -> None:
        self._check()
        future = self._loop.create_future()
        entry.waiters.append(future)
        await future
        if self._reason is not None and not entry.call.finished:
            self._check()

    def _cancel(self, request_id: int, entry: Entry) -> None:
        if not entry.call.finished and self._reason is None and self._open.get(request_id) is entry:
            self._write(wire.cancel(request_id))
            self._discard(request_id, entry)
            entry.wake()

    def _discard(self, request_id: int, entry: Entry) -> None:
        deadline = self._loop.time() + CANCEL_GRACE_S
        gone = self._open[request_id] = Entry(Discarded(), deadline)
        gone.parts = entry.parts
        for part in entry.parts or ():
            if part in self._open:
                self._open[part].call = Discarded()
        if deadline < self._timer_at:
            self._arm(deadline)

    def _drop(self, parts: list[int]) -> None:
        for part in parts:
            self._open.pop(part, None)

    def _arm(self, deadline: float) -> None:
        # One timer for all: arming one for each action would cost more than the rest of a short round trip.
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = deadline
        self._timer = self._loop.call_at(deadline, self._expire, None)

    def _expire(self, suspect: Entry | None) -> None:
        self._timer, self._timer_at = None, float("inf")
        if self._reason is not None or not self._open:
            return
        first = min(self._open.values(), key=lambda entry: entry.deadline)
        if first.deadline > self._loop.time():
            if first.deadline < float("inf"):
                self._arm(first.deadline)
        elif first is suspect:
            self._lose("the cell did not answer by an action's deadline", None)
        else:
            self._timer_at = self._loop.time() + _RECHECK_S
            self._timer = self._loop.call_at(self._timer_at, self._expire, first)

    async def _call_slowly(self, call: Call[T]) -> T:
        await self._wait_room(1)
        if self._stream.write_buffer_size > _WRITE_HIGH:
            await self._stream.drain()
        self._check()
        started_ns = now_ns()
        request_id, entry = self._send(call)
        if call.body is not None:
            await self._send_body(request_id, entry, call.body)
        if not call.finished:
            await self._answer(request_id, entry)
        return call.result(self.sandbox_id, now_ns() - started_ns)

    async def _send_body(self, request_id: int, entry: Entry, body: Iterator[bytes]) -> None:
        """Send DATA as the window allows; a call that ends early ends it. What reads the disk does so in a thread."""
        call = entry.call
        in_thread = isinstance(body, tree.Packer)
        try:
            while not call.finished:
                chunk = await _in_thread(self._loop, next, body, None) if in_thread else next(body, None)
                if chunk is None:
                    self._write(wire.data(request_id, b"", eof=True))
                    return
                for at in range(0, len(chunk), PIECE):
                    piece = chunk[at : at + PIECE]
                    while call.window < len(piece) and not call.finished:
                        await self._changed(entry)
                    if call.finished:
                        return
                    call.window -= len(piece)
                    self._write(wire.data(request_id, piece, eof=False))
        except BaseException:
            self._cancel(request_id, entry)  # a body that cannot be read, or a caller who is gone
            raise

    async def _wait_room(self, count: int) -> None:
        if count >= wire.REQUESTS_MAX:
            raise UsageError(f"{count} actions at once: a channel holds {wire.REQUESTS_MAX}; send them in several batches")
        while len(self._open) + count >= wire.REQUESTS_MAX:
            future = self._loop.create_future()
            self._room.append(future)
            await future
            self._check()

    def _make_room(self) -> None:
        waiting, self._room = self._room, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    # ---- the end ----

    def _check(self) -> None:
        if self._reason is not None:
            raise SandboxLost(self.sandbox_id, self._reason) from self._cause

    def _lose_for(self, exc: ProtocolError, cause: BaseException | None = None) -> None:
        self._lose(f"the cell spoke nonsense: {exc}", exc)
        if cause is not None:
            exc.__cause__ = cause

    def _lose(self, reason: str, cause: BaseException | None) -> None:
        if self._reason is not None:
            return
        self._reason, self._cause = reason, cause
        if self._timer is not None:
            self._timer.cancel()
        entries = list(self._open.values())
        self._open.clear()
        for entry in entries:
            entry.wake()
        self._make_room()
        for task in self._egress_tasks:
            task.cancel()
        self._stream.close()
        for future in (self._ready, self._closed):
            if not future.done():
                future.set_result(None)
        on_lost, self._on_lost = self._on_lost, None  # with it goes the circle of it and its holder, which only the collector would find
        if on_lost is not None:
            lost = SandboxLost(self.sandbox_id, reason)
            lost.__cause__ = cause
            on_lost(lost)


async def _in_thread(loop: asyncio.AbstractEventLoop, function: Callable[..., T], *args: object) -> T:
    """Run in a thread; a cancelled caller waits until the thread has let go of what it was given."""
    running = loop.run_in_executor(None, lambda: function(*args))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait((running,))
        raise
