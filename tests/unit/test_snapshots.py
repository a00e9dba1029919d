"""Stages, snapshots and resets on a fake substrate with layers: the order of steps, who keeps what, and that nothing is left behind."""

import asyncio
import contextlib
import logging
import os
import random
import threading

import pytest

import untax
from untax import flats, quarantine, shelf
from untax.layers.store import LayerStore
from untax.testing import FakeExit, LayeredFake


@pytest.fixture
def image(tmp_path):
    root = tmp_path / "image"
    (root / "workspace").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/release").write_text("one")
    return root


@pytest.fixture
def fake(tmp_path):
    return LayeredFake(tmp_path / "fake", programs={"for": lambda argv, env, stdin: FakeExit()})


@pytest.fixture
def make(fake, tmp_path):
    return lambda **options: untax.Engine(fake, state_dir=tmp_path / "state", **options)


@pytest.fixture
async def engine(make):
    async with make() as engine:
        yield engine


@pytest.fixture
def spec(image):
    return untax.EnvSpec(image=f"dir:{image}")


# ---- stages ----


def installs(fake):
    """A program that writes a file, as an installation would, and what it found."""
    seen = []

    def install(argv, env, stdin):
        seen.append(dict(env))
        fake.sandboxes[-1].files.write(argv[1], b"installed", 0o644, exclusive=False)
        return FakeExit(stdout=f"installed {argv[1]}\n".encode())

    fake.programs["install"] = install
    return seen


async def test_a_missing_stage_is_built_once_and_then_at_hand(fake, engine, spec):
    installs(fake)
    spec = untax.EnvSpec(image=spec.image, setup=("install /opt/tool",))
    async with engine.lease(spec) as first:
        assert await first.read("/opt/tool") == b"installed"
    assert list(first.ledger.stages) == ["deps"]
    assert first.ledger.metrics()["setup_s"] > 0
    assert fake.log.count("create") == 2

    fake.log.clear()
    async with engine.lease(spec, env={"LATE": "1"}, limits=untax.Limits(memory_mib=64)) as second:
        assert await second.read("/opt/tool") == b"installed"
    assert fake.log == ["create", "wait_ready", "open_channel", "configure", "destroy"]
    assert second.ledger.stages == {}
    assert second.ledger.metrics()["setup_s"] == 0
    assert not fake.frozen


async def test_set_up_commands_run_where_the_repository_lies(fake, engine, image, tmp_path, monkeypatch):
    """Not where the image would begin; without a repository there."""
    config = untax.core.root.ImageConfig(workdir="/srv")
    monkeypatch.setattr("untax.layers.sources.dir.make", lambda *_: Wishing(image, config))

    async def no_repository(*args, **options):
        return ()

    monkeypatch.setattr(engine.warehouse._grounds._stages, "_checked_out", no_repository)
    for repo, place in ((None, "/srv"), (untax.Repo(str(tmp_path), "0" * 40), "/workspace")):
        async with engine.lease(untax.EnvSpec(image="dir:/x", repo=repo, setup=("true",))):
            assert [spec.workdir for spec in fake.specs[-2:]] == [place] * 2


async def test_a_hundred_leases_of_one_missing_stage_build_it_once(fake, engine, spec):
    installs(fake)
    spec = untax.EnvSpec(image=spec.image, setup=("install /opt/tool",))

    async def rollout():
        async with engine.lease(spec) as box:
            return await box.read("/opt/tool")

    assert set(await asyncio.gather(*(rollout() for _ in range(100)))) == {b"installed"}
    assert fake.log.count("spawn install /opt/tool") == 1
    assert not fake.live


async def test_set_up_commands_have_a_policy_a_cache_and_variables_of_their_own(fake, make, spec):
    """Nothing that binds late gets into a layer that others will stand on."""
    seen = installs(fake)
    fake.marks = "trusted"
    async with make(setup_network=("index.example:443",)) as engine:
        spec = untax.EnvSpec(
            image=spec.image, setup=("install /opt/tool",), env={"SECRET": "1"}, limits=untax.Limits(memory_mib=64), user="me"
        )
        async with engine.lease(spec):
            pass
    build, lease = fake.specs
    assert (build.network, build.user, build.limits.memory_mib) == (("index.example:443",), "root", 64)
    assert (lease.network, lease.user) == ("none", "me")
    assert "SECRET" not in seen[0]
    assert seen[0]["PIP_CACHE_DIR"].startswith("/var/cache/untax")
    assert fake.caches[0].is_dir()
    assert fake.caches[1] is None


