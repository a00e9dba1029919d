"""Virtual machines under QEMU: a kernel of their own, the cell as its first process, and the channel over a virtio port.

A machine boots once for each chain of layers and size of hardware, is saved before it knows who it is, and every sandbox is
that machine restored, with a seed, a name and a clock of its own (`start="cold"` boots each one instead). Hardware virtualisation is used
only when a probe has booted with it; otherwise the machine is emulated, and every name and ledger says so. docs/vm.md has the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

from untax._remove import remove_tree
from untax.core.errors import BackendError, SubstrateUnavailable, UsageError
from untax.core.root import Root
from untax.core.spec import EnvSpec, require_duration
from untax.core.substrate import Export, Facts, Typical, Unenforced
from untax.substrates._chains import Chains
from untax.substrates._claims import RangeClaim
from untax.substrates._host import Holding, cell_missing_reason, chosen_state_dir, destroy_all, ensure_private_dir, is_host_root, sweep
from untax.substrates._tenant import Tenant
from untax.substrates._vm_boot import Kernel, find_kernel, initramfs
from untax.substrates._vm_files import SavedMachines, mke2fs
from untax.substrates._vm_machines import Host, Machines, Started
from untax.substrates._vm_probe import Probed, probed, qemu_path, qemu_version
from untax.substrates._vm_qemu import Accel, MachineKind
from untax.substrates._vm_sandbox import Birth, VmSandbox
from untax.substrates._vm_ssh import VmSshSandbox

log = logging.getLogger("untax.vm")

_READY_S = 180.0  # an emulated boot takes some 6 s on a quiet machine, and ten times that on a busy one
_KEEP = 8
_CHAINS_BYTES = 16 << 30  # the host's own software is gigabytes, and another disk with every package that changes
_EMULATED = Unenforced(
    "isolation",
    "the machine is emulated, and QEMU's authors promise no boundary for that",
    "use a host on which `untax doctor` finds KVM working",
)


def make(
    state_dir: str | None = None,
    machine: MachineKind = "q35",
    accel: Literal["auto", "kvm", "tcg"] = "auto",
    start: Literal["restored", "cold"] = "restored",
    kernel: str | None = None,
    qemu: str | None = None,
    sshd: str | None = None,
    starts: int | None = None,
    ready_s: float = _READY_S,
    keep: int = _KEEP,
) -> VmSubstrate:
    """`accel="auto"` uses KVM when a probe has booted with it. `start="cold"` boots every machine instead of restoring a saved one.

    `kernel` is a bzImage, by default the newest in /boot with its modules. `sshd` is the path of one in the images that are used: with it a
    sandbox has the incumbent path too, one fresh `ssh` an action. At most `starts` machines come up at once, each within
    `ready_s`; `keep` is how many saved machines are kept.
    """
    for name, value, known in (
        ("machine", machine, get_args(MachineKind)),
        ("accel", accel, ("auto", "kvm", "tcg")),
        ("start", start, ("restored", "cold")),
    ):
        if value not in known:
            raise UsageError(f"{name} must be one of {', '.join(known)}, not {value!r}")
    for name, count in (("starts", starts), ("keep", keep)):
        if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 1):
            raise UsageError(f"{name} must be a whole number from 1, not {count!r}")
    if sshd is not None and not os.path.isabs(sshd):
        raise UsageError(f"sshd must be an absolute path inside the images, as '/usr/sbin/sshd', not {sshd!r}")
    return VmSubstrate(
        chosen_state_dir(state_dir), machine, accel, start, kernel, qemu, sshd, starts, require_duration("ready_s", ready_s), keep
    )


class VmSubstrate:
    name = "vm"
    isolation = "vm"
    typical = Typical(start_s=1.0, action_s=0.002)  # restored and emulated, as on a host without KVM
    builder = "namespace"
    takes: Literal["oci", "squashfs", "erofs"] = "squashfs"

    def __init__(
        self,
        state_dir: Path,
        machine: MachineKind,
        accel: Literal["auto", "kvm", "tcg"],
        start: Literal["restored", "cold"],
        kernel: str | None,
        qemu: str | None,
        sshd: str | None,
        starts: int | None,
        ready_s: float,
        keep: int,
    ) -> None:
        self._state_dir = state_dir
        self._root = state_dir / "vm"
        self._machine: MachineKind = machine
        self._accel = accel
        self._is_cold = start == "cold"
        self._kernel = kernel
        self._qemu = qemu
        self._sshd = sshd
        self._starts = starts or max(1, os.cpu_count() or 1)
        self._ready_s = ready_s
        self._keep = keep
        self._holding: Holding | None = None
        self._machines: Machines | None = None
        self._live: dict[str, VmSandbox] = {}
        self._chains = Chains(self._root / "chains", "squashfs", _CHAINS_BYTES)

    # ---- what this machine offers ----

    def unavailable_reason(self) -> str | None:
        if not sys.platform.startswith("linux"):
            return "needs Linux; connect to a server that runs on it"
        if platform.machine() != "x86_64":
            return f"guests of {platform.machine()} machines are not supported yet; use another substrate"
        if reason := cell_missing_reason():
            return reason
        if qemu_path(self._qemu) is None:
            return f"no {self._qemu or 'qemu-system-x86_64'} found; apt install qemu-system-x86"
        if mke2fs() is None:
            return "no mke2fs found; apt install e2fsprogs"
        found = find_kernel(self._kernel)
        return found if isinstance(found, str) else None

    @property
    def unenforced(self) -> tuple[Unenforced, ...]:
        """Of every machine of this engine; nothing is known before it is started."""
        return (_EMULATED,) if self._machines is not None and self._machines.host.accel == "tcg" else ()

    def evidence(self) -> Sequence[str]:
        qemu, kernel = qemu_path(self._qemu), find_kernel(self._kernel)
        lines = []
        if qemu is not None:
            lines.append(qemu_version(qemu) or f"{qemu} does not run")
        if isinstance(kernel, Kernel):
            lines.append(f"kernel for guests: {kernel.image} ({kernel.release})")
        if (probe := self._looked()) is not None:
            lines.append(f"KVM: {'works' if probe.works else 'is not used'}: {probe.words}")
            if not probe.works:
                lines.append(
                    "machines are emulated (TCG): some ten times slower, and without QEMU's promise of a boundary; use a host with working KVM"
                )
                lines.append("not tried, because that takes some seconds: untax run --substrate vm -- uname -r")
        return lines

    @property
    def is_slow_to_try(self) -> bool:
        probe = self._looked()
        return probe is None or not probe.works

    def boundary_trouble(self) -> str | None:
        """Why its machines have no boundary that may be claimed here, with the remedy; None when they have. Blocks, the first time for seconds,
        unless it is started.
        """
        if self._machines is not None:
            is_emulated = self._machines.host.accel == "tcg"
        else:
            is_emulated = self._accel == "tcg" or ((probe := self._looked()) is not None and not probe.works)
        if not is_emulated:
            return None
        who = "accel='tcg' only emulates machines" if self._accel == "tcg" else "this host only emulates machines"
        return f"{who}, and QEMU's authors promise no boundary for that; {_EMULATED.remedy}"

    def _looked(self) -> Probed | None:
        """What is known of KVM here; None when there is nothing to find out with."""
        qemu, kernel = qemu_path(self._qemu), find_kernel(self._kernel)
        if qemu is None or isinstance(kernel, str) or cell_missing_reason() is not None:
            return None
        return self._probe(qemu, kernel, initramfs(kernel))

    def _probe(self, qemu: str, kernel: Kernel, ram_disk: bytes) -> Probed:
        with contextlib.suppress(BackendError, UsageError):
            ensure_private_dir(self._root)
        return probed(qemu, kernel, ram_disk, self._root if self._root.is_dir() else None)

    # ---- its life ----

    async def start(self) -> None:
        if self._holding is not None:
            return
        ensure_private_dir(self._state_dir)
        self._holding = Holding.take(self._root)
        try:
            await self._set_up()
        except BaseException:
            await self.aclose()
            raise

    async def _set_up(self) -> None:
        qemu, kernel = qemu_path(self._qemu), find_kernel(self._kernel)
        if qemu is None or isinstance(kernel, str):
            raise SubstrateUnavailable("", f"vm: {self.unavailable_reason()}")
        self._starting = asyncio.Semaphore(self._starts)
        await asyncio.to_thread(sweep, self._root, _end_left)
        self._chains.open()
        ensure_private_dir(self._root / "saved")
        ram_disk = await asyncio.to_thread(initramfs, kernel)
        accel = await self._choose(qemu, kernel, ram_disk)
        self.name = "-".join(("vm", *(["microvm"] if self._machine == "microvm" else []), *(["emulated"] if accel == "tcg" else [])))
        saved = SavedMachines(self._root / "saved", self._keep)
        assert self._holding is not None
        ids = await asyncio.to_thread(RangeClaim, self._state_dir) if is_host_root() else None
        self._machines = Machines(
            Host(qemu, self._machine, accel, self._sshd is not None), self._holding.path, saved, ids, self._ready_s, self._died
        )
        await asyncio.to_thread(self._machines.load, kernel, ram_disk)

    async def _choose(self, qemu: str, kernel: Kernel, ram_disk: bytes) -> Accel:
        if self._accel == "tcg":
            return "tcg"
        probe = await asyncio.to_thread(self._probe, qemu, kernel, ram_disk)
        if probe.works:
            return "kvm"
        if self._accel == "kvm":
            raise SubstrateUnavailable("", f"vm: accel='kvm': {probe.words}; use accel='auto' for emulation")
        log.info("virtual machines are emulated: %s", probe.words)
        return "tcg"

    async def aclose(self) -> None:
        holding, self._holding = self._holding, None
        if holding is None:
            return
        failed = await destroy_all(list(self._live.values()))
        if self._machines is not None:
            self._machines.close()
            self._machines = None
        await asyncio.to_thread(holding.close, is_clean=not failed)
        if failed:
            raise failed[0]

    # ---- chains ----

    @property
    def image_sockets(self) -> Mapping[str, str]:
        return {}

    async def own_root(self, image: str) -> Root | None:
        del image
        return None  # machines have no images of their own

    async def take_in(self, key: str, root: Root, export: Export) -> Root:
        """The chain as one read-only disk, made once and found again by its key."""
        return await self._chains.take_in(key, root, lambda path: asyncio.to_thread(export, root, path, "localhost/untax:disk", {}))

    def has_taken(self, root: Root) -> bool:
        return self._chains.has(root)

    async def discard(self, root: Root) -> None:
        """Machines that have the disk open keep it until they end; saved ones that stood on it are never found again, and go in their turn."""
        await self._chains.discard(root)

    # ---- sandboxes ----

    async def create(self, spec: EnvSpec) -> VmSandbox:
        raise UsageError(f"image {spec.image!r}: a virtual machine stands on layers, and an engine knows them: use Engine('vm')")

    async def create_on(self, spec: EnvSpec, root: Root, *, cache: Path | None = None) -> VmSandbox:
        del cache  # stages are built elsewhere
        machines = self._machines
        if machines is None:
            raise BackendError("", "the vm substrate is not started, or closed")
        sandbox_id = f"sbx-{secrets.token_hex(6)}"
        tenant = Tenant.of(spec, root)
        birth = Birth(sandbox_id, spec.limits, tenant.user, tenant.own)
        async with self._starting:
            base = self._chains.use(root)
            started = await (machines.booted if self._is_cold else machines.restored)(sandbox_id, base, spec.limits)
        sandbox = self._sandbox(started, birth, tenant.facts, self.unenforced)
        self._live[sandbox_id] = sandbox
        self._note(sandbox)
        return sandbox

    def _sandbox(self, started: Started, birth: Birth, facts: Facts, unenforced: tuple[Unenforced, ...]) -> VmSandbox:
        if self._sshd is None:
            return VmSandbox(started, birth, facts, unenforced, self._ready_s, self._forget)
        assert self._holding is not None
        return VmSshSandbox(started, birth, facts, unenforced, self._ready_s, self._forget, sshd=self._sshd, place=self._holding.path)

    def _died(self, sandbox_id: str) -> None:
        if (sandbox := self._live.get(sandbox_id)) is not None:
            sandbox.died()

    # ---- who belongs to whom ----

    def _note(self, sandbox: VmSandbox) -> None:
        """For a later sweep: which process is this engine's. The kernel ends it with the engine; this is for when it did not."""
        assert self._holding is not None
        with contextlib.suppress(OSError):
            (self._holding.path / f"{sandbox.id}.pid").write_text(f"{sandbox.pid} {_started_at(sandbox.pid)}")

    def _forget(self, sandbox_id: str) -> None:
        self._live.pop(sandbox_id, None)
        if self._holding is not None:
            (self._holding.path / f"{sandbox_id}.pid").unlink(missing_ok=True)


def _started_at(pid: int) -> str:
    """In ticks since the host's boot: with it a number that has been used again is not mistaken for the process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def _end_left(holding: Path) -> None:
    """End the machines of a dead engine that the kernel did not, and remove its directory."""
    for note in holding.glob("*.pid"):
        with contextlib.suppress(OSError, ValueError):
            number, _, started = note.read_text().partition(" ")
            pidfd = os.pidfd_open(int(number))
            try:
                if _started_at(int(number)) == started:  # and stays so while we hold the descriptor
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
    remove_tree(holding)
