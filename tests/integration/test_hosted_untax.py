"""The adapter of our own service: a held connection, and one HTTP request for each thing beside it."""

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tests import hosted as hosting
from tests.serving import environment

import untax
from untax import substrates
from untax.cluster.view import Views
from untax.core.substrate import IncumbentMaking
from untax.meter import gather


@pytest.fixture(scope="module")
async def server(tmp_path_factory):
    async with hosting.hosted(tmp_path_factory.mktemp("hosted")) as served:
        yield served


@pytest.fixture
async def engine(server):
    async with untax.Engine("hosted:untax", url=server.url, token=server.token) as engine:
        yield engine


async def leases(server) -> int:
    async with server.client() as client:
        return (await client.get("/v1/pools")).json()["use"]["leases"]


async def test_the_server_says_what_boundary_and_what_facts_its_sandboxes_have(server, engine):
    """Nothing is guessed: the isolation is the server's, and so are directory, user and home."""
    assert engine.substrate.isolation == "namespace"
    async with untax.connect(server.url, token=server.token) as remote, remote.lease() as theirs, engine.lease() as ours:
        asked = ["sh", "-c", "pwd; id -un; echo $HOME; echo $PATH; ulimit -n"]
        assert (await ours.run(asked)).text == (await theirs.run(asked)).text


async def test_a_lease_that_is_given_back_was_never_lost(server, engine):
    """The server's own account of a rollout is as trusted as the client's."""
    async with engine.lease() as box:
        await box.run(["true"])
        await box.reset()
        await box.run(["true"])
    assert await leases(server) == 0
    async with server.client() as client:
        told = (await client.get("/v1/ledgers")).json()["ledgers"][-2:]
    assert [(one["verdict"], one["reasons"]) for one in told] == [("trusted", [])] * 2


async def test_the_incumbent_path_is_one_request_for_each_thing(server, engine):
    """A lease of its own, results with their streams apart and byte for byte, deadlines, and nothing held afterwards."""
    assert isinstance(engine.substrate, IncumbentMaking)
    sandbox = await engine.substrate.create_incumbent(untax.EnvSpec())
    try:
        done = await sandbox.run_incumbent(["sh", "-c", "printf 'o\\377'; echo err >&2; exit 4"], timeout_s=30)
        assert (done.exit_code, done.stdout, done.stderr) == (4, b"o\xff", b"err\n")
        assert (await sandbox.run_incumbent(["sleep", "60"], timeout_s=0.3)).timed_out
        assert await leases(server) == 1
    finally:
        await sandbox.destroy()
    await sandbox.destroy()
    assert await leases(server) == 0
    with pytest.raises(untax.SandboxLost):
        await sandbox.run_incumbent(["true"], timeout_s=5)


async def test_an_incumbent_is_furnished_with_trees(engine, tmp_path):
    """What is to lie there before the first command gets there, modes and links with it."""
    (tmp_path / "tree/deep").mkdir(parents=True)
    (tmp_path / "tree/deep/run").write_text("#!/bin/sh\necho ran\n")
    (tmp_path / "tree/deep/run").chmod(0o755)
    (tmp_path / "tree/link").symlink_to("deep/run")
    sandbox = await engine.substrate.create_incumbent(untax.EnvSpec())
    try:
        await sandbox.furnish({"/tmp/a place": tmp_path / "tree"})
        assert (await sandbox.run_incumbent(["/tmp/a place/link"], timeout_s=5)).stdout == b"ran\n"
    finally:
        await sandbox.destroy()


async def test_what_the_service_refuses_is_the_callers_mistake_on_both_paths(server, engine):
    """An image that the operator did not allow is a `UsageError` that names the option."""
    with pytest.raises(untax.UsageError, match="--allow-image"):
        await engine.acquire(untax.EnvSpec(image="dir:/etc"))
    with pytest.raises(untax.UsageError, match="--allow-image"):
        await engine.substrate.create_incumbent(untax.EnvSpec(image="dir:/etc"))
    with pytest.raises(untax.UsageError, match="UNTAX_TOKEN"):
        await untax.Engine("hosted:untax", url=server.url, token="another-token-of-some-length").start()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"url": "unix:/tmp/x"}, "http://HOST:PORT"),
        ({"isolation": "steel"}, "isolation must be"),
        ({"substrate": "no-such"}, "there is no substrate"),
        ({"token": "a" * 20}, "url"),
    ],
)
def test_options_that_cannot_be_meant_are_refused(options, said):
    with pytest.raises(untax.UsageError, match=said):
        substrates.load("hosted:untax", **options)


