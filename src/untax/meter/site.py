"""One substrate of a run: its engine, what the workloads stand on there, and one slot of trials of a case.

A slot is what happens between two decisions of the run: the load beside it is started, the image dropped or the pool filled, then the
trials begin, all at once where the case has several. Only the trials themselves are timed.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from untax.box import Box
from untax.core.errors import SubstrateError, UntaxError, UsageError
from untax.core.span import now_ns
from untax.core.spec import Limits
from untax.core.substrate import ImageForgetting, Incumbent, IncumbentMaking, Tidying
from untax.engine import Engine
from untax.meter import stress
from untax.meter.record import HELD, Case
from untax.pool.options import PoolOptions
from untax.rollout.footing import Footing, footing
from untax.rollout.material import Material
from untax.rollout.runner import Measured, Runner, Work
from untax.rollout.workload import Workload

_PROBE_S = 1800.0  # for the first sandbox of an engine, which may have to make or fetch its image
_TRUE_S = 60.0
POOL = PoolOptions(linger_s=3600.0)
"""Of the engines that sites are made for: what a slot has made ready is kept until its trials take it."""
_FAULTS_IN_A_ROW = 5  # after so many the substrate is taken for gone


@dataclass(slots=True)
class Attempted:
    """A trial with the attempts before it."""

    measured: Measured
    attempts: int = 1
    wasted_ns: int = 0


@dataclass(slots=True)
class Slot:
    """What came of one: its trials, and from the first's beginning to the last's end; 0 when none was begun."""

    trials: list[Attempted] = field(default_factory=list)
    wall_ns: int = 0


class Site:
    def __init__(
        self,
        engine: Engine,
        material: Material,
        scratch: Path,
        *,
        server: str | None = None,
        image: str | None = None,
        limits: Limits | None = None,
        retries: int = 0,
        workers: int = 0,
    ) -> None:
        self.engine = engine
        self.runner = Runner(engine)
        self.has_incumbent = False
        self._isolation: str | None = None  # what its sandboxes promise; None: the substrate's own word does not hold here
        self._material = material
        self._scratch = scratch
        self._server = server
        self._image = image
        self._limits = limits
        self._retries = retries
        self._workers = workers
        self._works: dict[tuple[str, int, str], Work] = {}
        self._footings: dict[tuple[str, str], Footing] = {}
        self._pins: list[Any] = []
        self._faults = 0

    @property
    def name(self) -> str:
        """What the substrate calls itself, which may say more than the plan: that it is emulated, for example."""
        return self.engine.substrate.name

    async def examine(self, workload: Workload, *, wait_s: float | None = None) -> None:
        """One sandbox, to see that it works and what it offers; `UntaxError` when it does not, or not within `wait_s`."""
        plain = Workload(name=workload.name, image=workload.image, limits=workload.limits)
        spec = footing(self.engine, plain, self._material, image=self._image, limits=self._limits).spec
        async with self.engine.lease(spec, wait_s=wait_s or _PROBE_S) as box:
            self.has_incumbent = isinstance(box.sandbox, Incumbent) or isinstance(self.engine.substrate, IncumbentMaking)
            if all(limit.name != "isolation" for limit in box.ledger.unenforced):
                self._isolation = self.engine.substrate.isolation
            (await box.run(["true"], timeout_s=_TRUE_S)).check()

    async def prepare(self, case: Case, workload: Workload) -> Work:
        """What a case does and stands on, with every stage of it built: none of that is part of a trial."""
        key = (workload.name, case.length, case.warmth)
        if key not in self._works:
            ground = self._footings.get((workload.name, case.warmth))
            if ground is None:
                ground = await asyncio.to_thread(self._footing, case, workload)
                if self.engine.warehouse.has_stages:
                    self._pins.append((await self.engine.prepare(ground.spec)).pin)
                self._footings[workload.name, case.warmth] = ground
            self._works[key] = Work(workload, ground, workload.of_length(case.length))
        return self._works[key]

    def _footing(self, case: Case, workload: Workload) -> Footing:
        is_warm = case.warmth == "warm"
        return footing(self.engine, workload, self._material, is_warm=is_warm, server=self._server, image=self._image, limits=self._limits)

    async def run_slot(self, case: Case, work: Work) -> Slot:
        """All trials of a slot. Whatever fails is in what is given; only cancellation is raised, and `UntaxError` of what surrounds them."""
        await self._see_to_image(case, work)
        asked_ns = now_ns()
        try:
            warm = await self._warmed(case, work)
        except SubstrateError as exc:  # of the infrastructure, and so of these trials: each would have waited as long for its sandbox
            self._faults += 1
            spent_ns = now_ns() - asked_ns
            await self._settle()  # of those that did come up
            return Slot([Attempted(_never_begun(exc, spent_ns)) for _ in range(case.concurrency)])
        queue = asyncio.Semaphore(self._workers) if self._workers else None
        async with contextlib.AsyncExitStack() as stack:
            stack.push_async_callback(self._settle)
            stack.push_async_callback(_release_all, warm)
            if case.warmth == "warm" and not warm:
                stack.push_async_callback(self._cool, case, work)
            await stack.enter_async_context(stress.contention(case.contention, self._scratch))
            begin_ns = now_ns()
            boxes = [warm.pop() if warm else None for _ in range(case.concurrency)]
            trials = await asyncio.gather(*(self._attempt(case, work, box, queue) for box in boxes))
            slot = Slot(list(trials), now_ns() - begin_ns)
        for trial in slot.trials:
            self._faults = self._faults + 1 if trial.measured.outcome == "infra" else 0
        return slot

    async def gone_reason(self) -> str | None:
        """Why the substrate is taken for gone; None while it is not."""
        if not self._faults:
            return None
        reason = await asyncio.to_thread(self.engine.substrate.unavailable_reason)
        if reason is not None:
            return f"it vanished half-way: {reason}"
        return f"it failed {self._faults} times in a row" if self._faults >= _FAULTS_IN_A_ROW else None

    def close(self) -> None:
        for pin in self._pins:
            pin.close()
        self._pins.clear()

    # ---- inside ----

    async def _attempt(self, case: Case, work: Work, held: Box | None, queue: asyncio.Semaphore | None) -> Attempted:
        attempts, wasted_ns = 0, 0
        while True:
            measured = await self.runner.run(work, path=case.path, is_warm=case.warmth == "warm", held=held, queue=queue)
            attempts += 1
            measured.detail["substrate"] = self.name
            if self._isolation is not None:
                measured.detail["isolation"] = self._isolation
            if case.warmth == "warm" and case.path == "channel":
                measured.detail["warm"] = "the engine's pool" if held is None else HELD
            wanted = "exact" if case.warmth == "warm" else "cold"
            if (hit := measured.detail.get("hit", wanted)) != wanted:  # only a lease that a pool served has one
                measured.detail["missed"] = f"the pool's answer was {hit}, and {wanted} was to be measured"
            if measured.outcome != "infra" or attempts > self._retries or not getattr(measured.error, "retryable", False):
                return Attempted(measured, attempts, wasted_ns)
            wasted_ns += measured.total_ns
            try:
                if held is not None:
                    held = await self.runner.hold(work)
                elif case.warmth == "warm" and case.path == "channel":
                    await self._fill(work, 1)
            except UntaxError:
                return Attempted(measured, attempts, wasted_ns - measured.total_ns)

    async def _warmed(self, case: Case, work: Work) -> list[Box]:
        """Fill the engine's pool, or hold boxes where packages have to be uploaded: a pool knows nothing of those."""
        if case.warmth != "warm" or case.path != "channel":
            return []
        if work.footing.upload is None:
            await self._fill(work, case.concurrency)
            return []
        boxes: list[Box] = []
        try:
            for _ in range(case.concurrency):
                boxes.append(await self.runner.hold(work))
        except BaseException:
            await _release_all(boxes)
            raise
        return boxes

    async def _fill(self, work: Work, count: int) -> None:
        """So many are idle in the pool, and none is made in the place of one that is taken: a refill would run beside the trial."""
        await self.engine.warm(work.footing.spec, count)
        await self.engine.warm(work.footing.spec, 0)  # they stay: see POOL

    async def _cool(self, case: Case, work: Work) -> None:
        """Empty the pool again, so that the machine is as it was for whatever comes next. As a rule its trials have taken all there was."""
        driver = self.engine.pooling.driver
        await driver.wait_settled()
        while case.path == "channel" and driver.parked():
            async with self.engine.lease(work.footing.spec):
                pass  # nobody asks for it any more, so it is destroyed at its release

    async def _settle(self) -> None:
        """Wait for what was given up to be gone: its end would run beside the next slot's trials, which may be another substrate's."""
        await self.engine.pooling.driver.wait_settled()
        if isinstance(self.engine.substrate, Tidying):
            await self.engine.substrate.wait_tidy()

    async def _see_to_image(self, case: Case, work: Work) -> None:
        if case.image != "absent":
            return
        spec, substrate = work.footing.spec, self.engine.substrate
        if isinstance(substrate, ImageForgetting):
            await substrate.forget_image(spec)
        elif self.engine.layered is not None:
            self.close()  # the stages are no longer to be kept
            if not await self.engine.warehouse.drop_image(spec):
                raise UsageError(
                    f"image {spec.image!r} is in place on this machine and is never absent; name one that is fetched, by [options.{self.name}]"
                )
        elif self.engine.warehouse.has_stages:
            self.close()
            await self.engine.warehouse.discard(spec)
        else:
            raise UsageError(f"substrate {self.name!r} cannot drop an image")


def _never_begun(error: SubstrateError, spent_ns: int) -> Measured:
    """A trial whose sandbox was not there when it should have begun."""
    measured = Measured(outcome="infra", error=error, total_ns=spent_ns)
    measured.parts_ns["create"] = spent_ns
    return measured


async def _release_all(boxes: list[Box]) -> None:
    for box in boxes:
        await box.release()


def facts_of(measured: Measured, work: Work) -> Mapping[str, Any]:
    """What a record says about the software under a trial."""
    return {**work.footing.software, "stages": measured.stages}
