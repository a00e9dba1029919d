"""Ours in E2B's words."""

import pytest

from untax.channel.replies import Entry, Event
from untax.core.result import CommandResult
from untax.service.e2b.models import Accounts, end_event, entry_info, events_of, moment, resolved


@pytest.mark.parametrize(
    ("path", "whole"),
    [
        ("a.txt", "/home/user/a.txt"),
        ("~/a", "/home/user/a"),
        ("~", "/home/user"),
        ("/etc//x/../y", "/etc/y"),
        ("", "/home/user"),
        ("..", "/home"),
        ("//x", "/x"),
    ],
)
def test_paths_begin_at_the_users_home(path, whole):
    assert resolved(path, "/home/user") == whole


def test_accounts_are_read_as_far_as_they_make_sense():
    accounts = Accounts.parse(
        b"root:x:0:0:root:/root:/bin/bash\nbroken\nx:y:z\nuser:x:1000:1000::/home/user:\n\xff:x:5:5::/:/\n", b"root:x:0:\nuser:x:1000:\n"
    )
    assert accounts.users["user"].home == "/home/user"
    assert (accounts.owner(1000), accounts.owner(77), accounts.group(0)) == ("user", "77", "root")


def test_an_entry_has_all_that_the_sdk_shows():
    entry = Entry("x", "file", 0o644, 1000, 1000, 5, 1_500_000_000_000_000_000, None)
    info = entry_info(entry, "/home/user/x", Accounts.parse(b"user:x:1000:1000::/home/user:\n", b"user:x:1000:\n"), metadata={"k": "v"})
    assert info == {
        "name": "x", "type": "FILE_TYPE_FILE", "path": "/home/user/x", "size": "5", "mode": 0o644, "permissions": "-rw-r--r--",
        "owner": "user", "group": "user", "modifiedTime": "2017-07-14T02:40:00.000000Z", "metadata": {"k": "v"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("result", "end"),
    [
        (CommandResult(0), {"exitCode": 0, "exited": True, "status": "exit status 0"}),
        (CommandResult(3), {"exitCode": 3, "exited": True, "status": "exit status 3", "error": "exit status 3"}),
        (CommandResult(137, outcome="signaled"), {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed"}),
        (
            CommandResult(137, outcome="oom"),
            {"exitCode": -1, "exited": False, "status": "signal: killed", "error": "signal: killed (out of memory)"},
        ),
        (
            CommandResult(1, outcome="disk_full"),
            {"exitCode": 1, "exited": True, "status": "exit status 1", "error": "exit status 1 (disk full)"},
        ),
    ],
)
def test_a_process_ends_in_the_words_of_go(result, end):
    assert end_event(result) == end


def test_what_was_moved_goes_and_appears():
    assert events_of(Event("moved", "a", "b")) == [("a", "EVENT_TYPE_RENAME"), ("b", "EVENT_TYPE_CREATE")]
    assert events_of(Event("overflow", "", None)) == []


def test_times_are_in_utc():
    assert moment(0.5) == "1970-01-01T00:00:00.500000Z"
