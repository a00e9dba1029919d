"""An engine's pool on fake substrates: what is warm is bound late, what is missing is added, and no lease sees a dead sandbox."""

import asyncio
import dataclasses
import json

import pytest

import untax
from untax import quarantine
from untax.layers.store import LayerStore
from untax.leases import Bindings, checked
from untax.pool.record import PoolRecord
from untax.standby import Standby
from untax.testing import FakeExit, FakeSubstrate, LayeredFake
from untax.testing.fake import HANGS

MIB = 1024.0  # of the default limits
MEGA = 1 << 20


@pytest.fixture
def fake():
    return FakeSubstrate()


@pytest.fixture
def layered(tmp_path):
    # Behind a set-up its Python files are compiled, by a loop of the shell.
    return LayeredFake(tmp_path / "uppers", programs={"for": lambda *_: FakeExit()})


@pytest.fixture
def image(tmp_path):
    (tmp_path / "image").mkdir()
    return f"dir:{tmp_path / 'image'}"


async def settled(engine, spec=None, n=1):
    """The pool is full again."""
    await engine.warm(spec, n)


async def test_a_warm_lease_creates_nothing_and_says_so(fake):
    async with untax.Engine(fake) as engine:
        await engine.warm(n=2)
        fake.log.clear()
        async with engine.lease() as box:
            assert fake.log == []  # it only has to answer
            hit = box.ledger.hit
            assert (hit.kind, hit.start, hit.missing, hit.waited_for) == ("exact", "image", (), "")
        document = json.loads(box.ledger.to_json())
    assert document["hit"]["kind"] == "exact"
    assert [name for name, _ in document["wanted"]] == ["base", "image"]
    assert document["asked_at"] > 0
    assert document["metrics"]["create_s"] == 0.0
    assert not fake.live


async def test_what_is_given_at_lease_time_binds_to_what_is_warm(fake):
    async with untax.Engine(fake) as engine:
        await engine.warm(untax.EnvSpec(env={"A": "1"}), 1)
        made = len(fake.sandboxes)
        limits = untax.Limits(memory_mib=64)
        lease = engine.lease(env={"B": "2"}, user="two", files={"x": b"data"}, limits=limits, network=("a.example:443",))
        async with lease as box:
            env = (await box.run(["env"])).text.splitlines()
            assert {"B=2", "http_proxy=http://127.0.0.1:3128"} <= set(env)
            assert "A=1" not in env
            assert await box.read("x") == b"data"
            assert box.ledger.hit.kind == "exact"
        sandbox = fake.sandboxes[made - 1]
        assert (sandbox.spec.limits, sandbox.spec.user) == (limits, "two")


async def test_a_sandbox_that_cannot_change_its_limits_serves_only_leases_that_want_the_same(fake):
    fake.binds_late = frozenset()
    async with untax.Engine(fake) as engine:
        await engine.warm(n=1)
        async with engine.lease(limits=untax.Limits(memory_mib=64)) as box:
            assert box.ledger.hit.kind == "cold"
        async with engine.lease(user="two") as box:
            assert box.ledger.hit.kind == "cold"
        async with engine.lease() as box:
            assert box.ledger.hit.kind == "exact"


async def test_x22_a_sandbox_that_died_while_parked_is_replaced_unseen(fake):
    async with untax.Engine(fake) as engine:
        await engine.warm(n=3)
        fake.sandboxes[0].die()
        for sandbox in fake.sandboxes[1:3]:
            sandbox.cell.silent = True  # alive for the kernel, and never answers: closed before it is asked
            sandbox.cell.close()
        async with engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0
            assert box.ledger.verdict == "trusted"
        status = engine.pools()
        assert status.died + status.rejected >= 1
    assert not fake.live


