"""The way into a virtual machine that people use today: one fresh `ssh` an action, to an sshd inside.

Machines have no network device, so the sshd is reached over a channel of its own, which an agent of its own serves; the held channel is not touched. What
that adds to an `ssh` is a relay on this side and one inside, together about one dispatch of the held channel.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from untax.channel import actions, flow
from untax.channel.client import Channel
from untax.channel.process import Connection, Process
from untax.channel.stream import SocketStream
from untax.core.errors import BackendError, SandboxLost, SpawnFailed, SubstrateError, SubstrateUnavailable, UntaxError
from untax.core.result import CommandResult
from untax.core.substrate import Facts, Unenforced
from untax.substrates._incumbent import ANSWER_S
from untax.substrates._ssh_client import Address
from untax.substrates._ssh_once import run_once
from untax.substrates._vm_machines import Started
from untax.substrates._vm_sandbox import Birth, VmSandbox

_PORT = 2222
_CONNECT_S = 60.0  # an emulated machine agrees on keys in some seconds


class VmSshSandbox(VmSandbox):
    """A machine with an sshd in its image. It is started when the first action asks for it."""

    def __init__(
        self,
        started: Started,
        birth: Birth,
        facts: Facts,
        unenforced: tuple[Unenforced, ...],
        ready_s: float,
        forget: Callable[[str], None],
        *,
        sshd: str,
        place: Path,
    ) -> None:
        super().__init__(started, birth, facts, unenforced, ready_s, forget)
        self._sshd = sshd
        self._place = place
        self._way: asyncio.Task[_Way] | None = None

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One fresh `ssh`. The way in, which the first one opens, is part of its time and not of its round trip."""
        began = time.perf_counter()
        try:
            async with asyncio.timeout(timeout_s):
                way = await self._way_in()
        except TimeoutError:
            raise BackendError(self.id, f"the sshd inside was not up within {timeout_s:g} s; allow more") from None
        left_s = timeout_s - (time.perf_counter() - began)
        try:
            return await run_once(self.id, way.address, _CONNECT_S, self._facts.workdir, argv, timeout_s=left_s, ask=way.wait_answer)
        except SubstrateError as exc:
            if way.channel.is_lost:
                raise SandboxLost(self.id, way.channel.lost_reason or "its machine is gone") from exc
            raise

    async def _way_in(self) -> _Way:
        if self._way is None or (self._way.done() and not self._way.cancelled() and self._way.exception() is not None):
            self._way = asyncio.ensure_future(self._open_way())
        return await asyncio.shield(self._way)

    async def _open_way(self) -> _Way:
        sock, self._qemu.second = self._qemu.second, None
        if sock is None:
            raise SandboxLost(self.id, "its second channel is gone")
        return await _Way.open(self.id, sock, self._sshd, self._place)

    async def destroy(self) -> None:
        way, self._way = self._way, None
        if way is not None:
            way.cancel()
            with contextlib.suppress(asyncio.CancelledError, UntaxError):
                (await way).close()
        await super().destroy()


class _Way:
    """An sshd inside, and a port of this host's loopback that leads to it."""

    def __init__(
        self, channel: Channel, sshd: Process, server: asyncio.Server, address: Address, keys: tempfile.TemporaryDirectory[str]
    ) -> None:
        self.channel = channel
        self.address = address
        self._sshd = sshd
        self._server = server
        self._keys = keys

    @classmethod
    async def open(cls, sandbox_id: str, sock: socket.socket, program: str, place: Path) -> _Way:
        channel = Channel(SocketStream(sock), sandbox_id=sandbox_id)
        keys = tempfile.TemporaryDirectory(prefix="ssh-", dir=place)
        try:
            await channel.wait_ready()
            here = Path(keys.name)
            for name in ("host", "login"):
                await asyncio.to_thread(_make_key, here / name)
            user, inside = await _prepare(channel, here)
            sshd = await Process.open(channel, flow.start([program, "-D", "-e", "-f", f"{inside}/config"], timeout_s=None))
            await _wait_listening(sandbox_id, program, sshd)
            server = await asyncio.start_server(lambda reader, writer: _relay(channel, reader, writer), "127.0.0.1", 0)
            port = server.sockets[0].getsockname()[1]
            (here / "known").write_text(f"[127.0.0.1]:{port} {(here / 'host.pub').read_text()}")
        except BaseException:
            channel.close()
            keys.cleanup()
            raise
        return cls(channel, sshd, server, Address("127.0.0.1", user, port, str(here / "login"), str(here / "known")), keys)

    async def wait_answer(self) -> None:
        """Of the cell inside, which is there as long as its machine goes on."""
        await self.channel.call(actions.ping(timeout_s=ANSWER_S - 1))

    def close(self) -> None:
        self._server.close()
        self.channel.close()
        self._keys.cleanup()


def _make_key(path: Path) -> None:
    try:
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True, capture_output=True, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.CalledProcessError) as exc:
        raise SubstrateUnavailable("", f"ssh-keygen: {exc}; apt install openssh-client") from exc


async def _prepare(channel: Channel, here: Path) -> tuple[str, str]:
    """The user inside, and a directory there with what the sshd reads."""
    inside = "/tmp/.untax-ssh"
    user = (await channel.call(actions.shell("id -un"))).check().text.strip()
    await channel.call(actions.mkdir(inside, mode=0o700))
    config = f"Port {_PORT}\nListenAddress 127.0.0.1\nHostKey {inside}/host\nAuthorizedKeysFile {inside}/login.pub\nPidFile none\nStrictModes no\nUsePAM no\n"
    await channel.call(actions.write(f"{inside}/host", (here / "host").read_bytes(), mode=0o600))
    await channel.call(actions.write(f"{inside}/login.pub", (here / "login.pub").read_bytes()))
    await channel.call(actions.write(f"{inside}/config", config.encode()))
    return user, inside


async def _wait_listening(sandbox_id: str, program: str, sshd: Process) -> None:
    said = b""
    while b"listening" not in said:
        output = await sshd.read()
        if output is None:
            words = said.decode(errors="replace").strip() or (await sshd.wait()).summary()
            raise SpawnFailed(sandbox_id, f"{program} did not start in the machine: {words}; name one that its image has with sshd=…")
        said += output.data


async def _relay(channel: Channel, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        async with await Connection.open(channel, _PORT) as stream:

            async def there() -> None:
                while data := await reader.read(1 << 16):
                    await stream.write(data)

            sending = asyncio.ensure_future(there())
            try:
                while data := await stream.read():
                    writer.write(data)
                    await writer.drain()
            finally:
                sending.cancel()
    except (UntaxError, OSError):
        pass  # ssh is told by the end of the connection
    finally:
        writer.close()
