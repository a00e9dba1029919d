"""Twenty specs on a real fleet of four Ray nodes: leases by state-distance beside leases on any node, and beside what the simulator predicts.

Each node is an agent with a store of its own that holds half of the specs' dependencies and no pool. The same arrivals are played twice, each time on a
fleet that begins with nothing: once every lease goes to a node that is drawn (what a load balancer does), once to the one that placement
finds nearest. Popularity is by Zipf's law with exponent 1, arrivals are at random, and a set-up waits 0.4 s for somebody else and writes 8 MiB.

The simulator plays the same arrivals through the same two policies, with what the steps cost in the *random* run: a stage as it was built there, or as
it came from another node, a creation as the leases took that lacked nothing. So what it predicts for state-distance is not taken from the run that it is
compared with.
Time to ready is from asking until the box is there; the first lease of each spec counts too, unless with `--warm` every spec is leased once before.
`--image tar` has an image that is the same on every machine: then a stage that another node has is fetched from it and not built again, whatever
the policy.
"""

import argparse
import asyncio
import importlib
import random
import tarfile
import tempfile
import time
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

import untax
from benchmarks import _measure, _repositories
from benchmarks._measure import Row
from untax.cluster.fleet import Fleet
from untax.core.ledger import Ledger
from untax.core.stage import Stage
from untax.leases import Bindings, checked
from untax.pool.simulation import Description, Outcome, Trace, simulate
from untax.pool.simulation.description import Nodes, Operations, Step, Steps

NODES, REPOS, SPECS, FILES = 4, 4, 20, 50
HOLD_S = 0.3
RATE_PER_S = 3.0
RATIO, WITHIN = 0.5, 0.2
SETUP_MIB, STORE_MIB = 8, 100  # of a set-up's layer, and of each node's store: half of the twenty, and the repositories
STEP = f"sleep 0.4; mkdir -p /opt/deps; head -c {SETUP_MIB}M /dev/urandom > /opt/deps/blob{{n}}"
STARTS = untax.PoolOptions().first_starting

Take = Callable[[untax.EnvSpec], Awaitable[untax.Box]]


@dataclass
class Played:
    """How one policy did, and what it shows of the steps."""

    ready_s: list[float] = field(default_factory=list)
    created_s: list[float] = field(default_factory=list)
    """Of leases for which nothing was built, and that waited for nobody."""
    built_s: dict[str, list[float]] = field(default_factory=dict)
    """By stage key."""
    fetched_s: dict[str, list[float]] = field(default_factory=dict)
    """The same of those that came from another node, without the wait for who built them."""
    released_s: list[float] = field(default_factory=list)
    wanted: dict[int, tuple[Stage, ...]] = field(default_factory=dict)
    nodes: dict[str, int] = field(default_factory=dict)

    def add(self, number: int, seconds: float, ledger: Ledger, node: str) -> None:
        self.ready_s.append(seconds)
        self.wanted[number] = ledger.wanted
        self.nodes[node] = self.nodes.get(node, 0) + 1
        if not ledger.stages and ledger.metrics()["queue_s"] < seconds / 2:  # otherwise it waited for what another had built
            self.created_s.append(seconds)
        self.learn(ledger)

    def learn(self, ledger: Ledger) -> None:
        """What its stages took."""
        for stage in ledger.wanted:
            if stage.name in ledger.fetched:
                self.fetched_s.setdefault(stage.key, []).append(ledger.fetched[stage.name])
            elif stage.name in ledger.stages:
                self.built_s.setdefault(stage.key, []).append(ledger.stages[stage.name])

    @property
    def mean_s(self) -> float:
        return mean(self.ready_s)

    def said(self) -> str:
        builds, fetches = (sum(map(len, took.values())) for took in (self.built_s, self.fetched_s))
        spread = "/".join(str(count) for count in sorted(self.nodes.values(), reverse=True))
        return (
            f"mean {self.mean_s * 1e3:.0f} ms, waits for {builds} builds and {fetches} fetches, {len(self.created_s)} leases lacked nothing; "
            f"leases by node {spread}"
        )


