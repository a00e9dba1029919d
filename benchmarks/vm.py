"""Virtual machines: booted beside restored, the held channel beside one fresh ssh an action, and what cycles leave behind.

Each row says whether its machine was emulated. The ssh goes to an sshd inside the same machine, over a stream of the channel, since machines have no
network: what that adds is one held channel's dispatch, which is in the row beside it.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks import _census, _measure
from benchmarks._measure import Row

import untax

CYCLES = 50
SSH_ACTIONS = 5
BOOTS = 3
SETTLE_S = 5.0
PORT = 2222


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", action="append", choices=("q35", "microvm"), help="only this one; may be repeated")
    parser.add_argument("--cycles", type=int, default=CYCLES, help="create–run–destroy cycles that must leave nothing (default: %(default)s)")


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
        image = await asyncio.to_thread(image_with_sshd, Path(place) / "image")
        spec = untax.EnvSpec(image=f"dir:{image}", isolation="vm")
        for machine in arguments.machine or ("q35", "microvm"):
            state = Path(place) / machine
            rows += await ready(state, machine, spec, arguments.count)
            rows += await dispatch(state, machine, spec, Path(place), arguments.count)
            if machine == "q35":
                rows += await cycles(state, machine, spec, arguments.cycles)
    return rows


# ---- booted and restored ----


async def ready(state: Path, machine: str, spec: untax.EnvSpec, count: int) -> list[Row]:
    """From the request for a sandbox to its first result, in turn where both are at hand."""
    async with _measure.engine_on("vm", state, machine=machine) as warm, _measure.engine_on("vm", state, machine=machine, start="cold") as cold:
        await _first_result(warm, spec)  # boots once, and saves
        booted: list[float] = []
        restored: list[float] = []
        for turn in range(max(BOOTS, count)):
            if turn < BOOTS:
                booted.append(await _first_result(cold, spec))
            restored.append(await _first_result(warm, spec))
        label = warm.substrate.name
    times = _measure.percentile(booted, 0.5) / _measure.percentile(restored, 0.5)
    return [
        _measure.compare("booted: create to ready", label, booted),
        _measure.compare("restored: create to ready", label, restored, booted, note="native: the same machine, booted"),
        _measure.number("restored, faster than booted", label, times, "×", budget="≥ 5 ×", holds=times >= 5),
    ]


async def _first_result(engine: untax.Engine, spec: untax.EnvSpec) -> float:
    """Until the channel is open and answers; the first command's own time, which emulation makes long, is not in it."""
    began = time.perf_counter()
    async with engine.lease(spec) as box:
        took = time.perf_counter() - began
        (await box.run(["true"])).check()
    return took


# ---- the channel and ssh ----


async def dispatch(state: Path, machine: str, spec: untax.EnvSpec, place: Path, count: int) -> list[Row]:
    async with _measure.engine_on("vm", state, machine=machine) as engine, engine.lease(spec) as box, ssh_into(box, place) as argv:
        held: list[float] = []
        fresh: list[float] = []
        inside: list[float] = []
        for turn in range(max(20, count) + _measure.WARM_UP):
            result = (await box.run(["true"])).check()
            held.append(result.round_trip_s - result.elapsed_s)
            inside.append(result.elapsed_s)
            if turn < SSH_ACTIONS + 1:
                fresh.append(await _ssh(argv))
        del held[: _measure.WARM_UP], fresh[:1], inside[: _measure.WARM_UP]
        typical = _measure.percentile(inside, 0.5)
        label = engine.substrate.name
    over = [max(0.0, one - typical) for one in fresh]
    return [
        _measure.compare("dispatch over the held channel", label, held, over, budget="≤ 1/20 of ssh", holds=_twentieth, note="native: one fresh ssh an action"),
        _measure.compare("one `true` inside", label, inside),
    ]


def _twentieth(row: Row) -> bool:
    return row.ratio is not None and row.ratio <= 1 / 20


