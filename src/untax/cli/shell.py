"""Open a terminal in a fresh sandbox.

The exit code is the shell's own; 125 when the infrastructure failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator

import untax
from untax.cli._sandbox import add_sandbox_arguments, engine_of, put_in_place, spec_of
from untax.cli._terminal import StringFilter
from untax.core.errors import UsageError
from untax.core.ledger import Ledger, as_dict

_CHUNK = 64 << 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_sandbox_arguments(parser)
    parser.add_argument("--raw", action="store_true", help="let programs inside also set the title and clipboard of this terminal")
    parser.add_argument("--ttl", type=float, default=86_400.0, metavar="S", help="seconds the sandbox lasts (default: %(default)g)")
    parser.add_argument("command", nargs="*", metavar="CMD", help="another program than bash, after --")


def carry_out(arguments: argparse.Namespace) -> int:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("shell needs a terminal; for a command use: untax run -- CMD")
    code, ledger = asyncio.run(_shell(arguments))
    if arguments.json:
        print(json.dumps({"exit_code": code, "ledger": as_dict(ledger)}))
    return code


async def _shell(arguments: argparse.Namespace) -> tuple[int, Ledger]:
    argv = arguments.command or ["bash", "-i"]
    rows, cols = _size()
    term = os.environ.get("TERM", "xterm")
    async with engine_of(arguments) as engine:
        spec = spec_of(arguments, engine)
        await put_in_place(engine, spec)
        async with engine.lease(spec, env={"TERM": term}, ttl_s=arguments.ttl) as box:
            process = await box.start(argv, pty=True, rows=rows, cols=cols)
            with _raw_terminal():
                code = await _joined(process, as_it_is=arguments.raw)
    return code, box.ledger


async def _joined(process: untax.Process, *, as_it_is: bool) -> int:
    """Tie this terminal to the process until it ends."""
    loop = asyncio.get_running_loop()
    typed: asyncio.Queue[bytes] = asyncio.Queue()
    stdin, stdout = sys.stdin.fileno(), sys.stdout.fileno()
    filtered = StringFilter()
    jobs: set[asyncio.Task[None]] = set()

    def resized() -> None:
        jobs.add(loop.create_task(process.resize(*_size())))

    async def type_on() -> None:
        with contextlib.suppress(BrokenPipeError):
            while data := await typed.get():
                await process.write(data)

    def read_on() -> None:
        try:
            data = os.read(stdin, _CHUNK)
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(stdin)  # the terminal is gone, and would say so for ever
        typed.put_nowait(data)

    loop.add_reader(stdin, read_on)
    loop.add_signal_handler(signal.SIGWINCH, resized)
    typing = loop.create_task(type_on())
    try:
        async for output in process:
            _write_all(stdout, output.data if as_it_is else filtered.feed(output.data))
        return (await process.wait()).exit_code
    finally:
        loop.remove_reader(stdin)
        loop.remove_signal_handler(signal.SIGWINCH)
        for job in (typing, *jobs):
            job.cancel()
        await asyncio.gather(typing, *jobs, return_exceptions=True)


def _size() -> tuple[int, int]:
    """Rows and columns; a serial line, or a terminal that nobody has told its size, says 0."""
    cols, rows = os.get_terminal_size(sys.stdout.fileno())
    return rows or 24, cols or 80


@contextlib.contextmanager
def _raw_terminal() -> Iterator[None]:
    before = termios.tcgetattr(sys.stdin)
    tty.setraw(sys.stdin)
    try:
        yield
    finally:
        with contextlib.suppress(termios.error):  # it was closed
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]
