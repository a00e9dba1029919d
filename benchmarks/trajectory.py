"""T2 × 150: on `process` beside a plain script that runs the same commands, on `namespace` warm beside the same commands under the same CPU limit.

The script is a Python process of its own that runs each action by `subprocess.run`, in a directory of its own that it removes at the end.
For `process` it clones as well, as the cold trial does; for `namespace` it has the repository in place, as the warm trial does, and a control
group holds it to the CPU limit of the sandbox.
"""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks import _measure
from benchmarks._measure import Row
from untax.rollout import gitserver, workload
from untax.rollout.footing import footing
from untax.rollout.material import Material
from untax.rollout.perform import command_of
from untax.rollout.runner import Runner, Work

APART = 0.02  # issue 6: process is the floor
WARM = 1.05  # DESIGN §8
_PERIOD_US = 100_000


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--length", type=int, default=150, choices=(10, 50, 150), help="of the trajectory; budgets are for 150")
    parser.add_argument("--state-dir", metavar="DIR", help="where the repository and packages are kept (default: a temporary directory)")


async def measure(arguments: argparse.Namespace, substrate: str) -> list[Row]:
    is_warm = substrate != "process"
    ours: list[float] = []
    native: list[float] = []
    with contextlib.ExitStack() as stack:
        place = Path(arguments.state_dir or stack.enter_context(tempfile.TemporaryDirectory(prefix="untax-bench-")))
        material = Material(place / "bench")
        found = workload.load("T2")
        assert found.source is not None
        repository = material.repository(found.source)
        server = stack.enter_context(gitserver.serving(material.served))
        async with _measure.engine_on(substrate, place, setup_wheels=material.wheels(found.packages)) as engine:
            ground = footing(engine, found, material, is_warm=is_warm, server=server)
            work = Work(found, ground, found.of_length(arguments.length))
            runner = Runner(engine)
            pinned = await engine.prepare(ground.spec) if engine.layered is not None else None
            async with engine.lease(ground.spec) as box:
                path = (await box.run(["sh", "-c", "echo $PATH"])).text.strip()
            env = {**ground.spec.env, "PATH": path, "LANG": "C.UTF-8", "UNTAX_REPO_URL": f"http://{server}/{repository.name}"}
            env |= {"UNTAX_REPO_COMMIT": repository.commit, "PYTHONPATH": f"src:{material.packages(found.packages)}"}
            steps = [command_of(action) for action in ((*found.setup,) if not is_warm else ()) + work.actions]
            script = {"steps": steps, "env": env, "repository": repository.path if is_warm else None, "commit": repository.commit}
            cpus = ground.spec.limits.cpus if is_warm else None
            for turn in range(arguments.count + 1):  # the first is a warm-up
                for is_ours in (True, False) if turn % 2 else (False, True):
                    if is_ours:
                        held = await runner.hold(work) if is_warm else None
                        measured = await runner.run(work, held=held)
                        assert measured.outcome == "ok", measured.error
                        ours.append(measured.total_ns / 1e9)
                    else:
                        native.append(await asyncio.to_thread(_scripted, script, place, cpus))
            if pinned is not None:
                pinned.pin.close()
    what = f"T2 × {arguments.length}, {'warm' if is_warm else 'cold'}"
    if substrate == "process":
        budget, note = "within 2 % of a plain script", "clone and clean-up on both sides"
    else:
        budget, note = f"≤ {WARM} × native", "same CPU limit" if _cgroup_kind() else "native without a CPU limit: no cpu controller here"
    row = _measure.compare(what, substrate, ours[1:], native[1:], budget=budget, note=note)
    # Of the two of a turn, which the machine's mood has in common; it changes by more than the budget from turn to turn.
    pairs = [one / other for one, other in zip(ours[1:], native[1:], strict=True)]
    row.ratio = statistics.median(pairs)
    row.holds = row.ratio <= WARM if is_warm else abs(row.ratio - 1) <= APART
    row.note += f"; median of pairs from {min(pairs):.2f} to {max(pairs):.2f}"
    return [row]


# ---- the plain script ----


def _scripted(script: Mapping[str, object], place: Path, cpus: float | None) -> float:
    """Run the script in a process of its own and give the seconds that it took, its own start left out."""
    with tempfile.TemporaryDirectory(prefix="untax-script-", dir=place) as scratch, _limited(cpus) as group:
        given = json.dumps({**script, "directory": f"{scratch}/work", "group": group})
        argv = [sys.executable, "-m", "benchmarks.trajectory", "--script"]
        done = subprocess.run(argv, input=given, capture_output=True, text=True, check=False, cwd=Path(__file__).resolve().parent.parent)
        if done.returncode:
            raise SystemExit(f"trajectory: the plain script failed:\n{done.stderr}")
        return float(done.stdout)


def _script() -> None:
    given = json.load(sys.stdin)
    if given["group"]:
        Path(given["group"], "cgroup.procs").write_text(str(os.getpid()))
    directory = given["directory"]
    if given["repository"]:
        subprocess.run(["git", "clone", "-q", given["repository"], directory], check=True)
        subprocess.run(["git", "checkout", "-q", given["commit"]], check=True, cwd=directory)
    begin = time.perf_counter()
    os.makedirs(directory, exist_ok=True)
    for argv in given["steps"]:
        subprocess.run(argv, cwd=directory, env={**given["env"], "HOME": directory}, capture_output=True, check=False)
    shutil.rmtree(directory)
    print(time.perf_counter() - begin)


def _cgroup_kind() -> str | None:
    if os.geteuid() != 0:
        return None
    if "cpu" in _read("/sys/fs/cgroup/cgroup.subtree_control").split():
        return "/sys/fs/cgroup"
    return "/sys/fs/cgroup/cpu" if Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us").exists() else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def _limited(cpus: float | None) -> Iterator[str | None]:
    """A control group with that limit, of either version; None where there is none to be had."""
    top = _cgroup_kind() if cpus is not None else None
    if top is None or cpus is None:
        yield None
        return
    group = Path(tempfile.mkdtemp(prefix="untax-native-", dir=top))
    try:
        quota = int(cpus * _PERIOD_US)
        if (group / "cpu.max").exists():
            (group / "cpu.max").write_text(f"{quota} {_PERIOD_US}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
        yield str(group)
    finally:
        group.rmdir()


if __name__ == "__main__":
    if sys.argv[1:] == ["--script"]:
        _script()
    else:
        raise SystemExit(_measure.main("trajectory", __doc__, measure, count=5, options=options))
