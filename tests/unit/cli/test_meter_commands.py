"""`untax report`, `project` and `advise`: files in, answers out, and words for what cannot be answered."""

import json
from dataclasses import replace

import pytest
from tests import records

from untax.cli import main
from untax.meter.record import Case


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    records.write(place / "records.jsonl", records.whole_run([*records.plain_cases(), *records.more_cases()], 8))
    return str(place)


def test_report_prints_the_summary_and_where_the_page_is(run_dir, tmp_path, capsys):
    assert main(["report", run_dir, "--out", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == str(tmp_path / "report.html")
    assert "kubernetes · incumbent" in out


def test_report_as_json_names_files_and_findings(run_dir, tmp_path, capsys):
    assert main(["report", run_dir, "--out", str(tmp_path), "--tier", "T0", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["files"][0].endswith("report.html") and document["complete"] is True
    assert "completion" in document["missing_figures"]
    assert {"gap", "too few trials"} <= {finding["name"] for finding in document["findings"]}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["report", "RUN", "--tier", "T9"], "T0, T1, T2"),
        (["report", "RUN", "--substrate", "moon"], "container"),
        (["report", "nowhere"], "untax bench"),
        (["project", "RUN", "--tier", "T9"], "T0, T1, T2"),
        (["project"], "RUN"),
        (["project", "RUN", "--seconds-per-trajectory", "1"], "either"),
        (["project", "--seconds-per-trajectory", "quick"], "quick"),
        (["project", "RUN", "--batch", "0"], "--batch"),
        (["advise", "RUN", "--mix", "inspect"], "inspect=0.6"),
        (["advise", "RUN", "--isolation-of", "vm=wall"], "NAME=LEVEL"),
        (["advise", "RUN", "--isolation-of", "namespace=vm"], "not a matter of choice"),
        (["advise", "RUN", "--isolation", "vm", "--length", "0"], "length"),
    ],
)
def test_wrong_usage_is_exit_code_2_with_the_remedy(run_dir, capsys, words, said):
    assert main([run_dir if word == "RUN" else word for word in words]) == 2
    assert said in capsys.readouterr().err


def test_an_empty_file_is_refused(tmp_path, capsys):
    (tmp_path / "records.jsonl").touch()
    for command in ("report", "project", "advise"):
        assert main([command, str(tmp_path)]) == 2
        assert "empty" in capsys.readouterr().err


def test_the_papers_table_2_is_explained(capsys):
    assert main(["project", "--seconds-per-trajectory", "42.5", "--seconds-per-trajectory", "23.4", "--trajectories", "1000000"]) == 0
    out = capsys.readouterr().out
    assert "11,806 h" in out and "11,811 h" in out and "42.52 s" in out
    assert "6,500 h" in out and "6,495 h" in out and "1.82 ×" in out


@pytest.mark.parametrize(
    ("words", "hours"),
    [(["--seconds-per-trajectory", "1"], 278), (["--seconds-per-action", "0.010"], 417), (["--seconds-per-action", "0.1"], 4167)],
)
def test_the_papers_table_1(capsys, words, hours):
    assert main(["project", *words, "--json"]) == 0
    assert round(json.loads(capsys.readouterr().out)["projections"][0]["worker_hours"]) == hours


def test_money_and_workers_follow_from_hours(capsys):
    assert (
        main(["project", "--seconds-per-trajectory", "36", "--trajectories", "1e5", "--price", "0.25", "--goal-hours", "8", "--json"]) == 0
    )
    (found,) = json.loads(capsys.readouterr().out)["projections"]
    assert (found["worker_hours"], found["cost"], found["workers"]) == (1000.0, 250.0, 125)


def test_a_run_is_projected_with_intervals_and_extrapolated_lengths(run_dir, capsys):
    assert main(["project", run_dir, "--steps", "300", "--price", "1", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert all(one["extrapolated"] and one["worker_hours_interval"][0] < one["worker_hours"] for one in document["projections"])
    assert {cell["steps"] for cell in document["sensitivity"]} >= {10, 150, 300}
    assert all(one["floor"] for one in document["synchronous"] if one["batch"] > 8)
    assert main(["project", run_dir, "--sensitivity"]) == 0
    assert "10 million" in capsys.readouterr().out


def test_advice_names_a_substrate_and_why(run_dir, capsys):
    assert main(["advise", run_dir, "--parallel", "32", "--length", "10", "--isolation-of", "container=container"]) == 0
    out = capsys.readouterr().out
    assert "Advice: namespace" in out and "Break-even" in out
    assert "Left out: process: its isolation is 'none'" in out


def test_a_substrate_that_is_not_installed_is_left_out_until_its_level_is_said(run_dir, capsys, monkeypatch):
    import untax.cli.advise as command

    monkeypatch.setattr(command.substrates, "names", lambda: ["namespace", "process"])
    assert main(["advise", run_dir, "--isolation", "vm"]) == 2
    assert "--isolation-of" in capsys.readouterr().err
    assert main(["advise", run_dir, "--isolation", "vm", "--isolation-of", "vm=vm", "--json"]) == 0
    assert {option["substrate"] for option in json.loads(capsys.readouterr().out)["options"]} == {"vm"}


def test_what_ran_as_something_else_is_left_out_of_the_advice_by_name(tmp_path, capsys):
    made = [records.a_run()]
    for name, ran_as in (("namespace", "namespace"), ("vm", "vm-emulated")):
        made += [records.a_trial(Case(name, tier="T2"), n, substrate_detail={"substrate": ran_as}) for n in range(3)]
    records.write(tmp_path / "records.jsonl", made)

    assert main(["advise", str(tmp_path), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {option["substrate"] for option in document["options"]} == {"namespace"}
    assert "vm-emulated" in document["left_out"]["vm"]
    assert main(["advise", str(tmp_path), "--isolation", "vm"]) == 2
    assert "ran as vm-emulated" in capsys.readouterr().err


def test_two_runs_of_the_same_agree_and_a_slower_one_does_not(tmp_path, capsys):
    cases = [case for case in records.plain_cases() if case.substrate in ("process", "namespace")]
    for seed in (1, 2):
        records.write(tmp_path / str(seed) / "records.jsonl", records.whole_run(cases, 20, seed=seed))
    slower = [records.a_run(), *(records.a_trial(cases[0], n, profile=records.Profile(1, 1, 1, 1)) for n in range(20))]
    records.write(tmp_path / "slower" / "records.jsonl", slower)

    def disagreeing(other):
        assert main(["report", str(tmp_path / "1"), "--against", str(tmp_path / other), "--out", str(tmp_path / "out"), "--json"]) == 0
        return json.loads(capsys.readouterr().out)["disagreeing"]

    assert len(disagreeing("2")) <= 2
    assert disagreeing("slower") == [str(cases[0])]
    assert "agree within" in (tmp_path / "out" / "report.html").read_text()


@pytest.fixture
def priced(tmp_path):
    """A run whose plan says what a second of one substrate costs, as hosted ones have it."""
    first, *rest = records.whole_run([*records.plain_cases(), *records.more_cases()], 8)
    options = {"container": {"usd_per_s": 0.001}, "namespace": {"image": "host"}}
    records.write(tmp_path / "records.jsonl", [replace(first, plan={**first.plan, "options": options}), *rest])
    return str(tmp_path)


def test_what_a_second_of_a_sandbox_costs_is_projected_from_the_plan(priced, capsys):
    """Its own price counts where it has one, a worker's elsewhere; the command line is over both."""
    assert main(["project", priced, "--price", "1", "--price-of", "process=0", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["projections"]
    prices = {one["series"].partition(" ")[0]: one.get("price") for one in found}
    assert (prices["container"], prices["namespace"], prices["process"]) == (pytest.approx(3.6), 1.0, None)
    for one in found:
        assert "price" not in one or one["cost"] == pytest.approx(one["worker_hours"] * one["price"])
    assert main(["project", priced]) == 0
    assert "An hour of container is taken to cost 3.6 USD" in capsys.readouterr().out


def test_advice_counts_with_what_a_substrate_costs(priced, capsys):
    words = ["advise", priced, "--length", "10", "--isolation-of", "container=container", "--json"]

    def cost_of(*more):
        assert main([*words, *more]) == 0
        return next(one["cost"] for one in json.loads(capsys.readouterr().out)["options"] if one["substrate"] == "container")

    assert cost_of() == pytest.approx(cost_of("--price-of", "container=1") * 3.6)
    assert cost_of("--price", "7") == cost_of()


@pytest.mark.parametrize("words", [["--price-of", "moon=1"], ["--price-of", "container=dear"], ["--price-of", "container=-1"]])
def test_a_price_that_cannot_be_meant_is_refused(priced, capsys, words):
    for command in ("project", "advise"):
        assert main([command, priced, *words]) == 2
        assert "--price-of" in capsys.readouterr().err
