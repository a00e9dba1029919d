"""Reports are whole: every figure is there or a marked gap, nothing is loaded or run, every name is escaped, the same records give the same bytes."""

import copy
import json
import random
import re
import xml.etree.ElementTree as ET
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise

import pytest
from tests import records

from untax.core.errors import UsageError
from untax.meter import report
from untax.meter.figures._svg import MARGIN, NARROW, WIDE, apart, with_colours
from untax.meter.gather import gather
from untax.meter.record import Case, Gap, to_line
from untax.meter.report.contents import FIGURES, compile_contents

PAPER_FIGURES = ("composition", "cold-start", "distribution", "amortisation", "completion", "scale")


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    place = tmp_path_factory.mktemp("run")
    records.write(place / "records.jsonl", records.whole_run([*records.plain_cases(), *records.more_cases()], 12))
    return place


@pytest.fixture(scope="module")
def written(run_dir):
    files = report.write(run_dir, run_dir / "report", png=False)
    return {file.relative_to(run_dir / "report").as_posix(): file for file in files}


def test_a_page_a_document_pictures_and_tables_are_written(written):
    assert next(iter(written)) == "report.html"
    assert "report.md" in written
    for number, name in enumerate(PAPER_FIGURES, 1):
        assert f"figures/{number}-{name}.svg" in written
        assert f"data/{name}.csv" in written
    for name in ("summary", "table-1", "table-2", "paper", "differences", "pairs", "cases", "stall", "conditions", "sensitivity-0"):
        assert f"data/{name}.csv" in written
    assert all(file.stat().st_size > 0 for file in written.values())


def test_the_page_has_every_figure_for_wide_and_narrow_windows(written):
    page = written["report.html"].read_text()
    for name in (*PAPER_FIGURES, "paths", "concurrency"):
        figure = re.search(rf'<figure data-figure="{name}">(.*?)</figure>', page, re.DOTALL).group(1)
        assert figure.count("<svg") == 2 and "wide" in figure and "narrow" in figure
    assert page.count("command and records behind this figure") == 8
    assert page.count("untax bench --quick") >= 8


class _Loads(HTMLParser):
    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attrs):
        self.found += [
            (tag, name, value) for name, value in attrs if name in ("src", "href", "srcset") and not value.startswith(("#", "data:"))
        ]
        self.found += [(tag, name, value) for name, value in attrs if name.startswith("on") or tag == "script"]


def test_the_page_needs_nothing_and_runs_nothing(written):
    parser = _Loads()
    page = written["report.html"].read_text()
    parser.feed(page)
    assert parser.found == []
    assert "@import" not in page and "url(" not in page


def test_the_summary_has_n_in_every_measured_cell_or_in_the_one_before(written, run_dir):
    """Start, tax and trajectories may have other trials behind them; p95, SD and worker-hours have those of the cell to their left."""
    contents = compile_contents(gather(run_dir))
    rows = [row for row in contents.summary.rows if "–" not in map(str, row)]
    has_n = [[re.search(r"n \d+$", cell.under) is not None for cell in row[1:-1]] for row in rows]
    assert has_n and all(row == [True, False, False, True, True, False] for row in has_n)
    assert [head.split()[0] for head in contents.summary.head[1:4]] == ["start", "p95", "SD"]


def test_where_a_start_goes_is_shown_where_a_control_plane_told(tmp_path):
    """Medians over the cold cases of a series; a warm one's pod was placed before its trial, and who told nothing has no row."""

    def told(case, *schedules_ms):
        parts = [{"schedule": ms * 10**6, "start": 500 * 10**6} | ({"image": 0} if n else {}) for n, ms in enumerate(schedules_ms)]
        return [records.a_trial(case, n, profile=profile, substrate_detail={"start_parts_ns": one}) for n, one in enumerate(parts)]

    profile = records.PROFILES["kubernetes", "incumbent"]
    cold = Case("kubernetes", tier="T0")
    made = [*told(cold, 2, 4, 6), *told(replace(cold, tier="T1"), 4, 30), *told(replace(cold, warmth="warm"), 900)]
    other = [records.a_trial(Case("process", tier="T0"), n) for n in range(3)]
    records.write(tmp_path / "records.jsonl", [records.a_run(), *made, *other])
    contents = compile_contents(gather(tmp_path))

    assert contents.starts.head == ["", "schedule", "start", "image"]
    (row,) = contents.starts.rows
    assert [str(cell) for cell in row] == ["kubernetes", "4.00 ms", "500 ms", "0 s"]
    assert [cell.under.split("\n")[-1] for cell in row[1:]] == ["n 5", "n 5", "n 3"]
    assert contents.starts in contents.all_tables()
    assert "Where a pod’s start goes" in report.write(tmp_path, tmp_path / "out", png=False)[0].read_text()


