"""`untax.Fleet` over Ray nodes at loopback addresses of their own: one cluster for all of this module."""

import asyncio
import contextlib
import dataclasses
import json
import os
import pickle
from pathlib import Path

import pytest
from tests import chromium, raycluster
from tests.images import small_archive
from tests.integration.test_dashboard import _until as until

import untax

if reason := raycluster.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)


NOT_AHEAD_S = 59.0  # of leases that last no longer than this none is given ahead (`untax.remote.hand`)


@pytest.fixture(scope="module")
def cluster(ray_nodes):
    return ray_nodes


@pytest.fixture(scope="module")
async def fleet(cluster, tmp_path_factory):
    state = tmp_path_factory.mktemp("fleet")
    async with untax.Fleet(cluster.address, substrate="namespace", state_dir=state / "{node}") as fleet:
        yield fleet


async def test_a_fleet_leases_on_every_node_and_says_which(fleet, cluster):
    assert {member.node_id for member in fleet.members} == set(cluster.ids()) and not fleet.refusals
    boxes = []
    while {box._engine.member.node_id for box in boxes} != set(cluster.ids()):  # the caller's own first, as long as it is not much fuller
        boxes.append(await fleet.acquire())
        assert len(boxes) < 64
    assert {(await box.run(["echo", "there"])).stdout for box in boxes} == {b"there\n"}
    assert all(box._engine.member.name == box.ledger.placed.node for box in boxes)
    await asyncio.gather(*(box.release() for box in boxes))
    assert {box.ledger.verdict for box in boxes} == {"trusted"}


async def test_an_agent_of_the_same_node_is_reached_over_its_socket_and_the_others_over_tls(fleet, cluster):
    import ray

    here = ray.get_runtime_context().get_node_id()
    assert {node.member.node_id for node in fleet._nodes.values() if node.is_here} == {here}
    assert {node.member.node_id for node in fleet._nodes.values() if node._hand is not None} == {here}, "others give nothing ahead"
    for member in fleet.members:
        assert member.url.startswith(f"https://{member.address}:")
        assert (os.stat(member.socket).st_mode & 0o777) == 0o600


async def test_a_workers_next_lease_is_in_its_hand_and_the_ledger_says_so(fleet):
    """From its own node; nothing of it is left when the worker has stopped leasing."""
    [own] = [node for node in fleet._nodes.values() if node.is_here]
    await fleet.warm(n=8)
    boxes = []
    async with asyncio.timeout(30):
        while sum("in hand" in box.ledger.placed.why for box in boxes) < 5:
            async with fleet.lease() as box:
                assert (await box.run(["echo", "there"])).stdout == b"there\n"
            boxes.append(box)
        assert {box.ledger.placed.node for box in boxes if "in hand" in box.ledger.placed.why} == {own.label}
        assert len({box.id for box in boxes}) == len({box.ledger.rollout for box in boxes}) == len(boxes)
        theirs = {one["rollout"]: one for one in await fleet.ledgers()}
        assert [theirs.get(box.ledger.rollout, {}).get("placed", {}).get("why") for box in boxes] == [
            box.ledger.placed.why for box in boxes
        ]
        await fleet.warm(n=0)
        while own.has_in_hand or any(stage.leased for stage in (await fleet.pools()).stages):
            await asyncio.sleep(0.01)


async def every_call(fleet):
    """One of each kind that is looked for, and what they are counted as."""
    import ray
    from ray.experimental import internal_kv

    @ray.remote(num_cpus=0)
    class Nobody:
        pass

    ray.nodes()
    assert await fleet._joining.keeper.instance.remote() == fleet._ticket.instance
    assert ray.get(ray.remote(num_cpus=0)(lambda: "there").remote()) == "there"
    internal_kv._internal_kv_exists(b"nothing")
    ray.kill(Nobody.remote())
    await fleet._joining.roll()
    return ["nodes", "_remote instance", "_remote", "get", "_internal_kv_exists", "_remote", "kill", "_remote members"]


async def used(box):
    await box.write("file", b"there")
    assert await box.read("file") == b"there"
    async with box.session() as bash:
        assert (await bash.run("cat file")).stdout == b"there"
    return box.ledger.placed