def _archive(directory: Path, place: Path) -> str:
    """An image that is the same everywhere, so that what stands on it travels between nodes."""
    with tarfile.open(place / "image.tar", "w") as archive:
        archive.add(directory, ".")
    return f"tar:{place / 'image.tar'}"


def _arrivals(count: int, seed: int) -> list[tuple[float, int]]:
    draws = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(SPECS)]
    at, found = 0.0, []
    for _ in range(count):
        at += draws.expovariate(RATE_PER_S)
        found.append((at, draws.choices(range(SPECS), weights)[0]))
    return found


# ---- the real ones ----


async def _play(arrivals: Sequence[tuple[float, int]], specs: Sequence[untax.EnvSpec], take: Take, *, is_warm: bool) -> Played:
    played = Played()
    for spec in specs if is_warm else ():
        box = await take(spec)
        played.learn(box.ledger)
        await box.release()

    async def rollout(number: int) -> None:
        asked = time.perf_counter()
        box = await take(specs[number])
        played.add(number, time.perf_counter() - asked, box.ledger, box._engine.label)  # type: ignore[attr-defined]
        (await box.run(["true"])).check()
        await asyncio.sleep(HOLD_S)
        given_up = time.perf_counter()
        await box.release()
        played.released_s.append(time.perf_counter() - given_up)

    begin = time.perf_counter()
    tasks = []
    for at, number in arrivals:
        await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
        tasks.append(asyncio.create_task(rollout(number)))
    await asyncio.gather(*tasks)
    return played


def _anywhere(fleet: Fleet, seed: int) -> Take:
    draws = random.Random(f"nodes {seed}")

    async def take(spec: untax.EnvSpec) -> untax.Box:
        node = draws.choice(sorted(fleet._nodes.values(), key=lambda one: one.label))
        return await node.fulfil(checked(fleet.offer, spec, Bindings()))

    return take


async def _on_a_fleet(
    address: str,
    place: Path,
    name: str,
    arrivals: Sequence[tuple[float, int]],
    specs: Sequence[untax.EnvSpec],
    arguments: argparse.Namespace,
) -> Played:
    async with Fleet(
        address, name=name, substrate="namespace", state_dir=place / name / "{node}", store_budget_mib=STORE_MIB, limits="warn"
    ) as fleet:
        if len(fleet._nodes) != NODES:
            raise SystemExit(f"fleet_mixed: {len(fleet._nodes)} nodes of {NODES} came up: {fleet.refusals}")
        for node in fleet._nodes.values():  # what no policy is to be measured by: the first sandbox of an engine
            await (await node.acquire()).release()
        take = _anywhere(fleet, arguments.seed) if name == "random" else fleet.acquire
        return await _play(arrivals, specs, take, is_warm=arguments.warm)


# ---- the simulated ones ----


def _predicted(arrivals: Sequence[tuple[float, int]], costs: Played, policy: str, arguments: argparse.Namespace) -> Outcome:
    """What is in place on every node is no rung of it: the base, and an image of one machine."""
    numbers = sorted({number for _, number in arrivals})
    before = len(numbers) if arguments.warm else 0
    arrivals = [*((float(at), number) for at, number in enumerate(numbers[:before])), *((before + at, number) for at, number in arrivals)]
    in_place = 1 if arguments.image == "tar" else 2
    specs = tuple(costs.wanted[number][in_place:] for number in numbers)
    built, fetched = _by_rung(costs, costs.built_s), _by_rung(costs, costs.fetched_s)
    stages = {stage.key: stage for spec in specs for stage in spec}
    build_s = {key: mean(costs.built_s.get(key) or [built[stage.name]]) for key, stage in stages.items()}
    fetch_s = {key: mean(costs.fetched_s.get(key) or [fetched[stage.name]]) for key, stage in stages.items() if stage.name in fetched}
    sizes = {"image": arguments.image_mib, "repo": 1, "deps": SETUP_MIB}
    description = Description(
        Nodes(nodes=NODES, memory_mib=1 << 20, sandbox_mib=1024, store_mib=STORE_MIB, starts=STARTS),
        Steps(**{name: Step(built.get(name, 0.0), size, fetched.get(name)) for name, size in sizes.items()}, spread=0.0),
        Operations(create_s=mean(costs.created_s), bind_s=0.0005, reset_s=mean(costs.released_s)),
        warmup=before / len(arrivals),
    )
    trace = Trace(
        specs,
        build_s,
        array("d", (at for at, _ in arrivals)),
        array("l", (numbers.index(number) for _, number in arrivals)),
        array("d", (HOLD_S for _ in arrivals)),
        fetch_s,
    )
    return simulate(description, trace, policy, arguments.seed)


