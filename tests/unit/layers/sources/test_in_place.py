"""Images that are used where they lie: what `host` shows of this machine, what its skeleton holds, what both are known by."""

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from untax.core.errors import StageUnavailable, UsageError
from untax.layers.sources import InPlace, find, host
from untax.layers.sources.host import host_identity, host_root, submounts


@pytest.fixture(autouse=True)
def _forget():
    """A process remembers what it found, and holds what it uses; each test is a process of its own in that."""
    yield
    for fd in host._held.values():
        os.close(fd)
    host._held.clear()
    host._latest = None


# ---- host ----


def test_a_skeleton_can_be_read_whatever_the_umask(tmp_path):
    """The workload is another user than the engine."""
    before = os.umask(0o077)
    try:
        skeleton = host_root(tmp_path).layers[0]
    finally:
        os.umask(before)

    closed = [path for path, _, _ in os.walk(skeleton) if os.stat(path).st_mode & 0o555 != 0o555]
    assert closed == []
    assert os.stat(f"{skeleton}/etc/passwd").st_mode & 0o777 == 0o644


def test_a_disk_that_fills_up_leaves_no_half_of_a_skeleton(tmp_path, monkeypatch):
    """It would be taken for a whole one by every later engine."""

    def full(source, target):
        raise OSError(errno.ENOSPC, "No space left on device", target)

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copy2", full)
        with pytest.raises(StageUnavailable, match="No space left"):
            host_root(tmp_path)
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == []

    assert os.path.isfile(f"{host_root(tmp_path).layers[0]}/etc/passwd")


def test_nothing_of_the_host_is_in_it_but_what_is_listed(tmp_path):
    root = host_root(tmp_path)
    (skeleton,) = root.layers

    assert not os.path.exists(f"{skeleton}/etc/shadow")
    places = {view.at for view in root.views}
    for directory, _, files in os.walk(f"{skeleton}/home"):  # the interpreter's own prefix may be below somebody's home
        inside = directory.removeprefix(skeleton)
        assert files == []
        assert inside == "/home" or any(f"{place}/".startswith(f"{inside}/") for place in places)
    assert os.listdir(f"{skeleton}/run") == []
    assert {"/", "/etc", "/var", "/home", "/proc"}.isdisjoint(view.source for view in root.views)
    assert all(view.source == view.at for view in root.views)


def test_the_second_to_ask_gets_the_first_ones(tmp_path):
    assert host_root(tmp_path) == host_root(tmp_path)


async def test_host_is_found_by_its_name_and_good_on_this_machine_only(tmp_path):
    source = find("host", cache=tmp_path)

    assert isinstance(source, InPlace)
    assert (await source.identify()).is_portable is False
    assert await source.identify() == host_identity()
    assert (await source.root()) == host_root(tmp_path)
    with pytest.raises(UsageError, match="cache="):
        await find("host").root()


