"""Upload and download of trees beside `tar c | tar x` on the same trees: one file of 100 MiB, and 10,000 small ones.

Native copies between two directories beside the engine's state, so both sides end on the same file system. The
destination is new each time and removed outside the span. Both trees are made once; each turn takes each of them once through
tar, up and down, and when tar has its turn goes round. A turn takes some 5 s, so 200 of them are a quarter of an hour on each substrate.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import untax
from benchmarks import _measure
from benchmarks._measure import Row

SPEED = 0.5  # of tar's
BIG_MIB = 100
FILES, FILE_BYTES, FILES_EACH = 10_000, 1_000, 100


@dataclass
class Case:
    name: str
    tree: Path
    up: list[float] = field(default_factory=list)
    down: list[float] = field(default_factory=list)
    native: list[float] = field(default_factory=list)

    def rows(self, substrate: str) -> list[Row]:
        return [
            _measure.compare(
                f"{direction} {self.name}",
                substrate,
                samples,
                self.native,
                budget=f"≥ {SPEED} × the speed of tar",
                holds=lambda row: row.ratio is not None and row.ratio <= 1 / SPEED,
            )
            for direction, samples in (("upload", self.up), ("download", self.down))
        ]


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="untax-transfer-") as place:
        base = Path(place)
        cases = [Case(f"{BIG_MIB} MiB in one file", base / "big"), Case(f"{FILES:,} files", base / "many")]
        make_big(cases[0].tree)
        make_many(cases[1].tree)
        state = base / "state"
        state.mkdir(mode=0o700)
        async with _measure.engine_on(substrate, state) as engine, engine.lease(_measure.spec_for(substrate)) as box:
            for case in cases:  # the first faults everything in, and is looked at
                await _warm_up(box, case, base)
            for turn in range(arguments.count):
                for case in cases if turn % 2 else cases[::-1]:
                    await _turn(box, case, base, turn)
    return [row for case in cases for row in case.rows(substrate)]


def make_big(tree: Path) -> None:
    tree.mkdir()
    (tree / "big").write_bytes(os.urandom(1 << 20) * BIG_MIB)


def make_many(tree: Path) -> None:
    for directory in range(FILES // FILES_EACH):
        below = tree / f"directory-{directory}"
        below.mkdir(parents=True)
        for file in range(FILES_EACH):
            (below / f"file-{file}.py").write_bytes(os.urandom(FILE_BYTES))


async def _turn(box: untax.Box, case: Case, base: Path, turn: int) -> None:
    remote, tarred, fetched = f"copy-{turn}", base / "tarred", base / "fetched"
    if turn % 3 == 0:
        case.native.append(tar_s(case.tree, tarred))
    case.up.append(await _measure.timed(box.upload(case.tree, remote)))
    if turn % 3 == 1:
        case.native.append(tar_s(case.tree, tarred))
    case.down.append(await _measure.timed(box.download(remote, fetched)))
    if turn % 3 == 2:
        case.native.append(tar_s(case.tree, tarred))
    await box.run(["rm", "-rf", remote])
    shutil.rmtree(tarred)
    shutil.rmtree(fetched)


async def _warm_up(box: untax.Box, case: Case, base: Path) -> None:
    await box.upload(case.tree, "first")
    await box.download("first", base / "first")
    _require_same(case.tree, base / "first")
    tar_s(case.tree, base / "tarred")
    await box.run(["rm", "-rf", "first"])
    shutil.rmtree(base / "first")
    shutil.rmtree(base / "tarred")


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
    raise SystemExit(_measure.main("transfer", __doc__, measure, count=200))
