"""Each reason not to trust a run is found where it is, not found where it is not, and names a remedy."""

import random
from dataclasses import replace

import pytest
from tests import records

from untax.meter.checks import check, narrowing
from untax.meter.gather import gather
from untax.meter.record import Case, End, Gap, Resume, to_line

CASE = Case("namespace", tier="T2")
END = End("r1", "2026-11-16T11:00:00Z", 1, 0, 60_000_000_000)


def found(tmp_path, made, *, cut=0):
    data = b"".join(map(to_line, made))
    (tmp_path / "records.jsonl").write_bytes(data[: len(data) - cut])
    findings = check(gather(tmp_path))
    assert all(one.remedy for one in findings)
    return {one.name: one for one in findings}


def quiet(n=30, case=CASE, **fields):
    rng = random.Random(3)
    return [records.a_trial(case, number, rng=rng, order=number, **fields) for number in range(n)]


def longer(trial, factor):
    parts = {name: int(value * factor) for name, value in trial.parts_ns.items()}
    return replace(trial, parts_ns=parts, total_ns=sum(parts.values()))


def test_a_quiet_run_has_nothing_against_it(tmp_path):
    assert found(tmp_path, [records.a_run(), *quiet(), END]) == {}


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ({"load_1m": 7.5}, "busy host"),
        ({"load": [7.5, 1, 1]}, "busy host"),
        ({"noise_probe": {"p50_ns": 100_000, "p99_ns": 200_000}}, "noisy host"),
        ({"clock": {"ok": False, "reason": "it jumps"}}, "clock"),
    ],
)
def test_a_noisy_host_is_said(tmp_path, host, name):
    assert name in found(tmp_path, [records.a_run(host={**records.HOST, **host}), *quiet(), END])


def test_time_that_a_hypervisor_took_is_said(tmp_path):
    run = records.a_run(host={**records.HOST, "cores": 2, "noise_probe": {"steal_ticks": 100}})
    end = replace(END, host={"noise_probe": {"steal_ticks": 100 + 600}})  # 6 s of 2 × 60 s
    assert "5.0 %" in found(tmp_path, [run, *quiet(), end])["stolen time"].found


def test_too_few_trials_are_said_and_very_few_are_a_warning(tmp_path):
    assert found(tmp_path, [records.a_run(), *quiet(10), END])["too few trials"].level == "note"
    assert found(tmp_path, [records.a_run(), *quiet(4), END])["too few trials"].level == "warn"


def test_a_run_that_became_slower_has_drifted(tmp_path):
    trials = [longer(trial, 1 + 0.01 * n) for n, trial in enumerate(quiet())]
    said = found(tmp_path, [records.a_run(), *trials, END])["drift"]
    assert said.cases == (str(CASE),)


def test_drift_goes_by_the_order_of_the_run_and_not_of_the_file(tmp_path):
    trials = [longer(trial, 1 + 0.01 * n) for n, trial in enumerate(quiet())]
    random.Random(1).shuffle(trials)
    assert "drift" in found(tmp_path, [records.a_run(), *trials, END])


def test_two_kinds_of_trials_are_said(tmp_path):
    trials = [longer(trial, 2.0 if n % 3 == 0 else 1.0) for n, trial in enumerate(quiet(40))]
    assert "bimodal" in found(tmp_path, [records.a_run(), *trials, END])


def test_what_is_shorter_than_fifty_spans_is_below_resolution(tmp_path):
    case = Case("process", tier="T0")
    slow_clock = records.a_run(span_cost_ns=100_000)  # 50 × 0.1 ms is more than the 1.8 ms of a start
    said = found(tmp_path, [slow_clock, *quiet(case=case), END])["below resolution"]
    assert "first_command" in said.cases[0]
    assert "below resolution" not in found(tmp_path, [records.a_run(), *quiet(case=case), END])


