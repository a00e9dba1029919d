"""What is made ahead of need: never anybody else's, never stale, never more than a few."""

import asyncio
import os
import shutil
import signal

import pytest
from tests import hostview, leftovers
from tests.images import small_image
from tests.security.faults.ground import strace

import untax

MIB = 1 << 20
ROOT = os.geteuid() == 0


async def quiet(engine, spec, leases: int = 2) -> None:
    """Leased and given back, and time for the launcher to prepare for the next."""
    for _ in range(leases):
        async with engine.lease(spec) as box:
            await box.run(["true"])
    await asyncio.sleep(0.2)


async def test_one_that_was_made_ahead_holds_nothing_of_its_predecessors(engine, spec):
    for n in range(4):
        await quiet(engine, spec, leases=1)
        async with engine.lease(spec) as box:
            assert (await box.shell("ls -A . /tmp /dev/shm | grep -c predecessor")).text == "0\n"
            await box.shell(f"echo {n} | tee predecessor /tmp/predecessor /dev/shm/predecessor")


async def test_r7_limits_hold_for_one_that_was_made_ahead_for_others(engine, box, enforced):
    enforced("disk_mib", "pids")
    await quiet(engine, untax.EnvSpec())
    narrow = untax.EnvSpec(limits=untax.Limits(disk_mib=24, pids=20, memory_mib=128))
    async with engine.lease(narrow) as tight:
        full = await tight.shell("dd if=/dev/zero of=a bs=1M count=20; dd if=/dev/zero of=b bs=1M count=20", timeout_s=60)
        crowd = await tight.shell("for i in $(seq 60); do sleep 5 & done 2>/dev/null; wait", timeout_s=2)
        oom = await tight.run(["python3", "-c", "x = bytearray(400 << 20)"])
    await quiet(engine, narrow)
    async with engine.lease(untax.EnvSpec(limits=untax.Limits(disk_mib=200, pids=200))) as wide:
        roomy = await wide.shell("dd if=/dev/zero of=a bs=1M count=60 status=none; stat -c %s a", timeout_s=60)

    assert full.outcome == "disk_full"
    assert crowd.limit_kind == "pids"
    assert oom.outcome == "oom"
    assert int(roomy.text) == 60 * MIB


@pytest.mark.parametrize(("ahead", "waiting"), [(True, True), (False, False)])
async def test_nothing_is_made_ahead_where_that_is_not_wanted(tmp_path, ahead, waiting):
    before = {process.pid for process in hostview.below(os.getpid())}  # those of other engines here
    async with untax.Engine("namespace", state_dir=tmp_path / "state", ahead=ahead) as engine:
        await quiet(engine, untax.EnvSpec())
        made_ahead = [p for p in hostview.below(os.getpid()) if p.pid not in before and p.comm in ("cell-waiting", "cell-maker")]
        async with engine.lease() as box:
            assert (await box.run(["echo", "still here"])).text == "still here\n"

    assert bool(made_ahead) is waiting


@pytest.mark.parametrize("ahead", ["yes", 2, None])
def test_what_is_neither_true_nor_false_is_told(ahead):
    with pytest.raises(untax.UsageError, match="ahead must be True or False"):
        untax.Engine("namespace", ahead=ahead)


async def test_an_image_that_was_replaced_is_seen_as_it_is_now(engine, tmp_path):
    """Removed and made again under the same name: what was prepared over the old one is not used."""
    image = tmp_path / "image"
    for content in ("old", "new"):
        shutil.rmtree(image, ignore_errors=True)
        shutil.copytree(small_image("namespace").removeprefix("dir:"), image, symlinks=True)
        (image / "content").write_text(content)
        os.chmod(image / "content", 0o644)
        spec = untax.EnvSpec(image=f"dir:{image}")
        await quiet(engine, spec, leases=3)
        async with engine.lease(spec) as box:
            assert await box.read("/content") == content.encode()


async def test_c12_each_has_a_name_of_its_own_although_it_was_made_without_one(engine, spec):
    names = set()
    for _ in range(4):
        await quiet(engine, spec, leases=1)
        async with engine.lease(spec) as box:
            names.add((await box.run(["cat", "/proc/sys/kernel/hostname"])).text.strip())
            assert (await box.run(["cat", "/proc/1/comm"])).text == "cell-agent\n"
            assert names & {box._sandbox.id}
    assert len(names) == 4


async def test_x22_one_that_died_while_it_waited_is_not_handed_out(engine, spec):
    await quiet(engine, spec)
    waiting = hostview.parked()
    for agent in waiting:
        os.kill(agent.pid, signal.SIGKILL)
    assert all([await asyncio.to_thread(hostview.wait_gone, agent.pid, 2) for agent in waiting])
    async with engine.lease(spec) as box:
        assert (await box.run(["echo", "alive"])).stdout == b"alive\n"
    await quiet(engine, spec)

    assert waiting, "nothing was made ahead"
    assert hostview.parked(), "nothing is made ahead any more"