async def test_c3_one_that_dies_in_use_is_lost_and_its_place_filled_by_another(fake):
    async with untax.Engine(fake, pool=untax.PoolOptions(entries=1)) as engine:
        await engine.warm(n=1)
        box = await engine.acquire()
        fake.sandboxes[0].die()
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        await box.release()
        assert box.ledger.verdict == "infra"
        async with engine.lease() as other:
            assert other.id != box.id
            assert other.ledger.verdict == "trusted"


async def test_a_sandbox_that_was_used_is_never_leased_again(fake):
    async with untax.Engine(fake) as engine:
        await engine.warm(n=1)
        async with engine.lease() as first:
            await first.run(["true"])
        await settled(engine)
        async with engine.lease() as second:
            assert second.id != first.id


async def test_one_that_comes_back_untouched_serves_again_unless_each_is_to_be_used_once(layered, image, tmp_path):
    for reuse, again in (("reset", True), ("single", False)):
        spec = untax.EnvSpec(image=image)
        engine = untax.Engine(layered, state_dir=tmp_path / "state", pool=untax.PoolOptions(reuse=reuse))
        async with engine:
            await engine.warm(spec, 2)
            async with engine.lease(spec) as first:
                pass
            await settled(engine, spec, 2)
            async with engine.lease(spec) as second:
                assert (second.id == first.id) is again
            await settled(engine, spec, 2)
            async with engine.lease(spec) as third:
                await third.write("trace", b"x")
            await settled(engine, spec, 2)
            async with engine.lease(spec) as fourth:
                assert fourth.id != third.id
                with pytest.raises(untax.NotFound):
                    await fourth.read("trace")
    assert not layered.live


async def test_a_partial_hit_adds_only_what_is_missing_to_the_sandbox_itself(fake):
    async with untax.Engine(fake) as engine:
        await engine.warm(untax.EnvSpec(), 1)
        engine.pooling.driver.costs.observe("create", 5.0)  # so that what is idle is the nearer way
        parked = fake.sandboxes[0].id
        spec = untax.EnvSpec(setup=("echo one", "echo two"), env={"SECRET": "x"})
        fake.log.clear()
        async with engine.lease(spec) as box:
            assert box.id == parked
            hit = box.ledger.hit
            assert (hit.kind, hit.start, hit.missing) == ("partial", "image", ("deps",))
            assert set(hit.steps) == {"deps"}
            assert box.ledger.stages.keys() == {"deps"}
            assert (await box.run(["env"])).text.count("SECRET=x") == 1
        spawned = [step for step in fake.log if step.startswith("spawn echo")]
        assert spawned == ["spawn echo one", "spawn echo two"]
        assert engine.pools().partial == 1


async def test_without_room_an_idle_ancestor_gives_its_place_to_a_sandbox_over_the_stage_that_was_missing(layered, image, tmp_path):
    options = untax.PoolOptions(entries=1)
    async with untax.Engine(layered, state_dir=tmp_path / "state", pool=options) as engine:
        await engine.warm(untax.EnvSpec(image=image), 1)
        old = layered.sandboxes[0].id
        spec = untax.EnvSpec(image=image, setup=("echo one",))
        async with engine.lease(spec) as box:
            hit = box.ledger.hit
            assert (hit.kind, hit.start, hit.missing) == ("partial", "image", ("deps",))
            assert {"deps", "create", "ready"} <= hit.steps.keys()
            assert box.ledger.stages.keys() == {"deps"}
            assert old not in layered.live
            assert box.id in layered.live
    assert not layered.live


async def test_stages_that_came_by_themselves_are_counted_on_by_leases_of_every_flavour(layered, image, tmp_path):
    """Where limits are fixed at a sandbox's creation, a stage has a key for each of them; the layers are the same."""
    layered.binds_late = frozenset()
    plain = untax.EnvSpec(image=image, setup=("echo one",))
    async with untax.Engine(layered, state_dir=tmp_path / "state") as engine:
        pooling = engine.pooling
        ladders = [(await pooling.ladder(spec))[0] for spec in (plain, dataclasses.replace(plain, limits=untax.Limits(memory_mib=64)))]
        keys = {stages[-1].key for stages in ladders}
        assert len(keys) == 2 and not keys & pooling.driver.known_stages
        pooling.came([ladders[0][-1].key.partition("~")[0]])
        assert keys <= pooling.driver.known_stages


