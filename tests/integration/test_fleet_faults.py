"""What becomes of a fleet whose nodes, agents, keeper or clients are killed, cut off, or not as they should be. One cluster for all of it."""

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests import raycluster
from tests.images import small_archive, small_image
from tests.leftovers import traces
from tests.serving import first_line, script

import untax

if reason := raycluster.unavailable_reason():
    pytest.skip(reason, allow_module_level=True)

from untax.cluster import actors

PATIENCE_S = 30.0
LEASE_S = 3.0
DEADLINE_S = 10.0
LATE_S = 10.0  # a call returns within a second of its deadline; this machine may be full


@pytest.fixture(scope="module")
def cluster(ray_nodes):
    return ray_nodes


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
async def fleet(cluster, state):
    async with untax.Fleet(cluster.address, state_dir=state / "{node}", lease_s=LEASE_S) as fleet:
        yield fleet


@pytest.fixture(autouse=True)
def nothing_added(cluster):
    """What a test that failed has added would fail all that follow."""
    before = cluster.ids()
    yield
    for node_id in [one for one in cluster.ids() if one not in before]:
        cluster.kill(node_id)


async def until(what, patience_s=PATIENCE_S):
    """Other processes have no event for us."""
    end = time.monotonic() + patience_s
    while not (found := what()):
        assert time.monotonic() < end, "it did not come to be"
        await asyncio.sleep(0.02)
    return found


async def box_on(fleet, node_id):
    return await next(node for node in fleet._nodes.values() if node.member.node_id == node_id and node.is_usable).acquire()


def elsewhere(fleet):
    """The node that is reached over TLS."""
    return next(node for node in fleet._nodes.values() if not node.is_here)


def actor_of(fleet, node_id):
    import ray

    return ray.get_actor(actors.node_actor_name(fleet.name, fleet._ticket.instance, node_id), actors.NAMESPACE)


def pid_of(fleet, node_id, whose):
    """Of the actor that Ray knows, or of the agent beside it."""
    if whose == "actor":
        return actor_of(fleet, node_id).__ray_call__.remote(lambda self: os.getpid())
    return actor_of(fleet, node_id).__ray_call__.remote(lambda self: self._agent._process.pid)


async def leases_of(fleet):
    return [await actor_of(fleet, one.node_id).leases.remote() for one in fleet.members]


# ---- nodes ----


async def test_a_node_that_joins_gets_its_share_and_one_that_is_killed_loses_its_leases_and_no_more(fleet, cluster):
    await fleet.warm(None, 4)
    joined = await asyncio.to_thread(cluster.add)
    await until(lambda: joined in {node.member.node_id for node in fleet._nodes.values()})
    [label] = [node.label for node in fleet._nodes.values() if node.member.node_id == joined]
    await until(lambda: sum(fleet._placing.views.view(label).idle.values()))
    await fleet.warm(None, 0)
    kept = await box_on(fleet, next(node_id for node_id in cluster.ids() if node_id != joined))
    box, idle = await box_on(fleet, joined), await box_on(fleet, joined)
    began_s = time.monotonic()
    running = asyncio.ensure_future(box.run(["sleep", "100"], timeout_s=DEADLINE_S))
    await box.run(["true"])
    await asyncio.to_thread(cluster.kill, joined)
    async with fleet.lease() as fresh:  # at once: nobody need have noticed
        assert (await fresh.run(["echo", "here"])).stdout == b"here\n"
    with pytest.raises(untax.SandboxLost):
        await running
    assert time.monotonic() - began_s < DEADLINE_S + LATE_S
    await until(lambda: joined not in {member.node_id for member in fleet.members})
    began_s = time.monotonic()
    # A ferry that outlives its sandboxes by a moment says that they ended, before anybody knows of the node.
    with pytest.raises(untax.SandboxLost, match=r"left the fleet|the cell hung up"):
        await idle.run(["true"], timeout_s=DEADLINE_S)
    assert time.monotonic() - began_s < DEADLINE_S + LATE_S
    assert box.ledger.verdict == idle.ledger.verdict == "infra"
    assert (await kept.run(["echo", "still"])).stdout == b"still\n"
    for one in (box, idle, kept):
        await one.release()
    assert kept.ledger.verdict == "trusted"


