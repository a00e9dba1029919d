"""gVisor sandboxes, made by `runsc` itself without any engine: commands talk to a kernel in user space, and that to very little of the host's.

Each chain of layers is written once as an image that this kernel reads by itself. The cell is the first process and is spoken to over the
socket that it gets as its standard input and output; runsc is called when a sandbox begins, and never for an action. `run_incumbent` is the other
way, one `runsc exec` each, for comparison. docs/gvisor.md has the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import platform as machine
import secrets
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from untax._remove import remove_tree
from untax.core.errors import BackendError, SubstrateUnavailable, UntaxError, UsageError
from untax.core.root import Root
from untax.core.spec import EnvSpec, require_duration
from untax.core.substrate import Export, Typical, Unenforced
from untax.substrates._chains import Chains
from untax.substrates._container_images import cell_layer
from untax.substrates._gvisor_bundle import Wanted, config
from untax.substrates._gvisor_groups import Group, Groups, sweep_groups
from untax.substrates._gvisor_live import IMAGE, RememberedSandbox, first_words, lay_out, parts, taken_up
from untax.substrates._gvisor_runsc import Runsc, Started, processor, runsc_path, runsc_version, version_trouble
from untax.substrates._gvisor_sandbox import GvisorSandbox
from untax.substrates._host import (
    Holding,
    cell_missing_reason,
    cell_path,
    chosen_state_dir,
    destroy_all,
    ensure_private_dir,
    is_host_root,
    sweep,
)
from untax.substrates._namespace_host import userns_reason
from untax.substrates._tenant import Tenant

log = logging.getLogger("untax.gvisor")

Platform = Literal["systrap", "ptrace", "kvm"]

_READY_S = 30.0
_STARTS_PER_CPU = 2
_RUN_LINK = "run"  # in a holding: where runsc keeps its own
# gVisor's kernel itself, and the two processes of runsc: some 60 MiB on a quiet sandbox, more when much is open.
_ROOM_MIB = 160


def make(
    state_dir: str | None = None,
    runsc: str | None = None,
    platform: Platform = "systrap",
    starts: int | None = None,
    ready_s: float = _READY_S,
) -> GvisorSubstrate:
    """`runsc` is the program, by default the one on the PATH; `platform` how it catches system calls.

    At most `starts` sandboxes come up at once, each within `ready_s`.
    """
    if platform not in ("systrap", "ptrace", "kvm"):
        raise UsageError(f"platform must be 'systrap', 'ptrace' or 'kvm', not {platform!r}")
    if starts is not None and (isinstance(starts, bool) or not isinstance(starts, int) or starts < 1):
        raise UsageError(f"starts must be a whole number from 1, not {starts!r}")
    return GvisorSubstrate(chosen_state_dir(state_dir), runsc, platform, starts, require_duration("ready_s", ready_s))


class GvisorSubstrate:
    name = "gvisor"
    isolation = "gvisor"
    builder = "namespace"
    takes: Literal["oci", "squashfs", "erofs"] = "erofs"
    revives = True
    typical = Typical(start_s=0.2, action_s=0.005)  # most of which is how much longer a program takes to start inside

    def __init__(self, state_dir: Path, runsc: str | None, platform: Platform, starts: int | None, ready_s: float) -> None:
        self._state_dir = state_dir
        self._root = state_dir / "gvisor"
        self._given = runsc
        self._platform: Platform = platform
        self._starts = starts or _STARTS_PER_CPU * (os.cpu_count() or 1)
        self._ready_s = ready_s
        self._holding: Holding | None = None
        self._groups: Groups | None = None
        self._runsc: Runsc | None = None
        self._live: dict[str, GvisorSandbox] = {}
        self._chains = Chains(self._root / "chains", "erofs")

    # ---- what this machine offers ----

    def unavailable_reason(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "needs Linux; connect to a server that runs on it"
        if machine.machine() not in ("x86_64", "aarch64"):
            return f"gVisor does not run on {machine.machine()}; use another substrate"
        if reason := cell_missing_reason():
            return reason
        path = runsc_path(self._given)
        if path is None:
            return f"no {self._given or 'runsc'} found; install it (https://gvisor.dev/docs/user_guide/install), or name it with runsc=…"
        return version_trouble(path) or userns_reason()

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        """Of every sandbox of this engine; nothing is known before it is started."""
        return () if self._groups is None else self._groups.unenforced

    def evidence(self) -> Sequence[str]:
        path = runsc_path(self._given)
        if path is None or (version := runsc_version(path)) is None:
            return []
        who = "root" if is_host_root() else "an ordinary user: runsc runs in a user namespace, and its processes have this user's rights"
        return [f"runsc {version} at {path}, platform {self._platform}", who]

    # ---- its life ----

    async def start(self) -> None:
        if self._holding is not None:
            return
        if reason := self.unavailable_reason():
            raise SubstrateUnavailable("", f"gvisor: {reason}")
        ensure_private_dir(self._state_dir)
        self._holding = Holding.take(self._root)
        try:
            self._starting = asyncio.Semaphore(self._starts)
            await asyncio.to_thread(self._set_up, self._holding.path)
        except BaseException:
            await self.aclose()
            raise

    def _set_up(self, holding: Path) -> None:
        sweep(self._root, _end_left)
        self._chains.open()
        place = _short_place()
        (holding / _RUN_LINK).symlink_to(place)
        path = runsc_path(self._given)
        assert path is not None
        self._cell = hashlib.sha256(Path(cell_path()).read_bytes()).hexdigest()
        made_with = {
            "runsc": runsc_version(path) or "",
            "platform": self._platform,
            "the rights of": "root" if is_host_root() else "a user",
            "processor": processor(),
            "cell": self._cell[:16],
        }
        self._runsc = Runsc(path, place, self._platform, not is_host_root(), made_with)
        self._groups = Groups(holding.name, _ROOM_MIB)

    async def aclose(self) -> None:
        holding, self._holding = self._holding, None
        if holding is None:
            return
        failed = await destroy_all(list(self._live.values()))
        if self._groups is not None:
            self._groups.close()
        if self._runsc is not None and not failed:
            await asyncio.to_thread(remove_tree, self._runsc.place)
        await asyncio.to_thread(holding.close, is_clean=not failed)
        if failed:
            raise failed[0]

    # ---- chains ----

    @property
    def image_sockets(self) -> Mapping[str, str]:
        return {}

    async def own_root(self, image: str) -> Root | None:
        del image
        return None  # runsc has no images of its own

    async def take_in(self, key: str, root: Root, export: Export) -> Root:
        """The chain with the cell on top as one read-only image, written once and found again by its key."""
        holding = self._holding
        assert holding is not None

        async def write(path: Path) -> None:
            with tempfile.TemporaryDirectory(prefix="export-", dir=holding.path) as scratch:
                layer = await asyncio.to_thread(cell_layer, Path(scratch))
                await asyncio.to_thread(export, root.with_layers(str(layer)), path, "localhost/untax:image", {})

        return await self._chains.take_in(f"{key} {self._cell}", root, write)

    def has_taken(self, root: Root) -> bool:
        return self._chains.has(root)

    async def discard(self, root: Root) -> None:
        """Sandboxes that stand on the image keep it until they end."""
        await self._chains.discard(root)

    # ---- what was put down with its memory ----

    def parts(self, root: Root) -> Sequence[Path]:
        assert root.memory is not None
        return parts(root.memory)

    async def take_up(self, root: Root, stored: Sequence[Path]) -> RememberedSandbox:
        if self._holding is None or self._runsc is None:
            raise BackendError("", "the gvisor substrate is not started, or closed")
        return await asyncio.to_thread(taken_up, self._holding.path, stored, root, self._runsc)

    # ---- sandboxes ----

    async def create(self, spec: EnvSpec) -> GvisorSandbox:
        raise UsageError(f"image {spec.image!r}: a gVisor sandbox stands on layers, and an engine knows them: use Engine('gvisor')")

    async def create_on(self, spec: EnvSpec, root: Root, *, cache: Path | None = None) -> GvisorSandbox:
        del cache  # stages are built elsewhere
        sandbox_id = f"sbx-{secrets.token_hex(6)}"
        tenant = Tenant.of(spec, root)
        await self._starting.acquire()
        try:
            if self._holding is None or self._runsc is None or self._groups is None:
                raise BackendError("", "the gvisor substrate is not started, or closed")
            place = self._holding.path / sandbox_id
            wanted = Wanted(sandbox_id, str(place / IMAGE), tenant.user, tenant.own, spec.limits)
            words, group = self._made(sandbox_id, place, wanted, root)
            try:
                started = Started(self._runsc, words, sandbox_id, group.joins)
            except BaseException:
                _remove(place, group)
                raise
            if root.memory is not None:
                with contextlib.suppress(OSError):  # it has ended already: `wait_ready` says why
                    started.channel.send(first_words(sandbox_id))
            sandbox = GvisorSandbox(
                self._runsc, started, sandbox_id, place, group, replace(root, memory=None), spec.limits, tenant.user, tenant.facts,
                self._groups.unenforced, self._ready_s, self._starting.release, self._forget,
            )  # fmt: skip
        except BaseException:
            self._starting.release()
            raise
        self._live[sandbox_id] = sandbox
        return sandbox

    def _made(self, sandbox_id: str, place: Path, wanted: Wanted, root: Root) -> tuple[Sequence[str], Group]:
        """The bundle and the group, a few small files each, and the words for runsc."""
        assert self._groups is not None
        try:
            place.mkdir(mode=0o700)
            (place / "rootfs").mkdir()
            if root.memory is not None:
                words = lay_out(root.memory, place, wanted.user, wanted.limits)
            else:
                (place / IMAGE).parent.mkdir()
                self._chains.link(root, place / IMAGE)
                (place / "config.json").write_text(json.dumps(config(wanted)))
                words = ["run", f"--bundle={place}"]
            return words, self._groups.make(sandbox_id, wanted.limits)
        except UntaxError:
            remove_tree(place)
            raise
        except OSError as exc:
            remove_tree(place)
            raise BackendError(sandbox_id, f"{exc.filename or place}: {exc.strerror}; free space in the state directory") from exc

    def _forget(self, sandbox_id: str) -> None:
        self._live.pop(sandbox_id, None)


def _remove(place: Path, group: Group) -> None:
    remove_tree(place)
    group.remove()


def _short_place() -> Path:
    """Where runsc keeps sockets, whose names must be short: not in a state directory, which may be anywhere."""
    shared = Path("/run/untax")
    with contextlib.suppress(OSError):
        shared.mkdir(mode=0o700, exist_ok=True)
    choices = (str(shared), os.environ.get("XDG_RUNTIME_DIR", ""), "/tmp")
    where = next(one for one in choices if one and os.path.isdir(one) and os.access(one, os.W_OK | os.X_OK))
    return Path(tempfile.mkdtemp(prefix="untax-gv-", dir=where))


def _end_left(holding: Path) -> None:
    """Of a dead engine, whose sandboxes the kernel ended with it: its groups, and its directories."""
    if not sweep_groups(holding.name):
        log.warning("left over from %s: a process does not die; it is tried again at the next start", holding.name)
        return
    with contextlib.suppress(OSError):
        place = Path(os.readlink(holding / _RUN_LINK))
        if place.name.startswith("untax-gv-") and place.lstat().st_uid == os.geteuid():
            remove_tree(place)
    remove_tree(holding)
