"""Carrying a plan out on fakes: a failing trial is a record, a substrate that vanishes a gap, and nothing measured is ever lost."""

import asyncio
from collections import Counter

import pytest
from tests.unit.meter.benching import Bench, plan

from untax.core.errors import CreateError, PoolTimeout, RecordError, SandboxLost, SubstrateUnavailable
from untax.meter import run as runs
from untax.meter import summary
from untax.meter.gather import gather
from untax.meter.journal import Journal
from untax.meter.record import Batch, Case, End, Gap, Resume, Run, Trial, no_parts
from untax.meter.site import Attempted, Site
from untax.rollout.runner import Measured
from untax.testing import FakeClock, FakeExit, FakeSubstrate


async def test_every_trial_is_a_record_and_the_last_line_says_that_it_is_whole(tmp_path):
    bench = Bench(tmp_path, {"fake": FakeSubstrate()}, plan(works=(("W", 0), ("W", 4))))
    await bench.run()

    records = bench.records()
    assert isinstance(records[0], Run)
    assert isinstance(records[-1], End)
    trials = bench.records(Trial)
    assert sorted((t.case.length, t.trial, t.warmup) for t in trials) == sorted(
        (length, number, warmup) for length in (0, 4) for number, warmup in ((0, True), (0, False), (1, False), (2, False))
    )
    assert [t.order for t in trials] == list(range(8))
    assert all(t.outcome == "ok" and t.limits["cpus"] == 1.0 and t.software["image"] == "host" for t in trials)
    assert {t.actions for t in trials if t.case.length == 4} == {4}


async def test_substrates_are_interleaved(tmp_path):
    bench = Bench(tmp_path, {"a": FakeSubstrate(), "b": FakeSubstrate()}, plan(substrates=("a", "b"), trials=12, seed=3))
    await bench.run()

    names = "".join(t.case.substrate for t in bench.records(Trial))
    assert names.count("a") == names.count("b") == 13
    assert names not in ("ab" * 13, "ba" * 13)
    assert "aaa" not in names.replace("bb", "b")


async def test_a_failing_trial_is_a_record_and_the_others_go_on(tmp_path):
    fake = FakeSubstrate()
    counted = iter(range(1000))
    fake.programs["true"] = lambda *_: FakeExit(code=int(next(counted) == 3), stderr=b"bad luck")
    bench = Bench(tmp_path, {"fake": fake}, plan(trials=4))
    done = await bench.run()

    outcomes = [t.outcome for t in bench.records(Trial)]
    assert sorted(outcomes) == ["failed", *["ok"] * 4]
    failed = next(t for t in bench.records(Trial) if t.outcome == "failed")
    assert failed.error == {"type": "Unexpected", "message": failed.error["message"]}
    assert "bad luck" in failed.error["message"]
    assert failed.total_ns > 0
    assert done.failed == bench.records(End)[0].failed == 1


async def test_a_failure_that_may_pass_is_tried_again_and_its_time_is_kept(tmp_path):
    fake = FakeSubstrate()
    bench = Bench(tmp_path, {"fake": fake}, plan(trials=2, retries=2))
    create, counted = fake.create, iter(range(1000))

    async def sometimes(spec):
        if next(counted) in (3, 4):  # after the probe, the warm-up and its reset: both retries of one trial
            raise CreateError("", "busy")
        return await create(spec)

    fake.create = sometimes
    await bench.run()

    again = [t for t in bench.records(Trial) if t.attempts > 1]
    assert [(t.outcome, t.attempts) for t in again] == [("ok", 3)]
    assert again[0].wasted_ns > 0
    assert again[0].worker_ns == again[0].total_ns + again[0].wasted_ns


async def test_a_substrate_that_vanishes_half_way_is_a_gap_and_the_others_go_on(tmp_path):
    going, staying = FakeSubstrate(), FakeSubstrate()
    bench = Bench(tmp_path, {"going": going, "staying": staying}, plan(substrates=("going", "staying"), trials=6))

    def tell(done, *_):
        if done == 6:
            going.unavailable = "its daemon is gone"
            going.failures["create"] = SubstrateUnavailable("", "its daemon is gone")

    bench._hooks["tell"] = tell
    await bench.run()

    (gap,) = bench.records(Gap)
    assert (gap.substrate, gap.case) == ("going", None)
    assert "vanished half-way: its daemon is gone" in gap.reason
    trials = bench.records(Trial)
    assert sum(t.case.substrate == "staying" and not t.warmup for t in trials) == 6
    had = sum(t.case.substrate == "going" and not t.warmup for t in trials)
    assert 0 < had < 6
    assert gap.trials_missing == 6 - had
    assert bench.records(End)


