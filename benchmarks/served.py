"""One action on a sandbox of a server, beside the same on a sandbox of one's own: the channel is the same, and so should be the time.

The embedded sandbox stands where other programs have native. The server is a process of its own; the lease row shows what the way to it and
back costs, from asking for a box to the first result of `true`.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import untax
import untax.sync
from benchmarks import _measure
from benchmarks._measure import Row
from untax.leasing import Leasing

MORE_MS = 0.05  # issue 5: an action on a served sandbox ≤ embedded + this


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
        socket = Path(place) / "s.sock"
        argv = [sys.executable, "-m", "untax.cli", "serve", "--socket", str(socket), "--state-dir", f"{place}/served", "--json"]
        argv += ["--substrate", substrate, "--limits", "warn", "--drain", "0"]
        server = subprocess.Popen(argv, stdout=subprocess.PIPE)
        assert server.stdout is not None
        try:
            if not server.stdout.readline():
                raise SystemExit("served: the server did not start")
            rows = await _beside(arguments.count, substrate, f"unix:{socket}", Path(place) / "embedded")
            rows += await asyncio.to_thread(_beside_blocking, arguments.count, substrate, f"unix:{socket}", Path(place) / "embedded")
        finally:
            server.terminate()
            server.wait()
    return rows


async def _beside(count: int, substrate: str, url: str, state: Path) -> list[Row]:
    spec = _measure.spec_for(substrate)
    async with _measure.engine_on(substrate, state) as engine, untax.connect(url) as remote:
        async with engine.lease(spec) as own, remote.lease(spec) as served:
            for box in (own, served):
                await box.write("kibibyte", b"x" * 1024)
            runs = await _alternating(count, lambda: served.run(["true"]), lambda: own.run(["true"]))
            reads = await _alternating(count, lambda: served.read("kibibyte"), lambda: own.read("kibibyte"))
        leases = await _alternating(max(10, count // 4), lambda: _first_result(remote, spec), lambda: _first_result(engine, spec))
    return [
        _row("run true", substrate, *runs),
        _row("read 1 KiB", substrate, *reads),
        _measure.compare("lease to first result", substrate, *leases, note="native: embedded; cold"),
    ]


async def _first_result(engine: Leasing, spec: untax.EnvSpec) -> None:
    async with engine.lease(spec) as box:
        await box.run(["true"])


async def _alternating(
    count: int, ours: Callable[[], Awaitable[object]], theirs: Callable[[], Awaitable[object]]
) -> tuple[list[float], list[float]]:
    mine: list[float] = []
    other: list[float] = []
    for turn in range(count + _measure.WARM_UP):
        for samples, act in ((mine, ours), (other, theirs))[:: 1 if turn % 2 else -1]:
            samples.append(await _measure.timed(act()))
    return mine[_measure.WARM_UP :], other[_measure.WARM_UP :]


def _beside_blocking(count: int, substrate: str, url: str, state: Path) -> list[Row]:
    spec = _measure.spec_for(substrate)
    mine: list[float] = []
    other: list[float] = []
    with untax.sync.Engine(substrate, state_dir=str(state)) as engine, untax.sync.connect(url) as remote:
        with engine.lease(spec) as own, remote.lease(spec) as served:
            for turn in range(count + _measure.WARM_UP):
                for samples, box in ((mine, served), (other, own))[:: 1 if turn % 2 else -1]:
                    begin = time.perf_counter()
                    box.run(["true"])
                    samples.append(time.perf_counter() - begin)
    return [_row("run true, blocking", substrate, mine[_measure.WARM_UP :], other[_measure.WARM_UP :])]


def _row(what: str, substrate: str, ours: list[float], embedded: list[float]) -> Row:
    return _measure.compare(
        what, substrate, ours, embedded, budget=f"≤ embedded + {MORE_MS} ms at p50", holds=_holds, note="native: embedded"
    )


def _holds(row: Row) -> bool:
    assert row.native_p50 is not None
    return row.p50 <= row.native_p50 + MORE_MS


if __name__ == "__main__":
    raise SystemExit(_measure.main("served", __doc__, measure, count=400))
