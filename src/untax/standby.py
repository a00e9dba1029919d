"""A sandbox that is up: created, ready, its channel open, greeted and configured. Held by a pool until a lease binds it.

What a lease says beside its spec's stages (variables, user, limits, network, files) is bound to a sandbox that lives, so
that one which was made before anybody asked serves them all.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from untax.channel import actions
from untax.channel.call import Call
from untax.channel.client import READY_TIMEOUT_S, Begun, Channel
from untax.core.errors import (
    CommandFailed,
    CreateError,
    ProtocolError,
    ReadinessTimeout,
    SandboxLost,
    UntaxError,
    UsageError,
)
from untax.core.root import ImageConfig
from untax.core.span import Stopwatch
from untax.core.spec import EnvSpec, Network
from untax.core.stage import Stage, StageName
from untax.core.substrate import Describing, Enforcing, Explaining, Facts, Rebindable, Sandbox, Unenforced, UserBinding
from untax.ground import Ground

if TYPE_CHECKING:
    from untax.engine import Engine
    from untax.leases import Request

SETUP_TIMEOUT_S = 3600.0  # a step may install a large dependency tree

# What every command finds, whatever the image; nothing of the engine's own environment gets in. Nobody is there to answer a
# prompt or to leave a pager (THREATS 6.1).
BASE_ENV: Mapping[str, str] = {
    "LANG": "C.UTF-8",
    "TERM": "dumb",
    "PAGER": "cat",
    "GIT_PAGER": "cat",
    "GIT_TERMINAL_PROMPT": "0",
    "DEBIAN_FRONTEND": "noninteractive",
    "PIP_NO_INPUT": "1",
}
ORDINARY = Facts(workdir="/", home="/root", user="root")
NO_IMAGE = ImageConfig()
# Files up to this go into one frame together; larger ones each into their own.
_BATCH_FILES, _BATCH_BYTES = 64, 256 << 10
FRESH_S = 0.05
"""For which an answer proves that a sandbox lives."""
LATELY_S = 0.4
"""The same of one that nobody has asked for yet. Whoever does counts from that answer on, to `untax.remote.engine.FRESH_S`; what is left of that is the time
in which a worker comes for its next lease (`untax.remote.hand`), which then need not wait for another answer.
"""


def environment(spec: EnvSpec, facts: Facts, image: ImageConfig = NO_IMAGE) -> dict[str, str]:
    """The variables that commands start with: what the base, the sandbox, the image and the policy say, and the spec over them."""
    env = {**BASE_ENV, "PATH": facts.path, "HOME": facts.home, "USER": facts.user, "SHELL": facts.shell, **facts.env, **image.env}
    if spec.network != "none":
        proxy = f"http://127.0.0.1:{facts.proxy_port}"
        for name in ("http_proxy", "https_proxy"):
            env[name] = env[name.upper()] = proxy
        env["no_proxy"] = env["NO_PROXY"] = "localhost,127.0.0.1,::1"
    return {**env, **spec.env}


class Configuration(NamedTuple):
    """What the cell was told."""

    workdir: str
    env: dict[str, str]
    proxy_port: int


class Standby:
    """Made by `raise_up`. `on_lost` is called once, when its channel ends by itself, for whoever holds it then."""

    __slots__ = (
        "_begun",
        "_begun_s",
        "_plain",
        "answered_s",
        "bound",
        "built",
        "channel",
        "configuration",
        "engine",
        "facts",
        "ground",
        "name",
        "on_lost",
        "sandbox",
        "spans",
        "stages",
        "unenforced",
    )

    def __init__(self, engine: Engine, sandbox: Sandbox, ground: Ground | None, bound: EnvSpec) -> None:
        self.engine = engine
        self.name = sandbox.id
        """By which the pool knows it; stays when the sandbox is replaced by one at a higher stage."""
        self.sandbox = sandbox
        self.ground = ground
        """Held for the sandbox until it is gone."""
        self.bound = bound
        """Whose limits and user it has."""
        self.channel: Channel | None = None
        self.facts = ORDINARY
        self.unenforced: tuple[Unenforced, ...] = ()
        self.configuration: Configuration | None = None
        self._plain: Configuration | None = None  # what it is told for a spec without variables and network
        self._begun: tuple[Configuration, Begun[None]] | None = None  # what it was told ahead of `bind`
        self._begun_s = -math.inf
        self.answered_s = -math.inf
        """When it was last seen to live, by the event loop's clock."""
        self.on_lost: Callable[[Standby, SandboxLost], None] | None = None
        self.spans: list[tuple[str, int, int]] = []
        self.stages: tuple[Stage, ...] = ()
        """Those that it was made with, as the pool knows them."""
        self.built: dict[str, float] = {}
        """Stages that were missing, with the seconds that each took."""

    @property
    def image(self) -> ImageConfig:
        return self.ground.root.config if self.ground is not None else NO_IMAGE

    def open_channel(self) -> Channel:
        """`SandboxLost` when it has ended."""
        assert self.channel is not None
        return self.channel

    def lost(self, lost: SandboxLost) -> None:
        if self.on_lost is not None:
            self.on_lost(self, lost)

    def close(self) -> None:
        """No action reaches it from here on, and nobody is told of its end."""
        self.on_lost = None
        if self.channel is not None:
            self.channel.close()

    async def leave(self) -> None:
        """Destroy its sandbox. Safe to call twice."""
        self.close()
        if self.configuration is not None:
            self.configuration = None
            await self.engine.finish(self.engine.chore(self.engine.destroy(self.sandbox, self.ground)))  # also when cancelled meanwhile

    def become(self, other: Standby) -> None:
        """Take another's sandbox in place of its own, which has left."""
        self.sandbox, self.ground, self.bound, self.channel = other.sandbox, other.ground, other.bound, other.channel
        self.facts, self.unenforced, self.configuration = other.facts, other.unenforced, other.configuration
        self._plain = None
        other.on_lost = lambda _, lost: self.lost(lost)

    # ---- late binding ----

    def begin(self, spec: EnvSpec, now_s: float, *, is_certain: bool = True) -> None:
        """Send what `bind` will wait for, where that can be said already: whoever binds has other things to do until the answer is there.

        What was said a moment ago need not be said again: its answer proves the same. While it is not certain that the lease comes, and here, nothing of it
        is told: the sandbox only has to say that it lives.
        """
        channel = self.channel
        bound = self.engine.warehouse.bound(spec, self.image) if self.ground is not None else spec
        if type(channel) is not Channel or bound.user != self.bound.user or bound.workdir != self.bound.workdir:
            return
        wanted = self._wanted(spec)
        if not is_certain and wanted != self.configuration:
            return
        if self._begun is not None and self._begun[0] == wanted and now_s < self._begun_s + FRESH_S:
            return
        try:
            begun = channel.begin(self._telling(wanted))
        except UsageError:
            return  # `bind` says it again, to whom it concerns
        self._begun = (wanted, begun) if begun is not None else None
        self._begun_s = now_s

    async def bind(self, spec: EnvSpec, *, is_proven: bool) -> None:
        """Make it the lease's. Its answer is the proof that it lives; `is_proven` for one that has just answered.

        `SandboxLost` when it does not. A limit that cannot be changed is a `SandboxLost` too: another sandbox will do.
        """
        bound = self.engine.warehouse.bound(spec, self.image) if self.ground is not None else spec
        was = self.bound
        if bound is not was:
            if bound.limits != was.limits:
                await self._bind_limits(bound)
            if bound.user != was.user:
                await self._bind_user(bound.user)
            if bound.user != was.user or bound.workdir != was.workdir:
                self._plain = None
            self.bound = bound
        await self._configure(self._wanted(spec), is_proven=is_proven)

    def _wanted(self, spec: EnvSpec) -> Configuration:
        if spec.network != "none" or spec.env:
            return self.configuration_for(spec)
        if self._plain is None:
            self._plain = self.configuration_for(spec)
        return self._plain

    def configuration_for(self, spec: EnvSpec) -> Configuration:
        facts = self.facts
        port = facts.proxy_port if spec.network != "none" else 0
        return Configuration(self.bound.workdir or facts.workdir, environment(spec, facts, self.image), port)

    async def _bind_limits(self, bound: EnvSpec) -> None:
        sandbox = self.sandbox
        if isinstance(sandbox, Rebindable):
            unenforced = tuple(await sandbox.bind_limits(bound.limits))
            if refused := [limit for limit in unenforced if limit not in self.unenforced]:
                raise SandboxLost(sandbox.id, f"it cannot be given the lease's limits ({refused[0].name}: {refused[0].reason})")
            self.unenforced = unenforced

    async def _bind_user(self, user: str | None) -> None:
        sandbox = self.sandbox
        if not isinstance(sandbox, UserBinding):
            raise SandboxLost(sandbox.id, f"it was made for another user than {user!r}")
        await sandbox.bind_user(user)
        if isinstance(sandbox, Describing):
            self.facts = sandbox.facts()

    async def _configure(self, wanted: Configuration, *, is_proven: bool) -> None:
        channel, sandbox = self.open_channel(), self.sandbox
        begun, self._begun = self._begun, None
        is_new = wanted is not self.configuration and wanted != self.configuration
        is_under_way = begun is not None and not begun[1][0].finished
        if is_proven and not is_new and not is_under_way:  # what is under way has to come to its end: a channel is handed over at rest
            return
        asked_s = asyncio.get_running_loop().time()
        if begun is not None and begun[0] == wanted and (is_under_way or asked_s < self._begun_s + LATELY_S):
            asked_s = self._begun_s
        elif not is_under_way:
            begun = None  # it was asked too long ago, of somebody else's accord, for its answer to prove anything now
        was_greeted = bool(channel.cell_version)
        try:
            if begun is not None and begun[0] == wanted:
                await channel.end(begun[1])
            else:  # the first is sent right behind our greeting, so one wait covers both
                await channel.call(self._telling(wanted))
        except SandboxLost as exc:
            if not was_greeted:
                await self._explain(channel, exc)
            raise
        except OSError as exc:
            raise CreateError(sandbox.id, f"it could not be configured: {exc}") from exc
        self.answered_s = asked_s  # or later
        if not is_new:
            return
        self.configuration = wanted
        if wanted.workdir != self.facts.workdir:
            try:
                await channel.call(actions.mkdir(wanted.workdir))
            except OSError as exc:
                raise CreateError(sandbox.id, f"workdir: {exc}; name one that the sandbox's user may make") from exc

    def _telling(self, wanted: Configuration) -> Call[None]:
        if wanted is self.configuration or wanted == self.configuration:
            return actions.ping(timeout_s=READY_TIMEOUT_S)  # it is told nothing new, but must answer
        return actions.configure(workdir=wanted.workdir, env=wanted.env, proxy_port=wanted.proxy_port, timeout_s=READY_TIMEOUT_S)

    async def _explain(self, channel: Channel, exc: SandboxLost) -> None:
        """Raise why it never came up, where that is known."""
        if channel.cell_version:
            return
        if isinstance(exc.__cause__, ProtocolError):
            raise exc.__cause__ from None
        if "deadline" in exc.message:
            raise ReadinessTimeout(self.sandbox.id, f"the cell did not greet within {READY_TIMEOUT_S:g} s") from exc
        if isinstance(self.sandbox, Explaining) and (reason := await self.sandbox.loss_reason()):
            raise CreateError(self.sandbox.id, reason) from exc

    async def rehearse(self) -> None:
        """Run the shortest of programs. The first one in a sandbox takes twice as long: its worker, and every directory and library on
        the way to it, are looked at for the first time. Nothing is written, and whether it is there at all does not matter.
        """
        await self.open_channel().call(actions.run(["true"], timeout_s=READY_TIMEOUT_S))
        self.answered_s = asyncio.get_running_loop().time()

    @property
    def has_answered_lately(self) -> bool:
        return asyncio.get_running_loop().time() < self.answered_s + LATELY_S

    # ---- what no layer holds ----

    async def write(self, files: Mapping[str, bytes]) -> None:
        """The lease's own files."""
        channel = self.open_channel()
        calls = [actions.write(path, data) for path, data in files.items()]
        try:
            if len(calls) <= _BATCH_FILES and sum(map(len, files.values())) <= _BATCH_BYTES:
                for outcome in await channel.batch(calls, stop=True):
                    if isinstance(outcome, UntaxError):
                        raise outcome
            else:
                for call in calls:
                    await channel.call(call)
        except OSError as exc:
            raise CreateError(self.sandbox.id, f"files: {exc}") from exc

    async def add(self, names: Sequence[StageName], spec: EnvSpec) -> None:
        """Put stages in place inside, on a substrate without layers; what each took goes into `built`."""
        channel = self.open_channel()
        watch = Stopwatch(self.engine.clock)
        if "repo" in names and spec.repo is not None:
            try:
                tree = await self.engine.warehouse.repository(spec.repo)
                await channel.upload(tree, self.bound.workdir or self.facts.workdir, timeout_s=SETUP_TIMEOUT_S)
            except OSError as exc:
                raise CreateError(self.sandbox.id, f"files: {exc}") from exc
            self._took("repo", watch)
        if "deps" in names and spec.setup:
            for step in spec.setup:
                try:
                    (await channel.call(actions.shell(step, timeout_s=SETUP_TIMEOUT_S))).check()
                except CommandFailed as exc:
                    raise CreateError(self.sandbox.id, f"setup step {step!r}: {exc}") from exc
            self._took("deps", watch)

    def _took(self, name: str, watch: Stopwatch) -> None:
        start_ns, end_ns = watch.part()
        self.built[name] = (end_ns - start_ns) / 1e9


