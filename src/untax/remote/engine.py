"""`untax.connect`: the engine of another process on this machine, with the same API as one's own.

Leases, resets and snapshots are requests to the server. The actions of a leased box are not: its channel's descriptor is handed to this
process, which speaks to the sandbox itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from untax.core.errors import BackendError, PoolTimeout, ProtocolError, SandboxLost, UntaxError, UsageError
from untax.core.root import Root
from untax.core.span import Clock, now_ns
from untax.core.spec import EnvSpec, Limits
from untax.core.stage import Stage
from untax.leases import Bindings, Offer, Request, checked, plain_spec
from untax.leasing import Leasing
from untax.pool.status import PoolStatus
from untax.remote.address import is_web, socket_path, web_address
from untax.remote.box import RemoteBox
from untax.remote.connection import Connection, Part, Reply, Server
from untax.remote.dial import Dialler, UnixDialler, WebDialler
from untax.remote.hand import Given, Hand
from untax.remote.messages import load_types
from untax.remote.snapshot import RemoteSnapshot
from untax.snapshot import Snapshot

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.sources import Progress

log = logging.getLogger("untax.remote")

FRESH_S = 0.5
"""Since it answered its server, from which on one in hand has to answer again. Its death shows at once, however fresh it is; what this bounds is silence (decision 0019)."""
_PROOF_S = 1.0  # for a sandbox in hand to say that it lives, before another one is asked for
_WAITED_S = 0.01  # for what was in hand and did not answer, from which on it counts
_LATE_S = 2.0  # after `wait_s` has passed, for the server to say so itself


def connect(url: str, *, token: str | None = None, ca_file: str | os.PathLike[str] | None = None) -> RemoteEngine:
    """`async with untax.connect("unix:PATH") as engine`: the engine that `untax serve --socket PATH` runs, used as one's own.

    Or `untax.connect("https://HOST:PORT", token=…)`; without a token, that of `UNTAX_TOKEN`. `ca_file` names who signed its certificate.
    """
    return RemoteEngine(url, token=token, ca_file=ca_file)


@dataclass(frozen=True, slots=True)
class RemoteSubstrate:
    """What leases are checked against: the server's substrate, by name."""

    name: str
    isolation: str
    usual: str

    def default_spec(self) -> EnvSpec:
        return plain_spec(self.usual)


