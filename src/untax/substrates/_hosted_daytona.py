"""Sandboxes of Daytona, through Daytona's own SDK: `Engine("hosted:daytona")`.

The cell is uploaded once per sandbox and started in a terminal that is set to carry bytes as they are; its channel is the terminal's WebSocket, so an action is one
message there and one back. The incumbent path is one `process.exec` per action. What the sandbox may reach goes over the channel like everywhere; the
provider's own network is closed.
"""

from __future__ import annotations

import asyncio
import math
import os
import secrets
import shlex
from collections.abc import AsyncIterator, Sequence
from typing import Any

from untax.core.errors import BackendError, ReadinessTimeout
from untax.core.result import TIMEOUT_EXIT_CODE, CommandResult
from untax.core.spec import EnvSpec, Limits
from untax.core.substrate import Facts, Unenforced
from untax.substrates._hosted import TIMEOUT_S, Found, Hosted, Terms, Trouble, given, retry_after
from untax.substrates._hosted_sandbox import CELL, PROXY_PORT, HeldStream, HostedSandbox, cell, unenforced

_CREATES_PER_S = 5.0  # an assumption; what is refused nevertheless is asked for again after the time that the provider names
_CREATE_S = 120.0
_CALL_S = 30.0
_GREETING_S = 30.0
_SAID_MAX = 2000  # of what a terminal said instead of what it was told to
_SERVER_ERRORS = 500
_MINUTE_S = 60
_MIB_OF_GIB = 1024
_SIZED_BY_SNAPSHOT = unenforced(
    ("cpus", "memory_mib", "disk_mib", "pids"),
    "a hosted sandbox is as large as its snapshot",
    "make a snapshot with the cpu, memory and disk that rollouts may have, or name an image",
)


def make(
    snapshot: str | None = None,
    image: str | None = None,
    target: str | None = None,
    api_key: str | None = None,
    api_url: str | None = None,
    isolation: str = "container",
    timeout_s: int = TIMEOUT_S,
    create_s: float = _CREATE_S,
    creates_per_s: float = _CREATES_PER_S,
    usd_per_s: float | None = None,
    state_dir: str | None = None,
) -> HostedDaytona:
    """The key is `DAYTONA_API_KEY`'s unless it is given; a region is a `target`. A `snapshot` has its size, an `image` gets the spec's, in whole CPUs and GiB.

    `isolation` is what the provider runs: containers, unless the snapshot is one of a virtual machine.
    """
    options = given(api_key=api_key, api_url=api_url, target=target)
    return HostedDaytona(snapshot, image, options, create_s, Terms(isolation, timeout_s, creates_per_s, usd_per_s, state_dir))


class HostedDaytona(Hosted):
    name = "hosted:daytona"
    provider = "Daytona"
    extra = "daytona"
    key = "DAYTONA_API_KEY"
    held = "held: a terminal's WebSocket, both ways"

    def __init__(self, snapshot: str | None, image: str | None, options: dict[str, Any], create_s: float, terms: Terms) -> None:
        super().__init__(terms)
        self._params = given(snapshot=snapshot) if image is None else {"image": image}
        self._options = options
        self._create_s = create_s
        self._client: Any = None

    def _has_key(self) -> bool:
        by_token = os.environ.get("DAYTONA_JWT_TOKEN") and os.environ.get("DAYTONA_ORGANIZATION_ID")
        return bool(self._options.get("api_key") or os.environ.get("DAYTONA_API_KEY") or by_token)

    def _daytona(self) -> Any:
        """The SDK's client, which belongs to the running loop."""
        from daytona import AsyncDaytona, DaytonaConfig

        if self._client is None:
            self._client = AsyncDaytona(DaytonaConfig(**self._options, connection_pool_maxsize=None))
        return self._client

    async def _close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    def told(self, exc: Exception) -> Trouble:
        import daytona

        if not isinstance(exc, daytona.DaytonaError):
            return Trouble("unreachable" if isinstance(exc, OSError | TimeoutError) else "failed")
        match exc.status_code:
            case 429:
                return Trouble("rate", retry_after(exc.headers))
            case 401:
                return Trouble("key")
            case 403:
                return Trouble("forbidden")
            case 404 | 410:
                return Trouble("gone")
            case 400 | 409 | 413 | 422:
                return Trouble("usage")
            case int(status) if status >= _SERVER_ERRORS:
                return Trouble("failed")
        if isinstance(exc, daytona.DaytonaAuthenticationError):
            return Trouble("key")
        if isinstance(exc, daytona.DaytonaConnectionError):
            return Trouble("unreachable")
        return Trouble("late" if isinstance(exc, daytona.DaytonaTimeoutError) else "failed")

    async def _made(self, spec: EnvSpec, marks: dict[str, str]) -> DaytonaSandbox:
        from daytona import CreateSandboxFromImageParams, CreateSandboxFromSnapshotParams, Resources

        common: dict[str, Any] = {
            **self._params, **given(os_user=spec.user), "labels": marks, "network_block_all": True,
            # Idle for that long it is stopped, and stopped it is deleted; a living engine says that it is not idle.
            "auto_stop_interval": math.ceil(self.timeout_s / _MINUTE_S), "ephemeral": True,
        }  # fmt: skip
        limits: Sequence[Unenforced] = _SIZED_BY_SNAPSHOT
        if "image" in self._params:
            size, limits = _size(spec.limits)
            params: Any = CreateSandboxFromImageParams(**common, resources=Resources(**size))
        else:
            params = CreateSandboxFromSnapshotParams(**common)
        return DaytonaSandbox(await self._daytona().create(params, timeout=self._create_s), self, limits)

    async def _found(self, marks: dict[str, str]) -> AsyncIterator[Found]:
        from daytona import ListSandboxesQuery

        async for one in self._daytona().list(ListSandboxesQuery(labels=marks), request_timeout=_CALL_S):
            yield Found(one.id, one.labels, one.delete)


