"""A chain that was exported is the same tree where it arrives: looked at entry by entry, by the programs it was exported for."""

import gzip
import hashlib
import io
import json
import os
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest
from tests import treelist
from tests.chains import rich_chain
from tests.engines_fixture import docker, podman  # noqa: F401

from untax.core.errors import StageUnavailable, UsageError
from untax.core.root import ImageConfig, Root, View
from untax.core.spec import FrozenEnv
from untax.layers import export
from untax.layers.export import Options
from untax.layers.store import LayerStore

_IS_ROOT = os.geteuid() == 0
_ENGINE_OWN = (".dockerenv", "dev/", "proc/", "sys", "etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/mtab", "run/")
_CONFIG = ImageConfig(
    env=FrozenEnv({"PATH": "/usr/bin", "GREETING": "hello world=1"}),
    workdir="/data/file-to-directory",
    user="1000:1001",
    entrypoint=("/bin/sh", "-c"),
    command=("echo from the image",),
    labels=FrozenEnv({"org.example.kind": "test"}),
)

needs_root = pytest.mark.skipif(not _IS_ROOT, reason="root: mounts what was exported")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("export")


@pytest.fixture(scope="module")
def store(home):
    return LayerStore(home / "layers", marks="trusted" if _IS_ROOT else "user")


@pytest.fixture(scope="module")
def chain(home):
    (home / "plain").mkdir()
    return rich_chain(home / "plain")


@pytest.fixture(scope="module")
def renamed(home):
    if not _IS_ROOT:
        pytest.skip("root: only root's layers say where a renamed directory came from")
    (home / "renamed").mkdir()
    return rich_chain(home / "renamed", renames=True)


def root_of(layers, **more):
    return Root(tuple(str(layer) for layer in layers), **{"config": _CONFIG, **more})


def seen(rows, *, without=(), dates="ns", xattrs=("user.valueless",), owners=True):
    """Rows to compare: apart from what somebody else put there, dates as fine as the format has them, and without the attributes it loses."""
    kept = {}
    for path, row in rows.items():
        if any(path == place or (place.endswith("/") and (path + "/").startswith(place)) for place in without):
            continue
        row = dict(row)
        if not owners:
            row.pop("owner")
        if dates == "s" and "mtime_ns" in row:
            row["mtime_ns"] = row["mtime_ns"] // 10**9
        if kept_xattrs := {name: value for name, value in row.pop("xattrs", {}).items() if not name.startswith(xattrs)}:
            row["xattrs"] = kept_xattrs
        kept[path] = row
    return kept


def assert_same(got, want):
    assert sorted(got) == sorted(want)
    assert {path: row for path, row in got.items() if row != want[path]} == {path: row for path, row in want.items() if row != got[path]}
    assert len(want) > 100  # a listing of nothing would be the same as another


# ---- container engines ----


@needs_root
@pytest.mark.parametrize("which", ["chain", "renamed"])
def test_docker_runs_the_same_tree(which, request, store, docker, tmp_path):  # noqa: F811
    """Names, contents, modes, owners, links, dates of files and attributes are those of the chain, also where layers delete and replace."""
    layers = request.getfixturevalue(which)
    export.export(store, root_of(layers), tmp_path / "image.tar", "oci", Options(name=f"localhost/{which}:1"))
    docker("load", "-i", str(tmp_path / "image.tar"))
    container = docker("run", "-d", "--user", "0", "--entrypoint", "sleep", f"localhost/{which}:1", "600").decode().strip()
    try:
        [facts] = json.loads(docker("inspect", container))
        without = (*_ENGINE_OWN, "")  # an engine gives the top directory a mode of its own
        assert_same(
            seen(treelist.listing(facts["GraphDriver"]["Data"]["MergedDir"]), without=without),
            seen(treelist.of_chain(layers), without=without),
        )
    finally:
        docker("rm", "-f", container)


