"""The same names, blocking: for programs without an event loop, from any number of threads, and inside a running loop.

Lifecycles are carried out by an event loop in a thread of the engine's own. The actions of a sandbox without network go
straight over its socket, in the caller's thread, because two hops between threads would cost more than the action; with a
network the loop has to serve it and carries the actions too.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import os
import threading
from builtins import list as list_
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

import untax
from untax.batch import Batch as AsyncBatch
from untax.box import TIMEOUT_S, _record
from untax.box import Box as AsyncBox
from untax.channel import actions, flow, tree
from untax.channel.actions import SearchHow
from untax.channel.arguments import Name
from untax.channel.blocking import BlockingChannel
from untax.channel.blocking_link import BlockingLink
from untax.channel.call import Call
from untax.channel.client import Channel
from untax.channel.link import Link
from untax.channel.process import Output
from untax.channel.replies import Entry, Event, ProcessInfo, SearchResult, TreeSize
from untax.channel.stream import SocketStream
from untax.core.errors import Gone, NoWorker, PoolClosed, SandboxLost, UntaxError, UsageError
from untax.core.ledger import Ledger
from untax.core.result import CommandResult
from untax.core.root import ImageConfig
from untax.core.spec import EnvSpec, Limits, Network
from untax.core.stream import ByteStream
from untax.core.substrate import Substrate
from untax.engine import Engine as AsyncEngine
from untax.leases import DEFAULT_TTL_S
from untax.leases import Lease as AsyncLease
from untax.snapshot import Snapshot as AsyncSnapshot

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.merged import Change
    from untax.layers.sources import Progress

T = TypeVar("T")

__all__ = ["Batch", "Box", "Connection", "Engine", "Lease", "Process", "Session", "Snapshot", "Watch"]

# Threads that wait for set-up steps of direct boxes; each waits on its own socket and costs nothing meanwhile.
_SET_UP_THREADS = 256


def __getattr__(name: str) -> object:
    """Specs, limits, results and errors are the same ones."""
    return getattr(untax, name)


class _Loop:
    """An event loop in a thread of its own."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="untax", daemon=True)
        self._thread.start()

    def check_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError("this process is a fork of the one that made the engine, whose thread it lacks: make a new engine here")

    def check(self) -> None:
        self.check_process()
        if self._loop.is_closed():
            raise PoolClosed("the engine is closed")

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Carry `work` out over there and wait for it. An interrupt cancels it first, and waits for that."""
        try:
            self.check()
        except UntaxError:
            work.close()
            raise
        if threading.current_thread() is self._thread:
            work.close()
            raise UsageError("untax.sync was called from its own loop's thread, which would wait for itself")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            if not future.done():
                future.cancel()
                concurrent.futures.wait([future], timeout=10)
            raise

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()


class Engine:
    """As `untax.Engine`: `with`, or `start()` and `aclose()`."""

    def __init__(self, substrate: str | Substrate = "namespace", **options: Any) -> None:
        self._inner = _DirectEngine(substrate, **options)
        self._loop: _Loop | None = None

    @property
    def substrate(self) -> Substrate:
        return self._inner.substrate

    def start(self) -> None:
        if self._loop is not None:
            raise UsageError("this engine is running; make a new one")
        loop = self._inner.thread = _Loop()
        try:
            loop.run(self._inner.start())
        except BaseException:
            loop.close()
            raise
        self._loop = loop

    def aclose(self) -> None:
        """Release every box and end. Safe to call twice."""
        if self._loop is not None:
            self._loop.check_process()  # the loop of a fork is its parent's, and not to be touched
        loop, self._loop = self._loop, None
        if loop is not None:
            try:
                loop.run(self._inner.aclose())
            finally:
                loop.close()
                self._inner.threads.shutdown(wait=False)

    close = aclose

    def __enter__(self) -> Engine:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.aclose()

    def lease(
        self,
        spec: EnvSpec | None = None,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[Box]:
        """`with engine.lease(spec) as box`."""
        inner = self._inner.lease(
            spec, env=env, user=user, files=files, limits=limits, network=network, wait_s=wait_s, ttl_s=ttl_s
        )  # fmt: skip
        return Lease(lambda: self._boxed(inner), Box.release)

    def acquire(
        self,
        spec: EnvSpec | None = None,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Box:
        return self.lease(
            spec, env=env, user=user, files=files, limits=limits, network=network, wait_s=wait_s, ttl_s=ttl_s
        ).get()  # fmt: skip

    def prepare(self, spec: EnvSpec, *, progress: Progress | None = None) -> Prepared:
        """As `untax.Engine.prepare`; `progress` is called in the engine's own thread."""
        return self._running().run(self._inner.prepare(spec, progress=progress))

    def fork(
        self,
        snapshot: Snapshot | str,
        n: int,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[list_[Box]]:
        """`with engine.fork(snapshot, 8) as group`."""
        inner = self._inner.fork(
            _unwrapped(snapshot), n, env=env, user=user, files=files, limits=limits, network=network, wait_s=wait_s, ttl_s=ttl_s
        )  # fmt: skip

        def take() -> list_[Box]:
            loop = self._running()
            return [Box(loop, box) for box in loop.run(_awaited(inner))]

        return Lease(take, self._release_all)

    def restore(
        self,
        snapshot: Snapshot | str,
        *,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        files: Mapping[str, bytes] | None = None,
        limits: Limits | None = None,
        network: Network | None = None,
        wait_s: float | None = None,
        ttl_s: float = DEFAULT_TTL_S,
    ) -> Lease[Box]:
        """`with engine.restore(snapshot) as box`."""
        inner = self._inner.restore(
            _unwrapped(snapshot), env=env, user=user, files=files, limits=limits, network=network, wait_s=wait_s, ttl_s=ttl_s
        )  # fmt: skip
        return Lease(lambda: self._boxed(inner), Box.release)

    def grader(
        self, box: Box, take: Sequence[str] = ("src/**",), *, wait_s: float | None = None, ttl_s: float = DEFAULT_TTL_S
    ) -> Lease[Box]:
        """`with engine.grader(box, take=("src/**",)) as clean`."""
        inner = self._inner.grader(box._inner, take, wait_s=wait_s, ttl_s=ttl_s)
        return Lease(lambda: self._boxed(inner), Box.release)

    def find_snapshot(self, snapshot_id: str) -> Snapshot:
        loop = self._running()
        return Snapshot(loop, loop.run(self._inner.find_snapshot(snapshot_id)))

    @property
    def quarantined(self) -> tuple[str, ...]:
        return self._inner.quarantined

    def _boxed(self, inner: AsyncLease[AsyncBox]) -> Box:
        loop = self._running()
        return Box(loop, loop.run(_awaited(inner)))

    def _release_all(self, boxes: list_[Box]) -> None:
        async def released() -> None:
            await asyncio.gather(*(box._inner.release() for box in boxes))

        self._running().run(released())

    def _running(self) -> _Loop:
        if self._loop is None:
            raise UsageError("the engine is not started, or closed: use `with Engine()`")
        return self._loop


async def _awaited(inner: AsyncLease[T]) -> T:
    return await inner


class Lease(Generic[T]):
    """What `lease`, `fork`, `restore` and `grader` return: `with` gives it back at the end of the block, `get()` leaves that to you."""

    def __init__(self, take: Callable[[], T], give_back: Callable[[T], object]) -> None:
        self._take = take
        self._give_back = give_back
        self._taken: list_[T] = []

    def get(self) -> T:
        return self._take()

    def __enter__(self) -> T:
        self._taken.append(self._take())
        return self._taken[-1]

    def __exit__(self, *exc: object) -> None:
        self._give_back(self._taken.pop())


class Snapshot:
    """As `untax.Snapshot`, blocking."""

    def __init__(self, loop: _Loop, inner: AsyncSnapshot) -> None:
        self._loop = loop
        self._inner = inner
        self.id = inner.id
        self.spec = inner.spec
        self.how = inner.how
        self.elapsed_s = inner.elapsed_s

    def __repr__(self) -> str:
        return repr(self._inner)

    @property
    def is_saved(self) -> bool:
        return self._inner.is_saved

    def save(self) -> str:
        return self._loop.run(self._inner.save())

    def drop(self) -> None:
        self._loop.run(self._inner.drop())


def _unwrapped(snapshot: Snapshot | str) -> AsyncSnapshot | str:
    return snapshot._inner if isinstance(snapshot, Snapshot) else snapshot


# ---- how the socket gets into the callers' threads ----


class _Direct:
    """A `BlockingChannel` where a box of the loop expects a `Channel`: for configuring, set-up steps and the end."""

    def __init__(self, blocking: BlockingChannel, threads: concurrent.futures.Executor) -> None:
        self.blocking = blocking
        self._threads = threads

    @property
    def is_lost(self) -> bool:
        return self.blocking.is_lost

    @property
    def cell_version(self) -> str:
        return self.blocking.cell_version

    @property
    def is_idle(self) -> bool:
        return self.blocking.is_idle

    async def call(self, call: Call[T]) -> T:
        return await self._in_thread(lambda: self.blocking.call(call))

    async def batch(self, calls: Sequence[Call[Any]], *, stop: bool = False) -> list_[object]:
        return await self._in_thread(lambda: self.blocking.batch(calls, stop=stop))

    async def upload(self, local: Name, remote: Name, *, timeout_s: float | None = TIMEOUT_S) -> TreeSize:
        return await self._in_thread(lambda: self.blocking.upload(local, remote, timeout_s=timeout_s))

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def close(self) -> None:
        self.blocking.close()


class _DirectBox(AsyncBox):
    def _channel_over(self, stream: ByteStream, sandbox_id: str) -> Channel:
        engine = cast("_DirectEngine", self._engine)
        if self.spec.network != "none" or not isinstance(stream, SocketStream):
            return super()._channel_over(stream, sandbox_id)
        direct: _Direct

        def lost(exc: SandboxLost) -> None:  # in whatever thread was reading
            assert engine.thread is not None
            engine.thread.call_soon(self._lost, direct, exc)

        direct = _Direct(BlockingChannel(stream.detach(), sandbox_id=sandbox_id, on_lost=lost), engine.threads)
        return cast("Channel", direct)  # has what the box itself uses; actions do not come this way


class _DirectEngine(AsyncEngine):
    box_class = _DirectBox

    def __init__(self, substrate: str | Substrate, **options: Any) -> None:
        super().__init__(substrate, **options)
        self.thread: _Loop | None = None
        self.threads = concurrent.futures.ThreadPoolExecutor(_SET_UP_THREADS, "untax-setup")


# ---- boxes ----


class Box:
    """As `untax.Box`, blocking; may be used from several threads at once."""

    def __init__(self, loop: _Loop, inner: AsyncBox) -> None:
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

    def session(self, *, cwd: Name | None = None, env: Mapping[str, str | None] | None = None, user: str | None = None) -> Session:
        """`with box.session() as bash`."""
        return Session(self, cwd, env, user)

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
            lambda channel: _watch_direct(self._loop, channel, path, recursive),
            lambda box: _watch_through(self._loop, box, path, recursive),
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
        """Give the sandbox up. Safe to call twice."""
        if self._inner._ending is None or not self._inner._ending.done():
            self._loop.run(self._inner.release())

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
        channel: object = inner._channel or inner._live()
        if not isinstance(channel, _Direct):
            return self._loop.run(through(inner))
        self._loop.check()
        start_ns = inner._clock()
        try:
            value = direct(channel.blocking)
        except BaseException as exc:
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

    def _open(self, name: str, stream: flow.Flow[T]) -> _AnyLink[T]:
        async def through(box: AsyncBox) -> _AnyLink[T]:
            link = await box._measured(name, lambda channel: channel.open(stream))
            return _LoopLink(self._loop, link)

        def direct(channel: BlockingChannel) -> _AnyLink[T]:
            return channel.open(stream)

        return self._measured(name, direct, through)


class _LoopLink(Generic[T]):
    """A link that lives in the loop, used from here."""

    def __init__(self, loop: _Loop, link: Link[T]) -> None:
        self.flow = link.flow
        self._loop = loop
        self._link = link

    def receive(self) -> tuple[int, bytes] | None:
        return self._loop.run(self._link.receive())

    def send(self, data: bytes) -> None:
        self._loop.run(self._link.send(data))

    def send_eof(self) -> None:
        self._loop.call_soon(self._link.send_eof)

    def wait(self) -> T:
        return self._loop.run(self._link.wait())

    def kill(self) -> None:
        self._loop.call_soon(self._link.kill)

    def cancel(self) -> None:
        self._loop.call_soon(self._link.cancel)


_AnyLink = BlockingLink[T] | _LoopLink[T]


class Session:
    """As `untax.Session`: one bash inside, whose commands run one after another."""

    def __init__(self, box: Box, cwd: Name | None, env: Mapping[str, str | None] | None, user: str | None) -> None:
        self.pid = 0
        self.is_alive = False
        self._id = 0
        self._box = box
        self._channel: object = None
        self._user = user
        self._options: dict[str, Any] = {"cwd": cwd, "env": env, "user": user}
        self._opening()  # a mistake is told now
        self._turn = threading.Lock()

    def _opening(self) -> Call[tuple[int, int]]:
        return actions.session_open(**self._options)

    def open(self) -> Session:
        """Start the shell; `with` does it too."""
        self._channel = self._box._inner._channel
        self._id, self.pid = self._box._as_user("session", self._user, self._opening)
        self.is_alive = True
        return self

    def run(self, text: str | bytes, *, timeout_s: float | None = TIMEOUT_S, cap: int = actions.OUTPUT_CAP) -> CommandResult:
        """Run what one would type; the result's exit code is `$?`."""
        call = actions.session_run(self._id, text, timeout_s=timeout_s, cap=cap)
        with self._turn:
            if not self.is_alive:
                raise Gone("the session's shell has ended, or was never opened: open another session")
            if self._channel is not self._box._inner._channel:
                raise SandboxLost(self._box.id, self._box._inner._over or "the box was reset: open another session")
            try:
                result = self._box._act(call, "session")
            except Gone:
                self.is_alive = False
                raise
            self.is_alive = call.alive
            return result

    def close(self) -> None:
        if self.is_alive:
            self.is_alive = False
            if self._channel is self._box._inner._channel:
                try:
                    self._box._act(actions.session_close(self._id), "session")
                except UntaxError:
                    pass  # it is gone either way

    def __enter__(self) -> Session:
        return self.open()

    def __exit__(self, *exc: object) -> None:
        self.close()


class Process:
    """As `untax.Process`: iterate over it for its output."""

    def __init__(self, box: Box, link: _AnyLink[CommandResult]) -> None:
        self.pid = link.flow.pid
        self._box = box
        self._held = link

    @property
    def is_running(self) -> bool:
        return not self._held.flow.finished and self._box._inner._channel is not None

    @property
    def _link(self) -> _AnyLink[CommandResult]:
        self._box._loop.check_process()
        return self._held

    def read(self) -> Output | None:
        """The next piece of output, or None when there will be no more."""
        piece = self._link.receive()
        return None if piece is None else Output("stdout" if piece[0] == flow.STDOUT else "stderr", piece[1])

    def __iter__(self) -> Iterator[Output]:
        while (output := self.read()) is not None:
            yield output

    def write(self, data: bytes) -> None:
        self._link.send(data)

    def close_stdin(self) -> None:
        self._link.send_eof()

    def signal(self, number: int = 15, *, group: bool = False) -> None:
        self._box._act(actions.signal(self.pid, number, group=group), "signal")

    def kill(self) -> None:
        self._link.kill()

    def resize(self, rows: int, cols: int) -> None:
        self._box._act(actions.resize(self.pid, rows, cols), "resize")

    def wait(self) -> CommandResult:
        """How it ended, with the output that was not read before."""
        kept = (bytearray(), bytearray())
        dropped = [0, 0]
        while (piece := self._link.receive()) is not None:
            index = piece[0] - 1
            room = actions.OUTPUT_CAP - len(kept[index])
            kept[index].extend(piece[1][:room])
            dropped[index] += max(0, len(piece[1]) - room)
        return dataclasses.replace(
            self._link.wait(),
            stdout=bytes(kept[0]),
            stderr=bytes(kept[1]),
            dropped_stdout=dropped[0],
            dropped_stderr=dropped[1],
        )

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *exc: object) -> None:
        self._link.cancel()