async def test_a_set_up_command_that_fails_says_which_with_its_log(fake, engine, spec):
    fake.programs["break"] = lambda argv, env, stdin: FakeExit(7, stdout=b"no such package: frobnicate\n")
    spec = untax.EnvSpec(image=spec.image, setup=("echo first", "break it", "echo never"))
    with pytest.raises(untax.StageFailed, match=r"break it.*exit code 7") as failed:
        await engine.acquire(spec)
    assert failed.value.stage == "deps"
    assert failed.value.log == b"$ echo first\nfirst\n$ break it\nno such package: frobnicate\n"
    assert not failed.value.retryable
    assert "spawn echo never" not in fake.log
    assert not fake.live
    assert not fake.frozen
    fake.programs["break"] = fake.programs["true"]
    async with engine.lease(spec):  # nothing of a failure is kept
        pass


async def test_a_sandbox_that_dies_during_a_build_is_no_fault_of_the_recipe(fake, engine, spec):
    def die(argv, env, stdin):
        fake.sandboxes[-1].die()
        return FakeExit()

    fake.programs["die"] = die
    with pytest.raises(untax.SandboxLost) as lost:
        await engine.acquire(untax.EnvSpec(image=spec.image, setup=("die",)))
    assert lost.value.retryable
    assert not fake.live


async def test_a_build_s_log_is_bounded_and_keeps_its_end(fake, engine, spec):
    fake.programs["loud"] = lambda argv, env, stdin: FakeExit(stdout=b"x" * 60_000 + b"\n")
    fake.programs["fail"] = lambda argv, env, stdin: FakeExit(1, stdout=b"the end\n")
    with pytest.raises(untax.StageFailed) as failed:
        await engine.acquire(untax.EnvSpec(image=spec.image, setup=("loud", "loud", "fail")))
    assert len(failed.value.log) <= 64 << 10
    assert failed.value.log.endswith(b"the end\n")


async def test_prepare_puts_stages_in_place_and_asks_for_the_image_again(fake, engine, spec, image, monkeypatch):
    installs(fake)
    spec = untax.EnvSpec(image=spec.image, setup=("install /opt/tool",))
    prepared = await engine.prepare(spec)
    assert list(prepared.built) == ["deps"]
    assert [stage.name for stage in prepared.stages] == ["base", "image", "deps"]
    fake.log.clear()
    async with engine.lease(spec), engine.lease(spec):
        pass
    assert fake.log.count("create") == 2
    asked = []
    monkeypatch.setattr("untax.layers.sources.dir.make", lambda *args: asked.append(args) or Wishing(image, untax.core.root.ImageConfig()))
    async with engine.lease(spec):
        assert not asked
    assert list((await engine.prepare(spec)).built) == ["deps"]  # another image now, so another stage
    async with engine.lease(spec) as box:
        assert await box.read("/opt/tool") == b"installed"
    assert len(asked) == 1


async def test_a_layer_that_is_there_no_more_is_looked_for_again(fake, engine, spec, tmp_path):
    async with engine.lease(spec):
        pass
    moved = (tmp_path / "image").rename(tmp_path / "elsewhere")
    with pytest.raises(untax.CreateError):
        await engine.acquire(spec)
    with pytest.raises(untax.UntaxError):
        await engine.acquire(spec)
    moved.rename(tmp_path / "image")
    async with engine.lease(spec):
        pass


def descriptors(directory):
    found = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
    return [path for path in found if path.startswith(str(directory))]


async def test_a_closed_engine_has_nothing_open_below_its_state_directory(fake, make, spec, tmp_path):
    """Or the file system that it lies on could not be unmounted. Another engine in the process keeps what it uses."""
    installs(fake)
    async with make() as other:
        async with other.lease(untax.EnvSpec()):
            pass
        async with make() as engine, engine.lease(untax.EnvSpec()) as box:
            await (await box.snapshot()).save()
            async with engine.lease(untax.EnvSpec(image=spec.image, setup=("install /opt/tool",))):
                pass
        assert descriptors(tmp_path / "state/layers/host")
        async with other.lease(untax.EnvSpec()):
            pass
    assert descriptors(tmp_path / "state") == []