@needs_root
def test_docker_takes_over_what_the_image_says_about_itself(store, chain, docker, tmp_path):  # noqa: F811
    export.export(
        store, root_of(chain), tmp_path / "image.tar", "oci", Options(name="localhost/config:1", labels={"more": "1"}, is_portable=False)
    )
    docker("load", "-i", str(tmp_path / "image.tar"))

    assert docker("run", "--rm", "localhost/config:1") == b"from the image\n"
    said = docker("run", "--rm", "localhost/config:1", 'echo "$GREETING"; pwd; id -u; id -g; cat in').decode().splitlines()
    assert said == ["hello world=1", "/data/file-to-directory", "1000", "1001", "in"]
    [facts] = json.loads(docker("image", "inspect", "localhost/config:1"))
    assert facts["Config"]["Labels"] == {"org.example.kind": "test", "more": "1", "untax.reproducible": "false"}
    assert len(facts["RootFS"]["Layers"]) == len(chain)


@needs_root
def test_podman_shows_the_same_tree(store, chain, podman, tmp_path):  # noqa: F811
    export.export(store, root_of(chain), tmp_path / "image.tar", "oci", Options(name="localhost/chain:1"))
    podman("load", "-i", str(tmp_path / "image.tar"))
    container = podman("create", "localhost/chain:1").decode().strip()
    try:
        place = podman("mount", container).decode().strip()
        without = (*_ENGINE_OWN, "")
        assert_same(seen(treelist.listing(place), without=without), seen(treelist.of_chain(chain), without=without))
    finally:
        podman("unmount", container)
        podman("rm", container)


@needs_root
def test_containerd_shows_the_same_tree(store, chain, docker, tmp_path):  # noqa: F811
    export.export(store, root_of(chain), tmp_path / "image.tar", "oci", Options(name="localhost/chain:1"))
    docker.ctr("images", "import", str(tmp_path / "image.tar"))
    place = tmp_path / "mounted"
    place.mkdir()
    docker.ctr("images", "mount", "localhost/chain:1", str(place))
    try:
        assert_same(seen(treelist.listing(place), without=("",)), seen(treelist.of_chain(chain), without=("",)))
    finally:
        docker.ctr("images", "unmount", "--rm", str(place))
        docker.ctr("images", "rm", "localhost/chain:1")


# ---- disks ----


@needs_root
@pytest.mark.parametrize("which", ["chain", "renamed"])
def test_a_squashfs_holds_the_same_tree(which, request, store, tmp_path):
    layers = request.getfixturevalue(which)
    done = export.export(store, root_of(layers), tmp_path / "disk", "squashfs")

    lost = ("system.posix_acl", "user.valueless")
    got = treelist.of_mount("-t", "squashfs", "-o", "ro,loop", str(tmp_path / "disk"))
    assert_same(seen(got, dates="s", xattrs=lost), seen(treelist.of_chain(layers), dates="s", xattrs=lost))
    assert len(done.losses) == 2
    assert done.bytes == (tmp_path / "disk").stat().st_size


@needs_root
@pytest.mark.parametrize("which", ["chain", "renamed"])
def test_an_erofs_holds_the_same_tree(which, request, store, tmp_path):
    """As the kernel reads it, which was written by neither of us; and its own tool finds nothing wrong."""
    layers = request.getfixturevalue(which)
    done = export.export(store, root_of(layers), tmp_path / "disk", "erofs")

    lost = ("system.", "user.", "trusted.", "security.")
    subprocess.run(["fsck.erofs", str(tmp_path / "disk")], check=True, capture_output=True)
    got = treelist.of_mount("-t", "erofs", "-o", "ro,loop", str(tmp_path / "disk"))
    assert_same(seen(got, xattrs=lost), seen(treelist.of_chain(layers), xattrs=lost))
    assert len(done.losses) == 1
    assert done.bytes == (tmp_path / "disk").stat().st_size


