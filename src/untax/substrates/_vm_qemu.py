"""One QEMU process: how it is started, spoken to and ended.

Everything it may touch is handed to it as a descriptor: its disks and memory have no names that it could open, its ports and its monitor
are socket pairs. So nothing of it is left when it ends, and it ends with its engine.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from untax.core.errors import BackendError
from untax.substrates._host import cell_path
from untax.substrates._vm_monitor import Monitor

MachineKind = Literal["q35", "microvm"]
Accel = Literal["kvm", "tcg"]

_CONSOLE_BYTES = 64 << 10  # what QEMU keeps of what a guest prints, however much that is; a power of two
_CONSOLE_SHOWN = 2000
_WORDS_MAX = 64 << 10  # that a guest may say on its control port
_TRANSLATED_MIB = 128  # emulation keeps translated code; QEMU's own choice is a gigabyte
_SANDBOX = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
# A saved machine does not hold its memory, which is given to whoever goes on from it; that it is saved is told by an event.
_WITHOUT_MEMORY = [{"capability": name, "state": True} for name in ("x-ignore-shared", "events")]
_MACHINES: Mapping[MachineKind, str] = {
    "q35": "q35,usb=off,smbus=off,sata=off,vmport=off",
    "microvm": "microvm,x-option-roms=off,rtc=on,isa-serial=on",
}


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a guest finds. A machine that was saved is restored on the same only."""

    qemu: str
    machine: MachineKind
    accel: Accel
    cpus: int
    ram_mib: int

    @property
    def label(self) -> str:
        return f"{self.machine}, {'hardware virtualisation (KVM)' if self.accel == 'kvm' else 'emulated (TCG)'}"

    def arguments(self) -> list[str]:
        accel = "kvm" if self.accel == "kvm" else f"tcg,thread=multi,tb-size={_TRANSLATED_MIB}"
        cpu = "host" if self.accel == "kvm" else "max"
        return ["-accel", accel, "-cpu", cpu, "-smp", str(self.cpus), "-m", f"{self.ram_mib}M"]


@dataclass(slots=True)
class Plan:
    """A machine to start. The descriptors are the caller's, who closes them afterwards."""

    hardware: Hardware
    name: str
    kernel_fd: int
    initramfs_fd: int
    command_line: str
    base_fd: int = -1
    own_fd: int = -1
    ram_fd: int = -1
    shares_ram: bool = False
    """Whether what is written to memory goes to `ram_fd`, or stays the machine's own."""
    state_fd: int = -1
    """Where a saved machine goes on from; -1: it boots."""
    has_second: bool = False
    """Whether there is another channel, to an agent of its own."""
    uid: int | None = None
    groups: Sequence[int] = ()


@dataclass(slots=True)
class _Wiring:
    """Socket pairs and descriptors of a process that is being started."""

    arguments: list[str]
    fds: list[int] = field(default_factory=list)
    theirs: list[socket.socket] = field(default_factory=list)

    def pair(self, name: str) -> socket.socket:
        ours, its = socket.socketpair()
        self.theirs.append(its)
        self.fds.append(its.fileno())
        self.arguments += ["-chardev", f"socket,id={name},fd={its.fileno()}"]
        return ours

    def give(self, fd: int) -> str:
        """A name for a descriptor of ours in its process."""
        self.fds.append(fd)
        return f"/proc/self/fd/{fd}"

    def drive(self, name: str, fd: int, options: str, device: str) -> None:
        number = len(self.fds)
        self.fds.append(fd)
        self.arguments += ["-add-fd", f"fd={fd},set={number}"]
        self.arguments += [
            "-drive",
            f"id={name},if=none,format=raw,file.driver=file,file.filename=/dev/fdset/{number},file.locking=off,file.auto-read-only=off,{options}",
        ]
        self.arguments += ["-device", f"virtio-blk-{device},drive={name}"]


