"""What a client and a server say to each other, as bytes; no sockets. `docs/serve.md` describes it.

A message is a JSON object with a list of byte strings beside it, so that files and logs travel as they are. How messages get across is
a transport's business: a Unix socket cuts them by the header below, a WebSocket or an HTTP body would by its own framing. Neither side
believes the other's lengths before they are checked, and whatever cannot be read is a `ProtocolError`.

Values that come again with every lease (specs, stages) are byte strings of their own: each side makes them once, of the same bytes the same value.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import struct
from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Any

from untax.core.errors import ProtocolError, UntaxError, UsageError

PROTOCOL = 3
"""Of these messages. Either side refuses another number, naming both."""

MESSAGE_MAX = 64 << 20
"""Bytes of one message. What is larger belongs into the sandbox by `upload`, over the channel."""
_ATTACHMENTS_MAX = 10_000
_DEEPEST = 64

Body = dict[str, Any]

_SIZES = Struct("<III")  # JSON, number of attachments, descriptors that come along
_SIZE = Struct("<I")


# ---- values ----


_MODULES = ("core.spec", "core.root", "core.stage", "core.substrate", "core.ledger", "layers.merged", "pool.status")
"""Whose data classes travel as what they are. A change to one of their fields is a change of `PROTOCOL`."""

_AGAIN = ("EnvSpec", "Stage", "ImageConfig", "Unenforced")
"""Those of them that come again and again. Nothing ever changes one."""
_AGAIN_KEPT = 1024  # values, each way
_AGAIN_MAX = 8 << 10  # bytes of one that is kept: what others send must not fill our memory

_known: dict[str, type[Any]] = {}
_again: set[type[Any]] = set()
_texts: dict[int, tuple[Any, bytes]] = {}  # by the identity of a value, which is held so that it stays its own
_values: dict[bytes, Any] = {}
_encoders: list[_Encoder] = []  # that nobody uses at the moment


def load_types() -> None:
    """Ahead of the first message, which would pay for it otherwise."""
    if _known:
        return
    for name in _MODULES:
        found = importlib.import_module(f"untax.{name}")
        own = [one for one in vars(found).values() if isinstance(one, type) and one.__module__ == found.__name__]
        _known.update({one.__name__: one for one in own if dataclasses.is_dataclass(one)})
    _again.update(_known[name] for name in _AGAIN)


def _kind(name: str) -> type[Any] | None:
    load_types()
    return _known.get(name)


_as_json = json.JSONEncoder(separators=(",", ":")).encode
_PLAIN = frozenset((type(None), bool, int, float, str))
_fields: dict[type[Any], tuple[str, ...]] = {}


def _fields_of(kind: type[Any]) -> tuple[str, ...] | None:
    """Of a data class that travels; None for everything else."""
    found = _fields.get(kind)
    if found is None and dataclasses.is_dataclass(kind) and _kind(kind.__name__) is kind:
        found = _fields[kind] = tuple(one.name for one in dataclasses.fields(kind))
    return found


class _Encoder:
    """JSON of one value after the other, with what JSON has no word for turned into what it has, one level at a time."""

    def __init__(self) -> None:
        self.attached: list[bytes] = []
        self._marks = 0  # that were left
        encoder = json.JSONEncoder(separators=(",", ":"), default=self._special, check_circular=False)
        made = getattr(json.encoder, "c_make_encoder", None)
        self._encode: Callable[[Any], str]
        if made is None:
            self._encode = encoder.encode
        else:  # as `JSONEncoder.encode` does it, which makes it anew for every text
            text_of = json.encoder.encode_basestring_ascii
            quick = made(None, self._special, text_of, None, encoder.key_separator, encoder.item_separator, False, False, True)
            self._encode = lambda value: "".join(quick(value, 0))

    def text(self, value: Any, marks: int = 0) -> str | None:
        """None when something in it begins as our marks do, which is looked for afterwards because hardly anything does. `marks` are known of."""
        self.attached, self._marks = [], marks
        try:
            text = self._encode(value)
        except UsageError:
            raise
        except (TypeError, ValueError, RecursionError) as exc:
            raise UsageError(f"{type(value).__name__} cannot be sent to or by a server: {exc}") from exc
        return text if text.count('"$') == self._marks else None

    def _special(self, value: Any) -> Any:
        kind = type(value)
        if (names := _fields_of(kind)) is not None:
            self._marks += 1
            if kind in _again and (text := _text_of(value)) is not None:
                self.attached.append(text)
                return {"$value": len(self.attached) - 1}
            return {"$type": kind.__name__, **{name: getattr(value, name) for name in names}}
        if isinstance(value, (bytes, bytearray, memoryview)):
            self._marks += 1
            self.attached.append(bytes(value))
            return {"$bytes": len(self.attached) - 1}
        if isinstance(value, Mapping):
            return dict(value)
        if isinstance(value, (set, frozenset)):
            return list(value)
        raise UsageError(f"{value!r} cannot be sent to or by a server")


def _quick(value: Any, marks: int = 0) -> tuple[str | None, list[bytes]]:
    """What an encoder that nobody else uses now makes of it, and the byte strings beside it."""
    try:
        encoder = _encoders.pop()
    except IndexError:
        encoder = _Encoder()
    try:
        return encoder.text(value, marks), encoder.attached
    finally:
        _encoders.append(encoder)


def _text_of(value: Any) -> bytes | None:
    """A value that comes again, as the bytes that it is known by; None for one that has to go along as others do."""
    known = _texts.get(id(value))
    if known is not None:
        return known[1]
    text, attached = _quick({"$type": type(value).__name__, **{name: getattr(value, name) for name in _fields_of(type(value)) or ()}}, 1)
    if text is None or attached or len(text) > _AGAIN_MAX:
        return None
    if len(_texts) >= _AGAIN_KEPT:
        _texts.clear()
    known = _texts[id(value)] = value, text.encode()
    return known[1]


def _packed(value: Any, attached: list[bytes]) -> Any:
    """The same by hand, value by value: for messages in which something begins as our marks do."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is not dict and (names := _fields_of(kind)) is not None:
        return {"$type": kind.__name__, **{name: _packed(getattr(value, name), attached) for name in names}}
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (bytes, bytearray, memoryview)):
        attached.append(bytes(value))
        return {"$bytes": len(attached) - 1}
    if isinstance(value, Mapping):
        for name in value:
            if not isinstance(name, str) or name.startswith("$"):
                return {"$items": [[_packed(name, attached), _packed(item, attached)] for name, item in value.items()]}
        return {name: _packed(item, attached) for name, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_packed(item, attached) for item in value]
    raise UsageError(f"{value!r} cannot be sent to or by a server")


