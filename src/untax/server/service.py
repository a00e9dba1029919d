"""One engine for many clients, whatever they come over: who is there, what they hold, and how it all ends.

A transport makes a `Session` for each connection and gives it the messages; everything else is here and below.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from untax import __version__
from untax.core.errors import LeaseRefused, PoolClosed, ProtocolError, UntaxError
from untax.core.ledger import Ledger
from untax.core.spec import require_duration
from untax.core.stream import ByteStream
from untax.leases import usual_isolation
from untax.remote.boot import boot_id
from untax.remote.messages import PROTOCOL, Body, error_data
from untax.remote.stream import MessageStream
from untax.server.answers import Answers, Outcome
from untax.server.handed import HangUps
from untax.server.operations import Operations
from untax.server.owners import Owner, Owners
from untax.server.view import Views

if TYPE_CHECKING:
    from untax.engine import Engine

log = logging.getLogger("untax.server")

LEASE_S = 10.0
"""How long an owner that lost its connection may take to come back before what it held is given back."""
HEARTBEAT_S = 3.0
"""How often a client lets itself be heard, and finds out whether the server still answers."""
_BEATS = 3  # within the time after which a client that says nothing is given up
LEDGERS_KEPT = 256
_LEDGERS_BYTES = 16 << 20
_LONG = 200  # actions


class Final:
    """A ledger that nobody adds to any more, and whose it is. It is written out when somebody asks for it, which hardly anybody does."""

    __slots__ = ("_ledger", "_text", "tenant")

    def __init__(self, tenant: str, ledger: Ledger) -> None:
        self.tenant = tenant
        # Of a long one the text is much smaller than what it is made of.
        self._text = ledger.to_json() if len(ledger.actions) > _LONG or not ledger.is_closed else None
        self._ledger = ledger if self._text is None else None

    @property
    def text(self) -> str:
        """As `Ledger.to_json` has it."""
        if self._text is None:
            assert self._ledger is not None
            self._text, self._ledger = self._ledger.to_json(), None
        return self._text


class Service:
    """Over a started engine, which stays its maker's to close."""

    def __init__(self, engine: Engine, *, lease_s: float = LEASE_S) -> None:
        self.engine = engine
        self.lease_s = require_duration("lease_s", lease_s)
        self.ledgers: deque[Final] = deque(maxlen=LEDGERS_KEPT)
        """The latest that are final, the holders' part in them."""
        self.ledgers_total = 0
        """How many there were, those that were forgotten included."""
        self._closed: list[tuple[str, Ledger]] = []  # those that are about to be among them
        self.on_ledger: Callable[[Ledger, str], object] | None = None
        """Told of each, and whose it is."""
        self.sessions: set[Session] = set()
        self.owners = Owners(self.lease_s, self._over)
        self.answers = Answers(engine.chore, self._changed)
        self._hang_ups = HangUps()
        self.operations = Operations(engine, self._hang_ups, self.closed, self._changed, self.recall)
        engine.on_short = self.recall
        self._waiting: list[asyncio.Future[None]] = []
        self.is_draining = False
        self.views = Views(self)

    @property
    def leases(self) -> int:
        return sum(len(owner.leases) for owner in self.owners)

    def latest_ledgers(self, tenant: str | None = None) -> list[str]:
        """As many as fit a message, the oldest first; of one tenant, or of all."""
        self._keep()  # also of a lease whose end was told this moment
        found: deque[str] = deque()
        room = _LEDGERS_BYTES
        for one in reversed(self.ledgers):
            if tenant is not None and one.tenant != tenant:
                continue
            room -= len(one.text)
            if room < 0:
                break
            found.appendleft(one.text)
        return list(found)

    async def wait_idle(self) -> None:
        """Return once nobody holds a lease, or has asked for one or for anything else."""
        while self.leases or any(owner.under_way for owner in self.owners):
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future

    def drain(self) -> None:
        """From here on there are no new leases; the clients are told."""
        self.is_draining = True
        self.operations.gives_ahead = False
        self.views.changed_for_all()
        for session in list(self.sessions):
            session.say({"event": "draining"})
        self.recall()

    async def aclose(self) -> None:
        """End every owner and give back what it held. Safe to call twice."""
        self.is_draining = True
        self.operations.gives_ahead = False
        for session in list(self.sessions):
            session.say({"event": "closing"})
        ends = [self._ended(owner, "the server was stopped") for owner in self.owners]
        await asyncio.gather(*ends)
        for session in list(self.sessions):
            session.drop("the server was stopped")
        self.engine.on_short = None
        self.operations.close()
        self.views.close()
        self._hang_ups.close()

    def recall(self) -> None:
        """Somebody needs what lies in clients' hands, if anything does."""
        for session in list(self.sessions):
            owner = session.owner
            if owner is not None and not owner.is_recalled and owner.ahead.has_untaken:
                owner.is_recalled = True
                session.say({"event": "recall"})

    # ---- owners ----

    def _over(self, owner: Owner, reason: str) -> None:
        running = self.answers.end(owner)
        owner.ended = self.engine.chore(self._give_all_back(owner, reason, running))
        if owner.attachment is not None:
            owner.attachment.drop(reason)

    async def _give_all_back(self, owner: Owner, reason: str, running: list[asyncio.Task[Outcome]]) -> None:
        if running:
            await asyncio.wait(running)
        await self.operations.give_all_back(owner, reason)
        self._changed()

    async def _ended(self, owner: Owner, reason: str) -> None:
        self.owners.end(owner, reason)
        if owner.ended is not None:
            await owner.ended

    def closed(self, ledger: Ledger, tenant: str = "") -> None:
        """A ledger is final."""
        if not self._closed:  # behind the reply, which need not wait for it
            asyncio.get_running_loop().call_soon(self._keep)
        self._closed.append((tenant, ledger))

    def _keep(self) -> None:
        closed, self._closed = self._closed, []
        for tenant, ledger in closed:
            self.ledgers.append(Final(tenant, ledger))
            self.ledgers_total += 1
            if self.on_ledger is not None:
                try:
                    self.on_ledger(ledger, tenant)
                except Exception:  # told here: the others are kept all the same
                    log.exception("a ledger could not be passed on")

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)


