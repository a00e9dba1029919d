"""The hosted adapter of Daytona with the real SDK, against a local facade of Daytona's API: real processes and files behind it."""

import asyncio
import json
import signal
import sys
import time

import pytest

import untax
from untax import substrates
from untax.substrates import _hosted

daytona = pytest.importorskip("daytona", reason="daytona: its SDK is not installed; pip install 'untax[test]'")

from tests import daytona_facade  # noqa: E402
from tests.daytona_facade import Fault  # noqa: E402
from tests.providers import check_a_box  # noqa: E402


@pytest.fixture(scope="module")
async def provider(tmp_path_factory):
    async with daytona_facade.facade(tmp_path_factory.mktemp("daytona")) as facade:
        yield facade


@pytest.fixture
def options(provider):
    yield daytona_facade.options(provider)
    assert provider.sandboxes == {}
    provider.faults.clear()


async def test_a_box_of_a_provider_is_a_box(options):
    await check_a_box("hosted:daytona", options)


async def test_the_incumbent_path_is_one_call_of_the_sdk(options, provider):
    async with untax.Engine("hosted:daytona", **options) as engine, engine.lease() as box:
        before = len(provider.log)
        done = await box.sandbox.run_incumbent(["sh", "-c", "echo out; echo err >&2; exit 4"], timeout_s=30)
        assert (done.exit_code, done.stdout, done.stderr) == (4, b"out\nerr\n", b"")
        assert provider.log[before:] == [f"POST /toolbox/{box.id.removeprefix('daytona-')}/process/execute"]
        assert (await box.sandbox.run_incumbent(["sleep", "60"], timeout_s=1)).timed_out


@pytest.mark.parametrize("status", [401, 429, 500, 502, 503])
async def test_a_provider_in_trouble_is_never_a_result(options, provider, status):
    """The call fails as the provider's failure, and the next one is answered."""
    async with untax.Engine("hosted:daytona", **options) as engine, engine.lease() as box:
        provider.faults.append(Fault("POST /toolbox/", status))
        with pytest.raises(untax.BackendError):
            await box.sandbox.run_incumbent(["true"], timeout_s=30)
        assert (await box.sandbox.run_incumbent(["true"], timeout_s=30)).exit_code == 0


async def test_an_answer_without_an_exit_code_is_no_success(options, provider, monkeypatch):
    async with untax.Engine("hosted:daytona", **options) as engine, engine.lease() as box:
        process = box.sandbox._sandbox.process

        async def vague(*args, **kwargs):
            return daytona.ExecuteResponse.model_construct(exit_code=None, result="")

        monkeypatch.setattr(type(process), "exec", vague)
        with pytest.raises(untax.BackendError, match="how the command ended"):
            await box.sandbox.run_incumbent(["true"], timeout_s=30)


async def test_a_sandbox_that_the_provider_ends_is_lost(options, provider):
    async with untax.Engine("hosted:daytona", **options) as engine, engine.lease() as box:
        sandbox = box.sandbox
        await provider.end(box.id.removeprefix("daytona-"))
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        with pytest.raises(untax.SandboxLost):
            await sandbox.run_incumbent(["true"], timeout_s=30)
    assert box.ledger.verdict == "infra"


@pytest.mark.parametrize("where", ["POST /toolbox/", "GET /toolbox/"], ids=["upload", "terminal"])
async def test_a_channel_that_the_provider_does_not_open_is_its_failure(options, provider, where):
    substrate = substrates.load("hosted:daytona", **options)
    sandbox = await substrate.create(untax.EnvSpec(isolation="namespace"))
    await sandbox.wait_ready()
    provider.faults.append(Fault(where, 502))
    with pytest.raises(untax.BackendError):
        await sandbox.open_channel()
    await sandbox.destroy()
    await sandbox.destroy()
    await substrate.aclose()


# ---- what a create may meet ----


async def test_what_is_refused_for_its_rate_is_asked_again_when_the_provider_said(options, provider):
    provider.faults.append(Fault("POST /api/sandbox", 429, {"Retry-After": "1"}))
    async with untax.Engine("hosted:daytona", **options) as engine:
        before, began = len(provider.log), time.monotonic()
        async with engine.lease() as box:
            assert time.monotonic() - began >= 1
            assert (await box.run(["true"])).exit_code == 0
    assert provider.log[before:].count("POST /api/sandbox") == 2


@pytest.mark.parametrize(
    ("times", "wait", "said"), [(4, "0", "rate or quota"), (1, "3600", "after 3600 s")], ids=["always", "far too long"]
)
async def test_a_rate_that_never_suffices_is_said_with_its_remedy(options, provider, times, wait, said):
    provider.faults += [Fault("POST /api/sandbox", 429, {"Retry-After": wait})] * times
    async with untax.Engine("hosted:daytona", **options) as engine:
        with pytest.raises(untax.SubstrateUnavailable, match=rf"{said}.*creates_per_s"):
            await engine.acquire()


async def test_a_snapshot_that_is_not_there_is_the_callers_to_mend(options):
    async with untax.Engine("hosted:daytona", **options, snapshot="missing") as engine:
        with pytest.raises(untax.UsageError, match="Snapshot missing not found"):
            await engine.acquire()


