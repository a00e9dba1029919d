"""One gVisor sandbox, from its process to its end."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from untax._remove import remove_tree
from untax.channel.stream import SocketStream
from untax.core.errors import BackendError, CreateError, DestroyError, ReadinessTimeout, SandboxLost, SpawnFailed, UsageError
from untax.core.result import TIMEOUT_EXIT_CODE, CommandResult
from untax.core.root import Root
from untax.core.spec import Limits
from untax.core.substrate import Facts, Unenforced
from untax.substrates._greeting import first_bytes
from untax.substrates._gvisor_groups import Group
from untax.substrates._gvisor_live import RememberedSandbox, put_down
from untax.substrates._gvisor_memory import MemoryGuard
from untax.substrates._gvisor_runsc import Runsc, Started, in_words
from untax.substrates._host import wait_exit
from untax.substrates._incumbent import by_deadline, code_of_unstarted

_ROOM = 1 << 20  # a stream window, as the launcher gives its sockets
_OUTPUT_MAX = 1 << 20  # of the incumbent path, for each stream: as the held channel's default
_DESTROY_PATIENCE_S = 10.0
_CALL_S = 20.0
_FAILED = 128  # what runsc ends with when it is runsc that failed; a command may exit so too
_OF_RUNSC = re.compile(
    rb"^(?:loading|parsing process spec|executing processes for container|waiting on pid).*\n?\Z", re.MULTILINE
)  # its last line then


class GvisorSandbox:
    """`pid` is of `runsc`, whose child the sandbox is."""

    def __init__(
        self,
        runsc: Runsc,
        started: Started,
        sandbox_id: str,
        place: Path,
        group: Group,
        root: Root,
        limits: Limits,
        user: str,
        facts: Facts,
        unenforced: tuple[Unenforced, ...],
        ready_s: float,
        came_up: Callable[[], None],
        forget: Callable[[str], None],
    ) -> None:
        """`came_up` is called once: when it has, or will not any more."""
        self.id = sandbox_id
        self.pid = started.process.pid
        self.unenforced = unenforced
        self._runsc = runsc
        self._started = started
        self._place = place
        self._group = group
        self._root = root
        self._limits = limits
        self._user = user
        self._facts = facts
        self._ready_s = ready_s
        self._came_up: Callable[[], None] | None = came_up
        self._forget = forget
        self._stream: SocketStream | None = None
        self._is_gone = False
        self._guard = MemoryGuard(group, group.bytes_for(limits), self._shed, self.retire)
        self._guard.watch()

    def facts(self) -> Facts:
        return self._facts

    @property
    def detail(self) -> Mapping[str, Any]:
        return {"platform": self._runsc.platform, "is_rootless": self._runsc.is_rootless}

    # ---- its beginning ----

    async def wait_ready(self) -> None:
        """Until the cell, its first process, has greeted; the greeting is left where it is."""
        try:
            greeting = await self._greeting()
        finally:
            self._is_up()
        if greeting:
            return
        with contextlib.suppress(TimeoutError):  # then what it said so far is all there is
            async with asyncio.timeout(_CALL_S):
                await self._started.ended.wait()
        words = self._started.words
        if "no such user" in words:
            raise UsageError(f"user {self._user!r}: there is no such user in the sandbox")
        remedy = _remedy(words)
        if "mounting root" in words and self._root.layers:
            Path(self._root.layers[-1]).unlink(missing_ok=True)
            remedy = "its image was damaged and has been removed; the next lease makes it anew"
        raise CreateError(self.id, f"the sandbox did not come up: {words}; {remedy}")

    def _is_up(self) -> None:
        came_up, self._came_up = self._came_up, None
        if came_up is not None:
            came_up()

    async def _greeting(self) -> bytes:
        """The beginning of it; nothing when the sandbox has ended instead."""
        if self._is_gone:
            raise SandboxLost(self.id, "it is gone")
        try:
            return await first_bytes(self._started.channel, self._ready_s)
        except TimeoutError:
            raise ReadinessTimeout(self.id, f"the cell did not greet within {self._ready_s:g} s; allow more with ready_s=…") from None

    async def open_channel(self) -> SocketStream:
        if self._is_gone or self._stream is not None:
            raise SandboxLost(self.id, "its channel has been taken already, or it is gone")
        self._started.channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _ROOM)
        self._stream = SocketStream(self._started.channel)
        return self._stream

    async def loss_reason(self) -> str | None:
        return self._started.words if self._started.said else None

    # ---- as agents do today ----

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One `runsc exec`. Past its deadline the caller is told and runsc is ended; what it started may go on inside."""
        facts, user = self._facts, {"root": "0"}.get(self._user, self._user)
        if not user.isdigit():
            raise UsageError(f"user {user!r}: runsc knows users by their numbers only; give one")
        words = ["exec", f"--user={user}:{user}", f"--cwd={facts.workdir}"]
        words += [f"--env={name}={value}" for name, value in (("PATH", facts.path), ("HOME", facts.home), ("USER", facts.user))]
        began = time.perf_counter()
        kept, dropped = (bytearray(), bytearray()), [0, 0]
        ending = _run(self._runsc.argv(*words, self.id, *argv), kept, dropped)
        code = await by_deadline(ending, timeout_s, self.id, lambda: self._told("ps"))
        trip = time.perf_counter() - began
        if code is not None and code < 0:
            raise BackendError(self.id, f"runsc exec was ended by signal {-code}")
        if code == _FAILED and (own := _OF_RUNSC.search(kept[1])):
            return self._not_started(in_words(own[0]), trip)
        return CommandResult(
            TIMEOUT_EXIT_CODE if code is None else code,
            bytes(kept[0]),
            bytes(kept[1]),
            "timeout" if code is None else "exited",
            round_trip_s=trip,
            dropped_stdout=dropped[0],
            dropped_stderr=dropped[1],
        )

    def _not_started(self, words: str, trip_s: float) -> CommandResult:
        """When it is for the command's sake: a result, as the held channel has it."""
        if self._is_gone or self._started.ended.is_set() or words.startswith("loading"):
            raise SandboxLost(self.id, words)
        code = code_of_unstarted(words)
        if code is None:
            raise (SpawnFailed if "executing processes" in words else BackendError)(self.id, f"runsc exec: {words}")
        return CommandResult(code, b"", words.encode() + b"\n", round_trip_s=trip_s)

    # ---- while it lives ----

    async def pause(self) -> None:
        await self._told("pause")

    async def resume(self) -> None:
        await self._told("resume")

    async def _shed(self) -> None:
        """The cell takes this as the order to end the largest process: nobody inside can send it."""
        await self._runsc.call("kill", self.id, "SIGUSR1", timeout_s=_CALL_S)

    async def _told(self, what: str) -> None:
        try:
            await self._runsc.call(what, self.id, timeout_s=_CALL_S)
        except BackendError as exc:
            if self._is_gone or self._started.ended.is_set():
                raise SandboxLost(self.id, f"{what}: it is gone") from exc
            raise BackendError(self.id, exc.message) from exc

    async def remember(self) -> RememberedSandbox:
        try:
            return await put_down(self._runsc, self.id, self._place, self._root, self._user, self._limits)
        except BackendError as exc:
            if self._is_gone or self._started.ended.is_set():
                raise SandboxLost(self.id, "it ended while it was put down") from exc
            raise BackendError(self.id, exc.message) from exc

    # ---- its end ----

    def retire(self) -> None:
        self._guard.close()
        self._group.kill()
        self._started.kill()

    async def destroy(self) -> None:
        if self._is_gone:
            return
        self._is_up()
        self.retire()
        if self._stream is not None:
            self._stream.close()
        else:
            self._started.channel.close()
        try:
            async with asyncio.timeout(_DESTROY_PATIENCE_S):
                await self._started.ended.wait()
        except TimeoutError:
            raise DestroyError(self.id, f"process {self.pid} of runsc does not end") from None
        if not await asyncio.to_thread(self._remove):
            raise DestroyError(self.id, "a process of it does not die (uninterruptible sleep?)")
        self._is_gone = True
        self._forget(self.id)

    def _remove(self) -> bool:
        self._runsc.forget(self.id)
        remove_tree(self._place)
        return self._group.remove()


