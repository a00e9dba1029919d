"""The lives of sandboxes as E2B has them: made from templates, connected to, paused and woken, forked, frozen, ended."""

from __future__ import annotations

import asyncio
import logging
import os
from collections import OrderedDict
from collections.abc import Awaitable, Coroutine, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

from untax.core.errors import SandboxLost, SubstrateUnavailable, UntaxError, UsageError
from untax.core.spec import freeze_env
from untax.leases import usual_isolation
from untax.service.e2b.network import Rules
from untax.service.e2b.sandbox import DEFAULT_USER, Lifecycle, Manner, Sandbox
from untax.service.e2b.templates import BASE, Build, Template, Templates
from untax.service.errors import Refused
from untax.service.hosting import TTL_MAX_S, Holding, Hosting
from untax.service.tenants import Tenant

if TYPE_CHECKING:
    from untax.box import Box
    from untax.snapshot import Snapshot

T = TypeVar("T")

log = logging.getLogger("untax.service.e2b")

TIMEOUT_S = 300.0
FORKS_MAX = 100
_METADATA_MAX = 64
_TEXT_MAX = 4096
_KEYS_MAX = 10_000
_READY_S = 60.0
_READY_FIRST_S, _READY_LAST_S = 0.02, 1.0
IMAGE_KEY = "image"


@dataclass(frozen=True, slots=True)
class Wish:
    """A sandbox as it was asked for, checked."""

    template: Template
    build: Build
    manner: Manner
    metadata: Mapping[str, str]
    env: Mapping[str, str]
    rules: Rules
    lifecycle: Lifecycle
    timeout_s: float


