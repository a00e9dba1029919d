"""A pod exec over one WebSocket: the cell's held stream, and one command at a time.

The protocol is `v4.channel.k8s.io`: binary messages whose first byte names a stream. An API server passes it on to the node as it is,
while it translates v5, whose one gain is that standard input can be closed (docs/decisions/0010). Frames are read and written in the
transport's own callbacks, without a task or a queue between the socket and the channel.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import secrets
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

from untax.core.errors import BackendError
from untax.substrates._kubernetes_access import Access
from untax.substrates._kubernetes_api import dial, head, path_of, refusal

_STDIN, _STDOUT, _STDERR, _STATUS = 0, 1, 2, 3
_PROTOCOL = "v4.channel.k8s.io"
_OPENING_S = 15.0
_HEAD_MAX = 64 << 10
_MESSAGE_MAX = 4 << 20
# A mask keeps a browser's bytes from being read as HTTP by a cache on the way. Here TLS ends at the API server, and
# zeros are a mask that costs nothing.
_MASK = bytes(4)


class Exec(asyncio.Protocol):
    """One exec. `on_out`, `on_err` get output as it comes; `on_end` is called once, with the pod's word on how it ended or None."""

    def __init__(
        self,
        on_out: Callable[[bytes], None],
        on_err: Callable[[bytes], None] | None = None,
        on_end: Callable[[dict[str, Any] | None, Exception | None], None] | None = None,
    ) -> None:
        self._on_out = on_out
        self._on_err = on_err
        self._on_end = on_end
        self._transport: asyncio.Transport | None = None
        self._upgraded: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._answer = b""
        self._is_open = False
        self._got = bytearray()
        self._stream = -1  # of the message whose parts are coming
        self._status: dict[str, Any] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._ended = False

    # ---- opening ----

    @classmethod
    async def open(
        cls, access: Access, namespace: str, pod: str, container: str, argv: Sequence[str], *, stdin: bool, **callbacks: Any
    ) -> Exec:
        """Start `argv` in the pod. `ApiError` when the server says no, `OSError` when nobody answers."""
        query = {"container": container, "stdin": str(stdin).lower(), "stdout": "true", "stderr": "true", "command": list(argv)}
        path = path_of("api", "v1", "namespaces", namespace, "pods", pod, "exec", query=query)
        more = {
            "Accept": "*/*",
            "Connection": "Upgrade",
            "Upgrade": "websocket",
            "Sec-WebSocket-Version": "13",
            "Sec-WebSocket-Key": base64.b64encode(secrets.token_bytes(16)).decode(),
            "Sec-WebSocket-Protocol": _PROTOCOL,
        }
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(_OPENING_S):
                credentials = await access.headers()
                sock = await dial(access)
                opened = cls(**callbacks)
                try:
                    await loop.create_connection(lambda: opened, sock=sock, ssl=access.context(), server_hostname=access.server_hostname)
                    assert opened._transport is not None
                    opened._transport.write(head(access, "GET", path, credentials, more))
                    await opened._upgraded
                except BaseException:
                    opened.close()
                    sock.close()
                    raise
        except TimeoutError:
            raise BackendError("", f"the API server {access.server} did not open an exec within {_OPENING_S:g} s") from None
        return opened

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=256 << 10, low=0)

    def _take_answer(self, data: bytes) -> None:
        self._answer += data
        first, found, rest = self._answer.partition(b"\r\n\r\n")
        if not found:
            if len(self._answer) > _HEAD_MAX:
                self._fail_opening(OSError("an answer's head is too long"))
            return
        lines = first.decode("latin-1").split("\r\n")
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
        status = int(lines[0].split(" ")[1])
        if status != 101:
            # The body says why; it may come with the head, or behind it.
            size = int(headers.get("content-length", "0") or 0)
            if len(rest) >= size or len(rest) > _HEAD_MAX:
                self._fail_opening(refusal(status, rest))
            return
        self._answer = b""
        self._is_open = True
        if not self._upgraded.done():
            self._upgraded.set_result(None)
        if rest:
            self.data_received(rest)

    def _fail_opening(self, exc: Exception) -> None:
        if not self._upgraded.done():
            self._upgraded.set_exception(exc)
        self.close()

    # ---- what arrives ----

    def data_received(self, data: bytes) -> None:
        if not self._is_open:
            self._take_answer(data)
            return
        if self._got:
            self._got += data
            data = bytes(self._got)
            self._got.clear()
        at, end = 0, len(data)
        while end - at >= 2 and not self._ended:
            size, start = data[at + 1] & 0x7F, at + 2
            if size == 126:
                if end - at < 4:
                    break
                size, start = int.from_bytes(data[at + 2 : at + 4], "big"), at + 4
            elif size == 127:
                if end - at < 10:
                    break
                size, start = int.from_bytes(data[at + 2 : at + 10], "big"), at + 10
            if size > _MESSAGE_MAX or data[at + 1] & 0x80:
                self._end(None, OSError("a WebSocket frame that breaks the rules"))
                return
            if end - start < size:
                break
            self._frame(data[at], data[start : start + size])
            at = start + size
        if at < end and not self._ended:
            self._got += data[at:]

    def _frame(self, first: int, payload: bytes) -> None:
        code = first & 0x0F
        if code == 2 or code == 1:
            if payload:
                self._stream = payload[0]
                self._message(payload[1:])
        elif code == 0:
            self._message(payload)
        elif code == 9:
            self._send(0x8A, payload)
        elif code == 8:
            self._end(self._status, None)

    def _message(self, data: bytes) -> None:
        if self._stream == _STDOUT:
            if data:
                self._on_out(data)
        elif self._stream == _STDERR:
            if data and self._on_err is not None:
                self._on_err(data)
        elif self._stream == _STATUS and data:
            with contextlib.suppress(ValueError):
                status = json.loads(data)
                if isinstance(status, dict):
                    self._status = status
                    self._end(status, None)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._upgraded.done():
            self._upgraded.set_exception(exc or OSError("the API server hung up"))
        self._writable.set()
        self._end(self._status, exc)

    def _end(self, status: dict[str, Any] | None, exc: Exception | None) -> None:
        if self._ended:
            return
        self._ended = True
        if self._transport is not None:
            self._transport.abort()
        if self._on_end is not None:
            self._on_end(status, exc)

    # ---- what is sent ----

    def _send(self, first: int, payload: bytes) -> None:
        if self._transport is None or self._transport.is_closing():
            return
        size = len(payload)
        if size < 126:
            length = bytes((first, 0x80 | size))
        elif size < 1 << 16:
            length = struct.pack(">BBH", first, 0x80 | 126, size)
        else:
            length = struct.pack(">BBQ", first, 0x80 | 127, size)
        self._transport.write(length + _MASK + payload)

    def write(self, data: bytes) -> None:
        self._send(0x82, bytes((_STDIN,)) + data)

    @property
    def write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    async def drain(self) -> None:
        await self._writable.wait()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def pause_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def close(self) -> None:
        """End the connection; nothing is called any more."""
        self._ended = True
        self._writable.set()
        if self._upgraded.done() and not self._upgraded.cancelled():
            self._upgraded.exception()  # looked at, or the loop complains
        if self._transport is not None:
            self._transport.abort()


def exit_code_of(status: dict[str, Any]) -> int | None:
    """The command's exit status; None when it never ran, or nobody knows."""
    if status.get("status") == "Success":
        return 0
    if status.get("reason") != "NonZeroExitCode":
        return None
    for cause in (status.get("details") or {}).get("causes") or ():
        if cause.get("reason") == "ExitCode" and str(cause.get("message", "")).isdigit():
            return int(cause["message"])
    return None
