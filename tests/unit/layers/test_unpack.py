"""Good archives come out as GNU tar extracts them; deletions become overlay's marks; hostile ones are in tests/security/test_archives.py."""

import gzip
import hashlib
import io
import os
import shutil
import stat
import subprocess
import tarfile

import pytest
from tests import hostile_archives as hostile
from tests import treelist

from untax.core.errors import StageFailed
from untax.layers import marks as overlay
from untax.layers.blob import Blob, Caps
from untax.layers.unpack import unpack
from untax.substrates._host import is_host_root

IS_ROOT = is_host_root()
MARKS = "trusted" if IS_ROOT else "user"
LONG = "n" * 90


def extracted(data, tree, **options):
    tree.mkdir(exist_ok=True)
    return unpack(io.BytesIO(data), tree, marks=MARKS, **options)


def user_attributes(path):
    try:
        os.setxattr(path, "user.test", b"\0value\xff")
    except OSError:
        return False
    return True


@pytest.fixture
def source(tmp_path):
    """A tree with one of everything that a root file system may hold."""
    root = tmp_path / "source"
    deep = root / "usr" / LONG / LONG / LONG
    deep.mkdir(parents=True)
    (deep / ("f" * 200)).write_bytes(os.urandom(700_000))
    (root / "empty").write_bytes(b"")
    (root / "run").write_bytes(b"#!/bin/sh\n" * 1000)
    (root / "run").chmod(0o755)
    (root / "setuid").write_bytes(b"x")
    (root / "other name").hardlink_to(root / "run")
    (deep / "third").hardlink_to(root / "run")
    (root / os.fsdecode(b"b\xffd\nname")).write_bytes(b"not UTF-8")
    (root / "ünïcode").write_bytes(b"UTF-8")
    (root / "link").symlink_to("run")
    (root / "dangling").symlink_to("/nowhere/at all")
    (root / "far").symlink_to("x/" * 120 + "y")
    (deep / "up").symlink_to("../../../../run")
    os.link(root / "link", root / "link again", follow_symlinks=False)
    os.mkfifo(root / "fifo", 0o640)
    with open(root / "holes", "wb") as file:
        for at in (0, 1 << 20, 5 << 20):
            file.seek(at)
            file.write(os.urandom(5000))
        file.truncate(9 << 20)
    with open(root / "many holes", "wb") as file:
        for number in range(60):
            file.seek(number << 16)
            file.write(b"%d" % number * 2000)
    with open(root / "hole only", "wb") as file:
        file.truncate(1 << 20)
    (root / "tmp").mkdir()
    (root / "group").mkdir()
    (root / "group" / "f").write_bytes(b"in")
    user_attributes(root / "run")
    user_attributes(root / "group")
    if IS_ROOT:
        for name, owner in {
            "run": (1000, 1000),
            "empty": (65534, 65534),
            "group": (0, 50),
            "link": (7, 8),
            "fifo": (5, 6),
            "setuid": (33, 33),
        }.items():
            os.chown(root / name, *owner, follow_symlinks=False)
        os.setxattr(root / "setuid", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))
    (root / "setuid").chmod(0o6755)
    (root / "tmp").chmod(0o1777)
    (root / "group").chmod(0o2750)
    os.utime(root / "empty", ns=(10**18 + 123_456_789,) * 2)
    os.utime(root / "run", ns=(-86_400 * 10**9,) * 2)  # before 1970
    os.utime(root / "link", ns=(10**18,) * 2, follow_symlinks=False)
    os.utime(root / "group", ns=(10**18 + 5,) * 2)
    return root


def gnu_tar(*arguments):
    subprocess.run(["tar", *map(str, arguments)], check=True, capture_output=True)


def dates_of_directories_and_links(top):
    found = {}
    for directory, directories, files in os.walk(top):
        for name in (*directories, *files):
            status = os.lstat(os.path.join(directory, name))
            if not stat.S_ISREG(status.st_mode):
                found[os.path.relpath(os.path.join(directory, name), top)] = status.st_mtime_ns
    return found