class RemoteEngine(Leasing):
    """Leases sandboxes of a server. `async with`, or `start()` and `aclose()`. For one process and one event loop."""

    box_class: type[RemoteBox] = RemoteBox
    wants_facts = False
    """Whether leases are to say what commands find inside."""

    def __init__(self, url: str, *, token: str | None = None, ca_file: str | os.PathLike[str] | None = None, clock: Clock = now_ns) -> None:
        super().__init__(clock)
        self.url = url
        self._place: Dialler = WebDialler(web_address(url, token, ca_file)) if is_web(url) else UnixDialler(socket_path(url))
        self._connection: Connection | None = None
        self._leases = 0
        self._watching = {"is_resting": False}
        self._hand: Hand | None = None
        """None where channels come over the connection itself: who has one of those asks for each."""
        self.on_nothing_ahead: Callable[[EnvSpec, float | None], None] | None = None
        """Told when the next lease of this was wanted with the end of one, and the server says that nothing was idle for it; and in how long something
        will be, where it is being made already and nobody waits for it.
        """

    # ---- its own life ----

    async def start(self) -> None:
        """Connect; `BackendError` when no server listens there, `UsageError` or `ProtocolError` when it is not one for us."""
        if self._state != "new":
            raise UsageError(f"this connection is {self._state}; make a new one with untax.connect()")
        load_types()
        self._connection = Connection(
            self._place,
            on_event=self._heard,
            on_forgotten=lambda: self._end_all("its server was started anew, or gave it up while the connection was broken"),
            is_needed=self._is_needed,
        )
        if not self._place.carries_channels:
            self._hand = Hand(lambda lease_id: self.chore(self._give_back(lease_id, is_unused=True)))
        try:
            await self._connection.connect()
        except BaseException:
            self._state = "closed"
            await self._connection.close()
            raise
        self._state = "running"

    def _is_needed(self) -> bool:
        """Whether a connection that breaks is taken up again also while nobody waits for an answer."""
        return any(isinstance(box, RemoteBox) and box.is_live for box in self._boxes)

    async def aclose(self) -> None:
        """Release every box and say good-bye. Safe to call twice."""
        if self._state != "closed":
            self._state = "closed"
            if self._connection is not None:
                await self.finish(self.chore(self._close(self._connection)))

    async def _close(self, connection: Connection) -> None:
        if self._hand is not None:
            self._hand.close()
        await asyncio.gather(*(box.release() for box in list(self._boxes)), return_exceptions=True)
        while chores := [chore for chore in self._chores if chore is not asyncio.current_task()]:
            await asyncio.wait(chores)
        await connection.close()

    @property
    def server(self) -> Server:
        """What the server said about itself; `UsageError` before `start`."""
        if self._connection is None or self._connection.server is None:
            raise UsageError("not connected: use `async with untax.connect(url)`, or await start()")
        return self._connection.server

    @property
    def link_s(self) -> float:
        """What the way to the server and back takes, beside what the server does, as greetings, heartbeats and leases have shown."""
        if self._connection is None or self._connection.server is None:
            raise UsageError("not connected: use `async with untax.connect(url)`, or await start()")
        return self._connection.way_s

    def on_link(self, told: Callable[[float], None] | None) -> None:
        """Have `told` know of `link_s` now, and each time that it was looked at; None ends that."""
        if self._connection is None:
            raise UsageError("not connected: use `async with untax.connect(url)`, or await start()")
        self._connection.on_way = told
        if told is not None:
            told(self.link_s)

    @property
    def substrate(self) -> RemoteSubstrate:
        return RemoteSubstrate(self.server.substrate, self.server.isolation, self.server.usual)

    @property
    def offer(self) -> Offer:
        return self.substrate

    # ---- what is in store ----

    async def prepare(self, spec: EnvSpec, *, progress: Progress | None = None) -> Prepared:
        """Build the stages that `spec` lacks, ahead of its leases; they stay until the `pin` of what is given is closed, or this connection."""
        from untax.layers.build import Prepared
        from untax.remote.pin import RemotePin

        self._check_running()

        def told(part: Mapping[str, Any]) -> None:
            said = part.get("progress")
            if progress is not None and isinstance(said, tuple) and len(said) == 3:
                progress(*said)

        body = (await self.request("prepare", {"spec": checked(self.offer, spec, Bindings()).spec}, on_part=told)).body
        root, stages, built, pin_id, pinned = (body.get(name) for name in ("root", "stages", "built", "pin", "pinned"))
        if not isinstance(root, Root) or not isinstance(stages, tuple) or not isinstance(built, dict) or not isinstance(pinned, tuple):
            raise ProtocolError("stages were prepared without saying which")
        return Prepared(root, stages, built, RemotePin(self, str(pin_id), pinned))

    async def find_snapshot(self, snapshot_id: str) -> Snapshot:
        self._check_running()
        if not isinstance(snapshot_id, str):
            raise UsageError(f"{snapshot_id!r} is not a snapshot's id; they are as `await snapshot.save()` gives them")
        return RemoteSnapshot(self, (await self.request("find_snapshot", {"snapshot": snapshot_id})).body)

    async def warm(self, spec: EnvSpec | Snapshot | str | None = None, n: int = 1, *, limits: Limits | None = None) -> None:
        """As `untax.Engine.warm`: the server's pool serves all of its clients."""
        if isinstance(n, bool) or not isinstance(n, int):
            raise UsageError(f"n must be a whole number, not {n!r}")
        late, snapshot_id = Bindings(limits=limits), None
        if isinstance(spec, (Snapshot, str)):
            request = await self._request_from(spec, late)
            assert request.snapshot is not None
            spec, snapshot_id = request.spec, request.snapshot.id
        await self.ask("warm", spec=checked(self.offer, spec, late).spec, n=n, snapshot=snapshot_id)

    async def pools(self) -> PoolStatus:
        """What the server keeps ready, as `untax.Engine.pools` has it."""
        found = (await self.ask("pools")).get("pools")
        if not isinstance(found, PoolStatus):
            raise ProtocolError("a pool's status that is none")
        return found

    async def ladder(self, spec: EnvSpec) -> tuple[tuple[Stage, ...], frozenset[str]]:
        """The stages that a lease of `spec` needs in place, lowest first, as the server knows them, and the keys of those that are."""
        answer = await self.ask("ladder", spec=checked(self.offer, spec, Bindings()).spec)
        stages, present = answer.get("stages"), answer.get("present")
        if not isinstance(stages, tuple) or not stages or not all(isinstance(stage, Stage) for stage in stages):
            raise ProtocolError("the stages of a spec that are none")
        return stages, frozenset(map(str, present)) if isinstance(present, tuple) else frozenset()

    async def watch(self, told: Part) -> None:
        """Be told what the server has idle, stored and starting: all of it at once, then what changes (`docs/serve.md`). Lasts until it is
        cancelled; `BackendError` when the server is gone. A connection that broke is taken up again, and all of it told anew.
        """
        if self._connection is None:
            raise UsageError("not connected: use `async with untax.connect(url)`, or await start()")
        (await self._connection.request("watch", self._watching, on_part=told, is_standing=True)).discard()

    def rest(self, is_resting: bool) -> None:
        """Who watches does not look at it for a while, and is told less until it does again. Holds for every watch, begun or not."""
        if self._watching["is_resting"] != is_resting:
            self._watching["is_resting"] = is_resting
            if self._connection is not None:
                self._connection.restate("watch")

    async def ledgers(self) -> tuple[dict[str, Any], ...]:
        """The latest ledgers that are final, of all clients, as `Ledger.to_json` has them."""
        return tuple(json.loads(one) for one in (await self.ask("ledgers")).get("value") or ())

    # ---- how a box comes to be ----

    async def fulfil(self, request: Request, *, may_refuse: bool = False, on_sent: Callable[[int], None] | None = None) -> RemoteBox:
        """`may_refuse`: `LeaseRefused` at once where it would have to wait for the end of another lease, for who knows of other servers.

        `on_sent` is told the number of the request, by which views of the server say whether they have it in.
        """
        self._check_running()
        asked_ns = self.clock()
        if (box := await self.take_in_hand(request, asked_ns)) is not None:
            return box
        if request.wait_s is not None and (waited_s := (self.clock() - asked_ns) / 1e9) > _WAITED_S:
            request = replace(request, wait_s=max(_WAITED_S, request.wait_s - waited_s))
        self.stir()
        lease_id = self._new_lease()
        args = {
            "lease": lease_id,
            "spec": request.spec,
            "files": request.files,
            "wait_s": request.wait_s,
            "ttl_s": request.ttl_s,
            "snapshot": None if request.snapshot is None else request.snapshot.id,
        }
        if may_refuse:
            args["may_refuse"] = True
        if self.wants_facts:
            args["facts"] = True
        timeout_s = None if request.wait_s is None else request.wait_s + _LATE_S
        try:
            reply = await self.request("lease", args, timeout_s=timeout_s, on_sent=on_sent)
        except BackendError as exc:
            if timeout_s is not None and self.clock() - asked_ns >= timeout_s * 1e9:
                raise PoolTimeout(f"no sandbox within wait_s={request.wait_s:g}: {exc}") from exc
            raise
        try:
            box = self.box_class(self, request, lease_id, asked_ns, reply)
        except BaseException:
            self.chore(self._give_back(lease_id))
            raise
        self._boxes.add(box)
        assert self._connection is not None
        there_ns = int(reply.body["held_ns"]) - int(reply.body.get("began_ns") or 0)
        self._connection.took(max(0.0, (self.clock() - asked_ns - there_ns) / 1e9))
        return box

    def _new_lease(self) -> str:
        """Our own name of it, so that a lease can be named whose reply never came."""
        self._leases += 1
        return f"lse-{self._leases}"

    def stir(self) -> None:
        """A server that is asleep wakes up while the request is put together. Where something is in hand nobody need wake up."""
        if self._connection is not None and not self._hand:
            self._connection.knock()

    async def take_in_hand(self, request: Request, asked_ns: int) -> RemoteBox | None:
        """A box of what came with the end of an earlier lease, where there is one that lives."""
        hand, connection = self._hand, self._connection
        # A server that cannot be told that it was taken would take it back.
        if hand is None or connection is None or not connection.is_connected or not request.is_plain:
            return None
        connection.check_process()
        while (given := hand.take(request)) is not None:
            try:
                box = await self._proven(connection, given, request, asked_ns)
            except BaseException as exc:
                self.chore(self._give_back(given.lease_id, is_unused=True))
                if not isinstance(exc, UntaxError):
                    raise
                self._check_running()
                log.info("what %s gave ahead is of no use: %s", self._place, exc)
                continue
            self._boxes.add(box)
            return box
        return None

    async def _proven(self, connection: Connection, given: Given, request: Request, asked_ns: int) -> RemoteBox:
        """A box of what was in hand, which lives and is marked as taken. `UntaxError` when it does not, or came too late."""
        if given.reply.has_ended:
            given.reply.discard()
            raise SandboxLost("", "it died in hand")
        box = self.box_class(self, request, given.lease_id, asked_ns, given.reply, is_ahead=True)
        try:
            if asyncio.get_running_loop().time() > given.answered_s + FRESH_S:
                await box.prove(_PROOF_S if request.wait_s is None else min(request.wait_s, _PROOF_S))
            self._check_running()
            box._live()  # its end may have come with its answer
            connection.take(given.reply.body.get("slot"))
        except BaseException:
            box.dismiss()
            raise
        box.came()
        return box

    @property
    def has_in_hand(self) -> bool:
        """Whether the server gave something ahead that was not leased yet."""
        return bool(self._hand)

    @property
    def is_giving(self) -> bool:
        """Whether leases come from the hand at the moment, if not each of them."""
        return self._hand is not None and self._hand.is_in_use

    @property
    def wants_next(self) -> bool:
        """Whether a lease like the last one would be asked for here again."""
        return True

    async def give_up(self, lease_id: str, request: Request, account: bytes) -> None:
        """A lease is over. The next one of the same may come with the answer."""
        hand = self._hand if self._connection is not None and self._connection.can_take else None
        if hand is None or self._state != "running" or not self.wants_next or not hand.wants(request, len(self._boxes)):
            await self.ask("release", lease=lease_id, account=account)
            if hand is not None:
                hand.ended()
            return
        next_id, drops = self._new_lease(), hand.drops
        try:
            reply = await self.request("release", {"lease": lease_id, "account": account, "next": next_id})
        except BaseException:
            hand.failed()
            self.chore(self._give_back(next_id, is_unused=True))
            raise
        hand.ended()
        if reply.body.get("sandbox") is None:
            hand.failed()
            reply.discard()
            if self.on_nothing_ahead is not None and reply.body.get("is_idle") is False:
                coming_s = reply.body.get("idle_in_s")
                self.on_nothing_ahead(request.spec, float(coming_s) if isinstance(coming_s, (int, float)) else None)
        else:
            late_s = (self.clock() - int(reply.body["held_ns"]) - self.server.shift_ns) / 1e9  # the way here may have taken its time
            silent_s = float(reply.body.get("silent_s", 0.0))
            hand.keep(request, next_id, reply, drops, silent_s=max(0.0, silent_s), late_s=max(0.0, late_s))

    async def _give_back(self, lease_id: str, *, is_unused: bool = False) -> None:
        """A lease that could not be taken, or that nobody asked for."""
        with contextlib.suppress(UntaxError):  # a server that is gone has given it back
            await self.ask("release", lease=lease_id, account=b"", **({"is_unused": True} if is_unused else {}))

    # ---- for boxes and snapshots ----

    async def request(
        self,
        op: str,
        args: Mapping[str, Any],
        *,
        timeout_s: float | None = None,
        on_part: Part | None = None,
        on_sent: Callable[[int], None] | None = None,
    ) -> Reply:
        if self._connection is None:
            raise UsageError("not connected: use `async with untax.connect(url)`, or await start()")
        return await self._connection.request(op, args, timeout_s=timeout_s, on_part=on_part, on_sent=on_sent)

    async def ask(self, op: str, **args: Any) -> dict[str, Any]:
        """A request whose answer has no descriptor."""
        reply = await self.request(op, args)
        reply.discard()
        return reply.body

    def _heard(self, event: str, body: Mapping[str, Any]) -> None:
        if event == "recall":
            if self._hand is not None:
                self._hand.drop()
        elif event == "closing":
            self._end_all("its server was stopped")
        elif event == "egress":
            for box in self._boxes:
                if isinstance(box, RemoteBox) and box.id == body.get("sandbox"):
                    box.egress_told(body.get("attempt"))
        else:
            log.info("the server at %s is %s", self._place, event)

    def _end_all(self, reason: str) -> None:
        if self._hand is not None:
            self._hand.forget()
        for box in list(self._boxes):
            if isinstance(box, RemoteBox):
                box.end_by(reason)
