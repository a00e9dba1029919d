"""One action on a live sandbox: `run(["true"])`, a session's `true`, a 1 KiB read.

Measured from clients of two sizes, each an interpreter of its own, because a client that forked would pay for its
memory. Native is `subprocess.run(["true"])`; with `capture_output=True`, which returns what we return, it is a row of its own.
"""

import argparse
import asyncio
import json
import subprocess
import sys
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import Row

RESIDENT_MB = (50, 1000)
P50_MORE_MS, P95_MORE_MS = 0.3, 1.0  # DESIGN §8
SESSION_MS = READ_MS = 0.3


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--resident-mb",
        type=int,
        help="measure in this process, grown to this size (default: one process for each size)",
    )


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    if arguments.resident_mb is not None:
        return await _measure_here(arguments, substrate)
    rows = []
    for size in RESIDENT_MB:
        argv = [sys.executable, "-m", "benchmarks.action", "--substrate", substrate, "--count", str(arguments.count)]
        argv += ["--resident-mb", str(size), "--json", "-"]
        root = Path(__file__).resolve().parent.parent
        done = await asyncio.to_thread(
            subprocess.run, argv, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, check=False
        )
        if not done.stdout:
            raise SystemExit(f"action: the client of {size} MB failed:\n{done.stderr}")
        for fields in json.loads(done.stdout)["rows"]:
            del fields["verdict"]
            rows.append(Row(**fields))
    return rows


async def _measure_here(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    ballast = bytearray(max(0, arguments.resident_mb * 1_000_000 - _measure.status_kib("VmRSS") * 1024))
    ballast[::4096] = b"x" * len(ballast[::4096])  # resident, not only promised
    client = f"{arguments.resident_mb} MB client"
    count = arguments.count
    async with _measure.engine_on(substrate) as engine, engine.lease(_measure.spec_for(substrate)) as box:

        async def run_true() -> float:
            return await _measure.timed(box.run(["true"]))

        ours, native = await _measure.interleaved(count, run_true)
        beside, captured = await _measure.interleaved(count, run_true, lambda: _measure.native_s(capture=True))

        async with box.session() as bash:
            session, _ = await _measure.interleaved(count, lambda: _measure.timed(bash.run("true")), None)

        await box.write("kibibyte", b"x" * 1024)
        read, _ = await _measure.interleaved(count, lambda: _measure.timed(box.read("kibibyte")), None)
    del ballast
    return [
        _measure.compare(
            "run true",
            substrate,
            ours,
            native,
            budget=f"≤ native + {P50_MORE_MS} ms at p50, + {P95_MORE_MS:g} at p95",
            holds=_within_native,
            note=client,
        ),
        _measure.compare("run true, native captures too", substrate, beside, captured, note=client),
        _measure.compare(
            "session true",
            substrate,
            session,
            budget=f"≤ {SESSION_MS} ms at p50",
            holds=lambda row: row.p50 <= SESSION_MS,
            note=client,
        ),
        _measure.compare(
            "read 1 KiB",
            substrate,
            read,
            budget=f"≤ {READ_MS} ms at p50",
            holds=lambda row: row.p50 <= READ_MS,
            note=client,
        ),
    ]


def _within_native(row: Row) -> bool:
    assert row.native_p50 is not None
    assert row.native_p95 is not None
    return row.p50 <= row.native_p50 + P50_MORE_MS and row.p95 <= row.native_p95 + P95_MORE_MS


if __name__ == "__main__":
    raise SystemExit(_measure.main("action", __doc__, measure, count=500, options=options))
