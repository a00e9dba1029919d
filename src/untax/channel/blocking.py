"""The blocking driver: the same calls and flows over a blocking socket, from any number of threads.

There is no thread of its own. Of the threads that wait for an answer one, the leader, reads the socket and hands every frame
to whom it belongs; when its own answer is there it leaves the reading to another that still waits. One thread alone
pays one `send` and one `recv` for a round trip.

An interrupt (KeyboardInterrupt) may come between any two steps of a thread, and none may be left without a leader, or before a lock that nobody frees. CPython raises
one at the entry of a function of Python's, behind a call, and at the end of a loop's pass, never within C: a lock is taken by `with` alone, or, as all whose outcome must be
known, called by `map` in a loop's head, which keeps it before anything is raised; an attribute that a `finally` sets first is set.
"""

from __future__ import annotations

import contextlib
import os
import queue
import select
import socket
import struct
import threading
from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, TypeVar

from untax.channel import actions, flow, tree, wire
from untax.channel.arguments import Name
from untax.channel.batch import BatchCall
from untax.channel.blocking_link import FOREVER, BlockingLink, BlockingWatch, Entry, Greeting, Turn
from untax.channel.call import Call, Discarded
from untax.channel.client import CANCEL_GRACE_S, GRACE_S, READY_TIMEOUT_S
from untax.channel.flow import Flow
from untax.channel.handover import Resumed
from untax.channel.handshake import Handshake
from untax.channel.link import PIECE
from untax.channel.replies import TreeSize
from untax.channel.stream import RECEIVE_SIZE, RECEIVE_SMALL
from untax.channel.wire import FrameParser, Reader
from untax.core.errors import ProtocolError, ReadinessTimeout, SandboxLost, UsageError
from untax.core.span import now_ns

T = TypeVar("T")

_WAKE_S = 5.0  # a leader looks up this often, whatever it waits for: others may have set a nearer deadline meanwhile
_OVERDUE_READS = 64  # how much that lies in the socket is read before a silence is believed
_RECHECK_S = 0.02  # a deadline is believed only after one more look at what has come
_TIMEVAL = struct.Struct("@ll")


