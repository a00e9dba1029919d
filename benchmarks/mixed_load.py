"""Twenty specs that share ancestors, on a store that holds half of their dependency layers and memory for ten idle sandboxes.

Three ways to be ready for the same arrivals, each on the real engine:

- *state-distance*: the engine's own pool, adaptive, over staged layers; a miss builds only what is missing over the nearest ancestor.
- *exact-match*: a pool that knows whole specs only, as pools elsewhere do: ten idle sandboxes, set up completely, for the specs asked for most; a
  miss, and every refill, begins with the image: repository, then set-up, in the sandbox.
- *no pool*: staged layers and the same store budget, and nothing idle; it shows how much of the difference the layers make.

Every spec is leased once before, so that stores and pools are full. Time to ready is from asking until the first command could run; refills run beside it, as many at once as the engine starts.
"""

import argparse
import asyncio
import importlib
import random
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path

import untax
from benchmarks import _measure
from benchmarks._measure import Row

REPOS, SPECS, IDLE = 4, 20, 10
LAYER_MIB = 4
SETUP_S = 0.4  # what an installer spends on a network, beside the files it writes
RATE_PER_S, HOLD_S = 3.0, 0.3
RATIO = 0.5
FILES = 200
REFILLS = 4


def _repositories(place: Path) -> list[untax.Repo]:
    repos = []
    for number in range(REPOS):
        tree = place / f"repo{number}"
        tree.mkdir()
        git = ["git", "-C", str(tree), "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "init.defaultBranch=main"]
        subprocess.run([*git, "init", "--quiet"], check=True)
        for i in range(FILES):
            (tree / f"module{i}.py").write_text(f"x = {number * i}\n" * 20)
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", "all"], check=True)
        commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
        repos.append(untax.Repo(str(tree), commit))
    return repos


def _specs(repos: list[untax.Repo]) -> list[untax.EnvSpec]:
    image: str = importlib.import_module("tests.images").small_image(
        "namespace"
    )  # without Python, whose compiling would be most of a set-up
    step = "sleep {s}; mkdir -p /opt/deps; head -c {mib}M /dev/urandom > /opt/deps/blob{n}"
    return [
        untax.EnvSpec(image, repo=repos[number % REPOS], setup=(step.format(s=SETUP_S, mib=LAYER_MIB, n=number),), user="root")
        for number in range(SPECS)
    ]


def _arrivals(count: int, seed: int) -> list[tuple[float, int]]:
    """When, and which spec: popularity by Zipf's law, arrivals at random."""
    draws = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(SPECS)]
    at, found = 0.0, []
    for _ in range(count):
        at += draws.expovariate(RATE_PER_S)
        found.append((at, draws.choices(range(SPECS), weights)[0]))
    return found


Take = Callable[[untax.EnvSpec], Awaitable[untax.Box]]


async def _play(arrivals: list[tuple[float, int]], specs: list[untax.EnvSpec], take: Take) -> list[float]:
    """Seconds to ready of each, after every spec was leased once."""
    for spec in specs:
        await (await take(spec)).release()
    begin = time.perf_counter()
    took: list[float] = []

    async def rollout(spec: untax.EnvSpec) -> None:
        asked = time.perf_counter()
        box = await take(spec)
        took.append(time.perf_counter() - asked)
        (await box.run(["true"])).check()
        await asyncio.sleep(HOLD_S)
        await box.release()

    tasks = []
    for at, number in arrivals:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        tasks.append(asyncio.create_task(rollout(specs[number])))
    await asyncio.gather(*tasks)
    return took


