"""What every trial has in common: the account of its time, the order of its steps, and whose fault it is when one fails."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, Literal

from untax.core.errors import BackendError, StageFailed, UntaxError, UsageError
from untax.core.span import PARTS, Stopwatch
from untax.core.substrate import Bare, Detailing, Orchestrated
from untax.engine import Engine
from untax.rollout import perform
from untax.rollout.footing import Footing
from untax.rollout.perform import Done, Unexpected
from untax.rollout.workload import Action, Workload

Outcome = Literal["ok", "failed", "infra"]


@dataclass(frozen=True, slots=True)
class Work:
    """What is done in a trial, and on what it stands."""

    workload: Workload
    footing: Footing
    actions: tuple[Action, ...]


@dataclass(slots=True)
class Measured:
    """How a trial went. The parts and `unattributed_ns` add up to `total_ns`."""

    outcome: Outcome = "ok"
    error: BaseException | None = None
    parts_ns: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    total_ns: int = 0
    metrics_ns: dict[str, int] = field(default_factory=dict)
    actions: int = 0
    setup_own_ns: int = 0
    """Of the part `setup`: the own time of the workload's set-up commands, which a plain script would spend as well."""
    control_plane_ns: int = 0
    stages: dict[str, float] = field(default_factory=dict)
    detail: dict[str, Any] = field(default_factory=dict)

    @property
    def unattributed_ns(self) -> int:
        return self.total_ns - sum(self.parts_ns.values())


class Trial(abc.ABC):
    """One trial; each way of getting actions into a sandbox is a subclass."""

    def __init__(self, engine: Engine, work: Work) -> None:
        self.engine = engine
        self.work = work
        self.measured = Measured()
        self.doing = "queue"
        """The part that time goes into when the step under way fails."""
        self.excluded_ns = 0
        """Taken out of the total: what the meter does for its own sake."""
        self.watch = Stopwatch(engine.clock)

    def restart(self) -> None:
        """Forget what was accounted for so far: time is taken from now on."""
        self.measured = Measured(detail=self.measured.detail)
        self.excluded_ns = 0
        self.watch = Stopwatch(self.engine.clock)

    async def run(self, queue: asyncio.Semaphore | None) -> Measured:
        measured, watch = self.measured, self.watch
        begin_ns = watch.last_ns
        if queue is not None:
            await queue.acquire()
        try:
            self.cut("queue")
            await self._guarded(self._episode(begin_ns))
            self.doing = "cleanup"
            await self._guarded(self.give_back())
            self.cut("cleanup")
        finally:
            if queue is not None:
                queue.release()
        measured.total_ns = watch.last_ns - begin_ns - self.excluded_ns
        self.settle()
        if measured.error is None:
            measured.metrics_ns["fresh_episode"] = measured.total_ns
            if measured.actions:
                measured.metrics_ns["amortised_action"] = measured.total_ns // measured.actions
        return measured

    async def _episode(self, begin_ns: int) -> None:
        self.doing = "create"
        await self.open()
        self.measured.metrics_ns["first_command"] = self.watch.last_ns - begin_ns - self.excluded_ns
        self.doing = "setup"
        for step in self.work.footing.setup:
            done = await self.act(step)
            part_ns = self.cut("setup")
            # Clamped as an action's own time is: a sandbox may claim what it likes.
            self.measured.setup_own_ns += min(part_ns, done.inside_ns or 0)
            perform.check(step, done)
        self.doing = "dispatch"
        for action in self.work.actions:
            done = await self.act(action)
            self._account(done)
            self.measured.actions += 1
            perform.check(action, done)
        if self.work.workload.reset:
            self.doing = "reset"
            await self.reset()
            self.cut("reset")

    async def _guarded(self, step: Awaitable[None]) -> None:
        """A step that fails makes the outcome, and never takes the trial's siblings down."""
        try:
            await step
        except (Unexpected, UsageError, StageFailed) as exc:  # the workload's own: it would fail everywhere, every time
            self._fail("failed", exc)
        except (UntaxError, OSError) as exc:
            self._fail("infra", exc)
        except asyncio.CancelledError:
            # Whatever happens, what was taken is given back before the cancellation goes on.
            await self.engine.finish(self.engine.chore(self.give_back()))
            raise

    def _fail(self, outcome: Outcome, exc: BaseException) -> None:
        self.cut(self.doing)
        if self.measured.error is None:
            self.measured.outcome, self.measured.error = outcome, exc
        elif outcome == "infra":
            self.measured.outcome = outcome

    def distrust(self, reason: str) -> None:
        """What it shows is not the workload's doing, although every action ended as it should."""
        self.measured.outcome, self.measured.error = "infra", BackendError("", reason)

    def cut(self, part: str) -> int:
        """End a part now; the next begins here. Gives how long it was."""
        start_ns, end_ns = self.watch.part()
        self.measured.parts_ns[part] += end_ns - start_ns
        return end_ns - start_ns

    def exclude(self) -> None:
        """Leave out of the account what happened since the last part."""
        start_ns, end_ns = self.watch.part()
        self.excluded_ns += end_ns - start_ns

    def _account(self, done: Done) -> None:
        """Divide an action's time: inside, on the way, and in making a result of the answer."""
        start_ns, end_ns = self.watch.part()
        whole_ns = end_ns - start_ns
        way_ns = min(whole_ns, done.round_trip_ns) if done.round_trip_ns is not None else whole_ns
        # A sandbox that claims more time inside than the whole way took (it may be hostile) gets the whole way.
        inside_ns = way_ns if done.inside_ns is None else min(way_ns, done.inside_ns)
        parts = self.measured.parts_ns
        parts["action"] += inside_ns
        parts["dispatch"] += way_ns - inside_ns
        parts["observe"] += whole_ns - way_ns
        if done.inside_ns is None:
            self.measured.detail["inside"] = "not measured: no bash inside that knows the time, so dispatch is in action"

    def describe(self, sandbox: Bare | None) -> None:
        """What the sandbox says about itself, for the record; call it once every part is in the account."""
        if isinstance(sandbox, Orchestrated):
            # A sandbox that was made ahead tells of a control plane at work before the trial, which is no part of it.
            parts = self.measured.parts_ns
            self.measured.control_plane_ns = min(sandbox.control_plane_ns, parts["create"] + parts["ready"])
        if isinstance(sandbox, Detailing):
            self.measured.detail.update(sandbox.detail)

    # ---- each way has its own ----

    def settle(self) -> None:  # noqa: B027  (most have nothing to add)
        """Write down, after time has been taken, what would have taken time before."""

    @abc.abstractmethod
    async def open(self) -> None:
        """From nothing until the first command could run, with the parts of that accounted for."""

    @abc.abstractmethod
    async def act(self, action: Action) -> Done: ...

    @abc.abstractmethod
    async def reset(self) -> None: ...

    @abc.abstractmethod
    async def give_back(self) -> None:
        """Everything that `open` took. Safe to call twice, and when `open` failed."""