class Renaming(FakeSubstrate):
    """Finds out when it starts that it is something else than what it was asked for as."""

    async def start(self):
        await super().start()
        self.name = "other"


async def test_a_substrate_that_calls_itself_otherwise_is_said_and_can_be_lost(tmp_path):
    fake = Renaming()
    bench = Bench(tmp_path, {"fake": fake}, plan(trials=50))
    bench._hooks["tell"] = lambda done, *_: fake.failures.update(wait_ready=SandboxLost("", "dead")) if done == 3 else None
    await bench.run()

    trials = bench.records(Trial)
    assert {(t.case.substrate, t.substrate_detail["substrate"]) for t in trials} == {("fake", "other")}
    assert {t.substrate_detail["isolation"] for t in trials} == {fake.isolation}
    assert [(gap.substrate, "in a row" in gap.reason) for gap in bench.records(Gap)] == [("fake", True)]
    assert len(trials) < 12


async def test_a_substrate_that_only_fails_is_given_up_after_a_while(tmp_path):
    fake = FakeSubstrate()
    bench = Bench(tmp_path, {"fake": fake}, plan(trials=50))
    bench._hooks["tell"] = lambda *_: fake.failures.update(wait_ready=SandboxLost("", "dead"))
    await bench.run()

    assert "in a row" in bench.records(Gap)[0].reason
    assert len(bench.records(Trial)) < 10


async def test_a_substrate_that_cannot_be_had_at_all_is_a_gap(tmp_path):
    bad = FakeSubstrate(unavailable="no such engine")
    bench = Bench(tmp_path, {"bad": bad, "good": FakeSubstrate()}, plan(substrates=("bad", "good")))
    await bench.run()

    assert [(gap.substrate, "no such engine" in gap.reason) for gap in bench.records(Gap)] == [("bad", True)]
    assert {t.case.substrate for t in bench.records(Trial)} == {"good"}
    assert any("no such engine" in line for line in bench.said)


async def test_interrupted_it_keeps_what_is_done_and_goes_on_where_it_stopped(tmp_path):
    fake = FakeSubstrate()
    a_plan = plan(trials=8, works=(("W", 0), ("W", 4)), seed=11)
    whole = Bench(tmp_path / "whole", {"fake": FakeSubstrate()}, a_plan)
    await whole.run()
    cut = Bench(tmp_path / "cut", {"fake": fake}, a_plan)
    task = asyncio.ensure_future(cut.run())
    cut._hooks["tell"] = lambda done, *_: task.cancel() if done == 7 else None
    with pytest.raises(asyncio.CancelledError):
        await task
    kept = len(cut.records(Trial))
    assert not fake.live

    cut._hooks.clear()
    await cut.resume()

    def done(bench):
        return [(t.case, t.trial, t.warmup) for t in bench.records(Trial)]

    assert 7 <= kept < len(done(whole))
    assert done(cut) == done(whole)  # the same order, none twice, none missing
    assert len(cut.records(Resume)) == len(cut.records(End)) == 1
    assert [t.order for t in cut.records(Trial)] == list(range(len(done(cut))))


async def test_in_parts_it_is_the_same_run_with_the_host_of_each_part(tmp_path):
    """However short a part is, it has a slot; the order is the plan's, whoever stopped where."""
    a_plan = plan(trials=2, warmup=0, works=(("W", 0), ("W", 4)), seed=11)
    whole = Bench(tmp_path / "whole", {"fake": FakeSubstrate()}, a_plan)
    await whole.run()
    told = []
    parted = Bench(
        tmp_path / "parted", {"fake": FakeSubstrate()}, a_plan, part_s=0.0, tell=lambda done, total, *_: told.append((done, total))
    )
    await parted.run()
    while not parted.records(End):
        before = len(parted.records(Trial))
        await parted.resume()
        assert len(parted.records(Trial)) > before or parted.records(End)

    assert [(t.case, t.trial) for t in parted.records(Trial)] == [(t.case, t.trial) for t in whole.records(Trial)]
    assert len(parted.records(Resume)) >= len(parted.records(Trial)) - 1
    assert all(one.host["cores"] for one in parted.records(Resume))
    assert told == [(done, 4) for done in (1, 2, 3, 4)], "what earlier parts did is counted"


