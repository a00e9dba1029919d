"""Run one command in a fresh sandbox.

The exit code is the command's own; 124 when it passed --timeout, 125 when the infrastructure failed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import sys

import untax
from untax.cli._sandbox import add_sandbox_arguments, engine_of, put_in_place, spec_of
from untax.cli._terminal import show_result
from untax.core.errors import UsageError
from untax.core.ledger import Ledger, as_dict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sandbox_arguments(parser)
    parser.add_argument("--timeout", type=float, default=300.0, metavar="S", help="seconds the command may take (default: %(default)g)")
    parser.add_argument("--raw", action="store_true", help="show control characters on a terminal as they are")
    parser.add_argument("--stdin", action="store_true", help="give the command what comes on standard input")
    parser.add_argument("--ledger", action="store_true", help="say on standard error where the time went")
    parser.add_argument("command", nargs="+", metavar="CMD", help="the program and its arguments, after --")


def carry_out(arguments: argparse.Namespace) -> int:
    result, ledger = asyncio.run(_run(arguments))
    if arguments.json:
        print(json.dumps(_document(result, ledger)))
    else:
        show_result(result.stdout, result.stderr, as_it_is=arguments.raw)
        if result.truncated:
            dropped = result.dropped_stdout + result.dropped_stderr
            print(f"untax: {dropped} bytes in the middle of the output were dropped", file=sys.stderr)
        if result.outcome not in ("exited", "signaled"):
            print(f"untax: {result.outcome}{f' ({result.limit_kind})' if result.limit_kind else ''}", file=sys.stderr)
    if arguments.ledger:
        print(ledger, file=sys.stderr)
    return result.exit_code


async def _run(arguments: argparse.Namespace) -> tuple[untax.CommandResult, Ledger]:
    if arguments.stdin and sys.stdin.isatty():
        raise UsageError("--stdin wants a file or a pipe; for a terminal use: untax shell")
    stdin = sys.stdin.buffer.read() if arguments.stdin else None
    async with engine_of(arguments) as engine:
        spec = spec_of(arguments, engine)
        await put_in_place(engine, spec)
        async with engine.lease(spec) as box:
            result = await box.run(arguments.command, stdin=stdin, timeout_s=arguments.timeout)
    return result, box.ledger


def _document(result: untax.CommandResult, ledger: Ledger) -> dict[str, object]:
    return {
        "exit_code": result.exit_code,
        "outcome": result.outcome,
        "limit_kind": result.limit_kind,
        "stdout": result.stdout.decode("utf-8", "replace"),
        "stderr": result.stderr.decode("utf-8", "replace"),
        "stdout_base64": base64.b64encode(result.stdout).decode(),
        "stderr_base64": base64.b64encode(result.stderr).decode(),
        "truncated": result.truncated,
        "elapsed_s": result.elapsed_s,
        "round_trip_s": result.round_trip_s,
        "ledger": as_dict(ledger),
    }
