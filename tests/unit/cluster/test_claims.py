"""A stage is built once in a fleet, by agreement of its nodes; what one has, the others fetch."""

import asyncio
import contextlib
import subprocess
import threading

import pytest
from tests.transfers import Node, meet

import untax
from untax.cluster.transfer import copy
from untax.cluster.transfer.claims import Claims, owners
from untax.core.errors import StageFailed, StageUnavailable
from untax.layers import build
from untax.layers.record import SNAPSHOT
from untax.layers.store import StageRecord

NODES = ("one", "two", "three")


# ---- who owns what ----


def test_every_node_names_the_same_owner_and_few_stages_move_when_one_leaves():
    keys = [f"key-{number}" for number in range(600)]
    before = {key: owners(key, NODES)[0] for key in keys}
    after = {key: owners(key, ("three", "one"))[0] for key in keys}

    assert {node: sum(one == node for one in before.values()) > 120 for node in NODES} == dict.fromkeys(NODES, True)
    assert all(after[key] == before[key] for key in keys if before[key] != "two")
    assert owners("key-1", NODES) == owners("key-1", reversed(NODES))


def test_the_first_has_the_claim_and_the_others_are_told_of_its_end():
    claims = Claims()
    first, second, third = (claims.claim("key", node) for node in NODES)
    assert first.wait().outcome == "granted"
    assert not second.decided.is_set()
    claims.there("key", ["one"])
    claims.leave(first)

    assert (second.wait().outcome, second.wait().holders) == ("there", ("one",))
    assert third.wait().outcome == "there"
    assert claims.claim("key", "four").wait().outcome == "there"
    assert claims.claim("key", "four", not_at=["one"]).wait().outcome == "granted", "who was said to have it does not"


def test_a_claim_that_is_left_is_the_next_ones():
    claims = Claims()
    first, second, third = (claims.claim("key", node) for node in NODES)
    claims.leave(second)
    claims.leave(first)
    claims.leave(first)

    assert third.wait().outcome == "granted"
    claims.leave(third)
    assert claims.claim("key", "one").wait().outcome == "granted"


def test_a_recipe_that_failed_is_told_to_those_who_wait_and_kept_for_nobody():
    claims = Claims()
    first, second = (claims.claim("key", node) for node in NODES[:2])
    claims.failed(first, "no such commit", "log")
    claims.leave(first)

    assert (second.wait().outcome, second.wait().message) == ("failed", "no such commit")
    assert claims.claim("key", "one").wait().outcome == "granted"


# ---- nodes ----


@pytest.fixture
def nodes(tmp_path, trust):
    made = {name: Node(name, tmp_path, trust) for name in NODES}
    meet(made.values())
    yield made
    for node in made.values():
        node.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("untax-layers", "untax-fetch"))]


@pytest.fixture
def repo(tmp_path):
    where = tmp_path / "origin"
    where.mkdir()
    (where / "file").write_text("of the origin")
    git = ["git", "-C", str(where), "-c", "user.name=t", "-c", "user.email=t@example.org"]
    for argv in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *argv], check=True, capture_output=True)
    commit = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    return untax.Repo(f"file://{where}", commit)


@pytest.fixture
def builds(monkeypatch):
    """Which stages were really built, and how the next one fares."""
    real = build.fill
    begun = []

    async def fill(*args, **kwargs):
        begun.append(args[1])
        if (wait := getattr(fill, "wait", None)) is not None:
            await wait()
        if (error := getattr(fill, "error", None)) is not None:
            raise error
        return await real(*args, **kwargs)

    monkeypatch.setattr(build, "fill", fill)
    fill.begun = begun
    return fill


async def test_a_stage_that_three_nodes_want_at_once_is_built_once(nodes, repo, builds):
    assert await asyncio.gather(*(node.tree(repo) for node in nodes.values())) == ["of the origin"] * 3

    assert len(builds.begun) == 1
    records = [node.store.stages() for node in nodes.values()]
    assert len({one.adds for (one,) in records}) == 1
    for node in nodes.values():
        for layer in node.store.layers():
            node.store.verify(layer.id)


async def test_a_stage_that_another_node_has_is_fetched_whoever_is_asked_about_it(nodes, repo, builds):
    """Also when nobody remembers: owners keep nothing that they cannot do without."""
    await nodes["two"].tree(repo)
    for node in nodes.values():
        node.transfer.claims._hints.clear()
    await nodes["three"].tree(repo)
    await nodes["one"].tree(repo)

    assert len(builds.begun) == 1
    (first,), (second,) = nodes["two"].store.stages(), nodes["three"].store.stages()
    assert (first.key, first.adds, first.config, first.cost_s) == (second.key, second.adds, second.config, second.cost_s)


async def test_who_was_said_to_have_it_and_has_it_no_more_is_not_believed(nodes, repo, builds):
    await nodes["one"].tree(repo)
    for record in nodes["one"].store.stages():
        nodes["one"].store.remove_stage(record.key)

    assert await nodes["two"].tree(repo) == "of the origin"
    assert len(builds.begun) == 2


