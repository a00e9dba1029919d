"""The store keeps whole layers or none, whoever dies and whatever fills up; and only those that somebody needs."""

import errno
import fcntl
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.layers.odd import furnish
from tests.unit.layers.private import die_at, in_child, mount, on_tmpfs

from untax._remove import remove_tree
from untax.core.errors import StageUnavailable, UsageError
from untax.core.root import ImageConfig
from untax.core.spec import FrozenEnv
from untax.layers import _about as about
from untax.layers import _durable
from untax.layers import store as store_module
from untax.layers.garbage import would_free
from untax.layers.store import LayerStore, StageRecord

MARKS = "trusted" if os.geteuid() == 0 else "user"


@pytest.fixture
def root(tmp_path):
    yield tmp_path / "layers"
    remove_tree(tmp_path / "layers")


@pytest.fixture
def store(root):
    store = LayerStore(root, marks=MARKS)
    yield store
    store.close()


def publish(store, text="contents", size=0):
    with store.draft() as draft:
        (draft.tree / "file").write_text(text)
        os.utime(draft.tree / "file", ns=(0, 0))
        if size:
            (draft.tree / "bulk").write_bytes(os.urandom(size))
        return draft.publish()


def add_stage(store, key, text, *, parent=None, cost_s=1.0, size=0, name="deps"):
    layer = publish(store, text, size)
    store.put_stage(StageRecord(key, name, parent, (layer.id,), cost_s=cost_s))
    return layer


def again(store):
    """The store as the next process finds it."""
    store.close()
    return LayerStore(store.root, marks=store.marks, budget_bytes=store.budget_bytes)


# ---- layers ----


def test_a_published_layer_is_found_by_its_content(store):
    layer = publish(store)

    found = store.layer(layer.id)
    assert found == layer
    assert found.id.startswith("sha256-")
    assert (found.tree / "file").read_text() == "contents"
    assert found.entries == 2
    assert found.bytes >= 4096
    assert store.layers() == [layer]
    assert os.listdir(store.root / "drafts") == []


def test_the_same_content_twice_is_one_layer(store):
    first = publish(store)
    inode = first.tree.stat().st_ino
    second = publish(again(store))

    assert second == first
    assert second.tree.stat().st_ino == inode
    assert os.listdir(store.root / "drafts") == []


def test_a_draft_that_is_not_published_is_gone(store):
    draft = store.draft()
    (draft.tree / "file").touch()
    draft.discard()
    draft.discard()
    with pytest.raises(UsageError, match="already"):
        draft.publish()
    with pytest.raises(KeyError), store.draft():
        raise KeyError
    with store.draft() as draft:
        draft.publish()
        draft.discard()

    assert os.listdir(store.root / "drafts") == []
    assert len(store.layers()) == 1


def test_a_draft_begins_as_an_ordinary_directory(store):
    before = os.umask(0o077)
    try:
        with store.draft() as draft:
            assert draft.tree.stat().st_mode & 0o7777 == 0o755
            assert os.listdir(draft.tree) == []
    finally:
        os.umask(before)


def test_a_layer_of_anything_is_published_verified_and_removed(store, tmp_path):
    with store.draft() as draft:
        furnish(draft.tree, outside=tmp_path)
        layer = draft.publish()
    store.put_stage(StageRecord("k", "image", None, (layer.id,)))
    fresh = again(store)
    fresh.pin([layer.id]).close()
    fresh.verify(layer.id)
    fresh.check_seal(layer.id)

    fresh.remove_stage("k")

    assert os.listdir(store.root / "trees") == []
    assert os.listdir(store.root / "drafts") == []
    assert os.listdir(store.root / "damaged") == []


def test_a_missing_layer_is_unavailable_and_a_bad_id_is_a_mistake(store):
    missing = "sha256-" + "0" * 64

    for call in (store.layer, store.verify, store.check_seal, lambda one: store.pin([one])):
        with pytest.raises(StageUnavailable, match="not in the store"):
            call(missing)
        for bad in ("../../etc", "sha256-xyz", "", "sha256-" + "0" * 63 + "\n"):
            with pytest.raises(UsageError):
                call(bad)


# ---- damage ----


def edit(layer):
    with open(layer.tree / "file", "r+b") as file:
        file.write(b"C")
    os.utime(layer.tree / "file", ns=(0, 0))


