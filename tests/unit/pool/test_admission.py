"""How much may be starting at once: as much as the machine carries out side by side, found from times alone."""

import random

import pytest

from untax.pool.admission import Admission


def play(admission, *, places, alone_s=0.01, starts=4000, jitter=0.05, kind="create", seed=1):
    """A machine with so many places, always asked for as much as is admitted: time grows in proportion beyond them."""
    chance = random.Random(seed)
    caps = []
    for _ in range(starts):
        at_once = admission.cap
        admission.observe(kind, alone_s * max(1.0, at_once / places) * chance.uniform(1.0, 1.0 + jitter), at_once)
        caps.append(admission.cap)
    return sum(caps[-500:]) / 500


@pytest.mark.parametrize("places", [2, 4, 12, 40])
def test_the_cap_settles_a_little_above_what_runs_side_by_side(places):
    settled = play(Admission(first=4, floor=2, ceiling=128), places=places)

    assert places * 0.75 <= settled <= places * 1.35 + 1


def test_it_comes_down_from_a_first_guess_that_was_too_high():
    """Without ever having seen how quick a start is alone."""
    assert play(Admission(first=64, floor=2, ceiling=64), places=4) <= 6.5


def test_noise_of_half_the_time_does_not_lead_it_astray():
    for seed in range(5):
        assert 6 <= play(Admission(first=4, floor=2, ceiling=128), places=12, jitter=1.0, seed=seed, starts=20_000) <= 24


def test_the_bounds_hold():
    assert play(Admission(first=4, floor=2, ceiling=8), places=1000) <= 8
    assert play(Admission(first=4, floor=3, ceiling=8), places=1) >= 3
    for first, floor, ceiling in ((1, 2, 3), (4, 2, 3), (1, 0, 1)):
        with pytest.raises(ValueError):
            Admission(first=first, floor=floor, ceiling=ceiling)


def test_a_quiet_machine_teaches_nothing():
    """One start at a time says nothing of how many would go."""
    admission = Admission(first=4, floor=2, ceiling=64)
    for _ in range(1000):
        admission.observe("create", 0.01, 1)

    assert admission.cap == 4


def test_kinds_are_compared_with_themselves():
    """A build that takes a minute is no sign of saturation: what is seen of it once says nothing."""
    admission = Admission(first=8, floor=2, ceiling=64)
    chance = random.Random(2)
    for n in range(2000):
        at_once = admission.cap
        admission.observe("create", 0.01 * max(1.0, at_once / 16), at_once)
        admission.observe(f"build {n}", chance.uniform(1, 60), at_once)
        admission.observe("another build", 60.0 * max(1.0, at_once / 16), at_once)

    assert 12 <= admission.cap <= 24


def test_a_machine_that_changed_is_learnt_anew():
    admission = Admission(first=4, floor=2, ceiling=64)
    play(admission, places=16)
    assert 12 <= play(admission, places=16, alone_s=0.05, starts=8000) <= 22, "five times as slow, and as wide"
    assert play(admission, places=4, starts=20_000) <= 7, "narrower"
    assert play(admission, places=32, starts=20_000) >= 24, "wider"
