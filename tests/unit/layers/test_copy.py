"""A copy that is the same tree, entry by entry, and never anything from outside it."""

import os
import socket
import stat
from pathlib import Path

import pytest

from untax._remove import remove_tree
from untax.layers import marks
from untax.layers.copy import copy_tree

IS_ROOT = os.geteuid() == 0
KIND = marks.of_this_process()


@pytest.fixture
def trees(tmp_path):
    source, target = tmp_path / "source", tmp_path / "target"
    source.mkdir()
    target.mkdir()
    yield source, target
    assert remove_tree(source) and remove_tree(target)  # pytest cannot remove the deep ones


def seen(root: Path) -> dict[str, tuple]:
    """Everything about a tree that a copy must keep, by path; hard links as groups of names."""
    found: dict[str, tuple] = {}
    groups: dict[tuple[int, int], list[str]] = {}
    for directory, names, files in os.walk(root):
        for name in [".", *names, *files]:
            path = os.path.normpath(os.path.join(directory, name))
            st = os.lstat(path)
            kind = stat.S_IFMT(st.st_mode)
            content = Path(path).read_bytes() if kind == stat.S_IFREG else os.readlink(path) if kind == stat.S_IFLNK else (st.st_rdev,)
            xattrs = {n: os.getxattr(path, n, follow_symlinks=False) for n in os.listxattr(path, follow_symlinks=False)}
            key = os.path.relpath(path, root)
            found[key] = (kind, stat.S_IMODE(st.st_mode), st.st_uid, st.st_gid, st.st_mtime_ns, content, xattrs)
            if kind != stat.S_IFDIR and st.st_nlink > 1:
                names_of = groups.setdefault((st.st_dev, st.st_ino), [])
                if key not in names_of:
                    names_of.append(key)
    found["links"] = tuple(sorted(tuple(sorted(group)) for group in groups.values()))
    return found