async def test_a_failed_upgrade_is_told_with_its_log_and_leaves_nothing(layered, image, tmp_path):
    async with untax.Engine(layered, state_dir=tmp_path / "state", pool=untax.PoolOptions(entries=1)) as engine:
        await engine.warm(untax.EnvSpec(image=image), 1)
        with pytest.raises(untax.StageFailed, match="false"):
            await engine.acquire(untax.EnvSpec(image=image, setup=("false",)))
        async with engine.lease(untax.EnvSpec(image=image)) as box:
            assert box.ledger.verdict == "trusted"
    assert not layered.live


async def test_a_wait_is_explained_in_the_ledger(fake):
    async with untax.Engine(fake, pool=untax.PoolOptions(entries=1)) as engine:
        first = await engine.acquire()
        waiting = asyncio.ensure_future(engine.acquire())
        await asyncio.sleep(0.02)  # a part of which may be over before it asks
        await first.release()
        box = await waiting
        hit = box.ledger.hit
        assert hit.waited_s >= 0.01
        assert hit.waited_for
        assert box.ledger.metrics()["queue_s"] >= 0.009
        await box.release()


async def test_nobody_waits_longer_than_wait_s_and_is_told_for_what(fake):
    async with untax.Engine(fake, pool=untax.PoolOptions(entries=1)) as engine:
        async with engine.lease():
            with pytest.raises(untax.PoolTimeout, match="at most 1"):
                await engine.acquire(wait_s=0.02)
        async with engine.lease(wait_s=0.5):
            pass


async def test_a_lease_larger_than_the_pool_is_a_usage_error(fake):
    async with untax.Engine(fake, pool=untax.PoolOptions(memory_mib=100.0)) as engine:
        with pytest.raises(untax.UsageError, match="memory_mib"):
            await engine.acquire(limits=untax.Limits(memory_mib=200))


@pytest.mark.parametrize(
    "options",
    [{"entries": 0}, {"memory_mib": -1}, {"hit_rate": 1.5}, {"reuse": "often"}, {"first_starting": 1}, {"linger_s": "soon"}],
)
def test_bad_options_are_refused_where_they_enter(options):
    with pytest.raises(untax.UsageError, match="PoolOptions"):
        untax.PoolOptions(**options)


async def test_a_count_that_is_none_is_refused(fake):
    async with untax.Engine(fake) as engine:
        for bad in (-1, True, 1.5, "two"):
            with pytest.raises(untax.UsageError, match="n must be"):
                await engine.warm(n=bad)
    with pytest.raises(untax.UsageError, match="PoolOptions"):
        untax.Engine(fake, pool={"entries": 3})


async def test_a_cancelled_warm_leaves_the_pool_filling_and_the_engine_closable(fake):
    fake.gates["create"] = asyncio.Event()
    async with untax.Engine(fake) as engine:
        warming = asyncio.ensure_future(engine.warm(n=2))
        await asyncio.sleep(0.01)
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming
        fake.gates.pop("create").set()
        await engine.warm(n=2)
        assert engine.pools().stages[0].idle == 2
    assert not fake.live


async def test_what_is_kept_ready_follows_its_image(layered, tmp_path):
    """`prepare` asks what a name stands for; what is warm is then of the image as it is now."""
    place = tmp_path / "image"
    place.mkdir()
    spec = untax.EnvSpec(image=f"dir:{place}")
    async with untax.Engine(layered, state_dir=tmp_path / "state") as engine:
        await engine.warm(spec, 1)
        (before,) = [stage.key for stage in engine.pools().stages if stage.target]
        place.rename(tmp_path / "old")
        place.mkdir()
        (await engine.prepare(spec)).pin.close()
        async with engine.lease(spec):
            targets = [stage.key for stage in engine.pools().stages if stage.target]
        assert len(targets) == 1
        assert targets != [before]
    assert not layered.live


