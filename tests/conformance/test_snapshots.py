"""Snapshots, forks, resets and graders, on every substrate that has layers and on the fake one: what they share and what they never do.

Only file actions are used, so that the fake can be held to the same.
"""

import asyncio
import contextlib

import pytest
from tests.images import small_directory

import untax
from untax import substrates
from untax.core.substrate import Layered

ETC = "/etc/passwd"  # in the image


@pytest.fixture(autouse=True)
def _layers(engine):
    name = engine.test_substrate
    if name != "fake" and not isinstance(substrates.load(name), Layered):
        pytest.skip(f"the substrate {name!r} has no layers")


@pytest.fixture
def another(engine):
    """Makes a second one of the same state: another engine, or another client of the same server or fleet."""
    return engine.test_another


@pytest.fixture
def spec(engine):
    return untax.EnvSpec(image=f"dir:{small_directory()}", isolation=engine.offer.isolation)


@pytest.fixture
async def box(engine, spec):
    async with engine.lease(spec) as box:
        yield box


async def names(box, path="."):
    return sorted(entry.name for entry in await box.list(path))


# ---- snapshot and fork ----


async def test_a_fork_begins_with_the_snapshot_s_files_and_the_box_goes_on(engine, box):
    await box.write("a", b"then")
    snapshot = await box.snapshot()
    await box.write("a", b"now")
    await box.write("b", b"later")

    async with engine.fork(snapshot, 3) as group:
        assert len({one.id for one in group} | {box.id}) == 4
        assert [await one.read("a") for one in group] == [b"then"] * 3
        assert [await names(one) for one in group] == [["a"]] * 3
    assert await box.read("a") == b"now"
    await snapshot.drop()


async def test_f12_what_one_fork_writes_no_other_sees_nor_the_parent(engine, box):
    await box.write("shared", b"0")
    snapshot = await box.snapshot()
    async with engine.fork(snapshot, 8) as group:
        await asyncio.gather(*(one.write("shared", str(n).encode()) for n, one in enumerate(group)))
        await asyncio.gather(*(one.write(f"own-{n}", b"") for n, one in enumerate(group)))
        assert [await one.read("shared") for one in group] == [str(n).encode() for n in range(8)]
        assert [await names(one) for one in group] == [[f"own-{n}", "shared"] for n in range(8)]
        assert (await names(box), await box.read("shared")) == (["shared"], b"0")
    await snapshot.drop()


async def test_what_was_removed_stays_removed_in_a_fork(engine, spec):
    """Also when something else was put in its place: nothing of the old directory comes through."""
    async with engine.lease(spec) as first:
        await first.write("d/old", b"1")
        one = await first.snapshot()
    async with engine.restore(one) as second:
        await second.remove("d", recursive=True)
        two = await second.snapshot()
        await second.write("d/new", b"2")
        three = await second.snapshot()
    async with engine.restore(two) as box:
        assert await names(box) == []
    async with engine.restore(three) as box:
        assert await names(box, "d") == ["new"]
    async with engine.restore(one) as box:
        assert await names(box, "d") == ["old"]
    for snapshot in (one, two, three):
        await snapshot.drop()


async def test_a_snapshot_says_how_it_was_taken_and_how_long_it_took(box):
    await box.write("a", b"1")
    snapshot = await box.snapshot()

    assert snapshot.how == "swapped"
    assert 0 < snapshot.elapsed_s < 5
    assert snapshot.spec == box.spec
    assert [action.name for action in box.ledger.actions] == ["write", "snapshot"]
    await snapshot.drop()


async def test_process_memory_cannot_be_kept_and_that_is_said(box):
    with pytest.raises(untax.SubstrateUnavailable, match="live=True"):
        await box.snapshot(live=True)