class Session:
    """One connection: a greeting, then requests of one owner."""

    def __init__(
        self, service: Service, stream: MessageStream, label: str, *, proves_life: bool, on_owner: Callable[[Owner, Body], Body]
    ) -> None:
        """`on_owner` is told whose connection it is and how it greeted, and gives what the answer says beside the rest."""
        self._service = service
        self._stream = stream
        self._label = label
        self._proves_life = proves_life
        self._on_owner = on_owner
        self._shift_ns = 0
        self.owner: Owner | None = None
        service.sessions.add(self)

    @property
    def proves_life(self) -> bool:
        return self._proves_life

    def say(self, body: Body, fd: int | None = None) -> None:
        self._stream.send(body, fd)

    @property
    def unsent(self) -> int:
        return self._stream.unsent

    @property
    def asked(self) -> int:
        return self.owner.asked if self.owner is not None else 0

    def drop(self, reason: str) -> None:
        log.debug("connection of %s dropped: %s", self._label, reason)
        self._gone()
        self._stream.close()

    # ---- from the stream ----

    def message_received(self, body: Body, fd: int | ByteStream | None) -> None:
        if isinstance(fd, int):
            os.close(fd)  # nothing that a client sends needs one
        request_id = body.get("id")
        if isinstance(request_id, bool) or not isinstance(request_id, int) or not isinstance(body.get("op"), str):
            self.refuse(0, ProtocolError("a request without a number or a name"))
        elif self.owner is None:
            self._greeted(request_id, body)
        else:
            self._asked(self.owner, request_id, body)

    def connection_lost(self, reason: str) -> None:
        log.debug("connection of %s lost: %s", self._label, reason)
        self._gone()
        if self.owner is not None:
            self._service.owners.detach(self.owner, self)

    # ---- inside ----

    def _gone(self) -> None:
        self._service.sessions.discard(self)
        self._service.views.leave(self)

    def _greeted(self, request_id: int, body: Body) -> None:
        service = self._service
        try:
            owner, is_resumed = self._owner_of(body)
        except UntaxError as exc:
            self.refuse(request_id, exc)
            return
        try:
            more = self._on_owner(owner, body)
        except UntaxError as exc:
            self.refuse(request_id, exc)
            if not is_resumed:
                service.owners.end(owner, "it was refused")
            return
        self.owner = owner
        substrate = service.engine.substrate
        self.say(
            {
                "id": request_id,
                "ok": {
                    "protocol": PROTOCOL,
                    "release": __version__,
                    "owner": owner.id,
                    "secret": owner.secret,
                    "is_resumed": is_resumed,
                    "lease_s": service.lease_s,
                    "heartbeat_s": min(HEARTBEAT_S, service.lease_s / _BEATS),
                    "substrate": {"name": substrate.name, "isolation": substrate.isolation, "usual": usual_isolation(substrate)},
                    "boot": boot_id(),
                    "now_ns": service.engine.clock(),
                    **more,
                },
            },
            owner.ahead.fd if self._proves_life else None,
        )
        service.owners.attach(owner, self)

    def _owner_of(self, body: Body) -> tuple[Owner, bool]:
        if body.get("op") != "hello":
            raise ProtocolError("a request before the greeting")
        if body.get("protocol") != PROTOCOL:
            raise ProtocolError(
                f"the client {body.get('release')!s:.40} speaks protocol {body.get('protocol')!r}, the server {__version__} {PROTOCOL}:"
                " install the same release on both sides"
            )
        owner_id, secret, now_ns, boot = (body.get(name) for name in ("owner", "secret", "now_ns", "boot"))
        if not isinstance(owner_id, str | None) or not isinstance(secret, str | None) or not isinstance(now_ns, int):
            raise ProtocolError("a greeting without its fields")
        if self._service.is_draining and not (owner_id and self._service.owners.is_known(owner_id)):
            raise PoolClosed("the server is stopping; connect to another, or to its successor")
        # One machine has one monotonic clock for all. Elsewhere the way here is taken for nothing, which makes it the queue's.
        self._shift_ns = 0 if boot is not None and boot == boot_id() else self._service.engine.clock() - now_ns
        return self._service.owners.take_up(owner_id, secret, self._label)

    def _asked(self, owner: Owner, request_id: int, body: Body) -> None:
        service = self._service
        if not self._proves_life:  # whose end is known when it comes
            service.owners.renew(owner)
        if isinstance(seen := body.get("seen"), int):
            service.answers.seen(owner, seen)
        op, args = body["op"], body.get("args")
        match op:
            case "knock":
                service.operations.knocked(owner)
            case "renew":
                self.say({"id": request_id, "ok": {}})
            case "cancel":
                service.views.leave(self, request_id)
                service.answers.cancel(owner, request_id)
            case "bye":
                self.say({"id": request_id, "ok": {}})
                service.owners.end(owner, "it said good-bye")
            case "lease" if service.is_draining and isinstance(args, dict) and args.get("may_refuse") is True:
                self._say_error(request_id, LeaseRefused("draining", "it is draining: there are no new leases"))
            case "lease" | "warm" if service.is_draining:
                self._say_error(request_id, PoolClosed("the server is stopping; connect to another, or to its successor"))
            case "watch":
                self._watching(owner, request_id, is_resting=isinstance(args, dict) and args.get("is_resting") is True)
            case "ledgers":
                self.say({"id": request_id, "ok": {"value": service.latest_ledgers(owner.gate.name or None)}})
            case _ if isinstance(args, dict):
                shift_ns = self._shift_ns
                service.answers.ask(
                    owner, request_id, lambda tell: service.operations.carry_out(owner, request_id, op, args, shift_ns, tell), self
                )  # fmt: skip
            case _:
                self.refuse(request_id, ProtocolError("a request without arguments"))

    def _watching(self, owner: Owner, request_id: int, *, is_resting: bool) -> None:
        try:
            owner.gate.check_watching()
        except UntaxError as exc:
            self._say_error(request_id, exc)
        else:
            self._service.views.watch(self, request_id, is_resting=is_resting)

    def _say_error(self, request_id: int, exc: UntaxError) -> None:
        self.say({"id": request_id, "error": error_data(exc)})

    def refuse(self, request_id: int, exc: UntaxError) -> None:
        """Say why, and that was it."""
        log.info("connection of %s refused: %s", self._label, exc)
        self._say_error(request_id, exc)
        if self.owner is not None:
            self._service.owners.detach(self.owner, self)
        self.drop(str(exc))