async def test_pools_are_plain_data(fake):
    async with untax.Engine(fake) as engine:
        await engine.warm(n=2)
        async with engine.lease():
            status = engine.pools()
        (stage,) = status.stages
        assert (stage.name, stage.leased, stage.target) == ("image", 1, 2)
        assert status.exact == 1
        again = untax.PoolStatus.from_dict(json.loads(status.to_json()))
        assert again == status
        with pytest.raises(untax.UsageError, match="version"):
            untax.PoolStatus.from_dict({"untax_pool": 99})


async def test_a_quarantined_sandbox_keeps_its_place_in_the_budget(fake):
    async with untax.Engine(fake, pool=untax.PoolOptions(entries=1)) as engine:
        box = await engine.acquire()
        fake.failures["destroy"] = RuntimeError("stuck")
        await box.release()
        assert engine.quarantined == (box.id,)
        with pytest.raises(untax.PoolTimeout):
            await engine.acquire(wait_s=0.02)
        del fake.failures["destroy"]
        await engine.quarantine._try_all()
        async with engine.lease(wait_s=1.0):
            pass


async def test_what_is_idle_and_what_the_store_keeps_are_different_stages(layered, image, tmp_path):
    """A store for two dependency layers and two idle sandboxes hold four of them: idle ones keep theirs beside the budget."""

    def fill(argv, _env, _stdin):
        (layered.sandboxes[-1].upper / argv[1]).write_bytes(argv[1].encode() * MEGA)
        return FakeExit()

    layered.programs["fill"] = fill
    specs = [untax.EnvSpec(image=image, setup=(f"fill {name}",)) for name in "abcde"]
    async with untax.Engine(layered, state_dir=tmp_path / "state", store_budget_mib=3) as engine:
        for spec in specs[:2]:
            await engine.warm(spec, 1)
        for spec in specs[2:4]:
            await (await engine.acquire(spec)).release()
        for spec in specs[:4]:
            await engine.pooling.driver.wait_settled()
            async with engine.lease(spec) as box:
                assert box.ledger.hit.missing == ()
        await (await engine.acquire(specs[4])).release()
        await engine.pooling._settle()
        assert len(engine.warehouse.store.layers()) == 4  # one of the three that nothing stands on has gone
        assert len(engine.pooling.driver._unkept) == 2
        for spec in specs[:2]:
            async with engine.lease(spec) as box:
                assert box.ledger.hit.kind == "exact"
    store = LayerStore(tmp_path / "state/layers", marks="user")
    assert len(store.layers()) == 2  # nothing is in use any more
    store.close()


async def test_a_layer_that_no_budget_could_keep_fails_at_once_and_costs_no_idle_sandbox(layered, image, tmp_path):
    def fill(argv, _env, _stdin):
        (layered.sandboxes[-1].upper / "bulk").write_bytes(bytes(int(argv[1]) * MEGA))
        return FakeExit()

    layered.programs["fill"] = fill
    async with untax.Engine(layered, state_dir=tmp_path / "state", store_budget_mib=2) as engine:
        await engine.warm(untax.EnvSpec(image=image, setup=("fill 1",)), 1)
        with pytest.raises(untax.StageUnavailable, match="raise the budget"):
            await engine.acquire(untax.EnvSpec(image=image, setup=("fill 3",)))
        assert sum(stage.idle for stage in engine.pools().stages) == 1


