"""The tar format as data: what is read of headers, and what is malformed."""

import tarfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from untax.core import tar
from untax.core.tar import BLOCK, Header, TarError


def header_of(form, **fields):
    info = tarfile.TarInfo(fields.pop("name", "name"))
    for name, value in fields.items():
        setattr(info, name, value)
    return info.tobuf(form)[-BLOCK:]


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT])
@given(
    size=st.integers(0, 8**11 - 1),
    mode=st.integers(0, 0o7777),
    ids=st.tuples(st.integers(0, 65_535), st.integers(0, 65_535)),
    mtime=st.integers(0, 8**11 - 1),
)
def test_what_python_writes_is_read(form, size, mode, ids, mtime):
    header = Header(header_of(form, size=size, mode=mode, uid=ids[0], gid=ids[1], mtime=mtime, linkname="target"))

    assert (header.size, header.mode, header.uid, header.gid, header.mtime) == (size, mode, *ids, mtime)
    assert (header.name, header.target, header.kind) == (b"name", b"target", b"0")
    assert header.has_known_magic


@given(st.integers(-(1 << 62), (1 << 62) - 1))
def test_numbers_that_octal_digits_cannot_hold_are_read(value):
    field = tarfile.itn(value, 12, tarfile.GNU_FORMAT)

    assert tar.number(field, is_signed=True) == value


def test_a_prefix_belongs_to_a_name_in_one_dialect_only():
    name = "p" * 100 + "/" + "n" * 90
    ustar = header_of(tarfile.USTAR_FORMAT, name=name)
    assert Header(ustar).name == name.encode()

    gnu = bytearray(ustar)
    gnu[257:265] = b"ustar  \0"
    gnu[148:156] = b" " * 8
    gnu[148:156] = b"%06o\0 " % sum(gnu)
    assert Header(bytes(gnu)).name == b"n" * 90


@given(st.binary(min_size=BLOCK, max_size=BLOCK))
def test_noise_is_malformed_and_nothing_else(block):
    with pytest.raises(TarError):
        Header(block)


@pytest.mark.parametrize("field", [b"8\0", b"0x1", b"-1 ", b"1 1", b"\x80" + b"\xff" * 11])
def test_a_malformed_number_is_said(field):
    with pytest.raises(TarError):
        tar.number(field)


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=20).filter(lambda key: b"=" not in key), st.binary(max_size=200)), max_size=5))
def test_records_are_read_in_their_order(pairs):
    data = b""
    for key, value in pairs:
        size = len(key) + len(value) + 3
        while size != len(str(size)) + len(key) + len(value) + 3:
            size = len(str(size)) + len(key) + len(value) + 3
        data += b"%d %b=%b\n" % (size, key, value)

    assert tar.records(data) == pairs


@given(st.binary(max_size=60))
def test_any_bytes_are_records_or_malformed(data):
    try:
        tar.records(data)
    except TarError:
        pass


@pytest.mark.parametrize(
    ("text", "ns"),
    [(b"0", 0), (b"1.5", 1_500_000_000), (b"-1.5", -1_500_000_000), (b"1.123456789123", 1_123_456_789), (b"7.", 7_000_000_000)],
)
def test_times_have_fractions_and_may_be_before_1970(text, ns):
    assert tar.nanoseconds(text) == ns


@pytest.mark.parametrize("text", [b"", b"x", b"1.x", b"--1", b"1e9", b"9" * 30, b".5"])
def test_a_malformed_time_is_said(text):
    with pytest.raises(TarError):
        tar.nanoseconds(text)


def test_names_lead_down_only():
    assert tar.components(b"./a//b/./c/", deepest=3) == [b"a", b"b", b"c"]
    assert tar.components(b"./", deepest=3) == []
    for name in (b"/a", b"a/../b", b"..", b"a\0b", b"a/b/c/d"):
        with pytest.raises(TarError):
            tar.components(name, deepest=3)


def test_a_sparse_map_fits_its_file():
    tar.check_sparse([(0, 5), (10, 5), (20, 0)], stored=10, whole=20)
    for pieces, stored, whole in (([(0, 5), (4, 5)], 10, 20), ([(0, 5)], 6, 20), ([(18, 5)], 5, 20)):
        with pytest.raises(TarError):
            tar.check_sparse(pieces, stored=stored, whole=whole)
