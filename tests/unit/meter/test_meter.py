"""Plans, percentiles and the figure are pure; the host check reads and never fails."""

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from untax.core.errors import UsageError
from untax.meter import host
from untax.meter.figures import cost
from untax.meter.plan import NATIVE, Plan
from untax.meter.run import METRICS, Trial, summaries
from untax.meter.stats import percentile, summarise


def test_the_same_seed_gives_the_same_order():
    plan = Plan((NATIVE, "a", "b"), trials=5, warmup=1, seed=7)

    assert plan.order() == Plan((NATIVE, "a", "b"), trials=5, warmup=1, seed=7).order()
    assert plan.order() != Plan((NATIVE, "a", "b"), trials=5, warmup=1, seed=8).order()


def test_each_round_has_every_case_once():
    order = Plan((NATIVE, "a", "b"), trials=4, warmup=2).order()

    for number in range(-2, 4):
        assert sorted(case for n, case in order if n == number) == ["a", "b", NATIVE]


def test_a_plan_of_nothing_is_refused():
    for fields in ({"cases": ()}, {"cases": ("a",), "trials": 0}, {"cases": ("a",), "actions": 0}):
        with pytest.raises(UsageError):
            Plan(**fields)


def test_percentiles_interpolate():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([5.0], 95) == 5.0
    assert math.isnan(percentile([], 50))
    assert summarise([2.0, 4.0], [1.0]).ratio == 3.0


def test_failed_trials_do_not_count_as_fast_ones():
    trials = [Trial(0, NATIVE, dict.fromkeys(METRICS, 1.0)), Trial(0, "a", dict.fromkeys(METRICS, 2.0)), Trial(1, "a", error="x")]

    table = summaries(trials)
    assert table["a"]["action"].count == 1
    assert table["a"]["action"].ratio == 2.0


def test_the_figure_is_well_formed_whatever_the_cases_are_called():
    table = summaries([Trial(0, "<a&b>", dict.fromkeys(METRICS, 0.002)), Trial(0, NATIVE, dict.fromkeys(METRICS, 0.001))])

    root = ET.fromstring(cost.draw(table, title="T0 <&>"))
    assert root.tag.endswith("svg")


def test_the_host_check_says_something_about_everything(tmp_path):
    found = host.findings(tmp_path / "not" / "there" / "yet")

    names = [finding.name for finding in found]
    for subject in ("kernel", "cgroups", "user namespaces", "overlay in a user namespace", "KVM", "SMT", "swap", "io_uring", "free space"):
        assert subject in names
    assert all(finding.remedy for finding in found if finding.status in ("warn", "bad"))
    assert not (tmp_path / "not").exists()


def test_an_ext4_without_a_journal_is_warned_about(monkeypatch):
    monkeypatch.setattr(host, "_file_system_of", lambda path: ("no-such-device", "ext4"))

    assert host._journal(Path("/")).status == "warn"


def test_a_namespace_limit_of_zero_names_the_remedy(monkeypatch):
    monkeypatch.setattr(host, "_read", lambda path: "0")

    assert "sysctl" in host._user_namespaces().remedy
