"""Which stages go first: the least worth, nothing that others stand on, and no more than is needed."""

from untax.layers.eviction import HALF_LIFE_S, Candidate, aged, choose

SIZES = dict.fromkeys("abcdef", 100)


def stage(key, adds, *, parent=None, cost_s=10.0, uses=1.0, is_kept=False):
    return Candidate(key, parent, tuple(adds), cost_s, uses, is_kept)


def test_the_cheapest_and_least_used_goes_first():
    dear, cheap, unused = stage("dear", "a", cost_s=100), stage("cheap", "b", cost_s=5), stage("unused", "c", uses=0.1)

    assert choose([dear, cheap, unused], SIZES, 1) == ["unused"]
    assert choose([dear, cheap, unused], SIZES, 101) == ["unused", "cheap"]
    assert choose([dear, cheap, unused], SIZES, 0) == []


def test_what_is_dear_and_never_used_goes_before_what_is_cheap_and_always_used():
    assert choose([stage("dear", "a", cost_s=600, uses=0.01), stage("cheap", "b", cost_s=1, uses=50)], SIZES, 1) == ["dear"]


def test_what_others_stand_on_stays_while_they_stay():
    image, repo, deps = (
        stage("image", "a", cost_s=1),
        stage("repo", "b", parent="image", cost_s=50),
        stage("deps", "c", parent="repo", cost_s=900),
    )

    assert choose([image, repo, deps], SIZES, 1) == ["deps"]
    assert choose([image, repo, deps], SIZES, 300) == ["deps", "repo", "image"]


def test_what_is_in_use_stays_and_so_does_all_below_it():
    image, used, unused = (
        stage("image", "a"),
        stage("used", "b", parent="image", is_kept=True),
        stage("unused", "c", parent="image", cost_s=900),
    )

    assert choose([image, used, unused], SIZES, 1000) == ["unused"]


def test_a_shared_layer_is_freed_with_the_last_stage_that_needs_it():
    one, two = stage("one", "ab", cost_s=1), stage("two", "bc", cost_s=2)

    assert choose([one, two], SIZES, 100) == ["one"]
    assert choose([one, two], SIZES, 101) == ["one", "two"]


def test_what_would_free_nothing_is_given_back():
    """The way to a large stage leads over smaller ones of less worth; once it goes, they can stay."""
    small, large = stage("small", "a", cost_s=1), stage("large", "b", cost_s=2)

    assert choose([small, large], {"a": 1, "b": 1000}, 900) == ["large"]


def test_a_child_is_never_given_back_without_what_it_stands_on():
    parent, child = stage("parent", "a", cost_s=1), stage("child", "b", parent="parent", cost_s=1)

    assert choose([parent, child], {"a": 1000, "b": 1}, 900) == ["child", "parent"]


def test_the_same_facts_give_the_same_answer():
    candidates = [stage(key, key) for key in "fedcba"]

    assert choose(candidates, SIZES, 250) == choose(candidates[::-1], SIZES, 250) == ["a", "b", "c"]


def test_uses_fade():
    assert aged(8.0, HALF_LIFE_S) == 4.0
    assert aged(8.0, -5.0) == 8.0  # the clock was set back
    assert aged(8.0, 0.0) == 8.0


def test_the_choice_among_thousands_looks_at_each_layer_a_few_times():
    """A store of a training run has as many; a look at all of them for each would take minutes."""
    looks = 0

    class Counted(dict):
        def get(self, key, default=None):
            nonlocal looks
            looks += 1
            return super().get(key, default)

    count = 3000
    stages = [stage(f"k{n}", (f"l{n}", "shared"), parent=f"k{n - 1}" if n % 3 else None, cost_s=n % 97, uses=n % 13) for n in range(count)]

    assert len(choose(stages, Counted({f"l{n}": 1000 for n in range(count)}), count * 900)) == count * 9 // 10
    assert looks < 10 * count
