"""What a client and a server say to each other: it arrives as it was, and nonsense is refused before it is believed."""

import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

import untax
from untax.core import errors
from untax.core.root import ImageConfig, Root, View
from untax.core.spec import EnvSpec, Limits, Repo
from untax.core.stage import Stage
from untax.core.substrate import Unenforced
from untax.remote import messages
from untax.remote.messages import Framer, decode, encode, error_data, error_of, plain, read_plain


def there_and_back(body, descriptors=0):
    [message] = Framer().feed(encode(body, descriptors))
    return decode(message)


def test_values_arrive_as_what_they_are():
    spec = EnvSpec(
        image="dir:/x", repo=Repo("https://example.org/x", "0" * 40, 3), setup=("a", "b"), env={"A": "1"}, limits=Limits(2, 3, 4, 5),
        network=("example.org:443",), user="u", workdir="/w",
    )  # fmt: skip
    root = Root(("/a", "/b"), (View("/v", "/at"),), ImageConfig({"X": "y"}, labels={"l": "m"}), "/bin", True)
    body = {
        "spec": spec,
        "root": root,
        "stage": Stage("image", "key", {"kind": "x"}, "parent", True),
        "unenforced": (Unenforced("cpus", "why", "remedy"),),
        "files": {"a": b"\0\xff", "$odd": b"x"},
        "name": "caf\udce9",
        "numbers": (1, 2.5, None, True),
    }

    assert there_and_back(body, 1) == (body, 1)


def test_values_that_come_again_are_made_once_of_the_same_bytes():
    spec, same = EnvSpec(image="dir:/again", env={"A": "1"}), EnvSpec(image="dir:/again", env={"A": "1"})
    stage = Stage("image", "key-again", {"kind": "x"}, None, True)

    first, second = there_and_back({"spec": spec, "stages": (stage, stage)})[0], there_and_back({"spec": same, "stages": (stage,)})[0]

    assert first["spec"] == spec and first["spec"] is second["spec"]
    assert first["stages"][0] is first["stages"][1] is second["stages"][0] and first["stages"][0] == stage
    assert there_and_back({"spec": EnvSpec(image="dir:/again", env={"A": "2"})})[0]["spec"].env == {"A": "2"}


@pytest.mark.parametrize("odd", ["$HOME", "$value", '"$type', "$"])
def test_names_and_texts_that_look_like_marks_arrive_as_they_are(odd):
    body = {
        "text": odd,
        "names": {odd: 1, "other": (odd,)},
        "spec": EnvSpec(env={"A": odd}, image=odd),
        "image": ImageConfig(labels={odd: odd}),
        "stage": Stage("image", odd, {odd: odd}, None, True),
        "bytes": b"$",
    }
    assert there_and_back(body)[0] == body


def test_what_others_send_does_not_pile_up(monkeypatch):
    monkeypatch.setattr(messages, "_values", {})
    monkeypatch.setattr(messages, "_texts", {})
    for number in range(messages._AGAIN_KEPT + 10):
        there_and_back({"spec": EnvSpec(image=f"dir:/{number}")})
    large = EnvSpec(env={"A": "x" * messages._AGAIN_MAX})

    assert there_and_back({"spec": large})[0] == {"spec": large}
    assert len(messages._values) <= messages._AGAIN_KEPT and len(messages._texts) <= messages._AGAIN_KEPT
    assert max(map(len, messages._values)) <= messages._AGAIN_MAX


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.text() | st.binary(max_size=50),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(max_size=5).filter(lambda name: not name.startswith("$")), json_values, max_size=5))
def test_any_plain_value_arrives_as_it_was(body):
    assert there_and_back(body)[0] == body


@given(st.binary(max_size=200))
def test_whatever_is_not_a_message_is_a_protocol_error(data):
    try:
        decode(data)
    except errors.ProtocolError:
        pass


def packed(text, attached=(), descriptors=0):
    text = text.encode()
    sizes = b"".join(struct.pack("<I", len(one)) for one in attached)
    return struct.pack("<III", len(text), len(attached), descriptors) + sizes + text + b"".join(attached)


