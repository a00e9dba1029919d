"""Our own sandbox: namespaces, an overlay, limits and a filter, made by the native launcher in about two milliseconds.

As root each sandbox has a range of user ids of its own and its agent an identity apart from the workload. As an ordinary user
there is one id for everybody; docs/namespace.md says which protections remain.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from untax.channel.client import READY_TIMEOUT_S
from untax.channel.stream import SocketStream
from untax.core.errors import BackendError, CreateError, DestroyError, ReadinessTimeout, SandboxLost, SubstrateUnavailable, UsageError
from untax.core.root import Root, View
from untax.core.spec import EnvSpec
from untax.core.stage import WORKDIR
from untax.core.substrate import Facts, Unenforced
from untax.substrates import _launcher as wire
from untax.substrates._claims import Claim, RangeClaim, disk_image, mkfs_btrfs
from untax.substrates._host import (
    Holding,
    cell_missing_reason,
    cell_path,
    chosen_state_dir,
    ensure_private_dir,
    is_host_root,
    remove_tree,
    sweep,
)
from untax.substrates._host_image import HostImage, host_image
from untax.substrates._launcher import Launcher, LauncherRefused, pack, pack_all

log = logging.getLogger("untax.namespace")

HOME = "/home/user"
_MIB = 1 << 20
_SHM_BYTES = 64 * _MIB
# The kernel ends a sandbox's processes in well under a millisecond each; one that takes this long is in uninterruptible sleep.
_DESTROY_PATIENCE_S = 10.0
_DEATH_NOTICE_S = 0.5

_MEMORY, _PIDS, _CPU, _KILL, _FREEZE = 1, 2, 4, 8, 16
_DISK_MODES = ("none", "project quota", "btrfs quota", "btrfs image")

Disk = Literal["auto", "tmpfs"]


def make(state_dir: str | None = None, disk: Disk = "auto") -> NamespaceSubstrate:
    """`disk="tmpfs"` keeps what sandboxes write in memory, of the size `disk_mib`."""
    if disk not in ("auto", "tmpfs"):
        raise UsageError(f"disk must be 'auto' or 'tmpfs', not {disk!r}")
    return NamespaceSubstrate(chosen_state_dir(state_dir), disk)


@dataclass(frozen=True, slots=True)
class _Host:
    """What the launcher found it can do here."""

    is_root: bool
    abilities: int
    disk_mode: int
    disk_reason: str


class NamespaceSubstrate:
    name = "namespace"
    isolation = "namespace"

    def __init__(self, state_dir: Path, disk: Disk) -> None:
        self._state_dir = state_dir
        self._root = state_dir / "namespace"
        self._disk: Disk = disk
        self._holding: Holding | None = None
        self._launcher: Launcher | None = None
        self._ranges: RangeClaim | None = None
        self._image: Claim | None = None
        self._host_image: HostImage | None = None
        self._live: dict[int, NamespaceSandbox] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self.host: _Host | None = None  # once started
        self._unenforced: tuple[Unenforced, ...] = ()

    # ---- what this machine offers ----

    def unavailable_reason(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "needs Linux; connect to a server that runs on it"
        if reason := cell_missing_reason():
            return reason
        return _userns_reason()

    def evidence(self) -> Sequence[str]:
        lines = [
            f"kernel {os.uname().release}",
            "root" if is_host_root() else "an ordinary user, or root of a container: agent and workload share one user id",
        ]
        lines.append(f"user namespaces allowed: {_read_number('/proc/sys/user/max_user_namespaces')}")
        if is_host_root():
            lines.append("disk limits: mkfs.btrfs found" if mkfs_btrfs() else "disk limits: no mkfs.btrfs; apt install btrfs-progs")
        return lines

    # ---- its life ----

    async def start(self) -> None:
        if self._launcher is not None:
            return
        ensure_private_dir(self._state_dir)
        self._holding = Holding.take(self._root)
        launcher = self._launcher = Launcher(cell_path(), self._on_death)
        is_root = is_host_root()
        if is_root:
            self._ranges = RangeClaim(self._state_dir)
            if self._disk == "auto":
                self._image = await asyncio.to_thread(disk_image, self._state_dir)
        launcher.start()
        self.host = await self._configure(launcher)
        self._unenforced = tuple(_unenforced(self.host, self._disk))
        await self._sweep()

    async def _configure(self, launcher: Launcher) -> _Host:
        assert self._holding is not None
        first, count = (self._ranges.first, self._ranges.count) if self._ranges else (0, 0)
        image = str(self._image.path) if self._image else ""
        fields = b"".join(
            (
                pack(self._holding.path.name),
                pack(str(self._holding.path)),
                pack(image),
                pack(str(self._state_dir / "layers" / "trees")),
                struct.pack("<II", first, count),
            )
        )
        try:
            answer = await launcher.request(wire.CONFIG, fields)
        except LauncherRefused as exc:
            raise SubstrateUnavailable("", f"namespace: {exc}; {_remedy(exc.error)}") from exc
        in_userns, abilities, mode, size = struct.unpack_from("<BBBI", answer.fields)
        return _Host(not in_userns, abilities, mode, answer.fields[7 : 7 + size].decode(errors="replace"))

    async def _sweep(self) -> None:
        """End what dead engines left running before anything new is made; their files are removed in the background."""
        loop = asyncio.get_running_loop()
        dead: list[Path] = []

        def end(path: Path) -> None:
            try:
                asyncio.run_coroutine_threadsafe(self._end_dead(path.name), loop).result()
            except (LauncherRefused, BackendError) as exc:
                log.warning("left over from %s: %s; it is tried again at the next start", path.name, exc)
                return
            dead.append(path.rename(path.with_name(f"dead-{path.name}")))

        await asyncio.to_thread(sweep, self._root, end)
        dead += [path for path in self._root.glob("dead-*") if path not in dead]
        if dead:
            self._sweeping = asyncio.ensure_future(asyncio.to_thread(_remove_trees, dead))

    async def _end_dead(self, run: str) -> None:
        assert self._launcher is not None
        await self._launcher.request(wire.SWEEP, pack(run))

    async def aclose(self) -> None:
        launcher, self._launcher = self._launcher, None
        if launcher is not None:
            await launcher.aclose()
        if self._sweeping is not None:
            await asyncio.wait([self._sweeping])
            self._sweeping = None
        holding, self._holding = self._holding, None
        if holding is not None:
            await asyncio.to_thread(_remove_tree, holding.path)
            await asyncio.to_thread(holding.close)
        for claim in (self._ranges, self._image):
            if claim is not None:
                claim.close()
        self._ranges = self._image = None

    # ---- sandboxes ----

    @property
    def marks(self) -> Literal["trusted", "user"]:
        return "trusted" if is_host_root() else "user"

    async def create(self, spec: EnvSpec) -> NamespaceSandbox:
        if spec.image.startswith("dir:"):
            # In a thread: a directory on a file system that does not answer must hold up nobody but this caller.
            return await self.create_on(spec, await asyncio.to_thread(self._image_of, spec.image))
        return await self.create_on(spec, self._image_of(spec.image))

    async def create_on(self, spec: EnvSpec, root: Root, *, cache: Path | None = None) -> NamespaceSandbox:
        launcher = self._launcher
        if launcher is None:
            raise BackendError("", "the namespace substrate is not started, or closed")
        sandbox_id = f"sbx-{secrets.token_hex(6)}"
        limits = spec.limits
        memory = int(limits.memory_mib * _MIB)
        own = [WORKDIR, HOME, *([spec.workdir] if spec.workdir else [])] if not root.is_furnished else []
        fields = b"".join(
            (
                pack(sandbox_id),
                pack_all(root.layers[::-1]),
                pack_all([part for view in root.views for part in (view.source, view.at)]),
                pack(str(cache) if cache else ""),
                pack_all(own),
                struct.pack(
                    "<BQIIQQQ",
                    self._disk == "tmpfs",
                    memory,
                    limits.pids,
                    max(1, round(limits.cpus * 1000)),
                    int(limits.disk_mib * _MIB),
                    max(memory // 2, _MIB),
                    _SHM_BYTES,
                ),
                pack(WORKDIR),
            )
        )
        try:
            answer = await launcher.request(wire.CREATE, fields)
        except LauncherRefused as exc:
            kind = (
                BackendError
                if exc.error in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.EIO)
                else CreateError
            )
            raise kind(sandbox_id, f"{exc}; {_remedy(exc.error)}") from exc
        handle, pid = struct.unpack_from("<II", answer.fields)
        if answer.fd is None:
            raise BackendError(sandbox_id, "the launcher gave no channel")
        channel = socket.socket(fileno=answer.fd)
        user = None if spec.user in ("user", "1000") else spec.user
        sandbox = NamespaceSandbox(self, launcher, sandbox_id, handle, pid, channel, user, root, _facts(spec, root), self._unenforced)
        self._live[handle] = sandbox
        return sandbox

    def _image_of(self, image: str) -> Root:
        if image == "host":
            if self._host_image is None or not os.path.isdir(self._host_image.skeleton):
                images = self._root / "images"
                ensure_private_dir(images)
                try:
                    self._host_image = host_image(images)
                except OSError as exc:
                    raise BackendError(
                        "", f"the image 'host' cannot be prepared in {images}: {exc.strerror}; {_remedy(exc.errno)}"
                    ) from exc
            found = self._host_image
            return Root((found.skeleton,), tuple(View(*view) for view in found.views), path=found.path)
        if image.startswith("dir:"):
            directory = image[len("dir:") :]
            if not os.path.isabs(directory):
                raise UsageError(f"image {image!r}: give the directory by an absolute path")
            if not os.path.isdir(directory):
                raise UsageError(f"image {image!r}: there is no such directory")
            return Root((directory,))
        raise UsageError(f"image {image!r} is not known here; use 'host' or 'dir:/path/to/a/root/file/system'")

    def _on_death(self, handle: int, failure: LauncherRefused | None) -> None:
        sandbox = self._live.pop(handle, None)
        if sandbox is not None:
            sandbox.died(failure)

    def forget(self, handle: int) -> None:
        self._live.pop(handle, None)


class NamespaceSandbox:
    """One sandbox. `agent_pid` is its first process as the host sees it."""

    def __init__(
        self,
        substrate: NamespaceSubstrate,
        launcher: Launcher,
        sandbox_id: str,
        handle: int,
        agent_pid: int,
        channel: socket.socket,
        user: str | None,
        root: Root,
        facts: Facts,
        unenforced: tuple[Unenforced, ...],
    ) -> None:
        self.id = sandbox_id
        self.agent_pid = agent_pid
        self.unenforced = unenforced
        self.root = root
        self._substrate = substrate
        self._launcher = launcher
        self._handle = handle
        self._channel: socket.socket | None = channel
        self._user = user
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
        return f"{self._failure}; {_remedy(self._failure.error)}" if self._failure is not None else None

    async def provide_worker(self, user: str, name: str | None = None) -> None:
        try:
            await self._launcher.request(wire.ENTER, struct.pack("<I", self._handle) + pack(user) + pack(user if name is None else name))
        except LauncherRefused as exc:
            if user and exc.step in ("user", "namespaces") and exc.error == errno.EPERM and not is_host_root():
                raise UsageError(
                    f"user {user!r}: an engine of an ordinary user has one user id for its sandboxes; run the engine as root"
                ) from exc
            if exc.step == "user":
                raise UsageError(f"user {user!r}: there is no such user in the sandbox") from exc
            raise SandboxLost(self.id, f"nobody can act for user {user!r} in it: {exc}") from exc

    async def pause(self) -> None:
        await self._freeze(on=True)

    async def resume(self) -> None:
        await self._freeze(on=False)

    async def _freeze(self, *, on: bool) -> None:
        try:
            await self._launcher.request(wire.FREEZE, struct.pack("<IB", self._handle, on))
        except LauncherRefused as exc:
            if exc.error == errno.EOPNOTSUPP:
                raise SubstrateUnavailable(self.id, "freezing needs a writable cgroup v2 tree; run the engine as root") from exc
            raise SandboxLost(self.id, str(exc)) from exc

    def died(self, failure: LauncherRefused | None) -> None:
        self._failure = failure
        self._dead.set()

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
        self._dead.set()
        self._substrate.forget(self._handle)


def _facts(spec: EnvSpec, root: Root) -> Facts:
    user = spec.user or "user"
    home = "/root" if user in ("root", "0") else HOME
    workdir = spec.workdir or WORKDIR
    return Facts(workdir, home, user, root.path) if root.path else Facts(workdir, home, user)


# ---- the host ----


def _unenforced(host: _Host, disk: Disk) -> list[Unenforced]:
    if host.is_root:
        remedy = "mount the cgroup controllers (cgroup v2, or v1 with memory, pids and cpu)"
    else:
        remedy = "run the engine as root, or under `systemd-run --user --scope -p Delegate=yes`"
    missing = [
        Unenforced(name, "no writable control group with this controller", remedy)
        for name, ability in (("memory_mib", _MEMORY), ("cpus", _CPU))
        if not host.abilities & ability
    ]
    if not host.abilities & _PIDS and _kernel() < (5, 14):
        missing.append(Unenforced("pids", "no writable control group, and this kernel counts processes per user only", remedy))
    if host.disk_mode == 0 and disk != "tmpfs":
        tools = "install btrfs-progs, " if host.is_root and mkfs_btrfs() is None else ""
        as_root = "" if host.is_root else "run the engine as root, "
        remedy = f"{tools}{as_root}keep state_dir on a file system with project quotas, or use Engine(disk='tmpfs')"
        missing.append(Unenforced("disk_mib", host.disk_reason, remedy))
    return missing


def _kernel() -> tuple[int, int]:
    major, minor = os.uname().release.split(".")[:2]
    return int(major), int("".join(c for c in minor if c.isdigit()) or 0)


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):
        return None


def _userns_reason() -> str | None:
    if _read_number("/proc/sys/user/max_user_namespaces") == 0:  # binds root as well
        return "user namespaces are switched off; sysctl -w user.max_user_namespaces=15000"
    if not is_host_root() and _read_number("/proc/sys/kernel/unprivileged_userns_clone") == 0:
        return "user namespaces are for root only here; sysctl -w kernel.unprivileged_userns_clone=1, or run as root"
    return None


_FORBIDDEN = "the kernel, a container or a security module forbids it; run on the host itself, or allow user namespaces and mounts there"
_REMEDIES = {
    errno.ENOSPC: "a limit of the kernel or the disk is reached: free space in the state directory, or raise user.max_*_namespaces",
    errno.EDQUOT: "free space in the state directory",
    errno.EROFS: "the state directory is read-only; make it writable or name another with state_dir=…",
    errno.EMFILE: "too many open files; raise the limit (ulimit -n)",
    errno.ENFILE: "too many open files on this machine; raise fs.file-max",
    errno.EAGAIN: "too many processes; raise the limit (ulimit -u) or close sandboxes",
    errno.EUSERS: "too many live sandboxes in this engine; release some",
    errno.EPERM: _FORBIDDEN,
    errno.EACCES: _FORBIDDEN,
}


def _remedy(error: int | None) -> str:
    return _REMEDIES.get(error or 0, "run `untax doctor`")


def _remove_trees(paths: Sequence[Path]) -> None:
    for path in paths:
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    if not remove_tree(path):
        log.warning("%s could not be removed; the next start tries again", path)
