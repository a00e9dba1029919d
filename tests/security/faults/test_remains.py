"""THREATS 3: what does not go away, and what was left damaged.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from tests import agentwire as w
from tests import hostview, leftovers
from tests.enginehost import Refused, engine_host
from tests.security.faults.ground import (
    agent_of,
    wait_clean,
    works,
)

import untax
from untax.channel.client import Channel
from untax.channel.stream import SocketStream
from untax.substrates._host import cell_path


async def test_x28_a_mount_that_someone_holds_does_not_keep_the_sandbox(engine, as_root, state_dir):
    """A shell of the host's sits in the sandbox's directory; destroy returns, and what is left goes when it leaves."""
    box = await engine.acquire()
    pid = await agent_of(box)
    holder = await asyncio.create_subprocess_exec(
        "nsenter", "-t", str(pid), "-m", "--", "sh", "-c", "cd /workspace && echo in && exec sleep 100", stdout=asyncio.subprocess.PIPE
    )
    try:
        assert (await asyncio.wait_for(holder.stdout.readline(), 5)) == b"in\n"
        began = time.monotonic()
        await asyncio.wait_for(box.release(), 10)
        assert time.monotonic() - began < 3
        async with engine.lease() as other:
            assert (await other.run(["echo", "fine"])).stdout == b"fine\n"
    finally:
        holder.kill()
        await holder.wait()
        holder._transport.close()
    assert Path("/usr/bin/env").exists()


async def test_x29_a_group_that_refuses_to_go_is_tried_again(state, as_root):
    """A stranger's process sits in a group below the sandbox's own; when it has left, the next start removes the group."""
    async with engine_host(state) as host:
        await host.lease("a")
        pid = host.pid
        groups = [
            Path(where)
            for where in leftovers._cgroups()
            if f"-{host.pid}-" in where and where.rsplit("/", 1)[-1].startswith(("sbx-", "spare-"))
        ]
        if not groups:
            pytest.skip("no control groups here")
        stranger = await asyncio.create_subprocess_exec("sleep", "100")
        try:
            for group in groups:
                with contextlib.suppress(OSError):
                    (group / "stranger").mkdir()
                    (group / "stranger" / "cgroup.procs").write_text(str(stranger.pid))
            os.kill(stranger.pid, signal.SIGSTOP)
            began = time.monotonic()
            await asyncio.wait_for(host.call("release", box="a"), 10)
            assert time.monotonic() - began < 5
            await host.lease("b")
            assert (await host.run("b", ["true"]))["exit_code"] == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                stranger.kill()
            await stranger.wait()
            for group in groups:
                with contextlib.suppress(OSError):
                    (group / "stranger").rmdir()
    assert await works(state)
    assert not await wait_clean(state, pid, 10)


async def test_x29_groups_go_although_their_state_directory_is_gone_too(state, tmp_path, as_root):
    """Only those of the dead, and of those only the empty: an engine that lives keeps its groups, idle or not."""
    async with engine_host(tmp_path / "living") as living, engine_host(state) as host:
        await living.lease("a")
        await living.call("release", box="a")
        await host.lease("a")
        pid = host.pid
        kept = {c for c in leftovers._cgroups() if f"-{living.pid}-" in c and "spare-" not in c and "sbx-" not in c}
        launchers = [p.pid for p in hostview.below(pid) if p.ppid == pid]
        for victim in (*launchers, pid):  # the launcher first: it has no time to remove anything
            os.kill(victim, signal.SIGKILL)
        await host.process.wait()
        if not [c for c in leftovers._cgroups() if f"-{pid}-" in c]:
            pytest.skip("no control groups here")
        await asyncio.to_thread(hostview.eventually, lambda: not any(p.state != "Z" for p in hostview.below(pid)), 5, 0.05)
        await asyncio.to_thread(shutil.rmtree, state)
        assert await works(tmp_path / "other")

        assert not [c for c in leftovers._cgroups() if f"-{pid}-" in c]
        assert kept <= set(leftovers._cgroups())
        await living.lease("b")
        assert (await living.run("b", ["true"]))["exit_code"] == 0


@pytest.mark.parametrize("damage", ["truncate", "garbage", "directory", "link"])
async def test_x30_damaged_state_files_do_not_keep_an_engine_from_starting(state, damage):
    async with engine_host(state) as host:
        await host.lease("a")
        host.kill()
        await host.process.wait()
        pid = host.pid
    # os.walk, because what the dead engine's helper still removes vanishes under us
    files = [Path(where, name) for where, _, names in os.walk(state) for name in names if "sbx-" not in where and "spare-" not in where]
    for path in files:
        with contextlib.suppress(OSError):
            if path.is_symlink() or path.stat().st_size > 1 << 20:
                continue
            if damage == "truncate":
                os.truncate(path, 0)
            elif damage == "garbage":
                path.write_bytes(os.urandom(300))
            elif damage == "directory":
                path.unlink()
                path.mkdir()
            else:
                path.unlink()
                path.symlink_to("/etc/passwd")
    passwd = Path("/etc/passwd").read_bytes()
    try:
        assert await works(state)
    except Refused as refused:
        assert refused.kind in ("UsageError", "BackendError"), refused
        assert "state" in refused.message
    assert Path("/etc/passwd").read_bytes() == passwd
    assert not [c for c in leftovers._cgroups() if f"-{pid}-" in c]


async def test_x30_strange_entries_are_left_alone(state):
    async with engine_host(state) as host:
        await host.lease("a")
    outside = state.parent / "precious"
    outside.mkdir()
    (outside / "file").write_text("keep")
    for root in [p for p in state.iterdir() if p.is_dir()] or [state]:
        (root / "engine-1-evil").symlink_to(outside)
        (root / "engine-2-file").write_text("x")
        (root / "unknown").mkdir()
    assert await works(state)
    assert (outside / "file").read_text() == "keep"


async def test_x31_another_version_is_refused_with_both_named(tmp_path):
    import socket

    with w.Peer(cell_path(), tmp_path) as peer:
        peer.next()
        peer.send(w.hello(major=9))
        found = peer.next()
        assert found is not None
        assert found[1] == w.ERROR
        assert int.from_bytes(found[2][:2], "little") == w.VERSION
        assert b"9" in found[2]
        assert b"1" in found[2]
        assert peer.is_closed()

    ours, theirs = socket.socketpair()
    channel = Channel(SocketStream(theirs), sandbox_id="old")
    ours.sendall(w.hello(major=2, version=b"7.7.7"))
    with pytest.raises(untax.ProtocolError) as caught:
        await channel.wait_ready(2)
    assert "7.7.7" in str(caught.value) or "2" in str(caught.value)
    assert untax.__version__ in str(caught.value) or "1" in str(caught.value)
    channel.close()
    ours.close()
