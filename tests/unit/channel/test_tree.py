"""Trees as tar streams: the standard library reads what we pack, and nothing hostile gets out of what we unpack."""

import io
import os
import tarfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from untax.channel import tree
from untax.core.errors import FileError, ProtocolError, TooLarge, UntaxError, UsageError

LONG = "n" * 90


def packed(path, name=b"", **options):
    return b"".join(tree.Packer(os.fsencode(path), name, **options))


def unpack(data, local, step=None, **options):
    unpacker = tree.Unpacker(local, **options)
    try:
        for at in range(0, len(data), step or len(data)):
            unpacker.feed(data[at : at + (step or len(data))])
        unpacker.finish()
    finally:
        unpacker.close()
    return unpacker


def archive(*members):
    """A tar stream of (name, type, contents or target, mode), behind the root that a directory's stream begins with."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, kind, what, mode in ((".", tarfile.DIRTYPE, "", 0o755), *members):
            info = tarfile.TarInfo(name)
            info.type, info.mode = kind, mode
            if kind == tarfile.REGTYPE:
                info.size = len(what)
                tar.addfile(info, io.BytesIO(what))
            else:
                info.linkname = what
                tar.addfile(info)
    return out.getvalue()


FILE, LINK, HARD, DIR = tarfile.REGTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.DIRTYPE


@pytest.fixture
def source(tmp_path):
    root = tmp_path / "source"
    deep = root / LONG / LONG / LONG
    deep.mkdir(parents=True)
    (root / "empty").write_bytes(b"")
    (root / "run.sh").write_bytes(b"#!/bin/sh\n" * 100)
    (root / "run.sh").chmod(0o755)
    (deep / ("f" * 200)).write_bytes(os.urandom(700_000))
    (root / os.fsdecode(b"b\xffd\nname")).write_bytes(b"x")
    (root / "link").symlink_to("run.sh")
    (root / "far").symlink_to("x/" * 120 + "y")
    os.mkfifo(root / "fifo")
    (root / "closed").mkdir()
    (root / "closed" / "f").write_bytes(b"in")
    (root / "closed").chmod(0o555)
    os.utime(root / "run.sh", (1_000_000_000, 1_000_000_000))
    yield root
    (root / "closed").chmod(0o755)


def listing(root):
    found = {}
    for directory, dirs, files in os.walk(root):
        for name in dirs + files:
            path = os.path.join(directory, name)
            status = os.lstat(path)
            what = os.readlink(path) if os.path.islink(path) else open(path, "rb").read() if os.path.isfile(path) else None
            found[os.path.relpath(path, root)] = (status.st_mode, what)
    return found


def test_the_standard_library_reads_what_was_packed(source):
    with tarfile.open(fileobj=io.BytesIO(packed(source))) as tar:
        members = {member.name: member for member in tar.getmembers()}
        assert tar.extractfile("run.sh").read() == b"#!/bin/sh\n" * 100

    assert "fifo" not in members
    assert members["run.sh"].mode == 0o755
    assert members["run.sh"].mtime == 1_000_000_000
    assert members["far"].linkname == "x/" * 120 + "y"
    assert f"{LONG}/{LONG}/{LONG}/{'f' * 200}" in members


@pytest.mark.parametrize("step", [None, 1000, 511])
def test_a_tree_comes_back_as_it_was(source, tmp_path, step):
    unpack(packed(source), tmp_path / "copy", step)
    expected = listing(source)
    del expected["fifo"]

    assert listing(tmp_path / "copy") == expected
    assert os.stat(tmp_path / "copy" / "run.sh").st_mtime == 1_000_000_000
    (tmp_path / "copy" / "closed").chmod(0o755)


def test_one_file_goes_to_its_new_name(source, tmp_path):
    dest, body = tree.upload_plan(source / "run.sh", "a/b/new.sh", max_bytes=1 << 20, max_entries=10)
    unpack(b"".join(body), tmp_path / "here.sh")

    assert dest == b"a/b"
    assert (tmp_path / "here.sh").read_bytes() == b"#!/bin/sh\n" * 100
    assert os.stat(tmp_path / "here.sh").st_mode & 0o777 == 0o755


def test_caps_hold_while_packing(source):
    with pytest.raises(TooLarge):
        packed(source, max_bytes=1000)
    with pytest.raises(TooLarge):
        packed(source, max_entries=3)


def test_a_missing_source_is_the_callers_mistake(tmp_path):
    with pytest.raises(UsageError):
        tree.upload_plan(tmp_path / "nope", "x", max_bytes=1, max_entries=1)


def test_existing_files_are_replaced_and_not_written_through(tmp_path):
    outside = tmp_path / "outside"
    outside.write_bytes(b"safe")
    local = tmp_path / "local"
    local.mkdir()
    (local / "f").symlink_to(outside)
    unpack(archive(("f", FILE, b"new", 0o644)), local)

    assert outside.read_bytes() == b"safe"
    assert (local / "f").read_bytes() == b"new"
    assert not (local / "f").is_symlink()


@pytest.mark.parametrize("name", ["../evil", "a/../../evil", "/evil", "a/.."])
def test_a_name_that_leads_out_is_refused(tmp_path, name):
    with pytest.raises(ProtocolError):
        unpack(archive((name, FILE, b"x", 0o644)), tmp_path / "local")
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("target", ["/etc", "..", "a/../..", "../x", "", "d/../../x"])
def test_a_link_that_leads_out_is_left_out(tmp_path, target):
    unpacker = unpack(archive(("l", LINK, target, 0o777)), tmp_path / "local")

    assert unpacker.skipped == ["l"]
    assert not os.path.lexists(tmp_path / "local" / "l")


def test_links_inside_are_made_but_never_followed(tmp_path):
    """The stream's own link cannot carry a later entry elsewhere, not even inside."""
    unpack(archive(("d", DIR, "", 0o755), ("d/up", LINK, "../f", 0o777)), tmp_path / "fine")
    assert os.readlink(tmp_path / "fine" / "d" / "up") == "../f"

    with pytest.raises(FileError):
        unpack(archive(("d", DIR, "", 0o755), ("l", LINK, "d", 0o777), ("l/x", FILE, b"x", 0o644)), tmp_path / "local")
    assert not (tmp_path / "local" / "d" / "x").exists()


