"""envd's file system service over a box: stat, list, make, move, remove, and the giving of files to whom they belong.

envd does its work as root and gives what it makes to the user; so does this where the engine can have a root inside.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from untax.channel.replies import Entry
from untax.core.errors import Exists, NotFound, UntaxError
from untax.service.e2b.connect import Message, RpcError, number_field, text_field
from untax.service.e2b.models import METADATA_PREFIX, Account, entry_info, resolved

if TYPE_CHECKING:
    from untax.service.e2b.files import Pieces
    from untax.service.e2b.sandbox import Sandbox

_LINKS_MAX = 40  # as the kernel follows
_DEPTH_MAX = 100
_LISTED_MAX = 100_000
_TOGETHER = 64  # actions in one frame


class Filesystem:
    """The calls of one request: who asks decides where relative paths begin and who owns what is made."""

    def __init__(self, sandbox: Sandbox, account: Account) -> None:
        self._sandbox = sandbox
        self._box = sandbox.box
        self._account = account

    def path(self, given: str) -> str:
        if "\0" in given:
            raise RpcError("invalid_argument", "the path has a NUL in it")
        return resolved(given, self._account.home)

    # ---- calls ----

    async def stat(self, message: Message) -> Message:
        return {"entry": await self.info(self.path(text_field(message, "path")))}

    async def make_dir(self, message: Message) -> Message:
        path = self.path(text_field(message, "path"))
        try:
            entry = await self._box.stat(path)
        except NotFound:
            await self.make_directories(path)
            return {"entry": await self.info(path)}
        if entry.is_dir:
            raise RpcError("already_exists", f"directory already exists: {path}")
        raise RpcError("invalid_argument", f"path already exists but it is not a directory: {path}")

    async def move(self, message: Message) -> Message:
        source, target = (self.path(text_field(message, name)) for name in ("source", "destination"))
        await self._box.stat(source, follow=False)
        await self.make_directories(posixpath.dirname(target))
        await self._box.move(source, target)
        return {"entry": await self.info(target)}

    async def remove(self, message: Message) -> Message:
        path = self.path(text_field(message, "path"))
        if path == "/":
            raise RpcError("invalid_argument", "the root itself is not removed")
        try:
            await self._box.remove(path, recursive=True)
        except NotFound:
            pass  # as envd: what is not there is removed
        return {}

    async def list_dir(self, message: Message) -> Message:
        path = self.path(text_field(message, "path"))
        depth = min(number_field(message, "depth") or 1, _DEPTH_MAX)
        entry = await self._box.stat(path)
        if not entry.is_dir:
            raise RpcError("invalid_argument", f"path is not a directory: {path}")
        found: list[tuple[str, Entry]] = []
        await self._walk(path, depth, found)
        return {"entries": await self._infos(found)}

    async def _walk(self, path: str, depth: int, found: list[tuple[str, Entry]]) -> None:
        """Depth first, each directory in the order of its names, as envd walks."""
        try:
            entries = await self._box.list(path)
        except NotFound:
            return  # it went while we looked
        for entry in sorted(entries, key=lambda one: one.name):
            if len(found) >= _LISTED_MAX:
                raise RpcError("resource_exhausted", f"more than {_LISTED_MAX} entries: ask for less depth")
            inside = posixpath.join(path, entry.name)
            found.append((inside, entry))
            if entry.is_dir and depth > 1:
                await self._walk(inside, depth - 1, found)

    # ---- entries ----

    async def info(self, path: str) -> Message:
        """`NotFound` when nothing is there."""
        return (await self._infos([(path, await self._box.stat(path, follow=False))]))[0]

    async def _infos(self, found: Sequence[tuple[str, Entry]]) -> list[Message]:
        accounts = await self._sandbox.accounts()
        marks: list[Mapping[str, str]] = []
        for at in range(0, len(found), 4096):
            marks += await self._box.marks([path for path, _ in found[at : at + 4096]], METADATA_PREFIX)
        infos = []
        for (path, entry), metadata in zip(found, marks, strict=True):
            kind, target = await self._led_to(path, entry) if entry.type == "link" else (None, None)
            infos.append(entry_info(entry, path, accounts, kind=kind, target=target, metadata=metadata))
        return infos

    async def _led_to(self, path: str, entry: Entry) -> tuple[str, str]:
        """What a link leads to in the end, and where that is; a link that leads nowhere is told with where it points."""
        at = path
        for _ in range(_LINKS_MAX):
            if entry.type != "link" or entry.target is None:
                return entry.type, at
            at = resolved(entry.target, "/", posixpath.dirname(at))
            try:
                entry = await self._box.stat(at, follow=False)
            except (NotFound, NotADirectoryError):
                break
        return "link", at

    # ---- making and giving ----

    @property
    def _owner(self) -> tuple[int | None, int | None]:
        """For `mark`: nobody where the hands are the user's own anyway."""
        if self._sandbox.hands == self._account.name:
            return None, None
        return self._account.uid, self._account.gid

    async def make_directories(self, path: str) -> None:
        """As `mkdir -p`; those that were missing belong to the user."""
        chain = [path]
        while chain[-1] not in ("/", ""):
            chain.append(posixpath.dirname(chain[-1]))
        chain.reverse()
        missing: list[str] = []
        for at in range(0, len(chain), _TOGETHER):
            batch = self._box.batch()
            for one in chain[at : at + _TOGETHER]:
                batch.stat(one)
            for one, outcome in zip(chain[at : at + _TOGETHER], await batch.send(), strict=True):
                if isinstance(outcome, NotFound):
                    missing.append(one)
                elif isinstance(outcome, UntaxError):
                    raise outcome
                elif not outcome.is_dir:
                    raise RpcError("invalid_argument", f"path is not a directory: {one}")
        uid, gid = self._owner
        for at in range(0, len(missing), _TOGETHER // 2):
            batch = self._box.batch()
            for one in missing[at : at + _TOGETHER // 2]:
                batch.mkdir(one, parents=False)
                if uid is not None:
                    batch.mark(one, uid=uid, gid=gid)
            for outcome in await batch.send(stop=True):
                if isinstance(outcome, UntaxError) and not isinstance(outcome, Exists):
                    raise outcome

    async def write(self, path: str, pieces: Pieces, metadata: Mapping[str, str]) -> Message:
        """A whole file of the user's, its metadata replaced. Of what is large the pieces follow each other."""
        await self._first(path, await pieces.take(), metadata)
        while data := await pieces.take():
            await self._box.write(path, data, append=True, parents=False)
        info: Message = {"path": path, "name": posixpath.basename(path), "type": "file"}
        if metadata:
            info["metadata"] = dict(metadata)
        return info

    async def _first(self, path: str, data: bytes, metadata: Mapping[str, str]) -> None:
        uid, gid = self._owner
        for is_last in (False, True):
            batch = self._box.batch().write(path, data, parents=False)
            batch.mark(path, uid=uid, gid=gid, prefix=METADATA_PREFIX, attributes=metadata)
            outcome = next((one for one in await batch.send(stop=True) if isinstance(one, UntaxError)), None)
            if outcome is None:
                return
            if is_last or not isinstance(outcome, NotFound):
                raise outcome
            await self.make_directories(posixpath.dirname(path))
