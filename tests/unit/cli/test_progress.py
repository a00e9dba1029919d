"""How far it is, for people: a bar on a terminal, lines elsewhere, and nothing a name could do to the terminal."""

import io
import os
import pty

import pytest

from untax.cli._progress import Progress, human, seconds


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1536 << 10, "1.5 MiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_have_a_unit_that_fits(count, text):
    assert human(count) == text


@pytest.mark.parametrize(("count", "text"), [(0.04, "0.0 s"), (99.94, "99.9 s"), (120, "2 min"), (9000, "2.5 h")])
def test_times_have_a_unit_that_fits(count, text):
    assert seconds(count) == text


def test_a_line_for_each_step_where_there_is_no_terminal():
    out = io.StringIO()
    with Progress(out) as progress:
        for done in range(100):
            progress("one", done, 1 << 20)
        progress("two", 5, None)

    assert out.getvalue() == "untax: one (1.0 MiB)\nuntax: two\n"


def test_a_bar_that_fits_the_terminal_and_is_gone_at_the_end():
    master, slave = pty.openpty()
    with os.fdopen(slave, "w") as out:
        with Progress(out) as progress:
            progress("fetch \x1b]0;title\a " + "x" * 300, 50, 100)
            progress("fetch \x1b]0;title\a " + "x" * 300, 100, 100)
        shown = ""
        while not shown.endswith("\n"):
            shown += os.read(master, 1 << 16).decode()
    os.close(master)

    assert "\x1b]" not in shown
    assert shown.count("\r\x1b[K") == 3
    assert all(len(part) <= 80 for part in shown.split("\r\x1b[K")[1:3])
    assert shown.rpartition("\r\x1b[K")[2].startswith("untax: fetch")
