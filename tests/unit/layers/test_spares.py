"""What a store keeps only to be faster counts towards its budget and goes first; what is in use never goes."""

import fcntl
import os
import random
import threading
import time

import pytest
from tests.unit.layers.odd import furnish
from tests.unit.layers.private import in_child

from untax._remove import remove_tree
from untax.layers import spares
from untax.layers.garbage import would_free
from untax.layers.store import LayerStore, StageRecord

MARKS = "trusted" if os.geteuid() == 0 else "user"
MIB = 1 << 20


@pytest.fixture
def store(tmp_path):
    store = LayerStore(tmp_path / "layers", marks=MARKS)
    yield store
    store.close()
    remove_tree(store.root)


def fill(path, size, *, idle_s=0.0):
    with spares.using(path):
        path.mkdir()
        (path / "bulk").write_bytes(bytes(size))
    then = time.time() - idle_s
    os.utime(f"{path}.use", (then, then))


def blob(store, name, size, *, idle_s=0.0):
    path = store.downloads / f"sha256-{name}"
    path.write_bytes(bytes(size))
    os.utime(path, (time.time() - idle_s,) * 2)
    return path


def add_stage(store, key, size):
    with store.draft() as draft:
        (draft.tree / "bulk").write_bytes(key.encode() * (size // len(key)))
        layer = draft.publish()
    store.put_stage(StageRecord(key, "deps", None, (layer.id,), cost_s=1.0))


def names(store):
    return [spare.name for spare in store.spares()]


def test_what_was_not_used_for_longest_comes_first_with_what_it_takes(store):
    fill(store.mirrors / "one", MIB, idle_s=10)
    fill(store.caches / "two", 2 * MIB, idle_s=30)
    blob(store, "three", 3 * MIB, idle_s=20)

    assert names(store) == ["caches/two", "downloads/sha256-three", "mirrors/one"]
    assert [spare.bytes // MIB for spare in store.spares()] == [2, 3, 1]


def test_a_budget_takes_mirrors_and_caches_before_any_stage(store):
    add_stage(store, "stage", MIB)
    fill(store.mirrors / "old", 2 * MIB, idle_s=100)
    fill(store.caches / "new", 2 * MIB, idle_s=50)
    blob(store, "half", 2 * MIB)
    store.budget_bytes = 6 * MIB

    expected = would_free(store)
    freed = store.evict()
    assert freed.spares == ("mirrors/old",)
    assert freed.stages == ()
    assert freed == expected
    assert os.listdir(store.mirrors) == []

    store.budget_bytes = MIB // 2
    expected = would_free(store)
    freed = store.evict()
    assert (freed.spares, freed.stages) == (("caches/new", "downloads/sha256-half"), ("stage",))
    assert freed == expected
    assert store.spares() == [] and store.layers() == []


def test_what_nobody_has_used_for_long_goes_without_a_budget(store):
    fill(store.mirrors / "old", 100, idle_s=40 * 86400)
    fill(store.mirrors / "new", 100, idle_s=20 * 86400)
    fill(store.caches / "old", 100, idle_s=40 * 86400)
    blob(store, "old", 100, idle_s=10 * 86400)
    blob(store, "new", 100, idle_s=5 * 86400)

    expected = would_free(store)
    freed = store.evict()
    assert sorted(freed.spares) == ["caches/old", "downloads/sha256-old", "mirrors/old"]
    assert freed == expected
    assert sorted(names(store)) == ["downloads/sha256-new", "mirrors/new"]


def test_what_is_in_use_stays_however_old_and_keeps_no_layer_out(store):
    fill(store.caches / "busy", 2 * MIB, idle_s=40 * 86400)
    half = blob(store, "half", 2 * MIB, idle_s=40 * 86400)
    other = LayerStore(store.root, marks=MARKS, budget_bytes=2 * MIB)

    with spares.using(store.caches / "busy"), half.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        os.utime(store.caches / "busy.use", (1, 1))
        assert in_child(lambda: other.evict().spares == () or os.abort()) == 0
        assert would_free(other).spares == ()
        add_stage(other, "stage", MIB)
    assert (store.caches / "busy" / "bulk").stat().st_size == 2 * MIB
    assert other.stage("stage") is not None
    other.close()


def test_a_mirror_that_is_used_is_never_taken_away_under_its_user(store):
    """Users and removers at once: whoever is inside finds what it made until it leaves."""
    path = store.mirrors / "m"
    stop = threading.Event()
    failures = []
    uses = removals = 0

    def use():
        nonlocal uses
        while not stop.is_set():
            with spares.using(path):
                path.mkdir(exist_ok=True)
                (path / "mine").touch()
                time.sleep(0.0005)
                if not (path / "mine").exists():
                    failures.append("gone")
                uses += 1
            time.sleep(random.random() * 0.002)

    def remove():
        nonlocal removals
        while not stop.is_set():
            for spare in store.spares():
                removals += spares.remove(spare)

    threads = [threading.Thread(target=one) for one in (use, use, remove, remove)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while (uses < 200 or removals < 20) and not failures and time.monotonic() < deadline:
        stop.wait(0.05)
    stop.set()
    for thread in threads:
        thread.join()
    assert failures == []
    assert uses >= 200 and removals >= 20


def test_a_cache_that_a_workload_filled_is_counted_and_removed_and_nothing_else(store, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "big").write_bytes(bytes(MIB))
    cache = store.caches / "cache"
    with spares.using(cache):
        cache.mkdir()
        furnish(cache, outside=tmp_path / "outside")
        (cache / "big").write_bytes(bytes(3 * MIB))
        os.link(cache / "big", cache / "same")

    (found,) = store.spares()
    assert 3 * MIB <= found.bytes < 11 * MIB, "1,200 directories, three megabytes once, nothing of what links lead to"
    assert spares.remove(found)
    assert os.listdir(store.caches) == []
    assert (tmp_path / "outside" / "big").exists()


def test_what_a_killed_process_left_is_counted_again_and_its_removal_finished(store):
    fill(store.caches / "cut", MIB)
    (store.caches / "cut.use").write_bytes(b"12")
    (store.mirrors / ".gone-1").mkdir()
    (store.mirrors / ".gone-1" / "file").touch()

    (found,) = store.spares()
    assert found.bytes >= MIB
    store.evict()
    assert os.listdir(store.mirrors) == []