async def test_a_trial_that_is_cut_off_gives_its_sandbox_back(tmp_path):
    fake = FakeSubstrate(programs={"echo": lambda *_: None})
    bench = Bench(tmp_path, {"fake": fake}, plan())
    task = asyncio.ensure_future(bench.run())
    while not any(step.startswith("spawn echo") for step in fake.log):
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert not fake.live
    assert fake.log[-1] == "aclose"
    assert not bench.records(Trial)


async def test_rollouts_at_once_are_trials_and_a_batch(tmp_path):
    bench = Bench(tmp_path, {"fake": FakeSubstrate()}, plan(concurrency=(1, 4), trials=8))
    await bench.run()

    batches = [batch for batch in bench.records(Batch) if not batch.warmup]
    assert [(batch.rollouts, batch.failed, batch.case.concurrency) for batch in batches] == [(4, 0, 4)] * 2
    assert all(batch.wall_ns > 0 for batch in batches)
    numbers = sorted(t.trial for t in bench.records(Trial) if t.case.concurrency == 4 and not t.warmup)
    assert numbers == list(range(8))


async def test_rollouts_wait_for_a_worker_and_that_is_queue(tmp_path):
    fake = FakeSubstrate()
    bench = Bench(tmp_path, {"fake": fake}, plan(concurrency=(4,), trials=4, warmup=0, workers=1))
    await bench.run()

    # One after the other: each had destroyed its sandbox and its successor before the next was created.
    lives = [step for step in fake.log if step in ("create", "destroy")]
    assert lives == ["create", "destroy"] + ["create", "create", "destroy", "destroy"] * 4
    waits = sorted(t.parts_ns["queue"] for t in bench.records(Trial))
    assert waits[0] < waits[-1]


async def test_concurrency_climbs_until_throughput_grows_no_more(tmp_path):
    bench = Bench(tmp_path, {"fake": FakeSubstrate()}, plan(concurrency=(1, 2), trials=4, knee=True))
    await bench.run()

    levels = sorted({batch.case.concurrency for batch in bench.records(Batch)})
    assert levels[:2] == [2, 8]
    assert any("the knee is at about" in line for line in bench.said) or levels[-1] == 512


async def test_only_good_rollouts_are_throughput(tmp_path):
    counted = iter(range(1000))
    fake = FakeSubstrate(programs={"echo": lambda *_: FakeExit(code=int(next(counted) % 4 == 0))})
    fake.programs["bash"] = fake.programs["echo"]  # the workload's `shell`
    bench = Bench(tmp_path, {"fake": fake}, plan(concurrency=(4,), trials=4, warmup=0))
    done = await bench.run()

    (batch,) = bench.records(Batch)
    assert (batch.rollouts, batch.failed) == (4, 1)
    assert done.throughput[batch.case] == [pytest.approx(3e9 / batch.wall_ns)]


async def test_rollouts_whose_sandboxes_were_never_there_are_paid_for_and_are_no_throughput(tmp_path):
    fake = FakeSubstrate()
    bench = Bench(tmp_path, {"fake": fake}, plan(warmth=("warm",), concurrency=(4,), trials=4, warmup=0))
    create, counted = fake.create, iter(range(1000))

    async def once(spec):
        if next(counted):  # the first is the probe
            raise CreateError("", "no room")
        return await create(spec)

    fake.create = once
    done = await bench.run()

    trials = bench.records(Trial)
    assert [t.outcome for t in trials] == ["infra"] * 4
    assert all(t.total_ns == t.parts_ns["create"] > 0 for t in trials)
    assert [batch.failed for batch in bench.records(Batch)] == [4]
    assert not done.throughput


