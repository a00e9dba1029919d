"""What is wanted of a whole fleet, over nodes that come and go."""

import asyncio

import pytest

import untax
from untax.cluster.warming import Warming

SPEC, OTHER = untax.EnvSpec(), untax.EnvSpec(setup=("true",))


class Node:
    def __init__(self, label):
        self.label = label
        self.wants = {}
        self.is_slow = asyncio.Event()
        self.is_slow.set()
        self.trouble = None

    async def warm(self, spec, n):
        await self.is_slow.wait()
        if self.trouble is not None:
            raise self.trouble
        self.wants[spec] = n


@pytest.fixture
def nodes():
    return [Node(name) for name in "abc"]


@pytest.fixture
async def warming(nodes):
    warming = Warming(lambda: list(nodes))
    yield warming
    await warming.aclose()
    assert not warming._spreading


async def spread(warming):
    warming.changed()
    while warming._spreading:
        await asyncio.wait(warming._spreading)


def wanted(nodes, spec=SPEC):
    return [node.wants.get(spec) for node in nodes]


async def test_it_is_spread_evenly_and_anew_when_a_node_joins_or_leaves(nodes, warming):
    await warming.warm(SPEC, 8)
    assert wanted(nodes) == [3, 3, 2]
    nodes.append(Node("d"))
    await spread(warming)
    assert wanted(nodes) == [2, 2, 2, 2]
    del nodes[0]
    await spread(warming)
    assert wanted(nodes) == [3, 3, 2]


async def test_while_the_nodes_are_the_same_nothing_is_asked_again(nodes, warming):
    await warming.warm(SPEC, 3)
    for node in nodes:
        node.wants.clear()
    await spread(warming)
    assert wanted(nodes) == [None, None, None]


async def test_what_is_no_longer_wanted_is_not_spread(nodes, warming):
    await warming.warm(SPEC, 3)
    await warming.warm(OTHER, 3)
    await warming.warm(SPEC, 0)
    nodes.append(Node("d"))
    await spread(warming)
    assert wanted(nodes) == [0, 0, 0, None]
    assert wanted(nodes, OTHER) == [1, 1, 1, 0]


async def test_a_node_that_joins_while_one_waits_has_its_share_too(nodes, warming):
    await warming.warm(OTHER, 3)
    nodes[0].is_slow.clear()
    waiting = asyncio.ensure_future(warming.warm(SPEC, 4))
    await asyncio.sleep(0)
    nodes.append(Node("d"))
    warming.changed()
    nodes[0].is_slow.set()
    await waiting
    await spread(warming)
    assert wanted(nodes) == [1, 1, 1, 1]


async def test_what_no_node_can_is_raised_with_a_nodes_name_and_what_was_wanted_before_holds(nodes, warming):
    await warming.warm(SPEC, 3)
    for node in nodes:
        node.trouble = untax.CreateError("", "it cannot")
    with pytest.raises(untax.CreateError, match="node a: it cannot"):
        await warming.warm(SPEC, 6)
    for node in nodes:
        node.trouble = None
    nodes.append(Node("d"))
    await spread(warming)
    assert wanted(nodes) == [1, 1, 1, 0]


async def test_the_share_of_a_node_that_cannot_goes_to_the_others(nodes, warming, caplog):
    nodes[1].trouble = untax.StageUnavailable("store", "its disk is full")
    await warming.warm(SPEC, 6)
    assert wanted(nodes) == [3, None, 3]
    assert "node b keeps none" in caplog.text and "its disk is full" in caplog.text


async def test_a_failure_that_is_no_nodes_word_is_raised_as_it_is(nodes, warming):
    nodes[1].trouble = RuntimeError("a bug")
    with pytest.raises(RuntimeError, match="a bug"):
        await warming.warm(SPEC, 6)


async def test_a_node_that_fails_beside_others_leaves_them_their_share(nodes, warming, caplog):
    await warming.warm(SPEC, 4)
    nodes.append(Node("d"))
    nodes[3].trouble = untax.BackendError("", "it is gone")
    await spread(warming)
    assert wanted(nodes) == [1, 1, 1, None]
    assert "node d keeps none" in caplog.text


async def test_without_any_node_it_waits_for_one(nodes, warming):
    await warming.warm(SPEC, 2)
    gone = nodes[:]
    nodes.clear()
    await spread(warming)
    nodes.append(gone[0])
    await spread(warming)
    assert wanted(nodes) == [2]


async def test_that_none_are_wanted_has_to_reach_every_node_or_is_raised(nodes, warming):
    await warming.warm(SPEC, 6)
    nodes[1].trouble = untax.BackendError("", "it does not answer")
    with pytest.raises(untax.BackendError, match="node b: it does not answer"):
        await warming.warm(SPEC, 0)
    assert wanted(nodes) == [0, 2, 0]
    nodes.append(Node("d"))
    await spread(warming)
    assert wanted(nodes) == [0, 2, 0, None], "and nothing is spread again"
