"""How many nodes a fleet asks for, which it lets go, and in what words Ray is told: without Ray."""

import asyncio
import math
from dataclasses import dataclass, field

import pytest

import untax
from untax.cluster.gauge import _CALM_S, TELL_S, Gauge
from untax.cluster.scaler import Scaler
from untax.cluster.scaling import Load, Scaling, bundles, missing
from untax.testing import FakeClock

WORKER = {"CPU": 4.0, "memory": 1e9, "node:10.0.0.2": 1.0}
HEAD = {"CPU": 16.0, "node:__internal_head__": 1.0}


# ---- what is lacking ----


@pytest.mark.parametrize(
    ("view", "load"),
    [
        ({}, Load(0, 0, 0, math.inf)),
        ({"leased": 3, "free_sandboxes": 5, "free_mib": None, "most_mib": None}, Load(3, 0, 0, 5)),
        ({"leased": 8, "waiting": 3, "free_sandboxes": -3, "free_mib": None}, Load(8, 3, 3, 0)),
        ({"leased": 8, "waiting": 3, "free_sandboxes": -1, "free_mib": None}, Load(8, 3, 1, 0)),  # two of them are being started
        ({"leased": 4, "waiting": 2, "free_sandboxes": 90, "free_mib": -512.0, "most_mib": 2048.0}, Load(4, 2, 2, 0)),
        ({"leased": 2, "waiting": 0, "free_sandboxes": 98, "free_mib": 1024.0, "most_mib": 2048.0}, Load(2, 0, 0, 2)),
        ({"leased": 0, "waiting": 0, "free_sandboxes": 98, "free_mib": 2048.0, "most_mib": 2048.0}, Load(0, 0, 0, 98)),
    ],
)
def test_a_nodes_load_is_read_from_its_view(view, load):
    assert Load.of_view(view) == load


@pytest.mark.parametrize(
    ("loads", "more"),
    [
        ([], 0),
        ([Load(8, 0, 0, 0), Load(8, 0, 0, 0)], 0),  # full, and nobody waits
        ([Load(8, 1, 1), Load(8, 0)], 1),
        ([Load(8, 8, 8), Load(8, 9, 9)], 3),
        ([Load(8, 4, 4), Load(2, 0, 0, spare=6)], 0),  # they will go there
        ([Load(8, 10, 10), Load(2, 0, 0, spare=6)], 1),
        ([Load(0, 2, 2)], 2),  # all of its room is being made
        ([Load(8, 4, 4), Load(0, 0, 0, spare=math.inf)], 0),
    ],
)
def test_so_many_nodes_are_missing_as_those_would_fill_who_wait(loads, more):
    assert missing(loads) == more


def test_ray_is_told_a_size_in_which_no_node_that_is_there_has_room_for_one_that_is_not():
    present = [HEAD, WORKER, {"CPU": 8.0}, {"GPU": 1.0}]
    asked = bundles(present, 2, Scaling(), workers=present[1:])
    assert asked == [{"CPU": 16.0}, {"CPU": 4.0}, {"CPU": 8.0}, {"CPU": 4.0}, {"CPU": 4.0}]
    # Of nodes that nobody has seen yet, the first shows how large they are.
    assert bundles([HEAD], 3, Scaling(), workers=[]) == [{"CPU": 16.0}] + [{"CPU": 1.0}] * 3
    named = Scaling(node_resources={"CPU": 2, "sandboxes": 1})
    assert bundles([HEAD, {"CPU": 2.0, "sandboxes": 1.0}], 1, named, workers=[]) == [
        {"CPU": 16.0},
        {"CPU": 2.0, "sandboxes": 1.0},
        {"CPU": 2.0, "sandboxes": 1.0},
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"min_nodes": 0},
        {"max_nodes": 1.5},
        {"min_nodes": 3, "max_nodes": 2},
        {"idle_s": 0},
        {"idle_s": math.nan},
        {"idle_s": True},
        {"node_resources": {}},
        {"node_resources": {"CPU": 0}},
        {"node_resources": {"CPU": "8"}},
        {"node_resources": "CPU"},
    ],
)
def test_what_makes_no_sense_is_refused_where_it_enters(given):
    with pytest.raises(untax.UsageError, match=next(reversed(given))):
        Scaling(**given)


# ---- what a node tells ----


