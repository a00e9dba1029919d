"""Tables in four forms, whatever stands in their cells; numbers as people read them."""

import csv
import io
import math

import pytest

from untax.meter import units
from untax.meter.stats import Interval
from untax.meter.table import Table, Value, as_csv, as_html, as_markdown, as_text

NASTY = ("<script>alert(1)</script>", "a|b", "=HYPERLINK(1)", "`x`", "two\nlines", "[a](javascript:b)")


def table(*cells):
    made = Table("t", "", ["name", "value"])
    for cell in cells:
        made.add(cell, Value("1.5 s", 1.5, "1–2 s\nn 3"))
    return made


@pytest.mark.parametrize("text", NASTY)
def test_html_shows_a_cell_and_never_obeys_it(text):
    made = as_html(table(text))
    assert "<script" not in made and text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") in made


@pytest.mark.parametrize("text", NASTY)
def test_markdown_keeps_its_columns(text):
    row = as_markdown(table(text)).splitlines()[2]
    assert len([part for part in row.replace("\\|", "").split("|") if part.strip()]) == 2
    assert "<script" not in row.replace("\\<", "")


@pytest.mark.parametrize("text", NASTY)
def test_csv_reads_back_and_holds_no_formula(text):
    rows = list(csv.reader(io.StringIO(as_csv(table(text)))))
    assert rows[1][0].removeprefix("'") == text
    assert rows[1][0][0] not in "=+-@"
    assert float(rows[1][1]) == 1.5


def test_text_lines_up():
    lines = as_text(table("a", "long name")).splitlines()
    assert lines[1].index("1.5 s") == lines[2].index("1.5 s")
    assert "1–2 s, n 3" in lines[1]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (2.31e-3, "2.31 ms"),
        (0.9999, "1.00 s"),
        (42.5, "42.5 s"),
        (1234, "1,234 s"),
        (1.5e-7, "150 ns"),
        (math.nan, "–"),
        (-0.047, "-47.0 ms"),
    ],
)
def test_durations_have_three_digits_and_a_unit(value, text):
    assert units.seconds(value) == text


def test_other_numbers():
    assert units.hours(11_805.6) == "11,806 h" and units.hours(0.5) == "0.500 h"
    assert (units.share(0.123), units.share(0.0123), units.share(0.0000123), units.share(0)) == ("12 %", "1.2 %", "< 0.1 %", "0 %")
    assert (units.count(10_000), units.count(1e6), units.count(1e7)) == ("10,000", "1 million", "10 million")
    assert units.between(Interval(0.001, 0.002)) == "1.00–2.00 ms"
    assert units.between(Interval(0.5, 2)) == "500 ms–2.00 s"
    assert units.between(Interval(0.5, 2, is_open=True)) == "≥ 500 ms"
    assert units.tick(0.003) == "3 ms" and units.tick(10) == "10 s" and units.tick(100) == "100 s"
