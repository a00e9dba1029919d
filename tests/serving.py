"""`untax serve` in a process of its own, for tests that connect to it, kill it or freeze it."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
PATIENCE_S = 120.0
"""For another program to come to something, on a machine that five suites keep busy. Nothing that works takes as long."""


class Serving:
    """A server that said it listens."""

    def __init__(self, process: asyncio.subprocess.Process, url: str) -> None:
        self.process = process
        self.url = url

    @property
    def path(self) -> Path:
        return Path(self.url.removeprefix("unix:"))

    def send(self, number: int) -> None:
        os.kill(self.process.pid, number)

    async def kill(self) -> None:
        self.send(signal.SIGKILL)
        await self.process.wait()

    async def stop(self, number: int = signal.SIGTERM) -> int:
        self.send(number)
        return await self.process.wait()


def environment() -> dict[str, str]:
    paths = [str(_ROOT), str(_ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in paths if path)}


async def started(
    socket: Path,
    state: Path,
    *options: str,
    substrate: str = "namespace",
    stderr: int | None = None,
    failpoint: str | None = None,
    env: Mapping[str, str] | None = None,
) -> Serving:
    """Raises `AssertionError` with what it said when it ended instead. `failpoint`: one of `tests.failpoints`, at which it kills itself."""
    program = ["untax.cli"] if failpoint is None else ["tests.failpoints", failpoint]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", *program, "serve", "--json", "--socket", str(socket), "--state-dir", str(state),
        "--substrate", substrate, "--limits", "warn", *options,
        stdout=asyncio.subprocess.PIPE,
        stderr=stderr,
        env={**environment(), **(env or {})},
        start_new_session=True,
    )  # fmt: skip
    line = await first_line(process)
    document = json.loads(line or b"{}")
    if "listening" not in document:
        await process.wait()
        raise AssertionError(document)
    return Serving(process, document["listening"])


@contextlib.asynccontextmanager
async def serving(directory: Path, *options: str, substrate: str = "namespace") -> AsyncIterator[Serving]:
    """A server below `directory`; whatever happened to it, the process is gone at the end."""
    served = await started(directory / "s.sock", directory / "state", *options, substrate=substrate)
    try:
        yield served
    finally:
        await ended(served)


async def ended(served: Serving) -> None:
    if served.process.returncode is None:
        served.send(signal.SIGCONT)
        with contextlib.suppress(TimeoutError):
            served.send(signal.SIGTERM)
            served.send(signal.SIGTERM)
            await asyncio.wait_for(served.process.wait(), 20)
    if served.process.returncode is None:
        await served.kill()
    served.process._transport.close()  # or its pipe is closed when the loop is no more


async def script(source: str, *arguments: str, wait_line: bool = True) -> tuple[asyncio.subprocess.Process, bytes]:
    """A Python program as a client of its own, and the first line that it printed."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", source, *arguments, stdout=asyncio.subprocess.PIPE, env=environment(), start_new_session=True
    )
    assert process.stdout is not None
    return process, await first_line(process) if wait_line else b""


async def first_line(process: asyncio.subprocess.Process) -> bytes:
    """What a program says next; one that says nothing for long is ended, or what it made would be in the way of every test after this one."""
    assert process.stdout is not None
    try:
        return await asyncio.wait_for(process.stdout.readline(), PATIENCE_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise


def children(pid: int) -> Sequence[int]:
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
