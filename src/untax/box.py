"""A box: one leased sandbox as its holder sees it. Every action goes over the held channel and into the ledger.

How it comes to be and ends is the other half: in `untax.tenancy` where its sandbox is this process's own, in `untax.remote.box`
where it is a server's.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from builtins import list as list_
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from untax.batch import Batch
from untax.channel import actions, flow, tree
from untax.channel.actions import SearchHow
from untax.channel.arguments import Name
from untax.channel.call import Call
from untax.channel.client import Channel
from untax.channel.egress import EgressAttempt
from untax.channel.link import Watch
from untax.channel.process import Connection, Process
from untax.channel.replies import Entry, ProcessInfo, SearchResult, TreeSize
from untax.channel.session import Session
from untax.core.errors import BackendError, NoWorker, ProtocolError, SandboxLost, SpawnFailed
from untax.core.ledger import ActionRecord, EgressRecord, Ledger
from untax.core.result import CommandResult
from untax.core.root import ImageConfig
from untax.core.span import Stopwatch
from untax.core.substrate import Sandbox

if TYPE_CHECKING:
    from untax.layers.merged import Change
    from untax.leases import Request
    from untax.leasing import Leasing
    from untax.snapshot import Snapshot

T = TypeVar("T")

log = logging.getLogger("untax.box")

TIMEOUT_S = actions.TIMEOUT_S
_INFRASTRUCTURE = (SpawnFailed, SandboxLost, BackendError, ProtocolError)


class Box(ABC):
    """One leased sandbox. Several actions may be under way at once. Made by an engine."""

    def __init__(self, engine: Leasing, request: Request, ledger: Ledger) -> None:
        self.spec = request.spec
        self._engine = engine
        self._request = request
        self._ledger = ledger
        self._clock = engine.clock
        self._channel: Channel | None = None
        self._over: str | None = None  # why no action is possible any more
        self._blameless = False  # it is over because the holder wanted it so
        self._ending: asyncio.Future[None] | None = None
        self._expiry: asyncio.TimerHandle | None = None
        self._changing = asyncio.Lock()  # one reset or snapshot at a time

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

    @property
    def is_live(self) -> bool:
        """Whether actions still reach its sandbox, as far as is known here."""
        return self._over is None

    @property
    def sandbox(self) -> Sandbox | None:
        """The substrate's own object, for whoever measures it: where it is this process's, and until the lease is over."""
        return None

    @property
    @abstractmethod
    def image(self) -> ImageConfig:
        """What the image says about itself: its variables, user and working directory apply below the spec's; its entry point is data."""

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

    def session(
        self,
        *,
        cwd: Name | None = None,
        env: Mapping[str, str | None] | None = None,
        user: str | None = None,
        resume: Session | None = None,
    ) -> Session:
        """`async with box.session() as bash`: a bash whose directory, variables and functions last between its commands.

        `resume` is a session of the box that a live snapshot was taken of: its copy in this box, which began from it, goes on.
        """
        caller = _SessionCaller(self, user, lambda: actions.session_open(cwd=cwd, env=env, user=user))
        return Session(caller, cwd=cwd, env=env, user=user, resume=resume)

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

    async def mark(
        self, path: Name, *, uid: int | None = None, gid: int | None = None, prefix: str = "", attributes: Mapping[str, str] | None = None
    ) -> None:
        """Give a file to another owner; with a `prefix`, replace its extended attributes of names that begin so by `attributes`."""
        await self._act(actions.mark(path, uid=uid, gid=gid, prefix=prefix, attributes=attributes), "mark")

    async def marks(self, paths: Sequence[Name], prefix: str) -> list_[dict[str, str]]:
        """Of each path the extended attributes whose names begin with `prefix`, which is taken off; none of what is not there."""
        return await self._act(actions.marks(paths, prefix), "marks")

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

    @abstractmethod
    async def reset(self) -> None:
        """Back to what the lease began with, the same late bindings included.

        Everything in the old sandbox ends, actions under way included. One in which provably nothing happened is kept;
        otherwise a fresh one takes its place. When that does not come up the box is lost.
        """

    @abstractmethod
    async def snapshot(self, *, live: bool = False) -> Snapshot:
        """Freeze the files as they are now; the sandbox goes on. `engine.fork` and `engine.restore` begin from it.

        It lasts until it is dropped or the engine closes, unless it is saved. `live` would keep the memory of processes too.
        """

    @abstractmethod
    async def diff(self) -> list_[Change]:
        """What differs from what the lease began with, files that the lease itself was given included."""

    @abstractmethod
    async def pause(self) -> None:
        """Stop every process inside until `resume`."""

    @abstractmethod
    async def resume(self) -> None: ...

    async def release(self) -> None:
        """Give the sandbox up. Returns when it is gone; safe to call twice."""
        await self._engine.finish(self._begin_release())

    def _begin_release(self) -> asyncio.Future[None]:
        """As `release`, for who has something else to do until then."""
        if self._ending is None:
            self._blameless = True
            self._ending = self._engine.chore(self._end("the box was released"))
        return self._ending

    def _expire(self) -> None:
        if self._ending is None:
            self._ending = self._engine.chore(self._end(self._expired_reason))

    @property
    def _expired_reason(self) -> str:
        return f"its lease of {self._request.ttl_s:g} s has ended; ask for more with ttl_s"

    async def _end(self, reason: str) -> None:
        """Give back what the sandbox held, and close the ledger."""
        ledger = self._ledger
        watch = Stopwatch(self._clock)
        ledger.released(watch.last_ns)
        if (ledger.held_ns or ledger.start_ns) <= (released_ns := ledger.released_ns or 0) < watch.last_ns:
            watch.last_ns = released_ns  # its holder is in another process: the word of it was on its way
        self._over = self._over or reason
        if self._expiry is not None:
            self._expiry.cancel()
        await self._give_back(reason)
        ledger.add("cleanup", *watch.part())
        ledger.closed(watch.last_ns)
        self._engine.forget(self)
        # From here on a plain future in the place of this task: a task goes by way of code of Python's that swallows an interrupt, and whoever holds the box may let go
        # of it in any thread.
        self._ending = asyncio.get_running_loop().create_future()
        self._ending.set_result(None)

    @abstractmethod
    async def _give_back(self, reason: str) -> None:
        """The sandbox is nobody's from here on, and what it held is free; actions are refused already."""

    @abstractmethod
    async def _provide_worker(self, user: str | None) -> None:
        """Nobody inside acts for `user`; without a user the sandbox's own hands are gone and get replaced."""

    # ---- actions ----

    async def _act(self, call: Call[T], name: str = "action") -> T:
        channel = (self._channel if self._over is None else None) or self._live()
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

    async def _send_batch(self, calls: list_[Call[Any]], stop: bool) -> list_[Any]:
        return list_(await self._measured("batch", lambda channel: channel.batch(calls, stop=stop)))

    # ---- the channel and the account ----

    def _live(self) -> Channel:
        channel = self._channel
        if channel is None or self._over is not None:
            raise SandboxLost(self.id, self._over or "it is being reset")
        return channel

    def _failed(self, name: str, start_ns: int, channel: Channel | None, exc: BaseException) -> None:
        """Write down an action that did not come off; the infrastructure's failures mark the whole rollout."""
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
