"""Images in files: which one is meant, what it is known by, and that what was asked about is what is brought."""

import asyncio
import contextlib
import gzip
import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests import hostile_archives as hostile

from untax.core.errors import StageFailed, StageUnavailable, UsageError
from untax.layers.sources import find, in_thread
from untax.layers.sources._reference import this_platform
from untax.layers.store import LayerStore
from untax.substrates._host import is_host_root

MARKS = "trusted" if is_host_root() else "user"


@pytest.fixture
def store(tmp_path):
    store = LayerStore(tmp_path / "store", marks=MARKS)
    yield store
    store.close()


def silent(what, done, total):
    pass


def named_layer(text):
    return hostile.Tar("pax", b"").add(b"etc/name", data=text.encode()).bytes()


def layout(**layers):
    """A layout of several images by their tags."""
    members, entries = {}, []
    for tag, layer in layers.items():
        one = hostile.Layout([gzip.compress(layer, mtime=0)], [layer]).members()
        index = json.loads(one.pop("index.json"))
        entries.append(index["manifests"][0] | {"annotations": {"org.opencontainers.image.ref.name": tag}})
        members |= one
    return members | {"index.json": json.dumps({"schemaVersion": 2, "manifests": entries}).encode()}


def write_directory(path, members):
    for name, data in members.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


async def name_in(store, image):
    """What the file that tells images apart says."""
    source = find(image)
    await source.identify()
    fetched = await source.fetch(store, silent)
    return (store.layer(fetched.adds[-1]).tree / "etc/name").read_text()


# ---- which is meant ----


async def test_a_tag_chooses_among_the_images_of_a_layout(tmp_path, store):
    members = layout(one=named_layer("1"), two=named_layer("2"))
    for place in (write_directory(tmp_path / "layout", members), tmp_path / "layout.tar", tmp_path / "layout.tar.gz"):
        if not place.exists():
            data = hostile.plain_tar(members)
            place.write_bytes(gzip.compress(data) if place.suffix == ".gz" else data)
        assert await name_in(store, f"oci:{place}:one") == "1"
        assert await name_in(store, f"oci:{place}:two") == "2"
        with pytest.raises(UsageError, match="there are: one, two"):
            await name_in(store, f"oci:{place}:three")
        with pytest.raises(StageFailed):  # two that say nothing about their platforms
            await name_in(store, f"oci:{place}")


async def test_of_an_image_for_several_machines_this_machines_is_taken(tmp_path, store):
    good, other = (
        hostile.Layout([named_layer("ours")], [named_layer("ours")]),
        hostile.Layout([named_layer("other")], [named_layer("other")]),
    )
    members, entries = {}, []
    for one, platform in ((other, {"os": "linux", "architecture": "vax"}), (good, {"os": "linux", "architecture": hostile.MACHINE})):
        members |= one.members()
        entries.append(json.loads(members["index.json"])["manifests"][0] | {"platform": platform})
    several = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    kind = "application/vnd.oci.image.index.v1+json"
    outer = {"schemaVersion": 2, "manifests": [good.descriptor(several, kind)]}
    members |= {"blobs/" + hostile.digest_of(several).replace(":", "/"): several, "index.json": json.dumps(outer).encode()}

    assert await name_in(store, f"oci:{write_directory(tmp_path / 'layout', members)}") == "ours"


async def test_a_name_chooses_among_the_images_of_a_docker_archive(tmp_path, store):
    one, two = hostile.docker_members([named_layer("1")]), hostile.docker_members([named_layer("2")])
    entries = [json.loads(members.pop("manifest.json"))[0] for members in (one, two)]
    two = {("t" + name if name.endswith("layer.tar") else name): data for name, data in two.items()}
    entries[0]["RepoTags"], entries[1]["RepoTags"] = ["example.org/one:latest"], ["two:v1", "two:v2"]
    entries[1]["Layers"] = ["t0/layer.tar"]
    path = tmp_path / "images.tar"
    path.write_bytes(hostile.plain_tar(one | two | {"manifest.json": json.dumps(entries).encode()}))

    assert await name_in(store, f"docker-archive:{path}:example.org/one:latest") == "1"
    assert await name_in(store, f"docker-archive:{path}:example.org/one") == "1"
    assert await name_in(store, f"docker-archive:{path}:two:v2") == "2"
    with pytest.raises(UsageError, match=r"example\.org/one:latest, two:v1, two:v2"):
        await name_in(store, f"docker-archive:{path}")