async def test_x13_what_the_launcher_knows_of_mounts_one_failure_elsewhere_does_not_decide(tmp_path, spec, as_root):
    """The process that makes ahead finds nothing out anew: files of what it makes have owners that a snapshot can be shared with."""
    if shutil.which("strace") is None:
        pytest.skip("needs strace")
    before = {process.pid for process in hostview.below(os.getpid())}
    async with untax.Engine("namespace", state_dir=tmp_path / "state") as engine:
        [maker] = [p for p in hostview.below(os.getpid()) if p.pid not in before and p.comm == "cell-maker"]
        async with strace(maker.pid, "inject=mount_setattr:error=EINVAL:when=1") as struck:
            await quiet(engine, spec)
        assert struck
        await quiet(engine, spec)
        async with engine.lease(spec) as box:
            await box.write("mine", b"1")
            async with engine.restore(await box.snapshot()) as copy:
                assert (await copy.shell("stat -c %u mine .")).text.split() == ["1000", "1000"]


async def test_x4_without_a_maker_sandboxes_are_made_when_they_are_asked_for(tmp_path, spec):
    """Ended in the middle of its work, too: what it was making goes."""
    async with untax.Engine("namespace", state_dir=str(tmp_path / "state")) as engine:
        async with engine.lease(spec) as box:
            launcher = box._sandbox._launcher.pid
            [maker] = [p for p in hostview.below(launcher) if p.comm == "cell-maker"]
        os.kill(maker.pid, signal.SIGKILL)
        assert await asyncio.to_thread(hostview.wait_gone, maker.pid, 2)
        for _ in range(4):
            async with engine.lease(spec) as other:
                assert (await other.run(["echo", "made"])).stdout == b"made\n"
        [run] = [path.name for path in (tmp_path / "state" / "namespace").iterdir() if path.is_dir()]
    assert not [group for group in leftovers._cgroups() if run in group]


async def test_a_snapshot_that_was_prepared_for_holds_what_was_written_since(engine, spec):
    """From the second sandbox on the overlays are there before anybody asks; where they would begin differently now, they are made again."""
    for change in (
        "true",
        "echo x > /root-file",
        "mkdir /usr/local/fresh; chmod 700 /usr/local",
        "mkdir -p /top/deep && chmod 711 /top",
        "true",
    ):
        async with engine.lease(spec) as box:
            await box.write("early", b"early")
            await asyncio.sleep(0.1)  # now they are there
            if ROOT:
                (await box.shell(change, user="root")).check()
            await box.write("late", b"late")
            for n in range(3):
                snapshot = await box.snapshot()
                await box.write(f"after-{n}", b"x")
                async with engine.restore(snapshot) as again:
                    assert await again.read("late") == b"late"
                    with pytest.raises(FileNotFoundError):
                        await again.read(f"after-{n}")
                    listed = "stat -c '%n %a %u' /* /usr/local; ls -A / /usr/local"
                    assert (await again.shell(listed)).text == (await box.shell(listed)).text
                await snapshot.drop()


async def test_there_are_never_more_than_a_few(engine, tmp_path):
    for n in range(4):
        image = tmp_path / f"image-{n}"
        shutil.copytree(small_image("namespace").removeprefix("dir:"), image, symlinks=True)
        await quiet(engine, untax.EnvSpec(image=f"dir:{image}"))

        assert 0 < len(hostview.parked()) <= hostview.SPARES


async def test_a_dropped_snapshot_goes_although_something_was_made_ahead_over_it(engine, spec):
    async with engine.lease(spec) as box:
        await box.write("kept", b"x")
        snapshot = await box.snapshot()
    for _ in range(3):
        async with engine.restore(snapshot) as again:
            assert await again.read("kept") == b"x"
    await asyncio.sleep(0.2)
    await snapshot.drop()
    async with engine.lease(spec) as box:
        with pytest.raises(FileNotFoundError):
            await box.read("kept")


def test_a_group_that_nobody_waits_in_is_left_over():
    """Else two sandboxes could be lost in each test without anybody noticing."""
    names = ["cpu/spare-1", "cpu/spare-2", "memory/spare-1", "spare-7-blank", "spare-8-blank", "cpu/other"]

    assert leftovers._without_spares(names, 2, 2) == {"cpu/other"}
    assert leftovers._without_spares(names, 1, 2) == {"cpu/other", "cpu/spare #1"}


def test_a_sandbox_lost_before_its_first_word_is_somebody_s(monkeypatch):
    """It looks like one that waits; there are more of those than may be."""
    waiting = [hostview.Seen(pid, 1, "S", "cell-waiting", 0, (*hostview._own_pids(), 1)) for pid in (7, 8)]
    monkeypatch.setattr(hostview, "below", lambda _: waiting)
    assert hostview.held(1) == 0
    waiting.append(hostview.Seen(9, 1, "S", "cell", 0, (*hostview._own_pids(), 1)))
    assert hostview.held(1) == 1
