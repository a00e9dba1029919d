"""Stages built once: sources that count, a workshop without a sandbox, and the real store."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.core.root import ImageConfig, Root
from untax.core.spec import EnvSpec, FrozenEnv, Limits, Repo
from untax.core.stage import Identity
from untax.layers import build, deps, marks
from untax.layers.build import Built, Stages
from untax.layers.sources import Fetched
from untax.layers.store import LayerStore

KIND = marks.of_this_process()


@pytest.fixture
def store(tmp_path):
    store = LayerStore(tmp_path / "layers", marks=KIND)
    yield store
    store.close()


class Counting:
    """An image that takes until it is let go; `failures` are raised first."""

    def __init__(self, identity="image:1", *, failures=(), is_open=True):
        self.identity = Identity(identity)
        self.failures = list(failures)
        self.identified = self.fetched = self.cancelled = 0
        self.gate = asyncio.Event()
        self.begun = asyncio.Event()
        if is_open:
            self.gate.set()

    async def identify(self):
        self.identified += 1
        await asyncio.sleep(0)
        return self.identity

    async def fetch(self, store, progress):
        self.fetched += 1
        self.begun.set()
        progress("bytes", 1, 2)
        with store.draft() as draft:
            (draft.tree / "hello").write_text(self.identity.text)
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise
            if self.failures:
                raise self.failures.pop(0)
            return Fetched((draft.publish().id,), ImageConfig(env=FrozenEnv({"A": "1"})))


class Here:
    """An image that is used where it lies."""

    def __init__(self, path):
        self.path = path

    async def identify(self):
        return Identity(f"dir:{self.path}", is_portable=False)

    async def root(self):
        return Root(layers=(str(self.path),))


class Shop:
    """Writes what the set-up says into a directory, in place of a sandbox: `name=text`, or `fail`."""

    def __init__(self, directory):
        self.directory = directory
        self.jobs = []

    @contextlib.asynccontextmanager
    async def build(self, root, spec, cache):
        self.jobs.append((root, spec, cache))
        tree = self.directory / f"upper{len(self.jobs)}"
        tree.mkdir(parents=True)
        for step in spec.setup:
            if step == "fail":
                raise StageFailed("deps", "step 'fail' exited with 1", b"the log of it")
            if "\n" not in step:
                path = tree / step.partition("=")[0]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(step.partition("=")[2])
        yield Built(tree, b"".join(b"$ %s\ndone\n" % step.encode() for step in spec.setup))


async def test_what_set_up_commands_printed_is_kept_with_their_stage(store, tmp_path):
    """Without the step that is ours, and of a long log its end: a store has thousands."""
    spec = EnvSpec(image="x:1", setup=("a=1", "b=" + "2" * 10_000))
    made = await stages(store, Counting(), Shop(tmp_path)).root(spec)
    log = store.stage(made.stages[-1].key).log_tail

    assert log.endswith(b"222\ndone\n")
    assert b"compileall" not in log
    assert len(log) == 4096


def stages(store, source, shop=None):
    return Stages(store, shop, find=lambda image: source)


async def until_waiting(tasks, source):
    """Every task has come as far as it can: the build has begun, and they wait."""
    await source.begun.wait()
    for _ in range(200):
        await asyncio.sleep(0.001)
    assert not any(task.done() for task in tasks)


async def test_q10_x20_128_who_want_one_missing_image_fetch_it_once(store):
    source = Counting(is_open=False)
    made = stages(store, source)
    tasks = [asyncio.ensure_future(made.root(EnvSpec(image="x:1"))) for _ in range(128)]
    await until_waiting(tasks, source)
    source.gate.set()
    prepared = await asyncio.gather(*tasks)

    assert (source.identified, source.fetched) == (1, 1)
    assert len({one.root for one in prepared}) == 1
    assert (Path(prepared[0].root.layers[0]) / "hello").read_text() == "image:1"
    assert all(one.built.keys() == {"image"} for one in prepared)
    for one in prepared:
        one.pin.close()


async def test_what_is_there_is_not_built_again_and_costs_are_kept(store):
    source = Counting()
    first = await stages(store, source).root(EnvSpec(image="x:1"))
    again = await stages(store, source).root(EnvSpec(image="x:1"))
    record = store.stage(first.stages[1].key)

    assert source.fetched == 1
    assert first.built["image"] > 0 and again.built == {}
    assert record is not None and record.cost_s == first.built["image"]
    assert again.root == first.root
    assert dict(again.root.config.env) == {"A": "1"}
    assert not again.root.is_furnished


async def test_q10_a_failure_is_told_to_all_who_wait_with_its_log_and_the_next_one_tries_again(store):
    source = Counting(failures=[StageFailed("image", "refused", b"line 1\nline 2")], is_open=False)
    made = stages(store, source)
    tasks = [asyncio.ensure_future(made.root(EnvSpec(image="x:1"))) for _ in range(128)]
    await until_waiting(tasks, source)
    source.gate.set()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    after = await made.root(EnvSpec(image="x:1"))

    assert {(type(one), one.message, one.log) for one in outcomes} == {(StageFailed, "refused", b"line 1\nline 2")}
    assert len({id(one) for one in outcomes}) == 128, "each has a traceback of its own"
    assert source.fetched == 2
    assert after.built
    assert not list((store.root / "drafts").iterdir())


async def test_x34_one_who_leaves_takes_nothing_from_the_others(store):
    source = Counting(is_open=False)
    made = stages(store, source)
    tasks = [asyncio.ensure_future(made.root(EnvSpec(image="x:1"))) for _ in range(8)]
    await until_waiting(tasks, source)
    for task in tasks[:7]:  # the one who began it among them
        task.cancel()
    await asyncio.wait(tasks[:7])
    source.gate.set()
    prepared = await tasks[7]

    assert all(task.cancelled() for task in tasks[:7])
    assert (source.fetched, source.cancelled) == (1, 0)
    assert (Path(prepared.root.layers[0]) / "hello").exists()


async def test_x34_the_last_one_to_leave_ends_the_build_and_nothing_is_left_of_it(store):
    source = Counting(is_open=False)
    made = stages(store, source)
    tasks = [asyncio.ensure_future(made.root(EnvSpec(image="x:1"))) for _ in range(8)]
    await until_waiting(tasks, source)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)

    assert (source.fetched, source.cancelled) == (1, 1)
    assert not list((store.root / "drafts").iterdir())
    source.gate.set()
    assert (await made.root(EnvSpec(image="x:1"))).built, "and whoever comes next begins anew"


async def test_x34_cancelled_at_any_moment_nothing_stays_held(store):
    """A hundred times after a different delay; afterwards every layer can be taken away, and no draft is left."""
    source = Counting()
    for at in range(100):
        source.identity = Identity(f"image:{at % 5}")
        task = asyncio.ensure_future(stages(store, source).root(EnvSpec(image=f"x:{at}")))
        for _ in range(at % 25):
            await asyncio.sleep(0)
        await asyncio.sleep(at % 10 / 2000)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await task).pin.close()
    for record in store.stages():
        store.remove_stage(record.key)
    store.evict()

    assert store.layers() == []
    assert not list((store.root / "drafts").iterdir())


async def test_a_pinned_stage_is_not_evicted_and_an_evicted_one_is_built_again(store):
    source = Counting()
    made = stages(store, source)
    prepared = await made.root(EnvSpec(image="x:1"))
    store.remove_stage(prepared.stages[1].key)
    assert (Path(prepared.root.layers[0]) / "hello").exists()
    prepared.pin.close()
    store.evict()
    assert store.layers() == []

    again = await made.root(EnvSpec(image="x:1"))

    assert source.fetched == 2
    assert (Path(again.root.layers[0]) / "hello").exists()


async def test_f13_a_stage_whose_layer_was_changed_on_disk_is_refused_and_built_again(store, tmp_path, caplog):
    source = Counting()
    prepared = await stages(store, source).root(EnvSpec(image="x:1"))
    path = Path(prepared.root.layers[0]) / "hello"
    prepared.pin.close()
    path.write_text("planted")
    store.close()
    fresh = LayerStore(store.root, marks=KIND)  # an engine looks at each layer when it first uses it

    again = await stages(fresh, source).root(EnvSpec(image="x:1"))

    assert source.fetched == 2
    assert (Path(again.root.layers[0]) / "hello").read_text() == "image:1"
    assert "hello" in caplog.text
    again.pin.close()
    fresh.close()


async def test_an_image_in_a_file_is_asked_what_it_is_again_when_the_file_has_changed(store, tmp_path):
    source = Counting()
    file = tmp_path / "a.tar"
    file.write_bytes(b"1")
    made = stages(store, source)
    spec = EnvSpec(image=f"tar:{file}")
    first = await made.root(spec)
    await made.root(spec)
    assert source.identified == 1
    file.write_bytes(b"22")
    source.identity = Identity("image:2")
    second = await made.root(spec)

    assert (source.identified, source.fetched) == (2, 2)
    assert first.stages[1].key != second.stages[1].key


async def test_a_name_stands_for_one_image_in_an_engine_unless_it_is_asked_again(store):
    source = Counting()
    made = stages(store, source)
    spec = EnvSpec(image="registry:x/y:latest")
    first = await made.root(spec)
    source.identity = Identity("image:2")
    same = await made.root(spec)
    moved = await made.root(spec, ask_again=True)

    assert first.root == same.root != moved.root
    assert (Path(moved.root.layers[0]) / "hello").read_text() == "image:2"


async def test_an_image_that_could_not_be_fetched_is_asked_what_it_is_the_next_time(store):
    source = Counting(failures=[StageUnavailable("image", "it changed meanwhile")])
    made = stages(store, source)
    with pytest.raises(StageUnavailable):
        await made.root(EnvSpec(image="registry:x/y:latest"))
    await made.root(EnvSpec(image="registry:x/y:latest"))

    assert source.identified == 2


# ---- set-up ----


async def test_set_up_runs_once_over_the_stages_below_and_what_it_leaves_is_a_layer(store, tmp_path):
    shop = Shop(tmp_path / "shop")
    made = stages(store, Counting(), shop)
    spec = EnvSpec(image="x:1", setup=("etc/a=1", "var/cache/untax/pip/x=cached", "root/.cache/pip/y=cached", "tmp/z=gone", "usr/b=2"))
    first, *_ = await asyncio.gather(*(made.root(spec) for _ in range(16)))
    top = Path(first.root.layers[-1])

    assert len(shop.jobs) == 1
    below, planned, cache = shop.jobs[0]
    assert first.root.layers == (*below.layers, str(top))
    assert planned.setup[:-1] == spec.setup and "compileall" in planned.setup[-1]
    assert cache == store.caches / first.stages[1].key
    assert sorted(str(path.relative_to(top)) for path in top.rglob("*") if path.is_file()) == ["etc/a", "usr/b"]
    assert first.root.is_furnished
    assert set(first.built) == {"image", "deps"}


async def test_what_binds_late_neither_changes_a_key_nor_reaches_a_build(store, tmp_path):
    shop = Shop(tmp_path / "shop")
    made = stages(store, Counting(), shop)
    plain = EnvSpec(image="x:1", setup=("a=1",))
    late = EnvSpec(image="x:1", setup=("a=1",), env={"SECRET": "s"}, user="root", network="all", limits=Limits(memory_mib=99))
    first = await made.root(late)
    second = await made.root(plain)

    assert [stage.key for stage in first.stages] == [stage.key for stage in second.stages]
    assert len(shop.jobs) == 1
    assert shop.jobs[0][1].env == {} and shop.jobs[0][1].user is None


async def test_builds_over_one_image_share_a_cache_and_over_two_they_do_not(store, tmp_path):
    shop = Shop(tmp_path / "shop")
    await stages(store, Counting("image:1"), shop).root(EnvSpec(image="x:1", setup=("a=1",)))
    await stages(store, Counting("image:1"), shop).root(EnvSpec(image="x:1", setup=("a=2",)))
    await stages(store, Counting("image:2"), shop).root(EnvSpec(image="x:1", setup=("a=1",)))
    caches = [cache for _, _, cache in shop.jobs]

    assert caches[0] == caches[1] != caches[2]


def test_a_repository_cannot_spoil_the_package_cache_of_another():
    """Its build script runs in its own set-up and may write anything there; commits of one repository go on sharing."""
    one, other = (Repo(f"https://forge.example/{name}.git", "a" * 40) for name in ("one", "other"))
    names = [build._shared_by("image", repo) for repo in (one, replace(one, commit="b" * 40), other, None)]

    assert names[0] == names[1]
    assert len(set(names)) == 3
    assert not any("forge" in name or "/" in name for name in names)


async def test_a_set_up_command_that_fails_tells_all_and_leaves_the_stages_below(store, tmp_path):
    shop, source = Shop(tmp_path / "shop"), Counting()
    made = stages(store, source, shop)
    spec = EnvSpec(image="x:1", setup=("a=1", "fail"))
    outcomes = await asyncio.gather(*(made.root(spec) for _ in range(8)), return_exceptions=True)
    retried = await asyncio.gather(made.root(spec), return_exceptions=True)

    assert {(type(one), one.stage, one.log) for one in outcomes + retried} == {(StageFailed, "deps", b"the log of it")}
    assert len(shop.jobs) == 2 and source.fetched == 1
    assert [record.name for record in store.stages()] == ["image"]


async def test_an_image_in_place_is_not_stored_and_what_stands_on_it_is_not_portable(store, tmp_path):
    (tmp_path / "image").mkdir()
    made = stages(store, Here(tmp_path / "image"), Shop(tmp_path / "shop"))
    bare = await made.root(EnvSpec(image="dir:x"))
    built = await made.root(EnvSpec(image="dir:x", setup=("a=1",)))

    assert bare.root.layers == (str(tmp_path / "image"),) and bare.built == {} and bare.pin.ids == ()
    assert built.root.layers[0] == str(tmp_path / "image") and len(built.root.layers) == 2
    assert [(record.name, record.is_portable) for record in store.stages()] == [("deps", False)]


async def test_without_a_workshop_set_up_is_refused_before_anything_is_fetched(store):
    source = Counting()
    with pytest.raises(UsageError, match="set-up"):
        await stages(store, source).root(EnvSpec(image="x:1", setup=("a=1",)))

    assert source.fetched == 0


def test_files_that_root_made_in_the_work_tree_become_the_users(tmp_path):
    """Set-up runs as root; the user who works there must be able to change them. The rest stays root's."""
    root, other = os.stat("/"), os.stat_result([0o644, 1, 1, 1, 5, 5, 0, 0, 0, 0])
    assert root.st_uid == 0
    owner = deps.owners("/workspace", "trusted")

    assert owner(b"workspace/a.egg-info", root) == (1000, 1000)
    assert owner(b"workspace2", root) == owner(b"usr/x", root) == (0, 0)
    assert owner(b"workspace/of another", other) == (5, 5)
    assert deps.owners("/workspace", "user") is None