async def raise_up(
    engine: Engine,
    request: Request,
    ground: Ground | None,
    watch: Stopwatch,
    *,
    network: Network | None = None,
    seen: Callable[[Standby], None] | None = None,
) -> Standby:
    """A sandbox over `ground`, configured for the request. Without `seen`, what it took is given back when it fails; otherwise `seen` is
    called as soon as there is a sandbox and again when there is a channel, raises when it is not wanted any more, and frees it.
    `network` is the policy of the leases that it is for, where the request has none yet.
    """
    spec = request.spec
    bound = engine.warehouse.bound(spec, ground.root.config) if ground is not None else spec
    sandbox = await engine.create(bound, ground, request.cache)
    standby = Standby(engine, sandbox, ground, bound)
    try:
        if seen is not None:
            seen(standby)
        standby.spans.append(("create", *watch.part()))
        if isinstance(sandbox, Enforcing):
            standby.unenforced = tuple(sandbox.unenforced)
            engine.check_enforced(sandbox, standby.unenforced)
        await sandbox.wait_ready()
        standby.channel = engine.channel_over(await sandbox.open_channel(), sandbox.id, network or spec.network, standby.lost)
        if seen is not None:
            seen(standby)
        if isinstance(sandbox, Describing):
            standby.facts = sandbox.facts()
        await standby._configure(standby.configuration_for(spec), is_proven=False)
        standby.spans.append(("ready", *watch.part()))
    except BaseException:
        if seen is None:
            standby.close()
            await engine.finish(engine.chore(engine.destroy(sandbox, ground)))
        raise
    return standby
