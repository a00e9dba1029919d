"""Leases that one node cannot give and another can: an image that lies there, a disk with room."""

import asyncio
import gc

import pytest
from tests.unit.cluster.test_placing import nodes

import untax
from untax.cluster.elsewhere import named


def lacking(fleet, monkeypatch, *nodes):
    """As if the image lay on the other machines only: neither its stages nor a lease of it can be had there. Gives who was asked for a lease."""
    asked = []

    async def nothing(*_args):
        raise untax.UsageError("image 'dir:/data': there is no such directory")

    async def no_lease(node):
        asked.append(node)
        await nothing()

    for node in nodes:
        monkeypatch.setattr(fleet.services[node].engine, "ladder", nothing)
        monkeypatch.setattr(fleet.services[node].engine, "fulfil", lambda _request, node=node: no_lease(node))
    return asked


async def test_an_image_that_the_nearest_node_lacks_is_leased_where_it_is(tmp_path, monkeypatch):
    async with nodes(tmp_path, here="a") as fleet:
        asked = lacking(fleet, monkeypatch, "a", "b")
        for _ in range(3):
            box = await fleet.lease()
            assert box.ledger.placed.node == "c"
            await box.release()
        assert not asked  # they have said it when they were asked of which stages it is


async def test_a_node_that_turns_out_to_lack_the_image_is_passed_over_and_named_and_other_images_go_there(tmp_path, monkeypatch):
    """Its stages are the same everywhere, and one node alone was asked for them."""
    async with nodes(tmp_path, "ab", here="a") as fleet:
        await (await fleet.lease()).release()
        asked = lacking(fleet, monkeypatch, "a")
        box = await fleet.lease()
        assert box.ledger.placed.node == "b"
        assert [node for node, _ in box.ledger.placed.tried] == ["a"] and "no such directory" in box.ledger.placed.tried[0][1]
        await box.release()
        again = await fleet.lease()
        assert again.ledger.placed.tried == () and asked == ["a"]
        await again.release()
        assert fleet.placing.views.view("a").avoided_s == 0.0


async def test_what_every_node_lacks_is_the_callers_mistake_with_a_nodes_name(tmp_path, monkeypatch):
    async with nodes(tmp_path, here="b") as fleet:
        lacking(fleet, monkeypatch, *"abc")
        with pytest.raises(untax.UsageError, match="node b: image 'dir:/data': there is no such directory; the same on 2 more"):
            await fleet.lease()


async def test_a_node_that_says_later_that_it_lacks_the_image_leaves_no_trace_in_the_log(tmp_path, monkeypatch, caplog):
    async with nodes(tmp_path, here="a") as fleet:
        lacking(fleet, monkeypatch, "a")
        late = fleet.services["c"].engine

        async def slowly(_spec):
            await asyncio.sleep(0.05)
            raise untax.UsageError("image 'dir:/data': there is no such directory")

        monkeypatch.setattr(late, "ladder", slowly)
        box = await fleet.lease()
        await box.release()
        await asyncio.sleep(0.1)
        gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_mistake_in_the_lease_itself_is_raised_and_asked_of_no_other_node(tmp_path, monkeypatch):
    async with nodes(tmp_path, here="a") as fleet:
        asked = []

        async def no_user(node):
            asked.append(node)
            raise untax.UsageError("there is no user 'x'")

        for node, service in fleet.services.items():
            monkeypatch.setattr(service.engine, "fulfil", lambda _request, node=node: no_user(node))
        with pytest.raises(untax.UsageError, match="there is no user"):
            await fleet.lease()
        assert asked == ["a"]


# ---- full disks ----


def full_disk(fleet, monkeypatch, *nodes):
    """Whose store has no room for what is asked, until a lease there ends; gives who was waited at."""
    waited = []

    async def no_room(node, request):
        if not request.may_refuse:
            waited.append(node)
        raise untax.StageUnavailable("store", "the disk is full")

    for node in nodes:
        monkeypatch.setattr(fleet.services[node].engine, "fulfil", lambda request, node=node: no_room(node, request))
    return waited


async def test_a_node_whose_disk_is_full_refuses_and_the_next_is_asked(tmp_path, monkeypatch):
    async with nodes(tmp_path, "ab", here="a") as fleet:
        waited = full_disk(fleet, monkeypatch, "a")
        box = await fleet.lease()
        assert box.ledger.placed.node == "b" and "the disk is full" in box.ledger.placed.tried[0][1]
        assert not waited
        await box.release()


async def test_where_every_disk_is_full_a_lease_waits_at_one_of_them_once_and_says_so(tmp_path, monkeypatch):
    async with nodes(tmp_path, "abc", here="a") as fleet:
        waited = full_disk(fleet, monkeypatch, *"abc")
        with pytest.raises(untax.StageUnavailable, match=r"node \w: .*the disk is full"):
            await fleet.lease()
        assert len(waited) == 1


@pytest.mark.parametrize(
    "exc",
    [
        untax.StageFailed("deps", "exit code 1", b"log"),
        untax.StageUnavailable("store", "the disk is full"),
        untax.CreateError("sb-1", "no sandbox"),
        untax.LeaseRefused("full", "no room"),
        untax.UsageError("no such thing"),
        untax.PoolClosed("it was closed"),
    ],
)
def test_a_failure_told_with_its_node_is_of_the_same_kind_and_as_retryable(exc):
    told = named("n1", exc)
    assert type(told) is type(exc) and told.retryable == exc.retryable
    assert "node n1: " in str(told) and {**vars(told), "message": ""} == {**vars(exc), "message": ""}