def test_an_erofs_of_many_names_is_found_by_halves(store, tmp_path):
    """Directories of several blocks, names that sort before the dot, links of any length, several names of one file; the same bytes each time."""
    layer = tmp_path / "layer"
    (layer / "many").mkdir(parents=True)
    for number in range(1000):
        (layer / "many" / f"{chr(33 + number % 13)}{'n' * (number % 200)}{number}").write_bytes(b"%d" % number * (number % 7))
    (layer / "long").symlink_to("t" * 3000)
    (layer / "zeros").write_bytes(bytes(100_000))
    os.link(layer / "zeros", layer / "again")
    for name in ("one", "two"):
        export.export(store, Root((str(layer),)), tmp_path / name, "erofs")

    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    subprocess.run(["fsck.erofs", f"--extract={tmp_path / 'out'}", str(tmp_path / "one")], check=True, capture_output=True)
    assert sorted(os.listdir(tmp_path / "out/many")) == sorted(os.listdir(layer / "many"))
    assert all((tmp_path / "out/many" / name).read_bytes() == (layer / "many" / name).read_bytes() for name in os.listdir(layer / "many"))
    assert os.readlink(tmp_path / "out/long") == "t" * 3000
    assert (tmp_path / "out/again").read_bytes() == bytes(100_000)


@pytest.mark.parametrize("error_bytes", [0, 6 << 20])
def test_a_disk_has_room_for_attributes_and_grows_when_it_was_estimated_too_small(error_bytes, store, tmp_path, monkeypatch):
    from untax.layers.export import disk

    monkeypatch.setattr(disk, "_FIXED_BYTES", disk._FIXED_BYTES - error_bytes)
    layer = tmp_path / "layer"
    layer.mkdir()
    for number in range(2000):
        (layer / str(number)).touch()
        os.setxattr(layer / str(number), "user.large", str(number).encode().ljust(3000, b"x"))
    export.export(store, Root((str(layer),)), tmp_path / "disk", "ext4", Options(free_mib=0))

    subprocess.run(["/usr/sbin/e2fsck", "-fn", str(tmp_path / "disk")], check=True, capture_output=True)
    shown = subprocess.run(
        ["/usr/sbin/debugfs", "-R", "ea_get /1999 user.large", str(tmp_path / "disk")], capture_output=True, text=True
    ).stdout
    assert "1999xxx" in shown


@needs_root
def test_what_is_mounted_below_a_directory_is_not_part_of_it(store, tmp_path):
    """As for a sandbox, which does not see it either."""
    layer = tmp_path / "layer"
    (layer / "mounted").mkdir(parents=True)
    (layer / "file").write_text("own")
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(layer / "mounted")], check=True)
    try:
        (layer / "mounted/secret").write_text("of another file system")
        export.export(store, Root((str(layer),)), tmp_path / "image.tar", "oci")
        export.export(store, Root((str(layer),)), tmp_path / "ram", "initramfs")
    finally:
        subprocess.run(["umount", str(layer / "mounted")], check=True)
    assert b"secret" not in (tmp_path / "image.tar").read_bytes()
    assert b"own" in (tmp_path / "image.tar").read_bytes()
    assert b"secret" not in gzip.decompress((tmp_path / "ram").read_bytes())


@needs_root
@pytest.mark.parametrize("which", ["chain", "renamed"])
def test_an_ext4_disk_holds_the_same_tree_and_has_room(which, request, store, tmp_path):
    layers = request.getfixturevalue(which)
    done = export.export(store, root_of(layers), tmp_path / "disk", "ext4", Options(free_mib=50))

    got = treelist.of_mount("-t", "ext4", "-o", "ro,loop,noload", str(tmp_path / "disk"))
    assert_same(seen(got, without=("lost+found",), dates="s", xattrs=()), seen(treelist.of_chain(layers), dates="s", xattrs=()))
    assert done.losses == ()
    subprocess.run(["e2fsck", "-fn", str(tmp_path / "disk")], check=True, capture_output=True)
    facts = subprocess.run(["dumpe2fs", "-h", str(tmp_path / "disk")], check=True, capture_output=True, text=True).stdout
    free = next(int(line.split()[-1]) for line in facts.splitlines() if line.startswith("Free blocks")) * 4096
    assert 50 << 20 <= free < 62 << 20
    assert list((store.root / "drafts").iterdir()) == []