async def _ssh(argv: list[str]) -> float:
    began = time.perf_counter()
    process = await asyncio.create_subprocess_exec(*argv, "true", stdin=asyncio.subprocess.DEVNULL)
    if await process.wait() != 0:
        raise RuntimeError("ssh into the machine failed")
    return time.perf_counter() - began


@contextlib.asynccontextmanager
async def ssh_into(box: untax.Box, place: Path) -> AsyncIterator[list[str]]:
    """An sshd inside, and what runs a command by it."""
    keys = place / f"keys-{box.id}"
    keys.mkdir()
    for name in ("host", "login"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", keys / name], check=True)
    home = "/home/user"
    await box.write(f"{home}/host", (keys / "host").read_bytes(), mode=0o600)
    await box.write(f"{home}/login.pub", (keys / "login.pub").read_bytes())
    config = f"Port {PORT}\nListenAddress 127.0.0.1\nHostKey {home}/host\nAuthorizedKeysFile {home}/login.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
    await box.write(f"{home}/config", config.encode())
    sshd = await box.start(["/usr/bin/sshd", "-D", "-e", "-f", f"{home}/config"])
    server = await asyncio.start_server(lambda reader, writer: _relay(box, reader, writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    (keys / "known").write_text(f"[127.0.0.1]:{port} {(keys / 'host.pub').read_text()}")
    argv = ["ssh", "-T", "-F", "none", "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={keys}/known", "-o", "IdentitiesOnly=yes", "-o", "LogLevel=ERROR",
            "-i", str(keys / "login"), "-p", str(port), "user@127.0.0.1"]  # fmt: skip
    try:
        for attempt in range(20):  # until it listens, of which nothing tells
            try:
                await _ssh(argv)
                break
            except RuntimeError:
                if attempt == 19:
                    raise
        yield argv
    finally:
        server.close()
        sshd.kill()


async def _relay(box: untax.Box, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        async with await box.connect(PORT) as stream:

            async def there() -> None:
                while data := await reader.read(1 << 16):
                    await stream.write(data)

            sending = asyncio.ensure_future(there())
            try:
                while data := await stream.read():
                    writer.write(data)
                    await writer.drain()
            finally:
                sending.cancel()
    except (untax.UntaxError, OSError):
        pass  # the client is told by the end of the connection
    finally:
        writer.close()


def image_with_sshd(root: Path) -> Path:
    """The few programs of the conformance suite, and an sshd."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from tests import images

    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd is None:
        raise SystemExit("vm: no sshd to compare with; apt install openssh-server")
    images.PROGRAMS.append("true")
    root.mkdir()
    images.build(root)
    shutil.copy2(sshd, root / "usr/bin/sshd")
    for library in images._libraries_of(sshd):
        target = root / "usr/lib" / Path(library).name
        if not target.exists():
            shutil.copy2(os.path.realpath(library), target)
    return root


# ---- what is left ----


async def cycles(state: Path, machine: str, spec: untax.EnvSpec, count: int) -> list[Row]:
    outset = _census.take(state)
    cycle_s: list[float] = []
    async with _measure.engine_on("vm", state, machine=machine) as engine:
        for _ in range(2):
            await _first_result(engine, spec)
        before = _census.take(state)
        for _ in range(count):
            began = time.perf_counter()
            async with engine.lease(spec) as box:
                (await box.run(["true"])).check()
            cycle_s.append(time.perf_counter() - began)
        differs = await asyncio.to_thread(_census.wait_like, state, "", before, SETTLE_S)
        label = engine.substrate.name
    after = await asyncio.to_thread(_census.wait_like, state, "", outset, SETTLE_S)
    return [
        _measure.compare("one cycle", label, cycle_s),
        _measure.number(f"left after {count} cycles", label, len(differs), "things", budget="exactly as before", holds=not differs, note=str(differs or "")),
        _measure.number("left after close", label, len(after), "things", budget="exactly as before", holds=not after, note=str(after or "")),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("vm", __doc__, measure, count=10, options=options, only=("vm",)))
