"""Warm pools: see how those of the running engines are doing, or simulate a fleet that a file describes.

Policies are compared on the same arrivals, nodes, stores and pools; the outcome follows from the file and the seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from untax.cli._pool_table import status_lines
from untax.core.errors import UsageError
from untax.pool.record import Watched, running
from untax.pool.simulation import POLICIES, Description, Outcome, drawn, read_fleet, recorded, report, simulate
from untax.substrates._host import chosen_state_dir

_LOOK_S = 0.5  # how often a table is brought up to date: engines write no more often


def add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)

    def action(name: str, act: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=summary, description=summary)
        # Not to hide what was said before the action.
        made.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print one JSON document on standard output")
        made.add_argument("-v", "--verbose", action="store_true", default=argparse.SUPPRESS, help="log what happens on standard error")
        made.set_defaults(act=act)
        return made

    watched = action("status", _status, "show the pools of the engines that run now: what is idle, leased and waiting at which stage")
    watched.add_argument("--state-dir", metavar="DIR", help="of the engines (default: UNTAX_STATE_DIR, or where engines keep it)")
    watched.add_argument(
        "-w", "--watch", action="store_true", help="go on showing it until interrupted; with --json, a line for each change"
    )
    simulated = action("simulate", _simulate, "play rollouts through a fleet that a file describes, with each placement policy")
    simulated.add_argument("file", metavar="FILE.toml", help="nodes, stage costs and arrivals (docs/pools.md)")
    simulated.add_argument("--policy", action="append", choices=tuple(POLICIES), help="repeatable (default: all)")
    simulated.add_argument("--seed", type=int, default=1, help="of everything that is drawn (default: %(default)s)")
    simulated.add_argument("--rollouts", type=int, metavar="N", help="how many are drawn, whatever the file says")
    simulated.add_argument("--grid", action="store_true", help="every Zipf exponent with every utilisation of the file's [grid]")


def carry_out(arguments: argparse.Namespace) -> int:
    code: int = arguments.act(arguments)
    return code


def _status(arguments: argparse.Namespace) -> int:
    state_dir = chosen_state_dir(arguments.state_dir)
    shown: list[Watched] | None = None
    while True:
        found = running(state_dir)
        if found != shown:
            _show(found, state_dir, arguments)
            shown = found
        if not arguments.watch:
            return 0
        time.sleep(_LOOK_S)


def _show(found: list[Watched], state_dir: Path, arguments: argparse.Namespace) -> None:
    if arguments.json:
        engines = [
            {"pid": one.pid, "started_at": one.started_at, "updated_at": one.updated_at, "pool": one.pool.as_dict()} for one in found
        ]
        print(json.dumps({"state_dir": str(state_dir), "engines": engines}), flush=True)
        return
    lines = [line for one in found for line in status_lines(one)]
    if not found:
        lines = [f"no engine with a pool runs on {state_dir}"]
    clear = "\x1b[H\x1b[J" if arguments.watch and sys.stdout.isatty() else ""
    print(clear + "\n".join(lines), flush=True)


def _simulate(arguments: argparse.Namespace) -> int:
    description = read_fleet(Path(arguments.file))
    if arguments.rollouts is not None:
        description = description.with_rollouts(arguments.rollouts)
    policies = [name for name in POLICIES if not arguments.policy or name in arguments.policy]
    if arguments.grid:
        return _grid(arguments, description, policies)
    outcomes = _outcomes(description, policies, arguments.seed)
    if arguments.json:
        print(json.dumps(report.document(description, arguments.seed, outcomes)))
        return 0
    print("\n".join([*report.heading(description, arguments.seed), "", *report.table(outcomes), "", *report.ratios(outcomes)]).rstrip())
    return 0


def _grid(arguments: argparse.Namespace, description: Description, policies: list[str]) -> int:
    grid = description.grid
    if not grid.zipf or not grid.utilisation or description.ledgers is not None:
        raise UsageError("--grid needs a drawn trace, and a [grid] with lists of zipf and utilisation in the file")
    cells = {}
    for zipf in grid.zipf:
        for utilisation in grid.utilisation:
            cells[zipf, utilisation] = _outcomes(description.with_cell(zipf, utilisation), policies, arguments.seed)
    if arguments.json:
        print(json.dumps(report.grid_document(description, arguments.seed, cells)))
        return 0
    print("\n".join([*report.heading(description, arguments.seed, is_grid=True), "", *report.grid_table(cells)]))
    return 0


def _outcomes(description: Description, policies: list[str], seed: int) -> list[Outcome]:
    trace = recorded(description, seed) if description.ledgers is not None else drawn(description, seed)
    outcomes = []
    for name in policies:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{len(trace)} rollouts, {name}", end="", file=sys.stderr, flush=True)
        outcomes.append(simulate(description, trace, name, seed))
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    return outcomes
