"""Real substrates through the public names."""

import pytest

from untax import substrates


@pytest.fixture
def process_state(tmp_path):
    """A state directory for the process substrate; skips where the cell is not built."""
    if reason := substrates.load("process").unavailable_reason():
        pytest.skip(f"process: {reason}")
    return tmp_path / "state"
