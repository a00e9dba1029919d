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
from pathlib import Path
from typing import Literal

from untax._remove import remove_tree
from untax.core.errors import BackendError, CreateError, SubstrateUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import EnvSpec
from untax.core.stage import WORKDIR
from untax.core.substrate import Typical, Unenforced
from untax.substrates import _launcher as wire
from untax.substrates._claims import Claim, RangeClaim, disk_image, mkfs_btrfs
from untax.substrates._host import (
    Holding,
    cell_missing_reason,
    cell_path,
    chosen_state_dir,
    ensure_private_dir,
    is_host_root,
    sweep,
)
from untax.substrates._launcher import Launcher, LauncherRefused, pack, pack_all
from untax.substrates._namespace_host import Host, read_number, remedy, unenforced, userns_reason
from untax.substrates._namespace_layers import FrozenLayers
from untax.substrates._namespace_sandbox import HOME, SHM_BYTES, NamespaceSandbox, Place, amounts, facts_of

log = logging.getLogger("untax.namespace")

Disk = Literal["auto", "tmpfs"]


def make(state_dir: str | None = None, disk: Disk = "auto", ahead: bool = True) -> NamespaceSubstrate:
    """`disk="tmpfs"` keeps what sandboxes write in memory, of the size `disk_mib`; with `ahead=False` nothing is made before it is asked for."""
    if disk not in ("auto", "tmpfs"):
        raise UsageError(f"disk must be 'auto' or 'tmpfs', not {disk!r}")
    if ahead not in (False, True):  # equal to 0 and 1, which is what a command line can say
        raise UsageError(f"ahead must be True or False, not {ahead!r}")
    return NamespaceSubstrate(chosen_state_dir(state_dir), disk, is_ahead=bool(ahead))


class NamespaceSubstrate:
    name = "namespace"
    isolation = "namespace"
    typical = Typical(start_s=0.005, action_s=0.0003)
    binds_late: frozenset[Literal["limits", "disk", "user"]] = frozenset(("limits", "disk", "user"))

    def __init__(self, state_dir: Path, disk: Disk, *, is_ahead: bool = True) -> None:
        self._state_dir = state_dir
        self._root = state_dir / "namespace"
        self._disk: Disk = disk
        self._is_ahead = is_ahead
        self._holding: Holding | None = None
        self._launcher: Launcher | None = None
        self._ranges: RangeClaim | None = None
        self._image: Claim | None = None
        self._live: dict[int, NamespaceSandbox] = {}
        self._sweeping: asyncio.Task[None] | None = None
        self.host: Host | None = None  # once started
        self._unenforced: tuple[Unenforced, ...] = ()

    # ---- what this machine offers ----

    def unavailable_reason(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "needs Linux; connect to a server that runs on it"
        if reason := cell_missing_reason():
            return reason
        return userns_reason()

    def evidence(self) -> Sequence[str]:
        lines = [
            f"kernel {os.uname().release}",
            "root" if is_host_root() else "an ordinary user, or root of a container: agent and workload share one user id",
        ]
        lines.append(f"user namespaces allowed: {read_number('/proc/sys/user/max_user_namespaces')}")
        if is_host_root():
            lines.append("disk limits: mkfs.btrfs found" if mkfs_btrfs() else "disk limits: no mkfs.btrfs; apt install btrfs-progs")
        return lines

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        """Of every sandbox of this engine; nothing is known before it is started."""
        return self._unenforced

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
        self._layers = FrozenLayers(launcher)
        self._place = Place(launcher, self._holding.path / "boxes")
        self.host = await self._configure(launcher)
        self._unenforced = tuple(unenforced(self.host, in_memory=self._disk == "tmpfs"))
        await self._sweep()

    async def _configure(self, launcher: Launcher) -> Host:
        assert self._holding is not None
        first, count = (self._ranges.first, self._ranges.count) if self._ranges else (0, 0)
        image = str(self._image.path) if self._image else ""
        fields = b"".join(
            (
                pack(self._holding.path.name),
                pack(str(self._holding.path)),
                pack(image),
                pack(str(self._state_dir / "layers" / "trees")),
                struct.pack("<IIB", first, count, self._is_ahead),
            )
        )
        try:
            answer = await launcher.request(wire.CONFIG, fields)
        except LauncherRefused as exc:
            raise SubstrateUnavailable("", f"namespace: {exc}; {remedy(exc.error)}") from exc
        in_userns, abilities, mode, size = struct.unpack_from("<BBBI", answer.fields)
        return Host(not in_userns, abilities, mode, answer.fields[7 : 7 + size].decode(errors="replace"))

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
        """Over a directory that is a root file system as it stands; other images are layers, and an engine knows theirs."""
        scheme, _, directory = spec.image.partition(":")
        if scheme != "dir" or not os.path.isabs(directory):
            raise UsageError(f"image {spec.image!r}: without an engine's layers only 'dir:/path' can be used")
        return await self.create_on(spec, Root((directory,)))

    async def create_on(self, spec: EnvSpec, root: Root, *, cache: Path | None = None) -> NamespaceSandbox:
        launcher = self._launcher
        if launcher is None:
            raise BackendError("", "the namespace substrate is not started, or closed")
        sandbox_id = f"sbx-{secrets.token_hex(6)}"
        memory, pids, cpu, disk, tmp = amounts(spec.limits)
        own = [WORKDIR, HOME, *([spec.workdir] if spec.workdir else [])] if not root.is_furnished else []
        fields = b"".join(
            (
                pack(sandbox_id),
                pack_all(root.layers[::-1]),
                pack_all([part for view in root.views for part in (view.source, view.at)]),
                pack(str(cache) if cache else ""),
                pack_all(own),
                struct.pack("<BQIIQQQ", self._disk == "tmpfs", memory, pids, cpu, disk, tmp, SHM_BYTES),
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
            raise kind(sandbox_id, f"{exc}; {remedy(exc.error)}") from exc
        handle, pid = struct.unpack_from("<II", answer.fields)
        if answer.fd is None:
            raise BackendError(sandbox_id, "the launcher gave no channel")
        channel = socket.socket(fileno=answer.fd)
        facts = facts_of(spec, root)
        wanted = spec.user or root.config.user
        user = None if wanted in (None, "", "user", "1000") else facts.user
        sandbox = NamespaceSandbox(
            launcher, self._layers, self._place, sandbox_id, handle, pid, channel, user, root, facts, self._unenforced, self._forget
        )
        self._live[handle] = sandbox
        self._layers.hold(root)
        return sandbox

    def _on_death(self, handle: int, failure: LauncherRefused | None) -> None:
        sandbox = self._live.pop(handle, None)
        if sandbox is not None:
            sandbox.died(failure)

    def _forget(self, handle: int) -> None:
        self._live.pop(handle, None)


def _remove_trees(paths: Sequence[Path]) -> None:
    for path in paths:
        _remove_tree(path)


def _remove_tree(path: Path) -> None:
    if not remove_tree(path):
        log.warning("%s could not be removed; the next start tries again", path)