def test_f11_modes_owners_times_links_attributes_and_marks_are_kept(trees):
    source, target = trees
    (source / "d").mkdir()
    (source / "d" / "plain").write_bytes(b"x" * 70_000)
    (source / "d" / "empty").touch()
    (source / "d" / "program").write_bytes(b"#!")
    (source / "d" / "program").chmod(0o4755)
    (source / "d" / "secret").write_bytes(b"s")
    (source / "d" / "secret").chmod(0o000)
    os.link(source / "d" / "plain", source / "other name")
    os.symlink("/etc/passwd", source / "link")
    os.link(source / "link", source / "second link", follow_symlinks=False)
    os.mkfifo(source / "fifo", 0o640)
    os.mknod(source / "gone", stat.S_IFCHR, os.makedev(0, 0))
    (source / "d" / "replaced").mkdir()
    os.setxattr(source / "d" / "replaced", marks.opaque(KIND), b"y")
    os.setxattr(source / "d" / "plain", "user.note", b"kept")
    for name in (b"\xff\xfe", b"new\nline", b"-rf", b"n" * 255):
        Path(os.fsdecode(os.fsencode(source) + b"/" + name)).write_bytes(name)
    if IS_ROOT:
        os.chown(source / "d" / "program", 1000, 1000)  # takes the bit away
        (source / "d" / "program").chmod(0o4755)
        os.chown(source / "link", 33, 44, follow_symlinks=False)
        os.setxattr(source / "d" / "empty", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000"))
        os.setxattr(source / "link", "trusted.note", b"on a link", follow_symlinks=False)
    for at, path in enumerate(sorted(source.rglob("*"), reverse=True)):
        os.utime(path, ns=(1, 1_234_567_890_123_456_789 + at), follow_symlinks=False)
    (source / "d").chmod(0o500)
    source.chmod(0o751)
    os.utime(source, ns=(5, 5_000_000_007))

    copied = copy_tree(source, target)

    if not IS_ROOT:
        for root in trees:
            (root / "d").chmod(0o700)
            (root / "d" / "secret").chmod(0o400)
            os.utime(root / "d", ns=(0, 0))
    assert seen(target) == seen(source)
    assert copied.entries == len(list(source.rglob("*")))
    if IS_ROOT:
        assert stat.S_IMODE((target / "d" / "program").stat().st_mode) == 0o4755


def test_f11_holes_stay_holes(trees):
    """A file of 1 GiB with two words in it takes a few blocks, before and after."""
    source, target = trees
    with (source / "sparse").open("wb") as file:
        file.seek(500 << 20)
        file.write(b"middle")
        file.truncate(1 << 30)
        file.seek(0)
        file.write(b"begin")

    copy_tree(source, target)

    copy = (target / "sparse").stat()
    assert copy.st_size == 1 << 30
    assert copy.st_blocks * 512 < 1 << 20
    with (target / "sparse").open("rb") as file:
        assert file.read(5) == b"begin"
        file.seek(500 << 20)
        assert file.read(8) == b"middle\0\0"


def test_a_tree_deeper_than_any_path_and_any_number_of_descriptors(trees):
    """1,100 directories inside each other, 12 KiB of path, with a hard link at the bottom to a file at the top."""
    source, target = trees
    (source / "top").write_bytes(b"one file")
    fd = os.open(source, os.O_RDONLY)
    top = os.dup(fd)
    for _ in range(1100):
        os.mkdir("directory9", dir_fd=fd)
        below = os.open("directory9", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.link("top", "bottom", src_dir_fd=top, dst_dir_fd=fd)

    copied = copy_tree(source, target)

    down = os.open(target, os.O_RDONLY)
    for _ in range(1100):
        below = os.open("directory9", os.O_RDONLY, dir_fd=down)
        os.close(down)
        down = below
    assert copied.entries == 1102
    assert os.stat("bottom", dir_fd=down).st_ino == (target / "top").stat().st_ino
    assert os.listdir(target) and not [name for name in os.listdir(target) if name.startswith(".untax")]
    for descriptor in (fd, top, down):
        os.close(descriptor)


def test_t8_a_link_is_a_file_with_a_target_and_nothing_is_read_through_it(trees, tmp_path):
    source, target = trees
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "canary").write_bytes(b"canary")
    os.symlink(outside, source / "directory")
    os.symlink("loop", source / "loop")
    os.symlink("../outside/canary", source / "file")

    copy_tree(source, target)

    assert os.readlink(target / "directory") == str(outside)
    assert [os.readlink(target / name) for name in ("loop", "file")] == ["loop", "../outside/canary"]
    assert os.listdir(outside) == ["canary"]


def test_what_is_left_out_is_left_out_with_all_below_it_and_owners_can_be_others(trees):
    source, target = trees
    (source / "keep").mkdir()
    (source / "drop" / "deep").mkdir(parents=True)
    (source / "keep" / "file").touch()
    mine = (1234, 1235) if IS_ROOT else (os.geteuid(), os.getegid())

    copied = copy_tree(source, target, skip=lambda path, was: path == b"drop", owner=lambda path, was: mine)

    assert copied.entries == 2
    assert sorted(str(path.relative_to(target)) for path in target.rglob("*")) == ["keep", "keep/file"]
    assert ((target / "keep/file").stat().st_uid, (target / "keep/file").stat().st_gid) == mine


def test_overlays_notes_about_its_own_mounts_stay_behind(trees):
    source, target = trees
    (source / "d").mkdir()
    for name in ("origin", "impure"):
        os.setxattr(source / "d", f"{marks.prefix(KIND)}{name}", b"y")
    os.setxattr(source / "d", marks.redirect(KIND), b"/elsewhere")

    copy_tree(source, target)

    assert os.listxattr(target / "d") == [marks.redirect(KIND)]


def test_contents_that_lie_in_another_layer_are_refused(trees):
    """A file that says so would come out empty."""
    source, target = trees
    (source / "f").write_bytes(b"\0\0\0")
    os.setxattr(source / "f", marks.metacopy(KIND), b"")

    with pytest.raises(OSError, match="metacopy"):
        copy_tree(source, target)


def test_a_socket_keeps_its_place(trees):
    source, target = trees
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"/proc/self/fd/{(fd := os.open(source, os.O_RDONLY))}/s")
        os.close(fd)

    copy_tree(source, target)

    assert stat.S_ISSOCK((target / "s").lstat().st_mode)


@pytest.mark.skipif(not IS_ROOT, reason="root: only root makes devices")
def test_a_device_is_refused(trees):
    source, target = trees
    os.mknod(source / "disk", stat.S_IFBLK | 0o600, os.makedev(7, 0))

    with pytest.raises(OSError, match="device"):
        copy_tree(source, target)


def test_a_copy_can_be_stopped_and_leaves_no_descriptor(trees):
    source, target = trees
    for at in range(10):
        (source / f"d{at}").mkdir()
    before = os.listdir("/proc/self/fd")

    def stop():
        if (target / "d5").exists():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        copy_tree(source, target, check=stop)

    assert os.listdir("/proc/self/fd") == before
    assert sorted(os.listdir(target)) == [f"d{at}" for at in range(6)]
