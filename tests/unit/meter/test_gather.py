"""From a file of records to columns: warm-up is left out, failures are paid for and never averaged in, filters are checked."""

from dataclasses import replace

import pytest
from tests import records

from untax.core.errors import RecordError, UsageError
from untax.meter.gather import Series, gather
from untax.meter.record import Case, Gap, to_line
from untax.meter.summary import summarise

CASE = Case("namespace", tier="T2", length=50)


def test_latencies_are_those_of_trials_that_went_well(tmp_path):
    good = [records.a_trial(CASE, n, order=n) for n in range(3)]
    bad = records.a_trial(CASE, 3, order=3, outcome="infra", error={"type": "SandboxLost", "message": "gone"}, wasted_ns=10**9, attempts=2)
    warm = records.a_trial(CASE, 0, order=4, warmup=True)
    file = records.write(tmp_path / "r" / "records.jsonl", [records.a_run(), warm, *good, bad])

    found = gather(tmp_path / "r").cases[CASE]

    assert gather(file).cases[CASE].n == found.n == 3
    assert list(found.total) == pytest.approx([trial.total_ns / 1e9 for trial in good])
    assert (found.failed, found.retried, found.warmups) == (1, 1, 1)
    assert found.errors == {"infra: SandboxLost": 1} and found.example == "gone"


def test_failures_and_retries_are_paid_for_by_what_went_well(tmp_path):
    good = [records.a_trial(CASE, n) for n in range(2)]
    bad = records.a_trial(CASE, 2, outcome="failed", error={"type": "x", "message": ""}, wasted_ns=5 * 10**9)
    file = records.write(tmp_path / "records.jsonl", [records.a_run(), *good, bad])

    paid = sum(trial.worker_ns for trial in (*good, bad)) / 1e9
    assert gather(file).cases[CASE].worker_per_trajectory == pytest.approx(paid / 2)


def test_parts_add_up_to_the_mean_total(tmp_path):
    file = records.write(tmp_path / "records.jsonl", records.whole_run([CASE], 10))
    found = gather(file).cases[CASE]
    assert sum(found.mean_parts.values()) == pytest.approx(sum(found.total) / found.n)
    assert found.tax == pytest.approx(sum(found.total) / found.n - found.mean_parts["action"])


def test_the_own_time_of_set_up_commands_is_no_tax(tmp_path):
    """The report and the summary agree on it, and a file from before it was recorded reads as if there were none."""
    trial = records.a_trial(CASE)
    own = replace(trial, setup_own_ns=trial.parts_ns["setup"] - 1)
    old = to_line(trial).replace(b'"setup_own_ns":0,', b"")
    assert b"setup_own_ns" not in old
    before, after = tmp_path / "before", tmp_path / "after"
    before.write_bytes(to_line(records.a_run()) + old)
    records.write(after, [records.a_run(), own])

    setup_s = own.setup_own_ns / 1e9
    assert setup_s > 0
    assert gather(after).cases[CASE].tax == pytest.approx(gather(before).cases[CASE].tax - setup_s)
    assert gather(after).cases[CASE].parts == gather(before).cases[CASE].parts
    assert summarise(after).rows[CASE].tax_share == pytest.approx(gather(after).cases[CASE].tax_share)


@pytest.mark.parametrize("own_ns", [-1, 10**15, "x"])
def test_more_set_up_of_its_own_than_set_up_is_refused(tmp_path, own_ns):
    file = records.write(tmp_path / "f", [records.a_run(), records.a_trial(CASE, setup_own_ns=own_ns)])
    with pytest.raises(RecordError, match="set-up commands"):
        gather(file)


def test_plain_cases_are_found_by_series(tmp_path):
    file = records.write(tmp_path / "records.jsonl", records.whole_run([*records.plain_cases(), *records.more_cases()], 3))
    found = gather(file)
    assert [str(series) for series in found.series] == [
        "container", "container · incumbent", "kubernetes · incumbent", "namespace", "namespace · warm", "process", "vm",
    ]  # fmt: skip
    assert (found.tiers, found.lengths("T2"), found.lengths("T0")) == (["T0", "T1", "T2"], [10, 50, 150], [])
    assert found.of(Series("namespace"), "T0").case.concurrency == 1
    assert found.of(Series("namespace", warmth="warm"), "T0") is None


@pytest.mark.parametrize(("wanted", "said"), [({"tiers": ["T9"]}, "T0, T2"), ({"substrates": ["moon"]}, "container, namespace")])
def test_a_filter_that_matches_nothing_says_what_there_is(tmp_path, wanted, said):
    cases = [Case("namespace", tier="T0"), Case("container", tier="T2")]
    file = records.write(tmp_path / "records.jsonl", [records.a_run(), *(records.a_trial(case) for case in cases)])
    with pytest.raises(UsageError, match=said):
        gather(file, **wanted)


def test_a_filter_keeps_gaps_of_what_it_keeps(tmp_path):
    gaps = [Gap("r1", "", "namespace", "a", Case("namespace", tier="T2")), Gap("r1", "", "vm", "b")]
    file = records.write(tmp_path / "records.jsonl", [records.a_run(), records.a_trial(Case("namespace", tier="T0")), *gaps])
    assert [gap.reason for gap in gather(file, tiers=["T0"]).gaps] == ["b"]
    assert [gap.reason for gap in gather(file, substrates=["namespace"]).gaps] == ["a"]


def test_a_file_that_is_cut_off_gives_what_is_whole(tmp_path):
    made = [records.a_run(), records.a_trial(CASE, 0), records.a_trial(CASE, 1)]
    data = b"".join(map(to_line, made))
    (tmp_path / "records.jsonl").write_bytes(data[:-40])

    found = gather(tmp_path)
    assert found.truncated and found.end is None
    assert found.cases[CASE].n == 1


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "empty"),
        (to_line(records.a_run()), "no trials"),
        (to_line(records.a_run())[:-10], "cut off"),
        (to_line(records.a_run()) + to_line(records.a_trial(CASE)).replace(b'"v":1', b'"v":2'), "version 2"),
        (to_line(records.a_run()) + to_line(records.a_trial(CASE)).replace(b'"run":"r1"', b'"run":"r2"'), "r2"),
        (to_line(records.a_run()) + b"{]\n", "line 2"),
        (to_line(records.a_run()) + to_line(records.a_trial(CASE)).replace(b'"wasted_ns":0', b'"wasted_ns":"x"'), "record 2"),
    ],
)
def test_what_is_no_run_is_refused_with_words(tmp_path, data, said):
    (tmp_path / "records.jsonl").write_bytes(data)
    with pytest.raises(RecordError, match=said):
        gather(tmp_path)


def test_a_missing_file_names_the_remedy(tmp_path):
    with pytest.raises(RecordError, match="untax bench"):
        gather(tmp_path / "nowhere")