@pytest.mark.parametrize(
    "message",
    [
        b"",
        packed("[]"),
        packed('{"a": {"$bytes": 0}}'),
        packed('{"a": {"$bytes": true}}', [b"x"]),
        packed('{"a": {"$value": 0}}'),
        packed('{"a": {"$value": 0}}', [b"x"]),
        packed('{"a": {"$value": 0}}', [b"{}"]),
        packed('{"a": {"$value": 0}}', [b"\xff"]),
        packed('{"a": {"$value": 0}}', [b"[" * 100_000]),
        packed('{"a": {"$value": 0}}', [b'{"$value": 0}']),
        packed('{"a": {"$value": 0}}', [b'{"$type": "Limits"}']),
        packed('{"a": {"$value": 0}}', [b'{"$type": "EnvSpec", "image": ""}']),
        packed('{"a": {"$type": "Popen", "args": "x"}}'),
        packed('{"a": {"$type": "EnvSpec", "no_such_field": 1}}'),
        packed('{"a": {"$type": "EnvSpec", "image": ""}}'),
        packed('{"a": {"$items": [[1]]}}'),
        packed("[" * 100_000),
        packed("[" * 100 + "]" * 100),
        packed("{}", descriptors=2),
        packed("{}") + b"more",
        packed("9" * 10_000),
    ],
)
def test_a_message_that_breaks_the_rules_is_a_protocol_error(message):
    with pytest.raises(errors.ProtocolError):
        decode(message)


def test_a_length_is_checked_before_it_is_believed():
    with pytest.raises(errors.ProtocolError, match="4294967295 bytes"):
        list(Framer().feed(b"\xff\xff\xff\xff"))
    with pytest.raises(errors.ProtocolError):
        list(Framer(lambda: 100).feed(struct.pack("<I", 101)))


def test_messages_may_come_byte_by_byte():
    raw = encode({"a": 1}) + encode({"b": b"2"})
    framer = Framer()

    found = [decode(message)[0] for at in range(len(raw)) for message in framer.feed(raw[at : at + 1])]

    assert found == [{"a": 1}, {"b": b"2"}]


def test_what_is_too_large_names_the_remedy(monkeypatch):
    monkeypatch.setattr(messages, "MESSAGE_MAX", 1000)
    with pytest.raises(untax.UsageError, match="upload"):
        encode({"files": {"x": b"x" * 1001}})


def test_what_cannot_be_sent_says_so():
    with pytest.raises(untax.UsageError, match="cannot be sent"):
        encode({"x": object()})


@pytest.mark.parametrize(
    "error",
    [
        errors.UsageError("wrong"),
        errors.SandboxLost("sbx-1", "gone"),
        errors.CreateError("", "no"),
        errors.StageFailed("deps", "it failed", b"\xff log"),
        errors.PoolTimeout("late"),
        errors.NotFound(2, "No such file", "/x"),
        errors.Gone("nobody"),
        errors.ActionTimeout("slow"),
    ],
)
def test_errors_travel_by_the_name_of_their_class(error):
    back = error_of(there_and_back({"e": error_data(error)})[0]["e"])

    assert (type(back), str(back), back.args) == (type(error), str(error), error.args)
    assert vars(back) == vars(error)


@pytest.mark.parametrize(
    "data", [None, "x", {}, {"kind": "os", "args": ()}, {"kind": "UntaxError"}, {"kind": "SandboxLost", "args": ("one",)}, {"kind": "Exception", "args": ()}]
)  # fmt: skip
def test_an_error_that_nobody_knows_is_the_backend_s(data):
    assert type(error_of(data)) is errors.BackendError


def test_the_json_is_json():
    [message] = Framer().feed(encode({"a": (1, b"x")}))
    size, _, _ = struct.unpack_from("<III", message)
    assert json.loads(message[16 : 16 + size]) == {"a": [1, {"$bytes": 0}]}


@pytest.mark.parametrize("spoiled", [b"", b"{", b"[1]", b"\xff", b'{"a": 1} {}', b"[" * 100_000])
def test_what_is_plain_is_read_as_it_was_and_what_cannot_be_read_is_refused(spoiled):
    value = {"parts": [["queue", 1, 2]], "text": '"$bytes" ü', "share": 0.5, "none": None}
    assert read_plain(plain(value)) == value
    with pytest.raises(errors.ProtocolError):
        read_plain(spoiled)
