"""Every test of faults begins with a look at what runs already, and has a state directory of its own."""

import pytest
from tests import leftovers
from tests.security.faults.ground import before, loop_file_system


@pytest.fixture(autouse=True)
def baseline():
    leftovers.adopt_orphans()
    before.clear()
    before.update(leftovers.Watch(marks=()).take().processes)


@pytest.fixture
def state(tmp_path):
    return tmp_path / "state"


@pytest.fixture
def scratch(tmp_path, as_root):
    with loop_file_system(tmp_path) as where:
        yield where
