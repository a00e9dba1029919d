"""What comes in a request's body: as much as is allowed, and JSON that means one thing only."""

from __future__ import annotations

import json
import math
from typing import Any

from starlette.requests import ClientDisconnect, Request

from untax.service.errors import Refused

JSON_MAX = 4 << 20
"""Bytes of a JSON body: many variables and small files. Larger content goes through the file routes."""
BODY_MAX = 64 << 20
"""Bytes of any other body, and of a file that is written in one request."""


async def read_body(request: Request, most: int = BODY_MAX) -> bytes:
    """All of it; `Refused` with 413 as soon as it is known to be larger than `most`, without reading on."""
    announced = request.headers.get("content-length")
    if announced is not None and announced.isascii() and announced.isdigit() and (len(announced) > 18 or int(announced) > most):
        raise too_large(most)
    pieces, size = [], 0
    try:
        async for piece in request.stream():
            size += len(piece)
            if size > most:
                raise too_large(most)
            pieces.append(piece)
    except ClientDisconnect:
        raise Refused(400, "Disconnected", "the connection ended before its request did") from None
    return b"".join(pieces)


async def read_json(request: Request, most: int = JSON_MAX) -> dict[str, Any]:
    """The object that the body is; nothing at all is an empty one. `Refused` with 400 for whatever else."""
    return parse_json(await read_body(request, most))


def parse_json(data: bytes) -> dict[str, Any]:
    if not data.strip():
        return {}
    try:
        text = data.decode()  # `json` itself would let halves of characters through
        found = json.loads(text, object_pairs_hook=_object, parse_constant=_constant, parse_float=_number, parse_int=_whole)
        if b"\\u" in data:
            json.dumps(found, ensure_ascii=False).encode()  # `"\\ud800"` is no text that anything could be done with
    except Refused:
        raise
    except (ValueError, RecursionError) as exc:  # a hundred thousand brackets among them
        raise _bad(str(exc)) from None
    if not isinstance(found, dict):
        raise _bad("it is not an object")
    return found


def too_large(most: int) -> Refused:
    return Refused(413, "TooLarge", f"the body of this request may have {most} bytes")


def _bad(why: str) -> Refused:
    return Refused(400, "BadRequest", f"the body is not JSON as it is wanted here: {why}")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _bad("a name stands in one object twice")
    return found


def _constant(text: str) -> float:
    raise _bad(f"{text} is not a number in JSON")


def _number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise _bad(f"the number {text[:20]} is too large")
    return value


def _whole(text: str) -> int:
    if len(text) > 20:
        raise _bad(f"the number {text[:20]}… is too large")
    return int(text)
