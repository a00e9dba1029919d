"""Any machine that can be reached by SSH: the cloud machine of most studies, with one fresh `ssh` an action or one held session.

With `host=` sandboxes are directories of one machine, without a boundary between them. With a provider each sandbox is a machine of its
own, made by one command and deleted by another. The cell is copied to a machine once; it removes what it was given when the session ends.
docs/vm.md has examples.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import platform
import secrets
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from untax._remove import remove_tree
from untax.channel.client import READY_TIMEOUT_S
from untax.channel.stream import SocketStream
from untax.core.errors import (
    BackendError,
    CreateError,
    DestroyError,
    ReadinessTimeout,
    SandboxLost,
    SubstrateError,
    SubstrateUnavailable,
    UsageError,
)
from untax.core.result import CommandResult
from untax.core.spec import EnvSpec, require_duration
from untax.core.substrate import Facts, Typical, Unenforced
from untax.substrates import _ssh_client as client
from untax.substrates._host import Holding, cell_missing_reason, cell_path, chosen_state_dir, ensure_private_dir, sweep, wait_exit
from untax.substrates._ssh_client import Address
from untax.substrates._ssh_once import run_once

log = logging.getLogger("untax.ssh")

_PLACE = ".cache/untax"  # below the home there
_EXIT_GRACE_S = 10.0  # for the cell there to end what it started, and for its directory to go
_CONNECT_S = 30.0
_REMEDY = "use a substrate with isolation, for example Engine('namespace')"
_UNENFORCED = tuple(
    Unenforced(name, "the machine at the other end is used as it is", "make the machine itself as large as it may be")
    for name in ("cpus", "memory_mib", "disk_mib", "pids", "network")
)


@runtime_checkable
class Provider(Protocol):
    """Makes machines and deletes them. `name` is letters, digits and hyphens, and its owner's mark."""

    async def create(self, name: str) -> tuple[str, str]:
        """The address of a new machine as `user@host:port`, and lines of known_hosts for it, or nothing when its key is known."""

    async def delete(self, name: str) -> None:
        """Also of a machine that is gone already, or was never made."""


class Commands:
    """A provider of two commands, in which `{name}` stands for the machine's.

    The first prints the address on its first line, and lines of known_hosts after it; both end with 0 when all is well.
    """

    def __init__(self, create: Sequence[str], delete: Sequence[str], timeout_s: float) -> None:
        self._create = list(create)
        self._delete = list(delete)
        self._timeout_s = timeout_s

    async def create(self, name: str) -> tuple[str, str]:
        said = await self._run(self._create, name)
        address, _, keys = said.partition("\n")
        if not address.strip():
            raise CreateError(name, f"{shlex.join(self._create)} printed no address; its first line is user@host:port")
        return address.strip(), keys

    async def delete(self, name: str) -> None:
        await self._run(self._delete, name)

    async def _run(self, command: Sequence[str], name: str) -> str:
        argv = [part.replace("{name}", name) for part in command]
        try:
            process = await asyncio.create_subprocess_exec(
                *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
            )
        except OSError as exc:
            raise SubstrateUnavailable(name, f"{argv[0]}: {exc.strerror}; name a command that exists") from exc
        try:
            async with asyncio.timeout(self._timeout_s):
                out, err = await process.communicate()
        except TimeoutError:
            raise BackendError(name, f"{shlex.join(argv)}: not done within {self._timeout_s:g} s; allow more with provider_s=…") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            words = err[-1000:].decode(errors="replace").strip()
            raise BackendError(name, f"{shlex.join(argv)}: status {process.returncode}: {words or 'without a word'}")
        return out.decode(errors="replace")


def make(
    state_dir: str | None = None,
    host: str | None = None,
    identity: str | None = None,
    known_hosts: str | None = None,
    create: Sequence[str] | None = None,
    delete: Sequence[str] | None = None,
    provider: Provider | None = None,
    connect_s: float = _CONNECT_S,
    provider_s: float = 600.0,
) -> SshSubstrate:
    """`host` is `user@host:port`, one machine for all sandboxes; or `create` and `delete` are commands (or `provider` an object) that make and
    delete a machine for each. `identity` and `known_hosts` are files, by default what ssh finds itself; the machine's key is always checked.
    """
    if (create is None) != (delete is None):
        raise UsageError("create and delete belong together: what is made must be deleted")
    if create is not None and delete is not None:
        if provider is not None:
            raise UsageError("provider and create are two ways to say the same; give one")
        if isinstance(create, str) or isinstance(delete, str):
            raise UsageError("create and delete are lists of words, as ['sh', '-c', …]")
        provider = Commands(create, delete, require_duration("provider_s", provider_s))
    if host is not None and provider is not None:
        raise UsageError("host is one machine that is there, a provider makes others; give one of the two")
    address = None if host is None else Address.parse(host, identity, known_hosts)
    return SshSubstrate(chosen_state_dir(state_dir), address, provider, identity, known_hosts, require_duration("connect_s", connect_s))