async def test_a_node_tells_what_is_new_and_knows_since_when_nobody_needed_it():
    clock = FakeClock()
    gauge = Gauge(lambda: clock() / 1e9)
    clock.advance(5)
    assert gauge.idle_s == 5
    gauge.say({"id": 0, "part": {"leased": 0, "waiting": 0, "free_sandboxes": 2, "whole": True}})
    assert await gauge.wait_news(None) == Load(0, 0, 0, 2)
    clock.advance(TELL_S)
    news = asyncio.ensure_future(gauge.wait_news(gauge.load))
    await asyncio.sleep(0)
    gauge.say({"id": 0, "part": {"busy": 0.5}})
    await asyncio.sleep(0)
    assert not news.done() and gauge.idle_s == 5 + TELL_S
    gauge.say({"id": 0, "part": {"leased": 1, "free_sandboxes": 1}})
    assert await news == Load(1, 0, 0, 1)
    assert gauge.idle_s == 0
    clock.advance(3)
    gauge.say({"id": 0, "part": {"leased": 0, "free_sandboxes": 2}})
    clock.advance(2)
    assert gauge.idle_s == 2


@pytest.mark.parametrize(
    ("before", "after", "is_told"),
    [
        ({"leased": 3}, {"leased": 4}, False),
        ({"leased": 3, "free_sandboxes": 5}, {"leased": 5, "free_sandboxes": 3}, False),
        ({"leased": 3, "free_sandboxes": 1}, {"leased": 4, "free_sandboxes": 0}, True),
        ({"leased": 3}, {"leased": 0}, True),
        ({"leased": 0}, {"leased": 1}, True),
        ({"leased": 3, "free_sandboxes": 0}, {"leased": 3, "waiting": 1, "free_sandboxes": -1}, True),
        ({"leased": 3, "waiting": 1, "free_sandboxes": -1}, {"leased": 4, "waiting": 2, "free_sandboxes": -2}, True),
    ],
)
async def test_what_nobody_acts_on_is_told_less_often(before, after, is_told):
    clock = FakeClock()
    gauge = Gauge(lambda: clock() / 1e9)
    gauge.say({"id": 0, "part": {"waiting": 0, "free_sandboxes": 9, **before}})
    news = asyncio.ensure_future(gauge.wait_news(await gauge.wait_news(None)))
    clock.advance(TELL_S)
    gauge.say({"id": 0, "part": after})
    news.cancel()
    news = asyncio.ensure_future(gauge.wait_news(Load.of_view({"waiting": 0, "free_sandboxes": 9, **before})))
    for _ in range(5):
        await asyncio.sleep(0)
    assert news.done() is is_told
    clock.advance(_CALM_S)
    gauge.say({"id": 0, "part": {"leased": 77}})
    assert (await news).leased == 77 or is_told


# ---- what is done about it ----


@dataclass(eq=False)
class Node:
    name: str
    resources: dict[str, float] = field(default_factory=lambda: dict(WORKER))
    is_head: bool = False
    is_resting: bool = False
    is_coming: bool = False
    load: Load | None = None
    idle_since_s: float | None = None


class Bed:
    """A scaler whose nodes and whose Ray are lists."""

    def __init__(self, *nodes, restart=False, **given):
        self.clock = FakeClock()
        self.nodes, self.asked, self.told = list(nodes), [], 0
        self.refuses_to_rest_s = 0.0
        self.hears = True
        self.scaler = Scaler(
            Scaling(**given),
            lambda: self.nodes,
            rest=self._rest,
            wake=self._wake,
            told=self._tell,
            ask=self._ask,
            may_have_asked=restart,
            clock=lambda: self.clock() / 1e9,
        )

    async def _rest(self, node):
        if not self.refuses_to_rest_s:
            node.is_resting = True
            self.scaler.changed(node, None)
        return self.refuses_to_rest_s

    def _wake(self, node):
        node.is_resting, node.is_coming = False, True

    def _tell(self):
        self.told += 1

    async def _ask(self, asked):
        self.asked.append(asked)
        return self.hears

    async def say(self, *loads, after_s=0.0):
        self.clock.advance(after_s)
        for node, load in zip(self.nodes, loads, strict=True):
            self.scaler.changed(node, load)
        return await self.scaler.look()


FULL = Load(4, 2, 2)
BUSY = Load(4)
IDLE = Load(0, 0, 0, 4)


async def test_a_wait_that_lasts_is_told_once_and_again_and_taken_back_when_it_is_over():
    bed = Bed(Node("a", HEAD, is_head=True), Node("b"))
    assert 0 < await bed.say(BUSY, FULL) <= 1
    assert not bed.asked
    await bed.say(BUSY, FULL, after_s=1)
    size = [{"CPU": 16.0}, {"CPU": 4.0}, {"CPU": 4.0}]
    assert bed.asked == [size] and bed.scaler.wanted == 1 and bed.told == 1
    again_s = await bed.say(BUSY, FULL, after_s=1)
    assert bed.asked == [size]
    await bed.say(BUSY, FULL, after_s=again_s)
    assert bed.asked == [size] * 2 and bed.told == 1  # another program may have asked for something else
    await bed.say(BUSY, BUSY)
    assert bed.asked == [size] * 2 + [[]] and bed.scaler.wanted == 0 and bed.told == 2
    assert await bed.say(BUSY, BUSY, after_s=100) == math.inf
    assert len(bed.asked) == 3


