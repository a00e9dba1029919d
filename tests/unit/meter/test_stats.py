"""Percentiles, intervals and comparisons: checked against resampling and against distributions whose answer is known."""

import math
import random

import pytest

from untax.meter import stats


def lognormal(n, seed=1, sigma=0.5):
    rng = random.Random(seed)
    return [rng.lognormvariate(0, sigma) for _ in range(n)]


def test_percentiles_interpolate():
    assert stats.percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.5
    assert stats.percentile([5.0], 95) == 5.0
    assert math.isnan(stats.percentile([], 50))


@pytest.mark.parametrize("q", [50, 95, 99])
def test_the_interval_of_a_percentile_is_the_one_of_resampling(q):
    """What is computed without resampling lies where four thousand resamples put it, to within two neighbouring samples."""
    samples = lognormal(100)
    rng = random.Random(2)
    resampled = stats.interval_of([stats.percentile(rng.choices(samples, k=100), q) for _ in range(4000)])

    computed = stats.percentile_interval(sorted(samples), q)

    ordered = sorted(samples)
    for one, other in ((computed.low, resampled.low), (computed.high, resampled.high)):
        between = [x for x in ordered if min(one, other) < x < max(one, other)]
        assert len(between) <= 1


@pytest.mark.parametrize("n", [15, 60])
def test_intervals_hold_what_they_promise(n):
    """Of intervals for a known median and a known mean, about 95 in 100 contain it."""
    medians = means = 0
    for seed in range(300):
        samples = lognormal(n, seed)
        interval = stats.percentile_interval(sorted(samples), 50)
        medians += interval.low <= 1.0 <= interval.high
        rng = random.Random(seed)
        interval = stats.interval_of(stats.mean_draws(samples, 200, rng))
        means += interval.low <= math.exp(0.125) <= interval.high
    assert medians >= 0.91 * 300
    assert means >= 0.86 * 300  # percentile intervals of the mean of skewed samples are known to be somewhat short


def test_many_samples_and_few_agree_about_the_width():
    """Where resampling gives way to its limit, nothing jumps."""
    samples = lognormal(2000)
    resampled, limit = stats.spread(samples), stats.spread([*samples, 1.0])
    for name in ("mean_interval", "sd_interval"):
        assert getattr(limit, name).half_width == pytest.approx(getattr(resampled, name).half_width, rel=0.15)


def test_a_tail_that_was_not_sampled_is_said_to_be_open():
    """A hundred samples bound a p95 from above and do not bound a p99."""
    found = stats.spread(lognormal(100))
    assert not found.p50_interval.is_open and not found.p95_interval.is_open
    assert found.p99_interval.is_open
    assert stats.spread(lognormal(400)).p99_interval.is_open is False


def test_outliers_are_counted_and_kept():
    found = stats.spread([1.0, 1.01, 0.99, 1.02, 0.98, 1.0, 1.01, 9.0])
    assert found.far_out == 1
    assert found.max == 9.0 and found.mean > 1.9


def test_one_sample_is_described_without_pretending():
    found = stats.spread([2.0])
    assert (found.p50, found.p95, found.mean, found.sd, found.n) == (2.0, 2.0, 2.0, 0.0, 1)
    assert found.mean_interval.is_open and found.p50_interval.is_open


def test_a_difference_has_an_interval_a_ratio_and_a_size():
    slow = [2 * x for x in lognormal(100, 3, 0.1)]
    found = stats.difference(lognormal(100, 4, 0.1), slow)
    assert found.seconds_interval.low < found.seconds < found.seconds_interval.high
    assert found.ratio == pytest.approx(2.0, rel=0.05)
    assert found.ratio_interval.low < 2.0 < found.ratio_interval.high
    assert (found.effect, found.is_told_apart) == ("large", True)


def test_samples_of_one_distribution_are_not_told_apart():
    told = sum(stats.difference(lognormal(60, 2 * n), lognormal(60, 2 * n + 1)).is_told_apart for n in range(60))
    assert told <= 8


def test_cliffs_delta_counts_pairs():
    a, b = [1.0, 2.0, 2.0, 5.0], [2.0, 3.0]
    pairs = [(x, y) for x in a for y in b]
    assert stats.cliffs_delta(a, b) == (sum(y > x for x, y in pairs) - sum(y < x for x, y in pairs)) / len(pairs)
    assert stats.cliffs_delta([1.0], [2.0]) == 1.0 and stats.cliffs_delta([2.0], [1.0]) == -1.0


@pytest.mark.parametrize("n", [30, 100])
@pytest.mark.parametrize("draw", ["normal", "lognormal", "exponential"])
def test_one_heap_is_not_two(draw, n):
    """Skew and tails are no second mode."""
    rng = random.Random(5)
    draws = {"normal": lambda: rng.gauss(10, 1), "lognormal": lambda: rng.lognormvariate(0, 1), "exponential": lambda: rng.expovariate(1)}
    found = [stats.two_modes([draws[draw]() for _ in range(n)]) for _ in range(100)]
    assert sum(one is not None for one in found) <= 5


def test_two_heaps_are_found_with_their_medians():
    rng = random.Random(6)
    samples = [rng.gauss(1.0, 0.03) for _ in range(60)] + [rng.gauss(1.6, 0.05) for _ in range(30)]
    low, high, share = stats.two_modes(samples)
    assert (low, high, share) == (pytest.approx(1.0, abs=0.03), pytest.approx(1.6, abs=0.05), pytest.approx(1 / 3))


def test_the_beta_distribution_is_the_binomial_turned_round():
    """P(B(k, n−k+1) ≤ p) is the chance of at least k successes in n."""
    for n, k, p in ((10, 3, 0.2), (100, 95, 0.93), (1000, 500, 0.51)):
        tail = sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k, n + 1))
        assert stats.beta_share(p, k, n - k + 1) == pytest.approx(tail, rel=1e-9)
        assert stats.beta_quantile(tail, k, n - k + 1) == pytest.approx(p, rel=1e-9)
