"""One small document of a server over HTTP, by a connection of its own: for those who look at many servers now and then."""

from __future__ import annotations

import asyncio
import ssl

from untax.core.errors import BackendError, UsageError
from untax.remote.web import WebAddress, tls_of

_HEAD_MAX = 64 << 10
BODY_MAX = 8 << 20


async def get(address: WebAddress, path: str, *, timeout_s: float = 5.0) -> bytes:
    """What `path` holds there. `BackendError` when nobody answers in time or the answer is none, `UsageError` when the token or the certificate is not right."""
    try:
        async with asyncio.timeout(timeout_s):
            return await _asked(address, path)
    except TimeoutError:
        raise BackendError("", f"the server at {address} did not answer within {timeout_s:g} s") from None
    except ssl.SSLCertVerificationError as exc:
        raise UsageError(f"{address}: its certificate is not trusted ({exc.verify_message})") from exc
    except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as exc:
        raise BackendError("", f"no server answers at {address} ({getattr(exc, 'strerror', None) or exc})") from exc


async def _asked(address: WebAddress, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=tls_of(address), limit=_HEAD_MAX)
    try:
        host = f"[{address.host}]" if ":" in address.host else address.host
        lines = [f"GET {address.path}{path} HTTP/1.1", f"Host: {host}:{address.port}", "Connection: close"]
        if address.token:
            lines.append(f"Authorization: Bearer {address.token}")
        writer.write("\r\n".join([*lines, "", ""]).encode())
        status, length = _read_head(address, await reader.readuntil(b"\r\n\r\n"))
        if status in (401, 403):
            raise UsageError(f"{address} does not take this token")
        if status != 200 or length > BODY_MAX:
            raise BackendError("", f"{address}{path}: answered {status} with {length} bytes")
        return await reader.readexactly(length)
    finally:
        writer.close()


def _read_head(address: WebAddress, head: bytes) -> tuple[int, int]:
    """Status and length; our own servers give both."""
    first, *rest = head.decode("latin-1").split("\r\n")
    fields = dict(line.lower().split(":", 1) for line in rest if ":" in line)
    try:
        return int(first.split()[1]), int(fields["content-length"])
    except (IndexError, KeyError, ValueError) as exc:
        raise BackendError("", f"{address}: an answer that is none: {first[:80]!r}") from exc
