"""Patience with what passes, and its bounds: pure but for the waiting, which is noted and not done."""

import random
from email.utils import formatdate
from time import time

import pytest

from untax.core.errors import StageFailed, StageUnavailable
from untax.layers.sources import Stopped
from untax.layers.sources._http import Halt, Patience, Transient, Web, _asked_wait, persist, printable, shown

PATIENCE = Patience(attempts=5, most_attempts=12, first_wait_s=1, longest_wait_s=6, longest_asked_wait_s=60)


class Waits(Halt):
    """Notes how long it would have slept."""

    def __init__(self):
        super().__init__()
        self.waits = []

    def sleep(self, seconds):
        self.check()
        self.waits.append(seconds)


def failing(*failures):
    left = list(failures)

    def attempt():
        if left:
            raise left.pop(0)
        return "done"

    return attempt


def test_waits_grow_to_a_bound_and_are_drawn_at_random():
    random.seed(1)
    seen = []
    for _ in range(200):
        halt = Waits()
        assert persist("x", PATIENCE, halt, failing(*[Transient("no")] * 4)) == "done"
        seen.append(halt.waits)
    most = [max(waits) for waits in zip(*seen, strict=True)]
    assert all(low < high <= bound for low, high, bound in zip([0.9, 1.8, 3.6, 5.4], most, [1, 2, 4, 6], strict=True))
    assert min(waits[3] for waits in seen) < 0.5, "those who failed together do not come back together"


def test_attempts_without_progress_are_bounded():
    halt = Waits()
    with pytest.raises(StageUnavailable, match=r"x: no \(tried 5 times\)") as told:
        persist("x", PATIENCE, halt, failing(*[Transient("no")] * 99))
    assert len(halt.waits) == 4
    assert told.value.retryable


def test_progress_earns_patience_but_not_without_end():
    """A server that cuts every connection after a few bytes is not followed for ever."""
    halt = Waits()
    with pytest.raises(StageUnavailable, match="tried 12 times"):
        persist("x", PATIENCE, halt, failing(*[Transient("cut", progressed=True)] * 99))
    assert max(halt.waits) <= 1, "each wait is as after a first failure"


def test_a_server_that_says_how_long_to_wait_is_obeyed_within_bounds():
    halt = Waits()
    assert persist("x", PATIENCE, halt, failing(Transient("busy", wait_s=30))) == "done"
    assert 30 <= halt.waits[0] <= 31
    with pytest.raises(StageUnavailable, match="asks to wait 61 s"):
        persist("x", PATIENCE, halt, failing(Transient("busy", wait_s=61)))


def test_what_does_not_pass_is_not_tried_again():
    halt = Waits()
    with pytest.raises(StageFailed):
        persist("x", PATIENCE, halt, failing(StageFailed("image", "refused")))
    assert halt.waits == []


def test_nobody_waiting_ends_it():
    halt = Waits()

    def attempt():
        halt.set()
        raise Transient("cut")

    with pytest.raises(Stopped):
        persist("x", PATIENCE, halt, attempt)


def test_what_was_handed_to_a_halt_is_ended_once_and_not_after_it_was_dropped():
    halt, ended = Halt(), []
    kept, dropped = (lambda: ended.append("kept")), (lambda: ended.append("dropped"))
    halt.hold(kept)
    halt.hold(dropped)
    halt.drop(dropped)
    halt.set()
    assert ended == ["kept"]
    with pytest.raises(Stopped):
        halt.hold(kept)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, None), ("", None), ("0", 0), ("120", 120), ("-1", None), ("soon", None), ("1e9", None), ("9" * 400, 999_999_999)],
)
def test_retry_after_as_a_number(text, seconds):
    assert _asked_wait(text) == seconds


def test_retry_after_as_a_date():
    assert 28 <= _asked_wait(formatdate(time() + 30, usegmt=True)) <= 30
    assert _asked_wait(formatdate(time() - 30, usegmt=True)) == 0


def test_what_is_shown_of_a_url_has_no_secret_and_no_command_for_a_terminal():
    assert shown("https://me:secret@host.test/path?signature=secret#x") == "https://host.test/path"
    assert shown("https://host.test/\x1b[2J") == "https://host.test/�[2J"
    assert len(shown("https://host.test/" + "a" * 1000)) == 200
    assert printable("a\nb\x07", 10) == "a�b�"


@pytest.mark.parametrize(
    ("home", "is_plain", "url", "is_allowed"),
    [
        ("registry.test", False, "https://cdn.test/x", True),
        ("registry.test", False, "http://registry.test/x", False),
        ("registry.test", False, "http://127.0.0.1/x", False),
        ("registry.test", True, "http://registry.test:8080/x", True),
        ("registry.test", True, "http://cdn.test/x", False),
        ("registry.test", True, "http://127.0.0.1/x", False),
        ("127.0.0.1", True, "http://127.0.0.2/x", True),
        ("127.0.0.1", True, "http://[::1]/x", True),
        ("[::1]", True, "http://[::1]:5000/x", True),
        ("127.0.0.1", True, "http://cdn.test/x", False),
        ("127.0.0.1", False, "http://127.0.0.1/x", False),
        ("registry.test", False, "file:///etc/passwd", False),
        ("registry.test", False, "https://me@cdn.test/", False),
        ("registry.test", False, "https:///x", False),
        ("registry.test", False, "https://cdn.test:99999/", False),
    ],
)
def test_where_a_registry_may_send_us(home, is_plain, url, is_allowed):
    web = Web(home, is_plain=is_plain, patience=PATIENCE, halt=Halt())
    if is_allowed:
        assert web._origin(url)[0] in ("http", "https")
    else:
        with pytest.raises(StageFailed):
            web._origin(url)
