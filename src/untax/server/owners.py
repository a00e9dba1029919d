"""Who holds leases, and for how long after it was last heard of.

An *owner* is one client with an id and a secret of its own. It lasts as long as its connection does where the connection proves that the
client lives (a Unix socket: the kernel closes it with the process), and for `lease_s` after it was last heard of everywhere else. A connection that
broke can be taken up again within that time by whoever knows the secret; then everything the owner held is still there.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from untax.core.errors import UsageError
from untax.server.ahead import Ahead

if TYPE_CHECKING:
    from untax.core.spec import EnvSpec
    from untax.layers.store import Pin
    from untax.pool.status import PoolStatus
    from untax.server.answers import Answer
    from untax.snapshot import Snapshot
    from untax.tenancy import Tenancy

log = logging.getLogger("untax.server")

OWNERS_MAX = 4096


class Attachment(Protocol):
    """A connection, as its owner sees it."""

    @property
    def proves_life(self) -> bool:
        """Whether the connection ends by itself when the client does."""

    def drop(self, reason: str) -> None:
        """Somebody else speaks for the owner from here on."""


class Gate(Protocol):
    """What an owner may do beyond having connected: the tenant's limits, and whose snapshots are whose."""

    name: str
    """Whose ledgers these are; empty for the machine's own user."""

    def admit(self, spec: EnvSpec) -> None:
        """Raises for what may not be asked for."""

    def starting(self, count: int = 1) -> AbstractContextManager[None]:
        """Around the making of sandboxes; raises above a limit."""

    def leased(self, change: int) -> None:
        """So many leases more, or less."""

    def check_snapshot(self, snapshot_id: str) -> None:
        """Raises for one that is somebody else's."""

    def check_room(self) -> None:
        """Raises when one more snapshot would be too many."""

    async def took_snapshot(self, snapshot: Snapshot, *, is_saved: bool) -> None: ...

    def dropped_snapshot(self, snapshot_id: str) -> None: ...

    def shown(self, pools: PoolStatus) -> PoolStatus:
        """What it may see of the pools."""

    def check_watching(self) -> None:
        """Raises for who may not see what is idle and stored here, by stage key."""


class Open:
    """For whoever is trusted as the server's own user is."""

    name = ""

    def admit(self, spec: EnvSpec) -> None:
        pass

    def starting(self, count: int = 1) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def leased(self, change: int) -> None:
        pass

    def check_snapshot(self, snapshot_id: str) -> None:
        pass

    def check_room(self) -> None:
        pass

    async def took_snapshot(self, snapshot: Snapshot, *, is_saved: bool) -> None:
        pass

    def dropped_snapshot(self, snapshot_id: str) -> None:
        pass

    def shown(self, pools: PoolStatus) -> PoolStatus:
        return pools

    def check_watching(self) -> None:
        pass


class Proof(Protocol):
    def close(self) -> None: ...


class Owner:
    """What one client holds. `is_over` once nothing more may be added to it."""

    def __init__(self, label: str) -> None:
        self.id = f"own-{secrets.token_hex(8)}"
        self.secret = secrets.token_hex(16)
        self.label = label
        """For people: whose it is."""
        self.gate: Gate = Open()
        self.leases: dict[str, Tenancy] = {}
        self.ahead = Ahead()
        """Of the leases those that were given before they were asked for."""
        self.is_recalled = False
        """Whether it was told to give those back, and has got none since."""
        self.snapshots: dict[str, Snapshot] = {}
        self.pins: dict[str, Pin] = {}
        self.answers: dict[int, Answer] = {}
        self.under_way = 0
        """How many of them are not there yet."""
        self._leasing: dict[int, None] = {}  # numbers of requests for leases that no pool knows of yet, in their order
        self._last_lease = 0
        self.last: tuple[EnvSpec, Mapping[str, Any]] | None = None
        """What it leased last, and what was told of that."""
        self.carriers: dict[int, object] = {}
        """What carries the channels of its boxes, where descriptors cannot be handed over; the transport's own."""
        self.next_carrier = 1
        self.attachment: Attachment | None = None
        self.proof: Proof | None = None
        """What tells that the client itself has ended, where there is such a thing."""
        self.at_end: list[Callable[[], object]] = []
        """Called once it is over."""
        self.is_over = False
        self.timer: asyncio.TimerHandle | None = None
        self.ended: asyncio.Task[None] | None = None
        """Gives back what it held, once it is over."""

    def leasing(self, number: int) -> Callable[[], object]:
        """It asks for a lease by this request. What is given is to be called once a pool knows of it, or never will."""
        self._leasing[number] = None
        self._last_lease = max(self._last_lease, number)
        return functools.partial(self._leasing.pop, number, None)

    @property
    def asked(self) -> int:
        """Up to which number every request for a lease is in what is told of the pools now."""
        return min(self._leasing) - 1 if self._leasing else self._last_lease


class Owners:
    """All of them. `on_end` is called once for each owner that ends, with the reason."""

    def __init__(self, lease_s: float, on_end: Callable[[Owner, str], object]) -> None:
        self.lease_s = lease_s
        self._on_end = on_end
        self._all: dict[str, Owner] = {}

    def __iter__(self) -> Iterator[Owner]:
        return iter(list(self._all.values()))

    def __len__(self) -> int:
        return len(self._all)

    def is_known(self, owner_id: str) -> bool:
        return owner_id in self._all

    def take_up(self, owner_id: str | None, secret: str | None, label: str) -> tuple[Owner, bool]:
        """The owner of that id and whether it is an earlier one; a new one where the id is not known (any more).

        `UsageError` for a wrong secret, and when there are too many.
        """
        known = self._all.get(owner_id) if owner_id is not None else None
        if known is not None:
            if secret is None or not hmac.compare_digest(known.secret.encode(), secret.encode("utf-8", "replace")):
                raise UsageError("the secret does not fit the owner")
            return known, True
        if len(self._all) >= OWNERS_MAX:
            raise UsageError(f"{OWNERS_MAX} clients are connected already: close some of them, or start another server")
        owner = Owner(label)
        self._all[owner.id] = owner
        return owner, False

    def attach(self, owner: Owner, attachment: Attachment) -> None:
        before, owner.attachment = owner.attachment, attachment
        if before is not None and before is not attachment:
            before.drop("another connection has taken its place")
        self.renew(owner)

    def renew(self, owner: Owner) -> None:
        """It was heard of."""
        self._stop(owner)
        if owner.attachment is None or not owner.attachment.proves_life:
            owner.timer = asyncio.get_running_loop().call_later(self.lease_s, self._expire, owner)

    def detach(self, owner: Owner, attachment: Attachment) -> None:
        """Its connection is gone; it has `lease_s` from now to come back."""
        if owner.attachment is attachment and not owner.is_over:
            owner.attachment = None
            self.renew(owner)

    def end(self, owner: Owner, reason: str) -> None:
        """Whatever it held is given back. Safe to call twice."""
        if owner.is_over:
            return
        owner.is_over = True
        self._stop(owner)
        self._all.pop(owner.id, None)
        if owner.proof is not None:
            owner.proof.close()
        for call in owner.at_end:
            call()
        log.info("owner %s (%s) is over: %s", owner.id, owner.label, reason)
        self._on_end(owner, reason)

    def _expire(self, owner: Owner) -> None:
        self.end(owner, f"nothing was heard of it for {self.lease_s:g} s")

    def _stop(self, owner: Owner) -> None:
        if owner.timer is not None:
            owner.timer.cancel()
            owner.timer = None