FORMATS = {
    "pax": ["--format=pax", "--xattrs", "--xattrs-include=*"],
    "pax-sparse-1.0": ["--format=pax", "--sparse", "--sparse-version=1.0"],
    "pax-sparse-0.1": ["--format=pax", "--sparse", "--sparse-version=0.1"],
    "pax-sparse-0.0": ["--format=pax", "--sparse", "--sparse-version=0.0"],
    "gnu": ["--format=gnu"],
    "gnu-sparse": ["--format=gnu", "--sparse"],
    "oldgnu-sparse": ["--format=oldgnu", "--sparse"],
    "ustar": ["--format=ustar", f"--exclude=*/{LONG}*", "--exclude=./far", "--exclude=./run", "--exclude=./other name"],
    "v7": ["--format=v7", f"--exclude=*/{LONG}*", "--exclude=./far", "--exclude=./fifo", "--exclude=./run", "--exclude=./other name"],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("compression", ["", "-z", "-J"])
def test_an_archive_comes_out_as_gnu_tar_extracts_it(tmp_path, source, form, compression):
    """Entry by entry: kinds, modes, owners, sizes, contents, times, links, hard links, extended attributes, holes."""
    archive, theirs, ours = tmp_path / "a.tar", tmp_path / "theirs", tmp_path / "ours"
    gnu_tar(*filter(None, ["-c", compression, "-f", archive, *FORMATS[form], "-C", source, "."]))
    theirs.mkdir()
    gnu_tar("-x", "-p", "--numeric-owner", "--xattrs", "--xattrs-include=*", "-f", archive, "-C", theirs)

    result = extracted(archive.read_bytes(), ours)

    assert treelist.listing(ours) == treelist.listing(theirs)
    assert dates_of_directories_and_links(ours) == dates_of_directories_and_links(theirs)
    assert result.notes == ()
    assert result.entries >= 15
    if "sparse" in form:
        assert os.stat(ours / "holes").st_blocks * 512 < 1 << 20


def test_what_python_writes_comes_out_too(tmp_path, source):
    """Another writer of all three formats, with names in extended headers of its own making."""
    for form in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=form) as tar:
            tar.add(source, ".")
        ours = tmp_path / f"ours-{form}"

        extracted(out.getvalue(), ours)

        wanted, found = treelist.listing(source), treelist.listing(ours)
        assert {path: row.get("content") for path, row in found.items()} == {path: row.get("content") for path, row in wanted.items()}
        assert {path: row["mode"] for path, row in found.items()} == {path: row["mode"] for path, row in wanted.items()}


def test_a_root_file_system_of_this_machine_comes_out_as_gnu_tar_extracts_it(tmp_path):
    """Thousands of entries that nobody made for a test."""
    archive, theirs, ours = tmp_path / "a.tar", tmp_path / "theirs", tmp_path / "ours"
    places = [
        place
        for place in ("etc/alternatives", "etc/ssl/certs", "usr/share/perl", "usr/share/zoneinfo", "usr/lib/python3")
        if os.path.isdir(f"/{place}")
    ]
    subprocess.run(["tar", "-c", "--ignore-failed-read", "-f", archive, "-C", "/", *places], capture_output=True)
    theirs.mkdir()
    gnu_tar("-x", "-p", "--numeric-owner", "-f", archive, "-C", theirs)

    result = extracted(archive.read_bytes(), ours)

    wanted, found = treelist.listing(theirs), treelist.listing(ours)
    for row in (wanted[""], found[""]):
        row.clear()  # the archive says nothing about its top
    assert found == wanted
    assert result.entries > 500


