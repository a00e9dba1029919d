"""What lasts longer than one action, blocking: sessions, processes, connections, watches."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from untax.box import TIMEOUT_S
from untax.box import Box as AsyncBox
from untax.channel import actions, flow
from untax.channel.arguments import Name
from untax.channel.blocking import BlockingChannel
from untax.channel.call import Call
from untax.channel.process import Output
from untax.channel.replies import Event
from untax.core.errors import Gone, SandboxLost, UntaxError
from untax.core.result import CommandResult
from untax.sync.loop import AnyLink, Loop

if TYPE_CHECKING:
    from untax.sync.box import Box


class Session:
    """As `untax.Session`: one bash inside, whose commands run one after another."""

    def __init__(
        self, box: Box, cwd: Name | None, env: Mapping[str, str | None] | None, user: str | None, resume: Session | None = None
    ) -> None:
        self.pid = 0
        self.is_alive = False
        self._id = 0
        self._resumed = (resume._id, resume.pid) if resume is not None else None
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
        if self._resumed is not None:
            self._id, self.pid = self._resumed
        else:
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

    def __init__(self, box: Box, link: AnyLink[CommandResult]) -> None:
        self.pid = link.flow.pid
        self._box = box
        self._held = link

    @property
    def is_running(self) -> bool:
        return not self._held.flow.finished and self._box._inner._channel is not None

    @property
    def _link(self) -> AnyLink[CommandResult]:
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

    def wait_exit(self) -> None:
        """Return once it has ended; what it printed is still there to be read."""
        self._link.wait()

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

    def __init__(self, box: Box, link: AnyLink[None]) -> None:
        self._box = box
        self._held = link

    @property
    def _link(self) -> AnyLink[None]:
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

    def __init__(self, loop: Loop, following: Callable[[], Event | None], close: Callable[[], object]) -> None:
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


def watch_direct(loop: Loop, channel: BlockingChannel, path: Name, recursive: bool) -> Watch:
    watch = channel.watch(path, recursive=recursive)
    return Watch(loop, lambda: next(watch, None), watch.close)


async def watch_through(loop: Loop, box: AsyncBox, path: Name, recursive: bool) -> Watch:
    watch = await box.watch(path, recursive=recursive)

    async def following() -> Event | None:
        try:
            return await watch.__anext__()
        except StopAsyncIteration:
            return None

    return Watch(loop, lambda: loop.run(following()), lambda: loop.call_soon(watch.close))
