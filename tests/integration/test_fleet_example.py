"""The trainer's example, with a node that is killed on the way; a short run of what its own defaults do with 1,000."""

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from examples import ray_rollouts
from examples.ray_rollouts import Batch, Result, Trainer, leases_left, rewards_and_mask, run_rollout, summary, think_s
from tests import raycluster

import untax
from untax import substrates

_ROOT = Path(__file__).parents[2]
GOOD = Result(1, "trusted", 1.0, 1.0, "node a", "", "l1")
BAD = Result(2, "trusted", 0.0, 3.0, "node b", "", "l2")
LOST = Result(3, "infra", None, 9.0, "node b", "SandboxLost", "l3")


def test_what_must_not_count_is_masked():
    assert rewards_and_mask([GOOD, LOST, BAD]) == ([1.0, 0.0, 0.0], [True, False, True])


def test_the_summary_counts_ledgers_and_faults_and_tells_both_ways_apart():
    batches = [Batch((GOOD, BAD), (LOST,), 3.0, 0), Batch((GOOD, BAD), (), 2.0, 1, 1)]
    found = summary(batches)

    assert (found["rollouts"], found["masked"], found["ledgers"], found["scored_on_a_fault"], found["mean_reward"]) == (4, 1, 3, 0, 0.5)
    assert found["plain"]["slowest_over_median_rollout"] == 1.5 and found["redundant"]["slowest_over_median_rollout"] == 1.0
    assert summary([Batch((GOOD,), (GOOD,), 1.0, 0)])["scored_on_a_fault"] == 1
    assert summary([Batch((LOST,), (), 1.0, 0)])["scored_on_a_fault"] == 1


def test_the_summary_tells_of_results_whose_ledger_is_missing_or_is_anothers_too():
    def counted(*ledgers, masked=()):
        kept, lost = (tuple(dataclasses.replace(one, ledger=name) for name in names) for one, names in ((GOOD, ledgers), (LOST, masked)))
        return summary([Batch(kept, lost, 1.0, 0)])["without_a_ledger_of_its_own"]

    assert counted("l1", "l2", masked=("l3", "", "")) == 0, "a rollout that had no lease has no ledger"
    assert counted("l1", "l1", "l2") == 2
    assert counted("l1", "") == 1
    assert counted("l1", "l2", masked=("l2",)) == 1


def test_an_agent_thinks_as_long_in_every_run():
    assert think_s(7, 0.2, 0.8) == think_s(7, 0.2, 0.8) != think_s(8, 0.2, 0.8)
    assert think_s(7, 0.2, 0.0) == 0.2


# ---- a trainer, on a Ray that has no processes ----


class RayError(Exception):
    pass


class RayTaskError(RayError):
    def __init__(self, cause):
        super().__init__()
        self.cause = cause


class OneProcess:
    """Tasks are carried out when somebody waits for them, in the order in which they were started. `play` has what becomes of each."""

    exceptions = SimpleNamespace(RayError=RayError, RayTaskError=RayTaskError)

    def __init__(self, play):
        self.play = play
        self.started = []
        self.cancelled = []
        self.killed = []
        self.late = ()
        """The numbers of those that do not end when they are cancelled."""

    def put(self, what):
        return what

    def remote(self, **options):
        return lambda function: SimpleNamespace(remote=self._start)

    def _start(self, fleet, spec, number, *, is_lost, think):
        self.started.append(number)
        return len(self.started) - 1, number

    def wait(self, references, num_returns, timeout=None):
        over = [one for one in references if one[1] not in self.late][:num_returns]
        assert len(over) == num_returns or timeout is not None, "it would wait for ever"
        return over, [one for one in references if one not in over]

    def get(self, reference):
        assert reference[1] not in self.late, "it would wait for ever"
        found = self.play(reference[1])
        if isinstance(found, Exception):
            raise found
        return found

    def cancel(self, reference, *, force=False):
        (self.killed if force else self.cancelled).append(reference[1])


def trainer(play):
    ray = OneProcess(play)
    return Trainer(ray, None, None, SimpleNamespace(lost=0.0, think=0.0, spread=0.0)), ray


def test_what_is_masked_is_started_once_more_and_then_given_up():
    """Or a fleet that gives no leases at all would be asked for ever."""
    one, ray = trainer(lambda number: LOST)
    batch = one.batch(3, 1)

    assert (batch.results, len(batch.masked), batch.given_up, batch.surplus) == ((), 8, 4, 0)
    assert sorted(ray.started) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert summary([batch])["rollouts"] == 0 and summary([batch])["given_up"] == 4


def test_a_rollout_whose_worker_died_is_masked_and_the_batch_is_whole_with_its_second_attempt():
    died = {1}

    def play(number):
        if number in died:
            died.remove(number)
            return RayError("the worker died")
        return Result(number, "trusted", 1.0, 1.0)

    one, _ = trainer(play)
    batch = one.batch(3, 0)

    assert sorted(result.rollout for result in batch.results) == [0, 1, 2] and batch.given_up == 0
    assert [(result.rollout, result.reason) for result in batch.masked] == [(1, "RayError")]


def test_rollouts_that_are_not_needed_are_cancelled():
    one, ray = trainer(lambda number: Result(number, "trusted", 1.0, 1.0))
    batch = one.batch(3, 2)

    assert (len(batch.results), batch.surplus, ray.cancelled, ray.killed) == (3, 2, [3, 4], [])


