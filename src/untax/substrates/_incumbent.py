"""What the incumbent paths have in common: one deadline for all steps of an action, and whose fault it is when it passes.

How a command ended is told as its backend tells it. An exec gives one number, which is 128 + n for a command that signal n ended as well as for
one that exited so; hence such a path says `exited` with that number and never `signaled`, which is for backends that know. docs/measurement.md
says it to readers.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from typing import TypeVar

from untax.core.errors import BackendError

T = TypeVar("T")

ANSWER_S = 3.0  # a daemon on a busy machine takes a second to answer, and so does a login to a machine far away

_MISSING = re.compile(r"executable file .*not found|no such file or directory", re.IGNORECASE | re.DOTALL)
_UNFIT = re.compile(r"permission denied|exec format error|(is|not) a directory", re.IGNORECASE)


async def by_deadline(work: Awaitable[T], timeout_s: float, sandbox_id: str, ask: Callable[[], Awaitable[object]]) -> T | None:
    """What `work` gives, or None when it is the command that takes longer than `timeout_s`.

    That it is the command is known from the backend: past the deadline it is asked by `ask`, which may raise what is the matter. One that
    says nothing within `ANSWER_S` is a `BackendError`, as is a connection that breaks.
    """
    try:
        async with asyncio.timeout(timeout_s) as limit:
            return await work
    except OSError as exc:  # a TimeoutError is one too: the deadline's, or the kernel's for a connection
        if not limit.expired():
            raise BackendError(sandbox_id, f"the connection of an exec broke: {exc.strerror or exc}") from exc
    try:
        async with asyncio.timeout(ANSWER_S):
            await ask()
    except OSError as exc:
        raise BackendError(
            sandbox_id, f"an exec had no end within {timeout_s:g} s, and its backend then no answer to a question within {ANSWER_S:g} s"
        ) from exc
    return None


def code_of_unstarted(words: str) -> int | None:
    """As a shell has it: 127 for what is not there, 126 for what cannot be executed; None when a runtime's words are about something else."""
    return 127 if _MISSING.search(words) else 126 if _UNFIT.search(words) else None
