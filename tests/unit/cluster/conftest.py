"""What all who test the travel of layers stand on."""

import pytest
from tests.transfers import contexts, stores


@pytest.fixture(scope="module")
def trust(tmp_path_factory):
    return contexts(tmp_path_factory.mktemp("trust"))


@pytest.fixture
def two(tmp_path):
    with stores(tmp_path, "there", "here") as opened:
        yield opened