class Connection:
    """As `untax.Connection`: a byte stream to a port inside."""

    def __init__(self, box: Box, link: _AnyLink[None]) -> None:
        self._box = box
        self._held = link

    @property
    def _link(self) -> _AnyLink[None]:
        self._box._loop.check_process()
        return self._held

    def read(self) -> bytes:
        """The next bytes; empty at the end of the stream."""
        piece = self._link.receive()
        return b"" if piece is None else piece[1]

    def write(self, data: bytes) -> None:
        self._link.send(data)

    def write_eof(self) -> None:
        self._link.send_eof()

    def close(self) -> None:
        self._link.cancel()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Watch:
    """As `untax.Watch`: iterating waits for the next event, `close` ends it."""

    def __init__(self, loop: _Loop, following: Callable[[], Event | None], close: Callable[[], object]) -> None:
        self._loop = loop
        self._following = following
        self._close = close

    def __iter__(self) -> Watch:
        return self

    def __next__(self) -> Event:
        self._loop.check_process()
        event = self._following()
        if event is None:
            raise StopIteration
        return event

    def close(self) -> None:
        self._loop.check_process()
        self._close()

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _watch_direct(loop: _Loop, channel: BlockingChannel, path: Name, recursive: bool) -> Watch:
    watch = channel.watch(path, recursive=recursive)
    return Watch(loop, lambda: next(watch, None), watch.close)


async def _watch_through(loop: _Loop, box: AsyncBox, path: Name, recursive: bool) -> Watch:
    watch = await box.watch(path, recursive=recursive)

    async def following() -> Event | None:
        try:
            return await watch.__anext__()
        except StopAsyncIteration:
            return None

    return Watch(loop, lambda: loop.run(following()), lambda: loop.call_soon(watch.close))


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
