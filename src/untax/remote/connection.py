"""Requests to one server: numbered, so that each is carried out once however often the connection breaks on the way.

A connection that broke is taken up again at once, under the same owner, and what was not answered is asked for again. Where nobody listens any
more, everybody who waits is told. A server that says nothing for a while is taken for gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import select
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from untax import __version__
from untax.channel.stream import SocketStream
from untax.core.errors import BackendError, PoolClosed, ProtocolError, UntaxError, UsageError
from untax.core.span import now_ns
from untax.core.stream import ByteStream
from untax.remote.boot import boot_id
from untax.remote.dial import GREETING_S, Dialler
from untax.remote.marks import SLOTS, Marks
from untax.remote.messages import KNOCK, PROTOCOL, Body, error_of
from untax.remote.stream import MessageStream

log = logging.getLogger("untax.remote")

_SILENT_HEARTBEATS = 5  # without a word from the server before it is taken for gone
_ASLEEP_S = 0.004  # after which a process that had nothing to do takes a while to get going
_WAY_WEIGHT = 0.05  # of a way that took longer than was known: one that has become slow is noticed after some dozen
_HUNG_UP = getattr(select, "POLLRDHUP", 0)  # beside what is told unasked
_FIRST_RETRY_S = 0.05
_LAST_RETRY_S = 1.0
_AT_ONCE = 512  # requests of one sort under way; those above wait here, because a server refuses who has more than 1,024
_MAY_WAIT_LONG = frozenset({"lease", "prepare", "warm"})  # perhaps for the end of a lease, which is a request of the other sort

Part = Callable[[Body], None]


@dataclass(frozen=True, slots=True)
class Server:
    """What the server said about itself."""

    owner: str
    secret: str = field(repr=False)
    release: str
    substrate: str
    isolation: str
    usual: str
    """The isolation that is meant where none is said."""
    lease_s: float
    heartbeat_s: float
    shift_ns: int
    """What turns its clock's readings into ours."""

    @classmethod
    def read(cls, body: Mapping[str, Any], asked_ns: int) -> Server:
        if body.get("protocol") != PROTOCOL:
            raise ProtocolError(
                f"the server {body.get('release')!s:.40} speaks protocol {body.get('protocol')!r}, this client {__version__} {PROTOCOL}:"
                " install the same release on both sides"
            )
        try:
            is_one_clock = body["boot"] is not None and body["boot"] == boot_id()
            return cls(
                str(body["owner"]),
                str(body["secret"]),
                str(body["release"]),
                str(body["substrate"]["name"]),
                str(body["substrate"]["isolation"]),
                str(body["substrate"].get("usual", body["substrate"]["isolation"])),
                float(body["lease_s"]),
                max(0.05, float(body["heartbeat_s"])),
                0 if is_one_clock else (asked_ns + now_ns()) // 2 - int(body["now_ns"]),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ProtocolError(f"a greeting without its fields: {exc!r}") from exc


@dataclass(frozen=True, slots=True)
class Reply:
    body: Body
    fd: int | ByteStream | None

    def take_stream(self) -> ByteStream:
        """The channel that came along."""
        if self.fd is None:
            raise BackendError("", "a channel came without its descriptor: raise this process's limit of open files (ulimit -n)")
        return SocketStream(socket.socket(fileno=self.fd), reads_soon=True) if isinstance(self.fd, int) else self.fd

    @property
    def has_ended(self) -> bool:
        """Whether the other end of the channel that came along was closed since."""
        if not isinstance(self.fd, int):
            return False
        look = select.poll()
        look.register(self.fd, _HUNG_UP)
        return bool(look.poll(0))

    def discard(self) -> None:
        close(self.fd)


def close(fd: int | ByteStream | None) -> None:
    if isinstance(fd, int):
        os.close(fd)
    elif fd is not None:
        fd.close()


class _Awake:
    """When this process, by whichever connection, last said something or heard something."""

    at_s = -math.inf


class _Pending:
    def __init__(
        self,
        op: str,
        args: Mapping[str, Any],
        on_part: Part | None,
        answer: asyncio.Future[Reply],
        on_sent: Callable[[int], None] | None = None,
        *,
        is_standing: bool = False,
    ) -> None:
        self.op = op
        self.args = args
        self.on_part = on_part
        self.answer = answer
        self.on_sent = on_sent
        self.is_abandoned = False
        self.is_standing = is_standing
        """Whether it has no answer, only parts for as long as it lasts."""


class Connection:
    """`on_event` is told what the server says unasked, `on_forgotten` when a server answers that does not know us any more.

    While `is_needed` says so, a lost connection is taken up again also when nobody waits for an answer.
    """

    def __init__(
        self, dialler: Dialler, *, on_event: Callable[[str, Body], None], on_forgotten: Callable[[], None], is_needed: Callable[[], bool]
    ) -> None:
        self.server: Server | None = None
        self.on_lost: Callable[[str], None] | None = None
        """Told each time that the connection breaks, taken up again or not."""
        self.on_way: Callable[[float], None] | None = None
        """Told what `way_s` is, each time that it was looked at."""
        self._place = dialler
        self._on_event = on_event
        self._on_forgotten = on_forgotten
        self._is_needed = is_needed
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._stream: MessageStream | None = None
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1
        self._turns = {may_wait: asyncio.Semaphore(_AT_ONCE) for may_wait in (True, False)}
        self._greeting: tuple[int, asyncio.Future[Body]] | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._retrying: asyncio.Task[None] | None = None
        self._beat: asyncio.TimerHandle | None = None
        self._beat_ns: int | None = None  # when the last one was sent that has no answer yet
        self._way_s: float | None = None
        self._unheard = 0
        self._marks: Marks | None = None
        self._is_closed = False

    # ---- requests ----

    async def request(
        self,
        op: str,
        args: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        on_part: Part | None = None,
        on_sent: Callable[[int], None] | None = None,
        is_standing: bool = False,
    ) -> Reply:
        """Carry one request out over there. Cancelling it gives back what it came to. A standing one lasts until then.

        `on_sent` is told its number as soon as it is on its way, and may do then what nobody is to wait for. Raises what the server raised;
        `BackendError` when it is gone, or silent for `timeout_s`.
        """
        self.check_process()
        pending = _Pending(op, args, on_part, self._loop.create_future(), on_sent, is_standing=is_standing)
        if timeout_s is None:
            return await self._in_turn(pending)
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await self._in_turn(pending)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise BackendError("", f"the server at {self._place} did not answer {op} within {timeout_s:g} s") from None

    async def _in_turn(self, pending: _Pending) -> Reply:
        if pending.is_standing:
            return await self._asked(pending)
        turns = self._turns[pending.op in _MAY_WAIT_LONG]
        await turns.acquire()
        try:
            return await self._asked(pending)
        finally:
            turns.release()

    async def _asked(self, pending: _Pending) -> Reply:
        while self._stream is None or self._is_closed:  # also when it is lost again before this went on
            await self.connect()
        request_id = self._take_id()
        self._pending[request_id] = pending
        try:
            self._send(request_id, pending)
            if pending.on_sent is not None:
                pending.on_sent(request_id)
            reply = await pending.answer
        except UntaxError:
            if not pending.is_abandoned:
                self._pending.pop(request_id, None)
            raise
        except BaseException:
            self._abandon(request_id, pending)
            raise
        self._pending.pop(request_id, None)
        return reply

    def restate(self, op: str) -> None:
        """The arguments of a standing request are others now: it goes on with these, over the next connection where there is none."""
        if self._stream is not None:
            for request_id, pending in self._pending.items():
                if pending.is_standing and pending.op == op and not pending.is_abandoned:
                    self._send(request_id, pending)

    def knock(self) -> None:
        """Wake a server that may be asleep, for who is about to ask: it wakes up while the request is put together. Only where this process had
        nothing to say to any server for a while: both are asleep then, and a knock takes nothing from anybody.
        """
        if self._stream is None or self._loop.time() - _Awake.at_s < _ASLEEP_S:
            return
        # Leases are also made in other threads than the loop's, and in forks of this process: theirs begin where they are carried out.
        if asyncio._get_running_loop() is self._loop and os.getpid() == self._pid:
            _Awake.at_s = self._loop.time()
            self._stream.send(KNOCK)

    def _take_id(self) -> int:
        request_id = self._next_id
        self._next_id += 1
        return request_id

    def _send(self, request_id: int, pending: _Pending) -> None:
        assert self._stream is not None
        _Awake.at_s = self._loop.time()
        self._stream.send({"id": request_id, "op": pending.op, "seen": self._seen(), "args": pending.args})

    @property
    def can_take(self) -> bool:
        """Whether the server would know what was taken of what it gives ahead."""
        return self._marks is not None

    def take(self, slot: object) -> None:
        """What the server gave ahead under this number is leased. `ProtocolError` for a number that is none."""
        if self._marks is None or isinstance(slot, bool) or not isinstance(slot, int) or not 0 <= slot < SLOTS:
            raise ProtocolError(f"a lease was given ahead without its place: {slot!r}")
        self._marks.take(slot)

    def _seen(self) -> int:
        """Up to which number every request was answered that has an answer."""
        return next((one for one, pending in self._pending.items() if not pending.is_standing), self._next_id) - 1

    def _abandon(self, request_id: int, pending: _Pending) -> None:
        """Nobody waits any more; what comes of it is not wanted. Without a connection the server is told by the next one."""
        pending.is_abandoned = True
        is_answered = pending.answer.done() and not pending.answer.cancelled()
        if is_answered and pending.answer.exception() is None:
            pending.answer.result().discard()
        if self._stream is not None:
            self._stream.send({"id": request_id, "op": "cancel"})
            if is_answered:
                self._pending.pop(request_id, None)

    @property
    def way_s(self) -> float:
        """What the way to the server and back takes, beside what the server does."""
        return self._way_s if self._way_s is not None else math.inf

    def took(self, seconds: float) -> None:
        """So long the way there and back was, or seemed."""
        # A loop that was busy with something else makes a way seem long, nothing makes it seem short.
        before_s = self.way_s
        self._way_s = seconds if seconds < before_s else before_s + _WAY_WEIGHT * (seconds - before_s)
        if self.on_way is not None:
            self.on_way(self._way_s)

    # ---- its life ----

    @property
    def is_connected(self) -> bool:
        return self._stream is not None

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this process is a fork of the one that connected to the server: connect anew here")

    async def connect(self) -> None:
        """Return once the server has greeted. `BackendError` when there is none, `UsageError` or `ProtocolError` when it is the wrong one."""
        if self._is_closed:
            raise PoolClosed("the connection to the server is closed")
        if self._stream is not None:
            return
        if self._connecting is None:
            self._connecting = self._loop.create_task(self._connect())
            self._connecting.add_done_callback(_heard)
        await asyncio.shield(self._connecting)

    async def close(self) -> None:
        """Say good-bye, whereupon the server gives back whatever is left. Safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in (self._connecting, self._retrying):
            if task is not None:
                task.cancel()
                await asyncio.wait([task])
        if self._stream is not None:
            said: asyncio.Future[Reply] = self._loop.create_future()
            request_id = self._take_id()
            self._pending[request_id] = pending = _Pending("bye", {}, None, said)
            self._send(request_id, pending)
            with contextlib.suppress(TimeoutError, UntaxError):
                async with asyncio.timeout(GREETING_S):
                    await said
        self._drop_stream()
        self._place.close()
        self._share(None)
        self._fail_all(PoolClosed("the connection to the server is closed"))
        self._pending.clear()

    async def _connect(self) -> None:
        try:
            await self._greet(await self._place.dial())
        finally:
            self._connecting = None  # here and not in a callback: the connection may be lost before that is called

    async def _greet(self, stream: MessageStream) -> None:
        asked_ns = now_ns()
        greeting: asyncio.Future[Body] = self._loop.create_future()
        request_id = self._take_id()
        self._greeting = (request_id, greeting)
        before = self.server
        try:
            stream.start(self)
            stream.send(
                {
                    "id": request_id,
                    "op": "hello",
                    "protocol": PROTOCOL,
                    "release": __version__,
                    "owner": before.owner if before is not None else None,
                    "secret": before.secret if before is not None else None,
                    "boot": boot_id(),
                    "now_ns": asked_ns,
                    **self._place.greeting(),
                }
            )
            async with asyncio.timeout(GREETING_S):
                body = await greeting
            self.server = Server.read(body, asked_ns)
            self.took((now_ns() - asked_ns) / 1e9)
            self._place.greeted(stream, body)
        except BaseException as exc:
            stream.close()
            if isinstance(exc, TimeoutError):
                raise BackendError("", f"the server at {self._place} did not greet within {GREETING_S:g} s") from None
            raise
        finally:
            self._greeting = None
        self._stream = stream
        self._unheard = 0
        self._schedule_beat()
        if before is not None and self.server.owner != before.owner:
            self._on_forgotten()
        self._resend()

    def _resend(self) -> None:
        for request_id, pending in list(self._pending.items()):
            if pending.is_abandoned:
                assert self._stream is not None
                self._stream.send({"id": request_id, "op": "cancel"})
                del self._pending[request_id]
            elif not pending.answer.done():
                self._send(request_id, pending)

    # ---- from the stream ----

    def message_received(self, body: Body, fd: int | ByteStream | None) -> None:
        self._unheard = 0
        _Awake.at_s = self._loop.time()
        request_id = body.get("id")
        if isinstance(event := body.get("event"), str):
            self._on_event(event, body)
        elif self._greeting is not None:
            self._share(fd)
            self._greeted(self._greeting[1], body)
        elif isinstance(request_id, int) and (pending := self._pending.get(request_id)) is not None:
            self._answered(request_id, pending, body, fd)
            return
        elif request_id == 0 and self._beat_ns is not None:
            self.took((now_ns() - self._beat_ns) / 1e9)
            self._beat_ns = None
        close(fd)

    def connection_lost(self, reason: str) -> None:
        if self._greeting is not None:
            if not self._greeting[1].done():
                self._greeting[1].set_exception(BackendError("", f"the server at {self._place} refused the connection: {reason}"))
            return
        log.debug("the connection to %s was lost: %s", self._place, reason)
        self._drop_stream()
        if self.on_lost is not None:
            self.on_lost(reason)
        if not self._is_closed and (self._pending or self._is_needed()) and self._retrying is None:
            self._retrying = self._loop.create_task(self._retry(reason))
            self._retrying.add_done_callback(_heard)

    def _share(self, fd: int | ByteStream | None) -> None:
        """The page that came with a greeting; without one nothing is given ahead."""
        marks, self._marks = self._marks, None
        if marks is not None:
            marks.close()
        if isinstance(fd, int):
            try:
                self._marks = Marks(fd)
            except (OSError, ValueError) as exc:
                log.warning("%s: nothing is leased ahead: %s", self._place, exc)

    def _greeted(self, greeting: asyncio.Future[Body], body: Body) -> None:
        if greeting.done():
            return
        if isinstance(body.get("ok"), dict):
            greeting.set_result(body["ok"])
        else:
            greeting.set_exception(error_of(body.get("error")))

    def _answered(self, request_id: int, pending: _Pending, body: Body, fd: int | ByteStream | None) -> None:
        if isinstance(part := body.get("part"), dict):
            if pending.on_part is not None and not pending.is_abandoned:
                pending.on_part(part)
            return
        if pending.is_abandoned or pending.answer.done():
            if pending.is_abandoned:
                del self._pending[request_id]
            close(fd)
        elif isinstance(answer := body.get("ok"), dict):
            pending.answer.set_result(Reply(answer, fd))
        else:
            close(fd)
            pending.answer.set_exception(error_of(body.get("error")))

    # ---- when it breaks ----

    async def _retry(self, reason: str) -> None:
        """Until there is a connection again, or nobody needs one. Those who wait for an answer are told when nobody listens."""
        delay_s = _FIRST_RETRY_S
        began = self._loop.time()
        try:
            while self._stream is None and not self._is_closed:
                try:
                    await self.connect()
                    continue  # it may be lost again by now
                except UntaxError as exc:
                    self._fail_all(BackendError("", f"the connection to the server was lost ({reason}), and there is no other: {exc}"))
                    if not isinstance(exc, BackendError) or not self._is_needed():
                        return
                    if self._place.carries_channels and self.server is not None and self._loop.time() - began > self.server.lease_s:
                        self._on_forgotten()  # by now the server has given up what we held, if there is one
                        began = self._loop.time()
                        if not self._is_needed():
                            return
                await asyncio.sleep(delay_s)  # nothing tells when a file at a path begins to be listened at
                delay_s = min(2 * delay_s, _LAST_RETRY_S)
        finally:
            self._retrying = None

    def _fail_all(self, exc: UntaxError) -> None:
        """Nobody waits any more. What comes of it over there is given back when there is a connection again, should there ever be."""
        for one in self._pending.values():
            one.is_abandoned = True
            if not one.answer.done():
                one.answer.set_exception(type(exc)(*exc.args))
                one.answer.exception()  # perhaps nobody looks

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if self._beat is not None:
            self._beat.cancel()
        if stream is not None:
            stream.close()

    def _schedule_beat(self) -> None:
        assert self.server is not None
        self._beat = self._loop.call_later(self.server.heartbeat_s, self._heartbeat)

    def _heartbeat(self) -> None:
        if self._stream is None:
            return
        if self._unheard >= _SILENT_HEARTBEATS:
            self._stream.close()
            self.connection_lost("it does not answer")
            return
        self._unheard += 1
        self._beat_ns = now_ns()
        self._stream.send({"id": 0, "op": "renew", "seen": self._seen()})
        self._schedule_beat()


def _heard(task: asyncio.Task[None]) -> None:
    """Whoever waits for it is told; perhaps nobody does any more."""
    if not task.cancelled() and (exc := task.exception()) is not None:
        log.debug("no connection: %s", exc)
