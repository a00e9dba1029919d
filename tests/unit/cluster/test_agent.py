"""What an agent decides by itself; the rest of it is tried with real engines."""

from types import SimpleNamespace

import pytest

import untax
from untax import substrates
from untax.core.substrate import Unenforced
from untax.testing import FakeSubstrate

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


NO_MEMORY = Unenforced("memory_mib", "no writable control group", "mount them")


@pytest.mark.parametrize(("limits", "unenforced"), [("strict", (NO_MEMORY,)), ("strict", ()), ("warn", (NO_MEMORY,))])
async def test_a_node_that_cannot_enforce_limits_which_are_strict_is_no_member_and_says_what_a_lease_would(
    tmp_path, monkeypatch, limits, unenforced
):
    """An engine starts all the same, and would refuse every lease."""
    fake = FakeSubstrate(unenforced=unenforced)
    monkeypatch.setattr(substrates, "load", lambda name, **options: fake)
    monkeypatch.setattr("untax.cluster.agent.Reaper", lambda *given: SimpleNamespace(done=lambda: None))

    class Begun(Exception):
        """As far as a fake can go."""

    def begun(*given, **more):
        raise Begun

    monkeypatch.setattr("untax.cluster.agent.Service", begun)
    agent = Agent(Plan("fleet", "fake", str(tmp_path / "state"), {"limits": limits}), SimpleNamespace(node_id="n" * 56, name="n"))
    is_refused = limits == "strict" and unenforced
    with pytest.raises(untax.SubstrateUnavailable if is_refused else Begun) as caught:
        await agent.start()
    if is_refused:
        async with untax.Engine(fake, limits="strict") as engine:
            with pytest.raises(untax.SubstrateUnavailable) as of_lease:
                await engine.acquire()
        assert caught.value.message == of_lease.value.message == "memory_mib cannot be enforced: no writable control group (mount them)"