async def test_what_is_bound_late_binds_over_the_snapshot_s_spec(engine, spec):
    async with engine.lease(spec, env={"A": "1", "B": "1"}, files={"given": b"first"}) as box:
        snapshot = await box.snapshot()
    async with engine.restore(snapshot, env={"B": "2"}, files={"given": b"second"}) as box:
        assert (box.spec.env["A"], box.spec.env["B"]) == ("1", "2")
        assert await box.read("given") == b"second"
        await box.reset()
        assert await box.read("given") == b"second"
    async with engine.restore(snapshot) as box:
        assert await box.read("given") == b"first"  # it is in the files now
    await snapshot.drop()


async def test_a_fork_may_be_awaited_and_released_one_by_one(engine, box):
    snapshot = await box.snapshot()
    group = await engine.fork(snapshot, 2)
    one = await engine.restore(snapshot)
    for each in (*group, one):
        await each.release()
    with pytest.raises(untax.SandboxLost):
        await group[0].read(ETC)
    await snapshot.drop()


@pytest.mark.parametrize("n", [0, -1, True, 1.0, "2", 10**9])
async def test_a_number_of_forks_that_is_none_is_refused(engine, box, n):
    snapshot = await box.snapshot()
    with pytest.raises(untax.UsageError):
        engine.fork(snapshot, n)
    await snapshot.drop()


# ---- how long it lasts ----


async def test_boxes_keep_what_they_stand_on_when_the_snapshot_is_dropped(engine, spec):
    async with engine.lease(spec) as box:
        await box.write("a", b"1")
        snapshot = await box.snapshot()
    box = await engine.restore(snapshot)
    await snapshot.drop()
    await snapshot.drop()
    with pytest.raises(untax.UsageError, match="dropped"):
        await engine.restore(snapshot)

    assert await box.read("a") == b"1"
    await box.write("b", b"2")
    await box.reset()
    assert (await box.read("a"), await names(box)) == (b"1", ["a"])
    later = await box.snapshot()
    await box.release()
    async with engine.fork(later, 2) as group:
        assert [await one.read("a") for one in group] == [b"1"] * 2
    await later.drop()


async def test_a_saved_snapshot_outlives_its_engine(engine, another, spec):
    async with engine.lease(spec, env={"A": "1"}) as box:
        await box.write("kept", b"x" * 100_000, mode=0o755)
        await box.write("gone", b"")
        one = await box.snapshot()
        await box.write("more", b"y")
        await box.remove("gone")
        two = await box.snapshot()
    ids = [await one.save(), await two.save()]
    assert await two.save() == ids[1]

    async with another() as other:
        async with other.restore(ids[1]) as box, other.restore(ids[0]) as first:
            assert (await box.read("kept"), (await box.stat("kept")).mode) == (b"x" * 100_000, 0o755)
            assert (await names(box), await names(first)) == (["kept", "more"], ["gone", "kept"])
            assert box.spec.env["A"] == "1"
            await box.write("again", b"z")
            third = await (await box.snapshot()).save()
        with pytest.raises(untax.UsageError, match="save"):
            async with engine.lease(spec) as here:
                await other.restore(await here.snapshot())
        async with other.restore(one) as box:  # of another engine, but saved
            assert await names(box) == ["gone", "kept"]
    async with engine.restore(third) as box:
        assert await names(box) == ["again", "kept", "more"]
    for snapshot_id in (*ids, third):
        await (await engine.find_snapshot(snapshot_id)).drop()
        with pytest.raises(untax.UsageError, match=r"no .*snapshot"):
            await engine.restore(snapshot_id)


async def test_a_snapshot_that_was_not_saved_goes_with_its_engine(engine, another, spec):
    async with another() as other, other.lease(spec) as box:
        snapshot = await box.snapshot()
    with pytest.raises(untax.UsageError, match="save"):
        await engine.restore(snapshot)
    with pytest.raises(untax.UsageError, match=r"no .*snapshot"):
        await engine.restore(snapshot.id)


