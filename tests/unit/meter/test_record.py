"""The file of records: what is written is read back, and what is not one run of this version is refused with words."""

import json

import pytest

from untax.core.errors import UsageError
from untax.meter.journal import Journal
from untax.meter.record import (
    Batch,
    Case,
    End,
    Gap,
    Reader,
    RecordError,
    Resume,
    Run,
    Trial,
    from_line,
    no_parts,
    read,
    to_line,
)

CASE = Case("a", tier="T2", length=150, contention="disk")
RUN = Run("r1", "2026-01-01T00:00:00Z", 7, {"trials": 3}, {"kernel": "6"}, 200, "untax bench")


def trial(number=0, **fields):
    parts = {**no_parts(), "create": 5, "action": 20}
    return Trial(**{
        "run": "r1", "case": CASE, "trial": number, "order": number, "warmup": False, "started_at": "2026-01-01T00:00:00Z",
        "outcome": "ok", "parts_ns": parts, "total_ns": 25, "metrics_ns": {"first_command": 5}, **fields,
    })  # fmt: skip


def file_of(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else to_line(line) for line in lines))
    return path


@pytest.mark.parametrize(
    "record",
    [
        RUN,
        trial(error={"type": "SandboxLost", "message": "gone ✂"}, outcome="infra", attempts=2, wasted_ns=9, substrate_detail={"x": [1]}),
        Batch("r1", CASE, 1, 2, False, "2026-01-01T00:00:00Z", 8, 1, 99),
        Gap("r1", "2026-01-01T00:00:00Z", "a", "it vanished", CASE, 3),
        Gap("r1", "2026-01-01T00:00:00Z", "a", "it vanished"),
        Resume("r1", "2026-01-01T00:00:00Z", {}, "untax bench --resume x"),
        End("r1", "2026-01-01T00:00:00Z", 3, 1, 99, {"load": [0.1]}),
    ],
)
def test_a_record_is_read_back_as_it_was(record):
    line = to_line(record)

    assert line.endswith(b"\n") and line.count(b"\n") == 1
    assert from_line(line) == record


def test_what_a_worker_was_busy_with_includes_the_failed_attempts():
    parts = {**no_parts(), "queue": 1, "dispatch": 2, "create": 4}
    found = trial(parts_ns=parts, total_ns=7, wasted_ns=100, control_plane_ns=3)

    assert (found.worker_ns, found.orchestration_ns) == (107, 6)


def test_equal_cases_of_a_file_are_one_object(tmp_path):
    trials = [one for one in read(file_of(tmp_path / "f", RUN, trial(0), trial(1))) if isinstance(one, Trial)]

    assert trials[0].case is trials[1].case


def test_a_last_line_that_was_cut_off_is_left_out_and_said(tmp_path):
    path = file_of(tmp_path / "f", RUN, trial(0), to_line(trial(1))[:-20])

    with Reader(path) as reader:
        found = list(reader)
    assert [type(one) for one in found] == [Run, Trial]
    assert reader.truncated


@pytest.mark.parametrize(
    ("lines", "word"),
    [
        ((), "empty"),
        ((to_line(RUN)[:30],), "cut off"),
        ((trial(),), "first line"),
        ((RUN, b"not json\n"), "line 2: not JSON"),
        ((RUN, b"[1]\n"), "object"),
        ((RUN, to_line(trial()).replace(b'"v":1', b'"v":2')), "version 2"),
        ((to_line(RUN).replace(b'"v":1', b'"v":99'),), "version 99"),
        ((RUN, b'{"hello": 1}\n'), "no version"),
        ((RUN, b'{"v":1,"kind":"dream"}\n'), "unknown kind"),
        ((RUN, trial(run="r2")), "run r2"),
        ((RUN, trial(), Run("r2", "x", 1, {}, {}, 1)), "run r2"),
        ((RUN, trial(total_ns=26)), "25 ns"),
        ((RUN, trial(outcome="splendid")), "outcome"),
        ((RUN, trial(parts_ns={"create": 25})), "parts"),
        ((RUN, trial(case=Case("a", contention="noise"))), "contention"),
        ((RUN, to_line(trial()).replace(b'"trial":0,', b"")), "missing"),
    ],
)
def test_what_is_not_one_run_of_this_version_is_refused_with_words(tmp_path, lines, word):
    path = file_of(tmp_path / "f", *lines)

    with pytest.raises(RecordError, match=word) as caught:
        list(read(path))
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, UsageError)


def test_keys_of_a_later_writer_are_passed_over():
    document = {**json.loads(to_line(trial())), "mood": "good"}

    assert from_line(json.dumps(document)) == trial()


# ---- writing ----


def test_a_run_never_writes_over_another(tmp_path):
    Journal.create(tmp_path / "f", RUN).close()

    with pytest.raises(RecordError, match="--resume"):
        Journal.create(tmp_path / "f", RUN)


def test_only_one_writes_a_file_at_a_time(tmp_path):
    with Journal.create(tmp_path / "f", RUN), pytest.raises(RecordError, match="another run"):
        Journal.resume(tmp_path / "f")


def test_going_on_removes_the_half_line_and_nothing_else(tmp_path):
    path = file_of(tmp_path / "f", RUN, trial(0), to_line(trial(1))[:40])

    with Journal.resume(path) as journal:
        journal.append(trial(1))
        journal.sync()

    assert [one.trial for one in read(path) if isinstance(one, Trial)] == [0, 1]
    assert [entry.name for entry in tmp_path.iterdir()] == ["f"]


def test_a_damaged_file_is_not_gone_on_with(tmp_path):
    path = file_of(tmp_path / "f", RUN, b"nonsense\n", trial(0))
    before = path.read_bytes()

    with pytest.raises(RecordError):
        Journal.resume(path)
    assert path.read_bytes() == before


def test_a_directory_that_cannot_be_made_is_said_before_anything_is_measured():
    from pathlib import Path

    with pytest.raises(RecordError, match="--out"):
        Journal.create(Path("/dev/null/results/f"), RUN)
