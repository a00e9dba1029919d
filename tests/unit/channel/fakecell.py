"""A cell that is played by the test: what the client sends is parsed, and the test answers whatever it likes."""

import asyncio
import struct

from tests import agentwire

from untax.channel import wire
from untax.channel.client import Channel


def command_done(code=0, out=b"", err=b"", how=0):
    return struct.pack("<BiQQQQIIBQQ", how, code, 1000, 1, 1, 1, 0, 0, 0, 0, 0) + wire.blob(out) + wire.blob(err)


def error(code, number=0, message=b"no"):
    return struct.pack("<Hi", code, number) + wire.blob(message)


class FakeStream:
    """A `ByteStream` in memory. `stuck` is how much of what was written counts as unsent."""

    def __init__(self):
        self.receiver = None
        self.sent = b""
        self.stuck = 0
        self.closed = False
        self.paused = False
        self._drained = asyncio.Event()

    def start(self, receiver):
        self.receiver = receiver

    def write(self, data):
        if not self.closed:
            self.sent += data

    @property
    def write_buffer_size(self):
        return self.stuck

    async def drain(self):
        if self.stuck and not self.closed:
            await self._drained.wait()

    def unstick(self):
        self.stuck = 0
        self._drained.set()

    def pause_reading(self):
        self.paused = True

    def resume_reading(self):
        self.paused = False

    def close(self):
        if not self.closed:
            self.closed = True
            self._drained.set()
            self.receiver.connection_lost(None)


class FakeCell:
    """One channel and the test's end of it."""

    def __init__(self, *, greet=True, **options):
        self.stream = FakeStream()
        self.channel = Channel(self.stream, sandbox_id="sbx-1", **options)
        self._at = 0
        if greet:
            self.raw(agentwire.hello())
            self.requests()

    def raw(self, data):
        self.stream.receiver.data_received(data)

    def say(self, request_id, kind, payload=b""):
        self.raw(agentwire.frame(request_id, kind, payload))

    def requests(self):
        """What has been sent since the last look, as (id, kind, payload without deadline and key)."""
        found, sent = [], self.stream.sent
        while self._at < len(sent):
            length, request_id, kind, flags, _ = struct.unpack_from("<IIBBH", sent, self._at)
            start = self._at + 12 + (4 if flags & 1 else 0) + (16 if flags & 2 else 0)
            self._at += 4 + length
            found.append((request_id, kind, sent[start : self._at]))
        return found

    async def asked(self, coroutine):
        """Start the coroutine and give its task with the requests it sent first."""
        task = asyncio.ensure_future(coroutine)
        await settle()
        return task, self.requests()


async def settle():
    """Let every task run until it waits for something."""
    for _ in range(10):
        await asyncio.sleep(0)
