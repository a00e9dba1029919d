"""One E2B sandbox: a holding and what the dialect keeps beside it."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

from untax.core.errors import SandboxLost, UntaxError
from untax.service.e2b.models import ENVD_VERSION, Account, Accounts, moment
from untax.service.e2b.network import Rules
from untax.service.hosting import Holding

if TYPE_CHECKING:
    from untax.service.e2b.process import Processes
    from untax.service.e2b.watching import Watchers
    from untax.snapshot import Snapshot
    from untax.tenancy import Tenancy

CLIENT_ID = "untax"
DEFAULT_USER = "user"
_FALLBACK = {"user": Account("user", 1000, 1000, "/home/user"), "root": Account("root", 0, 0, "/root")}
_ACCOUNTS_MAX = 1 << 20
_SAMPLES = 720

State = Literal["running", "paused"]


@dataclass(frozen=True, slots=True)
class Lifecycle:
    """What happens at its deadline, and whether a request wakes it."""

    auto_pause: bool = False
    keep_memory: bool = True
    auto_resume: bool = False

    def to_json(self) -> dict[str, Any]:
        return {"autoResume": self.auto_resume, "onTimeout": "pause" if self.auto_pause else "kill"}


@dataclass(frozen=True, slots=True)
class Manner:
    """What its template says about how commands begin."""

    template: str
    alias: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    user: str = DEFAULT_USER
    workdir: str | None = None
    """None: the user's home."""


class Sandbox:
    """Made by `Sandboxes`. Its holding is the service's, and ends it."""

    def __init__(
        self,
        holding: Holding,
        manner: Manner,
        *,
        hands: str,
        metadata: Mapping[str, str],
        env: Mapping[str, str],
        rules: Rules,
        lifecycle: Lifecycle,
    ) -> None:
        from untax.service.e2b.process import Processes
        from untax.service.e2b.watching import Watchers

        self.holding = holding
        self.manner = manner
        self.hands = hands
        """Who file actions are done by inside: root where the engine can have one, and then files are given to their user."""
        self.metadata = dict(metadata)
        self.env = {**manner.env, **env}
        self.rules = rules
        self.lifecycle = lifecycle
        self.state: State = "running"
        self.kept: Snapshot | None = None
        """What is left of it while it is paused without its memory."""
        self.token = secrets.token_hex(32)
        self.traffic_token = secrets.token_hex(32)
        self.changing = asyncio.Lock()
        """One pause, resume or snapshot at a time."""
        self.samples: deque[Any] = deque(maxlen=_SAMPLES)
        self.processes: Processes = Processes(self)
        self.watchers: Watchers = Watchers(self)
        self._accounts: Accounts | None = None

    @property
    def id(self) -> str:
        return self.holding.id

    @property
    def box(self) -> Tenancy:
        """`SandboxLost` while it has none."""
        if self.state == "paused":
            raise SandboxLost(self.id, "the sandbox is paused")
        return cast("Tenancy", self.holding.box)

    @property
    def is_over(self) -> bool:
        return self.holding.ending is not None or (self.state == "running" and not self.holding.box.is_live)

    def moved(self) -> None:
        """It has another box: nothing that ran in the old one is left."""
        from untax.service.e2b.process import Processes
        from untax.service.e2b.watching import Watchers

        self.processes, self.watchers = Processes(self), Watchers(self)
        self._accounts = None

    # ---- accounts ----

    async def account(self, name: str | None) -> Account | None:
        """Who that is inside; None when there is nobody of that name."""
        name = name or self.manner.user
        accounts = await self.accounts()
        if name not in accounts.users and name not in _FALLBACK:
            self._accounts = None
            accounts = await self.accounts()  # perhaps it was made since
        return accounts.users.get(name) or _FALLBACK.get(name)

    async def accounts(self) -> Accounts:
        if self._accounts is None:
            read = []
            for path in ("/etc/passwd", "/etc/group"):
                try:
                    read.append(await self.box.read(path, limit=_ACCOUNTS_MAX))
                except SandboxLost:
                    raise
                except UntaxError:
                    read.append(b"")
            self._accounts = Accounts.parse(*read)
        return self._accounts

    def user_for(self, account: Account) -> str | None:
        """As `box.run` wants it."""
        return None if account.name == self.hands else account.name

    # ---- as the control plane shows it ----

    def created(self, domain: str | None) -> dict[str, Any]:
        """What an SDK needs to reach it."""
        shown: dict[str, Any] = {
            "templateID": self.manner.template,
            "sandboxID": self.id,
            "clientID": CLIENT_ID,
            "envdVersion": ENVD_VERSION,
            "envdAccessToken": self.token,
        }
        if not self.rules.public_traffic:
            shown["trafficAccessToken"] = self.traffic_token
        if self.manner.alias:
            shown["alias"] = self.manner.alias
        if domain:
            shown["domain"] = domain
        return shown

    def listed(self) -> dict[str, Any]:
        limits = self.holding.box.spec.limits
        shown: dict[str, Any] = {
            "templateID": self.manner.template,
            "sandboxID": self.id,
            "clientID": CLIENT_ID,
            "startedAt": moment(self.holding.began),
            "endAt": moment(self.holding.ends),
            "cpuCount": max(1, round(limits.cpus)),
            "memoryMB": limits.memory_mib,
            "diskSizeMB": limits.disk_mib,
            "metadata": self.metadata,
            "state": self.state,
            "envdVersion": ENVD_VERSION,
        }
        if self.manner.alias:
            shown["alias"] = self.manner.alias
        return shown

    def detailed(self, domain: str | None) -> dict[str, Any]:
        shown = self.listed() | {
            "envdAccessToken": self.token,
            "allowInternetAccess": self.rules.internet,
            "lifecycle": self.lifecycle.to_json(),
            "network": {**self.rules.given, "allowPublicTraffic": self.rules.public_traffic},
        }
        if domain:
            shown["domain"] = domain
        return shown


@dataclass(frozen=True, slots=True)
class Sample:
    """What it used at one moment."""

    at: float
    cpu_ticks: int
    cpu_pct: float
    memory: int
    disk: int
    disk_total: int

    def to_json(self, cpus: float, memory_mib: int) -> dict[str, Any]:
        return {
            "timestamp": moment(self.at),
            "timestampUnix": int(self.at),
            "cpuCount": max(1, round(cpus)),
            "cpuUsedPct": round(self.cpu_pct, 2),
            "memUsed": self.memory,
            "memTotal": memory_mib << 20,
            "memCache": 0,
            "diskUsed": self.disk,
            "diskTotal": self.disk_total,
        }