def test_pictures_are_files_of_their_own_in_both_schemes(written):
    for name in written:
        if name.endswith(".svg"):
            text = written[name].read_text()
            assert ET.fromstring(text).tag.endswith("svg")
            assert "prefers-color-scheme:dark" in text
            for scheme in (0, 1):
                assert "var(" not in with_colours(text, scheme)


def test_the_same_records_give_the_same_bytes(run_dir, written, tmp_path):
    for file in report.write(run_dir, tmp_path, png=False):
        assert file.read_bytes() == written[file.relative_to(tmp_path).as_posix()].read_bytes()


def test_names_from_records_are_shown_and_not_obeyed(tmp_path):
    nasty = "</svg><script>alert('x')</script>|`=1"
    case = Case(nasty, tier=nasty)
    trials = [records.a_trial(case, n, profile=records.PROFILES["process", "channel"]) for n in range(6)]
    bad = records.a_trial(case, 7, profile=records.PROFILES["process", "channel"], outcome="infra", error={"type": nasty, "message": nasty})
    run = records.a_run(command=nasty, run=nasty, host={nasty: nasty, "cpu": nasty}, started_at=nasty)
    fixed = [replace(trial, run=nasty) for trial in (*trials, bad)]
    records.write(tmp_path / "records.jsonl", [run, *fixed, Gap(nasty, "", nasty, nasty)])

    for file in report.write(tmp_path, tmp_path / "out", png=False):
        text = file.read_text()
        if file.suffix in (".html", ".svg"):
            assert "<script" not in text
        if file.suffix == ".svg":
            ET.fromstring(text)


@pytest.mark.parametrize(
    ("cases", "missing"),
    [
        ([Case("namespace", tier="T0")], {"amortisation", "completion", "concurrency"}),
        ([Case("namespace", tier="T2", length=50)], {"cold-start", "distribution", "concurrency"}),
        ([Case("container", tier="T0", concurrency=8)], {figure.__name__.rpartition(".")[2].replace("_", "-") for figure in FIGURES}),
    ],
)
def test_a_figure_without_its_records_is_a_marked_gap(tmp_path, cases, missing):
    records.write(tmp_path / "records.jsonl", records.whole_run(cases, 6))
    contents = compile_contents(gather(tmp_path))
    assert {figure.name for figure in contents.figures if figure.draw is None} == missing
    page = report.write(tmp_path, tmp_path / "out", png=False)[0].read_text()
    assert page.count('class="missing"') == len(missing) and page.count("data-figure=") == len(FIGURES)


def test_a_run_in_which_everything_failed_still_has_a_report(tmp_path):
    case = Case("namespace", tier="T0")
    trials = [records.a_trial(case, n, outcome="infra", error={"type": "CreateError", "message": "no"}) for n in range(3)]
    records.write(tmp_path / "records.jsonl", [records.a_run(), *trials])
    page = report.write(tmp_path, tmp_path / "out", png=False)[0].read_text()
    assert "CreateError" in page and "3 of 3" in page


def test_a_run_without_a_control_plane_has_no_table_of_starts(run_dir):
    assert compile_contents(gather(run_dir)).starts is None


def test_gaps_alone_have_a_report(tmp_path):
    records.write(tmp_path / "records.jsonl", [records.a_run(), Gap("r1", "", "vm", "no KVM here")])
    assert "no KVM here" in report.write(tmp_path, tmp_path / "out", png=False)[0].read_text()


