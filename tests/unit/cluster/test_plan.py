"""What is wrong with a fleet's options is said where they are given, as an engine says it, and not by each node after its agent was started."""

import pytest

pytest.importorskip("ray", reason="ray: not installed; pip install 'untax[ray]'")

import untax
from untax.cluster import access, operate
from untax.cluster.fleet import Fleet
from untax.cluster.plan import Plan
from untax.sync import Fleet as BlockingFleet

WRONG = [
    ({"limits": "bogus"}, "limits must be 'warn' or 'strict'"),
    ({"nonsense": 1}, "unexpected keyword argument 'nonsense'; its options are"),
    ({"substrate": "no-such"}, "there is no substrate 'no-such'"),
    ({"substrate": 3}, "substrate must be a substrate's name, not int"),
    ({"pool": 3}, "pool must be an untax.PoolOptions"),
    ({"lease_s": -1}, "lease_s must be a positive number"),
    ({"store_budget_mib": 0}, "store_budget_mib must be"),
    ({"disk": "floppy"}, "disk must be 'auto' or 'tmpfs'"),
]


@pytest.mark.parametrize(("options", "words"), WRONG)
@pytest.mark.parametrize("kind", [Fleet, BlockingFleet])
def test_options_are_checked_before_anything_is_started(kind, options, words):
    with pytest.raises(untax.UsageError, match=words):
        kind(**options)


async def test_so_are_those_of_a_fleet_that_stays(monkeypatch):
    monkeypatch.setattr(access, "connect", lambda *_, **__: pytest.fail("it was to be refused first"))
    with pytest.raises(untax.UsageError, match="unexpected keyword argument 'nonsense'"):
        async with operate.up("auto", Plan("fleet", options={"nonsense": 1})):
            pass


def test_a_substrate_for_each_spec_is_refused_with_the_names_of_those_that_there_are():
    """Its layers would not travel, and nobody would sweep after an agent that was killed."""
    with pytest.raises(untax.UsageError, match=r"one substrate on all of its nodes.*not 'auto' but one of .*namespace"):
        Fleet(substrate="auto")


def test_what_lies_on_the_nodes_need_not_lie_here(tmp_path):
    Fleet(setup_wheels="/on/the/nodes", state_dir=tmp_path / "{node}" / "state", pool=untax.PoolOptions(entries=4))
    assert not list(tmp_path.iterdir())


def test_layers_come_at_the_port_after_the_agents_own():
    assert (Plan("x").layers_port, Plan("x", port=8766).layers_port) == (0, 8767)
