"""Sandboxes of E2B, or of any server that speaks its dialect, through E2B's own SDK: `Engine("hosted:e2b")`.

The cell is uploaded once per sandbox and started as a command; its channel is that command's input and output, so an action is one request there
and one piece of a held stream back. The incumbent path is one `commands.run` per action. What the sandbox may reach goes over the channel like everywhere; the
provider's own network is closed. Sandboxes carry their owner in their metadata, and those of engines that are dead are removed at the next start.
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import functools
import hashlib
import importlib.util
import inspect
import logging
import os
import secrets
import shlex
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from untax.core.errors import BackendError, CreateError, SandboxLost, SubstrateUnavailable, UntaxError, UsageError
from untax.core.result import SIGNAL_EXIT_BASE, TIMEOUT_EXIT_CODE, CommandResult
from untax.core.spec import ISOLATION_LEVELS, EnvSpec
from untax.core.stream import Receiver
from untax.core.substrate import Facts, Typical, Unenforced
from untax.substrates._host import cell_missing_reason, cell_path

T = TypeVar("T")

log = logging.getLogger("untax.hosted")

_CELL = "/tmp/.untax-cell"  # inside; each sandbox is one lease's
_HOME = "/home/user"
_PROXY_PORT = 3129  # a server of ours in the provider's place has a cell there already, at the usual one
_TIMEOUT_S = 3600
_CREATES_PER_S = 1.0  # what E2B's smallest plan takes; a server of one's own takes more
_TRIES = 4
_SEND_MAX = 256 << 10
_SIGKILL = 9
_OWNER, _PID, _SINCE, _CREATE = "untax-owner", "untax-pid", "untax-since", "untax-create"
_UNDO_S = (0.0, 2.0)  # before each look for a sandbox that nobody got; it may be there only a moment after
_CLOSE_S = 10.0
_RENEWALS = 3  # of a sandbox's time within it, so that two may fail
_UNENFORCED = tuple(
    Unenforced(name, "a hosted sandbox is as large as its template", "build a template with the cpu and memory that rollouts may have")
    for name in ("cpus", "memory_mib", "disk_mib", "pids")
)


def make(
    template: str = "base",
    api_key: str | None = None,
    domain: str | None = None,
    api_url: str | None = None,
    sandbox_url: str | None = None,
    isolation: str = "vm",
    timeout_s: int = _TIMEOUT_S,
    creates_per_s: float = _CREATES_PER_S,
    usd_per_s: float | None = None,
    state_dir: str | None = None,
) -> HostedE2b:
    """The key is `E2B_API_KEY`'s unless it is given; a region is a `domain`. `isolation` is what the provider runs: E2B's machines, or less of one's own."""
    if isolation not in ISOLATION_LEVELS:
        raise UsageError(f"isolation must be one of {', '.join(ISOLATION_LEVELS)}, not {isolation!r}")
    if not creates_per_s > 0:
        raise UsageError("creates_per_s must be a positive number")
    given = {"api_key": api_key, "domain": domain, "api_url": api_url, "sandbox_url": sandbox_url}
    options: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    return HostedE2b(template, options, isolation, timeout_s, creates_per_s, usd_per_s, state_dir)