async def test_on_a_full_disk_a_leases_end_is_waited_for_unless_there_are_others_to_ask(layered, image, tmp_path, monkeypatch):
    spec = untax.EnvSpec(image=image)
    async with untax.Engine(layered, state_dir=tmp_path / "state") as engine:
        held = await engine.acquire(spec)
        real, is_full = engine.warehouse.find, True

        async def find(request):
            if is_full:
                raise untax.StageUnavailable("store", "the disk is full")
            return await real(request)

        monkeypatch.setattr(engine.warehouse, "find", find)
        monkeypatch.setattr(engine.warehouse, "at_hand", lambda _request: None)
        request = checked(engine.offer, spec, Bindings())
        with pytest.raises(untax.StageUnavailable, match="the disk is full"):
            async with asyncio.timeout(10):
                await engine.fulfil(dataclasses.replace(request, may_refuse=True))
        waiting = asyncio.ensure_future(engine.fulfil(request))
        await asyncio.wait([waiting], timeout=0.05)
        assert not waiting.done()
        is_full = False
        await held.release()
        await (await waiting).release()


# ---- what is left on disk ----


async def test_costs_are_learnt_across_engines_and_damage_is_no_failure(layered, image, tmp_path, caplog):
    state = tmp_path / "state"
    spec = untax.EnvSpec(image=image, setup=("echo one",))
    async with untax.Engine(layered, state_dir=state) as engine, engine.lease(spec):
        learnt = engine.pools().create_s
    file = state / "pools" / "costs-fake.json"
    assert json.loads(file.read_text())["by_name"].keys() >= {"create", "deps"}
    async with untax.Engine(layered, state_dir=state) as engine:
        assert engine.pools().create_s == learnt
    for damage in ("{", '{"version": 99}', '{"version": 1, "by_name": {"create": -1}, "by_key": {}}', "\0\xff"):
        file.write_text(damage)
        caplog.clear()
        async with untax.Engine(layered, state_dir=state) as engine, engine.lease(spec):
            pass
        assert "learnt anew" in caplog.text


async def test_c6_a_record_that_cannot_be_written_fails_no_lease(layered, image, tmp_path, monkeypatch, caplog):
    from untax.pool import record

    monkeypatch.setattr(record, "_WRITE_S", 0.0)
    async with untax.Engine(layered, state_dir=tmp_path / "state") as engine:
        monkeypatch.setattr(record, "_write", _refused)
        for _ in range(3):
            async with engine.lease(untax.EnvSpec(image=image)):
                await asyncio.sleep(0.01)
    assert caplog.text.count("leases go on without it") == 1


def _refused(*_):
    raise OSError(30, "Read-only file system")


async def test_whoever_watches_sees_the_engines_that_run(layered, image, tmp_path, monkeypatch):
    from untax.pool import record

    monkeypatch.setattr(record, "_WRITE_S", 0.0)
    state = tmp_path / "state"
    assert record.running(state) == []
    async with untax.Engine(layered, state_dir=state) as engine:
        await engine.warm(untax.EnvSpec(image=image), 2)
        while not (found := record.running(state)) or found[0].pool.stages[0].idle < 2:
            await asyncio.sleep(0.005)
        assert found[0].pool.substrate == "fake"
    assert record.running(state) == []
    assert not list((state / "pools").glob("engine-*"))


async def test_what_a_dead_engine_left_is_shown_to_nobody_and_removed(layered, tmp_path):
    from untax.pool import record

    directory = tmp_path / "state" / "pools"
    directory.mkdir(parents=True, mode=0o700)
    (directory / "engine-1-dead.lock").touch()
    (directory / "engine-1-dead.json").write_text("{}")
    assert record.running(tmp_path / "state") == []
    (tmp_path / "state").chmod(0o700)
    async with untax.Engine(layered, state_dir=tmp_path / "state"):
        assert not (directory / "engine-1-dead.json").exists()


# ---- hand-outs that go wrong ----


