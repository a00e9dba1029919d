"""A tree's digest is the same wherever it lies, and another after any change; its seal breaks at any touch."""

import os
import shutil
import stat
import time

import pytest
from tests.unit.layers.odd import furnish

from untax._remove import remove_tree
from untax.layers.digest import digest_tree, first_difference, id_of_rows, seal_tree

IS_ROOT = os.geteuid() == 0
PINNED = "sha256-eaa27e0af4e896d64e94e3e27cb3976a2996a1611cea0b8e4ce5fac02b50b162"


@pytest.fixture
def tree(tmp_path):
    """One of everything; removed by the function that has to cope with it."""
    top = tmp_path / "tree"
    top.mkdir(mode=0o755)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "untouched").write_text("x")
    furnish(top, outside=outside)
    yield top
    assert remove_tree(top)
    assert (outside / "untouched").read_text() == "x"


def fill(top, when=1_600_000_000_123_456_789):
    (top / "dir").mkdir(parents=True)
    (top / "dir" / "file").write_bytes(b"contents")
    (top / "dir" / "other").write_bytes(b"more")
    (top / "link").symlink_to("dir/file")
    os.link(top / "dir" / "file", top / "second")
    os.mkfifo(top / "fifo")
    for path in (top, top / "dir"):
        path.chmod(0o755)
    for path in (top / "dir" / "file", top / "dir" / "other", top / "fifo"):
        path.chmod(0o644)
    for path in (top / "dir" / "file", top / "dir" / "other"):
        os.utime(path, ns=(0, when))
    return top


def test_two_copies_are_one_content(tmp_path):
    one = fill(tmp_path / "one")
    time.sleep(0.01)  # or the directories might have the same times
    two = fill(tmp_path / "two")

    assert digest_tree(one).id == digest_tree(two).id
    assert seal_tree(one) != seal_tree(two)


@pytest.mark.skipif(not IS_ROOT, reason="owners: the literal value is of a tree of root's")
def test_the_digest_of_a_known_tree_is_this_number(tmp_path):
    """When this fails, every layer of every store has become one that "is no longer what was stored"."""
    assert digest_tree(fill(tmp_path / "tree")).id == PINNED


def edit_in_place(top):
    with open(top / "dir" / "file", "r+b") as file:
        file.write(b"C")
    os.utime(top / "dir" / "file", ns=(0, 1_600_000_000_123_456_789))


CHANGES = {
    "a byte, with the time put back": edit_in_place,
    "a mode": lambda top: (top / "dir" / "file").chmod(0o645),
    "setuid": lambda top: (top / "dir" / "file").chmod(0o4644),
    "a directory's mode": lambda top: (top / "dir").chmod(0o751),
    "the top's mode": lambda top: top.chmod(0o700),
    "a file's time by a nanosecond": lambda top: os.utime(top / "dir" / "file", ns=(0, 1_600_000_000_123_456_790)),
    "an attribute": lambda top: os.setxattr(top / "dir" / "file", "user.x", b"1"),
    "a directory's attribute": lambda top: os.setxattr(top / "dir", "user.overlay.opaque", b"y"),
    "a link's target": lambda top: ((top / "link").unlink(), (top / "link").symlink_to("dir/fil")),
    "a new file": lambda top: (top / "dir" / "zz").touch(),
    "a file less": lambda top: (top / "dir" / "other").unlink(),
    "a name": lambda top: (top / "dir" / "other").rename(top / "dir" / "Other"),
    "a file in place of a FIFO": lambda top: ((top / "fifo").unlink(), (top / "fifo").touch()),
    "a hard link that is a copy now": lambda top: ((top / "second").unlink(), shutil.copy2(top / "dir" / "file", top / "second")),
    "a hard link to another file": lambda top: ((top / "second").unlink(), os.link(top / "dir" / "other", top / "second")),
    "a whiteout": lambda top: os.mknod(top / "gone", stat.S_IFCHR, 0),
}
if IS_ROOT:
    CHANGES |= {
        "an owner": lambda top: os.chown(top / "dir" / "file", 7, -1),
        "a link's owner": lambda top: os.chown(top / "link", 7, -1, follow_symlinks=False),
        "a group of a directory": lambda top: os.chown(top / "dir", -1, 7),
        "a link's attribute": lambda top: os.setxattr(top / "link", "trusted.x", b"1", follow_symlinks=False),
        "a capability": lambda top: os.setxattr(
            top / "dir" / "file", "security.capability", b"\1\0\0\2\0\4\0\0" + bytes(12), follow_symlinks=False
        ),
        "a device's number": lambda top: os.mknod(top / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3)),
    }


