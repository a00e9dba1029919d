"""Containers: dispatch over the held channel beside one exec of the engine each, cold create beside namespace, cycles, and a frozen engine.

Starts a dockerd and a podman of its own (root), in directories of their own, and stops them; nothing of the machine's own engines is touched.
`--part` picks one of: dispatch, warm, cold, starts, cycles, freeze.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from tests.engines_fixture import Docker, Podman, _home
from tests.images import small_directory

import untax
from benchmarks import _measure
from benchmarks._measure import Row
from untax.core.substrate import Incumbent

DISPATCH_MS = 1.0  # issue 7
WARM_MS = 5.0
SHARE = 20
FASTER = 50
CYCLES = 200
SETTLE_S = 0.5  # an engine goes on working after its answer, and would be measured with the next one
PARTS = ("dispatch", "warm", "cold", "starts", "cycles", "freeze")
SPEC = untax.EnvSpec(image=f"dir:{small_directory()}", isolation="container")
NAMESPACE_SPEC = untax.EnvSpec(image=f"dir:{small_directory()}")

_own: dict[str, Any] = {}


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engine", action="append", choices=("docker", "podman"), help="only this one; may be repeated")
    parser.add_argument("--part", action="append", choices=PARTS, help="only this; may be repeated")
    parser.add_argument("--cycles", type=int, default=CYCLES, help="create, run, destroy (default: %(default)s)")
    parser.add_argument("--freeze-s", type=float, default=30.0, help="how long the engine stands still (default: %(default)g)")


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    rows: list[Row] = []
    for engine in arguments.engine or _own:
        socket = str(_own[engine].socket)
        for part in arguments.part or PARTS:
            print(f"{engine}: {part}", file=sys.stderr, flush=True)
            rows += await globals()[part](arguments, substrate, engine, socket)
    return rows


# ---- dispatch ----


async def dispatch(arguments: argparse.Namespace, substrate: str, engine: str, socket: str) -> list[Row]:
    """Round trip less the time inside, of one `true`. The incumbent's time inside is taken to be the held channel's."""
    held: list[float] = []
    inside: list[float] = []
    incumbent: list[float] = []
    async with _measure.engine_on(substrate, engine=engine, socket=socket) as opened, opened.lease(SPEC) as box:
        sandbox: Any = box.sandbox
        for turn in range(arguments.count + _measure.WARM_UP):
            result = await box.run(["true"])
            held.append(result.round_trip_s - result.elapsed_s)
            inside.append(result.elapsed_s)
            if turn % 4 == 0:
                incumbent.append((await sandbox.run_incumbent(["true"], timeout_s=30)).round_trip_s)
    held, incumbent = held[_measure.WARM_UP :], incumbent[2:]
    typical = statistics.median(inside)
    theirs = [trip - typical for trip in incumbent]
    ours = _measure.compare(
        f"dispatch, held channel ({engine})",
        substrate,
        held,
        budget=f"≤ {DISPATCH_MS:g} ms at p50",
        holds=lambda row: row.p50 <= DISPATCH_MS,
    )
    exec_row = _measure.compare(f"dispatch, one exec each ({engine})", substrate, theirs)
    share = exec_row.p50 / ours.p50
    return [
        ours,
        exec_row,
        _measure.number(f"incumbent ÷ held ({engine})", substrate, share, "×", budget=f"≥ {SHARE}", holds=share >= SHARE),
    ]


# ---- warm leases ----


async def warm(arguments: argparse.Namespace, substrate: str, engine: str, socket: str) -> list[Row]:
    async with _measure.engine_on(substrate, engine=engine, socket=socket) as opened:
        return await _measure.warm_first(opened, SPEC, f"{substrate} ({engine})", max(10, arguments.count // 20), WARM_MS)


# ---- cold create ----


async def cold(arguments: argparse.Namespace, substrate: str, engine: str, socket: str) -> list[Row]:
    """From asking to the result of the first `true`: by the held channel, by one exec, and on namespace, in turn."""
    samples: dict[str, list[float]] = {"held": [], "exec": [], "namespace": []}
    async with (
        _measure.engine_on(substrate, engine=engine, socket=socket) as containers,
        _measure.engine_on("namespace") as namespaces,
    ):

        async def first(opened: untax.Engine, spec: untax.EnvSpec, kind: str) -> None:
            begin = time.perf_counter()
            box = await opened.acquire(spec)
            try:
                if kind == "exec":
                    await cast("Incumbent", box.sandbox).run_incumbent(["true"], timeout_s=30)
                else:
                    (await box.run(["true"])).check()
                samples[kind].append(time.perf_counter() - begin)
            finally:
                await box.release()

        for _ in range(max(10, arguments.count // 10)):
            await first(containers, SPEC, "held")
            await first(containers, SPEC, "exec")
            await asyncio.sleep(SETTLE_S)
            for _ in range(6):  # the first of them after half a second of nothing, which is not what is measured
                await first(namespaces, NAMESPACE_SPEC, "namespace")
            del samples["namespace"][-6]
    namespace = _measure.compare("cold create to first result", "namespace", samples["namespace"][5:])
    by_exec = _measure.compare(f"cold create to first exec ({engine})", substrate, samples["exec"][1:])
    faster = by_exec.p50 / namespace.p50
    budget = f"≥ {FASTER}" if engine == "docker" else ""
    return [
        _measure.compare(f"cold create to first result ({engine})", substrate, samples["held"][1:]),
        by_exec,
        namespace,
        _measure.number(f"{engine} ÷ namespace", "namespace", faster, "×", budget=budget, holds=faster >= FASTER if budget else None),
    ]


async def starts(_: argparse.Namespace, substrate: str, engine: str, socket: str) -> list[Row]:
    """How many containers a second come of so many starts at once: where the default of `starts` comes from."""
    rows = []
    for cap in (1, 2, 4, 8, 16):
        async with _measure.engine_on(substrate, engine=engine, socket=socket, starts=cap) as opened:
            async with opened.lease(SPEC):
                pass

            async def one(opened: untax.Engine = opened) -> None:
                await (await opened.acquire(SPEC)).release()

            begin = time.perf_counter()
            await asyncio.gather(*(one() for _ in range(24)))
            rate = 24 / (time.perf_counter() - begin)
        rows.append(_measure.number(f"{cap} starts at once ({engine})", substrate, rate, "/s", budget="", holds=None))
    return rows


# ---- what is left ----


def census(home: Path) -> Counter[str]:
    """What this machine has of an engine's: mounts below its directory, processes that name it or hang below us, and our own descriptors."""
    found: Counter[str] = Counter()
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if str(home) in line:
            found[f"mount {line.split()[4].removeprefix(str(home))}"] += 1
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            if name.isdigit() and str(home).encode() in Path(f"/proc/{name}/cmdline").read_bytes():
                found["processes"] += 1
    found["cgroups"] = sum(f"untax-test-{os.getpid()}" in where or "libpod-" in where for where, _, _ in os.walk("/sys/fs/cgroup"))
    found["descriptors"] = len(os.listdir("/proc/self/fd"))
    found["entries"] = sum(1 for _ in (home / ("data/containers" if (home / "data").exists() else "root/overlay-containers")).glob("*"))
    return found