async def test_a_builder_that_leaves_the_fleet_leaves_the_claim_to_the_next(nodes, repo, builds):
    """Whether its owner is told, or only sees the connection end."""
    waiting = asyncio.Event()

    async def stall():
        if len(builds.begun) == 1:
            waiting.set()
            await asyncio.Event().wait()

    builds.wait = stall
    first = asyncio.ensure_future(nodes["one"].tree(repo))
    await waiting.wait()
    second = asyncio.ensure_future(nodes["two"].tree(repo))
    third = asyncio.ensure_future(nodes["three"].tree(repo))
    await asyncio.to_thread(nodes["one"].transfer.close)  # as its death would
    meet([nodes["two"], nodes["three"]])

    assert await asyncio.gather(second, third) == ["of the origin"] * 2
    assert len(builds.begun) == 2
    first.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await first


async def test_a_recipe_that_fails_fails_for_all_who_wait_and_is_tried_again_later(nodes, repo, builds):
    begun, go = asyncio.Event(), asyncio.Event()

    async def stall():
        begun.set()
        await go.wait()

    builds.wait, builds.error = stall, StageFailed("repo", "no such commit anywhere", b"what was printed")
    asked = [asyncio.ensure_future(node.tree(repo)) for node in nodes.values()]
    await begun.wait()
    claims = [node.transfer.claims for node in nodes.values()]
    while sum(len(line) for one in claims for line in one._lines.values()) < 3:
        await asyncio.sleep(0)
    go.set()
    for one in asked:
        with pytest.raises(StageFailed, match="no such commit anywhere") as caught:
            await one
        assert caught.value.log == b"what was printed"
    assert len(builds.begun) == 1
    builds.wait = builds.error = None

    assert await nodes["three"].tree(repo) == "of the origin"


async def test_a_node_without_room_fails_for_nobody_else(nodes, repo, builds):
    """A set-up command that filled the disk of its node says nothing about the recipe: the next in line builds."""
    begun, go = asyncio.Event(), asyncio.Event()

    async def stall():
        begun.set()
        await go.wait()
        builds.error = StageFailed("repo", "set-up command 'make': disk_full (1): no space") if len(builds.begun) == 1 else None

    builds.wait = stall
    first = asyncio.ensure_future(nodes["one"].tree(repo))
    await begun.wait()
    others = [asyncio.ensure_future(nodes[name].tree(repo)) for name in ("two", "three")]
    claims = [node.transfer.claims for node in nodes.values()]
    while sum(len(line) for one in claims for line in one._lines.values()) < 3:
        await asyncio.sleep(0)
    go.set()

    assert await asyncio.gather(*others) == ["of the origin"] * 2
    with pytest.raises(StageFailed, match="disk_full"):
        await first
    assert len(builds.begun) == 2


async def test_a_wait_that_is_cancelled_leaves_nothing(nodes, repo, builds):
    begun, go = asyncio.Event(), asyncio.Event()

    async def stall():
        begun.set()
        await go.wait()

    builds.wait = stall
    first = asyncio.ensure_future(nodes["one"].tree(repo))
    await begun.wait()
    second = asyncio.ensure_future(nodes["two"].tree(repo))
    claims = [node.transfer.claims for node in nodes.values()]
    while sum(len(line) for one in claims for line in one._lines.values()) < 2:
        await asyncio.sleep(0)
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    go.set()

    assert await first == "of the origin"
    assert await nodes["two"].tree(repo) == "of the origin"
    assert len(builds.begun) == 1


async def test_owners_that_cannot_be_reached_hold_nobody_up(nodes, repo, builds):
    nodes["two"].transfer.close()
    nodes["three"].transfer.close()

    assert await nodes["one"].tree(repo) == "of the origin"


async def test_what_is_only_on_one_machine_does_not_travel(nodes, repo, builds):
    await nodes["one"].tree(repo)
    (record,) = nodes["one"].store.stages()
    own = StageRecord("a-stage-of-this-machine", "image", None, record.adds, is_portable=False)
    nodes["one"].store.put_stage(own)

    with pytest.raises(StageUnavailable, match="does not travel"):
        await asyncio.to_thread(nodes["two"].transfer.bring, own.key, "one")
    assert nodes["two"].store.layers() == []


# ---- snapshots ----


async def copied(nodes, key):
    """As a client has it done, who knows both nodes."""
    (second,) = (peer for peer in nodes["one"].transfer.peers() if peer.node == "two")
    await asyncio.to_thread(copy, nodes["three"].transfer.dialer, second, key, "one")


async def test_a_snapshot_is_copied_to_a_second_node(nodes, repo):
    await nodes["one"].tree(repo)
    (record,) = nodes["one"].store.stages()
    saved = StageRecord("snap-0123", SNAPSHOT, None, record.adds, recipe={"spec": {"image": "x"}, "in_place": None, "stage_layers": 1})
    nodes["one"].store.put_stage(saved)
    await copied(nodes, "snap-0123")
    await copied(nodes, "snap-0123")

    assert nodes["two"].store.stage("snap-0123") == saved
    assert nodes["three"].store.stages() == []
    with pytest.raises(StageUnavailable, match="snap-9999"):
        await copied(nodes, "snap-9999")
