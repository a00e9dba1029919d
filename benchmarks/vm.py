"""Virtual machines: booted beside restored, the held channel beside one fresh ssh an action, and what cycles leave behind.

Each row says whether its machine was emulated. The ssh goes to an sshd inside the same machine, over a second channel, since machines have no
network: what that adds is about one held channel's dispatch, which is in the row beside it.
"""

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

import untax
from benchmarks import _census, _measure
from benchmarks._measure import Row
from untax.core.substrate import Incumbent

CYCLES = 50
SSH_ACTIONS = 5
WARM_MS, EMULATED_WARM_MS = 5.0, 100.0  # beside one `true`
BOOTS = 3
SETTLE_S = 5.0


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--machine", action="append", choices=("q35", "microvm"), help="only this one; may be repeated")
    parser.add_argument(
        "--cycles", type=int, default=CYCLES, help="create–run–destroy cycles that must leave nothing (default: %(default)s)"
    )


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    del substrate  # there is one
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="untax-bench-") as place:
        sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
        from tests.images import image_with_sshd  # the few programs of the conformance suite, and an sshd

        image = await asyncio.to_thread(image_with_sshd, Path(place) / "image")
        spec = untax.EnvSpec(image=f"dir:{image}", isolation="vm")
        for machine in arguments.machine or ("q35", "microvm"):
            state = Path(place) / machine
            rows += await ready(state, machine, spec, arguments.count)
            rows += await dispatch(state, machine, spec, arguments.count)
            async with _measure.engine_on("vm", state, machine=machine) as engine:
                beside_ms = EMULATED_WARM_MS if "emulated" in engine.substrate.name else WARM_MS
                rows += await _measure.warm_first(engine, spec, engine.substrate.name, max(10, arguments.count), beside_ms)
            if machine == "q35":
                rows += await cycles(state, machine, spec, arguments.cycles)
    return rows


# ---- booted and restored ----


async def ready(state: Path, machine: str, spec: untax.EnvSpec, count: int) -> list[Row]:
    """From the request for a sandbox to its first result, in turn where both are at hand."""
    async with (
        _measure.engine_on("vm", state, machine=machine) as warm,
        _measure.engine_on("vm", state, machine=machine, start="cold") as cold,
    ):
        await _first_result(warm, spec)  # boots once, and saves
        booted: list[float] = []
        restored: list[float] = []
        for turn in range(max(BOOTS, count)):
            if turn < BOOTS:
                booted.append(await _first_result(cold, spec))
            restored.append(await _first_result(warm, spec))
        label = warm.substrate.name
    times = _measure.percentile(booted, 0.5) / _measure.percentile(restored, 0.5)
    return [
        _measure.compare("booted: create to ready", label, booted),
        _measure.compare("restored: create to ready", label, restored, booted, note="native: the same machine, booted"),
        _measure.number("restored, faster than booted", label, times, "×", budget="≥ 5 ×", holds=times >= 5),
    ]


async def _first_result(engine: untax.Engine, spec: untax.EnvSpec) -> float:
    """Until the channel is open and answers; the first command's own time, which emulation makes long, is not in it."""
    began = time.perf_counter()
    async with engine.lease(spec) as box:
        took = time.perf_counter() - began
        (await box.run(["true"])).check()
    return took


# ---- the channel and ssh ----


async def dispatch(state: Path, machine: str, spec: untax.EnvSpec, count: int) -> list[Row]:
    async with _measure.engine_on("vm", state, machine=machine, sshd="/usr/bin/sshd") as engine, engine.lease(spec) as box:
        sandbox = box.sandbox
        assert isinstance(sandbox, Incumbent)
        held: list[float] = []
        fresh: list[float] = []
        inside: list[float] = []
        for turn in range(max(20, count) + _measure.WARM_UP):
            result = (await box.run(["true"])).check()
            held.append(result.round_trip_s - result.elapsed_s)
            inside.append(result.elapsed_s)
            if turn < SSH_ACTIONS + 1:
                fresh.append((await sandbox.run_incumbent(["true"], timeout_s=120)).check().round_trip_s)
        del held[: _measure.WARM_UP], fresh[:1], inside[: _measure.WARM_UP]
        typical = _measure.percentile(inside, 0.5)
        label = engine.substrate.name
    over = [max(0.0, one - typical) for one in fresh]
    return [
        _measure.compare(
            "dispatch over the held channel",
            label,
            held,
            over,
            budget="≤ 1/20 of ssh",
            holds=_twentieth,
            note="native: one fresh ssh an action",
        ),
        _measure.compare("one `true` inside", label, inside),
    ]


def _twentieth(row: Row) -> bool:
    return row.ratio is not None and row.ratio <= 1 / 20


# ---- what is left ----


async def cycles(state: Path, machine: str, spec: untax.EnvSpec, count: int) -> list[Row]:
    outset = _census.take(state)
    cycle_s: list[float] = []
    async with _measure.engine_on("vm", state, machine=machine) as engine:
        for _ in range(2):
            await _first_result(engine, spec)
        before = _census.take(state)
        for _ in range(count):
            began = time.perf_counter()
            async with engine.lease(spec) as box:
                (await box.run(["true"])).check()
            cycle_s.append(time.perf_counter() - began)
        differs = await asyncio.to_thread(_census.wait_like, state, "", before, SETTLE_S)
        label = engine.substrate.name
    after = await asyncio.to_thread(_census.wait_like, state, "", outset, SETTLE_S)
    return [
        _measure.compare("one cycle", label, cycle_s),
        _measure.number(
            f"left after {count} cycles",
            label,
            len(differs),
            "things",
            budget="exactly as before",
            holds=not differs,
            note=str(differs or ""),
        ),
        _measure.number(
            "left after close", label, len(after), "things", budget="exactly as before", holds=not after, note=str(after or "")
        ),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("vm", __doc__, measure, count=10, options=options, only=("vm",)))