async def cycles(arguments: argparse.Namespace, substrate: str, engine: str, socket: str) -> list[Row]:
    home = _own[engine].home
    took: list[float] = []
    async with _measure.engine_on(substrate, engine=engine, socket=socket) as opened:

        async def cycle() -> None:
            begin = time.perf_counter()
            async with opened.lease(SPEC) as box:
                (await box.run(["true"])).check()
            took.append(time.perf_counter() - begin)

        async def several(count: int) -> None:
            for _ in range(count):
                await cycle()

        await asyncio.gather(*(several(2) for _ in range(4)))
        await asyncio.sleep(2)
        before = census(home)
        took.clear()
        await asyncio.gather(*(several(arguments.cycles // 4) for _ in range(4)))
        for _ in range(50):  # an engine goes on cleaning up after it has answered
            await asyncio.sleep(0.2)
            if not (left := census(home) - before):
                break
        named = await opened.substrate._list(opened.substrate._labels)  # type: ignore[attr-defined]
    left["containers"] += len(named)
    left = +left
    return [
        _measure.compare(f"one cycle, four at once ({engine})", substrate, took),
        _measure.number(
            f"left after {len(took)} cycles ({engine})",
            substrate,
            left.total(),
            "things",
            budget="nothing",
            holds=not left,
            note=f"{dict(left)}" if left else "",
        ),
    ]


# ---- a frozen engine ----


async def freeze(arguments: argparse.Namespace, substrate: str, engine: str, socket: str) -> list[Row]:
    """`kill -STOP` under load. Each call has a deadline; how far beyond it each ends is what counts, and what it ends with."""
    own = _own[engine]
    pid = own._daemon.pid if engine == "docker" else own._service.pid
    answer_s, action_s = 5.0, 2.0
    over: list[float] = []
    outcomes: Counter[str] = Counter()
    beside: dict[str, list[float]] = {"before": [], "during": []}
    phase = "before"
    async with (
        _measure.engine_on(substrate, engine=engine, socket=socket, answer_s=answer_s) as opened,
        _measure.engine_on("namespace") as other,
        other.lease(NAMESPACE_SPEC) as neighbour,
    ):
        is_over = False

        async def watched(limit_s: float, work: Any) -> None:
            begin = time.perf_counter()
            try:
                value = await work
                outcomes[f"{phase}: {getattr(value, 'outcome', 'leased')}"] += 1
            except untax.UntaxError as exc:
                outcomes[f"{phase}: {type(exc).__name__}"] += 1
                value = None
            over.append(max(0.0, time.perf_counter() - begin - limit_s))
            if isinstance(value, untax.Box):
                await value.release()

        async def acting() -> None:
            while not is_over:
                try:
                    async with opened.lease(SPEC) as box:
                        while not is_over:
                            await watched(action_s, box.run(["true"], timeout_s=action_s))
                            if box.ledger.verdict != "trusted":
                                break
                            await asyncio.sleep(0.05)
                except untax.UntaxError:
                    await asyncio.sleep(0.05)

        async def leasing() -> None:
            while not is_over:
                await watched(3 * answer_s, opened.acquire(SPEC))  # create, attach and start have an answer each
                await asyncio.sleep(0.05)

        async def aside() -> None:
            while not is_over:
                result = await neighbour.run(["true"])
                beside.setdefault(phase, []).append(result.round_trip_s)
                await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(one) for one in (acting(), acting(), leasing(), leasing(), aside())]
        await asyncio.sleep(4)
        phase = "during"
        os.kill(pid, signal.SIGSTOP)
        try:
            await asyncio.sleep(arguments.freeze_s)
        finally:
            os.kill(pid, signal.SIGCONT)
        thawed, phase = time.perf_counter(), "after"
        recovery_s = None
        while recovery_s is None and time.perf_counter() - thawed < 60:
            try:
                async with opened.lease(SPEC) as box:
                    (await box.run(["true"], timeout_s=10)).check()
                    recovery_s = time.perf_counter() - thawed
            except untax.UntaxError:
                await asyncio.sleep(0.02)
        await asyncio.sleep(3)
        is_over = True
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(50):
            await asyncio.sleep(0.2)
            left = await opened.substrate._list(opened.substrate._labels)  # type: ignore[attr-defined]
            if not left and not opened.quarantined:
                break
    wrong = {name: count for name, count in outcomes.items() if name.startswith("during") and name.split(": ")[1] not in INFRASTRUCTURE}
    noise = _measure.percentile(beside["during"], 0.5) / _measure.percentile(beside["before"], 0.5)
    return [
        _measure.compare(
            f"beyond the deadline, frozen {arguments.freeze_s:g} s ({engine})", substrate, over, budget="≤ 1000 ms at most",
            holds=lambda _: max(over) <= 1.0, note=f"most {max(over) * 1e3:.0f} ms; {dict(sorted(outcomes.items()))}",
        ),
        _measure.number(
            f"results while frozen ({engine})", substrate, sum(wrong.values()), "calls", budget="≤ those in flight", holds=sum(wrong.values()) <= 4, note=f"{wrong or ''}"
        ),
        _measure.number(f"action beside it, frozen ÷ before ({engine})", "namespace", noise, "×", budget="≤ 1.5", holds=noise <= 1.5),
        _measure.number(
            f"thawed to first result ({engine})", substrate, (recovery_s or float("nan")) * 1e3, "ms", budget="without a restart", holds=recovery_s is not None
        ),
        _measure.number(f"left afterwards ({engine})", substrate, len(left) + len(opened.quarantined), "things", budget="nothing", holds=not left),
    ]  # fmt: skip


INFRASTRUCTURE = {"SandboxLost", "BackendError", "ReadinessTimeout", "CreateError", "PoolTimeout"}


@contextlib.contextmanager
def engines() -> Iterator[None]:
    """Both, for as long as the block lasts; the variables by which they are found say so."""
    with contextlib.ExitStack() as stack:
        for name, make, variable in (("docker", Docker, "DOCKER_HOST"), ("podman", Podman, "CONTAINER_HOST")):
            one: Any = make(stack.enter_context(_home()))
            stack.callback(one.stop)
            one.wait_ready() if name == "docker" else one.serve()
            _own[name] = one
            os.environ[variable] = f"unix://{one.socket}"
        yield


if __name__ == "__main__":
    if os.geteuid() != 0:
        raise SystemExit("benchmarks.container: starts engines of its own, which needs root")
    logging.getLogger("untax").setLevel(logging.ERROR)  # that storage has no quotas is said once, not once per part
    with engines():
        status = _measure.main("container", __doc__, measure, count=400, options=options, only=("container",))
    raise SystemExit(status)
