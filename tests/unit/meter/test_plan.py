"""Plans and time boxes: pure, checked whole, the same for the same seed."""

from collections import Counter

import pytest

from untax.core.errors import UsageError
from untax.meter import plan as plans
from untax.meter.plan import Plan, from_mapping
from untax.meter.ration import Ration
from untax.meter.record import Case


def test_the_same_seed_gives_the_same_order():
    def order(seed):
        plan = Plan(("a", "b"), trials=5, warmup=1, seed=seed)
        return list(plan.order(plan.cases()))

    assert order(7) == order(7)
    assert order(7) != order(8)


def test_each_round_has_every_case_once():
    plan = Plan(("a", "b"), works=(("T0", 0),), trials=4, warmup=2)
    order = list(plan.order(plan.cases()))

    for number in range(-2, 4):
        assert Counter(case for n, case in order if n == number) == Counter(plan.cases())


def test_rounds_are_in_different_orders():
    plan = Plan(("a", "b", "c"), works=(("T0", 0),), warmth=("cold",), paths=("channel",), trials=20, warmup=0)
    order = list(plan.order(plan.cases()))

    rounds = {tuple(case.substrate for n, case in order if n == number) for number in range(20)}
    assert len(rounds) > 1


def test_cases_are_every_combination_and_none_twice():
    plan = Plan(("a", "b"), works=(("T0", 0), ("T2", 10)), concurrency=(1, 8, 8), contention=("none", "cpu"))

    assert len(plan.cases()) == len(set(plan.cases())) == 2 * 2 * 2 * 2 * 2 * 2


def test_a_warm_sandbox_has_its_image():
    cases = Plan(("a",), works=(("T0", 0),), images=("present", "absent")).cases()

    assert {(case.warmth, case.image) for case in cases} == {("cold", "present"), ("cold", "absent"), ("warm", "present")}


