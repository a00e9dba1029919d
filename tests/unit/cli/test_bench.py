"""`untax bench`: what its flags may say, and which run it goes on with. Nothing is measured here."""

import argparse

import pytest
from tests import records

from untax.cli import bench, main
from untax.core.errors import UsageError
from untax.core.substrate import Typical
from untax.meter.begun import Done
from untax.meter.record import Case, Reader
from untax.rollout import workload
from untax.testing import FakeSubstrate

TEXT = 'version = 1\nname = "mine"\nactions = [{ run = ["true"] }]\n'


@pytest.fixture
def begun(tmp_path):
    """A run with one trial of a workload of one's own, not yet complete; gives its directory and the workload's file."""
    mine = tmp_path / "mine.toml"
    mine.write_text(TEXT)
    plan = {"substrates": ["process"], "works": [[str(mine), 0]], "seed": 1}
    trial = records.a_trial(Case("process", tier=str(mine)), software={"workload": workload.load(str(mine)).digest()})
    records.write(tmp_path / "run" / "records.jsonl", [records.a_run(plan=plan), trial])
    return tmp_path / "run", mine


def test_a_run_whose_workload_has_changed_is_not_gone_on_with(begun, capsys):
    """Trials before and after would be of two workloads under one name; the file is left as it was."""
    out, mine = begun
    before = (out / "records.jsonl").read_bytes()
    mine.write_text(TEXT.replace('"true"', '"false"'))

    assert main(["bench", "--resume", str(out)]) == 2
    assert "has changed since the run began; start a new one" in capsys.readouterr().err
    assert (out / "records.jsonl").read_bytes() == before


def test_a_run_whose_workload_is_the_same_is_gone_on_with(begun):
    out, mine = begun
    with Reader(out / "records.jsonl") as reader:
        bench._check_workloads(reader.run, Done(workloads={str(mine): workload.load(str(mine)).digest()}))


@pytest.mark.parametrize("text", ["auto,foo,8x", "foo", "8x", "0", "auto,0", "-1", "1.5", "²", ","])
def test_levels_that_are_neither_numbers_nor_auto_are_refused(text):
    with pytest.raises(UsageError, match="1,8,32"):
        bench._levels(text)


@pytest.mark.parametrize(
    ("text", "levels", "knee"), [("1,8", [1, 8], False), ("auto", [1, 8, 32], True), ("2, auto", [2], True), ("4,auto,16", [4, 16], True)]
)
def test_levels_are_numbers_and_auto_goes_on_to_the_knee(text, levels, knee):
    said = bench._levels(text)
    assert (said["concurrency"], said.get("knee", False)) == (levels, knee)


class Taking(FakeSubstrate):
    """As far as the command line asks: one that takes images in, and costs more than the other."""

    typical = Typical(start_s=60.0, action_s=0.1)
    builder, takes, image_sockets = "fake", "oci", {}
    own_root = take_in = discard = create_on = FakeSubstrate.create  # none is called


@pytest.fixture
def two(monkeypatch):
    """A machine with a substrate that takes images in, and one that does not."""
    kinds = {"taking": Taking, "standing": FakeSubstrate}
    monkeypatch.setattr(bench.substrates, "names", lambda: list(kinds))
    monkeypatch.setattr(bench.substrates, "load", lambda name: kinds[name]())


def planned(*words):
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    plan = bench._plan(parser.parse_args(words))
    return bench._in_time(plan, bench._known(plan))


@pytest.mark.usefixtures("two")
def test_in_a_time_box_the_host_is_exported_nowhere():
    """That takes minutes and goes on beside everybody else's trials, so a small image stands in for it."""
    small = {"taking": {"image": "debian:bookworm+python3,git"}}
    assert planned("--budget", "150").options == small
    assert planned("--budget", "150", "--image", "standing=dir:/x").options == {**small, "standing": {"image": "dir:/x"}}
    assert planned("--budget", "150", "--image", "taking=host").options == {"taking": {"image": "host"}}
    assert planned().options == {}


@pytest.mark.usefixtures("two")
def test_in_a_time_box_the_cheapest_substrate_comes_first(tmp_path):
    """So that the making of a dear one's stages takes nothing from it."""
    (tmp_path / "mine.toml").write_text('image = "dir:/own"\n' + TEXT)
    assert planned().substrates == ("taking", "standing")
    assert planned("--budget", "150").substrates == ("standing", "taking")
    assert planned("--budget", "150", "--tier", str(tmp_path / "mine.toml"), "--length", "0").substrates == ("standing", "taking")


@pytest.mark.usefixtures("two")
def test_a_workload_with_an_image_of_its_own_keeps_it_in_a_time_box(tmp_path):
    (tmp_path / "mine.toml").write_text('image = "dir:/own"\n' + TEXT)
    assert planned("--budget", "150", "--tier", str(tmp_path / "mine.toml"), "--length", "0").options == {}


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("text", ["taking", "taking=", "=x", "moon=x"])
def test_an_image_is_for_a_substrate_of_the_plan(text):
    with pytest.raises(UsageError, match=r"NAME=IMAGE.*taking, standing"):
        planned("--image", text)


STUDY = """
substrates = ["standing", "again"]
works = [["T0", 0]]
trials = 9
[[counts]]
substrates = ["again"]
trials = 5
[[counts]]
substrates = ["again", "standing"]
warmth = ["warm"]
trials = 0
[options.again]
substrate = "standing"
image = "dir:/x"
"""


@pytest.mark.usefixtures("two")
def test_flags_narrow_a_plan_and_a_label_stands_for_its_substrate(tmp_path):
    (tmp_path / "plan.toml").write_text(STUDY)
    whole = planned(str(tmp_path / "plan.toml"))
    assert (whole.substrates, [one["trials"] for one in whole.counts]) == (("standing", "again"), [5, 0])
    one = planned(str(tmp_path / "plan.toml"), "--substrate", "standing", "--trials", "2")
    assert (one.options, one.trials) == ({}, 2)
    assert one.counts == ({"substrates": ["standing"], "warmth": ["warm"], "trials": 0},)
    assert planned(str(tmp_path / "plan.toml"), "--cold", "--trials", "3").counts == ({"substrates": ["again"], "trials": 3},)


@pytest.mark.usefixtures("two")
def test_a_label_for_what_does_not_exist_is_refused(tmp_path):
    (tmp_path / "plan.toml").write_text(STUDY.replace('substrate = "standing"', 'substrate = "moon"'))
    with pytest.raises(UsageError, match="no substrate 'moon'"):
        planned(str(tmp_path / "plan.toml"))
