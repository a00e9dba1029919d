"""Advice: never a weaker boundary than asked for, pools where they pay and break-even lengths."""

from dataclasses import replace

import pytest
from tests import records

from untax.core.errors import UsageError
from untax.core.spec import ISOLATION_LEVELS, is_as_strong
from untax.meter.advise import Rollouts, advise
from untax.meter.gather import gather
from untax.meter.profile import Profile, profiles
from untax.meter.record import Case

LEVELS = {"process": "none", "namespace": "namespace", "container": "container", "kubernetes": "container", "vm": "vm"}

QUICK_START = Profile("a", "incumbent", "container", start_s=0.1, setup_s=0, end_s=0, own_s=0.1, way_s=0.05, n=30)
QUICK_ACTIONS = Profile("b", "channel", "vm", start_s=3.1, setup_s=0, end_s=0, own_s=0.1, way_s=0.001, n=30, warm_s=0.001)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    return profiles(gather(records.write(place / "records.jsonl", records.whole_run(records.plain_cases(), 15))), LEVELS)


@pytest.mark.parametrize("asked", ISOLATION_LEVELS)
@pytest.mark.parametrize("by", ["cost", "time"])
def test_no_weaker_boundary_is_ever_offered(measured, asked, by):
    if asked == "gvisor":
        measured = [*measured, replace(QUICK_START, isolation="gvisor")]
    found = advise(measured, Rollouts(isolation=asked, parallel=16), by=by)
    assert all(is_as_strong(option.profile.isolation, as_required=asked) for option in found.options)
    for profile in measured:
        assert (profile.name in found.left_out) != is_as_strong(profile.isolation, as_required=asked)


def test_nothing_strong_enough_is_an_error_that_says_what_there_is(measured):
    weak = [one for one in measured if one.substrate == "namespace"]
    with pytest.raises(UsageError, match="weaker than 'vm'"):
        advise(weak, Rollouts(isolation="vm"))
    with pytest.raises(UsageError, match="nothing was measured"):
        advise([], Rollouts())


def test_short_rollouts_want_a_quick_start_and_long_ones_quick_actions():
    short = advise([QUICK_START, QUICK_ACTIONS], Rollouts(isolation="container", length=10))
    long = advise([QUICK_START, QUICK_ACTIONS], Rollouts(isolation="container", length=200))
    assert short.best.profile is QUICK_START
    assert long.best.profile is QUICK_ACTIONS
    (even,) = short.break_evens
    assert (even.short, even.long) == (QUICK_START.name, QUICK_ACTIONS.name)
    assert even.length == pytest.approx(3.0 / 0.049)


def test_at_the_break_even_length_both_cost_the_same():
    (even,) = advise([QUICK_START, QUICK_ACTIONS], Rollouts(isolation="container")).break_evens
    at = advise([QUICK_START, QUICK_ACTIONS], Rollouts(isolation="container", length=even.length), by="time")
    cold = [option.seconds for option in at.options if not option.pool]
    assert cold[0] == pytest.approx(cold[1])


def test_a_better_one_in_both_has_no_break_even():
    worse = replace(QUICK_START, substrate="c", start_s=5.0, way_s=0.2)
    (even,) = advise([QUICK_START, worse], Rollouts(isolation="container")).break_evens
    assert (even.short, even.length) == (QUICK_START.name, None)


def test_a_pool_is_advised_where_idle_sandboxes_cost_less_than_waiting():
    cheap = advise([QUICK_ACTIONS], Rollouts(isolation="vm", length=50, parallel=64, idle_share=0.01))
    dear = advise([QUICK_ACTIONS], Rollouts(isolation="vm", length=50, parallel=64, idle_share=50.0))
    assert cheap.best.pool > 0 and cheap.best.hit_rate > 0.9
    assert dear.best.pool == 0
    assert advise([QUICK_ACTIONS], Rollouts(isolation="vm", parallel=64, idle_share=50.0), by="time").best.pool > 0


