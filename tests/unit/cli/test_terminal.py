"""O6, O10: what a workload prints can neither drive a terminal nor forge a log record."""

import io
import logging

from untax.cli._logs import OneLineFormatter
from untax.cli._terminal import neutralised, one_line, show


def test_o10_escape_sequences_are_spelled_out():
    hostile = b"\033]52;c;ZXZpbA==\a\033]0;t\a ok\n"

    assert neutralised(hostile) == rb"\x1b]52;c;ZXZpbA==\x07\x1b]0;t\x07 ok" + b"\n"


def test_c1_controls_and_bidirectional_marks_are_spelled_out():
    assert neutralised("a\x9bb\u202ec".encode()) == rb"a\x9bb\u202ec"


def test_ordinary_text_passes():
    assert neutralised("naïve ☃\tx\n".encode()) == "naïve ☃\tx\n".encode()
    assert neutralised(b"\xff\xfe") == rb"\xff\xfe"


def test_pipes_and_raw_output_get_the_exact_bytes():
    for options in ({"is_terminal": False, "as_it_is": False}, {"is_terminal": True, "as_it_is": True}):
        out = io.BytesIO()
        show(b"\x1b[2J\xff", out, **options)
        assert out.getvalue() == b"\x1b[2J\xff"


def test_o6_a_record_is_one_line():
    record = logging.LogRecord("untax", logging.WARNING, "f", 1, "said %s", ("x\n2026-01-01 ERROR forged\n\033[2J",), None)

    line = OneLineFormatter("%(levelname)s %(message)s").format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert line.startswith("WARNING said x\\x0a2026")
    assert one_line("plain") == "plain"
