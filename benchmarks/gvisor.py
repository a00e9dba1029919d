"""gVisor: dispatch over the held channel beside one `runsc exec` each, warm and cold leases, live snapshots and restores, and what cycles leave behind.

`--part` picks one of: dispatch, warm, cold, live, cycles.
"""

import argparse
import asyncio
import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import cast

from tests.images import tools_directory

import untax
from benchmarks import _census, _measure
from benchmarks._measure import Row
from untax.core.substrate import Incumbent

DISPATCH_MS, SHARE = 1.0, 20  # issue 7
WARM_MS = 5.0  # beside one `true` inside
CYCLES = 50
POOL = 2
PARTS = ("dispatch", "warm", "cold", "live", "cycles")
SPEC = untax.EnvSpec(image=f"dir:{tools_directory()}", isolation="gvisor")
SERVER = ["python3", "-u", "-m", "http.server", "8000", "--bind", "127.0.0.1"]


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be repeated")
    parser.add_argument("--cycles", type=int, default=CYCLES, help="create, run, destroy (default: %(default)s)")
    parser.add_argument("--platform", choices=("systrap", "ptrace", "kvm"), default="systrap", help="of runsc (default: %(default)s)")


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
        async with _measure.engine_on(substrate, Path(place), platform=arguments.platform) as engine:
            for part in arguments.part or PARTS:
                print(part, file=sys.stderr, flush=True)
                rows += await globals()[part](arguments, engine)
    return rows


async def dispatch(arguments: argparse.Namespace, engine: untax.Engine) -> list[Row]:
    """Round trip less the time inside, of one `true`. The incumbent's time inside is taken to be the held channel's."""
    held: list[float] = []
    inside: list[float] = []
    incumbent: list[float] = []
    async with engine.lease(SPEC) as box:
        for turn in range(arguments.count + _measure.WARM_UP):
            result = await box.run(["true"])
            held.append(result.round_trip_s - result.elapsed_s)
            inside.append(result.elapsed_s)
            if turn % 4 == 0:
                incumbent.append((await cast("Incumbent", box.sandbox).run_incumbent(["true"], timeout_s=30)).round_trip_s)
    typical = statistics.median(inside)
    ours = _measure.compare(
        "dispatch, held channel",
        "gvisor",
        held[_measure.WARM_UP :],
        budget=f"≤ {DISPATCH_MS:g} ms at p50",
        holds=lambda row: row.p50 <= DISPATCH_MS,
    )
    theirs = _measure.compare("dispatch, one runsc exec each", "gvisor", [trip - typical for trip in incumbent[2:]])
    share = theirs.p50 / ours.p50
    return [
        _measure.compare("one `true` inside", "gvisor", inside[_measure.WARM_UP :]),
        ours,
        theirs,
        _measure.number("incumbent ÷ held", "gvisor", share, "×", budget=f"≥ {SHARE}", holds=share >= SHARE),
    ]


async def warm(arguments: argparse.Namespace, engine: untax.Engine) -> list[Row]:
    """A lease from the pool until its first result, less what that took inside; the pool fills up between two."""
    beside: list[float] = []
    await engine.warm(SPEC, POOL)
    for _ in range(max(20, arguments.count // 5)):
        begin = time.perf_counter()
        box = await engine.acquire(SPEC)
        result = await box.run(["true"])
        beside.append(time.perf_counter() - begin - result.elapsed_s)
        assert box.ledger.hit is not None
        assert box.ledger.hit.kind == "exact", box.ledger.hit
        await box.release()
        await engine.warm(SPEC, POOL)
    await engine.warm(SPEC, 0)
    return [
        _measure.compare(
            "warm lease → first result, less the `true` inside", "gvisor", beside[2:], budget=f"≤ {WARM_MS:g} ms at p50",
            holds=lambda row: row.p50 <= WARM_MS,
        )
    ]  # fmt: skip


async def cold(arguments: argparse.Namespace, engine: untax.Engine) -> list[Row]:
    """From asking to the result of the first `true`, without a pool; and until it is gone again."""
    up: list[float] = []
    gone: list[float] = []
    for _ in range(max(10, arguments.count // 10)):
        begin = time.perf_counter()
        box = await engine.acquire(SPEC)
        (await box.run(["true"])).check()
        up.append(time.perf_counter() - begin)
        begin = time.perf_counter()
        await box.release()
        gone.append(time.perf_counter() - begin)
    return [
        _measure.compare("cold create → first result", "gvisor", up),
        _measure.compare("release, until nothing is left", "gvisor", gone),
    ]


async def live(arguments: argparse.Namespace, engine: untax.Engine) -> list[Row]:
    """Of a box with an HTTP server of Python's in it: the snapshot, a restore until the server answers, and starting the server anew instead."""
    taken: list[float] = []
    restored: list[float] = []
    pooled: list[float] = []
    anew: list[float] = []
    async with engine.lease(SPEC) as box:
        await _serve(box)
        for _ in range(max(8, arguments.count // 20)):
            begin = time.perf_counter()
            snapshot = await box.snapshot(live=True)
            taken.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            async with engine.restore(snapshot) as copy:
                await _answered(copy)
                restored.append(time.perf_counter() - begin)
            await engine.warm(snapshot, 1)
            await engine.pooling.driver.wait_settled()
            begin = time.perf_counter()
            async with engine.restore(snapshot) as copy:
                await _answered(copy)
                pooled.append(time.perf_counter() - begin)
                assert copy.ledger.hit is not None
            await snapshot.drop()
            await engine.pooling.driver.wait_settled()
            begin = time.perf_counter()
            async with engine.lease(SPEC) as fresh:
                await _serve(fresh)
                await _answered(fresh)
                anew.append(time.perf_counter() - begin)
    return [
        _measure.compare("live snapshot", "gvisor", taken),
        _measure.compare("restore → its server answers", "gvisor", restored),
        _measure.compare("warm lease of it → its server answers", "gvisor", pooled),
        _measure.compare("cold create, server started → it answers", "gvisor", anew),
    ]


async def _serve(box: untax.Box) -> None:
    server = await box.start(SERVER)
    assert b"Serving" in (await server.read()).data  # type: ignore[union-attr]


async def _answered(box: untax.Box) -> None:
    connection = await box.connect(8000)
    await connection.write(b"GET / HTTP/1.0\r\n\r\n")
    assert (await connection.read()).startswith(b"HTTP/1.0 200")
    connection.close()


async def cycles(arguments: argparse.Namespace, engine: untax.Engine) -> list[Row]:
    state, mark = engine.substrate._state_dir, engine.substrate._holding.path.name  # type: ignore[attr-defined]

    async def several(count: int) -> None:
        for _ in range(count):
            async with engine.lease(SPEC) as box:
                (await box.run(["true"])).check()

    await several(2)
    await asyncio.sleep(0.5)
    before = _census.take(state, mark)
    began = time.perf_counter()
    await asyncio.gather(*(several(arguments.cycles // 2) for _ in range(2)))
    each_s = (time.perf_counter() - began) / arguments.cycles
    left: dict[str, int] = {}
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(10):
            while left := _census.take(state, mark).less(before):
                await asyncio.sleep(0.1)
    return [
        _measure.number("one cycle, two at once", "gvisor", each_s * 1e3, "ms", budget="", holds=None),
        _measure.number(
            f"left after {arguments.cycles} cycles",
            "gvisor",
            sum(left.values()),
            "things",
            budget="nothing",
            holds=not left,
            note=str(left or ""),
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("gvisor", __doc__, measure, count=200, options=options, only=("gvisor",)))
