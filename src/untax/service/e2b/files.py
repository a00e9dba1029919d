"""Files over plain HTTP: `GET /files` and `POST /files` of a sandbox, by its token or by a signature in the URL."""

from __future__ import annotations

import gzip
import json
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from typing import TYPE_CHECKING

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse

from untax.core.errors import IsDirectory
from untax.service.e2b.filesystem import Filesystem
from untax.service.e2b.multipart import Bad, Multipart, Part, boundary_in
from untax.service.e2b.signature import Operation, refusal
from untax.service.errors import Refused

if TYPE_CHECKING:
    from untax.service.e2b.sandbox import Sandbox

PIECE = 1 << 20
_METADATA = "x-metadata-"
_METADATA_MAX = 4096  # bytes of all keys and values, with the name space counted for each
_KEY_MAX = 246
_PARTS_MAX = 10_000


def signed(sandbox: Sandbox, request: Request, operation: Operation) -> bool:
    """Whether the URL carries a signature that holds; `Refused` with 401 for one that does not, False for none."""
    query = request.query_params
    signature = query.get("signature")
    if signature is None:
        return False
    why = refusal(
        signature,
        query.get("path", ""),
        operation,
        query.get("username", ""),
        sandbox.token,
        query.get("signature_expiration"),
        time.time(),
    )
    if why is not None:
        raise Refused(401, "Unauthorized", why)
    return True


async def download(files: Filesystem, sandbox: Sandbox, request: Request) -> Response:
    path = files.path(request.query_params.get("path", ""))
    box = sandbox.box
    entry = await box.stat(path)
    if entry.is_dir:
        raise IsDirectory(21, "Is a directory", path)
    first = await box.read(path, limit=PIECE)
    headers = {"content-disposition": "inline", "vary": "accept-encoding"}
    is_packed = _takes_gzip(request.headers.get("accept-encoding", ""))
    if is_packed:
        headers["content-encoding"] = "gzip"
    if len(first) < PIECE:  # all of it
        return Response(gzip.compress(first, 1) if is_packed else first, 200, headers, "application/octet-stream")

    async def rest() -> AsyncIterator[bytes]:
        data, offset = first, 0
        while data:
            yield data
            offset += len(data)
            data = await box.read(path, offset=offset, limit=PIECE)

    return StreamingResponse(_packed(rest()) if is_packed else rest(), 200, headers, "application/octet-stream")


def _takes_gzip(header: str) -> bool:
    """Only where it is the first choice: an SDK that did not ask for it sends a list in which it stands among others."""
    wanted = [one.strip().lower() for one in header.split(",") if one.strip()]
    return wanted[:1] == ["gzip"] and len(wanted) == 1


async def _packed(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    async for piece in pieces:
        if packed := packer.compress(piece):
            yield packed
    yield packer.flush()


async def upload(files: Filesystem, request: Request) -> Response:
    """One file as the body itself, or several as parts of a form. Bodies pass through in pieces."""
    metadata = metadata_in(request.headers.items())
    path = request.query_params.get("path")
    try:
        boundary = boundary_in(request.headers.get("content-type", ""))
        body = _unpacked(request.stream(), request.headers.get("content-encoding", "").strip().lower())
        if boundary is None:
            if not path:
                raise Refused(400, "UsageError", "path is missing: it is needed for a body that is not a form")
            written = [await files.write(files.path(path), Pieces(body), metadata)]
        else:
            written = await _write_parts(files, _parts(body, Multipart(boundary)), path, metadata)
    except (Bad, zlib.error, EOFError) as exc:
        raise Refused(400, "UsageError", str(exc)) from None
    except ClientDisconnect:
        raise Refused(400, "Disconnected", "the connection ended before its request did") from None
    return Response(json.dumps(written), 200, media_type="application/json")


async def _write_parts(
    files: Filesystem, parts: AsyncIterator[Part | bytes], path: str | None, metadata: Mapping[str, str]
) -> list[dict[str, object]]:
    written: list[dict[str, object]] = []
    found = await anext(parts, None)
    while found is not None:
        assert isinstance(found, Part)
        if found.filename is None or len(written) >= _PARTS_MAX:
            raise Refused(400, "UsageError", "a part without a file name, or too many of them")
        pieces = Pieces(parts)
        written.append(await files.write(files.path(path or found.filename), pieces, metadata))
        found = pieces.following
    return written


def metadata_in(headers: list[tuple[str, str]]) -> dict[str, str]:
    """What `X-Metadata-*` headers say; the first of each counts."""
    found: dict[str, str] = {}
    size = 0
    for name, value in headers:
        if not name.startswith(_METADATA):
            continue
        key = name[len(_METADATA) :]
        if not key or len(key) > _KEY_MAX or "=" in key or not all(" " <= c <= "~" for c in key + value):
            raise Refused(400, "UsageError", f"metadata {key!r} must be printable ASCII, its key at most {_KEY_MAX} bytes and without '='")
        if key not in found:
            found[key] = value
            size += len("user.e2b.") + len(key) + len(value)
    if size > _METADATA_MAX:
        raise Refused(400, "UsageError", f"metadata may take {_METADATA_MAX} bytes altogether")
    return found


async def _unpacked(body: AsyncIterator[bytes], encoding: str) -> AsyncGenerator[bytes, None]:
    if encoding in ("", "identity"):
        async for piece in body:
            yield piece
        return
    if encoding != "gzip":
        raise Refused(415, "UsageError", f"content-encoding {encoding!r} is not taken: gzip or none")
    unpacker = zlib.decompressobj(31)
    async for piece in body:
        while piece:  # never more than a piece at once, however well it was packed
            yield unpacker.decompress(piece, PIECE)
            piece = unpacker.unconsumed_tail
    if rest := unpacker.flush():
        yield rest
    if not unpacker.eof:
        raise Bad("the packed body is cut off")


async def _parts(body: AsyncIterator[bytes], form: Multipart) -> AsyncIterator[Part | bytes]:
    async for piece in body:
        for found in form.feed(piece):
            yield found
    form.finish()


class Pieces:
    """A body in pieces that fit a frame."""

    def __init__(self, source: AsyncIterator[Part | bytes]) -> None:
        self._source = source
        self._kept = b""
        self._is_over = False
        self.following: Part | None = None
        """Of a form: the part after this one, once all of it has been taken."""

    async def take(self) -> bytes:
        """The next piece, `PIECE` bytes but for the last; empty when there is none."""
        parts, size = [self._kept], len(self._kept)
        while size < PIECE and not self._is_over:
            found = await anext(self._source, None)
            if isinstance(found, bytes):
                parts.append(found)
                size += len(found)
            else:
                self._is_over, self.following = True, found
        whole = b"".join(parts)
        self._kept = whole[PIECE:]
        return whole[:PIECE]