def test_f13_a_layer_edited_in_place_is_refused_and_set_aside(store, caplog):
    """Times can be put back; the change time cannot, and then the digest tells."""
    layer = publish(store)
    store.put_stage(StageRecord("k", "image", None, (layer.id,)))
    edit(layer)
    fresh = again(store)

    with pytest.raises(StageUnavailable, match="/file has another contents"):
        fresh.pin([layer.id])

    assert "set aside" in caplog.text
    assert fresh.stage("k") is None, "which means: build it again"
    assert fresh.layers() == []
    assert len(os.listdir(fresh.root / "damaged")) == 1
    assert publish(fresh).id == layer.id
    fresh.put_stage(StageRecord("k", "image", None, (layer.id,)))
    fresh.pin([layer.id]).close()


def test_f13_verify_and_check_seal_refuse_it_in_the_engine_that_made_it_too(store):
    for check in (store.verify, store.check_seal):
        layer = publish(store)
        edit(layer)
        with pytest.raises(StageUnavailable, match="/file"):
            check(layer.id)


def test_a_damaged_layer_is_replaced_by_the_same_content_published_again(store):
    layer = publish(store)
    edit(layer)

    assert publish(store) == layer
    store.verify(layer.id)


def test_a_seal_broken_by_what_changes_nothing_is_made_anew(store):
    """A restored backup has other inodes and the same content."""
    layer = publish(store)
    copy = layer.tree.with_name("copy")
    shutil.copytree(layer.tree, copy)
    shutil.rmtree(layer.tree)
    copy.rename(layer.tree)
    seal = (layer.tree.parent / "seal").read_text()
    fresh = again(store)

    fresh.pin([layer.id]).close()

    assert (layer.tree.parent / "seal").read_text() != seal
    assert os.listdir(fresh.root / "damaged") == []


def test_a_layer_whose_tree_is_gone_is_refused(store):
    layer = publish(store)
    shutil.rmtree(layer.tree)

    with pytest.raises(StageUnavailable, match="gone"):
        again(store).pin([layer.id])


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"version": 1}', "\0\0\0", '{"bytes": true, "entries": "x"}', "[" * 100_000], ids=range(7)
)
@pytest.mark.parametrize("name", ["layer.json", "seal", "rows"])
def test_x30_what_is_noted_of_a_layer_is_found_out_again(store, name, text):
    layer = publish(store)
    (layer.tree.parent / name).write_text(text)
    fresh = again(store)

    assert fresh.layer(layer.id) == layer
    fresh.pin([layer.id]).close()
    fresh.verify(layer.id)
    assert fresh.layers() == [layer]


# ---- records ----


def full_record(store):
    config = ImageConfig(FrozenEnv({"PATH": "/x", "Ü": "\udcff"}), "/srv", "app", ("sh", "-c"), ("x",), FrozenEnv({"a": "b"}))
    layer = publish(store)
    return StageRecord("k" * 64, "deps", "p" * 64, (layer.id,), config, {"steps": ["a"]}, 1.5, 12.25, False, b"log\xff\n")


def test_a_record_comes_back_as_it_was_put(store):
    record = full_record(store)
    store.put_stage(record)

    assert again(store).stage(record.key) == record
    assert store.stages() == [record]
    assert StageRecord.from_json(record.to_json()) == record
    assert store.stage("unknown") is None


@pytest.mark.parametrize("key", ["", "..", "a/b", ".hidden", "a\n", "x" * 129, "k.json", 7, None])
def test_a_key_that_is_no_file_name_is_a_mistake(store, key):
    for call in (store.stage, store.remove_stage, store.used, lambda one: StageRecord(one, "deps", None, ())):
        with pytest.raises(UsageError, match="key"):
            call(key)


def test_a_record_of_layers_that_are_not_there_is_refused(store):
    with pytest.raises(StageUnavailable):
        store.put_stage(StageRecord("k", "image", None, ("sha256-" + "0" * 64,)))
    assert store.stages() == []