def test_owners_are_kept_as_root_and_the_users_own_otherwise(tmp_path):
    tar = (
        hostile.Tar("gnu", b"")
        .add(b"f", data=b"x", uid=1000, gid=65_535, mode=0o4755)
        .add(b"d/", hostile.DIRECTORY, uid=5, gid=6, mode=0o700)
    )
    tar.add(b"l", hostile.LINK, target=b"f", uid=7, gid=8)

    extracted(tar.bytes(), tmp_path / "tree")

    found = {name: os.lstat(tmp_path / "tree" / name) for name in ("f", "d", "l")}
    owners = {name: (status.st_uid, status.st_gid) for name, status in found.items()}
    assert owners == ({"f": (1000, 65_535), "d": (5, 6), "l": (7, 8)} if IS_ROOT else dict.fromkeys("fdl", (os.geteuid(), os.getegid())))
    assert stat.S_IMODE(found["f"].st_mode) == 0o4755


@pytest.mark.skipif(
    not IS_ROOT, reason="root: only root can ask for an ordinary user's way of unpacking and see that nothing is given away"
)
def test_with_the_marks_of_a_user_nothing_is_owned_by_others(tmp_path):
    (tmp_path / "tree").mkdir()
    tar = (
        hostile.Tar("gnu", b"").add(b"f", data=b"x", uid=1000, gid=1000, mode=0o000).add(b"d/", hostile.DIRECTORY, uid=5, gid=6, mode=0o000)
    )

    unpack(io.BytesIO(tar.bytes()), tmp_path / "tree", marks="user")

    for name, mode in {"f": 0o400, "d": 0o700}.items():  # a user could neither read nor remove them otherwise
        status = os.lstat(tmp_path / "tree" / name)
        assert (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode)) == (0, 0, mode)


# ---- extended attributes ----


def with_attributes(**attributes):
    records = b"".join(hostile.pax_record(b"SCHILY.xattr." + name.encode(), value) for name, value in attributes.items())
    tar = hostile.Tar("pax", b"")
    return tar.extended(records).add(b"f", data=b"x").extended(records).add(b"d/", hostile.DIRECTORY, mode=0o755).bytes()


def test_overlays_own_attributes_never_come_from_an_archive(tmp_path):
    """They would hide or redirect what lower layers hold."""
    if not user_attributes(tmp_path):
        pytest.skip("the temporary directory's file system keeps no attributes of users")
    hidden = {f"{kind}.overlay.{name}": b"y" for kind in ("trusted", "user") for name in ("opaque", "redirect", "whiteout", "metacopy")}

    result = extracted(with_attributes(**hidden, **{"trusted.x": b"1", "security.selinux": b"x", "user.kept": b"1\0"}), tmp_path / "tree")

    for name in ("f", "d"):
        assert [one for one in os.listxattr(tmp_path / "tree" / name) if one != "security.selinux"] == ["user.kept"]
        assert os.getxattr(tmp_path / "tree" / name, "user.kept") == b"1\0"
    assert len(result.notes) == 2 * (len(hidden) + 2)


@pytest.mark.skipif(not IS_ROOT, reason="root: capabilities are root's to give")
def test_capabilities_are_kept_unless_they_name_another_machines_root(tmp_path):
    usual = bytes.fromhex("0100000200200000000000000000000000000000")
    extracted(with_attributes(**{"security.capability": usual}), tmp_path / "usual")
    other = extracted(
        with_attributes(**{"security.capability": bytes.fromhex("0100000300200000000000000000000000000000e8030000")}), tmp_path / "other"
    )

    assert os.getxattr(tmp_path / "usual" / "f", "security.capability") == usual
    assert "security.capability" not in os.listxattr(tmp_path / "other" / "f")
    assert any("security.capability" in note for note in other.notes)


# ---- layers over layers ----


def layer(*names, **fields):
    tar = hostile.Tar("pax", b"")
    for name in names:
        tar.add(name, hostile.DIRECTORY if name.endswith(b"/") else hostile.FILE, **fields)
    return tar.bytes()


