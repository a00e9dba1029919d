"""`Engine("auto")`: for each spec the substrate that suits it best on this machine, never below the spec's isolation.

What every substrate says of itself and what was measured here decide (pool/choice.py). An engine of the chosen one is started when the first
lease needs it; one that does not start is left out from then on, with its reason, and the next best takes its place. So is one whose boundary
turns out not to hold here, unless no boundary is asked for. Why a lease runs where it does is in its ledger and in the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from untax import substrates
from untax.core.errors import PoolTimeout, SubstrateError, SubstrateUnavailable, UsageError
from untax.core.spec import ISOLATION_LEVELS, EnvSpec, Limits, require_duration
from untax.core.stage import Stage
from untax.core.substrate import Doubtful, Fastidious, Layered, Priced, Reviving, Sandbox, Substrate
from untax.engine import Engine
from untax.layers._durable import replace_whole
from untax.leases import Bindings, Request, checked
from untax.pool import choice as choices
from untax.pool.choice import Choice, Expected
from untax.pool.costs import Costs
from untax.pool.status import PoolStatus, together
from untax.pooling import Pooling
from untax.snapshot import Snapshot
from untax.substrates._host import chosen_state_dir, ensure_private_dir
from untax.tenancy import Tenancy

if TYPE_CHECKING:
    from untax.layers.build import Prepared
    from untax.layers.sources import Progress

log = logging.getLogger("untax.auto")

_LEAST_WAIT_S = 0.001
MEASURED = "measured-costs.json"
"""Below the state directory: what the last run of `untax bench` found."""


class Candidates:
    """Every substrate there is, as a choice sees it. In place of one of them where an engine wants one."""

    name = "auto"

    def __init__(
        self, state_dir: str | None, options: Mapping[str, Mapping[str, Any]], actions: float, least: str = ISOLATION_LEVELS[0]
    ) -> None:
        if least not in ISOLATION_LEVELS:
            raise UsageError(f"least must be one of {', '.join(ISOLATION_LEVELS)}, not {least!r}")
        if unknown := sorted(set(options) - set(substrates.names())):
            raise UsageError(f"options: there is no substrate {unknown[0]!r}; there are: {', '.join(substrates.names())}")
        given = {} if state_dir is None else {"state_dir": state_dir}
        self._all: dict[str, Substrate] = {name: substrates.load(name, **given, **options.get(name, {})) for name in substrates.names()}
        self._state_dir = chosen_state_dir(state_dir)
        self._actions = require_duration("actions", actions)
        self._least = least
        self._unusable: dict[str, str] = {}
        self._doubted: dict[str, str] = {}
        self._expected: dict[str, Expected] = {}
        self.isolation = ISOLATION_LEVELS[-1]
        """So that every spec gets as far as the choice, which says what is lacking."""

    def default_spec(self) -> EnvSpec:
        return EnvSpec(isolation=max(EnvSpec().isolation, self._least, key=ISOLATION_LEVELS.index))

    def unavailable_reason(self) -> str | None:
        """Looks at all of them, one after the other. Blocks."""
        for name in self._all:
            self.look_at(name, is_brief=True)
        return None if self._expected else "; ".join(f"{name}: {reason}" for name, reason in sorted(self._unusable.items()))

    async def look(self) -> None:
        """The same without blocking, at all of them at once; `SubstrateUnavailable` when none can be used."""
        await asyncio.gather(*(asyncio.to_thread(self.look_at, name, is_brief=True) for name in self._all))
        if not self._expected:
            raise SubstrateUnavailable("", f"no substrate can be used here: {self.unavailable_reason()}")

    async def create(self, spec: EnvSpec) -> Sandbox:
        raise UsageError(f"image {spec.image!r}: 'auto' has no sandboxes of its own; use Engine('auto')")

    def look_at(self, name: str, *, is_brief: bool = False) -> None:
        """Find out whether one can be used, whether its boundary holds, and what is known of its costs. Blocks.

        `is_brief` leaves the second to whoever starts it, because it may take a trial of seconds.
        """
        substrate = self._all[name]
        reason = substrate.unavailable_reason()
        if reason is not None:
            self.leave_out(name, reason)
            return
        if not is_brief and (trouble := _boundary_trouble(substrate)):
            self.doubt(name, trouble)
        typical = substrate.typical if isinstance(substrate, Priced) else None
        measured = _measured(self._state_dir / MEASURED).get(name)
        self._expected[name] = choices.expected(name, substrate.isolation, typical, measured, self._learnt_s(name))

    def _learnt_s(self, name: str) -> float | None:
        try:
            return Costs.from_json((self._state_dir / "pools" / f"costs-{name}.json").read_text()).known("create")
        except (OSError, UsageError):
            return None  # whoever wrote it learns anew, and says so

    def leave_out(self, name: str, reason: str) -> None:
        self._expected.pop(name, None)
        self._unusable[name] = reason

    def doubt(self, name: str, reason: str) -> None:
        """Its boundary does not hold: from now on it is for those who ask for none."""
        if name not in self._doubted:
            log.warning("auto: %s is left out where a boundary is asked for: %s", name, reason)
        self._doubted[name] = reason

    def boundary_doubt(self, name: str, spec: EnvSpec) -> str | None:
        """Why `spec` must not be leased on it, as far as is known."""
        return None if self._asked(spec) == ISOLATION_LEVELS[0] else self._doubted.get(name)

    def _asked(self, spec: EnvSpec) -> str:
        return max(spec.isolation, self._least, key=ISOLATION_LEVELS.index)

    def choose(self, spec: EnvSpec) -> Choice:
        unusable = dict(self._unusable)
        able = []
        for name, one in self._expected.items():
            substrate = self._all[name]
            trouble = substrate.image_trouble(spec.image) if isinstance(substrate, Fastidious) else None
            trouble = trouble or self.boundary_doubt(name, spec)
            if trouble is None:
                able.append(one)
            else:
                unusable[name] = trouble
        return choices.choose(able, self._asked(spec), actions=self._actions, unusable=unusable)

    @property
    def keeping(self) -> list[str]:
        """Those that have snapshots, of files before those of memory only."""
        able = [name for name in self._expected if isinstance(self._all[name], (Layered, Reviving))]
        return sorted(able, key=lambda name: not isinstance(self._all[name], Layered))


class AutoEngine(Engine):
    """What `Engine("auto")` makes. `options` are those of single substrates, by name; `actions` is how long rollouts are taken to be.

    Nothing below `least` is chosen, whatever a spec accepts: for who leases to others.
    """

    def __init__(
        self,
        substrate: str = "auto",
        *,
        state_dir: str | os.PathLike[str] | None = None,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        actions: float = choices.ACTIONS,
        least: str = ISOLATION_LEVELS[0],
        **given: Any,
    ) -> None:
        if not isinstance(options, Mapping | None) or not all(isinstance(one, Mapping) for one in (options or {}).values()):
            raise UsageError("options must be a mapping of a substrate's name to its own options, as {'container': {'engine': 'podman'}}")
        assert substrate == "auto"
        self._options = {name: dict(one) for name, one in (options or {}).items()}
        self._candidates = Candidates(None if state_dir is None else os.fsdecode(state_dir), self._options, actions, least)
        try:
            super().__init__(self._candidates, state_dir=state_dir, **given)
        except UsageError as exc:
            if "already made" not in str(exc):
                raise
            raise UsageError("Engine('auto') has no options of one substrate; name it: options={'container': {…}}") from None
        self._given = {**given, "state_dir": state_dir}
        self._engines: dict[str, asyncio.Task[Engine]] = {}
        self._said_choices: set[str] = set()
        self._told: Callable[[], None] | None = None

    # ---- its own life ----

    async def start(self) -> None:
        if self._state != "new":
            raise UsageError(f"this engine is {self._state}; make a new one")
        await self._candidates.look()
        self._state = "running"

    async def _close(self) -> None:
        for outcome in await asyncio.gather(*(self._close_one(task) for task in self._engines.values()), return_exceptions=True):
            if isinstance(outcome, BaseException):
                log.warning("while closing: %s: %s", type(outcome).__name__, outcome)
        await self._wait_chores()

    async def _close_one(self, starting: asyncio.Task[Engine]) -> None:
        try:
            engine = await asyncio.shield(starting)
        except Exception:
            return  # it has given back what it took, and whoever asked for it was told
        await engine.aclose()

    def make(self, name: str) -> Engine:
        """An engine of one substrate, not started."""
        return Engine(name, **self._given, **self._options.get(name, {}))

    # ---- who serves what ----

    async def engine_for(self, spec: EnvSpec) -> tuple[Engine, Choice]:
        """Started. What does not start, or whose boundary does not hold, is left out and the next best asked; `UsageError` when none is left."""
        while True:
            self._check_running()
            choice = self._candidates.choose(spec)
            try:
                engine = await self._started(choice.substrate)
            except SubstrateError as exc:
                self._candidates.leave_out(choice.substrate, f"it did not start: {exc}")
                log.warning("auto: %s did not start and is left out: %s", choice.substrate, exc)
                continue
            if trouble := _boundary_trouble(engine.substrate):
                self._candidates.doubt(choice.substrate, trouble)
            if self._candidates.boundary_doubt(choice.substrate, spec):
                continue  # the engine stays: who asks for no boundary may be using it
            if choice.reason not in self._said_choices:
                self._said_choices.add(choice.reason)
                log.info("auto: %s", choice.reason)
            return engine, choice

    async def _started(self, name: str) -> Engine:
        """Once for all who ask, whoever of them leaves meanwhile."""
        starting = self._engines.get(name)
        if starting is None:
            starting = self._engines[name] = self.chore(self._start(self.make(name)))
        try:
            return await asyncio.shield(starting)
        except Exception:
            self._engines.pop(name, None)  # the next who asks begins anew
            raise

    async def _start(self, engine: Engine) -> Engine:
        await engine.start()
        engine.watch_pools(self._told)
        if self._told is not None:
            self._told()
        return engine

    @property
    def _running(self) -> list[Engine]:
        return [task.result() for task in self._engines.values() if task.done() and not task.cancelled() and task.exception() is None]

    # ---- what engines do ----

    async def fulfil(self, request: Request) -> Tenancy:
        if request.snapshot is not None:
            return await request.snapshot.engine.fulfil(request)
        began_ns = self.clock()
        try:
            async with asyncio.timeout(request.wait_s) as deadline:
                engine, choice = await self.engine_for(request.spec)
        except TimeoutError:
            if not deadline.expired():
                raise
            raise PoolTimeout(f"no engine had started within wait_s={request.wait_s:g}; allow more time for the first lease") from None
        if request.wait_s is not None:
            request = replace(request, wait_s=max(_LEAST_WAIT_S, request.wait_s - (self.clock() - began_ns) / 1e9))
        box = await engine.fulfil(request)
        box.ledger.choice = choice.reason
        return box

    async def prepare(self, spec: EnvSpec, *, progress: Progress | None = None) -> Prepared:
        request = checked(self.offer, spec, Bindings())
        return await (await self.engine_for(request.spec))[0].prepare(request.spec, progress=progress)

    async def warm(self, spec: EnvSpec | Snapshot | str | None = None, n: int = 1, *, limits: Limits | None = None) -> None:
        if isinstance(spec, (Snapshot, str)):
            request = await self._request_from(spec, Bindings(limits=limits))
            assert request.snapshot is not None
            await request.snapshot.engine.warm(request.snapshot, n, limits=limits)
            return
        request = checked(self.offer, spec, Bindings(limits=limits))
        await (await self.engine_for(request.spec))[0].warm(request.spec, n)

    async def ladder(self, spec: EnvSpec) -> tuple[tuple[Stage, ...], frozenset[str]]:
        request = checked(self.offer, spec, Bindings())
        return await (await self.engine_for(request.spec))[0].ladder(request.spec)

    def watch_pools(self, told: Callable[[], None] | None) -> list[Pooling]:
        self._told = told
        return [pooling for engine in self._running for pooling in engine.watch_pools(told)]

    def has_idle(self, request: Request) -> bool:
        chosen = self._candidates.choose(request.spec).substrate
        return any(engine.has_idle(request) for engine in self._running if engine.substrate.name == chosen)

    def idle_in_s(self, request: Request) -> float | None:
        chosen = self._candidates.choose(request.spec).substrate
        return next((engine.idle_in_s(request) for engine in self._running if engine.substrate.name == chosen), None)

    def foresee(self, spec: EnvSpec) -> None:
        """Nothing: which engine serves it is found out when it comes."""

    def trouble(self, request: Request) -> str | None:
        """None where it is not known yet which engine serves it."""
        if request.snapshot is not None:
            return None
        chosen = self._candidates.choose(request.spec).substrate
        running = {engine.substrate.name: engine for engine in self._running}
        return running[chosen].trouble(request) if chosen in running else None

    def pools(self) -> PoolStatus:
        """All engines' pools together."""
        self._check_running()
        return together("auto", [engine.pools() for engine in self._running])

    async def _request_from(self, snapshot: Snapshot | str, late: Bindings) -> Request:
        self._check_running()
        found = snapshot if isinstance(snapshot, Snapshot) else await self.find_snapshot(snapshot)
        if found.engine in self._running:
            return await found.engine._request_from(found, late)
        return await super()._request_from(found, late)

    async def find_snapshot(self, snapshot_id: str) -> Snapshot:
        self._check_running()
        last: UsageError | None = None
        for name in self._candidates.keeping:
            try:
                return await (await self._started(name)).find_snapshot(snapshot_id)
            except UsageError as exc:
                last = exc
            except SubstrateError as exc:
                self._candidates.leave_out(name, f"it did not start: {exc}")
        raise last or UsageError(
            "no substrate that can be used here has layers, so there are no snapshots; `untax doctor` lists the others"
        )

    @property
    def quarantined(self) -> tuple[str, ...]:
        return tuple(one for engine in self._running for one in engine.quarantined)

    def choice(self, spec: EnvSpec | None = None) -> Choice:
        """What a lease of `spec` would run on, and why."""
        self._check_running()
        return self._candidates.choose(checked(self.offer, spec, Bindings()).spec)


def _boundary_trouble(substrate: Substrate) -> str | None:
    return substrate.boundary_trouble() if isinstance(substrate, Doubtful) else None


def keep_measured(state_dir: Path, found: Sequence[Expected]) -> None:
    """Put what a run of the meter found in place of what was known of the same substrates. `OSError` when it cannot be written."""
    if found:
        ensure_private_dir(state_dir)
        whole = _measured(state_dir / MEASURED) | {one.substrate: one for one in found}
        replace_whole(state_dir / MEASURED, choices.to_json(list(whole.values())).encode())


def _measured(path: Path) -> dict[str, Expected]:
    try:
        return choices.from_json(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as exc:  # UsageError is one: nothing here may keep an engine from starting
        log.warning("what was measured is not used: %s: %s", path, exc)
        return {}
