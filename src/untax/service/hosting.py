"""What every dialect works on: one engine, its tenants, and what each of them holds.

A *holding* is a box that a tenant leased over HTTP, under an id of its own that outlives resets. It ends when it is given back, at its
deadline, or with the server; what became of it is kept as a ledger. Boxes whose channel a client holds (`untax.connect`) are owners' and not holdings;
both count against the tenant's allowance.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from untax.core.errors import PoolClosed
from untax.core.spec import EnvSpec, Limits, require_duration
from untax.pool.status import PoolStatus
from untax.server.service import Service
from untax.service.admission import Admission
from untax.service.errors import Refused, not_found
from untax.service.ferry import Ferry
from untax.service.fleet import Peers
from untax.service.kept import Kept
from untax.service.observed import Observed
from untax.service.probe import Probe
from untax.service.telemetry import Spans
from untax.service.tenants import Tenant, Tenants

if TYPE_CHECKING:
    from untax.box import Box
    from untax.engine import Engine

log = logging.getLogger("untax.service")

TTL_MAX_S = 7 * 86_400.0
"""The longest that a holding may last from any moment on. Boxes are leased for this, and holdings end them earlier."""
BUSY_S = 1.0
"""What a tenant at one of its limits is told to wait."""


class Holding:
    """One box of one tenant. `extra` is the dialect's own: labels, tokens, whatever it has to keep with the box."""

    def __init__(self, tenant: Tenant, box: Box, dialect: str, extra: Mapping[str, Any] | None = None) -> None:
        self.id = f"{dialect[:3]}-{secrets.token_hex(10)}" if dialect != "e2b" else f"i{secrets.token_hex(10)}"
        self.tenant = tenant
        self.box = box
        self.dialect = dialect
        self.extra: dict[str, Any] = dict(extra or {})
        self.began = time.time()
        self.ends = self.began
        """Wall-clock seconds, for people; the deadline itself is the loop's clock."""
        self.on_end: list[Callable[[], object]] = []
        """Called once when it is over, whoever ended it."""
        self.on_deadline: Callable[[], object] | None = None
        """Called at its deadline instead of ending it: for dialects in which a lease may pause then."""
        self.ending: asyncio.Task[None] | None = None
        self.timer: asyncio.TimerHandle | None = None

    @property
    def left_s(self) -> float:
        """Until its deadline."""
        return max(0.0, self.timer.when() - asyncio.get_running_loop().time()) if self.timer is not None else 0.0


@dataclass(slots=True)
class _Use:
    leases: int = 0
    starting: int = 0
    actions: int = 0


@dataclass(frozen=True, slots=True)
class Settings:
    """How a service behaves, whatever the dialect."""

    ttl_s: float = 3600.0
    """Of a lease that does not say."""
    ttl_max_s: float = TTL_MAX_S
    body_max: int = 64 << 20
    admission: Admission = field(default_factory=Admission)
    public_url: str | None = None
    """Under which clients reach it, where that is not the address it listens at."""
    domain: str | None = None
    """Of which every sandbox has a name of its own (`PORT-ID.DOMAIN`); None: sandboxes are told apart by a header."""
    extra: Mapping[str, Any] = field(default_factory=dict)