def test_deletions_become_overlays_marks(tmp_path):
    extracted(layer(b"etc/a", b"etc/b", b"var/x/y"), tmp_path / "below")
    extracted(layer(b"etc/.wh.a", b"var/.wh.x", b"opt/.wh..wh..opq", b"opt/new"), tmp_path / "above", below=[tmp_path / "below"])

    assert overlay.is_whiteout(os.lstat(tmp_path / "above/etc/a"))
    assert overlay.is_whiteout(os.lstat(tmp_path / "above/var/x"))
    assert os.getxattr(tmp_path / "above/opt", overlay.opaque(MARKS)) == b"y"
    assert sorted(os.listdir(tmp_path / "above/opt")) == ["new"]
    assert sorted(os.listdir(tmp_path / "above/etc")) == ["a"]


def test_the_kernel_merges_what_was_unpacked(tmp_path):
    """Seen through an overlay of both layers, deleted things are gone and hidden ones hidden."""
    extracted(layer(b"etc/a", b"etc/b", b"opt/old", b"var/x/y"), tmp_path / "below")
    extracted(layer(b"etc/.wh.a", b"var/.wh.x", b"opt/", b"opt/.wh..wh..opq", b"opt/new"), tmp_path / "above", below=[tmp_path / "below"])

    merged = treelist.of_chain([tmp_path / "below", tmp_path / "above"])

    assert {path for path, row in merged.items() if row["type"] == "-"} == {"etc/b", "opt/new"}
    assert "var/x" not in merged


@pytest.mark.parametrize("is_first", [True, False])
def test_a_layer_that_deletes_everything_below_it_is_seen_alone(tmp_path, is_first):
    """The kernel does not look at such a mark at the top of a layer, so every name there is dealt with by itself."""
    extracted(layer(b"etc/a", b"etc/sub/b", b"opt/old", b"file", b"was/a/directory"), tmp_path / "bottom")
    extracted(layer(b"var/x/y", b"etc/c", b".wh.file"), tmp_path / "middle", below=[tmp_path / "bottom"])
    entries = [b"etc/new", b"etc/.wh.a", b"was", b"opt/sub/.wh.x", b".wh.var"]
    entries.insert(0 if is_first else len(entries), b".wh..wh..opq")
    extracted(layer(*entries), tmp_path / "top", below=[tmp_path / "bottom", tmp_path / "middle"])

    merged = treelist.of_chain([tmp_path / "bottom", tmp_path / "middle", tmp_path / "top"])

    assert {path: row["type"] for path, row in merged.items() if path} == {
        "etc": "d",
        "etc/new": "-",
        "opt": "d",
        "opt/sub": "d",
        "was": "-",
    }


def test_a_lowest_layer_that_deletes_everything_below_it_deletes_nothing(tmp_path):
    extracted(layer(b".wh..wh..opq", b"etc/a"), tmp_path / "only")

    assert treelist.of_chain([tmp_path / "only"]).keys() - {""} == {"etc", "etc/a"}
    assert os.listdir(tmp_path / "only") == ["etc"]


def test_a_deletion_with_nothing_below_it_leaves_nothing(tmp_path):
    """Overlay would list such a mark by its name in a directory that it does not merge."""
    extracted(layer(b"etc/.wh.a", b"etc/b"), tmp_path / "bottom")
    extracted(layer(b"opt/.wh.a", b"opt/.wh..wh..opq", b"opt/b"), tmp_path / "opaque", below=[tmp_path / "bottom"])
    extracted(layer(b"new/.wh.a", b"new/b", b"etc/.wh.c", b"etc/.wh.b"), tmp_path / "top", below=[tmp_path / "bottom", tmp_path / "opaque"])

    assert os.listdir(tmp_path / "bottom/etc") == ["b"]
    assert os.listdir(tmp_path / "opaque/opt") == ["b"]
    assert os.listdir(tmp_path / "top/new") == ["b"]
    assert os.listdir(tmp_path / "top/etc") == ["b"]
    assert overlay.is_whiteout(os.lstat(tmp_path / "top/etc/b"))


