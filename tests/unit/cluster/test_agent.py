"""What an agent decides by itself; the rest of it is tried with real engines."""

from types import SimpleNamespace

import pytest

pytest.importorskip("cryptography", reason="ray: the extra is not installed")
pytest.importorskip("uvicorn", reason="server: the extra is not installed")

from untax.cluster.agent import Agent
from untax.cluster.gauge import Gauge
from untax.cluster.plan import Plan


class Hosting:
    leases = 0
    is_draining = False

    def drain(self):
        self.is_draining = True


@pytest.fixture
def agent():
    one = Agent(Plan("fleet"), SimpleNamespace())
    one.now_s = 100.0
    one.gauge = Gauge(lambda: one.now_s)
    one._hosting = Hosting()
    return one


def test_a_node_rests_once_nobody_has_needed_it_for_long_enough(agent):
    agent.now_s += 6
    assert agent.rest(10.0) == 4.0 and not agent.is_draining
    agent.now_s += 4
    assert agent.rest(10.0) == 0.0 and agent.is_draining


def test_a_node_with_a_lease_does_not_rest(agent):
    agent.now_s += 1000
    agent._hosting.leases = 1  # which nobody has told the gauge of yet
    assert agent.rest(10.0) == 10.0 and not agent.is_draining