@pytest.mark.parametrize("options", [{"store_budget_mib": 0}, {"store_budget_mib": True}, {"store_budget_mib": "1"}, {"setup_network": "some"},
                                     {"setup_network": ("a.example",)}])  # fmt: skip
def test_a_bad_option_about_layers_is_refused(make, options):
    with pytest.raises(untax.UsageError):
        make(**options)


# ---- who keeps what ----


async def test_the_steps_of_a_snapshot_and_a_fork(fake, engine, spec):
    async with engine.lease(spec) as box:
        fake.log.clear()
        snapshot = await box.snapshot()
        async with engine.restore(snapshot):
            pass
    assert fake.log == ["snapshot", "create", "wait_ready", "open_channel", "configure", "destroy", "destroy"]
    assert len(fake.frozen) == 1
    await snapshot.drop()
    await asyncio.sleep(0)
    assert not fake.frozen


async def test_a_frozen_layer_goes_when_the_last_who_needs_it_is_gone(fake, engine, spec):
    box = await engine.acquire(spec)
    one = await box.snapshot()
    two = await box.snapshot()
    fork = await engine.restore(two)
    for snapshot in (one, two):
        await snapshot.drop()
    await box.release()
    assert len(fake.frozen) == 2  # the fork stands on both
    three = await fork.snapshot()
    await fork.release()
    assert len(fake.frozen) == 3
    await three.drop()
    await asyncio.sleep(0.01)
    assert not fake.frozen


async def test_closing_the_engine_lets_go_of_every_snapshot(fake, make, spec):
    async with make() as engine, engine.lease(spec) as box:
        snapshot = await box.snapshot()
        await box.snapshot()
    assert not fake.frozen
    assert not list(fake.directory.iterdir())
    with pytest.raises(untax.UsageError, match="save"):
        _ = snapshot.ground


async def test_a_copy_is_not_what_the_box_stands_on(fake, engine, spec):
    """Taken while something writes: the box goes on where it was, and nothing keeps the copy for it."""
    fake.is_writing = True
    async with engine.lease(spec) as box:
        await box.write("a", b"1")
        snapshot = await box.snapshot()
        assert snapshot.how == "cloned"
        await box.write("a", b"2")
        async with engine.restore(snapshot) as fork:
            assert await fork.read("a") == b"1"
        await snapshot.drop()
        await asyncio.sleep(0)
        assert not fake.frozen
        assert await box.read("a") == b"2"
        assert [change.kind for change in await box.diff() if change.path == "/workspace/a"] == ["added"]


async def test_a_fork_is_all_or_none(fake, engine, spec):
    async with engine.lease(spec) as box:
        snapshot = await box.snapshot()
        create, made = fake.create_on, 0

        async def fail_later(*args, **options):
            nonlocal made
            made += 1
            if made == 5:
                raise untax.CreateError("", "no more")
            return await create(*args, **options)

        fake.create_on = fail_later
        with pytest.raises(untax.CreateError, match="no more"):
            async with engine.fork(snapshot, 8):
                pass
        assert fake.live == {box.id}


async def test_x34_cancelled_after_any_number_of_turns_nothing_is_left(fake, make, spec):
    rng = random.Random(34)
    async with make() as engine:
        async with engine.lease(spec) as box:  # what it stands on is built by threads, which turns of the loop do not measure
            await (await box.snapshot()).drop()

        async def rollout():
            async with engine.lease(spec, files={"a": b"1"}) as box:
                snapshot = await box.snapshot()
                async with engine.fork(snapshot, 3) as group:
                    await group[0].write("b", b"2")
                    await group[0].reset()
                    async with engine.grader(group[1], take=("*",)):
                        pass
                await snapshot.drop()
                await box.run(["sleep", "9"])

        for _ in range(60):
            task = asyncio.create_task(rollout())
            for _ in range(rng.randrange(120)):
                await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
    assert not fake.live
    assert not fake.frozen
    assert not list(fake.directory.iterdir())