def test_a_server_that_is_not_there_makes_it_unavailable():
    assert "untax serve" in substrates.load("hosted:untax", url="http://127.0.0.1:9").unavailable_reason()


async def test_two_engines_share_a_server_of_their_own_that_ends_with_them(tmp_path):
    """One is started for the first and outlives it; the last one's end is the server's."""
    first, second = (untax.Engine("hosted:untax", state_dir=tmp_path) for _ in range(2))
    async with second:
        async with first, first.lease() as box:
            pid = first.substrate._served.process.pid
            assert second.substrate._served.process.pid == pid
            assert (await box.run(["true"])).exit_code == 0
        async with second.lease() as box:
            assert (await box.run(["true"])).exit_code == 0
    assert not Path(f"/proc/{pid}").exists()


_HOLDER = """
import asyncio, untax, sys
async def main():
    async with untax.Engine("hosted:untax", state_dir=sys.argv[1]) as engine, engine.lease() as box:
        print(engine.substrate._served.process.pid, flush=True)
        await box.run(["sleep", "600"], timeout_s=None)
asyncio.run(main())
"""


async def test_a_server_of_its_own_ends_with_a_killed_process(tmp_path):
    """Nothing that was started for a client outlives it, however it ended."""
    holder = await asyncio.create_subprocess_exec(
        sys.executable, "-c", _HOLDER, str(tmp_path), stdout=asyncio.subprocess.PIPE, env=environment()
    )
    pid = int(await asyncio.wait_for(holder.stdout.readline(), 60))
    watched = os.pidfd_open(pid)
    ended = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().add_reader(watched, lambda: ended.done() or ended.set_result(None))
    try:
        holder.send_signal(signal.SIGKILL)
        await holder.wait()
        await asyncio.wait_for(ended, 30)
    finally:
        asyncio.get_running_loop().remove_reader(watched)
        os.close(watched)


async def test_the_meter_has_a_row_for_the_service(tmp_path):
    """Both paths, cold and warm, with the parts of each trial and the service's share of its start."""
    argv = ["bench", "--substrate", "hosted:untax", "--tier", "T0", "--trials", "1", "--warmup", "0", "--no-report", "--json"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "untax.cli", *argv, "--out", str(tmp_path / "out"), "--state-dir", str(tmp_path / "state"),
        stdout=asyncio.subprocess.PIPE,
        env=environment(),
    )  # fmt: skip
    said, _ = await process.communicate()
    assert process.returncode == 0, said
    assert json.loads(said)
    found = gather.gather(tmp_path / "out").cases.values()
    assert {(one.case.path, one.case.warmth) for one in found} == {
        (path, warmth) for path in ("channel", "incumbent") for warmth in ("cold", "warm")
    }
    for one in found:
        assert (one.n, one.failed) == (1, 0)
        assert one.parts["dispatch"] > 0 < one.parts["action"]
        if (one.case.path, one.case.warmth) == ("channel", "cold"):
            assert 0 < one.control_plane <= one.parts["create"] + one.parts["ready"]
            assert one.detail["server's substrate"] == "namespace"


async def test_a_server_is_watched_over_a_websocket_as_over_its_socket(server):
    """What is idle and stored there is told when it changes, by the keys that it gives for a spec."""
    spec = untax.EnvSpec(setup=("true",))
    views = Views()
    views.joined("n", isolation="namespace")
    view = views.view("n")
    came = asyncio.Event()

    def told(part):
        views.told("n", part)
        came.set()

    async def seen(condition):
        async with asyncio.timeout(30):
            while not condition():
                came.clear()
                await came.wait()

    async with untax.connect(server.url, token=server.token) as remote:
        watch = asyncio.ensure_future(remote.watch(told))
        try:
            top = (await remote.ladder(spec))[0][-1].key
            await seen(lambda: view.isolation == "namespace" and view.leased == 0)
            assert top not in view.stored
            await remote.warm(spec, 1)
            await seen(lambda: view.idle.get(top) == 1 and top in view.stored and not view.starting)
            async with remote.lease(spec):
                await seen(lambda: view.leased == 1)
            await seen(lambda: view.leased == 0)
            assert view.costs.known("create") is not None
            await remote.warm(spec, 0)
            await seen(lambda: not view.idle.get(top))
        finally:
            watch.cancel()
            await asyncio.wait([watch])
