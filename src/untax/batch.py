"""Many actions in one frame: collected here, sent together, answered one by one."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from untax.channel import actions
from untax.channel.arguments import Name
from untax.channel.call import Call

Send = Callable[[list[Call[Any]], bool], Awaitable[list[Any]]]


class Batch:
    """Actions in the order in which they were added. Nothing is sent before `send()`; it can be sent once.

    Each method takes what the method of the same name of `Box` takes. They run one after another inside.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._calls: list[Call[Any]] = []

    def __len__(self) -> int:
        return len(self._calls)

    def add(self, call: Call[Any]) -> Batch:
        self._calls.append(call)
        return self

    async def send(self, *, stop: bool = False) -> list[Any]:
        """Each action's value, or the error that it would have raised. `stop` leaves out what follows the first failure.

        A command that exits with another code than 0 has not failed in this sense; one that was left out is `NotRun`.
        """
        calls, self._calls = self._calls, []
        return await self._send(calls, stop)

    def run(
        self,
        argv: Sequence[Name],
        *,
        cwd: Name | None = None,
        env: Mapping[str, str | None] | None = None,
        stdin: bytes | None = None,
        user: str | None = None,
        timeout_s: float | None = actions.TIMEOUT_S,
    ) -> Batch:
        return self.add(actions.run(argv, cwd=cwd, env=env, stdin=stdin, user=user, timeout_s=timeout_s))

    def shell(
        self,
        text: str,
        *,
        cwd: Name | None = None,
        env: Mapping[str, str | None] | None = None,
        stdin: bytes | None = None,
        user: str | None = None,
        timeout_s: float | None = actions.TIMEOUT_S,
    ) -> Batch:
        return self.add(actions.shell(text, cwd=cwd, env=env, stdin=stdin, user=user, timeout_s=timeout_s))

    def read(self, path: Name, *, offset: int = 0, limit: int | None = None) -> Batch:
        return self.add(actions.read(path, offset=offset, limit=limit))

    def write(self, path: Name, data: bytes, *, mode: int | None = None, append: bool = False, parents: bool = True) -> Batch:
        return self.add(actions.write(path, data, mode=mode, append=append, parents=parents))

    def list(self, path: Name = ".") -> Batch:
        return self.add(actions.list_dir(path))

    def stat(self, path: Name, *, follow: bool = True) -> Batch:
        return self.add(actions.stat(path, follow=follow))

    def mkdir(self, path: Name, *, mode: int = 0o755, parents: bool = True) -> Batch:
        return self.add(actions.mkdir(path, mode=mode, parents=parents))

    def remove(self, path: Name, *, recursive: bool = False) -> Batch:
        return self.add(actions.remove(path, recursive=recursive))

    def move(self, source: Name, target: Name, *, overwrite: bool = True) -> Batch:
        return self.add(actions.move(source, target, overwrite=overwrite))

    def mark(
        self, path: Name, *, uid: int | None = None, gid: int | None = None, prefix: str = "", attributes: Mapping[str, str] | None = None
    ) -> Batch:
        return self.add(actions.mark(path, uid=uid, gid=gid, prefix=prefix, attributes=attributes))

    def search(self, pattern: str | bytes, root: Name = ".", **options: Any) -> Batch:
        return self.add(actions.search(pattern, root, **options))

    def edit(self, path: Name, old: str | bytes, new: str | bytes, *, count: int = 1) -> Batch:
        return self.add(actions.edit(path, old, new, count=count))

    def apply_patch(self, diff: str | bytes, directory: Name = ".", *, strip: int = 1) -> Batch:
        return self.add(actions.apply_patch(diff, directory, strip=strip))
