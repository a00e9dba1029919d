"""What real engines save comes out of the store as their own containers see it, entry by entry, deletions included."""

import gzip
import subprocess

import pytest
from tests import treelist
from tests.engines_fixture import docker, podman  # noqa: F401
from tests.images import small_directory

from untax.layers.sources import find
from untax.layers.store import LayerStore
from untax.substrates._host import is_host_root

# Each line is a layer: files replaced and removed, directories removed and made anew, kinds changed, odd modes and names.
LAYERS = (
    """mkdir -p /opt/a/b /srv/keep /srv/gone; echo 1 >/opt/a/b/1; echo 2 >/opt/a/2; ln -s a /opt/link; ln /opt/a/2 /opt/hard
       echo x >/srv/gone/x; echo y >/srv/keep/y; chmod 2755 /srv/keep; chown 1000:50 /opt/a/2; touch -d 2001-02-03 /opt/a/2""",
    "rm /opt/a/2; rm -r /srv/gone; rm /opt/link; mkdir /opt/link; echo new >/opt/link/f; chmod 0700 /srv/keep; : >'/opt/odd name'",
    "rm -r /opt/a; mkdir /opt/a; echo only >/opt/a/only; rm -r /opt/link; ln -s /srv /opt/link; chmod 4755 /usr/bin/true; touch /tmp/t",
)
# What an engine puts into every container by itself.
_OWN = ("dev", "proc", "sys", "run", ".dockerenv", "etc/hosts", "etc/hostname", "etc/resolv.conf", "etc/mtab")

pytestmark = pytest.mark.skipif(not is_host_root(), reason="docker: engines of our own need root")


@pytest.fixture(scope="module")
def image(docker, tmp_path_factory):  # noqa: F811
    """An image of four layers, made by running things in it."""
    packed = tmp_path_factory.mktemp("base") / "base.tar"
    subprocess.run(["tar", "-c", "-f", packed, "-C", small_directory(), "--numeric-owner", "."], check=True)
    changes = ("--change", "ENV LANG=C.UTF-8", "--change", "WORKDIR /srv", "--change", "USER 1000:1000")
    docker("import", *changes, str(packed), "untax-test:0")
    for number, script in enumerate(LAYERS):
        docker("run", "--name", f"made{number}", "--network", "none", "--user", "0", f"untax-test:{number}", "sh", "-c", script)
        docker("commit", "--change", "USER 1000:1000", f"made{number}", f"untax-test:{number + 1}")
        docker("rm", f"made{number}")
    return f"untax-test:{len(LAYERS)}"


@pytest.fixture(scope="module")
def saved(docker, image, tmp_path_factory):  # noqa: F811
    path = tmp_path_factory.mktemp("saved") / "docker.tar"
    docker("save", "--output", str(path), image)
    return path


@pytest.fixture(scope="module")
def wanted(docker, image, tmp_path_factory):  # noqa: F811
    """The tree as the engine itself exports it."""
    top = tmp_path_factory.mktemp("exported")
    docker("create", "--name", "whole", "--network", "none", image)
    data = docker("export", "whole")
    docker("rm", "whole")
    subprocess.run(["tar", "-x", "-p", "--numeric-owner", "-C", top], input=data, check=True)
    return without_own(treelist.listing(top))


def without_own(rows):
    kept = {path: row for path, row in rows.items() if path and not any(path == own or path.startswith(f"{own}/") for own in _OWN)}
    for row in kept.values():
        row.pop("names", None)  # hard links are compared on their own: an export may begin another group in each layer
        if "mtime_ns" in row:
            row["mtime_ns"] = row["mtime_ns"] // 10**9 * 10**9  # exports of some engines have whole seconds
    return kept


async def fetched(image, store):
    source = find(image)
    await source.identify()
    return await source.fetch(store, lambda *_: None)


@pytest.fixture
def store(tmp_path):
    store = LayerStore(tmp_path / "store", marks="trusted")
    yield store
    store.close()


def merged(store, adds):
    return without_own(treelist.of_chain([store.layer(one).tree for one in adds]))


async def test_what_docker_saves_is_what_its_container_sees(saved, wanted, store):
    found = await fetched(f"docker-archive:{saved}", store)

    assert merged(store, found.adds) == wanted
    assert (found.config.env["LANG"], found.config.workdir, found.config.user) == ("C.UTF-8", "/srv", "1000")
    assert len(found.adds) == 1 + len(LAYERS)
    assert wanted["opt/link"]["type"] == "l"
    assert "opt/a/b" not in wanted and "opt/a/only" in wanted


async def test_a_compressed_archive_is_the_same_image(saved, store, tmp_path):
    (tmp_path / "d.tar.gz").write_bytes(gzip.compress(saved.read_bytes(), 1))

    packed, plain = find(f"docker-archive:{tmp_path / 'd.tar.gz'}"), find(f"docker-archive:{saved}")

    assert await packed.identify() == await plain.identify()
    assert (await packed.fetch(store, lambda *_: None)).adds == (await plain.fetch(store, lambda *_: None)).adds


async def test_an_export_is_a_root_file_system(docker, image, wanted, store, tmp_path):  # noqa: F811
    docker("create", "--name", "exported", "--network", "none", image)
    (tmp_path / "root.tar").write_bytes(docker("export", "exported"))
    docker("rm", "exported")

    found = await fetched(f"tar:{tmp_path / 'root.tar'}", store)

    assert merged(store, found.adds) == wanted


@pytest.mark.parametrize("form", ["docker-archive", "oci-archive", "oci-dir"])
async def test_what_podman_saves_of_it_is_the_same(podman, saved, wanted, store, tmp_path, form):  # noqa: F811
    name = podman("load", "--input", str(saved)).decode().split()[-1]
    path = tmp_path / "podman"
    podman("save", "--format", form, "--output", str(path), name)

    scheme = "docker-archive" if form == "docker-archive" else "oci"
    found = await fetched(f"{scheme}:{path}", store)

    assert merged(store, found.adds) == wanted
    assert (found.config.workdir, found.config.user) == ("/srv", "1000")