async def test_the_longest_path_that_is_there_is_the_path(tmp_path, store):
    """Colons are good in paths: only what is left over names an image."""
    write_directory(tmp_path / "x", layout(a=named_layer("tag a")))
    write_directory(tmp_path / "x:a", layout(b=named_layer("path x:a")))

    assert await name_in(store, f"oci:{tmp_path}/x:a") == "path x:a"
    assert await name_in(store, f"oci:{tmp_path}/x:a:b") == "path x:a"
    with pytest.raises(UsageError, match="no such file"):
        await name_in(store, f"oci:{tmp_path}/y:a")


async def test_a_layer_that_is_a_link_to_another_is_read(tmp_path, store):
    """As old versions of docker save wrote an image in which one layer comes twice; it is then put once, where it comes last."""
    same, other = named_layer("same"), hostile.good_layer()
    members = hostile.docker_members([same, other, same])
    del members["2/layer.tar"]
    (tmp_path / "image.tar").write_bytes(hostile.plain_tar(members, {"2/layer.tar": "../0/layer.tar"}))
    source = find(f"docker-archive:{tmp_path / 'image.tar'}")

    fetched = await source.fetch(store, silent)

    assert len(fetched.adds) == 2
    assert (store.layer(fetched.adds[1]).tree / "etc/name").read_text() == "same"


async def test_empty_layers_are_left_out_and_an_empty_image_is_refused(tmp_path, store):
    empty = bytes(1024)
    (tmp_path / "a.tar").write_bytes(hostile.plain_tar(hostile.docker_members([empty, named_layer("x"), empty])))
    (tmp_path / "b.tar").write_bytes(hostile.plain_tar(hostile.docker_members([empty])))
    (tmp_path / "c.tar").write_bytes(empty)

    assert len((await find(f"docker-archive:{tmp_path / 'a.tar'}").fetch(store, silent)).adds) == 1
    for image in (f"docker-archive:{tmp_path / 'b.tar'}", f"tar:{tmp_path / 'c.tar'}"):
        with pytest.raises(StageFailed, match=r"nothing in it|is empty"):
            await find(image).fetch(store, silent)


# ---- what it is known by ----


async def test_one_image_has_one_identity_however_it_is_packed(tmp_path):
    """A layout, a tar of it, compressed or not, with compressed layers or not, what docker save writes: the config decides."""
    layer = named_layer("x")
    config = hostile.image_config([layer])
    plain, packed = hostile.Layout([layer], [layer], config), hostile.Layout([gzip.compress(layer)], [layer], config)
    encoded = plain.config_bytes
    manifest = json.dumps([{"Config": "c.json", "RepoTags": None, "Layers": ["l.tar"]}]).encode()
    docker = hostile.plain_tar({"c.json": encoded, "l.tar": layer, "manifest.json": manifest})
    (tmp_path / "a.tar").write_bytes(hostile.plain_tar(plain.members()))
    (tmp_path / "b.tar.gz").write_bytes(gzip.compress(hostile.plain_tar(packed.members())))
    (tmp_path / "c.tar").write_bytes(docker)
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress(docker))
    write_directory(tmp_path / "e", packed.members())
    images = ["oci:a.tar", "oci:b.tar.gz", "docker-archive:c.tar", "docker-archive:d.tar.gz", "oci:e"]

    found = {(await find(image.replace(":", f":{tmp_path}/", 1)).identify()) for image in images}

    assert {identity.text for identity in found} == {f"image:{hostile.digest_of(encoded)}"}
    assert all(identity.is_portable for identity in found)


async def test_a_root_file_system_is_known_by_its_bytes(tmp_path):
    path = tmp_path / "root.tar"
    path.write_bytes(named_layer("x"))
    first = await find(f"tar:{path}").identify()
    path.write_bytes(named_layer("y"))
    second = await find(f"tar:{path}").identify()
    (tmp_path / "copy.tar").write_bytes(named_layer("x"))

    assert first.text == f"tar:sha256:{hashlib.sha256(named_layer('x')).hexdigest()}"
    assert second != first
    assert await find(f"tar:{tmp_path / 'copy.tar'}").identify() == first