class Qemu:
    """Started by `start`. `on_end` is called once, from the event loop, when the guest has stopped for good or the process has ended."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        channel: socket.socket,
        monitor: socket.socket,
        on_end: Callable[[], None],
        second: socket.socket | None = None,
    ) -> None:
        self.channel = channel
        self.second = second
        self.control = control
        control.setblocking(False)
        self.monitor = Monitor(monitor, self._event)
        self.process = process
        self.ended = asyncio.Event()
        self.how: str | None = None
        """Why it has ended, once it has."""
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._pidfd = os.pidfd_open(process.pid)
        self._exited = asyncio.Event()
        self._loop.add_reader(self._pidfd, self._exit)
        self._heard = b""
        self._saved: asyncio.Future[str] | None = None

    @classmethod
    def start(cls, plan: Plan, on_end: Callable[[], None]) -> Qemu:
        """In the event loop's own thread: the kernel ends the process with the *thread* that started it."""
        hardware = plan.hardware
        device = "device" if hardware.machine == "microvm" else "pci"
        machine = _MACHINES[hardware.machine]
        wiring = _Wiring([hardware.qemu, "-name", plan.name, "-nodefaults", "-no-user-config", "-display", "none", "-nic", "none"])
        arguments = wiring.arguments
        if plan.ram_fd >= 0:
            sharing = "on" if plan.shares_ram else "off"
            path = wiring.give(plan.ram_fd)
            arguments += ["-object", f"memory-backend-file,id=ram,size={hardware.ram_mib}M,mem-path={path},share={sharing}"]
            machine += ",memory-backend=ram"
        arguments += ["-M", machine, *hardware.arguments(), "-sandbox", _SANDBOX, "-action", "reboot=shutdown,shutdown=pause"]
        arguments += ["-kernel", wiring.give(plan.kernel_fd), "-initrd", wiring.give(plan.initramfs_fd), "-append", plan.command_line]
        # Kept in a ring inside QEMU: a guest that prints without end costs the host nothing more (THREATS E29).
        arguments += ["-chardev", f"ringbuf,id=console,size={_CONSOLE_BYTES}", "-serial", "chardev:console"]
        arguments += ["-device", f"virtio-serial-{device},id=ports,max_ports=4"]
        control, channel, monitor = wiring.pair("control"), wiring.pair("channel"), wiring.pair("monitor")
        second = wiring.pair("second") if plan.has_second else None
        for number, name in enumerate(("control", "channel", *(["second"] if plan.has_second else [])), 1):
            arguments += ["-device", f"virtserialport,bus=ports.0,nr={number},chardev={name},name=untax.{name}"]
        arguments += ["-mon", "chardev=monitor,mode=control"]
        if plan.base_fd >= 0:
            wiring.drive("base", plan.base_fd, "readonly=on", device)
        if plan.own_fd >= 0:
            wiring.drive("own", plan.own_fd, "cache=unsafe,discard=unmap,detect-zeroes=unmap", device)
        arguments += ["-device", f"virtio-rng-{device}"]
        arguments += ["-global", "migration.store-global-state=off"]  # that it stood still when it was saved
        if plan.state_fd >= 0:
            wiring.fds.append(plan.state_fd)
            arguments += ["-incoming", "defer"]
        confined = [cell_path(), "confined", "--parent", str(os.getpid())]
        if plan.uid is not None:
            confined += ["--uid", str(plan.uid), *(part for group in plan.groups for part in ("--group", str(group)))]
        try:
            process = subprocess.Popen(
                [*confined, "--", *arguments],
                pass_fds=wiring.fds,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        except OSError as exc:
            for one in (control, channel, monitor, second):
                if one is not None:
                    one.close()
            raise BackendError("", f"QEMU cannot be started: {exc.strerror}") from exc
        finally:
            for its in wiring.theirs:
                its.close()
        started = cls(process, control, channel, monitor, on_end, second)
        if plan.state_fd >= 0:
            started.monitor.tell("migrate-set-capabilities", capabilities=_WITHOUT_MEMORY)
            started.monitor.tell("migrate-incoming", uri=f"fd:{plan.state_fd}")
        return started

    # ---- what it says ----

    async def wait_line(self) -> str | None:
        """The next line that the cell inside says on its control port; None when the machine ends instead, nothing when it rambles."""
        while b"\n" not in self._heard:
            reading = asyncio.ensure_future(self._loop.sock_recv(self.control, 4096))
            ending = asyncio.ensure_future(self.ended.wait())
            try:
                await asyncio.wait((reading, ending), return_when=asyncio.FIRST_COMPLETED)
            finally:
                ending.cancel()
                if not reading.done():
                    reading.cancel()
            if not reading.done():
                return None
            try:
                data = reading.result()
            except (OSError, asyncio.CancelledError):
                data = b""
            if not data:
                await self.ended.wait()
                return None
            self._heard += data
            if len(self._heard) > _WORDS_MAX:
                return ""
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode(errors="replace")

    async def tell(self, words: str) -> None:
        with contextlib.suppress(OSError):  # it has ended, as whoever waits for the answer is told
            await self._loop.sock_sendall(self.control, words.encode())

    async def console(self) -> str:
        """The last lines that the guest printed, made harmless; what QEMU itself said when it has ended."""
        if self._exited.is_set():
            return self._own_words()
        try:
            async with asyncio.timeout(2):
                said = await self.monitor.ask("ringbuf-read", device="console", size=_CONSOLE_BYTES, format="base64")
        except (TimeoutError, BackendError):
            return self._own_words() if self._exited.is_set() else ""
        return _harmless(base64.b64decode(said))

    def _own_words(self) -> str:
        """What is in the pipe: nobody reads it before, so it holds its beginning."""
        pipe = self.process.stderr
        if pipe is None or pipe.closed:
            return ""
        os.set_blocking(pipe.fileno(), False)
        try:
            return _harmless(pipe.read(_CONSOLE_SHOWN) or b"")
        except OSError:
            return ""

    async def save(self, fd: int) -> None:
        """Stop the guest and write its state, without the memory that it shares, to `fd`. It does not go on."""
        await self.monitor.ask("stop")
        await self.monitor.ask("migrate-set-capabilities", capabilities=_WITHOUT_MEMORY)
        await self.monitor.give("state", fd)
        self._saved = self._loop.create_future()
        await self.monitor.ask("migrate", uri="fd:state")
        if (status := await self._saved) != "completed":
            raise BackendError("", f"QEMU could not save the machine ({status})")

    # ---- its end ----

    def _event(self, name: str, data: Mapping[str, Any]) -> None:
        is_over = data.get("status") in ("completed", "failed", "cancelled")
        if name == "MIGRATION" and is_over and self._saved is not None and not self._saved.done():
            self._saved.set_result(data["status"])
        if name in ("SHUTDOWN", "GUEST_PANICKED"):
            reason = data.get("reason", "")
            self._end(
                {"guest-reset": "its kernel panicked", "guest-shutdown": "it switched itself off"}.get(
                    reason, f"its guest stopped ({reason or name})"
                )
            )

    def _exit(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        code = self.process.wait()
        self._exited.set()
        self._end(f"QEMU was ended by {signal.Signals(-code).name}" if code < 0 else f"QEMU ended with status {code}")

    def _end(self, how: str) -> None:
        if self.how is None:
            self.how = how
            self.ended.set()
            if self._saved is not None and not self._saved.done():
                self._saved.set_result(how)
            self._on_end()

    async def end(self) -> None:
        """Kill it and return once it is gone. Safe to call twice."""
        if not self._exited.is_set():
            self._on_end = _nothing
            with contextlib.suppress(ProcessLookupError):
                self.process.kill()
            await self._exited.wait()
        self.monitor.close()
        self.control.close()
        if self.second is not None:
            self.second.close()
        if self.process.stderr is not None:
            self.process.stderr.close()


def _nothing() -> None:
    pass


def _harmless(data: bytes) -> str:
    """Text without anything a terminal would act on, its last lines."""
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode(errors="replace").replace("\r", ""))
    text = "".join(one if one == "\n" or one.isprintable() else "?" for one in text)
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-20:])[-_CONSOLE_SHOWN:]
