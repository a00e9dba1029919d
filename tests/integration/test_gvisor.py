"""The gVisor substrate: what its evidence says, the incumbent path, what becomes of it when its engine dies, and live snapshots."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.engines_fixture import docker  # noqa: F401
from tests.images import small_directory, tools_directory
from tests.integration.test_vm import show_little

import untax
from untax import substrates
from untax.substrates import _gvisor_groups, gvisor

SPEC = untax.EnvSpec(image=f"dir:{tools_directory()}", isolation="gvisor")
SMALL = untax.EnvSpec(image=f"dir:{small_directory()}", isolation="gvisor")
COUNTER = "import sys\nn = 0\nfor line in sys.stdin:\n    n += int(line)\n    print(n, flush=True)"


@pytest.fixture(scope="module")
def engine(_runner, tmp_path_factory):
    if reason := substrates.load("gvisor").unavailable_reason():
        pytest.skip(f"gvisor: {reason}")
    engine = untax.Engine("gvisor", state_dir=tmp_path_factory.mktemp("gvisor") / "state")
    _runner.run(engine.start())
    yield engine
    _runner.run(engine.aclose())


@pytest.fixture
async def box(engine):
    async with engine.lease(SPEC) as box:
        yield box


# ---- what it is ----


async def test_commands_meet_a_kernel_of_their_own(box):
    """And not the host's: neither its release nor its boot."""
    said = (await box.shell("uname -r; cat /proc/sys/kernel/random/boot_id; dmesg")).text

    assert os.uname().release not in said
    assert Path("/proc/sys/kernel/random/boot_id").read_text().strip() not in said
    assert "gVisor" in said
    assert (box.ledger.substrate, box.ledger.isolation) == ("gvisor", "gvisor")


async def test_the_incumbent_path_runs_the_same_command(box):
    """One `runsc exec`: the same output, exit codes and words for what is missing."""
    sandbox = box.sandbox

    done = await sandbox.run_incumbent(["sh", "-c", "id -u; echo no >&2; exit 3"], timeout_s=20)
    missing = await sandbox.run_incumbent(["no-such-program"], timeout_s=20)
    late = await sandbox.run_incumbent(["sleep", "60"], timeout_s=0.3)

    assert (done.exit_code, done.stdout, done.stderr) == (3, b"1000\n", b"no\n")
    assert missing.exit_code == 127
    assert late.timed_out


