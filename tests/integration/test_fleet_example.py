"""The trainer's example, with a node that is killed on the way; a short run of what its own defaults do with 1,000."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from examples.ray_rollouts import Batch, Result, rewards_and_mask, summary, think_s
from tests import raycluster

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


def test_an_agent_thinks_as_long_in_every_run():
    assert think_s(7, 0.2, 0.8) == think_s(7, 0.2, 0.8) != think_s(8, 0.2, 0.8)
    assert think_s(7, 0.2, 0.0) == 0.2


def test_a_killed_node_and_lost_leases_are_masked_and_every_batch_is_whole(tmp_path):
    if reason := raycluster.unavailable_reason() or substrates.load("namespace").unavailable_reason():
        pytest.skip(reason)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "HOME": str(tmp_path)}
    argv = [sys.executable, str(_ROOT / "examples" / "ray_rollouts.py"), "--state-dir", str(tmp_path / "{node}")]
    argv += ["--rollouts", "16", "--batch", "4", "--extra", "2", "--lost", "0.1", "--think", "0.1"]
    with raycluster.RayCluster(3, cpus=3) as cluster:
        with subprocess.Popen(
            [*argv, "--address", cluster.address], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as run:
            for line in run.stderr:
                if line.startswith("batch 1 of 4"):
                    break
            cluster.kill(cluster.ids()[-1])
            said, complained = run.communicate(timeout=120)
        assert run.returncode == 0, complained
    found = json.loads(next(line for line in said.splitlines() if line.startswith("{")))  # Ray tells of dead nodes on the same stream
    assert found["rollouts"] == found["counted"] == 16
    assert found["masked"] > 0 and found["scored_on_a_fault"] == 0
    assert found["ledgers"] >= 16 and found["mean_reward"] == 1.0
    assert found["plain"]["batches"] == found["redundant"]["batches"] == 2
