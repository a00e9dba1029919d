"""From seconds to worker-hours: the paper's numbers, intervals, lengths that were not measured, batches that wait."""

import math
import random

import pytest
from tests import records

from untax.core.errors import UsageError
from untax.meter import project, published
from untax.meter.gather import Series, gather
from untax.meter.record import Case

MILLION = 1_000_000


@pytest.mark.parametrize(("seconds", "hours"), [(1.0, 278), (0.010 * 150, 417), (0.100 * 150, 4167), (42.5, 11_806), (23.4, 6_500)])
def test_worker_hours_are_those_of_equation_2(seconds, hours):
    assert round(project.worker_hours(seconds, MILLION)) == hours


def test_table_1_is_exact():
    for row in published.TABLE_1:
        assert round(project.worker_hours(row.seconds_per_trajectory, MILLION)) == row.hours


@pytest.mark.parametrize("row", published.TABLE_2[:2], ids=lambda row: row.words)
def test_table_2_is_what_was_computed_before_rounding(row):
    """The hours it prints belong to a latency that prints as the one beside them, and lie in what such a latency may come to."""
    assert round(row.computed_from, 1) == row.seconds
    assert round(project.worker_hours(row.computed_from, MILLION)) == row.hours
    _, printed = project.as_printed(f"{row.seconds}")
    assert printed.scaled(MILLION / 3600).low <= row.hours <= printed.scaled(MILLION / 3600).high
    assert f"{row.hours:,}" in published.rounding(row.seconds, MILLION)
    assert published.rounding(row.seconds, 10) is None


@pytest.mark.parametrize(
    ("text", "low", "high"),
    [("42.5", 42.45, 42.55), ("23.40", 23.395, 23.405), ("1.25e1", 12.45, 12.55), ("1", 1, 1), ("0.010", 0.01, 0.01)],
)
def test_a_typed_number_stands_for_what_rounds_to_it(text, low, high):
    value, interval = project.as_printed(text)
    assert value == float(text)
    assert (interval.low, interval.high) == (pytest.approx(low), pytest.approx(high))


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "fast", ""])
def test_what_is_no_time_is_refused(text):
    with pytest.raises(UsageError):
        project.as_printed(text)


def test_workers_for_a_goal_are_whole():
    assert project.workers_for(100.0, 10.0) == 10
    assert project.workers_for(100.1, 10.0) == 11


@pytest.fixture
def run(tmp_path):
    return gather(records.write(tmp_path / "records.jsonl", records.whole_run(records.plain_cases(), 25)))


def test_a_measured_length_is_its_own_mean(run):
    model = project.by_length(run, Series("namespace"), "T2")
    samples = run.of(Series("namespace"), "T2", 50)
    found = model.at(50)
    assert found.value == pytest.approx(samples.worker_per_trajectory)
    assert found.interval.low < found.value < found.interval.high
    assert not found.is_extrapolated


def test_lengths_between_are_on_the_line_and_lengths_beyond_are_marked(run):
    model = project.by_length(run, Series("namespace"), "T2")
    assert model.points[50] < model.at(100).value < model.points[150]
    assert not model.at(100).is_extrapolated
    assert model.at(300).is_extrapolated and model.at(5).is_extrapolated
    assert model.at(300).value == pytest.approx(model.points[150] + 1.5 * (model.points[150] - model.points[50]))
    assert model.at(300).interval.half_width > model.at(150).interval.half_width


def test_one_length_is_taken_apart_by_its_parts(tmp_path):
    case = Case("container", tier="T2", length=50)
    run = gather(records.write(tmp_path / "records.jsonl", records.whole_run([case], 10)))
    model = project.by_length(run, Series("container"), "T2")
    parts = run.cases[case].mean_parts
    once = sum(parts[name] for name in ("queue", "create", "ready", "setup", "reset", "cleanup"))
    assert model.fixed == pytest.approx(once)
    assert model.at(100).value == pytest.approx(2 * model.at(50).value - once)
    assert model.at(100).is_extrapolated


def test_a_tier_without_trajectories_is_projected_from_itself(tmp_path):
    run = gather(records.write(tmp_path / "records.jsonl", records.whole_run([Case("namespace", tier="T1")], 10)))
    assert project.tier_for(run) == "T1"
    assert project.by_length(run, Series("namespace"), "T1").at(150).is_extrapolated


