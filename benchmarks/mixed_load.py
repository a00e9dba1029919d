"""Twenty specs that share ancestors, with memory for ten idle sandboxes and a store that holds half of their dependency layers.

Two ways to be ready for the same arrivals, each on the real engine:

- *state-distance*: the engine as it is. A lease begins with whatever is closest: an idle sandbox of its spec, or the layers of its spec, or those of its
  repository, over which only the dependencies are installed.
- *exact-match-only*: the same pool (the same code, sizes that follow demand, admission, memory), which is told of each spec nothing but whether it
  is the same: there is an idle sandbox of that very spec, or one is made from the image, as pools elsewhere do. What is idle was made so as well.
- with `--bare`, *no pool*: the engine's layers and the same store budget, and nothing idle.

How the issue's sentence is read. *Sharing ancestors*: five specs each over four repositories, over one image with Python; what differs is the dependencies.
*Memory for ten pools*: idle and leased sandboxes together have room for ten beside what is leased on the average, in both pools alike. *A store budget
that holds half the dependency layers*: those of ten specs and of the four repositories, as measured in a first build; the engine's budget is for what
is kept beside the layers that sandboxes stand on, as the exact-match pool's sandboxes have their dependencies on the disk beside any budget, too. The program looks
whether the budget was kept. *The load*: popularity by Zipf's law with exponent 1, arrivals at random. *Set-up* is what a repository's often is: pip
installs wheels from a local directory (two hundred modules that all specs have, a hundred of their own), here with no network; `--setup sleep` is a set-up
that waits 0.4 s for somebody else and writes 8 MiB, which costs the machine nothing. The pace is such that a pool which sets up every sandbox anew keeps this
machine about half busy with that (one rollout in 1.5 s with wheels, three a second otherwise): faster, and it would be measured how exact-match queues.

Every spec is leased once before, so that stores and pools are full. Time to ready is from asking until the first command could run.
"""

import argparse
import asyncio
import importlib
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import untax
from benchmarks import _measure, _repositories
from benchmarks._measure import Row
from untax.core.stage import Stage
from untax.pool import events as ev
from untax.pool.costs import Costs
from untax.pool.pool import PoolDriver

REPOS, SPECS, IDLE = 4, 20, 10
HOLD_S = 0.3
RATIO = 0.5
FILES = 200
COMMON, OWN = 200, 100  # modules in a wheel
MEMORY_MIB = untax.Limits().memory_mib
AT_ONCE = 2  # leases while the stores and pools are filled
_MIB = 1 << 20


@dataclass(frozen=True)
class Setup:
    """`{n}` is the number of the spec."""

    image: str
    step: str
    rate_per_s: float
    wheels: Path | None = None


def _sleeping() -> Setup:
    images = importlib.import_module("tests.images")
    step = "sleep 0.4; mkdir -p /opt/deps; head -c 8M /dev/urandom > /opt/deps/blob{n}"
    return Setup(images.small_image("namespace"), step, rate_per_s=3.0)


def _installing(place: Path) -> Setup:
    images = importlib.import_module("tests.images")
    wheels = place / "wheels"
    wheels.mkdir()
    _wheel(wheels, "common", COMMON)
    for number in range(SPECS):
        _wheel(wheels, f"own{number}", OWN)
    step = "python3 -m pip install --quiet --no-index --find-links /var/tmp/wheels --target /opt/deps common own{n}"
    # Images come with their library compiled; this one is made without.
    image = place / "image"
    shutil.copytree(images.tools_directory(), image, symlinks=True)
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(image / "usr/local/lib")], check=True)
    return Setup(f"dir:{image}", step, rate_per_s=1 / 1.5, wheels=wheels)


def _wheel(place: Path, name: str, modules: int) -> None:
    """A package of so many modules, each like one that people write: eighty functions, nine kilobytes."""
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(place / f"{name}-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        names = [f"{name}/__init__.py", *(f"{name}/m{number}.py" for number in range(modules - 1))]
        for number, path in enumerate(names):
            lines = (f'def f{i}(x, y={i}):\n    """{name} {number}."""\n    return [x + y for _ in range({i})]\n\n\n' for i in range(80))
            wheel.writestr(path, "".join(lines))
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: bench\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "".join(f"{path},,\n" for path in names))


def _specs(setup: Setup, repos: list[untax.Repo]) -> list[untax.EnvSpec]:
    return [
        untax.EnvSpec(setup.image, repo=repos[number % REPOS], setup=(setup.step.format(n=number),), user="root") for number in range(SPECS)
    ]