@pytest.mark.parametrize(
    "name", ["", "x", "snap-", "../snap-0", "a,upperdir=/", "snap-" + "0" * 24 + "\n", "--privileged", "$(id)", 7, None]
)
async def test_f15_a9_a_name_that_is_no_snapshot_s_is_refused(engine, name):
    with pytest.raises(untax.UsageError):
        await engine.restore(name)


# ---- reset ----


async def test_a_box_in_which_nothing_happened_is_kept_by_a_reset(engine, box):
    """Where that can be proven; an ordinary user's launcher cannot look into a sandbox's IPC namespace, and replaces it."""
    before = box.id
    await box.reset()
    if engine.test_substrate == "fake" or substrates.load(engine.test_substrate).marks == "trusted":
        assert (box.id, box.ledger.resets) == (before, {"pristine": 1})
    else:
        assert sum(box.ledger.resets.values()) == 1
    await box.write("a", b"1")
    dirty = box.id
    await box.reset()
    assert box.id != dirty
    assert box.ledger.resets["replaced"] >= 1
    assert await names(box) == []


async def test_a_reset_goes_back_to_where_the_lease_began(engine, box):
    await box.write("a", b"1")
    snapshot = await box.snapshot()
    async with engine.restore(snapshot) as fork:
        await fork.write("a", b"2")
        await fork.write("b", b"2")
        await (await fork.snapshot()).drop()
        await fork.reset()
        assert (await names(fork), await fork.read("a")) == (["a"], b"1")
    await box.reset()
    assert await names(box) == []
    await snapshot.drop()


async def test_a_reset_after_a_snapshot_is_never_taken_for_a_pristine_one(box):
    await box.write("a", b"1")
    await (await box.snapshot()).drop()
    await box.reset()
    assert await names(box) == []


# ---- diff ----


async def test_a_diff_names_what_was_added_changed_and_removed(engine, spec):
    async with engine.lease(spec) as box:
        await box.write("sub/kept", b"1")
        await box.write("sub/gone", b"1")
        start = await box.snapshot()
    async with engine.restore(start) as box:
        assert await box.diff() == []
        await box.write("sub/new", b"2")
        await box.write("sub/kept", b"2")
        await box.remove("sub/gone")
        found = {change.path: change.kind for change in await box.diff()}
        place = "/workspace/sub"
        assert {path: kind for path, kind in found.items() if path.startswith(place + "/")} == {
            f"{place}/new": "added", f"{place}/kept": "modified", f"{place}/gone": "deleted",
        }  # fmt: skip
        await (await box.snapshot()).drop()
        await box.remove("sub/new")
        found = {change.path: change.kind for change in await box.diff()}
        assert f"{place}/new" not in found
        assert found[f"{place}/gone"] == "deleted"
    await start.drop()


# ---- grader ----


async def test_a_grader_has_the_named_files_and_nothing_else(engine, box):
    await box.write("src/a.py", b"1", mode=0o755)
    await box.write("src/deep/er/b.py", b"2")
    await box.write("src/.hidden", b"3")
    await box.write("conftest.py", b"planted")
    await box.write("/home/user/planted", b"planted")

    async with engine.grader(box, take=("src/**",)) as clean:
        assert await names(clean) == ["src"]
        assert await names(clean, "src") == ["a.py", "deep"]
        assert (await clean.read("src/a.py"), (await clean.stat("src/a.py")).mode) == (b"1", 0o755)
        assert (await clean.read("src/deep/er/b.py"), (await clean.stat("src/deep/er/b.py")).mode) == (b"2", 0o644)
        assert await clean.read(ETC)
        with pytest.raises(untax.NotFound):
            await clean.read("/home/user/planted")
    async with engine.grader(box, take=("*.py", "src/*/*/*.py", "src/.hidden")) as clean:
        assert await names(clean) == ["conftest.py", "src"]
        assert await names(clean, "src") == [".hidden", "deep"]


