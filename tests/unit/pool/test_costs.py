"""What steps are expected to cost: as measured, the recent more than the old, and kept between engines."""

import json

import pytest

from untax.core.errors import UsageError
from untax.core.spec import EnvSpec
from untax.core.stage import Identity, stages_of
from untax.pool.costs import Costs

STAGES = stages_of(EnvSpec(setup=("a",)), Identity("x"))
OTHER = stages_of(EnvSpec(setup=("b",)), Identity("x"))


def test_before_anything_was_measured_there_is_a_guess():
    costs = Costs()

    assert 0 < costs.of("bind") < costs.of("create") < costs.of_stage(STAGES[-1])
    assert costs.of_stage(STAGES[0]) == 0.0


def test_the_first_measurement_replaces_the_guess_and_later_ones_move_it():
    costs = Costs()
    costs.observe("create", 1.0)
    assert costs.of("create") == 1.0
    for _ in range(10):
        costs.observe("create", 2.0)

    assert 1.85 < costs.of("create") < 2.0


def test_a_stage_never_built_costs_what_its_rung_does_and_one_that_was_what_it_did():
    costs = Costs()
    costs.observe_stage(STAGES[-1], 4.0)
    assert costs.of_stage(OTHER[-1]) == 4.0
    costs.observe_stage(OTHER[-1], 9.0)

    assert (costs.of_stage(STAGES[-1]), costs.of_stage(OTHER[-1])) == (4.0, 9.0)


def test_stages_not_measured_for_longest_are_forgotten():
    costs = Costs()
    ladders = [stages_of(EnvSpec(setup=(f"s{n}",)), Identity("x"))[-1] for n in range(4097)]
    for n, stage in enumerate(ladders[:-1]):
        costs.observe_stage(stage, 100.0 + n)
    costs.observe_stage(ladders[0], 100.0)
    costs.observe_stage(ladders[-1], 1.0)

    assert costs.of_stage(ladders[0]) == 100.0
    assert costs.of_stage(ladders[2]) == 102.0
    assert costs.of_stage(ladders[1]) != 101.0


def test_what_a_stage_takes_to_come_is_learnt_apart_from_what_it_takes_to_build():
    """By its key, and by its rung for one that never came; before the first, a share of what building takes."""
    costs = Costs()
    costs.observe_stage(STAGES[-1], 4.0)
    assert costs.known_fetch(STAGES[-1]) is None
    assert costs.of_fetch(STAGES[-1]) == pytest.approx(0.4)
    costs.observe_fetch(STAGES[-1], 0.25)

    assert (costs.of_fetch(STAGES[-1]), costs.of_fetch(OTHER[-1]), costs.of_stage(STAGES[-1])) == (0.25, 0.25, 4.0)


def test_costs_come_back_from_a_file_as_they_were():
    costs = Costs()
    costs.observe("reset", 0.25)
    costs.observe_stage(STAGES[-1], 4.0)
    costs.observe_fetch(STAGES[-1], 0.5)
    again = Costs.from_json(costs.to_json())

    assert again.of_fetch(STAGES[-1]) == 0.5
    assert (again.of("reset"), again.of_stage(STAGES[-1]), again.of_stage(OTHER[-1])) == (0.25, 4.0, 4.0)
    assert again.to_json() == costs.to_json()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "null",
        "{}",
        '{"version": 1}',
        '{"version": 1, "by_name": [], "by_key": {}}',
        *(json.dumps({"version": 1, "by_name": {"create": bad}, "by_key": {}}) for bad in (-1, "x", None, True, 1e12, float("nan"))),
        '{"version": 2, "by_name": {}, "by_key": {}}',
    ],
)
def test_what_is_no_record_of_costs_is_refused_with_a_remedy(text):
    with pytest.raises(UsageError, match="remove the file"):
        Costs.from_json(text)


def test_a_first_measurement_that_was_far_off_is_soon_forgotten():
    costs = Costs()
    costs.observe("create", 2.0)  # a machine that was busy with something else
    for _ in range(4):
        costs.observe("create", 0.01)
    assert costs.of("create") < 0.03


def test_measurements_that_differ_as_they_do_move_what_is_expected_by_a_fifth():
    costs = Costs()
    for seconds in (1.0, 0.5, 2.0):
        costs.observe("create", seconds)
    assert costs.of("create") == pytest.approx(0.9 + 0.2 * (2.0 - 0.9))
