"""Pictures say what the numbers say: lengths are in proportion, places are in order, scales cover what is drawn."""

import re
import xml.etree.ElementTree as ET
from itertools import pairwise

import pytest
from tests import records

from untax.meter.figures import cold_start, completion, composition, distribution, scale
from untax.meter.figures._svg import NARROW, WIDE, Scale, log_scale
from untax.meter.gather import Series, gather
from untax.meter.stats import percentile, spread
from untax.meter.view import View

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def view(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    return View(gather(records.write(place / "records.jsonl", records.whole_run(records.plain_cases(), 10))))


def elements(figure, width, tag):
    return list(ET.fromstring(figure.draw(width).svg("x")).iter(f"{SVG}{tag}"))


def hinted(found, words):
    """Elements whose hint begins with some words, with that hint."""
    hints = [(one, one.findtext(f"{SVG}title") or "") for one in found]
    return [(one, hint) for one, hint in hints if hint.startswith(words)]


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_the_parts_of_a_bar_are_in_proportion_and_fill_it(view, width):
    samples = view.run.of(Series("vm"), "T2")
    bars = hinted(elements(composition.make(view), width, "rect"), "vm: ")
    assert len(bars) % 2 == 0
    half = len(bars) // 2
    for panel in (bars[:half], bars[half:]):
        total = sum(float(one.get("width")) for one, _ in panel)
        for one, hint in panel:
            part = hint.removeprefix("vm: ").split()[0]
            share = samples.mean_parts[part] / sum(samples.mean_parts.values())
            assert float(one.get("width")) / total == pytest.approx(share, abs=0.003)


def test_a_slower_start_lies_further_right(view):
    figure = cold_start.make(view)
    marks = [one for one, hint in hinted(elements(figure, WIDE, "circle"), "") if "p50" in hint]
    by_tier = [marks[n : n + len(view.cold)] for n in range(0, len(marks), len(view.cold))]
    assert len(by_tier) == 3
    for tier in by_tier:
        places = [float(one.get("cx")) for one in tier]
        assert places == sorted(places)


def test_every_trial_of_a_small_run_is_a_dot(view):
    figure = distribution.make(view)
    dots = [one for one in elements(figure, WIDE, "circle") if one.get("r") == "1.7"]
    assert len(dots) == sum(view.run.of(series, tier).n for series in view.cold for tier in ("T0", "T1", "T2"))


def test_of_very_many_trials_the_far_out_ones_are_still_shown():
    values = [1.0 + n / 1e5 for n in range(10_000)] + [50.0]
    shown = distribution.selection(values, spread(values))
    assert len(shown) < 400 and 50.0 in shown and min(values) in shown


def test_a_curve_goes_through_its_medians(view):
    samples = view.run.of(Series("vm"), "T2", 50)
    ((_, hint),) = hinted(elements(completion.make(view), WIDE, "circle"), "vm, 50 actions, whole")
    assert hint.startswith(f"vm, 50 actions, whole trajectory: p50 {percentile(samples.total, 50):.2f} s")


def test_hours_grow_in_proportion(view):
    marks = hinted(elements(scale.make(view), WIDE, "circle"), "vm: ")
    places = [(float(one.get("cx")), float(one.get("cy"))) for one, _ in marks]
    (x1, y1), (x2, y2), (x3, y3) = places
    assert (y2 - y1) / (x2 - x1) == pytest.approx((y3 - y2) / (x3 - x2), rel=0.01)
    hours = [float(re.search(r"trajectories, ([\d,]+) h", hint).group(1).replace(",", "")) for _, hint in marks]
    assert hours[2] == pytest.approx(10 * hours[0], rel=0.01)


@pytest.mark.parametrize("values", [[1e-6, 3e-6], [0.001, 5000.0], [2.0], [0.9, 1.1], [0.0, 1.0]])
def test_axes_have_ticks_and_hold_what_is_drawn(values):
    made = log_scale(values, 0, 100)
    assert all(-1e-6 <= made(value) <= 100 for value in values if value > 0)
    assert 1 <= len(made.ticks(6)) <= 6
    assert all(0 <= a < b <= 100 for a, b in pairwise([made(tick) for tick in made.ticks(6)]))


@pytest.mark.parametrize("most", [0.003, 1, 7.3, 12_000, 99_999_999])
def test_linear_ticks_are_round_and_few(most):
    ticks = Scale(0, most, 0, 100).ticks(6)
    assert 2 <= len(ticks) <= 7 and ticks[0] == 0 and ticks[-1] <= most * 1.000001