def test_one_that_does_not_end_when_it_is_cancelled_is_killed_and_keeps_no_batch_waiting():
    one, ray = trainer(lambda number: Result(number, "trusted", 1.0, 1.0))
    ray.late = (1,)
    batch = one.batch(3, 2)

    assert (len(batch.results), batch.surplus, ray.cancelled, ray.killed) == (3, 2, [1, 4], [1])


@pytest.mark.parametrize("mistake", [untax.UsageError("not so"), untax.StageFailed("repo", "there is no such commit"), TypeError("a slip")])
def test_a_mistake_of_the_callers_ends_the_batch_and_nothing_goes_on(mistake):
    """It would fail at every attempt; masked, it would look like a fault of the machines."""
    one, ray = trainer(lambda number: RayTaskError(mistake))
    with pytest.raises(type(mistake)):
        one.batch(3, 0)
    assert ray.started == [0, 1, 2] and ray.cancelled == [1, 2]


class Refusing:
    """A fleet that says this to every lease."""

    def __init__(self, said):
        self._said = said

    def lease(self, spec, **more):
        raise self._said


def test_a_rollout_masks_what_a_machine_did_and_raises_what_its_caller_did():
    for fault in (untax.BackendError("", "gone"), untax.StageFailed("setup", "node b: disk_full: a set-up command found no room")):
        result = run_rollout(Refusing(fault), None, 0, is_lost=False, think=0.0)
        assert (result.verdict, result.reward, result.reason) == ("infra", None, type(fault).__name__)
    for mistake in (untax.UsageError("not so"), untax.StageFailed("repo", "there is no such commit")):
        with pytest.raises(type(mistake)):
            run_rollout(Refusing(mistake), None, 0, is_lost=False, think=0.0)


class Holding:
    """A fleet that has leases, until it was asked often enough."""

    def __init__(self, *counts):
        self._counts = list(counts)

    def pools(self):
        count = self._counts.pop(0) if len(self._counts) > 1 else self._counts[0]
        return SimpleNamespace(stages=[SimpleNamespace(leased=count), SimpleNamespace(leased=0)])


def test_leases_that_are_on_their_way_back_are_waited_for_and_those_that_stay_are_told(monkeypatch):
    assert leases_left(Holding(2, 1, 0)) == 0
    monkeypatch.setattr(ray_rollouts, "IDLE_S", 0.0)
    assert leases_left(Holding(2)) == 2


# ---- on a real fleet ----


@contextlib.contextmanager
def example(cluster, tmp_path, *words):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HOME": str(tmp_path)}
    argv = [sys.executable, str(_ROOT / "examples" / "ray_rollouts.py"), "--state-dir", str(tmp_path / "{node}"), *words]
    with subprocess.Popen([*argv, "--address", cluster.address], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        yield run


@pytest.fixture(scope="module")
def four_nodes():
    if reason := raycluster.unavailable_reason() or substrates.load("namespace").unavailable_reason():
        pytest.skip(reason)
    with raycluster.RayCluster(4, cpus=5) as cluster:
        yield cluster


def played(cluster, tmp_path, *, rollouts, batch, extra, after, nodes):
    """So many rollouts; a node is killed after a number of batches, and another comes in its place afterwards."""
    batches = math.ceil(rollouts / batch)
    given = ("--rollouts", str(rollouts), "--batch", str(batch), "--extra", str(extra), "--lost", "0.02", "--think", "0.1")
    with example(cluster, tmp_path, *given) as run:
        for line in run.stderr:
            if line.startswith(f"batch {after} of {batches}"):
                break
        cluster.kill(cluster.ids()[-1])
        said, complained = run.communicate(timeout=1200)
    cluster.add()
    assert run.returncode == 0, complained
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))  # Ray tells of dead nodes on the same stream
    print(json.dumps(found))  # for docs/fleet.md
    assert found["rollouts"] == found["counted"] == batches * batch and found["given_up"] == 0
    assert found["masked"] > 0 and found["scored_on_a_fault"] == 0
    assert found["without_a_ledger_of_its_own"] == 0 and found["mean_reward"] == 1.0
    assert found["plain"]["batches"] == found["redundant"]["batches"] == batches // 2
    assert found["redundant"]["surplus"] > 0 and found["leases_left"] == 0
    assert "NodeDiedError" in found["masked_reasons"]  # it had rollouts when it was killed
    assert len(found["nodes"]) >= nodes and sum(found["nodes"].values()) == found["rollouts"]


@pytest.mark.timeout(400)  # 80 to 110 s on a machine that others use as well
def test_a_killed_node_and_lost_leases_are_masked_every_batch_is_whole_and_no_lease_is_left(four_nodes, tmp_path):
    """What is asked of 1,000, with fewer: the node that is killed may have had none of the first 16 that count, since placement chooses."""
    played(four_nodes, tmp_path, rollouts=64, batch=8, extra=2, after=2, nodes=3)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_thousand_rollouts_over_four_nodes(four_nodes, tmp_path):
    played(four_nodes, tmp_path, rollouts=1000, batch=12, extra=3, after=20, nodes=4)


def test_a_repository_that_is_none_ends_the_run_with_words(four_nodes, tmp_path):
    with example(four_nodes, tmp_path, "--repo", str(tmp_path / "nothing"), "--commit", "0" * 40, "--rollouts", "4", "--batch", "4") as run:
        complained = run.communicate(timeout=120)[1]
    assert run.returncode in (1, 2)
    assert "ray_rollouts: " in complained and str(tmp_path / "nothing") in complained and "Traceback" not in complained