async def test_a_lease_that_waits_too_long_for_a_fork_is_told(fake, engine, spec):
    async with engine.lease(spec) as box:
        snapshot = await box.snapshot()
        fake.gates["create"] = asyncio.Event()
        with pytest.raises(untax.PoolTimeout):
            await engine.fork(snapshot, 3, wait_s=0.02)
        fake.gates.pop("create").set()
    assert not fake.live


async def test_a_snapshot_that_fails_marks_the_rollout(fake, engine, spec):
    async with engine.lease(spec) as box:
        fake.failures["snapshot"] = untax.BackendError(box.id, "disk full")
        with pytest.raises(untax.BackendError):
            await box.snapshot()
        assert box.ledger.verdict == "infra"
        fake.failures.clear()
        await box.write("a", b"1")  # the box itself stands


async def test_a_saved_snapshot_is_found_once_however_many_ask_and_dropped_by_a_live_engine_only(fake, make, spec):
    async with make() as engine, engine.lease(spec) as box:
        snapshot = await box.snapshot()
        saved = await snapshot.save()
    with pytest.raises(untax.PoolClosed, match="find_snapshot"):
        await snapshot.drop()
    async with make() as engine:
        found = await asyncio.gather(*(engine.find_snapshot(saved) for _ in range(5)))
        assert len(set(found)) == 1
        await found[0].drop()
    assert not fake.frozen


async def test_a_damaged_layer_refuses_the_saved_snapshot_that_has_it(fake, make, spec, tmp_path):
    """F13: looked at when it is next used, and never stood on."""
    async with make() as engine, engine.lease(spec) as box:
        await box.write("a", b"true")
        saved = await (await box.snapshot()).save()
    (found,) = (tmp_path / "state/layers/trees").glob("*/tree/workspace/a")
    found.write_bytes(b"fals")
    async with make() as engine:
        with pytest.raises(untax.StageUnavailable):
            await engine.restore(saved)
    assert not fake.live


async def test_one_who_is_cancelled_while_saving_leaves_a_whole_snapshot(fake, make, spec, monkeypatch):
    """And nothing is taken away under the copy, though the snapshot itself is dropped meanwhile."""
    slow = threading.Event()
    real = shelf._store
    monkeypatch.setattr(shelf, "_store", lambda *args: (slow.wait(5), real(*args)))
    async with make() as engine:
        async with engine.lease(spec) as box:
            await box.write("a", b"1")
            snapshot = await box.snapshot()
        saving = asyncio.create_task(snapshot.save())
        await asyncio.sleep(0.01)
        saving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await saving
        snapshot.let_go()
        slow.set()
    assert not fake.frozen
    async with make() as engine, engine.restore(snapshot.id) as box:
        assert await box.read("a") == b"1"


async def test_a_flattened_chain_goes_with_the_last_who_needs_it(fake, make, spec, tmp_path, monkeypatch):
    monkeypatch.setattr(shelf, "DEEPEST", 3)
    monkeypatch.setattr(flats, "STEP", 2)
    trees = tmp_path / "state/layers/trees"
    async with make() as engine:
        async with engine.lease(spec) as box:
            snapshot = await box.snapshot()
        for n in range(20):
            async with engine.restore(snapshot) as box:
                assert len(box._standing.own) <= 5  # of twenty: as many as twenty has bits
                assert {entry.name for entry in await box.list(".")} == {str(i) for i in range(max(n - 3, 0), n)}
                await box.write(f"{n}", b"")
                if n > 2:
                    await box.remove(f"{n - 3}")
                following = await box.snapshot()
            await snapshot.drop()
            snapshot = following
        async with engine.fork(snapshot, 5) as group:  # flattened once for all of them
            assert [len(await one.list(".")) for one in group] == [3] * 5
            assert len({one._standing.root.layers for one in group}) == 1
            assert max(one.level for one in group[0]._standing.own) > 2  # what was flattened is flattened again
        saved = await snapshot.save()
        kept = {path.name for path in trees.iterdir()}
        await snapshot.drop()
        await asyncio.sleep(0.05)
        with pytest.raises(untax.UsageError):
            await engine.restore(saved)
    assert kept
    assert list(trees.iterdir()) == []
    assert not fake.frozen