async def restored(fleet, snapshot):
    async with fleet.restore(snapshot) as box:
        assert await box.read("mine") == b"of the node that went"
        assert box._engine.member.node_id == elsewhere(fleet).member.node_id


async def test_a_copy_of_a_snapshot_outlives_the_node_that_took_it(fleet, cluster, tmp_path):
    joined = await asyncio.to_thread(cluster.add)
    await until(lambda: joined in {node.member.node_id for node in fleet._nodes.values()})
    node = next(one for one in fleet._nodes.values() if one.member.node_id == joined)
    async with node.lease(untax.EnvSpec(image=f"tar:{small_archive(tmp_path)}")) as box:
        await box.write("mine", b"of the node that went")
        snapshot = await box.snapshot()
        there = await fleet.copy(snapshot, elsewhere(fleet).member.node_id)
    await asyncio.to_thread(cluster.kill, joined)
    await restored(fleet, there)  # at once: nobody need have noticed
    await until(lambda: joined not in {member.node_id for member in fleet.members})
    for known_as in (there, there.id, snapshot):  # what it was a copy of is the copy now
        await restored(fleet, known_as)
    await there.drop()


@pytest.mark.parametrize("whose", ["actor", "agent"])
async def test_an_agent_that_is_killed_is_replaced_and_its_leases_are_lost(fleet, cluster, state, whose):
    node = elsewhere(fleet)
    box = await box_on(fleet, node.member.node_id)
    os.kill(await pid_of(fleet, node.member.node_id, whose), signal.SIGKILL)
    with pytest.raises(untax.SandboxLost):
        await box.run(["sleep", "100"])
    assert box.ledger.verdict == "infra"
    await box.release()
    fresh = await until(lambda: [one for one in fleet._nodes.values() if one.member.node_id == node.member.node_id and one is not node])
    assert fresh[0].member.key != node.member.key
    await (await box_on(fleet, node.member.node_id)).release()


async def test_a_drained_node_gets_no_more_leases_and_goes_when_its_last_is_over(fleet, cluster):
    joined = await asyncio.to_thread(cluster.add)
    await until(lambda: joined in {node.member.node_id for node in fleet._nodes.values()})
    box = await box_on(fleet, joined)
    draining = asyncio.ensure_future(fleet._joining.asked(fleet._joining.keeper.drain, joined[:12]))
    await until(lambda: any(one.is_draining for one in fleet.members if one.node_id == joined))
    for _ in range(4):
        async with fleet.lease() as other:
            assert other._engine.member.node_id != joined
    assert (await box.run(["echo", "goes on"])).stdout == b"goes on\n"
    await box.release()
    assert await draining == ""
    assert box.ledger.verdict == "trusted"
    await until(lambda: joined not in {member.node_id for member in fleet.members})
    assert [one.reason for one in fleet.refusals if one.node_id == joined] == ["it was drained"]
    assert "no node is named 'nonsense'" in await fleet._joining.asked(fleet._joining.keeper.drain, "nonsense")
    await asyncio.to_thread(cluster.kill, joined)


def begins_late(keeper):
    """Agents have not been begun for a while when their nodes are known already."""
    clear = keeper._clear

    async def late(node):
        await asyncio.sleep(2)
        await clear(node)

    keeper._clear = late


