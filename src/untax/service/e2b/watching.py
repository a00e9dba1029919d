"""envd's watches: as a stream of events, and as watchers that are asked for what has come since."""

from __future__ import annotations

import asyncio
import posixpath
import secrets
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from untax.channel.link import Watch
from untax.core.errors import ActionError, NotDirectory
from untax.service.e2b.connect import Message, RpcError, flag_field, text_field
from untax.service.e2b.filesystem import Filesystem
from untax.service.e2b.models import events_of

if TYPE_CHECKING:
    from untax.service.e2b.sandbox import Sandbox

_WATCHERS_MAX = 256
_HAS_ENTRY = ("EVENT_TYPE_CREATE", "EVENT_TYPE_WRITE", "EVENT_TYPE_CHMOD")


@dataclass(eq=False)
class Watcher:
    """One that is asked for what has come."""

    files: Filesystem
    path: str
    has_entries: bool
    watch: Watch


class Watchers:
    """Those of one sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._watchers: dict[str, Watcher] = {}

    async def stream(self, files: Filesystem, message: Message, ping_s: float) -> AsyncIterator[Message]:
        path, watch = await self._watch(files, message)
        return self._streamed(files, watch, path, flag_field(message, "includeEntry"), ping_s)

    async def _streamed(self, files: Filesystem, watch: Watch, path: str, has_entries: bool, ping_s: float) -> AsyncIterator[Message]:
        events = _told(files, watch, path, has_entries)
        coming: asyncio.Task[Message] | None = None
        try:
            yield {"start": {}}
            while True:
                coming = coming or asyncio.ensure_future(anext(events))
                done, _ = await asyncio.wait([coming], timeout=ping_s)
                if not done:
                    yield {"keepalive": {}}
                    continue
                try:
                    event = coming.result()
                except StopAsyncIteration:
                    return
                coming = None
                yield {"filesystem": event}
        finally:
            watch.close()
            if coming is not None:
                coming.cancel()

    async def create(self, files: Filesystem, message: Message) -> Message:
        if len(self._watchers) >= _WATCHERS_MAX:
            raise RpcError("resource_exhausted", f"there are {_WATCHERS_MAX} watchers in the sandbox already: remove some")
        path, watch = await self._watch(files, message)
        name = "w" + secrets.token_hex(8)
        self._watchers[name] = Watcher(files, path, flag_field(message, "includeEntry"), watch)
        return {"watcherId": name}

    async def events(self, message: Message) -> Message:
        """What has come since it was last asked. What happened before the question is in the answer."""
        watcher = self._named(message)
        # The worker inside answers one question after another and looks at its watches in between: after the second it has looked.
        for _ in range(2):
            await self._sandbox.box.stat("/")
        events = [
            await _message(watcher.files, watcher.path, watcher.has_entries, *one)
            for event in watcher.watch.take_now()
            for one in events_of(event)
        ]
        return {"events": events}

    async def remove(self, message: Message) -> Message:
        watcher = self._named(message)
        del self._watchers[text_field(message, "watcherId")]
        watcher.watch.close()
        return {}

    def _named(self, message: Message) -> Watcher:
        name = text_field(message, "watcherId")
        found = self._watchers.get(name)
        if found is None:
            raise RpcError("not_found", f"watcher with id {name} not found")
        return found

    async def _watch(self, files: Filesystem, message: Message) -> tuple[str, Watch]:
        path = files.path(text_field(message, "path"))
        box = self._sandbox.box
        if not (await box.stat(path)).is_dir:
            raise NotDirectory(20, "Not a directory", path)
        return path, await box.watch(path, recursive=flag_field(message, "recursive"))


async def _told(files: Filesystem, watch: Watch, path: str, has_entries: bool) -> AsyncIterator[Message]:
    async for event in watch:
        for one in events_of(event):
            yield await _message(files, path, has_entries, *one)


async def _message(files: Filesystem, path: str, has_entries: bool, name: str, kind: str) -> Message:
    message: Message = {"name": name, "type": kind}
    if has_entries and kind in _HAS_ENTRY:
        try:
            message["entry"] = await files.info(posixpath.join(path, name) if name else path)
        except ActionError:
            pass  # it is gone again, or was moved
    return message
