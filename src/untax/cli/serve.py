"""Run one engine for every process of this machine's user, and over HTTP for whoever has a token.

Programs reach it with untax.connect("unix:PATH") or untax.connect("http://…"), the SDKs of others over HTTP. Without --socket it listens on
loopback and prints what a client needs. SIGTERM and Ctrl-C end it: there are no new leases then, those that are held get --drain
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
from typing import TYPE_CHECKING, Any, Protocol

import untax
from untax import substrates
from untax.core.errors import UsageError
from untax.server.descriptors import allow_descriptors
from untax.server.service import LEASE_S, Service
from untax.server.sole import only_server
from untax.server.unix import UnixListener

if TYPE_CHECKING:
    from untax.cli._serve_http import Http

log = logging.getLogger("untax.server")

_DRAIN_S = 10.0
_PORT = 8765
_LEAST = "namespace"  # clients say what they accept, and none of them may choose to run with the server's own rights


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--socket", metavar="PATH", help="a Unix socket to listen at; only this user can connect")
    http = parser.add_argument_group("over HTTP", "on loopback without --socket, or with any of these")
    http.add_argument("--host", metavar="ADDRESS", help="where it listens (default: 127.0.0.1); others than loopback need TLS and tokens")
    http.add_argument("--port", type=int, metavar="N", help=f"(default: {_PORT}; 0: any)")
    http.add_argument(
        "--token-file", metavar="FILE", help="one token, or tables of tenants (default: a key of its own below the state directory)"
    )
    http.add_argument("--tls-cert", metavar="FILE", help="certificate chain, PEM")
    http.add_argument("--tls-key", metavar="FILE", help="its private key, PEM")
    http.add_argument(
        "--allow-image",
        action="append",
        metavar="PATTERN",
        help="images that clients may name beside host, as a shell's pattern; repeatable",
    )
    http.add_argument("--allow-repo", action="append", metavar="PATTERN", help="repositories that clients may name, by URL; repeatable")
    http.add_argument(
        "--allow-network",
        action="append",
        metavar="PATTERN",
        help="private and local addresses that clients' sandboxes may be let reach, as in 10.0.0.0/8:5432; repeatable",
    )
    http.add_argument("--any-key", action="store_true", help="whoever has any key is heard; on loopback, for throw-away use")
    http.add_argument(
        "--domain", metavar="NAME", help="every sandbox gets a name, PORT-ID.NAME; wants --tls-cert for *.NAME, and names that lead here"
    )
    http.add_argument("--base-image", default="host", metavar="IMAGE", help="what E2B's template 'base' stands for (default: %(default)s)")
    http.add_argument(
        "--image",
        action="append",
        metavar="NAME=IMAGE",
        help="what a name stands for in clients' builds, as in python:3.12=docker:python:3.12; repeatable",
    )
    parser.add_argument(
        "--substrate",
        default="namespace",
        choices=("auto", *substrates.names()),
        help="how sandboxes are run; auto: what suits each spec, namespace at least (default: %(default)s)",
    )
    parser.add_argument("--state-dir", metavar="DIR", help="where the engine keeps its state")
    parser.add_argument("--tied", action="store_true", help="end when standard input does, as for a program that runs a server of its own")
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
    allow_descriptors()
    with only_server(arguments.state_dir, arguments.substrate) as tell:
        ended_by = asyncio.run(_serve(arguments, tell))
    return 0 if ended_by == signal.SIGTERM else 128 + ended_by


async def _serve(arguments: argparse.Namespace, tell: Callable[[str], None]) -> signal.Signals:
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            loop.add_signal_handler(number, signals.put_nowait, number)
    if arguments.tied:
        _end_with_input(loop, lambda: signals.put_nowait(signal.SIGTERM))
    network = arguments.setup_network
    http = _http_settings(arguments)
    least: dict[str, Any] = {"least": _LEAST} if arguments.substrate == "auto" else {}
    async with untax.Engine(
        arguments.substrate,
        state_dir=arguments.state_dir,
        limits=arguments.limits,
        store_budget_mib=arguments.store_budget_mib,
        setup_network="none" if not network else network[0] if network in (["none"], ["all"]) else tuple(network),
        setup_wheels=arguments.setup_wheels,
        **least,
    ) as engine:
        service = Service(engine, lease_s=arguments.lease)
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(service.aclose)
            leases: Leases = service
            document: dict[str, object] = {}
            if arguments.socket is not None:
                listener = UnixListener(service, arguments.socket)
                listener.start()
                stack.callback(listener.close)
                document["listening"] = f"unix:{listener.path}"
            if http is not None:
                hosting, told = await http.start(service, stack)
                leases = hosting
                document = {"listening": told["url"], **document, **told}
            tell(str(document["listening"]))
            _say_ready(arguments, document)
            ended_by = await signals.get()
            _notify("STOPPING=1")
            await _drained(leases, signals, arguments.drain)
    return ended_by


def _end_with_input(loop: asyncio.AbstractEventLoop, end: Callable[[], None]) -> None:
    def readable() -> None:
        if not os.read(0, 4096):
            loop.remove_reader(0)
            end()

    try:
        loop.add_reader(0, readable)
    except OSError as exc:
        raise UsageError("--tied wants a pipe or a socket as standard input") from exc


class Leases(Protocol):
    """What can be drained: the service of the Unix socket, or that with everything over HTTP in it."""

    @property
    def leases(self) -> int: ...

    def drain(self) -> None: ...

    async def wait_idle(self) -> None: ...


def _http_settings(arguments: argparse.Namespace) -> Http | None:
    """Checked before anything is started; None when only the Unix socket was asked for."""
    named = (arguments.host, arguments.port, arguments.token_file, arguments.tls_cert, arguments.tls_key, arguments.domain)
    if arguments.socket is not None and all(one is None for one in named) and not arguments.any_key:
        return None
    try:
        from untax.cli._serve_http import Http
    except ModuleNotFoundError as exc:
        raise UsageError(f"HTTP needs the package {exc.name}: pip install 'untax[server]', or serve a --socket only") from exc
    return Http(
        host=arguments.host or "127.0.0.1",
        port=_PORT if arguments.port is None else arguments.port,
        token_file=arguments.token_file,
        tls_cert=arguments.tls_cert,
        tls_key=arguments.tls_key,
        any_key=arguments.any_key,
        state_dir=arguments.state_dir,
        allow_image=tuple(arguments.allow_image or ()),
        allow_repo=tuple(arguments.allow_repo or ()),
        allow_network=tuple(arguments.allow_network or ()),
        domain=arguments.domain,
        base_image=arguments.base_image,
        images=_images(arguments.image or []),
    )


def _images(given: list[str]) -> dict[str, str]:
    pairs = [one.partition("=") for one in given]
    for name, equals, image in pairs:
        if not name or not equals or not image:
            raise UsageError("--image wants NAME=IMAGE, as in python:3.12=docker:python:3.12")
    return {name: image for name, _, image in pairs}


async def _drained(service: Leases, signals: asyncio.Queue[signal.Signals], drain_s: float) -> None:
    service.drain()
    if not drain_s:
        return
    if service.leases:
        print(f"untax: {service.leases} leases have {drain_s:g} s to end", file=sys.stderr)
    idle, again = asyncio.ensure_future(service.wait_idle()), asyncio.ensure_future(signals.get())
    await asyncio.wait([idle, again], timeout=drain_s, return_when=asyncio.FIRST_COMPLETED)
    for task in (idle, again):
        task.cancel()
    await asyncio.wait([idle, again])


def _say_ready(arguments: argparse.Namespace, listening: dict[str, object]) -> None:
    """One line for whoever waits for it, what an SDK needs after it, and word to a service manager."""
    document = {
        **listening,
        "pid": os.getpid(),
        "substrate": arguments.substrate,
        "lease_s": arguments.lease,
        "release": untax.__version__,
    }
    exports = document.get("exports")
    if arguments.json:
        print(json.dumps(document), flush=True)
    else:
        lines = [f"listening on {document['listening']} (process {os.getpid()}, substrate {arguments.substrate})"]
        if isinstance(exports, dict):
            lines += [f"export {name}={value}" for name, value in exports.items()]
        print("\n".join(lines), flush=True)
    _notify("READY=1")


def _notify(state: str) -> None:
    """As sd_notify: a datagram to the socket that the service manager named."""
    named = os.environ.get("NOTIFY_SOCKET")
    if named:
        address = "\0" + named[1:] if named.startswith("@") else named
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock:
            sock.connect(address)
            sock.send(state.encode())
