"""One namespace sandbox, from its first process to its end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import secrets
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from untax.channel.client import READY_TIMEOUT_S
from untax.channel.stream import SocketStream
from untax.core.errors import BackendError, DestroyError, ReadinessTimeout, SandboxLost, SubstrateUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import EnvSpec, Limits
from untax.core.stage import WORKDIR
from untax.core.substrate import Facts, Unenforced
from untax.substrates import _launcher as wire
from untax.substrates._host import is_host_root
from untax.substrates._launcher import Answer, Launcher, LauncherRefused, pack
from untax.substrates._namespace_host import change_refused, remedy
from untax.substrates._namespace_layers import FrozenLayers, FrozenUpper

HOME = "/home/user"
# The kernel ends a sandbox's processes in well under a millisecond each; one that takes this long is in uninterruptible sleep.
_DESTROY_PATIENCE_S = 10.0
_DEATH_NOTICE_S = 0.5
_MIB = 1 << 20
SHM_BYTES = 64 * _MIB
_IF_FEW = 2  # of FREEZE
_WORKERS = 1  # the cell's own process in there, which starts commands, is counted with them
_HELD = {"memory_mib": 1, "pids": 2, "cpus": 4, "disk_mib": 8}


class Place:
    """Where the launcher keeps upper directories, as it names them and as this process can read them."""

    def __init__(self, launcher: Launcher, boxes: Path) -> None:
        self._boxes = boxes
        # They may lie on a file system that is mounted for the launcher alone.
        self._seen = Path(f"/proc/{launcher.pid}/root") / boxes.relative_to("/")

    def named(self, disk: str) -> str:
        return str(self._boxes / disk / "upper")

    def seen(self, disk: str) -> Path:
        return self._seen / disk / "upper"


def _heard(answer: asyncio.Future[Answer]) -> None:
    """What came of it does not matter: the sandbox goes either way."""
    if not answer.cancelled():
        answer.exception()


def amounts(limits: Limits) -> tuple[int, int, int, int, int]:
    """As the launcher counts: bytes of memory, processes, thousandths of a processor, bytes on disk, bytes in /tmp."""
    memory = int(limits.memory_mib * _MIB)
    return memory, limits.pids + _WORKERS, max(1, round(limits.cpus * 1000)), int(limits.disk_mib * _MIB), max(memory // 2, _MIB)


class NamespaceSandbox:
    """One sandbox. `agent_pid` is its first process as the host sees it."""

    def __init__(
        self,
        launcher: Launcher,
        layers: FrozenLayers,
        place: Place,
        sandbox_id: str,
        handle: int,
        agent_pid: int,
        channel: socket.socket,
        user: str | None,
        root: Root,
        facts: Facts,
        unenforced: tuple[Unenforced, ...],
        forget: Callable[[int], None],
    ) -> None:
        self.id = sandbox_id
        self.agent_pid = agent_pid
        self.unenforced = self._unenforced_here = unenforced
        self.root = root
        self._launcher = launcher
        self._layers = layers
        self._place = place
        self._disk = sandbox_id  # under which name its upper directory lies
        self._forget = forget
        self._handle = handle
        self._channel: socket.socket | None = channel
        self._user = user
        self._workers = {"": ""}  # whom the cell acts for, by the name it knows them under
        self._facts = facts
        self._failure: LauncherRefused | None = None
        self._dead = asyncio.Event()

    def facts(self) -> Facts:
        return self._facts

    async def wait_ready(self) -> None:
        """At once, because the socket is there and the cell greets on it when it is up; with a user of the spec's own, after that.

        Whoever enters a sandbox gets the namespaces and the root that its first process has at that moment: before the
        greeting these may still be the host's.
        """
        if self._user is not None and await self._is_greeted():
            await self.provide_worker(self._user, name="")

    async def _is_greeted(self) -> bool:
        """Wait for the cell's greeting and leave it where it is; False when the cell has ended instead."""
        if self._channel is None:
            raise SandboxLost(self.id, "it is gone")
        with self._channel.dup() as probe:  # a descriptor that no `destroy` closes under the loop
            readable = asyncio.Event()
            loop = asyncio.get_running_loop()
            loop.add_reader(probe, readable.set)
            try:
                async with asyncio.timeout(READY_TIMEOUT_S):
                    await readable.wait()
            except TimeoutError:
                raise ReadinessTimeout(self.id, f"the cell did not greet within {READY_TIMEOUT_S:g} s") from None
            finally:
                loop.remove_reader(probe)
            try:
                return bool(probe.recv(1, socket.MSG_PEEK))
            except OSError:
                return False

    async def open_channel(self) -> SocketStream:
        channel, self._channel = self._channel, None
        if channel is None:
            raise SandboxLost(self.id, "its channel has been taken already, or it is gone")
        return SocketStream(channel)

    async def loss_reason(self) -> str | None:
        """Why its set-up failed, when the launcher knows."""
        try:
            async with asyncio.timeout(_DEATH_NOTICE_S):
                await self._dead.wait()
        except TimeoutError:
            return None
        return f"{self._failure}; {remedy(self._failure.error)}" if self._failure is not None else None

    async def provide_worker(self, user: str, name: str | None = None) -> None:
        name = user if name is None else name
        try:
            await self._launcher.request(wire.ENTER, struct.pack("<I", self._handle) + pack(user) + pack(name))
        except LauncherRefused as exc:
            if user and exc.step in ("user", "namespaces") and exc.error == errno.EPERM and not is_host_root():
                raise UsageError(
                    f"user {user!r}: an engine of an ordinary user has one user id for its sandboxes; run the engine as root"
                ) from exc
            if exc.step == "user":
                raise UsageError(f"user {user!r}: there is no such user in the sandbox") from exc
            raise SandboxLost(self.id, f"nobody can act for user {user!r} in it: {exc}") from exc
        self._workers[name] = user

    async def bind_limits(self, limits: Limits) -> Sequence[Unenforced]:
        try:
            answer = await self._launcher.request(wire.LIMIT, struct.pack("<IQIIQQ", self._handle, *amounts(limits)))
        except LauncherRefused as exc:
            raise SandboxLost(self.id, f"its limits cannot be changed: {exc}") from exc
        held, is_stale = struct.unpack_from("<BB", answer.fields)
        if is_stale:  # processes keep the limits they were started with
            for name, user in list(self._workers.items()):
                await self.provide_worker(user, name)
        never = {limit.name for limit in self._unenforced_here}
        refused = (change_refused(name) for name, bit in _HELD.items() if not held & bit and name not in never)
        self.unenforced = (*self._unenforced_here, *refused)
        return self.unenforced

    async def bind_user(self, user: str | None) -> None:
        default = user in (None, "", "user", "1000")
        await self.provide_worker("" if default else str(user), name="")
        self._facts = replace(self._facts, user=user or "user", home=home_of(user or "user"))

    async def pause(self) -> None:
        await self._freeze(on=True)

    async def resume(self) -> None:
        await self._freeze(on=False)

    def retire(self) -> None:
        with contextlib.suppress(BackendError):
            self._launcher.ask(wire.FREEZE, struct.pack("<IB", self._handle, _IF_FEW)).add_done_callback(_heard)

    async def _freeze(self, *, on: bool) -> None:
        try:
            await self._launcher.request(wire.FREEZE, struct.pack("<IB", self._handle, on))
        except LauncherRefused as exc:
            if exc.error == errno.EOPNOTSUPP:
                raise SubstrateUnavailable(self.id, "freezing needs a writable cgroup v2 tree; run the engine as root") from exc
            raise SandboxLost(self.id, str(exc)) from exc

    # ---- what was written in it ----

    @property
    def upper(self) -> Path:
        return self._place.seen(self._disk)

    async def snapshot(self) -> FrozenUpper:
        fresh = f"upr-{secrets.token_hex(6)}"
        try:
            answer = await self._launcher.request(wire.SNAPSHOT, struct.pack("<I", self._handle) + pack(fresh))
        except LauncherRefused as exc:
            if exc.error == errno.ESRCH:
                raise SandboxLost(self.id, f"snapshot: {exc}") from exc
            if exc.error == errno.EOPNOTSUPP:
                raise SubstrateUnavailable(
                    self.id,
                    f"snapshot: {exc.step}; use Linux 5.19 or newer, and a state_dir whose file system can shift owners (ext4, XFS, btrfs, tmpfs)",
                ) from exc
            raise BackendError(self.id, f"snapshot: {exc}; {remedy(exc.error)}") from exc  # and the sandbox is as it was
        cloned, taken_ns, size = struct.unpack_from("<BQI", answer.fields)
        layer = answer.fields[13 : 13 + size].decode()
        directory = self._place.named(layer)
        self._layers.add(layer, directory)
        frozen = self.root.with_layers(directory)
        if not cloned:
            self._disk = fresh
            self.root = frozen
            if not self._dead.is_set():
                self._layers.hold(Root((directory,)))
        how: Literal["swapped", "cloned"] = "cloned" if cloned else "swapped"
        return FrozenUpper(layer, frozen, self._place.seen(layer), how, taken_ns, lambda: self._layers.let_go_of(directory))

    async def is_pristine(self) -> bool:
        try:
            answer = await self._launcher.request(wire.PRISTINE, struct.pack("<I", self._handle))
        except (LauncherRefused, BackendError):
            return False
        return answer.fields[:1] == b"\1"

    # ---- its end ----

    def died(self, failure: LauncherRefused | None) -> None:
        self._failure = failure
        self._end()

    def _end(self) -> None:
        if not self._dead.is_set():
            self._dead.set()
            self._layers.let_go(self.root)

    async def destroy(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._dead.is_set():
            return
        try:
            async with asyncio.timeout(_DESTROY_PATIENCE_S):
                await self._launcher.request(wire.DESTROY, struct.pack("<I", self._handle))
        except TimeoutError:
            raise DestroyError(self.id, "a process in it does not die (uninterruptible sleep?); the launcher goes on trying") from None
        except BackendError:
            pass  # the launcher is gone, and the kernel ended its sandboxes with it
        self._end()
        self._forget(self._handle)


def home_of(user: str) -> str:
    return "/root" if user in ("root", "0") else HOME


def facts_of(spec: EnvSpec, root: Root) -> Facts:
    """What commands find unless they are told otherwise: the spec's word, then the image's, then ours."""
    user = (spec.user or root.config.user or "user").partition(":")[0]
    home = home_of(user)
    workdir = spec.workdir or root.config.workdir or WORKDIR
    return Facts(workdir, home, user, root.path) if root.path else Facts(workdir, home, user)
