"""The incumbent path: a sandbox as its users have it today, and one exec of the engine for each action.

No cell is in it while time is taken. What a workload needs that an exec cannot bring (a network that reaches the meter's git server, files
that are to lie there before the first command) is lent over a channel that is opened apart and left out of the account; users have
a bridge or a volume for it.
"""

from __future__ import annotations

import shlex
from typing import cast

from untax.channel import actions
from untax.channel.client import READY_TIMEOUT_S, Channel
from untax.channel.egress import Egress
from untax.core.errors import UntaxError, UsageError
from untax.core.spec import EnvSpec
from untax.core.substrate import Bare, Describing, Furnishing, Incumbent, Sandbox
from untax.engine import Engine
from untax.ground import Ground
from untax.leases import Bindings, checked
from untax.rollout import perform
from untax.rollout._trial import Trial, Work
from untax.rollout.footing import UPLOADED
from untax.rollout.perform import Done
from untax.rollout.workload import Action
from untax.standby import ORDINARY, environment

_UPLOAD_S = 600.0


class IncumbentTrial(Trial):
    def __init__(self, engine: Engine, work: Work) -> None:
        super().__init__(engine, work)
        self._sandbox: Bare | None = None
        self._ground: Ground | None = None
        self._channel: Channel | None = None
        self._first: Bare | None = None
        self._prefix = ""

    async def open_ahead(self) -> None:
        """Make the sandbox before time is taken. One that fails is made again, in time, and fails there."""
        try:
            await self.open()
        except UntaxError:
            await self.give_back()
        self.restart()

    async def open(self) -> None:
        if self._sandbox is not None:
            return
        spec = await self._find_ground()
        sandbox = self._sandbox = await self.engine.create_incumbent(spec, self._ground)
        self.cut("create")
        self.doing = "ready"
        if not isinstance(sandbox, Incumbent):
            raise UsageError(f"substrate {self.engine.substrate.name!r} has no incumbent path")
        await sandbox.wait_ready()
        self.cut("ready")
        self._first = sandbox
        self.doing = "setup"
        await self._lend(sandbox, spec)
        self.exclude()

    def settle(self) -> None:
        self.describe(self._first)

    async def _find_ground(self) -> EnvSpec:
        """What it stands on, where the substrate has layers."""
        spec = self.work.footing.spec
        request = checked(self.engine.substrate, spec, Bindings())
        warehouse = self.engine.warehouse
        self._ground = warehouse.at_hand(request)
        if self._ground is None and warehouse.has_stages:
            self._ground, built = await warehouse.find(request)
            self.measured.stages = dict(built or {})
            self.cut("setup")
        return spec if self._ground is None else warehouse.bound(spec, self._ground.root.config)

    async def _lend(self, sandbox: Bare, spec: EnvSpec) -> None:
        facts = sandbox.facts() if isinstance(sandbox, Describing) else ORDINARY
        workdir = spec.workdir or facts.workdir
        env = environment(spec, facts)
        exports = " ".join(f"{name}={shlex.quote(value)}" for name, value in env.items())
        self._prefix = f"export {exports}; mkdir -p {shlex.quote(workdir)}; cd {shlex.quote(workdir)} || exit 126\n"
        upload, repo = self.work.footing.upload, spec.repo if self._ground is None else None
        if isinstance(sandbox, Furnishing):
            trees = {UPLOADED: upload, workdir: await self.engine.warehouse.repository(repo) if repo is not None else None}
            await sandbox.furnish({where: tree for where, tree in trees.items() if tree is not None})
            return
        if spec.network == "none" and upload is None and repo is None:
            return
        egress = Egress(spec.network) if spec.network != "none" else None
        channel = self._channel = Channel(await cast("Sandbox", sandbox).open_channel(), sandbox_id=sandbox.id, egress=egress)
        port = facts.proxy_port if egress is not None else 0
        await channel.call(actions.configure(workdir=workdir, env=env, proxy_port=port, timeout_s=READY_TIMEOUT_S))
        if upload is not None:
            await channel.upload(upload, UPLOADED, timeout_s=_UPLOAD_S)
        if repo is not None:
            await channel.upload(await self.engine.warehouse.repository(repo), workdir, timeout_s=_UPLOAD_S)
        self.measured.detail["lent"] = "network or files over a channel that is not part of the account"

    async def act(self, action: Action) -> Done:
        sandbox = self._sandbox
        assert isinstance(sandbox, Incumbent)
        return await perform.by_incumbent(sandbox, action, self._prefix)

    async def reset(self) -> None:
        """As its users do: away with it, and another one."""
        await self.give_back()
        spec = await self._find_ground()
        self._sandbox = await self.engine.create_incumbent(spec, self._ground)
        await self._sandbox.wait_ready()

    async def give_back(self) -> None:
        channel, self._channel = self._channel, None
        sandbox, self._sandbox = self._sandbox, None
        ground, self._ground = self._ground, None
        if channel is not None:
            channel.close()
        if sandbox is not None:
            await self.engine.destroy(sandbox, ground)
        if ground is not None:
            ground.release()  # the sandbox had a hold of its own
