"""The blocking names on a fake substrate, whose stream is no socket: everything goes by the loop's thread."""

import asyncio
import os
import threading

import pytest

import untax
import untax.sync
from untax.testing import FakeSubstrate


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