async def test_no_lease_and_no_action_asks_ray_for_anything(fleet, cluster):
    """On this node and on another, out of the hand and asked for, once the fleet is warm."""
    await fleet.warm(n=8)
    with raycluster.counted() as calls:
        known = await every_call(fleet)
        assert calls == known, "what follows would show nothing"
        calls.clear()
        async with asyncio.timeout(30), contextlib.AsyncExitStack() as held:
            in_hand = 0
            while in_hand < 5:
                async with fleet.lease() as box:
                    in_hand += "in hand" in (await used(box)).why
            for _ in range(5):
                async with fleet.lease(ttl_s=NOT_AHEAD_S) as box:
                    assert "in hand" not in (await used(box)).why
            nodes = set()
            while len(nodes) < len(fleet.members):
                nodes.add((await used(await held.enter_async_context(fleet.lease(ttl_s=NOT_AHEAD_S)))).node)
        assert calls == []
    await fleet.warm(n=0)


async def test_an_agent_has_nothing_of_ray_in_its_process(fleet, cluster):
    """Nothing of Ray's can wait, log or die there, between an action and its sandbox."""
    has_ray = {"untax-agent": [], "ray::NodeActor": []}
    for pid in [pid for node_id in cluster.ids() for pid in cluster.processes(node_id)]:
        with contextlib.suppress(OSError):  # it has ended
            name, maps = (Path(f"/proc/{pid}/{one}").read_text() for one in ("comm", "maps"))
            if name.strip() in has_ray:
                has_ray[name.strip()].append("/_raylet" in maps)
    assert min(map(len, has_ray.values())) >= len(fleet.members)
    assert {name: set(found) for name, found in has_ray.items()} == {"untax-agent": {False}, "ray::NodeActor": {True}}


async def test_a_handle_is_used_where_it_was_unpickled(fleet):
    handle = pickle.loads(pickle.dumps(fleet))
    async with handle.lease() as box:
        assert (await box.run(["echo", "there"])).stdout == b"there\n"
    shared = await handle._ready()
    assert shared is not fleet and (await pickle.loads(pickle.dumps(fleet))._ready()) is shared  # one for the whole event loop
    await shared.aclose()
    async with pickle.loads(pickle.dumps(handle)) as own, own.lease() as box:
        assert (await box.run(["echo", "again"])).stdout == b"again\n"


async def test_tasks_and_actors_of_the_cluster_use_it(fleet):
    import ray

    @ray.remote(num_cpus=0.1)
    def task(handle):
        from untax.sync import Fleet

        with Fleet.current().lease() as box:
            found = box.run(["echo", "task"]).stdout
        fleet = pickle.loads(handle)
        assert fleet is Fleet.current()
        return found

    @ray.remote(num_cpus=0.1)
    class Worker:
        async def rollout(self):
            async with untax.Fleet.current().lease() as box:
                return (await box.run(["echo", "actor"])).stdout

    from untax.sync.fleet import _shared

    handle = pickle.dumps(_Blocking(_shared, fleet.ticket()))
    worker = Worker.remote()
    assert (
        await asyncio.gather(*(task.remote(handle) for _ in range(3)), *(worker.rollout.remote() for _ in range(3)))
        == [b"task\n"] * 3 + [b"actor\n"] * 3
    )


class _Blocking:
    """Pickles as a blocking handle does, which this process need not have."""

    def __init__(self, make, ticket):
        self._reduced = make, (ticket,)

    def __reduce__(self):
        return self._reduced


async def test_what_one_node_built_another_fetches_and_snapshots_are_copied(fleet, cluster, tmp_path):
    """A stage is built once in the fleet: the second node's ledger tells of the same layers, and its log of no build."""
    spec = untax.EnvSpec(image=f"tar:{small_archive(tmp_path)}", setup=("cat /proc/sys/kernel/random/uuid > /made",))
    first, second = fleet._nodes.values()
    made = []
    for node in (first, second):
        async with node.lease(spec) as box:
            made.append((await box.read("/made"), set(box.ledger.stages)))
            if node is first:
                await box.write("mine", b"of the first")
                snapshot = await box.snapshot()
    assert made[0] == made[1], "a second build would have made another"

    there = await fleet.copy(snapshot, second.member.node_id)
    assert there.id == snapshot.id and there.engine is second
    await snapshot.drop()
    async with fleet.restore(there) as box:
        assert await box.read("mine") == b"of the first"
        assert second.member.name in box.ledger.choice or box._engine is second
    with pytest.raises(untax.UsageError, match="no node is named"):
        await fleet.copy(there, "nowhere")
    async with first.lease() as box:
        of_host = await box.snapshot()
    with pytest.raises(untax.StageUnavailable, match="does not travel"):
        await fleet.copy(of_host, second.member.node_id)
    await of_host.drop()


