"""THREATS 3: the agent in a sandbox dies, stops or its connection is cut.

A fault of the infrastructure is an exception of its own kind and never a command's exit code; afterwards nothing is left.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time

import pytest
from tests import hostview
from tests.security.conftest import LONG
from tests.security.faults.ground import (
    agent_of,
)

import untax
from untax.channel import actions
from untax.channel.client import Channel
from untax.channel.stream import SocketStream
from untax.substrates._host import cell_path


async def test_x4_a_dead_agent_is_a_lost_sandbox_at_once(engine):
    box = await engine.acquire()
    try:
        pid = await agent_of(box)
        task = asyncio.create_task(box.run(["sleep", "60"]))
        await box.run(["true"])
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(untax.SandboxLost):
            await task
        assert time.monotonic() - began < 1
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"])
        assert box.ledger.verdict == "infra"
    finally:
        await box.release()


async def test_x5_a_stopped_agent_is_a_lost_sandbox_at_the_deadline(engine):
    box = await engine.acquire()
    pid = await agent_of(box)
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        with pytest.raises(untax.SandboxLost):
            await box.run(["true"], timeout_s=1)
        assert 1 <= time.monotonic() - began < 2.5
        assert box.ledger.verdict == "infra"
    finally:
        await box.release()
    assert hostview.wait_gone(pid, 2)


async def test_x6_a_connection_that_is_cut_or_garbled_is_a_lost_sandbox(tmp_path):
    """A proxy between client and cell cuts after so many bytes, flips one, repeats or delays; answers are right or a loss."""
    import socket

    generator = random.Random(6)
    for fault in ("cut", "flip", "repeat", "delay", "half") * (4 if LONG else 1):
        ours, near = socket.socketpair()
        far, theirs = socket.socketpair()
        cell = subprocess.Popen([cell_path(), "agent", "--stdio"], stdin=theirs, stdout=theirs, cwd=tmp_path)
        theirs.close()
        at = generator.randrange(30, 400)
        relay = asyncio.create_task(_relay(near, far, fault, at))
        channel = Channel(SocketStream(ours), sandbox_id=fault, grace_s=0.3)
        try:
            for n in range(20):
                result = await channel.call(actions.run(["echo", str(n)], timeout_s=1))
                assert result.stdout == f"{n}\n".encode() or fault == "flip"
        except (untax.SandboxLost, untax.UntaxError) as exc:
            assert fault != "delay", exc
        finally:
            channel.close()
            relay.cancel()
            await asyncio.wait([relay])
            near.close()
            far.close()
            assert await asyncio.to_thread(cell.wait, 5) >= 0


async def _relay(near, far, fault: str, at: int) -> None:
    loop = asyncio.get_running_loop()
    near.setblocking(False)
    far.setblocking(False)

    async def forward(source, sink) -> None:
        while data := await loop.sock_recv(source, 65536):
            await loop.sock_sendall(sink, data)

    async def backward() -> None:
        passed = 0
        done = False
        while data := await loop.sock_recv(far, 97):
            if not done and passed + len(data) > at:
                done = True
                if fault == "cut":
                    near.close()
                    return
                if fault == "half":
                    near.shutdown(1)
                    return
                if fault == "flip":
                    data = bytes([data[0] ^ 0x40]) + data[1:]
                if fault == "repeat":
                    data += data
                if fault == "delay":
                    await asyncio.sleep(0.2)
            passed += len(data)
            await loop.sock_sendall(near, data)

    with contextlib.suppress(OSError):
        await asyncio.gather(forward(near, far), backward())
