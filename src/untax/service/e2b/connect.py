"""Connect's JSON encoding: messages, envelopes of a stream, errors. No I/O.

A unary call is one JSON object each way, an error an HTTP status with `{"code", "message"}`. A stream is a run of envelopes,
each one flag byte and a big-endian length before its JSON; the last one has the flag `END` and either nothing or the error in it.
"""

from __future__ import annotations

import base64
import binascii
import json
import struct
from collections.abc import Iterator, Mapping
from typing import Any

from untax.core.errors import (
    ActionTimeout,
    DiskFull,
    Exists,
    FileError,
    Gone,
    IsDirectory,
    NotDirectory,
    NotFound,
    PermissionDenied,
    PoolError,
    SandboxLost,
    SpawnFailed,
    SubstrateError,
    TooLarge,
    UntaxError,
    UsageError,
)

UNARY, STREAM = "application/json", "application/connect+json"
MESSAGE_MAX = 8 << 20  # bytes of one message; input to a process comes in pieces far below
_COMPRESSED, _END = 1, 2
_HEAD = struct.Struct(">BI")
_STATUS = {
    "canceled": 499,
    "unknown": 500,
    "invalid_argument": 400,
    "deadline_exceeded": 504,
    "not_found": 404,
    "already_exists": 409,
    "permission_denied": 403,
    "resource_exhausted": 429,
    "failed_precondition": 400,
    "aborted": 409,
    "unimplemented": 501,
    "internal": 500,
    "unavailable": 503,
    "unauthenticated": 401,
}

Message = dict[str, Any]


class RpcError(Exception):
    """What a call is answered with instead of its result; `code` is one of Connect's."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        assert code in _STATUS
        self.code = code
        self.message = message

    @property
    def status(self) -> int:
        return _STATUS[self.code]

    @property
    def body(self) -> Message:
        return {"code": self.code, "message": self.message}


_BY_ERROR: tuple[tuple[type[UntaxError], str], ...] = (
    (NotFound, "not_found"),
    (Gone, "not_found"),
    (Exists, "already_exists"),
    (PermissionDenied, "permission_denied"),
    (NotDirectory, "invalid_argument"),
    (IsDirectory, "invalid_argument"),
    (DiskFull, "resource_exhausted"),
    (TooLarge, "resource_exhausted"),
    (FileError, "failed_precondition"),  # busy, read-only, too many links: the sandbox's own affair
    (UsageError, "invalid_argument"),
    (ActionTimeout, "deadline_exceeded"),
    (SandboxLost, "unavailable"),
    (PoolError, "unavailable"),
    (SpawnFailed, "resource_exhausted"),  # the sandbox stands, and has no process or memory left to start one with
    (SubstrateError, "internal"),
)


def rpc_error(exc: UntaxError) -> RpcError:
    """How Connect says what an action raised."""
    code = next((code for kind, code in _BY_ERROR if isinstance(exc, kind)), "unknown")
    said = f"{exc.filename}: {exc.strerror}" if isinstance(exc, FileError) and exc.filename else str(exc)
    return RpcError(code, said)


def load(raw: bytes) -> Message:
    """One message; `RpcError` for what is none."""
    if len(raw) > MESSAGE_MAX:
        raise RpcError("resource_exhausted", f"a message of more than {MESSAGE_MAX} bytes")
    try:
        message = json.loads(raw or b"{}", parse_constant=_no_number)
        if b"\\u" in raw:
            json.dumps(message, ensure_ascii=False).encode()  # half a character is no text that anything could be done with
    except (ValueError, RecursionError) as exc:
        raise RpcError("invalid_argument", f"not a JSON message: {type(exc).__name__}") from None
    if not isinstance(message, dict):
        raise RpcError("invalid_argument", "a message is a JSON object")
    return message


def _no_number(text: str) -> float:
    raise ValueError(f"{text} is no JSON")


def dump(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode()


def envelope(message: Mapping[str, Any]) -> bytes:
    body = dump(message)
    return _HEAD.pack(0, len(body)) + body


def end(error: RpcError | None = None) -> bytes:
    """The last envelope of a stream."""
    body = dump({"error": error.body} if error is not None else {})
    return _HEAD.pack(_END, len(body)) + body


class Envelopes:
    """Bytes as they come, to the messages of a stream."""

    def __init__(self) -> None:
        self._have = bytearray()

    def feed(self, data: bytes) -> Iterator[Message]:
        """The messages that are whole now; `RpcError` for what breaks the framing."""
        self._have += data
        while len(self._have) >= _HEAD.size:
            flags, size = _HEAD.unpack_from(self._have)
            if flags & _COMPRESSED:
                raise RpcError("unimplemented", "compressed messages are not taken: send Connect-Accept-Encoding identity")
            if size > MESSAGE_MAX:
                raise RpcError("resource_exhausted", f"a message of more than {MESSAGE_MAX} bytes")
            if len(self._have) < _HEAD.size + size:
                return
            body = bytes(self._have[_HEAD.size : _HEAD.size + size])
            del self._have[: _HEAD.size + size]
            if not flags & _END:
                yield load(body)

    def finish(self) -> None:
        if self._have:
            raise RpcError("invalid_argument", "the stream ended within a message")


# ---- fields, as the JSON mapping of protocol buffers writes them ----


def text_field(message: Message, name: str) -> str:
    value = message.get(name, "")
    if not isinstance(value, str):
        raise RpcError("invalid_argument", f"{name} is not a string")
    return value


def flag_field(message: Message, name: str, *, default: bool = False) -> bool:
    value = message.get(name, default)
    if not isinstance(value, bool):
        raise RpcError("invalid_argument", f"{name} is not a boolean")
    return value


def number_field(message: Message, name: str) -> int:
    """An unsigned integer; 64-bit ones come as strings."""
    value = message.get(name, 0)
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 20:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 64:
        raise RpcError("invalid_argument", f"{name} is not an unsigned number")
    return value


def object_field(message: Message, name: str) -> Message:
    value = message.get(name) or {}
    if not isinstance(value, dict):
        raise RpcError("invalid_argument", f"{name} is not an object")
    return value


def bytes_field(message: Message, name: str) -> bytes:
    value = message.get(name, "")
    try:
        if not isinstance(value, str):
            raise TypeError
        return base64.b64decode(value.replace("-", "+").replace("_", "/"), validate=True)
    except (TypeError, binascii.Error):
        raise RpcError("invalid_argument", f"{name} is not base64") from None


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()
