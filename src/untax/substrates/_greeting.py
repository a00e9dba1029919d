"""The first words of a cell on a socket, looked at and left there for the channel."""

from __future__ import annotations

import asyncio
import socket

_PEEK = 4096


async def first_bytes(sock: socket.socket, within_s: float) -> bytes:
    """What has come, once something has; nothing when the other end has gone instead. `TimeoutError` when neither happens in time."""
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    with sock.dup() as probe:  # a descriptor that no `destroy` closes under the loop
        loop.add_reader(probe, readable.set)
        try:
            async with asyncio.timeout(within_s):
                await readable.wait()
        finally:
            loop.remove_reader(probe)
        try:
            return probe.recv(_PEEK, socket.MSG_PEEK)
        except OSError:
            return b""
