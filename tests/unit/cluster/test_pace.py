"""Two who bring the same layer: a lease never waits at the pace of what comes ahead of demand, and nobody longer than it wants to."""

import contextlib
import os
import threading

import pytest
from tests.transfers import SOON_S, dialer, publish, serving

from untax.cluster.transfer.fetch import Fetch, Throttle
from untax.cluster.transfer.pace import Wanted
from untax.cluster.transfer.wire import Wires
from untax.core.errors import StageUnavailable


@pytest.fixture
def slow(two, trust):
    """A layer that comes ahead of demand, so slowly that it would take days; begun, and how to share its pace."""
    there, here = two
    layer = publish(there, {f"f{number}": os.urandom(3 << 20) for number in range(6)})
    wanted, wires, begun = Wanted(), Wires(), threading.Event()

    class Slow(Throttle):
        def take(self, size, hurried):
            begun.set()
            super().take(size, hurried)

    with serving(there, trust[0]) as peer:
        patient = Fetch(here, dialer(trust[1]), wires, Slow(10.0), connections=1, wanted=wanted)

        def bring():
            with contextlib.suppress(StageUnavailable):
                patient.layer(layer.id, [peer])

        thread = threading.Thread(target=bring, daemon=True)
        thread.start()
        assert begun.wait(SOON_S)
        yield layer.id, peer, wanted
        wires.stop()
        thread.join(SOON_S)
        assert not thread.is_alive()


def in_a_thread(call):
    caught = []

    def run():
        try:
            caught.append(call())
        except BaseException as exc:
            caught.append(exc)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(SOON_S)
    assert caught, "it still waits"
    return caught[0]


def test_a_lease_does_not_wait_at_the_spreaders_pace(two, trust, slow):
    layer_id, peer, wanted = slow
    urgent = Fetch(two[1], dialer(trust[1]), wanted=wanted)

    assert in_a_thread(lambda: urgent.layer(layer_id, [peer])).id == layer_id


def test_a_wait_for_who_brings_a_layer_can_be_stopped(two, trust, slow):
    """Also when that one is another process, which nobody can hurry."""
    layer_id, peer, _ = slow
    stuck = Fetch(two[1], dialer(trust[1]))
    threading.Timer(0.3, stuck.wires.stop).start()

    assert isinstance(in_a_thread(lambda: stuck.layer(layer_id, [peer])), StageUnavailable)


def test_who_is_patient_hurries_whoever_waited_first():
    wanted, wires = Wanted(), Wires()
    with wanted.by("layer", Wires(), is_patient=False):
        with wanted.by("other", wires, is_patient=True):
            assert not wires.hurried.is_set()
        with wanted.by("layer", wires, is_patient=True):
            assert wires.hurried.is_set()
    with wanted.by("layer", later := Wires(), is_patient=True):
        assert not later.hurried.is_set()
    assert not wanted._waiting
    assert not wanted._patient
