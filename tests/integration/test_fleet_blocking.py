"""`untax.sync.Fleet` over two Ray nodes, and handles of fleets that Ray itself carries into tasks and actors."""

import asyncio
import threading

import pytest
from tests import raycluster
from tests.images import small_archive

import untax
import untax.sync
from untax import substrates

if reason := raycluster.unavailable_reason() or substrates.load("namespace").unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

NAME = "blocking"


@pytest.fixture(scope="module")
def fleet(ray_nodes, tmp_path_factory):
    with untax.sync.Fleet(ray_nodes.address, name=NAME, state_dir=tmp_path_factory.mktemp("fleet") / "{node}") as fleet:
        yield fleet


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    return untax.EnvSpec(image=f"tar:{small_archive(tmp_path_factory.mktemp('image'))}")


def acquired_on(fleet, member, spec=None):
    """A box of that node, whatever placement would say."""
    [node] = [node for node in fleet._inner._nodes.values() if node.member.node_id == member.node_id]
    loop = fleet._running()
    return untax.sync.Box(loop, loop.run(node.acquire(spec)))


@pytest.fixture(params=[0, 1], ids=["one node", "the other"])
def member(request, fleet):
    return sorted(fleet.members, key=lambda member: member.name)[request.param]


@pytest.fixture
def box(fleet, member):
    box = acquired_on(fleet, member)
    yield box
    box.release()


def node_of(box):
    return box._inner._engine.member.node_id


def names(box, path="."):
    return sorted(entry.name for entry in box.list(path))


# ---- the same without await ----


def test_commands_files_and_sessions(box):
    assert box.run(["sh", "-c", "echo no >&2; exit 3"]).exit_code == 3
    box.write("d/f", b"bytes")
    assert (box.read("d/f"), names(box, "d")) == (b"bytes", ["f"])
    with box.session() as bash:
        bash.run("cd d; X=1")
        assert bash.run("echo $X; ls").text == "1\nf\n"
    with box.start(["cat"]) as process:
        process.write(b"one")
        process.close_stdin()
        assert process.wait().stdout == b"one"
    box.release()
    assert box.ledger.verdict == "trusted"
    with pytest.raises(untax.SandboxLost):
        box.run(["true"])


def test_snapshots_forks_restores_resets_and_graders(fleet, box):
    box.write("src/a", b"1")
    with box.session() as bash:
        bash.run("cd src; X=kept")
        snapshot = box.snapshot()
        assert bash.run("echo $X; ls; echo 2 >b").text == "kept\na\n"
    with fleet.fork(snapshot, 4, env={"LATE": "1"}) as group:
        assert [names(one, "src") for one in group] == [["a"]] * 4
        assert [one.shell("echo $LATE").text for one in group] == ["1\n"] * 4
        group[0].write("src/a", b"mine")
        assert [(one.path, one.kind) for one in group[0].diff()] == [("/workspace/src/a", "modified")]
        group[0].reset()
        assert [one.read("src/a") for one in group] == [b"1"] * 4
    assert {one.ledger.verdict for one in group} == {"trusted"}
    with fleet.grader(box) as clean:
        assert names(clean, "src") == ["a", "b"]
    box.reset()
    assert names(box) == []
    saved = snapshot.save()
    with fleet.restore(saved) as again, fleet.restore(snapshot) as twice:
        assert (again.read("src/a"), twice.read("src/a")) == (b"1", b"1")
    fleet.find_snapshot(saved).drop()
    with pytest.raises(untax.UsageError, match=r"no .*snapshot"):
        fleet.restore(saved).get()


def test_many_threads_fork_one_snapshot(fleet, box):
    box.write("a", b"then")
    snapshot = box.snapshot()
    found = []

    def work(n):
        with fleet.fork(snapshot, 2, files={"n": str(n).encode()}) as group, fleet.lease() as other:
            found.extend((one.read("a"), one.run(["cat", "n"]).text) for one in group)
            assert names(other) == []

    threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted([(b"then", str(n)) for n in range(6)] * 2)
    snapshot.drop()


