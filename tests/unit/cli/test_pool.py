"""`untax pool simulate`: a file in, the policies side by side out."""

import json
import re
from pathlib import Path

import pytest

from untax.cli import main
from untax.pool.simulation import POLICIES

FLEET = """
[fleet]
nodes = 5
memory_mib = 8
sandbox_mib = 1
store_mib = 40000
[trace]
rollouts = 400
specs = 20
repos = 10
images = 3
hold_s = 60
{more}
"""


@pytest.fixture
def file(tmp_path):
    def write(more: str = "") -> str:
        (tmp_path / "fleet.toml").write_text(FLEET.format(more=more))
        return str(tmp_path / "fleet.toml")

    return write


def test_policies_are_shown_side_by_side(file, capsys):
    assert main(["pool", "simulate", file()]) == 0

    out = capsys.readouterr().out
    assert [line.split()[0] for line in out.splitlines() if re.match(rf"({'|'.join(POLICIES)}) ", line)] == list(POLICIES)
    assert re.search(r"state-distance: [0-9.]+ × image-affinity", out)
    assert "seed 1" in out


def test_one_policy_alone_is_compared_with_nothing(file, capsys):
    assert main(["pool", "simulate", file(), "--policy", "random"]) == 0

    out = capsys.readouterr().out
    assert "×" not in out and "image-affinity" not in out


def test_the_document_is_the_same_for_the_same_seed(file, capsys):
    documents = []
    for seed in ("7", "7", "8"):
        assert main(["pool", "simulate", file(), "--json", "--seed", seed]) == 0
        documents.append(json.loads(capsys.readouterr().out))

    first, again, other = documents
    assert first == again
    assert first["outcomes"] != other["outcomes"]
    assert [one["policy"] for one in first["outcomes"]] == list(POLICIES)
    assert all(sum(one["shares"].values()) == pytest.approx(1) and one["rollouts"] == 200 for one in first["outcomes"])


def test_the_grid_has_a_line_for_each_cell(file, capsys):
    name = file("[grid]\nzipf = [0, 1.5]\nutilisation = [0.3, 0.9]\nrollouts = 100\n")
    assert main(["pool", "simulate", name, "--grid"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines if re.match(r" +[0-9]", line)] == [
        ["0", "0.3"],
        ["0", "0.9"],
        ["1.5", "0.3"],
        ["1.5", "0.9"],
    ]

    assert main(["pool", "simulate", name, "--grid", "--json", "--policy", "random", "--rollouts", "50"]) == 0
    cells = json.loads(capsys.readouterr().out)["grid"]
    assert [(cell["zipf"], cell["utilisation"], len(cell["outcomes"])) for cell in cells] == [
        (0, 0.3, 1),
        (0, 0.9, 1),
        (1.5, 0.3, 1),
        (1.5, 0.9, 1),
    ]
    assert cells[0]["outcomes"][0]["rollouts"] == 25


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent.toml"], "No such file"),
        (["{file}", "--grid"], "[grid]"),
        (["{file}", "--rollouts", "0"], "rollouts = 0"),
    ],
)
def test_what_cannot_be_simulated_is_wrong_usage(file, capsys, arguments, said):
    name = file()

    assert main(["pool", "simulate", *(one.format(file=name) for one in arguments)]) == 2
    assert said in capsys.readouterr().err


def test_a_file_that_is_no_toml_is_wrong_usage(tmp_path, capsys):
    broken = tmp_path / "broken.toml"
    broken.write_text("[fleet")

    assert main(["pool", "simulate", str(broken)]) == 2
    assert "is not TOML" in capsys.readouterr().err


def test_every_option_is_documented():
    text = (Path(__file__).parents[3] / "docs" / "cli.md").read_text().partition("### untax pool simulate")[2].partition("\n## ")[0]

    assert all(option in text for option in ("--policy", "--seed", "--rollouts", "--grid", "--json", *POLICIES))
