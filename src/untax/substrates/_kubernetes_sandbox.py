"""One pod: waiting for it on its events, the channel over one held exec, single execs as people use them today, and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from untax.channel.held import Carrier, HeldStream
from untax.core.errors import (
    BackendError,
    CreateError,
    DestroyError,
    ReadinessTimeout,
    SandboxLost,
    SpawnFailed,
    SubstrateError,
    SubstrateUnavailable,
)
from untax.core.result import TIMEOUT_EXIT_CODE, CommandResult
from untax.core.span import now_ns
from untax.core.substrate import Facts, Unenforced
from untax.substrates._incumbent import by_deadline, code_of_unstarted
from untax.substrates._kubernetes_api import Api, ApiError, path_of
from untax.substrates._kubernetes_exec import Exec, exit_code_of
from untax.substrates._kubernetes_pod import CELL, CONTAINER, HELD_NAME, HOME, WORKDIR
from untax.substrates._kubernetes_status import Condition, Timeline, condition, has_node

log = logging.getLogger("untax.kubernetes")

REOPEN_S = 20.0  # how long a broken stream is tried again while the pod is said to live
_GRACEFUL_S = 30.0  # a kubelet takes a second or two; one that takes longer is gone or stuck
_FORCED_S = 15.0
_CAP = 1 << 20  # of each stream that a single exec returns, as everywhere
_MACHINES = {"amd64": 62, "arm64": 183}  # ELF's e_machine
_NOT_THE_IMAGE_S = ("KUBERNETES_", "HOSTNAME", "HOME", "PATH", "TERM", "SHLVL", "PWD", "_")


@dataclass(frozen=True)
class Patience:
    """How long what may never come is waited for."""

    ready_s: float
    request_s: float
    reopen_s: float


class PodSandbox:
    """Made by `KubernetesSubstrate.create`, which tells it what its watch sees (`see`, `gone`)."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        name: str,
        *,
        architecture: str,
        patience: Patience,
        unenforced: Sequence[Unenforced],
        forget: Callable[[str], None],
    ) -> None:
        self.id = name
        self.unenforced = tuple(unenforced)
        self.timeline = Timeline()
        self._api = api
        self._namespace = namespace
        self._architecture = architecture
        self._patience = patience
        self._forget = forget
        self._uid: str | None = None
        self._condition = Condition("waiting")
        self._is_started = False  # by the word of an event, which comes up to a second before the pod's status says so
        self._changed = asyncio.Event()
        self._gone = asyncio.Event()
        self._stream: HeldStream | None = None
        self._is_ending = False  # by our own will

    # ---- what the watch tells ----

    def accept(self, pod: Mapping[str, Any]) -> None:
        """The API server has taken the pod."""
        self._uid = str(pod["metadata"]["uid"])
        self.timeline.note("accepted", now_ns())
        self.see(pod)

    def see(self, pod: Mapping[str, Any]) -> None:
        now = now_ns()
        if has_node(pod):
            self.timeline.note("scheduled", now)
        found = condition(pod)
        if found.state == "ready":
            self.timeline.note("ready", now)
        if self._condition.state in ("failed", "lost"):
            return
        if found.state == "failed" and "ready" in self.timeline.seen:
            found = Condition("lost", found.reason)
        self._condition = found
        self._changed.set()
        if found.state == "lost" and not self._is_ending and self._stream is not None:
            self._stream.lose(SandboxLost(self.id, found.reason))

    def hear(self, event: Mapping[str, Any]) -> None:
        """A Kubernetes event about the pod."""
        self.timeline.event(event, now_ns())
        if "started" in self.timeline.seen:
            self._is_started = True
            self.timeline.note("ready", self.timeline.seen["started"])
            self._changed.set()

    def gone(self) -> None:
        """There is no such pod any more."""
        self._gone.set()
        if self._condition.state not in ("failed", "lost"):
            self._condition = Condition("lost", "the pod was removed")
        self._changed.set()
        if self._stream is not None and not self._is_ending:
            self._stream.lose(SandboxLost(self.id, self._condition.reason))

    # ---- the contract ----

    @property
    def control_plane_ns(self) -> int:
        return self.timeline.control_plane_ns

    @property
    def detail(self) -> Mapping[str, Any]:
        return {"start_parts_ns": self.timeline.parts_ns()}

    async def wait_ready(self) -> None:
        await self._wait_state(lambda: self._is_started)

    async def _wait_state(self, is_enough: Callable[[], bool]) -> None:
        try:
            async with asyncio.timeout(self._patience.ready_s):
                while self._condition.state == "waiting" and not is_enough():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise ReadinessTimeout(self.id, self._why_not_ready()) from None
        if self._condition.state == "failed":
            raise CreateError(self.id, self._condition.reason)
        if self._condition.state == "lost":
            raise SandboxLost(self.id, self._condition.reason)

    def _why_not_ready(self) -> str:
        said = self._condition.reason or next(reversed(self.timeline.warnings), "")
        what = f"the pod was not up within ready_timeout_s={self._patience.ready_s:g}"
        if self._condition.reason:
            return f"{what}: the scheduler says: {said}; ask for less, free nodes, or allow more time"
        return f"{what}: {said or 'no word from its node'}; allow more time, or look at `kubectl describe pod {self.id}`"

    async def open_channel(self) -> HeldStream:
        stream = HeldStream(self.id, self._connect, patience_s=self._patience.reopen_s)
        try:
            await stream.open()
        except BackendError:
            if self._condition.state == "ready":
                raise
            # An event said too much, or the container has just ended: the pod's own status has the last word.
            await self._wait_state(lambda: False)
            stream = HeldStream(self.id, self._connect, patience_s=self._patience.reopen_s)
            await stream.open()
        assert stream.within is not None
        wanted = _MACHINES.get(self._architecture)
        if stream.within.machine and wanted and stream.within.machine != wanted:
            stream.close()
            raise CreateError(
                self.id,
                f"the image's programs are for another processor (ELF machine {stream.within.machine}) than the node's {self._architecture}; name an image for it",
            )
        self._stream = stream
        if self._condition.state == "lost":
            stream.lose(SandboxLost(self.id, self._condition.reason))
        return stream

    async def _connect(self, on_data: Callable[[bytes], None], on_lost: Callable[[Exception | None], None]) -> Carrier:
        if self._condition.state == "lost" and not self._is_ending:
            raise SandboxLost(self.id, self._condition.reason)
        said = bytearray()

        def ended(status: Mapping[str, Any] | None, exc: Exception | None) -> None:
            if exc is None:
                what = said.decode(errors="replace").strip() or str((status or {}).get("message", ""))
                exc = BackendError(self.id, f"the exec stream ended: {what[:300] or 'without a word'}")
            on_lost(exc)

        return await self._exec([CELL, "join", HELD_NAME], stdin=True, on_out=on_data, on_err=lambda data: _keep(said, data), on_end=ended)

    async def _exec(self, argv: Sequence[str], *, stdin: bool, **callbacks: Any) -> Exec:
        access = self._api.access
        try:
            return await Exec.open(access, self._namespace, self.id, CONTAINER, argv, stdin=stdin, **callbacks)
        except ApiError as exc:
            if exc.status == 404:
                raise SandboxLost(self.id, "there is no such pod any more") from exc
            if exc.status == 403:
                raise SubstrateUnavailable(
                    self.id, f"{exc}; the role needs: create and get on pods/exec (docs/kubernetes.md has it whole)"
                ) from exc
            raise BackendError(self.id, f"exec: {exc}") from exc
        except OSError as exc:
            raise BackendError(self.id, f"exec: the API server {access.server} cannot be reached: {exc.strerror or exc}") from exc

    def facts(self) -> Facts:
        within = self._stream.within if self._stream is not None else None
        if within is None:
            return Facts(workdir=WORKDIR, home=HOME, user="user")
        env = {name: value for name, value in within.env.items() if not name.startswith(_NOT_THE_IMAGE_S) and name}
        path = within.env.get("PATH") or Facts.__dataclass_fields__["path"].default
        user = {0: "root", 1000: "user"}.get(within.uid, str(within.uid))
        workdir = within.cwd if within.cwd not in ("", "/") else WORKDIR
        return Facts(workdir=workdir, home=HOME if within.uid else "/root", user=user, path=str(path), env=env)

    async def loss_reason(self) -> str | None:
        return self._condition.reason or None

    async def destroy(self) -> None:
        self._is_ending = True
        if self._stream is not None:
            self._stream.close()
        for grace_s, patience_s in ((1, _GRACEFUL_S), (0, _FORCED_S)):
            await self._delete(grace_s)
            try:
                async with asyncio.timeout(patience_s):
                    await self._gone.wait()
                break
            except TimeoutError:
                # Its node does not answer: without it only the API server can let go of the pod.
                log.warning("pod %s is not gone after %g s%s", self.id, patience_s, "; it is removed by force" if grace_s else "")
        else:
            raise DestroyError(self.id, f"the pod {self._namespace}/{self.id} cannot be removed; kubectl delete pod --force {self.id}")
        self._forget(self.id)

    async def _delete(self, grace_s: int) -> None:
        if self._gone.is_set():
            return
        options: dict[str, Any] = {"kind": "DeleteOptions", "apiVersion": "v1", "gracePeriodSeconds": grace_s}
        if self._uid is not None:
            options["preconditions"] = {"uid": self._uid}  # never another pod of the same name
        try:
            await self._api.request("DELETE", path_of("api", "v1", "namespaces", self._namespace, "pods", self.id), options)
        except ApiError as exc:
            if exc.status in (404, 409):
                self._gone.set()
            else:
                raise DestroyError(self.id, f"the pod {self._namespace}/{self.id} cannot be deleted: {exc}") from exc

    # ---- as people use it today ----

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One exec of its own, as `kubectl exec`. At its deadline the answer comes; Kubernetes has no way to end the process."""
        out, err = _Capped(), _Capped()
        start = now_ns()
        try:
            status = await by_deadline(self._run_exec(argv, out, err), timeout_s, self.id, self._wait_answer)
        except BackendError as exc:
            raise self._lost_or(exc) from exc
        code = TIMEOUT_EXIT_CODE if status is None else self._code(status, err)
        return CommandResult(
            code,
            out.data,
            err.data,
            "timeout" if status is None else "exited",
            round_trip_s=(now_ns() - start) / 1e9,
            dropped_stdout=out.dropped,
            dropped_stderr=err.dropped,
        )

    async def _run_exec(self, argv: Sequence[str], out: _Capped, err: _Capped) -> Mapping[str, Any]:
        """The pod's word on how it ended."""
        ended: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()

        def end(status: Mapping[str, Any] | None, exc: Exception | None) -> None:
            if ended.done():
                return
            if status is not None:
                ended.set_result(status)
            else:
                ended.set_exception(exc or BackendError(self.id, "the exec ended without a word"))

        stream = await self._exec(argv, stdin=False, on_out=out.add, on_err=err.add, on_end=end)
        try:
            return await ended
        finally:
            stream.close()

    async def _wait_answer(self) -> None:
        """Of the pod's node, by opening another exec: a GET of the pod the API server answers by itself, also for a node that hangs."""
        (await self._exec([CELL], stdin=False, on_out=lambda _: None)).close()

    def _lost_or(self, exc: BackendError) -> SubstrateError:
        return SandboxLost(self.id, self._condition.reason) if self._condition.state == "lost" else exc

    def _code(self, status: Mapping[str, Any], err: _Capped) -> int:
        """The command's; of one that could not be started, as a shell would put what the runtime says about it."""
        if (code := exit_code_of(dict(status))) is not None:
            return code
        message = str(status.get("message", ""))
        if (code := code_of_unstarted(message)) is not None:
            err.add(message.encode())
            return code
        if self._condition.state == "lost":
            raise SandboxLost(self.id, self._condition.reason)
        raise SpawnFailed(self.id, f"the command was not started: {message}")


def _keep(said: bytearray, data: bytes) -> None:
    if len(said) < 4096:
        said += data[:4096]


class _Capped:
    """Output up to the cap: the first half from the beginning, the rest from the end."""

    def __init__(self) -> None:
        self._head = bytearray()
        self._tail = bytearray()
        self.dropped = 0

    def add(self, data: bytes) -> None:
        room = _CAP // 2 - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        self._tail += data
        excess = len(self._tail) - _CAP // 2
        if excess > 0:
            del self._tail[:excess]
            self.dropped += excess

    @property
    def data(self) -> bytes:
        return bytes(self._head + self._tail)