@pytest.mark.parametrize("hiding", [b"etc/.wh..wh..opq", b".wh.etc"])
def test_a_deletion_below_what_is_hidden_already_leaves_nothing(tmp_path, hiding):
    """Nothing of the lowest layer is merged there any more, by a mark in between or by one in the same layer."""
    extracted(layer(b"etc/sub/a", b"etc/b"), tmp_path / "bottom")
    extracted(layer(hiding, b"new"), tmp_path / "middle", below=[tmp_path / "bottom"])
    extracted(layer(b"etc/sub/.wh.a", b"etc/.wh.b", b"etc/c"), tmp_path / "top", below=[tmp_path / "bottom", tmp_path / "middle"])
    extracted(layer(b"etc/.wh..wh..opq", b"etc/sub/.wh.a", b"etc/c"), tmp_path / "both", below=[tmp_path / "bottom"])

    for chain in (["bottom", "middle", "top"], ["bottom", "both"]):
        merged = treelist.of_chain([tmp_path / name for name in chain])
        assert {path for path in merged if path.startswith("etc")} == {"etc", "etc/sub", "etc/c"}, chain


def test_a_directory_that_is_only_gone_through_looks_as_it_does_below(tmp_path):
    """A layer may hold tmp/x and say nothing of tmp: its mode must not become another by that."""
    bottom = (
        hostile.Tar("gnu", b"").add(b"./", hostile.DIRECTORY, mode=0o711, uid=3).add(b"tmp/", hostile.DIRECTORY, mode=0o1777, uid=9, gid=9)
    )
    extracted(bottom.bytes(), tmp_path / "bottom")
    extracted(layer(b"tmp/x", b"new/x"), tmp_path / "top", below=[tmp_path / "bottom"])

    modes = {name: stat.S_IMODE(os.stat(tmp_path / "top" / name).st_mode) for name in (".", "tmp", "new")}
    assert modes == {".": 0o711, "tmp": 0o1777, "new": 0o755}
    if IS_ROOT:
        assert os.stat(tmp_path / "top/tmp").st_uid == 9
        assert os.stat(tmp_path / "top").st_uid == 3


def test_layers_of_the_years_before_overlay_are_read(tmp_path):
    """Docker on aufs put notes of its own at the top of each."""
    extracted(layer(b".wh..wh.aufs", b".wh..wh.orph/", b".wh..wh.plnk/", b".wh..wh.plnk/1.2", b"etc/x"), tmp_path / "tree")

    assert os.listdir(tmp_path / "tree") == ["etc"]


def test_the_last_of_two_entries_counts(tmp_path):
    """As with `tar -r`; a hard link to the first keeps what it was."""
    tar = hostile.Tar("gnu", b"").add(b"f", data=b"one").add(b"h", hostile.HARD, target=b"f").add(b"f", data=b"two", mode=0o600)
    tar.add(b"d/", hostile.DIRECTORY, mode=0o700).add(b"d/x", data=b"x").add(b"d/", hostile.DIRECTORY, mode=0o750)

    extracted(tar.bytes(), tmp_path / "tree")

    assert (tmp_path / "tree/f").read_bytes() == b"two"
    assert (tmp_path / "tree/h").read_bytes() == b"one"
    assert stat.S_IMODE(os.stat(tmp_path / "tree/d").st_mode) == 0o750


def test_a_comment_for_all_entries_is_read_over(tmp_path):
    """`git archive` writes one."""
    tar = hostile.Tar("pax", b"").extended(hostile.pax_record(b"comment", b"0" * 40), b"g").add(b"f", data=b"x")

    assert extracted(tar.bytes(), tmp_path / "tree").entries == 1


# ---- digests and compressions ----