async def test_a_sandbox_that_was_killed_is_lost_to_both_paths(engine):
    async with engine.lease(SPEC) as box:
        os.kill(box.sandbox.pid, signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await box.run(["sleep", "5"])
        assert box.ledger.verdict == "infra"


def test_a_program_that_is_not_there_is_named():
    reason = substrates.load("gvisor", runsc="/no/such/runsc").unavailable_reason()

    assert reason is not None
    assert "/no/such/runsc" in reason


@pytest.mark.parametrize("options", [{"platform": "xen"}, {"starts": 0}, {"starts": True}, {"ready_s": -1}])
def test_a_wrong_option_is_refused(options):
    with pytest.raises(untax.UsageError):
        substrates.load("gvisor", **options)


async def test_docker_s_runsc_is_gvisor_and_its_runc_is_not(docker, tmp_path):  # noqa: F811
    """The boundary is the one that the engine says its runtime is; a limit that it was told to ignore is said not to hold."""
    if substrates.load("gvisor").unavailable_reason() is not None:
        pytest.skip("gvisor: no runsc for docker to use")
    options = {"engine": "docker", "socket": str(docker.socket)}
    async with untax.Engine("container", state_dir=tmp_path / "state", runtime="runsc", **options) as engine, engine.lease(SMALL) as box:
        assert (await box.shell("uname -r")).text.strip() != os.uname().release
        assert box.ledger.isolation == "gvisor"
        assert {one.name for one in box.ledger.unenforced} >= {"memory_mib", "cpus"}
        async with box.session() as bash:
            await bash.run("x=1")
            assert (await bash.run("echo $x")).text == "1\n"
    async with untax.Engine("container", state_dir=tmp_path / "state", **options) as engine:
        with pytest.raises(untax.UsageError, match="isolation"):
            await engine.acquire(SMALL)


async def test_the_host_s_own_software_is_taken_in_once(tmp_path, monkeypatch):
    """What is inside is what lies on this machine, and of /etc only what is listed."""
    if reason := substrates.load("gvisor").unavailable_reason():
        pytest.skip(f"gvisor: {reason}")
    view, state = show_little(monkeypatch, tmp_path), tmp_path / "state"
    mark = (view / "mark").read_text()
    for _ in range(2):
        async with untax.Engine("gvisor", state_dir=state) as engine, engine.lease(untax.EnvSpec(image="host", isolation="gvisor")) as box:
            assert (await box.run(["/opt/view/tool"])).text == mark
            assert await box.read("/etc/ld.so.cache") == Path("/etc/ld.so.cache").read_bytes()
            assert (await box.shell("test -e /etc/shadow")).exit_code == 1
        (view / "mark").write_text("changed")  # this machine's packages have not, so that what was taken in is good for the next engine too
    assert len(list((state / "gvisor/chains").iterdir())) == 1


# ---- what is left of it ----

_HOLD = """
import asyncio, sys, untax
async def main():
    async with untax.Engine("gvisor", state_dir=sys.argv[1]) as engine:
        boxes = [await engine.acquire(untax.EnvSpec(image=sys.argv[2], isolation="gvisor")) for _ in range(2)]
        print(*(box.sandbox.pid for box in boxes), flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_x1_what_a_killed_engine_left_is_gone_with_the_next_start(engine, tmp_path):
    """Its sandboxes die with it, at once; its groups and directories are swept."""
    state = tmp_path / "state"
    held = subprocess.Popen([sys.executable, "-c", _HOLD, str(state), SPEC.image], stdout=subprocess.PIPE, text=True)
    try:
        pids = [int(one) for one in (await asyncio.to_thread(held.stdout.readline)).split()]
        assert len(pids) == 2
        place = Path(os.readlink(next((state / "gvisor").glob("engine-*/run"))))
        pidfds = [os.pidfd_open(pid) for pid in pids]
    finally:
        held.kill()
        held.wait()
    async with asyncio.timeout(10):
        for pidfd in pidfds:
            await _end_of(pidfd)
    async with untax.Engine("gvisor", state_dir=state):
        left = [path.name for path in (state / "gvisor").glob("engine-*") if f"-{held.pid}-" in path.name]
        groups = [path for tree in _gvisor_groups._trees() for path in tree.parent.glob(f"*engine-{held.pid}-*")]
    assert (left, groups, place.exists()) == ([], [], False)


async def _end_of(pidfd):
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    await ended.wait()
    asyncio.get_running_loop().remove_reader(pidfd)
    os.close(pidfd)


async def test_a_closed_engine_leaves_nothing(engine, tmp_path):
    async with untax.Engine("gvisor", state_dir=tmp_path / "state") as other:
        await other.acquire(SPEC)
        place = other.substrate._runsc.place
        name = other.substrate._holding.path.name
    assert not place.exists()
    assert [path for tree in _gvisor_groups._trees() for path in tree.parent.glob(f"*{name}*")] == []
    assert list((tmp_path / "state" / "gvisor").glob("engine-*")) == []


# ---- live snapshots ----


async def test_a_session_s_variables_are_in_every_copy_and_then_its_own(engine, box):
    """Two forks diverge, from each other and from the box that they were taken of."""
    async with box.session() as bash:
        await bash.run("cd /tmp; x=1; f() { echo f$x; }; echo one > file")
        snapshot = await box.snapshot(live=True)
        await bash.run("x=9; echo nine > file")
        async with engine.fork(snapshot, 2) as group:
            copies = [await one.session(resume=bash).open() for one in group]
            for number, copy in enumerate(copies, 2):
                await copy.run(f"x={number}$x; echo $x >> file")
            said = [(await copy.run("pwd; f; cat file")).text for copy in copies]
        here = (await bash.run("f; cat file")).text
    assert said == ["/tmp\nf21\none\n21\n", "/tmp\nf31\none\n31\n"]
    assert here == "f9\nnine\n"
    assert (snapshot.how, snapshot.is_live) == ("live", True)


async def test_a_started_interpreter_goes_on_with_what_it_knows(engine, box):
    counter = await box.start(["python3", "-c", COUNTER])
    await counter.write(b"40\n")
    assert (await counter.read()).data == b"40\n"

    snapshot = await box.snapshot(live=True)

    async with engine.restore(snapshot) as copy:
        taken = await copy.attach(counter.pid)
        await taken.write(b"2\n")
        assert (await _line(taken)) == b"42\n"
    await counter.write(b"1\n")
    assert (await _line(counter)) == b"41\n"


async def _line(process):
    data = b""
    while not data.endswith(b"\n"):
        data += (await process.read()).data
    return data


async def test_a_server_answers_in_a_box_that_was_restored(engine, box):
    """And a reset goes back to the snapshot, not to the image: the server is part of what the box begins with."""
    server = await box.start(["python3", "-u", "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", "/etc"])
    assert b"Serving" in (await server.read()).data

    snapshot = await box.snapshot(live=True)

    async with engine.restore(snapshot) as copy:
        assert b"root:" in await _get(copy, 8000)
        await copy.shell("rm -f /etc/passwd; pkill python3; kill -9 -1")
        await copy.reset()
        assert b"root:" in await _get(copy, 8000)
    assert b"root:" in await _get(box, 8000)


async def test_a_lease_of_a_warm_pool_has_the_server_running(engine, box):
    """Started once, and part of what is kept ready: each lease gets a copy of its own, with what it binds late."""
    server = await box.start(["python3", "-u", "-m", "http.server", "8000", "--bind", "127.0.0.1", "--directory", "/etc"])
    assert b"Serving" in (await server.read()).data
    snapshot = await box.snapshot(live=True)

    await engine.warm(snapshot, 2)

    async with engine.fork(snapshot, 2, env={"MINE": "1"}, files={"bound": b"late"}) as group:
        assert [one.ledger.hit.kind for one in group] == ["exact", "exact"]
        assert len({(await one.shell("cat /proc/sys/kernel/hostname")).text for one in group}) == 2
        await group[0].shell("rm /etc/passwd; pkill python3; kill -9 -1")
        assert b"root:" in await _get(group[1], 8000)
        assert (await group[1].shell("echo $MINE; cat bound")).text == "1\nlate"
        assert (await group[1].attach(server.pid)).pid == server.pid
        await group[0].reset()
        assert b"root:" in await _get(group[0], 8000)
    async with engine.restore(snapshot, limits=untax.Limits(memory_mib=512)) as other:  # settled when it is made: none of the pool's
        assert b"root:" in await _get(other, 8000)
        assert other.ledger.hit is None
    await snapshot.drop()
    assert not any(stage.name == "snapshot" and stage.idle for stage in engine.pools().stages)


async def _get(box, port):
    connection = await box.connect(port)
    await connection.write(b"GET /passwd HTTP/1.0\r\n\r\n")
    data = b""
    with contextlib.suppress(untax.UntaxError):
        while piece := await connection.read():
            data += piece
    return data


async def test_c13_a_copy_has_a_name_a_seed_and_a_clock_of_its_own(engine, box):
    """What would make two copies the same to the outside is not in them."""
    ask = "cat /proc/sys/kernel/hostname; head -c 16 /dev/urandom | od -An -tx1; date +%s"
    snapshot = await box.snapshot(live=True)
    async with engine.fork(snapshot, 2) as group:
        said = [(await one.shell(ask)).text.splitlines() for one in (box, *group)]
        host = (await asyncio.create_subprocess_exec("date", "+%s", stdout=subprocess.PIPE)).communicate()
        now = int((await host)[0])
    names, seeds, clocks = zip(*said, strict=True)
    assert len(set(names)) == len(set(seeds)) == 3
    assert all(abs(int(clock) - now) <= 2 for clock in clocks)


async def test_a_live_snapshot_waits_for_nobody_s_answer(engine, box):
    """What somebody waits for would be answered twice; that is refused, and the box goes on."""
    running = asyncio.create_task(box.run(["sleep", "1"]))
    await box.run(["true"])
    with pytest.raises(untax.UsageError, match="await them first"):
        await box.snapshot(live=True)
    assert (await running).exit_code == 0
    assert (await box.run(["echo", "on"])).text == "on\n"
    assert box.ledger.verdict == "trusted"


async def test_what_a_live_snapshot_has_settled_is_said(engine, box):
    snapshot = await box.snapshot(live=True)
    with pytest.raises(untax.UsageError, match="cannot be changed"):
        await engine.restore(snapshot, limits=untax.Limits(pids=7))
    with pytest.raises(untax.UsageError, match="live snapshot"):
        await engine.restore(snapshot, user="root")
    place = Path(snapshot.ground.root.memory)
    await snapshot.drop()
    async with asyncio.timeout(10):
        while place.exists():
            await asyncio.sleep(0.01)


async def test_a_saved_live_snapshot_outlives_its_engine(tmp_path):
    """Another engine goes on with its processes, keeps copies ready, and saves what it made of it; where memory cannot go on that is said."""
    state = tmp_path / "state"
    if reason := substrates.load("gvisor").unavailable_reason():
        pytest.skip(f"gvisor: {reason}")
    async with untax.Engine("gvisor", state_dir=state) as first, first.lease(SPEC) as box:
        counter = await box.start(["python3", "-c", COUNTER])
        await counter.write(b"40\n")
        await _line(counter)
        saved = await (await box.snapshot(live=True)).save()

    async with untax.Engine("gvisor", state_dir=state) as second:
        await second.warm(saved, 1)
        async with second.restore(saved, env={"MINE": "1"}) as copy:
            assert copy.ledger.hit.kind == "exact"
            taken = await copy.attach(counter.pid)
            await taken.write(b"2\n")
            assert await _line(taken) == b"42\n"
            assert (await copy.shell("echo $MINE")).text == "1\n"
            again = await (await copy.snapshot(live=True)).save()
        shared = [set(second.warehouse.store.stage(one).adds) for one in (saved, again)]
        assert len(shared[0] & shared[1]) == 1  # the image that both stand on

    async with untax.Engine("gvisor", state_dir=state, platform="ptrace") as other:
        with pytest.raises(untax.StageUnavailable, match="put down with platform systrap, and here is ptrace"):
            await other.restore(again)
    async with untax.Engine("namespace", state_dir=state) as plain:
        with pytest.raises(untax.UsageError, match=r"memory of processes on 'gvisor'; restore it with Engine\('gvisor'\)"):
            await plain.find_snapshot(saved)

    async with untax.Engine("gvisor", state_dir=state) as third:
        await (await third.find_snapshot(saved)).drop()
        async with third.restore(again) as copy:
            taken = await copy.attach(counter.pid)
            await taken.write(b"1\n")
            assert await _line(taken) == b"43\n"
        with pytest.raises(untax.UsageError, match="no saved snapshot"):
            await third.find_snapshot(saved)
    assert list((state / "gvisor").glob("engine-*")) == []


async def test_a_box_whose_chain_had_to_go_is_put_down_and_the_next_lease_takes_it_in_again(engine):
    """Other chains may take its place while it is in use."""
    async with engine.lease(SMALL) as box:
        chain = Path(box.sandbox._root.layers[-1])
        chain.unlink()
        snapshot = await box.snapshot(live=True)
        async with engine.restore(snapshot) as copy:
            assert (await copy.run(["echo", "on"])).text == "on\n"
            again = await copy.snapshot(live=True)
        async with engine.restore(again) as copy:
            assert (await copy.run(["echo", "on"])).text == "on\n"
    async with engine.lease(SMALL) as box:
        assert (await box.run(["echo", "on"])).text == "on\n"
        assert chain.exists()


async def test_a_copy_that_ends_before_it_is_told_its_name_is_an_error_and_leaves_nothing(engine, box, monkeypatch):
    class Dead(gvisor.Started):
        def __init__(self, *words):
            super().__init__(*words)
            self.kill()
            self.process.wait()

    snapshot = await box.snapshot(live=True)
    place = engine.substrate._holding.path
    before = set(place.glob("sbx-*"))
    with monkeypatch.context() as patch:
        patch.setattr(gvisor, "Started", Dead)
        with pytest.raises(untax.CreateError, match="did not come up"):
            await engine.restore(snapshot)
    async with asyncio.timeout(10):
        while set(place.glob("sbx-*")) - before:
            await asyncio.sleep(0.01)
    async with engine.restore(snapshot) as copy:
        assert (await copy.run(["echo", "on"])).text == "on\n"


async def test_live_is_refused_with_words_where_it_cannot_be(tmp_path):
    if reason := substrates.load("namespace").unavailable_reason():
        pytest.skip(f"namespace: {reason}")
    async with untax.Engine("namespace", state_dir=tmp_path / "state") as other, other.lease() as box:
        with pytest.raises(untax.SubstrateUnavailable, match="can put processes down"):
            await box.snapshot(live=True)