async def test_a_grader_of_a_fork_begins_with_the_spec_s_own_stages(engine, spec):
    async with engine.lease(spec, files={"given": b"by the holder"}) as box:
        await box.write("tests/t.py", b"planted")
        await box.write("src/a.py", b"1")
        await box.write("given", b"overwritten")
        snapshot = await box.snapshot()
        async with engine.grader(box) as clean:
            assert (await names(clean), await clean.read("given")) == (["given", "src"], b"by the holder")
    async with engine.restore(snapshot) as fork:
        clean = await engine.grader(fork)
        assert await names(clean) == ["src"]
        await clean.release()
    await snapshot.drop()


@pytest.mark.parametrize(
    "take", ["src/**", ("/etc/*",), ("../x",), ("a/../b",), ("",), ("a//b",), ("a\0",), ("x**",), (7,), None, ("[z-a]",)]
)
async def test_a_pattern_that_could_leave_the_working_directory_is_refused(engine, box, take):
    with pytest.raises(untax.UsageError):
        engine.grader(box, take=take)


# ---- deep chains ----


async def test_f14_a_fork_of_a_fork_of_a_fork_is_flattened_on_the_way(engine, spec):
    """Sixty generations, each with a file of its own and one that all rewrite; one file is removed half-way."""
    async with engine.lease(spec) as box:
        await box.write("gone", b"")
        snapshot = await box.snapshot()
    for generation in range(60):
        async with engine.restore(snapshot) as box:
            wanted = {f"g{n}" for n in range(generation)} | ({"last"} if generation else set()) | ({"gone"} if generation <= 30 else set())
            assert set(await names(box)) == wanted
            await box.write(f"g{generation}", b"")
            await box.write("last", str(generation).encode())
            if generation == 30:
                await box.remove("gone")
            following = await box.snapshot()
        await snapshot.drop()
        snapshot = following
    async with engine.restore(snapshot) as box:
        assert len(await names(box)) == 61
        assert await box.read("last") == b"59"
    with contextlib.suppress(AttributeError):
        assert max(len(one.root.layers) for one in engine.substrate.sandboxes[-20:]) < 60
    await snapshot.drop()


# ---- kept ready ----


async def test_a_snapshot_that_is_kept_ready_is_leased_from_the_pool(engine, spec):
    """A restore takes what is idle, with everything bound late that it says, and nobody gets what another wrote into it."""
    async with engine.lease(spec) as box:
        await box.write("a", b"then")
        snapshot = await box.snapshot()
    await engine.warm(snapshot, 2)

    async with engine.fork(snapshot, 2, env={"X": "1"}, files={"b": b"bound"}) as group:
        assert [one.ledger.hit.kind for one in group] == ["exact", "exact"]
        assert [(await one.read("a"), await one.read("b")) for one in group] == [(b"then", b"bound")] * 2
        await group[0].write("a", b"mine")
    await engine.warm(snapshot, 1)
    async with engine.restore(snapshot) as again:
        assert await again.read("a") == b"then"
        assert await names(again) == ["a"]
        await again.write("c", b"")
        await again.reset()
        assert await names(again) == ["a"]
        assert "snapshot" in {stage.name for stage in (await engine.pools()).stages}

    await snapshot.drop()
    assert not any(stage.name == "snapshot" and (stage.idle or stage.target) for stage in (await engine.pools()).stages)
    with pytest.raises(untax.UsageError, match="dropped"):
        await engine.warm(snapshot, 1)


async def test_a_saved_snapshot_is_kept_ready_by_its_id(engine, another, spec):
    async with engine.lease(spec) as box:
        await box.write("a", b"then")
        saved = await (await box.snapshot()).save()
    async with another() as other:
        await other.warm(saved, 1)
        async with other.restore(saved) as again:
            assert (again.ledger.hit.kind, await again.read("a")) == ("exact", b"then")
        await (await other.find_snapshot(saved)).drop()
    with pytest.raises(untax.UsageError, match=r"not a snapshot's id|no .*snapshot"):
        await engine.warm("latest", 1)
