"""The sequence of steps that the harness takes, read from the fake's log: for a benchmark, order is behaviour."""

from untax.box import Box
from untax.channel.client import Channel
from untax.core.span import PARTS
from untax.core.spec import EnvSpec, Repo
from untax.engine import Engine
from untax.rollout.footing import Footing
from untax.rollout.runner import Runner, Work
from untax.rollout.workload import Action, parse
from untax.testing import FakeClock, FakeExit, FakeSubstrate

TEXT = """
version = 1
name = "W"
{reset}
actions = [{{ run = ["true"] }}, {{ run = ["echo", "two"] }}]
"""
LEASE = ["create", "wait_ready", "open_channel", "configure"]
REST = ["spawn true", "spawn echo two"]


def work(reset=False, setup=()):
    workload = parse(TEXT.format(reset="reset = true" if reset else ""), origin="x")
    return Work(workload, Footing(EnvSpec(isolation="none"), setup=setup), workload.actions)


async def steps(fake, a_work, **how):
    async with Engine(fake) as engine:
        fake.log.clear()
        measured = await Runner(engine).run(a_work, **how)
        log = list(fake.log)
    assert not fake.live
    return log, measured


async def test_a_cold_trial_leases_acts_and_releases():
    log, measured = await steps(FakeSubstrate(), work())

    assert log == [*LEASE, *REST, "destroy"]
    assert (measured.outcome, measured.actions) == ("ok", 2)


async def test_set_up_comes_before_the_first_action_and_is_none():
    setup = (Action("run", ("true",)),)
    log, measured = await steps(FakeSubstrate(), work(setup=setup))

    assert log == [*LEASE, "spawn true", *REST, "destroy"]
    assert measured.actions == 2
    assert measured.parts_ns["setup"] > 0


async def test_a_reset_comes_after_the_last_action_and_before_the_release():
    log, measured = await steps(FakeSubstrate(), work(reset=True))

    assert log == [*LEASE, *REST, *LEASE, "destroy", "destroy"]
    assert measured.parts_ns["reset"] > 0


async def test_a_warm_trial_begins_with_a_box_that_is_held():
    fake = FakeSubstrate()
    async with Engine(fake) as engine:
        runner = Runner(engine)
        held = await runner.hold(work())
        fake.log.clear()
        measured = await runner.run(work(), held=held)

        assert fake.log == [*REST, "destroy"]
    assert (measured.parts_ns["create"], measured.parts_ns["ready"]) == (0, 0)


async def test_the_incumbent_path_opens_no_channel_and_makes_one_exec_for_each_action():
    log, measured = await steps(FakeSubstrate(incumbent=True), work(), path="incumbent")

    assert log == ["create", "wait_ready", "exec true", "exec echo two", "destroy"]
    assert measured.outcome == "ok"


async def test_a_reset_of_an_incumbent_is_another_sandbox():
    log, _ = await steps(FakeSubstrate(incumbent=True), work(reset=True), path="incumbent")

    assert log == ["create", "wait_ready", "exec true", "exec echo two", "destroy", "create", "wait_ready", "destroy"]


async def test_a_warm_incumbent_is_made_before_time_is_taken():
    log, measured = await steps(FakeSubstrate(incumbent=True), work(), path="incumbent", is_warm=True)

    assert log == ["create", "wait_ready", "exec true", "exec echo two", "destroy"]
    assert (measured.parts_ns["create"], measured.parts_ns["ready"]) == (0, 0)


# ---- where the time goes ----


class Ticking(FakeClock):
    """Goes on by a millisecond each time it is read."""

    def __call__(self):
        self.ns += 1_000_000
        return self.ns


async def test_parts_and_what_none_covers_add_up_to_the_total():
    fake = FakeSubstrate(programs={"true": lambda *_: FakeExit(wall_s=0.002)})
    async with Engine(fake, clock=Ticking()) as engine:
        measured = await Runner(engine).run(work(reset=True))

    assert set(measured.parts_ns) == set(PARTS)
    assert sum(measured.parts_ns.values()) + measured.unattributed_ns == measured.total_ns
    assert 0 <= measured.unattributed_ns <= 0.01 * measured.total_ns
    assert all(value >= 0 for value in measured.parts_ns.values())


async def test_a_hole_in_the_account_is_seen(monkeypatch):
    """What the lease's ledger does not account for shows as unattributed, and is not spread over its neighbours."""
    fake = FakeSubstrate()
    async with Engine(fake, clock=Ticking()) as engine:
        from untax.core.ledger import Ledger

        add = Ledger.add
        monkeypatch.setattr(Ledger, "add", lambda self, name, *ends: None if name == "create" else add(self, name, *ends))
        measured = await Runner(engine).run(work())

    assert measured.parts_ns["create"] == 0
    assert measured.unattributed_ns > 0


async def test_a_command_s_own_time_is_the_one_measured_inside():
    fake = FakeSubstrate(programs={"true": lambda *_: FakeExit(wall_s=0.000_5), "echo": lambda *_: FakeExit(wall_s=0.000_25)})
    async with Engine(fake) as engine:
        fake_round_trip = await Runner(engine).run(work())

    # The fake answers at once, so what it claims is more than the way took: it is believed up to that, and no further.
    assert 0 < fake_round_trip.parts_ns["action"] <= 750_000
    assert (
        fake_round_trip.parts_ns["action"] + fake_round_trip.parts_ns["dispatch"] + fake_round_trip.parts_ns["observe"]
        <= fake_round_trip.total_ns
    )