async def test_a_sandbox_that_dies_while_it_is_handed_out_costs_one_and_no_lease(fake, monkeypatch):
    """The lease gets another, and the rest of the pool stays where it is."""
    struck = []
    write = Standby.write

    async def dying(standby, files):
        if not struck:
            struck.append(standby.sandbox.id)
            standby.sandbox.die()
        await write(standby, files)

    monkeypatch.setattr(Standby, "write", dying)
    async with untax.Engine(fake) as engine:
        await engine.warm(n=4)
        async with engine.lease(files={"x": b"1"}) as box:
            assert box.id not in struck
            assert await box.read("x") == b"1"
        assert box.ledger.verdict == "trusted"
        assert engine.pools().rejected == 1
    assert not fake.live


async def test_an_action_that_races_with_the_release_is_refused_and_the_sandbox_is_as_it_was(layered, tmp_path, image):
    """What goes back to the pool has nothing running in it."""
    spec = untax.EnvSpec(image=image)
    async with untax.Engine(layered, state_dir=tmp_path / "state") as engine:
        await engine.warm(spec, 1)
        box = await engine.acquire(spec)
        engine.pooling.driver.is_short = lambda _: True
        sandbox, looked_at, may_answer = box.sandbox, asyncio.Event(), asyncio.Event()
        is_pristine = sandbox.is_pristine

        async def slowly():
            looked_at.set()
            await may_answer.wait()
            return await is_pristine()

        sandbox.is_pristine = slowly
        releasing = asyncio.ensure_future(box.release())
        await looked_at.wait()
        with pytest.raises(untax.SandboxLost, match="released"):
            await box.run(["sleep", "9"])
        may_answer.set()
        await releasing
        assert not sandbox.cell.is_running


@pytest.mark.parametrize("kind", ["in place", "over layers"])
async def test_a_partial_hit_has_the_working_directory_of_its_own_spec(kind, fake, layered, tmp_path, image):
    fake.programs["bash"] = layered.programs["bash"] = lambda *_: FakeExit()
    substrate, options = (fake, {}) if kind == "in place" else (layered, {"state_dir": tmp_path / "state"})
    below = untax.EnvSpec() if kind == "in place" else untax.EnvSpec(image=image)
    spec = dataclasses.replace(below, setup=("true",), workdir="/srv/app")
    async with untax.Engine(substrate, pool=untax.PoolOptions(entries=1), **options) as engine:
        await engine.warm(below, 1)
        async with engine.lease(spec, wait_s=10) as box:
            assert box.sandbox.cell._workdir == "/srv/app"


async def test_a_set_up_that_fails_in_a_sandbox_that_stays_behind_ends_no_retry(fake, monkeypatch):
    """The pool never knew that sandbox: once it is gone, nothing is told of it."""
    monkeypatch.setattr(quarantine, "_FIRST_RETRY_S", 0.01)
    fake.programs["bash"] = lambda *_: FakeExit(code=1)
    async with untax.Engine(fake) as engine:
        fake.failures["destroy"] = RuntimeError("busy")
        with pytest.raises(untax.CreateError):
            await engine.acquire(untax.EnvSpec(setup=("false",)))
        assert engine.quarantined
        del fake.failures["destroy"]
        async with asyncio.timeout(5):
            while engine.quarantined:
                await asyncio.sleep(0.01)
    assert not fake.live


async def test_closing_cuts_off_what_is_being_handed_out(fake):
    """The engine is not over before its last sandbox is, however long a set-up inside would have taken."""
    fake.programs["bash"] = lambda *_: HANGS
    engine = untax.Engine(fake, pool=untax.PoolOptions(entries=1))
    await engine.start()
    await engine.warm(n=1)
    coming = asyncio.ensure_future(engine.acquire(untax.EnvSpec(setup=("sleep 9",))))
    async with asyncio.timeout(5):
        while "spawn sleep 9" not in fake.log:
            await asyncio.sleep(0)
        await engine.aclose()
    assert not fake.live
    with pytest.raises(untax.UntaxError):
        await coming