class SshSubstrate:
    name = "ssh"

    def __init__(
        self,
        state_dir: Path,
        address: Address | None,
        provider: Provider | None,
        identity: str | None,
        known_hosts: str | None,
        connect_s: float,
    ) -> None:
        self._root = state_dir / "ssh"
        self._address = address
        self._provider = provider
        self._identity = identity
        self._known_hosts = known_hosts
        self._connect_s = connect_s
        self._holding: Holding | None = None
        self._ready: dict[Address, asyncio.Task[Remote]] = {}
        self.isolation = "vm" if provider is not None else "none"

    def unavailable_reason(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "needs Linux; connect to a server that runs on it"
        if reason := cell_missing_reason():
            return reason
        if client.ssh_path() is None:
            return "no ssh found; apt install openssh-client"
        if self._address is None and self._provider is None:
            return "no machine is named; give host='user@machine', or commands that make and delete one (create=…, delete=…)"
        return None

    def evidence(self) -> Sequence[str]:
        ssh = client.ssh_path()
        if ssh is None:
            return []
        return [subprocess.run([ssh, "-V"], capture_output=True, text=True, check=False).stderr.strip()]

    # ---- its life ----

    async def start(self) -> None:
        if self._holding is not None:
            return
        ensure_private_dir(self._root.parent)
        self._holding = Holding.take(self._root)
        dead: list[Path] = []
        await asyncio.to_thread(sweep, self._root, dead.append)
        for path in dead:
            await self._delete_left(path)

    async def _delete_left(self, holding: Path) -> None:
        """Delete the machines of an engine that is no more. One that does not go is left for the next start."""
        for note in sorted(holding.glob("*.machine")):
            if self._provider is None:
                return
            try:
                await self._provider.delete(note.stem)
            except (BackendError, SubstrateUnavailable) as exc:
                log.warning("machine %s was left behind: %s; the next start tries again", note.stem, exc)
                return
            note.unlink(missing_ok=True)
        remove_tree(holding)

    async def aclose(self) -> None:
        holding, self._holding = self._holding, None
        for task in self._ready.values():
            task.cancel()
        self._ready.clear()
        if holding is not None:
            await asyncio.to_thread(holding.close)

    # ---- sandboxes ----

    @property
    def typical(self) -> Typical:
        return Typical(start_s=0.3 if self._provider is None else 60.0, action_s=0.001)

    def image_trouble(self, image: str) -> str | None:
        if image == "host":
            return None
        return f"image {image!r}: a machine behind SSH has its own software; use image='host', or make the machine from that image"

    async def create(self, spec: EnvSpec) -> SshSandbox:
        if trouble := self.image_trouble(spec.image):
            raise UsageError(trouble)
        if self._holding is None:
            raise BackendError("", "the ssh substrate is not started, or closed")
        sandbox_id = f"sbx-{secrets.token_hex(6)}"
        address = self._address
        note: Path | None = None
        if address is None:
            note = self._holding.path / f"untax-{sandbox_id}.machine"
            note.touch(mode=0o600)  # before there is anything to delete: a crash in between must not hide it
            address = await self._made(note)
        try:
            remote = await self._remote(address)
            if spec.user not in (None, remote.user):
                raise UsageError(f"user {spec.user!r}: commands run as {remote.user}, who logs in; give host='{spec.user}@…'")
        except BaseException:
            if note is not None:
                await self._delete(note)
            raise
        return SshSandbox(self, sandbox_id, address, remote, note)

    async def _made(self, note: Path) -> Address:
        assert self._provider is not None
        try:
            text, keys = await self._provider.create(note.stem)
            known = self._known_hosts
            if keys.strip():
                place = note.with_suffix(".known_hosts")
                place.write_text(keys)
                known = str(place)
            return Address.parse(text, self._identity, known)
        except BaseException:
            await self._delete(note)
            raise

    async def _delete(self, note: Path) -> None:
        assert self._provider is not None
        try:
            await self._provider.delete(note.stem)
        except (BackendError, SubstrateUnavailable) as exc:
            raise DestroyError(
                note.stem, f"machine {note.stem}: {exc.message}; delete it by hand, or start an engine with this state_dir again"
            ) from exc
        note.with_suffix(".known_hosts").unlink(missing_ok=True)
        note.unlink(missing_ok=True)

    async def _remote(self, address: Address) -> Remote:
        """What is at the other end, with the cell there; found out once, and again after a failure."""
        task = self._ready.get(address)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = self._ready[address] = asyncio.ensure_future(Remote.prepare(address, self._connect_s))
        return await asyncio.shield(task)


class Remote:
    """A machine with the cell on it."""

    def __init__(self, home: str, user: str, cell: str, connect_s: float) -> None:
        self.home = home
        self.user = user
        self.cell = cell
        self.connect_s = connect_s

    @classmethod
    async def prepare(cls, address: Address, connect_s: float) -> Remote:
        """Over one connection: who and what it is, and the cell put there unless it is there already."""
        data = await asyncio.to_thread(Path(cell_path()).read_bytes)
        name = f"{_PLACE}/cell-{hashlib.sha256(data).hexdigest()[:24]}"
        # The shell there may be anybody's: each step is plain POSIX. `have` is only said of a file that is whole, because it is moved into place.
        script = (
            f'cd && umask 077 && mkdir -p {_PLACE} && echo "$(uname -s) $(uname -m)" && pwd -P && id -un && '
            f"if [ -x {name} ]; then cat >/dev/null; echo have; else cat >{name}.$$ && chmod 700 {name}.$$ && mv {name}.$$ {name} && echo put; fi"
        )
        try:
            code, out, err = await client.run(address, connect_s, f"exec sh -c {shlex.quote(script)}", data, connect_s * 4)
        except TimeoutError:
            raise BackendError("", f"ssh {address}: no answer within {connect_s * 4:g} s; is the machine up?") from None
        lines = out.decode(errors="replace").splitlines()
        if code == client.FAILED and len(lines) < 4:
            raise client.failure("", address, err[-1000:].decode(errors="replace").strip())
        if code != 0 or len(lines) < 4:
            raise SubstrateUnavailable(
                "", f"ssh {address}: the cell could not be put there: {(err or out)[-500:].decode(errors='replace').strip()}"
            )
        system, home, user = lines[-4:-1]
        if system != f"Linux {platform.machine()}":
            raise SubstrateUnavailable(
                "",
                f"ssh {address} is {system}, and this installation's cell is for Linux {platform.machine()}; install there, and connect to its server",
            )
        return cls(home, user, f"{home}/{name}", connect_s)


class SshSandbox:
    """A directory on the machine, or the machine; `note` is the record of a machine that is to be deleted with it."""

    unenforced = _UNENFORCED

    def __init__(self, substrate: SshSubstrate, sandbox_id: str, address: Address, remote: Remote, note: Path | None) -> None:
        self.id = sandbox_id
        self._substrate = substrate
        self._address = address
        self._remote = remote
        self._note = note
        self._directory = f"{remote.home}/{_PLACE}/{sandbox_id}"
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._stream: SocketStream | None = None

    def facts(self) -> Facts:
        # The loopback there is shared with the others on that machine.
        port = 20000 + secrets.randbelow(12000)
        return Facts(workdir=self._directory, home=self._directory, user=self._remote.user, proxy_port=port)

    async def wait_ready(self) -> None:
        """Open the session that is held, and wait for the cell's greeting, which is left where it is."""
        place, cell = shlex.quote(self._directory), shlex.quote(self._remote.cell)
        # The shell outlives the cell by one command: the directory goes even when the connection is lost first.
        script = f"trap '' HUP TERM PIPE; umask 077; mkdir -p {place} && {cell} agent --stdio --dir {place}; chmod -R u+rwX {place}; cd / && rm -rf {place}"
        self._process, self._sock = client.start(self._address, self._remote.connect_s, f"exec sh -c {shlex.quote(script)}")
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        with self._sock.dup() as probe:
            loop.add_reader(probe, readable.set)
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await readable.wait()
                is_up = bool(probe.recv(1, socket.MSG_PEEK))
            except TimeoutError:
                raise ReadinessTimeout(self.id, f"ssh {self._address}: the cell did not greet within {READY_TIMEOUT_S:g} s") from None
            except OSError:
                is_up = False
            finally:
                loop.remove_reader(probe)
        if not is_up:
            raise client.failure(self.id, self._address, client.words_of(self._process))

    async def open_channel(self) -> SocketStream:
        sock, self._sock = self._sock, None
        if sock is None:
            raise SandboxLost(self.id, "its channel has been taken already, or it is gone")
        self._stream = SocketStream(sock)
        return self._stream

    async def run_incumbent(self, argv: Sequence[str], *, timeout_s: float) -> CommandResult:
        """One fresh `ssh`: connect, agree on keys, log in, run, leave."""
        try:
            return await run_once(
                self.id, self._address, self._remote.connect_s, self._directory, argv, timeout_s=timeout_s, ask=self._wait_answer
            )
        except SubstrateError as exc:
            if self._process is None or self._process.poll() is not None:
                raise SandboxLost(self.id, exc.message) from exc
            raise

    async def _wait_answer(self) -> None:
        """Of the machine, to another login: only ssh knows the way there."""
        code, _, err = await client.run(self._address, self._remote.connect_s, "exec true")
        if code == client.FAILED:
            raise client.failure(self.id, self._address, err[-1000:].decode(errors="replace").strip())

    async def destroy(self) -> None:
        await self._end_session()
        if self._note is not None and self._note.exists():
            await self._substrate._delete(self._note)

    async def _end_session(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        # End of input: the cell ends what it started, its directory goes, and then the session is over.
        if self._stream is not None:
            self._stream.close()
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        await wait_exit(process, _EXIT_GRACE_S, lambda: os.kill(process.pid, signal.SIGKILL))
        if process.stderr is not None:
            process.stderr.close()
