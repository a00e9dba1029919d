"""A layer comes from whoever says first that it has it, and over several connections, so that nobody waits for what is slow."""

import concurrent.futures
import os
import threading

import pytest
from tests.transfers import SOON_S, Node, dialer, publish, serving

from untax.cluster.transfer import errand as errand_module
from untax.cluster.transfer.errand import Errand, kind_of
from untax.cluster.transfer.fetch import _AHEAD, CONNECTIONS, Fetch
from untax.cluster.transfer.outgoing import Outgoing
from untax.cluster.transfer.plan import CHUNK_BYTES
from untax.layers.store import StageRecord

MANY = 4 * CONNECTIONS  # chunks


def in_chunks(store):
    return publish(store, {"large": os.urandom(MANY * CHUNK_BYTES)})


@pytest.fixture
def asking(tmp_path, trust):
    """A node that wants the stage `key`."""
    node = Node("node", tmp_path, trust)
    errand = Errand(node.transfer, "key", "repo", lambda *_: None)
    yield errand
    errand.left()
    node.close()


class Holders:
    """Two nodes that have the stage `key`; `slow` says so once it may."""

    def __init__(self, store):
        self.layer = in_chunks(store)
        self.said = {"record": StageRecord("key", "repo", None, (self.layer.id,)).to_json(), "kind": kind_of(store)}
        self.outgoing = {name: Outgoing(store, self.layer.id) for name in ("slow", "quick")}
        self.asked, self.may_say = threading.Event(), threading.Event()

    def serving(self, store, context, name):
        return serving(store, context, node=name, ops={"stage": getattr(self, name)}, prepared={self.layer.id: self.outgoing[name]})

    def quick(self, session, _said):
        assert self.asked.wait(SOON_S), "both are asked at once"
        session.wire.send(self.said)

    def slow(self, session, _said):
        self.asked.set()
        if self.may_say.wait(SOON_S):
            session.wire.send(self.said)


@pytest.fixture
def holders(two):
    found = Holders(two[0])
    yield found
    found.may_say.set()


def test_the_first_to_answer_comes_first_and_the_others_are_there_should_it_fail(two, trust, asking, holders, monkeypatch):
    """In whatever order they were asked."""
    real = concurrent.futures.wait
    looks = []

    def wait(*args):
        looks.append(args)
        if len(looks) > 1:  # the quick one's answer has been taken
            holders.may_say.set()
        return real(*args)

    monkeypatch.setattr(concurrent.futures, "wait", wait)
    monkeypatch.setattr(errand_module, "_GRACE_S", SOON_S)
    monkeypatch.setattr(errand_module, "_ASKED_S", SOON_S)
    with holders.serving(two[0], trust[0], "slow") as slow, holders.serving(two[0], trust[0], "quick") as quick:
        assert [one.peer.node for one in asking.look([slow, quick])] == ["quick", "slow"]


def test_a_layer_comes_from_the_quick_holder_while_the_slow_one_has_not_answered(two, trust, asking, holders, monkeypatch):
    monkeypatch.setattr(errand_module, "_ASKED_S", SOON_S)  # nobody is given up
    gave = []
    real = Outgoing.send_chunk
    monkeypatch.setattr(Outgoing, "send_chunk", lambda self, wire, number: (gave.append(self), real(self, wire, number))[1])
    with holders.serving(two[0], trust[0], "slow") as slow, holders.serving(two[0], trust[0], "quick") as quick:
        record = asking.bring(asking.look([slow, quick]))
        assert asking.reasons == [], "it was not waited for until it was given up"
        holders.may_say.set()

    assert record.adds == (holders.layer.id,)
    assert len(gave) == MANY and set(gave) == {holders.outgoing["quick"]}
    asking._transfer.store.verify(holders.layer.id)


def test_the_chunks_of_one_layer_come_over_several_connections_at_once(two, trust, monkeypatch):
    """None of them is given its first before all are there."""
    there, here = two
    layer = in_chunks(there)
    real = Outgoing.send_chunk
    wires, guard, together = set(), threading.Lock(), threading.Barrier(CONNECTIONS)

    def send(self, wire, number):
        with guard:
            is_first = wire not in wires
            wires.add(wire)
        if is_first:
            together.wait(SOON_S)
        real(self, wire, number)

    monkeypatch.setattr(Outgoing, "send_chunk", send)
    with serving(there, trust[0]) as peer:
        Fetch(here, dialer(trust[1])).layer(layer.id, [peer])

    assert len(wires) == CONNECTIONS
    here.verify(layer.id)


def test_one_slow_connection_holds_up_no_chunk_but_those_that_it_was_asked_for(two, trust, monkeypatch):
    there, here = two
    layer = in_chunks(there)
    real = Outgoing.send_chunk
    slow, guard, others, all_others = [], threading.Lock(), [], threading.Event()

    def send(self, wire, number):
        with guard:
            slow.extend([wire] * (not slow))
        if wire is slow[0]:
            assert all_others.wait(SOON_S)
        else:
            others.append(number)
            if len(others) == MANY - _AHEAD:
                all_others.set()
        real(self, wire, number)

    monkeypatch.setattr(Outgoing, "send_chunk", send)
    with serving(there, trust[0]) as peer:
        Fetch(here, dialer(trust[1])).layer(layer.id, [peer])

    assert len(set(others)) == MANY - _AHEAD
    here.verify(layer.id)