def test_a_skeleton_that_no_longer_fits_is_removed_once_nobody_uses_it(tmp_path, monkeypatch):
    """Each change of the listed files makes another; without this they would only ever become more."""
    other = subprocess.Popen(
        [sys.executable, "-c", f"from pathlib import Path\nfrom untax.layers.sources.host import host_root\nprint(host_root(Path({str(tmp_path)!r})).layers[0], flush=True)\ninput()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    try:
        used = other.stdout.readline().strip()
        (tmp_path / "host-0123456789abcdef").mkdir()  # of a release that knew no locks, or of an engine that died
        monkeypatch.setattr(host, "_VERSION", "next")
        ours = host_root(tmp_path).layers[0]
        assert ours != used
        assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {Path(ours).name, Path(used).name}
    finally:
        other.communicate("\n")
    monkeypatch.setattr(host, "_VERSION", "the one after")
    host._latest = None

    newest = host_root(tmp_path).layers[0]

    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {Path(ours).name, Path(newest).name}


def test_an_edit_in_place_deep_in_a_listed_directory_changes_what_the_host_is(tmp_path, monkeypatch):
    """The directory's own time does not change by it."""
    listed = tmp_path / "listed"
    (listed / "deep").mkdir(parents=True)
    (listed / "deep" / "file").write_text("one")
    monkeypatch.setattr(host, "_ETC", (os.path.relpath(listed, "/etc"),))
    before = host_identity()
    (listed / "deep" / "file").write_text("two")
    host._latest = None  # as another engine sees it

    assert host_identity() != before


def test_what_packages_are_installed_is_part_of_what_the_host_is(tmp_path, monkeypatch):
    """Dependencies that were built over other software are built again; the skeleton stays."""
    database = tmp_path / "status"
    database.write_text("one")
    monkeypatch.setattr(host, "_PACKAGE_DATABASES", (str(database),))
    before, skeleton = host_identity(), host_root(tmp_path / "cache")
    database.write_text("two of them")

    assert host_identity() != before
    assert host_root(tmp_path / "cache") == skeleton


MOUNTS = r"""22 27 0:21 / /proc rw - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 27 254:1 / /usr/local rw shared:1 - xfs /dev/vdb rw
31 27 254:2 / /usr/share/with\040space rw shared:2 master:3 - ext4 /dev/vdc rw
32 27 0:40 / /usr/lib/auto rw - autofs systemd-1 rw
33 27 0:41 / /usr/src rw - nfs4 server:/src rw
34 27 0:42 / /usr/lib/debug/proc rw - proc proc rw
35 27 0:43 / /usrlocal rw - tmpfs tmpfs rw
36 27 0:44 / /opt/python/lib/more rw - tmpfs tmpfs rw
37 27 0:45 / /opt/python/secrets rw - tmpfs tmpfs rw
38 30 0:46 / /usr/local rw - tmpfs over rw
39 27 0:47 / /usr/covered rw - ext4 /dev/vdd rw
40 27 0:48 / /usr/covered rw - autofs later rw
a line that is none
"""


def test_what_is_mounted_below_a_view_is_a_view_of_its_own():
    """Overlay shows a lower directory without what is mounted in it. Left out: what has no files, what waits to be mounted, what lies elsewhere."""
    found = dict(submounts(MOUNTS, ["/usr", "/opt/python/lib"]))

    assert found == {"/usr/local": "tmpfs", "/usr/share/with space": "ext4", "/usr/src": "nfs4", "/opt/python/lib/more": "tmpfs"}


def test_a_server_that_does_not_answer_is_not_waited_for(tmp_path, monkeypatch):
    """Nor shown: every sandbox would hang on it."""
    import threading

    never = threading.Event()
    monkeypatch.setattr(host, "_ANSWER_S", 0.05)
    monkeypatch.setattr(os.path, "isdir", lambda path: never.wait())
    try:
        assert host._is_directory("/usr/src", is_remote=True) is False
    finally:
        never.set()


# ---- dir ----


async def test_a_directory_is_used_where_it_lies(tmp_path):
    (tmp_path / "image/usr").mkdir(parents=True)
    (tmp_path / "link").symlink_to("image")

    for name in ("image", "link", "image/", "./image"):
        source = find(f"dir:{tmp_path}/{name}")
        assert isinstance(source, InPlace)
        root = await source.root()
        assert root.layers == (str(tmp_path / "image"),)
        assert root.views == ()
        assert (await source.identify()).is_portable is False


async def test_a_directory_whose_upper_levels_change_is_another_image(tmp_path):
    (tmp_path / "usr").mkdir()
    source = find(f"dir:{tmp_path}")
    first = await source.identify()
    assert await find(f"dir:{tmp_path}").identify() == first
    (tmp_path / "usr/lib").mkdir()
    second = await source.identify()
    (tmp_path / "etc").write_text("x")

    assert len({first, second, await source.identify()}) == 3


def test_an_interpreter_below_tmp_is_said_and_left_out(monkeypatch, caplog):
    """A sandbox's own /tmp would cover it."""
    monkeypatch.setattr("sys.prefix", "/tmp/env")
    monkeypatch.setattr("sys.base_prefix", "/usr")

    assert host._interpreter_prefixes() == []
    assert "elsewhere" in caplog.text
