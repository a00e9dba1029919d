"""A box, blocking: every action straight over the socket where it is the callers', by the loop otherwise."""

from __future__ import annotations

import asyncio
from builtins import list as list_
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from untax.batch import Batch as AsyncBatch
from untax.box import TIMEOUT_S, _record
from untax.box import Box as AsyncBox
from untax.channel import actions, flow, tree
from untax.channel.actions import SearchHow
from untax.channel.arguments import Name
from untax.channel.blocking import BlockingChannel
from untax.channel.call import Call
from untax.channel.client import Channel
from untax.channel.replies import Entry, ProcessInfo, SearchResult, TreeSize
from untax.core.errors import NoWorker, SandboxLost
from untax.core.ledger import Ledger
from untax.core.result import CommandResult
from untax.core.root import ImageConfig
from untax.core.spec import EnvSpec
from untax.sync.direct import Direct
from untax.sync.loop import AnyLink, Loop, LoopLink
from untax.sync.snapshot import Snapshot
from untax.sync.streams import Connection, Process, Session, Watch, watch_direct, watch_through

if TYPE_CHECKING:
    from untax.layers.merged import Change

T = TypeVar("T")


class Box:
    """As `untax.Box`, blocking; may be used from several threads at once."""

    def __init__(self, loop: Loop, inner: AsyncBox) -> None:
        self._loop = loop
        self._inner = inner

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def id(self) -> str:
        return self._inner.id

    @property
    def spec(self) -> EnvSpec:
        return self._inner.spec

    @property
    def ledger(self) -> Ledger:
        return self._inner.ledger

    @property
    def image(self) -> ImageConfig:
        return self._inner.image

    # ---- commands ----

    def run(
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
        return self._as_user(
            "run",
            user,
            lambda: actions.run(argv, cwd=cwd, env=env, stdin=stdin, user=user, timeout_s=timeout_s, merge=merge, cap=cap),
        )

    def shell(
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
        return self._as_user(
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
        """`with box.session() as bash`."""
        return Session(self, cwd, env, user, resume)

    def start(
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
        def make() -> flow.ProcessFlow:
            if pty:
                return flow.pty(argv, rows=rows, cols=cols, cwd=cwd, env=env, user=user, timeout_s=timeout_s)
            return flow.start(argv, cwd=cwd, env=env, user=user, timeout_s=timeout_s, merge=merge, stdin=stdin)

        try:
            return Process(self, self._open("start", make()))
        except NoWorker:
            self._loop.run(self._inner._provide_worker(user))
        return Process(self, self._open("start", make()))

    def processes(self) -> list_[ProcessInfo]:
        return self._act(actions.processes(), "processes")

    def attach(self, pid: int) -> Process:
        return Process(self, self._open("start", flow.attach(pid)))

    def batch(self) -> Batch:
        return Batch(self)

    # ---- files ----

    def read(self, path: Name, *, offset: int = 0, limit: int | None = None) -> bytes:
        return self._act(actions.read(path, offset=offset, limit=limit), "read")

    def write(
        self,
        path: Name,
        data: bytes,
        *,
        mode: int | None = None,
        append: bool = False,
        exclusive: bool = False,
        parents: bool = True,
    ) -> int:
        call = actions.write(path, data, mode=mode, append=append, exclusive=exclusive, parents=parents)
        return self._act(call, "write")

    def list(self, path: Name = ".") -> list_[Entry]:
        return self._act(actions.list_dir(path), "list")

    def stat(self, path: Name, *, follow: bool = True) -> Entry:
        return self._act(actions.stat(path, follow=follow), "stat")

    def mkdir(self, path: Name, *, mode: int = 0o755, parents: bool = True) -> None:
        self._act(actions.mkdir(path, mode=mode, parents=parents), "mkdir")

    def remove(self, path: Name, *, recursive: bool = False) -> int:
        return self._act(actions.remove(path, recursive=recursive), "remove")

    def move(self, source: Name, target: Name, *, overwrite: bool = True) -> None:
        self._act(actions.move(source, target, overwrite=overwrite), "move")

    def mark(
        self, path: Name, *, uid: int | None = None, gid: int | None = None, prefix: str = "", attributes: Mapping[str, str] | None = None
    ) -> None:
        self._act(actions.mark(path, uid=uid, gid=gid, prefix=prefix, attributes=attributes), "mark")

    def marks(self, paths: Sequence[Name], prefix: str) -> list_[dict[str, str]]:
        return self._act(actions.marks(paths, prefix), "marks")

    def upload(self, local: Name, remote: Name, *, timeout_s: float | None = TIMEOUT_S) -> TreeSize:
        return self._measured(
            "upload",
            lambda channel: channel.upload(local, remote, timeout_s=timeout_s),
            lambda box: box.upload(local, remote, timeout_s=timeout_s),
        )

    def download(self, remote: Name, local: Name, *, max_bytes: int = tree.MAX_BYTES, timeout_s: float | None = TIMEOUT_S) -> TreeSize:
        return self._measured(
            "download",
            lambda channel: channel.download(remote, local, max_bytes=max_bytes, timeout_s=timeout_s),
            lambda box: box.download(remote, local, max_bytes=max_bytes, timeout_s=timeout_s),
        )

    def search(
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
        call = actions.search(
            pattern,
            root,
            how=how,
            ignore_case=ignore_case,
            whole_words=whole_words,
            globs=globs,
            most=most,
            timeout_s=timeout_s,
        )
        return self._act(call, "search")

    def edit(self, path: Name, old: str | bytes, new: str | bytes, *, count: int = 1) -> int:
        return self._act(actions.edit(path, old, new, count=count), "edit")

    def apply_patch(self, diff: str | bytes, directory: Name = ".", *, strip: int = 1, dry_run: bool = False) -> list_[str]:
        return self._act(actions.apply_patch(diff, directory, strip=strip, dry_run=dry_run), "apply_patch")

    def watch(self, path: Name = ".", *, recursive: bool = True) -> Watch:
        """What happens below `path` from now on, as an iterator."""
        return self._measured(
            "watch",
            lambda channel: watch_direct(self._loop, channel, path, recursive),
            lambda box: watch_through(self._loop, box, path, recursive),
        )

    def connect(self, port: int) -> Connection:
        return Connection(self, self._open("connect", flow.connect(port)))

    # ---- its life ----

    def reset(self) -> None:
        self._loop.run(self._inner.reset())

    def snapshot(self, *, live: bool = False) -> Snapshot:
        return Snapshot(self._loop, self._loop.run(self._inner.snapshot(live=live)))

    def diff(self) -> list_[Change]:
        return self._loop.run(self._inner.diff())

    def pause(self) -> None:
        self._loop.run(self._inner.pause())

    def resume(self) -> None:
        self._loop.run(self._inner.resume())

    def release(self) -> None:
        """Give the sandbox up. Safe to call twice. After an interrupt that has begun, unless it came before the first step of this."""
        try:
            release_all((self,))
        except BaseException:
            self._loop.call_soon(self._inner._begin_release)  # the interrupt may have come before the loop was told, or woken for it
            raise

    # ---- actions ----

    def _act(self, call: Call[T], name: str) -> T:
        return self._measured(name, lambda channel: channel.call(call), lambda box: box._act(call, name))

    def _measured(
        self,
        name: str,
        direct: Callable[[BlockingChannel], T],
        through: Callable[[AsyncBox], Coroutine[Any, Any, T]],
    ) -> T:
        """Straight over the socket where it is the callers', by the loop otherwise."""
        inner = self._inner
        channel: object = (inner._channel if inner._over is None else None) or inner._live()
        if not isinstance(channel, Direct):
            return self._loop.run(through(inner))
        self._loop.check()
        start_ns = inner._clock()
        try:
            value = direct(channel.blocking)
        except BaseException as exc:
            if isinstance(exc, SandboxLost):
                self._loop.catch_up()  # only there it is known why, for one whose lease has ended
            inner._failed(name, start_ns, cast("Channel", channel), exc)
            raise
        inner._ledger.record(_record(name, start_ns, inner._clock(), value))
        return value

    def _as_user(self, name: str, user: str | None, make: Callable[[], Call[T]]) -> T:
        try:
            return self._act(make(), name)
        except NoWorker:
            self._loop.run(self._inner._provide_worker(user))
        return self._act(make(), name)

    def _open(self, name: str, stream: flow.Flow[T]) -> AnyLink[T]:
        async def through(box: AsyncBox) -> AnyLink[T]:
            link = await box._measured(name, lambda channel: channel.open(stream))
            return LoopLink(self._loop, link)

        def direct(channel: BlockingChannel) -> AnyLink[T]:
            return channel.open(stream)

        return self._measured(name, direct, through)


def release_all(boxes: Iterable[Box], begun: Callable[[], object] | None = None) -> None:
    """Give them up together, those of one engine; `begun` is called once that is under way. An interrupt cuts the wait short, not what was begun: the caller begins what was not."""
    left = [box for box in boxes if box._inner._ending is None or not box._inner._ending.done()]
    if not left:
        if begun is not None:
            begun()
        return
    loop = left[0]._loop

    def begin() -> None:
        for box in left:
            box._inner._begin_release()
        if begun is not None:
            begun()

    async def released() -> None:
        await asyncio.gather(*(box._inner.release() for box in left))

    loop.call_soon(begin)  # what is run below may be cancelled before its first step
    loop.run(released())


class Batch(AsyncBatch):
    """As `untax.Batch`; `send` waits."""

    def __init__(self, box: Box) -> None:
        super().__init__(box._inner._send_batch)
        self._box = box

    def send(self, *, stop: bool = False) -> list_[Any]:  # type: ignore[override]
        calls, self._calls = self._calls, []
        return self._box._measured(
            "batch",
            lambda channel: list_(channel.batch(calls, stop=stop)),
            lambda box: box._send_batch(calls, stop),
        )
