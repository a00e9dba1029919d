"""One container, from its description to its end."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from untax.core.errors import BackendError, CreateError, DestroyError, ReadinessTimeout, SandboxLost, SpawnFailed, UsageError
from untax.core.result import TIMEOUT_EXIT_CODE, CommandResult
from untax.core.spec import Limits
from untax.core.substrate import Facts, Unenforced
from untax.substrates._container_api import EngineApi, Refused, Upgraded
from untax.substrates._container_body import docker_limits, podman_limits
from untax.substrates._container_stream import EngineStream, Pieces
from untax.substrates._greeting import first_bytes
from untax.substrates._incumbent import by_deadline, code_of_unstarted

_OUTPUT_MAX = 1 << 20  # of the incumbent path, for each stream: as the held channel's default
_LOOK_S = 0.02  # an exec takes some 50 ms


class ContainerSandbox:
    """`pid` is not known: the engine may be in another machine's process table, or in a virtual machine."""

    def __init__(
        self,
        api: EngineApi,
        starting: asyncio.Semaphore,
        sandbox_id: str,
        container: str,
        user: str,
        facts: Facts,
        unenforced: tuple[Unenforced, ...],
        ready_s: float,
        forget: Callable[[str], None],
    ) -> None:
        self.id = sandbox_id
        self.container = container
        self.unenforced = unenforced
        self._api = api
        self._starting = starting
        self._user = user
        self._facts = facts
        self._ready_s = ready_s
        self._forget = forget
        self._held: Upgraded | None = None  # until somebody opens the channel
        self._stream: EngineStream | None = None
        self._is_gone = False

    def facts(self) -> Facts:
        return self._facts

    # ---- its beginning ----

    async def wait_ready(self) -> None:
        """Attach to its first process, which is the cell; start it; and wait until it has said its first word."""
        async with self._starting:
            query = {"stream": "1", "stdin": "1", "stdout": "1", "stderr": "1"}
            held = self._held = await self._asked("attach", self._api.upgrade(f"/containers/{self.container}/attach", query=query))
            await self._asked("start", self._api.ask("POST", f"/containers/{self.container}/start"))
            await self._wait_greeting(held)

    async def _asked(self, what: str, question: Any) -> Any:
        if self._is_gone:
            question.close()
            raise SandboxLost(self.id, "it is gone")
        try:
            return await question
        except Refused as exc:
            if exc.status == 404:
                raise SandboxLost(self.id, f"the engine has it no more: {exc.words}") from exc
            raise CreateError(self.id, f"{what}: {exc}; {_remedy(exc.words)}") from exc
        except BackendError as exc:
            raise BackendError(self.id, exc.message) from exc

    async def _wait_greeting(self, held: Upgraded) -> None:
        """The first word is the cell's greeting, which is left where it is, or the reason why there will be none."""
        first = held.early or await self._first_bytes(held.sock)
        if first[:1] == b"\1":
            return
        said = b"".join(piece for _, piece in Pieces().feed(first)).decode(errors="replace").strip()
        if said.startswith("no such user"):
            raise UsageError(f"user {self._user!r}: there is no such user in the sandbox")
        raise CreateError(self.id, f"the cell did not start in it: {said or 'the container ended at once'}; {_remedy(said)}")

    async def _first_bytes(self, sock: socket.socket) -> bytes:
        try:
            return await first_bytes(sock, self._ready_s)
        except TimeoutError:
            raise ReadinessTimeout(self.id, f"the cell did not greet within {self._ready_s:g} s") from None

    async def open_channel(self) -> EngineStream:
        held, self._held = self._held, None
        if held is None:
            raise SandboxLost(self.id, "its channel has been taken already, or it is gone")
        self._stream = EngineStream(held.sock, held.early)
        return self._stream

    async def loss_reason(self) -> str | None:
        return self._stream.said.decode(errors="replace").strip() or None if self._stream is not None else None

    # ---- as agents do today ----

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One exec of the engine: make it, start it, read it to its end, ask how it ended; all of it by one deadline.

        Past that the caller is told; the engine has no way to end what it started, so that goes on inside.
        """
        began = time.perf_counter()
        output: dict[bool, _Kept] = {True: _Kept(), False: _Kept()}
        try:
            code = await by_deadline(self._run_exec(argv, output), timeout_s, self.id, self._wait_answer)
        except Refused as exc:  # newer engines say so, older ones in the output
            return self._not_started(exc.words, time.perf_counter() - began)
        trip = time.perf_counter() - began
        result = CommandResult(
            code if code is not None else TIMEOUT_EXIT_CODE,
            bytes(output[True].data),
            bytes(output[False].data),
            "timeout" if code is None else "exited",
            round_trip_s=trip,
            dropped_stdout=output[True].dropped,
            dropped_stderr=output[False].dropped,
        )
        if code in (126, 127) and b"OCI runtime exec failed" in result.stdout + result.stderr:
            return self._not_started((result.stdout + result.stderr).decode(errors="replace"), trip)
        return result

    async def _run_exec(self, argv: Sequence[str], output: Mapping[bool, _Kept]) -> int:
        facts = self._facts
        body = {"AttachStdout": True, "AttachStderr": True, "Cmd": list(argv), "User": self._user, "WorkingDir": facts.workdir,
                "Env": [f"PATH={facts.path}", f"HOME={facts.home}", f"USER={facts.user}"]}  # fmt: skip
        made = await self._exec("POST", f"/containers/{self.container}/exec", body)
        await _read_out(await self._exec_stream(f"/exec/{made['Id']}/start"), output)
        while (told := await self._exec("GET", f"/exec/{made['Id']}/json"))["Running"]:
            await asyncio.sleep(_LOOK_S)  # it has closed its output and goes on: nobody will be told of its end
        return int(told["ExitCode"])

    async def _wait_answer(self) -> None:
        """Of the engine, to the shortest question that it knows."""
        try:
            await self._api.ask("GET", "/_ping")
        except (Refused, BackendError) as exc:
            raise BackendError(self.id, str(exc)) from exc

    async def _exec(self, method: str, target: str, body: Mapping[str, object] | None = None) -> Any:
        try:
            return await self._api.ask(method, target, body)
        except Refused as exc:
            if exc.status in (404, 409):
                raise SandboxLost(self.id, f"the engine runs it no more: {exc.words}") from exc
            raise SpawnFailed(self.id, str(exc)) from exc
        except BackendError as exc:
            raise BackendError(self.id, exc.message) from exc

    async def _exec_stream(self, target: str) -> Upgraded:
        try:
            return await self._api.upgrade(target, {"Detach": False, "Tty": False})
        except Refused as exc:
            if exc.status in (404, 409):
                raise SandboxLost(self.id, f"the engine runs it no more: {exc.words}") from exc
            raise
        except BackendError as exc:
            raise BackendError(self.id, exc.message) from exc

    def _not_started(self, words: str, trip_s: float) -> CommandResult:
        """When it is for the command's sake: a result, as the held channel has it."""
        code = code_of_unstarted(words)
        if code is None:
            raise SpawnFailed(self.id, f"the command was not started: {words.strip()}")
        return CommandResult(code, b"", words.strip().encode() + b"\n", round_trip_s=trip_s)

    # ---- while it lives ----

    async def pause(self) -> None:
        # A freezer of the first kind of control groups gives up on processes that fork just then.
        await self._told("pause", tries=4)

    async def resume(self) -> None:
        await self._told("unpause")

    async def _told(self, what: str, tries: int = 1) -> None:
        for left in reversed(range(tries)):
            try:
                await self._api.ask("POST", f"/containers/{self.container}/{what}")
                return
            except Refused as exc:
                is_engines = exc.status >= HTTPStatus.INTERNAL_SERVER_ERROR
                if not is_engines or not left:
                    raise (BackendError if is_engines else SandboxLost)(self.id, f"{what}: {exc}") from exc

    async def bind_limits(self, limits: Limits) -> Sequence[Unenforced]:
        """All but the disk's, which is fixed when a container is made."""
        try:
            if self._api.engine == "docker":
                await self._api.ask("POST", f"/containers/{self.container}/update", docker_limits(limits))
            else:
                await self._api.ask("POST", f"/containers/{self.container}/update", podman_limits(limits), native=True)
        except Refused as exc:
            if exc.status in (404, 409):
                raise SandboxLost(self.id, f"limits: {exc}") from exc
            return [Unenforced(name, f"{self._api.engine} did not change it: {exc.words}", "lease it with the limits of its pool")
                    for name in ("cpus", "memory_mib", "pids")]  # fmt: skip
        return self.unenforced

    # ---- its end ----

    async def destroy(self) -> None:
        """First the container, then its stream: see `EngineStream`."""
        try:
            if not self._is_gone:
                await remove_container(self._api, self.container)
        except (Refused, BackendError) as exc:
            raise DestroyError(self.id, f"container {self.container[:12]}: {exc}") from exc
        finally:
            self._hang_up()
        self._is_gone = True
        self._forget(self.id)

    def _hang_up(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            held.sock.close()
        if self._stream is not None:
            self._stream.hang_up()


async def remove_container(api: EngineApi, container: str) -> None:
    """Kill and remove it with its volumes; return once it is gone. That it is gone already, or going, is as good."""
    query = {"force": "true", "v": "true", **({"timeout": "0"} if api.engine == "podman" else {})}
    for is_last in (False, False, True):
        try:
            await api.ask("DELETE", f"/containers/{container}", query=query, native=True)
            return
        except Refused as exc:
            words = exc.words.lower()
            if exc.status == 404 or "no such container" in words or "no container with" in words:
                return
            if "in progress" in words:
                # It ended by itself at the same moment and the engine is about it: this returns with its end.
                with contextlib.suppress(Refused):
                    await api.ask("POST", f"/containers/{container}/wait", query={"condition": "removed"})
                return
            # Podman finds it running, then cannot kill it because it has just ended; now it can be removed.
            if is_last or "state improper" not in words:
                raise


class _Kept:
    """What of an output is kept: its beginning, as much as the held channel keeps of it by default."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.dropped = 0

    def add(self, piece: bytes) -> None:
        room = _OUTPUT_MAX - len(self.data)
        self.data += piece[:room]
        self.dropped += max(0, len(piece) - room)


async def _read_out(stream: Upgraded, output: Mapping[bool, _Kept]) -> None:
    loop = asyncio.get_running_loop()
    pieces = Pieces()
    with stream.sock as sock:
        data = stream.early or await loop.sock_recv(sock, 1 << 16)
        while data:
            for is_output, piece in pieces.feed(data):
                output[is_output].add(piece)
            data = await loop.sock_recv(sock, 1 << 16)


def _remedy(words: str) -> str:
    if "exec format error" in words:
        return "the image is for another processor: pull or build it for this one"
    if "setting rlimit" in words or "operation not permitted" in words:
        return "the engine lacks a right that it needs; start it as root, with CAP_SYS_RESOURCE or lower default ulimits"
    if "no space" in words:
        return "free space where the engine keeps its data"
    return "look at the engine's own log"