@pytest.mark.parametrize("what", CHANGES)
def test_any_change_is_another_digest_and_breaks_the_seal(tmp_path, what):
    top = fill(tmp_path / "tree")
    rows = []
    before = digest_tree(top, rows.append)
    seal = seal_tree(top)
    assert digest_tree(top) == before
    assert seal_tree(top) == seal
    assert id_of_rows(rows) == before.id

    CHANGES[what](top)

    after = []
    assert digest_tree(top, after.append).id != before.id
    assert seal_tree(top) != seal
    assert "/" in first_difference(rows, after)


def test_what_differs_is_said_in_words(tmp_path):
    top = fill(tmp_path / "tree")
    known = []
    digest_tree(top, known.append)

    def after(change):
        change()
        found = []
        digest_tree(top, found.append)
        return first_difference(known, found)

    assert after(lambda: (top / "dir" / "file").chmod(0o600)) == "/dir/file has another mode"
    (top / "dir" / "file").chmod(0o644)
    assert after(lambda: (top / "dir" / "aa").touch()) == "/dir/aa was added"
    (top / "dir" / "aa").unlink()
    assert after(lambda: (top / "dir" / "zz").touch()) == "/dir/zz was added"
    (top / "dir" / "zz").unlink()
    assert after(lambda: (top / "dir" / "file").rename(top / "file")) == "/dir/file is gone"


def test_reading_changes_neither(tmp_path):
    top = fill(tmp_path / "tree")
    before, seal = digest_tree(top), seal_tree(top)

    (top / "dir" / "file").read_bytes()
    os.listdir(top / "dir")

    assert (digest_tree(top), seal_tree(top)) == (before, seal)


def test_a_hole_and_the_zeros_in_it_are_one_content(tmp_path):
    ids = set()
    for name, is_sparse in (("sparse", True), ("full", False)):
        top = tmp_path / name
        top.mkdir()
        with open(top / "file", "wb") as file:
            if is_sparse:
                file.seek(200_000)
            else:
                file.write(bytes(200_000))
            file.write(b"x")
            file.truncate(2_000_001)
            if not is_sparse:
                file.write(bytes(1_800_000))
        os.utime(top / "file", ns=(0, 0))
        ids.add(digest_tree(top).id)

    assert len(ids) == 1
    with open(top / "file", "r+b") as file:  # one byte, far behind the others
        file.seek(1_999_999)
        file.write(b"\1")
    os.utime(top / "file", ns=(0, 0))
    assert digest_tree(top).id not in ids


def test_a_tree_of_anything_a_workload_makes_has_a_digest_and_a_seal(tree):
    """A terabyte with 13 bytes in it, closed directories, 1,200 levels, names that are no text: in seconds, nothing followed or waited for."""
    rows = []
    found = digest_tree(tree, rows.append)
    seal = seal_tree(tree)

    assert found.entries > 1220
    assert found.bytes < 100 << 20
    assert sum(row.startswith(b"h\0") for row in rows) == 1
    assert sum(row.startswith(b"w\0") for row in rows) == 1
    assert stat.S_IMODE((tree / "closed").lstat().st_mode) == 0
    assert digest_tree(tree).id == found.id
    if IS_ROOT:  # an ordinary user's closed directories are opened to be read, which is noticed
        assert seal_tree(tree) == seal


def test_an_entry_below_a_closed_directory_counts(tree):
    before = digest_tree(tree).id
    for name, mode in (("closed", 0o700), ("closed/inner", 0o700), ("closed/inner/file", 0o600)):
        (tree / name).chmod(mode)
    st = (tree / "closed/inner/file").stat()
    (tree / "closed/inner/file").write_text("HIDDEN")
    os.utime(tree / "closed/inner/file", ns=(0, st.st_mtime_ns))
    for name, mode in (("closed/inner/file", 0), ("closed/inner", 0o400), ("closed", 0)):
        (tree / name).chmod(mode)

    assert digest_tree(tree).id != before


def test_no_descriptor_is_left_open(tree):
    digest_tree(tree)
    before = len(os.listdir("/proc/self/fd"))

    for _ in range(3):
        digest_tree(tree)
        seal_tree(tree)

    assert len(os.listdir("/proc/self/fd")) == before


def test_a_file_that_cannot_be_read_to_its_end_is_an_error_and_leaves_nothing_open(tmp_path, monkeypatch):
    top = tmp_path / "tree"
    top.mkdir()
    for number in range(8):
        (top / f"large{number}").write_bytes(os.urandom(2 << 20))
    before = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: 5)

    with pytest.raises(OSError, match="changed"):
        digest_tree(top)
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.skipif(not IS_ROOT, reason="trusted: an ordinary user has no trusted attributes")
def test_what_overlay_notes_about_a_copy_is_no_content(tmp_path):
    top = fill(tmp_path / "tree")
    before = digest_tree(top).id

    for name in ("origin", "impure", "nlink", "uuid"):
        os.setxattr(top / "dir", f"trusted.overlay.{name}", b"y")
    assert digest_tree(top).id == before
    os.setxattr(top / "dir", "trusted.overlay.redirect", b"elsewhere")
    assert digest_tree(top).id != before
