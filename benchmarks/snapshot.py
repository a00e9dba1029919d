"""Snapshot of a live sandbox, and leases over chains of them.

Nothing is open for writing, but a shell waits in a directory of its own and a process sleeps in another: both go on. With a
writer the sandbox is frozen and what it wrote is cloned; that cost is shown, without a budget.

Leases over both chains come in turn and with time between them, so that as much is made ahead for the one as for the other; forks, for most of which nothing is
made, show what depth itself costs.
"""

import argparse
import asyncio
import time

import untax
from benchmarks import _measure
from benchmarks._measure import Row

EACH_MS = 3.0
DEEP, SHALLOW = 60, 3
DEEPER = 1.5
PAUSE_S = 0.03
FORKED = 8  # at once: more than are ever made ahead
WRITER = "exec 3>>log; while :; do echo x >&3; read -t 0.01 <> <(:); done"


async def _snapshots(engine: untax.Engine, spec: untax.EnvSpec, count: int, *, writer: bool) -> tuple[list[float], set[str]]:
    samples: list[float] = []
    how: set[str] = set()
    for _ in range(count):
        async with engine.lease(spec) as box, box.session() as bash:
            await bash.run("mkdir -p a/b && cd a/b && echo x > file")
            (await box.shell("mkdir -p c && cd c && sleep 600 >/dev/null 2>&1 &")).check()
            process = await box.start(["bash", "-c", WRITER]) if writer else None
            if process is not None:
                await box.shell("until [ -s log ]; do sleep 0.01; done")
            begin = time.perf_counter()
            snapshot = await box.snapshot()
            samples.append(time.perf_counter() - begin)
            how.add(snapshot.how)
            assert (await bash.run("cat file && pwd")).stdout.startswith(b"x\n")
            await snapshot.drop()
    return samples, how


async def _chain(engine: untax.Engine, spec: untax.EnvSpec, depth: int) -> untax.Snapshot:
    async with engine.lease(spec) as box:
        for i in range(depth):
            await box.write(f"file-{i}", b"x")
            snapshot = await box.snapshot()
    return snapshot


async def _restore_s(engine: untax.Engine, snapshot: untax.Snapshot, depth: int) -> float:
    begin = time.perf_counter()
    async with engine.restore(snapshot) as box:
        took = time.perf_counter() - begin
        assert len(await box.list()) == depth
    return took


async def _fork_s(engine: untax.Engine, snapshot: untax.Snapshot) -> float:
    begin = time.perf_counter()
    async with engine.fork(snapshot, FORKED):
        return (time.perf_counter() - begin) / FORKED


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    spec = _measure.spec_for(substrate)
    async with _measure.engine_on(substrate) as engine:
        idle, how_idle = await _snapshots(engine, spec, arguments.count, writer=False)
        busy, how_busy = await _snapshots(engine, spec, arguments.count // 4, writer=True)
        chains = {depth: await _chain(engine, spec, depth) for depth in (SHALLOW, DEEP)}
        leases: dict[int, list[float]] = {depth: [] for depth in chains}
        forks: dict[int, list[float]] = {depth: [] for depth in chains}
        for _ in range(arguments.count + _measure.WARM_UP):
            for depth, snapshot in chains.items():
                await asyncio.sleep(PAUSE_S)
                leases[depth].append(await _restore_s(engine, snapshot, depth))
        for _ in range(arguments.count // 8):
            for depth, snapshot in chains.items():
                forks[depth].append(await _fork_s(engine, snapshot))
        shallow, deep = (leases[depth][_measure.WARM_UP :] for depth in (SHALLOW, DEEP))
    ratio, forked = (
        _measure.percentile(more, 0.5) / _measure.percentile(less, 0.5) for more, less in ((deep, shallow), (forks[DEEP], forks[SHALLOW]))
    )
    return [
        _measure.compare(
            "snapshot, nothing open for writing",
            substrate,
            idle,
            budget=f"≤ {EACH_MS:g} ms at p50",
            holds=lambda row: row.p50 <= EACH_MS,
            note=", ".join(sorted(how_idle)),
        ),
        _measure.compare("snapshot with a writer", substrate, busy, note=", ".join(sorted(how_busy))),
        _measure.compare(f"lease over {SHALLOW} snapshots", substrate, shallow),
        _measure.compare(f"lease over {DEEP} snapshots", substrate, deep),
        _measure.number("deep ÷ shallow", substrate, ratio, "×", budget=f"≤ {DEEPER:g} ×", holds=ratio <= DEEPER),
        _measure.compare(f"fork of {FORKED} over {SHALLOW} snapshots, each", substrate, forks[SHALLOW]),
        _measure.compare(f"fork of {FORKED} over {DEEP} snapshots, each", substrate, forks[DEEP]),
        _measure.number("deep ÷ shallow, forked", substrate, forked, "×", budget="", holds=None),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("snapshot", __doc__, measure, count=200, only=("namespace",)))