async def _run(argv: Sequence[str], kept: Sequence[bytearray], dropped: list[int]) -> int:
    """To its end, or to the caller's: it does not outlive this."""
    with contextlib.ExitStack() as ours:
        process, readers = await _started(ours, argv)
        try:
            await asyncio.gather(*(_read(reader, kept[i], dropped, i) for i, reader in enumerate(readers)))
            await wait_exit(process, _CALL_S, process.kill)
        finally:
            if process.returncode is None:
                process.kill()
                await wait_exit(process, _CALL_S, process.kill)
    return process.returncode


async def _started(ours: contextlib.ExitStack, argv: Sequence[str]) -> tuple[subprocess.Popen[bytes], list[asyncio.StreamReader]]:
    """Not by asyncio's own means, which wait until nobody holds the pipes any more: past its deadline the command inside still does."""
    loop = asyncio.get_running_loop()
    pairs = [socket.socketpair() for _ in range(2)]
    readers = []
    for mine, _ in pairs:
        reader = asyncio.StreamReader()
        transport, _ = await loop.create_connection(lambda reader=reader: asyncio.StreamReaderProtocol(reader), sock=mine)  # type: ignore[misc]
        ours.callback(transport.close)
        readers.append(reader)
    try:
        out, err = (its.fileno() for _, its in pairs)
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env={"PATH": "/usr/bin:/bin"}, start_new_session=True
        )
    finally:
        for _, its in pairs:
            its.close()
    return process, readers


async def _read(stream: asyncio.StreamReader, kept: bytearray, dropped: list[int], which: int) -> None:
    while data := await stream.read(1 << 16):
        room = _OUTPUT_MAX - len(kept)
        kept += data[:room]
        dropped[which] += max(0, len(data) - room)


def _remedy(words: str) -> str:
    if "exec format error" in words:
        return "the image is for another processor: use one for this machine's"
    if "newuidmap" in words or "user namespace" in words or "operation not permitted" in words:
        return "the kernel, a container or a security module forbids what runsc needs; run on the host itself, or as root"
    return "run `untax doctor`"