async def test_the_named_metrics():
    fake = FakeSubstrate()
    async with Engine(fake, clock=Ticking()) as engine:
        measured = await Runner(engine).run(work())

    metrics, parts = measured.metrics_ns, measured.parts_ns
    assert metrics["fresh_episode"] == measured.total_ns
    assert metrics["amortised_action"] == measured.total_ns // 2
    assert metrics["first_command"] == parts["queue"] + parts["create"] + parts["ready"] + parts["setup"]


async def test_what_set_up_commands_take_themselves_is_told_apart():
    """It stays in the part; a plain script would spend it as well, so it is no tax."""
    fake = FakeSubstrate(programs={"true": lambda *_: FakeExit(wall_s=0.000_5)})
    async with Engine(fake, clock=Ticking()) as engine:
        one = await Runner(engine).run(work(setup=(Action("run", ("true",)),)))
        none = await Runner(engine).run(work())
        fake.programs["true"] = lambda *_: FakeExit(wall_s=3600)
        liar = await Runner(engine).run(work(setup=(Action("run", ("true",)),)))

    assert one.setup_own_ns == 500_000 < one.parts_ns["setup"]
    assert none.setup_own_ns == 0
    assert liar.setup_own_ns == liar.parts_ns["setup"] < 10**9


async def test_what_is_there_before_a_trial_elsewhere_is_left_out_of_its_account(tmp_path, monkeypatch):
    """Preloaded files cost nothing on a substrate with layers and on the incumbent path, so copying them in is no part of a trial either."""
    clock = Ticking()

    async def an_hour(*_, **__):  # the fake cell takes no archives
        clock.advance(3600)
        return tmp_path

    plain = work(reset=True)
    spec = EnvSpec(isolation="none", repo=Repo("/src/project", "a" * 40))
    loaded = Work(plain.workload, Footing(spec, upload=tmp_path), plain.actions)
    monkeypatch.setattr(Box, "upload", an_hour)
    monkeypatch.setattr(Channel, "upload", an_hour)
    async with Engine(FakeSubstrate(incumbent=True), clock=clock) as engine:
        monkeypatch.setattr(engine.warehouse, "repository", an_hour)
        trials = [await Runner(engine).run(loaded, path=path) for path in ("channel", "incumbent")]

    for measured in trials:
        assert measured.error is None
        assert measured.metrics_ns["first_command"] < measured.total_ns == measured.metrics_ns["fresh_episode"] < 10**9
        assert sum(measured.parts_ns.values()) + measured.unattributed_ns == measured.total_ns
        assert 0 <= measured.unattributed_ns <= 0.1 * measured.total_ns
        assert 0 < measured.parts_ns["reset"] < 10**9
    assert trials[0].stages["repo"] >= 2 * 3600  # it is copied in again when the box is reset


class Placed(FakeSubstrate):
    """Its sandboxes say that a control plane took an hour over them."""

    async def create(self, spec):
        sandbox = await super().create(spec)
        sandbox.control_plane_ns = 3600 * 10**9
        return sandbox


async def test_a_control_plane_has_no_more_than_its_trial_gave_it():
    """What was placed before the trial began cost the trial nothing, whatever its sandbox tells of it."""
    fake = Placed(incumbent=True)
    async with Engine(fake, clock=Ticking()) as engine:
        runner = Runner(engine)
        cold = await runner.run(work())
        held = await runner.run(work(), held=await runner.hold(work()))
        ahead = await runner.run(work(), path="incumbent", is_warm=True)
        await engine.warm(work().footing.spec, 1)
        pooled = await runner.run(work())
        await engine.warm(work().footing.spec, 0)

    for measured in (cold, held, ahead, pooled):
        assert measured.control_plane_ns == measured.parts_ns["create"] + measured.parts_ns["ready"]
    assert cold.control_plane_ns > 0
    assert (held.control_plane_ns, ahead.control_plane_ns) == (0, 0)


# ---- what fails ----


async def test_an_action_that_ends_otherwise_than_expected_fails_the_trial_and_ends_it():
    fake = FakeSubstrate(programs={"true": lambda *_: FakeExit(code=3, stderr=b"no")})
    log, measured = await steps(fake, work())

    assert (measured.outcome, measured.actions) == ("failed", 1)
    assert "exit code 3" in str(measured.error)
    assert log == [*LEASE, "spawn true", "destroy"]
    assert "fresh_episode" not in measured.metrics_ns
    assert sum(measured.parts_ns.values()) + measured.unattributed_ns == measured.total_ns


async def test_a_failing_substrate_is_the_infrastructure_s_fault_and_its_time_counts():
    from untax.core.errors import CreateError

    fake = FakeSubstrate()
    fake.failures["create"] = CreateError("", "no room")
    _, measured = await steps(fake, work())

    assert (measured.outcome, type(measured.error)) == ("infra", CreateError)
    assert measured.parts_ns["create"] > 0


async def test_a_sandbox_that_dies_under_an_action_is_never_a_result():
    fake = FakeSubstrate()

    def die(*_):
        fake.sandboxes[-1].die()
        return FakeExit()

    fake.programs["echo"] = die
    _, measured = await steps(fake, work())

    assert measured.outcome == "infra"


async def test_a_workload_that_its_substrate_cannot_have_is_no_fault_of_the_infrastructure():
    log, measured = await steps(FakeSubstrate(), work(), path="incumbent")

    assert measured.outcome == "failed"
    assert "no incumbent path" in str(measured.error)
    assert log == ["create", "destroy"]