def test_what_is_prepared_and_kept_ready_is_found_in_the_pools(fleet, spec):
    wanted = untax.EnvSpec(image=spec.image, setup=("echo made >/made",))
    assert fleet.prepare(wanted).stages
    fleet.warm(wanted, 4)

    def idle():
        return sum(stage.idle for stage in fleet.pools().stages if stage.name == "deps")

    assert idle() == 4
    boxes = [fleet.acquire(wanted) for _ in range(4)]
    assert [box.ledger.hit.kind for box in boxes] == ["exact"] * 4
    assert {box.ledger.placed.node for box in boxes} == {member.name for member in fleet.members}
    for box in boxes:
        assert box.read("/made") == b"made\n"
        box.release()
    fleet.warm(wanted, 0)


def test_a_snapshot_is_kept_ready_where_it_was_taken(fleet, box):
    box.write("a", b"then")
    snapshot = box.snapshot()
    fleet.warm(snapshot, 2)
    with fleet.fork(snapshot, 2) as group:
        assert [(one.ledger.hit.kind, one.read("a")) for one in group] == [("exact", b"then")] * 2
    assert "snapshot" in {stage.name for stage in fleet.pools().stages}
    snapshot.drop()
    assert not any(stage.name == "snapshot" and (stage.idle or stage.target) for stage in fleet.pools().stages)


def test_a_copy_of_a_snapshot_is_forked_on_the_other_node(fleet, spec, member):
    [other] = [one for one in fleet.members if one != member]
    box = acquired_on(fleet, member, spec)
    box.write("mine", b"of the first")
    snapshot = box.snapshot()
    box.release()

    there = fleet.copy(snapshot, other.name)
    assert there.id == snapshot.id and there.is_saved
    with fleet.fork(snapshot, 2) as near, fleet.fork(there, 2) as far:
        assert {one.read("mine") for one in (*near, *far)} == {b"of the first"}
        assert [node_of(one) for one in (*near, *far)] == [member.node_id] * 2 + [other.node_id] * 2
    snapshot.drop()
    with fleet.restore(there) as again, fleet.restore(there.id) as named:
        assert (again.read("mine"), named.read("mine")) == (b"of the first", b"of the first")
    there.drop()


def test_forks_and_restores_say_on_which_node_they_are(fleet, box):
    names = {member.node_id: member.name for member in fleet.members}
    snapshot = box.snapshot()
    with fleet.fork(snapshot, 2) as group, fleet.restore(snapshot) as again, fleet.grader(box) as clean:
        for one in (*group, again, clean):
            assert one.ledger.placed is not None and one.ledger.placed.node == names[node_of(one)]
    snapshot.drop()


def test_the_ledgers_of_all_nodes_are_told(fleet, box):
    box.run(["true"])
    box.release()
    assert box.ledger.rollout in {one["rollout"] for one in fleet.ledgers()}


async def test_it_works_inside_a_running_loop(fleet):
    with fleet.lease() as box:
        snapshot = box.snapshot()
        with fleet.fork(snapshot, 2) as group:
            assert [one.run(["echo", "there"]).text for one in group] == ["there\n"] * 2
        snapshot.drop()


# ---- handles, as Ray carries them ----


@pytest.fixture
def saved(fleet):
    with fleet.lease(files={"a": b"of the driver"}) as box:
        saved = box.snapshot().save()
    yield saved
    fleet.find_snapshot(saved).drop()


# By the forks of a rollout's own snapshot, the restored one and the grader.
FOUND = [b"of the task", b"of the task", b"of the driver", b"of the task"]