# ---- several processes ----

_BUILDER = """
    import asyncio, os, sys, time
    from pathlib import Path
    from untax.core.root import ImageConfig
    from untax.core.spec import EnvSpec
    from untax.core.stage import Identity
    from untax.layers import marks
    from untax.layers.build import Built, Stages
    from untax.layers.sources import Fetched
    from untax.layers.store import LayerStore

    root, journal, seconds = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])

    class Slow:
        async def identify(self):
            return Identity("image:slow")
        async def fetch(self, store, progress):
            with open(journal, "a") as file:
                file.write(f"{os.getpid()}\\n")
            with store.draft() as draft:
                (draft.tree / "half").write_text("half")
                print("building", flush=True)
                await asyncio.sleep(seconds)
                (draft.tree / "whole").write_text("whole")
                return Fetched((draft.publish().id,), ImageConfig())

    async def main():
        store = LayerStore(root, marks=marks.of_this_process())
        made = Stages(store, find=lambda image: Slow())
        found = await asyncio.gather(*(made.root(EnvSpec(image="x:1")) for _ in range(8)))
        print(sorted(os.listdir(found[0].root.layers[0])), bool(found[0].built), flush=True)

    asyncio.run(main())
"""


def builder(store, journal, seconds):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_BUILDER), str(store.root), str(journal), str(seconds)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdout=subprocess.PIPE,
        text=True,
    )