class HostedE2b:
    name = "hosted:e2b"
    typical = Typical(start_s=0.5, action_s=0.03)

    def __init__(
        self,
        template: str,
        options: dict[str, Any],
        isolation: str,
        timeout_s: int,
        creates_per_s: float,
        usd_per_s: float | None,
        state_dir: str | None,
    ) -> None:
        self.isolation = isolation
        self.usd_per_s = usd_per_s
        """What a second of a sandbox costs, for projection and advice; None: not known."""
        self._template = template
        self._options = options
        self._timeout_s = timeout_s
        self._interval_s = 1 / creates_per_s
        self._pace = asyncio.Lock()
        self._next_at = 0.0
        self._undoing: set[asyncio.Task[None]] = set()
        self._owner = hashlib.sha256(f"{_machine()} {os.getuid()} {state_dir or ''}".encode()).hexdigest()[:16]

    def unavailable_reason(self) -> str | None:
        if importlib.util.find_spec("e2b") is None:
            return "needs E2B's SDK: pip install 'untax[e2b]'"
        if not (self._options.get("api_key") or os.environ.get("E2B_API_KEY")):
            return "needs a key: set E2B_API_KEY"
        return cell_missing_reason()

    async def start(self) -> None:
        """Remove what engines of this machine and state directory left that are dead."""
        await self._remove({_OWNER: self._owner}, lambda marks: _started(marks.get(_PID, "")) != marks.get(_SINCE))

    async def _remove(self, marks: dict[str, str], is_left: Callable[[dict[str, str]], bool]) -> None:
        """Those with `marks` of which nobody is the holder."""
        from e2b import AsyncSandbox, SandboxQuery

        kill: Callable[..., Awaitable[bool]] = AsyncSandbox.kill
        pages = AsyncSandbox.list(query=SandboxQuery(metadata=marks), **self._options)
        while pages.has_next:
            for found in await _asked("", pages.next_items):
                if is_left(found.metadata or {}):
                    log.info("sandbox %s, which nobody holds, goes", found.sandbox_id)
                    await _asked(found.sandbox_id, functools.partial(kill, found.sandbox_id, **self._options))

    async def aclose(self) -> None:
        """Every sandbox is destroyed by who made it; those that nobody got are waited for."""
        if self._undoing:
            _, late = await asyncio.wait(self._undoing, timeout=_CLOSE_S)
            for task in late:
                task.cancel()

    async def create(self, spec: EnvSpec) -> HostedSandbox:
        from e2b import AsyncSandbox

        if spec.image != "host":
            raise UsageError(
                f"image {spec.image!r}: a hosted sandbox has its template's software; name it with Engine('hosted:e2b', template=…)"
            )
        if spec.user not in (None, "user", "root"):
            raise UsageError(f"user {spec.user!r}: a hosted sandbox has the users 'user' and 'root'")
        mark = secrets.token_hex(16)
        marks = {_OWNER: self._owner, _PID: str(os.getpid()), _SINCE: _started(str(os.getpid())) or "", _CREATE: mark}
        is_wanted = True

        async def make_one() -> Any:
            await self._wait_turn()
            if not is_wanted:
                raise CreateError("", "nobody waits for it any more")
            return await AsyncSandbox.create(
                self._template, timeout=self._timeout_s, metadata=marks, allow_internet_access=False, **self._options
            )

        making = asyncio.ensure_future(_asked("", make_one))
        try:
            made = await asyncio.shield(making)
        except SubstrateUnavailable:
            raise  # refused: there is none
        except BaseException:  # nobody knows whether there is one, or will be
            is_wanted = False
            undoing = asyncio.ensure_future(self._undo(mark, making))
            self._undoing.add(undoing)
            undoing.add_done_callback(self._undoing.discard)
            raise
        return HostedSandbox(made, spec.user or "user", self._timeout_s)

    async def _undo(self, mark: str, making: asyncio.Future[Any]) -> None:
        """Remove what came of a create whose answer nobody got."""
        await asyncio.gather(making, return_exceptions=True)
        for pause_s in _UNDO_S:
            await asyncio.sleep(pause_s)
            try:
                await self._remove({_CREATE: mark}, lambda _: True)
            except UntaxError as exc:
                log.warning("a sandbox may be left, and ends within %d s: %s", self._timeout_s, exc)

    async def _wait_turn(self) -> None:
        """So many a second and no more: a provider counts them, and refuses whoever asks for more."""
        loop = asyncio.get_running_loop()
        async with self._pace:
            wait = self._next_at - loop.time()
            self._next_at = max(loop.time(), self._next_at) + self._interval_s
            if wait > 0:
                await asyncio.sleep(wait)


