"""Pods: dispatch over the held channel beside one exec an action, create to first result, and that cycles leave nothing.

Needs a cluster: KUBECONFIG and `--image`, or the shared `k8s/up` that the tests use (root). Dispatch is a round trip less the time inside;
what a single exec spends inside is not told, so the p50 of the same command over the channel is taken off.
"""

import argparse
import asyncio
import contextlib
import importlib
import os
import time
from collections.abc import AsyncIterator
from typing import Any

import untax
from benchmarks import _measure
from benchmarks._measure import Row

DISPATCH_MS = 1.5  # DESIGN §8, pod
INCUMBENT_SHARE = 1 / 20
WARM_MS = 5.0
CYCLES = 50
AT_ONCE = 5
PER_EXEC = 10  # actions over the channel for each single exec beside them


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--image", help="an image of a registry with a `true` in it (default: the tests' own, loaded into the nodes)")
    parser.add_argument(
        "--runtime-class", action="append", metavar="NAME=LEVEL", help="also measure this one, for example gvisor=gvisor; may be repeated"
    )
    parser.add_argument("--cycles", type=int, default=CYCLES, help="create, run, destroy (default: %(default)s)")


def _kubehost() -> Any:
    return importlib.import_module("tests.kubehost")  # by name: the tests are not typed


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    kubehost = _kubehost()

    rows: list[Row] = []
    image = arguments.image or kubehost.SMALL
    for one in (None, *(arguments.runtime_class or ())):
        name, _, level = (one or "=container").partition("=")
        given: dict[str, Any] = {"runtime_class": name, "isolation": level or "container"} if name else {}
        async with _engine(**given) as engine:
            spec = untax.EnvSpec(image=image, isolation=engine.substrate.isolation)
            label = f"{substrate} ({name})" if name else substrate
            rows += await _actions(engine, spec, label, arguments.count)
            rows += await _measure.warm_first(engine, spec, label, max(5, arguments.count // 15), WARM_MS)
            rows += await _cold(engine, spec, label, max(3, arguments.count // 20))
            if not name:
                rows.append(await _cycles(engine, spec, label, arguments.cycles, kubehost))
    return rows


@contextlib.asynccontextmanager
async def _engine(**given: Any) -> AsyncIterator[untax.Engine]:
    async with _measure.engine_on("kubernetes", **given) as engine:
        yield engine


async def _actions(engine: untax.Engine, spec: untax.EnvSpec, label: str, count: int) -> list[Row]:
    async with engine.lease(spec) as box:
        sandbox: Any = box.sandbox
        channel: list[float] = []
        warm: list[float] = []
        inside: list[float] = []
        incumbent: list[float] = []
        for turn in range(count + _measure.WARM_UP):
            result = await box.run(["true"])
            channel.append(result.round_trip_s - result.elapsed_s)
            inside.append(result.elapsed_s)
            warm.append(result.round_trip_s)
            if turn % PER_EXEC == 0:
                single = await sandbox.run_incumbent(["true"], timeout_s=30)
                incumbent.append(single.round_trip_s)
    channel, warm, inside = (samples[_measure.WARM_UP :] for samples in (channel, warm, inside))
    own = _measure.percentile(inside, 0.5)
    beside = [max(0.0, one - own) for one in incumbent[1:]]
    return [
        _measure.compare(
            "dispatch, held channel (native: one exec)", label, channel, beside,
            budget=f"≤ {DISPATCH_MS} ms, ≤ 1/{round(1 / INCUMBENT_SHARE)} of one exec's",
            holds=lambda row: row.p50 <= DISPATCH_MS and (row.ratio or 1) <= INCUMBENT_SHARE,
            note=f"{len(beside)} execs beside",
        ),
        _measure.compare("run true, warm pod", label, warm, note=f"{own * 1e3:.2f} ms of it inside"),
    ]  # fmt: skip


async def _cold(engine: untax.Engine, spec: untax.EnvSpec, label: str, count: int) -> list[Row]:
    first: list[float] = []
    plane: list[float] = []
    gone: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        box = await engine.acquire(spec)
        (await box.run(["true"])).check()
        first.append(time.perf_counter() - begin)
        sandbox: Any = box.sandbox
        plane.append(sandbox.control_plane_ns / 1e9)
        gone.append(await _measure.timed(box.release()))
    return [
        _measure.compare("pod create to first result", label, first),
        _measure.compare("of it the control plane's", label, plane),
        _measure.compare("release until the pod is gone", label, gone),
    ]


async def _cycles(engine: untax.Engine, spec: untax.EnvSpec, label: str, count: int, kubehost: Any) -> Row:
    is_here = os.geteuid() == 0 and kubehost.state_dir().exists()
    before = kubehost.on_nodes() if is_here else set()
    gate = asyncio.Semaphore(AT_ONCE)

    async def cycle() -> None:
        async with gate, engine.lease(spec) as box:
            (await box.run(["true"])).check()

    begin = time.perf_counter()
    await asyncio.gather(*(cycle() for _ in range(count)))
    took = time.perf_counter() - begin
    left: set[str] = set()
    for _ in range(100):  # kubelets clear away behind the API server's back
        left = (kubehost.on_nodes() if is_here else set()) - before
        if not left:
            break
        await asyncio.sleep(0.2)
    sandboxes = len(engine.quarantined)
    note = f"{took:.1f} s, {AT_ONCE} at once" + ("" if is_here else "; nodes not looked at")
    return _measure.number(
        f"left behind by {count} cycles", label, len(left) + sandboxes, "things", budget="0", holds=not left and not sandboxes, note=note
    )


def main() -> int:
    kubehost = _kubehost()

    if reason := kubehost.missing_reason():
        print(f"kubernetes: {reason}")
        return 0
    cluster = kubehost.Cluster()
    cluster.start()
    os.environ["KUBECONFIG"] = str(cluster.kubeconfig)
    try:
        return _measure.main("kubernetes", __doc__ or "", measure, count=300, options=options, only=("kubernetes",))
    finally:
        os.environ.pop("KUBECONFIG") if not cluster.is_given else None
        cluster.stop()


if __name__ == "__main__":
    raise SystemExit(main())