class _ExactPool:
    """What is asked for most has idle sandboxes, one for each spec, made by `make`."""

    def __init__(self, make: Take) -> None:
        self._make = make
        self._idle: dict[untax.EnvSpec, list[untax.Box]] = {}
        self._asked: Counter[untax.EnvSpec] = Counter()
        self._making: set[untax.EnvSpec] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._starts = asyncio.Semaphore(REFILLS)
        self.hits = self.misses = 0

    async def take(self, spec: untax.EnvSpec) -> untax.Box:
        self._asked[spec] += 1
        idle = self._idle.get(spec)
        try:
            if idle:
                self.hits += 1
                return idle.pop()
            self.misses += 1
            async with self._starts:
                return await self._make(spec)
        finally:
            self._refill()

    def _refill(self) -> None:
        wanted = [spec for spec, _ in self._asked.most_common(IDLE)]
        for spec in wanted:
            if not self._idle.get(spec) and spec not in self._making:
                self._making.add(spec)
                task = asyncio.create_task(self._fill(spec))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _fill(self, spec: untax.EnvSpec) -> None:
        async with self._starts:
            box = await self._make(spec)
        self._making.discard(spec)
        self._idle.setdefault(spec, []).append(box)
        while sum(map(len, self._idle.values())) > IDLE:
            least = min((one for one in self._idle if self._idle[one]), key=lambda one: self._asked[one])
            await self._idle[least].pop().release()

    async def aclose(self) -> None:
        await asyncio.gather(*self._tasks)
        await asyncio.gather(*(box.release() for idle in self._idle.values() for box in idle))


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    arrivals = _arrivals(arguments.count, arguments.seed)
    with tempfile.TemporaryDirectory(prefix="untax-bench-repo-") as place:
        repos = _repositories(Path(place))
        specs = _specs(repos)
        budget_mib = LAYER_MIB * SPECS // 2 + REPOS * 2
        limits = untax.Limits().memory_mib
        room = IDLE + int(3 * RATE_PER_S * HOLD_S) + 2
        pool = untax.PoolOptions(adaptive=True, memory_mib=float(room * limits), linger_s=60.0)
        async with _measure.engine_on(substrate, store_budget_mib=budget_mib, pool=pool) as engine:
            ours = await _play(arrivals, specs, engine.acquire)
            status = engine.pools()
        async with _measure.engine_on(substrate) as engine:

            async def from_the_image(spec: untax.EnvSpec) -> untax.Box:
                box = await engine.acquire(untax.EnvSpec(spec.image), user="root")
                assert spec.repo is not None
                await box.upload(spec.repo.url, "/workspace/repo")
                (await box.shell(spec.setup[0])).check()
                return box

            exact = _ExactPool(from_the_image)
            theirs = await _play(arrivals, specs, exact.take)
            await exact.aclose()
        async with _measure.engine_on(substrate, store_budget_mib=budget_mib) as engine:
            layered = await _play(arrivals, specs, engine.acquire)
    note = f"{arguments.count} rollouts, {RATE_PER_S:g}/s, seed {arguments.seed}"
    mean = {name: sum(took) / len(took) for name, took in {"ours": ours, "exact": theirs, "layered": layered}.items()}
    ratio = mean["ours"] / mean["exact"]
    hits = f"{status.exact} exact, {status.partial} partial, {status.cold} cold"
    return [
        _measure.compare("time to ready, state-distance", substrate, ours, note=f"mean {mean['ours'] * 1e3:.0f} ms; {hits}; {note}"),
        _measure.compare(
            "time to ready, exact-match",
            substrate,
            theirs,
            note=f"mean {mean['exact'] * 1e3:.0f} ms; {exact.hits} hits, {exact.misses} misses",
        ),
        _measure.compare(
            "time to ready, no pool",
            substrate,
            layered,
            note=f"mean {mean['layered'] * 1e3:.0f} ms",
        ),
        _measure.number("state-distance ÷ exact-match, means", substrate, ratio, "×", budget=f"≤ {RATIO:g} ×", holds=ratio <= RATIO),
        _measure.number("state-distance ÷ no pool, means", substrate, mean["ours"] / mean["layered"], "×", budget="", holds=None),
    ]


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=5, help="of the arrivals (default: %(default)s)")


if __name__ == "__main__":
    raise SystemExit(_measure.main("mixed_load", __doc__, measure, count=90, only=("namespace",), options=_options))