def _by_rung(costs: Played, took: dict[str, list[float]]) -> dict[str, float]:
    """The mean of all stages of a name; without those of which there was none."""
    found: dict[str, list[float]] = {}
    for stage in {stage.key: stage for stages in costs.wanted.values() for stage in stages}.values():
        found.setdefault(stage.name, []).extend(took.get(stage.key, ()))
    return {name: mean(seconds) for name, seconds in found.items() if seconds}


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    images, raycluster = importlib.import_module("tests.images"), importlib.import_module("tests.raycluster")
    if reason := raycluster.unavailable_reason():
        raise SystemExit(f"fleet_mixed: {reason}")
    with tempfile.TemporaryDirectory(prefix="untax-bench-fleet-") as directory, raycluster.RayCluster(NODES) as cluster:
        place = Path(directory)
        repos = _repositories.made(place, REPOS, FILES)
        image = _archive(images.small_directory(), place) if arguments.image == "tar" else images.small_image(substrate)
        arguments.image_mib = -(-(place / "image.tar").stat().st_size >> 20) if arguments.image == "tar" else 0
        specs = [untax.EnvSpec(image, repo=repos[number % REPOS], setup=(STEP.format(n=number),), user="root") for number in range(SPECS)]
        arrivals = _arrivals(arguments.count, arguments.seed)
        anywhere = await _on_a_fleet(cluster.address, place, "random", arrivals, specs, arguments)
        nearest = await _on_a_fleet(cluster.address, place, "state-distance", arrivals, specs, arguments)
    predicted = {name: _predicted(arrivals, anywhere, name, arguments) for name in ("random", "state-distance")}
    ratio = nearest.mean_s / anywhere.mean_s
    begin = "every spec leased once before" if arguments.warm else "from nothing"
    note = f"{arguments.count} rollouts, {RATE_PER_S:g}/s, {begin}, image {arguments.image}, seed {arguments.seed}"
    rows = [
        _measure.compare("time to ready, random node", substrate, anywhere.ready_s, note=anywhere.said()),
        _measure.compare("time to ready, state-distance", substrate, nearest.ready_s, note=nearest.said()),
        _measure.number("state-distance ÷ random, means", substrate, ratio, "×", budget=f"≤ {RATIO:g} ×", holds=ratio <= RATIO, note=note),
    ]
    for name, played in (("state-distance", nearest), ("random", anywhere)):
        off = played.mean_s / predicted[name].mean_s
        is_asked = name == "state-distance"
        rows.append(
            _measure.number(
                f"{name}: measured ÷ simulated, means",
                substrate,
                off,
                "×",
                budget=f"{1 - WITHIN:g} to {1 + WITHIN:g} ×" if is_asked else "",
                holds=abs(off - 1) <= WITHIN if is_asked else None,
                note=f"simulated mean {predicted[name].mean_s * 1e3:.0f} ms, {predicted[name].builds} builds, {predicted[name].fetches} fetches",
            )
        )
    return rows


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--image",
        choices=("dir", "tar"),
        default="dir",
        help="tar: layers travel between nodes (default: %(default)s)",
    )
    parser.add_argument("--warm", action="store_true", help="every spec is leased once before, which is not counted")
    parser.add_argument("--seed", type=int, default=5, help="of the arrivals (default: %(default)s)")


if __name__ == "__main__":
    raise SystemExit(_measure.main("fleet_mixed", __doc__, measure, count=150, only=("namespace",), options=_options))
