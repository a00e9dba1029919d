"""A snapshot that a server keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from untax.core.errors import ProtocolError, UsageError
from untax.core.spec import EnvSpec
from untax.snapshot import How, Snapshot

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.ground import Ground
    from untax.remote.engine import RemoteEngine


class RemoteSnapshot(Snapshot):
    """Lasts until `drop`, or as long as the connection of whoever took it; saved, until it is dropped."""

    def __init__(self, engine: RemoteEngine, data: Mapping[str, Any]) -> None:
        snapshot_id, spec, how, elapsed_s, is_saved = (data.get(name) for name in ("snapshot", "spec", "how", "elapsed_s", "is_saved"))
        if not isinstance(snapshot_id, str) or not isinstance(spec, EnvSpec) or not isinstance(elapsed_s, (int, float)):
            raise ProtocolError("a snapshot without its facts")
        self.id = snapshot_id
        self.spec = spec
        self.how = cast("How", how)
        self.elapsed_s = float(elapsed_s)
        self._remote = engine
        self._is_saved = is_saved is True
        self._is_dropped = False

    async def save(self) -> str:
        if not self._is_saved:
            self.check_kept()
            await self._remote.ask("save", snapshot=self.id)
            self._is_saved = True
        return self.id

    async def drop(self) -> None:
        if not self._is_dropped:
            self._is_dropped = True
            await self._remote.ask("drop", snapshot=self.id, is_saved=self._is_saved)

    def check_kept(self) -> None:
        if self._is_dropped:
            raise UsageError(f"snapshot {self.id} was dropped; save() what is to last")

    @property
    def engine(self) -> Engine:
        return cast("Engine", self._remote)  # only ever compared

    @property
    def ground(self) -> Ground:
        raise UsageError(f"snapshot {self.id} is a server's; save() it to use it in another engine")
