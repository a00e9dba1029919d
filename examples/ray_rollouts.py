"""Rollouts as Ray tasks over a fleet: each leases a sandbox, inspects a repository (tier T1), and gives a reward, or says that it must not count.

    python examples/ray_rollouts.py --address auto --rollouts 1000 --batch 50 --extra 5

Batches are played in turn as they are and with redundant environments: N + k are started, and the first N that can be trusted are kept. What
is printed at the end is what a trainer looks at: how many results are masked, and how long the slowest of a batch took either way.

A rollout whose infrastructure failed has the verdict "infra" and no reward: it is masked, never scored, and started once more so that the batch is whole.
One that fails again is given up, and its batch goes without it. `--lost` makes some fail on purpose at their first attempt, by leases that end too early;
whatever else fails (a node, say) is treated the same way. What would fail again however often it is started, a repository that is none say, ends the run.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import untax

ATTEMPTS = 2
END_S = 30.0  # for rollouts that were not needed to end, before their workers are killed: a program may not let itself be interrupted
IDLE_S = 30.0  # for the leases of rollouts that were not needed to be back
LOST_S = 0.05  # a lease that is to be lost lasts so long, which no rollout here does
# What the agent looks for, and what is there: the last one is not, so a good agent says so and a bad one has no reward.
TASKS = (("_ClassBuilder", True), ("asdict", True), ("evolve", True), ("define", True), ("no_such_name", False))
SYMBOL = """
import ast, pathlib, sys
found = [n.name for p in pathlib.Path("src").rglob("*.py") for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, (ast.ClassDef, ast.FunctionDef))]
print(sys.argv[1] in found)
"""


@dataclass(frozen=True)
class Result:
    """What became of one rollout. There is a reward exactly where the verdict is "trusted"."""

    rollout: int
    verdict: str
    reward: float | None
    seconds: float
    node: str = ""
    reason: str = ""
    ledger: str = ""
    """Its id: one for each lease that was given; none where none was."""


@dataclass(frozen=True)
class Batch:
    results: tuple[Result, ...]
    """The first N that can be trusted."""
    masked: tuple[Result, ...]
    seconds: float
    """Until the last of them was there."""
    extra: int
    surplus: int = 0
    """Started and not needed."""
    given_up: int = 0
    """Failed at every attempt."""


# ---- what a trainer does with results; plain functions ----


def rewards_and_mask(results: Iterable[Result]) -> tuple[list[float], list[bool]]:
    """As a loss takes them: a masked one counts nothing, whatever stands in its place."""
    found = list(results)
    return [one.reward if one.reward is not None else 0.0 for one in found], [one.verdict == "trusted" for one in found]


def think_s(rollout: int, median_s: float, spread: float) -> float:
    """How long the agent of this rollout thinks: log-normal, the same in every run. What makes the slowest of a batch slow is mostly this."""
    return median_s * math.exp(spread * random.Random(rollout).gauss(0, 1))


def summary(batches: Sequence[Batch]) -> dict[str, object]:
    masked = [one for batch in batches for one in batch.masked]
    results = [one for batch in batches for one in batch.results]
    owners = Counter(one.ledger for one in (*results, *masked))
    return {
        "rollouts": len(results),
        "masked": len(masked),
        "given_up": sum(batch.given_up for batch in batches),
        "masked_reasons": sorted({one.reason for one in masked})[:5],
        "ledgers": len({one.ledger for one in (*results, *masked) if one.ledger}),
        "without_a_ledger_of_its_own": sum(not one.ledger or owners[one.ledger] > 1 for one in results),
        "scored_on_a_fault": sum(one.reward is not None for one in masked) + sum(one.verdict != "trusted" for one in results),
        "mean_reward": statistics.fmean(one.reward or 0.0 for one in results) if results else None,
        "nodes": {name: sum(one.node == name for one in results) for name in sorted({one.node for one in results})},
        **{
            name: tail([one for one in batches if bool(one.extra) == has_extra])
            for name, has_extra in (("plain", False), ("redundant", True))
        },
    }


def tail(batches: Sequence[Batch]) -> dict[str, float] | None:
    """Of how long batches took, and of how much longer than their median rollout."""
    if not batches:
        return None
    over = [batch.seconds / statistics.median(one.seconds for one in batch.results) for batch in batches if batch.results]
    return {
        "batches": len(batches),
        "median_s": round(statistics.median(batch.seconds for batch in batches), 3),
        "slowest_s": round(max(batch.seconds for batch in batches), 3),
        "slowest_over_median_rollout": round(statistics.median(over), 2) if over else math.nan,
        "surplus": sum(batch.surplus for batch in batches),
    }


# ---- one rollout, in whatever process of the cluster Ray chose ----


def run_rollout(fleet, spec, rollout: int, *, is_lost: bool, think: float) -> Result:
    began, box = time.perf_counter(), None
    name, is_there = TASKS[rollout % len(TASKS)]
    try:
        with fleet.lease(spec, wait_s=120, ttl_s=LOST_S if is_lost else 600) as box:
            for argv in (["ls", "-la"], ["find", "src", "-name", "*.py"], ["grep", "-rn", "field_transformer", "src/attr"]):
                box.run(argv).check()
            time.sleep(think)  # where the model would be asked
            said = box.run(["python3", "-c", SYMBOL, name]).check().text.strip()
        reward = float(said == str(is_there))
    except untax.CommandFailed:
        reward = 0.0  # a failing command is the agent's own doing
    except untax.UntaxError as exc:
        if isinstance(exc, untax.UsageError) or (isinstance(exc, untax.StageFailed) and not exc.found_no_room):
            raise  # what was asked for can never be had: not the infrastructure's doing, as a machine's full disk is, and no reason to ask again
        node, ledger = _where(box)
        return Result(rollout, "infra", None, time.perf_counter() - began, node, type(exc).__name__, ledger)
    node, ledger = _where(box)
    if box.ledger.verdict != "trusted":  # also when everything seemed to go well
        return Result(rollout, "infra", None, time.perf_counter() - began, node, str(box.ledger.reason), ledger)
    return Result(rollout, "trusted", reward, time.perf_counter() - began, node, "", ledger)


def _where(box) -> tuple[str, str]:
    if box is None:
        return "", ""
    placed = box.ledger.placed
    return placed.node if placed is not None else "", json.loads(box.ledger.to_json())["rollout"]


# ---- the trainer ----


class Trainer:
    def __init__(self, ray, fleet, spec, options: argparse.Namespace) -> None:
        self._ray = ray
        self._fleet = ray.put(fleet)
        self._spec = spec
        self._options = options
        self._faults = random.Random(1)
        self._next = 0
        # Over all nodes: Ray would fill one half before it takes the next, and a lease is best had on its caller's own node.
        self._task = ray.remote(num_cpus=1, max_retries=0, scheduling_strategy="SPREAD")(run_rollout)

    def _start(self, number: int, *, attempt: int = 1) -> object:
        options = self._options
        is_lost = attempt == 1 and self._faults.random() < options.lost
        return self._task.remote(self._fleet, self._spec, number, is_lost=is_lost, think=think_s(number, options.think, options.spread))

    def batch(self, count: int, extra: int) -> Batch:
        """`count` results that can be trusted, of `count + extra` environments; fewer where too many failed at every attempt.

        Raises what no attempt could mend: the mistakes of whoever called this, with their words.
        """
        began = time.perf_counter()
        numbers = range(self._next, self._next + count + extra)
        self._next = numbers.stop
        running = {self._start(number): (number, 1) for number in numbers}
        kept: list[Result] = []
        masked: list[Result] = []
        given_up = 0
        try:
            while len(kept) < count and running:
                (done,), _ = self._ray.wait(list(running), num_returns=1)
                number, attempt = running.pop(done)
                result = self._result(done, number)
                if result.verdict == "trusted":
                    kept.append(result)
                    continue
                masked.append(result)
                if attempt < ATTEMPTS:
                    running[self._start(number, attempt=attempt + 1)] = number, attempt + 1
                else:
                    given_up += 1
            took = time.perf_counter() - began
        finally:
            for one in running:  # their leases are given back by their own `with`
                self._ray.cancel(one)
            if running:
                _, late = self._ray.wait(list(running), num_returns=len(running), timeout=END_S)
                for one in late:  # its node gives back what a process held that is no more
                    self._ray.cancel(one, force=True)
        return Batch(tuple(kept), tuple(masked), took, extra, len(running), given_up)

    def _result(self, reference: object, number: int) -> Result:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as exc:
            raise exc.cause from None  # the rollout's own program failed, and would again
        except self._ray.exceptions.RayError as exc:
            # The worker itself died, with its node or without: nothing is known of the rollout, so nothing is scored.
            return Result(number, "infra", None, 0.0, "", type(exc).__name__)


def leases_left(fleet) -> int:
    """How many are held on all nodes once no rollout runs any more: none, within a moment."""
    end = time.monotonic() + IDLE_S
    while (left := sum(stage.leased for stage in fleet.pools().stages)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--address", default="auto", help="of the Ray cluster's head")
    parser.add_argument("--rollouts", type=int, default=1000, help="results that are wanted in all (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=50, help="N (default: %(default)s)")
    parser.add_argument("--extra", type=int, default=5, help="k (default: %(default)s)")
    parser.add_argument("--lost", type=float, default=0.02, help="share of the rollouts whose lease ends too early (default: %(default)s)")
    parser.add_argument("--think", type=float, default=0.2, help="median seconds that an agent thinks (default: %(default)s)")
    parser.add_argument("--spread", type=float, default=0.8, help="of the logarithm of that (default: %(default)s)")
    parser.add_argument(
        "--repo", help="attrs, by a URL or a path that every node reaches (default: brought here, for nodes that share this machine)"
    )
    parser.add_argument("--commit", help="of it")
    parser.add_argument("--state-dir", help="of the nodes; {node} in it stands for the node's id")
    parser.add_argument("--limits", default="warn", choices=("warn", "strict"))
    options = parser.parse_args(argv)

    try:
        return train(options)
    except untax.UntaxError as exc:
        print(f"ray_rollouts: {type(exc).__name__}: {exc}", file=sys.stderr)
        return 2 if isinstance(exc, untax.UsageError) else 1


def train(options: argparse.Namespace) -> int:
    import ray

    import untax.sync

    ray.init(address=options.address, log_to_driver=False, configure_logging=False)
    given = {"state_dir": options.state_dir, "limits": options.limits} if options.state_dir else {}
    with untax.sync.Fleet(options.address, **given) as fleet:
        spec = untax.EnvSpec(repo=untax.Repo(*_repository(options)))
        fleet.warm(spec, options.batch)
        trainer, batches = Trainer(ray, fleet, spec, options), []
        trainer.batch(options.batch + options.extra, 0)  # Ray starts its workers with it; not counted
        turns = math.ceil(options.rollouts / options.batch)
        for turn in range(turns):
            batches.append(trainer.batch(options.batch, options.extra if turn % 2 else 0))
            print(
                f"batch {turn + 1} of {turns}: {batches[-1].seconds:.2f} s, {len(batches[-1].masked)} masked", file=sys.stderr, flush=True
            )
            if not batches[-1].results:
                print("ray_rollouts: no rollout of a whole batch can be trusted, so there is nothing to learn from", file=sys.stderr)
                return 1
        rewards, mask = rewards_and_mask([one for batch in batches for one in (*batch.results, *batch.masked)])
        counted = {"counted": sum(mask), "reward_sum": sum(r for r, m in zip(rewards, mask, strict=True) if m)}
        left = leases_left(fleet)
        print(json.dumps({**summary(batches), **counted, "leases_left": left}))
    return 1 if left else 0


def _repository(options: argparse.Namespace) -> tuple[str, str]:
    if options.repo:
        return options.repo, options.commit
    from untax.rollout import workload
    from untax.rollout.material import Material

    source = workload.load("T1").source
    assert source is not None
    repository = Material(Path.home() / ".cache" / "untax-examples").repository(source)
    return repository.path, repository.commit


if __name__ == "__main__":
    raise SystemExit(main())