def broken_records(store):
    good = json.loads(full_record(store).to_json())
    yield b""
    yield b"{"
    yield b"\xff\xfe"
    yield b"null"
    yield b"[" * 100_000
    yield json.dumps(good).encode()[:-10]
    yield json.dumps(good | {"version": 0}).encode()
    yield json.dumps(good | {"key": "other"}).encode()
    for field in good:
        yield json.dumps({name: value for name, value in good.items() if name != field}).encode()
        yield json.dumps(good | {field: {"x": [None]} if field != "recipe" else 3}).encode()
    yield json.dumps(good | {"adds": ["../../.."]}).encode()
    yield json.dumps(good | {"cost_s": float("inf")}).encode()


def test_x30_damaged_records_are_quarantined_with_a_message(store, caplog):
    """Whatever is in the file: start-up succeeds, the stage counts as missing, and the file is kept aside."""
    path = store.root / "stages" / ("k" * 64 + ".json")
    for number, text in enumerate(broken_records(store), start=1):
        path.write_bytes(text)
        fresh = again(store)
        caplog.clear()

        assert fresh.stage("k" * 64) is None, text
        assert "set aside" in caplog.text
        assert not path.exists()
        assert fresh.stages() == []
        assert len(os.listdir(fresh.root / "damaged")) == number


def test_the_layers_of_a_later_releases_record_are_left_alone_too(store):
    """A saved snapshot among them: nothing can build it again."""
    layer = add_stage(store, "k", "precious", name="snapshot")
    path = store.root / "stages" / "k.json"
    path.write_text(json.dumps({"version": 2, "stack": [{"layer": layer.id}]}))
    other = again(store)

    assert other.stage("k") is None
    assert would_free(other).layers == ()
    assert other.evict(wanted_bytes=1 << 60).layers == ()
    assert other.layer(layer.id) == layer
    path.unlink()
    assert other.evict().layers == (layer.id,)


def test_a_record_of_a_later_release_is_left_alone(store):
    record = full_record(store)
    path = store.root / "stages" / f"{record.key}.json"
    path.write_text(json.dumps(json.loads(record.to_json()) | {"version": 2}))

    assert store.stage(record.key) is None
    assert path.exists()


# ---- formats and places ----


def test_a_store_of_the_other_kind_of_marks_is_refused(store):
    other = "user" if MARKS == "trusted" else "trusted"

    with pytest.raises(UsageError, match="store of its own"):
        LayerStore(store.root, marks=other)
    publish(store)
    (store.root / "format").unlink()
    with pytest.raises(UsageError, match="store of its own"):
        LayerStore(store.root, marks=other)


def test_a_store_of_another_format_is_refused(store):
    (store.root / "format").write_text(json.dumps({"version": 2, "marks": MARKS}))

    with pytest.raises(UsageError, match="format 2"):
        LayerStore(store.root, marks=MARKS)


@pytest.mark.parametrize("text", ["", "{", "[]", "7", '{"version": 1}', "\0"])
def test_x30_a_damaged_format_file_is_quarantined(store, caplog, text):
    layer = publish(store)
    (store.root / "format").write_text(text)

    fresh = again(store)

    assert fresh.layers() == [layer]
    assert "set aside" in caplog.text
    assert json.loads((store.root / "format").read_text()) == {"version": 1, "marks": MARKS}


