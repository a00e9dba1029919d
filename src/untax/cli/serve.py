"""Run one engine for every process of this machine's user.

Programs reach it with untax.connect("unix:PATH"). SIGTERM and Ctrl-C end it: there are no new leases then, those that are held get --drain
seconds to end, and a second signal does not wait for them.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable

import untax
from untax import substrates
from untax.core.errors import UsageError
from untax.server.service import LEASE_S, Service
from untax.server.sole import only_server
from untax.server.unix import UnixListener

log = logging.getLogger("untax.server")

_DRAIN_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", required=True, metavar="PATH", help="where it listens; only this user can connect")
    parser.add_argument("--substrate", default="namespace", choices=substrates.names(), help="how sandboxes are run (default: %(default)s)")
    parser.add_argument("--state-dir", metavar="DIR", help="where the engine keeps its state")
    parser.add_argument(
        "--limits", choices=("warn", "strict"), default="strict", help="about a limit this host cannot enforce (default: %(default)s)"
    )
    parser.add_argument("--store-budget-mib", type=int, metavar="N", help="disk for layers beside those in use (default: all there is)")
    parser.add_argument(
        "--setup-network", action="append", metavar="POLICY", help="for set-up commands: none, all, or HOST:PORT; repeatable"
    )
    parser.add_argument("--setup-wheels", metavar="DIR", help="packages that pip and uv find in set-up commands")
    parser.add_argument(
        "--lease", type=float, default=LEASE_S, metavar="S", help="seconds a client may be without connection before it loses its leases (default: %(default)g)"
    )  # fmt: skip
    parser.add_argument(
        "--drain", type=float, default=_DRAIN_S, metavar="S", help="seconds that leases get to end on SIGTERM (default: %(default)g)"
    )


def carry_out(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.drain < float("inf"):
        raise UsageError(f"--drain must be a number of seconds, not {arguments.drain:g}")
    with only_server(arguments.state_dir, arguments.substrate) as tell:
        ended_by = asyncio.run(_serve(arguments, tell))
    return 130 if ended_by == signal.SIGINT else 0


async def _serve(arguments: argparse.Namespace, tell: Callable[[str], None]) -> signal.Signals:
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    network = arguments.setup_network
    async with untax.Engine(
        arguments.substrate,
        state_dir=arguments.state_dir,
        limits=arguments.limits,
        store_budget_mib=arguments.store_budget_mib,
        setup_network="none" if not network else network[0] if network in (["none"], ["all"]) else tuple(network),
        setup_wheels=arguments.setup_wheels,
    ) as engine:
        service = Service(engine, lease_s=arguments.lease)
        listener = UnixListener(service, arguments.socket)
        try:
            listener.start()
            tell(f"unix:{listener.path}")
            _say_ready(arguments, listener)
            ended_by = await signals.get()
            _notify("STOPPING=1")
            await _drained(service, signals, arguments.drain)
        finally:
            await service.aclose()
            listener.close()
    return ended_by


async def _drained(service: Service, signals: asyncio.Queue[signal.Signals], drain_s: float) -> None:
    service.drain()
    if not service.leases or not drain_s:
        return
    print(f"untax: {service.leases} leases have {drain_s:g} s to end", file=sys.stderr)
    idle, again = asyncio.ensure_future(service.wait_idle()), asyncio.ensure_future(signals.get())
    await asyncio.wait([idle, again], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (idle, again):
        task.cancel()
    await asyncio.wait([idle, again])


def _say_ready(arguments: argparse.Namespace, listener: UnixListener) -> None:
    """One line for whoever waits for it, and word to a service manager."""
    url = f"unix:{listener.path}"
    document = {
        "listening": url,
        "pid": os.getpid(),
        "substrate": arguments.substrate,
        "lease_s": arguments.lease,
        "release": untax.__version__,
    }
    print(
        json.dumps(document) if arguments.json else f"listening on {url} (process {os.getpid()}, substrate {arguments.substrate})",
        flush=True,
    )
    _notify("READY=1")


def _notify(state: str) -> None:
    """As sd_notify: a datagram to the socket that the service manager named."""
    named = os.environ.get("NOTIFY_SOCKET")
    if named:
        address = "\0" + named[1:] if named.startswith("@") else named
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            sock.send(state.encode())