@pytest.mark.parametrize("how", ["cancelled", "unanswered", "slow"])
async def test_a_create_of_which_nothing_came_leaves_no_sandbox(options, provider, monkeypatch, how):
    monkeypatch.setattr(_hosted, "_UNDO_S", (0.0, 0.1))
    substrate = substrates.load("hosted:daytona", **options, create_s=0.5 if how == "slow" else 60)
    if how == "unanswered":
        provider.faults.append(Fault("POST /api/sandbox", 504, is_carried_out=True))
    else:
        provider.may_start.clear()
    making = asyncio.ensure_future(substrate.create(untax.EnvSpec(isolation="namespace")))
    if how == "cancelled":
        while not provider.sandboxes:
            await asyncio.sleep(0.02)
        making.cancel()
    with pytest.raises({"cancelled": asyncio.CancelledError, "unanswered": untax.BackendError, "slow": untax.CreateError}[how]):
        await making
    provider.may_start.set()
    await substrate.aclose()


async def test_a_sandbox_that_takes_its_time_is_waited_for(options, provider):
    provider.may_start.clear()
    asyncio.get_running_loop().call_later(0.3, provider.may_start.set)
    async with untax.Engine("hosted:daytona", **options) as engine, engine.lease() as box:
        assert (await box.run(["true"])).exit_code == 0


async def test_an_image_gets_the_size_of_the_spec_and_what_is_not_exact_is_said(options, provider):
    limits = untax.Limits(cpus=1.5, memory_mib=2048, disk_mib=3072)
    async with untax.Engine("hosted:daytona", **options, image="debian:13", target="eu") as engine:
        async with engine.lease(limits=limits) as box:
            asked = provider.sandboxes[box.id.removeprefix("daytona-")].asked
            assert {name: asked[name] for name in ("cpu", "memory", "disk", "target")} == {"cpu": 2, "memory": 2, "disk": 3, "target": "eu"}
            assert asked["networkBlockAll"] is True
            assert "debian:13" in asked["buildInfo"]["dockerfileContent"]
            assert {one.name for one in box.sandbox.unenforced} == {"cpus", "pids"}


# ---- whose sandboxes ----

_ENGINE = """
import asyncio, json, sys, untax
async def main():
    engine = untax.Engine("hosted:daytona", state_dir=sys.argv[2], **json.loads(sys.argv[1]))
    await engine.start()
    await asyncio.gather(*(engine.acquire() for _ in range(3)))
    print("there", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_what_a_dead_engine_left_is_removed_and_what_a_living_one_has_is_not(options, provider, tmp_path):
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _ENGINE, json.dumps(options), str(tmp_path), stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert await asyncio.wait_for(process.stdout.readline(), 30) == b"there\n"
    dead = set(provider.sandboxes)
    assert len(dead) == 3  # more than a page of a listing
    process.send_signal(signal.SIGKILL)
    await process.wait()
    keys = daytona.DaytonaConfig(api_key=options["api_key"], api_url=options["api_url"])
    async with daytona.AsyncDaytona(keys) as client:
        foreign = await client.create(daytona.CreateSandboxFromSnapshotParams(labels={"mine": "1"}))
        async with untax.Engine("hosted:daytona", **options, state_dir=tmp_path / "other"):
            assert dead < set(provider.sandboxes)  # of another state directory: not ours to judge
        async with untax.Engine("hosted:daytona", **options, state_dir=tmp_path) as first, first.lease() as box:
            assert dead.isdisjoint(provider.sandboxes)
            async with untax.Engine("hosted:daytona", **options, state_dir=tmp_path):
                pass
            assert (await box.run(["true"])).exit_code == 0
            assert foreign.id in provider.sandboxes
        await foreign.delete()


async def test_a_sandbox_outlives_its_time_while_its_engine_lives_and_no_longer(options, provider):
    async with untax.Engine("hosted:daytona", **options, timeout_s=1) as engine, engine.lease() as box:
        there = provider.sandboxes[box.id.removeprefix("daytona-")]
        assert (there.asked["autoStopInterval"], there.asked["autoDeleteInterval"]) == (1, 0)  # minutes idle; at once when stopped
        while there.activity < 2:
            await asyncio.sleep(0.05)


# ---- what it cannot be used without ----


async def test_a_key_that_the_provider_does_not_know_is_said(options):
    with pytest.raises(untax.SubstrateUnavailable, match=r"does not know the key.*DAYTONA_API_KEY"):
        await untax.Engine("hosted:daytona", **{**options, "api_key": "dtn_0"}).start()


async def test_without_a_key_or_the_sdk_it_says_so(monkeypatch):
    for name in ("DAYTONA_API_KEY", "DAYTONA_JWT_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(untax.SubstrateUnavailable, match="DAYTONA_API_KEY"):
        await untax.Engine("hosted:daytona").start()
    monkeypatch.setitem(sys.modules, "daytona", None)
    with pytest.raises(untax.SubstrateUnavailable, match=r"untax\[daytona\]"):
        await untax.Engine("hosted:daytona").start()


async def test_a_provider_that_does_not_answer_cannot_be_reached(options):
    with pytest.raises(untax.BackendError, match="cannot be reached"):
        await untax.Engine("hosted:daytona", **{**options, "api_url": "http://127.0.0.1:9/api"}).start()
