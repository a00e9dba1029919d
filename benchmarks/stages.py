"""A lease whose stages exist, repository and dependencies included, beside one of the empty `host` image."""

import argparse
import subprocess
import tempfile
import time
from pathlib import Path

import untax
from benchmarks import _measure
from benchmarks._measure import Row

RATIO = 1.5
FILES = 500


def repository(place: Path) -> untax.Repo:
    """A repository of a few hundred files with some history."""
    git = ["git", "-C", str(place), "-c", "user.name=bench", "-c", "user.email=bench@localhost", "-c", "init.defaultBranch=main"]
    subprocess.run([*git, "init", "--quiet"], check=True)
    for part in range(3):
        for i in range(FILES):
            (place / f"module{i}.py").write_text(f"x = {part * i}\n")
        subprocess.run([*git, "add", "-A"], check=True)
        subprocess.run([*git, "commit", "--quiet", "-m", f"part {part}"], check=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    return untax.Repo(str(place), commit)


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="untax-bench-repo-") as place:
        plain = _measure.spec_for(substrate)
        staged = _measure.spec_for(substrate, repo=repository(Path(place)), setup=("mkdir -p /opt/deps && seq 100 > /opt/deps/list",))
        async with _measure.engine_on(substrate) as engine:
            begin = time.perf_counter()
            async with engine.lease(staged) as box:
                built_s = time.perf_counter() - begin
                (await box.shell("test -f /opt/deps/list && git status --porcelain")).check()
            samples: dict[str, list[float]] = {"plain": [], "staged": []}
            for turn in range(arguments.count + _measure.WARM_UP):
                cases = [("plain", plain), ("staged", staged)]
                for name, spec in cases if turn % 2 else cases[::-1]:
                    begin = time.perf_counter()
                    async with engine.lease(spec) as box:
                        samples[name].append(time.perf_counter() - begin)
    plain_s, staged_s = (samples[name][_measure.WARM_UP :] for name in ("plain", "staged"))
    ratio = _measure.percentile(staged_s, 0.5) / _measure.percentile(plain_s, 0.5)
    return [
        _measure.compare("lease of the empty host image", substrate, plain_s),
        _measure.compare("lease with repository and dependencies", substrate, staged_s, note=f"built once in {built_s:.2g} s"),
        _measure.number("staged ÷ empty", substrate, ratio, "×", budget=f"≤ {RATIO:g} ×", holds=ratio <= RATIO),
    ]


if __name__ == "__main__":
    raise SystemExit(_measure.main("stages", __doc__, measure, count=200, only=("namespace",)))