async def test_what_is_hot_on_one_node_comes_to_the_other_by_itself_and_placement_sees_it(fleet, tmp_path, monkeypatch):
    """Nobody asks the second node for it: its view says that the stages lie there, and a lease there lacks nothing."""
    spec = untax.EnvSpec(image=f"tar:{small_archive(tmp_path)}", setup=("cat /proc/sys/kernel/random/uuid > /made # hot",))
    first, second = fleet._nodes.values()
    for _ in range(4):
        async with first.lease(spec) as box:
            made = await box.read("/made")
    wanted = {stage.key.partition("~")[0] for stage in box.ledger.wanted if stage.name != "base"}
    views, told = fleet._placing.views, asyncio.Event()
    hear = views.told

    def heard(node, part):
        hear(node, part)
        if wanted <= views.view(second.label).stored:
            told.set()

    monkeypatch.setattr(views, "told", heard)
    if not wanted <= views.view(second.label).stored:
        async with asyncio.timeout(60):
            await told.wait()
    async with second.lease(spec) as box:
        assert (await box.read("/made"), box.ledger.stages) == (made, {})


def test_what_a_program_leaves_behind_when_its_fleet_closes(cluster, tmp_path):
    from untax.sync import Fleet

    with Fleet(cluster.address, name="second", state_dir=tmp_path / "{node}") as fleet, fleet.lease() as box:
        assert box.run(["echo", "there"]).stdout == b"there\n"
        sockets = [member.socket for member in fleet.members]
        assert len(sockets) == 2
    assert not any(os.path.exists(path) for path in sockets)
    assert not _mounts_below(tmp_path)
    with pytest.raises(untax.UntaxError):
        fleet.acquire()


def _mounts_below(path: Path) -> list[str]:
    return [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(path) in line]


async def test_every_agent_knows_the_others_and_answers_for_all_with_the_fleets_token_only(fleet):
    from untax.cluster.node import _address
    from untax.remote.get import get

    ticket = fleet._ticket
    for member in fleet.members:
        address = _address(member, ticket)
        for _ in range(100):  # they are told a moment after the clients
            text = (await get(address, "/fleet/metrics", timeout_s=5)).decode()
            if text.count("untax_node_up{") == len(fleet.members):
                break
            await asyncio.sleep(0.05)
        assert text.count("untax_node_up{") == len(fleet.members), text
        told = json.loads(await get(address, "/v1/fleet", timeout_s=5))
        assert {one["name"]: (one["node_id"], one["state"]) for one in told["nodes"]} == {
            one.name: (one.node_id, "in") for one in fleet.members
        }
        stranger = dataclasses.replace(address, token="x" * 43)
        for path in ("/fleet/metrics", "/v1/fleet"):
            with pytest.raises(untax.UntaxError):
                await get(stranger, path, timeout_s=5)
        page = (await get(stranger, "/", timeout_s=5)).decode()
        assert 'id="nodes"' in page and not any(one.name in page for one in fleet.members), "the page itself holds nothing"


async def test_the_page_of_any_agent_shows_every_node(fleet):
    if reason := chromium.unavailable_reason():
        pytest.skip(reason)
    token = fleet._ticket.token
    names = [one.name for one in fleet.members]

    def shown(url):
        browser.open("about:blank", width=1280)
        browser.open(f"{url}/#token={token}", width=1280)
        until(browser, f"document.querySelectorAll('#nodes tr').length == {len(names) + 1}")
        return browser.evaluate(
            "[...document.querySelectorAll('#nodes tr')].map(tr => [...tr.children].map(td => td.textContent).slice(0, 2))"
        )

    browser = await asyncio.to_thread(chromium.Browser().__enter__)
    try:
        browser.call("Security.setIgnoreCertificateErrors", ignore=True)  # it does not know the fleet's authority
        for member in fleet.members:
            head, *rows = await asyncio.to_thread(shown, member.url)
            assert head == ["node", "state"] and sorted(rows) == sorted([name, "in"] for name in names)
    finally:
        await asyncio.to_thread(browser.__exit__, None, None, None)


async def test_a_ticket_that_does_not_fit_is_refused_with_the_remedy(fleet):
    ticket = json.loads(fleet.ticket())
    stranger = untax.Fleet.from_ticket(json.dumps({**ticket, "token": "x" * 43}))
    with pytest.raises(untax.UsageError, match=r"node 127\.0\.0\.\d: .* handle"):
        await stranger.start()
    from untax.cluster.trust import Trust

    other = untax.Fleet.from_ticket(json.dumps({**ticket, "authority": Trust.new("untax").authority.certificate}))
    with pytest.raises(untax.PoolClosed, match="there is another of this name now: get a new handle"):
        await other.start()
