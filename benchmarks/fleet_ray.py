"""A fleet of four Ray nodes on this machine beside embedded engines: what the way to another node costs, and whether four agents serve what four engines do.

Actions go to a sandbox of another node over TLS, in turns with the same on an embedded engine's. Warm leases are hits, as in `warm_lease`, one after the other as a worker has them, and once more such that each is
asked for; every call that this process makes to Ray meanwhile is counted. For the throughput four clients lease, run `true` and release as fast as they can, each with two leases at once: from the fleet with a client on each node, as a
trainer's workers are, from four `untax serve` with a client each, and from four engines in the clients' own processes. Once more from the
fleet with all clients on its head's node, so that most leases and their actions go over TLS. All of them are there from the beginning and take turns of five seconds, so that a machine
that becomes slower does so for each; what is compared are neighbouring turns. Before each the file systems that sandboxes were written to are done with those of the turns before: they
would be at times that suit them, half a minute later, and take a tenth to a half of whoever has its turn then. The first two seconds of each are not counted: what is asked for is what is sustained, and a client of a fleet that has rested first
hears from every node again and leases a few before the next come with the end of the last.
"""

import argparse
import asyncio
import contextlib
import fcntl
import importlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import untax
from benchmarks import _measure
from benchmarks._measure import Row
from benchmarks.served import NOT_AHEAD_S, POOL, _alternating, warm_leases
from untax.cluster.fleet import Fleet

ACTION_MS, LEASE_MS = 0.3, 1.0  # issue 9: ≤ embedded + this at p50
SHARE = 0.9  # issue 9: of the leases per second of four separate engines
NODES, AT_ONCE = 4, 2
ROUNDS = 8
LEAD_S, TURN_S = 2.0, 3.0  # of a turn: until pools, hands and views are what they stay, and what is counted
PAUSE_S = 0.3  # between turns: the kernel is not done with a sandbox when its end is told
BTRFS_IOC_SYNC = 0x9408  # commit, and begin to clean up after subvolumes that were deleted
QUIET_S, SETTLED_S = 0.3, 20.0  # without any cleaning, and at most

