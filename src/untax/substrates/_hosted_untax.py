"""Sandboxes of an `untax serve` over HTTP: `Engine("hosted:untax", url=…, token=…)`, or of a server of its own on loopback.

A sandbox is a lease over the one connection that is held, and its channel a lane of that; the service has greeted and configured the cell, and the channel goes on
from there. What the sandbox may reach is dialled by this engine, as everywhere. The incumbent path has no such connection: a `POST` makes the lease, and each
action is another. The service frees what a dead client held, so there is nothing to sweep.
"""

from __future__ import annotations

import asyncio
import importlib.util
import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from untax.core.errors import BackendError, CreateError, PoolError, SandboxLost, UsageError
from untax.core.spec import ISOLATION_LEVELS, EnvSpec, FrozenEnv
from untax.core.stream import ByteStream
from untax.core.substrate import Facts, Typical, Unenforced
from untax.substrates._host import cell_missing_reason
from untax.substrates._hosted_http import Api, PostedSandbox
from untax.substrates._hosted_server import Served, give_back, take

if TYPE_CHECKING:
    from untax.remote.lent import LentBox, LentEngine
    from untax.remote.web import WebAddress

_TTL_S = 7 * 86_400.0  # a lease of ours ends with its connection long before
_DIAL_S = 2.0
_NEEDS = ("starlette", "uvicorn", "httptools", "websockets")


def make(
    url: str | None = None,
    token: str | None = None,
    ca_file: str | None = None,
    substrate: str = "namespace",
    isolation: str | None = None,
    usd_per_s: float | None = None,
    state_dir: str | None = None,
) -> HostedUntax:
    """Without a `url` a server is started on loopback over `substrate`, for as long as the engine. The token is `UNTAX_TOKEN`'s unless it is given.

    `isolation` is what a server at `url` runs; it is asked, and says so, when the engine starts.
    """
    from untax import substrates
    from untax.remote.address import is_web, web_address

    if isolation is not None and isolation not in ISOLATION_LEVELS:
        raise UsageError(f"isolation must be one of {', '.join(ISOLATION_LEVELS)}, not {isolation!r}")
    if url is None:
        if substrate not in substrates.names():
            raise UsageError(f"there is no substrate {substrate!r} for a server; there are: {', '.join(substrates.names())}")
        if token is not None or ca_file is not None:
            raise UsageError("token and ca_file are for a server at a url; one that is started here has a token of its own")
        return HostedUntax(None, substrate, substrates.load(substrate).isolation, usd_per_s, state_dir)
    if not is_web(url):
        raise UsageError(f"{url!r}: write http://HOST:PORT or https://HOST:PORT, as `untax serve` prints it")
    return HostedUntax(web_address(url, token, ca_file), substrate, isolation or "namespace", usd_per_s, state_dir)


class HostedUntax:
    name = "hosted:untax"
    typical = Typical(start_s=0.01, action_s=0.0012)

    def __init__(self, address: WebAddress | None, substrate: str, isolation: str, usd_per_s: float | None, state_dir: str | None) -> None:
        self.isolation = isolation
        self.usd_per_s = usd_per_s
        """What a second of a sandbox costs, for projection and advice; None: not known."""
        self._given = address
        self._address = address
        self._substrate = substrate
        self._state_dir = state_dir
        self._served: Served | None = None
        self._engine: LentEngine | None = None
        self._api: Api | None = None

    def unavailable_reason(self) -> str | None:
        if self._given is not None:
            return _trouble(self._given)
        if missing := [name for name in _NEEDS if importlib.util.find_spec(name) is None]:
            return f"a server on loopback needs {', '.join(missing)}: pip install 'untax[server]', or name one with url="
        from untax import substrates

        return substrates.load(self._substrate).unavailable_reason() or cell_missing_reason()

    # ---- its own life ----

    async def start(self) -> None:
        from untax.remote.address import web_address
        from untax.remote.lent import LentEngine

        if self._engine is not None:
            return
        try:
            if self._given is None:
                served = self._served = await asyncio.to_thread(take, self._substrate, self._state_dir)
                self._address = web_address(served.url, served.token, None)
            address = self._address
            assert address is not None
            engine = LentEngine(str(address), token=address.token, ca_file=address.ca_file)
            await engine.start()
        except BaseException:
            await self._stop()
            raise
        self._engine, self._api = engine, Api(address)
        self.isolation = engine.server.isolation

    async def aclose(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.aclose()
        await self._stop()

    async def _stop(self) -> None:
        if self._api is not None:
            self._api.close()
        served, self._served = self._served, None
        if served is not None:
            await asyncio.to_thread(give_back, served)

    # ---- sandboxes ----

    async def create(self, spec: EnvSpec) -> HeldSandbox:
        engine = self._engine
        if engine is None:
            raise BackendError("", "hosted:untax is not started, or closed")
        # Whatever else the spec says is put in place over the channel by the engine that holds it.
        wanted = replace(spec, repo=None, setup=(), env=FrozenEnv(), workdir=None, network="none")
        try:
            box = await engine.acquire(wanted, ttl_s=_TTL_S)
        except PoolError as exc:
            raise CreateError("", f"{engine.url}: {exc}") from exc
        except SandboxLost as exc:
            raise CreateError("", f"{engine.url}: {exc.message}") from exc
        return HeldSandbox(_lent(box), engine.server.substrate)

    async def create_incumbent(self, spec: EnvSpec) -> PostedSandbox:
        """As whoever has no held connection makes one. Its network is the service's to dial."""
        if self._api is None:
            raise BackendError("", "hosted:untax is not started, or closed")
        return await PostedSandbox.make(self._api, spec)


class HeldSandbox:
    """A lease of the service, whose channel is ours."""

    def __init__(self, box: LentBox, substrate: str) -> None:
        self.id = box.id
        self._box = box
        self._facts = box.facts
        self.unenforced: Sequence[Unenforced] = box.ledger.unenforced
        self.detail: Mapping[str, Any] = {"provider": "untax", "server's substrate": substrate, "server's pool": box.served_by}
        self.control_plane_ns = int(max(0.0, box.came_s - box.raised_s) * 1e9)

    def facts(self) -> Facts:
        return self._facts

    async def wait_ready(self) -> None:
        pass  # the service answers when it runs

    async def open_channel(self) -> ByteStream:
        if not self._box.is_live:
            raise SandboxLost(self.id, "the service has given it up")
        return self._box.lane

    async def provide_worker(self, user: str) -> None:
        await self._box.provide_worker(user)

    async def pause(self) -> None:
        await self._box.pause()

    async def resume(self) -> None:
        await self._box.resume()

    async def destroy(self) -> None:
        await self._box.release()


def _lent(box: object) -> LentBox:
    from untax.remote.lent import LentBox

    assert isinstance(box, LentBox)
    return box


def _trouble(address: WebAddress) -> str | None:
    try:
        with socket.create_connection((address.host, address.port), timeout=_DIAL_S):
            return None
    except OSError as exc:
        return f"no server answers at {address} ({exc.strerror or exc}); start one: untax serve"