def _size(limits: Limits) -> tuple[dict[str, Any], list[Unenforced]]:
    """What to ask for so that a sandbox has at least its limits, and where that is more than they are."""
    asked = {
        "cpus": ("cpu", limits.cpus, 1),
        "memory_mib": ("memory", limits.memory_mib, _MIB_OF_GIB),
        "disk_mib": ("disk", limits.disk_mib, _MIB_OF_GIB),
    }
    size = {theirs: max(1, math.ceil(wanted / unit)) for theirs, wanted, unit in asked.values()}
    over = [name for name, (theirs, wanted, unit) in asked.items() if size[theirs] * unit != wanted]
    return size, [
        *unenforced(over, "Daytona has whole CPUs and GiB, so there is more", "ask for whole ones"),
        *unenforced(("pids",), "Daytona has no such limit", "set it in the image"),
    ]


class DaytonaSandbox(HostedSandbox):
    def __init__(self, sandbox: Any, hosted: HostedDaytona, limits: Sequence[Unenforced]) -> None:
        super().__init__(f"daytona-{sandbox.id}", hosted, limits)
        self._sandbox = sandbox
        self._dirs = ("/", "/")

    def facts(self) -> Facts:
        workdir, home = self._dirs
        return Facts(workdir=workdir, home=home, user=str(self._sandbox.user), proxy_port=PROXY_PORT)

    @property
    def detail(self) -> dict[str, Any]:
        daemon, target = str(self._sandbox.daemon_version or ""), str(self._sandbox.target or "")
        return {"provider": "daytona", "daemon": daemon, "target": target, "class": str(self._sandbox.sandbox_class or "")}

    async def wait_ready(self) -> None:
        """The SDK answers when it runs; where it works is what only it can say."""
        workdir, home = await asyncio.gather(self._asked(self._sandbox.get_work_dir), self._asked(self._sandbox.get_user_home_dir))
        self._dirs = (str(workdir), str(home))

    async def open_channel(self) -> HeldStream:
        program = await cell()
        await self._asked(lambda: self._sandbox.fs.upload_file(program, CELL))
        stream = HeldStream(self.id)
        terminal = _Terminal(stream)
        handle = await self._asked(lambda: self._sandbox.process.create_pty_session(f"untax-{secrets.token_hex(8)}", terminal.arrived))

        async def ended() -> None:
            result = await handle.wait()
            terminal.is_ready.set()
            how = result.error or f"exit code {result.exit_code}"
            raise ConnectionError(f"{how}; its terminal said {terminal.said!r}" if terminal.said else how)

        stream.attach(ended, handle.send_input)
        stream.write(terminal.command(self._dirs[0]))
        try:
            async with asyncio.timeout(_GREETING_S):
                await terminal.is_ready.wait()
        except TimeoutError as exc:
            stream.close()
            raise ReadinessTimeout(
                self.id, f"its terminal said {terminal.said!r} and nothing of the cell; it wants sh, stty and chmod inside"
            ) from exc
        self._stream = stream
        return stream

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One call of the SDK, as its users make it. Output is what it gives: text, with errors among it."""
        from daytona import DaytonaProcessExecutionTimeoutError

        try:
            done = await self._sandbox.process.exec(shlex.join(argv), timeout=math.ceil(timeout_s))
        except DaytonaProcessExecutionTimeoutError:
            return CommandResult(TIMEOUT_EXIT_CODE, outcome="timeout")  # the daemon inside says so, so it is there
        except Exception as exc:  # of the SDK, or of what it is made of: none of them is a result
            raise await self._fault(exc) from exc
        if not isinstance(done.exit_code, int) or done.exit_code < 0:
            raise BackendError(self.id, f"Daytona did not say how the command ended: exit code {done.exit_code!r}")
        return CommandResult(done.exit_code, done.result.encode())

    async def _is_running(self) -> bool:
        await self._sandbox.refresh_data(request_timeout=_CALL_S)
        return str(getattr(self._sandbox.state, "value", self._sandbox.state)) == "started"

    async def _put_off(self) -> None:
        await self._sandbox.refresh_activity(request_timeout=_CALL_S)

    async def _end(self) -> None:
        await self._sandbox.delete(timeout=_CALL_S)


class _Terminal:
    """What comes out of a terminal until the cell speaks: a prompt, an echo, whatever a shell says at its start."""

    def __init__(self, stream: HeldStream) -> None:
        self.is_ready = asyncio.Event()
        """The cell speaks, or nobody ever will."""
        self.said = b""
        self._stream = stream
        self._nonce = secrets.token_hex(16)

    def command(self, workdir: str) -> bytes:
        # The two halves of the mark meet only where printf puts them: the echo of this line is not the mark.
        script = f"chmod 700 {CELL} && stty raw -echo && printf untax-%s: {self._nonce} && exec {CELL} agent --stdio --dir {shlex.quote(workdir)}"
        return f"exec sh -c {shlex.quote(script)}\n".encode()

    def arrived(self, data: bytes) -> None:
        if self.is_ready.is_set():
            self._stream.arrived(data)
            return
        self.said += data
        _, mark, rest = self.said.partition(f"untax-{self._nonce}:".encode())
        if mark:
            self.is_ready.set()
            self.said = b""
            self._stream.arrived(rest)
        else:
            self.said = self.said[-_SAID_MAX:]