def test_an_earlier_link_of_the_host_is_not_followed_below_the_root(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    local = tmp_path / "local"
    local.mkdir()
    (local / "d").symlink_to(outside)
    with pytest.raises(FileError):
        unpack(archive(("d/x", FILE, b"x", 0o644)), local)
    assert os.listdir(outside) == []


def test_devices_and_set_id_bits_do_not_come_through(tmp_path):
    members = (("null", tarfile.CHRTYPE, "", 0o666), ("fifo", tarfile.FIFOTYPE, "", 0o666), ("su", FILE, b"x", 0o6755))
    unpacker = unpack(archive(*members), tmp_path / "local")

    assert unpacker.skipped == ["null", "fifo"]
    assert os.stat(tmp_path / "local" / "su").st_mode & 0o7777 == 0o755


def test_hard_links_join_files_of_the_tree_only(tmp_path):
    unpack(archive(("a", FILE, b"x", 0o644), ("d/b", HARD, "a", 0o644)), tmp_path / "local")
    assert os.stat(tmp_path / "local" / "a").st_nlink == 2

    for target in ("../outside", "/etc/passwd"):
        with pytest.raises(ProtocolError):
            unpack(archive(("b", HARD, target, 0o644)), tmp_path / "other")
    with pytest.raises(ProtocolError):
        unpack(archive(("l", LINK, "a", 0o777), ("b", HARD, "l", 0o644)), tmp_path / "third")


def test_r13_declared_sizes_are_believed_only_up_to_the_cap(tmp_path):
    info = tarfile.TarInfo("bomb")
    info.size = 10 << 30
    with pytest.raises(TooLarge):
        unpack(archive()[:512] + info.tobuf(), tmp_path / "local", max_bytes=1 << 20)
    many = archive(*((f"f{n}", FILE, b"", 0o644) for n in range(50)))
    with pytest.raises(TooLarge):
        unpack(many, tmp_path / "many", max_entries=20)
    assert len(os.listdir(tmp_path / "many")) <= 20


@pytest.mark.parametrize("cut", [100, 512, 700, 1024 + 10])
def test_a_stream_that_breaks_off_is_noticed(tmp_path, cut):
    data = archive(("f", FILE, b"x" * 600, 0o644))
    if cut == 512:
        return  # a whole entry; only the missing end mark tells, which tar forgives as well
    with pytest.raises(ProtocolError):
        unpack(data[:cut], tmp_path / "local")


def test_an_empty_extended_header_leaves_nothing_open(tmp_path):
    """It once made the file behind it be taken for the header's contents, and its descriptor stay."""
    status = os.stat(tmp_path)
    stream = tree._header(b"./", status, b"5", 0)
    for n in range(3):
        stream += tree._fields(b"pax", 0o644, 0, 0, b"x", b"", b"") + tree._header(b"f%d" % n, status, b"0", 3 * (n % 2))
        stream += tree._padded(b"abc") if n % 2 else b""
    before = len(os.listdir("/proc/self/fd"))
    unpack(stream + tree._END, tmp_path / "out")

    assert len(os.listdir("/proc/self/fd")) == before
    assert (tmp_path / "out/f1").read_bytes() == b"abc"


def test_a_file_that_goes_on_is_refused(tmp_path):
    data = archive(("a", FILE, b"x", 0o644), ("b", FILE, b"x", 0o644))[512:]
    with pytest.raises(ProtocolError):
        unpack(data, tmp_path / "local")


@settings(max_examples=200, deadline=None)
@given(position=st.integers(0, 4095), value=st.integers(0, 255), summed=st.booleans())
def test_a_damaged_stream_stays_inside(tmp_path_factory, position, value, summed):
    """Whatever one byte becomes, also with a sum that fits it, nothing lands outside of the destination."""
    base = tmp_path_factory.mktemp("damaged")
    data = bytearray(archive(("d/f", FILE, b"x" * 100, 0o644), ("d/l", LINK, "f", 0o777), ("e", FILE, b"", 0o600)))
    position %= len(data)
    data[position] = value
    if summed:
        start = position - position % 512
        block = data[start : start + 512]
        block[148:156] = b" " * 8
        data[start + 148 : start + 156] = b"%06o\0 " % sum(block)
    try:
        unpack(bytes(data), base / "local", max_bytes=1 << 20, max_entries=100)
    except UntaxError:
        pass
    assert set(os.listdir(base)) <= {"local"}
    for path in (base / "local").rglob("*"):
        assert base in path.resolve().parents or not path.exists()