class BlockingChannel:
    """The client's end. Owns `sock`. Programs inside get no network over it: what they ask for is refused."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        sandbox_id: str,
        on_lost: Callable[[SandboxLost], None] | None = None,
        grace_s: float = GRACE_S,
        resumed: Resumed | None = None,
    ) -> None:
        sock.setblocking(True)
        self.sandbox_id = sandbox_id
        self._sock = sock
        self._fd = sock.fileno()
        self._on_lost = on_lost
        self._grace_s = grace_s
        self._pid = os.getpid()
        self._lock = threading.Lock()  # everything below
        self._sending = threading.Lock()  # the order of frames on the socket; never taken while `_lock` is held
        self._parser = FrameParser()
        self._handshake = Handshake()
        self._greeting = Entry(Greeting(self._handshake))
        self._open: dict[int, Entry] = {0: self._greeting}
        self._cancelled: dict[int, float] = {}  # ids whose final frame is due by then, the earliest first
        self._followers: dict[Turn, Entry] = {}
        self._is_read = False  # some thread is the leader, which alone may set it back, and needs no lock for that
        self._next_id = 1
        self._reason: str | None = None
        self._cause: BaseException | None = None
        self._is_ended = False  # all that follows from a reason is done
        self._receive_size = RECEIVE_SMALL
        self._receive_timeout_s = 0.0  # as set on the socket; 0: none
        self._unsent = b""  # the rest of a frame whose sender was interrupted; guarded by `_sending`
        if resumed is None:
            self._send(self._handshake.greeting)
        else:  # greeted and configured by somebody else
            self._handshake.resume(resumed.cell_version)
            self._open.clear()
            self._next_id = resumed.next_id
            if resumed.kept:
                self._dispatch(resumed.kept)

    # ---- life ----

    @property
    def is_lost(self) -> bool:
        return self._reason is not None

    @property
    def is_idle(self) -> bool:
        """Nothing is asked for, streamed or watched over it now; entry 0 is the greeting, which nobody asks for."""
        return len(self._open) <= (0 in self._open)

    @property
    def lost_reason(self) -> str | None:
        return self._reason

    @property
    def cell_version(self) -> str:
        return self._handshake.version

    def wait_ready(self, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Return once the cell has greeted. `ReadinessTimeout`, `SandboxLost`, or `ProtocolError` when it speaks another version."""
        try:
            self._wait(self._greeting, lambda: self._handshake.done, monotonic() + timeout_s)
        except TimeoutError:
            raise ReadinessTimeout(self.sandbox_id, f"the cell did not greet within {timeout_s:g} s") from None
        except SandboxLost:
            if isinstance(self._cause, ProtocolError) and not self._handshake.done:
                raise self._cause from None
            raise

    def close(self) -> None:
        """End the channel; actions in flight raise `SandboxLost`. From any thread, and twice."""
        self._lose("the channel was closed", None)

    # ---- actions ----

    def call(self, call: Call[T], timeout_s: float | None = None) -> T:
        """Carry out one action. An interrupt (KeyboardInterrupt) cancels the action inside."""
        if timeout_s is not None:
            call.timeout_s = timeout_s
        started_ns = now_ns()
        deadline = self._deadline(call)
        request_id, entry = self._begin(call, deadline)
        try:
            if call.body is not None:
                self._send_body(request_id, entry, call, deadline)
            self._finish(entry, None, deadline)
        except BaseException:
            self._cancel(request_id, entry)
            raise
        return call.result(self.sandbox_id, now_ns() - started_ns)

    def batch(self, calls: Sequence[Call[Any]], *, stop: bool = False) -> list[object]:
        """As `Channel.batch`."""
        whole = BatchCall(calls, stop=stop)
        if not calls:
            return []
        started_ns = now_ns()
        ids: list[int] = []
        try:
            for call in calls:
                ids.append(self._take_id(Entry(call)))
            whole.join(ids)
            deadline = self._deadline(whole)
            request_id, entry = self._begin(whole, deadline, parts=ids)
        except BaseException:
            with self._lock:  # those that were sent and cancelled still have their answers to come
                self._drop([one for one in ids if one in self._open and not isinstance(self._open[one].call, Discarded)])
            raise
        try:
            self._finish(entry, None, deadline)
        except BaseException:
            self._cancel(request_id, entry)
            raise
        whole.result(self.sandbox_id)
        trip_ns = now_ns() - started_ns
        if not whole.has_all_answers:
            self._lose_for(ProtocolError("a batch ended before its parts"))
            self._check()
        return whole.outcomes(self.sandbox_id, trip_ns)

    # ---- streams ----

    def open(self, stream: Flow[T]) -> BlockingLink[T]:
        """Begin a flow; returns once it has started, raises what the cell answered instead."""
        request_id, entry = self._begin(stream)
        try:
            self._wait(entry, lambda: stream.started or stream.finished, FOREVER)
        except BaseException:
            self._cancel(request_id, entry)
            raise
        if stream.is_failed:
            stream.result(self.sandbox_id)
        return BlockingLink(self, request_id, entry, stream)

    def watch(self, path: Name = ".", *, recursive: bool = True) -> BlockingWatch:
        call = flow.watch(path, recursive=recursive)
        request_id, entry = self._begin(call)
        try:
            self._wait(entry, lambda: call.started or call.finished, FOREVER)
        except BaseException:
            self._cancel(request_id, entry)
            raise
        if call.is_failed:
            call.result(self.sandbox_id)
        return BlockingWatch(self, request_id, entry, call)

    def upload(
        self,
        local: Name,
        remote: Name,
        *,
        max_bytes: int = tree.MAX_BYTES,
        max_entries: int = tree.MAX_ENTRIES,
        timeout_s: float | None = actions.TIMEOUT_S,
    ) -> TreeSize:
        """As `Channel.upload`."""
        dest, body = tree.upload_plan(local, remote, max_bytes=max_bytes, max_entries=max_entries)
        with contextlib.closing(body):
            return self.call(actions.upload(dest, body, max_bytes=max_bytes, max_entries=max_entries, timeout_s=timeout_s))

    def download(
        self,
        remote: Name,
        local: Name,
        *,
        max_bytes: int = tree.MAX_BYTES,
        max_entries: int = tree.MAX_ENTRIES,
        timeout_s: float | None = actions.TIMEOUT_S,
    ) -> TreeSize:
        """As `Channel.download`."""
        link = self.open(flow.download(remote, max_bytes=max_bytes, timeout_s=timeout_s))
        with contextlib.closing(tree.Unpacker(local, max_bytes=max_bytes, max_entries=max_entries)) as unpack:
            try:
                while (piece := link.receive()) is not None:
                    unpack.feed(piece[1])
                size = link.wait()
            finally:
                link.cancel()
            unpack.finish()
            return TreeSize(size.entries, size.bytes, tuple(unpack.skipped))

    # ---- ids and sending ----

    def _deadline(self, call: Call[Any]) -> float:
        return FOREVER if call.timeout_s is None else monotonic() + call.timeout_s + self._grace_s

    def _begin(self, call: Call[Any], deadline: float = FOREVER, parts: list[int] | None = None) -> tuple[int, Entry]:
        if os.getpid() != self._pid:
            raise UsageError("this process is a fork of the one that opened the sandbox: open another one here")
        entry = Entry(call)
        entry.parts = parts
        request_id = self._take_id(entry)
        try:
            frame = call.encode(request_id)
        except BaseException:
            with self._lock:
                self._drop([request_id])
            raise
        try:
            self._send(frame, deadline)
        except BaseException:
            self._cancel(request_id, entry)
            raise
        return request_id, entry

    def _take_id(self, entry: Entry) -> int:
        with self._lock:
            self._check()
            if len(self._open) > wire.REQUESTS_MAX - 1:
                raise UsageError(f"more than {wire.REQUESTS_MAX - 1} actions at once: wait for some of them")
            request_id = self._next_id
            while request_id in self._open:
                request_id = request_id % wire.ID_MAX + 1
            self._next_id = request_id % wire.ID_MAX + 1
            self._open[request_id] = entry
            return request_id

    def _drop(self, ids: list[int]) -> None:
        for request_id in ids:
            self._open.pop(request_id, None)

    def _send(self, data: bytes, deadline: float = FOREVER) -> None:
        """Send all of it; a cell that has not taken it by the deadline is lost.

        While the cell takes nothing, what it sends is read, or both sides would wait for ever. An interrupt leaves the rest of the
        frame for the next one who sends: in the middle of a frame nothing else may be said.
        """
        try:
            with self._sending:
                if self._unsent:
                    data = self._unsent + data
                try:
                    for sent in map(self._sock.send, (data,), (socket.MSG_DONTWAIT,)):
                        self._unsent = data[sent:]
                except BlockingIOError:
                    self._unsent = data
                while self._unsent:
                    self._send_more(deadline)
        except OSError as exc:
            self._read_out(exc)

    def _send_more(self, deadline: float) -> None:
        """Some of what is unsent, or wait for room."""
        try:
            for sent in map(self._sock.send, (self._unsent,), (socket.MSG_DONTWAIT,)):
                self._unsent = self._unsent[sent:]
            return
        except BlockingIOError:
            pass
        leads = False
        try:
            with self._lock:
                if not self._is_read:
                    self._is_read = leads = True
            poll = select.poll()
            poll.register(self._fd, select.POLLOUT | (select.POLLIN if leads else 0))
            ready = poll.poll(1000 * min(max(deadline - monotonic(), _RECHECK_S), 1.0))
            if leads and ready and ready[0][1] & select.POLLIN:
                self._read_once()
        finally:
            if leads:
                self._is_read = False
                try:
                    self._wake_another()
                except BaseException:  # an interrupt
                    self._wake_another()
                    raise
        if not ready and monotonic() > deadline:
            self._lose("the cell did not take a request by its deadline", None)
        self._check()

    def _read_out(self, exc: OSError) -> None:
        """The socket takes nothing more; an answer may still lie in it."""
        try:
            with contextlib.suppress(OSError):
                while data := self._sock.recv(RECEIVE_SIZE, socket.MSG_DONTWAIT):
                    with self._lock:
                        self._dispatch(data)
        finally:  # also after an interrupt
            self._lose("the connection was reset", exc)

    def _send_body(self, request_id: int, entry: Entry, call: Call[Any], deadline: float) -> None:
        assert call.body is not None
        for chunk in call.body:
            for at in range(0, len(chunk), PIECE):
                piece = chunk[at : at + PIECE]
                size = len(piece)
                if call.window < size:
                    self._finish(entry, lambda: call.window >= size or call.finished, deadline)  # noqa: B023
                if call.finished:
                    return
                with self._lock:
                    call.window -= size
                self._send(wire.data(request_id, piece, eof=False), deadline)
        if not call.finished:
            self._send(wire.data(request_id, b"", eof=True), deadline)

    def _cancel(self, request_id: int, entry: Entry) -> None:
        """Stop a request inside and forget it. Its final frame is due soon: who reads next sees to that."""
        deadline = monotonic() + CANCEL_GRACE_S
        gone = Entry(Discarded())
        gone.parts = entry.parts
        try:
            with self._lock:
                if entry.call.finished or self._reason is not None or self._open.get(request_id) is not entry:
                    return
                for turn in entry.turns:  # first: who waits for it hears nothing more once it is discarded
                    turn.put(None)
                self._open[request_id] = gone
                self._cancelled[request_id] = deadline
                for part in entry.parts or ():
                    if part in self._open:
                        self._open[part] = Entry(Discarded())
            self._send(wire.cancel(request_id), deadline)
        except BaseException:  # an interrupt: the cell may not have been told, and heeds no second word of what is over
            if self._reason is None and self._open.get(request_id) is gone:
                self._send(wire.cancel(request_id), deadline)
            raise

    # ---- waiting and reading ----

    def _finish(self, entry: Entry, is_ready: Callable[[], bool] | None, deadline: float) -> None:
        """As `_wait`, but silence beyond the deadline means that the sandbox is lost."""
        try:
            self._wait(entry, is_ready, deadline)
        except TimeoutError:
            self._lose("the cell did not answer by an action's deadline", None)
            self._check()

    def _wait(self, entry: Entry, is_ready: Callable[[], bool] | None, deadline: float) -> None:
        """Until `is_ready` (or the call is finished). `TimeoutError` at the deadline, `SandboxLost` at the channel's end."""
        call = entry.call
        turn: Turn | None = None
        try:
            leads = False  # in here: CPython raises what comes at the end of a pass at what stands before the loop
            while True:
                with self._lock:
                    if call.finished if is_ready is None else is_ready():
                        return
                    self._check()
                    left = deadline - monotonic()
                    if left < -_RECHECK_S:
                        raise TimeoutError
                    if leads or not self._is_read:
                        self._is_read = leads = True
                    elif turn is None:
                        turn = queue.SimpleQueue()
                        entry.turns |= {turn}
                        self._followers[turn] = entry
                        continue  # the leader may have left before it could know of this one
                if leads:
                    self._lead(call, is_ready, deadline)
                else:
                    assert turn is not None
                    with contextlib.suppress(queue.Empty):
                        turn.get(timeout=None if left == FOREVER else max(left, _RECHECK_S))
        finally:
            if leads:
                self._is_read = False
            # Whoever leaves may have been the one that a leader woke to read on.
            if turn is not None or (self._followers and not self._is_read):
                try:
                    self._leave(entry, turn)
                except BaseException:  # an interrupt
                    self._leave(entry, turn)
                    raise

    def _leave(self, entry: Entry, turn: Turn | None) -> None:
        if turn is not None:
            with self._lock:
                entry.turns -= {turn}
                self._followers.pop(turn, None)
        self._wake_another()

    def _lead(self, call: Call[Any] | Greeting, is_ready: Callable[[], bool] | None, deadline: float) -> None:
        while not (call.finished if is_ready is None else is_ready()) and self._reason is None:
            left = deadline - monotonic()
            if left < -_RECHECK_S:
                return
            if self._cancelled:
                left = min(left, self._due_s())
            self._limit_receive(min(max(left, _RECHECK_S), _WAKE_S))
            self._read_once()
            if self._cancelled and self._due_s() < 0:
                self._expire()

    def _due_s(self) -> float:
        """How long until the first final frame of a cancelled request is overdue."""
        with self._lock:
            return next(iter(self._cancelled.values()), FOREVER) - monotonic()

    def _expire(self) -> None:
        """A cancelled request's time is over. Nobody may have read for long: what lies in the socket is looked at first. Only by the leader."""
        for _ in range(_OVERDUE_READS):
            if not self._read_once(socket.MSG_DONTWAIT):
                break
        if self._due_s() < 0:
            self._lose("the cell did not end a cancelled action", None)

    def _wake_another(self) -> None:
        """Let one that still waits read on, when nobody does. One whose answer is there already would only leave. Twice does no harm."""
        with self._lock:
            if self._is_read:
                return
            for turn, entry in self._followers.items():
                if not entry.call.finished:
                    turn.put(None)
                    return

    def _limit_receive(self, left: float) -> None:
        """Let `recv` return after `left` seconds at the latest: an option of the socket saves a poll for each read."""
        if 0.5 * left <= self._receive_timeout_s <= left:
            return
        seconds = int(left)
        self._receive_timeout_s = 0.0  # until it is known: an interrupt may come behind the call
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(seconds, int((left - seconds) * 1e6)))
        self._receive_timeout_s = left

    def _read_once(self, flags: int = 0) -> bool:
        """Whether something came. Only by the leader."""
        data = replies = b""
        try:
            for data in map(self._sock.recv, (self._receive_size,), (flags,)):  # noqa: B007
                break
            if data:
                self._receive_size = RECEIVE_SMALL if len(data) < RECEIVE_SMALL else RECEIVE_SIZE
                with self._lock:
                    replies = self._dispatch(data)
                    data = b""
            else:
                self._lose("the cell hung up", None)
                return False
        except (BlockingIOError, InterruptedError):
            return False
        except OSError as exc:
            self._lose("the connection was reset", exc)
            return False
        except BaseException as exc:
            if data:  # which others may wait for, and nobody can tell how much of it was understood
                self._lose("an interrupt came while an answer was read", exc)
            raise
        if replies:
            self._send_if_free(replies)
        return True

    def _dispatch(self, data: bytes) -> bytes:
        """Hand frames to whom they belong; gives what must be answered at once."""
        replies = b""
        entries = self._open
        try:
            for request_id, kind, payload in self._parser.feed(data):
                entry = entries.get(request_id)
                if entry is None:
                    replies += self._unasked(request_id, kind, payload)
                    continue
                if request_id and not self._handshake.done:
                    raise ProtocolError("an answer before the greeting")
                if entry.call.feed(kind, payload):
                    del entries[request_id]
                    if self._cancelled:
                        self._cancelled.pop(request_id, None)
                    if entry.parts is not None:
                        self._drop(entry.parts)
                for turn in entry.turns:
                    turn.put(None)
        except ProtocolError as exc:
            self._end(f"the cell spoke nonsense: {exc}", exc)
        except Exception as exc:  # a bug in a parser: everybody who waits is told, and nothing hangs
            self._end(f"the cell spoke nonsense: an answer that could not be read: {exc!r}", exc)
        return replies

    def _unasked(self, request_id: int, kind: int, payload: bytes) -> bytes:
        if not self._handshake.done:
            raise ProtocolError("a frame before the greeting")
        if request_id & wire.EGRESS_BIT and kind == wire.EGRESS:
            reader = Reader(payload)
            reader.blob(1024)
            reader.u16()
            reader.end()
            return wire.frame(request_id, wire.EGRESS_DENY, wire.u16(403) + wire.blob(b"this sandbox has no network"))
        if request_id & wire.EGRESS_BIT and kind in (wire.OUT, wire.CREDIT, wire.DONE, wire.ERROR):
            return b""  # crossed our refusal
        raise ProtocolError(f"a frame of kind {kind:#x} for id {request_id}, which is not open")

    def _send_if_free(self, frames: bytes) -> None:
        """Answers to what nobody asked for are dropped when they would hold up the reading."""
        is_free = False
        try:
            for is_free in map(self._sending.acquire, (False,)):  # noqa: B007
                break
            if is_free and not self._unsent:
                for sent in map(self._sock.send, (frames,), (socket.MSG_DONTWAIT,)):
                    self._unsent = frames[sent:]
        except OSError:
            pass
        finally:
            if is_free:
                self._sending.release()

    # ---- the end ----

    def _check(self) -> None:
        if self._reason is not None:
            raise SandboxLost(self.sandbox_id, self._reason) from self._cause

    def _lose_for(self, exc: ProtocolError) -> None:
        self._lose(f"the cell spoke nonsense: {exc}", exc)

    def _lose(self, reason: str, cause: BaseException | None) -> None:
        try:
            with self._lock:
                self._end(reason, cause)
        except BaseException:  # an interrupt
            with self._lock:
                self._end(reason, cause)
            raise

    def _end(self, reason: str, cause: BaseException | None) -> None:
        """With the lock held. What was interrupted is done by the next one."""
        if self._is_ended:
            return
        if self._reason is None:
            self._reason, self._cause = reason, cause
        for turn in self._followers:
            turn.put(None)
        self._open.clear()
        self._cancelled.clear()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)  # wakes a leader that sits in recv
        self._sock.close()
        if self._on_lost is not None:
            lost = SandboxLost(self.sandbox_id, self._reason)
            lost.__cause__ = self._cause
            self._on_lost(lost)
            self._on_lost = None  # as `Channel` does, and not before: what is interrupted here is done once more
        self._is_ended = True
