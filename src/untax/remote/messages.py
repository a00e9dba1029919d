"""What a client and a server say to each other, as bytes; no sockets. `docs/serve.md` describes it.

A message is a JSON object with a list of byte strings beside it, so that files and logs travel as they are. How messages get across is
a transport's business: a Unix socket cuts them by the header below, a WebSocket or an HTTP body would by its own framing. Neither side
believes the other's lengths before they are checked, and whatever cannot be read is a `ProtocolError`.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from struct import Struct
from typing import Any

from untax.core.errors import ProtocolError, UntaxError, UsageError

PROTOCOL = 1
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

_known: dict[str, type[Any]] = {}


def load_types() -> None:
    """Ahead of the first message, which would pay for it otherwise."""
    if _known:
        return
    for name in _MODULES:
        found = importlib.import_module(f"untax.{name}")
        own = [one for one in vars(found).values() if isinstance(one, type) and one.__module__ == found.__name__]
        _known.update({one.__name__: one for one in own if dataclasses.is_dataclass(one)})


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


def _packed(value: Any, attached: list[bytes]) -> Any:
    kind = type(value)  # first by what most values are: a lease is some two hundred of them
    if kind in _PLAIN:
        return value
    if kind is not dict and (names := _fields_of(kind)) is not None:
        packed = {"$type": kind.__name__}
        for name in names:
            packed[name] = _packed(getattr(value, name), attached)
        return packed
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
        index = value["$bytes"]
        if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < len(attached):
            raise ProtocolError(f"a message without its attachment {index!r}")
        return attached[index]
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


# ---- whole messages ----


def encode(body: Mapping[str, Any], descriptors: int = 0) -> bytes:
    """One message with its header. `UsageError` for one that is too large, or that nobody could read."""
    attached: list[bytes] = []
    packed = _packed(body, attached)
    text = _as_json(packed).encode()
    sizes = b"".join(_SIZE.pack(len(one)) for one in attached)
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
    sizes = [_SIZE.unpack_from(message, _SIZES.size + _SIZE.size * index)[0] for index in range(count)]
    if at + text_size + sum(sizes) != len(message):
        raise ProtocolError("a message whose parts are not as large as itself")
    text = message[at : at + text_size]
    at += text_size
    attached = []
    for size in sizes:
        attached.append(message[at : at + size])
        at += size
    try:
        body = _unpacked(json.loads(text), attached)
    except ProtocolError:
        raise
    except (ValueError, TypeError, RecursionError, KeyError) as exc:  # UsageError of a spec among them
        raise ProtocolError(f"a message that cannot be read: {exc}") from exc
    if not isinstance(body, dict):
        raise ProtocolError("a message that is not an object")
    return body, descriptors


class Framer:
    """Cuts a byte stream into messages; keeps at most one unfinished one."""

    def __init__(self, most: Callable[[], int] = lambda: MESSAGE_MAX) -> None:
        self._most = most
        self._kept = bytearray()

    def feed(self, received: bytes) -> Iterator[bytes]:
        self._kept += received
        while len(self._kept) >= _SIZE.size:
            size = _SIZE.unpack_from(self._kept)[0]
            if not _SIZES.size <= size <= self._most():
                raise ProtocolError(f"a message of {size} bytes: allowed are {_SIZES.size} to {self._most()}")
            if len(self._kept) < _SIZE.size + size:
                return
            message = bytes(self._kept[_SIZE.size : _SIZE.size + size])
            del self._kept[: _SIZE.size + size]
            yield message


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