CLIENT = """
import asyncio, json, sys, time, untax
kind, where, state, at_once, node = sys.argv[1:6]

async def turn(engine, lead_s, counted_s):
    begin = time.monotonic() + lead_s
    end = begin + counted_s
    done = 0
    async def leases():
        nonlocal done
        while (now := time.monotonic()) < end:
            async with engine.lease() as box:
                (await box.run(["true"])).check()
            done += begin <= now
    await asyncio.gather(*(leases() for _ in range(int(at_once))))
    return done / (time.monotonic() - begin)

async def main():
    if kind == "fleet":
        import ray
        ray.init(
            json.loads(where)["ray_address"], namespace="untax", log_to_driver=False, configure_logging=False, _node_ip_address=node
        )
        engine = untax.Fleet.from_ticket(where)
    else:
        engine = untax.connect(where) if kind == "served" else untax.Engine("namespace", state_dir=state)
    async with engine:
        await engine.warm(None, 4 if kind != "fleet" else 16)
        async with engine.lease() as box:
            await box.run(["true"])
        print("ready", flush=True)
        while said := await asyncio.to_thread(sys.stdin.readline):
            print(await turn(engine, *map(float, said.split())), flush=True)

asyncio.run(main())
"""


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    raycluster = importlib.import_module("tests.raycluster")
    if reason := raycluster.unavailable_reason():
        raise SystemExit(f"fleet_ray: {reason}")
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place, raycluster.RayCluster(NODES) as cluster:
        async with untax.Fleet(cluster.address, state_dir=f"{place}/fleet/{{node}}") as fleet:
            async with _measure.engine_on(substrate, Path(place) / "embedded") as engine:
                rows = await _actions(arguments.count, fleet, engine)
                rows += await _leases(max(20, arguments.count // 3), fleet, engine)
            if arguments.rounds:
                rows += await asyncio.to_thread(_throughput, fleet, Path(place), arguments.rounds)
    return rows


async def _actions(count: int, fleet: Fleet, engine: untax.Engine) -> list[Row]:
    other = next(node for node in fleet._nodes.values() if not node.is_here)
    rows = []
    async with engine.lease() as own, other.lease() as there:
        for box in (own, there):
            await box.write("kibibyte", b"x" * 1024)
        for what, act in (("run true", lambda box: box.run(["true"])), ("read 1 KiB", lambda box: box.read("kibibyte"))):
            ours, embedded = await _alternating(count, lambda act=act: act(there), lambda act=act: act(own))  # type: ignore[misc]
            rows.append(_row(f"{what} on another node", ours, embedded, ACTION_MS))
    return rows


async def _leases(count: int, fleet: Fleet, engine: untax.Engine) -> list[Row]:
    spec = _measure.spec_for("namespace")
    await fleet.warm(spec, POOL * NODES)
    await engine.warm(spec, POOL)
    with importlib.import_module("tests.raycluster").counted() as calls:
        ours, embedded, kinds = await warm_leases(count, fleet, engine, spec)
        single, beside, asked = await warm_leases(count, fleet, engine, spec, ttl_s=NOT_AHEAD_S)
    note = f"native: embedded; hits: {kinds}; calls to Ray: {len(calls)}"
    return [
        _row("warm lease through the fleet", ours, embedded, LEASE_MS, note),
        _measure.compare("  where each is asked for", "namespace", single, beside, note=f"native: embedded; hits: {asked}"),
        _measure.number(
            "calls to Ray meanwhile",
            "namespace",
            float(len(calls)),
            "",
            budget="none",
            holds=not calls,
            note=f"in {len(ours) + len(single)} leases",
        ),
    ]


def _throughput(fleet: Fleet, place: Path, rounds: int) -> list[Row]:
    nodes = [member.address for member in fleet.members]
    head = next(node.member.address for node in fleet._nodes.values() if node.is_here)
    with _servers(place) as urls:
        where = {
            "fleet": [("fleet", fleet.ticket(), node) for node in nodes],
            "embedded": [("embedded", "-", "-")] * NODES,
            "served": [("served", url, "-") for url in urls],
            "one node": [("fleet", fleet.ticket(), head)] * NODES,
        }
        found: dict[str, list[float]] = {kind: [] for kind in where}
        with contextlib.ExitStack() as stack:
            clients = {kind: stack.enter_context(_clients(some, place)) for kind, some in where.items()}
            for turn in range(rounds):
                for kind in list(where)[:: 1 if turn % 2 else -1]:
                    found[kind].append(_turn(clients[kind]))
    rate = {kind: statistics.median(rates) for kind, rates in found.items()}

    def share(of: str, kind: str = "fleet") -> float:
        return statistics.median(one / other for one, other in zip(found[kind], found[of], strict=True))

    ratio = share("embedded")
    return [
        _measure.number(
            "leases/s of four agents ÷ of four engines", "namespace", ratio, "×", budget=f"≥ {SHARE:g}", holds=ratio >= SHARE,
            note=f"{rate['fleet']:.0f}/s, a client on each node, against {rate['embedded']:.0f}/s, each in its client's own process; medians of {rounds} turns",
        ),
        _measure.number(
            "  ÷ of four served engines", "namespace", share("served"), "×", budget="", holds=None,
            note=f"{rate['served']:.0f}/s, with a client each, {share('embedded', 'served'):.2f} × of four engines",
        ),
        _measure.number(
            "  all clients on one node ÷ four engines", "namespace", share("embedded", "one node"), "×", budget="", holds=None,
            note=f"{rate['one node']:.0f}/s, most of them over TLS",
        ),
    ]  # fmt: skip


@contextlib.contextmanager
def _servers(place: Path) -> Iterator[list[str]]:
    with contextlib.ExitStack() as stack:
        urls = []
        for number in range(NODES):
            socket = place / f"s{number}"
            argv = [sys.executable, "-m", "untax.cli", "serve", "--socket", str(socket), "--state-dir", f"{place}/served{number}", "--json"]
            server = subprocess.Popen([*argv, "--limits", "warn", "--drain", "0"], stdout=subprocess.PIPE)
            stack.callback(server.wait)
            stack.callback(server.terminate)
            assert server.stdout is not None
            if not server.stdout.readline():
                raise SystemExit("fleet_ray: a server did not start")
            urls.append(f"unix:{socket}")
        yield urls


@contextlib.contextmanager
def _clients(where: list[tuple[str, str, str]], place: Path) -> Iterator[list[subprocess.Popen[str]]]:
    clients = [
        subprocess.Popen(
            [sys.executable, "-c", CLIENT, kind, one, f"{place}/own{number}", str(AT_ONCE), node],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": "src"},
        )
        for number, (kind, one, node) in enumerate(where)
    ]  # fmt: skip
    try:
        for client in clients:
            if _said(client) != "ready":
                raise SystemExit("fleet_ray: a client did not start")
        yield clients
        for client in clients:
            client.communicate(timeout=60)
    finally:
        for client in clients:
            if client.poll() is None:
                client.kill()
                client.wait()


def _turn(clients: list[subprocess.Popen[str]]) -> float:
    """Leases a second of all of them together."""
    _settle()
    time.sleep(PAUSE_S)
    for client in clients:
        assert client.stdin is not None
        client.stdin.write(f"{LEAD_S} {TURN_S}\n")
        client.stdin.flush()
    return sum(float(_said(client)) for client in clients)


def _settle() -> None:
    """Return once no store cleans up any more: nobody is to have that of another's turn in its own."""
    for store in _stores():
        fd = os.open(store, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(fd, BTRFS_IOC_SYNC)
        finally:
            os.close(fd)
    end_s = time.monotonic() + SETTLED_S
    cleaned, since_s = _cleaning_ns(), time.monotonic()
    while since_s + QUIET_S > time.monotonic() and time.monotonic() < end_s:
        time.sleep(QUIET_S / 3)  # it has no event
        if (now := _cleaning_ns()) - cleaned > 200_000:  # more than waking up and finding nothing takes
            since_s = time.monotonic()
        cleaned = now


def _stores() -> Iterator[str]:
    """The loop images of all engines, each as its launcher has it mounted."""
    seen = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if b"\0launcher\0" not in (process / "cmdline").read_bytes():
                continue
            for line in (process / "mountinfo").read_text().splitlines():
                device, _, path = line.split()[2:5]
                if " - btrfs " in line and device not in seen:
                    seen.add(device)
                    yield f"{process}/root{path}"


def _cleaning_ns() -> int:
    """What the kernel's threads have spent on it so far."""
    spent = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (process / "comm").read_text().startswith(("btrfs-cleaner", "btrfs-transacti")):
                spent += int((process / "schedstat").read_text().split()[0])
    return spent


def _said(client: subprocess.Popen[str]) -> str:
    assert client.stdout is not None
    return client.stdout.readline().strip()


def _row(what: str, ours: list[float], embedded: list[float], more_ms: float, note: str = "native: embedded") -> Row:
    def holds(row: Row) -> bool:
        assert row.native_p50 is not None
        return row.p50 <= row.native_p50 + more_ms

    return _measure.compare(what, "namespace", ours, embedded, budget=f"≤ embedded + {more_ms:g} ms at p50", holds=holds, note=note)


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help="turns of each kind of four clients; 0 for none (default: %(default)s)"
    )


if __name__ == "__main__":
    raise SystemExit(_measure.main("fleet_ray", __doc__, measure, count=300, options=_arguments, only=("namespace",)))
