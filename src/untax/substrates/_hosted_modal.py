"""Sandboxes of Modal, through Modal's own SDK: `Engine("hosted:modal")`.

The cell is poured into each sandbox once and started as a command; its channel is that command's input and output, so an action is one call there
and one piece of a held stream back. The incumbent path is one `Sandbox.exec` per action. What the sandbox may reach goes over the channel like everywhere; the
provider's own network is closed. Modal ends a sandbox at its `timeout_s` whoever holds it: that cannot be put off.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from untax.core.errors import BackendError, UsageError
from untax.core.result import TIMEOUT_EXIT_CODE, CommandResult
from untax.core.spec import EnvSpec
from untax.core.substrate import Facts
from untax.substrates._hosted import TIMEOUT_S, Found, Hosted, Terms, Trouble, given
from untax.substrates._hosted_sandbox import CELL, PROXY_PORT, HeldStream, HostedSandbox, cell, unenforced

_CREATES_PER_S = 5.0  # an assumption; the SDK itself slows down when it is told to
_CALL_S = 60
_KILLED = 137  # as the SDK gives a signal 9
_UNENFORCED = unenforced(("disk_mib", "pids"), "Modal has no such limit", "set it in the image")


def make(
    image: str | None = None,
    app: str = "untax",
    environment: str | None = None,
    region: str | None = None,
    token_id: str | None = None,
    token_secret: str | None = None,
    isolation: str = "gvisor",
    timeout_s: int = TIMEOUT_S,
    creates_per_s: float = _CREATES_PER_S,
    usd_per_s: float | None = None,
    state_dir: str | None = None,
) -> HostedModal:
    """The key is `MODAL_TOKEN_ID`'s and `MODAL_TOKEN_SECRET`'s, or that of Modal's own file, unless it is given. `image` is a registry's or one of Modal's (`im-…`).

    `isolation` is what the provider runs: gVisor.
    """
    if (token_id is None) != (token_secret is None):
        raise UsageError("token_id and token_secret belong together: give both, or neither")
    tokens = None if token_id is None or token_secret is None else (token_id, token_secret)
    where = given(environment_name=environment)
    return HostedModal(image, app, where, region, tokens, Terms(isolation, timeout_s, creates_per_s, usd_per_s, state_dir))


class HostedModal(Hosted):
    name = "hosted:modal"
    provider = "Modal"
    extra = "modal"
    key = "MODAL_TOKEN_ID and MODAL_TOKEN_SECRET"
    held = "held: a command's output as it comes, its input as one call for each"

    def __init__(
        self, image: str | None, app: str, where: dict[str, Any], region: str | None, tokens: tuple[str, str] | None, terms: Terms
    ) -> None:
        super().__init__(terms)
        self._image = image
        self._app_name = app
        self._where = where
        self._region = given(region=region)
        self._tokens = tokens
        self._opening = asyncio.Lock()
        self._opened: tuple[Any, Any] | None = None

    def _has_key(self) -> bool:
        by_variables = os.environ.get("MODAL_TOKEN_ID") and os.environ.get("MODAL_TOKEN_SECRET")
        path = os.environ.get("MODAL_CONFIG_PATH") or Path.home() / ".modal.toml"
        return bool(self._tokens or by_variables or Path(path).is_file())

    async def _open(self) -> tuple[Any, Any]:
        """The SDK's client and the app that sandboxes belong to."""
        import modal

        async with self._opening:
            if self._opened is None:
                client = await (modal.Client.from_credentials.aio(*self._tokens) if self._tokens else modal.Client.from_env.aio())
                app = await modal.App.lookup.aio(self._app_name, create_if_missing=True, client=client, **self._where)
                self._opened = (client, app)
            return self._opened

    def told(self, exc: Exception) -> Trouble:
        from modal import exception

        match exc:
            case exception.AuthError():
                return Trouble("key")
            case exception.PermissionDeniedError():
                return Trouble("forbidden")
            case exception.ResourceExhaustedError():
                return Trouble("rate")  # where the server said when to come again, the SDK has
            case exception.NotFoundError() | exception.SandboxTerminatedError() | exception.SandboxTimeoutError():
                return Trouble("gone")
            case exception.InvalidError() | exception.AlreadyExistsError() | exception.RemoteError():
                return Trouble("usage")
            case exception.TimeoutError():
                return Trouble("late")
            case exception.ConnectionError() | OSError() | TimeoutError():
                return Trouble("unreachable")
        return Trouble("failed")

    async def _made(self, spec: EnvSpec, marks: dict[str, str]) -> ModalSandbox:
        import modal

        if spec.user not in (None, "root"):
            raise UsageError(f"user {spec.user!r}: Modal's sandboxes have the user 'root'; leave it out")
        client, app = await self._open()
        if self._image is None:
            image = modal.Image.debian_slim()
        else:
            image = modal.Image.from_id(self._image) if self._image.startswith("im-") else modal.Image.from_registry(self._image)
        cpus, memory_mib = spec.limits.cpus, spec.limits.memory_mib
        made = await modal.Sandbox.create.aio(
            app=app, image=image, tags=marks, timeout=self.timeout_s, block_network=True, client=client,
            cpu=(cpus, cpus), memory=(memory_mib, memory_mib), **self._region,
        )  # fmt: skip
        return ModalSandbox(made, self)

    async def _found(self, marks: dict[str, str]) -> AsyncIterator[Found]:
        import modal

        client, app = await self._open()
        async for one in modal.Sandbox.list.aio(app_id=app.app_id, tags=marks, client=client):
            yield Found(one.object_id, await one.get_tags.aio(), one.terminate.aio)


