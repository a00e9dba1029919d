"""What a fleet asks of all its nodes, or of one after the other: an answer says which node it is of, and one that fails does not stand for all."""

from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="ray: not installed; pip install 'untax[ray]'")

from tests.unit.cluster.test_fleet_life import ticket

import untax
from untax.cluster.fleet import Fleet
from untax.pool.status import PoolStatus, StageStatus
from untax.remote.snapshot import RemoteSnapshot


class Node:
    """One that answers as it was told to."""

    is_usable = True

    def __init__(self, label, said):
        self.label, self.said = label, said
        self.asked = 0

    async def answer(self, *_args, **_options):
        self.asked += 1
        if isinstance(self.said, Exception):
            raise self.said
        return self.said

    pools = prepare = find_snapshot = answer


def fleet_of(*nodes):
    fleet = Fleet.from_ticket(ticket().to_json())
    fleet._state = "running"
    fleet._nodes = {(node.label, "1"): node for node in nodes}

    async def ranked(_spec):
        return [SimpleNamespace(node=node.label) for node in nodes]

    async def is_lacking(_spec, _node, exc):
        return isinstance(exc, untax.UsageError) and "no such directory" in str(exc)

    by_label = {node.label: node for node in nodes}
    fleet._placing = SimpleNamespace(ranked=ranked, engine=by_label.__getitem__, wake=lambda: None, is_lacking=is_lacking)
    return fleet


def stage(key, idle, cost_s):
    return StageStatus("image", key, key, idle=idle, leased=1, making=0, waiting=0, target=idle, cost_s=cost_s)


def pool(*stages):
    return PoolStatus("namespace", stages, *range(1, 18))


async def test_the_pools_of_all_nodes_have_one_row_for_each_stage():
    found = await fleet_of(Node("a", pool(stage("x", 2, 0.5), stage("y", 1, 1.0))), Node("b", pool(stage("x", 3, 0.7)))).pools()
    assert [(one.key, one.idle, one.leased, one.target, one.cost_s) for one in found.stages] == [("x", 5, 2, 5, 0.7), ("y", 1, 1, 1, 1.0)]
    assert found.sandboxes == 2 and found.made == 2 * pool().made


async def test_a_node_that_does_not_say_how_its_pool_is_doing_is_left_out_unless_none_does():
    lost = untax.BackendError("", "it does not answer")
    assert (await fleet_of(Node("a", lost), Node("b", pool(stage("x", 3, 0.7)))).pools()).stages[0].idle == 3
    with pytest.raises(untax.BackendError, match="node a: it does not answer"):
        await fleet_of(Node("a", lost), Node("b", lost)).pools()


async def test_what_one_node_cannot_prepare_the_next_does():
    full, able = Node("a", untax.StageUnavailable("store", "the disk is full")), Node("b", "prepared")
    assert await fleet_of(full, able).prepare(untax.EnvSpec(isolation="none")) == "prepared"
    assert (full.asked, able.asked) == (1, 1)


async def test_what_no_node_can_prepare_is_told_with_the_name_of_the_first():
    with pytest.raises(untax.StageUnavailable, match="node a: the disk is full"):
        await fleet_of(*(Node(label, untax.StageUnavailable("store", "the disk is full")) for label in "ab")).prepare(
            untax.EnvSpec(isolation="none")
        )


async def test_what_one_node_lacks_is_prepared_on_the_next():
    lacking = Node("a", untax.UsageError("image 'dir:/data': there is no such directory"))
    assert await fleet_of(lacking, Node("b", "prepared")).prepare(untax.EnvSpec(isolation="none")) == "prepared"


async def test_a_recipe_that_fails_is_tried_on_one_node_only():
    failing, other = Node("a", untax.StageFailed("deps", "exit code 1")), Node("b", "prepared")
    with pytest.raises(untax.StageFailed, match="node a: exit code 1"):
        await fleet_of(failing, other).prepare(untax.EnvSpec(isolation="none"))
    assert other.asked == 0


async def test_a_snapshot_is_found_wherever_it_is_also_while_another_node_does_not_answer():
    there = object.__new__(RemoteSnapshot)
    assert await fleet_of(Node("a", untax.BackendError("", "away")), Node("b", there)).find_snapshot("s1") is there


async def test_a_snapshot_that_may_be_on_a_node_that_does_not_answer_is_not_said_to_be_nowhere():
    none, away = untax.UsageError("there is no snapshot 's1'"), untax.BackendError("", "it does not answer")
    with pytest.raises(untax.BackendError, match="node b does not say whether it has the snapshot s1") as caught:
        await fleet_of(Node("a", none), Node("b", away)).find_snapshot("s1")
    assert caught.value.retryable
    with pytest.raises(untax.UsageError, match=r"no node of the fleet has a snapshot 's1'.*copy\(\)"):
        await fleet_of(Node("a", none), Node("b", none)).find_snapshot("s1")