def test_f20_a_root_that_is_a_link_a_file_or_open_to_others_is_refused(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").touch()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)

    for name in ("link", "file", "file/below", "open"):
        with pytest.raises(UsageError, match="state_dir"):
            LayerStore(tmp_path / name, marks=MARKS)
    assert os.listdir(tmp_path / "real") == []


def test_many_who_pin_a_layer_for_the_first_time_look_at_it_once(store, monkeypatch):
    """To look takes a call for each of its entries, and all of an engine's first leases come at once."""
    layer = publish(store)
    store.put_stage(StageRecord("k", "deps", None, (layer.id,)))
    fresh = again(store)
    looks = []

    def look(path):
        looks.append(path)
        time.sleep(0.05)  # so that all of them are there before the first has looked
        return about.seal_now(path)

    monkeypatch.setattr(store_module, "seal_now", look)
    with ThreadPoolExecutor(8) as pool:
        pins = list(pool.map(lambda _: fresh.pin([layer.id]), range(8)))
    assert len(looks) == 1
    for pin in pins:
        pin.close()
    fresh.close()


# ---- pins and eviction ----


def test_a_pinned_layer_is_not_evicted_and_others_go(store):
    kept, gone = add_stage(store, "kept", "a"), add_stage(store, "gone", "b")
    pin = store.pin([kept.id])

    freed = store.evict(wanted_bytes=1 << 60)

    assert (freed.stages, freed.layers, freed.bytes) == (("gone",), (gone.id,), gone.bytes)
    assert store.layers() == [kept]
    pin.close()
    pin.close()
    assert store.evict(wanted_bytes=1 << 60).layers == (kept.id,)


def test_a_pin_holds_against_other_processes_until_its_own_dies(store):
    layer = add_stage(store, "k", "a")
    script = (
        "import sys, pathlib; from untax.layers.store import LayerStore\n"
        f"pin = LayerStore(pathlib.Path(sys.argv[1]), marks={MARKS!r}).pin([sys.argv[2]]); print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, store.root, layer.id],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    try:
        assert holder.stdout.readline() == b"held\n"
        assert store.evict(wanted_bytes=1 << 60).layers == ()
        store.remove_stage("k")
        assert store.layers() == [layer], "the record goes, what is used stays"
    finally:
        holder.kill()
        holder.communicate()

    assert store.evict().layers == (layer.id,), "which no record names any more"


def test_who_stands_on_a_damaged_layer_keeps_it(store):
    """It is out of use for everybody else, and another takes its place; nothing is removed from under a running sandbox."""
    layer = publish(store)
    pin = store.pin([layer.id])
    edit(layer)
    with pytest.raises(StageUnavailable):
        store.verify(layer.id)
    add_stage(store, "k", "contents")
    store.evict()
    assert len(os.listdir(store.root / "damaged")) == 1
    second = store.pin([layer.id])
    store.verify(layer.id)

    second.close()
    store.evict()
    assert len(os.listdir(store.root / "damaged")) == 1
    pin.close()
    store.evict()
    assert os.listdir(store.root / "damaged") == []
    store.pin([layer.id]).close()


def test_one_descriptor_serves_all_leases_of_a_layer(store):
    layer = publish(store)
    before = len(os.listdir("/proc/self/fd"))

    pins = [store.pin([layer.id, layer.id]) for _ in range(500)]

    assert len(os.listdir("/proc/self/fd")) <= before + 1
    for pin in pins:
        pin.close()


def test_a_layer_that_two_stages_share_stays_while_one_needs_it(store):
    shared = publish(store, "shared")
    own = publish(store, "own")
    store.put_stage(StageRecord("one", "deps", None, (shared.id, own.id)))
    store.put_stage(StageRecord("two", "deps", None, (shared.id,)))

    store.remove_stage("one")
    assert store.layers() == [shared]
    store.remove_stage("two")
    assert store.layers() == []
    store.remove_stage("two")


def test_a_saved_snapshot_is_never_evicted(store):
    snapshot = add_stage(store, "snap", "a", name="snapshot", cost_s=0.0)

    assert store.evict(wanted_bytes=1 << 60).layers == ()
    assert store.layers() == [snapshot]
    store.remove_stage("snap")
    assert store.layers() == []


def test_a_published_layer_waits_for_its_record(store):
    """Between the two another engine may be looking for room."""
    layer = publish(store)
    other = LayerStore(store.root, marks=MARKS)

    assert other.evict(wanted_bytes=1 << 60).layers == ()
    store.put_stage(StageRecord("k", "image", None, (layer.id,)))
    assert other.evict().layers == ()
    assert other.evict(wanted_bytes=1 << 60).layers == (layer.id,)


def test_a_layer_whose_record_never_came_goes_with_its_process(store):
    layer = publish(store)

    assert again(store).evict().layers == (layer.id,)


def test_the_budget_is_kept_by_evicting_what_is_worth_least(root):
    store = LayerStore(root, marks=MARKS, budget_bytes=3 << 20)
    cheap, dear = add_stage(store, "cheap", "a", cost_s=1, size=1 << 20), add_stage(store, "dear", "b", cost_s=100, size=1 << 20)

    new = add_stage(store, "new", "c", cost_s=10, size=1 << 20)
    store.trim()
    assert {layer.id for layer in store.layers()} == {dear.id, new.id}
    assert store.stage("cheap") is None
    assert sum(layer.bytes for layer in store.layers()) <= 3 << 20
    assert cheap.id not in os.listdir(root / "trees")
    assert os.listdir(root / "drafts") == []


def test_the_budget_is_for_what_is_kept_beside_the_layers_in_use(root):
    """Whoever needs a layer gets it, whatever others use; when nobody uses them any more, those worth least go."""
    store = LayerStore(root, marks=MARKS, budget_bytes=3 << 19)  # for one of them
    first = add_stage(store, "first", "a", cost_s=1, size=1 << 20)
    with store.pin([first.id]):
        second = add_stage(store, "second", "b", cost_s=2, size=1 << 20)
        other = LayerStore(root, marks=MARKS)
        with other.pin([second.id]):
            third = add_stage(store, "third", "c", cost_s=3, size=1 << 20)
            assert store.trim().stages == ()
            assert store.unkept() == {"first", "second"}
        other.close()
        assert store.trim().stages == ("second",)
        assert store.unkept() == {"first"}
    assert store.trim().stages == ("first",)
    assert store.unkept() == frozenset()
    assert store.layers() == [third]


def test_a_layer_that_no_budget_could_keep_is_refused(root):
    store = LayerStore(root, marks=MARKS, budget_bytes=3 << 20)
    with pytest.raises(StageUnavailable, match=r"budget of 3145728 bytes; raise the budget$") as refused:
        publish(store, "large", size=4 << 20)
    assert refused.value.stage == "budget"
    saved = add_stage(store, "snap", "a", name="snapshot", size=2 << 20)
    with pytest.raises(StageUnavailable, match=r"saved snapshots of .*remove snapshots"):
        publish(store, "b", size=2 << 20)
    assert store.layers() == [saved]
    assert os.listdir(root / "drafts") == []


def test_what_is_pinned_at_once_is_there_and_was_looked_at(store):
    layer = add_stage(store, "k", "a")
    with store.pin_at_once([layer.id]) as pin:
        assert pin.ids == (layer.id,)
        assert store.is_in_use(layer.id)
    assert again(store).pin_at_once([layer.id]) is None  # whose seal this process has not seen
    fd = os.open(store.root / "trees" / layer.id / "lock", os.O_RDWR)
    fcntl.flock(fd, fcntl.LOCK_EX)
    assert store.pin_at_once([layer.id]) is None  # somebody takes it away
    os.close(fd)
    store.remove_stage("k")
    assert store.pin_at_once([layer.id]) is None


def test_many_layers_are_taken_away_with_few_looks_at_the_records(store, monkeypatch):
    """Each look reads what every stage needs: one for each layer would take minutes in a store of thousands."""
    for number in range(100):
        add_stage(store, f"k{number}", str(number))
    other = again(store)
    looks = []
    listed = other._records.keys

    def keys():
        looks.append(1)
        return listed()

    monkeypatch.setattr(other._records, "keys", keys)
    freed = other.evict(wanted_bytes=1 << 60)

    assert len(freed.layers) == len(freed.stages) == 100
    assert other.layers() == [] and os.listdir(other.root / "drafts") == []
    assert len(looks) < 20


def test_use_outweighs_cost(root):
    store = LayerStore(root, marks=MARKS)
    often, dear = add_stage(store, "often", "a", cost_s=1, size=1 << 20), add_stage(store, "dear", "b", cost_s=5, size=1 << 20)
    for _ in range(20):
        store.used("often")
    store.budget_bytes = often.bytes + 4096

    assert again(store).evict().layers == (dear.id,)


def test_a_damaged_note_of_use_counts_as_none(store):
    add_stage(store, "k", "a")
    for data in (b"", b"x", b"\xff" * 16, b"\0" * 40):
        (store.root / "stages" / "k.use").write_bytes(data)
        store.used("k")
        assert store.evict().stages == ()
    store.used("unknown")
    assert not (store.root / "stages" / "unknown.use").exists()


# ---- several processes ----


def test_lock_stage_lets_one_in_at_a_time(store):
    """Threads and processes alike; and no lock file is left."""
    tally = store.root / "tally"
    tally.write_text("0")

    def count(times):
        mine = LayerStore(store.root, marks=MARKS)
        for _ in range(times):
            with mine.lock_stage("k"):
                value = int(tally.read_text())
                time.sleep(0.0005)
                tally.write_text(str(value + 1))

    def process():
        count(30)

    threads = [threading.Thread(target=count, args=(30,)) for _ in range(3)]
    children = [os.fork() for _ in range(1)]
    if children[0] == 0:
        try:
            process()
        finally:
            os._exit(0)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(children[0], 0)[1] == 0

    assert tally.read_text() == "120"
    assert list((store.root / "stages").glob("*.lock")) == []


def test_a_lock_of_a_killed_builder_is_free(store):
    def die():
        with LayerStore(store.root, marks=MARKS).lock_stage("k"):
            os.kill(os.getpid(), signal.SIGKILL)

    assert os.waitstatus_to_exitcode(in_child(die)) == -signal.SIGKILL
    with store.lock_stage("k"):
        pass


def test_many_processes_publish_pin_and_evict_at_once(root):
    """Whatever the interleaving: what is pinned is whole, and nothing is left half made."""
    LayerStore(root, marks=MARKS).close()

    def work(seed):
        store = LayerStore(root, marks=MARKS)
        for number in range(25):
            text = f"text {(seed + number) % 4}"
            layer = publish(store, text)
            store.put_stage(StageRecord(f"k{(seed + number) % 4}", "deps", None, (layer.id,)))
            try:
                with store.pin([layer.id]):
                    assert (layer.tree / "file").read_text() == text
                    store.verify(layer.id)
                    assert (layer.tree / "file").read_text() == text
            except StageUnavailable as exc:
                assert "not in the store" in str(exc), exc  # evicted between the two calls
            if number % 5 == seed % 5:
                store.evict(wanted_bytes=1 << 60)

    children = []
    for seed in range(5):
        child = os.fork()
        if child == 0:
            try:
                logging.disable()
                work(seed)
            except BaseException:
                import traceback

                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 5

    store = LayerStore(root, marks=MARKS)
    for layer in store.layers():
        store.verify(layer.id)
    assert all(store.layer(one) for record in store.stages() for one in record.adds)
    assert os.listdir(root / "drafts") == []
    assert os.listdir(root / "damaged") == []


# ---- death at every step ----

STEPS = ("rename", "fsync", "mkdir", "open", "unlink", "rmdir", "write", "close", "preadv", "listxattr")


def test_kill_9_at_every_step_leaves_a_whole_store(root, monkeypatch):
    """A child publishes, records and evicts, and is killed before its n-th call into the kernel, for every n until it gets through."""
    survived = None
    step = 0
    while survived is None:
        shutil.rmtree(root, ignore_errors=True)
        base = LayerStore(root, marks=MARKS)
        old = add_stage(base, "old", "old", name="snapshot")
        add_stage(base, "victim", "victim")
        base.close()

        status = os.waitstatus_to_exitcode(in_child(publish_and_die, root, step))
        if status == 0:
            survived = step
        else:
            assert status == -signal.SIGKILL

        found = LayerStore(root, marks=MARKS)
        assert os.listdir(root / "drafts") == [], f"step {step}"
        assert found.stage("old") is not None
        for layer in found.layers():
            found.verify(layer.id)
        for record in found.stages():
            found.pin(record.adds).close()
        assert old in found.layers()
        assert os.listdir(root / "damaged") == []
        assert list((root / "stages").glob(".new-*")) == []
        assert publish(found, "new").entries == 2  # and goes on as if nothing had been
        found.close()
        step += 1 if step < 40 else 3
    assert survived > 40


def publish_and_die(root, step):
    store = LayerStore(root, marks=MARKS)
    die_at(step, STEPS)
    add_stage(store, "new", "new")
    store.remove_stage("victim")
    store.evict(wanted_bytes=0)


def test_a_draft_is_swept_when_its_maker_is_dead_and_not_before(store):
    draft = store.draft()
    (draft.tree / "file").touch()
    other = LayerStore(store.root, marks=MARKS)
    assert draft.tree.is_dir()

    def die():
        dead = LayerStore(store.root, marks=MARKS).draft()
        (dead.tree / "left").touch()
        os.kill(os.getpid(), signal.SIGKILL)

    in_child(die)
    assert len(os.listdir(store.root / "drafts")) == 2
    LayerStore(store.root, marks=MARKS)
    assert os.listdir(store.root / "drafts") == [draft.tree.parent.name]
    assert draft.publish() == other.layers()[0]


# ---- a full disk ----


def test_a_full_disk_at_every_step_is_said_and_leaves_nothing(tmp_path):
    """On a small file system of its own, filled up to the last few pages: one page less each time."""

    def check(kind):
        outcomes = []
        for spare in range(40):
            place = tmp_path / f"{kind}-{spare}"
            place.mkdir()
            mount("tmpfs", place, "size=1m" if kind == "blocks" else "nr_inodes=60")
            store = LayerStore(place / "layers", marks=MARKS)
            old = add_stage(store, "old", "old", name="snapshot")
            fill_up(place, spare, kind)
            try:
                add_stage(store, "new", "new", size=20_000)
                outcomes.append("stored")
            except StageUnavailable as exc:
                outcomes.append("refused")
                assert "full" in str(exc), exc
            assert os.listdir(store.root / "drafts") == []
            assert list((store.root / "stages").glob(".new-*")) == []
            fresh = again(store)
            fresh.verify(old.id)
            assert fresh.stage("old") is not None
            assert (fresh.stage("new") is not None) == (outcomes[-1] == "stored")
            for layer in fresh.layers():
                fresh.verify(layer.id)
            (place / "ballast").unlink(missing_ok=True)
            shutil.rmtree(place / "inodes", ignore_errors=True)
            add_stage(fresh, "new", "new", size=20_000)
            if outcomes[-3:] == ["stored"] * 3:
                break
        assert outcomes.count("refused") >= 5
        assert outcomes[-1] == "stored"

    on_tmpfs(check, "blocks")
    on_tmpfs(check, "inodes")


def fill_up(place, spare, kind):
    """Leave `spare` pages, or inodes."""
    if kind == "inodes":
        (place / "inodes").mkdir()
        free = os.statvfs(place).f_ffree
        for number in range(free - spare):
            (place / "inodes" / str(number)).touch()
        return
    free = os.statvfs(place)
    with open(place / "ballast", "wb") as file:
        file.write(bytes((free.f_bfree - spare) * free.f_frsize))


def test_a_full_disk_while_filling_makes_room_for_another_attempt(tmp_path):
    """The workload's own write meets it; the draft goes, older stages go, and the same again succeeds."""

    def check():
        mount("tmpfs", tmp_path, "size=8m")
        store = LayerStore(tmp_path / "layers", marks=MARKS)
        add_stage(store, "old", "old", size=5 << 20)
        with pytest.raises(StageUnavailable, match="full") as told:
            add_stage(store, "new", "new", size=4 << 20)
        assert told.value.retryable
        assert os.listdir(store.root / "drafts") == []
        add_stage(store, "new", "new", size=4 << 20)
        assert store.stage("new") is not None

    on_tmpfs(check)


def test_other_failures_of_the_disk_are_said_too(store, monkeypatch):
    def fail(fd):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)

    with pytest.raises(StageUnavailable, match="Input/output"):
        publish(store)
    assert os.listdir(store.root / "drafts") == []


def test_a_write_that_was_lost_on_its_way_to_the_disk_is_a_failure(store, monkeypatch):
    """What `syncfs` reports is the last chance to learn of it."""

    def fail(fd):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(_durable, "syncfs", fail)

    with pytest.raises(StageUnavailable, match="full"):
        publish(store)
    assert store.layers() == []


def test_no_descriptor_is_left_open(root):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        store = LayerStore(root, marks=MARKS)
        layer = add_stage(store, "k", "a")
        store.pin([layer.id])
        store.draft().discard()
        with store.lock_stage("k"):
            pass
        store.evict(wanted_bytes=1 << 60)
        store.close()
        store.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_link_among_the_drafts_is_not_followed(store, tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").touch()
    (store.root / "drafts" / "x").symlink_to(tmp_path / "elsewhere")
    (store.root / "drafts" / "y").touch()

    LayerStore(store.root, marks=MARKS)

    assert os.listdir(store.root / "drafts") == []
    assert os.listdir(tmp_path / "elsewhere") == ["file"]


def test_a_sweeper_waits_for_nobody(store):
    """A live maker's lock is asked for, not waited for."""
    draft = store.draft()
    fd = os.open(draft.tree.parent / "lock", os.O_RDWR)
    with pytest.raises(BlockingIOError):
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(fd)
    began = time.monotonic()
    LayerStore(store.root, marks=MARKS).evict()
    assert time.monotonic() - began < 20
    draft.discard()
