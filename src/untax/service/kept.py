"""Whose snapshots are whose. What is saved outlives the server, so whose it is does too: in a file beside the store."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from untax.core.errors import BackendError, UntaxError, UsageError
from untax.layers._durable import replace_whole
from untax.service.errors import Refused, not_found
from untax.service.tenants import Tenant

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.snapshot import Snapshot


class Kept:
    """The snapshots of all tenants."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._path = Path(engine.warehouse.state_dir) / "service" / "snapshots.json"
        self._live: dict[str, tuple[str, Snapshot]] = {}
        self._saved: dict[str, str] = _read(self._path)
        self._writing = asyncio.Lock()
        self.others: list[Callable[[Tenant], int]] = []
        """That say how many a dialect keeps by itself; they count as these do."""

    def ids(self, tenant: Tenant) -> list[str]:
        mine = {snapshot_id for snapshot_id, (name, _) in self._live.items() if name == tenant.name}
        return sorted(mine | {snapshot_id for snapshot_id, name in self._saved.items() if name == tenant.name})

    def check_room(self, tenant: Tenant) -> None:
        most = tenant.allowance.snapshots
        if len(self.ids(tenant)) + sum(count(tenant) for count in self.others) >= most:
            raise Refused(429, "TooMany", f"{tenant.name} has {most} snapshots already: drop some of them", retry_after_s=1.0)

    def is_owned(self, tenant: Tenant, snapshot_id: str) -> bool:
        live = self._live.get(snapshot_id)
        return (live is not None and live[0] == tenant.name) or self._saved.get(snapshot_id) == tenant.name

    async def find(self, tenant: Tenant, snapshot_id: str) -> Snapshot:
        """`Refused` with 404 for one that is not this tenant's."""
        if not self.is_owned(tenant, snapshot_id):
            raise not_found("snapshot")
        live = self._live.get(snapshot_id)
        if live is not None:
            return live[1]
        try:
            return await self._engine.find_snapshot(snapshot_id)
        except UsageError:
            raise not_found("snapshot") from None

    async def own(self, tenant: Tenant, snapshot: Snapshot, *, save: bool = False) -> None:
        """It is `tenant`'s from here on; with `save` for longer than the server lives."""
        self._live[snapshot.id] = (tenant.name, snapshot)
        if save or snapshot.is_saved:
            await snapshot.save()
            await self.saved(tenant, snapshot.id)

    async def saved(self, tenant: Tenant, snapshot_id: str) -> None:
        self._saved[snapshot_id] = tenant.name
        await self._write()

    async def drop(self, tenant: Tenant, snapshot_id: str) -> None:
        snapshot = await self.find(tenant, snapshot_id)
        await snapshot.drop()
        await self.forget_dropped(snapshot_id)

    async def forget_dropped(self, snapshot_id: str) -> None:
        self._live.pop(snapshot_id, None)
        if self._saved.pop(snapshot_id, None) is not None:
            await self._write()

    async def aclose(self) -> None:
        """Those that are not saved go with the server."""
        live, self._live = self._live, {}
        for _, snapshot in live.values():
            if not snapshot.is_saved:
                try:
                    await snapshot.drop()
                except UntaxError:
                    pass  # the engine lets go of everything a moment later

    async def _write(self) -> None:
        async with self._writing:
            text = json.dumps({"untax_service_snapshots": 1, "snapshots": self._saved})
            try:
                await asyncio.to_thread(_replace, self._path, text)
            except OSError as exc:
                raise BackendError("", f"{self._path}: {exc.strerror}") from exc


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
        if found["untax_service_snapshots"] != 1:
            raise UsageError(f"{path} is of another release")
        return {str(name): str(whose) for name, whose in found["snapshots"].items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
        if isinstance(exc, UsageError):
            raise
        path.rename(path.with_suffix(".damaged"))  # nobody owns them then; the operator still finds them in the store
        return {}


def _replace(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, exist_ok=True)
    replace_whole(path, text.encode())
