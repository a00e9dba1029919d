"""QEMU's monitor protocol (QMP), as much of it as is needed. What is at the other end may have been taken over: nothing it says is trusted."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from typing import Any

from untax.core.errors import BackendError

_MONITOR_MAX = 1 << 20  # of one message; a whole console is 90 KB


class Monitor:
    """QMP over a socket: questions in turn, and events between the answers."""

    def __init__(self, sock: socket.socket, on_event: Callable[[str, Mapping[str, Any]], None]) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._on_event = on_event
        self._loop = asyncio.get_running_loop()
        self._buffer = b""
        self._waiting: list[asyncio.Future[Any]] = []
        self._loop.add_reader(sock, self._readable)
        self._is_closed = False
        self._asked("qmp_capabilities", {}, None)  # from then on it tells of events

    async def ask(self, command: str, **arguments: Any) -> Any:
        """`BackendError` when it refuses, or has ended."""
        return await self._asked(command, arguments, None)

    def tell(self, command: str, **arguments: Any) -> None:
        """As `ask`, without waiting for the answer."""
        self._asked(command, arguments, None)

    async def give(self, name: str, fd: int) -> None:
        """Hand it a descriptor under a name."""
        await self._asked("getfd", {"fdname": name}, fd)

    def _asked(self, command: str, arguments: Mapping[str, Any], fd: int | None) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())  # heard, whoever waits for it
        data = json.dumps({"execute": command, "arguments": arguments}).encode() + b"\n"
        try:
            if self._is_closed:
                raise OSError
            if fd is None:
                self._sock.send(data)
            else:
                socket.send_fds(self._sock, [data], [fd])
        except OSError:
            answer.set_exception(BackendError("", "QEMU's monitor does not answer"))
        else:
            self._waiting.append(answer)
        return answer

    def _readable(self) -> None:
        try:
            data = self._sock.recv(1 << 16)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        try:
            if len(self._buffer) > _MONITOR_MAX:
                raise ValueError
            for line in lines:
                if line.strip():
                    self._take(json.loads(line))
        except (ValueError, TypeError, AttributeError):  # not QMP: whoever broke out into it is not listened to
            self.close()

    def _take(self, message: Mapping[str, Any]) -> None:
        if "event" in message:
            self._on_event(message["event"], message.get("data") or {})
        elif "QMP" not in message and self._waiting:
            answer = self._waiting.pop(0)
            if answer.done():
                return
            if "error" in message:
                answer.set_exception(BackendError("", f"QEMU: {message['error'].get('desc')}"))
            else:
                answer.set_result(message.get("return"))

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._loop.remove_reader(self._sock)
        self._sock.close()
        waiting, self._waiting = self._waiting, []
        for answer in waiting:
            if not answer.done():
                answer.set_exception(BackendError("", "QEMU has ended"))
