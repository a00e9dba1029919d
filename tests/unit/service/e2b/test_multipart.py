"""Forms with files, however their bytes are cut."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from untax.service.e2b.multipart import Bad, Multipart, Part, boundary_in

BOUNDARY = b"xYz"


def form(*files: tuple[str, bytes]) -> bytes:
    parts = [
        b'--xYz\r\nContent-Disposition: form-data; name="file"; filename="%s"\r\nContent-Type: application/octet-stream\r\n\r\n%s\r\n'
        % (name.encode(), data)
        for name, data in files
    ]
    return b"".join(parts) + b"--xYz--\r\n"


def read(raw: bytes, size: int) -> list[tuple[str | None, bytes]]:
    parser = Multipart(BOUNDARY)
    found: list[tuple[str | None, bytes]] = []
    for at in range(0, len(raw), size):
        for one in parser.feed(raw[at : at + size]):
            if isinstance(one, Part):
                found.append((one.filename, b""))
            else:
                found[-1] = (found[-1][0], found[-1][1] + one)
    parser.finish()
    return found


@given(st.lists(st.binary(max_size=60).filter(lambda data: b"--xYz" not in data), max_size=4), st.integers(1, 40))
def test_files_come_out_as_they_went_in(contents, size):
    files = [(f"f{number}", data) for number, data in enumerate(contents)]
    assert read(form(*files), size) == files


def test_data_that_looks_like_the_beginning_of_a_boundary_is_data():
    files = [("a", b"\r\n--xY\r\n--x\r\n"), ("b", b"--xY")]
    assert all(read(form(*files), size) == files for size in range(1, 60))


def test_names_may_have_quotes_spaces_and_any_letters():
    assert read(form(('a "b" ü.txt'.replace('"', '\\"'), b"1")), 7) == [('a "b" ü.txt', b"1")]
    assert read(form(("a%22b.txt", b"1")), 7) == [('a"b.txt', b"1")]


def test_a_form_that_is_cut_off_is_an_error():
    parser = Multipart(BOUNDARY)
    list(parser.feed(form(("a", b"data"))[:-6]))
    with pytest.raises(Bad):
        parser.finish()


def test_a_head_without_end_is_refused_and_not_kept():
    parser = Multipart(BOUNDARY)
    with pytest.raises(Bad):
        for _ in range(100):
            list(parser.feed(b"--xYz\r\nA: " + b"b" * 1024))


@pytest.mark.parametrize(
    ("header", "boundary"),
    [("multipart/form-data; boundary=xYz", b"xYz"), ('multipart/form-data; boundary="a b"', b"a b"), ("text/plain", None), ("", None)],
)
def test_the_boundary_is_in_the_content_type(header, boundary):
    assert boundary_in(header) == boundary


def test_a_form_without_boundary_is_refused():
    with pytest.raises(Bad):
        boundary_in("multipart/form-data")
