"""Contention: real load of our own beside a trial, on the processors, the disk or the network. Ended for sure.

A stressor is a process of its own (`python -m untax.meter.stress KIND DIR`) that says when it is at work and ends with its standard
input, that is, at the latest with the meter itself. What it writes is a bounded file that it removes, and that whoever started it
removes as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path

from untax.core.errors import SubstrateUnavailable

_FILE_MIB = 64
_CHUNK = 1 << 20
_STREAMS = 4
_START_S = 30.0
_READY = b"at work\n"


@contextlib.asynccontextmanager
async def contention(kind: str, scratch: Path) -> AsyncIterator[None]:
    """Load of `kind` while the block lasts: `none`, `cpu` (two spinning processes for each core), `disk` (writing and syncing below `scratch`), `network` (streams over loopback)."""
    if kind == "none":
        yield
        return
    scratch.mkdir(parents=True, exist_ok=True)
    place = tempfile.mkdtemp(prefix="stress-", dir=scratch)
    count = 2 * (os.cpu_count() or 1) if kind == "cpu" else 2
    running: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            running.append(_started(kind, place))
        await asyncio.gather(*(asyncio.to_thread(_wait_at_work, one, kind) for one in running))
        yield
    finally:
        for one in running:
            one.kill()
        for one in running:
            one.wait()  # killed: it is gone as soon as the kernel gets to it
            for end in (one.stdin, one.stdout):
                if end is not None:
                    end.close()
        shutil.rmtree(place, ignore_errors=True)


def _started(kind: str, place: str) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    return subprocess.Popen(
        [sys.executable, "-m", "untax.meter.stress", kind, place], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env
    )


def _wait_at_work(one: subprocess.Popen[bytes], kind: str) -> None:
    assert one.stdout is not None
    timer = threading.Timer(_START_S, one.kill)
    timer.start()
    try:
        said = one.stdout.readline()
    finally:
        timer.cancel()
    if said != _READY:
        raise SubstrateUnavailable("", f"the {kind} stressor did not start")


# ---- the process itself ----


def main(kind: str, place: str) -> int:
    threading.Thread(target=_end_with_input, daemon=True).start()
    {"cpu": _spin, "disk": _write, "network": _stream}[kind](place)
    return 0


def _end_with_input() -> None:
    while sys.stdin.buffer.read(1 << 16):
        pass
    os._exit(0)  # whatever the work is doing


def _say_at_work() -> None:
    sys.stdout.buffer.write(_READY)
    sys.stdout.buffer.flush()


def _spin(_: str) -> None:
    _say_at_work()
    number = 1
    while True:
        number = number * 1_103_515_245 + 12_345 & 0x7FFFFFFF


def _write(place: str) -> None:
    data = os.urandom(_CHUNK)
    with tempfile.TemporaryFile(dir=place) as file:  # has no name: gone with us
        _say_at_work()
        while True:
            file.seek(0)
            for _ in range(_FILE_MIB):
                file.write(data)
            file.flush()
            os.fsync(file.fileno())


def _stream(_: str) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=_STREAMS) as server:
        for _number in range(_STREAMS):
            out = socket.create_connection(server.getsockname())
            got = server.accept()[0]
            threading.Thread(target=_send, args=(out,), daemon=True).start()
            threading.Thread(target=_receive, args=(got,), daemon=True).start()
        _say_at_work()
        threading.Event().wait()


def _send(to: socket.socket) -> None:
    data = bytes(_CHUNK)
    while True:
        to.sendall(data)


def _receive(of: socket.socket) -> None:
    while of.recv(_CHUNK):
        pass


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], sys.argv[2]))
