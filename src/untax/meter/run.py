"""Carries a plan out: engines, rounds of slots in the plan's order, a record for each trial, gaps for what could not be had.

A failing trial is a record. A substrate that vanishes is a gap, and the others go on. Interrupted, the run keeps everything that was
measured and goes on later where it stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

from untax.core.errors import PoolTimeout, UntaxError
from untax.core.span import now_ns
from untax.engine import Engine
from untax.meter import conditions, host
from untax.meter.begun import Done, instant, note
from untax.meter.journal import Journal
from untax.meter.plan import LEAST_TRIALS, Plan, checked_limits
from untax.meter.ration import Ration
from untax.meter.record import Batch, Case, End, Gap, Trial, Warmth
from untax.meter.site import POOL, Attempted, Site, Slot, facts_of
from untax.rollout import gitserver
from untax.rollout.material import Material
from untax.rollout.runner import Work
from untax.rollout.workload import Workload

_KNEE_FACTOR = 4
_KNEE_GAIN = 1.1  # throughput that grows by less than this has reached what the machine gives
_KNEE_MOST = 1024
_KNEE_BATCHES = 3
# Shares of a time box. In the 140 s of `make bench`, on two slow cores, five trials of T0 and T1 take 10 s on the two cheapest substrates together
# and 30 s on one that takes images in; the stages of the first take 30 s, the image of the other 45 to 85 s.
_FOR_CASES = 1 / 3  # at least, however long their stages took
_FOR_STAGES = 1 / 4  # at least, however long it took to bring what the workloads work on
_WORTH_SAYING = 1 / 10  # where stages took more, another run has more time for the cases

T = TypeVar("T")

MakeEngine = Callable[[str, Mapping[str, Any]], Engine]
Tell = Callable[[int, int, float | None, str], None]
"""Told after each slot: slots done, of how many, seconds left, the case."""


class Bench:
    """One plan on its way. `material` and `scratch` are below the state directory."""

    def __init__(
        self,
        plan: Plan,
        workloads: Mapping[str, Workload],
        journal: Journal,
        run: str,
        material: Material,
        scratch: Path,
        make_engine: MakeEngine,
        *,
        done: Done | None = None,
        part_s: float = float("inf"),
        say: Callable[[str], None] = lambda _: None,
        tell: Tell = lambda *_: None,
    ) -> None:
        self._plan = plan
        self._workloads = workloads
        self._journal = journal
        self._run = run
        self._material = material
        self._scratch = scratch
        self._make_engine = make_engine
        self._done = done or Done()
        self._part_s = part_s
        self.is_cut = False
        """Whether slots were left for another part, once `part_s` had passed; each part has one at least. The run is then not complete."""
        self._say = say
        self._tell = tell
        self._sites: dict[tuple[str, Warmth], Site] = {}
        self._works: dict[Case, Work] = {}
        self._tiers = [tier for tier, _ in plan.works]
        self._slots_done = self._slots_had = 0  # by this part, and by those before it
        self._ration = Ration(plan.budget_s or float("inf"), lambda case: min(LEAST_TRIALS, plan.slots(case)))
        self._brought_s = 0.0  # what it took to bring the workloads' repositories and packages
        self._stages_s = 0.0  # the same, and to make all stages
        self._counts: dict[Case, int] = {}
        self._begin_ns = now_ns()

    async def carry_out(self) -> Done:
        """Everything that is left of the plan. `RecordError` when records can no longer be written: what was measured is kept."""
        clock = conditions.ClockCheck()
        async with contextlib.AsyncExitStack() as stack:
            server = await self._serve(stack)
            cases = await self._ready(stack, server)
            if self._plan.budget_s:
                self._share_out()
                cases = await self._tried(cases)
            await self._rounds(cases)
            if self._plan.knee and not self.is_cut:
                await self._to_the_knee(cases)
        if self.is_cut:
            self._journal.sync()
            return self._done
        facts = {"load": host.facts()["load"], "noise_probe": conditions.noise_probe(), "clock": clock.report()}
        self._journal.append(End(self._run, instant(), self._done.order, self._done.failed, now_ns() - self._begin_ns, facts))
        self._journal.sync()
        return self._done

    # ---- before the trials ----

    async def _ready(self, stack: contextlib.AsyncExitStack, server: str | None) -> list[Case]:
        """The plan's cases that can be measured. One substrate after the other, so that in a time box the first of the plan want for nothing."""
        planned, cases = self._plan.cases(), []
        for name in dict.fromkeys(self._plan.substrates):
            await self._open(stack, name, server)
            cases += await self._prepared(case for case in planned if case.substrate == name)
        return cases

    async def _serve(self, stack: contextlib.AsyncExitStack) -> str | None:
        """A git server, when a workload clones. The repositories are brought to this machine first."""
        sources = [workload.source for workload in self._workloads.values() if workload.source is not None]
        for source in sources:
            await self._bring(self._material.repository, source)
        if not sources:
            return None
        server = gitserver.serving(self._material.served)
        address = await asyncio.to_thread(server.__enter__)
        stack.callback(server.__exit__, None, None, None)
        return address

    async def _bring(self, fetch: Callable[..., T], what: object) -> T:
        """Something that workloads work on, which everybody waits for."""
        begin_s = self._spent_s()
        try:
            return await asyncio.to_thread(fetch, what)
        finally:
            self._brought_s += self._spent_s() - begin_s

    async def _open(self, stack: contextlib.AsyncExitStack, name: str, server: str | None) -> None:
        """An engine for cold trials and one for warm ones: a cold trial must not find what a pool has ready.

        Those of one that cannot be had are closed at once: what they still build would be built beside the others' trials.
        """
        wait_s = self._stages_left_s()
        if wait_s is not None and wait_s <= 0:
            self._gap(name, self._too_long("its turn did not come within"))
            return
        try:
            async with contextlib.AsyncExitStack() as own:
                for warmth in self._plan.warmth:
                    self._sites[name, warmth] = await self._opened(own, name, server, wait_s)
                stack.push_async_exit(own.pop_all())
        except UntaxError as exc:
            self._forget(name)
            is_late = wait_s is not None and isinstance(exc, PoolTimeout)
            self._gap(name, self._not_made(name) if is_late else f"{type(exc).__name__}: {exc}")

    async def _opened(self, stack: contextlib.AsyncExitStack, name: str, server: str | None, wait_s: float | None) -> Site:
        plan = self._plan
        options = dict(plan.options.get(name, {}))
        image = options.pop("image", None)
        packages = sorted({package for workload in self._workloads.values() for package in workload.packages})
        if packages:
            options.setdefault("setup_wheels", await self._bring(self._material.wheels, packages))
        engine = await stack.enter_async_context(self._make_engine(name, {"pool": POOL, **options}))
        site = Site(
            engine,
            self._material,
            self._scratch,
            server=server,
            image=image,
            limits=checked_limits(plan.limits) if plan.limits else None,
            retries=plan.retries,
            workers=plan.workers,
        )
        stack.callback(site.close)
        await site.examine(next(iter(self._workloads.values())), wait_s=wait_s)
        return site

    def _stages_left_s(self) -> float | None:
        """In a time box, how long another stage may still be begun."""
        box_s = self._plan.budget_s
        return max(box_s * (1 - _FOR_CASES), self._brought_s + box_s * _FOR_STAGES) - self._spent_s() if box_s else None

    def _forget(self, name: str) -> None:
        for key in [key for key in self._sites if key[0] == name]:
            del self._sites[key]

    async def _prepared(self, cases: Iterable[Case]) -> list[Case]:
        """The cases that there is something to measure for, every stage of them built, the least work first."""
        cases = list(cases)
        for case in sorted(cases, key=self._effort):
            site = self._sites.get((case.substrate, case.warmth))
            if site is None or case in self._done.dropped or (case.path == "incumbent" and not site.has_incumbent):
                continue
            left_s = self._stages_left_s()
            if left_s is not None and left_s <= 0:
                self._drop(case, self._too_long("its stages were not built within"))
                continue
            try:
                self._works[case] = await site.prepare(case, self._workloads[case.tier])
            except UntaxError as exc:
                self._drop(case, f"{type(exc).__name__}: {exc}")
        return self._live(cases)

    def _effort(self, case: Case) -> tuple[int, int, int]:
        """What is less comes first in a time box; of the same, the substrates come as the plan has them."""
        return case.length, case.concurrency, self._tiers.index(case.tier)

    def _share_out(self) -> None:
        """What is left of the time box for the cases. Where stages took most of it, the run takes longer instead, and says so."""
        box_s = self._plan.budget_s
        self._stages_s = self._spent_s()
        kept_s = box_s * _FOR_CASES
        if self._stages_s + kept_s > box_s:
            self._ration.budget_s = self._stages_s + kept_s
            self._say(
                f"making stages took {self._stages_s:.0f} s of the time box of {box_s:g} s; the cases have {kept_s:.0f} s all the same, "
                f"so this run takes about {self._ration.budget_s:.0f} s. They are kept: the next run has that time for its cases"
            )

    # ---- rounds ----

    async def _rounds(self, cases: list[Case]) -> None:
        plan = self._plan
        current = None
        for number, case in plan.order(cases):
            if plan.budget_s and number < 0:
                continue  # the box's own first round was the warm-up
            if number != current:
                current = number
                if plan.budget_s and not self._has_round(number, cases):
                    break
            # A round that everybody is to have is begun when there is time for it, and then ended.
            if plan.budget_s and number >= LEAST_TRIALS and self._spent_s() > self._ration.budget_s:
                break
            if case in self._works:
                if self._slots_done and self._spent_s() > self._part_s and not self._has(number, case):
                    self.is_cut = True
                    return
                await self._slot(number, case, cases)

    def _has_round(self, number: int, cases: list[Case]) -> bool:
        """Whether a time box has one more. Of the first ones it has as much as it can: the dearest cases are dropped."""
        live, spent_s = self._live(cases), self._spent_s()
        if number >= LEAST_TRIALS:
            return self._ration.has_round(live, spent_s)
        for case in self._ration.dropped(live, spent_s, done=number):
            self._drop(case, self._too_long(f"only {self._counts.get(case, 0)} trials fitted into"))
        return True

    async def _tried(self, cases: list[Case]) -> list[Case]:
        """The warm-up of a run in a time box: one slot of each case, cheapest first; whatever cannot have its least number of trials is dropped.

        What has been tried has its time kept when the next is.
        """
        admitted: list[Case] = []
        for case in sorted(cases, key=self._effort):
            if case not in self._works:
                continue  # its substrate is gone
            if not self._ration.fits(case, admitted, self._spent_s()):
                self._drop(case, self._no_time(case))
                continue
            await self._slot(-1, case, cases)
            for dear in self._ration.dropped(self._live([*admitted, case]), self._spent_s()):
                self._drop(dear, self._no_time(dear))
            admitted = self._live([*admitted, case])
        return admitted

    async def _slot(self, number: int, case: Case, cases: list[Case]) -> None:
        """One slot of a case and its records, unless the file has them already."""
        if self._has(number, case):
            self._counts[case] = self._counts.get(case, 0) + (case.concurrency if number >= 0 else 0)
            self._slots_had += 1
            return
        self._journal.check_room()
        site, work = self._sites[case.substrate, case.warmth], self._works[case]
        started_at, begin_ns = instant(), now_ns()
        try:
            slot = await site.run_slot(case, work)
        except UntaxError as exc:
            self._drop(case, f"{type(exc).__name__}: {exc}")
            return
        self._keep(number, case, slot, work, started_at)
        self._ration.note(case, (now_ns() - begin_ns) / 1e9)
        self._slots_done += 1
        self._tell(self._slots_had + self._slots_done, self._slots_total(cases), self._left_s(cases), str(case))
        if (reason := await site.gone_reason()) is not None:
            self._lose(case.substrate, reason)

    def _keep(self, number: int, case: Case, slot: Slot, work: Work, started_at: str) -> None:
        is_warmup = number < 0
        for trial, attempted in zip(self._trial_numbers(number, case), slot.trials, strict=True):
            record = self._record(case, trial, attempted, work, started_at, is_warmup=is_warmup)
            self._journal.append(record)
            self._done.order += 1
            self._done.failed += record.outcome != "ok" and not is_warmup
        if not is_warmup:
            self._counts[case] = self._counts.get(case, 0) + case.concurrency
        if case.concurrency > 1:
            failed = sum(attempted.measured.outcome != "ok" for attempted in slot.trials)
            batch = Batch(self._run, case, max(0, number), self._done.order, is_warmup, started_at, len(slot.trials), failed, slot.wall_ns)
            self._journal.append(batch)
            note(self._done, batch)
        self._journal.sync()

    def _has(self, number: int, case: Case) -> bool:
        """Whether the file has every trial of a slot."""
        return all((case, trial, number < 0) in self._done.trials for trial in self._trial_numbers(number, case))

    def _trial_numbers(self, number: int, case: Case) -> range:
        first = number + self._plan.warmup if number < 0 else number
        return range(first * case.concurrency, (first + 1) * case.concurrency)

    def _record(self, case: Case, trial: int, attempted: Attempted, work: Work, started_at: str, *, is_warmup: bool) -> Trial:
        measured = attempted.measured
        error = measured.error
        return Trial(
            run=self._run,
            case=case,
            trial=trial,
            order=self._done.order,
            warmup=is_warmup,
            started_at=started_at,
            outcome=measured.outcome,
            parts_ns={**measured.parts_ns, "unattributed": measured.unattributed_ns},
            total_ns=measured.total_ns,
            metrics_ns=measured.metrics_ns,
            actions=measured.actions,
            attempts=attempted.attempts,
            wasted_ns=attempted.wasted_ns,
            control_plane_ns=measured.control_plane_ns,
            setup_own_ns=measured.setup_own_ns,
            error={"type": type(error).__name__, "message": str(error)[:2000]} if error is not None else None,
            limits=asdict(work.footing.spec.limits),
            software=facts_of(measured, work),
            substrate_detail=measured.detail,
        )

    # ---- to the knee ----

    async def _to_the_knee(self, cases: list[Case]) -> None:
        """From the highest level of the plan on, four times as many at once, until throughput grows no more."""
        tops: dict[Case, Case] = {}
        for case in self._live(cases):
            base = replace(case, concurrency=1)
            if base not in tops or case.concurrency > tops[base].concurrency:
                tops[base] = case
        for top in tops.values():
            await self._climb(top)

    async def _climb(self, case: Case) -> None:
        best = self._throughput(case)
        while case.concurrency * _KNEE_FACTOR <= _KNEE_MOST:
            work, below = self._works.get(case), case
            case = replace(case, concurrency=case.concurrency * _KNEE_FACTOR)
            if work is None:
                return
            self._works[case] = work
            for number in range(-1, min(_KNEE_BATCHES, self._plan.slots(case))):
                # Beyond the knee so many at once take as many times as long, and nobody knows yet whether this is beyond it.
                if not self._ration.has_slot(case, _KNEE_FACTOR * self._ration.costs_s.get(below, 0.0), self._spent_s()):
                    self._drop(case, f"the time box of {self._plan.budget_s:g} s was over before the knee was found")
                    return
                if case in self._works:
                    await self._slot(number, case, [case])
            reached = self._throughput(case)
            if reached < best * _KNEE_GAIN:
                self._say(f"{case.substrate} {case.tier}: the knee is at about {case.concurrency // _KNEE_FACTOR} rollouts at once")
                return
            best = reached

    def _throughput(self, case: Case) -> float:
        """Good rollouts per second: the median of its batches; 0 when there is none."""
        found = sorted(self._done.throughput.get(case, []))
        return found[len(found) // 2] if found else 0.0

    # ---- what could not be had ----

    def _lose(self, name: str, reason: str) -> None:
        """`name` is the plan's: a substrate may call itself by another once it has started."""
        self._forget(name)
        mine = [case for case in self._works if case.substrate == name]
        missing = sum(max(0, self._plan.slots(case) * case.concurrency - self._counts.get(case, 0)) for case in mine)
        for case in mine:
            del self._works[case]
        self._gap(name, reason, trials_missing=missing)

    def _drop(self, case: Case, reason: str) -> None:
        self._works.pop(case, None)
        missing = self._plan.slots(case) * case.concurrency - self._counts.get(case, 0)
        self._gap(case.substrate, reason, case=case, trials_missing=max(0, missing))

    def _no_time(self, case: Case) -> str:
        return self._too_long(f"no time for {min(LEAST_TRIALS, self._plan.trials_for(case))} trials in")

    def _too_long(self, what: str) -> str:
        """Why something does not fit the time box, and what to do about it."""
        box_s, stages_s = self._plan.budget_s, self._stages_s or self._spent_s()
        if stages_s <= box_s * _WORTH_SAYING:
            return f"{what} the time box of {box_s:g} s; run it with a larger --budget"
        return f"{what} the time box of {box_s:g} s after {stages_s:.0f} s of making stages; they are kept: run it again, or with a larger --budget"

    def _not_made(self, name: str) -> str:
        image = self._plan.options.get(name, {}).get("image")
        first = f", or make its image first: untax image pull {image}" if image else ""
        return self._too_long("no sandbox of it came up within") + first

    def _gap(self, substrate: str, reason: str, *, case: Case | None = None, trials_missing: int = 0) -> None:
        self._journal.append(Gap(self._run, instant(), substrate, reason[:2000], case, trials_missing))
        self._say(f"{case or substrate} is left out: {reason}")

    # ---- how far it is ----

    def _live(self, cases: Iterable[Case]) -> list[Case]:
        return [case for case in cases if case in self._works]

    def _spent_s(self) -> float:
        return (now_ns() - self._begin_ns) / 1e9

    def _slots_total(self, cases: list[Case]) -> int:
        return max(self._slots_had + self._slots_done, sum(self._plan.slots(case) + self._plan.warmup for case in self._live(cases)))

    def _left_s(self, cases: list[Case]) -> float | None:
        """From what slots have cost so far; None while some case has not been tried."""
        live = self._live(cases)
        if any(case not in self._ration.costs_s for case in live):
            return None
        left = 0.0
        for case in live:
            to_do = self._plan.slots(case) - self._counts.get(case, 0) // case.concurrency
            left += max(0, to_do) * self._ration.costs_s[case]
        if self._plan.budget_s:
            left = min(left, max(0.0, self._ration.budget_s - self._spent_s()))
        return left
