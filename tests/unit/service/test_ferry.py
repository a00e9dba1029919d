"""The agent's side of the ferry: what it does when that does not read, is gone, or is asked for too early."""

import socket

import pytest

from untax.server.owners import Owner
from untax.service.ferry import Ferry
from untax.substrates._host import cell_missing_reason

if reason := cell_missing_reason():
    pytest.skip(f"cell: {reason}", allow_module_level=True)


@pytest.fixture
async def ferry():
    ferry = Ferry()
    yield ferry
    await ferry.aclose()


@pytest.fixture
def pair():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as ours:
        its, _ = listener.accept()
        with its:
            yield ours, its


async def test_who_never_connected_is_carried_by_the_agent(ferry, pair):
    """Nothing is started for it."""
    assert not ferry.carry(Owner("x"), 1, pair[0].fileno())
    ferry.keep(Owner("x"), [])
    assert ferry._process is None


async def test_a_client_that_has_not_greeted_is_not_carried_for(ferry, pair):
    owner = Owner("x")
    ferry.connect(owner, pair[1], bytes(64))
    assert owner.id in ferry._numbers and not ferry.carry(owner, 1, pair[0].fileno())


async def test_a_ferry_that_does_not_read_costs_an_action_s_time_and_never_the_agent_s(ferry, pair):
    """A word that has to be said and cannot be is its end: two would read from one sandbox otherwise."""
    owner = Owner("x")
    ferry.connect(owner, pair[1], bytes(64))
    ferry._greeted.add(ferry._numbers[owner.id])
    process = ferry._process
    process.send_signal(19)
    for lane in range(100_000):
        if not ferry.carry(owner, lane, pair[0].fileno()):
            break
    else:
        pytest.fail("it took everything")
    assert process.poll() is None and ferry._process is process
    ferry.keep(owner, [1])
    assert process.poll() == -9 and not ferry.carry(owner, 1, pair[0].fileno())
    ferry.connect(owner, pair[1], bytes(64))  # another one
    assert ferry._process is not process and ferry._process.poll() is None


async def test_an_owner_that_ends_is_forgotten_once_however_many_ferries_it_had(ferry, pair):
    owner = Owner("x")
    ferry.connect(owner, pair[1], bytes(64))
    ferry._lose("for the test")
    ferry.connect(owner, pair[1], bytes(64))
    for call in owner.at_end:
        call()
    assert not ferry._numbers and ferry._process is not None


async def test_a_closed_one_starts_nothing(ferry, pair):
    await ferry.aclose()
    with pytest.raises(BrokenPipeError):
        ferry.connect(Owner("x"), pair[1], bytes(64))
