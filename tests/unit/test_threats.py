"""docs/threats.md says which test asks what; it says so truly."""

import importlib
import re
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_PAGE = (_ROOT / "docs" / "threats.md").read_text()
_ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in _PAGE.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]


def ids_of(short: str) -> set[str]:
    """The ids that the names of a module's tests begin with; those it took from another module are its own."""
    folder, _, name = short.rpartition("/")
    inside = folder if folder.startswith(("unit", "integration", "conformance")) else f"security/{folder}".rstrip("/")
    try:
        module = importlib.import_module(f"tests/{inside}/test_{name}".replace("/", "."))
    except pytest.skip.Exception as lacking:
        pytest.skip(str(lacking))
    found = set()
    for test in vars(module):
        if test.startswith("test_"):
            for word in test.split("_")[1:]:
                if not re.fullmatch(r"[a-z]\d+", word):
                    break
                found.add(word.upper())
    return found


def test_the_table_has_every_case_of_its_chapters():
    counts = {"E": 30, "R": 19, "P": 23, "O": 12, "F": 20, "N": 12}
    assert [row[0] for row in _ROWS] == [f"{k}{n}" for k, last in counts.items() for n in range(1, last + 1)] + [
        "X18",
        "X19",
        "X25",
        "C8",
        "C9",
    ]


@pytest.mark.parametrize("short", sorted({name for row in _ROWS for cell in row[1:] for name in re.findall(r"`([^`]+)`", cell)}))
def test_a_module_has_the_tests_that_the_table_says(short):
    claimed = {row[0] for row in _ROWS if any(f"`{short}`" in cell for cell in row[1:])}
    assert claimed <= ids_of(short)


def test_a_cell_without_a_test_has_a_reason():
    reasons = set(re.findall(r"^- (\([a-z]\)) ", _PAGE, re.MULTILINE))
    bare = {cell for row in _ROWS for cell in row[1:] if "`" not in cell}
    assert bare <= reasons
