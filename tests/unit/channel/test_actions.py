"""Requests as bytes, mistakes that never leave the caller, and replies that are held to what was asked for."""

import math
import struct

import pytest

from untax.channel import actions, wire
from untax.channel.call import ReadCall
from untax.channel.wire import blob, frame
from untax.core import errors
from untax.core.errors import ProtocolError, UsageError


def finished(how=0, code=0, out=b"", err=b"", dropped=(0, 0), oom=0, pids=0, full=0):
    return struct.pack("<BiQQQQIIBQQ", how, code, 2_000_000, 3, 4, 5, oom, pids, full, *dropped) + blob(out) + blob(err)


def failed(code, number=0, message=b""):
    return struct.pack("<Hi", code, number) + blob(message)


def answered(call, kind, payload):
    assert call.feed(kind, payload)
    return call.result("sbx")


def test_run_is_these_bytes():
    call = actions.run(["ls", "-l"], cwd="/tmp", env={"A": "1", "B": None}, stdin=b"in", timeout_s=2)
    payload = (
        struct.pack("<HIHH", 0, 1 << 20, 0, 0)
        + blob(b"/tmp") + blob(b"")
        + wire.blobs([b"ls", b"-l"]) + wire.blobs([b"A=1", b"B"]) + blob(b"in")
    )  # fmt: skip

    assert call.encode(5) == frame(5, wire.SPAWN, payload, deadline_ms=2000)


def test_a_long_stdin_follows_in_pieces():
    call = actions.run(["cat"], stdin=bytes(3 << 20))

    assert len(call.encode(1)) < 200
    assert sum(map(len, call.body)) == 3 << 20


@pytest.mark.parametrize(
    ("make", "remedy"),
    [
        (lambda: actions.run("ls -l"), "shell()"),
        (lambda: actions.run(b"ls"), "shell()"),
        (lambda: actions.run([]), "first element"),
        (lambda: actions.run([""]), "empty"),
        (lambda: actions.run(["a", 1]), "str or bytes"),
        (lambda: actions.run(["a\0b"]), "NUL"),
        (lambda: actions.run(["a", "\ud800"]), "bytes"),
        (lambda: actions.run(["a", "x" * (128 << 10)]), "stdin"),
        (lambda: actions.run(["a", *["x" * 100_000] * 25]), "file or stdin"),
        (lambda: actions.run(["a"], env={"A=B": "1"}), "'='"),
        (lambda: actions.run(["a"], env={"": "1"}), "not empty"),
        (lambda: actions.run(["a"], env={"A": "x\0"}), "NUL"),
        (lambda: actions.run(["a"], env={"A": 1}), "str or bytes"),
        (lambda: actions.run(["a"], env=["A=1"]), "mapping"),
        (lambda: actions.run(["a"], stdin="text"), "encode()"),
        (lambda: actions.run(["a"], cwd=""), "working directory"),
        (lambda: actions.run(["a"], cap=-1), "cap"),
        (lambda: actions.shell(["ls"]), "run()"),
        (lambda: actions.shell("x" * (128 << 10)), "write()"),
        (lambda: actions.read("a\0b"), "NUL"),
        (lambda: actions.read("x" * 5000), "4095"),
        (lambda: actions.read("x", offset=-1), "offset"),
        (lambda: actions.write("x", "text"), "encode()"),
        (lambda: actions.write("x", b"", mode=0o10000), "mode"),
        (lambda: actions.search(""), "empty"),
        (lambda: actions.search("x", globs="*.py"), "list"),
        (lambda: actions.search("x", how="magic"), "regex"),
        (lambda: actions.edit("x", "", "y"), "write()"),
        (lambda: actions.signal(1, 0), "signal"),
    ],
)
def test_a_mistake_is_refused_with_its_remedy(make, remedy):
    with pytest.raises(UsageError) as caught:
        make()

    assert remedy in str(caught.value)


@pytest.mark.parametrize("timeout_s", [-1, 0, math.nan, math.inf, 1e308, "1", True])
def test_a_timeout_is_a_positive_number_or_none(timeout_s):
    with pytest.raises(UsageError):
        actions.run(["true"], timeout_s=timeout_s)


def test_a_result_tells_everything():
    call = actions.run(["x"])
    assert call.feed(wire.DONE, finished(code=3, out=b"out", err=b"err"))
    result = call.result("sbx", 5_000_000)

    assert (result.exit_code, result.stdout, result.stderr, result.outcome) == (3, b"out", b"err", "exited")
    assert (result.elapsed_s, result.round_trip_s, result.peak_memory_kib) == (0.002, 0.005, 5)


def test_output_that_came_early_goes_first():
    call = actions.run(["x"])
    call.feed(wire.OUT, b"\1head ")
    call.feed(wire.OUT, b"\2err ")
    result = answered(call, wire.DONE, finished(out=b"tail", err=b"tail", dropped=(7, 0)))

    assert (result.stdout, result.stderr) == (b"head tail", b"err tail")
    assert result.truncated
    assert result.dropped_stdout == 7


