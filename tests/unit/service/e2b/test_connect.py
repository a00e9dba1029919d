"""Connect's framing: what comes in pieces, what is refused, and how errors are said."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from untax.core import errors
from untax.service.e2b import connect
from untax.service.e2b.connect import Envelopes, RpcError


def test_an_envelope_is_a_flag_a_big_endian_length_and_json():
    assert connect.envelope({"a": 1}) == b'\x00\x00\x00\x00\x07{"a":1}'
    assert connect.end() == b"\x02\x00\x00\x00\x02{}"
    assert connect.end(RpcError("not_found", "no")) == b'\x02\x00\x00\x00\x2d{"error":{"code":"not_found","message":"no"}}'


@given(st.lists(st.dictionaries(st.text(), st.text())), st.integers(1, 20))
def test_messages_are_the_same_however_their_bytes_are_cut(messages, size):
    whole = b"".join(map(connect.envelope, messages)) + connect.end()
    envelopes = Envelopes()

    found = [message for at in range(0, len(whole), size) for message in envelopes.feed(whole[at : at + size])]
    envelopes.finish()

    assert found == messages


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (struct.pack(">BI", 1, 2) + b"{}", "unimplemented"),
        (struct.pack(">BI", 0, 0xFFFFFFFF), "resource_exhausted"),
        (struct.pack(">BI", 0, 3) + b"[1]", "invalid_argument"),
        (struct.pack(">BI", 0, 3) + b"NaN", "invalid_argument"),
        (struct.pack(">BI", 0, 200_000) + b"[" * 200_000, "invalid_argument"),
        (struct.pack(">BI", 0, 14) + b'{"a":"\\ud800"}', "invalid_argument"),
    ],
)
def test_what_breaks_the_framing_is_refused_with_a_code(raw, code):
    with pytest.raises(RpcError) as refused:
        list(Envelopes().feed(raw))
    assert refused.value.code == code


def test_a_stream_that_ends_within_a_message_is_an_error():
    envelopes = Envelopes()
    assert list(envelopes.feed(b"\x00\x00\x00")) == []
    with pytest.raises(RpcError):
        envelopes.finish()


@pytest.mark.parametrize(
    ("error", "code", "status"),
    [
        (errors.file_error(2, "", "/a"), "not_found", 404),
        (errors.file_error(17, "", "/a"), "already_exists", 409),
        (errors.file_error(13, "", "/a"), "permission_denied", 403),
        (errors.file_error(28, "", "/a"), "resource_exhausted", 429),
        (errors.UsageError("x"), "invalid_argument", 400),
        (errors.SandboxLost("s", "x"), "unavailable", 503),
        (errors.Gone("x"), "not_found", 404),
        (errors.SpawnFailed("s", "starting a process: Resource temporarily unavailable"), "resource_exhausted", 429),
    ],
)
def test_errors_of_ours_have_a_code_of_theirs(error, code, status):
    said = connect.rpc_error(error)
    assert (said.code, said.status) == (code, status)


def test_fields_are_read_as_protocol_buffers_write_them():
    message = {"n": "18446744073709551615", "data": "aGk=", "url": "-_8=", "flag": True}
    assert connect.number_field(message, "n") == (1 << 64) - 1
    assert connect.bytes_field(message, "data") == b"hi"
    assert connect.bytes_field(message, "url") == b"\xfb\xff"
    assert connect.flag_field(message, "flag") is True
    for read, name in (
        (connect.number_field, "flag"),
        (connect.text_field, "flag"),
        (connect.bytes_field, "flag"),
        (connect.object_field, "n"),
    ):
        with pytest.raises(RpcError):
            read(message, name)
