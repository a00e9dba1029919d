"""How machines come up: booted, or restored from one that was booted before, saved, and is kept.

A machine is saved when it has everything that does not depend on whose it is. What several share stays unwritten: each restored one has its memory by
copy on write, a copy of the few blocks that an empty disk has, and the base disk for reading.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import math
import os
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from untax.core.errors import CreateError, SubstrateUnavailable
from untax.core.spec import Limits
from untax.substrates._claims import RangeClaim
from untax.substrates._host import cell_path
from untax.substrates._vm_boot import Kernel
from untax.substrates._vm_files import Saved, SavedMachines, blank_disk, blank_memory, nameless, sealed
from untax.substrates._vm_probe import KVM, qemu_version
from untax.substrates._vm_qemu import Accel, Hardware, MachineKind, Plan, Qemu

log = logging.getLogger("untax.vm")

_MIB = 1 << 20
_LEAST_RAM_MIB = 1024  # memory limits up to this share one saved machine: untouched memory costs nothing
_KERNEL_MIB = 128  # for the guest's kernel and the cell, beside what the workload may have
_PAGES = 32  # of its memory the kernel takes one part in 64 for its own bookkeeping; twice that, to be safe
_LEAST_DISK_MIB = 16  # an ext4 smaller than this holds next to nothing
_COMMAND_LINE = "console=ttyS0 quiet loglevel=4 panic=-1 no_timer_check cgroup_no_v1=all random.trust_cpu=on rdinit=/cell"
_REMEDY = "try another kernel=…, or start='cold'"


@dataclass(frozen=True, slots=True)
class Host:
    """What runs the machines of one engine."""

    qemu: str
    machine: MachineKind
    accel: Accel
    has_second: bool = False
    """Whether its machines have a second channel, to an agent of its own."""


@dataclass(frozen=True, slots=True)
class Started:
    qemu: Qemu
    remedy: Callable[[str], str]
    """For when it does not come up: told what was printed, removes what was damaged, and says what to do."""
    was_up: bool = False
    """It said so before it was saved, and does not say it again."""


class Machines:
    def __init__(
        self, host: Host, place: Path, saved: SavedMachines, ids: RangeClaim | None, ready_s: float, on_end: Callable[[str], None]
    ) -> None:
        """`place` is where disks are made, which have no names; `on_end` is told the name of a machine that has stopped by itself."""
        self.host = host
        self._place = place
        self._saved = saved
        self._ids = ids
        self._ready_s = ready_s
        self._on_end = on_end
        self._next_id = 0
        self._open: dict[str, Saved] = {}
        self._busy: dict[str, asyncio.Lock] = {}
        self._kernel_fd = self._initramfs_fd = -1

    def load(self, kernel: Kernel, initramfs: bytes) -> None:
        """Blocking: what machines boot, where they can read it, whoever they run as, and nobody can write to it."""
        self._kernel_fd, self._initramfs_fd = sealed("untax-kernel", kernel.image.read_bytes()), sealed("untax-initramfs", initramfs)
        self._identity = f"{kernel.identity} {hashlib.sha256(initramfs).hexdigest()} {qemu_version(self.host.qemu)}"
        self._command_line = _COMMAND_LINE + (" untax.second" if self.host.has_second else "")
        if self.host.accel == "tcg":
            self._command_line += " mitigations=off"  # against what a processor does ahead of time, and an emulated one does not
            if self.host.machine == "microvm":
                # It has no clock that a stock kernel could find its counter's rate with; emulation shows it the host's.
                self._command_line += f" tsc_early_khz={_counter_khz()}"

    def close(self) -> None:
        for saved in self._open.values():
            saved.close()
        self._open.clear()
        for fd in (self._kernel_fd, self._initramfs_fd):
            if fd >= 0:
                os.close(fd)
        self._kernel_fd = self._initramfs_fd = -1
        if self._ids is not None:
            self._ids.close()
            self._ids = None

    # ---- two ways up ----

    async def booted(self, name: str, base: Path, limits: Limits) -> Started:
        plan = self._plan(name, limits)
        with contextlib.ExitStack() as fds:
            plan.base_fd = _kept(fds, self._open_base(base))
            plan.own_fd = _kept(fds, await asyncio.to_thread(blank_disk, self._place, _disk_bytes(limits)))
            return Started(self._spawn(name, plan), lambda said: _on_no_boot(base, said))

    async def restored(self, name: str, base: Path, limits: Limits) -> Started:
        key = self._key(base, limits)
        async with self._busy.setdefault(key, asyncio.Lock()):
            saved = self._open.pop(key, None) or await asyncio.to_thread(self._saved.open, key)
            if saved is None:
                saved = await self._save(key, base, limits)
            self._open[key] = saved  # the latest is last
        self._close_old()
        plan = self._plan(name, limits)
        with contextlib.ExitStack() as fds:
            try:
                plan.base_fd = _kept(fds, self._open_base(base))
                plan.own_fd = _kept(fds, saved.disk(self._place))
                plan.state_fd = _kept(fds, saved.state())
            except FileNotFoundError as exc:
                raise CreateError(name, f"a saved machine is there no more; {self._on_no_restore(key)}") from exc
            plan.ram_fd = saved.ram_fd
            return Started(self._spawn(name, plan), lambda _: self._on_no_restore(key), was_up=True)

    def _open_base(self, base: Path) -> int:
        try:
            return os.open(base, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as exc:
            raise CreateError("", f"the disk {base.name} is there no more; the next lease makes it anew") from exc

    def _plan(self, name: str, limits: Limits) -> Plan:
        plan = Plan(self._hardware(limits), f"untax-{name}", self._kernel_fd, self._initramfs_fd, f"{self._command_line} -- init")
        plan.has_second = self.host.has_second
        if self._ids is not None:
            # Each machine's process has a user id of its own: what escapes into one meets no other.
            plan.uid = (self._ids.first + self._next_id % self._ids.count) << 16
            plan.groups = [KVM.stat().st_gid] if self.host.accel == "kvm" else []
            self._next_id += 1
        return plan

    def _hardware(self, limits: Limits) -> Hardware:
        memory = max(_LEAST_RAM_MIB, 1 << math.ceil(math.log2(limits.memory_mib)))
        ram_mib = memory + memory // _PAGES + _KERNEL_MIB
        return Hardware(self.host.qemu, self.host.machine, self.host.accel, max(1, math.ceil(limits.cpus)), ram_mib)

    def _spawn(self, name: str, plan: Plan) -> Qemu:
        return Qemu.start(plan, lambda: self._on_end(name))

    # ---- the first of its kind ----

    def _key(self, base: Path, limits: Limits) -> str:
        try:
            disk = base.stat()
        except FileNotFoundError as exc:
            raise CreateError("", f"the disk {base.name} is there no more; the next lease makes it anew") from exc
        parts = (
            self._identity,
            self._command_line,
            self._hardware(limits),
            base.name,
            disk.st_ino,
            disk.st_size,
            disk.st_mtime_ns,
            _disk_bytes(limits),
        )
        return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]

    async def _save(self, key: str, base: Path, limits: Limits) -> Saved:
        plan = self._plan(f"first-{key[:12]}", limits)
        log.info("booting a machine (%s), to be restored from now on", plan.hardware.label)
        ram_fd = blank_memory(plan.hardware.ram_mib * _MIB)
        try:
            with contextlib.ExitStack() as fds:
                state_fd = _kept(fds, nameless(self._place))
                plan.base_fd = _kept(fds, self._open_base(base))
                plan.own_fd = _kept(fds, await asyncio.to_thread(blank_disk, self._place, _disk_bytes(limits)))
                plan.ram_fd, plan.shares_ram = ram_fd, True
                await self._boot_and_save(plan, base, state_fd)
                about: dict[str, object] = {"hardware": plan.hardware.label, "base": base.name}
                return await asyncio.to_thread(self._saved.put, key, ram_fd, plan.own_fd, state_fd, about)
        except BaseException:
            os.close(ram_fd)
            raise

    async def _boot_and_save(self, plan: Plan, base: Path, state_fd: int) -> None:
        qemu = self._spawn(plan.name, plan)
        try:
            async with asyncio.timeout(self._ready_s):
                await wait_up(qemu, "", lambda said: _on_no_boot(base, said))
                await qemu.save(state_fd)
        except TimeoutError as exc:
            said = await qemu.console()
            raise CreateError("", f"a machine did not boot within {self._ready_s:g} s; allow more with ready_s=…\n{said}") from exc
        finally:
            qemu.channel.close()
            await qemu.end()  # before its memory is sealed, which nobody may have mapped for writing then

    def _close_old(self) -> None:
        """Machines that were restored keep their memory until they end."""
        for key in list(self._open)[: -self._saved.keep]:
            self._open.pop(key).close()

    def _on_no_restore(self, key: str) -> str:
        if (saved := self._open.pop(key, None)) is not None:
            saved.close()
        self._saved.drop(key)
        return "a saved machine that did not go on has been removed; the next lease boots one anew"


# ---- whether it came up ----


async def wait_up(qemu: Qemu, sandbox_id: str, remedy: Callable[[str], str]) -> None:
    """Until the cell inside has everything that does not depend on whose machine it is."""
    said = await qemu.wait_line()
    if said is None:
        raise await not_up(qemu, sandbox_id, remedy)
    if said != "ready":
        raise SubstrateUnavailable(sandbox_id, f"what runs in the machine is not this release's cell: it said {said!r}")


async def not_up(qemu: Qemu, sandbox_id: str, remedy: Callable[[str], str]) -> CreateError:
    said = await qemu.console()
    return CreateError(sandbox_id, with_console(f"the machine did not come up: {qemu.how}; {remedy(said)}", said))


def with_console(words: str, console: str) -> str:
    return f"{words}\nlast lines of its console:\n{console}" if console else words


def _on_no_boot(base: Path, said: str) -> str:
    if "base disk" in said or "SQUASHFS error" in said:
        base.unlink(missing_ok=True)
        return "its base disk was damaged and has been removed; the next lease makes it anew"
    return f"its kernel panicked; {_REMEDY}" if "panic" in said else _REMEDY


def _kept(fds: contextlib.ExitStack, fd: int) -> int:
    fds.callback(os.close, fd)
    return fd


def _disk_bytes(limits: Limits) -> int:
    return max(_LEAST_DISK_MIB, limits.disk_mib) * _MIB


def _counter_khz() -> int:
    said = subprocess.run([cell_path(), "tsc-khz"], capture_output=True, check=False).stdout
    return int(said) if said.strip().isdigit() else 1_000_000
