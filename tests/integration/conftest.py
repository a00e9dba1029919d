"""Real substrates through the public names."""

import pytest

from untax import substrates


@pytest.fixture
def process_state(tmp_path):
    """A state directory for the process substrate; skips where the cell is not built."""
    if reason := substrates.load("process").unavailable_reason():
        pytest.skip(f"process: {reason}")
    return tmp_path / "state"


@pytest.fixture(scope="session")
def ray_nodes():
    """A Ray cluster of two nodes for all who need no other; nodes that a test kills are those it added."""
    from tests import raycluster

    with raycluster.RayCluster(2) as cluster:
        yield cluster
