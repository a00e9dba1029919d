"""The hosted adapter of E2B with the real SDK, against our own server in the provider's place."""

import asyncio
import os

import pytest
from tests import hosted as hosting
from tests.providers import check_a_box

import untax
from untax import substrates

e2b = pytest.importorskip("e2b", reason="e2b: its SDK is not installed; pip install 'untax[test]'")


@pytest.fixture(scope="module")
async def server(tmp_path_factory):
    async with hosting.hosted(tmp_path_factory.mktemp("hosted")) as served:
        yield served


@pytest.fixture
def options(server):
    return {"api_url": server.url, "sandbox_url": server.url, "api_key": server.token, "isolation": "namespace", "creates_per_s": 100.0}


async def left(options) -> list[str]:
    keys = {name: options[name] for name in ("api_url", "api_key")}
    return [one.sandbox_id for one in await e2b.AsyncSandbox.list(**keys).next_items()]


async def test_a_box_of_a_provider_is_a_box(options):
    await check_a_box("hosted:e2b", options)
    assert await left(options) == []


async def test_the_incumbent_path_is_one_call_of_the_sdk(options):
    async with untax.Engine("hosted:e2b", **options) as engine, engine.lease() as box:
        done = await box.sandbox.run_incumbent(["sh", "-c", "echo out; echo err >&2; exit 4"], timeout_s=30)
        assert (done.exit_code, done.stdout, done.stderr) == (4, b"out\n", b"err\n")
        assert (await box.sandbox.run_incumbent(["sleep", "60"], timeout_s=1)).timed_out


async def test_a_sandbox_that_the_provider_ends_is_lost(options):
    async with untax.Engine("hosted:e2b", **options) as engine, engine.lease() as box:
        await e2b.AsyncSandbox.kill(box.id.removeprefix("e2b-"), api_url=options["api_url"], api_key=options["api_key"])
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
    assert box.ledger.verdict == "infra"


async def test_what_a_dead_engine_left_is_removed_and_what_a_living_one_has_is_not(options):
    keys = {name: options[name] for name in ("api_url", "sandbox_url", "api_key")}
    substrate = substrates.load("hosted:e2b", **options)
    dead = await e2b.AsyncSandbox.create(
        "base", metadata={"untax-owner": substrate._owner, "untax-pid": "4194304", "untax-since": "1"}, **keys
    )
    foreign = await e2b.AsyncSandbox.create("base", metadata={"mine": "1"}, **keys)
    async with untax.Engine("hosted:e2b", **options) as first, first.lease() as box:
        async with untax.Engine("hosted:e2b", **options):
            pass
        assert (await box.run(["true"])).exit_code == 0
        assert not await dead.is_running()
        assert await foreign.is_running()
    await foreign.kill()


async def test_without_a_key_it_says_so(monkeypatch):
    monkeypatch.delenv("E2B_API_KEY", raising=False)
    with pytest.raises(untax.SubstrateUnavailable, match="E2B_API_KEY"):
        await untax.Engine("hosted:e2b").start()


async def test_a_key_that_the_provider_does_not_know_is_said(options):
    with pytest.raises(untax.SubstrateUnavailable, match="does not know the key"):
        await untax.Engine("hosted:e2b", **{**options, "api_key": "e2b_" + "0" * 40}).start()


@pytest.mark.parametrize("is_cancelled", [True, False], ids=["cancelled", "unanswered"])
async def test_a_create_whose_answer_nobody_got_leaves_no_sandbox(options, monkeypatch, is_cancelled):
    create, is_made = e2b.AsyncSandbox.create, asyncio.Event()

    async def unanswered(*args, **kwargs):
        await create(*args, **kwargs)
        is_made.set()
        await asyncio.sleep(0.3 if is_cancelled else 0)
        raise e2b.TimeoutException("no answer")

    monkeypatch.setattr(e2b.AsyncSandbox, "create", unanswered)
    substrate = substrates.load("hosted:e2b", **options)
    making = asyncio.ensure_future(substrate.create(untax.EnvSpec(isolation="namespace")))
    await is_made.wait()
    if is_cancelled:
        making.cancel()
    with pytest.raises(asyncio.CancelledError if is_cancelled else untax.CreateError):
        await making
    await substrate.aclose()
    assert await left(options) == []


async def test_a_sandbox_outlives_its_time_while_its_engine_lives(options):
    async with untax.Engine("hosted:e2b", **options, timeout_s=2) as engine, engine.lease() as box:
        await asyncio.sleep(3)
        assert (await box.run(["echo", "here"])).text == "here\n"


async def test_a_machine_is_not_told_by_its_id_alone(options, monkeypatch):
    before = substrates.load("hosted:e2b", **options)._owner
    assert substrates.load("hosted:e2b", **options)._owner == before
    here = os.stat
    monkeypatch.setattr(os, "stat", lambda path, **how: here("/proc/self/ns/uts" if path == "/proc/self/ns/pid" else path, **how))
    assert substrates.load("hosted:e2b", **options)._owner != before


async def test_a_network_goes_over_the_channel(options):
    """The provider's own is closed; what the policy names is dialled from here, also where the sandbox has a cell of the provider's."""

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nConnection: close\r\n\r\nhello")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        ask = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{port}/', timeout=20).read())"
        async with untax.Engine("hosted:e2b", **options) as engine:
            spec = untax.EnvSpec(network=(f"127.0.0.1:{port}",), env={"no_proxy": "", "NO_PROXY": ""})
            async with engine.lease(spec) as box:
                assert (await box.run(["python3", "-c", ask])).text == "b'hello'\n"
    assert box.ledger.egress[0].verdict == "allowed"
