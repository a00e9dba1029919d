"""envd's process service: what runs in one sandbox, and who listens to it.

A process belongs to its sandbox, not to the request that started it: a client that goes away leaves it running, and another may listen to
it by its pid. What nobody listens to is thrown away, as envd does. A listener that does not take what it is sent holds the process up
(256 KiB in the cell, `_AHEAD` here), and its deadline ends it nevertheless.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from untax.channel.process import Process
from untax.core.errors import UntaxError, UsageError
from untax.core.result import CommandResult
from untax.service.e2b.connect import (
    Message,
    RpcError,
    bytes_field,
    flag_field,
    number_field,
    object_field,
    rpc_error,
    text_field,
    text_of,
)
from untax.service.e2b.models import Account, end_event, resolved

if TYPE_CHECKING:
    from untax.service.e2b.sandbox import Sandbox

_AHEAD = 1 << 20  # bytes kept for one listener that does not take them
_SIGNALS = {"SIGNAL_SIGTERM": 15, "SIGNAL_SIGKILL": 9, 15: 15, 9: 9}
_RUNNING_MAX = 1000


class Listener:
    """One stream's share of what a process prints."""

    def __init__(self) -> None:
        self.is_gone = False
        self._events: deque[tuple[str, bytes] | CommandResult | RpcError] = deque()
        self._size = 0
        self._come = asyncio.Event()
        self._taken = asyncio.Event()

    async def put(self, kind: str, data: bytes, ended: asyncio.Future[None]) -> None:
        """Waits while too much is kept already, unless the process has ended: then there is no more of it than the cell's window."""
        while self._size > _AHEAD and not self.is_gone and not ended.done():
            self._taken.clear()
            taken = asyncio.ensure_future(self._taken.wait())
            await asyncio.wait((taken, ended), return_when=asyncio.FIRST_COMPLETED)
            taken.cancel()
        if not self.is_gone:
            self._size += len(data)
            self.tell((kind, data))

    def tell(self, event: tuple[str, bytes] | CommandResult | RpcError) -> None:
        self._events.append(event)
        self._come.set()

    async def next(self) -> tuple[str, bytes] | CommandResult | RpcError:
        while not self._events:
            self._come.clear()
            await self._come.wait()
        event = self._events.popleft()
        if isinstance(event, tuple):
            self._size -= len(event[1])
            self._taken.set()
        return event

    def leave(self) -> None:
        self.is_gone = True
        self._events.clear()
        self._taken.set()


@dataclass(eq=False)
class Running:
    """One process, as it was asked for."""

    process: Process
    config: Message
    tag: str | None
    is_pty: bool
    has_stdin: bool
    listeners: set[Listener] = field(default_factory=set)
    task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return self.process.pid

    def listen(self) -> Listener:
        listener = Listener()
        self.listeners.add(listener)
        return listener