def test_a_case_of_many_at_once_takes_part_in_fewer_rounds():
    plan = Plan(("a",), works=(("T0", 0),), warmth=("cold",), paths=("channel",), concurrency=(1, 8), trials=20, warmup=0)
    counted = Counter(case.concurrency for _, case in plan.order(plan.cases()))

    assert counted == {1: 20, 8: 3}
    assert plans.trials_of(20, Case("a", concurrency=8)) == 24


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"substrates": []}, "at least one substrate"),
        ({"works": []}, "at least one tier"),
        ({"trials": 0}, "trials must be"),
        ({"trials": True}, "trials must be"),
        ({"trials": "many"}, "trials must be"),
        ({"warmup": -1}, "warmup"),
        ({"concurrency": [0]}, "concurrency"),
        ({"concurrency": 8}, "must be a list"),
        ({"contention": ["noise"]}, "not one of none, cpu, disk, network"),
        ({"warmth": ["tepid"]}, "cold, warm"),
        ({"paths": []}, "must not be empty"),
        ({"lengths": [-1]}, "length"),
        ({"works": [["T2"]]}, "pairs"),
        ({"works": [["T2", 10]], "tiers": ["T0"]}, "not both"),
        ({"colour": "red"}, "colour is not known"),
        ({"budget_s": -1}, "budget_s"),
        ({"limits": {"wheels": 4}}, "wheels is not known"),
        ({"options": {"b": {"image": "x"}}}, "does not measure"),
        ({"options": {"a": "x"}}, "table for each"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused_with_its_place(fields, word):
    with pytest.raises(UsageError, match=word) as caught:
        from_mapping({"substrates": ["a"], **fields}, where="plan.toml")
    assert str(caught.value).startswith("plan.toml")


def test_a_plan_comes_back_from_its_record():
    plan = Plan(("a",), works=(("T0", 0), ("T2", 150)), concurrency=(1, 8), knee=True, limits={"cpus": 2.0}, options={"a": {"image": "x"}})

    assert from_mapping(plan.to_json(), where="x") == plan


def test_a_plan_file_that_is_none(tmp_path):
    (tmp_path / "p.toml").write_text("= nonsense")

    with pytest.raises(UsageError, match="not TOML"):
        plans.read_file(tmp_path / "p.toml")
    with pytest.raises(UsageError, match="No such file"):
        plans.read_file(tmp_path / "q.toml")


# ---- the time box ----

SHORT, LONG, LONGER = (Case("a", tier="T2", length=n) for n in (10, 50, 150))


def test_a_longer_trajectory_is_foreseen_from_a_shorter_one_of_its_kind():
    ration = Ration(100.0)
    ration.note(SHORT, 1.0)

    assert ration.foreseen_s(LONG) == 5.0
    assert ration.foreseen_s(Case("a", tier="T1", length=50)) is None
    assert ration.foreseen_s(Case("a", tier="T2", length=0)) is None
    assert ration.foreseen_s(Case("a", tier="T2", length=50, concurrency=8)) is None


def test_work_that_nobody_tried_on_a_substrate_is_foreseen_from_the_others():
    """At least what it costs where it is cheapest, and what the substrate itself has shown goes before that."""
    ration = Ration(100.0)
    for case, cost in ((Case("a", tier="T2"), 1.0), (Case("b", tier="T2"), 2.0), (SHORT, 3.0)):
        ration.note(case, cost)

    assert ration.foreseen_s(Case("c", tier="T2")) == 1.0
    assert ration.foreseen_s(Case("b", tier="T2", warmth="warm", path="incumbent")) == 2.0
    assert ration.foreseen_s(Case("c", tier="T2", length=10)) == 3.0
    assert ration.foreseen_s(Case("c", tier="T2", length=50)) == 15.0
    assert ration.foreseen_s(Case("c", tier="T1")) is None


def test_a_case_that_cannot_have_its_least_is_not_begun():
    ration = Ration(100.0)
    ration.note(SHORT, 1.0)

    assert ration.fits(LONG, [SHORT], spent_s=10.0)  # 10 + 5 + 6 × 5
    assert not ration.fits(LONGER, [SHORT], spent_s=10.0)  # 10 + 5 + 6 × 15


def test_what_was_tried_has_its_time_kept_when_the_next_is_tried():
    ration = Ration(100.0)
    ration.note(LONG, 10.0)
    unknown = Case("a", tier="T0")

    assert ration.fits(unknown, [LONG], spent_s=49.0)
    assert not ration.fits(unknown, [LONG], spent_s=50.0)


def test_what_takes_next_to_nothing_is_left_out_by_no_box():
    """A warm-up that took far longer than anybody could foresee costs the dear cases their place, and not the cheap ones."""
    ration = Ration(100.0)
    for case, cost in ((SHORT, 1.0), (LONG, 5.0)):
        ration.note(case, cost)

    assert ration.dropped([SHORT, LONG], spent_s=500.0) == [LONG]
    assert ration.fits(Case("b", tier="T2", length=10), [], spent_s=500.0)
    assert not ration.fits(Case("b", tier="T2", length=10), [SHORT], spent_s=500.0)


def test_a_case_needs_no_more_than_the_plan_has_of_it():
    ration = Ration(100.0, least_of=lambda case: 1 if case is LONG else 5)
    for case, cost in ((SHORT, 1.0), (LONG, 50.0)):
        ration.note(case, cost)

    assert ration.needed_s([SHORT, LONG]) == 55.0
    assert ration.needed_s([SHORT, LONG], done=2) == 3.0
    assert ration.dropped([SHORT, LONG], spent_s=60.0) == [LONG]
    assert ration.dropped([SHORT, LONG], spent_s=60.0, done=1) == []


def test_the_dearest_go_first_until_the_others_fit():
    ration = Ration(60.0)
    for case, cost in ((SHORT, 1.0), (LONG, 5.0), (LONGER, 15.0)):
        ration.note(case, cost)

    assert ration.dropped([LONG, LONGER, SHORT], spent_s=20.0) == [LONGER]
    assert ration.dropped([SHORT], spent_s=20.0) == []
    assert ration.dropped([LONG], spent_s=40.0) == [LONG]


def test_what_has_begun_is_left_out_for_more_than_a_little():
    ration = Ration(100.0)
    ration.note(LONGER, 15.0)

    assert ration.dropped([LONGER], spent_s=50.0, done=1) == []  # 50 + 4 × 15
    assert ration.dropped([LONGER], spent_s=51.0, done=1) == [LONGER]


def test_another_round_is_begun_only_when_there_is_time_for_it():
    ration = Ration(10.0)
    ration.note(SHORT, 2.0)

    assert ration.has_round([SHORT], spent_s=8.0)
    assert not ration.has_round([SHORT], spent_s=8.1)


# ---- other numbers of trials, and one substrate under two names ----

COUNTED = {
    "substrates": ["process", "slow"],
    "works": [["T0", 0], ["T2", 50]],
    "paths": ["channel"],
    "warmth": ["cold", "warm"],
    "trials": 4,
    "warmup": 1,
    "counts": [{"substrates": ["slow"], "warmth": ["warm"], "trials": 0}, {"substrates": ["slow"], "lengths": [50], "trials": 2}],
}


def test_some_cases_have_other_numbers_of_trials_and_some_none():
    plan = from_mapping(COUNTED, where="test")
    cases = plan.cases()
    ran = Counter(case for number, case in plan.order(cases) if number >= 0)
    assert {(case.substrate, case.warmth, case.length): count for case, count in ran.items()} == {
        ("process", "cold", 0): 4, ("process", "warm", 0): 4, ("process", "cold", 50): 4, ("process", "warm", 50): 4,
        ("slow", "cold", 0): 4, ("slow", "cold", 50): 2,
    }  # fmt: skip
    assert from_mapping(plan.to_json(), where="the run's first record") == plan


@pytest.mark.parametrize(
    ("count", "words"),
    [
        ({"trials": -1}, "trials must be a whole number"),
        ({"substrates": ["slow"]}, "each has trials"),
        ({"substrates": ["moon"], "trials": 1}, "'moon', which the plan does not measure"),
        ({"substrates": "slow", "trials": 1}, "must be a list"),
        ({"moons": ["x"], "trials": 1}, "moons is not known"),
        ("slow", "must be tables"),
    ],
)
def test_counts_that_make_no_sense_are_refused(count, words):
    with pytest.raises(UsageError, match=words):
        from_mapping({**COUNTED, "counts": [count]}, where="test")