def test_time_that_no_part_covers_is_said(tmp_path):
    trials = []
    for trial in quiet():
        parts = {**trial.parts_ns, "unattributed": trial.total_ns // 20}
        trials.append(replace(trial, parts_ns=parts, total_ns=sum(parts.values())))
    assert "unattributed" in found(tmp_path, [records.a_run(), *trials, END])


def test_failures_gaps_and_interruptions_are_said(tmp_path):
    bad = records.a_trial(CASE, 40, outcome="infra", error={"type": "SandboxLost", "message": "it went"})
    said = found(tmp_path, [records.a_run(), *quiet(), bad, Gap("r1", "", "vm", "no KVM"), Resume("r1", "later", {}), END])
    assert "it went" in said["failed trials"].found and "1 of 31" in said["failed trials"].found
    assert "no KVM" in said["gap"].found
    assert "later" in said["resumed"].found


def test_a_run_that_is_not_whole_says_so(tmp_path):
    assert "not complete" in found(tmp_path, [records.a_run(), *quiet()])
    assert "cut off" in found(tmp_path, [records.a_run(), *quiet()], cut=30)


def test_different_ground_is_said(tmp_path):
    other = quiet(case=Case("container", tier="T2"), limits={"cpus": 4.0})
    assert "different limits" in found(tmp_path, [records.a_run(), *quiet(), *other, END])


def test_only_what_differs_is_said_and_once_for_all_tiers(tmp_path):
    made = [
        records.a_trial(Case(name, tier=tier), n, software={"image": image, "workload": tier})
        for tier in ("T0", "T2") for name, image in (("process", "host"), ("namespace", "debian")) for n in range(2)
    ]  # fmt: skip
    said = found(tmp_path, [records.a_run(), *made, END])["different software"].found
    assert said == "T0, T2: substrates were measured with different software: image debian; image host"


def test_commands_that_were_not_timed_inside_are_said(tmp_path):
    trials = quiet(substrate_detail={"inside": "not measured"})
    assert "not timed inside" in found(tmp_path, [records.a_run(), *trials, END])


def test_the_gap_between_substrates_is_followed_over_tiers_and_lengths(tmp_path):
    cases = [case for case in records.plain_cases() if case.substrate in ("namespace", "vm")]
    run = gather(records.write(tmp_path / "records.jsonl", records.whole_run(cases, 5)))
    tiers, lengths = narrowing(run)
    assert (tiers.axis, tiers.steps, lengths.axis) == ("tier", ("T0", "T1", "T2"), "length")
    assert tiers.narrows and lengths.narrows and tiers.gaps[0] > 100


def test_a_gap_that_does_not_narrow_is_said(tmp_path):
    trials = []
    for tier, factor in (("T0", 1.0), ("T2", 3.0)):
        plain, slow = Case("process", tier=tier), Case("namespace", tier=tier)
        trials += quiet(case=plain) + [longer(trial, factor) for trial in quiet(case=slow)]
    said = found(tmp_path, [records.a_run(), *trials, END])
    assert "T0" in said["gap does not narrow"].found


def test_many_quiet_cases_do_not_drift_by_chance(tmp_path):
    """Sixty cases that vary by a fifth: one in twenty such runs may be called drifting, not nearly every one."""
    called = 0
    for seed in range(10):
        rng = random.Random(seed)
        made = [records.a_run()]
        for number in range(60):
            case = Case("process", tier=f"W{number}")
            made += [longer(records.a_trial(case, n, rng=random.Random(1), order=n), rng.lognormvariate(0, 0.2)) for n in range(30)]
        called += "drift" in found(tmp_path, [*made, END])
    assert called <= 2


def test_packages_that_came_in_every_trial_are_said(tmp_path):
    assert "packages uploaded" in found(tmp_path, [records.a_run(), *quiet(software={"image": "x", "packages": "uploaded"}), END])


def test_a_substrate_that_ran_as_another_is_a_warning(tmp_path):
    other = found(tmp_path, [records.a_run(), *quiet(substrate_detail={"substrate": "namespace-emulated"}), END])["another substrate"]
    assert other.level == "warn" and "namespace-emulated" in other.found
    kind = {"substrate": "namespace-small", "isolation": "namespace"}
    assert found(tmp_path, [records.a_run(), *quiet(substrate_detail=kind), END])["another substrate"].level == "note"
    assert "another substrate" not in found(tmp_path, [records.a_run(), *quiet(substrate_detail={"substrate": "namespace"}), END])


def test_trials_that_the_pool_served_otherwise_are_counted(tmp_path):
    made = [*quiet(28), *quiet(2, substrate_detail={"missed": "the pool's answer was exact, and cold was to be measured"})]
    finding = found(tmp_path, [records.a_run(), *made, END])["not served as asked"]
    assert finding.level == "warn" and finding.cases == ("namespace T2 cold: 2 of 30",)
