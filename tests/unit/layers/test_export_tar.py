"""The tar that exports write, read by Python's own reader: every field, also those that need a record."""

import hashlib
import io
import os
import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from untax.core.errors import StageUnavailable
from untax.layers.export import _tar
from untax.layers.export._tree import Item, Losses


def holding(content):
    def opened():
        fd = os.memfd_create("content")
        os.write(fd, content)
        os.lseek(fd, 0, os.SEEK_SET)
        return fd

    return opened


def written(*items, losses=None):
    out = io.BytesIO()
    _tar.write_tar(items, out.write, losses or Losses())
    return out.getvalue()


def members(data):
    with tarfile.open(fileobj=io.BytesIO(data), encoding="utf-8", errors="surrogateescape") as archive:
        return list(archive)


_NAMES = st.binary(min_size=1, max_size=300).filter(lambda name: b"\0" not in name and b"/" not in name and name not in (b".", b".."))


@given(
    name=_NAMES,
    target=_NAMES,
    mode=st.integers(0, 0o7777),
    uid=st.integers(0, 2**32 - 2),
    gid=st.integers(0, 2**32 - 2),
    mtime_ns=st.integers(-(2**62), 2**62),
    content=st.binary(max_size=2000),
    value=st.binary(min_size=1, max_size=1200),
)
def test_whatever_an_entry_is_comes_back(name, target, mode, uid, gid, mtime_ns, content, value):
    file = Item(name, "file", mode, uid, gid, mtime_ns, len(content), xattrs={"user.a": value}, open=holding(content))
    link = Item(b"link", "link", 0o777, uid, gid, target=target)
    data = written(Item(b"", "directory", 0o755), file, link)

    assert len(data) % 512 == 0
    top, found, pointing = members(data)
    assert (top.name, top.isdir()) == (".", True)
    assert (found.mode, found.uid, found.gid, found.size) == (mode, uid, gid, len(content))
    assert os.fsencode(found.name) == name.rstrip(b"/")
    assert found.mtime == pytest.approx(mtime_ns / 1e9, rel=1e-12)
    assert found.pax_headers["SCHILY.xattr.user.a"].encode("utf-8", "surrogateescape") == value
    assert (os.fsencode(pointing.linkname), pointing.issym()) == (target, True)
    with tarfile.open(fileobj=io.BytesIO(data), errors="surrogateescape") as archive:
        assert archive.extractfile(archive.getmembers()[1]).read() == content


def test_a_file_of_several_names_is_there_once_and_keeps_its_attributes_at_each():
    """Engines give each link its owner anew, and the kernel then takes capabilities away: they must come again."""
    names = [
        Item(name, "file", 0o755, size=3, xattrs={"security.capability": b"c"}, links=7, open=holding(b"abc"))
        for name in (b"a", b"b", b"c")
    ]
    first, *others = members(written(*names))

    assert first.isreg()
    assert [(other.linkname, other.islnk()) for other in others] == [("a", True), ("a", True)]
    assert all(other.pax_headers["SCHILY.xattr.security.capability"] == "c" for other in (first, *others))


def test_sizes_beyond_octal_digits():
    header = _tar.plain_header(b"blob", 10 << 30)
    long = _tar._header(Item(b"f", "file", size=10 << 30), b"0", b"")

    assert tarfile.TarInfo.frombuf(header, "utf-8", "strict").size == 10 << 30
    assert b"14 size=10737418240\n"[3:] in long


@pytest.mark.parametrize("length", [*range(80, 110), 985, 986, 987, 988, 9984, 9985, 9986])
def test_the_length_of_a_record_counts_itself(length):
    record = _tar._record(b"path", b"x" * length)

    assert int(record.split(b" ", 1)[0]) == len(record)


def test_an_attribute_without_a_value_is_counted_as_lost():
    losses = Losses()
    [member] = members(written(Item(b"f", "fifo", xattrs={"user.none": b"", "user.some": b"1"}), losses=losses))

    assert set(member.pax_headers) == {"SCHILY.xattr.user.some"}
    assert losses.said() == (f"1 × {_tar.VALUELESS}",)


@pytest.mark.parametrize("content", [b"ab", b"abcd"])
def test_a_file_that_is_not_as_long_as_it_was_is_refused(content):
    with pytest.raises(StageUnavailable, match="changed"):
        written(Item(b"f", "file", size=3, open=holding(content)))


def test_the_bytes_are_these():
    """They are part of a digest that others have: a change here makes every exported layer another one."""
    data = written(
        Item(b"", "directory", 0o755),
        Item(b"d", "directory", 0o1777, 1000, 1000),
        Item(b"d/f", "file", 0o644, 1, 2, 1_234_567_890_000_000_001, 3, xattrs={"user.b": b"\xff", "user.a": b"1"}, open=holding(b"abc")),
        Item(b"d/l", "link", 0o777, target=b"f"),
        Item(b"p", "fifo", 0o600),
    )
    assert hashlib.sha256(data).hexdigest() == "71a7331243008fa6e9e1b09d5090e96693acb6a02442e2b68adf7846093554ec"