async def test_a_node_that_is_drained_before_its_agent_is_there_does_not_come_in_with_it(fleet, cluster):
    await fleet._joining.keeper.__ray_call__.remote(begins_late)
    joined = await asyncio.to_thread(cluster.add)
    while said := await fleet._joining.asked(fleet._joining.keeper.drain, joined[:12]):
        assert "no node is named" in said
        await asyncio.sleep(0.02)
    while not await fleet._joining.keeper.__ray_call__.remote(lambda self: self._nodes[joined].tending.done()):
        await asyncio.sleep(0.05)
    await fleet._joining.keeper.__ray_call__.remote(lambda self: delattr(self, "_clear"))
    known = await fleet._joining.keeper.__ray_call__.remote(lambda self: (self._nodes[joined].member, self._nodes[joined].refused))
    assert known == (None, "it was drained")
    with pytest.raises(ValueError):
        await pid_of(fleet, joined, "actor")
    await asyncio.to_thread(cluster.kill, joined)


# ---- who keeps it ----


async def test_leases_and_actions_go_on_without_whoever_keeps_the_fleet(fleet, cluster):
    box = await fleet.acquire()
    pid = await fleet._joining.keeper.__ray_call__.remote(lambda self: os.getpid())
    os.kill(pid, signal.SIGSTOP)
    try:
        for _ in range(6):
            async with fleet.lease() as other:
                assert (await other.run(["echo", "on"])).stdout == b"on\n"
    finally:
        os.kill(pid, signal.SIGKILL)
    assert (await box.run(["echo", "on"])).stdout == b"on\n"
    joined = await asyncio.to_thread(cluster.add)  # it is there again
    await until(lambda: joined in {node.member.node_id for node in fleet._nodes.values()})
    await asyncio.to_thread(cluster.kill, joined)
    await until(lambda: joined not in {node.member.node_id for node in fleet._nodes.values()})
    assert (await box.run(["echo", "on"])).stdout == b"on\n"
    await box.release()


# ---- clients ----


async def said(source, *arguments):
    """A program, and its first line that is not Ray's, which tells every driver of nodes that died."""
    process, line = await script(source, *arguments)
    while line.startswith((b"\x1b", b"\t")):
        line = await first_line(process)
    return process, line


HOLDER = """
import asyncio, sys, untax
async def main():
    fleet = untax.Fleet.from_ticket(sys.argv[1])
    await fleet.start()
    boxes = [await node.acquire() for node in fleet._nodes.values() for _ in range(2)]
    print(len(boxes), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""

MAKER = """
import asyncio, json, sys, untax
async def main():
    fleet = untax.Fleet(sys.argv[1], name="short-lived", state_dir=sys.argv[2] + "/{node}")
    await fleet.start()
    box = await fleet.acquire()
    print(json.dumps([member.socket for member in fleet.members]), flush=True)
    await asyncio.sleep(1000)
