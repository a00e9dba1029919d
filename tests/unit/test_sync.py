"""The blocking names on a fake substrate, whose stream is no socket: everything goes by the loop's thread."""

import asyncio
import os
import signal
import threading
import time

import pytest
from tests import interrupts

import untax
import untax.sync
from untax.sync.loop import Loop
from untax.testing import FakeSubstrate, LayeredFake


@pytest.fixture
def fake():
    return FakeSubstrate()


def test_the_same_without_await(fake):
    with untax.sync.Engine(fake) as engine, engine.lease(env={"A": "1"}, files={"f": b"x"}) as box:
        assert box.run(["true"]).exit_code == 0
        assert "A=1" in box.shell("env").text
        assert box.read("f") == b"x"
        first = box.id
        box.reset()
        assert box.id != first
        assert [type(v).__name__ for v in box.batch().run(["true"]).read("none").send()] == ["CommandResult", "NotFound"]
    assert box.ledger.verdict == "trusted"
    assert not fake.live
    with pytest.raises(untax.SandboxLost):
        box.run(["true"])


def test_specs_and_errors_are_the_same_ones():
    assert untax.sync.EnvSpec is untax.EnvSpec
    assert untax.sync.SandboxLost is untax.SandboxLost


async def test_it_works_inside_a_running_loop(fake):
    """As in a notebook: the caller's loop stands still meanwhile, ours does not."""
    assert asyncio.get_running_loop().is_running()
    with untax.sync.Engine(fake) as engine, engine.lease() as box:
        assert box.run(["echo", "x"]).text == "x\n"


def test_many_threads_share_a_box(fake):
    failures = []

    def work(n):
        try:
            assert box.run(["echo", str(n)]).text == f"{n}\n"
        except BaseException as exc:
            failures.append(exc)

    with untax.sync.Engine(fake) as engine, engine.lease() as box:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


def test_after_a_fork_it_says_so(fake):
    with untax.sync.Engine(fake) as engine, engine.lease() as box:
        pid = os.fork()
        if pid == 0:
            try:
                box.run(["true"])
            except untax.UsageError:
                os._exit(7)
            finally:
                os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        assert box.run(["true"]).exit_code == 0


def test_an_engine_that_cannot_start_leaves_no_thread():
    before = threading.active_count()
    with pytest.raises(untax.SubstrateUnavailable):
        untax.sync.Engine(FakeSubstrate(unavailable="not here")).start()
    assert threading.active_count() == before


def test_an_engine_that_could_not_start_can_be_closed():
    engine = untax.sync.Engine(FakeSubstrate(unavailable="not here"))
    with pytest.raises(untax.SubstrateUnavailable):
        engine.start()
    engine.aclose()


def test_a_second_start_does_no_harm_to_the_first(fake):
    with untax.sync.Engine(fake) as engine:
        with pytest.raises(untax.UsageError, match="running"):
            engine.start()
        with engine.lease() as box:
            assert box.run(["true"]).exit_code == 0


def test_a_closed_engine_says_so(fake):
    engine = untax.sync.Engine(fake)
    engine.start()
    engine.aclose()
    engine.aclose()
    with pytest.raises(untax.UsageError):
        engine.acquire()


def test_every_method_of_a_box_has_its_blocking_twin():
    import inspect

    for ours, theirs in ((untax.Box, untax.sync.Box), (untax.Session, untax.sync.Session), (untax.Process, untax.sync.Process)):
        for name, method in vars(ours).items():
            if name.startswith("_") or not callable(method) or name in ("furnish", "abandon"):
                continue
            twin = getattr(theirs, name)
            assert list(inspect.signature(method).parameters) == list(inspect.signature(twin).parameters), name


# ---- snapshots ----


@pytest.fixture
def layered(tmp_path):
    (tmp_path / "image/workspace").mkdir(parents=True)
    fake = LayeredFake(tmp_path / "fake")
    with untax.sync.Engine(fake, state_dir=tmp_path / "state") as engine:
        engine.spec = untax.EnvSpec(image=f"dir:{tmp_path}/image")
        yield engine
    assert not fake.live
    assert not fake.frozen


