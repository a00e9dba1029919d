"""One exec of a pod for each command, on a real cluster: how it ended, and whose fault it is when it did not."""

import asyncio
import os
import time

import pytest
from tests import kubehost
from tests.hostview import stopped

import untax
from untax.substrates import _incumbent

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SPEC = untax.EnvSpec(image=kubehost.SMALL, isolation="container")
SLACK_S = 2.0  # of a busy machine


@pytest.fixture(scope="module")
def cluster():
    with kubehost.cluster() as cluster:
        yield cluster


@pytest.fixture(scope="module")
def box(cluster, _runner, tmp_path_factory):
    """One for all: each command is an exec of its own."""
    engine = untax.Engine("kubernetes", kubeconfig=cluster.kubeconfig, state_dir=tmp_path_factory.mktemp("state"))
    _runner.run(engine.start())
    box = _runner.run(engine.acquire(SPEC))
    yield box
    _runner.run(box.release())
    _runner.run(engine.aclose())


@pytest.mark.parametrize(
    ("script", "code"), [("exit 0", 0), ("exit 128", 128), ("exit 200", 200), ("exit 255", 255), ("kill -9 $$", 137), ("kill -15 $$", 143)]
)
async def test_p20_a_status_is_told_as_it_came_and_not_guessed_from(box, script, code):
    """As everywhere on this path: see test_incumbent."""
    result = await box.sandbox.run_incumbent(["sh", "-c", f"echo out; echo err >&2; {script}"], timeout_s=30)

    assert (result.outcome, result.exit_code, result.stdout, result.stderr) == ("exited", code, b"out\n", b"err\n")


@pytest.mark.parametrize("who", ["kube-apiserver", "kubelet"])
async def test_x18_a_cluster_that_hangs_is_never_taken_for_a_slow_command(box, cluster, who, monkeypatch):
    """Neither its API server nor the pod's node, for which an API server answers some questions by itself."""
    if os.environ.get("KUBECONFIG"):
        pytest.skip("user: the cluster is not ours to stop")
    node = cluster.kubectl("get", "pod", box.sandbox.id, "-o", "jsonpath={.spec.nodeName}")
    pid = cluster.pid(who if who != "kubelet" else f"kubelet-{node.removeprefix('node')}")
    slow = await box.sandbox.run_incumbent(["sleep", "20"], timeout_s=1)
    monkeypatch.setattr(_incumbent, "ANSWER_S", 1.0)  # it will not answer
    with stopped(pid):
        began = time.monotonic()
        with pytest.raises(untax.BackendError):
            await asyncio.wait_for(box.sandbox.run_incumbent(["true"], timeout_s=1), 30)
        took_s = time.monotonic() - began
    monkeypatch.undo()
    back = await box.sandbox.run_incumbent(["echo", "back"], timeout_s=30)

    assert (slow.outcome, slow.exit_code) == ("timeout", 124)
    assert took_s < 1 + 1 + SLACK_S
    assert back.text == "back\n"