@pytest.mark.parametrize(
    ("facts", "outcome", "code"),
    [
        ({"how": 1, "code": 9}, "signaled", 137),
        ({"how": 1, "code": 9, "oom": 1}, "oom", 137),
        ({"how": 2}, "timeout", 124),
        ({"how": 3}, "signaled", 137),
        ({"code": 1, "full": 1}, "disk_full", 1),
        ({"code": 1, "pids": 1}, "limit", 1),
    ],
)
def test_outcomes_are_derived_from_the_facts(facts, outcome, code):
    result = answered(actions.run(["x"]), wire.DONE, finished(**facts))

    assert (result.outcome, result.exit_code) == (outcome, code)


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        (wire.DONE, b""),
        (wire.DONE, finished() + b"x"),
        (wire.DONE, finished()[:-1]),
        (wire.DONE, finished(how=4)),
        (wire.DONE, finished(code=256)),
        (wire.DONE, finished(how=1, code=0)),
        (wire.DONE, finished(out=b"x" * 101)),
        (wire.OUT, b""),
        (wire.OUT, b"\1"),
        (wire.OUT, b"\3x"),
        (wire.OUT, b"\1" + b"x" * 101),
        (wire.STARTED, b"\0\0\0\0"),
        (wire.ITEMS, b"\0\0\0\0"),
        (wire.CREDIT, b"\0\1\0\0\0"),
        (wire.ERROR, b"\1"),
        (0x55, b""),
    ],
)
def test_a13_nonsense_in_answer_to_a_command_is_a_protocol_error(kind, payload):
    with pytest.raises(ProtocolError):
        actions.run(["x"], cap=100).feed(kind, payload)


def test_a13_endless_output_is_cut_at_the_cap():
    call = actions.run(["x"], cap=1000)
    with pytest.raises(ProtocolError):
        for _ in range(100):
            call.feed(wire.OUT, b"\1" + b"x" * 100)


def test_a13_a_second_completion_is_nonsense():
    call = actions.ping()
    assert call.feed(wire.DONE, b"")
    with pytest.raises(ProtocolError):
        call.feed(wire.DONE, b"")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, UsageError), (2, errors.NotFound), (3, errors.SpawnFailed), (4, errors.Gone), (5, errors.TooLarge), (6, UsageError),
        (7, ProtocolError), (8, errors.NotRun), (9, errors.ActionTimeout), (10, errors.EditConflict), (11, errors.BackendError),
        (12, errors.NoWorker), (99, ProtocolError),
    ],
)  # fmt: skip
def test_every_error_code_has_its_exception(code, kind):
    with pytest.raises(kind) as caught:
        answered(actions.read("x"), wire.ERROR, failed(code, 2, b"why\x1b[2J\nforged"))

    assert "\x1b" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_refused_call_may_be_asked_again():
    call = actions.run(["x"], user="bob")
    call.encode(1)
    assert call.feed(wire.ERROR, failed(12))
    call.encode(2)

    assert answered(call, wire.DONE, finished()).exit_code == 0


def test_a_read_is_held_to_its_limit():
    call = actions.read("x", limit=4)
    call.feed(wire.OUT, b"\1ab")
    assert answered(call, wire.DONE, struct.pack("<QIq", 9, 0o100644, 5) + blob(b"cd")) == b"abcd"

    call = actions.read("x", limit=4)
    with pytest.raises(ProtocolError):
        call.feed(wire.OUT, b"\1abcde")


@pytest.mark.parametrize("make", [lambda: actions.read("x", limit=5000), lambda: actions.run(["x"], cap=5000)], ids=["read", "run"])
def test_many_small_parts_take_no_more_than_their_bytes(make):
    """A cell that sends a byte at a time must not make the host hold an object for each."""
    call = make()
    for _ in range(4000):
        call.feed(wire.OUT, b"\1x")
    parts = call._parts if isinstance(call, ReadCall) else call._heads[0]

    assert [bytes(part) for part in parts] == [b"x" * 4000]


def entry(name, kind=b"f"):
    return blob(name) + kind + struct.pack("<IIIQq", 0o100644, 1, 2, 3, 4) + blob(b"")


def test_entries_come_early_and_late():
    call = actions.list_dir("d", most=3)
    call.feed(wire.ITEMS, struct.pack("<I", 1) + entry(b"a\xff"))
    found = answered(call, wire.DONE, struct.pack("<BI", 0, 1) + entry(b"b", b"d"))

    assert [(e.name, e.type, e.mode) for e in found] == [("a\udcff", "file", 0o644), ("b", "directory", 0o644)]


def test_more_entries_than_asked_for_are_nonsense():
    call = actions.list_dir("d", most=1)
    with pytest.raises(ProtocolError):
        call.feed(wire.ITEMS, struct.pack("<I", 2) + entry(b"a") + entry(b"b"))
    with pytest.raises(ProtocolError):
        actions.list_dir("d").feed(wire.ITEMS, struct.pack("<I", 1_000_000) + entry(b"a"))
    with pytest.raises(ProtocolError):
        actions.list_dir("d").feed(wire.ITEMS, struct.pack("<I", 1) + entry(b"a", b"!"))


def test_a_search_gives_matches_and_counts():
    match = blob(b"a.py") + struct.pack("<IIB", 3, 5, 1) + blob(b"f")
    found = answered(actions.search("f", how="symbol"), wire.DONE, struct.pack("<QQBI", 9, 1, 1, 1) + match)

    assert (found.files, found.skipped, found.more) == (9, 1, True)
    assert (found.matches[0].path, found.matches[0].line, found.matches[0].kind) == ("a.py", 3, "function")


def test_credit_beyond_the_window_is_nonsense():
    call = actions.write("x", bytes(2 << 20))
    call.window -= 100
    call.feed(wire.CREDIT, b"\0" + struct.pack("<I", 100))
    with pytest.raises(ProtocolError):
        call.feed(wire.CREDIT, b"\0" + struct.pack("<I", 1))


def test_a_session_says_whether_its_shell_lives():
    call = actions.session_run(1, "exit")
    answered(call, wire.DONE, finished() + b"\0")
    assert not call.alive

    with pytest.raises(ProtocolError):
        actions.session_run(1, "x").feed(wire.DONE, finished() + b"\7")
