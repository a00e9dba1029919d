"""How the cell's facts about a command become one of the six outcomes that belong to the workload."""

import pytest

from untax.core.errors import CommandFailed
from untax.core.result import CommandResult, derive_outcome


def derive(**facts):
    plain = {"signaled": False, "timed_out": False, "code": 0, "oom_kills": 0, "pids_refused": 0, "disk_full": False}
    return derive_outcome(**{**plain, **facts})


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        ({}, (0, "exited", None)),
        ({"code": 3}, (3, "exited", None)),
        ({"signaled": True, "code": 9}, (137, "signaled", None)),
        ({"signaled": True, "code": 9, "oom_kills": 1}, (137, "oom", None)),
        ({"code": 137, "oom_kills": 1}, (137, "oom", None)),
        ({"code": 0, "oom_kills": 1}, (0, "exited", None)),
        ({"signaled": True, "code": 15, "oom_kills": 1}, (143, "signaled", None)),
        ({"signaled": True, "code": 25}, (153, "limit", "fsize")),
        ({"signaled": True, "code": 24}, (152, "limit", "cpu")),
        ({"code": 1, "disk_full": True}, (1, "disk_full", None)),
        ({"code": 0, "disk_full": True}, (0, "exited", None)),
        ({"code": 254, "pids_refused": 7}, (254, "limit", "pids")),
        ({"code": 0, "pids_refused": 7}, (0, "exited", "pids")),
        ({"timed_out": True, "code": 9, "oom_kills": 2}, (124, "timeout", None)),
        ({"timed_out": True, "pids_refused": 2}, (124, "timeout", "pids")),
    ],
)
def test_a_limit_is_blamed_only_for_what_it_did(facts, expected):
    assert derive(**facts) == expected


def test_a_checked_success_is_returned():
    result = CommandResult(0, b"x")

    assert result.check() is result


@pytest.mark.parametrize("result", [CommandResult(1), CommandResult(124, outcome="timeout"), CommandResult(0, outcome="oom")])
def test_a_checked_failure_is_raised(result):
    with pytest.raises(CommandFailed) as caught:
        result.check()

    assert caught.value.result is result


def test_a_summary_is_one_printable_line():
    """What a workload printed cannot forge a line of a log or drive a terminal."""
    text = CommandResult(2, stderr=b"one\n\x1b[2J\xffgone\n").summary()

    assert text == "exit code 2: \\x1b[2J\\ufffdgone"


def test_text_is_decoded_late_and_truncation_is_counted():
    result = CommandResult(0, b"\xc3\x28\xff", dropped_stderr=5)

    assert result.text == "�(�"
    assert result.truncated
    assert not CommandResult(0).truncated
