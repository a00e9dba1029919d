"""A tenant's owner: what clients that hold channels may do, by the same rules as over plain HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from untax.core.errors import PoolTimeout, UntaxError, UsageError
from untax.core.spec import EnvSpec
from untax.pool.status import PoolStatus
from untax.service.errors import Refused
from untax.service.hosting import Hosting
from untax.service.tenants import Tenant

if TYPE_CHECKING:
    from untax.snapshot import Snapshot


class TenantGate:
    """`untax.server.owners.Gate` for one tenant."""

    def __init__(self, hosting: Hosting, tenant: Tenant) -> None:
        self.name = tenant.name
        self._hosting = hosting
        self._tenant = tenant

    def admit(self, spec: EnvSpec) -> None:
        try:
            self._hosting.admit(self._tenant, spec)
        except Refused as exc:
            raise _told(exc) from exc

    @contextlib.contextmanager
    def starting(self, count: int = 1) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._hosting.starting(self._tenant, count))
            except Refused as exc:
                raise _told(exc) from exc
            yield

    def leased(self, change: int) -> None:
        self._hosting.leased(self._tenant, change)

    def check_snapshot(self, snapshot_id: str) -> None:
        if not self._hosting.kept.is_owned(self._tenant, snapshot_id):
            raise UsageError(f"there is no snapshot {snapshot_id[:80]!r}; save() what is to last")

    def check_room(self) -> None:
        try:
            self._hosting.kept.check_room(self._tenant)
        except Refused as exc:
            raise _told(exc) from exc

    async def took_snapshot(self, snapshot: Snapshot, *, is_saved: bool) -> None:
        await self._hosting.kept.own(self._tenant, snapshot, save=is_saved)

    def dropped_snapshot(self, snapshot_id: str) -> None:
        self._hosting.engine.chore(self._hosting.kept.forget_dropped(snapshot_id))

    def shown(self, pools: PoolStatus) -> PoolStatus:
        return self._hosting.shown(pools)

    def check_watching(self) -> None:
        if not self._hosting.has_one_tenant:
            raise UsageError("what others have built is nobody's business: a server with several tenants is watched over its Unix socket")


def _told(exc: Refused) -> UntaxError:
    """As the client's own release knows it."""
    return PoolTimeout(str(exc)) if exc.retryable else UsageError(str(exc))
