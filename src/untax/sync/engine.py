"""The engine, blocking, with its leases and snapshots."""

from __future__ import annotations

import os
from builtins import list as list_
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from untax.box import Box as AsyncBox
from untax.core.errors import UsageError
from untax.core.spec import EnvSpec, Limits, Network
from untax.core.substrate import Substrate
from untax.leases import DEFAULT_TTL_S
from untax.leases import Lease as AsyncLease
from untax.pool.status import PoolStatus
from untax.remote.engine import RemoteSubstrate
from untax.snapshot import Snapshot as AsyncSnapshot
from untax.sync.box import Box
from untax.sync.direct import DirectAutoEngine, DirectEngine, DirectRemoteEngine
from untax.sync.lease import Lease
from untax.sync.loop import Loop
from untax.sync.snapshot import Snapshot

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.sources import Progress
    from untax.sync.fleet import DirectFleet


class Engine:
    """As `untax.Engine`: `with`, or `start()` and `aclose()`."""

    def __init__(self, substrate: str | Substrate = "namespace", **options: Any) -> None:
        self._begin(DirectAutoEngine(substrate, **options) if substrate == "auto" else DirectEngine(substrate, **options))

    def _begin(self, inner: DirectEngine | DirectAutoEngine | DirectRemoteEngine | DirectFleet) -> None:
        self._inner = inner
        self._loop: Loop | None = None

    @property
    def substrate(self) -> Substrate | RemoteSubstrate:
        return self._inner.substrate

    def start(self) -> None:
        if self._loop is not None:
            raise UsageError("this engine is running; make a new one")
        loop = self._inner.thread = Loop()
        try:
            loop.run(self._inner.start())
        except BaseException:
            loop.close()
            raise
        self._loop = loop

    def aclose(self) -> None:
        """Release every box and end. Safe to call twice."""
        if self._loop is not None:
            self._loop.check_process()  # the loop of a fork is its parent's, and not to be touched
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.run(self._inner.aclose())
            finally:
                loop.close()
                self._inner.threads.shutdown(wait=False)

    close = aclose

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.aclose()

    def lease(
        self,
        spec: EnvSpec | None = None,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[Box]:
        """`with engine.lease(spec) as box`."""
        inner = self._inner.lease(
            spec, env=env, user=user, files=files, limits=limits, network=network, wait_s=wait_s, ttl_s=ttl_s
        )  # fmt: skip
        return self._lease(inner)

    def acquire(
        self,
        spec: EnvSpec | None = None,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Box:
        return self.lease(
            spec, env=env, user=user, files=files, limits=limits, network=network, wait_s=wait_s, ttl_s=ttl_s
        ).get()  # fmt: skip

    def prepare(self, spec: EnvSpec, *, progress: Progress | None = None) -> Prepared:
        """As `untax.Engine.prepare`; `progress` is called in the engine's own thread."""
        return self._running().run(self._inner.prepare(spec, progress=progress))

    def warm(self, spec: EnvSpec | Snapshot | str | None = None, n: int = 1, *, limits: Limits | None = None) -> None:
        """As `untax.Engine.warm`: returns once they are ready."""
        self._running().run(self._inner.warm(spec._inner if isinstance(spec, Snapshot) else spec, n, limits=limits))

    def pools(self) -> PoolStatus:
        async def asked() -> PoolStatus:
            return await self._inner.pools()

        return self._running().run(asked())

    def fork(
        self,
        snapshot: Snapshot | str,
        n: int,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[list_[Box]]:
        """`with engine.fork(snapshot, 8) as group`."""
        inner = self._inner.fork(
            _unwrapped(snapshot), n, env=env, user=user, files=files, limits=limits, network=network, wait_s=wait_s, ttl_s=ttl_s
        )  # fmt: skip

        async def taken(loop: Loop) -> list_[Box]:
            return [Box(loop, box) for box in await inner]

        return Lease(self._running, taken, lambda boxes: boxes)

    def restore(
        self,
        snapshot: Snapshot | str,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[Box]:
        """`with engine.restore(snapshot) as box`."""
        inner = self._inner.restore(
            _unwrapped(snapshot), env=env, user=user, files=files, limits=limits, network=network, wait_s=wait_s, ttl_s=ttl_s
        )  # fmt: skip
        return self._lease(inner)

    def grader(
        self, box: Box, take: Sequence[str] = ("src/**",), *, wait_s: float | None = None, ttl_s: float = DEFAULT_TTL_S
    ) -> Lease[Box]:
        """`with engine.grader(box, take=("src/**",)) as clean`."""
        inner = self._inner.grader(box._inner, take, wait_s=wait_s, ttl_s=ttl_s)
        return self._lease(inner)

    def find_snapshot(self, snapshot_id: str) -> Snapshot:
        loop = self._running()
        return Snapshot(loop, loop.run(self._inner.find_snapshot(snapshot_id)))

    @property
    def quarantined(self) -> tuple[str, ...]:
        if not isinstance(self._inner, (DirectEngine, DirectAutoEngine)):
            raise UsageError("a server's quarantine is its own; `untax serve` logs it")
        return self._inner.quarantined

    def _lease(self, inner: AsyncLease[AsyncBox]) -> Lease[Box]:
        async def taken(loop: Loop) -> Box:
            return Box(loop, await inner)

        return Lease(self._running, taken, lambda box: (box,))

    def _running(self) -> Loop:
        if self._loop is None:
            raise UsageError("the engine is not started, or closed: use `with Engine()`")
        return self._loop


class RemoteEngine(Engine):
    """As `untax.connect` gives it, blocking."""

    _inner: DirectRemoteEngine

    def __init__(self, url: str, *, token: str | None = None, ca_file: str | os.PathLike[str] | None = None) -> None:
        self._begin(DirectRemoteEngine(url, token=token, ca_file=ca_file))

    def ledgers(self) -> tuple[dict[str, Any], ...]:
        return self._running().run(self._inner.ledgers())


def connect(url: str, *, token: str | None = None, ca_file: str | os.PathLike[str] | None = None) -> RemoteEngine:
    """`with untax.sync.connect("unix:PATH") as engine`: the engine of `untax serve --socket PATH`, used as one's own; as `untax.connect`."""
    return RemoteEngine(url, token=token, ca_file=ca_file)


def _unwrapped(snapshot: Snapshot | str) -> AsyncSnapshot | str:
    return snapshot._inner if isinstance(snapshot, Snapshot) else snapshot
