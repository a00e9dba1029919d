"""Which leases were taken, in memory that two processes have: it outlives the one that wrote it, and cannot be used against the one that reads."""

import os

import pytest

from untax.remote.marks import SLOTS, Marks, Slots


@pytest.fixture
def slots():
    made = Slots()
    yield made
    made.close()


def test_what_a_client_takes_its_server_sees(slots):
    first, second = slots.give(), slots.give()
    marks = Marks(slots.fd)
    assert (slots.is_taken(first), slots.is_taken(second)) == (False, False)
    marks.take(second)
    assert (slots.is_taken(first), slots.is_taken(second)) == (False, True)
    marks.close()


def test_x33_what_was_taken_is_known_though_its_client_was_killed_the_next_moment(slots):
    slot = slots.give()
    child = os.fork()
    if child == 0:
        Marks(slots.fd).take(slot)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert slots.is_taken(slot)


def test_a_slot_that_is_given_again_is_nobodys(slots):
    slot = slots.give()
    Marks(slots.fd).take(slot)
    slots.free(slot)
    while (again := slots.give()) != slot:
        assert again is not None
    assert not slots.is_taken(slot)


def test_a_mark_that_comes_late_is_on_no_other_lease(slots):
    """A client that stood still while its server took back what it had in hand."""
    late = slots.give()
    slots.free(late)
    following = [slots.give() for _ in range(100)]
    Marks(slots.fd).take(late)
    assert not any(map(slots.is_taken, following))


def test_there_are_so_many_and_no_more(slots):
    given = [slots.give() for _ in range(SLOTS)]
    assert len(set(given)) == SLOTS
    assert slots.give() is None
    slots.free(given[7])
    assert slots.give() == given[7]


@pytest.mark.parametrize("size", [0, SLOTS // 2, 2 * SLOTS])
def test_a_client_cannot_take_the_memory_away_from_under_its_server(slots, size):
    """The server would be ended by SIGBUS at its next look."""
    with pytest.raises(PermissionError):
        os.ftruncate(slots.fd, size)
    assert not slots.is_taken(slots.give())


def test_what_is_not_such_a_page_is_refused(tmp_path):
    with open(tmp_path / "short", "wb+") as file, pytest.raises(ValueError, match="length"):
        Marks(file.fileno())