def test_one_trial_and_a_trial_of_no_time_are_drawn(tmp_path):
    empty = records.a_trial(
        Case("process", tier="T0"),
        parts_ns=dict.fromkeys(records.no_parts(), 0),
        total_ns=0,
        metrics_ns={"first_command": 0, "fresh_episode": 0},
    )
    records.write(tmp_path / "records.jsonl", [records.a_run(), empty, records.a_trial(Case("namespace", tier="T0"))])
    report.write(tmp_path, tmp_path / "out", png=False)


def test_the_summary_for_a_terminal_is_short_and_says_what_is_wrong(run_dir):
    text = report.summary(run_dir)
    assert "namespace" in text and "worker-hours" in text
    assert "! gap: gvisor" in text
    assert max(map(len, text.splitlines()[:5])) <= 120


def test_a_place_that_cannot_be_written_is_said(run_dir, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--out"):
        report.write(run_dir, tmp_path / "file", png=False)


def test_a_full_disk_leaves_the_report_that_was_there(run_dir, tmp_path, monkeypatch):
    page = report.write(run_dir, tmp_path, png=False)[0]
    before = page.read_bytes()

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "replace", full)
    with pytest.raises(UsageError, match="No space left"):
        report.write(run_dir, tmp_path, png=False)
    assert page.read_bytes() == before
    assert not list(tmp_path.glob(".report-*"))


def test_labels_are_kept_apart_and_in_order():
    places = apart([10, 11, 12, 90, 99], 15, 0, 100)
    assert all(b - a >= 15 - 1e-9 for a, b in pairwise(places))
    assert max(places) <= 100


@pytest.mark.parametrize("width", [WIDE, NARROW])
def test_every_figure_has_a_size(run_dir, width):
    for figure in compile_contents(gather(run_dir)).figures:
        canvas = figure.draw(width)
        assert canvas.width == width and canvas.height > 60


def test_pictures_for_slides_are_as_large_as_they_say(run_dir, tmp_path):
    """PNG files begin as such, and are drawn at twice the size for sharp screens."""
    pytest.importorskip("resvg_py", reason="resvg: not installed")
    files = report.write(run_dir, tmp_path, png=True)
    pictures = [file for file in files if file.suffix == ".png"]
    assert len(pictures) == len(FIGURES)
    for file in pictures:
        data = file.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n" and int.from_bytes(data[16:20]) == 2 * (WIDE + 2 * MARGIN)


def test_png_without_the_extra_names_it(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr(report._png, "is_there", lambda: False)
    with pytest.raises(UsageError, match=r"untax\[png\]"):
        report.write(run_dir, tmp_path, png=True)
    assert not any(file.suffix == ".png" for file in report.write(run_dir, tmp_path))


_ODD = (None, True, -1, 0, 1.5, float("nan"), float("inf"), 10**30, "", "<b>", [], {}, [1], {"a": {"b": [1]}}, -(10**18), "\x00\ud800")


def _places(value, at=()):
    """Every place in a JSON document."""
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from _places(inside, (*at, key))


def test_whatever_was_changed_in_a_file_there_is_a_report_or_words(tmp_path):
    """One or two values of a good file replaced or removed, at random: never anything but a report or a `UsageError`."""
    rng = random.Random(11)
    cases = [Case("process", tier="T0"), Case("namespace", tier="T2", length=10), Case("container", "incumbent", tier="T0", concurrency=8)]
    good = [json.loads(to_line(record)) for record in records.whole_run(cases, 3)]
    outcomes = Counter()
    for _ in range(120):
        made = copy.deepcopy(good)
        for _ in range(rng.choice((1, 2))):
            inside = rng.choice(made) if rng.random() < 0.7 else made[0]
            *way, last = rng.choice(list(_places(inside)))
            for key in way:
                inside = inside[key]
            if rng.random() < 0.2:
                del inside[last]
            else:
                inside[last] = rng.choice(_ODD)
        (tmp_path / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in made))
        try:
            report.write(tmp_path, tmp_path / "out", png=False)
            outcomes["report"] += 1
        except UsageError:
            outcomes["words"] += 1
    assert min(outcomes["report"], outcomes["words"]) > 20