async def test_a_disk_limit_that_is_fixed_at_creation_serves_only_leases_that_want_the_same(fake):
    """What binds late beside it still does, and is a hit."""
    fake.binds_late = frozenset(("limits", "user"))
    small = untax.Limits(disk_mib=64)
    async with untax.Engine(fake) as engine:
        await engine.warm(n=1)
        async with engine.lease(limits=small) as box:
            assert box.ledger.hit.kind == "cold"
            assert fake.specs[-1].limits.disk_mib == 64
        async with engine.lease(limits=untax.Limits(memory_mib=256)) as box:
            assert box.ledger.hit.kind == "exact"
            assert box.sandbox.spec.limits.memory_mib == 256


async def test_an_upgrade_that_is_cancelled_while_the_old_sandbox_goes_leaves_none(layered, image, tmp_path, monkeypatch):
    spec = untax.EnvSpec(image=image, setup=("true",))
    leaving, gate, leave = asyncio.Event(), asyncio.Event(), Standby.leave

    async def watched(standby):
        if not leaving.is_set():
            layered.gates["destroy"] = gate
            leaving.set()
        await leave(standby)

    monkeypatch.setattr(Standby, "leave", watched)
    async with untax.Engine(layered, state_dir=tmp_path / "state", pool=untax.PoolOptions(entries=1)) as engine:
        await engine.warm(untax.EnvSpec(image=image), 1)
        coming = asyncio.ensure_future(engine.acquire(spec))
        async with asyncio.timeout(5):
            await leaving.wait()
        coming.cancel()
        await asyncio.sleep(0)
        gate.set()
        with pytest.raises(asyncio.CancelledError):
            await coming
        async with engine.lease(spec, wait_s=5) as box:  # its place is free again
            assert layered.live == {box.id}
    assert not layered.live


async def test_refusals_during_a_hand_out_are_not_kept(fake):
    """Who is refused at its deadline while stages are added is told once, by whichever comes first; nothing of it stays in the driver."""
    async with untax.Engine(fake, pool=untax.PoolOptions(entries=1)) as engine:
        for _ in range(3):
            await engine.warm(n=1)
            with pytest.raises(untax.PoolTimeout):
                await engine.acquire(untax.EnvSpec(setup=("sleep 9",)), wait_s=0.02)
        driver = engine.pooling.driver
        assert driver.counts.refused == 3
        assert not driver._outcomes
        assert not driver._asked
        assert not driver._waiting


async def test_an_engine_that_fails_to_start_lets_go_of_its_store(layered, tmp_path, monkeypatch):
    """The store that it had opened is closed, and the substrate too; another engine starts on the same directory."""

    def broken(_):
        raise OSError("no record")

    async def start():
        engine = untax.Engine(layered, state_dir=tmp_path / "state")
        await engine.start()
        return engine

    await (await start()).aclose()  # what is made once and for all is there
    closed = []
    close = LayerStore.close
    with monkeypatch.context() as patched:
        patched.setattr(PoolRecord, "open", broken)
        patched.setattr(LayerStore, "close", lambda store: (closed.append(store), close(store))[1])
        with pytest.raises(OSError, match="no record"):
            await start()
    assert len(closed) == 1
    assert layered.log[-2:] == ["start", "aclose"]
    await (await start()).aclose()


async def test_what_cannot_be_told_to_a_hit_is_the_leases_own_mistake_and_costs_one_sandbox(fake):
    """It is asked to prove that it lives before the lease is written up; what goes wrong there is said where a lease can fail."""
    async with untax.Engine(fake) as engine:
        await engine.warm(n=2)
        with pytest.raises(untax.UsageError, match="the kernel takes"):
            await engine.acquire(env={"A": "x" * (5 << 20)})
        async with engine.lease() as box:
            assert box.ledger.hit.kind == "exact"
        assert not engine.pooling.driver._asked
    assert not fake.live
