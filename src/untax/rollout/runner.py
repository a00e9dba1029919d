"""One trial: a workload carried out on an engine under spans, from asking for a sandbox until it is gone.

The order of the steps is behaviour (`tests/unit/meter/test_order.py`): lease, set-up, actions, reset, release. The end of each is the
beginning of the next, read from the clock once. What a lease is made of comes from its ledger; what neither covers is `unattributed`.
"""

from __future__ import annotations

import asyncio

from untax.box import Box
from untax.core.substrate import Sandbox
from untax.engine import Engine
from untax.rollout import perform
from untax.rollout._incumbent import IncumbentTrial
from untax.rollout._trial import Measured, Trial, Work
from untax.rollout.footing import PACKAGES
from untax.rollout.perform import Done
from untax.rollout.workload import Action

__all__ = ["Measured", "Runner", "Work"]

_LIFECYCLE = ("queue", "create", "ready", "setup")
_UPLOAD_S = 600.0


class Runner:
    """Runs trials on one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def run(
        self,
        work: Work,
        *,
        path: str = "channel",
        is_warm: bool = False,
        held: Box | None = None,
        queue: asyncio.Semaphore | None = None,
    ) -> Measured:
        """One trial. A fault is in what is given, never raised; cancellation is passed on once everything is given back.

        `held` is a box that was leased ahead, for a warm trial that a pool cannot serve; the trial releases it. On the incumbent path
        a warm trial makes its sandbox before time is taken. `queue` is waited for first, as a rollout waits for a worker.
        """
        if path != "incumbent":
            return await _ChannelTrial(self.engine, work, held).run(queue)
        trial = IncumbentTrial(self.engine, work)
        if is_warm:
            await trial.open_ahead()
        return await trial.run(queue)

    async def hold(self, work: Work) -> Box:
        """A box for a warm trial, everything in place."""
        box = await self.engine.acquire(work.footing.spec)
        try:
            if work.footing.upload is not None:
                await box.upload(work.footing.upload, PACKAGES, timeout_s=_UPLOAD_S)
        except BaseException:
            await box.release()
            raise
        return box


class _ChannelTrial(Trial):
    """Over the held channel, by a lease like anybody's."""

    def __init__(self, engine: Engine, work: Work, held: Box | None) -> None:
        super().__init__(engine, work)
        self._box = held
        self._is_held = held is not None
        self._leased: tuple[Box, Sandbox | None, int, int] | None = None
        self._restored_s = 0.0  # of a reset: copying the repository in again

    async def open(self) -> None:
        if self._box is not None:
            self._leased = (self._box, self._box.sandbox, 0, 0)
            return
        footing = self.work.footing
        box = self._box = await self.engine.acquire(footing.spec)
        self._leased = (box, box.sandbox, *self.watch.part())
        if footing.upload is not None:
            self.doing = "setup"
            await box.upload(footing.upload, PACKAGES, timeout_s=_UPLOAD_S)
            self.exclude()  # they are of the image, elsewhere a layer or a directory that is there before

    def settle(self) -> None:
        """The parts of the lease, from its ledger. What lies before its first is still waiting to be taken up, what follows its last is not yet ready."""
        if self._leased is None:
            return
        box, sandbox, asked_ns, got_ns = self._leased
        if not self._is_held:
            self._add_lease(box, asked_ns, got_ns)
        if not self.engine.warehouse.has_stages:
            self._leave_out_repository()
        self.describe(sandbox)

    def _add_lease(self, box: Box, asked_ns: int, got_ns: int) -> None:
        ledger, parts = box.ledger, self.measured.parts_ns
        self.measured.stages = dict(ledger.stages)
        if (hit := getattr(ledger, "hit", None)) is not None:
            self.measured.detail["hit"] = hit.kind  # how a pool served it
        until_ns = ledger.start_ns
        parts["queue"] += until_ns - asked_ns
        for span in ledger.spans:
            if span.name in _LIFECYCLE:
                parts[span.name] += span.elapsed_ns
                until_ns = max(until_ns, ledger.start_ns + span.end_ns)
        parts["ready"] += max(0, got_ns - until_ns)

    def _leave_out_repository(self) -> None:
        """A spec has one only where it is preloaded (or warm); without layers it is copied in anew, at the start and at a reset, as on the
        incumbent path for the meter's sake.
        """
        measured = self.measured
        at_reset_ns = self._leave_out("reset", self._restored_s)
        at_start_ns = self._leave_out("setup", measured.stages.get("repo", 0.0) - self._restored_s)
        measured.total_ns -= at_start_ns + at_reset_ns
        if "first_command" in measured.metrics_ns:
            measured.metrics_ns["first_command"] -= at_start_ns

    def _leave_out(self, part: str, seconds: float) -> int:
        parts = self.measured.parts_ns
        ns = max(0, min(parts[part], int(seconds * 1e9)))
        parts[part] -= ns
        return ns

    async def act(self, action: Action) -> Done:
        assert self._box is not None
        return await perform.over_channel(self._box, action)

    async def reset(self) -> None:
        assert self._box is not None
        before_s = self._box.ledger.stages.get("repo", 0.0)
        await self._box.reset()
        self._restored_s = self._box.ledger.stages.get("repo", 0.0) - before_s

    async def give_back(self) -> None:
        box, self._box = self._box, None
        if box is None:
            return
        await box.release()
        if box.ledger.verdict == "infra" and self.measured.error is None:
            self.distrust(box.ledger.reason or "the ledger's verdict is infra")
