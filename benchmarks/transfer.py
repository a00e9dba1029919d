"""Upload and download of trees beside `tar c | tar x` on the same trees: one file of 100 MiB, and 10,000 small ones.

Native copies between two directories beside the engine's state, so both sides end on the same file system. The
destination is new each time and removed outside the span.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import Row

SPEED = 0.5  # of tar's
BIG_MIB = 100
FILES, FILE_BYTES, FILES_EACH = 10_000, 1_000, 100


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="untax-transfer-") as place:
        base = Path(place)
        for name, make in ((f"{BIG_MIB} MiB in one file", make_big), (f"{FILES:,} files", make_many)):
            tree = base / make.__name__
            make(tree)
            rows += await _tree(arguments.count, substrate, name, tree, base)
    return rows


def make_big(tree: Path) -> None:
    tree.mkdir()
    (tree / "big").write_bytes(os.urandom(1 << 20) * BIG_MIB)


def make_many(tree: Path) -> None:
    for directory in range(FILES // FILES_EACH):
        below = tree / f"directory-{directory}"
        below.mkdir(parents=True)
        for file in range(FILES_EACH):
            (below / f"file-{file}.py").write_bytes(os.urandom(FILE_BYTES))


async def _tree(count: int, substrate: str, name: str, tree: Path, base: Path) -> list[Row]:
    up: list[float] = []
    down: list[float] = []
    native: list[float] = []
    state = base / "state"
    state.mkdir(mode=0o700, exist_ok=True)
    async with _measure.engine_on(substrate, state) as engine, engine.lease(_measure.spec_for(substrate)) as box:
        for turn in range(count + 1):
            remote = f"copy-{turn}"
            tarred, fetched = base / "tarred", base / "fetched"
            native.append(tar_s(tree, tarred))
            up.append(await _measure.timed(box.upload(tree, remote)))
            down.append(await _measure.timed(box.download(remote, fetched)))
            if not turn:
                _require_same(tree, fetched)
            await box.run(["rm", "-rf", remote])
            shutil.rmtree(tarred)
            shutil.rmtree(fetched)
    up, down, native = up[1:], down[1:], native[1:]  # the first faults everything in
    return [
        _measure.compare(
            f"{direction} {name}",
            substrate,
            samples,
            native,
            budget=f"≥ {SPEED} × the speed of tar",
            holds=lambda row: row.ratio is not None and row.ratio <= 1 / SPEED,
        )
        for direction, samples in (("upload", up), ("download", down))
    ]


def tar_s(tree: Path, destination: Path) -> float:
    destination.mkdir()
    begin = time.perf_counter()
    packing = subprocess.Popen(["tar", "-C", tree, "-c", "."], stdout=subprocess.PIPE)
    subprocess.run(["tar", "-C", destination, "-x"], stdin=packing.stdout, check=True)
    packing.wait()
    return time.perf_counter() - begin


def _require_same(tree: Path, fetched: Path) -> None:
    """A copy that is quick and wrong is no copy."""
    differs = subprocess.run(["diff", "-rq", tree, fetched], capture_output=True, text=True, check=False)
    if differs.returncode:
        raise SystemExit(f"transfer: the copy differs:\n{differs.stdout[:2000]}")


if __name__ == "__main__":
    raise SystemExit(_measure.main("transfer", __doc__, measure, count=15))
