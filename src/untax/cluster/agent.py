"""One node's part of a fleet: an engine, served to clients of the same node on a Unix socket and to those of others over TLS. No Ray in here."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import secrets
import shutil
import ssl
import sys
import tempfile
from pathlib import Path

import untax
from untax.cluster import transfer
from untax.cluster.gauge import Gauge
from untax.cluster.plan import Plan, Post
from untax.cluster.reaper import Reaper
from untax.cluster.terms import Member, Roll
from untax.cluster.transfer import Transfer
from untax.cluster.trust import pinned
from untax.core.errors import UsageError
from untax.core.spec import Limits
from untax.engine import Engine
from untax.leases import usual_isolation
from untax.remote.address import checked_path
from untax.remote.boot import boot_id
from untax.server.descriptors import allow_descriptors
from untax.server.service import Service
from untax.server.sole import only_server
from untax.server.unix import UnixListener
from untax.service.admission import Admission
from untax.service.app import build
from untax.service.ferry import Ferry
from untax.service.fleet import NodeStatus, Peer, Peers
from untax.service.held import take_over
from untax.service.hosting import Hosting, Settings
from untax.service.listen import Address, HttpListener
from untax.service.tenants import Allowance, Tenant, Tenants, digest
from untax.substrates._host import ensure_private_dir

log = logging.getLogger("untax.cluster")

_MOST = sys.maxsize


class Agent:
    """From `start` to `aclose`. Clients with the fleet's token may do what the engine's own process may: they are the trainer's workers."""

    def __init__(self, plan: Plan, post: Post) -> None:
        self._plan = plan
        self._post = post
        self._stack = contextlib.AsyncExitStack()
        self._hosting: Hosting | None = None
        self._transfer: Transfer | None = None
        self.gauge = Gauge()
        self.member: Member | None = None

    async def start(self) -> Member:
        """Raises what the engine raises where it cannot be: `SubstrateUnavailable`, `UsageError`, `BackendError`."""
        async with contextlib.AsyncExitStack() as stack:
            self.member = await self._start(stack)
            self._stack = stack.pop_all()
        return self.member

    async def aclose(self) -> None:
        """Give back everything that anybody holds, and end. Safe to call twice."""
        await self._stack.aclose()

    # ---- for whoever keeps the fleet ----

    def meet(self, roll: Roll) -> None:
        """Who is in the fleet from here on, this node among them, and who is not."""
        if self._hosting is not None and self._hosting.fleet is not None:
            introduce(self._hosting.fleet, roll)
        if self._transfer is not None:
            self._transfer.meet([transfer.Peer.at(one.node_id, one.layers) for one in roll.members if one.layers])

    @property
    def now(self) -> Member | None:
        """The member that it is, drained or not."""
        return self.member.drained() if self.member is not None and self.is_draining else self.member

    @property
    def leases(self) -> int:
        return 0 if self._hosting is None else self._hosting.leases

    @property
    def is_draining(self) -> bool:
        return self._hosting is not None and self._hosting.is_draining

    def drain(self) -> None:
        """No new leases from here on."""
        if self._hosting is not None:
            self._hosting.drain()

    async def wait_idle(self) -> None:
        """Return once nobody holds a lease."""
        if self._hosting is not None:
            await self._hosting.wait_idle()

    def rest(self, idle_s: float) -> float:
        """No new leases, if nobody has needed the node for so long: 0 then, and else for how much longer that has to be so."""
        left_s = idle_s - self.gauge.idle_s if not self.leases else idle_s
        if left_s > 0:
            return left_s
        self.drain()
        return 0.0

    # ---- inside ----

    async def _start(self, stack: contextlib.AsyncExitStack) -> Member:
        plan, post = self._plan, self._post
        allow_descriptors()
        state = plan.state_dir_of(post.node_id)
        ensure_private_dir(state)
        self._hold(stack, state)
        place = _place(stack, state, plan.name)
        stack.callback(Reaper(plan.substrate, state, place).done)
        engine = Engine(plan.substrate, state_dir=state, **plan.options)
        await engine.start()
        stack.push_async_callback(engine.aclose)
        engine.check_host()  # a node that would refuse every lease is out, and says why
        service = Service(engine, lease_s=plan.lease_s)
        stack.push_async_callback(service.aclose)
        service.views.watch(self.gauge, 0, is_resting=True)  # nodes are started in minutes
        unix = UnixListener(service, place / "s")
        unix.start()
        stack.callback(unix.close)
        url = await self._listen(stack, engine, service, place)
        return Member(
            node_id=post.node_id,
            name=post.name,
            address=post.address,
            url=url,
            socket=str(unix.path),
            boot_id=boot_id(),
            version=untax.__version__,
            substrate=engine.offer.name,
            isolation=engine.offer.isolation,
            usual=usual_isolation(engine.offer),
            layers=self._transfer.address if self._transfer is not None else "",
            agent=secrets.token_hex(8),
        )

    def _hold(self, stack: contextlib.AsyncExitStack, state: Path) -> None:
        try:
            stack.enter_context(only_server(str(state), self._plan.substrate))(f"fleet {self._plan.name}, node {self._post.name}")
        except UsageError as exc:
            if "already" not in str(exc):
                raise
            raise UsageError(f"{exc}; nodes that share a machine need a state_dir with {{node}} in it") from None

    async def _listen(self, stack: contextlib.AsyncExitStack, engine: Engine, service: Service, place: Path) -> str:
        """TLS on the node's own address and no other, with a token for everything that is said there."""
        certificate, key = self._post.identity.write(place)
        address = Address(self._post.address, self._plan.port, str(certificate), str(key))
        address.check_safe(has_tokens=True, any_key=False)
        tenants = Tenants([(Tenant("fleet", _everything(), is_trusted=True), digest(self._post.token))])
        self._hosting = hosting = Hosting(engine, tenants, Settings(admission=_anything()), owners=service)
        hosting.fleet = Peers(self._post.token, pinned(self._post.authority), self._plan.name)
        hosting.ferry = Ferry()
        stack.push_async_callback(hosting.ferry.aclose)
        listener = HttpListener(build(hosting), address, functools.partial(take_over, hosting))
        stack.push_async_callback(listener.close)
        stack.push_async_callback(hosting.aclose)
        await listener.start()
        if engine.warehouse.has_stages:
            await self._travel(stack, engine, certificate, key)
        for path in (certificate, key):
            path.unlink()  # read, and needed by nobody else
        return listener.url

    async def _travel(self, stack: contextlib.AsyncExitStack, engine: Engine, certificate: Path, key: Path) -> None:
        """Give the store's layers to other nodes, and have theirs."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.load_cert_chain(certificate, key)
        post, loop = self._post, asyncio.get_running_loop()
        travel = self._transfer = Transfer(
            post.node_id,
            engine.warehouse.store,
            server_context=context,
            client_context=pinned(post.authority),
            token=post.token,
            host=post.address,
            port=self._plan.layers_port,
            untold_uses=engine.warehouse.untold_uses,
            arrived=lambda keys: loop.call_soon_threadsafe(engine.pooling.came, keys),
        )
        travel.start()
        stack.push_async_callback(asyncio.to_thread, travel.close)
        engine.warehouse.fetch_from(travel)


def introduce(peers: Peers, roll: Roll) -> None:
    """Who is asked how it is doing, and who is out and why."""
    peers.meet(
        [Peer(one.node_id, one.name, one.url, one.is_draining) for one in roll.members],
        [NodeStatus(one.node_id, one.name, trouble=one.reason) for one in roll.refusals],
        roll.wanted,
    )


def _place(stack: contextlib.AsyncExitStack, state: Path, name: str) -> Path:
    """A directory for the socket and, for a moment, the key; elsewhere where the name of a socket would be too long."""
    path = state / f"fleet-{name}"
    try:
        checked_path(path / "s")
        ensure_private_dir(path)
    except UsageError:
        if path.exists():
            raise
        path = Path(tempfile.mkdtemp(prefix=f"untax-{os.getuid()}-"))
    stack.callback(shutil.rmtree, path, ignore_errors=True)
    return path


def _anything() -> Admission:
    """What an embedded engine would not refuse either."""
    return Admission(("*",), ("*",), private=("*:*",), most=Limits(cpus=4096.0, memory_mib=1 << 30, disk_mib=1 << 30, pids=1 << 22))


def _everything() -> Allowance:
    return Allowance(**dict.fromkeys(Allowance.__dataclass_fields__, _MOST))