class Sandboxes:
    def __init__(self, hosting: Hosting, templates: Templates) -> None:
        self._hosting = hosting
        self._engine = hosting.engine
        self._templates = templates
        self._by_key: OrderedDict[tuple[str, str], asyncio.Task[Sandbox]] = OrderedDict()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._hands: str | None = "root" if os.geteuid() == 0 and self._engine.substrate.isolation != "none" else None

    def hands(self) -> str | None:
        """As whom files are handled inside: root, or the sandbox's one user where there is no other."""
        return self._hands

    # ---- finding ----

    def find(self, tenant: Tenant, sandbox_id: str) -> Sandbox:
        """404 in the same words for what never was, is no more, or is somebody else's."""
        found = self.find_any(sandbox_id)
        if found is None or found.holding.tenant is not tenant:
            raise Refused(404, "NotFound", "sandbox not found")
        return found

    def find_any(self, sandbox_id: str) -> Sandbox | None:
        holding = self._hosting.find_any(sandbox_id)
        if holding is None or holding.dialect != "e2b":
            return None
        found = cast("Sandbox", holding.extra["sandbox"])
        if found.is_over:
            self._background(self._hosting.release(holding))  # it died by itself
            return None
        return found

    def all(self, tenant: Tenant) -> list[Sandbox]:
        found = (self.find_any(one.id) for one in self._hosting.holdings(tenant, "e2b") if "sandbox" in one.extra)
        return [one for one in found if one is not None]

    # ---- making ----

    async def create(self, tenant: Tenant, body: Mapping[str, Any], key: str | None = None) -> Sandbox:
        """A sandbox of a template. The same key gives the same sandbox, however often it is asked for."""
        wish = self._wish(tenant, body)
        if key is None:
            return await self._made(tenant, wish)
        task = self._by_key.get((tenant.name, key))
        if task is not None and task.done() and (task.cancelled() or task.exception() is not None or task.result().is_over):
            task = None
        if task is None:
            task = self._by_key[tenant.name, key] = self._background(self._made(tenant, wish, key))
            while len(self._by_key) > _KEYS_MAX:
                self._by_key.popitem(last=False)
        return await asyncio.shield(task)

    def _wish(self, tenant: Tenant, body: Mapping[str, Any]) -> Wish:
        name = body.get("templateID")
        if not isinstance(name, str) or not name:
            raise UsageError("templateID is missing")
        if body.get("volumeMounts") or body.get("iam"):
            raise UsageError("volumes and identity tokens are not available on this server")
        metadata = _texts(body, "metadata")
        template, build = self._templates.ready(tenant.name, name)
        if name == BASE and (image := metadata.get(IMAGE_KEY)):
            build = Build(BASE, "ready", self._templates.image_for(image))
        internet = body.get("allow_internet_access", body.get("allowInternetAccess"))
        if not self._hosting.settings.admission.networks:
            internet = False
        lifecycle = Lifecycle(
            bool(body.get("autoPause")),
            body.get("autoPauseMemory") is not False,
            bool((body.get("autoResume") or {}).get("enabled")) if isinstance(body.get("autoResume") or {}, Mapping) else False,
        )
        rules = Rules.parse(body.get("network"), internet if isinstance(internet, bool) else None)
        self._hosting.check_network(rules.network)
        return Wish(
            template,
            build,
            template.manner(build),
            metadata,
            freeze_env(_texts(body, "envVars", most=10_000)),
            rules,
            lifecycle,
            self.checked_timeout(body.get("timeout", TIMEOUT_S), least=0.0),
        )

    def checked_timeout(self, value: object, *, least: float = 0.0) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not least <= value <= self._hosting.settings.ttl_max_s:
            raise UsageError(f"timeout must be a number of seconds between {least:g} and {self._hosting.settings.ttl_max_s:g}")
        return float(value)

    async def _made(self, tenant: Tenant, wish: Wish, key: str | None = None) -> Sandbox:
        holding = await self._hosting.hold(tenant, lambda: self._take(wish.build), dialect="e2b", ttl_s=max(wish.timeout_s, 0.001))
        sandbox = self._dressed(holding, wish)
        try:
            await self._begin_start(sandbox, wish.build)
        except BaseException:
            self._background(self._hosting.release(holding))
            raise
        wish.template.spawned += 1
        if key is not None:
            holding.on_end.append(lambda: self._by_key.pop((tenant.name, key), None))
        return sandbox

    def _dressed(self, holding: Holding, wish: Wish) -> Sandbox:
        sandbox = Sandbox(
            holding,
            wish.manner,
            hands=self._hands or DEFAULT_USER,
            metadata=wish.metadata,
            env=wish.env,
            rules=wish.rules,
            lifecycle=wish.lifecycle,
        )
        holding.extra["sandbox"] = sandbox
        holding.extra["build"] = wish.build
        holding.on_deadline = lambda: self._background(self._at_deadline(sandbox))
        holding.on_end.append(lambda: self._background(self._let_go(sandbox)))
        sandbox.box.police(wish.rules.policy())
        return sandbox

    async def _take(self, build: Build) -> Box:
        spec = build.spec(usual_isolation(self._engine.offer), self._hands)
        try:
            if build.snapshot is not None:
                return await self._engine.restore(build.snapshot, limits=spec.limits, network="all", ttl_s=TTL_MAX_S)
            return await self._engine.acquire(spec, ttl_s=TTL_MAX_S)
        except UsageError as exc:
            if self._hands is None or "user 'root'" not in str(exc):
                raise
            self._hands = None  # an engine without a root inside; found out once
            return await self._take(build)

    async def _begin_start(self, sandbox: Sandbox, build: Build) -> None:
        """The template's own command, and until it says that it is ready."""
        if build.start_cmd:
            account = await sandbox.account(None)
            assert account is not None
            events = await sandbox.processes.start(
                {"process": {"cmd": "/bin/bash", "args": ["-l", "-c", build.start_cmd]}, "tag": "startCmd", "stdin": False},
                account,
                None,
                3600.0,
            )
            await anext(events)
            await events.aclose()  # type: ignore[attr-defined]  # it is a generator; the process goes on
        if build.ready_cmd:
            await self._wait_ready(sandbox, build.ready_cmd)

    async def _wait_ready(self, sandbox: Sandbox, command: str) -> None:
        pause = _READY_FIRST_S
        account = await sandbox.account(None)
        assert account is not None
        try:
            async with asyncio.timeout(_READY_S):
                while True:
                    env = {"HOME": account.home, "USER": account.name, **sandbox.env}
                    result = await sandbox.box.run(
                        ["/bin/bash", "-l", "-c", command], user=sandbox.user_for(account), env=env, timeout_s=_READY_S
                    )
                    if result.exit_code == 0:
                        return
                    await asyncio.sleep(pause)  # a command that has to be asked again: it announces nothing
                    pause = min(pause * 2, _READY_LAST_S)
        except TimeoutError:
            raise SubstrateUnavailable(sandbox.id, f"its template's ready command did not succeed within {_READY_S:g} s") from None

    # ---- connecting, pausing, waking ----

    async def connect(self, sandbox: Sandbox, timeout_s: float) -> bool:
        """Wake it when it is paused; a deadline is only ever put off. True when it was paused."""
        async with sandbox.changing:
            was_paused = sandbox.state == "paused"
            if was_paused:
                await self._wake(sandbox)
                self._hosting.extend(sandbox.holding, timeout_s)
            elif timeout_s > sandbox.holding.left_s:
                self._hosting.extend(sandbox.holding, timeout_s)
        return was_paused

    async def pause(self, sandbox: Sandbox, *, keep_memory: bool) -> bool:
        """False when it was paused already."""
        async with sandbox.changing:
            if sandbox.state == "paused":
                return False
            box = sandbox.box
            if keep_memory:
                await box.pause()
            else:
                sandbox.kept = await box.snapshot()
            sandbox.state = "paused"
            self._hosting.keep(sandbox.holding)
            if not keep_memory:
                await box.release()
            return True

    async def _wake(self, sandbox: Sandbox) -> None:
        kept = sandbox.kept
        if kept is None:
            await cast("Any", sandbox.holding.box).resume()
            sandbox.state = "running"
            return
        box = await self._engine.restore(kept, network="all", ttl_s=TTL_MAX_S)
        if sandbox.holding.ending is not None:  # it was ended meanwhile, and nobody else knows of this box
            await box.release()
            raise SandboxLost(sandbox.id, "the sandbox was ended while it woke")
        sandbox.holding.box, sandbox.kept, sandbox.state = box, None, "running"
        sandbox.moved()
        sandbox.box.police(sandbox.rules.policy())
        await self._drop_unnamed(kept)
        await self._begin_start(sandbox, sandbox.holding.extra["build"])

    async def wake_for_request(self, sandbox: Sandbox) -> bool:
        """Whether a request may go on: a paused one wakes where its lifecycle says so."""
        if sandbox.state == "running":
            return True
        if not sandbox.lifecycle.auto_resume or sandbox.kept is not None:
            return False
        await self.connect(sandbox, TIMEOUT_S)
        return True

    async def _at_deadline(self, sandbox: Sandbox) -> None:
        try:
            if sandbox.lifecycle.auto_pause:
                await self.pause(sandbox, keep_memory=sandbox.lifecycle.keep_memory)
                return
        except UntaxError as exc:
            log.warning("sandbox %s could not be paused at its deadline: %s", sandbox.id, exc)
        await self._hosting.release(sandbox.holding)

    async def kill(self, sandbox: Sandbox) -> None:
        await self._hosting.release(sandbox.holding)

    async def _let_go(self, sandbox: Sandbox) -> None:
        async with sandbox.changing:  # a pause or a snapshot that is under way still needs it
            kept, sandbox.kept = sandbox.kept, None
            if kept is not None:
                await self._drop_unnamed(kept)

    async def _drop_unnamed(self, kept: Snapshot) -> None:
        """Unless it is a template by now: then it goes with that."""
        if not self._templates.has_snapshot(kept.id):
            await kept.drop()

    def set_timeout(self, sandbox: Sandbox, timeout_s: float) -> None:
        if sandbox.state == "running":
            self._hosting.extend(sandbox.holding, timeout_s)

    def set_rules(self, sandbox: Sandbox, rules: Rules) -> None:
        self._hosting.check_network(rules.network)
        sandbox.rules = rules
        if sandbox.state == "running":
            sandbox.box.police(rules.policy())

    # ---- forks and snapshots ----

    async def fork(self, sandbox: Sandbox, count: int, timeout_s: float) -> list[Sandbox | UntaxError]:
        """That many with its files as they are now. It goes on; what ran in it does not go over."""
        async with sandbox.changing:
            snapshot = await self._frozen(sandbox)
        build = sandbox.holding.extra["build"]
        wish = Wish(
            self._templates.find(sandbox.holding.tenant.name, BASE),
            build,
            sandbox.manner,
            sandbox.metadata,
            sandbox.env,
            sandbox.rules,
            sandbox.lifecycle,
            timeout_s,
        )

        async def one() -> Sandbox:
            holding = await self._hosting.hold(
                sandbox.holding.tenant,
                lambda: cast("Awaitable[Box]", self._engine.restore(snapshot, network="all", ttl_s=TTL_MAX_S)),
                dialect="e2b",
                ttl_s=max(timeout_s, 0.001),
            )
            fork = self._dressed(holding, wish)
            try:
                await self._begin_start(fork, build)
            except BaseException:
                self._background(self._hosting.release(holding))
                raise
            return fork

        made = await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)
        if snapshot is not sandbox.kept:
            await self._drop_unnamed(snapshot)
        results: list[Sandbox | UntaxError] = []
        for outcome in made:
            if isinstance(outcome, BaseException) and not isinstance(outcome, UntaxError):
                raise outcome
            results.append(outcome)
        return results

    async def _frozen(self, sandbox: Sandbox) -> Snapshot:
        if sandbox.kept is not None:
            return sandbox.kept
        if sandbox.state == "paused":  # its processes are held; its files are there to be frozen all the same
            return await sandbox.holding.box.snapshot()
        return await sandbox.box.snapshot()

    async def snapshot(self, sandbox: Sandbox, name: str | None) -> Template:
        """A template with its files as they are now, which outlives it and the server."""
        self._hosting.kept.check_room(sandbox.holding.tenant)
        async with sandbox.changing:
            taken = await self._frozen(sandbox)
            return await self._named(sandbox, taken, name)

    async def _named(self, sandbox: Sandbox, taken: Snapshot, name: str | None) -> Template:
        saved = await taken.save()
        old: Build = sandbox.holding.extra["build"]
        limits = sandbox.holding.box.spec.limits
        build = Build(
            status="ready", image=old.image, snapshot=saved, env=dict(sandbox.manner.env), user=old.user, workdir=old.workdir,
            start_cmd=old.start_cmd, ready_cmd=old.ready_cmd, cpus=limits.cpus, memory_mib=limits.memory_mib,
        )  # fmt: skip
        template = Template(f"s{saved.removeprefix('snap-')}", sandbox.holding.tenant.name, name, {"default": build}, origin=sandbox.id)
        self._templates.add(template)
        await self._templates.save()
        return template

    async def drop(self, snapshots: list[str]) -> None:
        """Those that no template needs; what a paused sandbox will wake from goes when it does."""
        paused = (one.extra["sandbox"].kept for one in self._hosting.holdings(dialect="e2b") if "sandbox" in one.extra)
        needed = {kept.id for kept in paused if kept is not None}
        for one in snapshots:
            if one in needed:
                continue
            try:
                await (await self._engine.find_snapshot(one)).drop()
            except UsageError:
                pass  # it is gone already

    # ---- work behind ----

    def _background(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.info("%s: %s", type(exc).__name__, exc)

    async def aclose(self) -> None:
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=10.0)


def _texts(body: Mapping[str, Any], name: str, *, most: int = _METADATA_MAX) -> dict[str, str]:
    value = body.get(name) or {}
    if not isinstance(value, Mapping) or len(value) > most:
        raise UsageError(f"{name} is not an object of at most {most} texts")
    for key, text in value.items():
        if not isinstance(text, str) or (name == "metadata" and len(key) + len(text) > _TEXT_MAX):
            raise UsageError(f"{name}: {key[:100]!r} is not a text, or too long")
    return dict(value)