async def test_the_snapshots_of_one_box_share_what_is_flattened_below_them(fake, make, spec, tmp_path, monkeypatch):
    """The part below is copied once, not for each; it goes with the last of them."""
    monkeypatch.setattr(shelf, "DEEPEST", 6)
    monkeypatch.setattr(flats, "STEP", 4)
    trees = tmp_path / "state/layers/trees"
    async with make() as engine:
        async with engine.lease(spec) as box:
            taken = []
            for n in range(11):
                await box.write(f"{n}", b"")
                if n == 5:
                    await box.remove("2")
                taken.append(await box.snapshot())
        for n, snapshot in enumerate(taken):
            async with engine.restore(snapshot) as fork:
                wanted = {str(i) for i in range(n + 1)} - ({"2"} if n >= 5 else set())
                assert {entry.name for entry in await fork.list(".")} == wanted
                assert len(fork._standing.own) <= 6
        assert len(list(trees.iterdir())) == 2  # of the first four layers, and of the first eight
        waiting = [asyncio.create_task(engine.fork(taken[-1], 3, wait_s=5).__aenter__()) for _ in range(4)]
        for group in await asyncio.gather(*waiting):
            for one in group:
                await one.release()
        for snapshot in taken[:-1]:
            await snapshot.drop()
        async with engine.restore(taken[-1]) as fork:
            assert len(await fork.list(".")) == 10
    assert list(trees.iterdir()) == []
    assert not fake.frozen


async def test_a_flattening_that_nobody_waits_for_any_more_leaves_nothing(fake, make, spec, tmp_path, monkeypatch):
    monkeypatch.setattr(shelf, "DEEPEST", 2)
    monkeypatch.setattr(flats, "STEP", 2)
    async with make() as engine, engine.lease(spec) as box:
        for n in range(4):
            await box.write(f"{n}", b"")
            snapshot = await box.snapshot()
        for patience in (0, 1, 2, 5, 20):
            waiting = asyncio.create_task(engine.fork(snapshot, 3).__aenter__())
            for _ in range(patience):
                await asyncio.sleep(0.001)
            waiting.cancel()
            try:
                for one in await waiting:  # it was quicker
                    await one.release()
            except asyncio.CancelledError:
                pass
        await snapshot.drop()
        await asyncio.sleep(0.2)
        assert list((tmp_path / "state/layers/trees").iterdir()) == []


async def test_a_saved_snapshot_is_not_laid_over_another_image(fake, make, spec, image):
    async with make() as engine, engine.lease(spec) as box:
        saved = await (await box.snapshot()).save()
    image.rename(image.with_name("before"))
    (image / "etc").mkdir(parents=True)
    async with make() as engine:
        with pytest.raises(untax.StageUnavailable, match="has changed"):
            await engine.restore(saved)


# ---- reset and quarantine ----


async def test_the_ladder_of_a_reset_tries_the_cheapest_first(fake, engine, spec):
    async with engine.lease(spec) as box:
        fake.log.clear()
        await box.reset()
        assert fake.log == ["is_pristine"]
        running = asyncio.create_task(box.run(["sleep", "9"]))
        while "spawn sleep 9" not in fake.log:
            await asyncio.sleep(0)
        fake.log.clear()
        await box.reset()
        with pytest.raises(untax.SandboxLost, match="reset"):
            await running
        assert "create" in fake.log
        assert box.ledger.resets == {"pristine": 1, "replaced": 1}
        assert box.ledger.verdict == "trusted"
    assert "resets" in box.ledger.to_json()


async def test_what_cannot_be_proven_pristine_is_replaced(fake, engine, spec):
    async with engine.lease(spec) as box:
        fake.failures["is_pristine"] = untax.BackendError("", "cannot look")
        before = box.id
        await box.reset()
        assert box.id != before
        fake.failures.clear()
        await box.pause()
        await box.reset()
        assert box.ledger.resets == {"replaced": 2}
    async with engine.lease(spec, files={"a": b"1"}) as box:  # the lease's own files may have been changed
        await box.reset()
        assert box.ledger.resets == {"replaced": 1}


