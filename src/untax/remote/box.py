"""A box whose sandbox is a server's: actions go straight over the channel that was handed out, its life is the server's to change."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from builtins import list as list_
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from untax.box import Box
from untax.channel import actions
from untax.channel.client import Channel
from untax.channel.egress import Egress, EgressAttempt
from untax.channel.handover import Resumed
from untax.core import account
from untax.core.errors import ProtocolError, SandboxLost, SubstrateError, UntaxError
from untax.core.ledger import ActionRecord, Ledger, Placed
from untax.core.root import ImageConfig
from untax.core.span import Stopwatch
from untax.core.stream import ByteStream
from untax.leases import Request
from untax.remote.connection import Reply
from untax.remote.messages import plain, unpacked
from untax.remote.snapshot import RemoteSnapshot

if TYPE_CHECKING:
    from untax.layers.merged import Change
    from untax.remote.engine import RemoteEngine

log = logging.getLogger("untax.box")

# The server ends a lease by its time and so do we; which of the two is seen first differs by less than this.
_EXPIRY_SLACK_NS = 100_000_000
_completing = threading.Lock()


class RemoteBox(Box):
    """Made by a `RemoteEngine` of what the server answered."""

    _engine: RemoteEngine
    on_given_back: Callable[[], object] | None = None
    """Told once the server has it back."""

    def __init__(
        self, engine: RemoteEngine, request: Request, lease_id: str, asked_ns: int, reply: Reply, *, is_ahead: bool = False
    ) -> None:
        """`is_ahead`: it was given before it was asked for."""
        stream = reply.take_stream()
        try:
            body = reply.body
            image, sandbox, held_ns, opening = body.get("image"), body.get("sandbox"), body.get("held_ns"), body.get("account")
            if not isinstance(image, ImageConfig) or not isinstance(sandbox, str):
                raise ProtocolError("a lease without its image's facts")
            if not isinstance(held_ns, int) or not isinstance(opening, bytes):
                raise ProtocolError("a lease without its account")
            server = engine.server
            ledger = Ledger(rollout="", substrate=server.substrate, isolation=server.isolation, start_ns=asked_ns, clock=engine.clock)
            ledger.sandboxes.append(sandbox)
            super().__init__(engine, request, ledger)
            self._opening: bytes = opening
            self._shift_ns = server.shift_ns
            self._lease_id = lease_id
            self._is_ahead = is_ahead
            self._image = image
            self._until_ns = (asked_ns if is_ahead else held_ns + self._shift_ns) + int(request.ttl_s * 1e9)
            self._channel = self._channel_over(stream, Resumed.from_data(body.get("channel") or {}))
        except BaseException:
            stream.close()
            raise
        self.came()
        left_s = max(0.0, (self._until_ns - self._clock()) / 1e9)
        self._expiry = asyncio.get_running_loop().call_later(left_s, self._expire)

    async def prove(self, within_s: float) -> None:
        """Of one that was given ahead a while ago: its answer is the proof that it lives. `SandboxLost` when it does not give one in time."""
        try:
            async with asyncio.timeout(within_s):
                await self._live().call(actions.ping(timeout_s=within_s))
        except TimeoutError:
            raise SandboxLost(self.id, f"it does not answer within {within_s:g} s") from None

    def came(self) -> None:
        """Its holder has it from now on."""
        self._ledger.held(self._clock())

    def dismiss(self) -> None:
        """Nobody has it, and nobody ever had."""
        self._over = self._over or "it was never leased"
        if self._expiry is not None:
            self._expiry.cancel()
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    # ---- its account ----

    @property
    def ledger(self) -> Ledger:
        """What the server knows of it is put in when somebody looks, which most holders never do."""
        if self._opening:
            self._complete()
        return self._ledger

    def was_placed(self, placed: Placed) -> None:
        self._ledger.placed = placed

    def _complete(self) -> None:
        """From any thread: a blocking holder looks from its own."""
        with _completing:
            if not self._opening:
                return  # another thread did it meanwhile
            ledger = self._ledger
            try:
                account.complete(ledger, unpacked(self._opening), shift_ns=self._shift_ns)
            except ProtocolError as exc:
                ledger.fault(f"ProtocolError: {exc}")
            if self._is_ahead:
                ledger.asked_at = time.time() - (self._clock() - ledger.start_ns) / 1e9
                if ledger.hit is not None:
                    ledger.hit.why = account.IN_HAND
            self._opening = b""  # last: until then everybody else waits here

    def _note_egress(self, attempt: EgressAttempt) -> None:
        if self._opening:
            self._complete()  # what is logged names the rollout
        super()._note_egress(attempt)

    def _channel_over(self, stream: ByteStream, resumed: Resumed) -> Channel:
        egress = Egress(self.spec.network, on_attempt=self._note_egress) if self.spec.network != "none" else None
        channel: Channel
        channel = Channel(stream, sandbox_id=self.id, egress=egress, on_lost=lambda lost: self._lost(channel, lost), resumed=resumed)
        return channel

    @property
    def image(self) -> ImageConfig:
        return self._image

    # ---- for its holder ----

    async def reset(self) -> None:
        async with self._changing:
            before = self._live()
            watch = Stopwatch(self._clock)
            is_idle = before.is_idle
            # No action reaches the sandbox until it is known which one it is. The old channel is the server's to close: from us
            # it would look like the end of the sandbox.
            self._channel = None
            try:
                reply = await self._ask("reset", idle=is_idle)
                self._over_with_a_reset(before, reply)
            except BaseException as exc:
                before.close()
                self._over = self._over or f"its reset failed: {exc}"
                if isinstance(exc, SubstrateError) and not self._blameless:
                    self._ledger.fault(f"{type(exc).__name__}: {exc}")
                raise
            finally:
                self._ledger.add("reset", *watch.part())

    def _over_with_a_reset(self, before: Channel, reply: Reply) -> None:
        if self._over is not None:  # given up meanwhile
            reply.discard()
            raise SandboxLost(self.id, self._over)
        how = reply.body.get("how")
        if how == "pristine" and reply.fd is None:
            if before.is_lost:
                raise SandboxLost(self.id, before.lost_reason or "it is gone")
            self._channel = before
        else:
            before.close()
            self._ledger.sandboxes.append(str(reply.body.get("sandbox")))
            stream = reply.take_stream()
            try:
                resumed = Resumed.from_data(reply.body.get("channel") or {})
                self._channel = self._channel_over(stream, resumed)
            except BaseException:
                stream.close()
                raise
        self._ledger.was_reset(str(how))

    async def snapshot(self, *, live: bool = False) -> RemoteSnapshot:
        async with self._changing:
            self._live()
            start_ns = self._clock()
            try:
                taken = RemoteSnapshot(self._engine, (await self._ask("snapshot", live=live)).body)
            except BaseException as exc:
                self._failed("snapshot", start_ns, self._channel, exc)
                raise
            now = self._clock()
            self._ledger.record(ActionRecord("snapshot", start_ns, now, now, 0, taken.how))
            return taken

    async def diff(self) -> list_[Change]:
        self._live()
        changes: list_[Change] = []
        await self._ask("diff", on_part=lambda part: changes.extend(part.get("changes") or ()))
        return changes

    async def pause(self) -> None:
        self._live()
        await self._ask("pause")

    async def resume(self) -> None:
        self._live()
        await self._ask("resume")

    # ---- for its engine ----

    @property
    def is_live(self) -> bool:
        return self._over is None

    def end_by(self, reason: str) -> None:
        """The server has given it up, or is no more."""
        if self._over is None:
            self._give_up(reason)

    def egress_told(self, said: object) -> None:
        """The server dialled for it, or refused to."""
        if isinstance(said, tuple) and len(said) == 4:
            host, port, verdict, reason = said
            self._note_egress(EgressAttempt(time.time(), str(host), int(port), None, verdict, str(reason)))

    # ---- inside ----

    async def _ask(self, op: str, *, on_part: Any = None, **args: Any) -> Reply:
        return await self._engine.request(op, {"lease": self._lease_id, **args}, on_part=on_part)

    async def _provide_worker(self, user: str | None) -> None:
        await self._ask("worker", user=user)

    def _lost(self, channel: Channel, lost: SandboxLost) -> None:
        if channel is not self._channel or self._over is not None:
            return
        if self._clock() >= self._until_ns - _EXPIRY_SLACK_NS:
            self._expire()
            self._over = self._over or self._expired_reason
            self._channel = None
        else:
            self._give_up(lost.message)

    def _give_up(self, reason: str) -> None:
        self._over = reason
        lost = SandboxLost(self.id, reason)
        self._ledger.fault(f"SandboxLost: {lost}")
        log.warning("sandbox %s is lost: %s", self.id, reason)
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    async def _give_back(self, reason: str) -> None:  # noqa: ARG002  the account has it
        channel, self._channel = self._channel, None
        try:
            if channel is not None:
                channel.stop_listening()  # the server ends it ahead of its answer, and we would be woken once more for that
            # First the account, then the end: the server closes the channel once it knows that this is what the holder wants.
            await self._engine.give_up(self._lease_id, self._request, plain(account.holding(self._ledger)))
        except UntaxError as exc:
            log.info("the lease of sandbox %s was not given up (%s); its server does so by itself", self.id, exc)
        finally:
            if channel is not None:
                channel.close()
            if self.on_given_back is not None:
                self.on_given_back()