def test_snapshots_forks_and_graders_without_await(layered):
    with layered.lease(layered.spec) as box:
        box.write("src/a", b"1")
        snapshot = box.snapshot()
        with layered.fork(snapshot, 3, env={"N": "1"}) as group:
            assert [one.read("src/a") for one in group] == [b"1"] * 3
            group[0].write("src/b", b"2")
            assert [change.path for change in group[0].diff() if change.kind == "added"] == ["/workspace/src/b"]
            group[0].reset()
            assert group[0].diff() == []
            assert group[0].spec.env["N"] == "1"
        with layered.grader(box) as clean:
            assert clean.read("src/a") == b"1"
        one = layered.restore(snapshot).get()
        one.release()
        with pytest.raises(untax.SubstrateUnavailable):
            box.snapshot(live=True)
    saved = snapshot.save()
    assert snapshot.is_saved
    snapshot.drop()
    with pytest.raises(untax.UsageError):
        layered.find_snapshot(saved)
    assert layered.quarantined == ()
    assert layered.prepare(layered.spec).built == {}


def test_many_threads_fork_one_snapshot(layered):
    with layered.lease(layered.spec) as box:
        box.write("n", b"0")
        snapshot = box.snapshot()
    seen = []

    def work(n):
        with layered.fork(snapshot, 2) as group:
            group[0].write("n", str(n).encode())
            seen.append((group[0].read("n"), group[1].read("n")))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(seen) == [(str(n).encode(), b"0") for n in range(1, 9)]


# ---- interrupts ----


def test_an_interrupt_cancels_what_is_waited_for(fake):
    """Also when the wait is in the midst: the work in the loop has ended when it is raised, and the engine goes on."""
    ended = []

    async def lasting():
        threading.Thread(target=signal.pthread_kill, args=(threading.main_thread().ident, signal.SIGINT)).start()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise

    with untax.sync.Engine(fake) as engine:
        with interrupts.raised(), pytest.raises(KeyboardInterrupt):
            engine._loop.run(lasting())
        assert ended == ["cancelled"]
        with engine.lease() as box:
            assert box.run(["true"]).exit_code == 0


# An interrupt in a call's first step keeps a coroutine that is its argument from ever being awaited, and nothing is wrong with that.
@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
@pytest.mark.parametrize("kind", ["a lease", "a fork", "an action", "acquired"])
def test_no_lease_is_lost_to_an_interrupt_whenever_it_comes(layered, kind):
    """Ray cancels tasks so, in processes that go on: a lease that nobody knows of would last for its hour, and a lock that nobody frees hold up the engine."""
    with layered.lease() as box:
        snapshot = box.snapshot()
    held = []

    def lease():
        with layered.lease():
            pass

    def fork():
        with layered.fork(snapshot, 2):
            pass

    def act():
        with layered.lease() as box:
            box.run(["true"])

    def acquire():
        held.append(layered.acquire())
        held[0].release()

    steps = 0
    for steps in interrupts.at_each_step({"a lease": lease, "a fork": fork, "an action": act, "acquired": acquire}[kind]):
        while held:
            held.pop().release()  # what was handed over is its holder's to release, who may have been interrupted before the first step of that
        until(lambda: not layered._inner._boxes, steps)
    assert steps > 500  # or it was not interrupted at all


# What is looked up and called until then. An interrupt there is raised at the entry of `release`, which no code of ours can guard.
STEPS_TO_RELEASE = 10


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_an_interrupted_release_has_begun(fake):
    """Whoever was interrupted in it need not call it again."""
    with untax.sync.Engine(fake) as engine:
        held = [engine.acquire()]
        steps = 0
        for steps in interrupts.at_each_step(lambda: held[0].release()):
            if steps < STEPS_TO_RELEASE:
                held[0].release()
            until(lambda: not engine._inner._boxes, steps)
            held[0] = engine.acquire()
        assert steps > 100


def until(what, *told):
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end, told
        time.sleep(0.001)


def test_an_interrupt_cleans_nothing_up_that_another_thread_has_given_up():
    """What runs in a loop that was closed meanwhile is not the waiting thread's to carry on."""
    loop, begun, waits, cleaned = Loop(), threading.Event(), threading.get_ident(), []

    async def work():
        try:
            begun.set()
            await asyncio.sleep(3600)
        finally:
            cleaned.append(threading.get_ident())

    def close():
        begun.wait(10)
        loop.close()
        signal.pthread_kill(waits, signal.SIGINT)

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        loop.run(work())
    assert not cleaned
    thread.join()
    del interrupt
