"""One engine on each node of a Ray cluster, used as one: bring it up, look at it, drain a node, take it down.

A fleet that `up` made stays until `down`, whoever uses it (docs/fleet.md). Programs join it with untax.Fleet().
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from untax import substrates
from untax.cli._fleet_table import fleet_lines
from untax.core.errors import UsageError
from untax.pool.options import PoolOptions

if TYPE_CHECKING:
    from untax.cluster.operate import FleetStatus

_LOOK_S = 1.0  # how often a live table asks the nodes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, act: Callable[[argparse.Namespace], Coroutine[Any, Any, int]], summary: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=summary, description=summary)
        # Not to hide what was said before the action.
        made.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document on standard output")
        made.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log what happens on standard error")
        made.add_argument(
            "--address", default="auto", metavar="HOST:PORT", help="of the Ray cluster's head (default: this machine's cluster)"
        )
        made.add_argument("--name", default="untax", help="of the fleet (default: %(default)s)")
        made.set_defaults(act=act)
        return made

    up = action("up", _up, "start an engine on every node, now and whenever one joins; it stays until `down`")
    up.add_argument(
        "--substrate",
        default="namespace",
        choices=substrates.names(),
        metavar="NAME",
        help="of every node (default: %(default)s)",
    )
    up.add_argument(
        "--state-dir", metavar="DIR", help="on each node; {node} in it stands for the node's id (default: where engines keep it)"
    )
    up.add_argument("--limits", choices=("strict", "warn"), default="strict", help="when a node cannot enforce one (default: %(default)s)")
    up.add_argument("--store-budget-mib", type=int, metavar="N", help="for the layers of each node")
    up.add_argument("--sandboxes", type=int, metavar="N", help="that leases and pools of one node may have at once (default: no bound)")
    up.add_argument(
        "--memory-mib", type=int, metavar="N", help="that the memory limits of one node's sandboxes may add up to (default: no bound)"
    )
    up.add_argument("--idle-s", type=float, metavar="S", help="let Ray take nodes away that had no lease for so long (default: never)")
    up.add_argument("--min-nodes", type=int, default=1, metavar="N", help="that stay however idle they are (default: %(default)s)")
    up.add_argument("--max-nodes", type=int, metavar="N", help="ask Ray's autoscaler for no more than so many in all")
    up.add_argument(
        "--node-resources", type=_resources, metavar="JSON", help="of one more node, as Ray counts them (default: the CPUs of the smallest)"
    )
    up.add_argument(
        "--port",
        type=int,
        default=0,
        metavar="N",
        help="where agents listen, the same on every node; for layers at the one after it (default: any two)",
    )
    status = action("status", _status, "show every node: leases, what is idle at which stage, what is starting, who is draining or out")
    status.add_argument(
        "-w", "--watch", action="store_true", help="go on showing it until interrupted; with --json, a line for each change"
    )
    drain = action("drain", _drain, "give no new leases on a node, and end its agent once the last one is over")
    drain.add_argument("node", metavar="NODE", help="its name, address, or the beginning of its id")
    drain.add_argument("--no-wait", action="store_true", help="return at once, not when the last lease is over")
    action("down", _down, "end every agent and everything it holds")
    given = action("access", _access, "write what Prometheus needs to scrape the fleet: token, certificate, configuration")
    given.add_argument("directory", metavar="DIR", help="made if it is missing; its files are for its owner only")


def _resources(text: str) -> dict[str, float]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"not a JSON object such as '{{\"CPU\": 8}}': {text!r}")
    return found


def carry_out(arguments: argparse.Namespace) -> int:
    from untax.cluster import terms
    from untax.cluster.access import require_ray

    require_ray()
    terms.checked_name(arguments.name)
    arguments.out = sys.stdout
    with contextlib.redirect_stdout(sys.stderr):  # where Ray prints what happens to its nodes
        code: int = asyncio.run(arguments.act(arguments))
    return code


async def _up(arguments: argparse.Namespace) -> int:
    from untax.cluster import operate
    from untax.cluster.plan import Plan
    from untax.cluster.scaling import Scaling

    options: dict[str, Any] = {"limits": arguments.limits}
    if arguments.store_budget_mib is not None:
        if arguments.store_budget_mib < 1:
            raise UsageError(f"--store-budget-mib must be a whole number of MiB from 1 on, not {arguments.store_budget_mib}")
        options["store_budget_mib"] = arguments.store_budget_mib
    if not 0 <= arguments.port <= 65_534:
        raise UsageError(f"--port must be between 0 and 65534, not {arguments.port}: layers come at the one after it")
    bounds = {"entries": arguments.sandboxes, "memory_mib": arguments.memory_mib}
    if bounds := {name: value for name, value in bounds.items() if value is not None}:
        options["pool"] = PoolOptions(**bounds)
    scaling = Scaling(arguments.node_resources, arguments.min_nodes, arguments.max_nodes, arguments.idle_s)
    plan = Plan(arguments.name, arguments.substrate, arguments.state_dir, options, port=arguments.port, scaling=scaling)
    if not arguments.json:
        print(f"untax: bringing the fleet {arguments.name!r} up", file=sys.stderr)
    async with operate.up(arguments.address, plan) as (operated, is_new):
        if not is_new:
            there = await operated.plan()
            if replace(there, options=dict(there.options)) != plan:
                raise UsageError(
                    f"the fleet {plan.name!r} is up already, with {there.substrate}, state_dir={there.state_dir!r}, port {there.port}, {dict(there.options)} and {there.scaling}: "
                    "take it down first, or give this one another --name"
                )
        status = await operated.status()
    _show(status, arguments, is_new=is_new)
    return 0


async def _status(arguments: argparse.Namespace) -> int:
    from untax.cluster import operate

    shown: FleetStatus | None = None
    async with operate.operating(arguments.address, arguments.name) as operated:
        while True:
            found = await operated.status()
            if found != shown:
                _show(found, arguments)
                shown = found
            if not arguments.watch:
                return 0
            await asyncio.sleep(_LOOK_S)


async def _drain(arguments: argparse.Namespace) -> int:
    from untax.cluster import operate

    async with operate.operating(arguments.address, arguments.name) as operated:
        node = await operated.find(arguments.node)
        if not arguments.no_wait and not arguments.json:
            print(f"untax: waiting for the leases of {node.name}; Ctrl-C leaves it draining", file=sys.stderr)
        await operated.drain(node.node_id, wait=not arguments.no_wait)
    said = {"fleet": arguments.name, "node": node.name, "node_id": node.node_id, "drained": not arguments.no_wait}
    _say(arguments, said, f"{node.name} is {'draining' if arguments.no_wait else 'drained'}")
    return 0


async def _down(arguments: argparse.Namespace) -> int:
    from untax.cluster import operate

    async with operate.operating(arguments.address, arguments.name) as operated:
        nodes = [one.name for one in (await operated.roll()).members]
        await operated.down()
    _say(arguments, {"fleet": arguments.name, "nodes": nodes}, f"the fleet {arguments.name!r} is down, {len(nodes)} agents ended")
    return 0


async def _access(arguments: argparse.Namespace) -> int:
    from untax.cluster import operate

    async with operate.operating(arguments.address, arguments.name) as operated:
        written = [str(path) for path in await operated.write_access(Path(arguments.directory))]
    if not arguments.json:
        print(f"untax: for this user only; Prometheus reads them after: chown -R prometheus: {arguments.directory}", file=sys.stderr)
    _say(arguments, {"fleet": arguments.name, "written": written}, "\n".join(written))
    return 0


def _show(status: FleetStatus, arguments: argparse.Namespace, *, is_new: bool | None = None) -> None:
    title = f"fleet {status.fleet} on {status.ray_address} (untax {status.release}, {status.substrate or 'no substrate'})"
    clear = "\x1b[H\x1b[J" if getattr(arguments, "watch", False) and arguments.out.isatty() else ""
    document = status.as_dict() if is_new is None else {**status.as_dict(), "is_new": is_new}
    _say(arguments, document, clear + "\n".join(fleet_lines(title, status.nodes, status.wanted)))


def _say(arguments: argparse.Namespace, document: dict[str, Any], text: str) -> None:
    print(json.dumps(document) if arguments.json else text, file=arguments.out, flush=True)