def _unpacked(value: Any, attached: list[bytes], depth: int = 0) -> Any:
    """Lists come back as tuples: every value that travels is a frozen one."""
    if depth > _DEEPEST:
        raise ProtocolError("a message that is nested too deep")
    kind = type(value)
    if kind is list:
        return tuple([item if type(item) in _PLAIN else _unpacked(item, attached, depth + 1) for item in value])
    if kind is not dict:
        return value
    if "$bytes" in value:
        return _attachment(value["$bytes"], attached)
    if "$value" in value:
        return _value_of(_attachment(value["$value"], attached))
    if "$items" in value:
        return dict(_unpacked(pair, attached, depth + 1) for pair in value["$items"])
    fields = {name: item if type(item) in _PLAIN else _unpacked(item, attached, depth + 1) for name, item in value.items()}
    if "$type" not in fields:
        return fields
    name = fields.pop("$type")
    made = _kind(name) if isinstance(name, str) else None
    if made is None:
        raise ProtocolError(f"a message with a value of type {name!r}, which this release does not know")
    return made(**fields)


_decoder = json.JSONDecoder()


def _read(text: bytes) -> Any:
    """JSON. As a rule it begins at once and nothing comes after it; otherwise it is read by the book."""
    string = text.decode()
    if not string.startswith("{"):
        return json.loads(string)
    value, end = _decoder.raw_decode(string)
    return value if end == len(string) else json.loads(string)


def _attachment(index: Any, attached: list[bytes]) -> bytes:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(attached):
        raise ProtocolError(f"a message without its attachment {index!r}")
    return attached[index]


def _value_of(text: bytes) -> Any:
    """One that comes again: what these bytes stood for before, where they did."""
    known = _values.get(text)
    if known is None:
        known = _unpacked(_read(text), [])
        if type(known) not in _again:
            raise ProtocolError(f"a message with a {type(known).__name__} among the values that come again")
        if len(text) <= _AGAIN_MAX:
            if len(_values) >= _AGAIN_KEPT:
                _values.clear()
            _values[text] = known
    return known


# ---- whole messages ----


def encode(body: Mapping[str, Any], descriptors: int = 0) -> bytes:
    """One message with its header; names in it are strings. `UsageError` for one that is too large, or that nobody could read."""
    if body is KNOCK:
        return _KNOCK
    quick, attached = _quick(body)
    if quick is None:
        attached = []
        quick = _as_json(_packed(body, attached))
    text = quick.encode()
    sizes = struct.pack(f"<{len(attached)}I", *map(len, attached))
    rest = b"".join((_SIZES.pack(len(text), len(attached), descriptors), sizes, text, *attached))
    if len(rest) > MESSAGE_MAX or len(attached) > _ATTACHMENTS_MAX:
        raise UsageError(
            f"{len(rest) >> 20} MiB in {len(attached)} pieces for one request to a server, which takes {MESSAGE_MAX >> 20} MiB in "
            f"{_ATTACHMENTS_MAX}: put large files into the sandbox with upload(), or into the image"
        )
    return _SIZE.pack(len(rest)) + rest