class Hosting:
    """Over a started engine, which stays its maker's to close. `owners` carries the clients that hold channels themselves."""

    def __init__(
        self,
        engine: Engine,
        tenants: Tenants,
        settings: Settings | None = None,
        *,
        owners: Service | None = None,
        spans: Spans | None = None,
    ) -> None:
        self.engine = engine
        self.tenants = tenants
        self.settings = settings or Settings()
        self.owners = owners or Service(engine)
        if spans is not None:
            self.owners.on_ledger = spans.rollout
        self.counters: Counter[tuple[str, ...]] = Counter()
        """Events since the start, by what they are; `/metrics` shows them."""
        self.observed = Observed()
        self.connections: Counter[str] = Counter()
        """That clients hold, by tenant."""
        self.watching: Counter[str] = Counter()
        """Pages that are open, by tenant."""
        self.kept = Kept(engine)
        self.probe = Probe(engine)
        self.spans = spans
        self.fleet: Peers | None = None
        """Where this service is a node of one."""
        self.ferry: Ferry | None = None
        """Where channels of boxes go past this process to clients on other machines."""
        self._holdings: dict[str, Holding] = {}
        self._use: dict[str, _Use] = {}
        self._waiting: list[asyncio.Future[None]] = []

    # ---- what there is ----

    @property
    def is_draining(self) -> bool:
        return self.owners.is_draining

    def holdings(self, tenant: Tenant | None = None, dialect: str | None = None) -> list[Holding]:
        """Oldest first; without a tenant everybody's, for the service's own use."""
        return [
            one
            for one in self._holdings.values()
            if (tenant is None or one.tenant is tenant) and (dialect is None or one.dialect == dialect)
        ]

    def find(self, tenant: Tenant, holding_id: str) -> Holding:
        """`Refused` with 404, in the same words, for an unknown one and for somebody else's."""
        found = self._holdings.get(holding_id)
        if found is None or found.tenant is not tenant:
            raise not_found("lease")
        return found

    def find_any(self, holding_id: str) -> Holding | None:
        """For requests that prove by another secret than the tenant's token that they may."""
        return self._holdings.get(holding_id)

    # ---- leases ----

    async def hold(
        self, tenant: Tenant, take: Callable[[], Awaitable[Box]], *, dialect: str, ttl_s: float, extra: Mapping[str, Any] | None = None
    ) -> Holding:
        """Lease a box for `tenant`. `take` leases it, with `ttl_s=TTL_MAX_S`; the deadline is the holding's.

        `PoolClosed` while the service drains, `Refused` with 429 above the tenant's allowance.
        """
        self.checked_ttl(ttl_s)
        with self.starting(tenant):
            return self.take_over(tenant, await take(), dialect=dialect, ttl_s=ttl_s, extra=extra)

    def take_over(self, tenant: Tenant, box: Box, *, dialect: str, ttl_s: float, extra: Mapping[str, Any] | None = None) -> Holding:
        """A box that was leased with `starting` around it is a holding from here on."""
        holding = Holding(tenant, box, dialect, extra)
        self._holdings[holding.id] = holding
        self._of(tenant).leases += 1
        self.counters["leases", dialect] += 1
        self.extend(holding, ttl_s)
        return holding

    def checked_ttl(self, ttl_s: float) -> float:
        if require_duration("ttl_s", ttl_s) > self.settings.ttl_max_s:
            raise Refused(400, "UsageError", f"ttl_s may be {self.settings.ttl_max_s:g} at most, not {ttl_s:g}")
        return ttl_s

    def extend(self, holding: Holding, ttl_s: float) -> None:
        """Its deadline is `ttl_s` from now, whatever it was; 0 ends it at once."""
        if holding.timer is not None:
            holding.timer.cancel()
        holding.ends = time.time() + ttl_s
        if holding.ending is None:
            holding.timer = asyncio.get_running_loop().call_later(ttl_s, self._expire, holding)

    def keep(self, holding: Holding) -> None:
        """No deadline until the next `extend`: a paused sandbox has none."""
        if holding.timer is not None:
            holding.timer.cancel()
            holding.timer = None

    async def release(self, holding: Holding) -> None:
        """Returns when its sandbox is gone; safe to call twice, and at once."""
        await self.engine.finish(self._begin_end(holding))

    def _expire(self, holding: Holding) -> None:
        if holding.on_deadline is not None:
            holding.on_deadline()
            return
        log.info("lease %s of %s has ended by its time", holding.id, holding.tenant.name)
        self._begin_end(holding)

    def _begin_end(self, holding: Holding) -> asyncio.Task[None]:
        if holding.ending is None:
            holding.ending = self.engine.chore(self._end(holding))
        return holding.ending

    async def _end(self, holding: Holding) -> None:
        self.keep(holding)
        self._holdings.pop(holding.id, None)
        for tell in holding.on_end:
            tell()
        try:
            await holding.box.release()
        finally:
            self._of(holding.tenant).leases -= 1
            self.owners.closed(holding.box.ledger, holding.tenant.name)
            self._changed()

    def answered(self, tenant: Tenant, name: str, status: int, took_s: float) -> None:
        """A request was carried out."""
        self.observed.add(name, status, took_s)
        if self.spans is not None:
            self.spans.request(name, tenant.name, status, took_s)

    # ---- what may be asked for ----

    def admit(self, tenant: Tenant, spec: EnvSpec) -> None:  # noqa: ARG002  for those who tell tenants apart
        """`Refused` for an image or a repository that the operator did not allow, and for more than there is."""
        self.settings.admission.check(spec)

    def check_limits(self, limits: Limits | None) -> None:
        self.settings.admission.check_limits(limits)

    def check_network(self, network: str | Sequence[str] | None) -> None:
        self.settings.admission.check_network(network)

    def pools(self, tenant: Tenant) -> dict[str, Any]:
        """What the engine keeps ready, and what of it is the tenant's."""
        return {**self.shown(self.engine.pools()).as_dict(), "use": self.use(tenant)}

    @property
    def has_one_tenant(self) -> bool:
        return sum(1 for _ in self.tenants) <= 1

    def shown(self, pools: PoolStatus) -> PoolStatus:
        """What others asked for is nobody's business: recipes are told only where there is one tenant."""
        if self.has_one_tenant:
            return pools
        return replace(pools, stages=tuple(replace(stage, label="", key="") for stage in pools.stages))

    # ---- limits ----

    @contextlib.contextmanager
    def starting(self, tenant: Tenant, count: int = 1) -> Iterator[None]:
        """While sandboxes are being made for `tenant`."""
        if self.is_draining:
            raise PoolClosed("the server is stopping; connect to another, or to its successor")
        use, most = self._of(tenant), tenant.allowance
        if use.leases + use.starting + count > most.leases:
            raise self._busy(tenant, f"{most.leases} sandboxes are held by {tenant.name} already, or being made")
        if use.starting + count > most.starting:
            raise self._busy(tenant, f"{use.starting} sandboxes are being made for {tenant.name} already, and {most.starting} may be")
        use.starting += count
        try:
            yield
        finally:
            use.starting -= count
            self._changed()

    @contextlib.contextmanager
    def acting(self, tenant: Tenant) -> Iterator[None]:
        """While one request of `tenant` is carried out."""
        use = self._of(tenant)
        if use.actions >= tenant.allowance.actions:
            raise self._busy(tenant, f"{use.actions} requests of {tenant.name} are under way already")
        use.actions += 1
        try:
            yield
        finally:
            use.actions -= 1

    def _busy(self, tenant: Tenant, why: str) -> Refused:
        self.counters["refused", tenant.name] += 1
        return Refused(429, "TooMany", f"{why}: wait for some of them", retry_after_s=BUSY_S)

    def _of(self, tenant: Tenant) -> _Use:
        found = self._use.get(tenant.name)
        if found is None:
            found = self._use[tenant.name] = _Use()
        return found

    def leased(self, tenant: Tenant, change: int) -> None:
        """Leases of clients that hold their channels, more or less."""
        self._of(tenant).leases += change
        if change > 0:
            self.counters["leases", "channel"] += change

    def use(self, tenant: Tenant) -> dict[str, int]:
        use = self._of(tenant)
        return {"leases": use.leases, "starting": use.starting, "actions": use.actions}

    # ---- its end ----

    @property
    def leases(self) -> int:
        return len(self._holdings) + self.owners.leases

    def drain(self) -> None:
        """From here on there are no new leases."""
        self.owners.drain()

    async def wait_idle(self) -> None:
        """Return once nobody holds a lease or has asked for one."""
        while self._holdings or any(use.starting for use in self._use.values()):
            future = asyncio.get_running_loop().create_future()
            self._waiting.append(future)
            await future
        await self.owners.wait_idle()

    async def aclose(self) -> None:
        """Give back everything that anybody holds. Safe to call twice."""
        self.drain()
        for holding in self.holdings():
            holding.box.ledger.fault("its server was stopped")
            self._begin_end(holding)
        endings = [holding.ending for holding in self.holdings() if holding.ending is not None]
        await asyncio.gather(*endings, return_exceptions=True)
        await self.kept.aclose()
        await self.owners.aclose()
        if self.spans is not None:
            await asyncio.to_thread(self.spans.close)

    def _changed(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)
