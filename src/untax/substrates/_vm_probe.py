"""Whether /dev/kvm really runs a guest: only a boot tells, so one is tried, once for each machine, kernel and QEMU."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import shutil
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from untax.substrates._host import cell_path
from untax.substrates._vm_boot import Kernel

KVM = Path("/dev/kvm")
_PROBE_S = 5.0  # with hardware virtualisation a guest is at its first process in one second; one that is not by then hangs
_BOOTED = b"untax: the probe has booted"


@dataclass(frozen=True, slots=True)
class Probed:
    works: bool
    words: str
    """What was found, for people."""


def qemu_path(given: str | None) -> str | None:
    return shutil.which(given or "qemu-system-x86_64", path=f"{os.environ.get('PATH', '')}:/usr/bin:/usr/local/bin")


def qemu_version(qemu: str) -> str:
    """Of one line; empty when it does not run."""
    try:
        said = subprocess.run([qemu, "--version"], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return said.splitlines()[0] if said else ""


def probed(qemu: str, kernel: Kernel, initramfs: bytes, cache: Path | None) -> Probed:
    """Blocking, for a few seconds the first time. The answer is kept in `cache`, until the host boots anew or one of the programs changes."""
    if not KVM.exists():
        return Probed(works=False, words="there is no /dev/kvm")
    if not os.access(KVM, os.R_OK | os.W_OK):
        return Probed(works=False, words="/dev/kvm is not this user's to open; add it to the group kvm")
    place = None if cache is None else cache / f"kvm-{_key(qemu, kernel)}.json"
    if place is not None:
        with contextlib.suppress(OSError, ValueError, TypeError):
            return Probed(**json.loads(place.read_text()))
    found = _boot(qemu, kernel, initramfs)
    if place is not None:
        with contextlib.suppress(OSError):
            partial = place.with_suffix(f".{os.getpid()}")
            partial.write_text(json.dumps({"works": found.works, "words": found.words}))
            partial.replace(place)
    return found


def _key(qemu: str, kernel: Kernel) -> str:
    binary = Path(qemu).resolve().stat()
    try:
        host = Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        host = ""
    return hashlib.sha256(f"{host} {qemu} {binary.st_size} {binary.st_mtime_ns} {kernel.identity}".encode()).hexdigest()[:24]


def _boot(qemu: str, kernel: Kernel, initramfs: bytes) -> Probed:
    fd = os.memfd_create("untax-initramfs", os.MFD_CLOEXEC)
    os.write(fd, initramfs)
    argv = [cell_path(), "confined", "--parent", str(os.getpid()), "--", qemu, "-nodefaults", "-no-user-config", "-display", "none", "-nic", "none",
            "-M", "q35", "-accel", "kvm", "-cpu", "host", "-m", "256M", "-no-reboot", "-serial", "stdio", "-kernel", str(kernel.image),
            "-initrd", f"/proc/self/fd/{fd}", "-append", "console=ttyS0 quiet panic=-1 rdinit=/cell untax.probe -- init"]  # fmt: skip
    began = time.monotonic()
    try:
        guest = subprocess.Popen(argv, pass_fds=[fd], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as exc:
        return Probed(works=False, words=f"QEMU cannot be started: {exc.strerror}")
    finally:
        os.close(fd)
    assert guest.stdout is not None
    said = b""
    try:
        while _BOOTED not in said and (left := began + _PROBE_S - time.monotonic()) > 0:
            if select.select([guest.stdout], [], [], left)[0]:
                data = os.read(guest.stdout.fileno(), 65536)
                if not data:
                    break
                said = (said + data)[-65536:]
    finally:
        guest.kill()
        guest.wait()
        guest.stdout.close()
    took = time.monotonic() - began
    if _BOOTED in said:
        return Probed(works=True, words=f"a probe booted in {took:.1f} s")
    if took >= _PROBE_S:
        return Probed(
            works=False, words=f"/dev/kvm opens, but a probe did not boot within {_PROBE_S:g} s (nested, or switched off above this host?)"
        )
    words = said.decode(errors="replace").strip().splitlines()
    return Probed(works=False, words=f"/dev/kvm opens, but a probe ended without booting: {words[-1][:200] if words else 'without a word'}")