class ModalSandbox(HostedSandbox):
    is_renewable = False

    def __init__(self, sandbox: Any, hosted: HostedModal) -> None:
        super().__init__(f"modal-{sandbox.object_id}", hosted, _UNENFORCED)
        self._sandbox = sandbox
        self._facts = Facts(workdir="/", home="/root", user="root", proxy_port=PROXY_PORT)

    def facts(self) -> Facts:
        return self._facts

    @property
    def detail(self) -> dict[str, Any]:
        return {"provider": "modal"}

    async def wait_ready(self) -> None:
        """The first command waits until it runs, and says what only the sandbox can."""
        said = (await self._sure("pwd; echo ~; id -un 2>/dev/null || echo root", b"")).decode(errors="replace").split("\n")
        workdir, home, user = said[:3]
        self._facts = Facts(workdir=workdir, home=home, user=user, proxy_port=PROXY_PORT)

    async def _sure(self, script: str, data: bytes) -> bytes:
        """What a script of ours says that cannot fail in a sandbox that is well."""

        async def ran() -> tuple[int, bytes]:
            process = await self._sandbox.exec.aio("sh", "-c", script, text=False, timeout=_CALL_S)
            process.stdin.write(data)
            process.stdin.write_eof()
            await process.stdin.drain.aio()
            said = await process.stdout.read.aio()
            return await process.wait.aio(), said

        code, said = await self._asked(ran)
        if code != 0:
            raise BackendError(self.id, f"sh -c {script!r} ended with {code}; the image wants sh, cat and chmod")
        return said

    async def open_channel(self) -> HeldStream:
        from modal.stream_type import StreamType

        await self._sure(f"cat >{CELL} && chmod 700 {CELL}", await cell())
        argv = (CELL, "agent", "--stdio", "--dir", self._facts.workdir)
        process = await self._asked(lambda: self._sandbox.exec.aio(*argv, text=False, stderr=StreamType.DEVNULL))
        stream = HeldStream(self.id)

        async def read() -> None:
            async for piece in process.stdout:
                stream.arrived(piece)

        async def send(data: bytes) -> None:
            process.stdin.write(data)
            await process.stdin.drain.aio()

        stream.attach(read, send)
        self._stream = stream
        return stream

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One exec of the SDK, as its users make it."""
        from modal.exception import ExecTimeoutError

        began, limit_s = asyncio.get_running_loop().time(), math.ceil(timeout_s)
        try:
            process = await self._sandbox.exec.aio(*argv, text=False, timeout=limit_s)
            out, err, code = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio(), process.wait.aio())
        except ExecTimeoutError:
            return CommandResult(TIMEOUT_EXIT_CODE, outcome="timeout")
        except Exception as exc:  # of the SDK, or of what it is made of: none of them is a result
            raise await self._fault(exc) from exc
        # The SDK has -1 for a deadline that it saw, and the signal where Modal was faster.
        if code == -1 or (code == _KILLED and asyncio.get_running_loop().time() - began >= limit_s):
            return CommandResult(TIMEOUT_EXIT_CODE, out, err, "timeout")
        return CommandResult(code, out, err)

    async def _is_running(self) -> bool:
        return await self._sandbox.poll.aio() is None

    async def _end(self) -> None:
        await self._sandbox.terminate.aio()
