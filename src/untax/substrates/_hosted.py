"""What sandboxes of all providers have in common: keys, rates, ownership, and creates whose answer is lost. One file beside it for each provider.

A provider's SDK has exceptions of its own; `told` says in a few words what one means, and everything else is decided here, once: what is asked
again and when, what is an error of which kind, and what its remedy is. Sandboxes carry their owner in their tags, and those of engines that are
dead are removed at the next start.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import math
import os
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from untax.core.errors import BackendError, CreateError, SandboxLost, SubstrateUnavailable, UntaxError, UsageError
from untax.core.spec import ISOLATION_LEVELS, EnvSpec
from untax.core.substrate import Typical
from untax.substrates._host import cell_missing_reason
from untax.substrates._hosted_sandbox import HostedSandbox

T = TypeVar("T")

log = logging.getLogger("untax.hosted")

TIMEOUT_S = 3600  # of a sandbox whose engine has died
_TRIES = 4
_PATIENCE_S = 60.0  # for one Retry-After; whoever asks for more refuses
_OWNER, _PID, _SINCE, _CREATE = "untax-owner", "untax-pid", "untax-since", "untax-create"
_UNDO_S = (0.0, 2.0)  # before each look for a sandbox that nobody got; it may be there only a moment after
_CLOSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Trouble:
    """What an exception of an SDK means."""

    kind: Literal["rate", "key", "forbidden", "usage", "gone", "late", "failed", "unreachable"]
    after_s: float | None = None
    """With `rate`: when the provider will hear the same again, if it said so."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a user may say of any provider, checked where it enters."""

    isolation: str
    timeout_s: int
    creates_per_s: float
    usd_per_s: float | None
    state_dir: str | None

    def __post_init__(self) -> None:
        if self.isolation not in ISOLATION_LEVELS:
            raise UsageError(f"isolation must be one of {', '.join(ISOLATION_LEVELS)}, not {self.isolation!r}")
        if not (self.creates_per_s > 0 and math.isfinite(self.creates_per_s)):
            raise UsageError("creates_per_s must be a positive number")
        if not self.timeout_s > 0:
            raise UsageError("timeout_s must be a positive number of seconds")
        if self.usd_per_s is not None and not (self.usd_per_s >= 0 and math.isfinite(self.usd_per_s)):
            raise UsageError("usd_per_s must be a number of dollars for each second, 0 or more")


@dataclass(frozen=True, slots=True)
class Found:
    """A sandbox that the provider lists."""

    id: str
    marks: Mapping[str, str]
    end: Callable[[], Awaitable[object]]