def test_both_digests_are_held_to(tmp_path):
    plain = hostile.good_layer()
    packed = gzip.compress(plain)
    digest, diff_id = hostile.digest_of(packed), hostile.digest_of(plain)
    other = hostile.digest_of(b"")

    extracted(packed, tmp_path / "right", digest=digest, diff_id=diff_id)
    with pytest.raises(StageFailed, match="its digest is"):
        extracted(packed, tmp_path / "a", digest=other, diff_id=diff_id)
    with pytest.raises(StageFailed, match="its diff_id is"):
        extracted(packed, tmp_path / "b", digest=digest, diff_id=other)
    with pytest.raises(StageFailed, match="md5"):
        extracted(packed, tmp_path / "c", digest="md5:" + hashlib.md5(packed).hexdigest())
    extracted(packed, tmp_path / "d", digest="sha512:" + hashlib.sha512(packed).hexdigest())


def test_what_is_behind_the_end_counts_for_the_digest(tmp_path):
    """Padding is part of a layer's bytes."""
    plain = hostile.good_layer() + bytes(100_000)

    extracted(gzip.compress(plain), tmp_path / "tree", diff_id=hostile.digest_of(plain))


@pytest.mark.parametrize("level", [1, 9])
def test_gzip_of_several_members_and_padding_is_read_to_its_end(tmp_path, level):
    plain = hostile.good_layer()
    packed = gzip.compress(plain[:600], level) + gzip.compress(b"") + gzip.compress(plain[600:], level) + bytes(1000)

    assert extracted(packed, tmp_path / "tree", diff_id=hostile.digest_of(plain)).entries == 2


@pytest.mark.parametrize("step", [1, 7, 512, 100_000])
def test_it_does_not_matter_in_which_pieces_a_source_gives_its_bytes(tmp_path, step):
    class Dripping(io.BytesIO):
        def read(self, size=-1):
            return super().read(min(size, step))

    packed = gzip.compress(hostile.good_layer())
    (tmp_path / "tree").mkdir()

    assert unpack(Dripping(packed), tmp_path / "tree", marks=MARKS).entries == 2


def test_zstd_is_read_where_the_library_is_and_otherwise_the_remedy_said(tmp_path):
    if shutil.which("zstd") is None:
        pytest.skip("zstd: the program is not installed; apt install zstd")
    packed = subprocess.run(["zstd", "-q"], input=hostile.good_layer(), stdout=subprocess.PIPE, check=True).stdout
    try:
        import zstandard  # noqa: F401
    except ImportError:
        with pytest.raises(StageFailed, match="pip install zstandard"):
            extracted(packed, tmp_path / "tree")
        return

    assert extracted(packed, tmp_path / "tree", diff_id=hostile.digest_of(hostile.good_layer())).entries == 2
    with pytest.raises(StageFailed):
        extracted(packed[: len(packed) // 2], tmp_path / "cut")
    with pytest.raises(StageFailed):
        extracted(packed + b"garbage", tmp_path / "garbage")


def test_what_nobody_hashes_is_skipped_without_being_read(tmp_path):
    """A look at the members of a large archive reads their headers only."""
    (tmp_path / "a").write_bytes(bytes(50 << 20))
    reads = []
    with open(tmp_path / "a", "rb", buffering=0) as file:
        blob = Blob(file, caps=Caps(), on_read=reads.append)
        assert blob.read(10) == bytes(10)
        assert blob.skip(40 << 20) == 40 << 20
        assert len(blob.read(20 << 20)) == (10 << 20) - 10
        assert blob.skip(5) == 0

    assert len(reads) < 60


def test_progress_is_told_and_may_end_it(tmp_path):
    class Enough(Exception):
        pass

    def on_read(done):
        if done > 500_000:
            raise Enough

    tar = hostile.Tar("gnu", b"").add(b"f", data=os.urandom(2_000_000))
    with pytest.raises(Enough):
        extracted(tar.bytes(), tmp_path / "tree", on_read=on_read)
    with Counted() as open_files:
        with pytest.raises(StageFailed):
            extracted(tar.bytes()[:-5000], tmp_path / "cut")
    assert open_files.left == 0


class Counted:
    def __enter__(self):
        self.before = len(os.listdir("/proc/self/fd"))
        return self

    def __exit__(self, *_):
        self.left = len(os.listdir("/proc/self/fd")) - self.before
