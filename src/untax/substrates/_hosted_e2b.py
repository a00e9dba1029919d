"""Sandboxes of E2B, or of any server that speaks its dialect, through E2B's own SDK: `Engine("hosted:e2b")`.

The cell is uploaded once per sandbox and started as a command; its channel is that command's input and output, so an action is one request there
and one piece of a held stream back. The incumbent path is one `commands.run` per action. What the sandbox may reach goes over the channel like everywhere; the
provider's own network is closed.
"""

from __future__ import annotations

import codecs
import functools
import inspect
import os
import shlex
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

from untax.core.errors import SandboxLost, SubstrateUnavailable, UsageError
from untax.core.result import SIGNAL_EXIT_BASE, TIMEOUT_EXIT_CODE, CommandResult
from untax.core.spec import EnvSpec
from untax.core.substrate import Facts, Typical
from untax.substrates._hosted import TIMEOUT_S, Found, Hosted, Terms, Trouble, given
from untax.substrates._hosted_sandbox import CELL, PROXY_PORT, HeldStream, HostedSandbox, cell, unenforced

_HOME = "/home/user"
_CREATES_PER_S = 1.0  # what E2B's smallest plan takes; a server of one's own takes more
_SIGKILL = 9
_UNENFORCED = unenforced(
    ("cpus", "memory_mib", "disk_mib", "pids"),
    "a hosted sandbox is as large as its template",
    "build a template with the cpu and memory that rollouts may have",
)


def make(
    template: str = "base",
    api_key: str | None = None,
    domain: str | None = None,
    api_url: str | None = None,
    sandbox_url: str | None = None,
    isolation: str = "vm",
    timeout_s: int = TIMEOUT_S,
    creates_per_s: float = _CREATES_PER_S,
    usd_per_s: float | None = None,
    state_dir: str | None = None,
) -> HostedE2b:
    """The key is `E2B_API_KEY`'s unless it is given; a region is a `domain`. `isolation` is what the provider runs: E2B's machines, or less of one's own."""
    options = given(api_key=api_key, domain=domain, api_url=api_url, sandbox_url=sandbox_url)
    return HostedE2b(template, options, Terms(isolation, timeout_s, creates_per_s, usd_per_s, state_dir))


class HostedE2b(Hosted):
    name = "hosted:e2b"
    provider = "E2B"
    extra = "e2b"
    key = "E2B_API_KEY"
    typical = Typical(start_s=0.5, action_s=0.03)
    held = "held: a command's output as it comes, its input as one request for each"

    def __init__(self, template: str, options: dict[str, Any], terms: Terms) -> None:
        super().__init__(terms)
        self._template = template
        self._options = options

    def _has_key(self) -> bool:
        return bool(self._options.get("api_key") or os.environ.get("E2B_API_KEY"))

    def told(self, exc: Exception) -> Trouble:
        import e2b

        if isinstance(exc, e2b.RateLimitException):
            return Trouble("rate")  # the SDK has heeded Retry-After before it gave up
        if isinstance(exc, e2b.AuthenticationException):
            return Trouble("key")
        if isinstance(exc, e2b.NotFoundException):
            return Trouble("gone")
        if isinstance(exc, e2b.SandboxException):
            return Trouble("late")
        return Trouble("unreachable" if isinstance(exc, OSError | TimeoutError) else "failed")

    async def _made(self, spec: EnvSpec, marks: dict[str, str]) -> E2bSandbox:
        from e2b import AsyncSandbox

        if spec.user not in (None, "user", "root"):
            raise UsageError(f"user {spec.user!r}: a hosted sandbox has the users 'user' and 'root'")
        made = await AsyncSandbox.create(
            self._template, timeout=self.timeout_s, metadata=marks, allow_internet_access=False, **self._options
        )
        return E2bSandbox(made, self, spec.user or "user")

    async def _found(self, marks: dict[str, str]) -> AsyncIterator[Found]:
        from e2b import AsyncSandbox, SandboxQuery

        kill: Callable[..., Awaitable[bool]] = AsyncSandbox.kill
        pages = AsyncSandbox.list(query=SandboxQuery(metadata=marks), **self._options)
        while pages.has_next:
            for found in await pages.next_items():
                yield Found(found.sandbox_id, found.metadata or {}, functools.partial(kill, found.sandbox_id, **self._options))


class E2bSandbox(HostedSandbox):
    def __init__(self, sandbox: Any, hosted: HostedE2b, user: str) -> None:
        super().__init__(f"e2b-{sandbox.sandbox_id}", hosted, _UNENFORCED)
        self._sandbox = sandbox
        self._user = user

    def facts(self) -> Facts:
        return Facts(workdir=_HOME, home="/root" if self._user == "root" else _HOME, user=self._user, proxy_port=PROXY_PORT)

    @property
    def detail(self) -> dict[str, Any]:
        return {"provider": "e2b", "envd": str(getattr(self._sandbox, "_envd_version", ""))}

    async def open_channel(self) -> HeldStream:
        sandbox, user, program = self._sandbox, self._user, await cell()
        await self._asked(lambda: sandbox.files.write(CELL, program, user=user))
        stream = HeldStream(self.id)
        command = f"chmod 700 {CELL} && exec {CELL} agent --stdio --dir {_HOME}"
        # The SDK gives output as text, with what is not UTF-8 replaced. Latin-1 is bytes and text at once; nothing is decoded before it is set below.
        run = functools.partial(
            sandbox.commands.run, command, background=True, stdin=True, timeout=0, user=user,
            on_stdout=lambda text: stream.arrived(text.encode("latin-1")),
        )  # fmt: skip
        if "retain_output" in inspect.signature(sandbox.commands.run).parameters:
            run.keywords["retain_output"] = False  # the SDK would keep all that ever came over the channel
        handle = await self._asked(run)
        if not hasattr(handle, "_stdout_decoder"):
            raise SubstrateUnavailable(self.id, "this release of E2B's SDK gives no way to exact bytes; the adapter was tried with 2.63")
        handle._stdout_decoder = codecs.getincrementaldecoder("latin-1")()
        stream.attach(handle.wait, functools.partial(sandbox.commands.send_stdin, handle.pid))
        self._stream = stream
        return stream

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One call of the SDK, as its users make it. Output is what the SDK gives: text."""
        from e2b import CommandExitException, TimeoutException

        try:
            done = await self._sandbox.commands.run(shlex.join(argv), timeout=timeout_s, user=self._user)
        except CommandExitException as exc:
            done = exc
        except TimeoutException as exc:
            fault = await self._fault(exc)
            if isinstance(fault, SandboxLost):
                raise fault from exc
            return CommandResult(TIMEOUT_EXIT_CODE, outcome="timeout")
        except Exception as exc:  # of the SDK, or of what it is made of: none of them is a result
            raise await self._fault(exc) from exc
        out, err = done.stdout.encode(), done.stderr.encode()
        if done.exit_code < 0:
            return CommandResult(SIGNAL_EXIT_BASE + _SIGKILL, out, err, "signaled")
        return CommandResult(done.exit_code, out, err)

    async def _is_running(self) -> bool:
        return bool(await self._sandbox.is_running())

    async def _put_off(self) -> None:
        await self._sandbox.set_timeout(self._asking.timeout_s)

    async def _end(self) -> None:
        await self._sandbox.kill()