asyncio.run(main())
"""


async def test_leases_of_a_client_that_is_killed_are_reclaimed_on_every_node(fleet):
    before = await leases_of(fleet)
    process, line = await said(HOLDER, fleet.ticket())
    try:
        assert int(line) == 4
        assert sum(await leases_of(fleet)) == sum(before) + 4
    finally:
        process.kill()
        await process.wait()
        process._transport.close()
    end = time.monotonic() + PATIENCE_S
    while await leases_of(fleet) != before:
        assert time.monotonic() < end
        await asyncio.sleep(0.1)


def left_of(state, groups=()):
    """By kind; of the fleet that has its state there, and no other on the cluster."""
    found = traces(state, mark="nothing", groups=groups, is_other=lambda name, words: True)
    return {kind: names for kind, names in found.items() if names}


def actors_of(name):
    import ray

    return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if one["name"].split(":")[:2] == ["untax", name]]


async def test_a_fleet_whose_maker_is_killed_takes_itself_down_and_leaves_nothing(fleet, cluster, tmp_path):
    process, line = await said(MAKER, cluster.address, str(tmp_path))
    try:
        sockets = json.loads(line)
        assert len(sockets) == 2 and all(os.path.exists(path) for path in sockets)
        there = [one.split() for one in left_of(tmp_path)["processes"]]
        groups = [f"untax-engine-{pid}-" for name, pid in there if name == "untax-agent"]
        assert len(groups) == 2 and {"memfd:cell", "sh"} <= {name for name, _ in there}, "or nothing would be left whatever happened"
        assert {"mounts", "entries", *(("groups",) if os.geteuid() == 0 else ())} <= left_of(tmp_path, groups).keys()
        assert len(actors_of("short-lived")) == 3  # who keeps it, and one on each node
    finally:
        process.kill()
        await process.wait()
        process._transport.close()
    await until(lambda: not any(os.path.exists(path) for path in sockets))
    end = time.monotonic() + PATIENCE_S
    while any(left := (left_of(tmp_path, groups), actors_of("short-lived"))):
        assert time.monotonic() < end, left
        await asyncio.sleep(0.05)


# ---- nodes that are not as they should be ----


@contextlib.contextmanager
def changed_python(directory, lines):
    """Python processes that begin meanwhile carry these out first."""
    (directory / "sitecustomize.py").write_text(lines)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(directory)
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH") if before is None else os.environ.update(PYTHONPATH=before)


def other_untax(directory, version=None):
    """Another untax: of another version, or the pure one that has no cell."""
    tree = directory / "untax"
    shutil.copytree(Path(untax.__file__).parent, tree, ignore=shutil.ignore_patterns("_native", "__pycache__"))
    if version is not None:
        text = (tree / "__init__.py").read_text()
        (tree / "__init__.py").write_text(text.replace(f'__version__ = "{untax.__version__}"', f'__version__ = "{version}"'))
    # An editable installation finds itself before every path.
    return changed_python(
        directory, "import sys\nsys.meta_path[:] = [one for one in sys.meta_path if 'untax' not in type(one).__module__]\n"
    )


def wrong_clock(directory):
    """An hour late, for all that its programs can see."""
    return changed_python(directory, "import time\n_true = time.time\ntime.time = lambda: _true() - 3600.0\n")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (lambda directory: other_untax(directory, "0.0.9"), r"it has untax 0\.0\.9, the fleet .*: install untax=="),
        (other_untax, r"SubstrateUnavailable: .*cell"),
        (wrong_clock, r"its clock is 3(600|59\d) s behind: set it"),
    ],
    ids=["another release", "no cell", "a wrong clock"],
)
async def test_a_node_that_cannot_be_one_is_refused_with_the_remedy_and_the_others_serve(fleet, cluster, tmp_path, made, words):
    with made(tmp_path):
        joined = await asyncio.to_thread(cluster.add)
    refusal = await until(lambda: next((one for one in fleet.refusals if one.node_id == joined), None))
    assert re.search(words, refusal.reason), refusal
    async with fleet.lease() as box:
        assert box._engine.member.node_id != joined
    await asyncio.to_thread(cluster.kill, joined)
    await until(lambda: not fleet.refusals)


async def test_a_node_that_makes_no_namespaces_is_refused_with_the_remedy(fleet, cluster):
    with cluster.confined("echo 0 > /proc/sys/user/max_user_namespaces") as joined:
        refusal = await until(lambda: next((one for one in fleet.refusals if one.node_id == joined), None))
        assert re.search(r"SubstrateUnavailable: namespace: .*user namespaces.*max_user_namespaces", refusal.reason), refusal
        async with fleet.lease() as box:
            assert box._engine.member.node_id != joined
    await until(lambda: not fleet.refusals)


SPEC = untax.EnvSpec(image=small_image("namespace"), setup=("head -c 4000000 /dev/urandom > /large",))


async def test_a_node_whose_disk_is_full_refuses_what_needs_it_also_while_it_has_leases(cluster, tmp_path):
    """An engine of its own would wait for a lease to end there; who has another node to ask does not."""
    if os.geteuid() != 0:
        pytest.skip("mounts: only root can give a directory a disk of its own")
    full, other = cluster.ids()[:2]
    disk = tmp_path / full[:12]
    disk.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m,mode=700", "tmpfs", str(disk)], check=True)
    try:
        async with untax.Fleet(cluster.address, name="full", state_dir=tmp_path / "{node}", limits="warn") as fleet:
            assert {member.node_id for member in fleet.members} == set(cluster.ids()), fleet.refusals
            node = next(one for one in fleet._nodes.values() if one.member.node_id == full)
            async with node.lease(untax.EnvSpec(image=SPEC.image)) as held:
                fill(disk, but_bytes=1 << 20)
                async with asyncio.timeout(PATIENCE_S), fleet.lease(SPEC) as box:
                    assert (await box.run(["stat", "-c", "%s", "/large"])).stdout == b"4000000\n"
                    assert box._engine.member.node_id == other
                    [(refused, why)] = box.ledger.placed.tried
                    assert refused == node.label and "is full" in why
                assert (await held.run(["true"])).exit_code == 0
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk, *, but_bytes):
    left = os.statvfs(disk)
    with open(disk / "filler", "wb") as file:
        os.posix_fallocate(file.fileno(), 0, left.f_bavail * left.f_bsize - but_bytes)


async def test_a_handle_used_after_the_fleet_went_down_says_so(cluster, tmp_path):
    async with untax.Fleet(cluster.address, name="gone", state_dir=tmp_path / "{node}") as fleet:
        joined = untax.Fleet.from_ticket(fleet.ticket())
        await joined.start()
        box = await joined.acquire()
        late = untax.Fleet.from_ticket(fleet.ticket())
    for handle in (joined, late):
        with pytest.raises(untax.PoolClosed, match="'gone' was taken down; bring it up again"):
            await handle.acquire()
    with pytest.raises(untax.SandboxLost):
        await box.run(["true"])
    assert box.ledger.verdict == "infra"
    with pytest.raises(untax.PoolClosed):
        await fleet.acquire()
    await joined.aclose()


def ray_version():
    import ray

    return ray.__version__


def test_what_is_no_cluster_is_refused_with_the_remedy(cluster):
    code = """