async def test_a_line_that_is_served_by_itself_is_told_nobody():
    bed = Bed(Node("a"))
    await bed.say(FULL)
    await bed.say(BUSY, after_s=0.5)
    await bed.say(FULL, after_s=10)
    assert bed.asked == []


async def test_nodes_that_are_about_to_have_an_agent_are_not_asked_for_twice():
    bed = Bed(Node("a"))
    await bed.say(FULL)
    await bed.say(FULL, after_s=1)
    assert bed.asked == [[{"CPU": 4.0}] * 2]
    bed.nodes.append(Node("b", is_coming=True))
    await bed.say(FULL, None)
    assert bed.scaler.wanted == 0 and bed.asked == [[{"CPU": 4.0}] * 2]  # as many as before
    bed.nodes[1].is_coming = False  # refused: it is of no use
    await bed.say(FULL, None)
    assert bed.scaler.wanted == 1 and bed.asked[-1] == [{"CPU": 4.0}] * 3


async def test_no_more_than_the_most_are_asked_for():
    bed = Bed(Node("a"), Node("b"), max_nodes=3)
    many = Load(4, 40, 40)
    await bed.say(many, many)
    await bed.say(many, many, after_s=1)
    assert bed.scaler.wanted == 1 and len(bed.asked[-1]) == 3
    bed.nodes += [Node("c"), Node("d")]
    await bed.say(many, many, many, many)
    assert bed.scaler.wanted == 0 and len(bed.asked[-1]) == 4  # and those are kept


async def test_a_keeper_that_was_started_again_takes_back_what_the_one_before_may_have_asked_for():
    bed = Bed(Node("a"), restart=True)
    await bed.say(BUSY)
    assert bed.asked == [[]]
    await bed.scaler.close()
    assert bed.asked == [[]]


async def test_what_ray_did_not_hear_is_said_again():
    bed = Bed(Node("a"))
    await bed.say(FULL)
    await bed.say(FULL, after_s=1)
    bed.hears = False
    again_s = await bed.say(BUSY)
    assert bed.asked[-1] == [] and again_s < math.inf
    bed.hears = True
    assert await bed.say(BUSY, after_s=again_s) == math.inf
    assert bed.asked[-2:] == [[], []]


async def test_what_was_asked_for_is_taken_back_when_the_fleet_goes_down():
    bed = Bed(Node("a"))
    await bed.say(FULL)
    await bed.say(FULL, after_s=1)
    await bed.scaler.close()
    assert bed.asked[-1] == []


async def test_idle_nodes_rest_the_longest_idle_first_but_never_the_head_and_never_too_many():
    bed = Bed(Node("head", is_head=True), Node("a"), Node("b"), Node("c"), idle_s=60, min_nodes=2)
    await bed.say(IDLE, IDLE, BUSY, IDLE)
    assert await bed.say(IDLE, IDLE, IDLE, IDLE, after_s=50) == 10
    await bed.say(IDLE, IDLE, IDLE, IDLE, after_s=10)
    assert [node.name for node in bed.nodes if node.is_resting] == ["a", "c"]
    await bed.say(IDLE, None, IDLE, None, after_s=1000)
    assert [node.name for node in bed.nodes if node.is_resting] == ["a", "c"]


async def test_nobody_rests_unless_it_was_said_and_not_while_somebody_waits():
    bed = Bed(Node("a"), Node("b"))
    assert await bed.say(IDLE, IDLE, after_s=1e6) == math.inf
    assert not any(node.is_resting for node in bed.nodes)
    bed = Bed(Node("a"), Node("b"), idle_s=1)
    await bed.say(Load(4, 9, 9), IDLE)
    await bed.say(Load(4, 9, 9), IDLE, after_s=100)
    assert not any(node.is_resting for node in bed.nodes)


async def test_a_node_that_was_needed_meanwhile_says_so_itself():
    bed = Bed(Node("a"), Node("b"), idle_s=10)
    bed.refuses_to_rest_s = 4.0
    await bed.say(IDLE, BUSY)
    assert await bed.say(IDLE, BUSY, after_s=10) == 4
    bed.refuses_to_rest_s = 0.0
    await bed.say(IDLE, BUSY, after_s=4)
    assert bed.nodes[0].is_resting


async def test_nodes_that_rest_are_woken_before_others_are_asked_for():
    bed = Bed(Node("a"), Node("b", is_resting=True), Node("c", is_resting=True))
    await bed.say(Load(4, 12, 12), None, None)
    await bed.say(Load(4, 12, 12), None, None, after_s=1)
    assert [node.is_coming for node in bed.nodes] == [False, True, True]
    assert bed.scaler.wanted == 1 and len(bed.asked[-1]) == 4