def _arrivals(count: int, seed: int, rate_per_s: float) -> list[tuple[float, int]]:
    """When, and which spec: popularity by Zipf's law, arrivals at random."""
    draws = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(SPECS)]
    at, found = 0.0, []
    for _ in range(count):
        at += draws.expovariate(rate_per_s)
        found.append((at, draws.choices(range(SPECS), weights)[0]))
    return found


# ---- playing it ----


class _Held(Protocol):
    """What both kinds of pool give."""

    kind: str

    async def run(self, argv: list[str]) -> untax.CommandResult: ...

    async def release(self) -> None: ...


Take = Callable[[untax.EnvSpec], Awaitable[_Held]]


@dataclass
class Played:
    took: list[tuple[str, float]]
    """How each was served, and seconds to ready."""
    note: str = ""

    @property
    def seconds(self) -> list[float]:
        return [seconds for _, seconds in self.took]

    @property
    def mean_s(self) -> float:
        return sum(self.seconds) / len(self.took)

    def said(self) -> str:
        """The mean, and where it comes from."""
        kinds = sorted({kind for kind, _ in self.took})
        parts = [[seconds for kind, seconds in self.took if kind == one] for one in kinds]
        each = ", ".join(f"{len(part)} {kind} ({1e3 * sum(part) / len(part):.0f} ms)" for kind, part in zip(kinds, parts, strict=True))
        return f"mean {self.mean_s * 1e3:.0f} ms: {each}" + (f"; {self.note}" if self.note else "")


async def _play(arrivals: list[tuple[float, int]], specs: list[untax.EnvSpec], take: Take) -> Played:
    """After every spec was leased once."""
    places = asyncio.Semaphore(AT_ONCE)

    async def first(spec: untax.EnvSpec) -> None:
        async with places:
            await (await take(spec)).release()

    await asyncio.gather(*map(first, specs))
    begin = time.perf_counter()
    took: list[tuple[str, float]] = []

    async def rollout(spec: untax.EnvSpec) -> None:
        asked = time.perf_counter()
        box = await take(spec)
        took.append((box.kind, time.perf_counter() - asked))
        (await box.run(["true"])).check()
        await asyncio.sleep(HOLD_S)
        await box.release()

    tasks = []
    for at, number in arrivals:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        tasks.append(asyncio.create_task(rollout(specs[number])))
    await asyncio.gather(*tasks)
    return Played(took)


def _pool_options(rate_per_s: float) -> untax.PoolOptions:
    room = IDLE + math.ceil(rate_per_s * HOLD_S)
    return untax.PoolOptions(adaptive=True, memory_mib=float(room * MEMORY_MIB), linger_s=60.0, first_starting=8)


# ---- the engine's own ----


class _Ours:
    def __init__(self, box: untax.Box) -> None:
        hit = box.ledger.hit
        assert hit is not None
        self.kind = (
            "exact" if hit.kind == "exact" else f"{hit.kind} over {hit.start}" + (f", built {'+'.join(hit.missing)}" if hit.missing else "")
        )
        self.run, self.release = box.run, box.release


async def _by_state(
    arrivals: list[tuple[float, int]],
    specs: list[untax.EnvSpec],
    substrate: str,
    setup: Setup,
    budget_mib: int,
    pool: untax.PoolOptions | None,
) -> Played:
    async with _measure.engine_on(substrate, store_budget_mib=budget_mib, pool=pool, setup_wheels=setup.wheels) as engine:

        async def take(spec: untax.EnvSpec) -> _Held:
            return _Ours(await engine.acquire(spec))

        played = await _play(arrivals, specs, take)
        await asyncio.sleep(2.0)  # until the store has been looked at after the last lease
        store = engine.warehouse.store
        used = [layer.bytes for layer in store.layers() if store.is_in_use(layer.id)]
        kept = [layer.bytes for layer in store.layers() if not store.is_in_use(layer.id)]
        played.note = f"{len(kept)} layers kept ({sum(kept) / _MIB:.0f} of {budget_mib} MiB) beside {len(used)} in use"
        if sum(kept) > budget_mib * _MIB:
            raise SystemExit(f"the store kept {sum(kept)} bytes, beyond its budget: this run shows nothing")
    return played


