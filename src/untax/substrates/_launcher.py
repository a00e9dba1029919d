"""The engine's side of the native launcher: one process that makes and ends namespace sandboxes on request.

Requests and answers are packets of a sequenced socket (native/launch.c tells their fields). Answers come in any order
and are told apart by number; a descriptor may come with one.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from untax.core.errors import BackendError
from untax.substrates._host import wait_exit

_PACKET = 64 << 10
_FD_SPACE = socket.CMSG_SPACE(struct.calcsize("i"))
_ANSWER = struct.Struct("<IB")
# The launcher gives its sandboxes eight seconds to die; after that it is itself stuck.
_EXIT_GRACE_S = 15.0

CONFIG, CREATE, DESTROY, ENTER, FREEZE, SWEEP, SNAPSHOT, DROP_LAYER, PRISTINE, LIMIT = range(1, 11)


def pack(value: str | bytes) -> bytes:
    data = os.fsencode(value)
    return struct.pack("<I", len(data)) + data


def pack_all(values: Sequence[str | bytes]) -> bytes:
    return struct.pack("<I", len(values)) + b"".join(map(pack, values))


@dataclass(frozen=True, slots=True)
class Answer:
    fields: bytes
    fd: int | None


class LauncherRefused(Exception):
    """A request that failed: at which step, and with which error of the kernel's."""

    def __init__(self, step: str, error: int) -> None:
        super().__init__(step, error)
        self.step = step
        self.error = error

    def __str__(self) -> str:
        return f"{self.step}: {os.strerror(self.error)}"


class Launcher:
    """Started in the running loop; `on_death(handle, failure)` is told of each sandbox that ends by itself."""

    def __init__(self, cell: str, on_death: Callable[[int, LauncherRefused | None], None]) -> None:
        self._cell = cell
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._pending: dict[int, asyncio.Future[Answer]] = {}
        self._unsent: deque[bytes] = deque()
        self._next = 0
        self._over: str | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # Nothing of the engine's reaches it: no variable, no terminal, no descriptor but the socket.
            self._process = subprocess.Popen(
                [self._cell, "launcher", str(its.fileno())],
                pass_fds=(its.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError as exc:
            ours.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None
            raise BackendError("", f"the launcher cannot be started: {exc.strerror}") from exc
        finally:
            its.close()
        ours.setblocking(False)
        self._sock = ours
        self._loop.add_reader(ours.fileno(), self._readable)
        self._loop.add_reader(self._pidfd, self._died)

    async def request(self, op: int, fields: bytes) -> Answer:
        """The answer; `LauncherRefused` when it is no, `BackendError` when the launcher is gone."""
        return await self.ask(op, fields)

    def ask(self, op: int, fields: bytes) -> asyncio.Future[Answer]:
        if self._over is not None:
            raise BackendError("", self._over)
        self._next = self._next % 0xFFFFFFFF + 1
        future: asyncio.Future[Answer] = self._loop.create_future()
        self._pending[self._next] = future
        packet = _ANSWER.pack(self._next, op) + fields
        if self._unsent:
            self._unsent.append(packet)
        else:
            self._send(packet)
        return future

    def _send(self, packet: bytes) -> None:
        try:
            self._sock.send(packet)
        except BlockingIOError:
            self._unsent.append(packet)
            self._loop.add_writer(self._sock.fileno(), self._writable)
        except OSError:
            self._lose()

    def _writable(self) -> None:
        while self._unsent:
            try:
                self._sock.send(self._unsent[0])
            except BlockingIOError:
                return
            except OSError:
                self._lose()
                return
            self._unsent.popleft()
        self._loop.remove_writer(self._sock.fileno())

    def _died(self) -> None:
        """Nobody else will answer, though a child that it had only just made may hold its end of the socket open."""
        while self._over is None and self._readable():
            pass  # what it had still said
        self._lose()

    def _readable(self) -> bool:
        """Take one packet; False when there is none."""
        try:
            packet, control, _, _ = self._sock.recvmsg(_PACKET, _FD_SPACE, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return False
        except OSError:
            packet, control = b"", []
        if not packet:
            self._lose()
            return False
        fd = struct.unpack_from("i", control[0][2])[0] if control else None
        number, status = _ANSWER.unpack_from(packet)
        fields = packet[_ANSWER.size :]
        if status == 2:
            handle, failed = struct.unpack_from("<IB", fields)
            self._on_death(handle, _refusal(fields[5:]) if failed else None)
            return True
        future = self._pending.pop(number, None)
        if future is None or future.done():
            if fd is not None:
                os.close(fd)
        elif status == 0:
            future.set_result(Answer(fields, fd))
        else:
            future.set_exception(_refusal(fields))
        return True

    def _lose(self) -> None:
        if self._over is None:
            self._over = "the launcher has ended"
            self._loop.remove_reader(self._sock.fileno())
            self._loop.remove_writer(self._sock.fileno())
            self._sock.close()
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
        for future in self._pending.values():
            if not future.done():
                future.set_exception(BackendError("", self._over))
        self._pending.clear()

    async def aclose(self) -> None:
        """End it and, with it, every sandbox it made. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        self._lose()
        await wait_exit(process, _EXIT_GRACE_S, process.kill)


def _refusal(fields: bytes) -> LauncherRefused:
    (size,) = struct.unpack_from("<I", fields)
    (error,) = struct.unpack_from("<i", fields, 4 + size)
    return LauncherRefused(fields[4 : 4 + size].decode(errors="replace"), error)