# ---- initramfs ----


@pytest.mark.parametrize("which", ["chain", "renamed"])
def test_an_initramfs_holds_the_same_tree(which, request, store, tmp_path):
    layers = request.getfixturevalue(which)
    export.export(store, root_of(layers), tmp_path / "ram", "initramfs")
    place = tmp_path / "unpacked"
    place.mkdir()
    archive = gzip.decompress((tmp_path / "ram").read_bytes())
    subprocess.run(["cpio", "-idm", "--quiet", "--no-absolute-filenames"], input=archive, cwd=place, check=True)

    how = {"dates": "s", "xattrs": ("user.", "security.", "system."), "owners": _IS_ROOT}
    assert_same(seen(treelist.listing(place), **how), seen(treelist.of_chain(layers), **how))


def kernel():
    found = sorted(path for path in Path("/boot").glob("vmlinuz-*") if os.access(path, os.R_OK))
    if os.uname().machine != "x86_64" or shutil.which("qemu-system-x86_64") is None:
        pytest.skip("guest: no qemu-system-x86_64; apt install qemu-system-x86")
    if not found:
        pytest.skip("guest: no readable /boot/vmlinuz-*; apt install linux-image-amd64, and run as root")
    return found[-1]


def test_a_kernel_boots_an_initramfs_into_the_tree(store, tmp_path):
    """The kernel's own reader takes it, hard links and owners included, and starts the given /init."""
    kernel()
    layer = tmp_path / "layer"
    for name in ("bin", "data", "proc", "dev"):
        (layer / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    if busybox is None:
        pytest.skip("guest: no busybox; apt install busybox-static")
    shutil.copy(busybox, layer / "bin/busybox")
    (layer / "init").write_text("not this one")
    (layer / "data/first").write_text("of two names")
    os.link(layer / "data/first", layer / "data/second")
    (layer / "data/link").symlink_to("first")
    if _IS_ROOT:
        os.chown(layer / "data/first", 1000, 1000)
    init = b"""#!/bin/busybox sh
b=/bin/busybox
$b echo "guest: $($b cat /data/link) $($b stat -c '%h %u:%g %a' /data/second) $($b stat -c %i /data/first | $b grep -c "^$($b stat -c %i /data/second)$")"
$b poweroff -f
"""
    (layer / "data/first").chmod(0o640)
    export.export(store, Root((str(layer),)), tmp_path / "ram", "initramfs", Options(init=init))
    done = subprocess.run(
        ["qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none", "-serial", "stdio", "-no-reboot", "-nic", "none",
         "-accel", "tcg", "-cpu", "max", "-m", "256M", "-kernel", str(kernel()), "-initrd", str(tmp_path / "ram"),
         "-append", "console=ttyS0 quiet loglevel=3 panic=-1 mitigations=off random.trust_cpu=on"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=120,
    )  # fmt: skip
    assert "guest: of two names 2 1000:1000 640 1" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]


# ---- whatever the format ----


def test_equal_layers_give_equal_bytes_wherever_and_whenever(store, chain, tmp_path):
    """A copy of the chain elsewhere, with other dates of directories, comes out as the same file; a pipe gets it too."""
    export.export(store, root_of(chain), tmp_path / "one", "oci")
    copies = []
    for number, layer in enumerate(chain):
        copies.append(tmp_path / f"copy-{number}")
        subprocess.run(["cp", "-a", str(layer), str(copies[-1])], check=True)
        os.utime(copies[-1], (1, 1))
        for directory, _, _ in os.walk(copies[-1]):
            os.utime(directory, (2, 2))
    piped = io.BytesIO()
    export.export(store, root_of(copies), tmp_path / "two", "oci")
    export.export(store, root_of(copies), Pipe(piped), "oci")

    assert digest(tmp_path / "one") == digest(tmp_path / "two")
    assert hashlib.sha256(piped.getvalue()).hexdigest() == digest(tmp_path / "one")
    export.export(store, root_of(chain), tmp_path / "one", "initramfs")
    export.export(store, root_of(copies), tmp_path / "two", "initramfs")
    assert digest(tmp_path / "one") == digest(tmp_path / "two")


class Pipe:
    """Only goes forward."""

    def __init__(self, out):
        self._out = out

    def write(self, data):
        return self._out.write(data)

    def flush(self):
        pass


def digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_blob_is_what_its_name_says_and_a_layer_that_comes_twice_is_there_once(store, chain, tmp_path):
    twice, piped = root_of([*chain, chain[0]]), io.BytesIO()
    export.export(store, twice, tmp_path / "image.tar", "oci")
    export.export(store, twice, Pipe(piped), "oci")
    assert hashlib.sha256(piped.getvalue()).hexdigest() == digest(tmp_path / "image.tar")

    with tarfile.open(tmp_path / "image.tar") as archive:
        members = {member.name: archive.extractfile(member).read() for member in archive if member.isfile()}
    for name, data in members.items():
        if name.startswith("blobs/"):
            assert name == f"blobs/sha256/{hashlib.sha256(data).hexdigest()}"
    [entry] = json.loads(members["manifest.json"])
    manifest = json.loads(members["blobs/" + json.loads(members["index.json"])["manifests"][0]["digest"].replace(":", "/")])
    assert [layer["digest"].partition(":")[2] for layer in manifest["layers"]] == [name.rpartition("/")[2] for name in entry["Layers"]]
    assert entry["Layers"][0] == entry["Layers"][3]
    assert len(members) == len(chain) + 2 + 3


def test_views_of_the_host_are_merged_into_one_layer(store, home, tmp_path):
    """What the chain has at the place of a view lies over it."""
    view, layer = tmp_path / "view", tmp_path / "layer"
    (view / "sub").mkdir(parents=True)
    (view / "below").write_text("below")
    (view / "sub/file").write_text("sub")
    (layer / "usr").mkdir(parents=True)
    (layer / "usr/above").write_text("above")
    export.export(store, Root((str(layer),), (View(str(view), "/usr"),), path="/usr/bin"), tmp_path / "image.tar", "oci")

    with tarfile.open(tmp_path / "image.tar") as archive:
        [entry] = json.load(archive.extractfile("manifest.json"))
        config = json.load(archive.extractfile(entry["Config"]))
        [name] = entry["Layers"]
        with tarfile.open(fileobj=archive.extractfile(name)) as inner:
            names = [member.name for member in inner]
    # And there are places for what a sandbox has mounts of its own for.
    assert names == [".", "dev", "proc", "sys", "tmp", "usr", "usr/above", "usr/below", "usr/sub", "usr/sub/file"]
    assert config["config"] == {"Env": ["PATH=/usr/bin"]}


@pytest.mark.parametrize("to", ["oci", "initramfs", "ext4"])
def test_t8_links_that_a_workload_left_are_exported_and_never_followed(to, store, tmp_path):
    """To a directory, to a file, in place of a directory that a lower layer has, and with names that a path could be built from."""
    outside, lower, upper = tmp_path / "outside", tmp_path / "lower", tmp_path / "upper"
    outside.mkdir()
    (outside / "secret").write_text("TOP-SECRET")
    (lower / "was-a-directory/sub").mkdir(parents=True)
    (lower / "was-a-directory/secret").write_text("own")
    upper.mkdir()
    (upper / "was-a-directory").symlink_to(outside)
    (upper / "directory").symlink_to(outside)
    (upper / "file").symlink_to(outside / "secret")
    (upper / "...").mkdir()
    (upper / ".../up").symlink_to("../" * 40 + str(outside).lstrip("/"))
    export.export(store, Root((str(lower), str(upper))), tmp_path / "out", to)

    data = (tmp_path / "out").read_bytes()
    data = gzip.decompress(data) if to == "initramfs" else data
    assert b"TOP-SECRET" not in data
    assert os.fsencode(outside) in data
    assert (outside / "secret").read_text() == "TOP-SECRET"
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_a_failed_export_leaves_the_old_file_and_nothing_beside_it(store, tmp_path):
    layer = tmp_path / "layer"
    (layer / "sub").mkdir(parents=True)
    (layer / "sub/.wh.clash").write_text("")
    target = tmp_path / "out" / "image.tar"
    target.parent.mkdir()
    target.write_text("old")

    with pytest.raises(UsageError, match="deletion"):
        export.export(store, Root((str(layer),)), target, "oci")
    with pytest.raises(UsageError, match="No such file"):
        export.export(store, Root((str(layer),)), tmp_path / "missing" / "file", "initramfs")
    assert target.read_text() == "old"
    assert list(target.parent.iterdir()) == [target]


def test_a_full_disk_is_said_and_leaves_nothing(store, chain):
    with pytest.raises(StageUnavailable, match="no space"):
        export.export(store, root_of(chain), Path("/dev/full"), "initramfs")


def test_a_file_that_changes_meanwhile_is_no_export(store, tmp_path):
    layer = tmp_path / "layer"
    layer.mkdir()
    (layer / "grows").write_bytes(bytes(3 << 20))

    def grow(what, done, total):
        with open(layer / "grows", "ab") as file:
            file.write(b"more")

    with pytest.raises(StageUnavailable, match="changed while it was read"):
        export.export(store, Root((str(layer),)), tmp_path / "image.tar", "oci", progress=grow)
    assert not (tmp_path / "image.tar").exists()


@pytest.mark.parametrize(("to", "package"), [("squashfs", "squashfs-tools"), ("ext4", "e2fsprogs")])
def test_a_missing_tool_is_named_with_its_package(to, package, store, chain, tmp_path, monkeypatch):
    from untax.layers.export import disk

    monkeypatch.setattr(disk, "_SYSTEM_PATH", str(tmp_path))
    with pytest.raises(UsageError, match=package):
        export.export(store, root_of(chain), tmp_path / "disk", to)


@pytest.mark.parametrize("name", ["a/Upper", "", "a b", "-x", "x:", "a//b", "x:" + "t" * 129, "a@b"])
def test_a_name_that_engines_refuse_is_refused_here(name, store, chain, tmp_path):
    with pytest.raises(UsageError, match="name"):
        export.export(store, root_of(chain), tmp_path / "image.tar", "oci", Options(name=name))


def test_progress_reaches_its_total(store, chain, tmp_path):
    said = []
    export.export(store, root_of(chain), tmp_path / "image.tar", "initramfs", progress=lambda *args: said.append(args))

    written = [(done, total) for what, done, total in said if what == "export"]
    assert [done for done, _ in written] == sorted(done for done, _ in written)
    assert written[-1][0] == written[-1][1] > 1 << 20


def test_an_ordinary_users_files_belong_to_the_user_inside(chain, home, tmp_path):
    """Layers of an ordinary user hold no owners, so none are made up, and that is said."""
    if _IS_ROOT:
        pytest.skip("user: root's layers hold owners")
    mine = LayerStore(home / "layers", marks="user")
    done = export.export(mine, root_of(chain), tmp_path / "ram", "initramfs")
    listed = subprocess.run(
        ["cpio", "-itvn", "--quiet"], input=gzip.decompress((tmp_path / "ram").read_bytes()), capture_output=True, check=True
    )

    assert {tuple(line.split()[2:4]) for line in listed.stdout.splitlines() if line[1:4] in (b"rwx", b"rw-", b"r--", b"rws")} == {
        (b"1000", b"1000")
    }
    assert any("1000:1000" in loss for loss in done.losses)
    export.export(mine, root_of(chain), tmp_path / "disk", "ext4")
    stat = subprocess.run(
        ["/usr/sbin/debugfs", "-R", "stat /data/dated", str(tmp_path / "disk")], capture_output=True, text=True, check=True
    ).stdout
    assert "User:  1000   Group:  1000" in stat