class Processes:
    """Those of one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._running: dict[int, Running] = {}

    # ---- calls ----

    async def list(self, _: Message) -> Message:
        processes = [
            {"config": one.config, "pid": one.pid, **({"tag": one.tag} if one.tag is not None else {})} for one in self._running.values()
        ]
        return {"processes": processes}

    async def send_input(self, message: Message) -> Message:
        await self._write(self._selected(message), object_field(message, "input"))
        return {}

    async def close_stdin(self, message: Message) -> Message:
        found = self._selected(message)
        if found.is_pty:
            raise RpcError("failed_precondition", "a terminal has no end of input: send 0x04")
        found.process.close_stdin()
        return {}

    async def send_signal(self, message: Message) -> Message:
        found = self._selected(message)
        signal = message.get("signal")
        number = _SIGNALS.get(signal) if isinstance(signal, (str, int)) else None
        if number is None:
            raise RpcError("invalid_argument", "signal is not SIGNAL_SIGTERM or SIGNAL_SIGKILL")
        await found.process.signal(number, group=number == _SIGNALS["SIGNAL_SIGKILL"])
        return {}

    async def update(self, message: Message) -> Message:
        found = self._selected(message)
        if pty := object_field(message, "pty"):
            if not found.is_pty:
                raise RpcError("failed_precondition", "the process has no terminal")
            await found.process.resize(*_size(pty))
        return {}

    async def stream_input(self, messages: AsyncIterator[Message]) -> Message:
        found: Running | None = None
        async for message in messages:
            if "start" in message:
                found = self._selected(object_field(message, "start"))
            elif "data" in message:
                if found is None:
                    raise RpcError("invalid_argument", "data before the start event")
                await self._write(found, object_field(object_field(message, "data"), "input"))
        return {}

    # ---- streams ----

    async def start(self, message: Message, account: Account, timeout_s: float | None, ping_s: float) -> AsyncIterator[Message]:
        """Start one, and give its events; `RpcError` before the first when it could not be started."""
        if len(self._running) >= _RUNNING_MAX:
            raise RpcError("resource_exhausted", f"{_RUNNING_MAX} processes are running in the sandbox already")
        running = await self._started(message, account, timeout_s)
        listener = running.listen()
        running.task = asyncio.ensure_future(self._pump(running))
        return self._events(running, listener, None, ping_s)

    async def connect(self, message: Message, timeout_s: float | None, ping_s: float) -> AsyncIterator[Message]:
        running = self._selected(message)
        return self._events(running, running.listen(), timeout_s, ping_s)

    async def _started(self, message: Message, account: Account, timeout_s: float | None) -> Running:
        sandbox = self._sandbox
        config = object_field(message, "process")
        command, arguments = text_field(config, "cmd"), config.get("args") or []
        if not command or not isinstance(arguments, list) or not all(isinstance(one, str) for one in arguments):
            raise RpcError("invalid_argument", "process.cmd is missing, or process.args are not strings")
        given = object_field(config, "envs")
        if not all(isinstance(value, str) for value in given.values()):
            raise RpcError("invalid_argument", "process.envs are not strings")
        env: dict[str, str | None] = {
            "HOME": account.home, "USER": account.name, "LOGNAME": account.name,
            "E2B_SANDBOX": "true", "E2B_SANDBOX_ID": sandbox.id, "E2B_TEMPLATE_ID": sandbox.manner.template,
            **sandbox.env, **given,
        }  # fmt: skip
        cwd = resolved(text_field(config, "cwd"), account.home, sandbox.manner.workdir)
        pty = object_field(message, "pty")
        has_stdin = bool(pty) or flag_field(message, "stdin", default=True)
        argv = [command, *arguments]
        try:
            if pty:
                rows, cols = _size(pty)
                process = await sandbox.box.start(
                    argv,
                    cwd=cwd,
                    env={"TERM": "xterm", **env},
                    user=sandbox.user_for(account),
                    timeout_s=timeout_s,
                    pty=True,
                    rows=rows,
                    cols=cols,
                )
            else:
                process = await sandbox.box.start(
                    argv, cwd=cwd, env=env, user=sandbox.user_for(account), timeout_s=timeout_s, stdin=has_stdin
                )
        except OSError as exc:
            raise RpcError("invalid_argument", f"cwd {cwd!r}: {exc.strerror}") from None
        except UsageError as exc:
            raise RpcError("invalid_argument", str(exc)) from None
        tag = message.get("tag")
        running = Running(process, config, tag if isinstance(tag, str) else None, bool(pty), has_stdin)
        self._running[running.pid] = running
        return running

    async def _pump(self, running: Running) -> None:
        """Carry what it prints to whoever listens, and its end."""
        last: CommandResult | RpcError
        ended = asyncio.ensure_future(running.process.wait_exit())
        try:
            async for output in running.process:
                kind = "pty" if running.is_pty else output.stream
                for listener in tuple(running.listeners):
                    await listener.put(kind, output.data, ended)
            last = await running.process.wait()
        except UntaxError as exc:
            last = rpc_error(exc)
        finally:
            ended.cancel()
            await asyncio.gather(ended, return_exceptions=True)
            if self._running.get(running.pid) is running:
                del self._running[running.pid]
        if isinstance(last, CommandResult) and last.timed_out:
            last = RpcError("deadline_exceeded", "the process passed its deadline")
        for listener in running.listeners:
            listener.tell(last)

    async def _events(self, running: Running, listener: Listener, timeout_s: float | None, ping_s: float) -> AsyncIterator[Message]:
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout_s if timeout_s is not None else None
        try:
            yield {"event": {"start": {"pid": running.pid}}}
            while True:
                try:
                    async with asyncio.timeout(ping_s if until is None else min(ping_s, until - loop.time())):
                        event = await listener.next()
                except TimeoutError:
                    if until is not None and loop.time() >= until:
                        raise RpcError("deadline_exceeded", "the connection passed its deadline; the process goes on") from None
                    yield {"event": {"keepalive": {}}}
                    continue
                if isinstance(event, RpcError):
                    raise event
                if isinstance(event, CommandResult):
                    yield {"event": {"end": end_event(event)}}
                    return
                kind, data = event
                yield {"event": {"data": {kind: text_of(data)}}}
        finally:
            listener.leave()
            running.listeners.discard(listener)

    # ---- what a message names ----

    def _selected(self, message: Message) -> Running:
        selector = object_field(message, "process")
        if "tag" in selector:
            tag = text_field(selector, "tag")
            found = next((one for one in self._running.values() if one.tag == tag), None)
            if found is None:
                raise RpcError("not_found", f"process with tag {tag} not found")
            return found
        pid = number_field(selector, "pid")
        found = self._running.get(pid)
        if found is None:
            raise RpcError("not_found", f"process with pid {pid} not found")
        return found

    async def _write(self, running: Running, given: Message) -> None:
        kind = "pty" if "pty" in given else "stdin"
        if (kind == "pty") != running.is_pty or not running.has_stdin:
            raise RpcError("failed_precondition", "the process has no such input")
        try:
            await running.process.write(bytes_field(given, kind))
        except BrokenPipeError:
            raise RpcError("failed_precondition", "the process reads no input any more") from None


def _size(pty: Message) -> tuple[int, int]:
    size = object_field(pty, "size")
    rows, cols = number_field(size, "rows") or 24, number_field(size, "cols") or 80
    if rows > 0xFFFF or cols > 0xFFFF:
        raise RpcError("invalid_argument", "pty.size is too large")
    return rows, cols
