"""The hosted adapter of Modal with the real SDK, against a local server of the few calls it makes: real processes and files behind it."""

import asyncio
import sys

import pytest

import untax
from untax import substrates
from untax.substrates import _hosted

modal = pytest.importorskip("modal", reason="modal: its SDK is not installed; pip install 'untax[test]'")

from grpclib import Status  # noqa: E402
from tests import modal_facade  # noqa: E402
from tests.providers import check_a_box  # noqa: E402


@pytest.fixture(scope="module")
async def provider(tmp_path_factory):
    async with modal_facade.facade(tmp_path_factory.mktemp("modal")) as facade:
        yield facade


@pytest.fixture
def options(provider, monkeypatch):
    for variable, value in modal_facade.environment(provider).items():
        monkeypatch.setenv(variable, value)
    yield modal_facade.options(provider)
    assert provider.sandboxes == {}
    provider.faults.clear()


async def test_a_box_of_a_provider_is_a_box(options):
    await check_a_box("hosted:modal", options)


async def test_the_incumbent_path_is_one_exec_of_the_sdk(options, provider):
    async with untax.Engine("hosted:modal", **options) as engine, engine.lease() as box:
        before = len(provider.log)
        done = await box.sandbox.run_incumbent(["sh", "-c", "echo out; echo err >&2; exit 4"], timeout_s=30)
        assert (done.exit_code, done.stdout, done.stderr) == (4, b"out\n", b"err\n")
        assert provider.log[before:].count("TaskExecStart") == 1
        assert (await box.sandbox.run_incumbent(["sleep", "60"], timeout_s=1)).timed_out


async def test_a_sandbox_that_the_provider_ends_is_lost(options, provider):
    async with untax.Engine("hosted:modal", **options) as engine, engine.lease() as box:
        sandbox = box.sandbox
        await provider.end(box.id.removeprefix("modal-"))
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        with pytest.raises(untax.SandboxLost):
            await sandbox.run_incumbent(["true"], timeout_s=30)
    assert box.ledger.verdict == "infra"


@pytest.mark.parametrize("status", [Status.PERMISSION_DENIED, Status.DATA_LOSS, Status.FAILED_PRECONDITION])
async def test_a_provider_in_trouble_is_never_a_result(options, provider, status):
    async with untax.Engine("hosted:modal", **options) as engine, engine.lease() as box:
        provider.faults.append(("TaskExecStart", status))
        with pytest.raises(untax.BackendError):
            await box.sandbox.run_incumbent(["true"], timeout_s=30)
        assert (await box.sandbox.run_incumbent(["true"], timeout_s=30)).exit_code == 0


async def test_a_spec_has_its_size_and_what_modal_does_not_limit_is_said(options, provider):
    async with untax.Engine("hosted:modal", **options, timeout_s=600, region="eu") as engine:
        async with engine.lease(limits=untax.Limits(cpus=1.5, memory_mib=2048)) as box:
            definition = provider.sandboxes[box.id.removeprefix("modal-")].asked.definition
            size = definition.resources
            assert (size.milli_cpu, size.milli_cpu_max, size.memory_mb, size.memory_mb_max) == (1500, 1500, 2048, 2048)
            assert definition.timeout_secs == 600
            assert list(definition.scheduler_placement.regions) == ["eu"]
            assert definition.network_access.network_access_type == modal_facade.api_pb2.NetworkAccess.BLOCKED
            assert {one.name for one in box.sandbox.unenforced} == {"disk_mib", "pids"}


async def test_what_is_refused_for_its_rate_is_asked_again_and_then_said(options, provider, monkeypatch):
    monkeypatch.setattr(_hosted, "_TRIES", 2)
    async with untax.Engine("hosted:modal", **options) as engine:
        provider.faults.append(("SandboxCreateV2", Status.RESOURCE_EXHAUSTED))
        async with engine.lease() as box:
            assert (await box.run(["true"])).exit_code == 0
        provider.faults += [("SandboxCreateV2", Status.RESOURCE_EXHAUSTED)] * 2
        with pytest.raises(untax.SubstrateUnavailable, match=r"rate or quota.*creates_per_s"):
            await engine.acquire()


async def test_what_a_dead_engine_left_is_removed_and_what_a_living_one_has_is_not(options, provider, tmp_path):
    async with untax.Engine("hosted:modal", **options, state_dir=tmp_path) as first, first.lease() as box:
        owner = first.substrate._owner
        client = await modal.Client.from_credentials.aio(*modal_facade.TOKENS)
        app = await modal.App.lookup.aio("untax", create_if_missing=True, client=client)
        made = {"app": app, "image": modal.Image.debian_slim(), "client": client}
        dead = [
            await modal.Sandbox.create.aio(tags={"untax-owner": owner, "untax-pid": "4194304", "untax-since": "1"}, **made)
            for _ in range(3)  # more than a page of a listing
        ]
        foreign = await modal.Sandbox.create.aio(tags={"mine": "1"}, **made)
        async with untax.Engine("hosted:modal", **options, state_dir=tmp_path):
            pass
        assert {one.object_id for one in dead}.isdisjoint(provider.sandboxes)
        assert foreign.object_id in provider.sandboxes
        assert (await box.run(["true"])).exit_code == 0
        await foreign.terminate.aio()


async def test_a_create_that_nobody_waits_for_leaves_no_sandbox(options, provider, monkeypatch):
    monkeypatch.setattr(_hosted, "_UNDO_S", (0.0, 0.1))
    substrate = substrates.load("hosted:modal", **options)
    monkeypatch.setitem(provider.withheld, "SandboxCreateV2", asyncio.Event())
    making = asyncio.ensure_future(substrate.create(untax.EnvSpec(isolation="namespace")))
    while not provider.sandboxes:
        await asyncio.sleep(0.005)
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    provider.withheld["SandboxCreateV2"].set()
    await substrate.aclose()


async def test_a_key_that_the_provider_does_not_know_is_said(options):
    with pytest.raises(untax.SubstrateUnavailable, match=r"does not know the key.*MODAL_TOKEN_ID"):
        await untax.Engine("hosted:modal", **{**options, "token_id": "ak-other"}).start()


async def test_without_a_key_or_the_sdk_it_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("MODAL_CONFIG_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("MODAL_TOKEN_ID", raising=False)
    with pytest.raises(untax.SubstrateUnavailable, match="MODAL_TOKEN_ID"):
        await untax.Engine("hosted:modal").start()
    with pytest.raises(untax.UsageError, match="belong together"):
        untax.Engine("hosted:modal", token_id="ak-1")
    monkeypatch.setitem(sys.modules, "modal", None)
    with pytest.raises(untax.SubstrateUnavailable, match=r"untax\[modal\]"):
        await untax.Engine("hosted:modal").start()