async def test_a_sandbox_that_cannot_be_proven_gone_is_quarantined_and_tried_again(fake, engine, spec, monkeypatch, caplog):
    monkeypatch.setattr(quarantine, "_FIRST_RETRY_S", 0.01)
    async with engine.lease(spec) as box:
        await box.write("a", b"1")
        snapshot = await box.snapshot()
    box = await engine.restore(snapshot)
    await snapshot.drop()
    stuck = box.id
    fake.failures["destroy"] = untax.DestroyError(stuck, "a process does not die")
    with caplog.at_level(logging.WARNING, "untax"):
        await box.write("b", b"2")
        await box.reset()
        await asyncio.sleep(0.05)
    assert engine.quarantined == (stuck,)
    assert "quarantine" in caplog.text
    assert box.id != stuck
    assert len(fake.frozen) == 1
    fake.failures.clear()
    await asyncio.sleep(0.3)
    assert engine.quarantined == ()
    assert fake.live == {box.id}
    await box.release()
    await asyncio.sleep(0.01)
    assert not fake.frozen


async def test_closing_tries_those_in_quarantine_a_last_time(fake, make, spec):
    async with make() as engine:
        box = await engine.acquire(spec)
        fake.failures["destroy"] = untax.DestroyError("", "stuck")
        await box.release()
        assert engine.quarantined
        fake.failures.clear()
    assert not fake.live


async def test_a_reset_does_not_wait_for_the_old_sandbox_to_go(fake, engine, spec):
    async with engine.lease(spec) as box:
        await box.write("a", b"1")
        gate = fake.gates["destroy"] = asyncio.Event()
        await asyncio.wait_for(box.reset(), 5)
        assert len(fake.live) == 2
        gate.set()


async def test_a_reset_without_room_for_two_destroys_first(fake, engine, spec):
    async with engine.lease(spec) as box:
        await box.write("a", b"1")
        create = fake.create_on

        async def one_at_a_time(*args, **options):
            if fake.live:
                raise untax.CreateError("", "too many live sandboxes")
            return await create(*args, **options)

        fake.create_on = one_at_a_time
        await box.reset()
        with pytest.raises(untax.NotFound):
            await box.read("a")
        assert box.ledger.verdict == "trusted"


# ---- what an image says ----


class Wishing:
    """A source of one image that has wishes."""

    def __init__(self, root, config):
        self._root = untax.core.root.Root((str(root),), config=config)

    async def identify(self):
        return untax.core.stage.Identity("wishing", is_portable=False)

    async def root(self):
        return self._root


@pytest.mark.parametrize("marks", ["trusted", "user"])
async def test_an_image_s_wishes_count_where_the_spec_says_nothing(fake, make, image, monkeypatch, marks):
    fake.marks = marks
    config = untax.core.root.ImageConfig(env={"A": "image", "B": "image"}, workdir="/srv", user="app:app", entrypoint=("/bin/false",))
    monkeypatch.setattr("untax.layers.sources.dir.make", lambda *_: Wishing(image, config))
    async with make() as engine:
        async with engine.lease(untax.EnvSpec(image="dir:/x", env={"B": "spec"})) as box:
            env = (await box.run(["env"])).text.splitlines()
            assert {"A=image", "B=spec"} <= set(env)
            assert box.image.entrypoint == ("/bin/false",)
            await box.write("here", b"")
            assert await box.read("/srv/here") == b""
            snapshot = await box.snapshot()
        async with engine.restore(snapshot) as box:
            assert await box.read("/srv/here") == b""
        async with engine.lease(untax.EnvSpec(image="dir:/x", workdir="/w", user="me")):
            pass
    assert [(spec.workdir, spec.user) for spec in fake.specs] == [
        ("/srv", "app" if marks == "trusted" else "user"), ("/srv", "app" if marks == "trusted" else "user"), ("/w", "me"),
    ]  # fmt: skip
    assert not any(line.startswith("spawn /bin/false") for line in fake.log)


async def test_every_lease_counts_as_a_use_of_its_stages(make, tmp_path):
    """Otherwise what is leased a thousand times would be evicted like what was leased once."""
    spec = untax.EnvSpec(setup=("true",), isolation="none")
    async with make() as engine:
        for _ in range(5):
            async with engine.lease(spec):
                pass

    store = LayerStore(tmp_path / "state" / "layers", marks=engine.substrate.marks)
    assert [round(one.uses) for one in store.candidates()] == [5]
