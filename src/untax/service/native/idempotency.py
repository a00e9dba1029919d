"""Requests that are carried out once, however often they come: by the key that the client gave them."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any

from untax.service.errors import Refused

KEPT_S = 600.0
"""How long an answer can be asked for again."""
KEYS_MAX = 4096
"""Answers kept for one tenant; the oldest goes first."""
KEPT_BYTES = 64 << 20
_KEY_MAX = 256


@dataclass(frozen=True, slots=True)
class Answered:
    """A whole answer, as it goes out, again if need be."""

    status: int
    body: bytes = b""
    media_type: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Kept:
    print: bytes
    task: asyncio.Task[Answered]
    until: float
    size: int = 0


class Answers:
    """`chore` starts work that outlives whoever asked for it."""

    def __init__(self, chore: Callable[[Coroutine[Any, Any, Answered]], asyncio.Task[Answered]]) -> None:
        self._chore = chore
        self._kept: dict[str, OrderedDict[str, _Kept]] = {}

    async def once(
        self, tenant: str, key: str, request: tuple[str, bytes], carry_out: Callable[[], Coroutine[Any, Any, Answered]]
    ) -> Answered:
        """What `carry_out` comes to, or came to when `key` was used before. `Refused` with 422 when that was for another request."""
        if not 0 < len(key) <= _KEY_MAX:
            raise Refused(400, "UsageError", f"an Idempotency-Key has 1 to {_KEY_MAX} characters")
        kept = self._kept.setdefault(tenant, OrderedDict())
        now = asyncio.get_running_loop().time()
        self._forget(kept, now)
        fingerprint = hashlib.sha256(b"\0".join((request[0].encode("utf-8", "replace"), request[1]))).digest()
        found = kept.get(key)
        if found is None:
            if len(kept) >= KEYS_MAX:
                raise Refused(429, "TooMany", f"{KEYS_MAX} requests with a key are under way", retry_after_s=1.0)
            found = kept[key] = _Kept(fingerprint, self._chore(carry_out()), now + KEPT_S)
            found.task.add_done_callback(lambda task: self._done(kept, key, task))
        elif found.print != fingerprint:
            raise Refused(422, "KeyReused", "this Idempotency-Key was used for another request: choose a new one")
        return await asyncio.shield(found.task)

    def _done(self, kept: OrderedDict[str, _Kept], key: str, task: asyncio.Task[Answered]) -> None:
        if task.cancelled() or task.exception() is not None or task.result().status in (408, 429) or task.result().status >= 500:
            kept.pop(key, None)  # nothing was done that must not be done again: it may be tried again under its key
        elif (one := kept.get(key)) is not None:
            one.size = len(task.result().body)

    def _forget(self, kept: OrderedDict[str, _Kept], now: float) -> None:
        total = sum(one.size for one in kept.values())
        for key, one in list(kept.items()):
            if not one.task.done():
                continue
            if one.until > now and total <= KEPT_BYTES and len(kept) < KEYS_MAX:
                break
            total -= one.size
            del kept[key]