async def test_the_climb_to_the_knee_keeps_to_the_time_box(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(runs, "now_ns", clock)

    def slow(*_):
        clock.advance(1.0)
        return FakeExit()

    fake = FakeSubstrate(programs={"true": slow})
    bench = Bench(tmp_path, {"fake": fake}, plan(concurrency=(1,), trials=5, knee=True, budget_s=13.0))
    await bench.run()

    (gap,) = bench.records(Gap)  # the probe, a warm-up and five trials take 7 s, four at once another 4 s each time
    assert gap.case.concurrency == 4
    assert "time box of 13 s" in gap.reason
    assert clock() <= 13e9


async def test_warm_trials_say_what_kept_them_warm(tmp_path):
    bench = Bench(tmp_path, {"fake": FakeSubstrate()}, plan(warmth=("cold", "warm")))
    await bench.run()

    for trial in bench.records(Trial):
        assert ("warm" in trial.substrate_detail) == (trial.case.warmth == "warm")


class Lingering(FakeSubstrate):
    """Takes its time over each end."""

    async def step(self, name):
        for _ in range(50 if name == "destroy" else 0):
            await asyncio.sleep(0)
        await super().step(name)


async def test_what_a_warm_slot_made_is_gone_before_the_next_begins(tmp_path):
    fake, left = Lingering(), []
    bench = Bench(tmp_path, {"fake": fake}, plan(warmth=("warm",), concurrency=(1, 3), trials=6))
    bench._hooks["tell"] = lambda *_: left.append(len(fake.live))
    await bench.run()

    assert len(left) > 4
    assert set(left) == {0}


async def test_nothing_is_made_beside_a_warm_trial(tmp_path):
    """One sandbox ahead of each trial and one for its reset: none in the place of the one that it took."""
    fake = FakeSubstrate()
    bench = Bench(tmp_path, {"fake": fake}, plan(warmth=("warm",), trials=4, warmup=0))
    await bench.run()

    assert [t.substrate_detail["hit"] for t in bench.records(Trial)] == ["exact"] * 4
    assert fake.log.count("create") == 1 + 2 * 4  # the first is looked at before any trial


async def test_what_a_warm_slot_made_and_its_trials_did_not_take_goes_too(tmp_path, monkeypatch):
    fake, left = FakeSubstrate(), []

    async def hesitant(self, case, work, held, queue):
        return Attempted(Measured(outcome="failed"))

    monkeypatch.setattr(Site, "_attempt", hesitant)
    bench = Bench(tmp_path, {"fake": fake}, plan(warmth=("warm",), concurrency=(3,), trials=6, warmup=0))
    bench._hooks["tell"] = lambda *_: left.append((fake.log.count("create"), len(fake.live)))
    await bench.run()

    assert left == [(4, 0), (7, 0)]


async def test_a_warm_trial_that_is_tried_again_is_warm_again(tmp_path):
    fake, counted = FakeSubstrate(), iter(range(1000))

    def once(*_):
        if next(counted) == 2:  # after the look at the substrate and the rehearsal of what is kept ready
            fake.sandboxes[-1].die()
        return FakeExit()

    fake.programs["true"] = once
    bench = Bench(tmp_path, {"fake": fake}, plan(warmth=("warm",), trials=1, warmup=0, retries=1))
    await bench.run()

    (trial,) = bench.records(Trial)
    assert (trial.attempts, trial.outcome, trial.substrate_detail["hit"]) == (2, "ok", "exact")


async def test_a_trial_that_the_pool_served_otherwise_than_its_case_says_is_marked(tmp_path, monkeypatch):
    """A warm trial that finds nothing ready measures a cold start, and a cold one that finds something a warm one."""
    whole = Bench(tmp_path / "whole", {"fake": FakeSubstrate()}, plan(warmth=("cold", "warm")))
    await whole.run()
    hits = {(t.case.warmth, t.substrate_detail["hit"], "missed" in t.substrate_detail) for t in whole.records(Trial)}
    assert hits == {("cold", "cold", False), ("warm", "exact", False)}

    async def nothing(*_):
        return []

    monkeypatch.setattr(Site, "_warmed", nothing)
    bench = Bench(tmp_path / "empty", {"fake": FakeSubstrate()}, plan(warmth=("warm",)))
    await bench.run()
    assert all("exact was to be measured" in t.substrate_detail["missed"] for t in bench.records(Trial))


async def test_the_incumbent_path_is_a_row_of_its_own_where_there_is_one(tmp_path):
    both, one = FakeSubstrate(incumbent=True), FakeSubstrate()
    bench = Bench(tmp_path, {"both": both, "one": one}, plan(substrates=("both", "one"), paths=("channel", "incumbent")))
    await bench.run()

    assert {(t.case.substrate, t.case.path) for t in bench.records(Trial)} == {
        ("both", "channel"), ("both", "incumbent"), ("one", "channel"),
    }  # fmt: skip
    assert not bench.records(Gap)


async def test_an_image_that_is_never_absent_is_a_gap(tmp_path):
    bench = Bench(tmp_path, {"fake": FakeSubstrate()}, plan(images=("present", "absent")))
    await bench.run()

    (gap,) = bench.records(Gap)
    assert gap.case.image == "absent"
    assert "cannot drop an image" in gap.reason


async def test_an_image_is_dropped_before_each_trial_that_wants_it_absent(tmp_path):
    fake = FakeSubstrate()
    dropped = []

    async def forget_image(spec):
        dropped.append(spec.image)

    fake.forget_image = forget_image
    bench = Bench(tmp_path, {"fake": fake}, plan(images=("absent",)))
    await bench.run()

    assert dropped == ["host"] * 4


async def test_a_time_box_drops_and_names_what_it_cannot_give_five_trials(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(runs, "now_ns", clock)

    def slow(*_):
        clock.advance(1.0)
        return FakeExit()

    fake = FakeSubstrate(programs={"true": slow})  # once in the tier itself, twice in the trajectory of four
    bench = Bench(tmp_path, {"fake": fake}, plan(works=(("W", 0), ("W", 4)), trials=10, budget_s=16.0))
    await bench.run()

    counted = {length: sum(t.case.length == length and not t.warmup for t in bench.records(Trial)) for length in (0, 4)}
    assert counted == {0: 10, 4: 0}
    assert [gap.case.length for gap in bench.records(Gap)] == [4]
    assert "time box of 16 s" in bench.records(Gap)[0].reason


def slow_by(clock, seconds):
    """A command that takes so long."""

    def program(*_):
        clock.advance(seconds)
        return FakeExit()

    return {"true": program}


def counted(bench):
    return Counter(t.case.substrate for t in bench.records(Trial) if not t.warmup)


async def test_a_time_box_opens_and_prepares_one_after_the_other_while_stages_may_be_made(tmp_path, monkeypatch):
    """The first of the plan have everything in place before the next is looked at, which has what is left of two thirds of the box."""
    clock = FakeClock()
    monkeypatch.setattr(runs, "now_ns", clock)
    waits, examine = [], Site.examine

    async def examined(site, workload, *, wait_s):
        waits.append(wait_s)
        await examine(site, workload, wait_s=wait_s)

    monkeypatch.setattr(Site, "examine", examined)
    fakes = {name: FakeSubstrate(programs=slow_by(clock, 10.0)) for name in ("a", "b", "c")}
    bench = Bench(tmp_path, fakes, plan(substrates=("a", "b", "c"), budget_s=24.0))
    await bench.run()

    assert waits == [16.0, 6.0]  # b is looked at, and then it is too late for its stages
    assert [(gap.substrate, gap.case is None) for gap in bench.records(Gap)][:2] == [("b", False), ("c", True)]
    for gap, words in zip(bench.records(Gap), ("its stages were not built", "its turn did not come"), strict=False):
        assert (
            gap.reason
            == f"{words} within the time box of 24 s after 20 s of making stages; they are kept: run it again, or with a larger --budget"
        )


async def test_stages_that_take_the_whole_time_box_leave_the_cases_their_share(tmp_path, monkeypatch):
    """As in the first run on a slow machine. It takes longer than its box, and says so."""
    clock = FakeClock()
    monkeypatch.setattr(runs, "now_ns", clock)
    examine = Site.examine

    async def examined(site, workload, *, wait_s):
        clock.advance(200.0 if site.name == "dear" else 0.0)
        await examine(site, workload, wait_s=wait_s)

    monkeypatch.setattr(Site, "examine", examined)
    fakes = {name: FakeSubstrate(programs=slow_by(clock, 1.0)) for name in ("cheap", "dear")}
    bench = Bench(tmp_path, fakes, plan(substrates=("cheap", "dear"), trials=10, budget_s=60.0))
    await bench.run()

    assert counted(bench) == {"cheap": 10}
    assert [gap.case.substrate for gap in bench.records(Gap)] == ["dear"]
    assert any("making stages took 202 s of the time box of 60 s; the cases have 20 s all the same" in line for line in bench.said)
    assert clock() <= 222e9


async def test_bringing_what_workloads_work_on_takes_no_substrate_s_turn(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(runs, "now_ns", clock)

    async def serve(bench, _):
        await bench._bring(clock.advance, 500.0)

    monkeypatch.setattr(runs.Bench, "_serve", serve)
    fakes = {name: FakeSubstrate(programs=slow_by(clock, 0.1)) for name in ("a", "b")}
    bench = Bench(tmp_path, fakes, plan(substrates=("a", "b"), budget_s=60.0))
    await bench.run()

    assert counted(bench) == {"a": 3, "b": 3}


async def test_warm_ups_of_dear_cases_take_no_trial_from_the_cheap_ones(tmp_path, monkeypatch):
    """However much longer one takes than could be foreseen; what is left out says what to do."""
    clock = FakeClock()
    monkeypatch.setattr(runs, "now_ns", clock)
    fakes = {"cheap": FakeSubstrate(programs=slow_by(clock, 0.1)), "dear": FakeSubstrate(programs=slow_by(clock, 30.0))}
    bench = Bench(
        tmp_path, fakes, plan(substrates=("cheap", "dear"), paths=("channel",), warmth=("cold", "warm"), trials=10, budget_s=100.0)
    )
    await bench.run()

    assert counted(bench)["cheap"] >= 10
    assert "dear" not in counted(bench)
    assert {gap.case.substrate for gap in bench.records(Gap)} == {"dear"}
    assert all("run it again, or with a larger --budget" in gap.reason for gap in bench.records(Gap))


async def test_a_substrate_that_does_not_come_up_in_a_time_box_is_closed_before_the_trials(tmp_path, monkeypatch):
    """What it was still building would be built beside them."""
    examine, dear, seen = Site.examine, FakeSubstrate(), []

    async def examined(site, workload, *, wait_s):
        if site.engine.substrate is dear:
            raise PoolTimeout("nothing became free")
        await examine(site, workload, wait_s=wait_s)

    monkeypatch.setattr(Site, "examine", examined)
    options = {"dear": {"image": "debian:bookworm"}}
    a_plan = plan(substrates=("cheap", "dear"), budget_s=60.0, options=options)
    bench = Bench(tmp_path, {"cheap": FakeSubstrate(), "dear": dear}, a_plan, tell=lambda *_: seen.append(dear.log[-1]))
    await bench.run()

    assert set(seen) == {"aclose"}
    (gap,) = bench.records(Gap)
    assert gap.reason == (
        "no sandbox of it came up within the time box of 60 s; run it with a larger --budget"
        ", or make its image first: untax image pull debian:bookworm"
    )


async def test_a_machine_that_grows_slower_costs_the_dearest_their_place(tmp_path, monkeypatch):
    """In every round: the cheap ones have their five."""
    clock, told = FakeClock(), []
    monkeypatch.setattr(runs, "now_ns", clock)

    def program(*_):
        clock.advance(1.0 if len(told) < 2 else 2.0)  # after the warm-ups
        return FakeExit()

    fake = FakeSubstrate(programs={"true": program})
    a_plan = plan(works=(("W", 0), ("W", 4)), trials=10, budget_s=24.0)
    bench = Bench(tmp_path, {"fake": fake}, a_plan, tell=lambda *_: told.append(1))
    await bench.run()

    lengths = Counter(t.case.length for t in bench.records(Trial) if not t.warmup)
    assert lengths[0] >= 5
    (gap,) = bench.records(Gap)
    assert (gap.case.length, gap.reason.partition(" in")[0]) == (4, f"only {lengths[4]} trials fitted")
    assert clock() <= 24e9


async def test_a_time_box_takes_nothing_from_a_plan_of_few_trials(tmp_path):
    bench = Bench(tmp_path, {"fake": FakeSubstrate()}, plan(trials=3, concurrency=(1, 4), budget_s=60.0))
    await bench.run()

    assert counted(bench) == {"fake": 3 + 4}
    assert not bench.records(Gap)


async def test_a_time_box_gives_everybody_five_before_it_gives_anybody_more(tmp_path, monkeypatch):
    clock = FakeClock()
    monkeypatch.setattr(runs, "now_ns", clock)

    def slow(*_):
        clock.advance(1.0)
        return FakeExit()

    bench = Bench(tmp_path, {"fake": FakeSubstrate(programs={"true": slow})}, plan(works=(("W", 0), ("W", 4)), trials=10, budget_s=24.0))
    await bench.run()

    counted = {length: sum(t.case.length == length and not t.warmup for t in bench.records(Trial)) for length in (0, 4)}
    assert counted == {0: 6, 4: 6}  # the probe 1 s, the warm-up 3 s, each round 3 s: six of them come to 22 s
    assert not bench.records(Gap)


async def test_records_that_can_no_longer_be_written_end_the_run_with_words(tmp_path, monkeypatch):
    import errno
    import os

    real, written = Journal._write_all, []

    def write_all(descriptor, line):
        written.append(line)
        if len(written) == 5:  # the first time that the disk is full; the reserve makes room for the same line again
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor, line)

    monkeypatch.setattr(Journal, "_write_all", staticmethod(write_all))
    fake = FakeSubstrate()
    bench = Bench(tmp_path, {"fake": fake}, plan(trials=20))
    with pytest.raises(RecordError, match=r"the disk is full.*--resume"):
        await bench.run()

    assert not fake.live
    kept = bench.records(Trial)
    assert [t.order for t in kept] == list(range(4))  # the one that met the full disk is there

    await bench.resume()
    assert len(bench.records(Trial)) == 21


def test_the_summary_counts_failures_and_marks_what_is_below_resolution(tmp_path):
    slow, quick = Case("a", tier="T0"), Case("b", tier="T0", warmth="warm")
    with Journal.create(tmp_path / "f", Run("r", "now", 1, {}, {}, span_cost_ns=200)) as journal:
        for number, (case, total, outcome) in enumerate(((slow, 9_000_000, "ok"), (slow, 5, "failed"), (quick, 9_000, "ok"))):
            parts = {**no_parts(), "create": total}
            metrics = {"first_command": total} if outcome == "ok" else {}
            journal.append(Trial("r", case, number, number, False, "now", outcome, parts, total, metrics))

    found = summary.summarise(tmp_path / "f")
    assert [(str(case), len(row.total), row.failed) for case, row in found.rows.items()] == [("a T0 cold", 1, 1), ("b T0 warm", 1, 0)]
    text = "\n".join(summary.lines(found))
    assert "a span costs 200 ns; * is under 50 × that" in text
    assert "9 µs*" in text
    assert "9.00 ms*" not in text
    assert "not complete" in text
    assert [row["below_resolution"] for row in summary.as_json(found)["cases"]] == [False, True]


def test_the_summary_names_together_what_was_left_out_for_one_reason(tmp_path):
    with Journal.create(tmp_path / "f", Run("r", "now", 1, {}, {}, span_cost_ns=200)) as journal:
        for case, reason in ((Case("a", tier="T2"), "no time"), (Case("b", tier="T0"), "no image"), (Case("b", tier="T2"), "no time")):
            journal.append(Gap("r", "now", case.substrate, reason, case))
        journal.append(Gap("r", "now", "c", "no image"))

    text = summary.lines(summary.summarise(tmp_path / "f"))
    assert [line for line in text if line.startswith("left out")] == [
        "left out: a T2 cold, b T2 cold: no time",
        "left out: b T0 cold, c: no image",
    ]


def test_the_summary_and_the_report_name_the_same_share_of_tax(tmp_path):
    """A share of all time: the ratio of two medians would be another number."""
    case = Case("a", tier="T0")
    with Journal.create(tmp_path / "f", Run("r", "now", 1, {}, {}, span_cost_ns=200)) as journal:
        for number, (create, action) in enumerate(((10, 90), (50, 50), (900, 100))):
            parts = {**no_parts(), "create": create * 10**6, "action": action * 10**6}
            total = sum(parts.values())
            journal.append(Trial("r", case, number, number, False, "now", "ok", parts, total, {"first_command": create}))

    (row,) = summary.summarise(tmp_path / "f").rows.values()
    assert row.tax_share == pytest.approx(960 / 1200) == gather(tmp_path / "f").cases[case].tax_share
    assert "80.0%" in "\n".join(summary.lines(summary.summarise(tmp_path / "f")))
    assert summary.as_json(summary.summarise(tmp_path / "f"))["cases"][0]["tax"]["share"] == pytest.approx(0.8)
