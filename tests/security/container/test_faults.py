"""X18 and C8: a container engine that is frozen, killed or started anew under load. Calls end by their deadlines, as the infrastructure's failure."""

import asyncio
import contextlib
import os
import shutil
import tempfile
import time
from pathlib import Path

import pytest
from tests.engines_fixture import Docker, docker, podman  # noqa: F401
from tests.hostview import stopped
from tests.images import small_directory
from tests.variants import socket_of

import untax
from untax import substrates
from untax.substrates._incumbent import ANSWER_S as ASKED_S

SPEC = untax.EnvSpec(image=f"dir:{small_directory()}", isolation="container")
ANSWER_S = 3.0  # an engine on a busy machine takes a second


@pytest.fixture(params=["docker", "podman"])
def daemon(request):
    """The process that answers, and how it is spoken to."""
    socket = socket_of(request, request.param)
    if os.geteuid() != 0:
        pytest.skip("container: to freeze an engine it must be our own, which needs root")
    own = request.getfixturevalue(request.param)
    pid = own._daemon.pid if request.param == "docker" else own._service.pid
    return pid, {"engine": request.param, "socket": socket, "answer_s": ANSWER_S}


async def gone(engine):
    substrate = engine.substrate
    for _ in range(100):  # what a thawed engine works off, nobody announces
        if not (left := await substrate._list(substrate._labels)):
            return []
        await asyncio.sleep(0.1)
    return left


async def within(seconds, awaitable):
    """What it raises, and that it did so in time."""
    began = time.monotonic()
    with pytest.raises(untax.UntaxError) as caught:
        await asyncio.wait_for(awaitable, seconds + 10)
    assert time.monotonic() - began < seconds, caught.value
    return caught.value


async def test_x18_a_frozen_engine_is_told_by_the_deadline_and_recovered_from(daemon, tmp_path):
    """C8. Held channels go through the daemon and end with their actions' deadlines; nothing else of ours stands still."""
    pid, options = daemon
    async with untax.Engine("container", state_dir=tmp_path / "state", **options) as engine:
        async with engine.lease(SPEC) as box:
            with stopped(pid):
                load = [asyncio.create_task(within(3 * ANSWER_S + 1, engine.acquire(SPEC))) for _ in range(4)]
                lost = await within(2, box.run(["true"], timeout_s=1))
                assert isinstance(lost, untax.SandboxLost)
                assert box.ledger.verdict == "infra"
                assert {type(one) for one in await asyncio.gather(*load)} == {untax.BackendError}
                soon = await within(2, engine.acquire(SPEC))  # the engine is not asked; the pool lets a second pass after so many failures
                assert isinstance(soon, untax.BackendError)
                if substrates.load("namespace").unavailable_reason() is None:
                    async with untax.Engine("namespace", state_dir=tmp_path / "other") as other, other.lease() as fine:
                        assert (await fine.run(["echo", "fine"], timeout_s=5)).text == "fine\n"
            assert isinstance(lost, untax.SubstrateError)
        async with asyncio.timeout(20):
            while True:  # the same engine, without a restart of anything
                try:
                    async with engine.lease(SPEC) as box:
                        assert (await box.run(["echo", "back"])).text == "back\n"
                    break
                except untax.BackendError:
                    await asyncio.sleep(0.05)
        assert await gone(engine) == []
        assert engine.quarantined == () or await _left_quarantine(engine)


async def _left_quarantine(engine) -> bool:
    async with asyncio.timeout(20):
        while engine.quarantined:
            await asyncio.sleep(0.1)
    return True


async def test_x18_a_frozen_engine_is_never_taken_for_a_slow_command(daemon, tmp_path):
    """On the incumbent path, frozen before an exec or under one: by its deadline and the time of one question. A command that is slow is so told."""
    pid, options = daemon
    patient = {**options, "answer_s": 60}  # the deadline is the exec's, and not the engine's for each answer
    async with untax.Engine("container", state_dir=tmp_path / "state", **patient) as engine, engine.lease(SPEC) as box:
        slow = await box.sandbox.run_incumbent(["sleep", "20"], timeout_s=1)
        assert (slow.outcome, slow.exit_code) == ("timeout", 124)
        under = asyncio.create_task(
            within(2 + ASKED_S + 1.5, box.sandbox.run_incumbent(["sh", "-c", "touch begun; sleep 20"], timeout_s=2))
        )
        await box.shell("until [ -e begun ]; do sleep 0.02; done", timeout_s=20)
        with stopped(pid):
            before = await within(1 + ASKED_S + 1.5, box.sandbox.run_incumbent(["true"], timeout_s=1))
            assert {type(before), type(await under)} == {untax.BackendError}
        back = await box.sandbox.run_incumbent(["echo", "back"], timeout_s=20)
        assert (back.exit_code, back.text) == (0, "back\n")


@contextlib.asynccontextmanager
async def own_docker(request):
    """One that may be killed."""
    request.getfixturevalue("docker")  # skips where there can be none
    home = Path(tempfile.mkdtemp(prefix="untax-eng-"))
    engine = Docker(home)
    try:
        await asyncio.to_thread(engine.wait_ready)
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)
        for line in reversed(Path("/proc/self/mountinfo").read_text().splitlines()):
            if (place := line.split()[4]).startswith(f"{home}/"):
                os.system(f"umount -l {place}")
        shutil.rmtree(home, ignore_errors=True)


async def test_c8_an_engine_that_is_killed_and_started_anew_is_used_again(request, as_root, tmp_path):
    async with (
        own_docker(request) as daemon,
        untax.Engine("container", state_dir=tmp_path / "state", engine="docker", socket=str(daemon.socket), answer_s=5) as engine,
    ):
        box = await engine.acquire(SPEC)
        running = asyncio.create_task(box.run(["sleep", "60"]))
        await box.run(["true"])
        daemon._daemon.kill()
        daemon._daemon.wait()
        assert isinstance(await within(5, running), untax.SandboxLost)
        refused = await within(2, engine.acquire(SPEC))
        assert isinstance(refused, untax.BackendError)
        assert "start its service" in str(refused)
        release = asyncio.create_task(box.release())  # its container cannot be removed now; nobody waits for that
        await asyncio.wait_for(release, 10)
        await asyncio.to_thread(daemon.restart)
        async with engine.lease(SPEC) as again:
            assert (await again.run(["echo", "back"])).text == "back\n"
        assert await gone(engine) == []


async def test_x18_an_engine_closes_though_its_daemon_is_frozen(daemon, tmp_path):
    """And the next one over the same state removes what could not be removed."""
    pid, options = daemon
    engine = untax.Engine("container", state_dir=tmp_path / "state", **options)
    await engine.start()
    await engine.acquire(SPEC)
    with stopped(pid):
        began = time.monotonic()
        await asyncio.wait_for(engine.aclose(), 30)
        assert time.monotonic() - began < 6 * ANSWER_S
    async with untax.Engine("container", state_dir=tmp_path / "state", **options) as after:
        for _ in range(100):
            if not (left := await after.substrate._list({"untax.state": str(tmp_path / "state")})):
                break
            await asyncio.sleep(0.1)
        assert left == []
