"""The blocking names on a fake substrate, whose stream is no socket: everything goes by the loop's thread."""

import asyncio
import concurrent.futures
import contextlib
import os
import threading
import time

import pytest

import untax
import untax.sync
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


@contextlib.contextmanager
def interrupted(monkeypatch, when):
    """In the next wait for the loop, in the moment that `when` names."""
    result = concurrent.futures.Future.result

    def wait(future, timeout=None):
        if when == "after it":
            result(future, timeout)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(concurrent.futures.Future, "result", wait)
        yield


@pytest.mark.parametrize("when", ["before it", "after it"])
@pytest.mark.parametrize("count", [1, 3], ids=["a lease", "a fork"])
def test_what_was_taken_in_the_moment_of_an_interrupt_is_given_back(layered, monkeypatch, when, count):
    """Ray cancels tasks so, in processes that go on: a lease that nobody knows of would last for its hour."""
    with layered.lease() as box:
        snapshot = box.snapshot()
    lease = layered.lease() if count == 1 else layered.fork(snapshot, count)
    with interrupted(monkeypatch, when):
        lease.__enter__()
    until(lambda: not layered._inner._boxes)
    with layered.lease():
        assert len(layered._inner._boxes) == 1


@pytest.mark.parametrize("when", ["before it", "after it"])
@pytest.mark.parametrize("count", [1, 3], ids=["a lease", "a fork"])
def test_an_interrupt_keeps_nothing_from_being_given_back(layered, monkeypatch, when, count):
    with layered.lease() as box:
        snapshot = box.snapshot()
    lease = layered.lease() if count == 1 else layered.fork(snapshot, count)
    lease.__enter__()
    with interrupted(monkeypatch, when):
        lease.__exit__(None, None, None)
    until(lambda: not layered._inner._boxes)


def until(what):
    end = time.monotonic() + 20
    while not what():
        assert time.monotonic() < end
        time.sleep(0.005)