@pytest.mark.parametrize("scheme", ["tar", "oci", "docker-archive"])
async def test_an_archive_that_changed_since_it_was_asked_about_is_not_taken_for_it(tmp_path, store, scheme):
    def write(text):
        layer = named_layer(text)
        members = {"oci": hostile.Layout([layer], [layer]).members(), "docker-archive": hostile.docker_members([layer])}
        (tmp_path / "a.tar").write_bytes(layer if scheme == "tar" else hostile.plain_tar(members[scheme]))

    write("first")
    source = find(f"{scheme}:{tmp_path / 'a.tar'}")
    await source.identify()
    write("second")

    with pytest.raises((StageFailed, StageUnavailable)):
        await source.fetch(store, silent)
    assert store.layers() == []


# ---- progress and cancelling ----


async def test_progress_comes_in_the_loop_and_ends_at_the_total(tmp_path, store):
    (tmp_path / "a.tar").write_bytes(hostile.Tar("gnu", b"").add(b"f", data=os.urandom(3_000_000)).bytes())
    said = []

    await find(f"tar:{tmp_path / 'a.tar'}").fetch(
        store, lambda what, done, total: said.append((what, done, total, asyncio.get_running_loop()))
    )

    size = (tmp_path / "a.tar").stat().st_size
    assert said[-1][:3] == ("unpacking", size, size)
    assert [one[1] for one in said] == sorted(one[1] for one in said)


async def test_a_cancelled_fetch_has_ended_when_it_says_so_and_leaves_nothing(tmp_path, store):
    (tmp_path / "a.tar").write_bytes(hostile.Tar("gnu", b"").add(b"f", data=bytes(60 << 20)).bytes())
    source = find(f"tar:{tmp_path / 'a.tar'}")
    await source.identify()
    begun = asyncio.Event()
    task = asyncio.ensure_future(source.fetch(store, lambda *_: begun.set()))
    await begun.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

    assert task.cancelled()
    assert os.listdir(store.root / "drafts") == os.listdir(store.root / "trees") == []
    assert (await source.fetch(store, silent)).adds


async def test_an_image_that_is_being_unpacked_keeps_no_thread_from_others():
    """The loop has few threads, and every lease needs one for an instant."""
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    go_on = threading.Event()
    long = asyncio.ensure_future(in_thread(lambda _: go_on.wait(30)))
    await asyncio.sleep(0)
    try:
        assert await asyncio.wait_for(asyncio.to_thread(lambda: "here"), 10) == "here"
    finally:
        go_on.set()
    assert await long


async def test_work_in_a_thread_is_waited_for_however_often_it_is_cancelled():
    ended = []

    def work(stop):
        while True:
            try:
                stop.check()
            finally:
                ended.append(False)
            if len(ended) > 10_000_000:
                return

    task = asyncio.ensure_future(in_thread(work))
    await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    count = len(ended)
    await asyncio.sleep(0.02)

    assert len(ended) == count


@pytest.mark.parametrize("name", ["\ud800", "a\nb\x1b[2J", "x" * 100_000])
@pytest.mark.parametrize("field", ["Config", "Layers", "RepoTags"])
async def test_t22_names_that_an_archive_gives_are_shown_so_that_they_can_be(tmp_path, store, name, field):
    """A message goes to logs and terminals: a name of their own must not break the one or command the other."""
    entry = {"Config": "c.json", "Layers": ["l.tar"], "RepoTags": ["a:b"]}
    entry[field] = name if field == "Config" else [name]
    (tmp_path / "image").mkdir()
    (tmp_path / "image/manifest.json").write_text(json.dumps([entry, entry] if field == "RepoTags" else [entry]))
    platform = this_platform()
    config = {"architecture": platform.architecture, "os": "linux", "rootfs": {"type": "layers", "diff_ids": ["sha256:" + "a" * 64]}}
    (tmp_path / "image/c.json").write_text(json.dumps(config))

    with pytest.raises((StageFailed, UsageError)) as told:
        await find(f"docker-archive:{tmp_path}/image").fetch(store, silent)
    assert str(told.value).isprintable()
    assert len(str(told.value)) < 2000