class Hosted(ABC):
    """A substrate whose sandboxes a provider runs. `Service`, `Priced`, `Fastidious` and `Diagnosing` for all of them."""

    name: ClassVar[str]
    provider: ClassVar[str]
    """As sentences have it."""
    extra: ClassVar[str]
    """Of untax; the SDK's own name as well."""
    key: ClassVar[str]
    """The variable, or variables, that hold it."""
    held: ClassVar[str]
    """What the channel runs over, as `untax doctor` says it."""
    typical = Typical(start_s=1.0, action_s=0.1)

    def __init__(self, terms: Terms) -> None:
        self.isolation = terms.isolation
        self.usd_per_s = terms.usd_per_s
        """What a second of a sandbox costs, for projection and advice; None: not known."""
        self.timeout_s = terms.timeout_s
        self._creates_per_s = terms.creates_per_s
        self._pace = asyncio.Lock()
        self._next_at = 0.0
        self._undoing: set[asyncio.Task[None]] = set()
        self._owner = hashlib.sha256(f"{_machine()} {os.getuid()} {terms.state_dir or ''}".encode()).hexdigest()[:16]

    # ---- what each provider has of its own ----

    @abstractmethod
    def _has_key(self) -> bool: ...

    @abstractmethod
    def told(self, exc: Exception) -> Trouble:
        """What an exception means that came out of the SDK, or through it."""

    @abstractmethod
    async def _made(self, spec: EnvSpec, marks: dict[str, str]) -> HostedSandbox:
        """One call of the SDK: a sandbox that carries `marks`, with the provider's own network closed."""

    @abstractmethod
    def _found(self, marks: dict[str, str]) -> AsyncIterator[Found]:
        """Those that carry `marks`, and perhaps more. What the SDK raises comes through."""

    async def _close(self) -> None:
        """Let go of what the SDK holds open."""
        return

    # ---- as a substrate ----

    def unavailable_reason(self) -> str | None:
        if importlib.util.find_spec(self.extra) is None:
            return f"needs {self.provider}'s SDK: pip install 'untax[{self.extra}]'"
        if not self._has_key():
            return f"needs a key: set {self.key}"
        return cell_missing_reason()

    def image_trouble(self, image: str) -> str | None:
        if image == "host":
            return None
        return f"image {image!r}: a hosted sandbox has its provider's software; name it with Engine({self.name!r}, …), whose options docs/hosted.md has"

    def evidence(self) -> list[str]:
        cost = "not known: give usd_per_s" if self.usd_per_s is None else f"{self.usd_per_s:g} USD a second"
        return [f"channel: {self.held}", f"cost: {cost}", f"a sandbox whose engine has died ends within {self.timeout_s} s"]

    async def start(self) -> None:
        """Remove what engines of this machine and state directory left that are dead."""
        await self._remove({_OWNER: self._owner}, lambda marks: _started(marks.get(_PID, "")) != marks.get(_SINCE))

    async def _remove(self, marks: dict[str, str], is_left: Callable[[Mapping[str, str]], bool]) -> None:
        """Those with `marks` of which nobody is the holder."""

        async def listed() -> list[Found]:
            # Whole before anything goes: what goes may shift the pages that are still to come.
            return [one async for one in self._found(marks) if marks.items() <= one.marks.items() and is_left(one.marks)]

        for one in await self.asked("", listed):
            log.info("sandbox %s, which nobody holds, goes", one.id)
            with contextlib.suppress(SandboxLost):  # somebody was faster
                await self.asked(one.id, one.end)

    async def aclose(self) -> None:
        """Every sandbox is destroyed by who made it; those that nobody got are waited for."""
        if self._undoing:
            _, late = await asyncio.wait(self._undoing, timeout=_CLOSE_S)
            for task in late:
                task.cancel()
        await self._close()

    async def create(self, spec: EnvSpec) -> HostedSandbox:
        if trouble := self.image_trouble(spec.image):
            raise UsageError(trouble)
        mark = secrets.token_hex(16)
        marks = {_OWNER: self._owner, _PID: str(os.getpid()), _SINCE: _started(str(os.getpid())) or "", _CREATE: mark}
        is_wanted = True

        async def make_one() -> HostedSandbox:
            await self._wait_turn()
            if not is_wanted:
                raise CreateError("", "nobody waits for it any more")
            return await self._made(spec, marks)

        making = asyncio.ensure_future(self.asked("", make_one))
        try:
            made = await asyncio.shield(making)
        except (SubstrateUnavailable, UsageError):
            raise  # refused: there is none
        except BaseException:  # nobody knows whether there is one, or will be
            is_wanted = False
            undoing = asyncio.ensure_future(self._undo(mark, making))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise
        made.keep()
        return made

    async def _undo(self, mark: str, making: asyncio.Future[HostedSandbox]) -> None:
        """Remove what came of a create whose answer nobody got."""
        await asyncio.gather(making, return_exceptions=True)
        for pause_s in _UNDO_S:
            await asyncio.sleep(pause_s)
            try:
                await self._remove({_CREATE: mark}, lambda _: True)
            except UntaxError as exc:
                log.warning("a sandbox may be left, and ends within %d s: %s", self.timeout_s, exc)

    async def _wait_turn(self) -> None:
        """So many a second and no more: a provider counts them, and refuses whoever asks for more."""
        loop = asyncio.get_running_loop()
        async with self._pace:
            wait = self._next_at - loop.time()
            self._next_at = max(loop.time(), self._next_at) + 1 / self._creates_per_s
            if wait > 0:
                await asyncio.sleep(wait)

    # ---- calls of the SDK ----

    async def asked(self, sandbox_id: str, call: Callable[[], Awaitable[T]]) -> T:
        """One call of the SDK, its errors in ours. What the provider refuses for its rate is asked again when it said, or later each time."""
        for attempt in range(_TRIES):
            try:
                return await call()
            except UntaxError:
                raise
            except Exception as exc:  # of the SDK, or of what it is made of: `told` knows them
                trouble = self.told(exc)
                pause_s = 2.0**attempt if trouble.after_s is None else trouble.after_s
                if trouble.kind != "rate" or attempt == _TRIES - 1 or pause_s > _PATIENCE_S:
                    raise self.error(trouble, sandbox_id, exc) from exc
            # Nobody else has to find out by being refused as well.
            self._next_at = max(self._next_at, asyncio.get_running_loop().time() + pause_s)
            await asyncio.sleep(pause_s)
        raise AssertionError

    def error(self, trouble: Trouble, sandbox_id: str, exc: Exception) -> UntaxError:
        said = str(exc) or type(exc).__name__
        match trouble.kind:
            case "rate":
                when = "" if trouble.after_s is None else f" (it asks to come again after {trouble.after_s:g} s)"
                return SubstrateUnavailable(
                    sandbox_id, f"{self.provider} refuses for its rate or quota: {said}{when}; lower creates_per_s, or ask for more"
                )
            case "key":
                return SubstrateUnavailable(sandbox_id, f"{self.provider} does not know the key: {said}; set {self.key}")
            case "forbidden" if not sandbox_id:
                return SubstrateUnavailable(
                    "", f"{self.provider} does not allow this to the key: {said}; look at its rights and limits there"
                )
            case "usage" | "gone" if not sandbox_id:
                return UsageError(f"{self.provider} has no such sandbox to give: {said}; look at the options of Engine({self.name!r}, …)")
            case "gone":
                return SandboxLost(sandbox_id, f"{self.provider} does not have it any more: {said}")
            case "late" if not sandbox_id:
                return CreateError("", f"{self.provider}: {said}")
            case "unreachable":
                return BackendError(sandbox_id, f"{self.provider} cannot be reached: {said}")
            case _:
                return BackendError(sandbox_id, f"{self.provider}: {said}")


def given(**options: Any) -> dict[str, Any]:
    """Those that were given: an SDK has defaults of its own for the others."""
    return {name: value for name, value in options.items() if value is not None}


def retry_after(headers: Mapping[str, Any]) -> float | None:
    """The seconds of a `Retry-After`; a date there is as good as none, because clocks differ."""
    for name, value in headers.items():
        if name.lower() == "retry-after":
            with contextlib.suppress(ValueError):
                seconds = float(value)
                return seconds if math.isfinite(seconds) and seconds >= 0 else None
    return None


def _machine() -> str:
    """Where the numbers of processes mean what they mean here: images and clones share a machine's id, and containers have processes of their own."""
    parts = [os.uname().nodename]
    for path in ("/etc/machine-id", "/proc/sys/kernel/random/boot_id"):
        with contextlib.suppress(OSError):
            parts.append(Path(path).read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(parts)


def _started(pid: str) -> str | None:
    """When a process of this machine began, which tells it from a later one of the same number; None when there is none."""
    try:
        return Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, IndexError):
        return None