def test_a_larger_pool_never_makes_a_rollout_slower():
    options = advise([QUICK_ACTIONS], Rollouts(isolation="vm", parallel=64)).options
    by_pool = sorted(options, key=lambda option: option.pool)
    assert [option.seconds for option in by_pool] == sorted((option.seconds for option in by_pool), reverse=True)


def test_a_pool_whose_warm_start_nobody_measured_is_marked():
    options = advise([QUICK_START], Rollouts(isolation="container", parallel=64)).options
    assert all(option.is_assumed == bool(option.pool) for option in options)


def test_resets_are_paid_for_and_a_missing_one_is_a_new_sandbox():
    plain, twice = (advise([QUICK_START], Rollouts(isolation="container", resets=n)).options[-1].seconds for n in (0, 2))
    assert twice - plain == pytest.approx(2 * 0.1)
    quick = replace(QUICK_START, reset_s=0.001)
    assert advise([quick], Rollouts(isolation="container", resets=2)).best.seconds < twice


def test_a_mix_of_tiers_changes_the_agents_own_time(measured):
    light = advise(measured, Rollouts(mix={"T0": 1.0})).best
    heavy = advise(measured, Rollouts(mix={"T2": 3.0, "T0": 1.0})).best
    assert heavy.seconds > 10 * light.seconds
    with pytest.raises(UsageError, match="T9"):
        advise(measured, Rollouts(mix={"T9": 1.0}))


def test_failures_are_paid_for():
    flaky = replace(QUICK_START, failed_share=0.5)
    assert advise([flaky], Rollouts(isolation="container")).best.cost == pytest.approx(
        2 * advise([QUICK_START], Rollouts(isolation="container")).best.cost
    )


@pytest.mark.parametrize(
    "fields", [{"length": 0}, {"parallel": 0}, {"isolation": "wall"}, {"price": -1}, {"mix": {"T0": -1}}, {"resets": float("nan")}]
)
def test_a_description_that_makes_no_sense_is_refused(fields):
    with pytest.raises(UsageError):
        Rollouts(**fields)


def test_a_profile_is_what_was_measured(measured):
    found = next(one for one in measured if one.name == "namespace")
    assert found.warm_s is not None and found.warm_s < found.start_s + found.setup_s
    assert found.own_s == pytest.approx(0.13, rel=0.1)
    assert set(found.own_by_tier) == {"T0", "T1", "T2"}
    assert "moon" not in {one.substrate for one in measured}


@pytest.mark.parametrize(("note", "is_said"), [("held by the meter", True), ("the engine's pool", False), ("", False)])
def test_only_what_the_meter_held_says_nothing_of_a_pool(note, is_said):
    advice = advise([replace(QUICK_ACTIONS, warm_note=note)], Rollouts(isolation="vm", parallel=64), by="time")
    assert advice.best.pool
    assert any("what a lease from a pool costs is not in its start" in reason for reason in advice.reasons) == is_said


def test_what_ran_as_something_else_has_no_profile(tmp_path):
    """An emulated machine has neither the boundary nor the speed of what it was asked for as."""
    cases = [Case("namespace", tier="T2"), Case("vm", tier="T2")]
    made = [records.a_trial(case, n, substrate_detail={"substrate": f"{case.substrate}{'-emulated' * (case.substrate == 'vm')}"})
            for case in cases for n in range(3)]  # fmt: skip
    run = gather(records.write(tmp_path / "records.jsonl", [records.a_run(), *made]))
    assert [one.name for one in profiles(run, LEVELS)] == ["namespace"]


def test_a_kind_of_a_substrate_that_keeps_its_boundary_is_advised_under_its_own_name(tmp_path):
    """A virtual machine of another make is one; what its records do not promise, or promise less of, is not."""
    promised = {"kept": "vm", "weaker": "container", "emulated": None}
    for name, level in promised.items():
        detail = {"substrate": "vm-microvm", **({"isolation": level} if level else {})}
        made = [records.a_trial(Case("vm", tier="T2"), n, substrate_detail=detail) for n in range(3)]
        run = gather(records.write(tmp_path / name, [records.a_run(), *made]))
        assert [(one.name, one.isolation) for one in profiles(run, LEVELS)] == ([("vm-microvm", "vm")] if name == "kept" else [])