def test_a_series_without_the_trajectories_that_others_have_is_not_guessed_at(tmp_path):
    cases = [Case("namespace", tier="T2"), Case("namespace", tier="T2", length=50), Case("container", tier="T2"), Case("vm", tier="T1")]
    run = gather(records.write(tmp_path / "records.jsonl", records.whole_run(cases, 10)))
    models = project.models(run, "T2")
    assert [one.substrate for one in models] == ["namespace"]
    assert [one.substrate for one in project.unprojected(run, "T2", models)] == ["container"]


def test_only_the_trials_behind_a_number_are_counted(tmp_path):
    trials = [records.a_trial(Case("namespace", tier="T2", length=50), n) for n in range(30)]
    trials += [records.a_trial(Case("namespace", tier="T2", length=150), n) for n in range(10)]
    trials += [records.a_trial(Case("namespace", tier="T2", length=200), n) for n in range(5)]
    run = gather(records.write(tmp_path / "records.jsonl", [records.a_run(), *trials]))
    model = project.by_length(run, Series("namespace"), "T2")
    assert [model.n_at(length) for length in (10, 50, 100, 150, 300)] == [40, 30, 40, 10, 15]
    assert project.project({Series("namespace"): model}, steps=150, trajectories=1)[0].n == 10


def test_projections_begin_with_the_fastest_and_count_from_it(run):
    found = project.project(project.models(run, "T2"), steps=150, trajectories=MILLION)
    assert [one.hours.value for one in found] == sorted(one.hours.value for one in found)
    assert found[0].ratio == 1.0 and found[0].more_hours == 0.0
    assert found[-1].more_hours == pytest.approx(found[-1].hours.value - found[0].hours.value)


def test_failures_make_hours_dearer_and_less_certain(tmp_path):
    case = Case("namespace", tier="T2", length=50)
    good = [records.a_trial(case, n) for n in range(20)]
    bad = [records.a_trial(case, n, outcome="infra", error={"type": "x", "message": ""}) for n in range(20, 25)]
    model = {}
    for name, trials in (("well", good), ("ill", good + bad)):
        run = gather(records.write(tmp_path / name / "records.jsonl", [records.a_run(), *trials]))
        model[name] = project.by_length(run, Series("namespace"), "T2").at(50)
    assert model["ill"].value > 1.2 * model["well"].value
    assert model["ill"].interval.half_width > model["well"].interval.half_width


def test_the_sensitivity_grid_is_what_the_issue_asks_for(run):
    rows = project.sensitivity(project.by_length(run, Series("namespace"), "T2"))
    assert (min(rows), max(rows)) == (10, 300)
    assert list(rows[10]) == [10**4, 10**5, 10**6, 10**7]
    assert rows[300][10**7].is_extrapolated and not rows[150][10**7].is_extrapolated
    assert rows[150][10**7].interval.high == pytest.approx(1000 * rows[150][10**4].interval.high)


def test_an_unknown_tier_is_refused(run):
    with pytest.raises(UsageError, match="T0, T1, T2"):
        project.tier_for(run, "T7")


def test_the_slowest_of_a_batch_is_the_mean_of_maxima():
    rng = random.Random(1)
    samples = [rng.lognormvariate(0, 0.4) for _ in range(200)]
    played = math.fsum(max(rng.choices(samples, k=16)) for _ in range(4000)) / 4000

    found, larger = project.stalls(samples, [16, 201])

    assert found.slowest.value == pytest.approx(played, rel=0.02)
    assert found.slowest.interval.low < found.slowest.value < found.slowest.interval.high
    assert found.waiting == pytest.approx(1 - (math.fsum(samples) / 200) / found.slowest.value)
    assert not found.is_floor and larger.is_floor
    assert larger.slowest.value > found.slowest.value


def test_a_batch_of_one_waits_for_nobody():
    (found,) = project.stalls([1.0, 2.0, 6.0], [1])
    assert found.slowest.value == pytest.approx(3.0)
    assert found.waiting == pytest.approx(0.0)