def test_q10_two_processes_build_a_stage_once(store, tmp_path):
    journal = tmp_path / "journal"
    children = [builder(store, journal, 0.7) for _ in range(3)]
    answers = [child.communicate(timeout=60)[0].splitlines() for child in children]

    assert len(journal.read_text().splitlines()) == 1
    assert [answer[-1].partition("] ")[0] for answer in answers] == ["['half', 'whole'"] * 3
    assert sorted(answer[-1].rpartition(" ")[2] for answer in answers) == ["False", "False", "True"]


def test_x34_a_builder_that_is_killed_half_way_leaves_nothing_and_the_next_builds_it(store, tmp_path):
    """The one that waited for it goes on at once: a lock of the dead is nobody's."""
    journal = tmp_path / "journal"
    first = builder(store, journal, 600)
    assert first.stdout.readline() == "building\n"
    second = builder(store, journal, 0.1)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    answer = second.communicate(timeout=60)[0].splitlines()

    assert answer[-1] == "['half', 'whole'] True"
    assert len(journal.read_text().splitlines()) == 2
    LayerStore(store.root, marks=KIND).close()  # sweeps
    assert not list((store.root / "drafts").iterdir())
    assert len(store.layers()) == 1
    assert json.loads((store.root / "stages" / f"{store.stages()[0].key}.json").read_text())["name"] == "image"