async def _budget_mib(spec: untax.EnvSpec, substrate: str, setup: Setup) -> int:
    """For half of the dependency layers, and the repositories."""
    async with _measure.engine_on(substrate, setup_wheels=setup.wheels) as engine:
        await (await engine.acquire(spec)).release()
        store = engine.warehouse.store
        sizes = {one.name: sum(store.layer(layer).bytes for layer in one.adds) for one in store.stages()}
    return math.ceil((sizes["deps"] * SPECS // 2 + sizes["repo"] * REPOS) / _MIB)


# ---- pools that know whole specs only ----


@dataclass
class _Whole:
    """A sandbox of one spec, set up completely."""

    name: str
    box: untax.Box


class _Theirs:
    def __init__(self, driver: PoolDriver[untax.EnvSpec, _Whole], stages: tuple[Stage, ...], entry: _Whole, kind: str) -> None:
        self._driver, self._stages, self._entry = driver, stages, entry
        self._since = time.perf_counter()
        self.kind = "exact" if kind == "exact" else "made"
        self.run = entry.box.run

    async def release(self) -> None:
        await self._entry.box.release()
        self._driver.held(self._stages, time.perf_counter() - self._since)
        self._driver.give_back(self._entry.name, clean=False, is_gone=True)


class _FromTheImage:
    """How an exact-match pool makes what it keeps, and what it lacks."""

    def __init__(self, engine: untax.Engine, setup: Setup, costs: Costs) -> None:
        self._engine, self._setup, self._costs = engine, setup, costs

    async def make(self, order: ev.Create, request: untax.EnvSpec) -> _Whole:
        begin = time.perf_counter()
        box = await self._engine.acquire(untax.EnvSpec(request.image), user="root")
        created = time.perf_counter()
        assert request.repo is not None
        await box.upload(request.repo.url, "/workspace/repo")
        if self._setup.wheels is not None:
            await box.upload(self._setup.wheels, "/var/tmp/wheels")
        (await box.shell(request.setup[0])).check()
        self._costs.observe("create", created - begin)
        self._costs.observe_stage(order.stages[-1], time.perf_counter() - created)
        return _Whole(box.id, box)

    async def destroy(self, entry: _Whole) -> None:
        await entry.box.release()


async def _by_match(
    arrivals: list[tuple[float, int]], specs: list[untax.EnvSpec], substrate: str, setup: Setup, pool: untax.PoolOptions
) -> Played:
    async with _measure.engine_on(substrate) as engine:
        costs = Costs()
        driver: PoolDriver[untax.EnvSpec, _Whole] = PoolDriver(
            _FromTheImage(engine, setup, costs), pool, shares_stages=False, upgrades_in_place=False, costs=costs
        )

        async def take(spec: untax.EnvSpec) -> _Held:
            stages = (Stage("deps", f"spec{specs.index(spec)}", {}, None, is_portable=False),)
            grant = await driver.acquire(stages, spec, memory_mib=MEMORY_MIB)
            driver.bound(grant, 0.0005)
            return _Theirs(driver, stages, grant.entry, grant.order.kind)

        try:
            return await _play(arrivals, specs, take)
        finally:
            driver.close()
            await driver.wait_closed()


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="untax-bench-repo-") as place:
        setup = _installing(Path(place)) if arguments.setup == "wheels" else _sleeping()
        arrivals = _arrivals(arguments.count, arguments.seed, setup.rate_per_s)
        specs = _specs(setup, _repositories.made(Path(place), REPOS, FILES))
        budget_mib = await _budget_mib(specs[0], substrate, setup)
        pool = _pool_options(setup.rate_per_s)
        ours = await _by_state(arrivals, specs, substrate, setup, budget_mib, pool)
        theirs = await _by_match(arrivals, specs, substrate, setup, pool)
        bare = await _by_state(arrivals, specs, substrate, setup, budget_mib, None) if arguments.bare else None
    ratio = ours.mean_s / theirs.mean_s
    note = f"{arguments.count} rollouts, {setup.rate_per_s:.2g}/s, {arguments.setup}, seed {arguments.seed}"
    rows = [
        _measure.compare("time to ready, state-distance", substrate, ours.seconds, note=ours.said()),
        _measure.compare("time to ready, exact-match-only", substrate, theirs.seconds, note=theirs.said()),
        _measure.number(
            "state-distance ÷ exact-match-only, means", substrate, ratio, "×", budget=f"≤ {RATIO:g} ×", holds=ratio <= RATIO, note=note
        ),
    ]
    if bare is not None:
        rows.insert(2, _measure.compare("time to ready, no pool", substrate, bare.seconds, note=bare.said()))
        rows.append(_measure.number("state-distance ÷ no pool, means", substrate, ours.mean_s / bare.mean_s, "×", budget="", holds=None))
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=5, help="of the arrivals (default: %(default)s)")
    parser.add_argument("--setup", choices=("wheels", "sleep"), default="wheels", help="what a set-up does (default: %(default)s)")
    parser.add_argument("--bare", action="store_true", help="also the engine without a pool")


if __name__ == "__main__":
    raise SystemExit(_measure.main("mixed_load", __doc__, measure, count=30, only=("namespace",), options=_options))
