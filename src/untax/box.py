"""A box: one leased sandbox as its holder sees it. Every action goes over the held channel and into the ledger.

Whoever ends the lease, and however, what the sandbox held is given back; afterwards every action raises `SandboxLost`.
"""

from __future__ import annotations

import asyncio
import logging
from builtins import list as list_
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from untax.batch import Batch
from untax.channel import actions, flow, tree
from untax.channel.actions import SearchHow
from untax.channel.arguments import Name
from untax.channel.call import Call
from untax.channel.client import READY_TIMEOUT_S, Channel
from untax.channel.egress import Egress, EgressAttempt
from untax.channel.link import Watch
from untax.channel.process import Connection, Process
from untax.channel.replies import Entry, ProcessInfo, SearchResult, TreeSize
from untax.channel.session import Session
from untax.core.errors import (
    BackendError,
    CommandFailed,
    CreateError,
    NoWorker,
    ProtocolError,
    ReadinessTimeout,
    SandboxLost,
    SpawnFailed,
    SubstrateError,
    UsageError,
)
from untax.core.ledger import ActionRecord, EgressRecord, Ledger
from untax.core.result import CommandResult
from untax.core.span import Stopwatch
from untax.core.spec import EnvSpec
from untax.core.stream import ByteStream
from untax.core.substrate import Describing, Enforcing, Explaining, Facts, Freezable, Sandbox, UserSwitching

if TYPE_CHECKING:
    from untax.engine import Engine, Request

T = TypeVar("T")

log = logging.getLogger("untax.box")

TIMEOUT_S = actions.TIMEOUT_S
SETUP_TIMEOUT_S = 3600.0  # a step may install a large dependency tree
_INFRASTRUCTURE = (SpawnFailed, SandboxLost, BackendError, ProtocolError)

# What every command finds, whatever the image; nothing of the engine's own environment gets in. Nobody is there to answer a
# prompt or to leave a pager (THREATS 6.1).
BASE_ENV: Mapping[str, str] = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
}
_ORDINARY = Facts(workdir="/", home="/root", user="root")


def environment(spec: EnvSpec, facts: Facts) -> dict[str, str]:
    """The variables that commands start with: what the base, the sandbox and the policy say, and the spec over them."""
    env = {**BASE_ENV, "PATH": facts.path, "HOME": facts.home, "USER": facts.user, "SHELL": facts.shell}
    if spec.network != "none":
        proxy = f"http://127.0.0.1:{facts.proxy_port}"
        for name in ("http_proxy", "https_proxy"):
            env[name] = env[name.upper()] = proxy
        env["no_proxy"] = env["NO_PROXY"] = "localhost,127.0.0.1,::1"
    return {**env, **spec.env}


