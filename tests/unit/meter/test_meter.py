"""The host check reads and never fails; the conditions of a run are measured; percentiles are pure."""

import math
from pathlib import Path

from untax.meter import conditions, host
from untax.meter.stats import percentile


def test_percentiles_interpolate():
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert percentile([5.0], 95) == 5.0
    assert math.isnan(percentile([], 50))


def test_the_facts_of_a_host_are_json_and_name_what_a_reader_must_know():
    facts = host.facts()

    assert {"kernel", "cpu", "cores", "memory_mib", "python", "untax", "load"} <= facts.keys()
    assert facts["cores"] >= 1
    assert len(facts["load"]) == 3


def test_the_noise_probe_orders_its_percentiles():
    probe = conditions.noise_probe(samples=50)

    assert 0 < probe["p50_ns"] <= probe["p95_ns"] <= probe["p99_ns"] <= probe["max_ns"]


def test_a_span_costs_something_and_less_than_an_action():
    assert 0 < conditions.span_cost_ns(spans=200) < 1_000_000


def test_a_clock_that_runs_evenly_is_found_well(monkeypatch):
    monkeypatch.setattr(conditions.time, "time_ns", conditions.time.monotonic_ns)

    found = conditions.ClockCheck().report()
    assert found["ok"], found


def test_a_wall_clock_that_is_set_meanwhile_is_said(monkeypatch):
    check = conditions.ClockCheck()
    real = conditions.time.time_ns
    monkeypatch.setattr(conditions.time, "time_ns", lambda: real() + 3_600_000_000_000)

    found = check.report()
    assert not found["ok"]
    assert "apart" in found["reason"]


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
