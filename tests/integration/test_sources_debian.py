"""`debian:` with the real mmdebstrap and the mirror of this machine's apt: a small system, a failure, a change of mind."""

import asyncio
import contextlib
import os
import shutil
import stat
import time
from pathlib import Path

import pytest

from untax.core.errors import StageFailed
from untax.layers import sources
from untax.layers.sources import _apt
from untax.layers.store import LayerStore


@pytest.fixture
def suite():
    """A release that this machine's own apt gets, so that nothing else is asked for anything."""
    if shutil.which("mmdebstrap") is None:
        pytest.skip("debian: no mmdebstrap; apt install mmdebstrap")
    if os.geteuid() != 0 and shutil.which("newuidmap") is None:
        pytest.skip("debian: no newuidmap; apt install uidmap")
    known = _apt.read_sources()
    found = next((source.suite for source in known if source.suite.isalpha() and source in _apt.for_suite(known, source.suite)), None)
    if found is None:
        pytest.skip("debian: this machine's apt gets nothing from a Debian mirror")
    return found


@pytest.fixture
def store(tmp_path):
    opened = LayerStore(tmp_path / "layers", marks="trusted" if os.geteuid() == 0 else "user")
    yield opened
    opened.close()


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    """Where builders make what they make; must be empty afterwards."""
    place = tmp_path / "scratch"
    place.mkdir()
    for directory in (place, *place.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o111)  # apt's own user has to get there
    monkeypatch.setenv("TMPDIR", str(place))
    return place


def quiet(what, done, total):
    pass


def builders(scratch):
    """Processes that were told to work in `scratch`, whoever their parent is by now."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if place.name != str(os.getpid()) and f"TMPDIR={scratch}".encode() in (place / "environ").read_bytes():
                found.append((place / "cmdline").read_bytes())
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)  # 15 s on an idle machine; most of it is other people's disk
async def test_a_real_debian_has_its_packages_and_nothing_of_the_day_it_was_made(suite, store, scratch):
    """No caches, logs, lists, names or ids of this machine; no file newer than the mirror's own newest date; owners as packages say."""
    began = time.time()
    seen = []
    source = sources.find(f"debian:{suite}+less")

    found = await source.fetch(store, lambda *said: seen.append(said))

    (layer,) = found.adds
    tree = store.layer(layer).tree
    assert (tree / "usr/bin/less").is_file() and (tree / "usr/bin/apt-get").is_file()
    assert f"VERSION_CODENAME={suite}" in (tree / "usr/lib/os-release").read_text() or suite == "sid"
    assert "/usr/bin" in found.config.env["PATH"]
    assert (tree / "etc/machine-id").read_bytes() == b""
    for place in ("etc/resolv.conf", "etc/hostname", "etc/apt/apt.conf.d/99mmdebstrap"):
        assert not (tree / place).exists()
    assert [path for path in (tree / "var/log").rglob("*") if path.is_file() and path.stat().st_size] == []
    assert sum(path.is_file() for place in ("var/cache/apt", "var/lib/apt/lists") for path in (tree / place).rglob("*")) == 0
    newest = max(path.lstat().st_mtime for path in tree.rglob("*") if path.is_file() and not path.is_symlink())
    assert newest < began - 60
    if os.geteuid() == 0:
        assert (tree / "etc/shadow").stat().st_gid == 42
        assert (tree / "usr/bin/su").stat().st_mode & stat.S_ISUID
    assert seen[0][0].startswith("install ") and seen[-1][1] > 50 << 20
    assert list(scratch.iterdir()) == []


async def test_a_release_that_there_is_not_fails_with_the_builder_s_words(suite, store, scratch):
    with pytest.raises(StageFailed, match="mmdebstrap failed") as told:
        await sources.find("debian:nosuchrelease").fetch(store, quiet)
    assert b"nosuchrelease" in told.value.log
    assert store.layers() == [] and list(scratch.iterdir()) == []


async def test_a_build_that_nobody_waits_for_ends_with_all_it_started(suite, store, scratch):
    running = asyncio.create_task(sources.find(f"debian:{suite}").fetch(store, quiet))
    while not list(scratch.iterdir()):  # it has begun to make something
        assert not running.done()
        await asyncio.sleep(0.02)
    await asyncio.sleep(1)
    assert builders(scratch)
    running.cancel()
    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert time.monotonic() - began < 30
    assert builders(scratch) == []
    assert list(scratch.iterdir()) == [] and store.layers() == []