def on_every_node(function):
    """A remote function or class for each node, to run there."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    nodes = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
    places = [NodeAffinitySchedulingStrategy(node, soft=False) for node in nodes]
    return [ray.remote(num_cpus=0.1, scheduling_strategy=place)(function) for place in places]


def test_a_handle_given_to_a_task_leases_and_forks_there(fleet, saved):
    import ray

    def rollout(fleet, saved):
        with fleet.lease() as box:
            box.write("a", b"of the task")
            with fleet.fork(box.snapshot(), 2) as group, fleet.restore(saved) as restored, fleet.grader(box, take=("a",)) as clean:
                found = [one.read("a") for one in (*group, restored, clean)]
        return found, box.ledger.verdict

    tasks = on_every_node(rollout)
    assert ray.get([task.remote(fleet, saved) for task in tasks]) == [(FOUND, "trusted")] * 2


def test_a_handle_given_to_an_actor_is_kept_from_call_to_call(fleet, saved):
    import ray

    class Worker:
        def __init__(self, fleet):
            self.fleet = fleet

        def begin(self, data):
            self.box = self.fleet.acquire()
            self.box.write("a", data)
            self.snapshot = self.box.snapshot()
            return self.box.id

        def fork(self, saved):
            with self.fleet.fork(self.snapshot, 2) as group, self.fleet.restore(saved) as restored:
                return [one.read("a") for one in (*group, restored)]

        def end(self):
            self.snapshot.drop()
            self.box.release()
            return self.box.ledger.verdict, self.fleet is untax.sync.Fleet.current(self.fleet._inner.name)

    workers = [kind.remote(fleet) for kind in on_every_node(Worker)]
    one, two = ray.get([worker.begin.remote(data) for worker, data in zip(workers, (b"1", b"2"), strict=True)])
    assert one != two
    assert ray.get([worker.fork.remote(saved) for worker in workers]) == [[b"1", b"1", b"of the driver"], [b"2", b"2", b"of the driver"]]
    assert ray.get([worker.end.remote() for worker in workers]) == [("trusted", True)] * 2
    for worker in workers:
        ray.kill(worker)


@pytest.fixture
async def joined(fleet, ray_nodes):
    """The same fleet, for an event loop."""
    async with untax.Fleet(ray_nodes.address, name=NAME) as joined:
        yield joined


async def rolled_out(fleet, saved):
    """What a rollout of a task or an actor finds."""
    async with fleet.lease() as box:
        await box.write("a", b"of the task")
        snapshot = await box.snapshot()
        async with fleet.fork(snapshot, 2) as group, fleet.restore(saved) as restored, fleet.grader(box, take=("a",)) as clean:
            found = [await one.read("a") for one in (*group, restored, clean)]
        await snapshot.drop()
    return found, box.ledger.verdict


async def test_a_handle_of_an_event_loop_is_used_in_a_task_s_own(joined, saved):
    """Each `asyncio.run` of the task has one of its own, and the next one begins anew."""

    def twice(fleet, saved):
        return [asyncio.run(rolled_out(fleet, saved)) for _ in range(2)]

    found = await asyncio.gather(*(task.remote(joined, saved) for task in on_every_node(twice)))
    assert found == [[(FOUND, "trusted")] * 2] * 2


async def test_a_handle_of_an_event_loop_is_used_in_an_async_actor(joined, saved):
    """By several calls at once."""
    import ray

    class Worker:
        def __init__(self, fleet):
            self.fleet = fleet

        async def rollout(self, saved):
            return await rolled_out(self.fleet, saved)

        async def given(self, fleet, saved):
            return await rolled_out(fleet, saved), await fleet._ready() is await self.fleet._ready()

    workers = [kind.remote(joined) for kind in on_every_node(Worker)]
    found = await asyncio.gather(*(worker.rollout.remote(saved) for worker in workers for _ in range(3)))
    assert found == [(FOUND, "trusted")] * 6
    given = await asyncio.gather(*(worker.given.remote(joined, saved) for worker in workers))
    assert given == [((FOUND, "trusted"), True)] * 2
    for worker in workers:
        ray.kill(worker)


async def test_a_handle_knows_who_is_in_the_fleet_before_its_first_lease_and_after(fleet, joined):
    """So that a task can name a node to copy to."""

    def blocking(fleet):
        before = fleet.members
        fleet.acquire().release()
        return [{member.node_id for member in told} for told in (before, fleet.members)]

    def looped(fleet):
        async def both():
            before = fleet.members
            await (await fleet.acquire()).release()
            return [{member.node_id for member in told} for told in (before, fleet.members)]

        return asyncio.run(both())

    tasks = [task.remote(fleet) for task in on_every_node(blocking)] + [task.remote(joined) for task in on_every_node(looped)]
    assert await asyncio.gather(*tasks) == [[{member.node_id for member in fleet.members}] * 2] * 4