def decode(message: bytes) -> tuple[Body, int]:
    """The body of a message without its length, and how many descriptors belong to it."""
    if len(message) < _SIZES.size:
        raise ProtocolError("a message that is too short")
    text_size, count, descriptors = _SIZES.unpack_from(message)
    at = _SIZES.size + _SIZE.size * count
    if count > _ATTACHMENTS_MAX or descriptors > 1 or at + text_size > len(message):
        raise ProtocolError("a message whose parts are larger than itself")
    sizes = struct.unpack_from(f"<{count}I", message, _SIZES.size)
    if at + text_size + sum(sizes) != len(message):
        raise ProtocolError("a message whose parts are not as large as itself")
    text = message[at : at + text_size]
    at += text_size
    attached = []
    for size in sizes:
        attached.append(message[at : at + size])
        at += size
    try:
        body = _unpacked(_read(text), attached)
    except ProtocolError:
        raise
    except (ValueError, TypeError, RecursionError, KeyError) as exc:  # UsageError of a spec among them
        raise ProtocolError(f"a message that cannot be read: {exc}") from exc
    if not isinstance(body, dict):
        raise ProtocolError("a message that is not an object")
    return body, descriptors


def packed(value: Mapping[str, Any]) -> bytes:
    """A mapping as one byte string of a message, for who looks into it later or not at all."""
    return encode(value)[_SIZE.size :]


def unpacked(data: bytes) -> Body:
    """The same again."""
    return decode(data)[0]


def plain(value: Mapping[str, Any]) -> bytes:
    """As `packed`, of what is JSON as it stands: for who looks at every part of it anyway, and need not have it made of ours before."""
    try:
        return _as_json(value).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise UsageError(f"{type(value).__name__} cannot be sent to a server: {exc}") from exc


def read_plain(data: bytes) -> Body:
    """The same again, lists for tuples."""
    try:
        value = _read(data)
    except (ValueError, RecursionError) as exc:
        raise ProtocolError(f"a message that cannot be read: {exc}") from exc
    if not isinstance(value, dict):
        raise ProtocolError("a message that is not an object")
    return value


KNOCK: Body = {"id": 0, "op": "knock"}
"""Has no answer: it only wakes who is about to be asked for something."""
_KNOCK = encode({**KNOCK})


class Framer:
    """Cuts a byte stream into messages; keeps at most one unfinished one."""

    def __init__(self, most: Callable[[], int] = lambda: MESSAGE_MAX) -> None:
        self._most = most
        self._kept = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        if not self._kept and len(received) >= _SIZE.size and len(received) - _SIZE.size == _SIZE.unpack_from(received)[0]:
            self._check(len(received) - _SIZE.size)
            yield received[_SIZE.size :]  # as a rule it is one message
            return
        self._kept += received
        while len(self._kept) >= _SIZE.size:
            size = _SIZE.unpack_from(self._kept)[0]
            self._check(size)
            if len(self._kept) < _SIZE.size + size:
                return
            message = bytes(self._kept[_SIZE.size : _SIZE.size + size])
            del self._kept[: _SIZE.size + size]
            yield message

    def _check(self, size: int) -> None:
        if not _SIZES.size <= size <= self._most():
            raise ProtocolError(f"a message of {size} bytes: allowed are {_SIZES.size} to {self._most()}")


# ---- errors ----


def error_data(exc: UntaxError) -> Body:
    """An error by the name of its class, with what it was made of."""
    data: Body = {"kind": type(exc).__name__, "args": list(exc.args)}
    if isinstance(exc, OSError):
        data["filename"] = exc.filename
    return data


def error_of(data: Any) -> UntaxError:
    """The same error; one that this release does not know is a `BackendError` that says its name."""
    from untax.core import errors

    try:
        kind, args = getattr(errors, data["kind"]), list(data["args"])
        if not issubclass(kind, UntaxError):
            raise TypeError
        if issubclass(kind, OSError) and data.get("filename") is not None:
            args.append(data["filename"])
        error: UntaxError = kind(*args)
    except (AttributeError, TypeError, KeyError, ValueError):
        return errors.BackendError("", f"the server failed: {str(data)[:2000]}")
    return error
