"""The persistent shell: one bash whose working directory, variables and functions last from one command to the next."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from typing import Protocol, TypeVar

from untax.channel import actions
from untax.channel.arguments import Name
from untax.channel.call import Call
from untax.core.errors import Gone, UntaxError
from untax.core.result import CommandResult

T = TypeVar("T")


class Caller(Protocol):
    """Carries out one action: `Channel.call`, or something around it."""

    async def __call__(self, call: Call[T], /) -> T: ...


class Session:
    """One bash inside. Its commands run one after another, in the order in which they were asked for.

    A command that ends the shell (`exit`, `exec`) still has a result; from then on `is_alive` is false and `run` raises
    `Gone`. The same holds when the cell had to end the shell to stop a command at its deadline.
    """

    def __init__(
        self,
        call: Caller,
        *,
        cwd: Name | None = None,
        env: Mapping[str, str | None] | None = None,
        user: str | None = None,
        resume: Session | None = None,
    ) -> None:
        self.pid = 0
        self.is_alive = False
        self._id = 0
        self._resumed = (resume._id, resume.pid) if resume is not None else None
        self._call = call
        self._opening = actions.session_open(cwd=cwd, env=env, user=user)
        self._turn = asyncio.Lock()

    async def open(self) -> Session:
        """Start the shell; `async with` does it too."""
        if self._resumed is not None:
            self._id, self.pid = self._resumed
        else:
            self._id, self.pid = await self._call(self._opening)
        self.is_alive = True
        return self

    async def run(self, text: str | bytes, *, timeout_s: float | None = actions.TIMEOUT_S, cap: int = actions.OUTPUT_CAP) -> CommandResult:
        """Run what one would type; the result's exit code is `$?`."""
        call = actions.session_run(self._id, text, timeout_s=timeout_s, cap=cap)
        async with self._turn:
            if not self.is_alive:
                raise Gone("the session's shell has ended, or was never opened: open another session")
            try:
                result = await self._call(call)
            except Gone:
                self.is_alive = False
                raise
            self.is_alive = call.alive
            return result

    async def close(self) -> None:
        """End the shell and what runs in it. Safe to call twice, and on a lost sandbox."""
        if self.is_alive:
            self.is_alive = False
            with contextlib.suppress(UntaxError):  # it is gone either way
                await self._call(actions.session_close(self._id))

    async def __aenter__(self) -> Session:
        return await self.open()

    async def __aexit__(self, *exc: object) -> None:
        await self.close()