class HostedSandbox:
    unenforced = _UNENFORCED

    def __init__(self, sandbox: Any, user: str, timeout_s: int) -> None:
        self.id = f"e2b-{sandbox.sandbox_id}"
        self._sandbox = sandbox
        self._user = user
        self._stream: CommandStream | None = None
        self._renewing = asyncio.ensure_future(self._renew(timeout_s))

    async def _renew(self, timeout_s: int) -> None:
        """The provider ends it at its time, so that nothing outlives a dead engine for long; a living one puts that off."""
        while True:
            await asyncio.sleep(timeout_s / _RENEWALS)
            try:
                await _asked(self.id, lambda: self._sandbox.set_timeout(timeout_s))
            except UntaxError as exc:
                log.warning("the time of sandbox %s could not be put off: %s", self.id, exc)

    def facts(self) -> Facts:
        return Facts(workdir=_HOME, home="/root" if self._user == "root" else _HOME, user=self._user, proxy_port=_PROXY_PORT)

    @property
    def detail(self) -> dict[str, Any]:
        return {"provider": "e2b", "envd": str(getattr(self._sandbox, "_envd_version", ""))}

    async def wait_ready(self) -> None:
        pass  # the provider answers when it runs

    async def open_channel(self) -> CommandStream:
        sandbox, user = self._sandbox, self._user
        cell = await asyncio.to_thread(Path(cell_path()).read_bytes)
        await _asked(self.id, lambda: sandbox.files.write(_CELL, cell, user=user))
        stream = CommandStream(self.id, sandbox)
        command = f"chmod 700 {_CELL} && exec {_CELL} agent --stdio --dir {_HOME}"
        run = functools.partial(sandbox.commands.run, command, background=True, stdin=True, timeout=0, user=user, on_stdout=stream.arrived)
        if "retain_output" in inspect.signature(sandbox.commands.run).parameters:
            run.keywords["retain_output"] = False  # the SDK would keep all that ever came over the channel
        handle = await _asked(self.id, run)
        # The SDK gives output as text, with what is not UTF-8 replaced. Latin-1 is bytes and text at once; nothing was decoded before now.
        if not hasattr(handle, "_stdout_decoder"):
            raise SubstrateUnavailable(self.id, "this release of E2B's SDK gives no way to exact bytes; the adapter was tried with 2.63")
        handle._stdout_decoder = codecs.getincrementaldecoder("latin-1")()
        stream.attach(handle)
        self._stream = stream
        return stream

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One call of the SDK, as its users make it. Output is what the SDK gives: text."""
        from e2b import CommandExitException, SandboxException, TimeoutException

        try:
            done = await self._sandbox.commands.run(shlex.join(argv), timeout=timeout_s, user=self._user)
        except CommandExitException as exc:
            done = exc
        except TimeoutException as exc:
            if not await self._is_running():
                raise SandboxLost(self.id, str(exc)) from exc
            return CommandResult(TIMEOUT_EXIT_CODE, outcome="timeout")
        except SandboxException as exc:
            raise (BackendError if await self._is_running() else SandboxLost)(self.id, str(exc)) from exc
        out, err = done.stdout.encode(), done.stderr.encode()
        if done.exit_code < 0:
            return CommandResult(SIGNAL_EXIT_BASE + _SIGKILL, out, err, "signaled")
        return CommandResult(done.exit_code, out, err)

    async def _is_running(self) -> bool:
        try:
            return bool(await self._sandbox.is_running())
        except Exception:  # the SDK has many; none of them says that it runs
            return False

    async def destroy(self) -> None:
        self._renewing.cancel()
        if self._stream is not None:
            self._stream.close()
        await _asked(self.id, self._sandbox.kill)


class CommandStream:
    """A `ByteStream` over a running command: pieces of its output as they come, its input in one request after another."""

    def __init__(self, sandbox_id: str, sandbox: Any) -> None:
        self._id = sandbox_id
        self._sandbox = sandbox
        self._receiver: Receiver | None = None
        self._early: list[bytes] = []
        self._kept: deque[bytes] = deque()
        self._kept_size = 0
        self._is_paused = False
        self._is_closed = False
        self._has_more = asyncio.Event()
        self._is_sent = asyncio.Event()
        self._is_sent.set()
        self._tasks: list[asyncio.Task[None]] = []

    def attach(self, handle: Any) -> None:
        self._tasks = [asyncio.ensure_future(self._wait(handle)), asyncio.ensure_future(self._send(handle.pid))]

    def arrived(self, text: str) -> None:
        data = text.encode("latin-1")
        if not data or self._is_closed:
            return
        if self._receiver is None or self._is_paused:
            self._early.append(data)  # bounded by what the cell may send ahead of credit
        else:
            self._receiver.data_received(data)

    async def _wait(self, handle: Any) -> None:
        reason: Exception | None = None
        try:
            await handle.wait()
        except Exception as exc:  # of the SDK: whatever ended the command ended the stream
            reason = SandboxLost(self._id, f"its command ended: {exc}")
        self._lose(reason)

    async def _send(self, pid: int) -> None:
        while not self._is_closed:
            await self._has_more.wait()
            self._has_more.clear()
            while self._kept:
                pieces, size = [], 0
                while self._kept and size < _SEND_MAX:
                    pieces.append(self._kept.popleft())
                    size += len(pieces[-1])
                try:
                    await self._sandbox.commands.send_stdin(pid, b"".join(pieces))
                except Exception as exc:  # of the SDK: input is lost, so the stream is
                    self._lose(SandboxLost(self._id, f"its input is closed: {exc}"))
                    return
                self._kept_size -= size
            self._is_sent.set()

    # ---- as a stream ----

    def start(self, receiver: Receiver) -> None:
        self._receiver = receiver
        if self._is_closed:
            asyncio.get_running_loop().call_soon(receiver.connection_lost, None)
            return
        self.resume_reading()

    def write(self, data: bytes) -> None:
        if not self._is_closed:
            self._kept.append(bytes(data))
            self._kept_size += len(data)
            self._is_sent.clear()
            self._has_more.set()

    @property
    def write_buffer_size(self) -> int:
        return self._kept_size

    async def drain(self) -> None:
        await self._is_sent.wait()

    def pause_reading(self) -> None:
        self._is_paused = True

    def resume_reading(self) -> None:
        self._is_paused = False
        early, self._early = self._early, []
        for piece in early:
            if self._receiver is not None and not self._is_closed:
                self._receiver.data_received(piece)

    def close(self) -> None:
        self._lose(None)

    def _lose(self, exc: Exception | None) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._kept.clear()
        self._is_sent.set()
        self._has_more.set()
        current = asyncio.current_task()
        for task in self._tasks:
            if task is not current:
                task.cancel()
        if self._receiver is not None:
            self._receiver.connection_lost(exc)


async def _asked(sandbox_id: str, call: Callable[[], Awaitable[T]]) -> T:
    """One call of the SDK, its errors in ours. What the provider refuses for its rate is asked again, later each time."""
    from e2b import AuthenticationException, RateLimitException, SandboxException

    for attempt in range(_TRIES):
        try:
            return await call()
        except RateLimitException as exc:
            if attempt == _TRIES - 1:
                raise SubstrateUnavailable(
                    sandbox_id, f"E2B refuses for its rate or quota: {exc}; lower creates_per_s, or ask for more"
                ) from exc
            await asyncio.sleep(2.0**attempt)  # the SDK has heeded Retry-After before it gave up
        except AuthenticationException as exc:
            raise SubstrateUnavailable(sandbox_id, f"E2B does not know the key: {exc}; set E2B_API_KEY") from exc
        except SandboxException as exc:
            raise (BackendError if sandbox_id else CreateError)(sandbox_id, f"E2B: {exc}") from exc
        except (OSError, TimeoutError) as exc:
            raise BackendError(sandbox_id, f"E2B cannot be reached: {exc}") from exc
        except Exception as exc:  # httpx's and whatever else the SDK lets through
            raise BackendError(sandbox_id, f"E2B: {type(exc).__name__}: {exc}") from exc
    raise AssertionError


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
