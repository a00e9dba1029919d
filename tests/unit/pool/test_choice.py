"""The choice of a substrate: never a weaker boundary than asked for, the cheapest of the others, by what is best known of each."""

import pytest

from untax.core.errors import UsageError
from untax.core.substrate import Typical
from untax.pool.choice import Expected, choose, expected, from_json, rollout_s, to_json

QUICK_START = Expected("container", "container", start_s=0.3, action_s=0.05)
QUICK_ACTIONS = Expected("vm", "vm", start_s=6.0, action_s=0.001)
PLAIN = Expected("process", "none", start_s=0.003, action_s=0.0002)


def test_a_weaker_boundary_is_never_chosen_however_cheap():
    choice = choose([PLAIN, QUICK_START, QUICK_ACTIONS], "container", actions=10)
    assert choice.substrate == "container"
    assert "weaker than 'container'" in choice.left_out["process"]
    assert "next best vm" in choice.reason


@pytest.mark.parametrize(("actions", "best"), [(1, "container"), (1000, "vm")])
def test_the_length_of_rollouts_decides_between_start_and_action(actions, best):
    assert choose([QUICK_START, QUICK_ACTIONS], "container", actions=actions).substrate == best


def test_of_equals_the_stronger_boundary_wins():
    weak, strong = Expected("a", "namespace", 1.0, 0.0), Expected("b", "vm", 1.0, 0.0)
    assert choose([weak, strong], "namespace").substrate == "b"


def test_without_a_strong_one_the_error_says_what_each_lacks():
    with pytest.raises(UsageError, match=r"kubernetes: no cluster.*process: its isolation is 'none'.*untax doctor"):
        choose([PLAIN], "vm", unusable={"kubernetes": "no cluster"})


def test_what_was_measured_goes_before_what_was_learnt_and_that_before_what_is_typical():
    typical = Typical(1.0, 0.1)
    measured = Expected("x", "vm", 3.0, 0.3, source="measured")
    assert expected("x", "vm", typical, measured, 2.0) is measured
    assert expected("x", "vm", typical, None, 2.0) == Expected("x", "vm", 2.0, 0.1, source="learnt")
    assert expected("x", "vm", typical, None, None) == Expected("x", "vm", 1.0, 0.1)
    # Measured under another boundary, it is another thing.
    assert expected("x", "container", typical, measured, None).source == "typical"
    assert expected("x", "gvisor", None, None, None).start_s > expected("y", "namespace", None, None, None).start_s


def test_a_rollout_is_paid_once_and_with_every_action_and_reset():
    assert rollout_s(start_s=2, action_s=0.5, actions=4, end_s=1, resets=2, replacement_s=3) == 11


def test_what_was_measured_is_read_back():
    measured = [Expected("x", "vm", 3.0, 0.3, 0.1, "measured")]
    assert from_json(to_json(measured)) == {"x": measured[0]}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"version": 9, "substrates": []}',
        '{"version": 1, "substrates": [{"substrate": "x"}]}',
        '{"version": 1, "substrates": [{"substrate": "x", "isolation": "wall", "start_s": 1, "action_s": 1, "source": "measured"}]}',
        '{"version": 1, "substrates": [{"substrate": "x", "isolation": "vm", "start_s": -1, "action_s": 1, "source": "measured"}]}',
        '{"version": 1, "substrates": [{"substrate": "x", "isolation": "vm", "start_s": NaN, "action_s": 1, "source": "measured"}]}',
        '{"version": 1, "substrates": [{"substrate": "x", "isolation": "vm", "start_s": 1, "action_s": 1, "source": "guessed"}]}',
    ],
)
def test_what_is_no_record_of_costs_is_refused_with_a_remedy(text):
    with pytest.raises(UsageError, match="untax bench"):
        from_json(text)