class Box:
    """Made by an engine. Several actions may be under way at once."""

    def __init__(self, engine: Engine, request: Request, ledger: Ledger) -> None:
        self.spec = request.spec
        self._engine = engine
        self._request = request
        self._ledger = ledger
        self._clock = engine.clock
        self._sandbox: Sandbox | None = None
        self._channel: Channel | None = None
        self._over: str | None = None  # why no action is possible any more
        self._blameless = False  # it is over because the holder wanted it so
        self._ending: asyncio.Task[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._leaving: set[asyncio.Task[None]] = set()
        self._resetting = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<Box {self.id} {self._over or 'live'}>"

    @property
    def id(self) -> str:
        """Of the sandbox; another one after `reset`."""
        return self._ledger.sandboxes[-1] if self._ledger.sandboxes else ""

    @property
    def ledger(self) -> Ledger:
        """Where the time went, and the verdict. Final after `release`."""
        return self._ledger

    # ---- commands ----

    async def run(
        self,
        argv: Sequence[Name],
        *,
        cwd: Name | None = None,
        env: Mapping[str, str | None] | None = None,
        stdin: bytes | None = None,
        user: str | None = None,
        timeout_s: float | None = TIMEOUT_S,
        merge: bool = False,
        cap: int = actions.OUTPUT_CAP,
    ) -> CommandResult:
        """Run `argv` without a shell and wait for it. `timeout_s=None` lasts as long as the lease.

        A program that is missing exits with 127. Cancelling the await kills the command. `merge` puts stderr into stdout;
        `cap` is how many bytes of each are returned.
        """
        return await self._as_user(
            "run",
            user,
            lambda: actions.run(argv, cwd=cwd, env=env, stdin=stdin, user=user, timeout_s=timeout_s, merge=merge, cap=cap),
        )

    async def shell(
        self,
        text: str,
        *,
        cwd: Name | None = None,
        env: Mapping[str, str | None] | None = None,
        stdin: bytes | None = None,
        user: str | None = None,
        timeout_s: float | None = TIMEOUT_S,
        merge: bool = False,
        cap: int = actions.OUTPUT_CAP,
    ) -> CommandResult:
        """Run `text` by a fresh bash, or sh where there is none; otherwise as `run`."""
        return await self._as_user(
            "shell",
            user,
            lambda: actions.shell(text, cwd=cwd, env=env, stdin=stdin, user=user, timeout_s=timeout_s, merge=merge, cap=cap),
        )

    def session(self, *, cwd: Name | None = None, env: Mapping[str, str | None] | None = None, user: str | None = None) -> Session:
        """`async with box.session() as bash`: a bash whose directory, variables and functions last between its commands."""
        caller = _SessionCaller(self, user, lambda: actions.session_open(cwd=cwd, env=env, user=user))
        return Session(caller, cwd=cwd, env=env, user=user)

    async def start(
        self,
        argv: Sequence[Name],
        *,
        cwd: Name | None = None,
        env: Mapping[str, str | None] | None = None,
        user: str | None = None,
        timeout_s: float | None = None,
        merge: bool = False,
        stdin: bool = True,
        pty: bool = False,
        rows: int = 24,
        cols: int = 80,
    ) -> Process:
        """Start `argv` and return while it runs: it streams, and can be written to, signalled and awaited.

        `pty` gives it a terminal of its own, of `rows` and `cols`, that can be resized.
        """
        if pty:
            return await self._started(user, lambda: flow.pty(argv, rows=rows, cols=cols, cwd=cwd, env=env, user=user, timeout_s=timeout_s))
        return await self._started(
            user, lambda: flow.start(argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, merge=merge, stdin=stdin)
        )

    async def processes(self) -> list_[ProcessInfo]:
        """What was started and not yet forgotten, running or not."""
        return await self._act(actions.processes(), "processes")

    async def attach(self, pid: int) -> Process:
        """Take over the stream of a process that was started earlier."""
        return await self._started(None, lambda: flow.attach(pid))

    def batch(self) -> Batch:
        """Collect actions and send them as one: `await box.batch().run(["make"]).read("out").send()`."""
        return Batch(self._send_batch)

    # ---- files ----

    async def read(self, path: Name, *, offset: int = 0, limit: int | None = None) -> bytes:
        """The bytes of a file; `TooLarge` above 64 MiB unless a part is asked for."""
        return await self._act(actions.read(path, offset=offset, limit=limit), "read")

    async def write(
        self, path: Name, data: bytes, *, mode: int | None = None, append: bool = False, exclusive: bool = False, parents: bool = True
    ) -> int:
        """Write a whole file, or append to one; missing directories are made. Without `mode`: 0644, or what an existing file has."""
        call = actions.write(path, data, mode=mode, append=append, exclusive=exclusive, parents=parents)
        return await self._act(call, "write")

    async def list(self, path: Name = ".") -> list_[Entry]:
        return await self._act(actions.list_dir(path), "list")

    async def stat(self, path: Name, *, follow: bool = True) -> Entry:
        return await self._act(actions.stat(path, follow=follow), "stat")

    async def mkdir(self, path: Name, *, mode: int = 0o755, parents: bool = True) -> None:
        await self._act(actions.mkdir(path, mode=mode, parents=parents), "mkdir")

    async def remove(self, path: Name, *, recursive: bool = False) -> int:
        """Remove a file, an empty directory, or with `recursive` a tree. Gives how many names went."""
        return await self._act(actions.remove(path, recursive=recursive), "remove")

    async def move(self, source: Name, target: Name, *, overwrite: bool = True) -> None:
        await self._act(actions.move(source, target, overwrite=overwrite), "move")

    async def upload(self, local: Name, remote: Name, *, timeout_s: float | None = TIMEOUT_S) -> TreeSize:
        """Copy a local file or directory to `remote`, which is its new name inside."""
        return await self._measured("upload", lambda channel: channel.upload(local, remote, timeout_s=timeout_s))

    async def download(
        self, remote: Name, local: Name, *, max_bytes: int = tree.MAX_BYTES, timeout_s: float | None = TIMEOUT_S
    ) -> TreeSize:
        """Copy a file or directory out to `local`, its new name. What is unsafe to unpack is refused."""
        return await self._measured("download", lambda channel: channel.download(remote, local, max_bytes=max_bytes, timeout_s=timeout_s))

    async def search(
        self,
        pattern: str | bytes,
        root: Name = ".",
        *,
        how: SearchHow = "text",
        ignore_case: bool = False,
        whole_words: bool = False,
        globs: Sequence[str] = (),
        most: int = 1000,
        timeout_s: float | None = TIMEOUT_S,
    ) -> SearchResult:
        """Look for a text, a regular expression (`how="regex"`) or a Python symbol (`how="symbol"`) below `root`."""
        call = actions.search(
            pattern, root, how=how, ignore_case=ignore_case, whole_words=whole_words, globs=globs, most=most, timeout_s=timeout_s
        )
        return await self._act(call, "search")

    async def edit(self, path: Name, old: str | bytes, new: str | bytes, *, count: int = 1) -> int:
        """Replace `old`, which must be there exactly `count` times (0: once or more), by `new`; `EditConflict` otherwise."""
        return await self._act(actions.edit(path, old, new, count=count), "edit")

    async def apply_patch(self, diff: str | bytes, directory: Name = ".", *, strip: int = 1, dry_run: bool = False) -> list_[str]:
        """Apply a unified diff below `directory`, all of it or nothing. Gives the paths that changed."""
        return await self._act(actions.apply_patch(diff, directory, strip=strip, dry_run=dry_run), "apply_patch")

    async def watch(self, path: Name = ".", *, recursive: bool = True) -> Watch:
        """What happens below `path` from now on, as an asynchronous iterator."""
        return await self._measured("watch", lambda channel: channel.watch(path, recursive=recursive))

    async def connect(self, port: int) -> Connection:
        """A byte stream to a port on the sandbox's own loopback, for a server that runs inside."""
        return await self._measured("connect", lambda channel: Connection.open(channel, port))

    # ---- its life ----

    async def reset(self) -> None:
        """Replace the sandbox by a fresh one of the same spec with the same late bindings.

        Everything in the old one ends, actions under way included. When the new one does not come up the box is lost.
        """
        async with self._resetting:
            self._live()
            watch = Stopwatch(self._clock)
            self._leave("the box was reset")
            try:
                await self._open(None)
            except BaseException as exc:
                self._over = self._over or f"its reset failed: {exc}"
                self._leave(self._over)
                if isinstance(exc, SubstrateError) and not self._blameless:
                    self._ledger.fault(f"{type(exc).__name__}: {exc}")
                raise
            finally:
                self._ledger.add("reset", *watch.part())

    async def pause(self) -> None:
        """Stop every process inside until `resume`."""
        await self._freezable().pause()

    async def resume(self) -> None:
        await self._freezable().resume()

    async def release(self) -> None:
        """Give the sandbox up. Returns when it is gone; safe to call twice."""
        if self._ending is None:
            self._blameless = True
            self._ending = self._engine.chore(self._end("the box was released"))
        await self._engine.finish(self._ending)

    # ---- how it comes to be, for the engine ----

    async def furnish(self, watch: Stopwatch) -> None:
        """Make the sandbox and everything the lease asked for, in parts that share their ends."""
        await self._open(watch)
        self._ledger.held(watch.last_ns)
        self._expiry = asyncio.get_running_loop().call_later(self._request.ttl_s, self._expire)

    async def abandon(self) -> None:
        """Give back whatever a `furnish` that failed had taken."""
        self._over = self._over or "it was never ready"
        self._leave(self._over)
        if self._leaving:
            await asyncio.wait(self._leaving)

    async def _open(self, watch: Stopwatch | None) -> None:
        ledger = self._ledger
        sandbox = self._sandbox = await self._engine.create(self.spec)
        ledger.sandboxes.append(sandbox.id)
        self._check_wanted()
        if watch is not None:
            ledger.add("create", *watch.part())
        if isinstance(sandbox, Enforcing):
            ledger.unenforced = tuple(sandbox.unenforced)
            self._engine.check_enforced(sandbox, ledger.unenforced)
        await sandbox.wait_ready()
        channel = self._channel = self._channel_over(await sandbox.open_channel(), sandbox.id)
        self._check_wanted()
        facts = sandbox.facts() if isinstance(sandbox, Describing) else _ORDINARY
        await self._configure(sandbox, channel, facts)
        if watch is not None:
            ledger.add("ready", *watch.part())
        if self._request.files or self.spec.setup:
            await self._set_up()
            if watch is not None:
                ledger.add("setup", *watch.part())

    def _check_wanted(self) -> None:
        """`SandboxLost` when the lease ended while the sandbox was coming up; whoever waits for it gives it back."""
        if self._over is not None:
            raise SandboxLost(self.id, self._over)

    def _channel_over(self, stream: ByteStream, sandbox_id: str) -> Channel:
        egress = Egress(self.spec.network, on_attempt=self._note_egress) if self.spec.network != "none" else None
        channel: Channel
        channel = Channel(stream, sandbox_id=sandbox_id, egress=egress, on_lost=lambda lost: self._lost(channel, lost))
        return channel

    async def _configure(self, sandbox: Sandbox, channel: Channel, facts: Facts) -> None:
        workdir = self.spec.workdir or facts.workdir
        port = facts.proxy_port if self.spec.network != "none" else 0
        call = actions.configure(workdir=workdir, env=environment(self.spec, facts), proxy_port=port, timeout_s=READY_TIMEOUT_S)
        try:
            # Sent right behind our greeting, so one wait covers both.
            await channel.call(call)
            if workdir != facts.workdir:
                await self._make_workdir(channel, workdir)
        except SandboxLost as exc:
            if isinstance(exc.__cause__, ProtocolError) and not channel.cell_version:
                raise exc.__cause__ from None
            if not channel.cell_version and "deadline" in exc.message:
                raise ReadinessTimeout(self.id, f"the cell did not greet within {READY_TIMEOUT_S:g} s") from exc
            if not channel.cell_version and isinstance(sandbox, Explaining) and (reason := await sandbox.loss_reason()):
                raise CreateError(sandbox.id, reason) from exc
            raise
        except OSError as exc:
            raise CreateError(self.id, f"it could not be configured: {exc}") from exc

    async def _make_workdir(self, channel: Channel, workdir: str) -> None:
        try:
            await channel.call(actions.mkdir(workdir))
        except OSError as exc:
            raise CreateError(self.id, f"workdir: {exc}; name one that the sandbox's user may make") from exc

    async def _set_up(self) -> None:
        channel = self._live()
        for path, data in self._request.files.items():
            try:
                await channel.call(actions.write(path, data))
            except OSError as exc:
                raise CreateError(self.id, f"files: {exc}") from exc
        for step in self.spec.setup:
            try:
                (await channel.call(actions.shell(step, timeout_s=SETUP_TIMEOUT_S))).check()
            except CommandFailed as exc:
                raise CreateError(self.id, f"setup step {step!r}: {exc}") from exc

    # ---- how it ends ----

    def _expire(self) -> None:
        if self._ending is None:
            reason = f"its lease of {self._request.ttl_s:g} s has ended; ask for more with ttl_s"
            self._ending = self._engine.chore(self._end(reason))

    def _lost(self, channel: Channel, lost: SandboxLost) -> None:
        """The channel has ended by itself: the sandbox is of no more use and goes at once."""
        if channel is self._channel and self._over is None:
            self._over = lost.message
            self._ledger.fault(f"SandboxLost: {lost}")
            log.warning("sandbox %s is lost: %s", self.id, lost.message)
            self._leave(lost.message)

    def _leave(self, reason: str) -> None:
        """Let go of the sandbox: no action reaches it any more, and it is destroyed in the background."""
        sandbox, channel = self._sandbox, self._channel
        self._sandbox = self._channel = None
        if channel is not None:
            channel.close()
        if sandbox is not None:
            task = self._engine.chore(self._engine.destroy(sandbox))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)
            log.debug("sandbox %s goes: %s", sandbox.id, reason)

    async def _end(self, reason: str) -> None:
        ledger = self._ledger
        watch = Stopwatch(self._clock)
        ledger.released(watch.last_ns)
        self._over = self._over or reason
        if self._expiry is not None:
            self._expiry.cancel()
        self._leave(reason)
        if self._leaving:
            await asyncio.wait(self._leaving)
        ledger.add("cleanup", *watch.part())
        ledger.closed(watch.last_ns)
        self._engine.forget(self)

    # ---- actions ----

    def _live(self) -> Channel:
        channel = self._channel
        if channel is None:
            raise SandboxLost(self.id, self._over or "it is being reset")
        return channel

    async def _act(self, call: Call[T], name: str = "action") -> T:
        channel = self._channel or self._live()
        clock = self._clock
        start_ns = clock()
        try:
            value = await channel.call(call)
        except BaseException as exc:
            self._failed(name, start_ns, channel, exc)
            raise
        self._ledger.record(_record(name, start_ns, clock(), value))
        return value

    async def _measured(self, name: str, act: Callable[[Channel], Awaitable[T]]) -> T:
        """As `_act`, for what is more than one call."""
        channel = self._live()
        start_ns = self._clock()
        try:
            value = await act(channel)
        except BaseException as exc:
            self._failed(name, start_ns, channel, exc)
            raise
        self._ledger.record(_record(name, start_ns, self._clock(), value))
        return value

    async def _as_user(self, name: str, user: str | None, make: Callable[[], Call[T]]) -> T:
        try:
            return await self._act(make(), name)
        except NoWorker:
            await self._provide_worker(user)
        return await self._act(make(), name)

    async def _started(self, user: str | None, make: Callable[[], flow.ProcessFlow]) -> Process:
        async def open_one(channel: Channel) -> Process:
            return await Process.open(channel, make())

        try:
            process = await self._measured("start", open_one)
        except NoWorker:
            await self._provide_worker(user)
            process = await self._measured("start", open_one)
        return process

    async def _provide_worker(self, user: str | None) -> None:
        """Nobody inside acts for `user`; without a user the sandbox's own hands are gone and get replaced."""
        sandbox = self._sandbox
        if not isinstance(sandbox, UserSwitching):
            raise UsageError(f"user {user!r}: substrate {self._engine.substrate.name!r} runs commands as one user only; leave user= out")
        await sandbox.provide_worker(user or "")

    async def _send_batch(self, calls: list_[Call[Any]], stop: bool) -> list_[Any]:
        return list_(await self._measured("batch", lambda channel: channel.batch(calls, stop=stop)))

    def _failed(self, name: str, start_ns: int, channel: Channel, exc: BaseException) -> None:
        now = self._clock()
        self._ledger.record(ActionRecord(name, start_ns, now, now, 0, type(exc).__name__))
        if not isinstance(exc, _INFRASTRUCTURE):
            return
        if isinstance(exc, SandboxLost) and (self._blameless or (self._over is None and channel is not self._channel)):
            exc.message = self._over or "the box was reset"
            return  # the holder ended it under its own action
        if isinstance(exc, SandboxLost) and self._over:
            exc.message = self._over
        self._ledger.fault(f"{type(exc).__name__}: {exc}")

    def _note_egress(self, attempt: EgressAttempt) -> None:
        record = EgressRecord(attempt.host, attempt.port, attempt.verdict, attempt.reason, self._clock())
        self._ledger.egress_attempt(record)
        log.info(
            "egress rollout=%s sandbox=%s to=%r port=%d verdict=%s reason=%r",
            self._ledger.rollout, self.id, record.host, record.port, record.verdict, record.reason,
        )  # fmt: skip

    def _freezable(self) -> Freezable:
        self._live()
        if not isinstance(self._sandbox, Freezable):
            raise UsageError(f"substrate {self._engine.substrate.name!r} cannot pause a sandbox")
        return self._sandbox


def _record(name: str, start_ns: int, end_ns: int, value: object) -> ActionRecord:
    if isinstance(value, CommandResult):
        received_ns = min(end_ns, start_ns + int(value.round_trip_s * 1e9))
        return ActionRecord(name, start_ns, received_ns, end_ns, int(value.elapsed_s * 1e9), value.outcome)
    return ActionRecord(name, start_ns, end_ns, end_ns, 0, "ok")


class _SessionCaller:
    """A session's way to the cell: through the box's account, and only into the sandbox that the session began in."""

    def __init__(self, box: Box, user: str | None, opening: Callable[[], Call[tuple[int, int]]]) -> None:
        self._box = box
        self._user = user
        self._opening = opening
        self._channel: Channel | None = None

    async def __call__(self, call: Call[T], /) -> T:
        box = self._box
        if self._channel is None:
            self._channel = box._live()
        elif self._channel is not box._channel:
            raise SandboxLost(box.id, box._over or "the box was reset: open another session")
        try:
            return await box._act(call, "session")
        except NoWorker:  # can only answer the opening, which then is made once more
            await box._provide_worker(self._user)
        return await box._act(cast("Call[T]", self._opening()), "session")
