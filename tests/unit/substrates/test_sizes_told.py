"""The sizes that `docs/adding-a-substrate.md` gives as evidence are those of the files."""

import re
from pathlib import Path

import pytest

import untax.substrates

PAGE = Path(__file__).parents[3] / "docs/adding-a-substrate.md"
FILES = {path.stem: path for path in Path(untax.substrates.__file__).parent.glob("*.py")}
TOLD = dict(re.findall(r"`(\w+?)(?:\.py)?`,? (\d+)", PAGE.read_text().partition("is the one to copy")[0]))
UNTOLD = {"__init__", "_greeting", "_tenant"}  # some dozen lines each


@pytest.mark.parametrize("name", sorted(TOLD))
def test_a_size_that_is_told_is_nearly_right(name):
    assert int(TOLD[name]) == pytest.approx(len(FILES[name].read_text().splitlines()), rel=0.1, abs=10)


def test_no_file_is_left_out():
    assert FILES.keys() - TOLD.keys() == UNTOLD
