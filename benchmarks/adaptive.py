"""Sizes that follow demand, against every fixed size, on three recorded traces and with the same memory.

The traces are real rollouts (`record_traces`). They are played to the engine's own driver and decisions in simulated time, with creations
that take as long as a container's on the machine of DESIGN §3, because that is what pools hide: on `namespace` a creation is
two milliseconds. The first quarter of each trace is played and not counted: fixed pools are full when it begins, demand is not known yet. A fixed size is so many idle sandboxes of each spec, as far as the memory allows.
"""

import argparse
import asyncio
import json
import selectors
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from benchmarks import _measure
from benchmarks._measure import Row
from untax.core.stage import Stage
from untax.pool import events as ev
from untax.pool.costs import Costs
from untax.pool.options import PoolOptions
from untax.pool.pool import PoolDriver

TRACES = Path(__file__).parent / "traces"
CREATE_S, BIND_S = 0.37, 0.001
SANDBOX_MIB = 1.0
WARM_UP = 0.25
ROOM = 24  # sandboxes that the memory holds, leased and idle


class _Jump(selectors.SelectSelector):
    """Waits for nothing: time jumps to when the next thing is due."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self.now_s += max(0.0, timeout or 0.0)
        return super().select(0)


class _SimulatedLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jump = _Jump()
        super().__init__(self._jump)

    def time(self) -> float:
        return self._jump.now_s


def simulated(work: Coroutine[Any, Any, float]) -> float:
    loop = _SimulatedLoop()
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


class _Entry:
    def __init__(self, name: str) -> None:
        self.name = name


class _Hands:
    """Sandboxes that take time and nothing else."""

    def __init__(self) -> None:
        self._count = 0

    async def make(self, order: ev.Create, request: object) -> _Entry:  # noqa: ARG002
        await asyncio.sleep(CREATE_S)
        self._count += 1
        return _Entry(f"e{self._count}")

    async def destroy(self, entry: _Entry) -> None:  # noqa: ARG002
        await asyncio.sleep(0.01)


class _Rollout:
    def __init__(self, line: str) -> None:
        said = json.loads(line)
        self.at_s = float(said["asked_at"])
        self.hold_s = float(said["hold_s"])
        below: str | None = None
        stages: list[Stage] = []
        for name, key in said["wanted"]:
            stages.append(Stage(name, key, {}, below, is_portable=True))
            below = key
        self.stages = tuple(stages)


async def play(rollouts: list[_Rollout], *, adaptive: bool, fixed: int) -> float:
    """Mean seconds from asking until ready."""
    costs = Costs()
    costs.observe("create", CREATE_S)
    options = PoolOptions(entries=ROOM, memory_mib=ROOM * SANDBOX_MIB, adaptive=adaptive, linger_s=5.0, most_starting=8, first_starting=8)
    hands = _Hands()
    driver: PoolDriver[str, _Entry] = PoolDriver(hands, options, shares_stages=True, upgrades_in_place=False, costs=costs)
    specs = {one.stages[-1].key: one.stages for one in rollouts}
    driver.stored(stage.key for stages in specs.values() for stage in stages)
    for stages in specs.values():
        if fixed:
            await driver.warm(stages, "r", fixed, memory_mib=SANDBOX_MIB)
    loop = asyncio.get_running_loop()
    begin, first = loop.time(), rollouts[0].at_s
    ready: list[float] = []

    counted_from = first + WARM_UP * (rollouts[-1].at_s - first)

    async def one(rollout: _Rollout) -> None:
        asked = loop.time()
        grant = await driver.acquire(rollout.stages, "r", memory_mib=SANDBOX_MIB)
        await asyncio.sleep(BIND_S)
        driver.bound(grant, BIND_S)
        if rollout.at_s >= counted_from:
            ready.append(loop.time() - asked)
        await asyncio.sleep(rollout.hold_s)
        driver.held(rollout.stages, rollout.hold_s)
        driver.give_back(grant.entry.name, clean=False)

    tasks = []
    for rollout in rollouts:
        await asyncio.sleep(max(0.0, begin + rollout.at_s - first - loop.time()))
        tasks.append(asyncio.create_task(one(rollout)))
    await asyncio.gather(*tasks)
    driver.close()
    await driver.wait_closed()
    return sum(ready) / len(ready)


async def measure(arguments: argparse.Namespace, _: str) -> list[Row]:
    return await asyncio.to_thread(_rows, arguments.traces)


def _rows(traces: Path) -> list[Row]:
    rows = []
    for path in sorted(traces.glob("*.jsonl")):
        rollouts = [_Rollout(line) for line in path.read_text().splitlines()]
        specs = len({one.stages[-1].key for one in rollouts})
        sizes = range(ROOM // specs + 1)
        fixed = {size: simulated(play(rollouts, adaptive=False, fixed=size)) for size in sizes}
        ours = simulated(play(rollouts, adaptive=True, fixed=0))
        best = min(fixed, key=lambda size: fixed[size])
        note = ", ".join(f"{size} each {mean_s * 1e3:.0f} ms" for size, mean_s in fixed.items())
        rows.append(
            _measure.number(
                f"{path.stem}: adaptive ÷ best fixed ({best} each)",
                "simulated",
                ours / fixed[best],
                "×",
                budget="< 1 ×",
                holds=ours < fixed[best],
                note=f"mean time to ready {ours * 1e3:.0f} ms; {note}; {len(rollouts)} rollouts",
            )
        )
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--traces", type=Path, default=TRACES, metavar="DIR", help="others than those that come along")


if __name__ == "__main__":
    raise SystemExit(_measure.main("adaptive", __doc__, measure, count=1, only=("process",), options=_options))
