"""One action on a sandbox of a server, beside the same on a sandbox of one's own: the channel is the same, and so should be the time.

The embedded sandbox stands where other programs have native. The server is a process of its own; the lease rows show what the way to it and
back costs: of a warm lease until the box is there (one after the other, as a worker has them, and where each is asked for), and cold from asking for a box to its end, with `true` in between.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import untax
import untax.sync
from benchmarks import _measure
from benchmarks._measure import Row
from untax.core.account import IN_HAND
from untax.leasing import Leasing

MORE_MS = 0.05  # issue 5: an action on a served sandbox ≤ embedded + this
POOL = 4
NOT_AHEAD_S = 59.0
"""Of leases that last no longer than this none is given ahead (`untax.remote.hand`)."""


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
        await asyncio.gather(engine.warm(spec, POOL), remote.warm(spec, POOL))
        warm, native, kinds = await warm_leases(max(20, count // 4), remote, engine, spec)
        single, beside, asked = await warm_leases(max(20, count // 4), remote, engine, spec, ttl_s=NOT_AHEAD_S)
    return [
        _row("run true", substrate, *runs),
        _row("read 1 KiB", substrate, *reads),
        _measure.compare("warm lease", substrate, warm, native, note=f"native: embedded; hits: {kinds}"),
        _measure.compare("warm lease, asked for", substrate, single, beside, note=f"native: embedded; hits: {asked}"),
        _measure.compare("lease to first result", substrate, *leases, note="native: embedded; cold"),
    ]


async def warm_leases(
    count: int, ours: Leasing, embedded: Leasing, spec: untax.EnvSpec, **late: Any
) -> tuple[list[float], list[float], str]:
    """Seconds until a box is there, of both in turn, with time for the pools to fill up again as between rollouts; and how the pool served ours."""
    kinds: set[str] = set()
    times: dict[Leasing, list[float]] = {ours: [], embedded: []}
    for turn in range(count + _measure.WARM_UP):
        for leasing in (ours, embedded)[:: 1 if turn % 2 else -1]:
            begin = time.perf_counter()
            box = await leasing.acquire(spec, **late)
            times[leasing].append(time.perf_counter() - begin)
            if leasing is ours:
                assert box.ledger.hit is not None
                kinds.add("in hand" if box.ledger.hit.why == IN_HAND else box.ledger.hit.kind)
            await box.release()
            await asyncio.sleep(0.02)
    return times[ours][_measure.WARM_UP :], times[embedded][_measure.WARM_UP :], ", ".join(sorted(kinds))


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