import asyncio, sys, untax
for address in ("127.0.0.1:1", "ray://127.0.0.1:1", "nonsense:port", sys.argv[1]):
    if address == sys.argv[1]:
        import ray
        ray.__version__ = "2.9.3"  # which is what the cluster's own is compared with
    try:
        asyncio.run(untax.Fleet(address).start())
    except untax.UntaxError as exc:
        print(type(exc).__name__, exc)
"""
    said = subprocess.run(["env", "-u", "RAY_ADDRESS", sys.executable, "-c", code, cluster.address], capture_output=True, text=True, timeout=60)  # fmt: skip
    lines = said.stdout.splitlines()
    assert len(lines) == 4, said
    assert lines[0].startswith("SubstrateUnavailable no Ray cluster answers at 127.0.0.1:1") and "ray start --head" in lines[0]
    assert lines[1].startswith("UsageError ray://") and "HOST:PORT" in lines[1]
    assert lines[2].startswith("UsageError address must be 'auto' or HOST:PORT of a Ray cluster's head, not 'nonsense:port'")
    assert re.search(rf"^UsageError the Ray cluster at '{cluster.address}' is of another version: .*Ray: {ray_version()} .*Ray: 2\.9\.3 .*; install the same ray", lines[3])  # fmt: skip


async def test_a_fleet_that_is_up_is_not_joined_with_other_options(fleet, cluster):
    with pytest.raises(untax.UsageError, match=r"is up with lease_s=3\.0, not 5\.0: join it without options"):
        await untax.Fleet(cluster.address, lease_s=5.0).start()
    async with untax.Fleet(cluster.address) as joined, joined.lease() as box:
        assert (await box.run(["echo", "joined"])).stdout == b"joined\n"
    assert (await (await fleet.acquire()).run(["echo", "still up"])).stdout == b"still up\n"
